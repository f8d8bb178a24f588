"""The simulated prompt source, row store and scoring.

Owns: what those processes would hold. Never: decisions. Invariant: a row is inserted once, and only its first insert is
told of.
"""

from __future__ import annotations

from functools import partial

from orchestrator.core.outbox import CommandId
from orchestrator.sim.engine import Scenario, Simulation
from transport.messages import (
    Command,
    DropRows,
    GroupScored,
    PromptRef,
    PromptsArrived,
    RequestPrompts,
    RolloutFinished,
)
from transport.types import GroupId, PromptId, RowId, parse_row_id, row_id

PROMPT_TOKENS = 50


class SimulatedPrompts:
    """The prompt source, with a ranker that knows as much as one can of a prompt."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._num_read = 0
        simulation.attach(self._obey)

    def _obey(self, _: CommandId, command: Command) -> None:
        if isinstance(command, RequestPrompts):
            self._simulation.after(self._simulation.scenario.costs.prompts_s, partial(self._answer, command.count))

    def _answer(self, count: int) -> None:
        scenario = self._simulation.scenario
        read = range(self._num_read, min(self._num_read + count, scenario.num_prompts))
        self._num_read = read.stop
        prompts = [_prompt(scenario, PromptId(f"p{index}")) for index in read]
        positions = tuple(str(index + 1) for index in read)
        exhausted = self._num_read >= scenario.num_prompts
        self._simulation.tell(PromptsArrived(prompts=tuple(prompts), source_positions=positions, exhausted=exhausted))


def _prompt(scenario: Scenario, prompt_id: PromptId) -> PromptRef:
    predicted_tokens = scenario.lengths.predicted_tokens(prompt_id)
    return PromptRef(prompt_id=prompt_id, prompt_tokens=PROMPT_TOKENS, predicted_tokens=predicted_tokens)


class SimulatedRows:
    """The row store and the scoring tasks behind it: a group that becomes whole is scored a little later."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._tokens: dict[RowId, int] = {}
        self._dropped: set[GroupId] = set()
        simulation.attach(self._obey)

    def _obey(self, _: CommandId, command: Command) -> None:
        if isinstance(command, DropRows):
            self._dropped.update(command.group_ids)

    def has(self, row: RowId) -> bool:
        return row in self._tokens

    def lose(self, row: RowId) -> None:
        del self._tokens[row]

    def insert(self, row: RowId, event: RolloutFinished) -> None:
        """The first insert wins, and only it is told of; a dropped group takes none."""
        group_id, _ = parse_row_id(row)
        if row in self._tokens or group_id in self._dropped:
            return
        self._tokens[row] = event.response_tokens
        self._simulation.log.tokens += event.response_tokens
        self._simulation.tell(event)
        if self._lengths(group_id) is not None:
            self._simulation.after(self._simulation.scenario.costs.scoring_s, partial(self._score, group_id))

    def _lengths(self, group_id: GroupId) -> tuple[int, ...] | None:
        samples = range(self._simulation.scenario.core.group_size)
        lengths = tuple(self._tokens.get(row_id(group_id, sample), -1) for sample in samples)
        return None if -1 in lengths else lengths

    def _score(self, group_id: GroupId) -> None:
        lengths = self._lengths(group_id)
        if lengths is not None:
            rewards = tuple(float(length % 2) for length in lengths)
            signal = len(set(rewards)) > 1
            event = GroupScored(group_id=group_id, rewards=rewards, response_tokens=lengths, signal=signal)
            self._simulation.tell(event)
