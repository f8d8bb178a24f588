"""The generation engine that is an inference server: started by this worker, or run elsewhere.

    submit ───────► sender ─► one request a sample, while its gate is open ─► results, as each sample ends
    load_weights ─► gate closed ─► pause in place, load, label, continue ─► gate open
    watch ────────► the server died, hangs or forgot its weights ─► another one, with what it held ─► gate open

Owns: what happens to the server when: updates, the watch. Never: the broker; samples (sender.py); the server's
life (upkeep.py). Invariant: the gate is open only while the server holds what was last loaded here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import structlog

from transport.contracts.llms import BF16
from transport.contracts.types import GroupId, WeightIdentity
from transport.errors import PeerUnavailableError, first_error
from transport.process.clock import Clock
from workers.errors import (
    EngineHungError,
    ServerAnswerError,
    ServerUnavailableError,
    WeightsMismatchError,
    WeightsSpoiledError,
)
from workers.generation.engine import (
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Progress,
    Result,
    ResultQueue,
    SampleKey,
    StopStrings,
)
from workers.generation.server.client import UPDATE_S, ServerKind, ServerSettings
from workers.generation.server.sender import SampleSender
from workers.generation.server.sglang import SGLANG
from workers.generation.server.upkeep import HeldWeights, ServerUpkeep, hold, hold_copy
from workers.generation.server.vllm import VLLM

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

POLL_S = 1.0
KINDS = {"sglang": SGLANG, "vllm": VLLM}
"""By the name in ``generation.engine``."""


class WholeModel(Protocol):
    """Tensors by name, each made when it is asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def whole(self, name: str) -> torch.Tensor: ...

    def close(self) -> None: ...


Complete = Callable[[Mapping[str, "torch.Tensor"]], WholeModel]
"""Makes a model of what came. Raises WeightsMismatchError."""


class ServerEngine:
    """A GenerationEngine (engine.py). ``start`` before anything else, ``close`` at the end, also after an error."""

    def __init__(
        self, kind: ServerKind, settings: ServerSettings, clock: Clock, *, complete: Complete | None = None
    ) -> None:
        """complete: where what comes of new weights is not all of a model."""
        self._kind = kind
        self._complete = complete
        self._settings = settings
        self.server = ServerUpkeep(kind, settings, clock)
        self._results = ResultQueue()
        self.sender = SampleSender(
            self.server, self._results, settings.slots, clock, keeps_partial=settings.keeps_partial
        )
        self._updating = asyncio.Lock()
        self._changing = asyncio.Lock()  # of the server: its weights, or the server itself

    async def start(self) -> EngineInfo:
        """Bring the server up and check it. Raises ModelError; EngineCrashedError when it does not come up."""
        await self.server.open()
        await self.server.bring_up()
        self.sender.stops = await asyncio.to_thread(StopStrings.of, self._settings.directory, self._settings.stop)
        self._results.serving = asyncio.create_task(self._serve(), name=self._kind.name)
        await self._results.until(self.sender.gate.wait())
        return self.info

    @property
    def info(self) -> EngineInfo:
        """Once it was started."""
        return EngineInfo(
            name=self._kind.name.lower(),
            capacity=self.sender.capacity,
            max_context=self.server.max_context,
            vocab_size=self.server.model.vocab_size,
            kv_tokens=self.server.facts.kv_tokens,
        )

    def submit(self, request: GenerationRequest) -> None:
        limits = {"max_context": self.server.max_context, "vocab_size": self.server.model.vocab_size}
        if reason := self._kind.refusal(request) or request.why_impossible(**limits):
            self._results.put(request.failure(request.samples, reason, retryable=False))
        else:
            self.sender.push(request)

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        await self.sender.abort(frozenset(groups))

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        return self.sender.progress(known)

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsMismatchError, PeerUnavailableError (the server cannot get them): it serves what it served."""
        held = await asyncio.to_thread(self._hold, weights, tensors)
        try:
            async with asyncio.timeout(UPDATE_S + self._settings.startup_s), self._updating:
                await self._results.until(self._update(held))
        except TimeoutError:
            raise EngineHungError(f"the server did not take {weights} in time") from None

    async def use_full_precision(self, reason: str) -> None:
        """Its server is started again without fp8, with the weights that it holds; what runs there runs again. A load
        that follows waits for it."""
        if self._settings.fp8:
            await self._results.until(self._leave_fp8(reason))

    async def _leave_fp8(self, reason: str) -> None:
        async with self._changing:  # not while one is brought up, which would have been told the old settings
            log.warning("no fp8 from now on: the server is started again", reason=reason)
            self._settings = replace(self._settings, fp8=BF16)
            self.server.use(self._settings)
            self.sender.lose(reason, meant=True)

    def load(self) -> EngineLoad:
        return self.sender.load()

    async def close(self) -> None:
        """End the server if it is ours; what still runs is dropped."""
        await self._results.end_serving()
        await self.server.close()

    def _hold(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> HeldWeights:
        """What the server is to have, all of it, whatever of it came."""
        if self._complete is None:
            return hold(weights, tensors)
        import torch

        dtype = self._settings.dtype
        with closing(self._complete(tensors)) as model:
            kinds = [(name, shape, dtype) for name, shape in model.shapes.items()]
            return hold_copy(weights, kinds, lambda name: model.whole(name).to(getattr(torch, dtype)))

    async def _update(self, held: HeldWeights) -> None:
        """Have the server take ``held``, if need be the next server."""
        await self.sender.gate.wait()
        self.sender.gate.clear()  # what runs goes on
        self.sender.remember(held.weights)
        try:
            async with self._changing:
                await self.sender.settle()
                await self.server.pass_on(held)
        except (WeightsMismatchError, PeerUnavailableError):
            held.close()
            self.sender.open_gate()
            raise
        except ServerAnswerError as error:
            held.close()
            self.sender.lose(str(error))
            raise WeightsSpoiledError(f"the server did not take {held.weights}: {error}") from error
        except ServerUnavailableError as error:
            self.server.keep(held)  # the next one gets it at once
            self.sender.lose(str(error))
            await self.sender.gate.wait()
        else:
            self.sender.open_gate()

    async def _serve(self) -> None:
        """Watch the server until the engine is closed. Raises what no server can be had for."""
        slots = self._settings.slots
        try:
            async with asyncio.TaskGroup() as group:
                self.sender.start(group, min(slots, self.server.facts.slots or slots))
                await self._watch()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None

    async def _watch(self) -> None:
        sender = self.sender
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await sender.wake.wait()
            sender.wake.clear()
            if not sender.lost and sender.gate.is_set():
                reason = await self.server.probe()
                if reason and sender.gate.is_set():  # during an update it has other things to do
                    sender.lose(reason)
                sender.trust()
                sender.fit()
            if sender.lost:
                await sender.withdraw()
                async with self._changing:
                    await self.server.replace(sender.lost)
                sender.renew()
