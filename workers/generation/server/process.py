"""The process of a server of our own: start, wait until it is healthy, end.

Owns: one process group, its way in and its log. Invariant: the process ends with its worker, whatever ends that (the
kernel sends the signal); two servers never share a port of this class's choosing; and no other user of this machine
drives it, because it listens on a socket in a directory that is closed to them, or asks for a key that stands on no
command line.
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
from pathlib import Path

import structlog

from transport.process.spawn import ending_with_this_process
from workers.errors import EngineHungError, ModelError, ServerAnswerError, ServerUnavailableError
from workers.generation.server.client import ServerClient, ServerKind, ServerSettings

log = structlog.get_logger(__name__)

HEALTH_POLL_S = 0.25
STOP_S = 10.0
CONFIG = "--config"
MAX_DIRECTORY_BYTES = 50
LAST_LINES = 5
LAST_BYTES = 4096
PACKAGES = Path(__file__).parents[3]
"""Where ours are."""
OUR_PACKAGES = ("transport", "workers")
"""What the loader needs of them."""


def link_packages(directory: Path) -> Path:
    """Make ``directory`` one that holds what the loader imports of ours, and nothing else. Returns it, absolute.

    Installed, our packages lie beside our torch and transformers, and a server with its own must not find those.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in OUR_PACKAGES:
        fresh = directory / f".{name}-{os.getpid()}"
        fresh.symlink_to(PACKAGES / name)
        fresh.replace(directory / name)
    return directory.absolute()


class ServerProcess:
    """One server of this worker's own, started as often as it takes."""

    def __init__(self, kind: ServerKind, settings: ServerSettings) -> None:
        self._kind = kind
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._private = _temporary_directory() / f"streamrl-server-{os.getpid()}-{secrets.token_hex(8)}"
        self.port = 0 if kind.socket_option else free_port()
        self.key = secrets.token_hex(24)
        """Kept over restarts, as the port is, so that one client serves all."""

    @property
    def url(self) -> str:
        return f"unix:{self._socket}" if self._kind.socket_option else f"http://127.0.0.1:{self.port}"

    @property
    def _socket(self) -> Path:
        return self._private / "socket"

    @property
    def pid(self) -> int | None:
        """Of the living process; it leads its process group."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it; it is healthy much later. Raises ModelError for a command that cannot be run."""
        settings = self._settings
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        self._private.mkdir(mode=0o700)
        argv = [*self._with_key([*settings.command, *self._kind.arguments(settings)]), *self._place()]
        packages = link_packages(settings.log.parent / "server-packages")
        path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH", ""))))
        with settings.log.open("ab") as output:
            os.fchmod(output.fileno(), 0o600)  # a server may write there what it was started with
            self._log_start = output.tell()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **self._kind.environment, **self._key_environment(), "PYTHONPATH": path},
                    start_new_session=True,
                    preexec_fn=ending_with_this_process(),
                )
            except OSError as error:
                reason = error.strerror or str(error)
                raise ModelError(
                    f"the server cannot be started with {argv[0]!r}: {reason}; see generation.server_command"
                ) from error
        log.info("server started", pid=self._process.pid, url=self.url, log=str(settings.log))

    def _place(self) -> list[str]:
        """Where it listens."""
        if self._kind.socket_option:
            return [self._kind.socket_option, str(self._socket)]
        return ["--host", "127.0.0.1", "--port", str(self.port)]

    def _key_environment(self) -> dict[str, str]:
        return {self._kind.key_variable: self.key} if self._kind.key_variable else {}

    def _with_key(self, argv: list[str]) -> list[str]:
        """``argv`` with a ``--config`` that holds the key, and what the user's own ``--config`` has, if there is one.

        Raises ModelError: a key or a file of the user's that cannot be used.
        """
        option = self._kind.key_option
        if any(argument.partition("=")[0] == "--api-key" for argument in argv):
            raise ModelError("leave --api-key out of generation.server_args: the worker gives its own server a key")
        if not option:
            return argv
        theirs = ""
        if CONFIG in argv[:-1]:
            at = argv.index(CONFIG)
            try:
                theirs = Path(argv[at + 1]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"the server's --config {argv[at + 1]} cannot be read: {error}") from error
            del argv[at : at + 2]
        path = self._private / "config.yaml"
        path.touch(mode=0o600)
        path.write_text(f'{theirs.rstrip()}\n{option}: "{self.key}"\n', encoding="utf-8")
        return [*argv, CONFIG, str(path)]

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

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
    """Wait until the server computes. process: watched meanwhile, where it is our own.

    Raises: ServerUnavailableError: not within ``deadline_s``, or the process ended before.
    """
    ended = asyncio.create_task(process.wait(), name="server's end") if process else None
    reason = "no answer yet"
    try:
        async with asyncio.timeout(deadline_s):
            while ended is None or not ended.done():
                try:
                    await client.health(deadline_s)
                    return
                except (ServerUnavailableError, ServerAnswerError) as error:
                    reason = str(error)
                await asyncio.sleep(HEALTH_POLL_S)
    except TimeoutError:
        raise ServerUnavailableError(client.url, f"not healthy within {deadline_s:.0f} s: {reason}") from None
    finally:
        if ended is not None:
            ended.cancel()
    assert process is not None
    raise ServerUnavailableError(client.url, f"its process ended: {process.last_words()}")


def _temporary_directory() -> Path:
    """One of which the path of a socket may begin: there is room for 107 bytes in an address."""
    directory = Path(tempfile.gettempdir())
    return directory if len(os.fsencode(directory)) <= MAX_DIRECTORY_BYTES else Path("/tmp")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
