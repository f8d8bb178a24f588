"""One step of a Llama, Qwen2 or Qwen3 model over a mixed batch, decode tokens and whole prompts together, and its KV.

Owns: the arithmetic of a step, the memory of keys and values. Never: which sample is where (``slots.py``).
Invariant: equal to the Hugging Face module's own forward (tests compare them); its parameters stay the module's
parameters, as views of the fused ones, so that loading weights by their Hugging Face names reaches both. Slots
``[0, n)`` are the running ones, so that a step reads plain slices; everything beyond a slot's length is finite, because
a masked position still meets its value as 0 * value.

Why not call the module: with q, k, v and gate, up fused, transposed keys and norms in one operation a decode step of
SmolLM2 (bf16, 32 slots, one thread) takes less than half the module's time. Other families run on
ModuleForward, which is slower and computes the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from workers.errors import ModelError
from workers.generation.embedded.products import Linear, enough_rows

FIRST_CAPACITY = 128
"""Tokens a slot can hold at first; it doubles on demand, because with T innermost a page of every key row is touched
however short the samples are (64 slots of SmolLM2 at 2048 tokens: 1.5 GB)."""
LIMITED_STEP = 256
"""Tokens by which it grows where memory is too short for doubling: what all slots could take then is worth a copy."""
ROW_PAD = 32
"""Spare tokens at the end of a row: rows a power of two apart would fall into the same cache sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """layers: L.  heads: H, of keys and values.  head_dim: D."""

    layers: int
    heads: int
    head_dim: int

    def num_bytes(self, slots: int, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of ``slots`` slots of ``tokens`` tokens together."""
        return 2 * self.layers * self.heads * self.head_dim * (tokens + slots * ROW_PAD) * dtype.itemsize


class SlotKV:
    """Static KV memory of up to ``max_slots`` slots of up to ``max_tokens`` tokens; see KVShape.num_bytes.

    limit: tokens, all slots together, at least ``max_tokens``; 0: as many as they may take. Where that is less, there
    are the more slots the shorter they are: slots * capacity never is above it.
    keys, values: of each layer, [S, H, T, D]. Of the keys T is innermost in memory: a decode step multiplies [G, D] by
    [D, T], and that way the product took half the time on a CPU (bf16, 32 slots, 96 tokens: 8.9 against 13.3 ms over 30
    layers).
    """

    def __init__(
        self, shape: KVShape, *, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device, limit: int = 0
    ) -> None:
        if 0 < limit < max_tokens:
            raise ValueError(f"{limit} tokens do not hold one slot of {max_tokens}")
        self.shape = shape
        self.max_slots = slots
        self.max_tokens = max_tokens
        self.limit = limit or slots * max_tokens
        self.capacity = min(FIRST_CAPACITY, max_tokens)
        self.slots = min(slots, self.limit // self.capacity)
        self._dtype, self._device = dtype, device
        self.keys = [self._zeros(transposed=True) for _ in range(shape.layers)]
        self.values = [self._zeros(transposed=False) for _ in range(shape.layers)]

    def _zeros(self, *, transposed: bool) -> torch.Tensor:
        tokens, head_dim = self.capacity + ROW_PAD, self.shape.head_dim
        tail = (head_dim, tokens) if transposed else (tokens, head_dim)
        memory = torch.zeros(self.slots, self.shape.heads, *tail, dtype=self._dtype, device=self._device)
        return memory.transpose(2, 3) if transposed else memory

    def reserve(self, tokens: int, num_slots: int, keep: int) -> None:
        """Make room for ``tokens`` tokens in each of slots [0, num_slots), keeping slots [0, keep), none of which is
        longer; a layer at a time."""
        capacity = self._capacity_for(tokens, num_slots)
        if capacity == self.capacity and self.slots * capacity <= self.limit:
            return
        kept = min(self.capacity, capacity)
        self.capacity, self.slots = capacity, min(self.max_slots, self.limit // capacity)
        for layers, transposed in ((self.keys, True), (self.values, False)):
            for layer, memory in enumerate(layers):
                layers[layer] = self._zeros(transposed=transposed)
                layers[layer][:keep, :, :kept] = memory[:keep, :, :kept]
                del memory
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # too short for what is asked for later: to whom shares the GPU it is of use

    def _capacity_for(self, tokens: int, num_slots: int) -> int:
        """The present one while it will do; else twice as much while memory holds that, else what leaves room for more
        slots."""
        if num_slots > self.max_slots or tokens > self.max_tokens or num_slots * tokens > self.limit:
            raise ValueError(
                f"{num_slots} slots of {tokens} tokens do not fit into {self.max_slots} of {self.max_tokens}, "
                f"{self.limit} tokens together"
            )
        if tokens <= self.capacity and num_slots * self.capacity <= self.limit:
            return self.capacity
        doubled = min(max(tokens, 2 * self.capacity), self.max_tokens)
        if tokens > self.capacity and self.max_slots * doubled <= self.limit:
            return doubled
        stepped = -(-tokens // LIMITED_STEP) * LIMITED_STEP
        return min(stepped, self.limit // num_slots, self.max_tokens)

    def append(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write tokens into their slots. slots, positions: [R].  keys, values: [R, H, D]."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def fill(self, layer: int, slots: slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a prompt into all of ``slots``. keys, values: [P, H, D]."""
        self.keys[layer][slots, :, : len(keys)] = keys.transpose(0, 1)
        self.values[layer][slots, :, : len(values)] = values.transpose(0, 1)

    def live(self, layer: int, num_slots: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [n, H, D, tokens] and [n, H, tokens, D] of what the running slots hold."""
        keys, values = self.keys[layer][:num_slots, :, :tokens], self.values[layer][:num_slots, :, :tokens]
        return keys.transpose(2, 3), values

    def copy_prompt(self, slot: int, tokens: int) -> list[torch.Tensor]:
        """A copy of the first ``tokens`` tokens of one slot: all keys, then all values, [H, P, D] each."""
        return [memory[slot, :, :tokens].clone() for memory in (*self.keys, *self.values)]

    def paste_prompt(self, slots: slice, prompt: Sequence[torch.Tensor]) -> None:
        for memory, kept in zip((*self.keys, *self.values), prompt, strict=True):
            memory[slots, :, : kept.shape[1]] = kept

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of one slot over another's."""
        for memory in (*self.keys, *self.values):
            memory[target, :, :tokens] = memory[source, :, :tokens]

    def clear(self, slot: int) -> None:
        """Zero one slot: needed where it may hold numbers that are not finite."""
        for memory in (*self.keys, *self.values):
            memory[slot].zero_()


FUSED_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})

LIVE_MULTIPLE = 16
"""Attention reads a multiple of this many tokens, so that row ends meet the vector width (16 bf16 in 256 bits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSegment:
    """Tokens ``[start, stop)`` of the batch are a prompt, to be written into ``slots``."""

    start: int
    stop: int
    slots: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRuns:
    """Which decode tokens are of which running slot, where some slots have several, one after another.

    rows: [n, W] tokens of each slot, its last one repeated where it has fewer than W.
    places: [R] of each token in ``rows``, flat.
    """

    rows: torch.Tensor
    places: torch.Tensor

    @staticmethod
    def of(widths: NDArray[np.int64], device: torch.device) -> DecodeRuns:
        """widths: [n] tokens of each slot, each >= 1; found on the host, since a GPU would be waited for."""
        width = int(widths.max())
        starts = widths.cumsum() - widths
        slots = np.repeat(np.arange(len(widths)), widths)
        rows = starts[:, None] + np.minimum(np.arange(width), widths[:, None] - 1)
        places = slots * width + np.arange(len(slots)) - starts[slots]
        return DecodeRuns(rows=torch.from_numpy(rows).to(device), places=torch.from_numpy(places).to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one step computes.

    token_ids: [N] int64: tokens of the running slots, one after another, then the prompts.
    positions: [N] int64, of each token in its sample.
    decode_slots: [R] int64, slot of each token of a running slot.
    max_tokens: longest sample of the decode part, its new tokens included.
    runs: None: one token for each of the slots [0, R).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    decode_slots: torch.Tensor
    max_tokens: int
    prompts: Sequence[PromptSegment]
    runs: DecodeRuns | None = None

    @property
    def num_decode(self) -> int:
        """R, tokens of the running slots."""
        return len(self.decode_slots)

    @property
    def num_slots(self) -> int:
        """n, running slots that decode."""
        return len(self.runs.rows) if self.runs else self.num_decode


class Forward(Protocol):
    """Runs one step on the slots' KV, which holds the new tokens afterwards."""

    kv_shape: KVShape

    def run(self, batch: StepBatch, kv: SlotKV) -> torch.Tensor:
        """Returns logits [num_decode + len(prompts), V]: of each decode token, then of each prompt's last token."""
        ...

    def weights_changed(self) -> None:
        """Call after writing to the parameters, before the next step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """parameters: the model's tensors by each of their Hugging Face names (a tied tensor has two); writing to them
    changes it.  max_context: tokens of prompt + response.  names: of tensors in the model's files -> in ``parameters``,
    where they differ.
    """

    forward: Forward
    parameters: Mapping[str, torch.Tensor]
    max_context: int
    vocab_size: int
    names: Mapping[str, str] = field(default_factory=dict[str, str])


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether FusedForward computes this model: its family, with full attention and a rope that does not change."""
    config = cast(Any, model.config)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        config.model_type in FUSED_FAMILIES
        and set(layer_types) == {"full_attention"}
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in {"default", "linear", "llama3", "yarn"}
    )


Operation = Callable[[torch.Tensor], torch.Tensor]


def _linear(layer: nn.Linear) -> Linear:
    return Linear(layer.weight, layer.bias)


def _norm(norm: Any) -> Operation:
    return partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=float(norm.variance_epsilon))


def _fuse(*linears: nn.Linear) -> Linear:
    """One linear layer for several with the same input; their parameters become views of its rows."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = torch.cat([linear.bias.detach() for linear in linears]) if linears[0].bias is not None else None
    start = 0
    for linear in linears:
        stop = start + linear.weight.shape[0]
        linear.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return Linear(weight, bias)


def _rotate(cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rope of x [N, heads, D]. cos, sin: [N, 1, D]; the sine's first half is negated, so that rotate_half is a roll."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The parameters of one block. q_norm, k_norm: Qwen3 only."""

    input_norm: Operation
    qkv: Linear
    q_norm: Operation | None
    k_norm: Operation | None
    out: Linear
    mlp_norm: Operation
    gate_up: Linear
    down: Linear


class FusedForward:
    """Takes over the parameters of ``model``. max_context: tokens, the length of its rope table."""

    def __init__(self, model: PreTrainedModel, *, max_context: int) -> None:
        config, body = cast(Any, model.config), cast(Any, model).model
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(body.layers[0].self_attn.head_dim)
        self._scale = float(body.layers[0].self_attn.scaling)
        self.kv_shape = KVShape(layers=len(body.layers), heads=self._kv_heads, head_dim=self._head_dim)
        self._layers = [_take_layer(layer) for layer in body.layers]
        self._embedding = body.embed_tokens.weight
        self._norm = _norm(body.norm)
        self._lm_head = _linear(cast(Any, model).lm_head)
        self._cos, self._sin = _rope_table(body, self._embedding, max_context)

    @torch.inference_mode()
    def run(self, batch: StepBatch, kv: SlotKV) -> torch.Tensor:
        hidden = F.embedding(batch.token_ids, self._embedding)
        rope = partial(_rotate, self._cos[batch.positions], self._sin[batch.positions])
        mask = self._mask(batch)
        for index, layer in enumerate(self._layers):
            hidden = hidden + layer.out(self._attend(index, layer, layer.input_norm(hidden), rope, mask, batch, kv))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        if batch.prompts:
            last = [hidden[prompt.stop - 1 : prompt.stop] for prompt in batch.prompts]
            hidden = torch.cat([hidden[: batch.num_decode], *last])
        return self._lm_head(self._norm(hidden))

    def weights_changed(self) -> None:
        self._lm_head.pack()
        for layer in self._layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.pack()

    def _mask(self, batch: StepBatch) -> torch.Tensor:
        """What lies beyond each decode token: [n * H, 1 or as many rows as its product has, T], 0 or -inf."""
        positions, kv_heads = batch.positions[: batch.num_decode], self._kv_heads
        tokens = -(-batch.max_tokens // LIVE_MULTIPLE) * LIVE_MULTIPLE
        outside = torch.arange(tokens, device=positions.device) > positions[:, None]
        mask = torch.zeros(outside.shape, dtype=self._embedding.dtype, device=positions.device)
        mask = mask.masked_fill_(outside, -torch.inf)
        if batch.runs is None:
            return mask.repeat_interleave(kv_heads, dim=0)[:, None]
        n, width = batch.runs.rows.shape
        each = mask[batch.runs.rows][:, None, :, None].expand(n, kv_heads, width, self._heads // kv_heads, tokens)
        return enough_rows(each.reshape(n * kv_heads, -1, tokens))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        hidden: torch.Tensor,
        rope: Operation,
        mask: torch.Tensor,
        batch: StepBatch,
        kv: SlotKV,
    ) -> torch.Tensor:
        """Attention of one layer before its output projection; [N, heads * D]."""
        qkv = layer.qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        query, key, value = qkv.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = layer.q_norm(query), layer.k_norm(key)
            query, key = rope(query), rope(key)
        else:
            query, key = rope(qkv[:, : self._heads + self._kv_heads]).split((self._heads, self._kv_heads), dim=1)
        n = batch.num_decode
        parts: list[torch.Tensor] = []
        if n:
            kv.append(index, batch.decode_slots, batch.positions[:n], key[:n], value[:n])
            if batch.runs is None:
                parts.append(self._attend_decode(index, query[:n, None], mask, kv))
            else:
                padded = self._attend_decode(index, query[batch.runs.rows], mask, kv)
                parts.append(padded[batch.runs.places])
        for prompt in batch.prompts:
            rows = slice(prompt.start, prompt.stop)
            kv.fill(index, prompt.slots, key[rows], value[rows])
            parts.append(self._attend_prompt(query[rows], key[rows], value[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decode(self, index: int, query: torch.Tensor, mask: torch.Tensor, kv: SlotKV) -> torch.Tensor:
        """query: [n, W, heads, D].  mask: as of ``_mask``.  Returns [n * W, heads * D]."""
        n, width, tokens = query.shape[0], query.shape[1], mask.shape[-1]
        keys, values = kv.live(index, n, tokens)
        # A slot's tokens, and query heads that share a key head, are the rows of one product: no key is repeated.
        grouped = query.view(n, width, self._kv_heads, -1, self._head_dim).transpose(1, 2)
        rows = grouped.reshape(n * self._kv_heads, -1, self._head_dim)
        scores = torch.baddbmm(mask, enough_rows(rows), keys.flatten(0, 1), alpha=self._scale)
        attended = torch.bmm(scores.softmax(-1), values.flatten(0, 1))[:, : rows.shape[1]]
        return attended.reshape(n, self._kv_heads, width, -1).transpose(1, 2).reshape(n * width, -1)

    def _attend_prompt(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query: [P, heads, D].  key, value: [P, H, D].  Returns [P, heads * D]."""
        repeats = self._heads // self._kv_heads
        key, value = (x.repeat_interleave(repeats, dim=1).transpose(0, 1)[None] for x in (key, value))
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, is_causal=True, scale=self._scale
        )
        return attended[0].transpose(0, 1).flatten(1)


def _take_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_fuse(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        out=_linear(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


@torch.inference_mode()
def _rope_table(body: Any, like: torch.Tensor, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's own cos and sin for every position: [max_context, 1, D] each; see _rotate for the sine's sign."""
    cos, sin = body.rotary_emb(like[None], torch.arange(max_context, device=like.device)[None])
    half = sin.shape[-1] // 2
    return cos[0, :, None], torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)[0, :, None]


# --- any other model, through its own module --------------------------------------------------------------------------


class ModuleForward:
    """Runs ``model``'s own forward. Raises ModelError for a model whose cache is not plain keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = cast(Any, model.config).get_text_config()
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"}:
            raise ModelError(
                f"model type {config.model_type!r} has layers of type {', '.join(sorted(layer_types))}; "
                "the embedded engine runs full attention only"
            )
        heads = config.num_attention_heads
        self.kv_shape = KVShape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        self._model = cast(Any, model)
        self._cache_argument = cache_argument(model)

    @torch.inference_mode()
    def run(self, batch: StepBatch, kv: SlotKV) -> torch.Tensor:
        n = batch.num_decode
        logits: list[torch.Tensor] = []
        if n:
            logits.append(self._decode(batch, kv))
        for prompt in batch.prompts:
            cache = DynamicCache(config=self._model.config)
            ids = batch.token_ids[None, prompt.start : prompt.stop]
            out = self._model(input_ids=ids, **{self._cache_argument: cache}, use_cache=True, logits_to_keep=1)
            logits.append(out.logits[:, -1])
            for index, layer in enumerate(cast(Any, cache).layers):
                kv.fill(index, prompt.slots, layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
        return torch.cat(logits)

    def weights_changed(self) -> None:
        """The module computes with its parameters as they are."""

    def _decode(self, batch: StepBatch, kv: SlotKV) -> torch.Tensor:
        """Every token is a row of the module's batch, also where several are of one slot."""
        positions = batch.positions[: batch.num_decode]
        inside = torch.arange(batch.max_tokens, device=positions.device) <= positions[:, None]
        out = self._model(
            input_ids=batch.token_ids[: batch.num_decode, None],
            position_ids=positions[:, None],
            attention_mask=inside[:, None, None],  # 4-D: transformers passes it on as it is
            **{self._cache_argument: _SlotCache(kv, batch)},
            use_cache=True,
        )
        return out.logits[:, -1]


def cache_argument(model: PreTrainedModel) -> str:
    """How ``model`` calls its keys and values: since transformers 5.24 "cache", and the older name only warns."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _SlotCache(Cache):
    """The running slots as the module sees its cache: each row has its own length."""

    def __init__(self, kv: SlotKV, batch: StepBatch) -> None:
        super().__init__(layers=[])
        self._kv, self._batch = kv, batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens, [R, H, 1, D] each; return all tokens of each one's slot, [R, H, T, D] each."""
        batch = self._batch
        positions = batch.positions[: batch.num_decode]
        self._kv.append(layer_idx, batch.decode_slots, positions, key_states[:, :, 0], value_states[:, :, 0])
        keys, values = self._kv.live(layer_idx, batch.num_slots, batch.max_tokens)
        keys = keys.transpose(2, 3)
        return (keys, values) if batch.runs is None else (keys[batch.decode_slots], values[batch.decode_slots])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._batch.max_tokens - 1
