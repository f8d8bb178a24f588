"""The rounds log as one rank reads it: its commands in their order, each with the rows that this rank takes part with.

Owns: the place in the log, and asking for rows that are missing. Never: trains. Invariant: a command is given out only
when all its rows are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from transport.broker import keys
from transport.broker.base import Broker, Fence
from transport.broker.events import event_entry
from transport.contracts.messages import (
    RowsMissing,
    TrainerCommand,
    TrainRound,
    part_of,
    rollout_info_decoder,
    trainer_command_decoder,
)
from transport.contracts.types import Column, GroupId, RowId, row_id
from transport.errors import MessageError
from transport.process.clock import Clock
from transport.rows.columns import RowStore, decode_array, decode_scalar
from workers.errors import RoundsError
from workers.trainer.learner import PromptGroup, TrainingSample

log = structlog.get_logger(__name__)

READ_COUNT = 64
READ_WAIT_S = 1.0
AHEAD = 2
"""Commands that wait decoded: one being trained, one ready."""
MISSING_POLL_S = 0.25
MISSING_REPEAT_S = 10.0
"""Rows still missing are reported again after this long: the first report may be what a broker lost."""

OPTIONAL = (Column.LOSS_MASK, Column.REFERENCE_LOGPROBS, Column.BRANCH_ENDS, Column.TOKEN_ADVANTAGES)
REQUIRED = frozenset({Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.ADVANTAGE})

Wanted = Sequence[tuple[GroupId, Sequence[RowId]]]


class RoundsReader:
    """Reads on from ``cursor`` until FinishTraining.

    wanted: columns without which a row is not complete, beside REQUIRED.  parts: that have an objective of their own;
    of a group of any other the part is not told.  age_decay: of what a token counts, for each version that it is behind
    its batch's, where ROLLOUT_INFO is wanted.  stall_s: the longest wait for the next command, or for one round's
    missing rows, while no orchestrator gives a sign of life. One that lives judges by itself what takes too long; it
    may have been paused.
    """

    def __init__(
        self,
        broker: Broker,
        rows: RowStore,
        clock: Clock,
        fence: Fence | None,
        *,
        cursor: str,
        part: int,
        num_parts: int,
        wanted: frozenset[Column],
        stall_s: float,
        parts: Collection[str] = (),
        age_decay: float = 1.0,
    ) -> None:
        self._broker = broker
        self._rows = rows
        self._clock = clock
        self._fence = fence
        self._cursor = cursor
        self._part = part
        self._num_parts = num_parts
        self._required = REQUIRED | wanted
        self._columns = (*self._required, *(column for column in OPTIONAL if column not in wanted))
        self._of_group = (Column.PROMPT_IDS, *((Column.TASK_ENTRY,) if parts else ()))
        self._parts = parts
        self._stall_s = stall_s
        self._age_decay = age_decay
        self.queue: asyncio.Queue[tuple[str, TrainerCommand, Sequence[PromptGroup]]] = asyncio.Queue(maxsize=AHEAD)
        """(entry id, command, this rank's rows of a TrainRound; none for other commands and for pads)."""

    async def read(self) -> None:
        """Put every command into ``queue``, forever: after FinishTraining more may follow, of a run that was resumed.

        Raises: RoundsError: no orchestrator for ``stall_s``; an entry that no trainer can read.
        """
        last_s = self._clock.now_s()
        while True:
            entries = await self._broker.read(keys.ROUNDS, self._cursor, count=READ_COUNT, wait_s=READ_WAIT_S)
            if entries or await self.is_orchestrated():
                last_s = self._clock.now_s()
            elif self._clock.now_s() - last_s > self._stall_s:
                raise RoundsError(
                    f"no command after {self._cursor} on the rounds log, and no sign of life of an orchestrator, for "
                    f"{self._stall_s:.0f} s"
                )
            for entry in entries:
                try:
                    command = trainer_command_decoder.decode(entry.entry.payload)
                except MessageError as error:  # not passed over, as an event is: the batch would be short unnoticed
                    raise RoundsError(
                        f"entry {entry.entry_id} of the rounds log is unreadable: {error}. Keep others away from the "
                        "broker; --resume takes it out"
                    ) from error
                groups = ()
                if isinstance(command, TrainRound) and (wanted := self._my_rows(command)):
                    groups = await self._read_groups(wanted, command.batch)
                await self.queue.put((entry.entry_id, command, groups))
                self._cursor = entry.entry_id
                last_s = self._clock.now_s()

    def _my_rows(self, command: TrainRound) -> Wanted:
        """This rank's part. A round that was packed for another number of parts is dealt out again."""
        if len(command.ranks) == self._num_parts:
            mine = command.ranks[self._part]
        else:
            mine = [group for rank in command.ranks for group in rank][self._part :: self._num_parts]
        return [(g.group_id, [row_id(g.group_id, sample) for sample in g.samples]) for g in mine]

    async def _read_groups(self, wanted: Wanted, batch: int) -> list[PromptGroup]:
        """The rows, once they are all there. Raises RoundsError: no orchestrator is left to have them made again."""
        last_s = self._clock.now_s()
        reported_s: float | None = None
        while True:
            groups, missing = await self._try_read(wanted, batch)
            if not missing:
                return groups
            now_s = self._clock.now_s()
            if await self.is_orchestrated():
                last_s = now_s
            elif now_s - last_s > self._stall_s:
                raise RoundsError(f"rows {', '.join(missing[:5])} did not come within {self._stall_s:.0f} s")
            if reported_s is None or now_s - reported_s > MISSING_REPEAT_S:
                reported_s = now_s
                log.warning("rows are missing; asking for them again", rows=len(missing), first=missing[0])
                event = RowsMissing(row_ids=missing)
                await self._broker.append(keys.EVENTS, event_entry(event, rows=len(missing)), fence=self._fence)
            await asyncio.sleep(MISSING_POLL_S)

    async def is_orchestrated(self) -> bool:
        """Whether an orchestrator gave a sign of life in the last seconds."""
        return await self._broker.get_meta(keys.STATUS) is not None

    async def _try_read(self, wanted: Wanted, batch: int) -> tuple[list[PromptGroup], tuple[RowId, ...]]:
        """(groups, rows without a required column); a group without its prompt misses all its rows."""
        row_ids = [row for _, rows in wanted for row in rows]
        prompts, columns = await asyncio.gather(
            self._rows.read_groups([group for group, _ in wanted], self._of_group),
            self._rows.read_rows(row_ids, self._columns),
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
        groups = [
            PromptGroup(
                group_id=group,
                prompt_ids=decode_array(Column.PROMPT_IDS, prompt[Column.PROMPT_IDS]),
                samples=[_sample(row, found[row], batch, self._age_decay) for row in rows],
                part=self._part_of(group, prompt),
            )
            for (group, rows), prompt in zip(wanted, prompts, strict=True)
        ]
        return groups, ()

    def _part_of(self, group_id: GroupId, columns: Mapping[Column, bytes]) -> str:
        """Raises RoundsError."""
        if not self._parts:
            return ""
        try:
            part = part_of(columns.get(Column.TASK_ENTRY, b""))
        except MessageError as error:
            raise RoundsError(f"group {group_id} cannot be trained: {error}") from error
        return part if part in self._parts else ""


def _counts(columns: Mapping[Column, bytes], batch: int, age_decay: float) -> NDArray[np.float32] | None:
    """[R]: age_decay ** age of each token, in versions that its weights are behind those that ``batch`` begins with;
    None: all count alike.

    Raises MessageError.
    """
    if Column.ROLLOUT_INFO not in columns:
        return None
    spans = rollout_info_decoder.decode(columns[Column.ROLLOUT_INFO]).spans
    ages = [max(0, batch - span.weights.version) for span in spans]
    return np.repeat(age_decay ** np.array(ages), [span.end - span.start for span in spans]).astype(np.float32)


def _sample(row: RowId, columns: Mapping[Column, bytes], batch: int, age_decay: float) -> TrainingSample:
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
            reward=decode_scalar(Column.REWARD, columns[Column.REWARD]) if Column.REWARD in columns else None,
            advantages=optional(Column.TOKEN_ADVANTAGES),
            values=optional(Column.VALUES),
            returns=optional(Column.RETURNS),
            branch_ends=optional(Column.BRANCH_ENDS),
            counts=_counts(columns, batch, age_decay),
        )
    except MessageError as error:
        raise RoundsError(f"row {row} cannot be trained: {error}") from error
