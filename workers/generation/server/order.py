"""An order to load weights, from the engine to the loader inside a server, and how it went. Never: torch, I/O.

The order names the bytes by their manifest: no bulk byte passes through HTTP. How both travel is each server's own.
"""

from __future__ import annotations

import msgspec

from transport.contracts.messages import MessageDecoder, WeightManifest
from transport.contracts.types import Struct


class LoadOrder(Struct, frozen=True, kw_only=True):
    """Load the version of ``manifest``, from the nearest of its sources; None: only look whether it could be.

    number: of this order, so that its outcome is not mistaken for another's.  vocab_size: of the model that is meant.
    verified: its sources were read and compared with the checksums just now.
    """

    number: int
    vocab_size: int
    manifest: WeightManifest | None = None
    verified: bool = False


class Outcome(Struct, frozen=True, kw_only=True):
    """How an order went. mismatch: the tensors do not fit the model.  spoiled: it failed when some were written.
    seconds: that the loader took, from its call to its return.
    """

    number: int
    error: str = ""
    mismatch: bool = False
    spoiled: bool = False
    seconds: float = 0.0


order_decoder = MessageDecoder(LoadOrder)
_outcome_decoder = MessageDecoder(Outcome)


def outcome_numbers(outcome: Outcome) -> list[int]:
    """As a server can answer it, whatever it encodes its answers with."""
    return list(msgspec.msgpack.encode(outcome))


def read_outcome(numbers: list[int]) -> Outcome:
    """The inverse. Raises MessageError."""
    return _outcome_decoder.decode(bytes(numbers))
