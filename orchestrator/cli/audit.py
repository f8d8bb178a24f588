"""Was every row of every trained batch trained exactly once, in the lineage of weights that survives, and nothing else?

Where there is a critic its newest checkpoint must hold the same rows, too, as far as it reaches.

No row of an evaluation is ever trained: none is sent, and the trainer's ledger has no place for one.

Recomputed from independent records: the rounds that the core commanded (its journal, replayed), the rounds log as the
broker holds it, the ledger inside the newest checkpoint with the weights beside it, the steps that the trainer
reported, and the lines of metrics.jsonl. ``audit_run`` reads them, the rest compares and is pure.

A run that goes on is compared up to a cut. What comes later in a run is read first (the ledger, then the end of the
rounds log), so that the journal, which is read last, contains everything that led there; what the journal has beyond
the cut is left out.
Source: DESIGN, delivery ("exactly once" means in the surviving lineage of weights); ours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import filterfalse
from typing import Any

from orchestrator.cli.audit_files import (
    Recomputed,
    check_checkpoints,
    check_events,
    check_final_model,
    check_held_out,
    check_lines,
    check_requests,
    check_samples,
    requests_line,
)
from orchestrator.config.run_directory import RunDir
from orchestrator.core.model import outbox
from orchestrator.journal import is_written, newest_epoch
from orchestrator.loop.intake import rows_without
from orchestrator.observability.metrics import read_file
from orchestrator.observability.samples import SAMPLES, all_samples
from orchestrator.sim.replay import recorded_commands
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, LogEntry, parse_entry_id
from transport.contracts.ledger import checkpoints_place, critic_checkpoints_place, newest_checkpoint
from transport.contracts.messages import (
    CloseMiniBatch,
    FinishTraining,
    StepDone,
    TrainerCommand,
    TrainRound,
    trainer_command_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import Column, RowId, WeightIdentity, is_evaluation, row_id
from transport.errors import MessageError
from transport.process.storage import Place
from transport.tensors.manifest import file_checksum

READ_COUNT = 1000
RoundsLog = Sequence[tuple[str, TrainerCommand]]
"""(entry id, command), ascending."""
BatchPass = tuple[int, int]
"""(batch, pass over it)."""
MAX_NAMED = 5
"""Rows named in one problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """What the newest checkpoint says. rows: per batch and pass, every row its optimizer steps contain.

    name: of its directory.  weights: those that its ledger was written beside, None where it does not say.
    changed: files beside it that are missing, or not those that it was written beside.
    """

    version: int
    cursor: str
    rows: Mapping[BatchPass, Sequence[RowId]]
    name: str = ""
    weights: WeightIdentity | None = None
    changed: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """problems: empty when everything trained was trained exactly once.  batches, rows: how much was looked at.

    live: the run goes on, and what it did since is not in here.  notes: what could not be compared.
    requests: of a service, which trains nothing, what was looked at.
    """

    problems: tuple[str, ...]
    batches: int
    rows: int
    live: bool = False
    notes: tuple[str, ...] = ()
    requests: str = ""


def up_to(log: RoundsLog, cut: str) -> RoundsLog:
    """Its entries up to and including ``cut``."""
    last = parse_entry_id(cut)
    return [entry for entry in log if parse_entry_id(entry[0]) <= last]


def closed_batches(log: RoundsLog) -> int:
    """Batches whose last pass is closed on ``log``."""
    closes = [command.batch for _, command in log if isinstance(command, CloseMiniBatch) and command.finishes_batch]
    return max(closes, default=-1) + 1


def audit(
    commanded: RoundsLog,
    held: RoundsLog,
    checkpoint: CheckpointRecord | None,
    *,
    trained_version: int,
    passes: int,
    missing: Collection[RowId] = (),
    live: bool = False,
) -> AuditReport:
    """Compare the three records.

    commanded: all rounds of the run, from its journal.  held: the rounds log as the broker holds it; its beginning may
    have been trimmed.  trained_version: batches trained, by the last StepDone.  passes: over each batch.
    missing: rows beyond the checkpoint that the broker no longer has.  live: the run goes on.
    """
    log = commanded
    if held:  # the broker's entries where it has them, the journal's where they were trimmed
        first = parse_entry_id(held[0][0])
        log = [*(entry for entry in commanded if parse_entry_id(entry[0]) < first), *held]
    sent = _sent(log)
    problems = _compare_logs(commanded, held) + _check_closes(log, trained_version)
    of_evaluations = sorted({row for rows in sent.values() for row in rows if is_evaluation(row)})
    problems += _named("of an evaluation, and sent to the trainer", of_evaluations)
    for batch_pass, rows in sorted(sent.items()):
        problems += _named(f"batch {batch_pass[0]}, pass {batch_pass[1]}: sent twice", _repeated(rows))
    for number in sorted({number for _, number in sent}):  # a group that was left to another batch is in that one alone
        rows = [row for (_, of), in_batch in sorted(sent.items()) if of == number for row in sorted(set(in_batch))]
        problems += _named(f"pass {number}: sent in two batches", _repeated(rows))
    if checkpoint is not None:
        problems += _check_ledger(sent, checkpoint, passes)
    problems += _named("not in the broker, and in no checkpoint", sorted(missing))
    trained = [rows for (batch, _), rows in sent.items() if batch < trained_version]
    num_rows = sum(len(set(rows)) for rows in trained)
    return AuditReport(problems=tuple(problems), batches=trained_version, rows=num_rows, live=live)


def check_steps(steps: Sequence[StepDone], checkpoint: CheckpointRecord | None, *, finished: bool) -> list[str]:
    """The newest checkpoint against the steps that the trainer reported.

    finished: the run ended well, so that every step was reported; before, a report may be on its way, or sent again.
    """
    if checkpoint is None:
        return ["the run is finished, and there is no checkpoint of what it trained"] if finished and steps else []
    name = checkpoint.name
    problems = [f"{name}: {file} is not the one that its ledger was written beside" for file in checkpoint.changed]
    weights = checkpoint.weights
    reported = {(step.weights.epoch, step.weights.version): step.weights for step in steps}
    if weights is not None:
        if weights.version != checkpoint.version:
            problems.append(f"{name}: weights of version {weights.version} under a ledger of {checkpoint.version}")
        published = reported.get((weights.epoch, weights.version), weights)
        if published != weights:
            problems.append(f"{name}: its weights are {weights}, the trainer published {published}")
    if finished:
        versions = {version for _, version in reported}
        unreported = [batch for batch in range(checkpoint.version) if batch + 1 not in versions]
        problems += [f"batch {batch} is in {name}, and the journal has no step that trained it" for batch in unreported]
        newest = max(reported, default=(0, 0))[1]  # of the last trainer: one before it may be lost
        if newest > checkpoint.version:
            problems.append(f"the run is finished with {newest} batches, and {name} contains {checkpoint.version}")
    return problems


def check_critic(
    commanded: RoundsLog, checkpoint: CheckpointRecord | None, *, passes: int, finished: int | None
) -> list[str]:
    """The critic's newest checkpoint against what was commanded: the same rows, once, in a lineage of its own.

    finished: batches that the run is over with; None while it goes on.
    """
    if checkpoint is None:
        return ["the critic: the run is finished, and there is no checkpoint of it"] if finished else []
    name = f"the critic's {checkpoint.name}"
    problems = [f"{name}: {file} is not the one that its ledger was written beside" for file in checkpoint.changed]
    if finished is not None and checkpoint.version != finished:
        problems.append(f"{name} contains {checkpoint.version} batches, and the run is finished with {finished}")
    return problems + [f"the critic: {problem}" for problem in _check_ledger(_sent(commanded), checkpoint, passes)]


def check_metrics(steps: Sequence[StepDone], lines: Sequence[Mapping[str, Any]], damaged: Sequence[int]) -> list[str]:
    """metrics.jsonl against the steps that the journal holds: each is written there before it is in the journal."""
    problems = [f"metrics.jsonl: line {number} is damaged" for number in damaged]
    written = {(line.get("incarnation", 0), line["batch"]): line for line in lines if "batch" in line}
    for step in steps:
        line = written.get((step.weights.epoch, step.batch))
        name = f"batch {step.batch} of the trainer's incarnation {step.weights.epoch}"
        if line is None:
            problems.append(f"metrics.jsonl: no line of {name}")
        elif (line["version"], line.get("rows_in_steps", step.num_rows)) != (step.weights.version, step.num_rows):
            problems.append(f"metrics.jsonl: the line of {name} differs from its report")
    return list(dict.fromkeys(problems))


def _compare_logs(commanded: RoundsLog, held: RoundsLog) -> list[str]:
    """The broker's log must be a stretch of the commanded one: nothing foreign, changed or taken out."""
    if not held:
        return []
    expected = dict(commanded)
    problems = [f"rounds log entry {entry_id} was never commanded" for entry_id, _ in held if entry_id not in expected]
    changed = [entry_id for entry_id, command in held if expected.get(entry_id, command) != command]
    problems += [f"rounds log entry {entry_id} is not what was commanded" for entry_id in changed]
    present = {entry_id for entry_id, _ in held}
    first, last = parse_entry_id(held[0][0]), parse_entry_id(held[-1][0])
    problems += [
        f"rounds log entry {entry_id} was removed"
        for entry_id, _ in commanded
        if first < parse_entry_id(entry_id) < last and entry_id not in present
    ]
    return problems


def _sent(log: RoundsLog) -> Mapping[BatchPass, Sequence[RowId]]:
    """Rows of each batch and pass, as often as they were sent."""
    sent: dict[BatchPass, list[RowId]] = defaultdict(list)
    for _, command in log:
        if isinstance(command, TrainRound) and command.kind == "train":
            sent[command.batch, command.pass_index] += _rows_of(command)
    return sent


def _rows_of(command: TrainRound) -> list[RowId]:
    return [row_id(rows.group_id, sample) for rank in command.ranks for rows in rank for sample in rows.samples]


def _check_closes(log: RoundsLog, trained_version: int) -> list[str]:
    """Every trained batch was closed once in each pass, with the number of rows that were sent."""
    problems: list[str] = []
    sent: Counter[tuple[int, int, int]] = Counter()
    finished: Counter[int] = Counter()
    for entry_id, command in log:
        match command:
            case TrainRound() if command.kind == "train":
                sent[command.batch, command.pass_index, command.mini_batch] += len(_rows_of(command))
            case CloseMiniBatch():
                rows = sent[command.batch, command.pass_index, command.mini_batch]
                if rows != command.num_rows:
                    problems.append(
                        f"batch {command.batch}, pass {command.pass_index}, mini-batch {command.mini_batch}: closed "
                        f"with {command.num_rows} rows at {entry_id}, but {rows} were sent"
                    )
                finished[command.batch] += command.finishes_batch
            case _:
                pass
    unfinished = [batch for batch in range(trained_version) if finished[batch] != 1]
    return problems + [f"batch {batch} was trained and is closed {finished[batch]} times" for batch in unfinished]


def _check_ledger(sent: Mapping[BatchPass, Sequence[RowId]], checkpoint: CheckpointRecord, passes: int) -> list[str]:
    """Up to its version the checkpoint must contain exactly what was sent, once.

    A ledger keeps rows by the batch that they were admitted to; with rolling membership they are trained in another.
    """
    problems: list[str] = []
    expected: dict[BatchPass, set[RowId]] = defaultdict(set)
    for (batch, pass_index), rows in sent.items():
        if batch < checkpoint.version and pass_index < passes:
            for row in filterfalse(is_evaluation, rows):  # those are named already
                expected[int(row.partition("/")[0]), pass_index].add(row)
    known = {key for key in checkpoint.rows if key[0] < checkpoint.version}
    for batch, pass_index in sorted(expected.keys() | known):
        name = f"batch {batch}, pass {pass_index}"
        wanted = expected.get((batch, pass_index), set())
        rows = list(checkpoint.rows.get((batch, pass_index), ()))
        problems += _named(f"{name}: trained twice by the checkpoint", _repeated(rows))
        problems += _named(f"{name}: sent and not trained", sorted(wanted - set(rows)))
        problems += _named(f"{name}: trained and never sent", sorted(set(rows) - wanted))
    extra = sorted({batch for batch, _ in checkpoint.rows.keys() - expected.keys() if batch >= checkpoint.version})
    problems += [f"the checkpoint of version {checkpoint.version} contains rows of batch {batch}" for batch in extra]
    return problems


def _repeated(rows: Sequence[RowId]) -> list[RowId]:
    return sorted(row for row, count in Counter(rows).items() if count > 1)


def _named(what: str, rows: Sequence[RowId]) -> list[str]:
    if not rows:
        return []
    more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
    return [f"{what}: {', '.join(rows[:MAX_NAMED])}{more}"]


# -- reading the records


async def audit_run(rundir: RunDir, settings: Settings, broker: Broker) -> AuditReport:
    """Read the records of ``rundir`` and compare them in the order that the head of this file explains."""
    finished = await broker.get_meta(keys.STATE) == keys.STATE_FINISHED
    live = not finished and (is_written(rundir.journal) or is_written(rundir.path))  # between two orchestrators, too
    places = {"": checkpoints_place(settings, rundir.path)}
    places |= {"the critic's ": critic_checkpoints_place(settings, rundir.path)} if settings.has_critic else {}
    checkpoint = _newest_checkpoint(places[""])
    critic = _newest_checkpoint(places["the critic's "]) if settings.has_critic else None
    cursors = [one.cursor for one in (checkpoint, critic) if one is not None]
    cut = max(await broker.last_id(keys.ROUNDS), ZERO_ID, *cursors, key=parse_entry_id)
    held: list[tuple[str, TrainerCommand]] = []
    unread: list[str] = []
    async for entry in _entries(broker, keys.ROUNDS):
        try:
            held.append((entry.entry_id, trainer_command_decoder.decode(entry.entry.payload)))
        except MessageError as error:
            unread.append(f"stream {keys.ROUNDS}: entry {entry.entry_id} is unreadable: {error}; --resume takes it out")
    held = list(up_to(held, cut))
    commanded, recomputed = _from_journal(rundir, settings)
    steps, metrics, samples = recomputed.steps, read_file(rundir.metrics), all_samples(rundir.path / SAMPLES)
    finished = finished or (not live and any(isinstance(command, FinishTraining) for _, command in commanded))
    trained_version = max((step.weights.version for step in steps), default=0)
    missing: list[RowId] = []
    if live:  # rows that a broker lost are being made again, and others are freed behind a newer checkpoint
        commanded = up_to(commanded, cut)
        trained_version = min(trained_version, closed_batches(commanded))
    else:
        first = checkpoint.version if checkpoint else 0
        rounds = [command for _, command in commanded if isinstance(command, TrainRound) and command.batch >= first]
        beyond = [row for command in rounds for row in _rows_of(command)]
        missing = await rows_without(broker, beyond, Column.ADVANTAGE)
    passes = settings.trainer.epochs
    report = audit(
        commanded, held, checkpoint, trained_version=trained_version, passes=passes, missing=missing, live=live
    )
    problems = unread
    if settings.has_critic:
        problems += check_critic(commanded, critic, passes=passes, finished=trained_version if finished else None)
    problems += check_steps(steps, checkpoint, finished=finished)
    for what, place in places.items() if not live else ():  # a trainer at work removes those before the newest
        problems += check_checkpoints(place, what)
    problems += check_metrics(steps, metrics.lines, metrics.damaged) + recomputed.problems
    if not live:
        once = newest_epoch(rundir.journal) <= 1
        problems += check_lines(recomputed, metrics.lines, closed=closed_batches(commanded), exact=once)
        problems += check_held_out(rundir, settings, evaluated=any("eval" in line for line in recomputed.lines))
    problems += check_samples(recomputed, samples) + check_requests(recomputed)
    problems += check_final_model(rundir) if finished else []
    events = [(entry.entry_id, entry.entry.payload) async for entry in _entries(broker, keys.EVENTS)]
    problems += check_events(recomputed, events)
    requests = requests_line(recomputed) if settings.trainer.engine == "none" else ""
    notes: list[str] = []
    if commanded and not held and not events and not live:
        said = "the broker holds nothing of this run: its records were not compared"
        (notes if settings.broker.url else problems).append(said)
    return replace(
        report, problems=(*dict.fromkeys((*report.problems, *problems)),), notes=tuple(notes), requests=requests
    )


async def _entries(broker: Broker, stream: str) -> AsyncIterator[LogEntry]:
    after = ZERO_ID
    while entries := await broker.read(stream, after, count=READ_COUNT):
        for entry in entries:
            yield entry
        after = entries[-1].entry_id


def _newest_checkpoint(checkpoints: Place) -> CheckpointRecord | None:
    """What the newest checkpoint says; once more where a trainer at work has replaced it meanwhile."""
    while (found := newest_checkpoint(checkpoints)) is not None:
        path, ledger = found
        changed: list[str] = []
        for name, was in (ledger.seal.files if ledger.seal else {}).items():
            with suppress(OSError):  # one that cannot be read is not what it was
                if file_checksum(path / name) == was:
                    continue
            changed.append(name)
        newest = newest_checkpoint(checkpoints)
        if not changed or (newest is not None and newest[0] == path):
            return CheckpointRecord(
                version=ledger.version,
                cursor=ledger.cursor,
                rows=ledger.rows(),
                name=path.name,
                weights=ledger.seal.weights if ledger.seal else None,
                changed=changed,
            )
    return None


def _from_journal(rundir: RunDir, settings: Settings) -> tuple[RoundsLog, Recomputed]:
    """The rounds that the core commanded, and what the journal says of the other records."""
    commanded: RoundsLog = []
    recomputed = Recomputed(settings)
    for record, commands in recorded_commands(rundir.journal):
        commanded += [
            (outbox.CommandId(record.seq, index).entry, command)
            for index, command in enumerate(commands)
            if isinstance(command, TrainRound | CloseMiniBatch | FinishTraining)
        ]
        recomputed.add(record, commands)
    return commanded, recomputed
