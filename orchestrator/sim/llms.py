"""Models that simulator and planner know by name.

Invariant: each equals what its Hugging Face ``config.json`` says; ``transport/contracts/llms.py`` reads any other's.
"""

from __future__ import annotations

from transport.contracts.llms import Llm

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


def _qwen(name: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, *, head_dim: int = 128) -> Llm:
    """Qwen2.5 and Qwen3: small ones are tied, and have another padding of the vocabulary."""
    return Llm(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocabulary=152064 if hidden >= 3584 and not name.startswith("Qwen3") else 151936,
        tied=hidden < 3584,
        qk_norm=name.startswith("Qwen3"),
    )


def _llama(name: str, layers: int, hidden: int, heads: int, mlp: int) -> Llm:
    return Llm(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, vocabulary=128256
    )


OTHERS = (
    _qwen("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, head_dim=64),
    _qwen("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960),
    _qwen("Qwen2.5-14B", 48, 5120, 40, 8, 13824),
    _qwen("Qwen3-4B", 36, 2560, 32, 8, 9728),
    _qwen("Qwen3-8B", 36, 4096, 32, 8, 12288),
    _llama("Llama-3.1-8B", 32, 4096, 32, 14336),
    _llama("Llama-3.3-70B", 80, 8192, 64, 28672),
)
LLMS = {llm.name: llm for llm in (QWEN_3B, QWEN_7B, QWEN_32B, QWEN_72B, SMOLLM2_135M, SMOLLM2_1_7B, *OTHERS)}

OWNERS = {"Qwen": "Qwen", "Llama": "meta-llama", "SmolLM2": "HuggingFaceTB"}
HUB = {name: f"{next(owner for start, owner in OWNERS.items() if name.startswith(start))}/{name}" for name in LLMS}
"""Where each is on the hub, as setting ``model.path`` names it."""
