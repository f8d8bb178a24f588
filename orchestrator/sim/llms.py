"""What of an LLM decides how long it takes: layers, widths, heads.

Owns: the shapes, and the counts that follow. Never: GPUs. Invariant: a specification equals what its Hugging Face
``config.json`` says; ``from_config`` reads any other dense decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

BYTES = 2
"""Of a weight, a key or a value in bf16."""


class UnknownModelError(ValueError):
    """A configuration does not describe a dense decoder; the message names the missing field."""


class Llm(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a dense decoder with grouped-query attention and a gated MLP."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_params(self) -> int:
        """Weights of one layer: attention and MLP. Norms and biases are left out (below 0.1%)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def params(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.layer_params + self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Weights that a token is multiplied with: all but the input embedding."""
        return self.layers * self.layer_params + self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> float:
        return float(BYTES * self.params)

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token."""
        return float(2 * BYTES * self.layers * self.kv_heads * self.head_dim)


# Hugging Face config.json of each. StreamRL's Table 2 prints 28 query and 8 KV heads for the 7B, which cannot be: 8
# does not divide 28; its configuration has 4.
QWEN_7B = Llm(
    name="Qwen2.5-7B", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, mlp=18944, vocabulary=152064
)
QWEN_32B = Llm(
    name="Qwen2.5-32B", layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, mlp=27648, vocabulary=152064
)
QWEN_72B = Llm(
    name="Qwen2.5-72B", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=29568, vocabulary=152064
)
QWEN_3B = Llm(
    name="Qwen2.5-3B",
    layers=36,
    hidden=2048,
    heads=16,
    kv_heads=2,
    head_dim=128,
    mlp=11008,
    vocabulary=151936,
    tied=True,
)
SMOLLM2_135M = Llm(
    name="SmolLM2-135M", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocabulary=49152, tied=True
)
SMOLLM2_1_7B = Llm(
    name="SmolLM2-1.7B",
    layers=24,
    hidden=2048,
    heads=32,
    kv_heads=32,
    head_dim=64,
    mlp=8192,
    vocabulary=49152,
    tied=True,
)
LLMS = {llm.name: llm for llm in (QWEN_3B, QWEN_7B, QWEN_32B, QWEN_72B, SMOLLM2_135M, SMOLLM2_1_7B)}

HUB = {name: ("Qwen/" if name.startswith("Qwen") else "HuggingFaceTB/") + name for name in LLMS}
"""Where each is on the hub, as setting ``model.path`` names it."""


def from_config(name: str, config: Mapping[str, object]) -> Llm:
    """The shape of a dense decoder from its Hugging Face configuration.

    Raises UnknownModelError when a field is missing or the model is not dense.
    """
    if config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"):
        raise UnknownModelError(f"{name} has experts: only dense decoders are modelled")

    def count(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnknownModelError(f"{name}: its configuration has no usable {field} ({value!r})")
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
    )
