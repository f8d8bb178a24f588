"""The loader for SGLang's --custom-weight-loader, and the form in which orders and outcomes pass through its calls.

SGLang hands a custom loader what ``/update_weights_from_tensor`` brought: named tensors, as base64 of a pickle. Ours is
one tensor without elements, whose name is the order, so no bulk byte passes through HTTP; the opcodes are written out
here, and nothing is ever unpickled. How it went is left where ``/get_weights_by_name`` finds it.

Never raises: SGLang ends the whole server for that. Imported by the engine, too: torch only inside the server.
"""

from __future__ import annotations

import base64
import logging
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transport.contracts.messages import encode
from workers.generation.server.order import LoadOrder, Outcome, order_decoder, outcome_numbers

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

OUTCOME = "streamrl:outcome:"
"""Beginning of the name under which the loader answers how an order went."""

# [(name, torch.Tensor())] in pickle protocol 4: a list, a string, a global called with no arguments, a pair.
_BEFORE_NAME = b"\x80\x04]X"
_AFTER_NAME = b"ctorch\nTensor\n)R\x86a."


def to_payload(order: LoadOrder) -> str:
    """What goes into ``serialized_named_tensors``."""
    name = base64.b64encode(encode(order))
    return base64.b64encode(_BEFORE_NAME + struct.pack("<I", len(name)) + name + _AFTER_NAME).decode()


def from_name(name: str) -> LoadOrder:
    """The order in the name of the tensor. Raises MessageError, or ValueError when it is no base64."""
    return order_decoder.decode(base64.b64decode(name))


def outcome_name(number: int) -> str:
    return f"{OUTCOME}{number}"


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the order that is the name of the only tensor. model: SGLang's, on its device."""
    from workers.generation.server.loader import carry_out

    try:
        order = from_name(named_tensors[0][0])
        outcome = carry_out(model, order, lambda tensors: model.load_weights(iter(tensors.items())), _processes)
    except Exception:  # no order of ours: the engine that gave it finds no outcome
        log.exception("not an order to load weights")
        return
    if outcome.error:
        log.error("order %d not carried out: %s", outcome.number, outcome.error)
    _leave(model, outcome)


def _processes() -> Any:
    from sglang.srt.distributed import get_tp_group  # pyright: ignore[reportMissingImports]  only inside the server

    return get_tp_group().cpu_group


def _leave(model: Any, outcome: Outcome) -> None:
    """Answer /get_weights_by_name with ``outcome`` where its name is asked for, and as before otherwise."""
    ask: Callable[..., Any] | None = getattr(model, "_streamrl_ask", None) or getattr(
        model, "get_weights_by_name", None
    )
    model._streamrl_ask = ask

    def answer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(OUTCOME):
            return outcome_numbers(outcome)
        return ask(name, *args, **kwargs) if ask else None  # as SGLang answers for a model that cannot

    model.get_weights_by_name = answer
