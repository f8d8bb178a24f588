"""Commands become I/O, in the order they were decided; plans of dispatch are computed in a thread beside the loop.

Owns: the commands not yet carried out, and the plans to compute. Never: decides, skips or reorders within a stream.
Invariant: a command carried out twice has the effect of once, because its id is the id of its stream entry.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TypeAlias, assert_never

import msgspec
import structlog

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import CoreSettings
from orchestrator.errors import ForeignEntryError
from orchestrator.loop.intake import Arrival, Inbox
from orchestrator.loop.prompt_server import PromptServer
from transport.broker import keys
from transport.broker.base import Broker, Commit, Entry, Fence, GroupWrite, Mark, StreamWrite, parse_entry_id
from transport.contracts import messages
from transport.contracts.messages import Command, ComputePlan, GroupAdmitted, encode
from transport.contracts.types import Column, GroupId, WorkerId, is_evaluation
from transport.errors import TailLostError
from transport.process import faults
from transport.rows.columns import encode_array

log = structlog.get_logger(__name__)

Issued: TypeAlias = tuple[CommandId, Command]

ENTRIES_PER_STEP = 512
"""Stream entries, or groups' prompt columns, written at once: the broker serves nobody meanwhile, some 10 ms."""
_UNFENCED = messages.DropRows | messages.TrimRounds | messages.SpawnWorkers | messages.FinishRun
"""Commands that are carried out without a fenced commit of their own."""


class Executor:
    """Carries out commands; ``submit`` never waits, ``run`` does the I/O."""

    def __init__(
        self,
        broker: Broker,
        fence: Fence,
        prompts: PromptServer,
        request_plan: Callable[[ComputePlan], None],
        on_finish: Callable[[messages.FinishRun], None],
        *,
        last_seq: int,
    ) -> None:
        """last_seq: position of the last event applied before this process: no command has a later id yet."""
        self._broker = broker
        self._fence = fence
        self._prompts = prompts
        self._request_plan = request_plan
        self._on_finish = on_finish
        self._last_seq = last_seq
        self._mark = ""
        self._steps = 0
        # groups whose rows were freed last: a lost tail brings them back; more than a file loses between two flushes
        self._dropped: deque[GroupId] = deque(maxlen=4096)
        self._restated = asyncio.Event()
        self._waiting: list[Issued] = []
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, issued: Iterable[Issued]) -> None:
        """Queue commands, in order. What can be queued is bounded by what the core decides without hearing back."""
        before = len(self._waiting)
        self._waiting.extend(issued)
        if len(self._waiting) > before:
            self._idle.clear()
            self._work.set()

    def restate(self, issued: Iterable[Issued]) -> None:
        """Queue what is sent again to a broker that lost its tail; what waits goes after it, by its ids.

        The rows that were freed last are freed again, too.
        """
        self._mark = ""
        self._restated.set()
        again = [messages.DropRows(group_ids=tuple(self._dropped))] if self._dropped else []
        self.submit([*issued, *((CommandId(0, 0), command) for command in again)])

    async def drained(self) -> None:
        """Wait until everything submitted so far is carried out. Raises FencedError if this is not the newest one."""
        await self._idle.wait()
        await self._broker.commit(Commit(fence=self._fence))

    async def run(self) -> None:
        """Carry out what is submitted, forever: all that is waiting, in as few round trips as its order allows."""
        while True:
            await self._work.wait()
            self._work.clear()
            batch, self._waiting = self._waiting, []
            self._restated.clear()
            try:
                await self._carry_out(batch)
            except TailLostError as error:
                log.warning("the broker lost its tail; commands wait until all of it was sent again", error=str(error))
                self._waiting = [*batch, *self._waiting]
                async with asyncio.timeout(60.0):  # a lost tail is looked for every second
                    await self._restated.wait()
                self._work.set()
                continue
            faults.point("orchestrator.executed")
            if not self._waiting:
                self._idle.set()

    async def _carry_out(self, batch: Sequence[Issued]) -> None:
        """Prompt columns first (a plan must not be claimed before its prompt is there), then streams, then the rest."""
        admissions = (command for _, command in batch if isinstance(command, messages.AdmitGroups))
        admitted = [group for command in admissions for group in command.groups]
        for start in range(0, len(admitted), ENTRIES_PER_STEP):
            writes = tuple(self._group_write(group) for group in admitted[start : start + ENTRIES_PER_STEP])
            await self._broker.commit(Commit(fence=self._fence, groups=writes))
        self._last_seq = max([self._last_seq, *(command_id[0] for command_id, _ in batch)])
        appends: dict[str, dict[str, Entry]] = {}
        for command_id, command in sorted(batch, key=itemgetter(0)):  # a restated command is older, or here twice
            if (placed := stream_entry(command)) is not None:
                appends.setdefault(placed[0], {})[command_id.entry] = placed[1]
        for writes in in_steps(appends):
            await self._append(writes)
        if not appends and any(isinstance(command, _UNFENCED) for _, command in batch):
            await self._broker.commit(Commit(fence=self._fence))  # an orchestrator that was replaced must free nothing
        for _, command in batch:
            await self._apply(command)

    async def _append(self, writes: Sequence[StreamWrite]) -> None:
        """Append what is not there yet. Raises ForeignEntryError when it is kept out by an entry that is not ours."""
        self._steps += 1
        now = f"{self._fence.epoch}-{self._steps}"
        added = await self._broker.append_many(writes, fence=self._fence, mark=Mark(after=self._mark, now=now))
        self._mark = now
        for write, num_added in zip(writes, added, strict=True):
            if num_added < len(write.entries):
                last = await self._broker.last_id(write.stream)
                if parse_entry_id(last)[0] > self._last_seq:
                    raise ForeignEntryError(write.stream, last)

    async def _apply(self, command: Command) -> None:
        match command:
            case messages.RequestPrompts() | messages.RequestHeldOutPrompts():
                self._prompts.request(command)
            case ComputePlan():
                self._request_plan(command)
            case messages.SlotOutcome():
                self._prompts.observe(command)
            case messages.DropRows():
                await self._broker.drop_groups(command.group_ids)
                self._dropped.extend(command.group_ids)
            case messages.TrimRounds():
                await self._broker.trim(keys.ROUNDS, command.cursor)
            case messages.SpawnWorkers():
                await self._broker.put_meta(keys.SPAWN, encode(command))
            case messages.FinishRun():
                await self._broker.put_meta(keys.STATE, keys.STATE_FINISHED)
                self._on_finish(command)
            case _:
                pass

    def _group_write(self, group: GroupAdmitted) -> GroupWrite:
        find = self._prompts.held_out_prompt if is_evaluation(group.group_id) else self._prompts.prompt
        prompt = find(group.prompt_id)
        columns = {
            Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, prompt.prompt_ids),
            Column.PROMPT_TEXT: prompt.text.encode(),
            Column.TASK_ENTRY: prompt.entry_json.encode(),
        }
        return GroupWrite(group_id=group.group_id, size=group.group_size, columns=columns)


def in_steps(appends: Mapping[str, Mapping[str, Entry]]) -> Iterator[list[StreamWrite]]:
    """What to append in one step each: of ENTRIES_PER_STEP entries or fewer, in order within each stream."""
    step: list[StreamWrite] = []
    room = ENTRIES_PER_STEP
    for stream, by_id in appends.items():
        entries = list(by_id.items())
        while entries:
            now, entries = entries[:room], entries[room:]
            step.append(StreamWrite(stream=stream, entries=now, is_queue=stream.startswith(keys.plans(WorkerId("")))))
            room -= len(now)
            if not room:
                yield step
                step, room = [], ENTRIES_PER_STEP
    if step:
        yield step


def stream_entry(command: Command) -> tuple[str, Entry] | None:
    """The stream that ``command`` goes to, and its entry there; None for a command that is none."""
    match command:
        case messages.TrainRound():
            groups = " ".join(rows.group_id for rank in command.ranks for rows in rank)
            stream, fields = keys.ROUNDS, {"batch": str(command.batch), "kind": command.kind, "groups": groups}
        case messages.CloseMiniBatch():
            stream, fields = keys.ROUNDS, {"batch": str(command.batch), "rows": str(command.num_rows)}
        case messages.FinishTraining():
            stream, fields = keys.ROUNDS, {"reason": command.reason}
        case messages.LoadWeights():
            fields = {"worker": command.worker_id, "weights": str(command.weights)}
            stream = keys.control(command.worker_id)
        case messages.AbortRollouts():
            fields = {"worker": command.worker_id, "groups": " ".join(command.group_ids)}
            stream = keys.control(command.worker_id)
        case messages.DrainWorker():
            stream, fields = keys.control(command.worker_id), {"worker": command.worker_id}
        case messages.DispatchGroups():
            (plan,) = command.plans  # the core sends one group a command, so that the command's id names the entry
            fields = {
                "group": plan.group_id,
                "batch": str(plan.batch),
                "prompt": plan.prompt_id,
                "samples": f"{len(plan.samples)}/{plan.group_size}",
                "predicted_tokens": f"{plan.predicted_tokens:.0f}",
                "attempt": str(plan.attempt),
            }
            return keys.plans(command.worker_id), Entry(fields=fields, payload=encode(plan))
        case messages.RequestPrompts() | messages.RequestHeldOutPrompts() | messages.AdmitGroups() | ComputePlan():
            return None
        case messages.SlotOutcome() | messages.EvaluationOutcome() | messages.DropRows() | messages.TrimRounds():
            return None
        case messages.FinishRun() | messages.SpawnWorkers():
            return None
        case _:
            assert_never(command)
    return stream, Entry(fields={"command": type(command).__name__, **fields}, payload=encode(command))


class Planner:
    """``request`` never waits; ``run`` computes."""

    def __init__(self, settings: Callable[[], CoreSettings]) -> None:
        """settings: the core's, at the moment of planning."""
        self._settings = settings
        self._requests: dict[int, ComputePlan] = {}
        self._work = asyncio.Event()

    def request(self, command: ComputePlan) -> None:
        """Ask for a plan; it comes as PlanComputed. Of several for one batch, the last is the one that counts."""
        self._requests[command.batch] = command
        self._work.set()

    async def run(self, inbox: Inbox) -> None:
        while True:
            await self._work.wait()
            command = self._requests.pop(next(iter(self._requests)))
            if not self._requests:
                self._work.clear()
            started_s = time.perf_counter()
            computed = await asyncio.to_thread(compute_plan, command, self._settings())
            seconds = time.perf_counter() - started_s
            log.info("planned", batch=command.batch, policy=computed.policy, ms=round(1e3 * seconds, 1))
            await inbox.put(Arrival(msgspec.structs.replace(computed, compute_s=seconds)))
