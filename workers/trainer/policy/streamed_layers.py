"""A frozen model whose layers stay in host memory: scoring.offload = "reference".

    fetch    layer 1 | layer 2 | layer 3 | ...  | layer 1      host -> device, one ahead of its turn
    compute          | layer 1 | layer 2 | ...                 a forward pass

The device holds embedding, last norm, head, and two layers. A GPU copies on a stream of its own while it computes; on a
CPU the same code runs without streams, and saves nothing.

Owns: where the layers' weights are, and their way. Never: their values. Invariants: a forward pass gives what it gives
without, because the same operations run on the same bytes; between two passes every layer is in host memory again,
but for the first of the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from workers.errors import ModelError

AHEAD = 2
"""Layers that the host may have asked for beyond the one that is computed. It asks far faster than a GPU computes, and
memory is held by every layer that was asked for."""


class StreamedLayers:
    """Of one frozen module, in place. One forward pass at a time.

    layers: in the order of their turn; every other parameter and buffer of ``module`` goes to ``device`` for good.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._fetching = self._module.Stream()
        self._tensors = [[*layer.parameters(), *layer.buffers()] for layer in layers]
        self._host = [[_in_host(tensor, device) for tensor in tensors] for tensors in self._tensors]
        self._fetched: dict[int, tuple[list[Tensor], Any]] = {}
        self._computed: deque[Any] = deque(maxlen=AHEAD)
        """When the last layers will have been computed."""
        streamed = {id(tensor) for tensors in self._tensors for tensor in tensors}
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in streamed:
                tensor.data = tensor.data.to(device)
        for index, (layer, tensors) in enumerate(zip(layers, self._tensors, strict=True)):
            _place(tensors, self._host[index])
            layer.register_forward_pre_hook(partial(self._enter, index))
            layer.register_forward_hook(partial(self._leave, index))

    def _enter(self, index: int, *_: Any) -> None:
        self._fetch(index)  # of a first pass: nobody was before
        there, come = self._fetched.pop(index)
        come.wait(self._module.current_stream())
        _place(self._tensors[index], there)
        self._fetch((index + 1) % len(self._tensors))

    def _fetch(self, index: int) -> None:
        if index in self._fetched:
            return
        if len(self._computed) == AHEAD:
            self._computed[0].synchronize()
        with self._module.stream(self._fetching):
            there = [torch.empty_like(here, device=self._device) for here in self._host[index]]
            for tensor, here in zip(there, self._host[index], strict=True):
                tensor.copy_(here, non_blocking=True)
            come = self._module.Event()
            come.record(self._fetching)
        self._fetched[index] = there, come

    def _leave(self, index: int, *_: Any) -> None:
        if self._device.type == "cuda":
            for tensor in self._tensors[index]:
                tensor.data.record_stream(self._module.current_stream())  # its memory is not given away before
            self._computed.append(self._module.current_stream().record_event())
        _place(self._tensors[index], self._host[index])


def stream_layers(module: nn.Module, device: torch.device) -> None:
    """Keep the decoder layers of ``module``, which is on the CPU, there. Raises ModelError: it has none."""
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(module).__name__} has no layers to bring one by one: scoring.offload must be none")
    StreamedLayers(module, layers, device)


def _in_host(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().pin_memory() if device.type == "cuda" else tensor.detach()


def _place(tensors: Sequence[Tensor], where: Sequence[Tensor]) -> None:
    for tensor, data in zip(tensors, where, strict=True):
        tensor.data = data
