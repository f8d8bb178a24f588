"""From a run's settings to a worker object: which parts each kind is made of.

torch is imported in no function before ``take_gpus`` has ended: CUDA_VISIBLE_DEVICES is read at import.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.events import event_entry
from transport.contracts.ledger import checkpoints_place, critic_checkpoints_place
from transport.contracts.messages import MessageDecoder, WorkerLost
from transport.contracts.settings import LoraSettings, RowSettings, Settings, TensorSettings
from transport.contracts.types import RunName, WorkerId
from transport.contracts.user_files import ForcedLengths, ModelIdentity, identify_model
from transport.process.clock import MonotonicClock
from transport.process.files import run_directory, writing
from transport.process.gpus import gpu_share
from transport.process.storage import prepare
from transport.rows.run_rows import open_rows
from transport.tensors.base import Endpoint, TimeLimit, parse_ports
from transport.tensors.ucx import wants_ucx
from workers.errors import ModelError, ModelMismatchError
from workers.generation.given import GivenResponses
from workers.leases.lifecycle import Worker, WorkerFactory

log = structlog.get_logger(__name__)

if TYPE_CHECKING:
    import torch

    from workers.environments.encoder import ObservationEncoder
    from workers.generation.engine import GenerationEngine
    from workers.generation.server.engine import Complete, WholeModel

Make = Callable[[Broker, Settings, WorkerId, Path], Coroutine[Any, Any, Worker]]
"""Makes a worker of a model directory."""


def with_model(model_dir: Path | None, trust_remote_code: bool, make: Make) -> WorkerFactory:
    """The worker that ``make`` makes of a model directory: the given one, or ``model.path`` of the run, prepared here.

    The path comes with the run's settings; whether its code may run stays this machine's decision.
    """

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.models import model_cache, prepare_model

        directory = model_dir or await asyncio.to_thread(
            prepare_model,
            settings.model.path,
            cache_dir=model_cache(os.environ),
            trust_remote_code=trust_remote_code,
        )
        await check_model(broker, worker_id, directory)
        return await make(broker, settings, worker_id, directory)

    return build


def with_critic_model(model_dir: Path | None, trust_remote_code: bool, make: Make) -> WorkerFactory:
    """Likewise of what a critic begins as: it may be another model, but of the run's tokenizer."""

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Worker:
        from workers.models import model_cache, prepare_model

        if not settings.has_critic:
            problem = 'has no critic: it needs algorithm.advantage = "gae", and a trainer'
            raise ModelError(f"run {settings.run.name!r} {problem}")
        directory = model_dir or await asyncio.to_thread(
            prepare_model,
            settings.critic.model or settings.model.path,
            cache_dir=model_cache(os.environ),
            trust_remote_code=trust_remote_code,
        )
        await check_model(broker, worker_id, directory, tokenizer_alone=True)
        return await make(broker, settings, worker_id, directory)

    return build


async def check_model(broker: Broker, worker_id: WorkerId, directory: Path, *, tokenizer_alone: bool = False) -> None:
    """Raises ModelMismatchError, and tells the run so, where this worker's model is not the one of the run.

    tokenizer_alone: a model of another shape will do.
    """
    raw = await broker.get_meta(keys.MODEL)
    if raw is None:
        return  # the run has no orchestrator of this version
    wanted = MessageDecoder(ModelIdentity).decode(raw)
    own = await asyncio.to_thread(identify_model, directory)
    if tokenizer_alone:
        own = msgspec.structs.replace(own, config="")
    if differing := own.differs_in(wanted):
        problem = (
            f"{worker_id} is refused: the {differing} of {directory} differs from the model of run {broker.run!r}: "
            + (
                "it could not read the policy's tokens: give critic.model (or --model-dir) one of the same tokenizer"
                if tokenizer_alone
                else "give --model-dir the same model, or leave it out to prepare the run's model.path"
            )
        )
        lost = WorkerLost(worker_id=worker_id, reason=problem)
        await broker.append(keys.EVENTS, event_entry(lost, worker=worker_id))
        raise ModelMismatchError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChoice:
    """Which inference server a worker uses: this machine's decision, as it names a program to run.

    url, key: of one that runs elsewhere.  command, args: of one of its own; empty: of this Python.  gpus: that this
    worker took for it.
    """

    url: str = ""
    key: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    gpus: int = 1


async def generation_worker(
    broker: Broker,
    settings: Settings,
    worker_id: WorkerId,
    model_dir: Path,
    *,
    run_dir: Path,
    trust_remote_code: bool,
    secret: bytes,
    server: ServerChoice,
    environment: str = "",
    environment_path: str = "",
) -> Worker:
    """A generation worker with the engine that the run names. secret: shared with the trainer, for its weights.

    environment, environment_path: "module:function" that this machine allows, and where it lies.

    An emulated one imports no torch, so that it starts in well under a second.
    """
    from workers.generation.worker import GenerationWorker

    generation, clock = settings.generation, MonotonicClock()
    lengths = await asyncio.to_thread(ForcedLengths.of, settings) if generation.lengths else None
    log_path = run_dir / "logs" / f"{generation.engine}-{worker_id.partition('.')[0]}.log"
    engine = engine_of(settings, model_dir, log_path, trust_remote_code, server)
    if settings.environments:
        engine = await with_environment(engine, settings, model_dir, environment, environment_path)
    if settings.endpoint.enabled:
        engine = await with_endpoint(broker, engine, settings, worker_id, model_dir, run_dir, secret)
    from transport.tensors.relay import Relay
    from workers.weights.pull import WeightPuller

    limit, ucx = limit_of(settings.tensors), wants_ucx(settings.tensors.ucx)
    relay = Relay(secret=secret, limit=limit, ucx=ucx) if settings.tensors.relay else None
    puller, stop = WeightPuller(secret=secret, limit=limit, relay=relay, ucx=ucx), ()
    computes, transfer_s = generation.engine != "emulated", settings.emulated.transfer_s * settings.emulated.time_scale
    if transfer_s or not computes:
        from workers.generation.emulated import EmulatedLink

        puller = EmulatedLink(transfer_s, puller, computes=computes)
    if computes:
        from workers.models import stop_token_ids

        stop = stop_token_ids(model_dir)
    given: GivenResponses | None = None
    if settings.data.response_column:
        given = await asyncio.to_thread(
            GivenResponses.of, model_dir, settings.data, max_tokens=settings.sampling.max_new_tokens
        )
    return GenerationWorker(
        broker,
        engine,
        settings,
        worker_id,
        puller,
        clock,
        rows=open_rows(broker, settings, secret=secret),
        stop_token_ids=stop,
        lengths=lengths,
        given=given,
        relay=relay,
    )


def _encoder(settings: Settings, model_dir: Path) -> ObservationEncoder:
    """What is said to the policy, as its model reads it. Raises ModelError."""
    from workers.environments.encoder import ObservationEncoder

    data = settings.data
    return ObservationEncoder.of(model_dir, templated=data.chat_template, arguments=data.chat_template_kwargs)


async def with_environment(
    engine: GenerationEngine, settings: Settings, model_dir: Path, allowed: str, path: str
) -> GenerationEngine:
    """The engine whose samples are episodes. allowed, path: see ``Environments``. Raises EnvironmentSetupError."""
    from workers.environments.engine import EpisodeEngine
    from workers.environments.pool import Environments
    from workers.scoring.jail import hide_from_children

    hide_from_children()
    pool = Environments(settings, allowed, path)
    encoder = await asyncio.to_thread(_encoder, settings, model_dir)
    return EpisodeEngine(engine, pool, encoder, settings.environment)


async def with_endpoint(
    broker: Broker,
    engine: GenerationEngine,
    settings: Settings,
    worker_id: WorkerId,
    model_dir: Path,
    run_dir: Path,
    secret: bytes,
) -> GenerationEngine:
    """The engine whose samples are conversations of agents, which reach it over HTTP. Raises ModelError."""
    from transport.process.http import ENDPOINT_ADDRESSES, ENDPOINT_KEY
    from workers.endpoint.engine import SessionEngine
    from workers.endpoint.http import EndpointServer, run_key
    from workers.endpoint.prompts import BrokerPrompts
    from workers.models import stop_token_ids

    endpoint = settings.endpoint
    index = int(worker_id.partition(".")[0].rpartition("-")[2])
    encoder = await asyncio.to_thread(_encoder, settings, model_dir)
    sampling = msgspec.structs.replace(settings.sampling.params, stop_token_ids=stop_token_ids(model_dir))
    sessions = SessionEngine(
        engine,
        encoder,
        endpoint,
        MonotonicClock(),
        model=endpoint.model or settings.model.path,
        sampling=sampling,
        group_size=settings.pipeline.group_size,
        prompts=BrokerPrompts(broker),
    )
    sessions.listener = EndpointServer(
        sessions,
        host=endpoint.host,
        port=endpoint.port + index if endpoint.port else 0,
        key=run_key(secret, RunName(settings.run.name)),
        address_file=run_dir / ENDPOINT_ADDRESSES / f"{index}.address",
        key_file=run_dir / ENDPOINT_KEY,
    )
    return sessions


def engine_of(
    settings: Settings, model_dir: Path, log_path: Path, trust_remote_code: bool, server: ServerChoice
) -> GenerationEngine:
    """The engine that ``generation.engine`` names. server, log_path: for one that speaks to a server."""
    generation, clock = settings.generation, MonotonicClock()
    lora = settings.trainer.lora if settings.trainer.lora.publish == "adapters" else None
    if generation.engine == "emulated":
        from workers.generation.emulated import EmulatedEngine

        return EmulatedEngine(
            settings.emulated,
            generation.slots,
            clock,
            drafts=generation.drafts,
            fp8=generation.fp8,
            kv_tokens=generation.kv_tokens,
            max_context=generation.max_context,
        )
    if generation.engine == "embedded":
        from workers.generation.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(generation, model_dir, clock, trust_remote_code=trust_remote_code, lora=lora)
    from workers.generation.server.client import ServerSettings
    from workers.generation.server.engine import KINDS, ServerEngine

    kind = KINDS[generation.engine]
    made_of = ServerSettings(
        directory=model_dir,
        log=log_path,
        url=server.url,
        key=server.key,
        command=(*(server.command or kind.command), *server.args),
        gpus=max(generation.gpus_per_worker, server.gpus),
        gpu_share=gpu_share(os.environ),
        slots=generation.slots,
        stop=generation.stop,
        dtype=generation.dtype,
        max_context=generation.max_context,
        keeps_partial=generation.partial_s > 0,
        drafts=generation.drafts,
        fp8=generation.fp8,
        trust_remote_code=trust_remote_code,
        startup_s=settings.liveness.startup_s,
        silence_s=generation.server_silence_s,
        request_s=settings.pipeline.rollout_timeout_s,
    )
    complete = adapted_model(model_dir, lora, trust_remote_code) if lora else None
    return ServerEngine(kind, made_of, clock, complete=complete)


def adapted_model(model_dir: Path, lora: LoraSettings, trust_remote_code: bool) -> Complete:
    """What makes whole models of adapters that come alone."""

    def complete(adapters: Mapping[str, torch.Tensor]) -> WholeModel:
        from workers.trainer.policy.export import MergedWeights
        from workers.trainer.policy.loading import empty_module

        return MergedWeights(empty_module(model_dir, trust_remote_code=trust_remote_code), model_dir, adapters, lora)

    return complete


async def scoring_worker(
    broker: Broker,
    settings: Settings,
    worker_id: WorkerId,
    model_dir: Path,
    *,
    reward: str,
    reward_path: str,
    advantage: str = "",
    functions_path: str = "",
    teacher_url: str = "",
    teacher_key: str = "",
    tasks: Sequence[str] = (),
    secret: bytes,
) -> Worker:
    """A scoring worker that computes ``reward`` and ``advantage`` and nothing else, whatever the run's settings say.

    teacher_url, teacher_key: of the one server that it asks for a teacher's logprobs, and may tell its key.
    tasks: that it does; () for all of the run.
    secret: shared with the run's storage units.
    """
    from workers.scoring.teacher import teacher_of
    from workers.scoring.worker import ScoringWorker

    return ScoringWorker(
        broker,
        settings,
        worker_id,
        model_dir=model_dir,
        clock=MonotonicClock(),
        allowed_reward=reward,
        reward_path=reward_path,
        allowed_advantage=advantage,
        functions_path=functions_path,
        teacher=teacher_of(settings, teacher_url, teacher_key, model_dir),
        tasks=tasks,
        rows=open_rows(broker, settings, secret=secret),
    )


async def storage_worker(
    broker: Broker,
    settings: Settings,
    worker_id: WorkerId,
    *,
    max_bytes: int,
    own_address: Mapping[str, str],
    secret: bytes,
) -> Worker:
    """A storage unit of the run. max_bytes: 0 for ``rows.unit_bytes``.  The others as for the trainer."""
    from workers.storage.worker import StorageWorker

    if settings.rows.store != "units":
        raise ModelError(f"run {settings.run.name!r} keeps its rows in the broker (rows.store): it needs no unit")
    endpoint = endpoint_of(settings.rows, own_address, secret)
    return StorageWorker(broker, endpoint, max_bytes=max_bytes or settings.rows.unit_bytes)


async def trainer_worker(
    broker: Broker,
    settings: Settings,
    worker_id: WorkerId,
    model_dir: Path,
    *,
    run_dir: Path,
    rank: int,
    trust_remote_code: bool,
    loss: str = "",
    functions_path: str = "",
    own_address: Mapping[str, str],
    secret: bytes,
) -> Worker:
    """One rank of the trainer.

    loss, functions_path: the user's own "module:function" that this machine allows, and where it lies.
    own_address: settings of the section tensors that this machine overrides, where they are not empty.
    secret: shared with the generation workers.  Raises DirectoryError now, not at the first checkpoint.
    """
    from workers.trainer.learner import EmulatedLearner
    from workers.trainer.worker import TrainerWorker
    from workers.weights.publish import WeightPublisher

    if settings.trainer.engine == "none":
        raise ModelError(f"run {settings.run.name!r} is a service: nothing is trained in it (trainer.engine)")
    if rank >= settings.trainer.num_ranks:
        has = f"trainer.ranks = {settings.trainer.num_ranks}, numbered from 0"
        raise ModelError(f"there is no rank {rank} in run {settings.run.name!r}, which has {has}")

    def make_directory() -> None:
        with writing(run_dir):
            run_directory(run_dir)
        prepare(checkpoints_place(settings, run_dir))
        if rank == 0 and not (run_dir / "config.toml").exists():
            log.warning(
                f"{run_dir.absolute()} is not the directory that the orchestrator of run {settings.run.name!r} writes: "
                "the final model goes here, and checkpoints too unless trainer.checkpoint_dir names another place; "
                "inspect --audit looks for them in the orchestrator's. On its host, give --run-dir"
            )

    await asyncio.to_thread(make_directory)
    endpoint = weights_endpoint(settings.tensors, own_address, secret)
    publisher = WeightPublisher(
        settings.run.name, run_dir, endpoint=endpoint, delta_share=delta_share_of(settings.tensors)
    )
    if settings.trainer.engine == "emulated":
        compares = settings.generation.engine == "emulated" and bool(settings.generation.fp8)
        learner = EmulatedLearner(settings.emulated, publisher, time.sleep, compares=compares)
    else:
        from workers.trainer.policy.policy_learner import PolicyLearner, objective_of
        from workers.user_functions.loss import own_losses, try_losses

        names = {algorithm.loss for algorithm in settings.algorithms.values()}
        objective = objective_of(settings, own_losses(names, loss, functions_path))
        await asyncio.to_thread(try_losses, objective)
        learner = PolicyLearner(
            settings,
            model_dir,
            publisher,
            objective=objective,
            rank=rank,
            meeting_dir=run_dir / "ranks",
            trust_remote_code=trust_remote_code,
        )
    rows, clock = open_rows(broker, settings, secret=secret), MonotonicClock()
    return TrainerWorker(broker, settings, worker_id, model_dir, run_dir, learner, clock, rows=rows, rank=rank)


async def critic_worker(
    broker: Broker,
    settings: Settings,
    worker_id: WorkerId,
    model_dir: Path,
    *,
    run_dir: Path,
    trust_remote_code: bool,
    secret: bytes,
) -> Worker:
    """The critic of a run that has one. The arguments as for the trainer."""
    from workers.critic.worker import CriticWorker, EmulatedCritic

    def make_directory() -> None:
        with writing(run_dir):
            run_directory(run_dir)
        prepare(critic_checkpoints_place(settings, run_dir))

    await asyncio.to_thread(make_directory)
    if settings.trainer.engine == "emulated":
        learner = EmulatedCritic(settings.emulated, time.sleep)
    else:
        from workers.critic.learner import CriticLearner

        learner = CriticLearner(settings, model_dir, trust_remote_code=trust_remote_code)
    rows = open_rows(broker, settings, secret=secret)
    return CriticWorker(broker, settings, worker_id, model_dir, run_dir, learner, MonotonicClock(), rows=rows)


async def publishing_worker(
    broker: Broker,
    settings: Settings,
    worker_id: WorkerId,
    model_dir: Path,
    *,
    run_dir: Path,
    weights_dir: Path | None,
    own_address: Mapping[str, str],
    secret: bytes,
) -> Worker:
    """The publisher of a service run. The others as for the trainer. Raises ModelError in a run that has a trainer."""
    import torch

    from workers.weights.publish import PublishingWorker, WeightPublisher, read_tensors

    if settings.trainer.engine != "none":
        raise ModelError(
            f"run {settings.run.name!r} has a trainer, which publishes its weights itself: publish is for a service"
        )
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    endpoint = weights_endpoint(settings.tensors, own_address, secret)
    publisher = WeightPublisher(
        settings.run.name, run_dir, endpoint=endpoint, delta_share=delta_share_of(settings.tensors)
    )
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


def endpoint_of(section: TensorSettings | RowSettings, own: Mapping[str, str], secret: bytes) -> Endpoint:
    """Where a worker listens. own: settings of the section that this machine overrides. Raises SecretError."""
    chosen = msgspec.structs.replace(section, **{name: value for name, value in own.items() if value})
    return Endpoint(host=chosen.host, advertise=chosen.advertise, ports=parse_ports(chosen.ports), secret=secret)


def weights_endpoint(tensors: TensorSettings, own: Mapping[str, str], secret: bytes) -> Endpoint:
    """Where the trainer serves weights. Raises SecretError."""
    return replace(endpoint_of(tensors, own, secret), limit=limit_of(tensors), ucx=wants_ucx(tensors.ucx))


def delta_share_of(tensors: TensorSettings) -> float:
    return tensors.delta_share if tensors.delta else 0.0


def limit_of(tensors: TensorSettings) -> TimeLimit:
    return TimeLimit(tensors.wait_s, tensors.min_mb_s)
