"""Activations that the backward pass computes again instead of keeping them: trainer.recompute.

    none        every layer keeps what its backward pass needs
    selective   a layer keeps its matrix products and attention; norms, rotations and the rest are made again
    whole       a layer keeps its input; all of it is made again, for about a third more compute

Owns: which operations are kept. Never: modules or names of its own: it stands in the layers' ``forward``, below the
hooks of FSDP, which gather a layer's weights once more before its backward pass. Invariant: gradients are those of
"none" bit for bit (fp32), because the same operations run again on the same numbers; there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from workers.errors import ModelError

Recompute = Literal["none", "selective", "whole"]

KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "torch_attn::_varlen_attn",
    "_c10d_functional::reduce_scatter_tensor",
}
"""What "selective" keeps. Source: torchtitan's list; scores that attention writes out (bmm) are made again."""


def recompute_activations(module: nn.Module, mode: Recompute) -> None:
    """Patch every decoder layer of ``module`` in place, before it is sharded.

    Raises: ModelError: the model has no layers that transformers could checkpoint.
    """
    if mode == "none":
        return
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(module).__name__} has no layers to compute again: trainer.recompute must be none")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, mode)


def _recomputed(forward: Callable[..., Any], mode: Recompute, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = {"context_fn": _kept_products} if mode == "selective" else {}
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs)


def _kept_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """operation: an OpOverload, or a higher-order operator, which is made again."""
    schema = cast(Any, getattr(operation, "_schema", None))
    return (
        CheckpointPolicy.MUST_SAVE if schema is not None and schema.name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
    )
