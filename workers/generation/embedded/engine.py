"""The generation engine that lives in the worker's process: one thread steps the slot decoder.

Owns: the thread, all that goes to it and comes back, the model's dtype, device and limits. Never: the broker; which
samples run (``slots.py``); how a model directory comes to be (``workers/models``).
Invariant: the model is touched by that thread alone; what ends the thread ends every wait on the engine, by name.

    asyncio loop                        thread
    submit ───────► inbox ────────────► between two steps: queue, abort, load weights
    abort, load ──► inbox + future ───►                    (the future is set when it is done)
    results ◄────── call_soon_threadsafe ◄──────────────── step: every sample that ended
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from transport.contracts.settings import GenerationSettings
from transport.contracts.types import GroupId, WeightIdentity
from transport.process.clock import Clock
from workers.errors import EngineHungError, ModelError, StreamError
from workers.generation.embedded.forward import Forward, FusedForward, ModuleForward, can_fuse
from workers.generation.embedded.slots import SlotDecoder
from workers.generation.engine import (
    BASE_WEIGHTS,
    Completion,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Result,
    ResultQueue,
)
from workers.models.resolve import check_model_dir
from workers.weights.pull import check_tensors, shown_names

CLOSE_TIMEOUT_S = 30.0
"""A step takes well below a second; the longest thing the thread may be in is a prefill or a copy of the weights."""
CALL_TIMEOUT_S = 120.0
"""For an abort or new weights, which wait for the step that runs: minutes mean that the device hangs."""

_Command = Callable[[SlotDecoder], list[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """What an embedded engine is made of; the fields are those of settings.GenerationSettings.

    weights: identity of what lies in ``directory``.
    """

    directory: Path
    slots: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "auto"
    threads: int = 1
    max_context: int = 0
    trust_remote_code: bool = False
    weights: WeightIdentity = BASE_WEIGHTS

    @classmethod
    def of(
        cls, generation: GenerationSettings, directory: Path, *, trust_remote_code: bool = False
    ) -> EmbeddedSettings:
        """What a run's settings ask for."""
        return cls(
            directory=directory,
            slots=generation.slots,
            dtype=getattr(torch, generation.dtype),  # "bfloat16" or "float32": the settings were checked
            device=generation.device,
            threads=generation.threads,
            max_context=generation.max_context,
            trust_remote_code=trust_remote_code,
        )


CPU_MAX_CONTEXT = 2048
"""Tokens; the default limit on a CPU, where longer samples take minutes and KV memory competes with everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """parameters: the model's tensors by each of their names (a tied tensor has two); writing to them changes it."""

    forward: Forward
    parameters: Mapping[str, torch.Tensor]
    max_context: int
    vocab_size: int


def resolve_device(device: str) -> torch.device:
    """``auto`` is cuda when there is one, else cpu. Raises ModelError for a device that this machine has not."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"generation.device {device!r} is not a device: use auto, cpu or cuda") from error
    if resolved.type == "cuda" and not (resolved.index or 0) < torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        raise ModelError(f"generation.device is {device!r}, but torch sees {num_gpus} GPUs here: use auto or cpu")
    return resolved


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int = 0,
    trust_remote_code: bool = False,
    fused: bool = True,
) -> LoadedModel:
    """Load a causal language model for generation.

    Args:   max_context: tokens of prompt + response; 0: what the model allows, at most CPU_MAX_CONTEXT on a CPU.
            fused: use FusedForward where it can compute the model; False is for comparing the two.
    Raises: ModelError: directory or file missing, broken, of a kind that cannot run here; it says which and what to do.
    """
    check_model_dir(directory)
    model = _read(directory, dtype, trust_remote_code).to(device).eval()
    limit = _max_context(model, device, max_context)
    forward = FusedForward(model, max_context=limit) if fused and can_fuse(model) else ModuleForward(model)
    return LoadedModel(
        forward=forward,
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        max_context=limit,
        vocab_size=model.get_input_embeddings().weight.shape[0],
    )


def _read(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{directory} cannot be loaded as a causal language model: {reason}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        names = shown_names(missing)
        raise ModelError(f"{directory} lacks weights of its model: {names}; copy or save the model again")
    return model


def _max_context(model: Any, device: torch.device, asked: int) -> int:
    allowed = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or CPU_MAX_CONTEXT)
    if asked > allowed:
        raise ModelError(f"generation.max_context is {asked}, but the model allows {allowed} tokens")
    return asked or (min(allowed, CPU_MAX_CONTEXT) if device.type == "cpu" else allowed)


def check_memory(model: LoadedModel, slots: int) -> None:
    """Check that KV memory of ``slots`` full slots fits now, not in the middle of a run. Raises ModelError."""
    parameter = next(iter(model.parameters.values()))
    needed = model.forward.kv_shape.num_bytes(slots, model.max_context, parameter.dtype)
    if parameter.device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(parameter.device)
    else:
        available = psutil.virtual_memory().available
    if needed > available:
        raise ModelError(
            f"{slots} slots of {model.max_context} tokens need {needed / 1e9:.1f} GB of KV memory, and "
            f"{available / 1e9:.1f} GB are free: lower generation.slots or generation.max_context"
        )


class EmbeddedEngine:
    """A GenerationEngine (engine.py). ``start`` before anything else, ``close`` at the end, also after an error."""

    def __init__(self, settings: EmbeddedSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._decoder: SlotDecoder | None = None
        self._work: Future[Any] | None = None  # what the thread does: first loading, then serving
        self._results = ResultQueue()
        self._outstanding = 0
        self._busy_s = 0.0

    # --- the asyncio side ---------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Load the model and start the thread. Raises ModelError."""
        loop = asyncio.get_running_loop()
        self._work = self._executor.submit(self._load)
        decoder: SlotDecoder = await asyncio.wrap_future(self._work)
        self._decoder = decoder
        self._work = self._executor.submit(self._serve, decoder, loop)
        self._results.serving = asyncio.wrap_future(self._work)
        return EngineInfo(
            name="embedded", capacity=decoder.slots, max_context=decoder.max_context, vocab_size=decoder.vocab_size
        )

    def submit(self, request: GenerationRequest) -> None:
        self._outstanding += len(request.samples)
        self._inbox.put(lambda decoder: decoder.submit(request))

    async def results(self) -> list[Result]:
        """At least one result. Raises EngineCrashedError when the thread has ended, after its last results."""
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        keys = frozenset(groups)
        await self._call(lambda decoder: decoder.abort(keys))

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsMismatchError, and then the old weights are as they were."""

        def load(decoder: SlotDecoder) -> list[Result]:
            check_tensors(decoder.parameters, tensors)
            decoder.load_weights(weights, tensors)
            return []

        await self._call(load)

    def load(self) -> EngineLoad:
        running = self._decoder.num_running if self._decoder else 0
        return EngineLoad(
            running=running,
            waiting=max(self._outstanding - running, 0),
            busy_s=self._busy_s,
            tokens=self._decoder.counters.tokens if self._decoder else 0,
        )

    async def close(self) -> None:
        """End the thread; what still runs is dropped. Raises EngineHungError when the thread does not end."""
        self._inbox.put(None)
        self._executor.shutdown(wait=False)
        if self._work is not None:
            _, pending = await asyncio.wait({asyncio.wrap_future(self._work)}, timeout=CLOSE_TIMEOUT_S)
            if pending:
                raise EngineHungError(f"the engine's thread did not end within {CLOSE_TIMEOUT_S:.0f} s")
        self._executor.shutdown(wait=True)  # the thread has nothing left to do but to end

    async def _call(self, command: _Command) -> None:
        """Run ``command`` in the thread between two steps; its error is raised here and does not end the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def answer(error: StreamError | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run(decoder: SlotDecoder) -> list[Result]:
            try:
                results = command(decoder)
            except StreamError as error:
                loop.call_soon_threadsafe(answer, error)
                return []
            loop.call_soon_threadsafe(answer, None)
            return results

        self._inbox.put(run)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._results.until(done)
        except TimeoutError:
            raise EngineHungError(f"the engine's thread did not answer within {CALL_TIMEOUT_S:.0f} s") from None

    def _deliver(self, results: list[Result]) -> None:
        self._outstanding -= sum(1 if isinstance(result, Completion) else len(result.samples) for result in results)
        self._results.put(*results)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _load(self) -> SlotDecoder:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        model = load_model(
            settings.directory,
            dtype=settings.dtype,
            device=resolve_device(settings.device),
            max_context=settings.max_context,
            trust_remote_code=settings.trust_remote_code,
        )
        check_memory(model, settings.slots)
        return SlotDecoder(
            model.forward,
            model.parameters,
            slots=settings.slots,
            max_context=model.max_context,
            vocab_size=model.vocab_size,
            weights=settings.weights,
            clock=self._clock,
        )

    def _serve(self, decoder: SlotDecoder, loop: asyncio.AbstractEventLoop) -> None:
        """Step while there is work, sleep on the inbox while there is none; returns on close."""
        while True:
            results: list[Result] = []
            while not self._inbox.empty() or not (decoder.has_work or results):
                more = self._obey(decoder)
                if more is None:
                    return
                results += more
            started_s = self._clock.now_s()
            results += decoder.step()
            self._busy_s += self._clock.now_s() - started_s
            if results:
                loop.call_soon_threadsafe(self._deliver, results)

    def _obey(self, decoder: SlotDecoder) -> list[Result] | None:
        """Run the next command, waiting for it; None means close.

        In a frame of its own: a command that outlived it would keep mapped weights alive.
        """
        command = self._inbox.get()
        return command(decoder) if command else None
