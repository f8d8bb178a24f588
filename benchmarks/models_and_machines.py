"""Writes docs/models-and-machines.md: which model fits which machine, with memory sums and the command of each row.

The planner's own functions answer: what one instance of the engine needs (``orchestrator/sim/costs.py``), and what a
rank of the trainer holds (``transport/contracts/training_memory.py``), by which the trainer also refuses.

    python -m benchmarks.models_and_machines > docs/models-and-machines.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from orchestrator.planning.plan_search import PLANNED
from orchestrator.sim.costs import Gpu, generation_degrees
from orchestrator.sim.llms import HUB, LLMS
from transport.contracts.llms import Llm
from transport.contracts.settings import PipelineSettings
from transport.contracts.training_memory import (
    LORA_RANK,
    USABLE_SHARE,
    DoesNotFitError,
    Layout,
    LayoutError,
    RankMemory,
    Training,
    choose_layout,
    rank_memory,
)

GIGA = 1e9
LONGEST_TOKENS = 4096
"""Of a sample with its prompt; a micro-batch holds two, or one."""
GROUPS = 32
"""Of a batch, at most: there are no more data ranks. Commands say so where the default has fewer than ranks."""
USUAL_GROUPS = PipelineSettings().groups_per_batch
MACHINES = ((1, 24), (4, 24), (8, 24), (1, 80), (2, 80), (8, 80), (16, 80))
"""GPUs, and GB of each."""
MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-4B", "Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-14B",
    "Qwen2.5-32B", "Llama-3.3-70B", "Qwen2.5-72B",
)  # fmt: skip
KEPT = Training(tokens=2 * LONGEST_TOKENS, longest_tokens=LONGEST_TOKENS)
SHORT = {"tokens": LONGEST_TOKENS}
WAYS = tuple(
    msgspec.structs.replace(KEPT, **changes)
    for changes in (
        {},
        SHORT,
        {"recompute": "whole"},
        {"recompute": "whole", **SHORT},
        {"recompute": "whole", "offload": "optimizer", **SHORT},
    )
)
"""Ways to train, the fastest first; the first that fits is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model on one machine. degree: GPUs of an instance.  shared: trainer and engine are on the only GPU."""

    llm: Llm
    degree: int
    workers: int
    layout: Layout
    training: Training
    memory: RankMemory
    shared: bool

    @property
    def command(self) -> str:
        parallel = (f"trainer.parallel.{name}={getattr(self.layout, name)}" for name in ("tensor", "pipeline"))
        settings = [
            f"model.path={HUB[self.llm.name]}",
            *([f"generation.gpus_per_worker={self.degree}"] if self.degree > 1 else []),
            f"generation.workers={self.workers}",
            f"trainer.ranks={self.layout.num_ranks}",
            *(parallel if self.layout.num_ranks > 1 else ()),
            *([f"pipeline.groups_per_batch={GROUPS}"] if self.layout.data > USUAL_GROUPS else []),
            f"trainer.micro_batch_tokens={self.training.tokens}",
            *([f"trainer.recompute={self.training.recompute}"] if self.training.recompute != "none" else []),
            *([f"trainer.offload={self.training.offload}"] if self.training.offload != "none" else []),
            *([f"trainer.lora.rank={self.training.lora_rank}"] if self.training.lora_rank else []),
        ]
        return f"{BASE} " + " ".join(f"--set {setting}" for setting in settings)

    def cells(self) -> list[str]:
        memory = self.memory
        parts = (memory.masters, memory.gradients, memory.optimizer, memory.copy + memory.gathered)
        sums = " + ".join(f"{size / GIGA:.1f}" for size in (*parts, memory.activations + memory.working))
        generate = "shared" if self.shared else f"{self.workers} x {self.degree}"
        layout = self.layout
        return [
            self.llm.name,
            f"LoRA {self.training.lora_rank}" if self.training.lora_rank else "full",
            generate,
            f"{layout.data} x {layout.tensor} x {layout.pipeline}",
            f"{sums} = {memory.total / GIGA:.1f}",
            f"`{self.command}`",
        ]


BASE = ".venv/bin/streamrl-orchestrator run --config mine.toml --set generation.engine=sglang"


def fitted(llm: Llm, num_gpus: int, gigabytes: int, lora_rank: int) -> Row | None:
    """The fastest way that fits with the most ranks; None where none does."""
    shared = num_gpus == 1
    share = 0.5 if shared else 1.0  # core/placement.py: each has the same
    gpu = Gpu(name=f"{gigabytes} GB", memory_bytes=gigabytes * GIGA * share)
    degree = next(iter(generation_degrees(llm, gpu, LONGEST_TOKENS, PLANNED)), 0)
    left = num_gpus if shared else num_gpus - degree
    if not degree or left < 1 or degree > num_gpus:
        return None
    usable = gpu.memory_bytes * USABLE_SHARE
    for way in WAYS:
        training = msgspec.structs.replace(way, lora_rank=lora_rank)
        for ranks in range(left, 0, -1):
            try:
                layout = choose_layout(llm, ranks, usable, training, max_data=GROUPS)
            except (DoesNotFitError, LayoutError):
                continue
            return Row(
                llm=llm,
                degree=degree,
                workers=max(1, (num_gpus - ranks) // degree),
                layout=layout,
                training=training,
                memory=rank_memory(llm, layout, training),
                shared=shared,
            )
    return None


HEAD = f"""# Which model fits which machine

Made by `python -m benchmarks.models_and_machines`; do not edit it here. The rows are what the planner's functions say,
the same by which [`plan`](planning.md) proposes and the trainer refuses at its start, where it names what would fit.
They are predictions, compared with small models on a CPU (`benchmarks/parallel_predicted.py`), and with models of up to
7B on one H100, where a rank took 3 to 7% less than predicted ([figures](figures.md)).

- Samples have up to {LONGEST_TOKENS} tokens, prompt included; a rank computes {2 * LONGEST_TOKENS} at once, or
  {LONGEST_TOKENS} where only that fits, in bf16. Longer ones need more of the last summand.
- **generate** is instances x GPUs of each; on one GPU engine and trainer share it half and half. **train** is data x
  tensor x pipeline ranks ([how ranks share a model](parallel.md)).
- **GB of a rank** are masters + gradients + optimizer + weights to compute with (a bf16 copy, or what is gathered of
  other ranks) + activations and the rest; {USABLE_SHARE:.0%} of a GPU may be used. With [LoRA](lora.md) the frozen
  bf16 base is among the masters. Optimizer 0.0 at full training: it is in host memory (`trainer.offload`).
- A trained weight is 16 bytes over all ranks (fp32 master, gradient, two moments), and 2 more where no ranks share it.
- `mine.toml` has your data, reward and `sampling.max_new_tokens`; a batch has at least a group a data rank, in the
  commands where the default has fewer. `run` gives every process its GPUs, on one machine.
"""


def page() -> str:
    return "\n".join([HEAD, *(line for machine in MACHINES for line in _section(*machine))]).rstrip() + "\n"


def _section(num_gpus: int, gigabytes: int) -> Iterator[str]:
    yield f"## {num_gpus} x {gigabytes} GB\n"
    lacking: list[str] = []
    yield "| model | trains | generate | train | GB of a rank | command |"
    yield "|---|---|---|---|---|---|"
    for name in MODELS:
        rows = [fitted(LLMS[name], num_gpus, gigabytes, lora_rank) for lora_rank in (0, LORA_RANK)]
        for row in rows:
            if row is not None:
                yield "| " + " | ".join(row.cells()) + " |"
        lacking += _lacking(name, rows)
    yield f"\nDoes not fit: {', '.join(lacking)}.\n" if lacking else ""


def _lacking(name: str, rows: Sequence[Row | None]) -> list[str]:
    if any(rows):
        return [] if rows[0] else [f"{name} (full)"]
    return [name]


if __name__ == "__main__":
    print(page(), end="")
