"""The policy as the trainer computes it: a Hugging Face model over packed rows, without ever holding all logits.

The logits of one micro-batch are the largest tensor of training (4096 tokens x 49152 words are 800 MB in fp32). A loss
that is a sum over tokens needs them a few rows at a time: softmax, the token's own logprob, and, because the loss tells
d(loss)/d(logprob) at once, the gradient in the same buffer. Autograd over the whole made three more passes over fresh
memory and took 1.3 s of a 6.4 s step (SmolLM2, 1549 tokens, bf16, one thread).

Owns: device, dtype and loading; the fp32 master weights, their gradient sum (one flat fp32 buffer), and, when it
computes in bf16, the bf16 copy that the forward pass runs on. Never: the objective, the optimizer. Invariants: packed
rows give what samples alone give (checked at loading); gradients of all micro-batches are summed in fp32 and equal
autograd through log_softmax(logits / temperature) (a test compares them); the copy is the masters, rounded; dropout is
off, so that logprobs compare with the rollout's.

Legend: N loss tokens, D hidden size, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, RowId
from workers.algorithms.loss import LossMetrics, Objective, loss_metrics, loss_sum, loss_terms
from workers.errors import ModelError
from workers.models import check_model_dir, choose_device
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy import packing
from workers.trainer.policy.packing import PackedBatch, pack, split_by_tokens, summing_dtype

PROBE_TOLERANCE = 1e-3
"""Largest difference between our logprobs and the model's own that passes for rounding (fp32)."""

SOFTMAX_ROWS = 128
"""Rows of logits handled at once: 25 MB of fp32 at 49152 words, so that its passes stay near the cache."""
BLOCK_ROWS = 2048
"""Rows whose gradient is kept (in the compute dtype) for one matrix product into the weight's gradient."""

TokenGradient = Callable[[Tensor, slice], Tensor]
"""(logprobs_n, which tokens) -> d(loss)/d(logprobs_n): what an additive objective can say piece by piece."""


class PolicyModel:
    """Forward and backward over packed rows. temperature: of the rollout (0 counts as 1)."""

    def __init__(self, module: PreTrainedModel, *, dtype: torch.dtype, temperature: float) -> None:
        self.module = module
        """Its parameters are the compute weights."""
        self.temperature = temperature or 1.0
        self._head = plain_head(module)
        compute = dict(module.named_parameters())
        sizes = [parameter.numel() for parameter in compute.values()]
        self.gradient = torch.zeros(sum(sizes), device=module.device)
        """[all parameters] float32: the sum of gradients so far."""
        self.masters: dict[str, nn.Parameter] = {}
        """Name -> fp32 parameter; its ``grad`` is a view of ``gradient``. Tied weights appear once."""
        # Not autocast: it rounds all weights again in every micro-batch, and a streamed batch has many.
        self._copies: list[nn.Parameter] = []
        for (name, parameter), part in zip(compute.items(), self.gradient.split(sizes), strict=True):
            gradient = part.view_as(parameter)
            master = parameter
            if dtype != torch.float32:  # buffers (rope) stay fp32
                master = nn.Parameter(parameter.detach().clone())
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(_add_to(gradient))
                self._copies.append(parameter)
            master.grad = gradient
            self.masters[name] = master
            if parameter is self._head.weight:
                self._head_gradient = gradient

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
            tokens = batch.tokens.slice(part.start, part.stop)
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_()
                loss = loss_sum(leaf, tokens, objective, terms)
                (gradient,) = torch.autograd.grad(loss, leaf)
            metrics += loss_metrics(loss, logprobs, tokens, objective)
            return gradient

        hidden = predictor_hidden(self.module, batch)
        hidden.backward(
            backward_through_head(
                hidden.detach(), batch.target_N, self._head, self.temperature, token_gradient, self._head_gradient
            )
        )
        return metrics

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the compute copy, after they changed."""
        if self._copies:
            for copy, master in zip(self._copies, self.masters.values(), strict=True):
                copy.copy_(master)


def _add_to(total: Tensor) -> Any:
    """A hook that moves a parameter's bf16 gradient into its fp32 sum as it comes."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None  # autograd calls us after it wrote it
        total.add_(parameter.grad)
        parameter.grad = None

    return move


def predictor_hidden(module: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """[N, D] hidden state that predicts each loss token, so that logits exist for no other position."""
    trunk = cast(nn.Module, module.base_model)
    out = trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, groups=batch.attention)
    return out.last_hidden_state[0].index_select(0, batch.predictor_N)


@torch.no_grad()
def packed_logprobs(module: PreTrainedModel, batch: PackedBatch, temperature: float) -> Tensor:
    """[N] ``summing_dtype`` logprobs of the loss tokens under the present weights."""
    return target_logprobs(predictor_hidden(module, batch), batch.target_N, plain_head(module), temperature)


def row_logprobs(
    module: PreTrainedModel, groups: Sequence[PromptGroup], *, temperature: float, max_tokens: int
) -> dict[RowId, NDArray[np.float32]]:
    """Of each row, [its loss tokens] float32, in packed passes of at most ``max_tokens``."""
    result: dict[RowId, NDArray[np.float32]] = {}
    for piece in split_by_tokens(groups, max_tokens):
        batch = pack(piece, "token_mean", module.device)
        parts = packed_logprobs(module, batch, temperature).cpu().split(list(batch.row_lengths))
        result.update((row, part.numpy()) for row, part in zip(batch.row_ids, parts, strict=True))
    return result


def reference_logprobs(
    model_dir: Path, settings: Settings
) -> Callable[[Sequence[PromptGroup]], dict[RowId, NDArray[np.float32]]]:
    """Load the base model, frozen: its logprobs are the trainer's at version 0. Called on one thread at a time."""
    device = choose_device(settings.trainer.device, "trainer.device")
    module = load_module(model_dir, device=device)
    module.to(dtype=choose_dtype(settings.trainer.dtype, device))  # pyright: ignore[reportCallIssue]
    temperature = settings.sampling.temperature or 1.0
    return partial(row_logprobs, module, temperature=temperature, max_tokens=settings.trainer.micro_batch_tokens)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_module(model_dir: Path, *, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a checkpoint directory in fp32 with our attention.

    Raises: ModelError: the directory is missing or broken, or its model cannot be trained packed.
    """
    check_model_dir(model_dir)
    ALL_ATTENTION_FUNCTIONS[packing.ATTENTION] = packing.shared_prompt_attention
    transformers_logging.disable_progress_bar()  # its monitor thread outlives the call, and logs are no terminals
    try:
        module = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation=packing.ATTENTION,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"cannot load a causal language model from {model_dir}: {error}") from error
    module = cast(nn.Module, module).to(device).eval()
    check_packing(cast(PreTrainedModel, module))
    return cast(PreTrainedModel, module)


def choose_dtype(name: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """The dtype of the forward pass.

    "auto" is bf16 where the hardware multiplies it: a GPU, or a CPU with avx512_bf16 or amx (3x the fp32 step on one
    core of such a CPU). Elsewhere oneDNN emulates it, slower than fp32.
    """
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    cpu = torch.cpu.get_capabilities()
    in_hardware = device.type == "cuda" or cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return torch.bfloat16 if in_hardware else torch.float32


def plain_head(module: PreTrainedModel) -> nn.Linear:
    """The output embedding. Raises ModelError for a model whose head is more than a matrix."""
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{type(module).__name__} has no plain output embedding; the trainer cannot use it")
    return head


@torch.no_grad()
def check_packing(module: PreTrainedModel) -> None:
    """Compare packed logprobs with the model's own on two short samples, once, in fp32.

    A model may ignore our attention function, scale its logits, or place tokens by something else than position ids;
    it would train, wrongly. Raises ModelError naming the model.
    """
    vocabulary = int(cast(Any, module).get_input_embeddings().weight.shape[0])
    ids = np.random.default_rng(0).integers(0, vocabulary, size=12).astype(np.int32)
    prompt, responses = ids[:4], (ids[4:9], ids[9:])
    samples = [
        TrainingSample(
            row_id=RowId(f"0/0/{i}"), response_ids=r, rollout_logprobs=np.zeros(len(r), np.float32), advantage=0.0
        )
        for i, r in enumerate(responses)
    ]
    group = PromptGroup(group_id=GroupId("0/0"), prompt_ids=prompt, samples=samples)
    batch = pack([group], "token_mean", module.device)
    ours = packed_logprobs(module, batch, 1.0)
    module.set_attn_implementation("eager")
    theirs: list[Tensor] = []
    for response in responses:
        row = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)).to(module.device)[None]
        logits = cast(Any, module)(input_ids=row, use_cache=False).logits
        logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        theirs.append(logprobs.gather(1, row[0, len(prompt) :, None])[:, 0])
    module.set_attn_implementation(packing.ATTENTION)
    error = (ours - torch.cat(theirs)).abs().max().item()
    if not error < PROBE_TOLERANCE:
        raise ModelError(
            f"{type(module).__name__} cannot be trained packed: its logprobs then differ by {error:.3g} from those of"
            " its own forward pass"
        )


# --- the head ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def target_logprobs(hidden_ND: Tensor, target_N: Tensor, head: nn.Linear, temperature: float) -> Tensor:
    """[N] ``summing_dtype``: log_softmax(head(hidden) / temperature) of the targets."""
    pieces = zip(hidden_ND.split(SOFTMAX_ROWS), target_N.split(SOFTMAX_ROWS), strict=True)
    return torch.cat([_softmax(hidden, target, head, temperature)[0] for hidden, target in pieces])


@torch.no_grad()
def backward_through_head(
    hidden_ND: Tensor,
    target_N: Tensor,
    head: nn.Linear,
    temperature: float,
    token_gradient: TokenGradient,
    weight_gradient: Tensor,
) -> Tensor:
    """Gradient of a token-wise loss through the head.

    Args:    hidden_ND: [N, D], any floating dtype.  weight_gradient: [V, D] ``summing_dtype``, added to in place.
    Returns: d(loss)/d(hidden), [N, D] in the dtype of ``hidden_ND``.
    """
    hidden_gradient = torch.empty_like(hidden_ND)
    for start in range(0, hidden_ND.shape[0], BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, hidden_ND.shape[0]))
        logit_gradient = _block_gradient(hidden_ND, target_N, head, temperature, token_gradient, rows)
        torch.mm(logit_gradient, head.weight, out=hidden_gradient[rows])
        if weight_gradient.dtype == logit_gradient.dtype:
            weight_gradient.addmm_(logit_gradient.T, hidden_ND[rows])
        else:
            weight_gradient += logit_gradient.T @ hidden_ND[rows]
    return hidden_gradient


def _block_gradient(
    hidden_ND: Tensor,
    target_N: Tensor,
    head: nn.Linear,
    temperature: float,
    token_gradient: TokenGradient,
    rows: slice,
) -> Tensor:
    """d(loss)/d(head's output) of ``rows``, [rows, V] in the compute dtype."""
    block = torch.empty(rows.stop - rows.start, head.out_features, dtype=hidden_ND.dtype, device=hidden_ND.device)
    for start in range(rows.start, rows.stop, SOFTMAX_ROWS):
        part = slice(start, min(start + SOFTMAX_ROWS, rows.stop))
        target = target_N[part, None]
        logprobs, unnormalised, total = _softmax(hidden_ND[part], target_N[part], head, temperature)
        # d logprob / d logit = (onehot - softmax) / temperature
        gradient = token_gradient(logprobs, part)[:, None] / temperature
        unnormalised.mul_(-gradient / total[:, None]).scatter_add_(1, target, gradient)
        block[part.start - rows.start : part.stop - rows.start] = unnormalised
    return block


def _softmax(hidden: Tensor, target: Tensor, head: nn.Linear, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob of the target [n], exp(logits - max) [n, V], its sum [n]), in ``summing_dtype``, one pass of exp."""
    logits = F.linear(hidden, head.weight, head.bias).to(summing_dtype(hidden.dtype))
    if temperature != 1.0:
        logits.div_(temperature)
    largest = logits.amax(dim=-1, keepdim=True)
    logits.sub_(largest)
    chosen = logits.gather(1, target[:, None])[:, 0]
    unnormalised = logits.exp_()
    total = unnormalised.sum(dim=-1)
    return chosen - total.log(), unnormalised, total
