"""An order to load weights, as it travels from the engine to the loader inside the SGLang server.

SGLang hands a custom loader what ``/update_weights_from_tensor`` brought: named tensors, as base64 of a pickle. Ours is
one tensor without elements, whose name is the order, so no bulk byte passes through HTTP; the opcodes are written out
here, and nothing is ever unpickled. The loader finds the bytes by the manifest in the order, like any reader.

Owns: this format, on both sides. Never: torch, sglang, I/O.
"""

from __future__ import annotations

import base64
import struct

import msgspec

from transport.contracts.messages import MessageDecoder, WeightManifest, encode
from transport.contracts.types import Struct

LOADER = "workers.generation.server.sglang_loader.load"
"""For the server's --custom-weight-loader."""
OUTCOME = "streamrl:outcome:"
"""Beginning of the name under which the loader answers how an order went."""

# [(name, torch.Tensor())] in pickle protocol 4: a list, a string, a global called with no arguments, a pair.
_BEFORE_NAME = b"\x80\x04]X"
_AFTER_NAME = b"ctorch\nTensor\n)R\x86a."


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


_orders = MessageDecoder(LoadOrder)
_outcomes = MessageDecoder(Outcome)


def to_payload(order: LoadOrder) -> str:
    """What goes into ``serialized_named_tensors``."""
    name = base64.b64encode(encode(order))
    return base64.b64encode(_BEFORE_NAME + struct.pack("<I", len(name)) + name + _AFTER_NAME).decode()


def from_name(name: str) -> LoadOrder:
    """The order in the name of the tensor. Raises MessageError, or ValueError when it is no base64."""
    return _orders.decode(base64.b64decode(name))


def outcome_name(number: int) -> str:
    return f"{OUTCOME}{number}"


def outcome_numbers(outcome: Outcome) -> list[int]:
    """As the server can tell it, which is asked for the values of a parameter."""
    return list(msgspec.msgpack.encode(outcome))


def read_outcome(raw: bytes) -> Outcome:
    """The inverse. Raises MessageError."""
    return _outcomes.decode(raw)
