"""One inference server kept up: brought up, checked, watched, replaced, and always given the weights it has to hold.

Owns: the process if it is ours, the client, the held version. Never: samples. Invariant: ``bring_up`` returns only when
the server is what the run needs and holds the version that was last loaded here.
"""

from __future__ import annotations

import asyncio

import structlog

from transport.process.clock import Clock
from workers.errors import (
    EngineCrashedError,
    ModelError,
    ServerAnswerError,
    ServerUnavailableError,
    WeightsMismatchError,
)
from workers.generation.server.client import BASE_LABEL, ServerClient, ServerFacts, ServerKind, ServerSettings
from workers.generation.server.process import HEALTH_POLL_S, ServerProcess, wait_healthy
from workers.generation.server.weights import HeldWeights, WeightOrders
from workers.models.facts import ModelFacts, model_facts

log = structlog.get_logger(__name__)

MAX_STARTS = 3
"""Starts of a server in a row; then the worker ends, and what started it decides."""
HEALTH_CHECKS_PER_SILENCE = 3


async def check_server(client: ServerClient, kind: ServerKind, model: ModelFacts) -> ServerFacts:
    """Check the healthy server behind ``client``. What it does not say, the shapes of its tensors, the loader checks.

    Raises: ModelError: it serves another kind of model, or cannot take weights from us; as every call else.
    """
    facts = await client.facts()
    if facts.model_type != model.model_type:
        raise ModelError(
            f"{client.url} serves {facts.model!r} of type {facts.model_type!r}, "
            f"the run's model is of type {model.model_type!r}"
        )
    if facts.version not in kind.tested:
        log.warning(f"untested {kind.name} version", version=facts.version, tested=kind.tested, url=client.url)
    if kind.loader not in facts.loaders:
        raise ModelError(
            f"{client.url} cannot take new weights: install streamrl beside its {kind.name} and start it with "
            f"{kind.loader_option} {kind.loader}"
        )
    return facts


class ServerUpkeep:
    """The server of one engine."""

    def __init__(self, kind: ServerKind, settings: ServerSettings, clock: Clock) -> None:
        self._kind = kind
        self._settings = settings
        self._clock = clock
        self.process = None if settings.url else ServerProcess(kind, settings)
        where = self.process or settings
        self.client = kind.client(where.url, settings, where.key)
        self.model = ModelFacts(model_type="", vocab_size=0, max_context=0)
        self.facts = ServerFacts(version="", model="", model_type="", label=BASE_LABEL, kv_tokens=0)
        self.kv_use = 0.0
        self.answers = False  # as of the last probe
        self.restarts = 0
        self._held: HeldWeights | None = None
        self._orders = WeightOrders(self.client, same_host=self.process is not None)
        self._well_at_s = 0.0
        self._health_due_s = 0.0

    @property
    def label(self) -> str:
        """Of the weights that the server holds when all is well."""
        return str(self._held.weights) if self._held else BASE_LABEL

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response: what the model, the settings and the server's memory allow."""
        limits = (self.model.max_context, self._settings.max_context, self.facts.max_context, self.facts.kv_tokens)
        return min(limit for limit in limits if limit > 0)

    async def open(self) -> None:
        """Read the model's own files. Raises ModelError."""
        self.model = await asyncio.to_thread(model_facts, self._settings.directory)
        await self.client.open()

    async def bring_up(self) -> None:
        """Start the server, or wait for the one elsewhere; check it, and give it what it has to hold.

        Raises: ModelError: it will never do.  EngineCrashedError: it does not come up.
        """
        for attempt in range(1, MAX_STARTS + 1):
            try:
                await self._bring_up_once()
                return
            except (ServerUnavailableError, ServerAnswerError) as error:
                log.error("server not up", attempt=attempt, reason=str(error))
                if attempt == MAX_STARTS or self.process is None:
                    raise EngineCrashedError(f"no server: {error}") from error

    async def _bring_up_once(self) -> None:
        if self.process is not None:
            await self.process.stop()
            await self.process.start()
            await wait_healthy(self.client, self._settings.startup_s, self.process)
        else:
            await self._wait_elsewhere()
        self.facts = await check_server(self.client, self._kind, self.model)
        self._orders.vocab_size, self._orders.processes = self.model.vocab_size, self.facts.processes
        self._orders.label = self.facts.label
        try:
            await self._orders.look()
        except WeightsMismatchError as error:
            raise ModelError(f"{self.client.url} serves another model than the run's: {error}") from error
        if self._held is not None:
            await self._orders.pass_on(self._held)
        self._well()

    async def _wait_elsewhere(self) -> None:
        """Wait for a server that this worker does not start. Raises ServerUnavailableError."""
        reason = ""
        try:
            async with asyncio.timeout(self._settings.startup_s):
                while True:
                    try:
                        await self.client.recover()
                        break
                    except ServerUnavailableError as error:
                        reason = str(error)
                    await asyncio.sleep(HEALTH_POLL_S)
        except TimeoutError:
            raise ServerUnavailableError(self.client.url, reason or "no answer yet") from None
        await wait_healthy(self.client, self._settings.startup_s)

    async def replace(self, reason: str) -> None:
        """Bring up another one, because this one is lost. Raises as ``bring_up``."""
        log.error("server lost, starting it again" if self.process else "server lost, waiting for it", reason=reason)
        self.restarts += 1
        await self.bring_up()

    async def pass_on(self, held: HeldWeights) -> None:
        """Have the server take ``held``, which it holds from now on. Raises as WeightOrders.pass_on, and then what it
        has to hold is what it was.
        """
        await self._orders.pass_on(held)
        self.keep(held)

    def keep(self, held: HeldWeights) -> None:
        """A server that is brought up from now on gets ``held``."""
        former, self._held = self._held, held
        if former is not None and former is not held:
            former.close()

    # --- watch --------------------------------------------------------------------------------------------------------

    async def probe(self) -> str:
        """How the server is: why it is lost, or "". Also refreshes ``kv_use`` and ``answers``."""
        self.answers = False
        if self.process is not None and self.process.pid is None:
            return f"its process ended: {self.process.last_words()}"
        silence_s = self._settings.silence_s
        try:
            self.kv_use = await self.client.kv_use()
            if self._clock.now_s() >= self._health_due_s:
                await self._look_closer(silence_s)
        except (ServerUnavailableError, ServerAnswerError) as error:
            return str(error) if self._clock.now_s() - self._well_at_s > silence_s else ""
        self._well()
        return ""

    async def _look_closer(self, silence_s: float) -> None:
        """Whether its model still computes, and still with our weights: one that was started anew has its own."""
        await self.client.health(silence_s)
        self._health_due_s = self._clock.now_s() + silence_s / HEALTH_CHECKS_PER_SILENCE
        served = await self.client.label()
        if self._held is not None and served != self.label:
            self._well_at_s = float("-inf")
            raise ServerAnswerError(self.client.url, 0, f"it serves weights {served!r} instead of {self.label!r}")

    def _well(self) -> None:
        self.answers = True
        self._well_at_s = self._clock.now_s()

    async def close(self) -> None:
        await self.client.close()
        if self.process is not None:
            await self.process.stop()
        if self._held is not None:
            self._held.close()
