"""From a run's settings to a worker object: the one place that knows which parts each kind is made of."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.given_lengths import read_lengths
from transport.contracts.messages import MessageDecoder, WorkerLost
from transport.contracts.model_identity import ModelIdentity, identify_model
from transport.contracts.settings import SERVER_ENGINES, Settings, TensorSettings
from transport.contracts.types import WorkerId
from transport.process.clock import MonotonicClock
from transport.process.files import run_directory, writing
from transport.tensors.address import Endpoint, parse_ports
from workers.errors import ModelError, ModelMismatchError
from workers.generation.worker import ForcedLengths
from workers.leases.events import event_entry
from workers.leases.lifecycle import Worker, WorkerFactory

if TYPE_CHECKING:
    from workers.generation.engine import GenerationEngine
    from workers.trainer.learner import Learner
    from workers.weights.publish import WeightPublisher


def with_model(model_dir: Path | None, trust_remote_code: bool, make: Callable[[Path], WorkerFactory]) -> WorkerFactory:
    """The worker that ``make`` makes of a model directory: the given one, or ``model.path`` of the run, prepared here.

    The path comes with the run's settings; whether its code may run stays this machine's decision.
    """

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        directory = model_dir or await asyncio.to_thread(_prepare, settings.model.path, trust_remote_code)
        await check_model(broker, worker_id, directory)
        return await make(directory)(broker, settings, worker_id)

    return build


async def check_model(broker: Broker, worker_id: WorkerId, directory: Path) -> None:
    """Raises ModelMismatchError, and tells the run so, where this worker's model is not the one of the run."""
    raw = await broker.get_meta(keys.MODEL)
    if raw is None:
        return  # the run has no orchestrator of this version
    wanted = MessageDecoder(ModelIdentity).decode(raw)
    own = await asyncio.to_thread(identify_model, directory)
    differing = own.differs_in(wanted)
    if differing:
        problem = (
            f"{worker_id} is refused: the {differing} of {directory} differs from the model of run {broker.run!r}: "
            "give --model-dir the same model, or leave it out to prepare the run's model.path"
        )
        lost = WorkerLost(worker_id=worker_id, reason=problem)
        await broker.append(keys.EVENTS, event_entry(lost, worker=worker_id))
        raise ModelMismatchError(problem)


def _prepare(path: str, trust_remote_code: bool) -> Path:
    from workers.models.resolve import model_cache, prepare_model

    return prepare_model(path, cache_dir=model_cache(os.environ), trust_remote_code=trust_remote_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChoice:
    """Which inference server a worker uses: this machine's decision, as it names a program to run.

    url, key: of one that runs elsewhere.  command, args: of one of its own; empty: of this Python.
    """

    url: str = ""
    key: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


def generation_worker(
    run_dir: Path,
    model_dir: Path,
    trust_remote_code: bool,
    secret: bytes = b"",
    server: ServerChoice = ServerChoice(),
) -> WorkerFactory:
    """A generation worker with the engine that the run names. secret: shared with the trainer, for its weights."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        lengths = await asyncio.to_thread(_forced_lengths, settings)
        if settings.generation.engine == "emulated":
            return _emulated_worker(broker, settings, worker_id, lengths, secret)
        from workers.generation.worker import GenerationWorker
        from workers.models.facts import stop_token_ids
        from workers.weights.pull import WeightPuller

        clock = MonotonicClock()
        if settings.generation.engine in SERVER_ENGINES:
            log_path = run_dir / "logs" / f"{settings.generation.engine}-{worker_id.partition('.')[0]}.log"
            engine = server_engine(settings, model_dir, log_path, trust_remote_code, server)
        else:
            engine = _embedded_engine(settings, model_dir, trust_remote_code)
        stops = stop_token_ids(model_dir)
        puller = WeightPuller(secret=secret)
        return GenerationWorker(
            broker, engine, settings, worker_id, puller, clock, stop_token_ids=stops, lengths=lengths
        )

    return build


def _embedded_engine(settings: Settings, model_dir: Path, trust_remote_code: bool) -> GenerationEngine:
    from workers.generation.embedded.engine import EmbeddedEngine, EmbeddedSettings

    made_of = EmbeddedSettings.of(settings.generation, model_dir, trust_remote_code=trust_remote_code)
    return EmbeddedEngine(made_of, MonotonicClock())


def server_engine(
    settings: Settings, model_dir: Path, log_path: Path, trust_remote_code: bool, server: ServerChoice
) -> GenerationEngine:
    """An engine that speaks to the server of ``server``. log_path: of a server of its own."""
    from workers.generation.server.client import ServerSettings
    from workers.generation.server.engine import KINDS, ServerEngine

    generation = settings.generation
    kind = KINDS[generation.engine]
    made_of = ServerSettings(
        directory=model_dir,
        log=log_path,
        url=server.url,
        key=server.key,
        command=(*(server.command or kind.command), *server.args),
        slots=generation.slots,
        dtype=generation.dtype,
        max_context=generation.max_context,
        trust_remote_code=trust_remote_code,
        startup_s=settings.liveness.startup_s,
        silence_s=generation.server_silence_s,
        request_s=settings.pipeline.rollout_timeout_s,
    )
    return ServerEngine(kind, made_of, MonotonicClock())


def _forced_lengths(settings: Settings) -> ForcedLengths | None:
    if not settings.generation.lengths:
        return None
    most = settings.sampling.max_new_tokens
    return ForcedLengths(
        [min(tokens, most) for tokens in read_lengths(Path(settings.generation.lengths))],
        groups_per_batch=settings.pipeline.groups_per_batch,
        group_size=settings.pipeline.group_size,
    )


def _emulated_worker(
    broker: Broker, settings: Settings, worker_id: WorkerId, lengths: ForcedLengths | None, secret: bytes
) -> Worker:
    """Without torch, so that it starts in well under a second."""
    from workers.generation.emulated import EmulatedEngine, EmulatedLink, LinkedWorker
    from workers.generation.worker import GenerationWorker

    clock = MonotonicClock()
    engine = EmulatedEngine(settings.emulated, settings.generation.slots, clock)
    link = EmulatedLink(settings.emulated.transfer_s * settings.emulated.time_scale, clock, secret=secret)
    worker = GenerationWorker(broker, engine, settings, worker_id, link, clock, lengths=lengths)
    return LinkedWorker(worker, link, broker)


def scoring_worker(model_dir: Path, reward: str, reward_path: str = "") -> WorkerFactory:
    """A scoring worker that computes ``reward`` and nothing else, whatever the run's settings say."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.scoring.worker import ScoringWorker

        return ScoringWorker(
            broker,
            settings,
            worker_id,
            model_dir=model_dir,
            clock=MonotonicClock(),
            allowed_reward=reward,
            reward_path=reward_path,
        )

    return build


def trainer_worker(
    run_dir: Path,
    model_dir: Path,
    rank: int,
    trust_remote_code: bool,
    own_address: Mapping[str, str] | None = None,
    secret: bytes = b"",
) -> WorkerFactory:
    """One rank of the trainer.

    own_address: settings of the section tensors that this machine overrides, where they are not empty.
    secret: shared with the generation workers.
    """

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.trainer.worker import TrainerWorker
        from workers.weights.publish import WeightPublisher

        if settings.trainer.engine == "none":
            raise ModelError(f"run {settings.run.name!r} is a service: nothing is trained in it (trainer.engine)")
        await asyncio.to_thread(_make_directory, run_dir)
        endpoint = endpoint_of(settings.tensors, own_address or {}, secret)
        publisher = WeightPublisher(settings.run.name, run_dir, endpoint=endpoint)
        learner = _learner(settings, run_dir, model_dir, publisher, rank, trust_remote_code)
        return TrainerWorker(broker, settings, worker_id, model_dir, run_dir, learner, MonotonicClock(), rank=rank)

    return build


def _make_directory(directory: Path) -> None:
    """Raises DirectoryError now, not at the first checkpoint."""
    with writing(directory):
        run_directory(directory)
        (directory / "checkpoints").mkdir(exist_ok=True)


def publishing_worker(
    run_dir: Path, model_dir: Path, weights_dir: Path | None, own_address: Mapping[str, str], secret: bytes
) -> WorkerFactory:
    """The publisher of a service run. The others as for the trainer. Raises ModelError in a run that has a trainer."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        import torch

        from workers.weights.publish import WeightPublisher
        from workers.weights.publishing_worker import PublishingWorker, read_tensors

        if settings.trainer.engine != "none":
            raise ModelError(f"run {settings.run.name!r} has a trainer, which publishes its weights itself")
        await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
        endpoint = endpoint_of(settings.tensors, own_address, secret)
        publisher = WeightPublisher(settings.run.name, run_dir, endpoint=endpoint)
        dtype = getattr(torch, settings.generation.dtype)  # "bfloat16" or "float32": the settings were checked
        return PublishingWorker(
            broker,
            worker_id,
            publisher,
            dtype,
            read_tensors,
            MonotonicClock(),
            model_dir=model_dir,
            weights_dir=weights_dir,
        )

    return build


def endpoint_of(tensors: TensorSettings, own: Mapping[str, str], secret: bytes) -> Endpoint:
    """Where the trainer serves weights. Raises SecretError."""
    chosen = msgspec.structs.replace(tensors, **{name: value for name, value in own.items() if value})
    return Endpoint(host=chosen.host, advertise=chosen.advertise, ports=parse_ports(chosen.ports), secret=secret)


def _learner(
    settings: Settings, run_dir: Path, model_dir: Path, publisher: WeightPublisher, rank: int, trust_remote_code: bool
) -> Learner:
    if settings.trainer.engine == "emulated":
        from workers.trainer.emulated import EmulatedLearner

        return EmulatedLearner(settings.emulated, publisher, time.sleep)
    from workers.trainer.policy.policy_learner import PolicyLearner

    return PolicyLearner(
        settings,
        model_dir,
        publisher,
        rank=rank,
        meeting_dir=run_dir / "ranks",
        trust_remote_code=trust_remote_code,
    )
