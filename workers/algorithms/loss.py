"""The policy-gradient objective as sums over tokens.

A mini-batch arrives in pieces, so every term is a per-token loss times a weight, summed; the sum is divided once, when
the mini-batch closes and its size is known. The gradient then equals that of the whole batch in one piece. A term that
cannot be written so (one that whitens over the batch) declares ``additive=False`` and the trainer refuses to stream it.
Most terms are sums over tokens; a policy loss that looks at whole rows is one over rows, which are never cut.

    policy loss      ratio of                 what its bounds do
    ppo_clip         each token               the gradient ends beyond them               PPO (1707.06347), GRPO, DAPO
    cispo            each token               the weight stops growing, no token is lost  MiniMax-M1 (2506.13585)
    gspo             a row: mean of its logs  as ppo_clip                                 GSPO (2507.18071)
    sequence_clip    a row: sum of its logs   as ppo_clip                                 RLOO (2402.14740)
    yours            as it likes              as it likes                                 ../user_functions

The whole is three streams of tokens: rl_coef * policy loss + ce_coef * cross-entropy of what is to be imitated +
kl_coef * KL to the reference model, which may be a teacher. Parts of the data may have streams of their own: a
mini-batch's sum is that over its rows, each by its part's, and what it is divided by counts all of them.

Owns: the arithmetic on log-probabilities. Never: a model, padding, I/O.

Legend: N = loss tokens of one packed piece: the response tokens that the policy chose, laid end to end, no padding.
Suffix ``_N`` = [N] float32 (float64 of a float64 model). ``logprobs_N`` carry the gradient; all else is data. Every
logprob is that of the sampled token under log_softmax(logits / temperature).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.algorithms.advantage import STD_EPSILON

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
OldLogprobs = Literal["rollout", "recomputed"]
PolicyLoss = Literal["ppo_clip", "cispo", "gspo", "sequence_clip"]
Importance = Literal["truncate", "mask"]
KlEstimator = Literal["k3", "reverse"]
Additive = Literal["tokens", "responses"]
"""What a loss is a sum over: of each token by itself, or of all tokens of a row together."""
BY_ROW = frozenset({"gspo", "sequence_clip"})
"""Those whose terms look at all tokens of a row."""
SHARED = ("aggregation", "max_length", "old_logprobs", "given")
"""What is of the whole mini-batch: what its sum is divided by, and what was recorded of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which objective. Field meanings and defaults: transport.contracts.settings.AlgorithmSettings.

    loss: a PolicyLoss, or the name of ``own_loss``.
    max_length: tokens that a response can have, by which "fixed_length" divides.
    given: nobody sampled the responses, so the rollout's logprobs are none.
    of_parts: of rows of a part of the data that has its own; they differ in what is of a row alone (``SHARED``).
    """

    advantage: str = "group_std"
    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    importance_cap: float = 2.0
    importance: Importance = "truncate"
    aggregation: Aggregation = "token_mean"
    old_logprobs: OldLogprobs = "rollout"
    rl_coef: float = 1.0
    ce_coef: float = 0.0
    ce_above: float = -math.inf
    kl_estimator: KlEstimator = "k3"
    max_length: int = 0
    given: bool = False
    own_loss: OwnLoss | None = None
    of_parts: Mapping[str, Objective] = field(default_factory=dict[str, "Objective"], hash=False)

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing. Raises ValueError."""
        if self.old_logprobs == "rollout" and 0 < self.importance_cap <= 1 + self.clip_high:
            raise ValueError(
                f"importance_cap {self.importance_cap} must exceed 1 + clip_high ({1 + self.clip_high}) or be 0 (off)"
            )
        if self.aggregation == "fixed_length" and self.max_length < 1:
            raise ValueError("fixed_length divides by max_length, which must be above 0")
        if (self.own_loss is None) != (self.loss in get_args(PolicyLoss)):
            raise ValueError(f"the loss {self.loss!r} is none of ours, and no function of the user's, or both")
        for part, one in self.of_parts.items():
            if differing := [name for name in SHARED if getattr(one, name) != getattr(self, name)]:
                raise ValueError(f"{differing[0]} is of the whole mini-batch: part {part!r} cannot have its own")

    def of(self, part: str) -> Objective:
        """That of rows of a part of the data; "": of none."""
        return self.of_parts.get(part, self)

    @property
    def all(self) -> tuple[Objective, ...]:
        """Its own, and those of parts."""
        return self, *self.of_parts.values()

    @property
    def by_row(self) -> bool:
        """Whether a term looks at all tokens of a row."""
        return self.loss in BY_ROW if self.own_loss is None else self.own_loss.additive == "responses"

    def trains(self, has_advantage: bool, reward: float | None) -> bool:
        """Whether a row moves the weights at all. reward: None where it is not known, which no bound lets pass."""
        policy = self.rl_coef > 0 and (has_advantage or self.own_loss is not None)
        imitated = self.ce_coef > 0 and (self.ce_above == -math.inf or (reward is not None and reward > self.ce_above))
        return policy or imitated or self.kl_coef > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoss:
    """A policy loss of the user's. per_token: as ``policy_loss_N``.  additive: what it says of itself."""

    name: str
    additive: Additive
    per_token: Callable[[Tensor, TokenBatch, Objective], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What the objective knows of each token.

    rollout_logprobs_N: recorded by the engine that sampled the token.
    old_logprobs_N: of the trainer's own weights before the first step of the batch; None with old_logprobs="rollout",
    and where none were recorded (see ``with_old``).
    reference_logprobs_N: of the reference model; None without KL.
    advantages_N: its own, or its row's advantage.  weights_N: from ``token_weight``.
    rewards_N: its row's reward; None: no row is imitated for its reward.
    row_N: number of its row, int64, ascending; None where only sums over tokens are computed.
    values_N, returns_N: what the critic expected, and should have; None but for the critic.
    """

    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    old_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    rewards_N: Tensor | None = None
    row_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None

    def with_old(self, logprobs_N: Tensor, objective: Objective) -> TokenBatch:
        """The batch with the old-policy logprobs that ``objective`` asks for.

        A batch of one step records none: the forward pass of that step runs with the weights of before the first step,
        so its own ``logprobs_N`` are the old ones.
        """
        if objective.old_logprobs == "rollout" or self.old_logprobs_N is not None:
            return self
        return replace(self, old_logprobs_N=logprobs_N.detach())

    def slice(self, start: int, stop: int) -> TokenBatch:
        """Tokens [start, stop), whose rows are numbered from 0: a term that is a sum over tokens sums over the parts to
        that over the whole; one over rows does where no row is cut."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        parts: dict[str, Any] = {name: all_N[start:stop] for name, all_N in columns.items() if all_N is not None}
        if self.row_N is not None and start < stop:
            parts["row_N"] = parts["row_N"] - parts["row_N"][0]
        return TokenBatch(**parts)


def token_weight(num_loss_tokens: int, aggregation: Aggregation) -> float:
    """Weight of each token of a row with ``num_loss_tokens`` of them.

    token_mean: 1, so that every token of the mini-batch counts alike (DAPO). sequence_mean: 1 / tokens of its row, so
    that every row counts alike (GRPO). fixed_length: 1, and the sum is divided by what does not depend on lengths, so
    that a token counts alike whatever else is in its row and its mini-batch (Dr. GRPO, arXiv 2503.20783).
    """
    return 1.0 / max(num_loss_tokens, 1) if aggregation == "sequence_mean" else 1.0


def normaliser(objective: Objective, *, num_rows: int, num_tokens: int, advantage_squares: float = 0.0) -> float:
    """What the summed loss of a whole mini-batch is divided by: its loss tokens, its rows, or all that they could have.

    advantage_squares: sum over its rows, by whose deviation a "batch_std" is divided besides: their mean is 0.
    """
    size = {
        "token_mean": num_tokens,
        "sequence_mean": num_rows,
        "fixed_length": num_rows * objective.max_length,
    }[objective.aggregation]
    deviation = math.sqrt(advantage_squares / max(num_rows - 1, 1)) + STD_EPSILON
    return max(size, 1) * (deviation if objective.advantage == "batch_std" else 1.0)


MAX_LOG_RATIO = 80.0


def _ratio_N(log_ratio_N: Tensor) -> Tensor:
    """exp, always finite: it ends at 88 in float32, where the sum over a row of thousands of tokens comes, and infinity
    that clipping multiplies with 0 has no gradient but NaN."""
    return torch.exp(log_ratio_N.clamp(max=MAX_LOG_RATIO))


def importance_weight_N(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, objective: Objective) -> Tensor:
    """exp(old - rollout), cut at the cap: corrects for the engine's numbers not being the trainer's. A constant.

    Source: truncated importance sampling (TIS), fengyao.notion.site/off-policy-rl; TRL's "token_truncate", and "mask":
    "token_mask", where what is above the cap does not count at all.
    """
    weight_N, cap = _ratio_N(old_logprobs_N - rollout_logprobs_N).detach(), objective.importance_cap
    return weight_N.clamp(max=cap) if objective.importance == "truncate" else weight_N * (weight_N <= cap)


def policy_ratio_N(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
    """pi_now / pi_old of each token or, the same at all of them, of its row; old: the rollout's or the recomputed."""
    old_N = tokens.rollout_logprobs_N if tokens.old_logprobs_N is None else tokens.old_logprobs_N
    log_ratio_N = logprobs_N - old_N
    if objective.loss in BY_ROW:
        log_ratio_N = _over_row_N(log_ratio_N, tokens, mean=objective.loss == "gspo")
    return _ratio_N(log_ratio_N)


def _over_row_N(values_N: Tensor, tokens: TokenBatch, *, mean: bool) -> Tensor:
    """Sum, or mean, of its row's values, at each token."""
    row_N = tokens.row_N
    if row_N is None:
        raise ValueError("a loss of whole rows needs to know them")
    if not len(row_N):
        return values_N
    sums = values_N.new_zeros(int(row_N[-1]) + 1).index_add(0, row_N, values_N)
    return (sums / row_N.bincount(minlength=len(sums)).clamp(min=1) if mean else sums)[row_N]


def policy_loss_N(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
    """-min(ratio * A, clip(ratio) * A), or with "cispo" -clip(ratio) * A * logprob, the ratio a constant there; with
    the importance correction. [N], not yet weighted; one of whole rows says at each token what its row has.

    Where ``importance_cap`` c > 0 applies:
    - old "rollout": the ratio's denominator *is* the sampling policy, so the ratio already is the importance weight and
      a second one would count it twice. c bounds it on the side that clipping leaves open (A < 0, ratio large):
      ratio -> min(ratio, c), as two-sided clipping does (INTELLECT-2, arXiv 2505.07291; TRL's ``delta``), and with
      "mask" leaves out what is above it.
    - old "recomputed": the ratio is between two sets of trainer weights; what lies between them and the engine (other
      kernels, older weights) is corrected by the constant factor ``importance_weight_N``.
    """
    ratio_N = policy_ratio_N(logprobs_N, tokens, objective)
    clipped_N = ratio_N.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    cap, kept_N = objective.importance_cap, None
    if tokens.old_logprobs_N is None and cap > 0:
        kept_N = ratio_N.detach() <= cap if objective.importance == "mask" else None
        ratio_N = ratio_N.clamp(max=cap)
    if objective.loss == "cispo":
        loss_N = -clipped_N.detach() * tokens.advantages_N * logprobs_N
    else:
        loss_N = -torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
    if tokens.old_logprobs_N is not None and cap > 0:
        kept_N = importance_weight_N(tokens.old_logprobs_N, tokens.rollout_logprobs_N, objective)
    return loss_N if kept_N is None else loss_N * kept_N


def k3_kl_N(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: >= 0, low variance. Source: joschu.net/blog/kl-approx.html (k3)."""
    difference_N = reference_logprobs_N - logprobs_N
    return torch.exp(difference_N) - difference_N - 1


def reference_kl_N(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
    """kl_coef * KL(policy || reference) per token. Raises ValueError without reference logprobs.

    "k3" is differentiated as it stands. "reverse" has the gradient of the KL itself at the present weights, as
    expected over what the policy samples: (log policy - log reference) times that of the logprob, a policy gradient
    whose advantages are dense. What was sampled by other weights counts by its ratio, a constant, up to the cap.
    Source: on-policy distillation, as arXiv 2306.13649 and thinkingmachines.ai/blog/on-policy-distillation have it.
    """
    reference_N = tokens.reference_logprobs_N
    if reference_N is None:
        raise ValueError("kl_coef > 0 needs the reference_logprobs column")
    if objective.kl_estimator == "k3":
        return objective.kl_coef * k3_kl_N(logprobs_N, reference_N)
    now_N = logprobs_N.detach()
    difference_N = now_N - reference_N
    if objective.importance_cap > 0:
        difference_N = difference_N * importance_weight_N(now_N, tokens.rollout_logprobs_N, objective)
    return objective.kl_coef * difference_N * logprobs_N


def cross_entropy_N(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
    """-ce_coef * logprob of each token of a response with a reward above ``ce_above``; 0 for the others'.

    Raises ValueError where there is a bound and there are no rewards.
    """
    loss_N = -objective.ce_coef * logprobs_N
    if objective.ce_above == -math.inf:
        return loss_N
    if tokens.rewards_N is None:
        raise ValueError("ce_above needs the reward column")
    return loss_N * (tokens.rewards_N > objective.ce_above)


def _policy_term_N(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
    per_token = policy_loss_N if objective.own_loss is None else objective.own_loss.per_token
    return objective.rl_coef * per_token(logprobs_N, tokens, objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One term. additive: its sum over pieces of the mini-batch is its sum over the whole."""

    name: str
    additive: bool
    per_token: Callable[[Tensor, TokenBatch, Objective], Tensor]


def loss_terms(objective: Objective) -> tuple[LossTerm, ...]:
    """The terms that this objective sums, of rows of no part that has its own."""
    terms = {
        LossTerm(name="rl", additive=True, per_token=_policy_term_N): objective.rl_coef,
        LossTerm(name="ce", additive=True, per_token=cross_entropy_N): objective.ce_coef,
        LossTerm(name="ref_kl", additive=True, per_token=reference_kl_N): objective.kl_coef,
    }
    return tuple(term for term, factor in terms.items() if factor > 0)


def loss_sum(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective, terms: tuple[LossTerm, ...]) -> Tensor:
    """Weighted sum over tokens of all terms: a scalar with gradient, to be divided by ``normaliser`` at the close."""
    per_token_N = torch.stack([term.per_token(logprobs_N, tokens, objective) for term in terms]).sum(0)
    return (per_token_N * tokens.weights_N).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Sums over tokens (and one maximum), so that pieces and ranks add up to what the whole batch would have said.

    loss: weighted sum.  tokens: N.  clipped_low, clipped_high: tokens whose gradient the clip removed.  kl: to the
    reference, of kl_tokens, whose loss has it.  mismatch, mismatch_max: |trainer - rollout logprob|.  mismatch_k3,
    mismatch_tv: KL and total variation between the two, as the rollout's tokens estimate them.  rows, loss_tokens: all
    that were handed over, also those that have no gradient and were not computed: the normalisers.  advantage_squares:
    of those rows.  entropy: over all of those, see ``rollout_entropy``.
    """

    loss: float = 0.0
    tokens: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    kl: float = 0.0
    kl_tokens: float = 0.0
    entropy: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    mismatch_k3: float = 0.0
    mismatch_tv: float = 0.0
    rows: float = 0.0
    loss_tokens: float = 0.0
    advantage_squares: float = 0.0

    def __add__(self, other: LossMetrics) -> LossMetrics:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return LossMetrics(**sums | {"mismatch_max": max(self.mismatch_max, other.mismatch_max)})

    def to_vectors(self) -> tuple[list[float], list[float]]:
        """(what ranks add up, what they take the maximum of)."""
        sums = [getattr(self, f.name) for f in fields(self) if f.name != "mismatch_max"]
        return sums, [self.mismatch_max]

    @staticmethod
    def from_vectors(sums: list[float], largest: list[float]) -> LossMetrics:
        """The inverse of ``to_vectors``."""
        names = [f.name for f in fields(LossMetrics) if f.name != "mismatch_max"]
        return LossMetrics(**dict(zip(names, sums, strict=True)), mismatch_max=largest[0])

    def means(self, *, given: bool = False) -> dict[str, float]:
        """Per-token means under the names that metrics.jsonl uses; what nothing was computed of is not there.

        entropy is a mean over all tokens, the others over ``computed_tokens``: those of rows with a gradient.
        given: nobody sampled the responses, so there is no rollout to compare with.
        """
        means = {"entropy": self.entropy / self.loss_tokens} if self.loss_tokens and not given else {}
        means["computed_tokens"] = tokens = self.tokens
        if self.kl_tokens:
            means["kl"] = self.kl / self.kl_tokens
        if not tokens or given:
            return means
        return means | {
            "clip_fraction_low": self.clipped_low / tokens,
            "clip_fraction_high": self.clipped_high / tokens,
            "logprob_mismatch": self.mismatch / tokens,
            "logprob_mismatch_max": self.mismatch_max,
            "mismatch_k3": self.mismatch_k3 / tokens,
            "mismatch_tv": self.mismatch_tv / tokens,
        }


def rollout_entropy(rollout_logprobs: NDArray[np.float32], loss_mask: NDArray[np.uint8] | None) -> float:
    """Sum of -rollout_logprob over the loss tokens of a row: an unbiased estimate of the sampling policy's entropy.

    It costs no pass of the model, so rows without a gradient count too.
    Args:    rollout_logprobs: [R].  loss_mask: [R], None: all ones.
    """
    chosen = rollout_logprobs if loss_mask is None else rollout_logprobs[loss_mask.astype(bool)]
    return -float(chosen.sum(dtype=np.float64))


@torch.no_grad()
def loss_metrics(loss: Tensor, logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> LossMetrics:
    """What one piece adds to the metrics. logprobs_N: of the weights that computed ``loss``."""
    tokens = tokens.with_old(logprobs_N, objective)
    ratio_N = policy_ratio_N(logprobs_N, tokens, objective)
    negative_N, positive_N = tokens.advantages_N < 0, tokens.advantages_N > 0
    reference_N = tokens.reference_logprobs_N if objective.kl_coef > 0 else None
    mismatch_N = (logprobs_N - tokens.rollout_logprobs_N).abs()
    summed = {
        "clipped_low": (ratio_N < 1 - objective.clip_low) & negative_N,
        "clipped_high": (ratio_N > 1 + objective.clip_high) & positive_N,
        "mismatch": mismatch_N,
        "mismatch_k3": k3_kl_N(tokens.rollout_logprobs_N, logprobs_N),
        "mismatch_tv": (torch.exp(logprobs_N - tokens.rollout_logprobs_N) - 1).abs() / 2,
        **({} if reference_N is None else {"kl": k3_kl_N(logprobs_N, reference_N)}),
    }
    found = {
        "loss": loss.to(torch.float64),
        **{name: each_N.sum(dtype=torch.float64) for name, each_N in summed.items()},
        **({"mismatch_max": mismatch_N.max().to(torch.float64)} if mismatch_N.numel() else {}),
    }
    values: list[float] = torch.stack(list(found.values())).tolist()  # a GPU is waited for once
    num_tokens = float(logprobs_N.numel())
    kl_tokens = num_tokens if reference_N is not None else 0.0
    return LossMetrics(tokens=num_tokens, kl_tokens=kl_tokens, **dict(zip(found, values, strict=True)))
