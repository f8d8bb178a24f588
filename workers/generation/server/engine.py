"""The generation engine that is an inference server: started by this worker, or run elsewhere.

    submit ───────► sender ─► one request a sample, while its gate is open ─► results, as each sample ends
    load_weights ─► gate closed ─► pause in place, load, label, continue ─► gate open
    watch ────────► the server died, hangs or forgot its weights ─► another one, with what it held ─► gate open

While the gate is closed nothing new is sent; what runs goes on, also through an update. When the server is lost, its
samples wait again and are sent to the next one.

Owns: what happens to the server when: updates, the watch. Never: the broker; samples (sender.py); the server's
life (upkeep.py). Invariant: the gate is open only while the server holds what was last loaded here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from transport.contracts.types import GroupId, WeightIdentity
from transport.errors import PeerUnavailableError, first_error
from transport.process.clock import Clock
from workers.errors import EngineHungError, ServerAnswerError, ServerUnavailableError, WeightsMismatchError
from workers.generation.engine import EngineInfo, EngineLoad, GenerationRequest, Result, ResultQueue
from workers.generation.server.client import UPDATE_S, ServerKind, ServerSettings
from workers.generation.server.sender import SampleSender, SenderCounters
from workers.generation.server.sglang import SGLANG
from workers.generation.server.upkeep import ServerUpkeep
from workers.generation.server.vllm import VLLM
from workers.generation.server.weights import HeldWeights, hold

if TYPE_CHECKING:
    import torch

POLL_S = 1.0
KINDS = {"sglang": SGLANG, "vllm": VLLM}
"""By the name in ``generation.engine``."""


class ServerEngine:
    """A GenerationEngine (engine.py). ``start`` before anything else, ``close`` at the end, also after an error."""

    def __init__(self, kind: ServerKind, settings: ServerSettings, clock: Clock) -> None:
        self._kind = kind
        self._settings = settings
        self.server = ServerUpkeep(kind, settings, clock)
        self._results = ResultQueue()
        self._sender = SampleSender(self.server, self._results, settings.slots, clock)
        self._updating = asyncio.Lock()
        self._changing = asyncio.Lock()  # of the server: its weights, or the server itself

    # --- the protocol -------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Bring the server up and check it. Raises ModelError; EngineCrashedError when it does not come up."""
        await self.server.open()
        await self.server.bring_up()
        self._results.serving = asyncio.create_task(self._serve(), name=self._kind.name)
        await self._results.until(self._sender.until_open())
        return self.info

    @property
    def info(self) -> EngineInfo:
        """Once it was started."""
        return EngineInfo(
            name=self._kind.name.lower(),
            capacity=self._sender.capacity,
            max_context=self.server.max_context,
            vocab_size=self.server.model.vocab_size,
        )

    @property
    def counters(self) -> SenderCounters:
        return self._sender.counters

    def submit(self, request: GenerationRequest) -> None:
        limits = {"max_context": self.server.max_context, "vocab_size": self.server.model.vocab_size}
        if reason := self._kind.refusal(request) or request.why_impossible(**limits):
            self._results.put(request.failure(request.samples, reason, retryable=False))
        else:
            self._sender.push(request)

    async def results(self) -> list[Result]:
        """At least one result. Raises EngineCrashedError when no server can be had any more."""
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        await self._sender.abort(frozenset(groups))

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsMismatchError, PeerUnavailableError (the server cannot get them): it serves what it served."""
        held = await asyncio.to_thread(hold, weights, tensors)
        try:
            async with asyncio.timeout(UPDATE_S + self._settings.startup_s), self._updating:
                await self._results.until(self._update(held))
        except TimeoutError:
            raise EngineHungError(f"the server did not take {weights} in time") from None

    def load(self) -> EngineLoad:
        return self._sender.load()

    async def close(self) -> None:
        """End the server if it is ours; what still runs is dropped."""
        if self._results.serving is not None:
            self._results.serving.cancel()
            await asyncio.wait({self._results.serving})
        await self.server.close()

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _update(self, held: HeldWeights) -> None:
        """Have the server take ``held``, if need be the next server."""
        await self._sender.close_gate()
        self._sender.remember(held.weights)
        try:
            async with self._changing:
                await self._sender.settle()
                await self.server.pass_on(held)
        except (WeightsMismatchError, PeerUnavailableError):
            held.close()
            self._sender.open_gate()
            raise
        except ServerAnswerError as error:
            held.close()
            self._sender.lose(str(error))
            raise WeightsMismatchError(f"the server did not take {held.weights}: {error}") from error
        except ServerUnavailableError as error:
            self.server.keep(held)  # the next one gets it at once
            self._sender.lose(str(error))
            await self._sender.until_open()
        else:
            self._sender.open_gate()

    # --- watch --------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Watch the server until the engine is closed. Raises what no server can be had for."""
        slots = self._settings.slots
        try:
            async with asyncio.TaskGroup() as group:
                self._sender.start(group, min(slots, self.server.facts.slots or slots))
                await self._watch()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None

    async def _watch(self) -> None:
        sender = self._sender
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await sender.wake.wait()
            sender.wake.clear()
            if not sender.lost and sender.is_open:
                reason = await self.server.probe()
                if reason and sender.is_open:  # during an update it has other things to do
                    sender.lose(reason)
                sender.trust()
                sender.fit()
            if sender.lost:
                await self._replace()

    async def _replace(self) -> None:
        """Another server for this one; its samples are sent to that."""
        await self._sender.withdraw()
        async with self._changing:
            await self.server.replace(self._sender.lost)
        self._sender.renew()
