"""Everything a report says of one run, read from its directory: journal, metrics, configuration, samples.

No file is changed. What is missing (no trained batch yet, no samples kept) is left out, not guessed; only a directory
without a journal is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.run_directory import RunDir, journal_of
from orchestrator.core.state import PipelineState
from orchestrator.journal import newest_snapshot_before, read_whole_records
from orchestrator.observability.metrics_file import read_file
from orchestrator.observability.report.bubbles import Usage, bubbles_by_batch, stages, total, usage_by_window
from orchestrator.observability.report.spans import Timeline, build_timeline
from orchestrator.observability.samples import SAMPLES, read_samples
from transport.contracts.messages import Event, GroupScored, JournalRecord, TrainerReady, WorkerJoined
from transport.contracts.types import GroupId, WorkerKind, is_evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run.

    config: config.toml as it stands, with where each value came from.
    all_lines: of metrics.jsonl, in its order, with bubbles from the journal added.
    damage: what of metrics.jsonl could not be read, "" where all could.
    lines: the last one of each batch, in order of batch: what a chart shows of one that was trained again.
    evaluations: the last line of each version that was evaluated, in order of version.
    components: names of the reward's components.  samples: newest first, text as the model wrote it: hostile.
    usage: track -> seconds over the whole run.
    """

    name: str
    config: str
    all_lines: Sequence[Mapping[str, Any]]
    damage: str
    lines: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    components: Sequence[str]
    samples: Sequence[Mapping[str, Any]]
    timeline: Timeline
    usage: Mapping[str, Usage]

    def usage_of(self, stage: str) -> Usage:
        """Seconds of all tracks of a stage together."""
        return total([self.usage[track] for track in stages(self.timeline)[stage]])

    def settings(self) -> dict[str, object]:
        """Dotted key -> value, as configured."""
        return {
            f"{section}.{key}": value
            for section, keys in tomllib.loads(self.config).items()
            for key, value in keys.items()
        }


def read_run(run_dir: Path) -> RunRecord:
    """Read a run, live or over. Raises: ConfigError: there is none; JournalError: its history is damaged."""
    rundir = RunDir(run_dir)
    scored: dict[GroupId, GroupScored] = {}
    timeline = build_timeline(_noting_scores(newest_records(journal_of(run_dir)), scored))
    file = read_file(rundir.metrics)
    lines = joined(file.lines, timeline)
    return RunRecord(
        name=run_dir.resolve().name,
        config=rundir.config.read_text(encoding="utf-8") if rundir.config.exists() else "",
        all_lines=lines,
        damage=file.say(),
        lines=last_of_each(lines, "batch"),
        evaluations=last_of_each([line for line in lines if "eval" in line], "version"),
        components=sorted({name for event in scored.values() for name in event.components}),
        samples=read_samples(run_dir / SAMPLES),
        timeline=timeline,
        usage={track: usage for track, (usage,) in usage_by_window(timeline, [0.0, timeline.end_s]).items()},
    )


def read_timeline(run_dir: Path) -> Timeline:
    """The timeline of the run in ``run_dir``. Raises: ConfigError: there is none; JournalError: it is damaged."""
    return build_timeline(newest_records(journal_of(run_dir)))


def _noting_scores(records: Iterable[JournalRecord], scored: dict[GroupId, GroupScored]) -> Iterator[JournalRecord]:
    """The records, one at a time (a long run's do not fit in memory); each group's scores are noted once on the way."""
    for record in records:
        if isinstance(record.event, GroupScored) and not is_evaluation(record.event.group_id):
            scored[record.event.group_id] = record.event
        yield record


def joined(lines: Sequence[Mapping[str, Any]], timeline: Timeline) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl with what only the journal knows: bubbles by cause."""
    bubbles = bubbles_by_batch(timeline)
    return [
        {**line, **bubbles.get((line.get("incarnation", 0), line["batch"]), {})} if "batch" in line else dict(line)
        for line in lines
    ]


def last_of_each(lines: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """A batch that was trained again after a restart shows as it was trained last; a version likewise."""
    last = {line[key]: line for line in lines if key in line}
    return [last[place] for place in sorted(last)]


# --- the part of a journal that is reported ---------------------------------------------------------------------------

MAX_EVENTS = 500_000
"""About 350,000 samples: half a minute of work and half a GB."""


def newest_records(journal: Path, *, most: int = MAX_EVENTS) -> Iterator[JournalRecord]:
    """All records of a journal of ``most`` or fewer; else about the newest ``most``, after events for the workers that
    the state kept before them knows: a report must not take longer than its user waits for it.

    Raises JournalError.
    """
    found = newest_snapshot_before(journal, most)
    if found is None:
        yield from read_whole_records(journal)
        return
    seq, snapshot = found
    state = PipelineState.restore(snapshot)
    for event in present(state):
        yield JournalRecord(seq=seq, now_s=state.now_s, event=event, cursor="")
    yield from read_whole_records(journal, from_seq=seq + 1)


def present(state: PipelineState) -> Iterator[Event]:
    """Events that would bring in every worker of ``state``."""
    view = state.view()
    for worker in view.workers:
        yield WorkerJoined(
            worker_id=worker.worker_id, kind=WorkerKind.GENERATE, capacity=worker.capacity, weights=worker.loaded
        )
    for worker_id, kind in state.other_workers().items():
        if kind is WorkerKind.TRAIN and view.newest is not None:
            yield TrainerReady(worker_id=worker_id, weights=view.newest)
