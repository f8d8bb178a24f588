"""Products of a step whose rows do not depend on each other, to the bit: float32 on a CPU.

Owns: how linear layers and attention are multiplied there. Never: what they mean (``forward.py``).
Invariant: a row has the same bits whatever rows are beside it, so a sample is the same token by token with drafts and
without, and in any company (tests compare them). Everywhere else rows are equal but for rounding.

Why not ``F.linear`` alone: MKL is handed a weight as it lies and packs it anew in every product, so that a step of two
tokens takes nearly twice one of one; and for one to three rows, or what is left over of several, it picks routines that
round otherwise. oneDNN packs once, after weights are loaded, and has one routine. It costs a second copy of the layers'
weights. The operations are those that TorchInductor freezes weights with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

FEWEST_ROWS = 4
"""Of a batched product. With fewer, MKL picks a routine that rounds otherwise; they take as long."""


def rounds_by_row(weight: torch.Tensor) -> bool:
    """Whether products with ``weight`` can be had so."""
    on_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Linear:
    """x [N, K] -> x @ weight.T + bias, [N, M]. ``pack`` after every change of the weight, which stays as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._packed: torch.Tensor | None = None
        self.pack()

    @torch.inference_mode()
    def pack(self) -> None:
        if rounds_by_row(self._weight):
            operations: Any = torch.ops.mkldnn
            self._packed = operations._reorder_linear_weight(self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        operations: Any = torch.ops.mkldnn
        product: torch.Tensor = operations._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def enough_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, R, D] with FEWEST_ROWS at least, where that is what ``Linear`` has; the others are zeros behind them."""
    missing = FEWEST_ROWS - x.shape[1]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 and rounds_by_row(x) else x
