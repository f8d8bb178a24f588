"""Connect to the run's broker, and refuse a server that would lose or evict what we give it.

Owns: what a usable server is. Never: starts one (embedded.py does).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import RedisBroker
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import RunName
from transport.errors import BrokerRejectedError

MIN_REDIS = (7, 0)
MIN_VALKEY = (7, 2)  # the first Valkey; it continues Redis 7.2


async def connect(
    settings: BrokerSettings,
    run: RunName,
    *,
    url: str | None = None,
    password: str | None = None,
    outage_s: float | None = None,
) -> RedisBroker:
    """A broker whose server answered and was checked.

    url, password: instead of those in ``settings`` (an embedded server's, or STREAMRL_BROKER_PASSWORD, which only a
    process's ``__main__`` reads); a password inside the URL wins.  outage_s: instead of ``settings.outage_s``.
    Raises: BrokerUnavailableError when nothing answered for ``outage_s``; BrokerRejectedError, at once, for a password
            that is refused, TLS that does not fit, a server that is too old or may evict keys.
    """
    link = RedisLink(
        url or settings.url,
        password=settings.password if password is None else password,
        tls_ca=settings.tls_ca,
        outage_s=settings.outage_s if outage_s is None else outage_s,
    )
    broker = RedisBroker(link, run)
    try:
        check_server(await broker.server_facts(), link.address)
    except BaseException:
        await broker.close()
        raise
    return broker


def check_server(facts: Mapping[str, str], address: str) -> None:
    """Raises BrokerRejectedError that says what to change. facts: INFO server and memory."""
    is_valkey = "valkey_version" in facts
    name, minimum = ("Valkey", MIN_VALKEY) if is_valkey else ("Redis", MIN_REDIS)
    version = facts.get("valkey_version" if is_valkey else "redis_version", "")
    if _parse_version(version) < minimum:
        raise BrokerRejectedError(
            f"broker {address} is {name} {version or 'of unknown version'}: use Redis >= 7.0 or Valkey >= 7.2"
        )
    policy = facts.get("maxmemory_policy", "")
    if policy != "noeviction":  # also without a limit: one set later would evict queues silently
        raise BrokerRejectedError(
            f"broker {address} may evict keys (maxmemory-policy is {policy or 'unknown'}): "
            "run `redis-cli config set maxmemory-policy noeviction`, and put it into the server's configuration"
        )


def _parse_version(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
