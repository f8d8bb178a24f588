"""The audit of real runs: one that goes on is never wronged, and tampering with one that ended is named."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli.audit import AuditReport, audit_run
from orchestrator.cli.control import open_run
from orchestrator.config.run_directory import RunDir
from orchestrator.journal import Journal, JournalError, read_records
from orchestrator.sim import replay
from tests.fakes.explicit_ids import append_at
from tests.fakes.live_run import BATCHES, EMULATED, LiveRun
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, LogEntry
from transport.contracts.ledger import FILE_NAME, Ledger, checkpoint_dirs, newest_checkpoint
from transport.contracts.messages import JournalRecord, StepDone
from transport.contracts.types import RowId

pytestmark = pytest.mark.chaos

OnFiles = Callable[[RunDir], None]
OnBroker = Callable[[Broker], Awaitable[None]]


def test_a_run_that_goes_on_is_clean_at_every_look(tmp_path: Path):
    """Short batches, a checkpoint after each: whatever moves while it is read, moves here."""
    settings = (*EMULATED, "emulated.time_scale=0.002", "trainer.checkpoint_every=1", "run.batches=10000")
    with LiveRun(tmp_path, *settings) as run:
        run.wait_for_batch(2)
        looks = [audited(RunDir(run.run_dir)) for _ in range(14)]
        run.wait_for_batch(looks[0].batches + 10)
        looks += [audited(RunDir(run.run_dir)) for _ in range(14)]
        said = run.audit()
        assert run.survivors(), run.describe()
    assert [problem for look in looks for problem in look.problems] == []
    assert all(look.live for look in looks)
    batches = [look.batches for look in looks]
    assert batches == sorted(batches)
    assert batches[-1] >= batches[0] + 10
    assert said.returncode == 0
    assert re.search(r"audit clean: .*; the run goes on, checked up to batch \d+ ", said.stdout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of BATCHES batches that ended well, with checkpoints after every second one."""
    directory = tmp_path_factory.mktemp("finished")
    settings = (*EMULATED, "trainer.checkpoint_every=2", "trainer.keep_checkpoints=3")
    with LiveRun(directory, *settings) as run:
        assert run.wait_for_end() == 0, run.describe()
        return run.run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> RunDir:
    """A copy, to be tampered with."""
    return RunDir(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def audited(rundir: RunDir, tamper: OnBroker | None = None) -> AuditReport:
    async def look() -> AuditReport:
        async with open_run(rundir.path) as (found, settings, broker):
            if tamper is not None:
                await tamper(broker)
            return await audit_run(found, settings, broker)

    return asyncio.run(look())


# --- the journal


def rewrite(rundir: RunDir, records: Iterable[JournalRecord]) -> None:
    """A journal of these events in this order, as if they were all."""
    aside = rundir.path / "before"
    rundir.journal.rename(aside)
    rundir.journal.mkdir()
    first = min(aside.glob("snapshot-000000000000*"))
    shutil.copy(first, rundir.journal / "snapshot-000000000000.bin")
    journal, _ = Journal.open(rundir.journal)
    journal.append([msgspec.structs.replace(record, seq=seq) for seq, record in enumerate(records, 1)])
    journal.close()


def history(rundir: RunDir) -> list[JournalRecord]:
    return list(read_records(rundir.journal, from_seq=1))


def without_the_last_step(rundir: RunDir) -> None:
    records = history(rundir)
    last = max(place for place, record in enumerate(records) if isinstance(record.event, StepDone))
    rewrite(rundir, records[:last] + records[last + 1 :])


def without_a_step_in_the_middle(rundir: RunDir) -> None:
    records = history(rundir)
    steps = [place for place, record in enumerate(records) if isinstance(record.event, StepDone)]
    rewrite(rundir, records[: steps[2]] + records[steps[2] + 1 :])


def cut_before_the_last_step(rundir: RunDir) -> None:
    records = history(rundir)
    last = max(place for place, record in enumerate(records) if isinstance(record.event, StepDone))
    rewrite(rundir, records[:last])


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


def flip_the_journal(rundir: RunDir) -> None:
    flip_a_byte(max(rundir.journal.glob("segment-*.log"), key=lambda path: path.stat().st_size))


# --- the checkpoint


def newest(rundir: RunDir) -> tuple[Path, Ledger]:
    found = newest_checkpoint(rundir.checkpoints)
    assert found is not None
    return found


def older(rundir: RunDir) -> Path:
    """The newest checkpoint of fewer batches."""
    version = newest(rundir)[1].version
    return next(path for path in checkpoint_dirs(rundir.checkpoints) if f"step-{version}" not in path.name)


def older_weights(rundir: RunDir) -> None:
    shutil.copy(older(rundir) / "model.safetensors", newest(rundir)[0] / "model.safetensors")


def older_weights_and_what_names_them(rundir: RunDir) -> None:
    for name in ("model.safetensors", "optimizer.safetensors", "meta.json"):
        shutil.copy(older(rundir) / name, newest(rundir)[0] / name)


def older_checkpoint_under_the_newest_name(rundir: RunDir) -> None:
    path = newest(rundir)[0]
    shutil.rmtree(path)
    shutil.copytree(older_than(rundir, path), path)


def older_than(rundir: RunDir, gone: Path) -> Path:
    return next(
        path for path in checkpoint_dirs(rundir.checkpoints) if path.name.split(".")[0] != gone.name.split(".")[0]
    )


def without_the_newest_checkpoints(rundir: RunDir) -> None:
    version = newest(rundir)[1].version
    for path in checkpoint_dirs(rundir.checkpoints):
        if path.name.split(".")[0] == f"step-{version}":
            shutil.rmtree(path)


def without_checkpoints(rundir: RunDir) -> None:
    shutil.rmtree(rundir.checkpoints)


def change_ledger(change: Callable[[Ledger], None]) -> OnFiles:
    def tamper(rundir: RunDir) -> None:
        path, ledger = newest(rundir)
        change(ledger)
        (path / FILE_NAME).write_bytes(ledger.to_bytes(ledger.seal))

    return tamper


def forget_a_row(ledger: Ledger) -> None:
    ledger.passes[1][0][0] &= ~1


def add_a_row(ledger: Ledger) -> None:
    ledger.add(0, [RowId("1/77/0")])


def claim_more(ledger: Ledger) -> None:
    ledger.version += 1


def claim_less(ledger: Ledger) -> None:
    ledger.version -= 1


# --- metrics


def change_metrics(change: Callable[[list[str]], list[str]]) -> OnFiles:
    def tamper(rundir: RunDir) -> None:
        lines = rundir.metrics.read_text().splitlines(keepends=True)
        rundir.metrics.write_text("".join(change(lines)))

    return tamper


def lie_of_rows(lines: list[str]) -> list[str]:
    line = json.loads(lines[1])
    return [lines[0], json.dumps(line | {"rows_in_steps": line["rows_in_steps"] + 1}) + "\n", *lines[2:]]


# --- the broker


async def rounds(broker: Broker) -> list[LogEntry]:
    return list(await broker.read(keys.ROUNDS, ZERO_ID, count=1000))


async def rebuild(broker: Broker, entries: Iterable[tuple[str, LogEntry]]) -> None:
    await broker.delete_stream(keys.ROUNDS)
    for entry_id, entry in entries:
        await append_at(broker, keys.ROUNDS, entry.entry, entry_id)


async def remove_a_round(broker: Broker) -> None:
    held = [(entry.entry_id, entry) for entry in await rounds(broker)]
    await rebuild(broker, held[:1] + held[2:])


async def exchange_two_rounds(broker: Broker) -> None:
    held = await rounds(broker)
    ids = [entry.entry_id for entry in held]
    await rebuild(broker, zip(ids, [held[1], held[0], *held[2:]], strict=True))


async def repeat_a_round(broker: Broker) -> None:
    held = await rounds(broker)
    await append_at(broker, keys.ROUNDS, held[0].entry, "999999-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    says: str
    files: OnFiles | None = None
    broker: OnBroker | None = None


ACTS = {
    "the last StepDone removed": Act(files=without_the_last_step, says="the journal has no step that trained it"),
    "a StepDone removed": Act(files=without_a_step_in_the_middle, says="the journal has no step that trained it"),
    "the journal cut short": Act(files=cut_before_the_last_step, says="the journal has no step that trained it"),
    "older weights under a newer ledger": Act(files=older_weights, says="model.safetensors is not the one"),
    "older weights, by name": Act(files=older_weights_and_what_names_them, says="model.safetensors is not the one"),
    "an older checkpoint under a newer name": Act(
        files=older_checkpoint_under_the_newest_name, says="finished with 6 batches, and step-6.* contains 4"
    ),
    "a byte of the weights": Act(
        files=lambda rundir: flip_a_byte(newest(rundir)[0] / "model.safetensors"),
        says="model.safetensors is not the one",
    ),
    "a byte of the optimizer": Act(
        files=lambda rundir: flip_a_byte(newest(rundir)[0] / "optimizer.safetensors"),
        says="optimizer.safetensors is not the one",
    ),
    "no weights": Act(
        files=lambda rundir: (newest(rundir)[0] / "model.safetensors").unlink(), says="model.safetensors is not the one"
    ),
    "the newest checkpoint removed": Act(files=without_the_newest_checkpoints, says="with 6 batches, and step-4"),
    "no checkpoint": Act(files=without_checkpoints, says="there is no checkpoint"),
    "a row out of the ledger": Act(files=change_ledger(forget_a_row), says="sent and not trained: 1/0/0"),
    "a row into the ledger": Act(files=change_ledger(add_a_row), says="trained and never sent: 1/77/0"),
    "a ledger of more": Act(files=change_ledger(claim_more), says="under a ledger of 7"),
    "a ledger of less": Act(files=change_ledger(claim_less), says="contains rows of batch 5"),
    "a damaged line": Act(
        files=change_metrics(lambda lines: [lines[0], lines[1][:20] + "\n", *lines[2:]]), says="line 2 is damaged"
    ),
    "a line removed": Act(files=change_metrics(lambda lines: lines[:2] + lines[3:]), says="no line of batch 2"),
    "the last line cut": Act(
        files=change_metrics(lambda lines: [*lines[:-1], lines[-1][:9]]), says=f"no line of batch {BATCHES - 1}"
    ),
    "a changed line": Act(files=change_metrics(lie_of_rows), says="differs from its report"),
    "no metrics": Act(files=lambda rundir: rundir.metrics.unlink(), says="no line of batch 0"),
    "a round removed": Act(broker=remove_a_round, says="was removed"),
    "two rounds exchanged": Act(broker=exchange_two_rounds, says="is not what was commanded"),
    "a round repeated": Act(broker=repeat_a_round, says="999999-0 was never commanded"),
}


@pytest.mark.parametrize("what", ACTS)
def test_tampering_is_named(run_dir: RunDir, what: str):
    act = ACTS[what]
    if act.files is not None:
        act.files(run_dir)
    problems = audited(run_dir, act.broker).problems
    assert re.search(act.says, "\n".join(problems)), problems


def test_a_flipped_byte_in_the_journal_is_named(run_dir: RunDir):
    flip_the_journal(run_dir)
    with pytest.raises(JournalError, match="is damaged at byte"):
        audited(run_dir)


def test_what_nobody_touched_is_clean(run_dir: RunDir):
    report = audited(run_dir)
    assert (report.problems, report.batches, report.live) == ((), BATCHES, False)


def test_a_torn_end_of_the_journal_is_no_damage_to_audit_and_replay(run_dir: RunDir):
    last = max(run_dir.journal.glob("segment-*.log"))
    last.write_bytes(last.read_bytes() + b"\x40\0\0\0torn")
    assert audited(run_dir).problems == ()
    assert replay.main(run_dir.path) == 0
