"""The scoring tasks: "reward" and "reference" of one sample, and "advantages" of a group that has all its rewards.

Owns: detokenisation, the columns that each task writes, the group's step from rewards to GroupScored. Never: the reward
itself (reward_pool.py), how rewards become advantages (estimates.py), torch. Invariant:
GroupScored is appended with the insert of the group's advantages, hence exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.broker.base import Commit, RowWrite
from transport.broker.events import event_append
from transport.contracts.messages import GroupScored, RowsMissing, part_of, rollout_info_decoder
from transport.contracts.settings import AlgorithmSettings
from transport.contracts.types import Column, GroupId, RowId, WorkerId, row_id
from transport.errors import DECODE_ERRORS, MessageError
from transport.rows.columns import RowStore, decode_array, decode_scalar, encode_array
from workers.algorithms.advantage import overlong_penalty
from workers.models import Detokenize
from workers.scoring.estimates import Estimate
from workers.scoring.rewards import Reward, RewardSource
from workers.trainer.learner import PromptGroup, TrainingSample

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of a task. unit_id: a row id or a group id."""

    unit_id: str
    group_id: GroupId


Handle = Callable[[Unit], Awaitable[Commit]]
"""Works on one unit. Returns what is to be written for it, nothing when its group is gone: then the unit is only
acknowledged. RewardError: try again; MessageError: what was stored is bad, no retry helps."""


def _lost_row(row_id: RowId, group: Mapping[Column, bytes], worker_id: WorkerId) -> Commit:
    """A unit whose columns are not there: nothing to do when its group was dropped; else its bytes were lost."""
    if not group:
        return Commit()
    return Commit(appends=(event_append(RowsMissing(row_ids=(row_id,)), row=row_id, worker=worker_id),))


class RewardTask:
    """Scores one sample at a time, by what the policy wrote of it; many may be in work together.

    One whose environment gave a reward has that one.
    """

    def __init__(self, rows: RowStore, worker_id: WorkerId, pool: RewardSource, detokenize: Detokenize) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._pool = pool
        self._detokenize = detokenize

    async def __call__(self, unit: Unit) -> Commit:
        """Reward of one row. Raises RewardError; MessageError for columns that do not decode."""
        row_id = RowId(unit.unit_id)
        (row,) = await self._rows.read_rows([row_id], [Column.RESPONSE_IDS, Column.LOSS_MASK, Column.ROLLOUT_INFO])
        (group,) = await self._rows.read_groups([unit.group_id], [Column.PROMPT_TEXT, Column.TASK_ENTRY])
        if Column.RESPONSE_IDS not in row or not group:
            return _lost_row(row_id, group, self._worker_id)
        given = rollout_info_decoder.decode(row.get(Column.ROLLOUT_INFO, b"")).reward
        if given is not None:
            return _scored(row_id, Reward(value=given))
        try:
            ids = decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS])
            if Column.LOSS_MASK in row:
                ids = ids[decode_array(Column.LOSS_MASK, row[Column.LOSS_MASK]).astype(bool)]
            response = self._detokenize(ids.tolist())
        except (OverflowError, IndexError) as error:
            raise MessageError(f"the response has ids that the tokenizer does not know: {error}") from error
        prompt = group.get(Column.PROMPT_TEXT, b"").decode(errors="replace")
        return _scored(row_id, await self._pool.score(prompt, response, group.get(Column.TASK_ENTRY, b"")))


def _scored(row_id: RowId, reward: Reward) -> Commit:
    columns = {
        Column.REWARD: encode_array(Column.REWARD, [reward.value]),
        Column.REWARD_COMPONENTS: msgspec.json.encode(reward.components),
    }
    return Commit(rows=(RowWrite(row_id=row_id, columns=columns),))


class AdvantageTask:
    """algorithms, estimates: of groups by their part of the data; "": of those whose part has none of its own.

    max_group_size: samples that a group can have.  max_tokens: that a response can have.
    mixed: prompts are of parts, which their entries name.
    """

    def __init__(
        self,
        rows: RowStore,
        worker_id: WorkerId,
        algorithms: Mapping[str, AlgorithmSettings],
        estimates: Mapping[str, Estimate],
        *,
        max_group_size: int,
        max_tokens: int,
        mixed: bool = False,
    ) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._algorithms = algorithms
        self._estimates = estimates
        self._max_group_size = max_group_size
        self._max_tokens = max_tokens
        self._mixed = mixed
        read = {column for estimate in estimates.values() for column in (*estimate.needs, *estimate.reads)}
        self._columns = (Column.REWARD, Column.REWARD_COMPONENTS, Column.ROLLOUT_INFO, *sorted(read))

    async def __call__(self, unit: Unit) -> Commit:
        """Advantages of one whole group. Raises MessageError for rows whose columns do not decode; RewardError."""
        ids = [row_id(unit.group_id, sample) for sample in range(self._max_group_size)]
        read = await self._rows.read_rows(ids, self._columns)
        rows = {row: columns for row, columns in zip(ids, read, strict=True) if Column.REWARD in columns}
        if not rows:
            return Commit()  # the group was dropped
        part = await _part(self._rows, unit.group_id) if self._mixed else ""
        algorithm = self._algorithms.get(part, self._algorithms[""])
        estimate = self._estimates.get(part, self._estimates[""])
        if lost := tuple(row for row, columns in rows.items() if not columns.keys() >= {*estimate.needs}):
            return Commit(appends=(event_append(RowsMissing(row_ids=lost), row=lost[0], worker=self._worker_id),))
        rewards = [decode_scalar(Column.REWARD, columns[Column.REWARD]) for columns in rows.values()]
        infos = [rollout_info_decoder.decode(columns.get(Column.ROLLOUT_INFO, b"")) for columns in rows.values()]
        shaped = np.asarray(rewards, np.float32) + overlong_penalty(
            [info.response_tokens for info in infos],
            max_tokens=self._max_tokens,
            share=algorithm.overlong_share,
            penalty=algorithm.overlong_penalty,
        )
        found = estimate.written(shaped, [*rows.values()])
        scored = GroupScored(
            group_id=unit.group_id,
            rewards=tuple(rewards),
            response_tokens=tuple(info.response_tokens for info in infos),
            signal=estimate.has_signal(shaped, found),
            components=_mean_components([*rows.values()]),
            value_versions=_value_versions([*rows.values()]),
            environment_tokens=sum(info.environment_tokens for info in infos),
            part=part,
        )
        append = event_append(scored, group=unit.group_id, worker=self._worker_id, reward=f"{fmean(rewards):.4f}")
        writes = [
            RowWrite(
                row_id=row,
                columns={column: encode_array(column, values) for column, values in columns.items()},
                on_insert=(append,) if index == 0 else (),
            )
            for index, (row, columns) in enumerate(zip(rows, found, strict=True))
        ]
        return Commit(rows=writes)


async def _part(rows: RowStore, group_id: GroupId) -> str:
    """Raises MessageError."""
    (group,) = await rows.read_groups([group_id], [Column.TASK_ENTRY])
    return part_of(group.get(Column.TASK_ENTRY, b""))


def _value_versions(rows: Sequence[Mapping[Column, bytes]]) -> tuple[int, ...]:
    """Of the critic's weights that valued each row; () without a critic."""
    held = [row[Column.VALUE_WEIGHTS] for row in rows if Column.VALUE_WEIGHTS in row]
    return tuple(int(decode_array(Column.VALUE_WEIGHTS, raw)[1]) for raw in held)


def _mean_components(rows: Sequence[Mapping[Column, bytes]]) -> dict[str, float]:
    """Mean of each named component over the samples that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        try:
            components = msgspec.json.decode(row.get(Column.REWARD_COMPONENTS, b"{}"), type=dict[str, float])
        except DECODE_ERRORS as error:
            raise MessageError(f"the reward components of a row are not numbers by name: {error}") from error
        for name, value in components.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in values.items()}


RowLogprobs = Callable[[RowId, PromptGroup], Awaitable[NDArray[np.float32]]]


class ReferenceTask:
    """Logprobs of each response under the model that training started from, or a teacher; only with ``kl_coef`` > 0.

    logprobs: [R] of a row's response, given the row and it with its prompt; asked for many rows together. May raise
    RewardError.  asked: by part of the data, "" for those that have nothing of their own, whether its loss has a KL:
    of the others' rows nobody is asked, and all are 0.
    """

    def __init__(
        self,
        rows: RowStore,
        worker_id: WorkerId,
        logprobs: RowLogprobs,
        *,
        asked: Mapping[str, bool] = MappingProxyType({"": True}),
    ) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._logprobs = logprobs
        self._asked = asked

    @staticmethod
    def computed(
        logprobs: Callable[[Sequence[PromptGroup]], Mapping[RowId, NDArray[np.float32]]],
    ) -> RowLogprobs:
        """By a model of this process. logprobs: those of some groups' rows; called on one thread at a time."""
        passes = sample_passes(partial(asyncio.to_thread, logprobs))
        return lambda _, group: passes.take(group)

    async def __call__(self, unit: Unit) -> Commit:
        """Reference logprobs of one row. Raises MessageError for columns that do not decode; RewardError."""
        group = await read_sample(self._rows, unit, self._worker_id)
        if isinstance(group, Commit):
            return group
        row_id, column = RowId(unit.unit_id), Column.REFERENCE_LOGPROBS
        part = await _part(self._rows, unit.group_id) if len(self._asked) > 1 else ""
        asked = self._asked.get(part, self._asked[""])
        logprobs = await self._logprobs(row_id, group) if asked else np.zeros_like(group.samples[0].rollout_logprobs)
        return Commit(rows=(RowWrite(row_id=row_id, columns={column: encode_array(column, logprobs)}),))


async def read_sample(rows: RowStore, unit: Unit, worker_id: WorkerId) -> PromptGroup | Commit:
    """A sample with its prompt, as a model sees it; where it is not there, all that is left to do."""
    row_id = RowId(unit.unit_id)
    (row,) = await rows.read_rows([row_id], [Column.RESPONSE_IDS, Column.BRANCH_ENDS])
    (group,) = await rows.read_groups([unit.group_id], [Column.PROMPT_IDS])
    if Column.RESPONSE_IDS not in row or Column.PROMPT_IDS not in group:
        return _lost_row(row_id, group, worker_id)
    prompt_ids = decode_array(Column.PROMPT_IDS, group[Column.PROMPT_IDS])
    ids = decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS])
    ends = decode_array(Column.BRANCH_ENDS, row[Column.BRANCH_ENDS]) if Column.BRANCH_ENDS in row else None
    unused = np.zeros(len(ids), np.float32)
    sample = TrainingSample(row_id=row_id, response_ids=ids, rollout_logprobs=unused, advantage=0.0, branch_ends=ends)
    return PromptGroup(group_id=unit.group_id, prompt_ids=prompt_ids, samples=[sample])


class Passes(Generic[Item, T]):
    """Has items computed together: what arrives during one pass of a model is the next pass.

    compute: a result of each item, in their order; one call at a time.
    """

    def __init__(self, compute: Callable[[Sequence[Item]], Awaitable[Sequence[T]]]) -> None:
        self._compute = compute
        self._computing = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Item] = {}
        self._computed: dict[int, T] = {}

    async def take(self, item: Item) -> T:
        """Its result. Raises what ``compute`` raised of a pass that it was in."""
        number = next(self._numbers)
        self._waiting[number] = item
        try:
            async with self._computing:
                if number not in self._computed:
                    taken = dict(self._waiting)
                    self._computed.update(zip(taken, await self._compute([*taken.values()]), strict=True))
                    self._waiting = {name: new for name, new in self._waiting.items() if name not in taken}
                return self._computed[number]
        finally:
            self._waiting.pop(number, None)
            self._computed.pop(number, None)


def sample_passes(
    compute: Callable[[Sequence[PromptGroup]], Awaitable[Mapping[RowId, T]]],
) -> Passes[PromptGroup, T]:
    """Of items that are one sample with its prompt each. compute: of some groups' rows, a result each."""

    async def together(samples: Sequence[PromptGroup]) -> list[T]:
        by_id: dict[GroupId, PromptGroup] = {}
        for one in samples:
            before = by_id[one.group_id].samples if one.group_id in by_id else ()
            new = [row for row in one.samples if row.row_id not in {known.row_id for known in before}]
            by_id[one.group_id] = replace(one, samples=[*before, *new])
        found = await compute(list(by_id.values()))
        return [found[one.samples[0].row_id] for one in samples]

    return Passes(together)
