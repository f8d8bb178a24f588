"""From a run's settings to a worker object: the one place that knows which parts each kind is made of."""

from __future__ import annotations

import asyncio
from pathlib import Path

from transport.broker.base import Broker
from transport.clock import MonotonicClock
from transport.settings import Settings
from transport.types import WorkerId
from workers.lifecycle import Worker, WorkerFactory


def generation_worker(run_dir: Path, model_dir: Path, trust_remote_code: bool) -> WorkerFactory:
    """A generation worker with the engine that the run names."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.generation.embedded import EmbeddedEngine, EmbeddedSettings
        from workers.generation.stop_tokens import stop_token_ids
        from workers.generation.weights import WeightPuller
        from workers.generation.worker import GenerationWorker

        clock = MonotonicClock()
        engine = EmbeddedEngine(
            EmbeddedSettings.of(settings.generation, model_dir, trust_remote_code=trust_remote_code), clock
        )
        stops = stop_token_ids(model_dir)
        return GenerationWorker(broker, engine, settings, worker_id, WeightPuller(), clock, stop_token_ids=stops)

    return build


def scoring_worker(run_dir: Path, model_dir: Path, reward: str) -> WorkerFactory:
    """A scoring worker that computes ``reward`` and nothing else, whatever the run's settings say."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.scoring.worker import ScoringWorker

        return ScoringWorker(
            broker, settings, worker_id, model_dir=model_dir, clock=MonotonicClock(), allowed_reward=reward
        )

    return build


def trainer_worker(run_dir: Path, model_dir: Path, rank: int, trust_remote_code: bool) -> WorkerFactory:
    """One rank of the trainer."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.trainer.publish import WeightPublisher
        from workers.trainer.worker import TrainerWorker

        await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
        publisher = WeightPublisher(settings.run.name, run_dir)
        return TrainerWorker(
            broker,
            settings,
            worker_id,
            model_dir,
            run_dir,
            publisher,
            MonotonicClock(),
            rank=rank,
            trust_remote_code=trust_remote_code,
        )

    return build
