"""The generation engine that lives in the worker's process: one thread steps the slot decoder.

Owns: the thread, and everything that goes to it and comes back. Never: the broker; which samples run (``slots.py``).
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

import torch

from transport.contracts.settings import GenerationSettings
from transport.contracts.types import GroupId, WeightIdentity
from transport.process.clock import Clock
from workers.errors import EngineHungError, StreamError
from workers.generation.embedded.model_loading import check_memory, load_model, resolve_device
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
from workers.weights.pull import check_tensors

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
