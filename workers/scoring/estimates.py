"""How a group's rewards become advantages: of samples, of tokens by a function of the user's, of tokens by a critic.

Owns: what each reads of a row, and the columns that it writes. Never: the arithmetic (workers/algorithms, the user's),
the broker, torch without a critic. Invariant: a row's ADVANTAGE is the mean of its tokens', 0 where it trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transport.contracts.settings import AlgorithmSettings, Settings
from transport.contracts.types import Column
from transport.rows.columns import decode_array
from workers.algorithms.advantage import estimator, has_signal
from workers.user_functions.advantage import OwnAdvantage, Response, own_advantages

Row = Mapping[Column, bytes]
Written = dict[Column, NDArray[np.float32]]


class Estimate(Protocol):
    """needs, reads: columns of rows beside their reward, without which they are not whole; and where there are any."""

    @property
    def needs(self) -> Collection[Column]: ...

    @property
    def reads(self) -> Collection[Column]: ...

    def written(self, rewards_G: NDArray[np.float32], rows: Sequence[Row]) -> list[Written]:
        """Of each row of a group. rewards_G: [G] of them. Raises RewardError; MessageError for columns of no use."""
        ...

    def has_signal(self, rewards_G: NDArray[np.float32], written: Sequence[Written]) -> bool:
        """Whether the group is worth training."""
        ...


def estimates_of(settings: Settings, allowed: str, path: str) -> dict[str, Estimate]:
    """Of the run's groups by their part of the data; "": of those whose part has none of its own.

    allowed, path: the user's functions and their directory, from this process's own command line.
    Raises AlgorithmError.
    """
    algorithms = settings.algorithms
    own = own_advantages({algorithm.advantage for algorithm in algorithms.values()}, allowed, path)

    def of(algorithm: AlgorithmSettings) -> Estimate:
        if settings.has_critic:
            return ByCritic(algorithm.gamma, algorithm.gae_lambda)
        function = own.get(algorithm.advantage)
        if function is None:
            return OfSamples(estimator(algorithm.advantage))
        return OfTokens(function) if function.per_token else OfSamples(function.of_samples, own=True)

    return {part: of(algorithm) for part, algorithm in algorithms.items()}


@dataclass(frozen=True, slots=True)
class OfSamples:
    """One advantage a sample. own: the user's, who alone knows which groups are worth training."""

    estimate: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    own: bool = False
    needs: Collection[Column] = field(default=(), init=False)
    reads: Collection[Column] = field(default=(), init=False)

    def written(self, rewards_G: NDArray[np.float32], rows: Sequence[Row]) -> list[Written]:
        advantages = self.estimate(rewards_G)
        return [{Column.ADVANTAGE: advantages[index : index + 1]} for index in range(len(rows))]

    def has_signal(self, rewards_G: NDArray[np.float32], written: Sequence[Written]) -> bool:
        if not self.own:
            return has_signal(rewards_G)
        return any(bool(columns[Column.ADVANTAGE].any()) for columns in written)


@dataclass(frozen=True, slots=True)
class OfTokens:
    """One advantage a token, by a function of the user's."""

    function: OwnAdvantage
    needs: Collection[Column] = field(default=(Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS), init=False)
    reads: Collection[Column] = field(default=(Column.LOSS_MASK, Column.BRANCH_ENDS), init=False)

    def written(self, rewards_G: NDArray[np.float32], rows: Sequence[Row]) -> list[Written]:
        responses = [_response(row) for row in rows]
        found = self.function.of_tokens(rewards_G, responses)
        return [_of_tokens(tokens, one.chosen) for tokens, one in zip(found, responses, strict=True)]

    def has_signal(self, rewards_G: NDArray[np.float32], written: Sequence[Written]) -> bool:
        return any(bool(columns[Column.TOKEN_ADVANTAGES].any()) for columns in written)


def _response(row: Row) -> Response:
    ids = decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS])
    ends = row.get(Column.BRANCH_ENDS)
    return Response(
        token_ids=ids,
        chosen=_chosen(row, len(ids)),
        logprobs=decode_array(Column.ROLLOUT_LOGPROBS, row[Column.ROLLOUT_LOGPROBS]),
        branch_ends=np.array([len(ids)], np.int32) if ends is None else decode_array(Column.BRANCH_ENDS, ends),
    )


def _chosen(row: Row, tokens: int) -> NDArray[np.bool_]:
    """[R], of the tokens that the policy chose."""
    mask = row.get(Column.LOSS_MASK)
    return np.ones(tokens, bool) if mask is None else decode_array(Column.LOSS_MASK, mask).astype(bool)


def _of_tokens(advantages: NDArray[np.float32], chosen: NDArray[np.bool_]) -> Written:
    mean = advantages[chosen].mean(keepdims=True) if chosen.any() else np.zeros(1, np.float32)
    return {Column.ADVANTAGE: mean, Column.TOKEN_ADVANTAGES: advantages}


@dataclass(frozen=True, slots=True)
class ByCritic:
    """One advantage a token, by GAE from a critic's values; the last token that the policy chose has the reward."""

    gamma: float
    lam: float
    needs: Collection[Column] = field(default=(Column.VALUES,), init=False)
    reads: Collection[Column] = field(default=(Column.VALUE_WEIGHTS, Column.LOSS_MASK), init=False)

    def written(self, rewards_G: NDArray[np.float32], rows: Sequence[Row]) -> list[Written]:
        return [self._of_row(float(reward), row) for reward, row in zip(rewards_G, rows, strict=True)]

    def has_signal(self, rewards_G: NDArray[np.float32], written: Sequence[Written]) -> bool:
        """A group whose rewards agree still has advantages."""
        return True

    def _of_row(self, reward: float, row: Row) -> Written:
        """0 at tokens that the policy did not choose, which are no steps."""
        from torch import from_numpy, zeros_like  # only with a critic

        from workers.algorithms.gae import gae

        values = decode_array(Column.VALUES, row[Column.VALUES])
        chosen = _chosen(row, len(values))
        advantages, returns = np.zeros(len(values), np.float32), np.zeros(len(values), np.float32)
        if chosen.any():
            expected = from_numpy(values[chosen])
            rewards = zeros_like(expected)
            rewards[-1] = reward
            found, targets = gae(rewards, expected, self.gamma, self.lam)
            advantages[chosen], returns[chosen] = found.numpy(), targets.numpy()
        return {**_of_tokens(advantages, chosen), Column.RETURNS: returns}
