"""What of an LLM decides how long it takes and how much memory: layers, widths, heads, and what is held in fp8.

Owns: the shape of a dense decoder, and the counts that follow. Never: GPUs, which models there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

BYTES = 2
"""Of a weight, a key or a value in bf16."""


class Fp8(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds in fp8, in one byte instead of two: keys and values, the weights that compute. It is false
    where that is nothing.
    """

    kv: bool = False
    weights: bool = False

    def __bool__(self) -> bool:
        return self.kv or self.weights

    @property
    def kv_bytes(self) -> int:
        """Of a key or a value."""
        return 1 if self.kv else BYTES

    @property
    def weight_bytes(self) -> int:
        """Of a weight."""
        return 1 if self.weights else BYTES

    @property
    def names(self) -> list[str]:
        return [name for name, is_on in (("keys and values", self.kv), ("weights", self.weights)) if is_on]

    @property
    def options(self) -> str:
        """As `profile`, `plan` and `simulate` are told."""
        return " ".join(name for name, is_on in (("--fp8-kv", self.kv), ("--fp8-weights", self.weights)) if is_on)

    @property
    def settings(self) -> dict[str, str]:
        """As [generation] is told."""
        return {name: "fp8" for name, is_on in (("kv_dtype", self.kv), ("weights_dtype", self.weights)) if is_on}


BF16 = Fp8()


class UnknownModelError(ValueError):
    """A configuration does not describe a dense decoder; the message names the missing field."""


class Llm(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a dense decoder with grouped-query attention and a gated MLP.

    tied: the matrix of the embedding is that of the head.  qk_norm: queries and keys are normalised, as in Qwen3.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False

    @property
    def layer_params(self) -> int:
        """Weights of one layer: attention and MLP. Norms and biases are left out (below 0.1%)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def embedding_params(self) -> int:
        """Of the embedding, and of the head, which is the same matrix where they are tied."""
        return self.hidden * self.vocabulary

    @property
    def params(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.layer_params + self.embedding_params * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Weights that a token is multiplied with: all but the input embedding."""
        return self.layers * self.layer_params + self.embedding_params

    @property
    def weight_bytes(self) -> float:
        return float(BYTES * self.params)

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token."""
        return float(2 * BYTES * self.layers * self.kv_heads * self.head_dim)


def _names(value: object) -> list[str]:
    return [str(one) for one in cast("list[object]", value)] if isinstance(value, list) else []


def from_config(name: str, config: Mapping[str, object]) -> Llm:
    """The shape of a dense decoder from its Hugging Face configuration.

    Raises UnknownModelError when a field is missing or the model is not dense.
    """
    if config.get("is_decoder") is False or any("MaskedLM" in one for one in _names(config.get("architectures"))):
        raise UnknownModelError(f"{name} is an encoder ({config.get('model_type')}): it writes no text")
    if config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"):
        raise UnknownModelError(f"{name} has experts: only dense decoders are modelled")

    def count(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            kind = config.get("model_type")
            raise UnknownModelError(
                f"{name}: its configuration has no usable {field} ({value!r})"
                + (f"; a decoder that writes text has one, and this is of the type {kind!r}" if kind else "")
            )
        return value

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    return Llm(
        name=name,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", hidden // heads),
        mlp=count("intermediate_size"),
        vocabulary=count("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=config.get("model_type") == "qwen3",
    )
