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
import os
import queue
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from transport.contracts.settings import GenerationSettings, LoraSettings
from transport.contracts.types import GroupId, WeightIdentity
from transport.process.clock import Clock
from transport.process.gpus import gpu_share
from transport.process.logs import get_logger
from workers.errors import EngineHungError, ModelError, StreamError
from workers.generation.embedded.drafts import SaidBefore
from workers.generation.embedded.forward import FusedForward, LoadedModel, ModuleForward, can_fuse
from workers.generation.embedded.slots import Drafting, SlotDecoder
from workers.generation.engine import (
    BASE_WEIGHTS,
    NO_STOPS,
    Completion,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Progress,
    Result,
    ResultQueue,
    SampleKey,
    StopStrings,
)
from workers.models import check_model_dir, check_rope, choose_device, multiplies_bf16
from workers.weights.adapters import AdaptedWeights, adapted_weights
from workers.weights.names import names_in_files
from workers.weights.pull import Renamed, check_tensors, shown_names

log = get_logger(__name__)

CPU_MAX_CONTEXT = 2048
"""Tokens; the default limit on a CPU, where longer samples take minutes and KV memory competes with everything else."""
CLOSE_TIMEOUT_S = 30.0
"""A step takes well below a second; the longest thing the thread may be in is a prefill or a copy of the weights."""
CALL_TIMEOUT_S = 120.0
"""For an abort or new weights, which wait for the step that runs: minutes mean that the device hangs."""

_Command = Callable[[SlotDecoder], list[Result]]


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int = 0,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal language model for generation.

    Args:   dtype: of its weights. It computes with the same values in float32 where the hardware has no bf16.
            max_context: tokens of prompt + response; 0: what the model allows, at most CPU_MAX_CONTEXT on a CPU.
    Raises: ModelError: directory or file missing, broken, of a kind that cannot run here; it says which and what to do.
    """
    check_model_dir(directory)
    model = _placed(_read(directory, dtype, trust_remote_code), device).eval()
    if dtype == torch.bfloat16 and not multiplies_bf16(device):
        log.info("computes in float32: this hardware does not multiply bfloat16", model=str(directory))
        model = model.float()
    allowed = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or CPU_MAX_CONTEXT)
    if max_context > allowed:
        raise ModelError(f"generation.max_context is {max_context}, but the model allows {allowed} tokens")
    limit = max_context or (min(allowed, CPU_MAX_CONTEXT) if device.type == "cpu" else allowed)
    check_rope(model.config.get_text_config().to_dict(), limit)  # samples of all slots are one call
    forward = FusedForward(model, max_context=limit) if can_fuse(model) else ModuleForward(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    in_files = names_in_files(model, parameters)
    return LoadedModel(
        forward=forward,
        parameters=parameters,
        names={where: name for name, where in in_files.items() if where != name},
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


def _placed(model: Any, device: torch.device) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise ModelError(f"the model does not fit into the memory of {device} (generation.device): {reason}") from error


def check_memory(model: LoadedModel, slots: int, kv_tokens: int = 0) -> None:
    """Check that KV memory of ``slots`` full slots, or of ``kv_tokens`` tokens, fits now, not in the middle of a run.
    Raises ModelError.
    """
    context = model.max_context
    if 0 < kv_tokens < context:
        raise ModelError(
            f"generation.kv_tokens is {kv_tokens}, and one sample may take {context} tokens: raise it to that, or set "
            "generation.max_context to what prompt and response need"
        )
    parameter = next(iter(model.parameters.values()))
    what, instead = f"{slots} slots of {context} tokens", "set generation.kv_tokens, or lower generation.slots or"
    tokens = slots * context
    if 0 < kv_tokens < tokens:
        what, instead, tokens = f"{kv_tokens} tokens", "lower generation.kv_tokens or", kv_tokens
    needed = model.forward.kv_shape.num_bytes(slots, tokens, parameter.dtype)
    available = _free_bytes(parameter.device)
    if needed > available:
        raise ModelError(
            f"{what} need {needed / 1e9:.1f} GB of KV memory, and {available / 1e9:.1f} GB are free: {instead} "
            "generation.max_context"
        )


def _free_bytes(device: torch.device) -> int:
    """Of a GPU: of what this process may use of it."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # what fusing the layers left there is free, too
    free, total = torch.cuda.mem_get_info(device)
    return min(free, int(total * gpu_share(os.environ)) - torch.cuda.memory_reserved(device))


def make_decoder(
    model: LoadedModel,
    *,
    slots: int,
    clock: Clock,
    stops: StopStrings = NO_STOPS,
    drafts: int = 0,
    draft_memory: int = 0,
    kv_tokens: int = 0,
) -> SlotDecoder:
    """drafts: tokens drafted for a sample and step, at most; where there are any, steps are timed first."""
    decoder = SlotDecoder(model, slots=slots, weights=BASE_WEIGHTS, clock=clock, stops=stops, kv_tokens=kv_tokens)
    if drafts:
        started_s = clock.now_s()
        step_s = decoder.measure_steps(drafts)
        decoder.drafting = Drafting(said=SaidBefore(draft_memory), max_tokens=drafts, step_s=step_s)
        took_s = clock.now_s() - started_s
        shown = {int(size): round(1000 * s, 2) for size, s in zip(step_s.tokens, step_s.seconds, strict=True)}
        log.info("drafts: steps timed", took_s=round(took_s, 2), ms_by_tokens=shown)
    return decoder


class EmbeddedEngine:
    """A GenerationEngine (engine.py). ``start`` before anything else, ``close`` at the end, also after an error."""

    def __init__(
        self,
        settings: GenerationSettings,
        directory: Path,
        clock: Clock,
        *,
        trust_remote_code: bool = False,
        lora: LoraSettings | None = None,
    ) -> None:
        """lora: where its weights come as adapters alone; a copy of what they change is then kept of the base."""
        self._settings = settings
        self._directory = directory
        self._lora = lora
        self._base: dict[str, torch.Tensor] = {}
        self._names: Mapping[str, str] = {}
        self._trust_remote_code = trust_remote_code
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._decoder: SlotDecoder | None = None
        self._work: Future[Any] | None = None  # what the thread does: first loading, then serving
        self._results = ResultQueue()
        self._outstanding = 0
        self._busy_s = 0.0

    async def start(self) -> EngineInfo:
        """Load the model and start the thread. Raises ModelError."""
        loop = asyncio.get_running_loop()
        self._work = self._executor.submit(self._load)
        decoder: SlotDecoder = await asyncio.wrap_future(self._work)
        self._decoder = decoder
        self._work = self._executor.submit(self._serve, decoder, loop)
        self._results.serving = asyncio.wrap_future(self._work)
        return EngineInfo(
            name="embedded",
            capacity=decoder.slots,
            max_context=decoder.max_context,
            vocab_size=decoder.vocab_size,
            kv_tokens=decoder.kv_tokens,
            kv_padded=True,
        )

    def submit(self, request: GenerationRequest) -> None:
        self._outstanding += len(request.samples)
        self._inbox.put(lambda decoder: decoder.submit(request))

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        await self._call(lambda decoder: decoder.abort(frozenset(groups)))

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        found: list[Progress] = []

        def look(decoder: SlotDecoder) -> list[Result]:
            found.extend(decoder.progress(known))
            return []

        await self._call(look)
        return found

    async def use_full_precision(self, reason: str) -> None:
        """It holds nothing in fp8."""

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsMismatchError, and then the old weights are as they were."""

        tensors = Renamed(tensors, self._names) if self._names else tensors

        def load(decoder: SlotDecoder) -> list[Result]:
            if self._lora is None:
                check_tensors(decoder.parameters, tensors)
                decoder.load_weights(weights, tensors)
            else:
                decoder.load_weights(weights, self._adapted(decoder, tensors, self._lora))
            return []

        await self._call(load)

    def _adapted(
        self, decoder: SlotDecoder, adapters: Mapping[str, torch.Tensor], lora: LoraSettings
    ) -> AdaptedWeights:
        """The model's weights that change. Raises WeightsMismatchError."""
        for name in adapted_weights(adapters):
            if name in decoder.parameters and name not in self._base:
                self._base[name] = decoder.parameters[name].detach().clone()
        device = next(iter(decoder.parameters.values())).device
        here = {name: tensor.to(device) for name, tensor in adapters.items()}
        return AdaptedWeights(self._base, here, lora)

    def load(self) -> EngineLoad:
        if (decoder := self._decoder) is None:
            return EngineLoad(running=0, waiting=self._outstanding, busy_s=0.0, tokens=0)
        running = decoder.num_running
        return EngineLoad(
            running=running,
            waiting=max(self._outstanding - running, 0),
            busy_s=self._busy_s,
            tokens=decoder.tokens,
            cached_tokens=decoder.reused_tokens,
            kv_use=decoder.held_tokens / decoder.kv_tokens if decoder.kv_tokens else 0.0,
            drafted_tokens=decoder.drafted,
            accepted_tokens=decoder.accepted,
            retracted_samples=decoder.num_retracted,
        )

    async def close(self) -> None:
        """End the thread; what still runs is dropped. Raises EngineHungError when the thread does not end."""
        self._inbox.put(None)
        self._executor.shutdown(wait=False)
        if self._work is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):  # what ended it has been said to whoever waited for it
                    await asyncio.gather(asyncio.wrap_future(self._work), return_exceptions=True)
            except TimeoutError:
                raise EngineHungError(f"the engine's thread did not end within {CLOSE_TIMEOUT_S:.0f} s") from None
        self._executor.shutdown(wait=True)  # the thread has nothing left to do but to end

    async def _call(self, command: _Command) -> None:
        """Run ``command`` in the thread between two steps; its error is raised here and does not end the thread."""
        done: Future[None] = Future()

        def run(decoder: SlotDecoder) -> list[Result]:
            if not done.set_running_or_notify_cancel():
                return []  # its caller has gone, and with it, perhaps, the memory of new weights
            try:
                results = command(decoder)
            except StreamError as error:
                done.set_exception(error)
                return []
            done.set_result(None)
            return results

        self._inbox.put(run)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._results.until(asyncio.wrap_future(done))
        except TimeoutError:
            raise EngineHungError(f"the engine's thread did not answer within {CALL_TIMEOUT_S:.0f} s") from None

    def _deliver(self, results: list[Result], told: list[Callable[[], None]]) -> None:
        for tell in told:
            tell()
        self._outstanding -= sum(1 if isinstance(result, Completion) else len(result.samples) for result in results)
        self._results.put(*results)

    def _load(self) -> SlotDecoder:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        model = load_model(
            self._directory,
            dtype=getattr(torch, settings.dtype),  # "bfloat16" or "float32": the settings were checked
            device=choose_device(settings.device, "generation.device"),
            max_context=settings.max_context,
            trust_remote_code=self._trust_remote_code,
        )
        check_memory(model, settings.slots, settings.kv_tokens)
        self._names = model.names
        stops = StopStrings.of(self._directory, settings.stop)
        return make_decoder(
            model,
            slots=settings.slots,
            clock=self._clock,
            stops=stops,
            drafts=settings.drafts,
            draft_memory=settings.draft_memory,
            kv_tokens=settings.kv_tokens,
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
            told, decoder.told = decoder.told, []
            if results or told:
                loop.call_soon_threadsafe(self._deliver, results, told)

    def _obey(self, decoder: SlotDecoder) -> list[Result] | None:
        """Run the next command, waiting for it; None means close.

        In a frame of its own: a command that outlived it would keep mapped weights alive.
        """
        command = self._inbox.get()
        return command(decoder) if command else None
