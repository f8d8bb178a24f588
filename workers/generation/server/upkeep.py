"""One SGLang server kept up: brought up, checked, watched, replaced, and always given the weights it has to hold.

Owns: the process if it is ours, the client, the held version. Never: samples. Invariant: ``bring_up`` returns only when
the server is what the run needs and holds the version that was last loaded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import structlog

from transport.process.clock import Clock
from workers.errors import (
    EngineCrashedError,
    ModelError,
    ServerAnswerError,
    ServerUnavailableError,
    WeightsMismatchError,
)
from workers.generation.server.check import ModelFacts, check_server, model_facts
from workers.generation.server.order import LOADER
from workers.generation.server.process import (
    DEFAULT_COMMAND,
    HEALTH_POLL_S,
    LaunchSettings,
    ServerProcess,
    wait_healthy,
)
from workers.generation.server.sglang_http import BASE_LABEL, Load, ServerInfo, SglangClient
from workers.generation.server.weights import HeldWeights, OrderDesk, make_ready

log = structlog.get_logger(__name__)

MAX_STARTS = 3
"""Starts of a server in a row; then the worker ends, and whoever started it decides."""
HEALTH_CHECKS_PER_SILENCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """What an engine of this kind is made of.

    directory: the model.  log: where a server of our own writes.  url, key: of a server elsewhere; empty: our own.
    command: program and first arguments of our own server.  slots: samples at once.  max_context: tokens, 0: the
    model's.  startup_s: from start to healthy.  silence_s: without an answer for so long it hangs.  request_s: of one
    sample.  environment: variables that our own server needs.
    """

    directory: Path
    log: Path
    url: str = ""
    key: str = ""
    command: tuple[str, ...] = DEFAULT_COMMAND
    slots: int = 64
    dtype: str = "bfloat16"
    max_context: int = 0
    trust_remote_code: bool = False
    startup_s: float = 300.0
    silence_s: float = 30.0
    request_s: float = 300.0
    environment: ClassVar[Mapping[str, str]] = {}
    default_command: ClassVar[tuple[str, ...]] = DEFAULT_COMMAND

    def client(self, url: str, key: str) -> SglangClient:
        """For the server at ``url``."""
        return SglangClient(url, connections=self.slots, request_s=self.request_s, key=key)

    def launch(self) -> LaunchSettings:
        """How our own server is started."""
        return LaunchSettings(
            command=self.command,
            arguments=self.arguments(),
            log=self.log,
            environment=self.environment,
            key_option="api-key",
        )

    def arguments(self) -> list[str]:
        """Of our own server, after ``command``."""
        arguments = [
            *("--model-path", str(self.directory)),
            *("--dtype", self.dtype),
            *("--max-running-requests", str(self.slots)),
            *("--custom-weight-loader", LOADER),
            "--enable-priority-scheduling",
            "--disable-priority-preemption",  # it would recompute what runs
            "--skip-tokenizer-init",  # token ids in, token ids out
        ]
        arguments += ["--context-length", str(self.max_context)] if self.max_context else []
        return arguments + (["--trust-remote-code"] if self.trust_remote_code else [])


class ServerUpkeep:
    """The server of one engine."""

    def __init__(self, settings: SglangSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.process = None if settings.url else ServerProcess(settings.launch())
        where = self.process or settings
        self.client = settings.client(where.url, where.key)
        self.model = ModelFacts(model_type="", vocab_size=0, max_context=0)
        self.info = ServerInfo(version="", max_total_num_tokens=0)
        self.load = Load()
        self.answers = False  # as of the last probe
        self.restarts = 0
        self._held: HeldWeights | None = None
        self._desk = OrderDesk(self.client, same_host=self.process is not None)
        self._well_at_s = 0.0
        self._health_due_s = 0.0

    @property
    def label(self) -> str:
        """Of the weights that the server holds when all is well."""
        return str(self._held.weights) if self._held else BASE_LABEL

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response: what the model, the settings and the server's memory allow."""
        limits = (self.model.max_context, self._settings.max_context, self.info.context_length or 0)
        return min(limit for limit in (*limits, self.info.max_total_num_tokens) if limit > 0)

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
        self.info = await check_server(self.client, self.model)
        self._desk.vocab_size, self._desk.ranks = self.model.vocab_size, self.info.tp_size
        self._desk.label = (await self.client.model_info()).weight_version
        try:
            await self._desk.look()
        except WeightsMismatchError as error:
            raise ModelError(f"{self.client.url} serves another model than the run's: {error}") from error
        if self._held is not None:
            await self._desk.pass_on(self._held)
        self._well()

    async def _wait_elsewhere(self) -> None:
        """Wait for a server that somebody else starts. Raises ServerUnavailableError."""
        reason = ""
        try:
            async with asyncio.timeout(self._settings.startup_s):
                while True:
                    try:
                        await make_ready(self.client)
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
        """Have the server take ``held``, which it holds from now on. Raises as OrderDesk.pass_on, and then what it
        has to hold is what it was.
        """
        await self._desk.pass_on(held)
        self.keep(held)

    def keep(self, held: HeldWeights) -> None:
        """A server that is brought up from now on gets ``held``."""
        former, self._held = self._held, held
        if former is not None and former is not held:
            former.close()

    # --- watch --------------------------------------------------------------------------------------------------------

    async def probe(self) -> str:
        """How the server is: why it is lost, or "". Also refreshes ``load`` and ``answers``."""
        self.answers = False
        if self.process is not None and self.process.pid is None:
            return f"its process ended: {self.process.last_words()}"
        silence_s = self._settings.silence_s
        try:
            self.load = await self.client.load()
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
        served = (await self.client.model_info()).weight_version
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
