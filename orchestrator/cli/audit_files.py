"""Is what a run left on its disk what its journal says: checkpoints, metrics, samples, held-out problems, final model?

Beside the audit of the rounds (audit.py), which compares what was trained. Each record is recomputed from the journal,
or compared with the checksum that was written with it; a problem names file, and line or entry. Pure, but for
``check_checkpoints``, ``check_final_model`` and ``check_held_out``, which read what they are named after.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.run_directory import RunDir
from orchestrator.observability.metrics import MetricsLog, reward_components
from transport.broker import keys
from transport.contracts.ledger import (
    FILE_NAME,
    META_FILE,
    MODEL_FILES,
    CheckpointMeta,
    FileMark,
    Ledger,
    checkpoint_dirs,
)
from transport.contracts.messages import (
    Command,
    Event,
    GroupScored,
    JournalRecord,
    PromptsSubmitted,
    RolloutFinished,
    SamplesTaken,
    StepDone,
    event_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, RowId, parse_row_id
from transport.errors import DECODE_ERRORS, MessageError
from transport.process.storage import Place
from transport.tensors.manifest import file_checksum

ALWAYS_SAME = (
    "version",
    "groups_trained",
    "reward",
    "reward_std",
    "response_tokens",
    "response_tokens_p50",
    "response_tokens_p90",
    "response_tokens_max",
    "samples_trained",
    "tokens_trained",
    "rows_in_steps",
    "tokens_in_steps",
    "eval_reward",
    "eval_problems",
    "eval_answered",
)
"""Keys of a line that do not depend on when an orchestrator was started again."""
MAX_NAMED = 5
"""Problems of one kind that are named; the others are counted."""


class Recomputed:
    """Contents of the other records according to the journal, gathered while it is replayed.

    lines: of metrics.jsonl.  steps: (incarnation, batch) in their order.  scores: of each group, as often as it was
    scored.  events: by the entry of the events log that each came from.  problems: of the journal itself.
    submitted, taken: of a service, by number of the request.  generated: its samples.
    """

    def __init__(self, settings: Settings) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.steps: list[StepDone] = []
        self.scores: defaultdict[GroupId, list[GroupScored]] = defaultdict(list)
        self.events: dict[str, Event] = {}
        self.problems: list[str] = []
        self.submitted: dict[int, PromptsSubmitted] = {}
        self.taken: dict[int, int] = {}
        self.generated: set[RowId] = set()
        trains = self._trains = settings.trainer.engine != "none"
        self._metrics = MetricsLog(
            Path(), trains=trains, passes=settings.trainer.epochs, held_out=settings.eval, write=self.lines.append
        )
        self._before: JournalRecord | None = None

    def add(self, record: JournalRecord, commands: Sequence[Command]) -> None:
        """The next record of the journal, and what followed from it."""
        before, event = self._before, record.event
        if before is not None and record.now_s < before.now_s:
            kind = type(event).__name__
            self.problems.append(f"journal: event {record.seq} ({kind}) is older than the one before it")
        if before is None or record.cursor != before.cursor:
            self.events[record.cursor] = event
        self._before = record
        self._metrics.observe(event, commands, record.now_s)
        if isinstance(event, StepDone):
            self.steps.append(event)
        elif isinstance(event, GroupScored):
            self.scores[event.group_id].append(event)
        elif isinstance(event, PromptsSubmitted):
            self.submitted.setdefault(event.request, event)
        elif isinstance(event, SamplesTaken):
            self.taken[event.request] = max(event.upto, self.taken.get(event.request, 0))
        elif isinstance(event, RolloutFinished) and not self._trains:
            self.generated.add(event.row_id)

    @property
    def cursor(self) -> str:
        """Position of the last event on the events log."""
        return self._before.cursor if self._before is not None else ""


def check_events(recomputed: Recomputed, held: Iterable[tuple[str, bytes]]) -> list[str]:
    """The journal against the events log as the broker holds it. held: (entry id, payload)."""
    problems: list[str] = []
    for entry_id, payload in held:
        event = recomputed.events.get(entry_id)
        with suppress(MessageError):  # one that is no event was skipped
            if event is not None and event_decoder.decode(payload) != event:
                kind = type(event).__name__
                problems.append(f"journal: the {kind} of entry {entry_id} is not what stream {keys.EVENTS} holds")
    return _first(problems)


def check_lines(recomputed: Recomputed, lines: Sequence[Mapping[str, Any]], *, closed: int, exact: bool) -> list[str]:
    """metrics.jsonl, line by line, against what the journal says.

    closed: batches whose last pass was commanded.  exact: no orchestrator was started again, whose lines may be of
    fewer groups than were trained.
    """
    problems: list[str] = []
    expected = {_key(line): line for line in recomputed.lines}
    order = {(step.weights.epoch, step.batch): number for number, step in enumerate(reversed(recomputed.steps))}
    newest: dict[int, int] = {}
    for step in recomputed.steps:
        newest[step.weights.epoch] = max(newest.get(step.weights.epoch, -1), step.batch)
    reported = {(step.weights.epoch, step.batch): [*step.metrics] for step in recomputed.steps}
    seen = set[tuple[int, int]]()
    last: int | None = None
    for line in lines:
        key, name = _key(line), _name(line)
        if key in seen:
            problems.append(f"metrics.jsonl: {name} has a second line")
            continue
        seen.add(key)
        if "batch" in line:
            if key not in expected and (line["batch"] >= closed or line["batch"] < newest.get(key[0], -1)):
                problems.append(f"metrics.jsonl: a line of {name}, which was never trained")
                continue
            place = order.get(key)
            if place is not None:
                if last is not None and place > last:
                    problems.append(f"metrics.jsonl: the line of {name} stands after that of a later step")
                last = place
        same = expected.get(key)
        if same is not None and (changed := _changed(line, same, reported.get(key, ()), exact=exact)):
            problems.append(f"metrics.jsonl: the line of {name} says {changed}")
    if exact:
        evaluated = [line for line in recomputed.lines if "eval" in line and _key(line) not in seen]
        problems += [f"metrics.jsonl: no line of {_name(line)}" for line in evaluated]
    return _first(problems)


def _key(line: Mapping[str, Any]) -> tuple[int, int]:
    """Incarnation of the trainer and batch; for an evaluation a pair that no batch has."""
    return (line.get("incarnation", 0), line["batch"]) if "batch" in line else (-1, line["eval"])


def _name(line: Mapping[str, Any]) -> str:
    if "batch" not in line:
        return f"evaluation {line['eval']}"
    return f"batch {line['batch']} of the trainer's incarnation {line.get('incarnation', 0)}"


def _changed(line: Mapping[str, Any], expected: Mapping[str, Any], reported: Sequence[str], *, exact: bool) -> str:
    """The first number that differs, "" for none. reported: names of what the trainer said of its step."""
    components = [name for name in reward_components(expected) if not name.endswith("_with_filtered")]
    if not exact and line.get("groups_trained") != expected.get("groups_trained"):
        components.clear()
    for name in (*(ALWAYS_SAME if components or exact else ()), *components, *reported):
        if name in line and name in expected and not _equal(line[name], expected[name]):
            return f"{name} {line[name]}, by the journal it is {expected[name]}"
    return ""


def _equal(one: object, other: object) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return one == other


def check_requests(recomputed: Recomputed) -> list[str]:
    """Every sample of a service is one that a request asked for, and no reader has more than it asked for."""
    problems: list[str] = []
    for row in sorted(recomputed.generated):
        name, sample = parse_row_id(row)
        number, index = map(int, name.split("/"))
        asked = recomputed.submitted.get(number)
        if asked is None or index >= len(asked.prompts) or sample >= asked.group_size:
            problems.append(f"journal: sample {row} was generated, and no request asked for it")
    for number, taken in sorted(recomputed.taken.items()):
        asked = recomputed.submitted.get(number)
        if asked is not None and taken > len(asked.prompts) * asked.group_size:
            problems.append(f"journal: {taken} samples of request {number} were taken, more than it asked for")
    return _first(problems)


def requests_line(recomputed: Recomputed) -> str:
    """How much of a service was looked at."""
    asked = sum(len(one.prompts) * one.group_size for one in recomputed.submitted.values())
    return (
        f"{len(recomputed.submitted)} requests for {asked} samples, {len(recomputed.generated)} generated, "
        f"{sum(recomputed.taken.values())} taken by their readers"
    )


def check_samples(recomputed: Recomputed, samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """samples.jsonl: each reward is one that its sample got."""
    problems: list[str] = []
    for sample in samples:
        group, _, index = str(sample.get("row", "")).rpartition("/")
        scores = recomputed.scores.get(GroupId(group), [])
        given = {round(score.rewards[int(index)], 4) for score in scores if int(index) < len(score.rewards)}
        if given and sample.get("reward") not in given:
            problems.append(
                f"samples.jsonl: sample {sample['row']} has reward {sample.get('reward')}, by the journal it is "
                f"{min(given)}"
            )
    return _first(problems)


def check_held_out(rundir: RunDir, settings: Settings, *, evaluated: bool) -> list[str]:
    """eval.jsonl: it is there once a problem of it was asked, and each of its lines is one."""
    if not rundir.held_out.exists():
        return ["eval.jsonl is not there, and its problems were asked"] if evaluated else []
    problems: list[str] = []
    for number, text in enumerate(rundir.held_out.read_text(errors="replace").splitlines(), start=1):
        try:
            whole = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            problems.append(f"eval.jsonl: line {number} is damaged")
    return _first(problems)


def check_final_model(rundir: RunDir) -> list[str]:
    """The files of weights of the final model are those that the trainer wrote. Reads all of them."""
    try:
        marks = msgspec.json.decode((rundir.path / MODEL_FILES).read_bytes(), type=dict[str, FileMark])
    except FileNotFoundError:
        return []  # no model was saved, or by an earlier version
    except (OSError, *DECODE_ERRORS) as error:
        return [f"{MODEL_FILES}: {error}"]
    return _marked(rundir.model, "model", marks)


def check_checkpoints(checkpoints: Place, what: str = "") -> list[str]:
    """Every checkpoint that is kept, as a trainer that goes on from it checks it. Reads all of them."""
    problems: list[str] = []
    for path in checkpoint_dirs(checkpoints):
        name = f"{what}{path.name}"
        found: list[str] = []
        try:
            meta = CheckpointMeta.from_bytes((path / META_FILE).read_bytes())
            found += _marked(path, name, meta.files)
            found += _strangers(path, name, meta)
            ledger = Ledger.from_bytes((path / FILE_NAME).read_bytes())
            if (meta.version, meta.cursor) != (ledger.version, ledger.cursor):
                found.append(
                    f"{name}: {META_FILE} is of version {meta.version} up to {meta.cursor}, its ledger of "
                    f"{ledger.version} up to {ledger.cursor}"
                )
        except MessageError as error:
            found.append(f"{name}: {FILE_NAME}: {error}")
        except (OSError, ValueError, RecursionError) as error:
            found.append(f"{name}: {META_FILE} cannot be used: {error}")
        if found and path in checkpoint_dirs(checkpoints):  # not removed by a trainer at work meanwhile
            problems += found
    return problems


def _strangers(path: Place, name: str, meta: CheckpointMeta) -> list[str]:
    if not isinstance(path, Path):
        return []
    known = {META_FILE, *meta.files}
    others = sorted(file.name for file in path.iterdir() if file.name not in known and not file.name.startswith("."))
    return [f"{name}: {other} is no file of it" for other in others]


def _marked(directory: Place, name: str, marks: Mapping[str, FileMark]) -> list[str]:
    problems: list[str] = []
    for file, mark in marks.items():
        try:
            whole = (directory / file).stat().st_size == mark.nbytes and file_checksum(
                directory / file
            ) == mark.checksum
        except OSError:
            problems.append(f"{name}: {file} is not there")
        else:
            problems += [] if whole else [f"{name}: {file} is not what was written"]
    return problems


def _first(problems: list[str]) -> list[str]:
    more = len(problems) - MAX_NAMED
    return (
        problems if more <= 0 else [*problems[:MAX_NAMED], f"{problems[0].partition(':')[0]}: {more} more like these"]
    )
