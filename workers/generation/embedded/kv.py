"""Keys and values of the running samples, one slot each.

Owns: the memory. Never: which sample is where (``slots.py``), attention (``forward.py``).
Invariant: slots ``[0, n)`` are the running ones, so that a step reads plain slices; everything beyond a slot's length
is finite, because a masked position still meets its value as 0 * value.

Layout per layer: keys [S, H, D, T], values [S, H, T, D]. Keys are stored transposed: a decode step multiplies [G, D] by
[D, T], and with T innermost that product took half the time on a CPU (bf16, 32 slots, 96 tokens: 8.9 against 13.3 ms
over 30 layers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIRST_CAPACITY = 128
"""Tokens a slot can hold at first; it doubles on demand, because with T innermost a page of every key row is touched
however short the samples are (64 slots of SmolLM2 at 2048 tokens: 1.5 GB)."""
ROW_PAD = 32
"""Spare tokens at the end of a row: rows a power of two apart would fall into the same cache sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """layers: L.  heads: H, of keys and values.  head_dim: D."""

    layers: int
    heads: int
    head_dim: int

    def num_bytes(self, slots: int, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of ``slots`` slots of ``tokens`` tokens."""
        return 2 * self.layers * self.heads * self.head_dim * slots * (tokens + ROW_PAD) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PromptKV:
    """A prompt's keys and values, kept for the samples of its group that found no slot yet.

    keys: L x [H, D, P].  values: L x [H, P, D].
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class SlotKV:
    """Static KV memory of S slots. ``max_tokens`` bounds it; see KVShape.num_bytes."""

    def __init__(
        self, shape: KVShape, *, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.slots = slots
        self.max_tokens = max_tokens
        self.capacity = min(FIRST_CAPACITY, max_tokens)
        self._dtype, self._device = dtype, device
        self.keys = [self._zeros(transposed=True) for _ in range(shape.layers)]
        self.values = [self._zeros(transposed=False) for _ in range(shape.layers)]

    def reserve(self, tokens: int, num_slots: int) -> None:
        """Make room for ``tokens`` tokens in every slot, keeping slots [0, num_slots); a layer at a time."""
        if tokens <= self.capacity:
            return
        if tokens > self.max_tokens:
            raise ValueError(f"{tokens} tokens do not fit into slots of {self.max_tokens}")
        old = self.capacity
        self.capacity = min(max(tokens, 2 * old), self.max_tokens)
        for layer in range(self.shape.layers):
            keys, values = self._zeros(transposed=True), self._zeros(transposed=False)
            keys[:num_slots, :, :, :old] = self.keys[layer][:num_slots, :, :, :old]
            values[:num_slots, :, :old] = self.values[layer][:num_slots, :, :old]
            self.keys[layer], self.values[layer] = keys, values

    def _zeros(self, *, transposed: bool) -> torch.Tensor:
        tokens = self.capacity + ROW_PAD
        tail = (self.shape.head_dim, tokens) if transposed else (tokens, self.shape.head_dim)
        return torch.zeros(self.slots, self.shape.heads, *tail, dtype=self._dtype, device=self._device)

    def append(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one token into each of the slots [0, n). positions: [n].  keys, values: [n, H, D]."""
        rows = torch.arange(positions.shape[0], device=positions.device)
        self.keys[layer][rows, :, :, positions] = keys
        self.values[layer][rows, :, positions] = values

    def fill(self, layer: int, slots: slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a prompt into all of ``slots``. keys, values: [P, H, D]."""
        tokens = keys.shape[0]
        self.keys[layer][slots, :, :, :tokens] = keys.permute(1, 2, 0)
        self.values[layer][slots, :, :tokens] = values.transpose(0, 1)

    def live(self, layer: int, num_slots: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [n, H, D, tokens] and [n, H, tokens, D] of what the running slots hold."""
        return self.keys[layer][:num_slots, :, :, :tokens], self.values[layer][:num_slots, :, :tokens]

    def copy_prompt(self, slot: int, tokens: int) -> PromptKV:
        """A copy of the first ``tokens`` tokens of one slot."""
        return PromptKV(
            tuple(keys[slot, :, :, :tokens].clone() for keys in self.keys),
            tuple(values[slot, :, :tokens].clone() for values in self.values),
        )

    def paste_prompt(self, slots: slice, prompt: PromptKV) -> None:
        tokens = prompt.values[0].shape[1]
        for layer in range(self.shape.layers):
            self.keys[layer][slots, :, :, :tokens] = prompt.keys[layer]
            self.values[layer][slots, :, :tokens] = prompt.values[layer]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of one slot over another's."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :, :tokens] = keys[source, :, :, :tokens]
            values[target, :, :tokens] = values[source, :, :tokens]

    def clear(self, slot: int) -> None:
        """Zero one slot: needed where it may hold numbers that are not finite."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[slot].zero_()
            values[slot].zero_()
