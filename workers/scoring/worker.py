"""The scoring worker: takes its share of every scoring task, each through a consumer of its own.

    tasks:reward      sample: response ids -> text -> reward (child processes)      REWARD, REWARD_COMPONENTS
    tasks:reference   sample: logprobs under the base model (with kl_coef > 0)      REFERENCE_LOGPROBS
    tasks:advantages  group:  rewards -> advantages, GroupScored                    ADVANTAGE

Any number of these workers share the queues. Owns: wiring. Invariant: nothing is acknowledged before it is written.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import MessageDecoder, TrialRows
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerId
from transport.errors import first_error
from transport.process.clock import Clock
from transport.rows.columns import BrokerRows, RowStore
from workers.leases.lifecycle import Activity, BusyMeter
from workers.scoring.consumer import Handle, TaskConsumer
from workers.scoring.reward_pool import RewardPool
from workers.scoring.reward_process import Sample
from workers.scoring.rewards import reward_spec
from workers.scoring.tasks import AdvantageTask, Detokenize, RewardTask, load_detokenizer

REWARD_PROCESSES = 2
"""A reward that hangs blocks one of them; rewards are cheap beside generation, so more would idle."""
AT_ONCE = 16
"""Units of one task that a worker holds together: enough to hide the broker's round trips."""


class ScoringWorker:
    """Scores until cancelled.

    model_dir: tokenizer, and the reference model where there is one.  allowed_reward: "module:function" named on this
    worker's own command line.  rows: where columns live; the broker's own hashes by default.
    Raises (constructor): RewardSetupError: the run's reward is another than the allowed one.
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
        rows: RowStore | None = None,
    ) -> None:
        self._broker = broker
        self._rows = rows or BrokerRows(broker)
        self._settings = settings
        self._worker_id = worker_id
        self._model_dir = model_dir
        self._clock = clock
        self._meter = BusyMeter(clock)
        spec = reward_spec(settings, allowed_reward, reward_path)
        self._pool = RewardPool.of(settings, spec, processes=REWARD_PROCESSES)
        self._consumers: dict[str, TaskConsumer] = {}

    async def run(self) -> None:
        """Score until cancelled. Raises RewardSetupError, ModelError; the broker's errors when it stays away."""
        try:
            _, detokenize = await asyncio.gather(
                self._pool.start(await self._trial()), asyncio.to_thread(load_detokenizer, self._model_dir)
            )
            await self._broker.put_meta(keys.TRIED, self._settings.scoring.reward.encode())
            self._consumers = {
                task: self._consumer(task, handle) for task, handle in (await self._tasks(detokenize)).items()
            }
            async with asyncio.TaskGroup() as group:
                for task, consumer in self._consumers.items():
                    group.create_task(consumer.run(), name=task)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        finally:
            await self._pool.close()

    async def _trial(self) -> list[Sample]:
        """Rows to try the reward on, none where it once passed: a judge that is down for a moment must end no run."""
        if await self._broker.get_meta(keys.TRIED) == self._settings.scoring.reward.encode():
            return []
        raw = await self._broker.get_meta(keys.TRIAL)
        rows = MessageDecoder(TrialRows).decode(raw).rows if raw is not None else []
        return [Sample(prompt=row.prompt, response=row.response, entry=row.entry.encode()) for row in rows]

    async def _tasks(self, detokenize: Detokenize) -> dict[str, Handle]:
        settings = self._settings
        tasks: dict[str, Handle] = {
            "reward": RewardTask(self._rows, self._worker_id, self._pool, detokenize),
            "advantages": AdvantageTask(
                self._rows,
                self._worker_id,
                kind=settings.algorithm.advantage,
                max_group_size=settings.pipeline.group_size,
            ),
        }
        if settings.algorithm.kl_coef > 0:
            from workers.scoring.reference import ReferenceModel, ReferenceTask  # torch: only where it is needed

            model = await asyncio.to_thread(ReferenceModel, self._model_dir, settings)
            tasks["reference"] = ReferenceTask(self._rows, self._worker_id, model)
        return tasks

    def _consumer(self, task: str, handle: Handle) -> TaskConsumer:
        return TaskConsumer(
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

    def activity(self) -> Activity:
        counters = {f"{task}_done": float(consumer.done) for task, consumer in self._consumers.items()}
        counters["given_up"] = float(sum(consumer.given_up for consumer in self._consumers.values()))
        counters["reward_failures"] = float(self._pool.failures)
        counters["jailed"] = float(self._pool.jailed)
        doing = "scoring" if self._meter.in_work else "waiting" if self._consumers else "starting"
        return Activity(doing=doing, busy_s=self._meter.busy_s(), running=self._meter.in_work, counters=counters)
