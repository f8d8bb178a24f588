"""Which of a segment's addresses to read from here, and with which backend.

A backend is imported when an address first needs it. Invariant: an address that cannot be reached from here (another
host's memory, another machine's loopback) is never tried.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from urllib.parse import urlsplit

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

    A scheme that this version does not know is left out (a newer publisher may offer it), unless nothing else is
    there: then MessageError names the valid ones.
    """
    known = [source for source in sources if urlsplit(source).scheme in SCHEMES]
    addresses = [parse_address(source) for source in known or sources]
    usable = [address for address in addresses if _reachable_from_here(address, publisher_host)]
    return sorted(usable, key=lambda address: SCHEMES.index(address.scheme))


def reader_for(address: Address, secret: bytes) -> SegmentReader:
    """The backend that reads ``address``: the module of its scheme offers ``reader(secret) -> SegmentReader``."""
    return importlib.import_module(f"transport.tensors.{address.scheme}").reader(secret)
