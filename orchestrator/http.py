"""The orchestrator's listener: the address and the key of ``[api]``, and the links of the live page.

What is common to all listeners of a run is in ``transport/process/http.py``.
"""

from __future__ import annotations

import socket
from pathlib import Path

from orchestrator.errors import ConfigError
from transport.contracts.settings import ApiSettings, EndpointSettings
from transport.contracts.types import natural_order
from transport.process.http import is_loopback, listen, listen_again, write_address
from transport.process.programs import shown
from transport.process.secret import SHARED_SECRET


def check_secret(api: ApiSettings) -> None:
    """Raises ConfigError where anyone on the network could ask."""
    if api.enabled and not api.secret and not is_loopback(api.host):
        raise ConfigError(
            f"api.host {api.host} is reached from other machines: set {SHARED_SECRET} (or api.secret), "
            "or listen on 127.0.0.1",
            key="api.secret",
        )


def check_endpoint(endpoint: EndpointSettings, secret: str) -> None:
    """Raises ConfigError where anyone on the network could try to be an agent. secret: api.secret."""
    if endpoint.enabled and not secret and not is_loopback(endpoint.host):
        raise ConfigError(
            f"endpoint.host {endpoint.host} is reached from other machines: set {SHARED_SECRET}, "
            "or listen on 127.0.0.1",
            key="endpoint.host",
        )


def check_listening(api: ApiSettings) -> None:
    """Raises ConfigError where ``open_listener`` would: before a run begins, not in the middle of its start."""
    check_secret(api)
    if api.enabled:
        _listening(api).close()


def open_listener(api: ApiSettings, address_file: Path) -> socket.socket:
    """Listen, and write ``host:port`` to ``address_file``.

    With port 0 the port of the file is taken again where it is free, so that a page outlives a restart.
    Raises ConfigError: the port is in use, the host is not ours, or the secret is missing.
    """
    check_secret(api)
    again = None if api.port else listen_again(api.host, address_file)
    listener = again or _listening(api)
    write_address(listener, address_file)
    return listener


def _listening(api: ApiSettings) -> socket.socket:
    """Raises ConfigError."""
    try:
        return listen(api.host, api.port)
    except OSError as error:
        if api.port:
            what, other = f"api.port {api.port} on {api.host}", "choose another, or 0 for a free one"
        else:
            what, other = f"api.host {api.host}", "choose an address of this machine"
        raise ConfigError(f"{what} cannot be listened on: {error.strerror}; {other}", key="api.port") from error


def endpoint_links(addresses: Path, key_file: Path) -> list[str]:
    """What agents take as base_url, one of each generation worker that has listened; and where the key is."""
    if not (addresses.is_dir() and key_file.exists()):
        return []
    files = sorted(addresses.glob("*.address"), key=lambda file: natural_order(file.name))
    return [f"http://{file.read_text(encoding='ascii').strip()}/v1" for file in files]


def page_links(address_file: Path, key_file: Path, *, keyed: bool) -> list[str]:
    """Links of the live page, the first for a browser on this machine; none before it is served.

    keyed: with the run's key, for a person at a terminal; else with the place of the key: what is printed elsewhere
    lies in files that others read.
    A listener on all addresses has none of its own: it is reached here by loopback, from elsewhere by this host's name.
    """
    if not (address_file.exists() and key_file.exists()):
        return []
    host, _, port = address_file.read_text(encoding="ascii").strip().rpartition(":")
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    hosts = [everywhere[host], socket.gethostname()] if host in everywhere else [host]
    if not keyed:
        return [f"http://{each}:{port}/ (its key is in {shown(key_file)})" for each in hosts]
    key = key_file.read_text(encoding="ascii").strip()
    return [f"http://{each}:{port}/#key={key}" for each in hosts]
