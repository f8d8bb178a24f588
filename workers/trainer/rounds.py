"""The rounds log as the trainer reads it: commands in order, each round with its rows.

    rounds ─► read ─► fetch the rows of this rank's groups ─► queue of two ─► the trainer
                      missing ones: RowsMissing on events, then look again

Owns: the cursor of what was handed over, decoding of rows. Never: trains. Invariant: commands come out in the order of
the log, and a round comes out only when all its rows are there; so no rank ever waits for rows inside a collective.

Rows of the next round are fetched while one is trained. The queue is short because the rounds of a batch are released
when the trainer has little to do anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from transport.broker import keys
from transport.broker.base import Broker, Fence
from transport.contracts.messages import (
    FinishTraining,
    RowsMissing,
    TrainerCommand,
    TrainRound,
    trainer_command_decoder,
)
from transport.contracts.types import Column, GroupId, RowId, row_id
from transport.errors import MessageError
from transport.process.clock import Clock
from transport.rows.columns import RowStore, decode_array, decode_scalar
from workers.errors import RoundsError
from workers.leases.events import event_entry
from workers.trainer.learner import PromptGroup, TrainingSample

log = structlog.get_logger(__name__)

READ_COUNT = 64
READ_WAIT_S = 1.0
AHEAD = 2
"""Commands that wait decoded: one being trained, one ready."""
MISSING_POLL_S = 0.25
MISSING_REPEAT_S = 10.0
"""Rows still missing are reported again after this long: the first report may be what a broker lost."""

ROW_COLUMNS = (
    Column.RESPONSE_IDS,
    Column.ROLLOUT_LOGPROBS,
    Column.ADVANTAGE,
    Column.LOSS_MASK,
    Column.REFERENCE_LOGPROBS,
)
REQUIRED = frozenset({Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.ADVANTAGE})

Wanted = Sequence[tuple[GroupId, Sequence[RowId]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """One command. groups: this rank's rows of a TrainRound; empty for other commands and for pads."""

    entry_id: str
    command: TrainerCommand
    groups: Sequence[PromptGroup]


class RoundsReader:
    """Reads on from ``cursor`` until FinishTraining.

    needs_reference: rows are complete only with reference logprobs.  stall_s: the longest wait for the next command, or
    for one round's missing rows, while no orchestrator gives a sign of life. One that lives judges by itself what takes
    too long; it may have been paused.
    """

    def __init__(
        self,
        broker: Broker,
        rows: RowStore,
        clock: Clock,
        fence: Fence | None,
        *,
        cursor: str,
        rank: int,
        world_size: int,
        needs_reference: bool,
        stall_s: float,
    ) -> None:
        self._broker = broker
        self._rows = rows
        self._clock = clock
        self._fence = fence
        self._cursor = cursor
        self._rank = rank
        self._world_size = world_size
        self._required = REQUIRED | ({Column.REFERENCE_LOGPROBS} if needs_reference else set())
        self._stall_s = stall_s
        self.queue: asyncio.Queue[Fetched] = asyncio.Queue(maxsize=AHEAD)
        self.missing: tuple[RowId, ...] = ()
        """Rows that are waited for now."""

    async def read(self) -> None:
        """Put every command into ``queue``; ends after FinishTraining.

        Raises: RoundsError: no orchestrator for ``stall_s``; an entry that no trainer can read.
        """
        last_s = self._clock.now_s()
        while True:
            entries = await self._broker.read(keys.ROUNDS, self._cursor, count=READ_COUNT, wait_s=READ_WAIT_S)
            if entries or await self._is_orchestrated():
                last_s = self._clock.now_s()
            elif self._clock.now_s() - last_s > self._stall_s:
                raise RoundsError(
                    f"no command after {self._cursor} on the rounds log, and no sign of life of an orchestrator, for "
                    f"{self._stall_s:.0f} s"
                )
            for entry in entries:
                command = _decode(entry.entry_id, entry.entry.payload)
                await self.queue.put(await self._fetch(entry.entry_id, command))
                self._cursor = entry.entry_id
                last_s = self._clock.now_s()
                if isinstance(command, FinishTraining):
                    return

    async def _fetch(self, entry_id: str, command: TrainerCommand) -> Fetched:
        wanted = self._my_rows(command) if isinstance(command, TrainRound) else []
        return Fetched(entry_id=entry_id, command=command, groups=await self._read_groups(wanted) if wanted else ())

    def _my_rows(self, command: TrainRound) -> Wanted:
        """This rank's part. A round that was packed for another number of ranks is dealt out again."""
        if len(command.ranks) == self._world_size:
            mine = command.ranks[self._rank]
        else:
            mine = [group for rank in command.ranks for group in rank][self._rank :: self._world_size]
        return [(g.group_id, [row_id(g.group_id, sample) for sample in g.samples]) for g in mine]

    async def _read_groups(self, wanted: Wanted) -> list[PromptGroup]:
        """The rows, once they are all there. Raises RoundsError: no orchestrator is left to have them made again."""
        last_s = self._clock.now_s()
        reported_s: float | None = None
        while True:
            groups, missing = await self._try_read(wanted)
            self.missing = missing
            if not missing:
                return groups
            now_s = self._clock.now_s()
            if await self._is_orchestrated():
                last_s = now_s
            elif now_s - last_s > self._stall_s:
                raise RoundsError(f"rows {', '.join(missing[:5])} did not come within {self._stall_s:.0f} s")
            if reported_s is None or now_s - reported_s > MISSING_REPEAT_S:
                reported_s = now_s
                log.warning("rows are missing; asking for them again", rows=len(missing), first=missing[0])
                event = RowsMissing(row_ids=missing)
                await self._broker.append(keys.EVENTS, event_entry(event, rows=len(missing)), fence=self._fence)
            await asyncio.sleep(MISSING_POLL_S)

    async def _is_orchestrated(self) -> bool:
        """Whether an orchestrator gave a sign of life in the last seconds."""
        return await self._broker.get_meta(keys.STATUS) is not None

    async def _try_read(self, wanted: Wanted) -> tuple[list[PromptGroup], tuple[RowId, ...]]:
        """(groups, rows without a required column); a group without its prompt misses all its rows."""
        row_ids = [row for _, rows in wanted for row in rows]
        prompts, columns = await asyncio.gather(
            self._rows.read_groups([group for group, _ in wanted], (Column.PROMPT_IDS,)),
            self._rows.read_rows(row_ids, ROW_COLUMNS),
        )
        found = dict(zip(row_ids, columns, strict=True))
        missing = tuple(
            row
            for (_, rows), prompt in zip(wanted, prompts, strict=True)
            for row in rows
            if Column.PROMPT_IDS not in prompt or self._required - found[row].keys()
        )
        if missing:
            return [], missing
        return [_group(group, prompt, rows, found) for (group, rows), prompt in zip(wanted, prompts, strict=True)], ()


def _group(
    group_id: GroupId,
    prompt: Mapping[Column, bytes],
    rows: Sequence[RowId],
    found: Mapping[RowId, Mapping[Column, bytes]],
) -> PromptGroup:
    return PromptGroup(
        group_id=group_id,
        prompt_ids=decode_array(Column.PROMPT_IDS, prompt[Column.PROMPT_IDS]),
        samples=[_sample(row, found[row]) for row in rows],
    )


def _sample(row: RowId, columns: Mapping[Column, bytes]) -> TrainingSample:
    def optional(column: Column):
        return decode_array(column, columns[column]) if column in columns else None

    try:
        return TrainingSample(
            row_id=row,
            response_ids=decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]),
            rollout_logprobs=decode_array(Column.ROLLOUT_LOGPROBS, columns[Column.ROLLOUT_LOGPROBS]),
            advantage=decode_scalar(Column.ADVANTAGE, columns[Column.ADVANTAGE]),
            loss_mask=optional(Column.LOSS_MASK),
            reference_logprobs=optional(Column.REFERENCE_LOGPROBS),
        )
    except MessageError as error:
        raise RoundsError(f"row {row} cannot be trained: {error}") from error


def _decode(entry_id: str, payload: bytes) -> TrainerCommand:
    """Unlike an event, a command that cannot be read must not be passed over: the batch would be short unnoticed."""
    try:
        return trainer_command_decoder.decode(payload)
    except MessageError as error:
        raise RoundsError(f"entry {entry_id} of the rounds log is unreadable: {error}") from error
