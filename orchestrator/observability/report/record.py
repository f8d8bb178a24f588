"""What is known of one run, read from its directory: its numbers, its timeline, how it ended, what it was.

What is read (journal, metrics, configuration, samples) may be a run's that goes on or that crashed. What is missing (no
trained batch yet, no samples kept) is left out, not guessed; only a directory without a journal is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator.config.load import render, resolve
from orchestrator.config.run_directory import RunDir, journal_of
from orchestrator.config.schema import to_toml
from orchestrator.config.starts import Start, read_starts
from orchestrator.core.state import PipelineState
from orchestrator.errors import ConfigError
from orchestrator.journal import newest_snapshot_before, read_whole_records
from orchestrator.observability.loggers import read_left_out
from orchestrator.observability.metrics import read_file
from orchestrator.observability.report.bubbles import Cause, Usage, bubbles_by_batch, stages, total, usage_by_window
from orchestrator.observability.report.spans import Mark, Timeline, build_timeline
from orchestrator.observability.samples import SAMPLES, read_samples
from orchestrator.observability.standing import Standing, State, read_standing
from transport.contracts.ledger import EVALUATED
from transport.contracts.messages import Event, GroupScored, JournalRecord, TrainerReady, WorkerJoined
from transport.contracts.types import WorkerKind, is_evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    name: str
    config: str  # config.toml as it stands, with where each value came from
    starts: Sequence[Start]  # each time that it was started
    standing: Standing | None  # None where its configuration is missing or damaged
    all_lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl, in its order, with bubbles from the journal added
    damage: str  # what of metrics.jsonl could not be read, "" where all could
    lines: Sequence[Mapping[str, Any]]  # the last one of each batch, in order: what a chart shows of one trained again
    evaluations: Sequence[Mapping[str, Any]]  # the last line of each version that was evaluated, in order of version
    components: Sequence[str]  # names of the reward's
    samples: Sequence[Mapping[str, Any]]  # newest first, text as the model wrote it: hostile
    timeline: Timeline
    left_out: Sequence[str]  # loggers that the run went on without, since when and why
    usage: Mapping[str, Usage]  # track -> seconds over the whole run

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dotted key -> value, as the run was configured."""
        return flat(self.config)

    @property
    def troubles(self) -> Sequence[Mark]:
        """What cost the run something."""
        return [mark for mark in self.timeline.marks if mark.trouble]

    @property
    def seconds(self) -> float:
        """That the run took, from its command to its end; of one that goes on, or has several starts, its own clock."""
        whole = self.standing.seconds if self.standing is not None and len(self.starts) == 1 else 0.0
        return whole or self.timeline.end_s

    def usage_of(self, stage: str) -> Usage:
        return total([self.usage[track] for track in stages(self.timeline)[stage]])


def read_run(run_dir: Path, *, over: bool = False) -> RunRecord:
    """Read a run, live or over.

    over: the caller holds its lock, and it has ended.  Raises: ConfigError: there is none; JournalError: its history is
    damaged.
    """
    rundir = RunDir(run_dir)
    components: set[str] = set()

    def noting_components() -> Iterator[JournalRecord]:
        """The records, one at a time: a long run's do not fit in memory."""
        for record in newest_records(journal_of(run_dir)):
            if isinstance(record.event, GroupScored) and not is_evaluation(record.event.group_id):
                components.update(record.event.components)
            yield record

    timeline = build_timeline(noting_components())
    standing = None
    with suppress(ConfigError):
        standing = read_standing(run_dir, over=over)
    file, bubbles = read_file(rundir.metrics), bubbles_by_batch(timeline)
    lines = [
        {**line, **(bubbles.get((line.get("incarnation", 0), line["batch"]), {}) if "batch" in line else {})}
        for line in file.lines
    ]
    return RunRecord(
        name=run_dir.resolve().name,
        config=rundir.config.read_text(encoding="utf-8") if rundir.config.exists() else "",
        starts=read_starts(rundir),
        standing=standing,
        all_lines=lines,
        damage=file.say(),
        lines=last_of_each(lines, "batch"),
        evaluations=last_of_each(
            [*(line for line in lines if "eval" in line), *read_file(run_dir / EVALUATED).lines], "version"
        ),
        components=sorted(components),
        samples=read_samples(run_dir / SAMPLES),
        timeline=timeline,
        left_out=[str(one) for one in read_left_out(run_dir)],
        usage={track: usage for track, (usage,) in usage_by_window(timeline, [0.0, timeline.end_s]).items()},
    )


def flat(config: str) -> dict[str, Any]:
    """The settings of a configuration file by dotted key; none of one that is damaged."""
    with suppress(tomllib.TOMLDecodeError):
        sections = tomllib.loads(config).items()
        return {
            f"{name}.{key}": value for name, keys in sections if isinstance(keys, dict) for key, value in keys.items()
        }
    return {}


def last_of_each(lines: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """A batch that was trained again after a restart shows as it was trained last; a version likewise."""
    last = {line[key]: line for line in lines if key in line}
    return [last[place] for place in sorted(last)]


# --- the part of a journal that is reported ---------------------------------------------------------------------------

MAX_EVENTS = 500_000  # about 350,000 samples: half a minute of work and half a GB


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
    view, kind = state.view(), WorkerKind.GENERATE
    events: list[Event] = [
        WorkerJoined(worker_id=worker.worker_id, kind=kind, capacity=worker.capacity, weights=worker.loaded)
        for worker in view.workers
    ]
    if view.newest is not None:
        trainers = [each for each, kind in state.pipeline.fleet.others.items() if kind is WorkerKind.TRAIN]
        events += [TrainerReady(worker_id=trainer, weights=view.newest) for trainer in trainers]
    for event in events:
        yield JournalRecord(seq=seq, now_s=state.now_s, event=event, cursor="")
    yield from read_whole_records(journal, from_seq=seq + 1)


# --- what one wants to know first -------------------------------------------------------------------------------------

NOT_COMPARED = ("run.name", "run.dir", "broker.url", "broker.password")
MAX_NAMED = 8  # batches
KINDS = {State.FINISHED: "good", State.FAILED: "bad", State.CRASHED: "bad"}


def verdict(run: RunRecord) -> tuple[str, str, str]:
    """How the run stands: "good", "open" (it may go on) or "bad"; in a word; why, its batches, and how to go on."""
    standing = run.standing
    if standing is None:
        return "open", "Not known", "its configuration cannot be read"
    go_on = f"go on with: {standing.go_on}" if standing.go_on else ""
    batches = f"{standing.batches} batches" if standing.batches else ""
    return (
        KINDS.get(standing.state, "open"),
        standing.state.capitalize(),
        "; ".join(filter(None, (standing.why, batches, go_on))),
    )


def of_all_groups(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of batches with the means over all groups where some were filtered: those over the trained ones fall as
    the model solves more groups whole.
    """
    end = "_with_filtered"
    return [
        {**line, **{key.removesuffix(end): value for key, value in line.items() if key.endswith(end)}} for line in lines
    ]


def held_out_change(evaluations: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Held-out reward of the first and the last weights that were evaluated; None where those are not two."""
    found = ends_of(evaluations, "eval_reward") if len(evaluations) > 1 else None
    return found[:2] if found else None


def ends_of(lines: Sequence[Mapping[str, Any]], key: str, most: int = 1) -> tuple[float, float, int] | None:
    """Mean of ``key`` over the first and the last lines that have it, and over how many; None without any.

    An eighth of them, at most ``most``: one batch is mostly noise, and many would hide how far the run came.
    """
    values = [line[key] for line in lines if isinstance(line.get(key), int | float)]
    count = max(1, min(most, len(values) // 8))
    return (fmean(values[:count]), fmean(values[-count:]), count) if values else None


def changed_settings(run: RunRecord) -> tuple[str, list[list[str]]]:
    """What the run's settings are compared with (its preset, or the defaults), and rows (key, there, in the run)."""
    named = [start.preset for start in run.starts[:1] if start.preset] or re.findall(r"# preset ([\w-]+)", run.config)
    for preset in (*named[:1], None):
        with suppress(ConfigError):  # it was of another version
            base = flat(render(resolve(preset, [], [], {})))
            break
    else:
        return "", []
    rows = differing([base, run.settings])
    return f"preset {preset}" if preset else "the defaults", [row for row in rows if row[0] in run.settings]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows (dotted key, value in each as TOML, "" where there is none) for the keys that are not equal in all."""
    keys = list(dict.fromkeys(key for one in settings for key in one if key not in NOT_COMPARED))
    rows = [[key, *(_shown(one[key]) if key in one else "" for one in settings)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _shown(value: object) -> str:
    try:
        return to_toml(value)
    except TypeError:  # a date: in a file that no run wrote
        return str(value)


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """What the run was: (name, value), those that are known."""
    get, last = run.settings.get, run.starts[-1] if run.starts else Start(started="")
    sources = {
        "reasoning_gym": f"{get('data.task')} {_shown(get('data.params', {}))} of reasoning_gym",
        "jsonl": get("data.path"),
        "hf": f"{get('data.path')} ({get('data.split')})",
    }
    reward = get("scoring.reward") or "the data's own verifier"
    group = f"{get('pipeline.groups_per_batch')} prompts of {get('pipeline.group_size')} samples"
    rows = {
        "model": get("model.path"),
        "data": sources.get(get("data.source", "")),
        "reward": reward if run.settings else "",
        "a batch": group if get("pipeline.groups_per_batch") else "",
        "engine": " ".join(filter(None, (get("generation.engine"), get("generation.dtype")))),
        "started": run.starts[0].started and _date(run.starts[0].started) if run.starts else "",
        "starts": str(len(run.starts)) if len(run.starts) > 1 else "",
        "versions": ", ".join(f"{name} {version}" for name, version in last.versions.items()),
        "machine": last.machine,
    }
    return [(name, str(value)) for name, value in rows.items() if value]


def _date(text: str) -> str:
    """A moment of ``starts.jsonl`` for people; as it is, where it is none."""
    with suppress(ValueError):
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC"
    return text


def redone(timeline: Timeline) -> str:
    """What was done twice: ``5 samples generated again, 2 batches trained again (15, 16)``; "" where nothing was."""
    samples, batches = timeline.num_again, timeline.batches_again
    named = ", ".join(str(batch + 1) for batch in batches[:MAX_NAMED]) + (", ..." if len(batches) > MAX_NAMED else "")
    parts = (f"{samples} sample{'s' * (samples > 1)} generated again" if samples else "",)
    parts += (f"{len(batches)} batch{'es' * (len(batches) > 1)} trained again ({named})" if batches else "",)
    return ", ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """``41 s``, ``2 min 21 s``, ``3 h 12 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def busy_share(run: RunRecord, stage: str) -> float | None:
    usage = run.usage_of(stage)
    return usage.busy_s / usage.present_s if usage.present_s else None


def idle_share(run: RunRecord, stage: str, cause: Cause) -> float | None:
    usage = run.usage_of(stage)
    return usage.idle_s.get(cause, 0.0) / usage.present_s if usage.present_s else None
