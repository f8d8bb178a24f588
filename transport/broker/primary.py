"""Which server holds a run now, where that is not always the same one: the primary that sentinels watch, or the node of
a cluster that has the run's keys.

    redis+sentinel://host:26379,host:26379/name     its sentinels, and what they call the primary
    redis+cluster://host:6379,host:6379             nodes of the cluster, any of them

Asked anew for each connection: a primary that died, or was demoted, closes those that there are. What it had taken and
not passed on is lost, as when a server lost its tail: another primary has another boot id (base.py: ServerInfo).

Owns: the question. Never: a run's own commands, or how long one is tried (redis_link.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio.connection import Connection

Place: TypeAlias = tuple[str, int]
"""Host and port."""

SENTINEL, CLUSTER = "+sentinel", "+cluster"
ASK_S = 2.0  # three that are silent leave some of the time that a call has
_PORTS = {SENTINEL: 26379, CLUSTER: 6379}


@dataclass(slots=True)
class Watchers:
    """Who knows where the primary is. name: what sentinels call it; "": they are nodes of a cluster.

    key: any of the run's.
    """

    places: list[Place]
    name: str
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: type[Connection] = Connection

    async def find(self) -> Place:
        """Ask one after another; who answered is asked first from then on.

        Raises ConnectionError (redis-py's) that says what each said.
        """
        said: list[str] = []
        for place in list(self.places):
            try:
                async with asyncio.timeout(ASK_S):
                    found = await self._ask(place)
            except (exceptions.RedisError, OSError, TimeoutError) as error:
                said.append(f"{place[0]}:{place[1]}: {error or type(error).__name__}")
                continue
            self.places.remove(place)
            self.places.insert(0, place)
            return found
        whom = f"sentinels of {self.name}" if self.name else "nodes of the cluster"
        raise exceptions.ConnectionError(f"none of the {whom} knows a primary: {'; '.join(said)}")

    async def _ask(self, place: Place) -> Place:
        arguments: dict[str, Any] = {**self.arguments, "host": place[0], "port": place[1]}
        connection = self.kind(**arguments)
        try:
            await connection.connect()
            return await (self._of_sentinel(connection) if self.name else self._of_node(connection, place))
        finally:
            await connection.disconnect(nowait=True)

    async def _of_sentinel(self, connection: Connection) -> Place:
        found = await _answer(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        if found is None:
            raise exceptions.ConnectionError(f"watches no {self.name!r}")
        host, port = cast("Sequence[bytes]", found)
        return host.decode(), int(port)

    async def _of_node(self, connection: Connection, asked: Place) -> Place:
        slot = cast("int", await _answer(connection, "CLUSTER", "KEYSLOT", self.key))
        ranges = cast("Sequence[tuple[int, int, Sequence[bytes]]]", await _answer(connection, "CLUSTER", "SLOTS"))
        for first, last, primary, *_ in ranges:
            if first <= slot <= last:
                return primary[0].decode() or asked[0], int(primary[1])
        raise exceptions.ConnectionError(f"no node has slot {slot}")


async def check_primary(connection: Connection, place: Place) -> None:
    """Raises ConnectionError (redis-py's): it is a replica, as for a moment after a fail-over."""
    role = cast("Sequence[bytes]", await _answer(connection, "ROLE"))
    if role[0] != b"master":
        raise exceptions.ConnectionError(f"{place[0]}:{place[1]} is no primary")


async def _answer(connection: Connection, *command: str) -> object:
    await connection.send_command(*command, check_health=False)
    return cast("object", await connection.read_response())


def watchers_of(url: str, key: str) -> tuple[str, Watchers | None]:
    """The URL of the first place that ``url`` names, and who is to be asked; None for the URL of one server.

    Raises ValueError: it is none.
    """
    parts = urlsplit(url)
    ending = next((one for one in _PORTS if parts.scheme.endswith(one)), "")
    if not ending:
        return url, None
    user, _, hosts = parts.netloc.rpartition("@")
    places: list[Place] = []
    for host in hosts.split(","):
        one = urlsplit(f"//{host}")
        if not one.hostname:
            raise ValueError(f"{host!r} is no host:port")
        places.append((one.hostname, one.port or _PORTS[ending]))
    name = parts.path.strip("/")
    if (ending == SENTINEL) != bool(name) or "/" in name:
        raise ValueError("redis+sentinel://host:port,host:port/name, or redis+cluster://host:port,host:port")
    host, port = places[0]
    host = f"[{host}]" if ":" in host else host
    query = f"?{parts.query}" if parts.query else ""
    single = f"{parts.scheme.removesuffix(ending)}://{user + '@' if user else ''}{host}:{port}{query}"
    return single, Watchers(places, name, key)
