"""Does ``inspect --audit`` find damage to a finished run, and name where it is?

A run of the preset ``tiny`` (two ranks, evaluations, three checkpoints made) is copied for each damage; the audit of
the copy must end with 1 and name the stream or file. The undamaged copies must be clean. The last line is one JSON
object: ``damages`` that were done, ``audit_found``, ``unnamed`` (found, and the place is not in the words), and
``false_alarms``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.journal import all_snapshots, read_whole_records
from transport.broker import keys
from transport.broker.base import ZERO_ID
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.ledger import FILE_NAME, META_FILE, CheckpointMeta, FileMark, Ledger, checkpoint_dirs
from transport.contracts.messages import GroupScored, JournalRecord, RolloutFinished, StepDone, encode
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import RunName
from transport.tensors.manifest import file_checksum

RUN = "--preset tiny --name whole --plain --set run.batches=12 --set trainer.ranks=2 --set trainer.checkpoint_every=4"
RUN += " --set eval.every=6"
Change = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """where: a word that the audit must say. done: to the directory of a run."""

    about: str
    where: str
    done: Change


def newest(run: Path) -> Path:
    path = checkpoint_dirs(run / "checkpoints")[0]
    assert isinstance(path, Path)
    return path


def flip(path: Path, share: float = 0.5) -> None:
    """One bit of a file, at a share of its length."""
    raw = bytearray(path.read_bytes())
    raw[min(int(len(raw) * share), len(raw) - 1)] ^= 1
    path.write_bytes(raw)


def files_of_checkpoints() -> Iterable[Damage]:
    for pattern in ("model*", "optimizer*", FILE_NAME, "steps.msgpack", META_FILE):
        where = pattern.removesuffix("*")

        def found(run: Path, pattern: str = pattern) -> Path:
            return next(newest(run).glob(pattern))

        def found_in_older(run: Path, pattern: str = pattern) -> Path:
            return next(Path(str(checkpoint_dirs(run / "checkpoints")[-1])).glob(pattern))

        yield Damage(about=f"{pattern} deleted", where=where, done=lambda run, at=found: at(run).unlink())
        yield Damage(about=f"{pattern} flipped", where=where, done=lambda run, at=found: flip(at(run)))
        yield Damage(
            about=f"older {pattern} deleted", where=where, done=lambda run, at=found_in_older: at(run).unlink()
        )
        yield Damage(about=f"older {pattern} flipped", where=where, done=lambda run, at=found_in_older: flip(at(run)))
        yield Damage(about=f"{pattern} cut", where=where, done=lambda run, at=found: os.truncate(at(run), 100))
    yield Damage(about="a file beside", where="more.bin", done=lambda run: (newest(run) / "more.bin").touch())
    yield Damage(about="newest deleted", where="contains", done=lambda run: shutil.rmtree(newest(run)))
    yield Damage(about="all deleted", where="no checkpoint", done=lambda run: shutil.rmtree(run / "checkpoints"))


def ledgers() -> Iterable[Damage]:
    def edited(change: Callable[[Ledger], object]) -> Change:
        """As one would who knows the format: the file's mark is made right."""

        def done(run: Path) -> None:
            path = newest(run)
            ledger = Ledger.from_bytes((path / FILE_NAME).read_bytes())
            change(ledger)
            (path / FILE_NAME).write_bytes(encode(ledger))
            meta = CheckpointMeta.from_bytes((path / META_FILE).read_bytes())
            file = path / FILE_NAME
            mark = FileMark(nbytes=file.stat().st_size, checksum=file_checksum(file))
            meta = msgspec.structs.replace(meta, files={**meta.files, FILE_NAME: mark})
            (path / META_FILE).write_bytes(meta.to_bytes())

        return done

    def first_slot(ledger: Ledger) -> dict[int, int]:
        return ledger.passes[1][0]

    def lose(ledger: Ledger) -> None:
        slots = first_slot(ledger)
        slots[min(slots)] &= ~1

    yield Damage(about="ledger without a row", where="sent and not trained", done=edited(lose))
    yield Damage(
        about="ledger with a row more", where="never sent", done=edited(lambda one: first_slot(one).update({99: 1}))
    )
    yield Damage(about="ledger without a batch", where="batch 1", done=edited(lambda one: one.passes.pop(1)))
    yield Damage(
        about="ledger of a version less",
        where="version",
        done=edited(lambda one: setattr(one, "version", one.version - 1)),
    )


def metrics() -> Iterable[Damage]:
    def lines(change: Callable[[list[str]], list[str]]) -> Change:
        def done(run: Path) -> None:
            path = run / "metrics.jsonl"
            path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

        return done

    def altered(name: str, of: str = "batch") -> Callable[[list[str]], list[str]]:
        def change(rows: list[str]) -> list[str]:
            at = [number for number, row in enumerate(rows) if of in json.loads(row)][1]
            row: dict[str, Any] = json.loads(rows[at])
            return [*rows[:at], json.dumps(row | {name: row[name] + 1}), *rows[at + 1 :]]

        return change

    names = "reward reward_std samples_trained tokens_trained rows_in_steps tokens_in_steps version groups_trained"
    for name in (*names.split(), *["response_tokens", "loss", "grad_norm", "lr", "entropy", "empty", "batch"]):
        yield Damage(about=f"{name} altered", where="metrics.jsonl", done=lines(altered(name)))
    yield Damage(about="an evaluation altered", where="evaluation", done=lines(altered("eval_reward", "eval")))

    def beyond(rows: list[str]) -> list[str]:
        return [*rows, json.dumps(json.loads(rows[-1]) | {"batch": 999, "version": 1000})]

    for about, change in (
        ("a line deleted", lambda rows: rows[:5] + rows[6:]),
        ("an evaluation deleted", lambda rows: [row for row in rows if '"eval": 1' not in row]),
        ("a line twice", lambda rows: rows[:6] + rows[5:]),
        ("two lines swapped", lambda rows: [*rows[:3], rows[4], rows[3], *rows[5:]]),
        ("a line of no batch", beyond),
        ("a line cut", lambda rows: [*rows[:4], rows[4][: len(rows[4]) // 2], *rows[5:]]),
    ):
        yield Damage(about=about, where="metrics.jsonl", done=lines(change))
    yield Damage(
        about="metrics.jsonl deleted", where="metrics.jsonl", done=lambda run: (run / "metrics.jsonl").unlink()
    )


def journals() -> Iterable[Damage]:
    """Rewritten with right checksums, as no crash would."""

    def rewritten(change: Callable[[list[JournalRecord]], list[JournalRecord]]) -> Change:
        def done(run: Path) -> None:
            journal = run / "journal"
            records = change(list(read_whole_records(journal)))
            for path in journal.glob("segment-*"):
                path.unlink()
            for path in sorted(journal.glob("snapshot-*"))[1:]:
                path.unlink()
            raw = b""
            for seq, record in enumerate(records, start=1):
                body = encode(msgspec.structs.replace(record, seq=seq))
                raw += struct.pack("<II", len(body), zlib.crc32(body)) + body
            (journal / "segment-000000000001.e1.log").write_bytes(raw)

        return done

    def place(records: list[JournalRecord], kind: type) -> int:
        found = [number for number, record in enumerate(records) if isinstance(record.event, kind)]
        return found[len(found) // 2]

    def edited(kind: type, **changes: Callable[[Any], object]) -> Change:
        def change(records: list[JournalRecord]) -> list[JournalRecord]:
            at = place(records, kind)
            event: Any = records[at].event
            new = msgspec.structs.replace(event, **{key: value(getattr(event, key)) for key, value in changes.items()})
            return [*records[:at], msgspec.structs.replace(records[at], event=new), *records[at + 1 :]]

        return rewritten(change)

    def without(kind: type) -> Change:
        return rewritten(lambda rs: [record for n, record in enumerate(rs) if n != place(rs, kind)])

    def twice(kind: type) -> Change:
        return rewritten(lambda rs: [*rs[: place(rs, kind) + 1], *rs[place(rs, kind) :]])

    def swapped(kind: type) -> Change:
        def change(rs: list[JournalRecord]) -> list[JournalRecord]:
            at = place(rs, kind)
            return [*rs[:at], rs[at + 1], rs[at], *rs[at + 2 :]]

        return rewritten(change)

    for kind in (GroupScored, RolloutFinished, StepDone):
        for about, done in (("left out", without(kind)), ("twice", twice(kind)), ("swapped", swapped(kind))):
            yield Damage(about=f"{kind.__name__} {about}", where="", done=done)
    yield Damage(
        about="a reward changed",
        where="GroupScored",
        done=edited(GroupScored, rewards=lambda was: (was[0] + 0.5, *was[1:])),
    )
    yield Damage(
        about="a length changed",
        where="GroupScored",
        done=edited(GroupScored, response_tokens=lambda was: (was[0] + 1, *was[1:])),
    )
    yield Damage(about="num_rows changed", where="batch", done=edited(StepDone, num_rows=lambda was: was - 1))
    yield Damage(
        about="a loss changed", where="loss", done=edited(StepDone, metrics=lambda was: was | {"loss": was["loss"] + 1})
    )
    yield Damage(about="second half cut off", where="", done=rewritten(lambda rs: rs[: len(rs) // 2]))
    yield Damage(
        about="a bit of the journal flipped",
        where="segment",
        done=lambda run: flip(max((run / "journal").glob("segment-*"), key=lambda path: path.stat().st_size)),
    )
    yield Damage(
        about="first snapshot flipped",
        where="snapshot",
        done=lambda run: flip(min((run / "journal").glob("snapshot-*"))),
    )
    yield Damage(about="journal gone", where="journal", done=lambda run: shutil.rmtree(run / "journal"))


def others() -> Iterable[Damage]:
    def sample(run: Path) -> None:
        path = run / "samples.jsonl"
        first, *rest = path.read_text().splitlines()
        row = json.loads(first)
        path.write_text("\n".join([json.dumps(row | {"reward": row["reward"] + 9}), *rest]) + "\n")

    def rounds(again: bool) -> Change:
        async def change(run: Path) -> None:
            server = EmbeddedServer(run / "broker")
            await server.start()
            try:
                name = RunName(run.name)
                broker = await connect(BrokerSettings(), name, url=server.url, password=server.password)
                entries = await broker.read(keys.ROUNDS, ZERO_ID, count=10_000)
                if again:
                    await broker.append(keys.ROUNDS, entries[len(entries) // 2].entry)
                else:
                    await broker.trim(keys.ROUNDS, entries[len(entries) // 2].entry_id)
                    await broker.append(keys.ROUNDS, entries[0].entry)
                await broker.close()
            finally:
                await server.stop()

        return lambda run: asyncio.run(change(run))

    yield Damage(about="a sample's reward altered", where="samples.jsonl", done=sample)
    yield Damage(about="eval.jsonl deleted", where="eval.jsonl", done=lambda run: (run / "eval.jsonl").unlink())
    yield Damage(about="broker's directory gone", where="broker", done=lambda run: shutil.rmtree(run / "broker"))
    yield Damage(about="a round twice", where="rounds", done=rounds(again=True))
    yield Damage(about="rounds trimmed, one again", where="rounds", done=rounds(again=False))
    yield Damage(
        about="final model flipped", where="model.safetensors", done=lambda run: flip(run / "model/model.safetensors")
    )
    yield Damage(about="final model gone", where="model", done=lambda run: shutil.rmtree(run / "model"))


def audited(run: Path) -> tuple[int, str]:
    program = Path(sys.executable).with_name("streamrl-orchestrator")
    done = subprocess.run([program, "inspect", run, "--audit"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only damages whose words hold this")
    options = parser.parse_args()
    counts = {"damages": 0, "audit_found": 0, "unnamed": 0, "false_alarms": 0}
    with tempfile.TemporaryDirectory(prefix="damage-") as made:
        whole, copy = Path(made) / "whole", Path(made) / "copies/whole"
        program = Path(sys.executable).with_name("streamrl-orchestrator")
        subprocess.run([program, "run", *RUN.split(), "--dir", made], check=True, stdout=subprocess.DEVNULL)
        assert dict(all_snapshots(whole / "journal"))
        nothing = Damage(about="nothing", where="", done=lambda run: None)
        damages = [*files_of_checkpoints(), *ledgers(), *metrics(), *journals(), *others()]
        for damage in (nothing, *(one for one in damages if options.k in one.about)):
            shutil.rmtree(copy.parent, ignore_errors=True)
            shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("*.sock"))
            damage.done(copy)
            code, said = audited(copy)
            if damage is nothing:
                counts["false_alarms"] += code != 0
                continue
            found = code != 0 and "Traceback" not in said
            counts["damages"] += 1
            counts["audit_found"] += found
            counts["unnamed"] += found and damage.where not in said
            if not found or damage.where not in said:
                print(f"{damage.about}: exit code {code}: {' | '.join(said.splitlines()[:3])[:300]}", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
