"""The lines of ``metrics.jsonl``: what passes as events and commands, summed up for each batch and each evaluation.

A line for each trained batch, by ``batch``; one for each evaluation of held-out problems, by ``eval`` (its number).

Invariants: a line is written once per (incarnation of the trainer, batch) and per evaluation, however often a step is
reported, also over restarts of the orchestrator; a step that is reported after that of a later batch gets its line at
the end, and resets nothing. What a line says of samples is true of those that its batch trained, each once: a row that
was generated again counts as it was last, and a group counts where it was trained, not where it was admitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import structlog

from orchestrator.observability.metrics_file import append_line, read_file
from transport.contracts.messages import (
    Command,
    EvaluationOutcome,
    Event,
    GroupScored,
    JournalRecord,
    RankerJudged,
    RolloutFinished,
    RunResumed,
    SlotOutcome,
    StepDone,
    TrainRound,
    WeightsLoaded,
)
from transport.contracts.types import FinishReason, GroupId, batch_of, is_evaluation

log = structlog.get_logger(__name__)

KEPT_BATCHES = 64
"""A batch so far behind the newest is not trained again; as many as a trainer reports again (``workers/trainer``)."""


@dataclass(slots=True)
class _Group:
    """What was reported last of one prompt group.

    versions: sample -> oldest weights.  truncated: samples that were cut at the limit.
    """

    score: GroupScored | None = None
    versions: dict[int, int] = field(default_factory=dict[int, int])
    truncated: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Since:
    """What happened since the line before, whichever batch it was for. filtered: scores of groups that were."""

    samples: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    filtered: list[GroupScored] = field(default_factory=list[GroupScored])

    def summary(self) -> dict[str, Any]:
        ended = {f"groups_{outcome}": count for outcome, count in sorted(self.outcomes.items())}
        return {"samples_generated": self.samples, "tokens_generated": self.tokens, **ended}


@dataclass(slots=True)
class _EngineSeconds:
    """Seconds that samples spent in slots of engines since the last evaluation."""

    training: float = 0.0
    evaluation: float = 0.0

    @property
    def share(self) -> float:
        total = self.training + self.evaluation
        return self.evaluation / total if total else 0.0


class MetricsLog:
    """Notes groups from the events and rounds from the commands, and appends a line to ``path`` for each batch."""

    def __init__(self, path: Path, *, trains: bool = True, passes: int = 1) -> None:
        """trains: a run that does not has no batches, and nothing is kept of its samples.  passes: over each batch."""
        self._path = path
        self._trains = trains
        self._passes = passes
        self._groups: dict[GroupId, _Group] = {}
        self._members: dict[int, dict[GroupId, None]] = {}
        """Batch -> groups that its rounds hold."""
        self._since = _Since()
        file = read_file(path)
        if said := file.say():
            log.warning(said, path=str(path))
        self._written = {(line.get("incarnation", 0), line["batch"]) for line in file.lines if "batch" in line}
        self._evaluated = {line["eval"] for line in file.lines if "eval" in line}
        self._engine_s = _EngineSeconds()
        self._begun_s: float | None = None
        """When the seconds of the next line begin: at the last step, of the first batch when weights were loaded."""
        self._ranker: dict[str, float] = {}
        self.last_line: dict[str, Any] = {}

    def recall(self, records: Iterable[JournalRecord], rounds: Iterable[TrainRound] = ()) -> None:
        """Take note of what was before a restart, so that the batches that were open then are whole in their lines.

        records: the newest of the journal.  rounds: those that are not in a checkpoint yet. How many slots had ended
        untrained since the last line is not known.
        """
        for command in rounds:
            self._note_command(command, 0.0)
        newest = (0, -1)
        for record in records:
            match record.event:
                case RolloutFinished() | GroupScored():
                    self.observe(record.event, (), record.now_s)
                case StepDone() as event if (key := (event.weights.epoch, event.batch)) > newest:  # not reported again
                    newest = key
                    self._begun_s, self._since = record.now_s, _Since()
                case WeightsLoaded() | RunResumed():
                    self._begin(record.event, record.now_s)
                case RankerJudged():
                    self._ranker = ranker_numbers(record.event)
                case _:
                    pass

    def observe(self, event: Event, commands: Iterable[Command], now_s: float) -> dict[str, Any] | None:
        """Take note of one applied event. Returns the batch's line if this event finished a batch."""
        if not self._trains:
            return None
        match event:
            case WeightsLoaded() | RunResumed():
                self._begin(event, now_s)
            case RolloutFinished():
                self._finished(event)
            case GroupScored() if not is_evaluation(event.group_id):
                self._group(event.group_id).score = event
            case RankerJudged():
                self._ranker = ranker_numbers(event)
            case _:
                pass
        for command in commands:
            self._note_command(command, now_s)
        return self._finish(event, now_s) if isinstance(event, StepDone) else None

    def _begin(self, event: WeightsLoaded | RunResumed, now_s: float) -> None:
        """Generation may begin; before it the run starts up, or starts up again, which is no batch's time."""
        if isinstance(event, RunResumed):
            self._begun_s = None
        elif self._begun_s is None:
            self._begun_s = now_s

    def _finished(self, event: RolloutFinished) -> None:
        if is_evaluation(event.row_id):
            self._engine_s.evaluation += event.engine_s
            return
        self._engine_s.training += event.engine_s
        self._since.samples += 1
        self._since.tokens += event.response_tokens
        name, _, sample = event.row_id.rpartition("/")
        group, index = self._group(GroupId(name)), int(sample)
        group.versions[index] = event.oldest.version
        if event.finish_reason is FinishReason.LENGTH:
            group.truncated.add(index)
        else:
            group.truncated.discard(index)

    def _group(self, group_id: GroupId) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group()
        return group

    def _note_command(self, command: Command, now_s: float) -> None:
        match command:
            case TrainRound(kind="train"):  # each pass over the batch sends its groups again: they are counted once
                members = self._members.setdefault(command.batch, {})
                members |= {rows.group_id: None for rank in command.ranks for rows in rank}
            case SlotOutcome() if command.outcome != "trained":
                self._since.outcomes[command.outcome] += 1
                ended = self._groups.pop(command.group_id, None)
                if ended and ended.score and command.outcome == "filtered":
                    self._since.filtered.append(ended.score)
            case EvaluationOutcome():
                self._evaluated_line(command, now_s)
            case _:
                pass

    def _evaluated_line(self, outcome: EvaluationOutcome, now_s: float) -> None:
        """Write the line of an evaluation, with what it cost since the one before."""
        share, self._engine_s = self._engine_s.share, _EngineSeconds()
        if outcome.number in self._evaluated:
            return
        line = evaluation_line(outcome, now_s, share)
        self._evaluated.add(outcome.number)
        append_line(self._path, line)

    def _finish(self, event: StepDone, now_s: float) -> dict[str, Any] | None:
        key = (event.weights.epoch, event.batch)
        if key in self._written:
            if key == max(self._written):  # the journal missed it because of a kill: what follows begins here
                self._since, self._begun_s = _Since(), now_s
            return None
        seconds = now_s - self._begun_s if self._begun_s is not None else now_s
        since, self._since, self._begun_s = self._since, _Since(), now_s
        trained = [self._groups[name] for name in self._members.get(event.batch, ()) if name in self._groups]
        samples, tokens = event.num_rows // self._passes, event.num_tokens // self._passes
        rates = {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds} if seconds > 0 else {}
        line: dict[str, Any] = {
            "batch": event.batch,
            "version": event.weights.version,
            "incarnation": event.weights.epoch,
            "time_s": round(now_s, 3),
            "seconds": round(seconds, 3),
            **summarise(event.batch, trained, since.filtered),
            "samples_trained": samples,
            "tokens_trained": tokens,
            **since.summary(),
            **rates,
            "rows_in_steps": event.num_rows,
            "tokens_in_steps": event.num_tokens,
            **event.metrics,
            **self._ranker,
        }
        line = {name: value for name, value in line.items() if _is_number_or_text(value)}
        if key >= max(self._written, default=key):
            self.last_line = line
        self._forget(event.batch - KEPT_BATCHES)
        self._written.add(key)
        append_line(self._path, line)
        return line

    def _forget(self, before: int) -> None:
        """Forget batches before ``before``: no restart of the trainer goes back so far."""
        self._members = {batch: members for batch, members in self._members.items() if batch >= before}
        self._groups = {name: group for name, group in self._groups.items() if batch_of(name) >= before}


def _is_number_or_text(value: object) -> bool:
    """Whether JSON has it: NaN and infinity are left out."""
    return not isinstance(value, float) or math.isfinite(value)


def summarise(batch: int, trained: Sequence[_Group], filtered: Sequence[GroupScored]) -> dict[str, Any]:
    """Means and quantiles over the samples that ``batch`` trained; nothing for an empty batch.

    filtered: scores of groups that were filtered meanwhile; they count where the policy is judged.
    """
    scores = [group.score for group in trained if group.score]
    line: dict[str, Any] = {"groups_trained": len(trained)} if trained else {}
    if scores:
        rewards = [reward for score in scores for reward in score.rewards]
        tokens = [length for score in scores for length in score.response_tokens]
        line |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
        if left_out := [reward for score in filtered for reward in score.rewards]:
            line["reward_with_filtered"] = fmean([*rewards, *left_out])
        line |= _component_means(scores)
        judged = [*scores, *filtered]
        line |= {
            "no_signal": sum(not score.signal for score in judged) / len(judged),
            "response_tokens": fmean(tokens),
            **quantiles(tokens),
            "response_tokens_max": max(tokens),
        }
    staleness = [max(0, batch - version) for group in trained for version in group.versions.values()]
    if staleness:
        line |= {
            "truncated": sum(len(group.truncated) for group in trained) / len(staleness),
            "staleness": fmean(staleness),
            "staleness_max": max(staleness),
        }
    return line


def _component_means(scores: Sequence[GroupScored]) -> dict[str, float]:
    """Of each named component of the reward, over the groups that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, mean in score.components.items():
            values.setdefault(name, []).append(mean)
    return {name: fmean(means) for name, means in sorted(values.items())}


def quantiles(tokens: Sequence[int]) -> dict[str, int]:
    """P50 and P90 of response lengths, tokens: the smallest length that so many of the samples do not exceed."""
    ordered = sorted(tokens)
    return {f"response_tokens_p{q}": ordered[max(0, -(-len(ordered) * q // 100) - 1)] for q in (50, 90)}


def ranker_numbers(judged: RankerJudged) -> dict[str, float]:
    """How right predictions were, as part of a batch's line; nothing before the first groups were judged."""
    if not judged.num_groups:
        return {}
    return {
        "ranker_recall_20": round(judged.recall_20, 3),
        "ranker_recall_10": round(judged.recall_10, 3),
        "ranker_recall_5": round(judged.recall_5, 3),
        "ranker_tau": round(judged.kendall_tau, 3),
        "ranker_drift": round(judged.drift, 3),
        "ranker_trusted": float(judged.trusted),
    }


def evaluation_line(outcome: EvaluationOutcome, now_s: float, share: float) -> dict[str, Any]:
    """An evaluation as a line of ``metrics.jsonl``. share: of the engines' seconds since the one before, for this one.

    Without any answer there are no means.
    """
    line: dict[str, Any] = {
        "eval": outcome.number,
        "version": outcome.weights.version,
        "incarnation": outcome.weights.epoch,
        "time_s": round(now_s, 3),
    }
    if outcome.answered:
        line |= {"eval_reward": outcome.reward}
        line |= {f"eval_{name}": mean for name, mean in sorted(outcome.components.items())}
        line |= {"eval_response_tokens": outcome.response_tokens}
    return line | {
        "eval_problems": outcome.problems,
        "eval_answered": outcome.answered,
        "eval_seconds": round(outcome.seconds, 3),
        "eval_tokens": outcome.tokens,
        "eval_share": round(share, 4),
        "eval_short": outcome.reason,
    }
