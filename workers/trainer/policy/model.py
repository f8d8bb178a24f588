"""The policy as the trainer computes it: a Hugging Face model over packed rows, without ever holding all logits.

Owns: device, dtype and loading; the fp32 master weights, their gradient sum (one flat fp32 buffer), and, when it
computes in bf16, the bf16 copy that the forward pass runs on. With adapters (lora.py) all these are theirs, and the
base is only in the dtype of the forward pass. Never: the objective, the optimizer. Invariants: packed rows give what
samples alone give (checked at loading); gradients of all micro-batches are summed in fp32 and equal autograd through
log_softmax(logits / temperature) (a test compares them); the copy is the masters, rounded; dropout is off, so that
logprobs compare with the rollout's.

Legend: N loss tokens, D hidden size, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from transport.contracts.settings import LoraSettings, Settings
from transport.contracts.types import GroupId, RowId
from transport.process.logs import get_logger
from workers.algorithms.loss import LossMetrics, Objective, TokenBatch, loss_metrics, loss_sum, loss_terms
from workers.errors import ModelError
from workers.models import check_rope, choose_device, multiplies_bf16
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy import attention, probe
from workers.trainer.policy import lora as lora_layers
from workers.trainer.policy.gradients import FlatSums, ShardedSums, global_norm
from workers.trainer.policy.head import Head, HeadLoss, target_logprobs, whole_rows
from workers.trainer.policy.loading import NOT_BUILT, check_stored, empty_module, load_weights
from workers.trainer.policy.packing import PackedBatch, pack, split_by_tokens
from workers.trainer.policy.parallel import (
    DATA,
    EMBEDDING,
    HEAD,
    TENSOR,
    Ranks,
    SingleRank,
    check_split,
    is_split_over,
    is_tied,
    keep_stage,
    num_copies,
    place_of,
    shard_over_data,
    split_tensors,
)
from workers.trainer.policy.pipeline import Pipeline
from workers.trainer.policy.streamed_layers import stream_layers
from workers.weights.adapters import Merging

log = get_logger(__name__)

PROBE_TOLERANCE = 1e-5
"""Largest difference between packed logprobs and the model's own that passes for rounding (fp32), nats."""
SLIDING = "sliding_attention"
"""What transformers calls a layer that sees a window."""


class PolicyModel:
    """Forward and backward over packed rows, on what this rank holds of the model. temperature: of the rollout.

    module: becomes what this rank holds, in place; with one rank it stays as it is.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        dtype: torch.dtype,
        temperature: float,
        ranks: Ranks | None = None,
        fill: Callable[[PreTrainedModel], None] | None = None,
        lora: LoraSettings | None = None,
        seed: int = 0,
    ) -> None:
        """fill: gives an empty module its weights, once it is what this rank holds.  seed: of new adapters."""
        self.module = module
        """Its parameters are the compute weights."""
        self.temperature = temperature or 1.0  # 0 counts as 1
        self.ranks = ranks or SingleRank()
        layout, place = self.ranks.layout, place_of(self.ranks.layout, self.ranks.rank)
        check_split(module, layout)
        tied = is_tied(module)
        self.lora = lora or LoraSettings()
        adapted = lora_layers.adapted_layers(module, self.lora)
        keep_stage(module, layout, place)
        if (mesh := self.ranks.axis(TENSOR)) is not None:
            split_tensors(module, mesh)
        master_dtype = next(module.parameters()).dtype
        if adapted:
            lora_layers.attach(module, adapted, self.lora)
            lora_layers.round_base(module, dtype)
        is_last = place.stage == layout.pipeline - 1
        self.is_first_peer = place.tensor == 0
        """Whether what this rank finds of a loss counts: its tensor peers find the same."""
        self.reads_rows = self.is_first_peer and place.stage == 0
        """Whether this rank counts the rows of a round for its peers."""
        self._stage = self._stage_of(module, is_last)
        if (mesh := self.ranks.axis(DATA)) is not None:
            compute = None if dtype == master_dtype else dtype
            shard_over_data(self._stage, cast(Any, module.base_model).layers, mesh, compute)
        if fill is not None:
            fill(module)
        if adapted:
            lora_layers.initialise(dict(module.named_parameters()), seed)
        self._sums = ShardedSums() if mesh is not None else FlatSums(module, dtype)
        self.masters: dict[str, Tensor] = {}
        """Name in the whole model -> what is trained and saved of it. Tied weights appear once."""
        self._base: dict[str, Tensor] = {}
        """Likewise, what is frozen."""
        self.locals: dict[str, nn.Parameter] = {}
        """Name -> this rank's part of the master, in the same memory: what an optimizer steps."""
        for name, parameter in module.named_parameters():
            whole = EMBEDDING if tied and name == HEAD else name  # of a last stage
            if parameter.requires_grad:
                self.masters[whole], self.locals[whole] = self._sums.add(parameter)
            else:
                self._base[whole] = parameter
        if is_last and not adapted:
            self._stage.head_gradient = self._sums.of(plain_head(module).weight)
        self._tied_over_stages = tied and layout.pipeline > 1 and EMBEDDING in self.masters
        """Whether the first and the last stage both hold the embedding."""
        self._pipeline = Pipeline(self._stage, self.ranks, dtype) if layout.pipeline > 1 else None

    def _stage_of(self, module: PreTrainedModel, has_head: bool) -> PolicyStage:
        return PolicyStage(module, self.temperature, has_head=has_head)

    @property
    def device(self) -> torch.device:
        return next(iter(self.locals.values())).device

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the masters, and of all sums."""
        return next(iter(self.locals.values())).dtype

    @property
    def gradient(self) -> Tensor:
        """[all that this rank holds]: the sum of gradients so far, in the dtype of the masters."""
        return self._sums.flat()

    @property
    def published(self) -> Mapping[str, Tensor]:
        """Name in the whole model -> what this rank holds of it: with adapters the base, to which ``merging`` adds."""
        return self._base if self.lora.rank else self.masters

    def merging(self) -> Merging:
        """What turns ``published`` into the present weights, one at a time. All ranks call it."""
        return Merging.of(self.masters, self.lora)

    def backward(self, batches: Sequence[PackedBatch], objective: Objective) -> LossMetrics:
        """Add the gradient of the unscaled loss sum of some rows. All ranks call it with as many.

        Raises: ValueError: a loss term that is not additive: it has to wait for the whole mini-batch.
        """
        if waits := {term.name for one in objective.all for term in loss_terms(one) if not term.additive}:
            raise ValueError(f"loss terms {sorted(waits)} are not sums over tokens: they cannot be streamed")
        calls = [LossCall(batch, objective) for batch in batches]
        if self._pipeline is not None:
            self._pipeline.backward(calls)
        else:
            for call in calls:
                self._stage(None, call).backward()
        return sum((call.metrics() for call in calls), LossMetrics())

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] float32 logprobs of the loss tokens under the present weights. All ranks of the data axis call it."""
        with torch.no_grad():
            return self._stage(None, LossCall(batch))

    def close(self) -> None:
        """Complete the sum: what ranks hold in common becomes the gradient of all of them. Then ``gradients`` is."""
        self._sums.close(self.locals)
        if (mesh := self.ranks.axis(TENSOR)) is not None:
            for name, master in self.masters.items():
                if not is_split_over(master, TENSOR):  # norms of heads: each rank has the gradient of its own heads
                    dist.all_reduce(self._grad(name), group=mesh.get_group())
        if self._tied_over_stages:
            dist.all_reduce(self._grad(EMBEDDING), group=self.ranks.ends)

    def gradient_norm(self) -> float:
        """Of the whole model's gradient sum."""
        if self.ranks.layout.num_ranks == 1:
            return global_norm([self.gradient])
        copies: dict[int, list[Tensor]] = {}
        for name, master in self.masters.items():
            copies.setdefault(self._num_holders(name, master), []).append(self._grad(name))
        squares = sum(global_norm(parts) ** 2 / number for number, parts in copies.items())
        return math.sqrt(self.ranks.total(squares))

    def scale(self, factor: float) -> None:
        self._sums.scale(factor)

    def start_sum(self) -> None:
        self._sums.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the compute weights, after they changed."""
        self._sums.refresh()
        if isinstance(self._stage, FSDPModule):
            self._stage.reshard()  # a forward pass without a backward leaves the root gathered

    def _grad(self, name: str) -> Tensor:
        gradient = self.locals[name].grad
        assert gradient is not None  # after ``close``
        return gradient

    def _num_holders(self, name: str, master: Tensor) -> int:
        """Ranks whose part of it is the same as ours."""
        tensor = self.ranks.layout.tensor if not is_split_over(master, TENSOR) else 1
        return num_copies(master) * tensor * (2 if self._tied_over_stages and name == EMBEDDING else 1)


class LossCall:
    """One micro-batch, and what its forward pass finds out. objective: None for logprobs alone."""

    def __init__(self, batch: PackedBatch, objective: Objective | None = None) -> None:
        self.batch = batch
        self.objective = objective
        self._spans = spans_of(batch, objective) if objective is not None else []
        self._gradient: Tensor | None = None
        self._computed: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self._spans]
        """Of each span, piece by piece as its tokens come: the sum of their losses, and their logprobs."""

    @property
    def wants_rows(self) -> bool:
        """Whether ``look_at_rows`` has to come first."""
        return any(objective.by_row for objective, _ in self._spans)

    def look_at_rows(self, logprobs_N: Tensor) -> None:
        """Take the gradient of all tokens from what they are together. One pass of the head more than by tokens."""
        self._gradient = self._gradient_of(logprobs_N, slice(0, len(logprobs_N)))

    def token_gradient(self, logprobs: Tensor, part: slice) -> Tensor:
        """d(loss)/d(logprobs) of some tokens: what a sum over tokens can say piece by piece."""
        if self._gradient is not None:
            return self._gradient[part]
        return self._gradient_of(logprobs, part)

    def _gradient_of(self, logprobs: Tensor, part: slice) -> Tensor:
        """logprobs: of the tokens of ``part``."""
        found: list[Tensor] = []
        for (objective, span), (losses, seen) in zip(self._spans, self._computed, strict=True):
            start, stop = max(span.start, part.start), min(span.stop, part.stop)
            if start < stop:
                logprobs_n = logprobs[start - part.start : stop - part.start].detach()
                loss, gradient = loss_gradient(logprobs_n, self.batch.tokens.slice(start, stop), objective)
                losses.append(loss)
                seen.append(logprobs_n)
                found.append(gradient)
        return torch.cat(found) if found else torch.zeros_like(logprobs)

    def metrics(self) -> LossMetrics:
        """Read when the passes are over, as a GPU is waited for here; nothing where this rank has no head."""
        total = LossMetrics()
        for (objective, span), (losses, seen) in zip(self._spans, self._computed, strict=True):
            if losses:
                loss = torch.stack(losses).sum(dtype=torch.float64)
                tokens = self.batch.tokens.slice(span.start, span.stop)
                total += loss_metrics(loss, torch.cat(seen), tokens, objective)
        return total


def loss_gradient(logprobs: Tensor, tokens: TokenBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    """(loss sum, its gradient by the logprobs)."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = loss_sum(leaf, tokens.with_old(logprobs, objective), objective, loss_terms(objective))
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def spans_of(batch: PackedBatch, objective: Objective) -> list[tuple[Objective, slice]]:
    """What each loss token is trained with: neighbours together, in order, each of whole rows. Empty ones are not."""
    spans: list[tuple[Objective, slice]] = []
    start = 0
    for part, length in zip(batch.row_parts, batch.row_lengths, strict=True):
        one, stop = objective.of(part), start + length
        if spans and spans[-1][0] is one:
            spans[-1] = one, slice(spans[-1][1].start, stop)
        elif length:
            spans.append((one, slice(start, stop)))
        start = stop
    return spans


class PolicyStage(nn.Module):
    """What this rank computes of a packed row: all of the model, or some of its layers and what stands at an end."""

    def __init__(self, module: PreTrainedModel, temperature: float, *, has_head: bool) -> None:
        super().__init__()
        self.module = module
        self.has_head = has_head
        self.temperature = temperature
        self.head_gradient: Tensor | None = None
        """Where the head's gradient is added; None: it goes the way of all others."""

    def forward(self, hidden: Tensor | None, call: LossCall) -> Tensor:
        """hidden: [1, T, D] of the stage before; None: this is the first.

        Returns: [1, T, D] for the next stage; from the last one a scalar whose backward pass is that of the loss, or,
        without an objective, [N] logprobs.
        """
        batch = call.batch
        trunk = cast(nn.Module, self.module.base_model)
        given = {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
        out = trunk(**given, position_ids=batch.position_ids, use_cache=False, groups=batch.attention)
        out = out.last_hidden_state
        if not self.has_head:
            return out
        head = Head.of(plain_head(self.module).weight, self.temperature)
        predictors = whole_rows(out)[0].index_select(0, batch.predictor_N)
        if call.objective is None:
            return target_logprobs(predictors, batch.target_N, head)
        if call.wants_rows:
            call.look_at_rows(target_logprobs(predictors, batch.target_N, head))
        weight = head.weight if self.head_gradient is None else head.weight.detach()  # autograd has none to hand on
        return HeadLoss.apply(predictors, weight, batch.target_N, head, call.token_gradient, self.head_gradient)


def predictor_hidden(module: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """[N, D] hidden state that predicts each loss token, so that logits exist for no other position."""
    trunk = cast(nn.Module, module.base_model)
    out = trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, groups=batch.attention)
    return out.last_hidden_state[0].index_select(0, batch.predictor_N)


@torch.no_grad()
def packed_logprobs(module: PreTrainedModel, batch: PackedBatch, temperature: float) -> Tensor:
    """[N] ``summing_dtype`` logprobs of the loss tokens under the present weights."""
    return target_logprobs(
        predictor_hidden(module, batch), batch.target_N, Head.of(plain_head(module).weight, temperature)
    )


def row_logprobs(
    module: PreTrainedModel, groups: Sequence[PromptGroup], *, temperature: float, max_tokens: int
) -> dict[RowId, NDArray[np.float32]]:
    """Of each row, [its loss tokens] float32, in packed passes of at most ``max_tokens``."""
    result: dict[RowId, NDArray[np.float32]] = {}
    for piece in split_by_tokens(groups, max_tokens):
        batch = pack(piece, "token_mean", module.device)
        result |= by_row(batch, packed_logprobs(module, batch, temperature))
    return result


def by_row(batch: PackedBatch, logprobs_N: Tensor) -> dict[RowId, NDArray[np.float32]]:
    """Of each row, [its loss tokens]."""
    parts = logprobs_N.cpu().split(list(batch.row_lengths))
    return {row: part.numpy() for row, part in zip(batch.row_ids, parts, strict=True)}


def reference_logprobs(
    model_dir: Path, settings: Settings
) -> Callable[[Sequence[PromptGroup]], dict[RowId, NDArray[np.float32]]]:
    """Load the base model, frozen: its logprobs are the trainer's at version 0. Called on one thread at a time."""
    device = choose_device(settings.scoring_device, "scoring.device" if settings.scoring.device else "trainer.device")
    offloaded = settings.scoring.offload == "reference"
    module = empty_policy(model_dir)
    check_window(module.config, settings.generation.max_context)
    load_weights(module, model_dir, device=torch.device("cpu") if offloaded else device)
    module.to(dtype=choose_dtype(settings.trainer.dtype, device))  # pyright: ignore[reportCallIssue]
    if offloaded:
        stream_layers(module, device)
    temperature = settings.sampling.temperature or 1.0
    return partial(row_logprobs, module, temperature=temperature, max_tokens=settings.trainer.micro_batch_tokens)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_module(model_dir: Path, *, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """All of a checkpoint directory in fp32 with our attention. Raises ModelError as ``empty_policy`` does."""
    module = empty_policy(model_dir, trust_remote_code=trust_remote_code)
    load_weights(module, model_dir, device=device)
    return module


def empty_policy(
    model_dir: Path, *, trust_remote_code: bool = False, say: Callable[[str], object] = log.warning
) -> PreTrainedModel:
    """The model of a directory without its weights: on torch's meta device, for ``load_weights`` to fill.

    say: hears remarks on the directory, a sentence each.
    Raises: ModelError: the directory is missing or broken, holds a mixture of experts or weights that are not those of
            its config.json, or its model cannot be trained packed, which is found with a small one of the same kind.
    """
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    module = empty_module(model_dir, attention=attention.ATTENTION, trust_remote_code=trust_remote_code)
    check_dense(module)
    for remark in check_stored(module, model_dir):
        say(remark)
    check_family(module, trust_remote_code=trust_remote_code)
    return module


def check_dense(module: PreTrainedModel) -> None:
    """Raises ModelError: the model is a mixture of experts."""
    for where, part in module.named_modules():
        if "Experts" in type(part).__name__ or where.rpartition(".")[2] == "experts":
            raise ModelError(
                f"{module.config.model_type} is a mixture of experts ({where}), which the trainer does not train yet: "
                "use a dense model"
            )


def check_family(module: PreTrainedModel, *, trust_remote_code: bool = False) -> None:
    """Try packing on small models of ``module``'s family: a narrow one, and where that fails one of its own width.

    Raises ModelError naming the family, and the kinds of layers at fault where others are not.
    """
    kinds = probe.kinds_of_layers(module)

    def check(layers: Sequence[int], *, narrow: bool) -> None:
        check_packing(
            probe.small_model(
                module,
                layers,
                attention=attention.ATTENTION,
                narrow=narrow,
                trust_remote_code=trust_remote_code,
            )
        )

    def fails(index: int) -> bool:
        try:
            check([index], narrow=True)
        except ModelError:
            return True
        return False

    layers = probe.chosen_layers(kinds, len(probe.decoder_layers(module)))
    with torch.random.fork_rng(devices=[]), suppress(ModelError):
        return check(layers, narrow=True)
    with torch.random.fork_rng(devices=[]):
        try:
            check(layers, narrow=False)
        except ModelError as error:
            guilty = [kind for kind, index in kinds.items() if len(kinds) > 1 and fails(index)]
            named = f" (its layers of kind {', '.join(guilty)})" if 0 < len(guilty) < len(kinds) else ""
            raise ModelError(f"{error}{named}") from error


def check_window(config: PreTrainedConfig, max_context: int, *, served: bool = False) -> None:
    """Raises ModelError: samples may be longer than the window of some of the model's layers, or reach the change of a
    rope.

    The first such sample ended a run, or was trained otherwise beside a long one. max_context: as the setting of
    generation; 0: what the model allows.  served: SGLang or vLLM generates.
    """
    text = cast(Any, config.get_text_config())
    longest = max_context or getattr(text, "max_position_embeddings", 0) or 0
    check_rope(text.to_dict(), longest, served=served)
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not window or not getattr(text, "use_sliding_window", True) or (kinds and SLIDING not in kinds):
        return
    if longest > window:
        raise ModelError(
            f"layers of this {config.model_type} model see {window} tokens (sliding_window), and a sample may have "
            f"{longest}: attention within a window is not supported; set generation.max_context = {window} or less"
        )


def choose_dtype(name: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """The dtype of the forward pass. "auto" is bf16 where the hardware multiplies it."""
    if name == "auto":
        return torch.bfloat16 if multiplies_bf16(device) else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def plain_head(module: PreTrainedModel) -> nn.Linear:
    """The output embedding. Raises ModelError for a model whose head is more than a matrix."""
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{type(module).__name__} has no plain output embedding; the trainer cannot use it")
    return head


@torch.no_grad()
def check_packing(module: PreTrainedModel) -> None:
    """Compare packed logprobs with the model's own, each sample alone, for two groups in one row, in fp32.

    A model may ignore our attention function, scale its logits, place tokens by something else than position ids, or
    read neighbours in a convolution; it would train, wrongly. Raises ModelError naming the model.
    """
    vocabulary = int(cast(Any, module).get_input_embeddings().weight.shape[0])
    ids = np.random.default_rng(0).integers(0, vocabulary, size=26).astype(np.int32)
    prompts, responses = (ids[:4], ids[4:7]), ((ids[7:12], ids[12:15], ids[15:16]), (ids[16:20], ids[20:26]))
    groups = [_probe_group(number, *given) for number, given in enumerate(zip(prompts, responses, strict=True))]
    name = type(module).__name__
    try:
        ours = packed_logprobs(module, pack(groups, "token_mean", module.device), 1.0)
        module.set_attn_implementation("eager")
        theirs = [
            _own_logprobs(module, group.prompt_ids, sample.response_ids) for group in groups for sample in group.samples
        ]
    except NOT_BUILT as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{name} cannot be trained packed: {reason}") from error
    finally:
        module.set_attn_implementation(attention.ATTENTION)
    error = (ours - torch.cat(theirs)).abs().max().item()
    if not error < PROBE_TOLERANCE:
        raise ModelError(
            f"{name} cannot be trained packed: its logprobs then differ by {error:.3g} from those of its own forward"
            " pass"
        )


def _probe_group(number: int, prompt: NDArray[np.int32], responses: Sequence[NDArray[np.int32]]) -> PromptGroup:
    samples = [
        TrainingSample(
            row_id=RowId(f"0/{number}/{i}"),
            response_ids=ids,
            rollout_logprobs=np.zeros(len(ids), np.float32),
            advantage=0.0,
        )
        for i, ids in enumerate(responses)
    ]
    return PromptGroup(group_id=GroupId(f"0/{number}"), prompt_ids=prompt, samples=samples)


def _own_logprobs(module: PreTrainedModel, prompt: NDArray[np.int32], response: NDArray[np.int32]) -> Tensor:
    """[R] logprobs of ``response``, of the model's own forward pass over this sample alone."""
    row = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)).to(module.device)[None]
    logits = cast(Any, module)(input_ids=row, use_cache=False).logits
    logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, row[0, len(prompt) :, None])[:, 0]
