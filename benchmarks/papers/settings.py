"""The papers' settings in ours: GPUs, splits, pipelines and dispatch of every result that is compared.

Owns: our reading of what the papers leave open, each said here. Never: published numbers (``rows.py``).
Invariant: splits and parallel degrees were chosen by enumeration on seed 0, which is not reported.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from benchmarks.papers.experiments import FULL_LENGTH, Pipelined
from orchestrator.sim.costs import A100, ASSUMED, GPUS_PER_NODE, H800, swap_s
from orchestrator.sim.llms import QWEN_7B, QWEN_32B, QWEN_72B
from orchestrator.sim.scenarios import Layout
from transport.contracts.llms import BF16, Fp8, Llm

GPUS = {QWEN_7B: 32, QWEN_32B: 64, QWEN_72B: 128}
"""GPUs of each LLM. StreamRL prints 32 for the 7B (fig. 11) and has 128; that of the 32B is ours."""
LENGTHS = (5_000, 10_000, 20_000)
MICRO_BATCH_TOKENS = 65_536
"""Of a rank where batches overlap; half of it where the trainer waits for the first samples of a batch."""
LINK_BYTES_PER_S = 10e9
"""Bytes a second of the 80 Gbps between StreamRL's datacenters (sec. 7)."""
SAMPLES_A_GPU = 8
"""Of a batch: StreamRL's 1024 on 128 GPUs. AsyncFlow prints no batch."""
ASYNCFLOW_SHARE = 9 / 16
"""Of the GPUs that generate: what the allocation answers for the 7B on 128 A100s, on seed 0."""
ASYNCFLOW_TOKENS = 8_192
"""Longest response: AsyncFlow prints none; the first stage of DeepScaleR's own recipe."""


SEER_BATCH, SEER_GROUP = 600, 16
"""Prompts and samples of each: Seer's 9,600 samples of the 72B on 128 H800 as 16 instances of TP8."""
SEER_TOKENS = 40_960
SEER_MEDIAN, SEER_SIGMA = 4_817.0, 1.0
"""Lognormal lengths that have Seer's mean, 7,615 tokens, when cut at its limit. The spread is ours: 1.6% are cut."""
SEER_SHARED = 0.8
"""Of the variance of log lengths, what the samples of a group share. Seer shows groups of one colour and prints no
number; StreamRL's and CASTILLO's prompts whose history is known give .7 to .9."""


def tensor_parallel(llm: Llm) -> int:
    """Of an instance: the degree at which the colocated baseline is fastest, chosen on a seed that is not reported."""
    return 4 if llm is QWEN_7B else 8


def colocated(llm: Llm, max_tokens: int = FULL_LENGTH, dispatch: str = "even", recall: float = 0.87) -> Pipelined:
    """StreamRL's ColocationRL: all GPUs generate, then all train."""
    layout = Layout(
        generation_gpus=GPUS[llm], training_gpus=GPUS[llm], tensor_parallel=tensor_parallel(llm), colocated=True
    )
    return Pipelined(llm=llm, layout=layout, pipeline="serial", dispatch=dispatch, max_tokens=max_tokens, recall=recall)


VERL_CACHE_SHARE = 0.5
"""Of a GPU's memory that verl's engine plans with: ``gpu_memory_utilization`` of its configuration in early 2025."""
VERL_LAYER_S = 100e-6
"""Of a decode step and layer without CUDA graphs, which that configuration switches off (``enforce_eager``): some ten
kernels of 10 us each, launched one by one. Source: ours; verl prints no figure."""


def like_verl(of: Pipelined) -> Pipelined:
    """A colocated pipeline on an engine as verl configures it by default. Its trainer is taken as ours: StreamRL's verl
    trains by Megatron-LM, too."""
    gpu = of.layout.generation_gpu
    engine = msgspec.structs.replace(gpu, memory_bytes=gpu.memory_bytes * VERL_CACHE_SHARE / ASSUMED.usable_memory)
    return replace(of, layout=replace(of.layout, generation_gpu=engine), layer_s=VERL_LAYER_S)


RANK_GPUS = (8, 16, 24, 32)
"""Of a rank: whole nodes, as tensor parallelism stays inside one."""


def rank_gpus(llm: Llm, training_gpus: int) -> int:
    """GPUs of a rank: the fewest that hold all models of PPO; where no choice divides the GPUs, a node that swaps."""
    if llm is QWEN_7B:
        return 4
    sizes = [size for size in RANK_GPUS if training_gpus % size == 0]
    return next((size for size in sizes if not swap_s(llm, H800, training_gpus, training_gpus // size)), GPUS_PER_NODE)


def split(llm: Llm, generation_gpus: int, **changes: int) -> Layout:
    """So many of an LLM's GPUs generate, the others train; ranks that swap get rounds three times as large."""
    training = GPUS[llm] - generation_gpus
    ranks = training // rank_gpus(llm, training)
    swaps = swap_s(llm, H800, training, ranks) > 0
    layout = Layout(
        generation_gpus=generation_gpus,
        training_gpus=training,
        tensor_parallel=tensor_parallel(llm),
        ranks=ranks,
        micro_batch_tokens=MICRO_BATCH_TOKENS * (3 if swaps else 1),
    )
    return replace(layout, **changes)


SYNC_SPLIT = {
    (QWEN_7B, 5_000): 12,
    (QWEN_7B, 10_000): 12,
    (QWEN_7B, 20_000): 16,
    (QWEN_32B, 5_000): 16,
    (QWEN_32B, 10_000): 24,
    (QWEN_32B, 20_000): 32,
    (QWEN_72B, 5_000): 40,
    (QWEN_72B, 10_000): 48,
    (QWEN_72B, 20_000): 56,
}
ASYNC_SPLIT = {
    (QWEN_7B, 5_000): 12,
    (QWEN_7B, 10_000): 12,
    (QWEN_7B, 20_000): 16,
    (QWEN_32B, 5_000): 16,
    (QWEN_32B, 10_000): 24,
    (QWEN_32B, 20_000): 24,
    (QWEN_72B, 5_000): 40,
    (QWEN_72B, 10_000): 40,
    (QWEN_72B, 20_000): 48,
}
"""(LLM, longest response) -> GPUs that generate."""
GROWING_START = 8
"""GPUs of 32 that generate while the longest response is 10K: what StreamRL's Algorithm 1 answers for the 7B in whole
nodes. Ours, which deals out half nodes, answers 12; a single node is added then, after iteration 5."""
CROSSING_TRAINERS = {5_000: 32, 10_000: 30, 20_000: 28}
"""H800 that train beside 32 H20 that generate, longest response -> GPUs, in ranks of two: the cheapest samples among
all 132 sizes and degrees by the search of the allocation (``planning/allocation.py``), on seed 0."""


def sync_stream(llm: Llm, max_tokens: int = FULL_LENGTH) -> Pipelined:
    layout = split(
        llm, SYNC_SPLIT[llm, max_tokens], micro_batch_tokens=MICRO_BATCH_TOKENS // 2 * max_tokens // FULL_LENGTH
    )
    return Pipelined(llm=llm, layout=layout, pipeline="stream", dispatch="scored", max_tokens=max_tokens)


def fully_async(llm: Llm, max_tokens: int = FULL_LENGTH, generation_gpus: int | None = None) -> Pipelined:
    """The paper's own: one step behind, weights at batch boundaries, Algorithm 2 with the maximum."""
    layout = split(
        llm,
        generation_gpus or ASYNC_SPLIT[llm, max_tokens],
        micro_batch_tokens=MICRO_BATCH_TOKENS * max_tokens // FULL_LENGTH,
    )
    return Pipelined(llm=llm, layout=layout, pipeline="fully_async", dispatch="two_class_max", max_tokens=max_tokens)


def in_flight(generation_gpus: int = 40) -> Pipelined:
    """Ours: weights between two decode steps, and no trained token more than one version old."""
    return Pipelined(layout=split(QWEN_72B, generation_gpus), pipeline="in_flight", dispatch="paced")


def rolling(generation_gpus: int = 40) -> Pipelined:
    """Ours: a finished sample takes the place of one that still runs, at most two versions behind."""
    return Pipelined(layout=split(QWEN_72B, generation_gpus), pipeline="rolling_2", dispatch="paced")


AIDED_SPLIT = {"sync": 48, "async": 32, "fp8": 24}
"""GPUs of 128 that generate where engines draft or hold fp8 caches, of 24 to 48: with the others ranks swap, or
generation is the slower stage. With weights in fp8, too, instances of four GPUs on 24 are quick enough for ranks that
swap."""


def aided(experiment: Pipelined, *, drafts: float = 0.0, fp8: Fp8 = BF16) -> Pipelined:
    """The same with engines that draft at this acceptance, or hold something in fp8."""
    return replace(experiment, layout=replace(experiment.layout, drafts=drafts, fp8=fp8))


def deferring(experiment: Pipelined, share: float) -> Pipelined:
    """The same with so many more prompts in hand, over those of a batch; the slowest groups go on in the next one."""
    return replace(experiment, deferred=share)


def in_fp8() -> Pipelined:
    """In flight with caches and weights in fp8."""
    experiment = in_flight(AIDED_SPLIT["fp8"])
    smaller = replace(experiment, layout=replace(experiment.layout, tensor_parallel=4))
    return aided(smaller, fp8=Fp8(kv=True, weights=True))


def asyncflow(llm: Llm, gpus: int, pipeline: str, *, batch: int = 0) -> Pipelined:
    """AsyncFlow's cluster of so many NPUs, as A100s: its NPU is not named, and the A100 is the nearest of ours.

    batch: samples; 0: they grow with the cluster.
    """
    degree = 4 if llm is QWEN_7B else 8
    generation = round(gpus * ASYNCFLOW_SHARE / degree) * degree
    layout = Layout(
        generation_gpus=gpus if pipeline == "serial_colocated" else generation,
        training_gpus=gpus if pipeline == "serial_colocated" else gpus - generation,
        tensor_parallel=degree,
        ranks=(gpus if pipeline == "serial_colocated" else gpus - generation) // degree,
        generation_gpu=A100,
        training_gpu=A100,
        colocated=pipeline == "serial_colocated",
        micro_batch_tokens=16_384,
    )
    return Pipelined(
        llm=llm,
        layout=layout,
        pipeline="serial" if pipeline == "serial_colocated" else pipeline,
        dispatch="even",
        max_tokens=ASYNCFLOW_TOKENS,
        batch=batch or SAMPLES_A_GPU * gpus,
        algorithm="grpo_kl",
    )


SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000)
"""GPUs of the scaling curve."""


def scaled(gpus: int, *, colocated: bool) -> Pipelined:
    """The 32B on so many H800, with as many samples a GPU as StreamRL has: ours, and its colocated baseline."""
    generation = gpus * 3 // 8 // 8 * 8
    layout = Layout(
        generation_gpus=gpus if colocated else generation,
        training_gpus=gpus if colocated else gpus - generation,
        tensor_parallel=8,
        ranks=(gpus if colocated else gpus - generation) // 8,
        colocated=colocated,
    )
    return Pipelined(
        llm=QWEN_32B,
        layout=layout,
        pipeline="serial" if colocated else "in_flight",
        dispatch="even" if colocated else "paced",
        batch=SAMPLES_A_GPU * gpus,
    )
