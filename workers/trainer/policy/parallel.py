"""How the ranks of a trainer share one model: a mesh of pipeline x data x tensor, and the model made to fit it.

    axis       ranks along it                        what a rank holds                     by
    data       train different rows                  its share of every tensor, gathered   FSDP2, fully_shard
                                                     a layer at a time
    tensor     compute each layer together           its heads, columns, words             DTensor, sequence parallel
    pipeline   compute consecutive layers            its layers                            torch.distributed.pipelining

An axis of one rank is not there: one process runs plain tensors, because a one-rank ``fully_shard`` cost 8 to 73%.
Ranks of one place on the data axis, the peers, read the same rows.

Owns: which rank has which place; which part of a model it keeps; what a model must be to be split. Invariants: every
parameter keeps the name it has in the whole model; whatever the layout, what the ranks hold together is the model, and
their gradient is that of one process (tests compare them in float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from transport.contracts.llms import from_config
from transport.contracts.training_memory import Layout, LayoutError, check_layout, stage_layers
from workers.algorithms.loss import LossMetrics
from workers.errors import ModelError
from workers.weights.parts import TalkingRanks

PIPELINE, DATA, TENSOR = "pipeline", "data", "tensor"
AXES = (PIPELINE, DATA, TENSOR)
"""Of the mesh, outermost first: neighbours in rank, which share a host, are those that talk most."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FAMILIES = ("llama", "qwen2", "qwen3")
"""``model_type`` of what can be split over tensor or pipeline ranks; all share their layers' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of one rank, along each axis."""

    stage: int = 0
    data: int = 0
    tensor: int = 0


def place_of(layout: Layout, rank: int) -> Place:
    rest, tensor = divmod(rank, layout.tensor)
    stage, data = divmod(rest, layout.data)
    return Place(stage=stage, data=data, tensor=tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShape:
    """What the ranks must agree on before they enter a round together.

    mark: of its rows, the same on all peers.  micro_batches: that this rank has.  tokens: of its largest.
    """

    mark: int
    micro_batches: int
    tokens: int


class Ranks(Protocol):
    """What a rank needs of the others. Raises RanksError when one of them went away."""

    @property
    def rank(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def axis(self, name: str) -> DeviceMesh | None:
        """That axis of the mesh; None where it has only one rank."""
        ...

    @property
    def ends(self) -> ProcessGroup | None:
        """The group of the first and the last stage of a pipeline, on these two."""
        ...

    def total(self, value: float) -> float:
        """Its sum over all ranks, in float64."""
        ...

    def reduce(self, metrics: LossMetrics) -> LossMetrics:
        """The metrics of all."""
        ...

    def agree(self, value: int) -> int:
        """Rank 0's value."""
        ...

    def agree_round(self, shape: RoundShape) -> RoundShape:
        """Wait until all are about to enter a round: (our mark, most micro-batches of all, most tokens of the peers).

        Raises RanksError: peers have other rows than we.
        """
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order, on all of them."""
        ...

    @property
    def beside(self) -> TalkingRanks:
        """The same ranks over a process group of its own, for a thread beside training: neither hears the other."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """There are no others."""

    rank: int = 0
    layout: Layout = field(default_factory=Layout)
    ends: None = None

    def axis(self, name: str) -> DeviceMesh | None:
        return None

    def total(self, value: float) -> float:
        return value

    def reduce(self, metrics: LossMetrics) -> LossMetrics:
        return metrics

    def agree(self, value: int) -> int:
        return value

    def agree_round(self, shape: RoundShape) -> RoundShape:
        return shape

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    @property
    def beside(self) -> TalkingRanks:
        return self

    def close(self) -> None:
        pass


# -- what can be split


def check_split(module: PreTrainedModel, layout: Layout) -> None:
    """Raises ModelError: this model cannot be split so; it says by what it can."""
    if layout.tensor == layout.pipeline == 1:
        return
    config = module.config
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"trainer.parallel: a {config.model_type} model is split over data ranks only (tensor and pipeline are "
            f"for {', '.join(FAMILIES)})"
        )
    try:
        check_layout(from_config(f"this {config.model_type} model", config.to_dict()), layout)
    except LayoutError as error:
        raise ModelError(str(error)) from error


# -- splitting


def keep_stage(module: PreTrainedModel, layout: Layout, place: Place) -> None:
    """Take away what other stages compute. The rest keeps its names; both ends keep the matrix of tied embeddings."""
    if layout.pipeline == 1:
        return
    trunk, last = cast(Any, module.base_model), layout.pipeline - 1
    kept = stage_layers(len(trunk.layers), layout.pipeline, place.stage)
    layers = nn.ModuleList()
    for index in kept:
        layers.add_module(str(index), trunk.layers[index])
    trunk.layers = layers
    if place.stage > 0:
        trunk.embed_tokens = None
    if place.stage < last:
        trunk.norm, cast(Any, module).lm_head = nn.Identity(), None


def is_tied(module: PreTrainedModel) -> bool:
    """Whether one matrix is both the input and the output embedding."""
    first, last = (cast(Any, get)() for get in (module.get_input_embeddings, module.get_output_embeddings))
    return first is not None and last is not None and first.weight is last.weight


def split_tensors(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Make each layer's matrices DTensors over ``mesh`` (one axis), with its norms and sums over a part of the tokens.

    Source: Megatron-LM (arXiv 1909.08053, 2205.05198); the plan is that of torch's own examples.
    """
    tied, model = is_tied(module), cast(Any, module)
    trunk = model.base_model
    by_tokens = Shard(1)
    of_layer: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": by_tokens}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=by_tokens),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(by_tokens,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=by_tokens),
    }
    for layer in trunk.layers:
        parallelize_module(layer, mesh, of_layer)
    ends: dict[str, ParallelStyle] = {}
    if trunk.embed_tokens is not None:
        ends["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=by_tokens)
    if not isinstance(trunk.norm, nn.Identity):
        ends["norm"] = SequenceParallel()
    parallelize_module(trunk, mesh, ends)
    if tied:
        cast(Any, model).lm_head.register_parameter("weight", cast(Any, trunk.embed_tokens).weight)
    elif model.lm_head is not None:
        parallelize_module(module, mesh, {"lm_head": ColwiseParallel()})


def shard_over_data(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Have every rank of ``mesh`` keep its share of each tensor; a layer is gathered while it computes, in ``dtype``.

    Gradients are summed (not averaged) over ranks, in float32 where the masters are float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    trained = next(parameter for parameter in root.parameters() if parameter.requires_grad)
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=trained.dtype, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other


# -- what a rank holds of a tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def recast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Have a parameter itself in ``dtype``, wherever it stands.

    Not ``parameter.data = ...``: of a DTensor that changes what it says of itself, and its local part stays as it was.
    """
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))


def is_split_over(tensor: Tensor, axis: str) -> bool:
    """Whether ranks along ``axis`` know of it as one tensor: split, or held by each with its gradient summed."""
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())


def num_copies(tensor: Tensor) -> int:
    """Ranks that hold the same part of it, along the axes that know of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = tensor.device_mesh.shape
    return math.prod(size for size, placed in zip(sizes, tensor.placements, strict=True) if placed.is_replicate())
