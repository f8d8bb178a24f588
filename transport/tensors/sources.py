"""Which of a segment's addresses to read from here, and with which backend.

A backend is imported when an address first needs it. Invariant: an address that cannot be reached from here (another
host's memory, another machine's loopback) is never tried.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from transport.errors import MessageError
from transport.tensors.address import SCHEMES, Address, host_id, is_loopback, parse_address, process_token
from transport.tensors.base import SegmentReader


def _reachable_from_here(address: Address, publisher_host: str) -> bool:
    """Whether bytes published on host id ``publisher_host`` can be read here through ``address``."""
    match address.scheme:
        case "shm":
            return address.place == host_id()
        case "inproc":
            return address.place == process_token()
        case _:
            return publisher_host == host_id() or not is_loopback(address.place)


def choose_sources(sources: Sequence[str], publisher_host: str) -> list[Address]:
    """The sources that can be read from here, cheapest first.

    What is no address is left out, and a scheme that this version does not know (a newer publisher may offer it),
    unless nothing else is there: then MessageError says what is wrong with the first.
    """
    addresses: list[Address] = []
    problems: list[MessageError] = []
    for source in sources:
        try:
            addresses.append(parse_address(source))
        except MessageError as error:
            problems.append(error)
    if problems and not addresses:
        raise problems[0]
    usable = [address for address in addresses if _reachable_from_here(address, publisher_host)]
    return sorted(usable, key=lambda address: SCHEMES.index(address.scheme))


def reader_for(address: Address, secret: bytes) -> SegmentReader:
    """The backend that reads ``address``: the module of its scheme offers ``reader(secret) -> SegmentReader``."""
    return importlib.import_module(f"transport.tensors.{address.scheme}").reader(secret)
