"""One inference server kept up: started, checked, watched, replaced, and always given the weights it has to hold.

Owns: the process group if it is ours, its way in and its log; the client; the held version. Never: samples.
Invariant: ``bring_up`` returns only when the server is what the run needs and holds the version that was last loaded
here, which was verified and never changes. A server of ours ends with its worker, whatever ends that (the kernel sends
the signal); two never share a port of ours; and no other user of this machine drives one, because it listens on a
socket in a directory that is closed to them, or asks for a key that stands on no command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from transport.contracts.messages import WeightManifest
from transport.contracts.types import WeightIdentity
from transport.process.clock import Clock
from transport.process.programs import ending_with_this_process
from transport.tensors.base import choose_sources, host_id
from transport.tensors.manifest import checksum, digest_tensors, layout_bytes, plan_layout, with_checksums
from transport.tensors.shm import held_address
from workers.errors import (
    EngineCrashedError,
    EngineHungError,
    ModelError,
    ServerAnswerError,
    ServerUnavailableError,
    WeightsMismatchError,
)
from workers.generation.server.client import BASE_LABEL, ServerClient, ServerFacts, ServerKind, ServerSettings
from workers.generation.server.loader import LoadOrder
from workers.models import ModelFacts, model_facts
from workers.weights.pull import PulledTensors

if TYPE_CHECKING:
    import torch


log = structlog.get_logger(__name__)

HEALTH_POLL_S = 0.25
MAX_STARTS = 3
"""Starts of a server in a row; then the worker ends, and what started it decides."""
HEALTH_CHECKS_PER_SILENCE = 3
STOP_S = 10.0
LAST_LINES, LAST_BYTES = 5, 4096
PACKAGES = Path(__file__).parents[3]
"""Where ours are."""


# --- the version that it has to hold ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class HeldWeights:
    """weights: what tokens are labelled with.  manifest: of the bytes behind ``fd``, which is -1 once they are gone."""

    weights: WeightIdentity
    manifest: WeightManifest
    fd: int

    def offer(self, *, same_host: bool) -> WeightManifest:
        """For a server here, which maps what is held, or for one elsewhere, which pulls, and may be here after all."""
        held = held_address(self.fd)
        if same_host:
            return replace(self.manifest, sources=(held,), parts=())
        return replace(self.manifest, sources=(held, *self.manifest.sources))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def hold(weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> HeldWeights:
    """Keep ``tensors``, which may go when this returns: a version in one segment of shared memory by its open file
    (its name may go, its bytes stay), one that was received by the memory that it is in, anything else by a copy in
    anonymous memory, for which it blocks. What came in parts is one range there, with the same digest.
    """
    if not isinstance(tensors, PulledTensors):
        kinds = [(name, one.shape, str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()]
        return hold_copy(weights, kinds, tensors.__getitem__)
    fd = tensors.received.keep() if tensors.received else _shared_file(tensors.manifest)
    if fd is None:
        fd = os.memfd_create(str(weights), os.MFD_CLOEXEC)
        os.ftruncate(fd, tensors.manifest.total_bytes)
        for offset, data in tensors.bytes_at():
            _write(fd, offset, data)
    return HeldWeights(weights=weights, manifest=tensors.manifest, fd=fd)


def _shared_file(manifest: WeightManifest) -> int | None:
    """The manifest's segment on this host, opened."""
    for address in choose_sources(manifest.sources, manifest.host):
        if address.scheme == "shm":
            try:
                return os.open(Path("/") / address.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # superseded since it was mapped: the copy of the mapping has to do
                return None
    return None


def hold_copy(
    weights: WeightIdentity, kinds: Iterable[tuple[str, Sequence[int], str]], tensor: Callable[[str], torch.Tensor]
) -> HeldWeights:
    """Keep a copy of tensors that are made when they are asked for, each once. kinds: (name, shape, dtype) of each."""
    import torch

    layout = plan_layout(kinds)
    checksums: list[str] = []
    with ExitStack() as stack:
        fd = os.memfd_create(str(weights), os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, layout_bytes(layout))
        for spec in layout:
            data = tensor(spec.name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            _write(fd, spec.offset, data)
            checksums.append(checksum(data))
        stack.pop_all()
    specs = with_checksums(layout, checksums)
    manifest = WeightManifest(
        weights=replace(weights, digest=digest_tensors(specs)),
        tensors=specs,
        total_bytes=layout_bytes(specs),
        sources=(),
        host=host_id(),
    )
    return HeldWeights(weights=weights, manifest=manifest, fd=fd)


def _write(fd: int, offset: int, data: memoryview) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        offset, data = offset + written, data[written:]


# --- the process of a server of our own -------------------------------------------------------------------------------


def link_packages(directory: Path) -> Path:
    """Make ``directory`` one that holds what the loader imports of ours, and nothing else. Returns it, absolute.

    Installed, our packages lie beside our torch and transformers, and a server with its own must not find those.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("transport", "workers"):
        fresh = directory / f".{name}-{os.getpid()}"
        fresh.symlink_to(PACKAGES / name)
        fresh.replace(directory / name)
    return directory.absolute()


class ServerProcess:
    """One server of this worker's own, started as often as it takes: url, port and key stay, so that one client serves
    all.
    """

    def __init__(self, kind: ServerKind, settings: ServerSettings) -> None:
        self._kind = kind
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        temporary = Path(tempfile.gettempdir())
        if len(os.fsencode(temporary)) > 50:  # the address of a socket has room for 107 bytes
            temporary = Path("/tmp")
        self._private = temporary / f"streamrl-server-{os.getpid()}-{secrets.token_hex(8)}"
        if kind.socket_option:
            path = self._private / "socket"
            self.url, self._listening = f"unix:{path}", (kind.socket_option, str(path))
        else:
            with socket.socket() as probe:  # of a port that nothing listens on now
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            self.url, self._listening = f"http://127.0.0.1:{port}", ("--host", "127.0.0.1", "--port", str(port))
        self.key = secrets.token_hex(24)

    @property
    def pid(self) -> int | None:
        """Of the living process; it leads its process group."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def use(self, settings: ServerSettings) -> None:
        """What the next start is told."""
        self._settings = settings

    async def start(self) -> None:
        """Start it; it is healthy much later. Raises ModelError for a command that cannot be run."""
        kind, settings = self._kind, self._settings
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        self._private.mkdir(mode=0o700)
        argv = self._with_key([*settings.command, *kind.arguments(settings)])
        argv += self._listening
        packages = link_packages(settings.log.parent / "server-packages")
        environment = {**os.environ, **kind.environment} | ({kind.key_variable: self.key} if kind.key_variable else {})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH", ""))))
        with settings.log.open("ab") as output:
            os.fchmod(output.fileno(), 0o600)  # a server may write there what it was started with
            self._log_start = output.tell()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=ending_with_this_process(),
                )
            except OSError as error:
                reason = error.strerror or str(error)
                raise ModelError(
                    f"the server cannot be started with {argv[0]!r}: {reason}; see generation.server_command"
                ) from error
        log.info("server started", pid=self._process.pid, url=self.url, log=str(settings.log))

    def _with_key(self, argv: list[str]) -> list[str]:
        """``argv`` with a ``--config`` that holds the key, and what the user's own ``--config`` has, if there is one.

        Raises ModelError: a key or a file of the user's that cannot be used.
        """
        if any(argument.partition("=")[0] == "--api-key" for argument in argv):
            raise ModelError("leave --api-key out of generation.server_args: the worker gives its own server a key")
        if not self._kind.key_option:
            return argv
        theirs = ""
        if "--config" in argv[:-1]:
            at = argv.index("--config")
            try:
                theirs = Path(argv[at + 1]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"the server's --config {argv[at + 1]} cannot be read: {error}") from error
            del argv[at : at + 2]
        path = self._private / "config.yaml"
        path.touch(mode=0o600)
        path.write_text(f'{theirs.rstrip()}\n{self._kind.key_option}: "{self.key}"\n', encoding="utf-8")
        return [*argv, "--config", str(path)]

    async def stop(self) -> None:
        """End it and everything it started, also what hangs. Raises EngineHungError when the kernel cannot."""
        shutil.rmtree(self._private, ignore_errors=True)
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it has nothing to save, and its own goodbye takes seconds
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            raise EngineHungError(f"server {process.pid} did not end within {STOP_S:.0f} s of SIGKILL") from None

    def last_words(self) -> str:
        """The end of what it wrote since it was started, and where the rest is."""
        path = self._settings.log
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(self._log_start, path.stat().st_size - LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
            return " | ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip()) + f" (all of it: {path})"
        return f"see {path}"


async def wait_healthy(client: ServerClient, deadline_s: float, process: ServerProcess | None = None) -> None:
    """Wait until the server computes. process: our own, watched meanwhile; a server elsewhere is freed first of what a
    worker that died in an update left there.

    Raises: ServerUnavailableError: not within ``deadline_s``, or the process ended before.  ServerAnswerError: a server
            elsewhere refuses us.
    """
    reason, is_free = "no answer yet", process is not None
    try:
        async with asyncio.timeout(deadline_s):
            while process is None or process.pid is not None:
                try:
                    if not is_free:
                        await client.recover()
                        is_free = True
                    await client.health(deadline_s)
                    return
                except ServerUnavailableError as error:
                    reason = str(error)
                except ServerAnswerError as error:
                    if not is_free:
                        raise
                    reason = str(error)
                await asyncio.sleep(HEALTH_POLL_S)
    except TimeoutError:
        raise ServerUnavailableError(client.url, f"not healthy within {deadline_s:.0f} s: {reason}") from None
    raise ServerUnavailableError(client.url, f"its process ended: {process.last_words()}")


# --- the server, ours or elsewhere ------------------------------------------------------------------------------------


class ServerUpkeep:
    """The server of one engine. facts, kv_use, answers: as of the last look at it."""

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
        self.answers = False
        self.restarts = 0
        self.trouble = ""
        """What is wrong while it is brought up again, for people."""
        self._held: HeldWeights | None = None
        self._served = ""  # the label that it gives to tokens
        self._num_orders = 0
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

    def use(self, settings: ServerSettings) -> None:
        """A server of our own that is brought up from now on is told these."""
        self._settings = settings
        if self.process is not None:
            self.process.use(settings)

    async def open(self) -> None:
        """Read the model's own files. Raises ModelError."""
        self.model = await asyncio.to_thread(model_facts, self._settings.directory)
        await self.client.open()

    async def close(self) -> None:
        await self.client.close()
        if self.process is not None:
            await self.process.stop()
        if self._held is not None:
            self._held.close()

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
        await self._check()
        if self._held is not None:
            await self._order(self._held)
        self._well()

    async def _check(self) -> None:
        """Raises ModelError: it serves another kind of model, or cannot take weights from us. What it does not say, the
        shapes of its tensors, the loader checks.
        """
        kind, url = self._kind, self.client.url
        self.facts = facts = await self.client.facts()
        if facts.model_type != self.model.model_type:
            raise ModelError(
                f"{url} serves {facts.model!r} of type {facts.model_type!r}, "
                f"the run's model is of type {self.model.model_type!r}"
            )
        if facts.version not in kind.tested:
            log.warning(f"untested {kind.name} version", version=facts.version, tested=kind.tested, url=url)
        if kind.loader not in facts.loaders:
            raise ModelError(
                f"{url} cannot take new weights: install streamrl beside its {kind.name} and start it with "
                f"{kind.loader_option} {kind.loader}"
            )
        rope, served = self.model.rope, facts.max_context or self.model.max_context
        if rope is not None and 0 < self._settings.max_context <= rope.limit < served:
            raise ModelError(
                f"{url} serves up to {served} tokens, and computes the rope of this model ({rope.kind}) for more than "
                f"{rope.limit}, the run for {self._settings.max_context}: start it with {kind.context_option} "
                f"{self._settings.max_context}"
            )
        self._served = facts.label
        try:
            await self._order(None)
        except WeightsMismatchError as error:
            raise ModelError(f"{url} serves another model than the run's: {error}") from error

    async def _order(self, held: HeldWeights | None) -> None:
        """Have the server load ``held``, or only look whether its model has the run's vocabulary."""
        self._num_orders += 1
        here = self.process is not None
        order = LoadOrder(
            number=self._num_orders,
            vocab_size=self.model.vocab_size,
            manifest=held.offer(same_host=here) if held else None,
            verified=here,
        )
        label = str(held.weights) if held else ""
        await self.client.update(order, label, served=self._served, processes=self.facts.processes)
        self._served = label or self._served

    async def replace(self, reason: str) -> None:
        """Bring up another one, because this one is lost. Raises as ``bring_up``."""
        log.error("server lost, starting it again" if self.process else "server lost, waiting for it", reason=reason)
        self.restarts += 1
        then, why = "it is started again" if self.process else "it is waited for", reason.partition("\n")[0]
        self.trouble = f"its {self._kind.name} server is lost ({why}); {then}"
        await self.bring_up()
        self.trouble = ""

    async def pass_on(self, held: HeldWeights) -> None:
        """Have the server take ``held``, which it holds from now on. Raises as ServerClient.update, and then it has to
        hold what it had.
        """
        await self._order(held)
        self.keep(held)

    def keep(self, held: HeldWeights) -> None:
        """A server that is brought up from now on gets ``held``."""
        former, self._held = self._held, held
        if former is not None and former is not held:
            former.close()

    async def probe(self) -> str:
        """How the server is: why it is lost, or ""."""
        self.answers = False
        if self.process is not None and self.process.pid is None:
            return f"its process ended: {self.process.last_words()}"
        silence_s = self._settings.silence_s
        try:
            self.kv_use = await self.client.kv_use()
            if self._clock.now_s() >= self._health_due_s:  # does its model still compute, and with our weights?
                await self.client.health(silence_s)
                self._health_due_s = self._clock.now_s() + silence_s / HEALTH_CHECKS_PER_SILENCE
                served = await self.client.label()
                if self._held is not None and served != self.label:  # one that was started anew has its own
                    return f"{self.client.url} serves weights {served!r} instead of {self.label!r}"
        except (ServerUnavailableError, ServerAnswerError) as error:
            return str(error) if self._clock.now_s() - self._well_at_s > silence_s else ""
        self._well()
        return ""

    def _well(self) -> None:
        self.answers = True
        self._well_at_s = self._clock.now_s()
