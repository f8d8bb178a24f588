"""Was every row trained exactly once? Asked of a finished run's files, by nothing that the product uses to answer it.

It reads the formats as they are documented and shares no code with ``orchestrator/cli/audit.py``, nor with
what writes the files: a mistake in one of them is no mistake in both.

    checkpoints/step-<n>[.<k>]/ledger.msgpack   {version, cursor, passes: batch -> pass -> slot -> bit set of samples}
    journal/segment-*.log                 frames: length u32 | crc32 u32 | {seq, now_s, event: {type, ...}, cursor}
    metrics.jsonl                         one JSON object a trained batch: batch, version, incarnation, ...
    broker: rounds, weights, dead, tasks:<task>      streams whose entries hold a MessagePack payload

Owns: what must be so at the end of a run, whatever happened to it. Never: anything of a run that still goes on.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import redis

FRAME = struct.Struct("<II")
MAX_NAMED = 4

Row = tuple[int, int, int]
"""(batch that it was admitted to, slot, sample)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the settings promise. rows: of each batch, 0 where they leave it open.

    fixed: rows are trained in the batch that they were admitted to.
    """

    name: str
    batches: int
    group_size: int
    rows: int
    passes: int = 1
    max_staleness: int = 1
    fixed: bool = True


@dataclass(slots=True)
class Findings:
    """problems: what is wrong.  rows: different ones that the last checkpoint contains.  counts: what was looked at."""

    problems: list[str] = field(default_factory=list)
    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def name(self, what: str, which: object) -> None:
        """Enter what ``which``, a collection, has and should not have."""
        named = sorted(which)  # type: ignore[call-overload]
        if named:
            more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
            self.problems.append(f"{what}: {', '.join(map(str, named[:MAX_NAMED]))}{more}")


def audit(run_dir: Path, broker: redis.Redis, expected: Expected) -> Findings:
    """Look at everything that a finished run left. broker: a client of a server with its data."""
    found = Findings()
    trained = _check_ledger(run_dir / "checkpoints", expected, found)
    _check_journal(_events(run_dir / "journal", found), trained, expected, found)
    _check_rounds(_entries(broker, expected.name, "rounds"), trained, expected, found)
    _check_weights(_entries(broker, expected.name, "weights"), found)
    _check_metrics(run_dir / "metrics.jsonl", expected, found)
    for letter in _fields(broker, expected.name, "dead"):
        found.problems.append(f"dead letter of {letter.get('dead_queue')}: {letter.get('dead_reason')}")
    return found


# -- the last checkpoint


def _check_ledger(checkpoints: Path, expected: Expected, found: Findings) -> set[Row]:
    """Returns the rows that the newest weights contain."""
    newest = max(filter(None, map(_named, checkpoints.glob("step-*"))), default=None)
    if newest is None:
        found.problems.append("there is no checkpoint")
        return set()
    ledger = msgspec.msgpack.decode((newest[2] / "ledger.msgpack").read_bytes())
    if ledger["version"] != expected.batches:
        found.problems.append(f"the newest checkpoint is of version {ledger['version']}, not {expected.batches}")
    whole = (1 << expected.group_size) - 1
    by_pass: dict[int, set[Row]] = defaultdict(set)
    for batch, passes in ledger["passes"].items():
        for number, slots in passes.items():
            found.name(f"batch {batch}, pass {number}: slots not whole", [s for s, b in slots.items() if b != whole])
            by_pass[number] |= {
                (batch, slot, sample)
                for slot, bits in slots.items()
                for sample in range(bits.bit_length())
                if bits >> sample & 1
            }
    trained = by_pass[0]
    if set(by_pass) != set(range(expected.passes)):
        found.problems.append(f"passes {sorted(by_pass)} were trained, not {expected.passes}")
    for number, rows in by_pass.items():
        found.name(f"rows of pass 0 or {number}, not of both", rows ^ trained)
    rows = Counter(batch for batch, _, _ in trained)
    if expected.rows:
        wrong = [f"{batch} ({rows[batch]})" for batch in range(expected.batches) if rows[batch] != expected.rows]
        found.name(f"batches that do not hold {expected.rows} rows", wrong)
    found.name("batches that there should not be", set(rows) - set(range(expected.batches)))
    found.rows = len(trained)
    return trained


def _named(path: Path) -> tuple[int, int, Path] | None:
    """(version, number, directory) of a checkpoint in place; None for one that is being written."""
    match = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", path.name)
    return (int(match[1]), int(match[2] or 0), path) if match else None


# -- the journal


def _events(journal: Path, found: Findings) -> Iterator[Mapping[str, Any]]:
    """Every event in the order applied; a hole, a repetition or a damaged frame is a problem."""
    following = None
    for path in sorted(journal.glob("segment-*.log")):
        raw, offset = path.read_bytes(), 0
        while offset < len(raw):
            length, checksum = FRAME.unpack_from(raw, offset) if offset + FRAME.size <= len(raw) else (0, 0)
            payload = raw[offset + FRAME.size : offset + FRAME.size + length]
            if not length or len(payload) < length or zlib.crc32(payload) != checksum:
                found.problems.append(f"{path.name}: no whole frame at byte {offset}")
                break
            record = msgspec.msgpack.decode(payload)
            if following is not None and record["seq"] != following:
                found.problems.append(f"{path.name}: event {record['seq']} stands where {following} belongs")
            following = record["seq"] + 1
            offset += FRAME.size + length
            found.counts["events"] += 1
            yield record["event"]


def _check_journal(events: Iterator[Mapping[str, Any]], trained: set[Row], expected: Expected, found: Findings) -> None:
    """Each batch was stepped, in the newest lineage with as many rows as its ledger has; nothing was too old."""
    steps: dict[int, Mapping[str, Any]] = {}
    oldest: dict[Row, list[int]] = defaultdict(list)
    scored: set[tuple[int, int]] = set()
    for event in events:
        match event["type"]:
            case "StepDone":
                before = steps.get(event["batch"])
                if before is None or event["weights"]["epoch"] >= before["weights"]["epoch"]:
                    steps[event["batch"]] = event
            case "RolloutFinished" if not event["row_id"].startswith("eval"):
                oldest[_row(event["row_id"])].append(event["oldest"]["version"])
            case "GroupScored" if not event["group_id"].startswith("eval"):
                scored.add(_group(event["group_id"]))
            case _:
                pass
    found.name("batches without a step", set(range(expected.batches)) - set(steps))
    found.name("steps beyond the run", set(steps) - set(range(expected.batches)))
    found.name("steps of another version", [b for b, step in steps.items() if step["weights"]["version"] != b + 1])
    epochs = [steps[batch]["weights"]["epoch"] for batch in sorted(steps)]
    if epochs != sorted(epochs):
        found.problems.append(f"epochs of the surviving steps fall: {epochs}")
    counted = sum(step["num_rows"] for step in steps.values())
    found.counts["twice"] += max(0, counted - expected.passes * len(trained))
    if counted != expected.passes * len(trained):
        found.problems.append(f"the steps count {counted} rows in {expected.passes} passes, the ledger {len(trained)}")
    found.name("trained groups that nobody scored", {row[:2] for row in trained} - scored)
    if expected.fixed:
        bound = expected.max_staleness
        found.name(
            f"trained rows older than {bound} versions",
            [row for row in trained if oldest[row] and row[0] - max(oldest[row]) > bound],
        )
    found.counts["rollouts"] = sum(map(len, oldest.values()))
    found.counts["generated twice"] = sum(len(versions) > 1 for versions in oldest.values())
    found.counts["trainer epochs"] = len(set(epochs))


# -- the broker


def _check_rounds(rounds: list[Mapping[str, Any]], trained: set[Row], expected: Expected, found: Findings) -> None:
    """What is left of the rounds log sends no row twice, nothing that was not trained, and closes what it sent."""
    sent: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    first = min((command["batch"] for command in rounds if "batch" in command), default=0)
    for command in rounds:
        key = (command.get("batch", 0), command.get("pass_index", 0), command.get("mini_batch", 0))
        if command["type"] == "TrainRound" and command.get("kind", "train") == "train":
            sent[key] += [
                (*_group(rows["group_id"]), sample)
                for rank in command["ranks"]
                for rows in rank
                for sample in rows["samples"]
            ]
        elif command["type"] == "CloseMiniBatch" and key[0] > first and len(sent[key]) != command["num_rows"]:
            found.problems.append(f"{key} was closed with {command['num_rows']} rows, and {len(sent[key])} were sent")
    for number in range(expected.passes):
        rows = Counter(row for key, of_key in sent.items() if key[1] == number for row in of_key)
        twice = [row for row, count in rows.items() if count > 1]
        found.counts["twice"] += len(twice)
        found.name(f"rows sent twice in pass {number}", twice)
        found.name(f"rows sent in pass {number} and not trained", set(rows) - trained)
    found.counts["rounds"] = len(rounds)


def _check_weights(manifests: list[Mapping[str, Any]], found: Findings) -> None:
    """Versions rise in an epoch, and epochs rise; a manifest that is told again is no step back."""
    newest = (0, 0)
    for manifest in manifests:
        age = (manifest["weights"]["epoch"], manifest["weights"]["version"])
        if age < newest:
            found.problems.append(f"weights {age} were announced after {newest}")
        newest = max(newest, age)
    found.counts["manifests"] = len(manifests)


def _entries(broker: redis.Redis, run: str, stream: str) -> list[Mapping[str, Any]]:
    """The payloads of a stream, decoded."""
    entries: Any = broker.xrange(f"streamrl:{{{run}}}:{stream}")
    return [msgspec.msgpack.decode(fields[b"payload"]) for _, fields in entries]


def _fields(broker: redis.Redis, run: str, stream: str) -> list[dict[str, str]]:
    """The readable fields of a stream."""
    entries: Any = broker.xrange(f"streamrl:{{{run}}}:{stream}")
    return [{k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()} for _, fields in entries]


# -- metrics


def _check_metrics(path: Path, expected: Expected, found: Findings) -> None:
    """Each batch has a line, each step one at most, and versions are what they should be."""
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            found.counts["torn lines of metrics"] += 1
            if number == 1:
                found.problems.append("metrics.jsonl: the first line is no JSON")
    batches = [line for line in lines if "batch" in line]
    found.name("batches without a line of metrics", set(range(expected.batches)) - {line["batch"] for line in batches})
    repeated = Counter((line["batch"], line["version"], line["incarnation"]) for line in batches)
    found.name("steps with two lines of metrics", [step for step, count in repeated.items() if count > 1])
    found.name("lines of another version", [line["batch"] for line in batches if line["version"] != line["batch"] + 1])


def _group(group_id: str) -> tuple[int, int]:
    batch, slot = group_id.split("/")
    return int(batch), int(slot)


def _row(row_id: str) -> Row:
    batch, slot, sample = row_id.split("/")
    return int(batch), int(slot), int(sample)
