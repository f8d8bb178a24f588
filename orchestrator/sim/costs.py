"""What GPUs can do, what share of it is reached, and the seconds of decoding, training and transfers that follow.

Owns: all hardware constants of simulator and planner, where they are from, and the arithmetic of roofs (memory, FLOP/s,
links). Invariants: policies are tuned against these numbers, never the other way round, and how much a result depends
on each is printed beside it; a layout that does not fit into memory is refused by name, never estimated; what one
machine was measured to do is taken as it is, nothing follows from it.
"""

from __future__ import annotations

import bisect
import functools
import math
from typing import Literal, TypeAlias

import msgspec

from orchestrator.core.broadcast import Links, Peer, Source, Stream, broadcast_time, plan_broadcast
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.llms import BF16, BYTES, Fp8, Llm
from transport.contracts.settings import AtLeast0, NotNegative, ParallelSettings
from transport.contracts.training_memory import DoesNotFitError, Layout, Training, layouts, rank_memory
from transport.contracts.training_memory import state_bytes as predicted_state_bytes

GIGA = 1e9
TERA = 1e12


ROUND_SHARE = 0.1
"""Of a micro-batch's time, what it takes however small it is: with so much a rank counts as saturated."""


class TrainCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one data-parallel rank of the trainer, seconds; all ranks work at once.

    round_s: of every round, however small.  pass_s: of every forward and backward pass, of which a round takes one for
    each ``pass_tokens``; 0: one in all.  token_s: a token of the rank.  squared_token_s: attention, times the square of
    each sequence's tokens.  fill_s: filling the pipeline from empty, when the trainer had run out of micro-batches.
    mini_batch_s: reducing gradients and draining at the end of a mini-batch.  optimizer_s: the optimizer's step.
    padded: attention takes as long as if all samples were as long as the longest of their group.
    Source: StreamRL sec. 4.2 takes it from a profile; the form is ours.
    """

    token_s: NotNegative
    squared_token_s: NotNegative = 0.0
    round_s: NotNegative = 0.0
    pass_s: NotNegative = 0.0
    pass_tokens: AtLeast0 = 0
    fill_s: NotNegative = 0.0
    mini_batch_s: NotNegative = 0.0
    optimizer_s: NotNegative = 0.0
    padded: bool = False

    def micro_batch_s(self, tokens: float, squared_tokens: float = 0.0) -> float:
        """Forward and backward of one rank's part. squared_tokens: the sum of the squared sequence lengths."""
        passes = max(1, math.ceil(tokens / self.pass_tokens)) if self.pass_tokens else 1
        return self.round_s + passes * self.pass_s + tokens * self.token_s + squared_tokens * self.squared_token_s

    def saturating_tokens(self) -> int:
        """Tokens of one rank that saturate it: a round of fewer pays more than ROUND_SHARE for being one."""
        spent_s = (self.round_s + self.pass_s) * (1 / ROUND_SHARE - 1)
        return math.ceil(spent_s / self.token_s) if self.token_s else 0

    def step_s(self) -> float:
        """The end of a mini-batch: gradients are reduced, the optimizer steps."""
        return self.mini_batch_s + self.optimizer_s


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """What engines and trainer cost one another on a machine that they share; as it comes, nothing.

    decode_beside, train_beside: seconds of decode steps, and of the trainer's work, while one of each does, over alone.
    decode_share, train_share: of the machine's cores, what one engine, and the trainer, keep busy; 0: they compute
    elsewhere.
    """

    decode_beside: float = 1.0
    train_beside: float = 1.0
    decode_share: float = 0.0
    train_share: float = 0.0


ALONE = Sharing()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one engine and one trainer, with one model.

    decode: of one generation worker.  train: of one rank, as it was set; None: no trainer was measured.
    publish_s: a version leaves the trainer.  load_s: it is fetched and put into an engine.
    slots, micro_batch_tokens: the largest batch and micro-batch that were measured.
    sharing: of one worker and one rank on one machine.
    """

    decode: DecodeCost
    train: TrainCost | None
    publish_s: float
    load_s: float
    slots: int
    micro_batch_tokens: int
    sharing: Sharing = ALONE


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One type of GPU, as its vendor describes it; infinite is what limits nothing.

    flops: dense bf16, 1/s.  memory_bytes, memory_bytes_per_s: HBM.  link_bytes_per_s: NVLink, both directions together.
    host_bytes_per_s: to the memory of its host, one direction.  network_bytes_per_s: its share of the node's network.
    price: relative to an H20; those that StreamRL's Table 1 does not have are ours, from list prices of clouds.
    measured: instead of all that, where there is a profile; one "GPU" is one generation worker, or one rank.
    """

    name: str
    flops: float = math.inf
    memory_bytes: float = math.inf
    memory_bytes_per_s: float = math.inf
    link_bytes_per_s: float = math.inf
    host_bytes_per_s: float = math.inf
    network_bytes_per_s: float = math.inf
    price: float = 1.0
    measured: Measured | None = None


H800 = Gpu(  # StreamRL Table 1; network: sec. 7, 8 x 200 Gbps for 8 GPUs; host: PCIe 5.0 x16
    name="H800",
    flops=989.5 * TERA,
    memory_bytes=80 * GIGA,
    memory_bytes_per_s=3.35 * TERA,
    link_bytes_per_s=400 * GIGA,
    host_bytes_per_s=64 * GIGA,
    network_bytes_per_s=25 * GIGA,
    price=2.85,
)
H20 = Gpu(  # StreamRL Table 1; network: sec. 7, 100 Gbps for 8 GPUs
    name="H20",
    flops=148 * TERA,
    memory_bytes=96 * GIGA,
    memory_bytes_per_s=4.0 * TERA,
    link_bytes_per_s=900 * GIGA,
    host_bytes_per_s=64 * GIGA,
    network_bytes_per_s=12.5 / 8 * GIGA,
    price=1.00,
)
H100 = msgspec.structs.replace(  # NVIDIA's data sheet of the SXM5: an H800 with all of its NVLink; 400 Gbps each
    H800, name="H100", link_bytes_per_s=900 * GIGA, network_bytes_per_s=50 * GIGA, price=2.85
)
H200 = msgspec.structs.replace(  # NVIDIA's data sheet: an H100 with 141 GB of HBM3e
    H100, name="H200", memory_bytes=141 * GIGA, memory_bytes_per_s=4.8 * TERA, price=3.40
)
A100 = Gpu(  # NVIDIA's data sheet of the SXM4 80 GB; network: 8 x 200 Gbps; host: PCIe 4.0 x16
    name="A100",
    flops=312 * TERA,
    memory_bytes=80 * GIGA,
    memory_bytes_per_s=2.039 * TERA,
    link_bytes_per_s=600 * GIGA,
    host_bytes_per_s=32 * GIGA,
    network_bytes_per_s=25 * GIGA,
    price=1.70,
)
GPUS = {gpu.name: gpu for gpu in (H800, H20, H100, H200, A100)}


Algorithm: TypeAlias = Literal["ppo", "grpo", "grpo_kl"]
Recompute: TypeAlias = Literal["none", "selective", "whole"]


class TrainerSupport(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer runs, and what each of its GPUs then holds.

    rank_sizes: GPUs of a data-parallel rank, by tensor and pipeline parallelism.  algorithms: whose cost it has.
    predicted: as ``transport/contracts/training_memory.py`` says, with this recompute and offload. Else rank_bytes of a
    weight, of every rank, split over its GPUs, and shared_bytes of a weight, split over all GPUs; and
    ``Assumptions.activation_bytes``, because activations are made again.
    """

    rank_sizes: tuple[int, ...]
    algorithms: tuple[Algorithm, ...]
    predicted: bool = False
    recompute: Recompute = "none"
    rank_bytes: float = 0.0
    shared_bytes: float = 0.0

    def training(self, tokens: float, longest_tokens: float) -> Training:
        """What it asks of a GPU's memory, computing in bf16."""
        return Training(tokens=int(max(tokens, longest_tokens)), recompute=self.recompute)


OUR_TRAINER = TrainerSupport(rank_sizes=(1, 2, 4, 8, 16, 32, 64), algorithms=("grpo",), predicted=True)
"""All that ``workers/trainer`` runs, and that a plan may therefore ask of it. The reference model of a KL term is a
scoring worker's, which plans do not place."""
PAPERS_TRAINER = TrainerSupport(
    rank_sizes=(1, 2, 4, 8, 16, 32, 64, 128), algorithms=("ppo", "grpo", "grpo_kl"), rank_bytes=6.0, shared_bytes=12.0
)
"""StreamRL sec. 6, 7: Megatron-LM, 3D parallelism. bf16 weights and fp32 gradients; fp32 master copy and two moments
are split over all GPUs. Of several models at least one is there; where not all are, each round swaps (``swap_s``)."""


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What share of the data sheet is reached, and what every step costs besides. Nothing here was fitted to a result.

    memory_efficiency: of HBM bandwidth when weights are read. GEMV and skinny GEMM kernels reach 75-90%.
    kv_efficiency: of HBM bandwidth when scattered KV pages are read. Paged attention kernels reach 50-70%.
    gemm_efficiency: of peak FLOP/s in large GEMMs; cuBLAS on Hopper reaches 60-75%.
    link_efficiency: of one direction of NVLink in all-reduces of a few hundred KB and more.
    allreduce_s: latency of one all-reduce of a few KB between up to 8 GPUs (NCCL and custom kernels: 8-15 us).
    step_s, layer_s: scheduling, sampling and launches of a decode step, with CUDA graphs; per layer what graphs leave.
    usable_memory: of HBM that may be planned with.  activation_bytes: of a GPU, for activations and buffers.
    mfu: model FLOP utilisation in training; Megatron-LM reports 0.40-0.50 for dense models of this size on Hopper. What
    is computed again for want of memory is in it. One H100, this trainer: 1.5B as predicted (1.01-1.03 of it), 0.5B is
    predicted 1.75 times too fast, because what is no product is not modelled.
    half_tokens: of a forward and backward pass that runs at half of that; one of t tokens runs at t / (t + half_tokens)
    of it. Narayanan et al. 2021, fig. 7: micro-batches of 8 x 2,048 tokens are 1.3 times as fast a token as of 2,048 on
    an A100, which is 730 tokens; with an H800's 3.2 times the FLOP/s over the same launches some 2,300.
    pass_tokens: of such a pass at most: what activation_bytes hold of layer inputs, 164 KB a token of a 72B on 8 GPUs.
    fill_s: filling the trainer's pipeline from empty.  mini_batch_s: reducing gradients and draining. Both besides
    stage_tokens: of a micro-batch of one sample or a few, which every pipeline stage but the first waits for.
    optimizer_s: the optimizer's step with its states swapped in (StreamRL sec. 6).
    round_s: reading a round from the log and packing it.  host_efficiency: of PCIe when states are swapped.
    switch_s: of a colocated GPU between the stages, besides the bytes: buffers, CUDA graphs and the KV pool made again.
    network_efficiency: of the network in a weight transfer.  edge_s: latency of one edge of its tree.
    load_s: putting a received version into a running engine, between two decode steps.
    gather_s: of a version at the trainer, besides its bytes to the host: cast, gathered, its manifest written.
    scoring_s: of a group, from its last token to its reward: a few ms for a comparison, seconds for a program that is
    run; between them.
    noise: spread of the logarithm of an instance's speed, which it keeps, and of each micro-batch's. Clocks and memory
    of equal GPUs differ by 1-3%.
    draft_acceptance: chance that a drafted token is the one that is sampled. Seer reports 1.8-2.2 tokens a step from a
    group's suffix tree, which is a chance of .45-.55 with some depth; an EAGLE-like head .65-.75 (NeMo-RL, TLT).
    draft_tokens: drafted a step at most.  draft_s: of drafting for a step, on the host (suffix trees).
    trainer: what it runs.
    """

    memory_efficiency: float = 0.80
    kv_efficiency: float = 0.60
    gemm_efficiency: float = 0.60
    link_efficiency: float = 0.80
    allreduce_s: float = 10e-6
    step_s: float = 1.5e-3
    layer_s: float = 15e-6
    usable_memory: float = 0.90
    activation_bytes: float = 4e9
    mfu: float = 0.40
    half_tokens: float = 2048.0
    pass_tokens: float = 24_576.0
    stage_tokens: float = 8_192.0
    fill_s: float = 0.75
    mini_batch_s: float = 0.75
    optimizer_s: float = 3.0
    round_s: float = 0.01
    host_efficiency: float = 0.80
    switch_s: float = 1.0
    network_efficiency: float = 0.80
    edge_s: float = 0.01
    load_s: float = 0.5
    gather_s: float = 0.5
    scoring_s: float = 1.0
    noise: float = 0.02
    draft_acceptance: float = 0.55
    draft_tokens: float = 8.0
    draft_s: float = 0.2e-3
    trainer: TrainerSupport = PAPERS_TRAINER


ASSUMED = Assumptions()


# -- an LLM on some of them


GPUS_PER_NODE = 8
"""Tensor parallelism stays inside a node (StreamRL sec. 2.1); every testbed of the paper has nodes of 8."""
TENSOR_DEGREES = (1, 2, 4, 8)
MOST_TOKENS = 1 << 20
"""Of a micro-batch: more is never asked for."""

PASSES = {"ppo": 3.0, "grpo": 1.0, "grpo_kl": 4.0 / 3.0}
"""Forward and backward passes (6 FLOP a weight and token) that a token costs the trainer.

PPO with actor, critic and reference of one size (StreamRL sec. 7): forward and backward of actor and critic, and a
forward, a third of that, of actor (old logprobs), critic (values) and reference: 2 + 3/3 = 3, or 18 FLOP. GRPO streams
with the rollout's logprobs: the actor only; with a KL term, and the reference's forward."""

TRAINED_MODELS = {"ppo": 2, "grpo": 1, "grpo_kl": 1}
FROZEN_MODELS = {"ppo": 1, "grpo": 0, "grpo_kl": 1}
"""References: they have bf16 weights, and neither gradients nor optimizer."""

TRANSFER_CHUNKS = 16


def tensor_degrees(llm: Llm, gpu: Gpu) -> list[int]:
    """Tensor-parallel degrees inside a node that split the query heads evenly; what was measured is not split."""
    return [degree for degree in TENSOR_DEGREES if llm.heads % degree == 0 and (degree == 1 or gpu.measured is None)]


def generation_degrees(
    llm: Llm,
    gpu: Gpu,
    context_tokens: int,
    assumed: Assumptions = ASSUMED,
    *,
    fp8: Fp8 = BF16,
) -> list[int]:
    """Those that hold the weights and ``context_tokens`` of context, which the longest sample needs; none where a whole
    node does not. fp8: what an instance holds in it."""
    needed = context_tokens * llm.kv_bytes * fp8.kv_bytes / BYTES
    return [degree for degree in tensor_degrees(llm, gpu) if _kv_room(llm, gpu, degree, assumed, fp8) > needed]


def decode_cost(
    llm: Llm, gpu: Gpu, tensor_parallel: int, assumed: Assumptions = ASSUMED, *, fp8: Fp8 = BF16
) -> DecodeCost:
    """One generation instance on ``tensor_parallel`` GPUs.

    fp8: what it holds in it: half as much is read and held. Arithmetic is taken to be as quick as in bf16, also on
    GPUs that multiply fp8 faster.

    KV heads are split as far as they go and repeated beyond. Raises DoesNotFitError when weights and one token of
    context do not fit, ValueError when the heads do not split.
    """
    if gpu.measured is not None and tensor_parallel == 1:
        return gpu.measured.decode
    if tensor_parallel not in tensor_degrees(llm, gpu):
        raise ValueError(f"{llm.heads} heads of {llm.name} do not split {tensor_parallel} ways in a node of {gpu.name}")
    room = _kv_room(llm, gpu, tensor_parallel, assumed, fp8)
    token_bytes = llm.kv_bytes * fp8.kv_bytes / BYTES
    if room <= token_bytes:
        needed = llm.params * fp8.weight_bytes / tensor_parallel / 1e9
        have = gpu.memory_bytes * assumed.usable_memory / 1e9
        raise DoesNotFitError(
            f"{llm.name} needs {needed:.0f} GB of weights and its KV cache on each of {tensor_parallel} {gpu.name}, "
            f"{have:.0f} GB each are usable"
        )
    kv_split = min(tensor_parallel, llm.kv_heads)
    collectives = 2 * llm.layers if tensor_parallel > 1 else 0  # all-reduces: after attention and MLP of every layer
    moved_bytes = 2 * (tensor_parallel - 1) / tensor_parallel * BYTES * llm.hidden  # of a token, in one direction
    allreduce_s = collectives * moved_bytes / (gpu.link_bytes_per_s / 2 * assumed.link_efficiency)
    gemm_s = 2 * llm.active_params / (tensor_parallel * gpu.flops * assumed.gemm_efficiency)
    read_bytes = fp8.weight_bytes * llm.active_params / tensor_parallel
    return DecodeCost(
        fixed_s=assumed.step_s + llm.layers * assumed.layer_s + collectives * assumed.allreduce_s,
        weights_s=read_bytes / (gpu.memory_bytes_per_s * assumed.memory_efficiency),
        gemm_sample_s=gemm_s,
        sample_s=allreduce_s,
        kv_token_s=token_bytes / kv_split / (gpu.memory_bytes_per_s * assumed.kv_efficiency),
        prefill_token_s=gemm_s + allreduce_s,
        kv_capacity_tokens=float(int(room / (token_bytes * tensor_parallel / kv_split))),
    )


def _kv_room(llm: Llm, gpu: Gpu, degree: int, assumed: Assumptions, fp8: Fp8) -> float:
    """Bytes that an instance has for its KV cache."""
    usable = gpu.memory_bytes * assumed.usable_memory - assumed.activation_bytes
    return degree * usable - float(fp8.weight_bytes * llm.params)


def train_cost(
    llm: Llm,
    gpu: Gpu,
    num_gpus: int,
    ranks: int,
    algorithm: Algorithm = "ppo",
    assumed: Assumptions = ASSUMED,
) -> TrainCost:
    """The trainer on ``num_gpus`` GPUs as ``ranks`` data-parallel ranks, each split by tensor and pipeline parallelism.

    A rank that does not hold all models of the algorithm swaps them in every round (``swap_s``).
    Raises DoesNotFitError when the states do not fit, ValueError when the GPUs cannot be dealt out evenly.
    """
    if ranks < 1 or num_gpus < 1 or num_gpus % ranks:
        raise ValueError(f"{num_gpus} GPUs cannot be dealt out to {ranks} ranks")
    if refusal := training_misfit(llm, gpu, num_gpus, ranks, assumed):
        raise DoesNotFitError(refusal)
    if gpu.measured is not None and gpu.measured.train is not None:
        return gpu.measured.train
    rank_flops = num_gpus // ranks * gpu.flops * assumed.mfu
    passes = PASSES[algorithm] + RECOMPUTED[assumed.trainer.recompute]
    attention = 6 * llm.layers * llm.heads * llm.head_dim  # forward and backward of causal scores and values
    token_s = passes * 6 * llm.active_params / rank_flops
    layout = training_layout(llm, num_gpus, ranks, assumed.trainer)
    stages = layout.pipeline if layout is not None else 1
    token_s *= -(-llm.layers // stages) * stages / llm.layers  # the stage with the most layers sets the pace
    stages_s = (stages - 1) * assumed.stage_tokens * token_s
    return TrainCost(
        token_s=token_s,
        squared_token_s=token_s * attention / (6 * llm.active_params),
        round_s=assumed.round_s + swap_s(llm, gpu, num_gpus, ranks, algorithm, assumed),
        pass_s=assumed.half_tokens * token_s,
        pass_tokens=round(assumed.pass_tokens),
        fill_s=assumed.fill_s + stages_s,
        mini_batch_s=assumed.mini_batch_s + stages_s,
        optimizer_s=assumed.optimizer_s,
    )


def swap_s(
    llm: Llm, gpu: Gpu, num_gpus: int, ranks: int, algorithm: Algorithm = "ppo", assumed: Assumptions = ASSUMED
) -> float:
    """What a round takes besides because its rank does not hold all models: every model comes from the host.

    0 where weights and gradients of all fit beside the activations; optimizer states may stay at the host, which
    ``optimizer_s`` pays. Else each model's weights come in every round, and the sum of its gradients; that gradients
    also go back is hidden, as PCIe carries both ways at once. Nothing is hidden behind computation: two models do not
    fit side by side. A predicted trainer holds what it trains, and trains one model.
    """
    trainer = assumed.trainer
    if trainer.predicted:
        return 0.0
    frozen_bytes = BYTES * FROZEN_MODELS[algorithm]
    models_bytes = llm.params * (trainer.rank_bytes * TRAINED_MODELS[algorithm] + frozen_bytes) * ranks / num_gpus
    if models_bytes + assumed.activation_bytes <= gpu.memory_bytes * assumed.usable_memory:
        return 0.0
    return models_bytes / (gpu.host_bytes_per_s * assumed.host_efficiency)


def save_s(llm: Llm, gpu: Gpu, num_gpus: int, algorithm: Algorithm = "ppo", assumed: Assumptions = ASSUMED) -> float:
    """Of a checkpoint what the trainer waits for: fp32 weights and moments go to the host; files are written behind."""
    if gpu.measured is not None:
        return 0.0
    states = TRAINED_MODELS[algorithm] * CHECKPOINT_BYTES * llm.params / num_gpus
    return states / (gpu.host_bytes_per_s * assumed.host_efficiency)


CHECKPOINT_BYTES = 12
"""Of a trained weight: fp32 master and two moments."""


def gather_s(llm: Llm, gpu: Gpu, num_gpus: int, ranks: int, assumed: Assumptions = ASSUMED) -> float:
    """A version leaves the trainer: one rank's GPUs bring their parts of it to the host."""
    if gpu.measured is not None:
        return gpu.measured.publish_s
    return assumed.gather_s + llm.weight_bytes * ranks / num_gpus / (gpu.host_bytes_per_s * assumed.host_efficiency)


RECOMPUTED = {"none": 0.0, "selective": 0.0, "whole": 1.0 / 3.0}
"""Passes that are computed again: the forward of all layers, or what costs little."""


@functools.cache
def training_layout(llm: Llm, num_gpus: int, ranks: int, trainer: TrainerSupport) -> Layout | None:
    """How the GPUs of each of ``ranks`` share its work: by the least pipeline parallelism; None where they cannot."""
    per_rank = num_gpus // ranks
    if trainer.predicted:
        return next(iter(layouts(llm, num_gpus, ParallelSettings(data=ranks))), None)
    tensor = max(degree for degree in TENSOR_DEGREES if per_rank % degree == 0 and llm.heads % degree == 0)
    return Layout(data=ranks, tensor=tensor, pipeline=per_rank // tensor)


def training_bytes(
    llm: Llm, num_gpus: int, ranks: int, tokens: float, longest_tokens: float, assumed: Assumptions = ASSUMED
) -> float:
    """Of each GPU, with a micro-batch of ``tokens``; infinite where the GPUs cannot share the model so."""
    trainer = assumed.trainer
    if not trainer.predicted:
        return state_bytes(llm, num_gpus, ranks, assumed) + assumed.activation_bytes
    layout = training_layout(llm, num_gpus, ranks, trainer)
    return math.inf if layout is None else rank_memory(llm, layout, trainer.training(tokens, longest_tokens)).total


def state_bytes(llm: Llm, num_gpus: int, ranks: int, assumed: Assumptions = ASSUMED) -> float:
    """Weights, gradients and optimizer of each GPU."""
    trainer = assumed.trainer
    layout = training_layout(llm, num_gpus, ranks, trainer) if trainer.predicted else None
    if layout is not None:
        return predicted_state_bytes(llm, layout, trainer.training(1, 1))
    return llm.params * (trainer.rank_bytes * ranks + trainer.shared_bytes) / num_gpus


def most_micro_batch_tokens(llm: Llm, gpu: Gpu, num_gpus: int, ranks: int, longest: int, assumed: Assumptions) -> float:
    """Tokens of a micro-batch for which there is memory; infinite where nothing of it depends on them."""
    if gpu.measured is not None or not assumed.trainer.predicted:
        return math.inf
    room = gpu.memory_bytes * assumed.usable_memory

    def takes(tokens: int) -> float:
        return training_bytes(llm, num_gpus, ranks, tokens, longest, assumed)

    return max(0, bisect.bisect_right(range(MOST_TOKENS), room, key=takes) - 1)


def training_misfit(
    llm: Llm, gpu: Gpu, num_gpus: int, ranks: int, assumed: Assumptions = ASSUMED, longest_tokens: int = 0
) -> str:
    """Why weights, gradients, optimizer and activations do not fit, with the bytes of each GPU; "" where they do.

    longest_tokens: of a sample, which a micro-batch must hold. What was measured is one rank, if a trainer was measured
    at all.
    """
    if gpu.measured is not None:
        if gpu.measured.train is None:
            return f"{gpu.name} cannot train: its profile has no trainer"
        return (
            "" if ranks == num_gpus else f"one {gpu.name} is one rank of the trainer, {num_gpus} are no {ranks} ranks"
        )
    needed = training_bytes(llm, num_gpus, ranks, longest_tokens, longest_tokens, assumed)
    usable = gpu.memory_bytes * assumed.usable_memory
    if needed <= usable:
        return ""
    if needed == math.inf:
        return f"{num_gpus // ranks} GPUs of a rank cannot share {llm.name}: they do not divide its heads or layers"
    return (
        f"training {llm.name} on {num_gpus} {gpu.name} as {ranks} ranks needs {needed / 1e9:.0f} GB of each, "
        f"{usable / 1e9:.0f} GB are usable"
    )


def most_ranks(llm: Llm, gpu: Gpu, num_gpus: int, assumed: Assumptions = ASSUMED, algorithm: Algorithm = "ppo") -> int:
    """The most data-parallel ranks that hold all models; where no choice does, the most that hold one and swap.

    Raises DoesNotFitError when none does.
    """
    sizes = [num_gpus // size for size in assumed.trainer.rank_sizes if num_gpus % size == 0]
    fitting = [ranks for ranks in sizes if not training_misfit(llm, gpu, num_gpus, ranks, assumed)]
    if not fitting:
        raise DoesNotFitError(f"training {llm.name} does not fit on {num_gpus} {gpu.name}")
    whole = (ranks for ranks in fitting if not swap_s(llm, gpu, num_gpus, ranks, algorithm, assumed))
    return next(whole, fitting[0])


def switch_s(llm: Llm, gpu: Gpu, num_gpus: int, algorithm: Algorithm = "ppo", assumed: Assumptions = ASSUMED) -> float:
    """One switch of colocated GPUs between the stages: the other stage's states go to the host or come from it.

    Source: ours; the papers describe it (StreamRL sec. 1) and give no figure.
    """
    states = TRAINED_MODELS[algorithm] * state_bytes(llm, num_gpus, 1, assumed)
    return assumed.switch_s + states / (gpu.host_bytes_per_s * assumed.host_efficiency)


def transfer_s(llm: Llm, bytes_per_s: float, instances: int, assumed: Assumptions = ASSUMED) -> float:
    """A version to ``instances`` instances of the trainer's site over edges of ``bytes_per_s``, along a binary tree.

    To the farthest leaf. Every edge has the network of a node, ``GPUS_PER_NODE * gpu.network_bytes_per_s``, as if an
    inner node had one for each that it feeds.
    """
    depth = max(1, instances).bit_length()
    edge_bytes_per_s, piece_bytes = bytes_per_s * assumed.network_efficiency, llm.weight_bytes / TRANSFER_CHUNKS
    stream = Stream().forwarded(edge_bytes_per_s, assumed.edge_s, piece_bytes, depth)
    return stream.end_s(llm.weight_bytes, piece_bytes)


def crossing_s(
    llm: Llm, node_bytes_per_s: float, link_bytes_per_s: float, hosts: int, assumed: Assumptions = ASSUMED
) -> float:
    """A version to another site: once over the link, and behind its gateway to all ``hosts``, as a run plans it.

    node_bytes_per_s: of the network card of a node there, each way.
    """
    links = Links(
        site_bytes_per_s=node_bytes_per_s * assumed.network_efficiency,
        slow_bytes_per_s=link_bytes_per_s * assumed.network_efficiency,
        card_bytes_per_s=node_bytes_per_s * assumed.network_efficiency,
        site_round_trip_s=assumed.edge_s,
        slow_round_trip_s=assumed.edge_s,
    )
    trainer = Source(name="trainer", host="trainer", site="training")
    nodes = [Peer(name=f"node{number}", host=f"node{number}", site="generation") for number in range(hosts)]
    nbytes = int(llm.weight_bytes)
    plan = plan_broadcast([nbytes], [trainer], nodes, links, piece_bytes=-(-nbytes // TRANSFER_CHUNKS))
    return broadcast_time(plan)
