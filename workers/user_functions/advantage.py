"""An advantage estimator of the user's, for a group or for each token:

    function(rewards)             [G] float64 of one group -> [G] numbers
    function(rewards, responses)  the same, and a Response each -> G arrays, with a number for each of its tokens;
                                  it says so: ``function.per_token = True``

It says that it is a sum over responses, ``function.additive = "responses"``: a group's advantages come from that group
alone, because groups are trained as they come. It is tried on small groups before the run begins.

Owns: what such a function must be. Never: torch, I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.errors import AlgorithmError, RewardError
from workers.user_functions.imports import allowed_functions, find_in, import_function, raised

OPTIONS = ("--advantage", "--functions-path")
HINT = "name its directory with algorithm.functions_path, on a worker with --functions-path"
ADDITIVE = "responses"
TRIED = ([0.0, 1.0], [1.0, 1.0, 1.0], [0.25, -1.0, 3.0, 0.0], [0.0] * 8, [1e3, 0.0, 0.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response as an estimator of tokens sees it.

    token_ids: [R] int32.  chosen: [R] bool, those that the policy chose; the others (what an environment said) are not
    trained.  logprobs: [R] float32 of the rollout, 0 where it chose nothing.  branch_ends: [B] int, where each of its
    samples ends: one at R, but for an episode of several, each of which stands behind the prompt by itself.
    """

    token_ids: NDArray[np.int32]
    chosen: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    branch_ends: NDArray[np.int32]


class OwnAdvantage:
    """The function, guarded. Raises (constructor) AlgorithmError for what it takes, or says of itself."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self.per_token = getattr(function, "per_token", False) is True
        taken = ("rewards", "responses") if self.per_token else ("rewards",)
        try:
            inspect.signature(function).bind(*taken)
        except (TypeError, ValueError) as error:
            also = (
                "" if self.per_token else f"; one that takes (rewards, responses) says {self._short}.per_token = True"
            )
            raise AlgorithmError(
                f"advantage {name!r} cannot be called with ({', '.join(taken)}): {error}{also}"
            ) from error
        said = getattr(function, "additive", None)
        if said != ADDITIVE:
            raise AlgorithmError(
                f"advantage {name!r} says additive = {said!r}: write {self._short}.additive = {ADDITIVE!r} "
                "below it, if a group's advantages come from its own rewards alone. What looks at other groups cannot "
                "be trained as groups come; advantage batch_std shows how a deviation of the batch is had all the same"
            )

    @property
    def _short(self) -> str:
        return self._name.partition(":")[2]

    def of_samples(self, rewards_G: NDArray[np.float32]) -> NDArray[np.float32]:
        """[G] rewards -> [G] advantages. Raises RewardError: it raised, or returned something else."""
        result = self._numbers(self._called(rewards_G), "")
        if result.shape != rewards_G.shape:
            raise RewardError(
                f"advantage {self._name!r} returned shape {[*result.shape]} for {len(rewards_G)} rewards: return one "
                f"number for each, or say {self._short}.per_token = True and return an array for each"
            )
        if not np.isfinite(result).all():
            raise RewardError(f"advantage {self._name!r} returned {result.tolist()} for rewards {rewards_G.tolist()}")
        return result.astype(np.float32)

    def of_tokens(self, rewards_G: NDArray[np.float32], responses: Sequence[Response]) -> list[NDArray[np.float32]]:
        """Of each response, [R] advantages, 0 where the policy chose nothing. Raises RewardError as ``of_samples``."""
        result = self._called(rewards_G, [*responses])
        if not isinstance(result, list | tuple | np.ndarray) or len(result) != len(responses):
            found = f"{len(result)} arrays" if isinstance(result, list | tuple) else type(result).__name__
            raise RewardError(
                f"advantage {self._name!r} returned {found} for {len(responses)} responses: return a list with an "
                "array for each"
            )
        return [
            self._of_response(one, response, number)
            for number, (one, response) in enumerate(zip(result, responses, strict=True))
        ]

    def _of_response(self, found: Any, response: Response, number: int) -> NDArray[np.float32]:
        values, tokens = self._numbers(found, f" of response {number}"), len(response.token_ids)
        if values.shape != (tokens,):
            raise RewardError(
                f"advantage {self._name!r} returned shape {[*values.shape]} for response {number}, which has {tokens} "
                "tokens: return a number for each, also for those that the policy did not choose"
            )
        if not (finite := np.isfinite(values)).all():
            worst = int(np.argmin(finite))
            raise RewardError(
                f"advantage {self._name!r} returned {values[worst]} for token {worst} of response {number}, the first "
                f"of {int((~finite).sum())}"
            )
        return np.where(response.chosen, values, 0.0).astype(np.float32)

    def _called(self, rewards_G: NDArray[np.float32], *more: Any) -> Any:
        try:
            return self._function(np.array(rewards_G, dtype=np.float64), *more)
        except Exception as error:  # foreign code may raise anything
            raise RewardError(f"advantage {self._name!r} raised {raised(error)}") from error

    def _numbers(self, found: Any, where: str) -> NDArray[np.float64]:
        try:
            return np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise RewardError(f"advantage {self._name!r} returned no numbers{where}: {error}") from error


def own_advantages(wanted: Collection[str], allowed: str, path: str = "") -> dict[str, OwnAdvantage]:
    """The user's estimators among the run's, by name, tried.

    Args:   wanted: of the run and its parts, ours among them.  allowed, path: of this process's own command line.
    Raises: AlgorithmError: one is not allowed, cannot be imported, or is none.
    """
    names = allowed_functions("advantage", wanted, allowed, OPTIONS, AlgorithmError)
    find_in(path if names else "")
    found = {name: OwnAdvantage(name, import_function(name, "advantage", HINT, AlgorithmError)) for name in names}
    for name, estimate in found.items():
        _try(name, estimate)
    return found


def _try(name: str, estimate: OwnAdvantage) -> None:
    groups = [np.array(rewards, dtype=np.float32) for rewards in TRIED]

    def tried(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        """All of a group, end to end."""
        if not estimate.per_token:
            return estimate.of_samples(rewards)
        return np.concatenate(estimate.of_tokens(rewards, [*_responses(len(rewards))]))

    try:
        first = [tried(group) for group in groups]
        again = [tried(group) for group in reversed(groups)][::-1]
    except RewardError as error:
        raise AlgorithmError(f"{error} (tried before the run)") from error
    for group, one, other in zip(groups, first, again, strict=True):
        if not np.allclose(one, other, rtol=1e-5, atol=1e-6):
            raise AlgorithmError(
                f"advantage {name!r} says additive = {ADDITIVE!r}, but gives rewards {group.tolist()} the advantages "
                f"{one.tolist()} once and {other.tolist()} after other groups: it must look at its group alone, and "
                "remember nothing"
            )


def _responses(count: int) -> Iterator[Response]:
    """What an estimator of tokens is tried on: of one token, with tokens of an environment, of two samples."""
    for number in range(count):
        tokens = 1 + 3 * number % 7
        chosen = np.arange(tokens) % (number + 2) <= number
        yield Response(
            token_ids=np.arange(tokens, dtype=np.int32),
            chosen=chosen,
            logprobs=np.where(chosen, -1.0, 0.0).astype(np.float32),
            branch_ends=np.array([1, tokens] if number % 4 == 3 and tokens > 1 else [tokens], np.int32),
        )
