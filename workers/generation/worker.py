"""The generation worker: claims dispatch plans, runs them on its engine, writes each sample the moment it ends.

    plans:<worker> ─► claim ─► engine ─► publish ─► row + RolloutFinished (+ the plan's ack with its last sample)
    control:<worker> ─► follow ─► engine: new weights between two steps, aborts
                        report ─► events: what is held, so that what was lost is found out
                        keep   ─► partial:<group>: what running samples have got since, for whoever goes on with them
                        renew  ─► leases of the plans that are held

Back-pressure: a plan is claimed only while fewer samples are at work than the engine's slots plus one group, so that a
slot that falls free is filled at once, and what another worker could do is not hoarded.

Owns: these loops, and which samples of which plan are still to come. Never: decides; touches a prompt's meaning.
Invariant: a plan is acknowledged in the commit that writes the last of its samples, and leaves only after it, so that a
report never misses a group that is at work; ``WeightsLoaded`` is reported only once the engine serves them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import structlog
from msgspec.structs import replace
from numpy.typing import NDArray

from transport.broker import keys
from transport.broker.base import ZERO_ID, Append, Broker, Commit, Delivery, RowWrite, parse_entry_id
from transport.broker.events import event_append, event_entry
from transport.contracts.messages import (
    STARTING,
    AbortRollouts,
    DrainWorker,
    Event,
    GroupPlan,
    LoadWeights,
    PartialGroup,
    PartialSample,
    PartialTokens,
    RolloutFailed,
    RolloutFinished,
    RolloutInfo,
    WorkerLost,
    WorkerReported,
    encode,
    group_plan_decoder,
    has_grown,
    worker_command_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import (
    Column,
    FinishReason,
    GroupId,
    WeightIdentity,
    WorkerId,
    is_evaluation,
    row_id,
)
from transport.contracts.user_files import ForcedLengths
from transport.errors import MessageError, StreamError, first_error
from transport.process import faults
from transport.process.clock import Clock
from transport.rows.columns import RowStore, decode_array, encode_array, loss_mask
from transport.rows.partial import NOTHING, Beginning, partial_append, read_beginnings
from transport.tensors.relay import Relay
from workers.generation.engine import (
    BASE_WEIGHTS,
    Completion,
    EngineFailure,
    EngineInfo,
    GenerationEngine,
    GenerationRequest,
    Progress,
    Result,
    SampleKey,
)
from workers.generation.given import GivenResponses
from workers.leases.lifecycle import Activity, Leases
from workers.weights.updates import ROUTE_WAIT_S, Puller, WeightUpdates

log = structlog.get_logger(__name__)

REMEMBERED_ABORTS = 4096
"""Aborts kept for plans that are not claimed yet; more than a worker's queue ever holds."""
WAIT_S = 1.0
"""How long one read waits: the longest time a loop is deaf to the end of its connection."""
REPORT_S = 2.0
"""Between two reports: what was lost is found out within a few seconds, and the log stays readable."""
LAST_KEEP_S = 1.0
"""For a worker that is told to leave: what its samples have got is kept by then, or as it was kept before."""


# --- the plans that are held ------------------------------------------------------------------------------------------


class KeptTokens(NamedTuple):
    end: int
    oldest: WeightIdentity
    newest: WeightIdentity


@dataclass(slots=True, kw_only=True)
class HeldPlan:
    """One claimed plan. to_come: samples that have no result yet.  aborted: the rest of them is not wanted.
    prompt_tokens: of its prompt, once that was read.  kept: by sample, how many of its tokens are on the group's log,
    and the oldest and newest weights of them.  told: how many of them were reported, where it has one sample alone.
    """

    entry_id: str
    plan: GroupPlan
    to_come: set[int]
    aborted: bool = False
    prompt_tokens: int = 0
    kept: dict[int, KeptTokens] = field(default_factory=dict[int, KeptTokens])
    told: int = 0

    @property
    def key(self) -> tuple[GroupId, int]:
        return self.plan.group_id, self.plan.attempt


class HeldPlans:
    """By (group, attempt), in the order in which they were claimed. cursor: the last entry that was claimed."""

    def __init__(self) -> None:
        self._held: dict[tuple[GroupId, int], HeldPlan] = {}
        self._aborts: dict[tuple[GroupId, int], None] = {}  # an ordered set
        self.cursor = ZERO_ID

    def add(self, entry_id: str, plan: GroupPlan) -> HeldPlan:
        """A plan was claimed. It is aborted from the start when its abort came before it."""
        held = HeldPlan(entry_id=entry_id, plan=plan, to_come=set(plan.samples))
        held.aborted = self._aborts.pop(held.key, 0) is None
        self._held[held.key] = held
        self.claimed(entry_id)
        return held

    def claimed(self, entry_id: str) -> None:
        self.cursor = max(self.cursor, entry_id, key=parse_entry_id)

    def get(self, group_id: GroupId, attempt: int) -> HeldPlan | None:
        return self._held.get((group_id, attempt))

    def remove(self, plans: Iterable[HeldPlan]) -> None:
        for held in plans:
            self._held.pop(held.key, None)

    def abort(self, command: AbortRollouts) -> list[HeldPlan]:
        """Mark what ``command`` means. Returns what is held of it; the rest is remembered until it is claimed."""
        attempts: Sequence[int | None] = command.attempts or [None] * len(command.group_ids)
        stopped: list[HeldPlan] = []
        for group_id, attempt in zip(command.group_ids, attempts, strict=False):
            meant = [
                held
                for held in self._held.values()
                if held.plan.group_id == group_id and attempt in (None, held.plan.attempt)
            ]
            stopped += meant
            if not meant and attempt is not None:
                self._aborts[group_id, attempt] = None
        for held in stopped:
            held.aborted = True
        while len(self._aborts) > REMEMBERED_ABORTS:
            del self._aborts[next(iter(self._aborts))]
        return stopped

    def lose(self, entry_ids: Collection[str]) -> list[HeldPlan]:
        """Leases that went to another worker: forget these plans without an acknowledgement."""
        plans = [held for held in self._held.values() if held.entry_id in entry_ids]
        self.remove(plans)
        return plans

    @property
    def all(self) -> tuple[HeldPlan, ...]:
        return tuple(self._held.values())

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        return tuple(dict.fromkeys(held.plan.group_id for held in self._held.values()))

    @property
    def num_samples(self) -> int:
        """Samples that are to come."""
        return sum(len(held.to_come) for held in self._held.values())


# --- what is written of them ------------------------------------------------------------------------------------------


def row_write(completion: Completion, held: HeldPlan, worker_id: WorkerId) -> RowWrite:
    """The row of one finished sample, and the event that reports it if the row is new."""
    num_tokens = len(completion.response_ids)
    weights = [span.weights for span in completion.spans]  # not in order, where an older worker went on with a sample
    info = RolloutInfo(
        worker_id=worker_id,
        finish_reason=completion.finish_reason,
        prompt_tokens=held.prompt_tokens,
        response_tokens=num_tokens,
        spans=completion.spans,
        attempt=completion.attempt,
        queued_s=completion.queued_s,
        engine_s=completion.engine_s,
        segments=completion.segments,
        reward=completion.reward,
        resumed_tokens=completion.resumed,
    )
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, completion.response_ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, completion.logprobs),
        Column.ROLLOUT_INFO: encode(info),
    }
    if completion.segments:
        columns[Column.LOSS_MASK] = encode_array(Column.LOSS_MASK, loss_mask(completion.segments))
    if completion.branch_ends:
        columns[Column.BRANCH_ENDS] = encode_array(Column.BRANCH_ENDS, completion.branch_ends)
    row = row_id(completion.group_id, completion.sample)
    finished = RolloutFinished(
        row_id=row,
        worker_id=worker_id,
        response_tokens=num_tokens,
        finish_reason=completion.finish_reason,
        oldest=min(weights),
        newest=max(weights),
        num_bytes=sum(map(len, columns.values())),
        queued_s=completion.queued_s,
        engine_s=completion.engine_s,
        environment_tokens=info.environment_tokens,
        resumed_tokens=completion.resumed,
    )
    append = event_append(
        finished,
        row=row,
        worker=worker_id,
        weights=str(finished.newest),
        tokens=num_tokens,
        predicted_tokens=round(held.plan.predicted_tokens),
        finish=completion.finish_reason.value,
    )
    return RowWrite(row_id=row, columns=columns, on_insert=(append,))


def partial_tokens(got: Progress) -> PartialTokens:
    _, attempt, sample = got.key
    return PartialTokens(
        sample=sample,
        attempt=attempt,
        start=got.start,
        token_ids=encode_array(Column.RESPONSE_IDS, got.token_ids),
        logprobs=encode_array(Column.ROLLOUT_LOGPROBS, got.logprobs),
        spans=got.spans,
    )


def kept_tokens(got: Progress, before: KeptTokens | None) -> KeptTokens:
    """What is on the log once ``got`` is, after ``before``."""
    weights = [span.weights for span in got.spans] + ([before.oldest, before.newest] if before else [])
    return KeptTokens(got.end, min(weights), max(weights))


def failure_append(failure: EngineFailure, worker_id: WorkerId) -> Append:
    event = RolloutFailed(
        group_id=failure.group_id,
        worker_id=worker_id,
        samples=failure.samples,
        reason=failure.reason,
        retryable=failure.retryable,
    )
    return event_append(event, group=failure.group_id, worker=worker_id, reason=failure.reason)


# --- how a group is sampled -------------------------------------------------------------------------------------------


def group_seed(run_seed: int, group_id: GroupId) -> int:
    """The seed of a group's samples: the same on whichever worker and attempt it is generated."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{group_id}".encode(), digest_size=8).digest(), "little") >> 1


class GenerationWorker:
    """Generates until cancelled, or until it is drained.

    stop_token_ids: any of them ends a response.  lengths: forced output lengths, if there are any.
    given: responses that rows bring along, where nothing is sampled but evaluations.
    rows: where columns live; the broker's own hashes by default.  relay: what the puller passes weights on with.
    """

    def __init__(
        self,
        broker: Broker,
        engine: GenerationEngine,
        settings: Settings,
        worker_id: WorkerId,
        puller: Puller,
        clock: Clock,
        *,
        stop_token_ids: Sequence[int] = (),
        lengths: ForcedLengths | None = None,
        given: GivenResponses | None = None,
        rows: RowStore | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._broker = broker
        self._rows = rows or RowStore(broker)
        self._engine = engine
        self._settings = settings
        self._worker_id = worker_id
        self._stop_token_ids = tuple(stop_token_ids)
        self._lengths = lengths
        self._given = given
        self._leases = Leases(
            broker, keys.plans(worker_id), worker_id, clock, lease_s=settings.liveness.lease_s
        )  # it reclaims nothing: the orchestrator gives a lost worker's groups to others
        self._plans = HeldPlans()
        route_wait_s = settings.liveness.heartbeat_s + ROUTE_WAIT_S if relay is not None else 0.0
        self._updates = WeightUpdates(broker, engine, puller, worker_id, clock, route_wait_s=route_wait_s)
        self._relay = relay
        self._room = asyncio.Event()
        self._drained = asyncio.Event()
        self._info: EngineInfo | None = None
        self._samples = 0

    async def run(self) -> None:
        """Start the engine, then work until cancelled, or until the run wants fewer workers.

        Raises: ModelError, EngineCrashedError, EngineHungError; the broker's errors when it stays away.
        """
        try:
            if self._relay is not None:  # before it is known of: its first version is passed on, too
                await asyncio.to_thread(self._relay.listen_facing, (await self._broker.info()).address)
            self._info = await self._engine.start()
            async with asyncio.TaskGroup() as group:
                named: dict[str, Coroutine[Any, Any, None]] = {
                    "claim": self._claim(self._info),
                    "publish": self._publish(),
                    "follow": self._follow(),
                    "prefetch": self._updates.prefetch(),
                    "report": self._report(),
                    "keep": self._keep(),
                    "renew": self._leases.keep(self._stop),
                }
                loops = [group.create_task(loop, name=name) for name, loop in named.items()]
                await self._drained.wait()
                for loop in loops:
                    loop.cancel()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, StreamError):
                async with asyncio.timeout(LAST_KEEP_S):
                    await self._keep_once()
            raise
        finally:
            if self._relay is not None:
                await asyncio.to_thread(self._relay.close)
            await self._engine.close()

    def activity(self) -> Activity:
        if self._info is None:
            return Activity(doing=STARTING)
        load = self._engine.load()
        at_work = "decoding" if load.running else "waiting"
        return Activity(
            doing="standing aside" if self._updates.stands_aside else "loading" if self._updates.loading else at_work,
            capacity=load.capacity or self._info.capacity,
            busy_s=load.busy_s,
            running=load.running,
            waiting=load.waiting,
            weights=self._updates.served,
            counters={
                "samples": float(self._samples),
                "tokens": float(load.tokens),
                "cached_tokens": float(load.cached_tokens),
                "drafted_tokens": float(load.drafted_tokens),
                "accepted_tokens": float(load.accepted_tokens),
                "retracted_samples": float(load.retracted_samples),
            },
            kv_use=load.kv_use,
            way=self._updates.way,
            trouble=load.trouble,
            relay=self._relay.address if self._relay is not None else "",
        )

    async def _claim(self, info: EngineInfo) -> None:
        """Claim as many plans as there is room for, forever."""
        group_size = self._settings.pipeline.group_size
        while True:
            capacity = self._engine.load().capacity or info.capacity  # samples that fit now
            room = capacity + group_size - self._plans.num_samples
            if room > 0:
                await self._accept(await self._leases.claim(-(-room // group_size), wait_s=WAIT_S))
            else:
                self._room.clear()
                with contextlib.suppress(TimeoutError):  # room that a waiting episode leaves is looked at, not told of
                    async with asyncio.timeout(WAIT_S):
                        await self._room.wait()

    async def _accept(self, deliveries: Sequence[Delivery]) -> None:
        """Take over claimed plans: nothing is awaited before all are held, or a report could miss one."""
        accepted: list[HeldPlan] = []
        unreadable: list[tuple[Delivery, MessageError]] = []
        for delivery in deliveries:
            try:
                accepted.append(self._plans.add(delivery.entry_id, group_plan_decoder.decode(delivery.entry.payload)))
            except MessageError as error:
                self._plans.claimed(delivery.entry_id)
                unreadable.append((delivery, error))
        for delivery, error in unreadable:
            log.error("plan rejected", entry=delivery.entry_id, reason=str(error))
            await self._leases.reject(delivery, str(error))
        if accepted:
            faults.point("generate.claimed")
            await self._start(accepted)

    async def _start(self, accepted: Sequence[HeldPlan]) -> None:
        """Read the prompts and submit; a plan that cannot start fails or ends here."""
        wanted = [Column.PROMPT_IDS, *([] if self._given is None else [Column.TASK_ENTRY])]
        if self._settings.environments or self._settings.endpoint.enabled:
            wanted = [Column.PROMPT_IDS, Column.PROMPT_TEXT, Column.TASK_ENTRY]
        columns = await self._rows.read_groups([held.plan.group_id for held in accepted], wanted)
        written: list[Result] = []
        for held, group in zip(accepted, columns, strict=True):
            if held.aborted:
                await self._end(held)
                continue
            try:
                prompt_ids = decode_array(Column.PROMPT_IDS, group.get(Column.PROMPT_IDS, b""))
                if not len(prompt_ids):
                    raise MessageError("the broker does not have it")
                held.prompt_tokens = len(prompt_ids)
                if self._given is None or is_evaluation(held.plan.group_id):
                    self._submit(held, prompt_ids, group, await self._begun(held.plan))
                else:
                    entry = group.get(Column.TASK_ENTRY, b"")
                    written += self._completions(held, entry, self._given)
            except MessageError as error:
                await self._end(held, f"its prompt cannot be read: {error}")
        if written:
            await self._write(written)

    def _completions(self, held: HeldPlan, entry: bytes, given: GivenResponses) -> list[Completion]:
        plan, weights = held.plan, self._updates.served or BASE_WEIGHTS
        return [given.completion(plan.group_id, sample, plan.attempt, entry, weights) for sample in plan.samples]

    async def _begun(self, plan: GroupPlan) -> dict[int, Beginning]:
        """What samples of the plan go on from, as far as the log of the group still has it: one that it does not have,
        or not as the plan says, starts over."""
        if not plan.partial:
            return {}
        assert self._info is not None  # nothing is claimed before the engine has started
        vocabulary = self._info.vocab_size
        left = await read_beginnings(self._broker, plan.group_id, before=plan.attempt)
        begun: dict[int, Beginning] = {}
        for sample in plan.partial:
            beginning = left.get(sample.sample, NOTHING)
            known = sample.sample in plan.samples and len(beginning) and beginning.oldest == sample.oldest
            if known and beginning.token_ids.min() >= 0 and beginning.token_ids.max() < vocabulary:
                begun[sample.sample] = beginning
        log.info("goes on", group=plan.group_id, samples=len(begun), tokens=sum(map(len, begun.values())))
        return begun

    def _submit(
        self,
        held: HeldPlan,
        prompt_ids: NDArray[np.int32],
        group: Mapping[Column, bytes],
        begun: Mapping[int, Beginning],
    ) -> None:
        plan = held.plan
        sampling = plan.sampling or self._settings.sampling.params
        if plan.sampling is None and is_evaluation(plan.group_id):
            sampling = replace(sampling, temperature=self._settings.eval.temperature)
        self._submit_request(
            held,
            GenerationRequest(
                group_id=plan.group_id,
                prompt_ids=prompt_ids,
                samples=plan.samples,
                sampling=replace(
                    sampling,
                    stop_token_ids=self._stop_token_ids,
                    ignore_eos=self._lengths is not None,
                    seed=group_seed(self._settings.run.seed, plan.group_id),
                ),
                priority=plan.priority,
                attempt=plan.attempt,
                limits=self._lengths.limits(plan.group_id, plan.samples) if self._lengths else (),
                prompt_text=group.get(Column.PROMPT_TEXT, b"").decode(errors="replace"),
                entry=group.get(Column.TASK_ENTRY, b""),
            ),
            begun,
        )

    def _submit_request(self, held: HeldPlan, request: GenerationRequest, begun: Mapping[int, Beginning]) -> None:
        """Each sample goes on from its beginning, whose end is sampled again where it would be a whole response."""
        ends = () if request.sampling.ignore_eos else request.sampling.stop_token_ids
        cut: dict[int, Beginning] = {}
        for sample, beginning in begun.items():
            stops = np.flatnonzero(np.isin(beginning.token_ids, ends)).tolist()
            if used := beginning.cut(min([request.limit(sample) - 1, *stops])):
                cut[sample] = used
                held.kept[sample] = KeptTokens(len(used), used.oldest, used.newest)
        self._engine.submit(dataclasses.replace(request, begun=cut))

    async def _end(self, held: HeldPlan, reason: str = "") -> None:
        """Acknowledge a plan that never started, and say why where its samples are waited for."""
        failure = EngineFailure(group_id=held.plan.group_id, samples=held.plan.samples, reason=reason, retryable=True)
        appends = [failure_append(failure, self._worker_id)] if reason else []
        await self._broker.commit(Commit(appends=appends, acks=self._leases.acks([held.entry_id])))
        self._release([held])

    def _release(self, finished: Sequence[HeldPlan]) -> None:
        self._plans.remove(finished)
        self._leases.release(held.entry_id for held in finished)
        self._room.set()

    async def _publish(self) -> None:
        """Write what the engine hands out, forever: while one commit is under way, the next gathers."""
        while True:
            await self._write(await self._engine.results())

    async def _write(self, results: Sequence[Result]) -> None:
        commit, finished = self._publication(results)
        faults.point("generate.row_ready")
        await self._rows.commit(commit)
        faults.point("generate.row_committed")
        self._samples += len(commit.rows)
        self._release(finished)
        for held in finished:
            others = self._plans.group_ids  # of the same group an attempt may run on, whose tokens are on that log, too
            if held.kept and held.plan.group_id not in others:  # else it goes with the group
                await self._broker.delete_stream(keys.partial(held.plan.group_id))

    def _publication(self, results: Sequence[Result]) -> tuple[Commit, list[HeldPlan]]:
        """Everything that is ready, in one commit, with the ack of each plan that it finishes; those plans.

        One commit and not one for each sample: an ack can then never overtake a row of its group.
        """
        rows: list[RowWrite] = []
        appends: list[Append] = []
        touched: dict[str, HeldPlan] = {}
        for result in results:
            held = self._plans.get(result.group_id, result.attempt)
            if held is None:
                continue  # its lease was lost: the worker that has it now writes it
            touched[held.entry_id] = held
            if isinstance(result, Completion):
                held.to_come.discard(result.sample)
                if result.finish_reason is not FinishReason.ABORT:
                    rows.append(row_write(result, held, self._worker_id))
            else:
                held.to_come.difference_update(result.samples)
                if not held.aborted:
                    appends.append(failure_append(result, self._worker_id))
        finished = [held for held in touched.values() if not held.to_come]
        acks = self._leases.acks(held.entry_id for held in finished)
        return Commit(rows=rows, appends=appends, acks=acks), finished

    async def _follow(self) -> None:
        """Obey the control log, forever. Of several loads at once only the last is worth its time."""
        cursor = ZERO_ID
        while True:
            entries = await self._broker.read(keys.control(self._worker_id), cursor, count=64, wait_s=WAIT_S)
            newest: LoadWeights | None = None
            for entry in entries:
                cursor = entry.entry_id
                try:
                    command = worker_command_decoder.decode(entry.entry.payload)
                except MessageError as error:  # those after it still count
                    log.error("unreadable command", entry=entry.entry_id, reason=str(error))
                    continue
                match command:
                    case AbortRollouts():
                        await self._abort(command)
                    case LoadWeights():
                        newest = command
                    case DrainWorker(reason=reason):  # what was held is published: ``run`` ends, and with it the lease
                        lost = WorkerLost(worker_id=self._worker_id, reason=f"drained: {reason}", left=True)
                        await self._report_event(lost)
                        self._drained.set()
            if newest is not None:
                if newest.full_precision:
                    await self._engine.use_full_precision(newest.full_precision)
                self._updates.note_aside(newest.aside_s)
                event = await self._updates.load(newest.weights)
                await self._report_event(event, weights=str(newest.weights))

    async def _abort(self, command: AbortRollouts) -> None:
        stopped = self._plans.abort(command)
        if stopped:
            log.info("aborting", groups=[held.plan.group_id for held in stopped], reason=command.reason)
            await self._engine.abort([held.key for held in stopped])

    async def _report(self) -> None:
        """Say what is held, forever. The snapshot is taken before its append, and a plan leaves it after its commit."""
        while True:
            await self._broker.commit(Commit(appends=[self._held_append()]))
            await asyncio.sleep(REPORT_S)

    def _held_append(self, partial: Sequence[PartialGroup] = ()) -> Append:
        report = WorkerReported(
            worker_id=self._worker_id,
            held=self._plans.group_ids,
            plans_cursor=self._plans.cursor,
            weights=self._updates.served,
            capacity=self._engine.load().capacity,
            partial=tuple(partial),
        )
        fields = {"held": len(report.held), "cursor": report.plans_cursor, "weights": str(report.weights)}
        return event_append(report, worker=self._worker_id, **fields)

    # -- what running samples have got, kept for whoever goes on with them

    async def _keep(self) -> None:
        """Forever, or not at all."""
        period_s = self._settings.generation.partial_s
        while period_s:
            await asyncio.sleep(period_s)
            await self._keep_once()
        await asyncio.Event().wait()

    async def _keep_once(self) -> None:
        """In one commit with the report of it, so that the core never counts on tokens that are nowhere."""
        held = {held.key: held for held in self._plans.all if not held.aborted and held.to_come}
        if not held or not self._settings.generation.partial_s:
            return
        known = {(*key, sample): kept.end for key, plan in held.items() for sample, kept in plan.kept.items()}
        news: dict[SampleKey, KeptTokens] = {}
        appends: list[Append] = []
        reported: dict[tuple[GroupId, int], list[PartialSample]] = {}
        for got in await self._engine.progress(known):
            group_id, attempt, sample = got.key
            plan = held.get((group_id, attempt))
            if plan is None or sample not in plan.to_come or is_evaluation(group_id):
                continue  # it ended meanwhile, or starts over in any case
            before = plan.kept.get(sample)
            kept = news[got.key] = kept_tokens(got, before)
            appends.append(partial_append(group_id, partial_tokens(got)))
            tokens = kept.end if plan.plan.alone else 0
            same_ages = before is not None and (before.oldest, before.newest) == (kept.oldest, kept.newest)
            if not same_ages or has_grown(tokens, plan.told):
                plan.told = tokens
                of_plan = reported.setdefault(plan.key, [])
                of_plan.append(PartialSample(sample=sample, oldest=kept.oldest, newest=kept.newest, tokens=tokens))
        if not appends:
            return
        groups = [
            PartialGroup(group_id=group_id, attempt=attempt, samples=tuple(samples))
            for (group_id, attempt), samples in reported.items()
        ]
        appends += [self._held_append(groups)] if groups else []
        await self._broker.commit(Commit(appends=appends))
        faults.point("generate.kept")
        for (group_id, attempt, sample), kept in news.items():
            held[group_id, attempt].kept[sample] = kept

    async def _stop(self, entry_ids: Collection[str]) -> None:
        """Stop working on what was given to another worker."""
        lost = self._plans.lose(entry_ids)
        log.warning("leases lost", groups=[held.plan.group_id for held in lost])
        await self._engine.abort([held.key for held in lost])
        self._room.set()

    async def _report_event(self, event: Event, **fields: str | int) -> None:
        await self._broker.append(keys.EVENTS, event_entry(event, worker=self._worker_id, **fields))
