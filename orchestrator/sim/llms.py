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
LLMS = {llm.name: llm for llm in (QWEN_3B, QWEN_7B, QWEN_32B, QWEN_72B, SMOLLM2_135M, SMOLLM2_1_7B)}

HUB = {name: ("Qwen/" if name.startswith("Qwen") else "HuggingFaceTB/") + name for name in LLMS}
"""Where each is on the hub, as setting ``model.path`` names it."""
