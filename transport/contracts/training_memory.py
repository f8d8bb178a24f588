"""What a rank of the trainer holds in memory, and which layouts of ranks a model allows and fits into.

    rank_memory     bytes of the fullest rank, part by part, from the model, the layout and what is trained on it
    choose_layout   trainer.parallel = "auto": the least tensor and pipeline parallelism that fits
    layout_of_run   the same of a run's settings
    what_fits       which settings would do where these do not

Owns: the arithmetic of the trainer's memory; the trainer refuses by it, and plans propose by it. Never: torch, devices.
Invariants: the parts add up to the total; a layout that is returned divides the model and fits. Source: ours, counted
with torch's memory tracker over small models (``benchmarks/parallel_predicted.py``); the papers give no formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from transport.contracts.llms import Llm
from transport.contracts.settings import ParallelSettings, Settings

MASTER_BYTES, GRADIENT_BYTES, MOMENTS_BYTES = 4, 4, 8
"""Of a trained weight: fp32 master, fp32 sum of gradients, the two moments of AdamW."""
SUM_BYTES = 4
"""Of norms, of softmax, and of gradients while they are reduced: all in fp32."""
BLOCK_ROWS, CPU_SOFTMAX_ROWS, GPU_SOFTMAX_ROWS = 2048, 128, 512
"""Rows of logits whose gradient is held at once, in the compute dtype, for one matrix product into the weight's
gradient, and of those in fp32 (``workers/trainer/policy/head.py``)."""
MOST_TENSOR = 8
"""Ranks that compute a layer together stay within a host."""
USABLE_SHARE = 0.9
"""Of a device's memory, that may be planned with: the rest is for its context, buffers and fragments."""
LORA_RANK = 16
"""Of adapters, where they are proposed."""

PROMPT_TOKENS = 64
"""Of a prompt, where generation.max_context does not say. Few, as the trainer refuses what it is sure does not fit."""

Axis = int | Literal["auto"]


class LayoutError(ValueError):
    """A layout does not divide the model or the ranks. The message names the setting and what would."""


class DoesNotFitError(ValueError):
    """A model does not fit. The message names it, the layout, the bytes, and what would fit."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks along each axis; their product trains one model."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"{self.data} data x {self.tensor} tensor x {self.pipeline} pipeline"


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a rank's memory beside the model and the layout.

    tokens: of the largest micro-batch, prompts included.  longest_tokens: of a sample, which is never split.
    compute_bytes: of a weight or an activation: 2 in bf16, 4 in fp32.  lora_rank: of adapters; 0: all weights are
    trained.  lora_targets: as the setting.  host_is_device: what is offloaded stays in the same memory (a CPU).
    """

    tokens: int
    longest_tokens: int = 0
    compute_bytes: int = 2
    recompute: Literal["none", "selective", "whole"] = "none"
    offload: Literal["none", "optimizer"] = "none"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ("all-linear",)
    host_is_device: bool = False


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank. States stay from step to step; the rest is there at the fullest moment of one.

    masters: fp32 weights, or with adapters theirs and the frozen base.  copy: of all weights, that is computed with.
    gathered: weights of other ranks, while they are computed with.  activations: kept for the backward pass.
    working: a block of logits and its gradient, or what the backward pass of a layer needs, whichever is more.
    """

    masters: float
    gradients: float
    optimizer: float
    copy: float
    gathered: float
    activations: float
    working: float

    @property
    def states(self) -> float:
        return self.masters + self.gradients + self.optimizer + self.copy

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.activations + self.working

    def __str__(self) -> str:
        parts = ((getattr(self, name), name) for name in self.__struct_fields__)
        return ", ".join(f"{size / 1e9:.1f} GB {name}" for size, name in parts if size >= 5e7) or "less than 0.1 GB"


def training_of(settings: Settings, *, compute_bytes: int, on_gpu: bool) -> Training:
    """What a run's settings ask of a rank. compute_bytes: of what trainer.dtype means on its device."""
    trainer, sampling, pipeline = settings.trainer, settings.sampling, settings.pipeline
    longest = max(settings.generation.max_context, sampling.max_new_tokens)
    prompt = longest - sampling.max_new_tokens or PROMPT_TOKENS
    of_batch = pipeline.groups_per_batch * (prompt + pipeline.group_size * sampling.max_new_tokens)
    return Training(
        tokens=max(min(trainer.micro_batch_tokens, of_batch), longest, *trainer.parallel.buckets),
        longest_tokens=longest,
        compute_bytes=compute_bytes,
        recompute=trainer.recompute,
        offload=trainer.offload,
        lora_rank=trainer.lora.rank,
        lora_targets=tuple(trainer.lora.targets),
        host_is_device=not on_gpu,
    )


# -- bytes of a rank


def rank_memory(llm: Llm, layout: Layout, training: Training) -> RankMemory:
    """Of the fullest rank."""
    stages = (_stage_memory(llm, layout, training, stage) for stage in {0, layout.pipeline - 1})
    return max(stages, key=lambda one: one.total)


def state_bytes(llm: Llm, layout: Layout, training: Training) -> float:
    """Weights, gradients and optimizer of the rank that holds most of them."""
    return max(_stage_memory(llm, layout, training, stage).states for stage in {0, layout.pipeline - 1})


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of a stage: as many each as can be, the first stages one more where it does not come out even."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def _stage_memory(llm: Llm, layout: Layout, training: Training, stage: int) -> RankMemory:
    size, data = training.compute_bytes, layout.data
    layers = len(stage_layers(llm.layers, layout.pipeline, stage))
    layer, ends = _layer_params(llm, layout), _end_params(llm, layout, stage)
    weights = layers * layer + ends
    adapters = layers * lora_params(llm, training) / layout.tensor
    trained = adapters if training.lora_rank else weights
    base = size * weights / data if training.lora_rank else 0.0
    in_host = training.offload == "optimizer" and not training.host_is_device
    sharded = data > 1
    return RankMemory(
        masters=MASTER_BYTES * trained / data + base,
        gradients=GRADIENT_BYTES * trained / data,
        optimizer=0.0 if in_host else MOMENTS_BYTES * trained / data,
        copy=0.0 if sharded or size == MASTER_BYTES else size * trained,
        gathered=size * (ends + 2 * layer) if sharded else 0.0,
        activations=_activation_bytes(llm, layout, training, stage),
        working=_working_bytes(llm, layout, training, stage),
    )


def _layer_params(llm: Llm, layout: Layout) -> float:
    """Of one layer: matrices are split over tensor ranks, both norms are not."""
    return llm.layer_params / layout.tensor + 2 * llm.hidden


def _end_params(llm: Llm, layout: Layout, stage: int) -> float:
    """Of embedding and head, as far as the stage has them; tied ones are on the first and on the last."""
    first, last = stage == 0, stage == layout.pipeline - 1
    matrices = 1 if first and last and llm.tied else first + last
    return matrices * llm.embedding_params / layout.tensor


def lora_params(llm: Llm, training: Training) -> float:
    """Of the adapters of one layer: a rank times inputs and outputs of each matrix that has one."""
    heads, keys = llm.heads * llm.head_dim, llm.kv_heads * llm.head_dim
    sizes = {
        "q_proj": llm.hidden + heads,
        "k_proj": llm.hidden + keys,
        "v_proj": llm.hidden + keys,
        "o_proj": heads + llm.hidden,
        "gate_proj": llm.hidden + llm.mlp,
        "up_proj": llm.hidden + llm.mlp,
        "down_proj": llm.mlp + llm.hidden,
    }
    every = "all-linear" in training.lora_targets
    return training.lora_rank * sum(count for name, count in sizes.items() if every or name in training.lora_targets)


def _activation_bytes(llm: Llm, layout: Layout, training: Training, stage: int) -> float:
    """What the forward pass keeps, of as many micro-batches as the stage has under way (one forward, one backward)."""
    layers = len(stage_layers(llm.layers, layout.pipeline, stage))
    kept = (layout.pipeline - stage) * layers * layer_token_bytes(llm, layout, training)
    if training.recompute != "none":  # of one layer of one micro-batch everything, while it is computed again
        kept += layer_token_bytes(llm, layout, msgspec.structs.replace(training, recompute="none"))
    ends = (3 * training.compute_bytes + SUM_BYTES) * llm.hidden / layout.tensor  # last norm, hidden states, gradient
    return training.tokens * (kept + ends)


def layer_token_bytes(llm: Llm, layout: Layout, training: Training) -> float:
    """Kept of one token by one layer.

    Each norm keeps its input in fp32, that input normalised, and its output, of which tensor ranks hold all tokens for
    the matrix products behind it; attention keeps queries, keys and values, and its output twice; the MLP keeps four
    products. A layer that is computed again keeps its input alone; "selective" also its matrix products and attention.
    """
    size, split = training.compute_bytes, layout.tensor
    heads, keys = llm.heads * llm.head_dim, llm.kv_heads * llm.head_dim
    if training.recompute == "whole":
        return size * llm.hidden / split
    if training.recompute == "selective":
        return size * (3 * llm.hidden + 2 * heads + 2 * keys + 2 * llm.mlp) / split
    norms = 2 * llm.hidden * ((SUM_BYTES + size) / split + size)
    attention = size * (3 * heads + 2 * keys) + ((SUM_BYTES + size) * (heads + keys) if llm.qk_norm else 0)
    return norms + (attention + 4 * size * llm.mlp) / split


def _working_bytes(llm: Llm, layout: Layout, training: Training, stage: int) -> float:
    """At the fullest moment of the backward pass: in the head, in a layer, or in the embedding."""
    size, tokens = training.compute_bytes, training.tokens
    words = llm.vocabulary / layout.tensor
    matrix = llm.embedding_params / layout.tensor
    trains_all = not training.lora_rank
    rows = CPU_SOFTMAX_ROWS if training.host_is_device else GPU_SOFTMAX_ROWS
    block = size * min(tokens, BLOCK_ROWS) * words + 3 * SUM_BYTES * min(tokens, rows) * words
    head = block + (size * matrix if trains_all and size < MASTER_BYTES else 0.0)
    layer = 3 * size * tokens * llm.mlp / layout.tensor + 4 * size * tokens * llm.hidden
    if trains_all:  # its gradient, before it is added to the sum
        layer += size * llm.hidden * llm.mlp / layout.tensor
    if layout.data > 1 and trains_all:
        layer += (size + SUM_BYTES) * _layer_params(llm, layout)
    return max(head if stage == layout.pipeline - 1 else 0.0, layer)


# -- layouts


def check_layout(llm: Llm, layout: Layout, *, ranks: int | None = None) -> None:
    """Raises LayoutError: ``layout`` does not divide the model, or is not of ``ranks``; the message says what would."""
    if problem := next(_problems(llm, layout), ""):
        raise LayoutError(problem)
    if ranks is not None and layout.num_ranks != ranks:
        raise LayoutError(f"trainer.parallel of {layout} is for {layout.num_ranks} ranks, and trainer.ranks = {ranks}")


def _problems(llm: Llm, layout: Layout) -> Iterator[str]:
    counts = _split_by_tensor(llm)
    divisors = [str(n) for n in range(1, MOST_TENSOR + 1) if all(count % n == 0 for count in counts.values())]
    for what, count in counts.items():
        if count % layout.tensor:
            yield (
                f"trainer.parallel.tensor = {layout.tensor} does not divide the {count} {what} of {llm.name}; "
                f"{', '.join(divisors)} would"
            )
    if layout.pipeline > llm.layers:
        yield f"trainer.parallel.pipeline = {layout.pipeline} is more than the {llm.layers} layers of {llm.name}"


def _split_by_tensor(llm: Llm) -> dict[str, int]:
    return {
        "attention heads": llm.heads,
        "key-value heads": llm.kv_heads,
        "columns of the MLP": llm.mlp,
        "words": llm.vocabulary,
    }


def layouts(
    llm: Llm, ranks: int, parallel: ParallelSettings | None = None, *, ranks_per_host: int = MOST_TENSOR
) -> list[Layout]:
    """Those of ``ranks`` that the model allows: the least tensor and pipeline parallelism first.

    parallel: what is not "auto" in it is kept.  ranks_per_host: within which ranks compute a layer together.
    """
    wanted = parallel or ParallelSettings()
    found = [
        Layout(data=ranks // tensor // pipeline, tensor=tensor, pipeline=pipeline)
        for pipeline in _choices(wanted.pipeline, min(ranks, llm.layers))
        for tensor in _choices(wanted.tensor, min(ranks, MOST_TENSOR, ranks_per_host))
        if ranks % (tensor * pipeline) == 0 and (wanted.tensor != "auto" or ranks_per_host % tensor == 0)
    ]
    allowed = [one for one in found if wanted.data in ("auto", one.data) and not any(_problems(llm, one))]
    return sorted(allowed, key=lambda one: (one.tensor * one.pipeline, one.pipeline))


def _choices(axis: Axis, most: int) -> Sequence[int]:
    return range(1, most + 1) if axis == "auto" else (axis,)


def choose_layout(
    llm: Llm,
    ranks: int,
    memory_bytes: float,
    training: Training,
    parallel: ParallelSettings | None = None,
    *,
    max_data: int = 0,
    ranks_per_host: int = MOST_TENSOR,
) -> Layout:
    """The layout of ``trainer.parallel``, its "auto" the least tensor and pipeline parallelism that fits.

    Args:    memory_bytes: that one rank may use.  max_data: parts of a round at most; 0: no limit.
    Raises:  LayoutError: no layout of so many ranks divides the model.  DoesNotFitError: none fits.
    """
    wanted = parallel or ParallelSettings()
    allowed = layouts(llm, ranks, wanted, ranks_per_host=ranks_per_host)
    if not allowed:
        raise LayoutError(_no_layout(llm, ranks, wanted, ranks_per_host))
    few = [one for one in allowed if not max_data or one.data <= max_data] or allowed
    for layout in few:
        if rank_memory(llm, layout, training).total <= memory_bytes:
            return layout
    least = min(few, key=lambda one: rank_memory(llm, one, training).total)
    raise DoesNotFitError(_misfit(llm, least, memory_bytes, training, wanted.pipeline))


def layout_of_run(
    llm: Llm, settings: Settings, ranks: int, memory_bytes: float, *, compute_bytes: int, on_gpu: bool
) -> Layout:
    """How so many ranks of a run share the model: ``choose_layout`` as its settings bound it.

    No more data ranks than a mini-batch has groups; one stage where old-policy logprobs are recomputed, which only a
    rank with all layers does. Raises as ``choose_layout``.
    """
    training = training_of(settings, compute_bytes=compute_bytes, on_gpu=on_gpu)
    parallel = settings.trainer.parallel
    if parallel.pipeline == "auto" and settings.algorithm.old_logprobs == "recomputed":
        parallel = msgspec.structs.replace(parallel, pipeline=1)
    max_data = settings.pipeline.groups_per_batch // settings.trainer.mini_batches
    return choose_layout(llm, ranks, memory_bytes, training, parallel, max_data=max_data)


def _no_layout(llm: Llm, ranks: int, wanted: ParallelSettings, ranks_per_host: int) -> str:
    """Why; the first axis that is a number and does not divide is named."""
    tensor = 1 if wanted.tensor == "auto" else wanted.tensor
    pipeline = 1 if wanted.pipeline == "auto" else wanted.pipeline
    if problem := next(_problems(llm, Layout(tensor=tensor, pipeline=pipeline)), ""):
        return problem
    tensors = sorted({one.tensor for one in layouts(llm, ranks, ranks_per_host=ranks_per_host)})
    return (
        f"{ranks} ranks cannot train {llm.name} as trainer.parallel says (data = {wanted.data}, tensor = "
        f"{wanted.tensor}, pipeline = {wanted.pipeline}): tensor may be {', '.join(map(str, tensors))}, pipeline at "
        f"most {llm.layers}, and data x tensor x pipeline must be {ranks}"
    )


# -- what would fit instead


def what_fits(llm: Llm, layout: Layout, memory_bytes: float, training: Training, pipeline: Axis = "auto") -> list[str]:
    """Settings with which a rank needs no more than ``memory_bytes``, the least change first.

    pipeline: stages that more ranks may have.
    """

    def fits(**changes: object) -> bool:
        changed = msgspec.structs.replace(training, **changes)
        return rank_memory(llm, layout, changed).total <= memory_bytes

    found: list[str] = []
    least = max(training.longest_tokens, 1)
    tokens = next((count for count in _halves(training.tokens) if count >= least and fits(tokens=count)), 0)
    if tokens:
        found.append(f"trainer.micro_batch_tokens = {tokens}")
    offloads = training.offload == "none" and not training.host_is_device
    changes: list[tuple[str, dict[str, object]]] = []
    if training.recompute != "whole":
        changes.append(('trainer.recompute = "whole"', {"recompute": "whole"}))
    if offloads:
        changes.append(('trainer.offload = "optimizer"', {"offload": "optimizer"}))
    if not training.lora_rank:
        changes.append((f"trainer.lora.rank = {LORA_RANK}", {"lora_rank": LORA_RANK}))
    found += [text for text, change in changes if fits(**change)]
    if len(changes) > 1 and not found:
        for count in range(2, len(changes) + 1):
            some = changes[:count] if count < len(changes) else changes
            if fits(**{key: value for _, change in some for key, value in change.items()}):
                found.append(" with ".join(text for text, _ in some))
                break
    if ranks := more_ranks(llm, layout, memory_bytes, training, pipeline):
        found.append(f"trainer.ranks = {ranks}")
    return found


def _halves(tokens: int) -> Iterator[int]:
    while tokens > 1:
        tokens //= 2
        yield tokens


MOST_RANKS = 4096


def more_ranks(llm: Llm, layout: Layout, memory_bytes: float, training: Training, pipeline: Axis = "auto") -> int:
    """The least doubling of the ranks with which it fits; 0 where none does."""
    ranks = layout.num_ranks * 2
    while ranks <= MOST_RANKS:
        for one in layouts(llm, ranks, ParallelSettings(pipeline=pipeline)):
            if rank_memory(llm, one, training).total <= memory_bytes:
                return ranks
        ranks *= 2
    return 0


def _misfit(llm: Llm, layout: Layout, memory_bytes: float, training: Training, pipeline: Axis) -> str:
    needed = rank_memory(llm, layout, training)
    would = what_fits(llm, layout, memory_bytes, training, pipeline)
    return (
        f"training {llm.name} as {layout} needs {needed.total / 1e9:.1f} GB of each rank ({needed}), "
        f"{memory_bytes / 1e9:.1f} GB are usable; it takes {', or '.join(would) or 'a smaller model'}"
    )
