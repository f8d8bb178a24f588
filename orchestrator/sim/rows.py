"""The simulated prompt source, row store and scoring. Only the first insert of a row counts and is reported."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from orchestrator.core.model.outbox import CommandId
from orchestrator.sim.engine import Simulation
from transport.contracts.continuous_batching import Sample
from transport.contracts.messages import (
    Command,
    DropRows,
    GroupPlan,
    GroupScored,
    HeldOutPromptsArrived,
    PromptsArrived,
    RequestHeldOutPrompts,
    RequestPrompts,
    RolloutFinished,
)
from transport.contracts.types import GroupId, RowId, WeightIdentity, is_evaluation, parse_row_id, row_id

Spans: TypeAlias = tuple[tuple[WeightIdentity, int], ...]
"""(weights, tokens that they sampled), in order."""
FIRST_HELD_OUT = 1_000_000_000
"""Place of the first held-out prompt, behind all that are trained."""


class SimulatedPrompts:
    """The prompt source, with a ranker as good as the scenario's lengths say."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._num_read = 0
        simulation.attach(self._execute, RequestPrompts, RequestHeldOutPrompts)

    def _execute(self, _: CommandId, command: Command) -> None:
        prompts_s = self._simulation.scenario.costs.prompts_s
        if isinstance(command, RequestPrompts):
            self._simulation.after(prompts_s, partial(self._answer, command.count))
        elif isinstance(command, RequestHeldOutPrompts):
            self._simulation.after(prompts_s, partial(self._name_held_out, command.count))

    def _name_held_out(self, count: int) -> None:
        places = range(FIRST_HELD_OUT, FIRST_HELD_OUT + count)
        prompts = tuple(self._simulation.scenario.lengths.prompt(place) for place in places)
        self._simulation.report(HeldOutPromptsArrived(prompts=prompts))

    def _answer(self, count: int) -> None:
        scenario = self._simulation.scenario
        read = range(self._num_read, min(self._num_read + count, scenario.num_prompts))
        self._num_read = read.stop
        prompts = [scenario.lengths.prompt(index) for index in read]
        positions = tuple(str(index + 1) for index in read)
        exhausted = self._num_read >= scenario.num_prompts
        self._simulation.report(PromptsArrived(prompts=tuple(prompts), source_positions=positions, exhausted=exhausted))


class SimulatedRows:
    """The row store and the scoring tasks behind it: a group that becomes whole is scored a little later."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rows: dict[RowId, Spans] = {}
        self._tokens: dict[RowId, int] = {}
        self._missing: dict[GroupId, int] = {}
        self._dropped: set[GroupId] = set()
        simulation.attach(self._execute, DropRows)

    def _execute(self, _: CommandId, command: Command) -> None:
        if isinstance(command, DropRows):
            self._dropped.update(command.group_ids)
            for group_id in command.group_ids:
                for row in self._rows_of(group_id):
                    self._rows.pop(row, None)
                    self._tokens.pop(row, None)

    def has(self, row: RowId) -> bool:
        return row in self._rows

    def spans(self, row: RowId) -> Spans:
        """Which weights sampled how many tokens of the row."""
        return self._rows[row]

    def num_tokens(self, row: RowId) -> int:
        """Response length of the row."""
        return self._tokens[row]

    def lose(self, row: RowId) -> None:
        group_id, _ = parse_row_id(row)
        del self._rows[row], self._tokens[row]
        self._missing[group_id] = self._missing.get(group_id, 0) + 1

    def insert(self, event: RolloutFinished, sample: Sample[GroupPlan]) -> None:
        """The first insert wins, and only it is reported; a dropped group takes none."""
        group_id, row = sample.request.group_id, event.row_id
        if row in self._rows or group_id in self._dropped:
            return
        self._rows[row], self._tokens[row] = tuple(sample.spans), event.response_tokens
        self._simulation.log.tokens += event.response_tokens
        self._simulation.report(event)
        missing = self._missing.get(group_id, sample.request.group_size) - 1
        self._missing[group_id] = missing
        if not missing:
            del self._missing[group_id]
            self._simulation.after(self._simulation.scenario.costs.scoring_s, partial(self._score, group_id))

    def _rows_of(self, group_id: GroupId) -> list[RowId]:
        size = 1 if is_evaluation(group_id) else self._simulation.scenario.core.group_size
        return [row_id(group_id, sample) for sample in range(size)]

    def _lengths(self, group_id: GroupId) -> tuple[int, ...] | None:
        lengths = [self._tokens.get(row, 0) for row in self._rows_of(group_id)]
        return tuple(lengths) if all(lengths) else None

    def _score(self, group_id: GroupId) -> None:
        lengths = self._lengths(group_id)
        if lengths is not None:
            rewards = tuple(float(length % 2) for length in lengths)
            signal = len(set(rewards)) > 1
            event = GroupScored(group_id=group_id, rewards=rewards, response_tokens=lengths, signal=signal)
            self._simulation.report(event)
