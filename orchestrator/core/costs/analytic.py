"""Cost coefficients from specifications: an LLM, a type of GPU, a parallel layout, the share of the peak reached.

Owns: the arithmetic of roofs (memory, FLOP/s, links). Never: constants (``hardware.py``, ``llms.py``). Invariant: a
layout that does not fit into memory is refused by name, never estimated; what was measured is taken as it is.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from orchestrator.core.costs.cost_model import TrainCost, TransferCost
from orchestrator.core.costs.hardware import ASSUMED, Assumptions, Gpu
from orchestrator.core.costs.llms import BYTES, Llm
from transport.contracts.continuous_batching import DecodeCost

GPUS_PER_NODE = 8
"""Tensor parallelism stays inside a node (StreamRL sec. 2.1); every testbed of the paper has nodes of 8."""

Algorithm: TypeAlias = Literal["ppo", "grpo", "grpo_kl"]

PASSES = {"ppo": 3.0, "grpo": 1.0, "grpo_kl": 4.0 / 3.0}
"""Forward and backward passes (6 FLOP a weight and token) that a token costs the trainer.

PPO with actor, critic and reference of one size (StreamRL sec. 7): forward and backward of actor and critic, and a
forward, a third of that, of actor (old logprobs), critic (values) and reference: 2 + 3/3 = 3, or 18 FLOP. GRPO streams
with the rollout's logprobs: the actor only; with a KL term, and the reference's forward."""

TRAINED_MODELS = {"ppo": 2, "grpo": 1, "grpo_kl": 1}
RESIDENT_BYTES = 6.0
"""Of a weight while its model is on the GPU: bf16 weights and fp32 gradients, split over the GPUs of a rank."""
OPTIMIZER_BYTES = 12.0
"""Of a weight: fp32 master copy and two moments, split over all GPUs. Of several models one is resident at a time, the
others are swapped to the host (StreamRL sec. 6)."""


class DoesNotFitError(ValueError):
    """A model does not fit on the GPUs it was given. The message names the model, the layout and the bytes."""


def tensor_degrees(llm: Llm, gpu: Gpu) -> list[int]:
    """Tensor-parallel degrees inside a node that split the query heads evenly; what was measured is not split."""
    return [degree for degree in (1, 2, 4, 8) if llm.heads % degree == 0 and (degree == 1 or gpu.measured is None)]


def smallest_tensor_degree(llm: Llm, gpu: Gpu, assumed: Assumptions = ASSUMED, *, context_tokens: int = 32_768) -> int:
    """The fewest GPUs that hold an instance with ``context_tokens`` of context, which the longest sample needs.

    Raises DoesNotFitError when a whole node does not.
    """
    for degree in tensor_degrees(llm, gpu):
        if _kv_room(llm, gpu, degree, assumed) > context_tokens * llm.kv_bytes:
            return degree
    raise DoesNotFitError(
        f"{llm.name} ({llm.weight_bytes / 1e9:.0f} GB of weights) with {context_tokens} tokens of context does not fit "
        f"on {tensor_degrees(llm, gpu)[-1]} {gpu.name}"
    )


def decode_cost(llm: Llm, gpu: Gpu, tensor_parallel: int, assumed: Assumptions = ASSUMED) -> DecodeCost:
    """One generation instance on ``tensor_parallel`` GPUs.

    KV heads are split as far as they go and repeated beyond. Raises DoesNotFitError when weights and one token of
    context do not fit, ValueError when the heads do not split.
    """
    if gpu.measured is not None and tensor_parallel == 1:
        return gpu.measured.decode
    if tensor_parallel not in tensor_degrees(llm, gpu):
        raise ValueError(f"{llm.heads} heads of {llm.name} do not split {tensor_parallel} ways in a node of {gpu.name}")
    room = _kv_room(llm, gpu, tensor_parallel, assumed)
    if room <= llm.kv_bytes:
        needed = llm.weight_bytes / tensor_parallel / 1e9
        have = gpu.memory_bytes * assumed.usable_memory / 1e9
        raise DoesNotFitError(
            f"{llm.name} needs {needed:.0f} GB of weights and its KV cache on each of {tensor_parallel} {gpu.name}, "
            f"{have:.0f} GB each are usable"
        )
    kv_split = min(tensor_parallel, llm.kv_heads)
    flops = tensor_parallel * gpu.flops * assumed.gemm_efficiency
    read_bytes = BYTES * llm.active_params / tensor_parallel
    return DecodeCost(
        fixed_s=assumed.step_s
        + llm.layers * assumed.layer_s
        + _collectives(llm, tensor_parallel) * assumed.allreduce_s,
        weights_s=read_bytes / (gpu.memory_bytes_per_s * assumed.memory_efficiency),
        gemm_sample_s=2 * llm.active_params / flops,
        sample_s=_allreduce_bytes_s(llm, gpu, tensor_parallel, assumed),
        kv_token_s=llm.kv_bytes / kv_split / (gpu.memory_bytes_per_s * assumed.kv_efficiency),
        prefill_token_s=2 * llm.active_params / flops + _allreduce_bytes_s(llm, gpu, tensor_parallel, assumed),
        kv_capacity_tokens=float(int(room / (llm.kv_bytes * tensor_parallel / kv_split))),
    )


def _kv_room(llm: Llm, gpu: Gpu, degree: int, assumed: Assumptions) -> float:
    """Bytes that an instance has for its KV cache."""
    usable = gpu.memory_bytes * assumed.usable_memory - assumed.activation_bytes
    return degree * usable - llm.weight_bytes


def _collectives(llm: Llm, degree: int) -> int:
    """All-reduces of a step: after attention and after the MLP of every layer."""
    return 2 * llm.layers if degree > 1 else 0


def _allreduce_bytes_s(llm: Llm, gpu: Gpu, degree: int, assumed: Assumptions) -> float:
    """Moving one token's hidden state through all of a step's all-reduces, in one direction of the link."""
    moved = 2 * (degree - 1) / degree * BYTES * llm.hidden
    return _collectives(llm, degree) * moved / (gpu.link_bytes_per_s / 2 * assumed.link_efficiency)


def train_cost(
    llm: Llm,
    gpu: Gpu,
    num_gpus: int,
    ranks: int,
    algorithm: Algorithm = "ppo",
    assumed: Assumptions = ASSUMED,
) -> TrainCost:
    """The trainer on ``num_gpus`` GPUs as ``ranks`` data-parallel ranks, each split by tensor and pipeline parallelism.

    Raises DoesNotFitError when the states do not fit, ValueError when the GPUs cannot be dealt out evenly.
    """
    if ranks < 1 or num_gpus < 1 or num_gpus % ranks:
        raise ValueError(f"{num_gpus} GPUs cannot be dealt out to {ranks} ranks")
    check_training_fits(llm, gpu, num_gpus, ranks, assumed)
    if gpu.measured is not None and gpu.measured.train is not None:
        return gpu.measured.train
    rank_flops = num_gpus // ranks * gpu.flops * assumed.mfu
    passes = PASSES[algorithm]
    attention = 6 * llm.layers * llm.heads * llm.head_dim  # forward and backward of causal scores and values
    return TrainCost(
        token_s=passes * 6 * llm.active_params / rank_flops,
        squared_token_s=passes * attention / rank_flops,
        round_s=assumed.round_s,
        fill_s=assumed.fill_s,
        mini_batch_s=assumed.mini_batch_s,
        optimizer_s=assumed.optimizer_s,
    )


def check_training_fits(llm: Llm, gpu: Gpu, num_gpus: int, ranks: int, assumed: Assumptions = ASSUMED) -> None:
    """Raises DoesNotFitError, with the bytes of each GPU, when weights, gradients and optimizer states do not fit.

    What was measured is one rank, if a trainer was measured at all.
    """
    if gpu.measured is not None:
        if gpu.measured.train is None:
            raise DoesNotFitError(f"{gpu.name} cannot train: its profile has no trainer")
        if ranks != num_gpus:
            raise DoesNotFitError(f"one {gpu.name} is one rank of the trainer, {num_gpus} are no {ranks} ranks")
        return
    needed = llm.params * (RESIDENT_BYTES * ranks + OPTIMIZER_BYTES) / num_gpus + assumed.activation_bytes
    usable = gpu.memory_bytes * assumed.usable_memory
    if needed > usable:
        raise DoesNotFitError(
            f"training {llm.name} on {num_gpus} {gpu.name} as {ranks} ranks needs {needed / 1e9:.0f} GB of each, "
            f"{usable / 1e9:.0f} GB are usable"
        )


def most_ranks(llm: Llm, gpu: Gpu, num_gpus: int, assumed: Assumptions = ASSUMED) -> int:
    """The most data-parallel ranks of whole power-of-two GPU groups that fit. Raises DoesNotFitError when none does."""
    for per_rank in (1, 2, 4, 8, 16, 32, 64, 128):
        if num_gpus % per_rank == 0:
            try:
                check_training_fits(llm, gpu, num_gpus, num_gpus // per_rank, assumed)
            except DoesNotFitError:
                continue
            return num_gpus // per_rank
    raise DoesNotFitError(f"training {llm.name} does not fit on {num_gpus} {gpu.name}")


def switch_s(llm: Llm, gpu: Gpu, num_gpus: int, algorithm: Algorithm = "ppo", assumed: Assumptions = ASSUMED) -> float:
    """One switch of colocated GPUs between the stages: the other stage's states go to the host or come from it.

    Source: ours; the papers describe it (StreamRL sec. 1) and give no figure.
    """
    states = TRAINED_MODELS[algorithm] * llm.params * (RESIDENT_BYTES + OPTIMIZER_BYTES) / num_gpus
    return assumed.switch_s + states / (gpu.host_bytes_per_s * assumed.host_efficiency)


def transfer_cost(
    llm: Llm,
    bytes_per_s: float,
    instances: int,
    assumed: Assumptions = ASSUMED,
) -> TransferCost:
    """A version to ``instances`` instances over edges of ``bytes_per_s``, along a binary tree from the trainer.

    Inside one datacenter an edge has the network of a node: ``GPUS_PER_NODE * gpu.network_bytes_per_s``.
    """
    return TransferCost(
        num_bytes=llm.weight_bytes,
        bytes_per_s=bytes_per_s * assumed.network_efficiency,
        latency_s=assumed.edge_s,
        depth=max(1, instances).bit_length(),
        load_s=assumed.load_s,
    )
