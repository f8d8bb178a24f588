"""What GPUs can do on paper, and what share of it is reached; or what one machine was measured to do.

Owns: all hardware constants of simulator and planner, and where they are from. Never: what follows from them
(``analytic.py``). Invariant: policies are tuned against these numbers, never the other way round; how much a result
depends on each is printed beside it.
"""

from __future__ import annotations

import math

import msgspec

from orchestrator.core.costs.cost_model import TrainCost
from transport.contracts.continuous_batching import DecodeCost

GIGA = 1e9
TERA = 1e12


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one engine and one trainer, with one model: it is taken as it is, nothing follows from it.

    decode: of one generation worker.  train: of one rank, as it was set; None: no trainer was measured.
    publish_s: a version leaves the trainer.  load_s: it is fetched and put into an engine.
    slots, micro_batch_tokens: the largest batch and micro-batch that were measured.
    decode_beside, train_beside: seconds of either while both work on one machine, over alone.
    """

    decode: DecodeCost
    train: TrainCost | None
    publish_s: float
    load_s: float
    slots: int
    micro_batch_tokens: int
    decode_beside: float = 1.0
    train_beside: float = 1.0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One type of GPU, as its vendor describes it.

    flops: dense bf16, 1/s.  memory_bytes, memory_bytes_per_s: HBM.  link_bytes_per_s: NVLink, both directions together.
    host_bytes_per_s: to the memory of its host, one direction.  network_bytes_per_s: its share of the node's network.
    price: relative to an H20; those that StreamRL's Table 1 does not have are ours, from list prices of clouds.
    measured: instead of all that, where there is a profile; one "GPU" is one generation worker, or one rank.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    price: float
    measured: Measured | None = None


def profiled(name: str, measured: Measured) -> Gpu:
    """Hardware that is known by measurements alone: what a data sheet would say of it limits nothing."""
    return Gpu(
        name=name,
        flops=math.inf,
        memory_bytes=math.inf,
        memory_bytes_per_s=math.inf,
        link_bytes_per_s=math.inf,
        host_bytes_per_s=math.inf,
        network_bytes_per_s=math.inf,
        price=1.0,
        measured=measured,
    )


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


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What share of the data sheet is reached, and what every step costs besides. Nothing here was fitted to a result.

    memory_efficiency: of HBM bandwidth when weights are read. GEMV and skinny GEMM kernels reach 75-90%.
    kv_efficiency: of HBM bandwidth when scattered KV pages are read. Paged attention kernels reach 50-70%.
    gemm_efficiency: of peak FLOP/s in large GEMMs; cuBLAS on Hopper reaches 60-75%.
    link_efficiency: of one direction of NVLink in all-reduces of a few hundred KB and more.
    allreduce_s: latency of one all-reduce of a few KB between up to 8 GPUs (NCCL and custom kernels: 8-15 us).
    step_s, layer_s: scheduling, sampling and launches of a decode step, with CUDA graphs; per layer what graphs leave.
    usable_memory: of HBM that may be planned with.  activation_bytes: of a GPU, for activations and buffers.
    mfu: model FLOP utilisation in training; Megatron-LM reports 0.40-0.50 for dense models of this size on Hopper.
    fill_s: filling the trainer's pipeline from empty.  mini_batch_s: reducing gradients and draining.
    optimizer_s: the optimizer's step with its states swapped in (StreamRL sec. 6).
    round_s: launching one micro-batch.  host_efficiency: of PCIe when states are swapped.
    switch_s: of a colocated GPU between the stages, besides the bytes: buffers, CUDA graphs and the KV pool made again.
    network_efficiency: of the network in a weight transfer.  edge_s: latency of one edge of its tree.
    load_s: putting a received version into a running engine, between two decode steps.
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
    fill_s: float = 0.75
    mini_batch_s: float = 0.75
    optimizer_s: float = 3.0
    round_s: float = 0.01
    host_efficiency: float = 0.80
    switch_s: float = 1.0
    network_efficiency: float = 0.80
    edge_s: float = 0.01
    load_s: float = 0.5


ASSUMED = Assumptions()
