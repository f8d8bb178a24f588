"""AdamW whose moments stay in host memory: trainer.offload = "optimizer".

    fetch    moments 1 | moments 2 | moments 3 | ...        host -> device
    update             | piece 1   | piece 2   | piece 3    the step of all parameters, a piece at a time
    store                          | moments 1 | moments 2  device -> host

The moments are 8 of the 18 bytes of a weight, and only the step needs them. They pass through a few buffers on the
device; a GPU copies both ways on streams of their own while it updates. On a CPU the same code runs without streams,
and saves nothing.

Owns: where the moments are, and their way. Never: the rate, clipping, weights. Invariants: parameters and moments are
those of torch's fused AdamW, whose kernel this calls, bit for bit (tests); ``state`` has its keys, so that a
checkpoint does not say where the moments were; after ``step`` the host's moments are whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PIECE = 1 << 24
"""Elements that are updated at once: 128 MB of moments on the way."""
BUFFERS = 3
"""One that is fetched, one that is updated, one that is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive elements of one parameter. exp_avg, exp_avg_sq: in the host's memory.  step: counts this step."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    group: dict[str, Any]


@dataclass(slots=True)
class Buffer:
    """Moments on the device: [2, PIECE]. fetched, stored: when they have come, and when they have left."""

    moments: Tensor
    fetched: Any
    stored: Any = field(default=None)


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW(fused=True) of parameters on one device, contiguous, at least float32.

    A DTensor is stepped by its local part, and its moments are those of that part, as plain tensors.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        piece: int = PIECE,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._piece = piece
        self._device = _local(self.param_groups[0]["params"][0]).device
        self._module: Any = torch.get_device_module(self._device)
        """torch.cuda, or torch.cpu, whose streams and events do nothing."""
        self._fetching, self._storing = self._module.Stream(), self._module.Stream()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Returns when the moments are back in the host's memory."""
        pieces = list(self._pieces())
        if not pieces:
            return
        size = max(piece.parameter.numel() for piece in pieces)
        dtype = pieces[0].exp_avg.dtype
        computing = self._module.current_stream()
        buffers = [
            Buffer(torch.empty(2, size, dtype=dtype, device=self._device), self._module.Event())
            for _ in range(min(BUFFERS, len(pieces)))
        ]
        self._fetching.wait_stream(computing)  # the buffers' memory was another's before
        self._fetch(pieces[0], buffers[0])
        for index, piece in enumerate(pieces):
            buffer = buffers[index % len(buffers)]
            if index + 1 < len(pieces):
                self._fetch(pieces[index + 1], buffers[(index + 1) % len(buffers)])
            buffer.fetched.wait(computing)
            _update(piece, *_parts(buffer, piece))
            self._store(piece, buffer, computing)
        computing.wait_stream(self._storing)
        if self._device.type == "cuda":
            self._storing.synchronize()  # a checkpoint may read them now

    def _fetch(self, piece: Piece, buffer: Buffer) -> None:
        if buffer.stored is not None:
            self._fetching.wait_event(buffer.stored)
        with self._module.stream(self._fetching):
            for there, here in zip(_parts(buffer, piece), (piece.exp_avg, piece.exp_avg_sq), strict=True):
                there.copy_(here, non_blocking=True)
            buffer.fetched.record(self._fetching)

    def _store(self, piece: Piece, buffer: Buffer, computing: Any) -> None:
        self._storing.wait_stream(computing)
        with self._module.stream(self._storing):
            for there, here in zip(_parts(buffer, piece), (piece.exp_avg, piece.exp_avg_sq), strict=True):
                here.copy_(there, non_blocking=True)
            buffer.stored = self._storing.record_event()

    def _pieces(self) -> Iterator[Piece]:
        """Counts the step of each parameter as it comes by."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                state["step"] += 1
                flat = (_local(parameter), _local(parameter.grad), state["exp_avg"], state["exp_avg_sq"])
                for parts in zip(*(one.view(-1).split(self._piece) for one in flat), strict=True):
                    yield Piece(
                        parameter=parts[0],
                        gradient=parts[1],
                        exp_avg=parts[2],
                        exp_avg_sq=parts[3],
                        step=state["step"],
                        group=group,
                    )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """With moments in the host's memory, also when a checkpoint was restored onto the device."""
        state = cast(dict[str, Any], self.state[parameter])
        local = _local(parameter)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
            state["exp_avg"], state["exp_avg_sq"] = self._on_host(local), self._on_host(local)
        for name in ("exp_avg", "exp_avg_sq"):
            if state[name].device.type != "cpu":
                state[name] = self._on_host(local).copy_(state[name])
        return state

    def _on_host(self, like: Tensor) -> Tensor:
        """Zeros; page-locked for a GPU, which copies nothing else beside its own work."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self._device.type == "cuda")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parts(buffer: Buffer, piece: Piece) -> tuple[Tensor, Tensor]:
    exp_avg, exp_avg_sq = buffer.moments[:, : piece.parameter.numel()]
    return exp_avg, exp_avg_sq


def _update(piece: Piece, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    beta1, beta2 = piece.group["betas"]
    torch.ops.aten._fused_adamw_(
        [piece.parameter],
        [piece.gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [piece.step],
        lr=piece.group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=piece.group["weight_decay"],
        eps=piece.group["eps"],
        amsgrad=False,
        maximize=False,
    )
