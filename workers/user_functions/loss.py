"""A policy loss of the user's: ``function(logprobs, tokens, objective)`` -> the loss of each token.

    logprobs   [N] of the present weights, with a gradient      tokens      TokenBatch (loss.py), all else of each token
    returns    [N], neither weighted, summed nor averaged       objective   the run's algorithm settings

It says what it is a sum over, as an attribute: ``function.additive = "tokens"`` where the loss of a token looks at that
token alone, ``"responses"`` where it looks at all tokens of its response (``tokens.row_N`` says which those are). Only
such a loss can be trained as rows come in. Before the run begins it is tried on small tensors, whole and in the parts
that it says it is a sum of.

Owns: what such a function must be, and whether it is. Never: the streams beside it, weights of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from workers.algorithms.loss import Additive, Objective, OwnLoss, TokenBatch
from workers.errors import AlgorithmError
from workers.user_functions.imports import allowed_functions, find_in, import_function, raised

OPTIONS = ("--loss", "--functions-path")
HINT = "name its directory with algorithm.functions_path, on a worker with --functions-path"
ROWS = ((3, 1, 5, 2), (120, 1, 77, 300))
"""Loss tokens of the rows that a loss is tried on: few, which can be shown, and about as many as in a small run."""
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Between whole and parts: float32 sums of a few tokens differ by less, what depends on others by far more."""


def own_losses(wanted: Collection[str], allowed: str, path: str = "") -> dict[str, OwnLoss]:
    """The user's losses among the run's, by name. ``try_losses`` comes next.

    Args:   wanted: of the run and its parts, ours among them.  allowed, path: of this process's own command line.
    Raises: AlgorithmError: one is not allowed, cannot be imported, or does not say what it is a sum over.
    """
    names = allowed_functions("loss", wanted, allowed, OPTIONS, AlgorithmError)
    find_in(path if names else "")
    return {name: _own_loss(name) for name in names}


def _own_loss(name: str) -> OwnLoss:
    function = import_function(name, "loss", HINT, AlgorithmError)
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise AlgorithmError(f"loss {name!r} cannot be called with (logprobs, tokens, objective): {error}") from error
    said: Any = getattr(function, "additive", None)
    if said not in get_args(Additive):
        raise AlgorithmError(
            f"loss {name!r} says additive = {said!r}: write {name.partition(':')[2]}.additive = "
            '"tokens" below it if the loss of a token looks at that token alone, or "responses" if it looks at its '
            "response alone. One that looks at the whole batch cannot be trained as rows come in"
        )
    return OwnLoss(name=name, additive=said, per_token=_guarded(name, function))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[[Tensor, TokenBatch, Objective], Tensor]:
    def per_token(logprobs_N: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
        """Raises AlgorithmError: the function raised, or returned another shape."""
        try:
            loss_N = function(logprobs_N, tokens, objective)
        except Exception as error:  # foreign code may raise anything
            raise AlgorithmError(f"loss {name!r} raised {raised(error)}") from error
        if not isinstance(loss_N, Tensor) or loss_N.shape != logprobs_N.shape:
            found = f"shape {[*loss_N.shape]}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
            raise AlgorithmError(
                f"loss {name!r} returned {found} for {len(logprobs_N)} tokens: return a tensor with the loss of each, "
                "neither summed nor averaged"
            )
        return loss_N

    return per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Tensors that a loss is tried on. when: in words."""

    when: str
    logprobs_N: Tensor
    tokens: TokenBatch
    rows: tuple[int, ...]


def try_losses(objective: Objective) -> None:
    """Try the user's losses, each as every part has it that it trains. Raises as ``try_loss``."""
    for one in objective.all:
        if one.own_loss is not None:
            try_loss(one.own_loss, one)


def try_loss(loss: OwnLoss, objective: Objective) -> None:
    """Try ``loss`` on tensors of ROWS. Raises AlgorithmError that says what is wrong with it, and what to do."""
    for trial in _trials(objective):
        loss_N, gradient_N = _evaluated(loss, objective, trial.logprobs_N, trial.tokens)
        for what, found_N in (("loss", loss_N), ("gradient of its loss", gradient_N)):
            if not found_N.isfinite().all():
                raise AlgorithmError(
                    f"loss {loss.name!r}: the {what} is {_shown(found_N)} {trial.when}; it must be finite: look for a "
                    "division by zero, a logarithm of it, or an exp that is not clamped"
                )
        parts = [_evaluated(loss, objective, *part) for part in _parts(trial, loss.additive)]
        for what, whole_N, in_parts in (
            ("loss", loss_N, [one for one, _ in parts]),
            ("gradient", gradient_N, [one for _, one in parts]),
        ):
            apart_N = torch.cat(in_parts)
            if not torch.allclose(whole_N, apart_N, rtol=RELATIVE, atol=ABSOLUTE):
                raise AlgorithmError(_not_additive(loss, what, trial.when, whole_N, apart_N))


def _shown(found_N: Tensor) -> str:
    """Few values as they are; of many, what is wrong with them."""
    if len(found_N) <= sum(ROWS[0]):
        return str(found_N.tolist())
    wrong_N = found_N[~found_N.isfinite()]
    return f"{wrong_N[0].item()} for {len(wrong_N)} of {len(found_N)} tokens"


def _not_additive(loss: OwnLoss, what: str, when: str, whole_N: Tensor, apart_N: Tensor) -> str:
    others = "tokens" if loss.additive == "tokens" else "responses"
    weaker = 'say "responses" if it looks at its own response alone; ' if loss.additive == "tokens" else ""
    worst = int((whole_N - apart_N).abs().argmax())
    return (
        f"loss {loss.name!r} says additive = {loss.additive!r}, but {when} the {what} of a token is "
        f"{whole_N[worst].item():.4g} beside other {others} and {apart_N[worst].item():.4g} without them: {weaker}what "
        "divides by a count or a deviation of the batch must leave that out (algorithm.aggregation divides)"
    )


def _evaluated(loss: OwnLoss, objective: Objective, logprobs_N: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """(loss, gradient of its weighted sum), both [N]. Raises AlgorithmError: there is no gradient."""
    leaf_N = logprobs_N.clone().requires_grad_()
    loss_N = loss.per_token(leaf_N, tokens, objective)
    if not loss_N.requires_grad:
        raise AlgorithmError(
            f"loss {loss.name!r} has no gradient: compute it from logprobs, and detach only what is to be constant"
        )
    (gradient_N,) = torch.autograd.grad((loss_N * tokens.weights_N).sum(), leaf_N, allow_unused=True)
    if gradient_N is None:
        raise AlgorithmError(f"loss {loss.name!r} does not depend on logprobs: nothing would be trained")
    return loss_N.detach(), gradient_N


def _trials(objective: Objective) -> Iterator[Trial]:
    for rows in ROWS:
        yield from _trials_of(objective, rows)


def _trials_of(objective: Objective, rows: tuple[int, ...]) -> Iterator[Trial]:
    generator = torch.Generator().manual_seed(0)
    count, row_N = sum(rows), torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))

    def of_rows(values: Tensor) -> Tensor:
        return values[row_N]

    for when, spread in (("where nothing changed since the rollout", 0.0), ("as is usual", 0.3), ("far off", 8.0)):

        def near(logprobs_N: Tensor, spread: float = spread) -> Tensor:
            return logprobs_N + spread * torch.randn(count, generator=generator)

        logprobs_N = -3 * torch.rand(count, generator=generator) - 0.1
        advantages = torch.randn(len(rows), generator=generator) * (0.0 if spread == 0.0 else 1.0)
        tokens = TokenBatch(
            rollout_logprobs_N=near(logprobs_N),
            advantages_N=of_rows(advantages),
            weights_N=torch.rand(count, generator=generator) + 0.5,
            old_logprobs_N=near(logprobs_N) if objective.old_logprobs == "recomputed" else None,
            reference_logprobs_N=near(logprobs_N) if objective.kl_coef > 0 else None,
            rewards_N=of_rows(torch.rand(len(rows), generator=generator)),
            row_N=row_N,
        )
        yield Trial(when=when, logprobs_N=logprobs_N, tokens=tokens, rows=rows)


def _parts(trial: Trial, additive: Additive) -> Iterator[tuple[Tensor, TokenBatch]]:
    start = 0
    for size in trial.rows if additive == "responses" else [1] * sum(trial.rows):
        yield trial.logprobs_N[start : start + size], trial.tokens.slice(start, start + size)
        start += size
