"""The scoring worker: takes its share of every scoring task, each through a consumer of its own.

    tasks:reward      sample: response ids -> text -> reward (child processes)      REWARD, REWARD_COMPONENTS
    tasks:reference   sample: logprobs under base model or teacher (kl_coef > 0)    REFERENCE_LOGPROBS
    tasks:advantages  group:  rewards -> advantages, GroupScored                    ADVANTAGE
                      and values -> those of each token (with a critic, which does tasks:values: workers/critic)

    claim / reclaim ──► up to ``at_once`` units in work, each in a task of its own ──► commit(rows, appends, ack)
                          │ fails: tried again here, until its attempts are used up ──► dead letter + ScoringFailed
                          └ its lease went to another worker: the work on it stops

Any number of these workers share the queues. Owns: attempts, dead letters. Never: leases (workers/leases); what a unit
means (tasks.py). Invariant: a unit ends as committed once or as a dead letter with its reason; it is never acknowledged
without either, unless its group is gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import structlog

from transport.broker import keys
from transport.broker.base import Broker, Commit, Delivery
from transport.broker.events import event_append
from transport.contracts.messages import MessageDecoder, ScoringFailed, TrialRows
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, WorkerId
from transport.contracts.user_files import identify_model
from transport.errors import MessageError, first_error
from transport.process import faults
from transport.process.clock import Clock
from transport.rows.columns import RowStore
from workers.errors import ModelError, RewardError, RewardTimeoutError
from workers.leases.lifecycle import Activity, BusyMeter, Leases
from workers.models import load_detokenizer, model_cache, prepare_model
from workers.scoring.estimates import estimates_of
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import Sample, reward_spec
from workers.scoring.tasks import AdvantageTask, Handle, ReferenceTask, RewardTask, RowLogprobs, Unit
from workers.scoring.teacher import Teacher

log = structlog.get_logger(__name__)

REWARD_PROCESSES = 2
"""A reward that hangs blocks one of them; rewards are cheap beside generation, so more would idle."""
AT_ONCE = 16
"""Units of one task that a worker holds together: enough to hide the broker's round trips."""
CLAIM_WAIT_S = 1.0
"""How long one claim waits for work; also how late a reclaim may be."""


class ScoringWorker:
    """Scores until cancelled.

    model_dir: tokenizer, and the reference model where there is one.  allowed_reward: "module:function" named on this
    worker's own command line, and allowed_advantage.  teacher: the server that has the reference model.  tasks: that it
    does, all of the run by default.  rows: where columns live; the broker's own hashes by default.
    Raises (constructor): RewardSetupError, AlgorithmError: the run's is another than the allowed one, or is none;
    ModelError: the run has no such task.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        worker_id: WorkerId,
        *,
        model_dir: Path,
        clock: Clock,
        allowed_reward: str = "",
        reward_path: str = "",
        allowed_advantage: str = "",
        functions_path: str = "",
        teacher: Teacher | None = None,
        tasks: Collection[str] = (),
        rows: RowStore | None = None,
    ) -> None:
        self._broker = broker
        self._rows = rows or RowStore(broker)
        self._settings = settings
        self._worker_id = worker_id
        self._model_dir = model_dir
        self._clock = clock
        self._meter = BusyMeter(clock)
        self._tasks = frozenset(tasks or settings.scoring_tasks)
        if unknown := sorted(self._tasks - settings.scoring_tasks.keys()):
            has = ", ".join(settings.scoring_tasks)
            raise ModelError(f"--tasks: run {settings.run.name!r} has no task {unknown[0]!r}; it has {has}")
        spec = reward_spec(settings, allowed_reward, reward_path)
        self._estimates = estimates_of(settings, allowed_advantage, functions_path)
        self._pool = open_pool(settings, spec, processes=REWARD_PROCESSES) if "reward" in self._tasks else None
        self._teacher = teacher
        self._consumers: dict[str, TaskConsumer] = {}

    async def run(self) -> None:
        """Score until cancelled. Raises RewardSetupError, ModelError; the broker's errors when it stays away."""
        try:
            handles = await self._handles()
            self._consumers = {
                task: TaskConsumer(
                    self._broker,
                    self._rows,
                    task,
                    self._worker_id,
                    handle,
                    clock=self._clock,
                    meter=self._meter,
                    lease_s=self._settings.scoring.lease_s,
                    max_attempts=self._settings.scoring.max_deliveries,
                    at_once=AT_ONCE,
                )
                for task, handle in handles.items()
            }
            async with asyncio.TaskGroup() as group:
                for task, consumer in self._consumers.items():
                    group.create_task(consumer.run(), name=task)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        finally:
            if self._pool is not None:
                await self._pool.close()
            if self._teacher is not None:
                await self._teacher.close()

    async def _trial(self) -> list[Sample]:
        """Rows to try the reward on, none where it once passed: a judge that is down for a moment must end no run."""
        if await self._broker.get_meta(keys.TRIED) == self._settings.scoring.reward.encode():
            return []
        raw = await self._broker.get_meta(keys.TRIAL)
        rows = MessageDecoder(TrialRows).decode(raw).rows if raw is not None else []
        return [Sample(prompt=row.prompt, response=row.response, entry=row.entry.encode()) for row in rows]

    async def _handles(self) -> dict[str, Handle]:
        """Of each of its tasks, once what it needs is loaded and tried."""
        settings, handles = self._settings, dict[str, Handle]()
        if self._pool is not None:
            _, detokenize = await asyncio.gather(
                self._pool.start(await self._trial()), asyncio.to_thread(load_detokenizer, self._model_dir)
            )
            await self._broker.put_meta(keys.TRIED, settings.scoring.reward.encode())
            handles["reward"] = RewardTask(self._rows, self._worker_id, self._pool, detokenize)
        if "advantages" in self._tasks:
            handles["advantages"] = AdvantageTask(
                self._rows,
                self._worker_id,
                settings.algorithms,
                self._estimates,
                max_group_size=settings.pipeline.group_size,
                max_tokens=settings.sampling.max_new_tokens,
                mixed=bool(settings.data.mix),
            )
        if "reference" in self._tasks:
            asked = {part: algorithm.kl_coef > 0 for part, algorithm in settings.algorithms.items()}
            handles["reference"] = ReferenceTask(self._rows, self._worker_id, await self._reference(), asked=asked)
        return handles

    async def _reference(self) -> RowLogprobs:
        """Raises ModelError."""
        if self._teacher is not None:
            await self._teacher.start()
            return self._teacher.logprobs
        import torch  # only where it is needed

        from workers.trainer.policy.model import reference_logprobs

        torch.set_num_threads(self._settings.trainer.threads)  # else one a core, beside those of engine and trainer
        directory = await asyncio.to_thread(reference_dir, self._settings, self._model_dir)
        return ReferenceTask.computed(await asyncio.to_thread(reference_logprobs, directory, self._settings))

    def activity(self) -> Activity:
        counters = {f"{task}_done": float(consumer.done) for task, consumer in self._consumers.items()}
        counters["given_up"] = float(sum(consumer.given_up for consumer in self._consumers.values()))
        if self._pool is not None:
            counters["reward_failures"] = float(self._pool.failures)
            if self._pool.jailed is not None:
                counters["jailed"] = float(self._pool.jailed)
        doing = "scoring" if self._meter.in_work else "waiting" if self._consumers else "starting"
        return Activity(doing=doing, busy_s=self._meter.busy_s(), running=self._meter.in_work, counters=counters)


def reference_dir(settings: Settings, model_dir: Path) -> Path:
    """Of the model that the KL is to: the teacher, prepared here, or ``model_dir``, the base model.

    Raises ModelError: it cannot be prepared, or its token ids are other words.
    """
    teacher = settings.algorithm.teacher
    if not teacher:
        return model_dir
    directory = prepare_model(teacher, cache_dir=model_cache(os.environ), setting="algorithm.teacher")
    theirs, ours = (identify_model(one).tokenizer for one in (directory, model_dir))
    if theirs != ours or not ours:
        raise ModelError(
            f"algorithm.teacher = {teacher!r} has another vocabulary than model.path = {settings.model.path!r} "
            f"(tokenizer {theirs or 'unknown'}, not {ours or 'unknown'}): its logprobs are of other words; name a "
            "teacher of the same family of models"
        )
    return directory


class TaskConsumer:
    """Consumes one task until cancelled.

    Attempts are deliveries and local tries together, so that neither a reward that raises nor one that kills its worker
    is tried for ever. What the handler wants written happens in the same step as the ack, and only if the unit is still
    pending: a broker that lost its tail has no such unit, and the row that is generated in its place has another score.

    lease_s: a unit that its holder did not renew for so long is taken over.  max_attempts: of one unit.
    at_once: units in work together.
    """

    def __init__(
        self,
        broker: Broker,
        rows: RowStore,
        task: str,
        consumer: WorkerId,
        handle: Handle,
        *,
        clock: Clock,
        meter: BusyMeter,
        lease_s: float,
        max_attempts: int,
        at_once: int,
    ) -> None:
        self._rows = rows
        self._task = task
        self._consumer = consumer
        self._handle = handle
        self._meter = meter
        # one delivery more than allowed, so that the last one is given up here, together with its event
        self._leases = Leases(
            broker, keys.tasks(task), consumer, clock, lease_s=lease_s, max_deliveries=max_attempts + 1
        )
        self._max_attempts = max_attempts
        self._at_once = at_once
        self._working: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self.done = 0
        self.given_up = 0

    async def run(self) -> None:
        """Forever. Raises what the broker raises when it stays away."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leases.keep(self._stop), name=f"{self._task} leases")
            while True:
                while len(self._working) >= self._at_once:
                    self._room.clear()
                    await self._room.wait()
                for delivery in await self._leases.claim(self._at_once - len(self._working), wait_s=CLAIM_WAIT_S):
                    faults.point("score.claimed")
                    work = group.create_task(self._work(delivery), name=f"{self._task} {delivery.entry_id}")
                    self._working[delivery.entry_id] = work

    async def _stop(self, entry_ids: Collection[str]) -> None:
        """Stop working on what another worker has taken over."""
        for entry_id in entry_ids:
            if entry_id in self._working:
                self._working[entry_id].cancel()

    async def _work(self, delivery: Delivery) -> None:
        self._meter.begin()
        try:
            await self._finish(delivery)
        finally:
            self._meter.end()
            self._working.pop(delivery.entry_id, None)
            self._leases.release([delivery.entry_id])
            self._room.set()

    async def _finish(self, delivery: Delivery) -> None:
        """Commit the unit, or move it to the dead letters in one step with its event: its slot gets another group."""
        fields = delivery.entry.fields
        unit = Unit(unit_id=fields.get("unit", ""), group_id=GroupId(fields.get("group", "")))
        try:
            commit = await self._attempt(unit, delivery.deliveries)
        except (RewardError, MessageError) as error:
            log.error("unit given up", task=self._task, unit=unit.unit_id, reason=str(error))
            shown = f"{self._task} of {unit.unit_id or '(nothing)'}: {error}"
            failed = ScoringFailed(group_id=unit.group_id, reason=shown)
            appends = [event_append(failed, group=unit.group_id, worker=self._consumer)] if unit.group_id else []
            await self._leases.reject(delivery, shown, appends=appends)
            self.given_up += 1
            return
        await self._rows.commit(replace(commit, acks=self._leases.acks([delivery.entry_id]), if_held=True))
        faults.point("score.committed")
        self.done += 1

    async def _attempt(self, unit: Unit, deliveries: int) -> Commit:
        """Try until the attempts are used up, or one took too long: it would again. Raises the last error."""
        if not unit.unit_id or not unit.group_id:
            raise MessageError("the notice names no unit or no group")
        failure = RewardError(f"given up after {deliveries - 1} deliveries: the workers that held it died")
        for attempt in range(deliveries, self._max_attempts + 1):
            try:
                return await self._handle(unit)
            except RewardError as error:
                log.warning("unit failed", task=self._task, unit=unit.unit_id, attempt=attempt, reason=str(error))
                failure = error
                if isinstance(error, RewardTimeoutError):
                    break
        raise failure
