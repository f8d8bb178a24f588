"""What a run reports of itself: lines of ``metrics.jsonl``, and the status that the live view draws.

A line for each trained batch, by ``batch``; one for each evaluation of held-out problems, by ``eval`` (its number).

Owns: means, rates, idle shares. Never: decisions; it only reads the events and commands that pass. Invariant: a line is
written once per (trainer epoch, batch) and per evaluation, however often a step is told, also over restarts of the
orchestrator. One that is told late, behind a later batch's, has its line at the end and moves nothing else back.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator.runtime.history import Curves, RecentEvents
from transport.messages import (
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
    WeightsLoaded,
    WorkerStatus,
)
from transport.types import GroupId, WorkerId, is_evaluation

RATE_WINDOW_S = 10.0
"""Rates and idle shares in the live view are taken over this long."""


@dataclass(slots=True)
class _BatchTally:
    """What is known of a batch while it is open."""

    rewards: list[float] = field(default_factory=list[float])
    response_tokens: list[int] = field(default_factory=list[int])
    staleness: list[int] = field(default_factory=list[int])
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    components: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def summary(self) -> dict[str, Any]:
        """Means over the samples that were scored; nothing at all of an empty batch."""
        line: dict[str, Any] = {f"groups_{name}": count for name, count in sorted(self.outcomes.items())}
        if self.rewards:
            line |= {"reward": fmean(self.rewards)}
            line |= {name: fmean(values) for name, values in sorted(self.components.items())}
            line |= {
                "samples": len(self.rewards),
                "response_tokens": fmean(self.response_tokens),
                "response_tokens_max": max(self.response_tokens),
            }
        if self.staleness:
            line |= {"staleness": fmean(self.staleness), "staleness_max": max(self.staleness)}
        return line


@dataclass(slots=True)
class _EngineSeconds:
    """Seconds that samples spent in slots of engines since the last evaluation."""

    training: float = 0.0
    evaluation: float = 0.0

    @property
    def share(self) -> float:
        total = self.training + self.evaluation
        return self.evaluation / total if total else 0.0


def batch_of(group_or_row: str) -> int:
    """The batch in a group id or row id."""
    return int(group_or_row.partition("/")[0])


class MetricsLog:
    """Tallies batches from the events and appends a line to ``path`` when one is trained.

    For the live page it also keeps the curves, recent events and the names of the reward's components.
    """

    def __init__(self, path: Path, *, trains: bool = True) -> None:
        """trains: a run that does not has no batches, and nothing is kept of its samples."""
        self._path = path
        self._trains = trains
        self._open: dict[int, _BatchTally] = {}
        self._scored: set[GroupId] = set()
        lines, evaluations = read_metrics(path), read_evaluations(path)
        self._written = {(line["epoch"], line["batch"]) for line in lines}
        self._evaluated = {line["eval"] for line in evaluations}
        self._engine_s = _EngineSeconds()
        self._begun_s: float | None = None
        """When the seconds of the next line begin: at the last step, of the first batch when weights were loaded."""
        self._ranker: dict[str, float] = {}
        self.last_line: dict[str, Any] = {}
        self.curves = Curves(sorted(lines, key=lambda line: (line["epoch"], line["batch"])))
        self.evaluations = evaluations
        self.recent = RecentEvents()
        self.components: set[str] = set()

    def recall(self, records: Iterable[JournalRecord]) -> None:
        """Take note of events of before a restart, so that the batches that were open then are whole in their lines."""
        for record in records:
            match record.event:
                case RolloutFinished() | GroupScored():
                    self.observe(record.event, (), record.now_s)
                case StepDone():
                    self._begun_s = record.now_s
                case WeightsLoaded() | RunResumed():
                    self._begin(record.event, record.now_s)
                case RankerJudged():
                    self._ranker = ranker_numbers(record.event)
                case _:
                    pass

    def observe(self, event: Event, commands: Iterable[Command], now_s: float) -> dict[str, Any] | None:
        """Take note of one applied event. Returns the batch's line if this event finished a batch."""
        self.recent.add(event, now_s)
        if not self._trains:
            return None
        match event:
            case WeightsLoaded() | RunResumed():
                self._begin(event, now_s)
            case RolloutFinished():
                self._finished(event)
            case GroupScored() if event.group_id not in self._scored and not is_evaluation(event.group_id):
                self._scored.add(event.group_id)
                self._score(event)
            case RankerJudged():
                self._ranker = ranker_numbers(event)
            case _:
                pass
        for command in commands:
            if isinstance(command, SlotOutcome):
                outcomes = self._tally(batch_of(command.group_id)).outcomes
                outcomes[command.outcome] = outcomes.get(command.outcome, 0) + 1
            elif isinstance(command, EvaluationOutcome):
                self._evaluated_line(command, now_s)
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
        batch = batch_of(event.row_id)
        self._tally(batch).staleness.append(max(0, batch - event.oldest.version))

    def _evaluated_line(self, outcome: EvaluationOutcome, now_s: float) -> None:
        """Write the line of an evaluation, with what it cost since the one before."""
        share, self._engine_s = self._engine_s.share, _EngineSeconds()
        if outcome.number in self._evaluated:
            return
        line = evaluation_line(outcome, now_s, share)
        self._evaluated.add(outcome.number)
        self.evaluations.append(line)
        self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _tally(self, batch: int) -> _BatchTally:
        return self._open.setdefault(batch, _BatchTally())

    def _score(self, event: GroupScored) -> None:
        self.components |= event.components.keys()
        tally = self._tally(batch_of(event.group_id))
        tally.rewards.extend(event.rewards)
        tally.response_tokens.extend(event.response_tokens)
        for name, mean in event.components.items():
            tally.components.setdefault(name, []).append(mean)

    def _finish(self, event: StepDone, now_s: float) -> dict[str, Any] | None:
        key = (event.weights.epoch, event.batch)
        if key in self._written:
            return None
        seconds = now_s - self._begun_s if self._begun_s is not None else now_s
        self._begun_s = now_s
        # A batch trained again after a restart of the trainer keeps its tally; a closed one of before is not needed.
        tally = self._tally(event.batch)
        for batch in [batch for batch in self._open if batch < event.batch - 64]:
            del self._open[batch]
        line = {
            "batch": event.batch,
            "version": event.weights.version,
            "epoch": event.weights.epoch,
            "time_s": round(now_s, 3),
            "seconds": round(seconds, 3),
            **tally.summary(),
            "trained_rows": event.num_rows,
            "trained_tokens": event.num_tokens,
            **event.metrics,
            **self._ranker,
        }
        if seconds > 0:
            line |= {
                "samples_per_s": len(tally.rewards) / seconds,
                "tokens_per_s": sum(tally.response_tokens) / seconds,
            }
        if key >= max(self._written, default=key):
            self.last_line = line
            self.curves.add(line)
        self._scored = {group for group in self._scored if batch_of(group) >= event.batch - 64}
        self._written.add(key)
        self._append(line)
        return line


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
        "epoch": outcome.weights.epoch,
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of trained batches in a metrics file, in order."""
    return [line for line in read_lines(path) if "batch" in line]


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The lines of evaluations in a metrics file, in order."""
    return [line for line in read_lines(path) if "eval" in line]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file, [] if there is none. A torn last line (a kill while writing) is left out."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class UsageWindow:
    """Busy shares and token rates of the workers over the last RATE_WINDOW_S, from their leases."""

    def __init__(self) -> None:
        self._seen: dict[WorkerId, deque[WorkerStatus]] = {}

    def update(self, leases: Mapping[WorkerId, WorkerStatus]) -> list[dict[str, Any]]:
        """One readable row a live worker, in order of name."""
        for gone in self._seen.keys() - leases.keys():
            del self._seen[gone]
        for worker_id, status in leases.items():
            history = self._seen.setdefault(worker_id, deque())
            if not history or status.elapsed_s > history[-1].elapsed_s:
                history.append(status)
            while history[-1].elapsed_s - history[0].elapsed_s > RATE_WINDOW_S:
                history.popleft()
        return [self._row(self._seen[worker_id]) for worker_id in sorted(leases)]

    @staticmethod
    def _row(history: deque[WorkerStatus]) -> dict[str, Any]:
        first, last = history[0], history[-1]
        elapsed_s = last.elapsed_s - first.elapsed_s
        row: dict[str, Any] = {
            "worker": last.worker_id,
            "kind": last.kind.value,
            "doing": last.doing,
            "since_s": round(last.since_s, 1),
            "running": last.running,
            "waiting": last.waiting,
            "weights": str(last.weights) if last.weights else "",
            "counters": last.counters,
            "kv_use": last.kv_use,
        }
        if elapsed_s > 0:
            row["idle"] = round(1.0 - min(1.0, (last.busy_s - first.busy_s) / elapsed_s), 3)
            row["tokens_per_s"] = (last.counters.get("tokens", 0.0) - first.counters.get("tokens", 0.0)) / elapsed_s
        return row
