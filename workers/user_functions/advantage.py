"""An advantage estimator of the user's: ``function(rewards)``, [G] float64 of one group -> [G] numbers.

It says that it is a sum over responses, ``function.additive = "responses"``: a group's advantages come from that group
alone, because groups are trained as they come. It is tried on small groups before the run begins.

Owns: what such a function must be. Never: torch, I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.errors import AlgorithmError, RewardError
from workers.user_functions.imports import check_allowed, find_in, import_function, raised

OPTIONS = ("--advantage", "--functions-path")
HINT = "name its directory with algorithm.functions_path, on a worker with --functions-path"
ADDITIVE = "responses"
TRIED = ([0.0, 1.0], [1.0, 1.0, 1.0], [0.25, -1.0, 3.0, 0.0], [0.0] * 8, [1e3, 0.0, 0.0])


class OwnAdvantage:
    """The function, guarded. Raises (constructor) AlgorithmError for what it takes, or says of itself."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        try:
            inspect.signature(function).bind(np.zeros(2))
        except (TypeError, ValueError) as error:
            raise AlgorithmError(f"advantage {name!r} cannot be called with (rewards): {error}") from error
        said = getattr(function, "additive", None)
        if said != ADDITIVE:
            raise AlgorithmError(
                f"advantage {name!r} says additive = {said!r}: write {name.partition(':')[2]}.additive = {ADDITIVE!r} "
                "below it, if a group's advantages come from its own rewards alone. What looks at other groups cannot "
                "be trained as groups come; advantage batch_std shows how a deviation of the batch is had all the same"
            )

    def __call__(self, rewards_G: NDArray[np.float32]) -> NDArray[np.float32]:
        """[G] rewards -> [G] advantages. Raises RewardError: it raised, or returned something else."""
        try:
            result = np.asarray(self._function(np.array(rewards_G, dtype=np.float64)), dtype=np.float64)
        except Exception as error:  # foreign code may raise anything
            raise RewardError(f"advantage {self._name!r} raised {raised(error)}") from error
        if result.shape != rewards_G.shape:
            raise RewardError(
                f"advantage {self._name!r} returned shape {[*result.shape]} for {len(rewards_G)} rewards: return one "
                "number for each"
            )
        if not np.isfinite(result).all():
            raise RewardError(f"advantage {self._name!r} returned {result.tolist()} for rewards {rewards_G.tolist()}")
        return result.astype(np.float32)


def own_advantage(wanted: str, allowed: str, path: str = "") -> OwnAdvantage | None:
    """The run's own estimator, tried; None where it uses one of ours.

    Args:   wanted: ``algorithm.advantage``.  allowed, path: of this process's own command line.
    Raises: AlgorithmError: it is not allowed, cannot be imported, or is none.
    """
    check_allowed("advantage", wanted, allowed, OPTIONS, AlgorithmError)
    if not allowed:
        return None
    find_in(path)
    found = OwnAdvantage(allowed, import_function(allowed, "advantage", HINT, AlgorithmError))
    _try(allowed, found)
    return found


def _try(name: str, estimate: OwnAdvantage) -> None:
    groups = [np.array(rewards, dtype=np.float32) for rewards in TRIED]
    try:
        first = [estimate(group) for group in groups]
        again = [estimate(group) for group in reversed(groups)][::-1]
    except RewardError as error:
        raise AlgorithmError(f"{error} (tried before the run)") from error
    for group, one, other in zip(groups, first, again, strict=True):
        if not np.allclose(one, other, rtol=1e-5, atol=1e-6):
            raise AlgorithmError(
                f"advantage {name!r} says additive = {ADDITIVE!r}, but gives rewards {group.tolist()} the advantages "
                f"{one.tolist()} once and {other.tolist()} after other groups: it must look at its group alone, and "
                "remember nothing"
            )
