"""Connections to one server: commands in, replies out, every error translated: those of redis-py end here.

Owns: the connections, retries, what each of redis-py's errors means to a caller, and how a script gets the names of
keys.py and the values of a call.
Invariant: a connection whose reply was not read to its end is closed, never used again.

redis-py's own retries are off: it sends a command again without knowing whether it ran (measured: an XADD whose reply
was cut off was appended twice). Here everything may be sent again, because the caller promises that it may: reads,
plain overwrites, and scripts that recognise their own request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import ipaddress
import os
import re
import socket
import ssl
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import msgspec
from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from transport.broker import keys
from transport.broker.base import ALIVE_S, MAX_DEAD_LETTERS
from transport.broker.primary import Watchers, check_primary, watchers_of
from transport.broker.reach import Away, Reach
from transport.contracts.types import USER_PREFIX
from transport.errors import BrokerFullError, BrokerRejectedError, BrokerUnavailableError

Argument: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Argument]
Reply: TypeAlias = "bytes | int | list[Reply] | None"

MAX_CONNECTIONS = 128
"""A process holds one for every call in progress: 32 session slots, and a few blocking reads. More is a leak."""
MAX_SOCKET_PATH = 103  # bytes of a socket's path that every system takes (Linux: 107)

_FULL = {
    "OOM": "its memory: raise its maxmemory or lower broker.max_retained_bytes",
    "MISCONF": "it cannot write its files: free some space on its disk",
}
"""Errors of a server that refuses writes until there is room again -> what is full."""
_BUSY = ("READONLY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "LOADING", "BUSY", "MOVED", "UNBLOCKED")
"""Errors of a server that may be well again in a while: loading, failing over, in another client's script."""
_ELSEWHERE = ("READONLY", "MOVED", "UNBLOCKED")
"""Errors of a server that was the primary: another connection finds the one that is."""
_CODE = re.compile(rf"(?:^|: )({'|'.join((*_FULL, *_BUSY))}) ")
"""At the beginning of an answer, or after the line number where a script raised the answer of one of its commands."""
_CODE_OF_CLASS: dict[type[exceptions.RedisError], str] = {
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.MovedError: "MOVED",
}
"""Errors whose first word redis-py takes off."""


_NO_PASSWORD = exceptions.AuthenticationWrongNumberOfArgsError
_WRONG_PASSWORD = "invalid username-password pair"
"""What the server says; redis-py gives it no class of its own while it connects."""


def _code(error: exceptions.RedisError) -> str:
    """What kind of answer it is, of those above; "": another."""
    found = _CODE.search(str(error))
    return _CODE_OF_CLASS.get(type(error)) or (found[1] if found else "")


class ReplyError(BrokerRejectedError):
    """The server refused one command. code: the first word of its answer."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(f"broker {address} refused a command: {message}")
        self.message = message
        self.code = message.partition(" ")[0]


class _Connection(Protocol):
    """What is used of redis-py's connection, which is only partly typed."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def can_read(self) -> bool: ...
    def pack_commands(self, commands: Iterable[Command]) -> list[bytes]: ...
    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None: ...
    async def read_response(self) -> Reply: ...


@contextmanager
def short_path(path: str) -> Generator[str]:
    """A name of the socket at ``path`` that the kernel takes: it allows MAX_SOCKET_PATH bytes, runs lie deeper.

    Good within the block. Longer ones go by way of their directory, opened (Linux).
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class _SocketConnection(UnixDomainSocketConnection):
    """Over a socket of this host, at a path of any length."""

    async def _connect(self) -> None:
        whole = self.path
        try:
            with short_path(whole) as self.path:
                await super()._connect()
        finally:
            self.path = whole


_lookups: dict[str, concurrent.futures.Future[list[str]]] = {}
_looking_up = threading.Lock()


def look_up(host: str) -> concurrent.futures.Future[list[str]]:
    """Addresses of ``host``, from a thread of its own; who asks while that waits shares it.

    A resolver may take a minute to give up. In the event loop's own threads, of which there are few, other work would
    wait for it, and so would the end of the process (measured: a worker whose broker's name had vanished did not end).
    """
    with _looking_up:
        if (under_way := _lookups.get(host)) is not None:
            return under_way
        looking = _lookups[host] = concurrent.futures.Future[list[str]]()
        looking.set_running_or_notify_cancel()  # nobody who stops waiting cancels it for the others

    def look() -> None:
        found: list[str] | OSError
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except OSError as error:
            found = error
        except UnicodeError as error:
            found = socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host: {error}")
        with _looking_up:
            del _lookups[host]
        if isinstance(found, OSError):
            looking.set_exception(found)
        else:
            looking.set_result(found)

    threading.Thread(target=look, name=f"look up {host}", daemon=True).start()
    return looking


async def _addresses(host: str) -> list[str]:
    """Raises gaierror: the name does not resolve."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return await asyncio.wrap_future(look_up(host))
    return [host]


class _NamedConnection(Connection):
    """To a host by its name, each of whose addresses is tried in turn."""

    name = ""

    async def _connect(self) -> None:
        self.name = self.host
        limit_s = float(self.socket_connect_timeout or 0.0)
        try:
            async with asyncio.timeout(limit_s):
                addresses = await _addresses(self.name)
            for left, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
                self.host = address
                try:
                    async with asyncio.timeout(limit_s / len(addresses)):
                        return await super()._connect()
                except OSError:  # a TimeoutError is one
                    if not left:
                        raise
        finally:
            self.host = self.name


class _TlsConnection(_NamedConnection, SSLConnection):
    """The certificate is that of the name, not of an address."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = cast("Mapping[str, Any]", super()._connection_arguments())  # pyright: ignore[reportUnknownMemberType]
        return {**arguments, "server_hostname": self.name}


class _Connections:
    """The connections of one client: one for each call in progress, kept for the next.

    Redis-py has a pool too, but it takes locks and keeps statistics at every use, which together with the fetching of
    a connection are a fifth of what a round trip costs this process.
    """

    def __init__(self, kind: type[Connection], arguments: Mapping[str, Any], watchers: Watchers | None = None) -> None:
        """watchers: know which server it is; None: the one in ``arguments``."""
        self._kind = kind
        self._arguments = arguments
        self._watchers = watchers
        self._open: set[_Connection] = set()
        self.idle: list[_Connection] = []  # every reply was read

    async def take(self) -> _Connection:
        """One that is idle and sound, else a new one. It is the caller's until it is put to ``idle`` or dropped."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_connected and not await connection.can_read():
                return connection
            await self.drop(connection)  # the server closed it
        if len(self._open) >= MAX_CONNECTIONS:
            raise exceptions.MaxConnectionsError(f"{MAX_CONNECTIONS} connections are in use")
        place = await self._watchers.find() if self._watchers is not None else None
        there: dict[str, Any] = {"host": place[0], "port": place[1]} if place is not None else {}
        arguments: dict[str, Any] = {**self._arguments, **there}
        made = self._kind(**arguments)
        connection = cast("_Connection", made)
        self._open.add(connection)
        try:
            await connection.connect()
            if place is not None:
                await check_primary(made, place)
        except BaseException:
            await self.drop(connection)
            raise
        return connection

    async def drop(self, connection: _Connection) -> None:
        """A reply may be left in it, or none will come."""
        self._open.discard(connection)
        await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """All of them, those in use too."""
        self.idle.clear()
        for connection in list(self._open):
            await self.drop(connection)


class Tls(NamedTuple):
    """Files of ``rediss://``. ca: who signed the server's certificate.  cert, key: what this side shows it."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def arguments(self) -> dict[str, str]:
        """For redis-py. Raises BrokerRejectedError: a file is not what its setting says."""
        found: dict[str, str] = {}
        if self.ca:
            try:
                ssl.create_default_context(cafile=self.ca)
            except (OSError, ssl.SSLError) as error:
                raise BrokerRejectedError(
                    f"broker.tls_ca (--tls-ca) {self.ca} is no file of CA certificates: {error.strerror or error}"
                ) from error
            found["ssl_ca_certs"] = self.ca
        if self.cert or self.key:
            try:
                ssl.create_default_context().load_cert_chain(self.cert, self.key, password=_no_pass_phrase)
            except (OSError, ssl.SSLError) as error:
                raise BrokerRejectedError(
                    f"broker.tls_cert (--tls-cert) {self.cert} and broker.tls_key (--tls-key) {self.key} are no "
                    f"certificate and its private key, without a pass phrase: {error.strerror or error}"
                ) from error
            found |= {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        return found


NO_TLS_FILES = Tls()


def _no_pass_phrase() -> bytes:
    """OpenSSL would ask for it on the terminal."""
    return b""


class RedisLink:
    """A client of one server, or of whichever is the primary now (primary.py).

    key: any of the run's, by which a cluster knows its node.
    outage_s: how long one call keeps trying when the server does not answer.  timeout_s: for one reply; a blocking
    command must block for less (``max_block_s``).  bear_s: how long the process does, where it calls again.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        password: str = "",
        tls: Tls = NO_TLS_FILES,
        outage_s: float = 60.0,
        timeout_s: float = 10.0,
        bear_s: float | None = None,
    ) -> None:
        arguments, watchers = _pool_arguments(url, key, password, tls)
        kind = cast("type[Connection]", arguments.pop("connection_class", Connection))
        if watchers is not None:
            watchers.kind, watchers.arguments = kind, dict(arguments)
            if watchers.name:  # sentinels have no databases
                watchers.arguments.pop("db", None)
        self._connections = _Connections(kind, arguments, watchers)
        self._uses_tls = issubclass(kind, SSLConnection)
        self._shows_certificate = bool(tls.cert)
        self.outage_s = outage_s
        self._timeout_s = timeout_s
        self.max_block_s = timeout_s / 2
        self.address = arguments.get("path") or f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}"
        self._reach = Reach(self.address, outage_s if bear_s is None else bear_s)

    def away(self) -> Away | None:
        """Since when and why the server does not answer; None while it does."""
        return self._reach.away()

    async def command(self, *arguments: Argument, block_s: float = 0.0) -> Reply:
        """One idempotent command. block_s: for which the server may hold its answer back."""
        return (await self.pipeline([arguments], block_s=block_s))[0]

    async def script(
        self, name: str, key: str, prefix: str, number: int, request: ScriptCall, *, run_id: str = ""
    ) -> Reply:
        """One script of scripts/, loaded when the server does not know it (it forgets them when it restarts)."""
        sha, text = _script(name)
        arguments: Command = (1, key, prefix, number, _encoder.encode(request.body), run_id, *request.blobs)
        try:
            return await self.command("EVALSHA", sha, *arguments)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self.command("EVAL", text, *arguments)

    async def pipeline(self, commands: Sequence[Command], *, block_s: float = 0.0) -> list[Reply]:
        """Idempotent commands in one round trip, sent again until the server answers.

        Raises: BrokerUnavailableError after ``outage_s``, counted from when the first answer was due, whatever kept it
                away; BrokerRejectedError at once when waiting will not help.
        """
        deadline_s, pause_s = 0.0, 0.02
        now_s = asyncio.get_running_loop().time
        while True:
            due_s = now_s() + block_s
            left_s = deadline_s - now_s() if deadline_s else block_s + max(1.0, self.outage_s)
            limit_s = min(self._timeout_s, max(pause_s, left_s))
            try:
                return await self._exchange(commands, block_s, limit_s)
            except BrokerUnavailableError:
                deadline_s = deadline_s or min(due_s, now_s()) + self.outage_s
                if now_s() + pause_s > deadline_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def close(self) -> None:
        self._reach.close()
        await self._connections.close()

    async def _exchange(self, commands: Sequence[Command], block_s: float, limit_s: float) -> list[Reply]:
        """``_exchange_once``, and what it says of the broker's being there."""
        number = self._reach.sent(block_s)
        try:
            replies = await self._exchange_once(commands, limit_s)
        except BrokerFullError:
            self._reach.answered(number)
            raise
        except BrokerUnavailableError as error:
            self._reach.failed(number, error.__cause__ or error)
            raise
        except ReplyError:
            self._reach.answered(number)
            raise
        except BaseException:
            self._reach.dropped(number)
            raise
        self._reach.answered(number)
        return replies

    async def _exchange_once(self, commands: Sequence[Command], limit_s: float) -> list[Reply]:
        """Send once, read once. Raises BrokerUnavailableError when it may be tried again."""
        try:
            replies = await self._send_and_read(commands, limit_s)
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError, _NO_PASSWORD) as error:
            raise self._connection_error(error) from error
        except exceptions.RedisError as error:  # while connecting: the handshake itself was refused
            raise ReplyError(self.address, str(error)) from error
        for reply in replies:
            if isinstance(reply, exceptions.RedisError):
                raise self._translate(reply) from reply
        return cast("list[Reply]", replies)

    async def _send_and_read(
        self, commands: Sequence[Command], limit_s: float
    ) -> list[Reply | exceptions.ResponseError]:
        async with asyncio.timeout(limit_s):
            connection = await self._connections.take()
            try:
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                replies: list[Reply | exceptions.ResponseError] = []
                for _ in commands:
                    try:
                        replies.append(await connection.read_response())
                    except exceptions.ResponseError as error:
                        replies.append(error)
                if any(isinstance(reply, exceptions.RedisError) and _code(reply) in _ELSEWHERE for reply in replies):
                    raise exceptions.ConnectionError("the primary is another server now")
            except BaseException:
                await self._connections.drop(connection)
                raise
            self._connections.idle.append(connection)
            return replies

    def _translate(self, error: exceptions.RedisError) -> BrokerUnavailableError | BrokerRejectedError:
        message, code = str(error), _code(error)
        if code in _FULL:
            return BrokerFullError(self.address, f"{_FULL[code]} ({message.partition(' script: ')[0]})")
        if code:
            return BrokerUnavailableError(self.address, message)
        if isinstance(error, exceptions.NoScriptError):
            return ReplyError(self.address, f"NOSCRIPT {message}")
        if isinstance(error, exceptions.NoPermissionError):
            return BrokerRejectedError(f"broker {self.address} denies its user a command: {message}")
        return ReplyError(self.address, message)

    def _connection_error(self, error: Exception) -> BrokerUnavailableError | BrokerRejectedError:
        """Rejected when the two sides do not agree on the password, or on TLS."""
        cause: BaseException | None = error
        was_reset = False
        while cause is not None:
            if isinstance(cause, (exceptions.AuthenticationError, _NO_PASSWORD)) or _WRONG_PASSWORD in str(cause):
                asked = (
                    "wants a password, and none was given"
                    if isinstance(cause, _NO_PASSWORD)
                    else "refuses the password"
                )
                return BrokerRejectedError(
                    f"broker {self.address} {asked} ({cause}): set broker.password, put it into "
                    "broker.url, or set STREAMRL_BROKER_PASSWORD"
                )
            if isinstance(cause, ssl.SSLCertVerificationError):
                return BrokerRejectedError(
                    f"broker {self.address} has a certificate that is not trusted ({cause.verify_message}): "
                    "set broker.tls_ca to the CA file that signed it, and use the host name it was made for"
                )
            if isinstance(cause, ssl.SSLError) and "CERTIFICATE" in (cause.reason or ""):
                return BrokerRejectedError(
                    f"broker {self.address} refuses the certificate of this side, or its lack ({cause.reason}): "
                    "set broker.tls_cert and broker.tls_key to what its CA has signed"
                )
            if isinstance(cause, ssl.SSLError):
                return BrokerRejectedError(
                    f"broker {self.address} does not speak TLS as asked ({cause.reason}): "
                    "use redis:// for a server without TLS"
                )
            was_reset = was_reset or isinstance(cause, ConnectionResetError)
            cause = cause.__cause__ or cause.__context__
        reason = str(error)
        if self._uses_tls and was_reset and not self._shows_certificate:
            # a reset may come before the words in which a server refuses a client without one
            reason += " (if it asks for a certificate, set broker.tls_cert and broker.tls_key)"
        if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
            # a server without TLS waits for the end of what it takes for a command
            reason = "no answer in time" + (" (if it does not speak TLS, use redis://)" if self._uses_tls else "")
        return BrokerUnavailableError(self.address, reason)


def _pool_arguments(url: str, key: str, password: str, tls: Tls) -> tuple[dict[str, Any], Watchers | None]:
    """redis-py's arguments: RESP2 (its replies are plain lists), no retries, no CLIENT SETINFO (newer than 7.0).

    No time-out of its own either: it writes under asyncio.wait_for, which in Python 3.11 swallows a cancellation that
    comes as the write ends, and the cancelled reader then blocks on. ``_send_and_read`` has one for all of a call.
    """
    try:
        single, watchers = watchers_of(url, key)
        arguments = cast("dict[str, Any]", parse_url(single))
    except ValueError as error:
        encode = ""
        if "@" in url.partition("://")[2].partition("/")[2]:
            encode = " (a / in a user or a password is written %2F there; STREAMRL_BROKER_PASSWORD takes it as it is)"
        raise BrokerRejectedError(
            f"broker.url is no URL of a broker, like redis://host:port or redis+sentinel://host:port/name: {error}"
            f"{encode}"
        ) from error
    if password:
        arguments.setdefault("password", password)
    if arguments.get("connection_class") is SSLConnection:
        arguments.update(tls.arguments(), connection_class=_TlsConnection)
    arguments.update(
        protocol=2,
        decode_responses=False,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        socket_connect_timeout=5.0,
        health_check_interval=0,
        driver_info=None,
    )
    arguments.pop("max_connections", None)
    if "path" in arguments:
        arguments["connection_class"] = _SocketConnection
    else:
        arguments["socket_keepalive"] = True
        arguments.setdefault("connection_class", _NamedConnection)
    return arguments, watchers


# --- scripts ----------------------------------------------------------------------------------------------------------

_KEY_NAMES: dict[str, str | int] = {
    "owner": keys.OWNER,
    "owner_alive": keys.OWNER_ALIVE,
    "alive_ms": int(1000 * ALIVE_S),
    "workers_group": keys.WORKERS_GROUP,
    "meta": keys.META_PREFIX,
    "epochs": keys.EPOCHS,
    "incarnations": keys.INCARNATIONS,
    "retained_bytes": keys.RETAINED_BYTES,
    "task_specs": keys.TASK_SPECS,
    "mark": keys.MARK,
    "streams": keys.STREAMS,
    "workers": keys.WORKERS,
    "dead": keys.DEAD,
    "tasks": keys.tasks(""),
    "lease": keys.LEASE_PREFIX,
    "row": keys.ROW_PREFIX,
    "group": keys.GROUP_PREFIX,
    "shared": keys.SHARED_PREFIX,
    "ready": keys.READY_PREFIX,
    "noticed": keys.NOTICED_PREFIX,
    "user": USER_PREFIX,
    "max_dead": MAX_DEAD_LETTERS,
}

CLAIMING = ("hold_run", "acquire_epoch", "leave_run")
"""Scripts that compare the run's id themselves."""

_encoder = msgspec.json.Encoder()


@cache
def _script(name: str) -> tuple[str, str]:
    """What EVALSHA calls ``scripts/<name>.lua``, and its text behind the key names and the prelude."""
    folder = files("transport.broker.scripts")
    names = ", ".join(f"{name} = {value!r}" for name, value in _KEY_NAMES.items())
    before = ("prelude",) if name in CLAIMING else ("prelude", "guard")
    parts = [folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in (*before, name)]
    text = "\n".join([f"local KEY = {{ {names} }}", *parts])
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), text


@dataclass(slots=True)
class ScriptCall:
    """What a script gets: readable JSON, and binary values beside it that the JSON names by their place in ARGV."""

    body: dict[str, object] = field(default_factory=dict[str, object])
    blobs: list[bytes] = field(default_factory=list[bytes])

    def blob(self, value: bytes) -> int:
        """Add a binary value. Returns what stands for it in a list of the body (see ``resolve`` in prelude.lua)."""
        self.blobs.append(value)
        return len(self.blobs) + 4
