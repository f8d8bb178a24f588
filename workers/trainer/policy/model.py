"""The policy as the trainer computes it: a Hugging Face model over packed rows.

Owns: the fp32 master weights, their gradient sum (one flat fp32 buffer), and, when it computes in bf16, the bf16 copy
that the forward pass runs on. Never: the objective, the optimizer. Invariants: gradients of all micro-batches are
summed in fp32; the copy is the masters, rounded; dropout is off, so that logprobs compare with the rollout's.

bf16 is a second set of weights rather than autocast: autocast rounds all weights again in every micro-batch, and a
streamed batch has many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.algorithms.loss import LossMetrics, LossTerm, Objective, loss_metrics, loss_sum, loss_terms
from workers.errors import ModelError
from workers.trainer.policy.head import backward_through_head, target_logprobs
from workers.trainer.policy.packing import PackedBatch


class PolicyModel:
    """Forward and backward over packed rows. temperature: of the rollout (0 counts as 1)."""

    def __init__(self, module: PreTrainedModel, *, dtype: torch.dtype, temperature: float) -> None:
        self._module = module
        self._dtype = dtype
        self._temperature = temperature or 1.0
        self._head = plain_head(module)
        compute = dict(module.named_parameters())
        self.gradient = torch.zeros(sum(p.numel() for p in compute.values()), device=module.device)
        """[all parameters] float32: the sum of gradients so far."""
        self.masters = compute if dtype == torch.float32 else _split_masters(compute, dtype)
        """Name -> fp32 parameter; its ``grad`` is a view of ``gradient``. Tied weights appear once."""
        self._copies = None if dtype == torch.float32 else list(compute.values())
        self._attach_gradients(compute)
        self._head_gradient = self._gradient_of(self._head.weight, compute)

    @property
    def device(self) -> torch.device:
        return self._module.device

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face module whose parameters are the compute weights."""
        return self._module

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] float32 logprobs of the loss tokens under the present weights."""
        return target_logprobs(predictor_hidden(self._module, batch), batch.target_N, self._head, self._temperature)

    def backward(self, batch: PackedBatch, objective: Objective) -> LossMetrics:
        """Add the gradient of the batch's unscaled loss sum to ``gradient``.

        Raises: ValueError: a loss term that is not additive: it has to wait for the whole mini-batch.
        """
        terms = loss_terms(objective)
        if waits := [term.name for term in terms if not term.additive]:
            raise ValueError(f"loss terms {waits} are not sums over tokens: they cannot be streamed")
        metrics = LossMetrics()

        def token_gradient(logprobs: Tensor, part: slice) -> Tensor:
            nonlocal metrics
            gradient, added = _token_gradient(logprobs, batch, part, objective, terms)
            metrics += added
            return gradient

        predictors = predictor_hidden(self._module, batch)
        predictors.backward(
            backward_through_head(
                predictors.detach(), batch.target_N, self._head, self._temperature, token_gradient, self._head_gradient
            )
        )
        return metrics

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the compute copy, after they changed."""
        if self._copies is not None:
            for copy, master in zip(self._copies, self.masters.values(), strict=True):
                copy.copy_(master)

    def _attach_gradients(self, compute: dict[str, nn.Parameter]) -> None:
        """Make each master's grad a slice of ``gradient``, and have bf16 gradients added to it as they come."""
        for (name, master), part in zip(self.masters.items(), self._slices(), strict=True):
            master.grad = part.view_as(master)
            if self._copies is not None:
                compute[name].register_post_accumulate_grad_hook(_add_to(master.grad))

    def _slices(self) -> Iterator[Tensor]:
        return iter(self.gradient.split([p.numel() for p in self.masters.values()]))

    def _gradient_of(self, weight: Tensor, compute: dict[str, nn.Parameter]) -> Tensor:
        name = next(name for name, parameter in compute.items() if parameter is weight)
        gradient = self.masters[name].grad
        assert gradient is not None  # attached above
        return gradient


def predictor_hidden(module: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """[N, D] hidden state that predicts each loss token, so that logits exist for no other position."""
    trunk = cast(nn.Module, module.base_model)
    out = trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, groups=batch.attention)
    return out.last_hidden_state[0].index_select(0, batch.predictor_N)


def _token_gradient(
    logprobs: Tensor, batch: PackedBatch, part: slice, objective: Objective, terms: tuple[LossTerm, ...]
) -> tuple[Tensor, LossMetrics]:
    """d(loss sum)/d(logprobs) of some tokens, and what they add to the metrics."""
    tokens = batch.tokens.slice(part.start, part.stop)
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = loss_sum(leaf, tokens, objective, terms)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient, loss_metrics(loss, logprobs, tokens, objective)


def _split_masters(compute: dict[str, nn.Parameter], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Keep the fp32 values as masters and turn the module's parameters into ``dtype``. Buffers (rope) stay fp32."""
    masters: dict[str, nn.Parameter] = {}
    for name, parameter in compute.items():
        masters[name] = nn.Parameter(parameter.detach().clone())
        parameter.data = parameter.data.to(dtype)
    return masters


def _add_to(total: Tensor) -> Any:
    """A hook that moves a parameter's bf16 gradient into its fp32 sum."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None  # autograd calls us after it wrote it
        total.add_(parameter.grad)
        parameter.grad = None

    return move


def plain_head(module: PreTrainedModel) -> nn.Linear:
    """The output embedding. Raises ModelError for a model whose head is more than a matrix."""
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{type(module).__name__} has no plain output embedding; the trainer cannot use it")
    return head
