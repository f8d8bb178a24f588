"""Files from outside: configurations, data, logs of lengths, models' JSON, and what lies in a run directory.

An input is ``(kind of file, content)``. Its reader gives a value or the one documented error, which names the file if a
user named it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from orchestrator.cli.plan import parse_model
from orchestrator.config.load import render, resolve
from orchestrator.errors import ConfigError, DataError
from orchestrator.journal import Journal, JournalError, read_whole_records, recover
from orchestrator.observability.samples import read_samples
from orchestrator.planning.profiles import Profile, read_profile
from orchestrator.prompts.dataset import load_problems
from ranker.logs import read_log
from ranker.model import StoredRanker, read_ranker
from ranker.protocol import LengthLogError, RankerFileError
from tests.fuzz.harness import Check, CheckFailedError, Target
from tests.fuzz.hostile import Maker, anything, damaged, nested, number, packed, raw_message, text, whole
from transport.contracts.ledger import FILE_NAME, META_FILE, CheckpointMeta, newest_checkpoint
from transport.contracts.messages import JournalRecord, StepDone
from transport.contracts.user_files import identify_model, read_lengths
from transport.errors import FatalError, LengthFileError
from workers.models import check_model_dir, stop_token_ids
from workers.trainer.checkpoint import STEPS_FILE, CheckpointStore, _mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of file. read: given its path.  errors: what that may raise.  named: their message names the file."""

    name: str
    make: Callable[[Random], bytes]
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...] = ()
    named: bool = True


# --- configurations ---------------------------------------------------------------------------------------------------

PLAIN = b"""\
# a run
[run]
name = "mine"   # its name
batches = 20

[data]
source = "reasoning_gym"
task = "chain_sum"
params = { min_terms = 2, max_terms = 3 }

[trainer]
lr = 1e-5
[generation]
lengths = '''
several
lines'''
"""
TOML_WORDS = (
    "[run]", "[data.params]", "[[run]]", "name", "run.name", "batches", "=", " = ", "1", "-1", "1e999", "nan", "'",
    '"', '"""', "'''", "[", "]", "{", "}", ",", ".", "\n", "\r\n", "#", "\\", "true", "0x" + "f" * 30, "9" * 5000,
    "a." * 2000 + "a", "[" * 500, "{a=" * 500, "1979-05-27", "\x00", "\ufeff", "é", '"\\ud800"', "broker.url",
    '"redis://:x@[::1"', "inf",
)  # fmt: skip


def _toml(random: Random) -> bytes:
    match random.randrange(4):
        case 0:
            return damaged(random, PLAIN)
        case 1:
            return "".join(random.choice(TOML_WORDS) for _ in range(random.randrange(30))).encode()
        case 2:
            return PLAIN + "".join(random.choice(TOML_WORDS) for _ in range(random.randrange(6))).encode()
        case _:
            word = random.choice(TOML_WORDS)
            return f"[run]\nname = {word * random.choice((1, 3, 200))}\n".encode()


def _configuration(path: Path) -> None:
    render(resolve(None, [path], [], {}))


def _override(path: Path) -> None:
    resolve(None, [], [path.read_bytes().decode(errors="replace")], {})


def _override_text(random: Random) -> bytes:
    key = random.choice(("run.name", "run.batches", "data.params.x", "trainer.lr", "broker.url", "a.b", ""))
    return f"{key}={random.choice((random.choice(TOML_WORDS), text(random), json.dumps(whole(random))))}".encode()


# --- rows and lengths -------------------------------------------------------------------------------------------------


def _json(random: Random, value: object) -> bytes:
    match random.randrange(12):
        case 0:
            return nested(random)
        case 1:
            return damaged(random, json.dumps(value, default=str, skipkeys=True).encode())
        case 2:
            return (
                b'{"prompt": "x", "answer": '
                + random.choice((b"9" * 5000, b"1e999", b"NaN", b"-0", b'"\\ud800"'))
                + b"}"
            )
        case _:
            return json.dumps(value, default=str, skipkeys=True).encode()


def _rows(random: Random) -> bytes:
    def row() -> object:
        if random.random() < 0.1:
            return anything(random)
        columns = ("prompt", "answer", "id", "length", "base_tokens", text(random))
        good: dict[str, Any] = {
            "prompt": f"question {random.random()}",
            "answer": "4",
            "length": random.randrange(1, 99),
        }
        return good | {random.choice(columns): anything(random) for _ in range(random.randrange(2))}

    lines = [_json(random, row()) for _ in range(random.randrange(6))]
    return random.choice((b"\n", b"\n", b"\r\n", b"\n\n", b"\r")).join(lines)


def _packed_rows(random: Random) -> bytes:
    raw = gzip.compress(_rows(random), mtime=0)
    return random.choice((raw, damaged(random, raw), raw[:-5], raw + raw, raw + b"x", _rows(random)))


def _problems(path: Path) -> None:
    load_problems(
        resolve(None, [], ["data.source=jsonl", f"data.path={path}", "data.answer_column=answer"], {}).settings
    )


def _lengths(random: Random) -> bytes:
    words = ("1", "20", "0", "-3", "1e3", "1e999", "nan", "9" * 5000, "# x", "", "x", "٣", "1_0", "\x00", "1.5", "0x10")
    raw = "\n".join(random.choice(words) for _ in range(random.randrange(8))).encode()
    return random.choice((raw, raw, damaged(random, raw)))


# --- a run directory --------------------------------------------------------------------------------------------------


def _samples(random: Random) -> bytes:
    lines = [_json(random, {"row": "0/0/0", "prompt": text(random), "reward": number(random)}) for _ in range(3)]
    return b"\n".join(lines)


def _journal(random: Random) -> bytes:
    """A segment of three records and what damage does to it."""
    with tempfile.TemporaryDirectory() as directory:
        journal, _ = Journal.open(Path(directory))
        journal.append(list(itertools.takewhile(bool, (_record(random, seq) for seq in (1, 2, 3)))))
        journal.close()
        raw = b"".join(path.read_bytes() for path in Path(directory).glob("segment-*"))
    return random.choice((raw, damaged(random, raw), raw[: random.randrange(len(raw) + 1)], raw + random.randbytes(9)))


def _record(random: Random, seq: int) -> JournalRecord | None:
    made = Maker(random, wild=0.0).value(JournalRecord) | {"seq": seq, "now_s": 1.0}
    try:
        return msgspec.convert(made, JournalRecord)
    except (msgspec.ValidationError, ValueError):
        return None


def _recovered(path: Path) -> None:
    directory = path.parent / "journal"
    directory.mkdir(exist_ok=True)
    path.replace(directory / "segment-000000000001.log")
    list(read_whole_records(directory))
    recover(directory)


def _checkpoint(random: Random) -> bytes:
    meta = Maker(random, wild=random.choice((0.0, 0.05))).value(CheckpointMeta)
    steps = raw_message(random, tuple[StepDone, ...])
    return packed((_json(random, meta), raw_message(random, dict[str, int]), steps, random.random() < 0.7))


def _checkpointed(path: Path) -> None:
    """meta.json with the true marks of the other files (its own names and numbers stay as they are), or with none."""
    raw_meta, ledger, steps, marks = msgspec.msgpack.decode(path.read_bytes(), type=tuple[bytes, bytes, bytes, bool])
    place = path.parent / "checkpoints" / "step-3"
    place.mkdir(parents=True, exist_ok=True)
    contents = {"model.safetensors": b"x", "optimizer.safetensors": b"y", FILE_NAME: ledger, STEPS_FILE: steps}
    for name, content in contents.items():
        (place / name).write_bytes(content)
    if marks:
        raw_meta = _with_marks(raw_meta, {name: _mark(place / name) for name, content in contents.items() if content})
    (place / META_FILE).write_bytes(raw_meta)
    CheckpointStore(place.parent, keep=1).load_latest()
    newest_checkpoint(place.parent)


def _with_marks(raw_meta: bytes, marks: object) -> bytes:
    try:
        meta = json.loads(raw_meta)
    except (ValueError, RecursionError):
        return raw_meta
    return (
        json.dumps(meta | {"files": marks}, default=msgspec.to_builtins).encode()
        if isinstance(meta, dict)
        else raw_meta
    )


# --- models -----------------------------------------------------------------------------------------------------------


def _model(random: Random) -> bytes:
    names = ("model_type", "hidden_size", "num_hidden_layers", "eos_token_id", "vocab_size", "num_attention_heads", "x")
    good = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
    config = good | {"intermediate_size": 8, "num_key_value_heads": 1, "eos_token_id": [1, 2]}
    return _json(random, config | {random.choice(names): anything(random) for _ in range(random.randrange(3))})


def _model_dir(path: Path) -> None:
    (path.parent / "config.json").write_bytes(path.read_bytes())
    identify_model(path.parent)
    stop_token_ids(path.parent)
    check_model_dir(path.parent)


KINDS = (
    Kind(name="config.toml", make=_toml, read=_configuration, errors=(ConfigError,)),
    Kind(name="override", make=_override_text, read=_override, errors=(ConfigError,), named=False),
    Kind(name="rows.jsonl", make=_rows, read=_problems, errors=(DataError,)),
    Kind(name="rows.jsonl.gz", make=_packed_rows, read=_problems, errors=(DataError,)),
    Kind(name="lengths.jsonl", make=_rows, read=read_log, errors=(LengthLogError,)),
    Kind(name="lengths.jsonl.gz", make=_packed_rows, read=read_log, errors=(LengthLogError,)),
    Kind(name="lengths.txt", make=_lengths, read=read_lengths, errors=(LengthFileError,)),
    Kind(name="samples.jsonl", make=_samples, read=read_samples),
    Kind(name="segment", make=_journal, read=_recovered, errors=(JournalError,), named=False),
    Kind(name="checkpoint", make=_checkpoint, read=_checkpointed),
    Kind(
        name="ranker.bin",
        make=lambda random: raw_message(random, StoredRanker),
        read=read_ranker,
        errors=(RankerFileError,),
    ),
    Kind(name="model.json", make=_model, read=lambda path: parse_model(str(path)), errors=(ConfigError,)),
    Kind(name="model", make=_model, read=_model_dir, errors=(FatalError,), named=False),
    Kind(
        name="profile.json",
        make=lambda random: _json(random, Maker(random, wild=random.choice((0.0, 0.05))).value(Profile)),
        read=read_profile,
        errors=(ConfigError,),
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}


def make(random: Random) -> bytes:
    kind = random.choice(KINDS)
    return packed((kind.name, kind.make(random)))


@contextmanager
def _opened() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="streamrl-fuzz-") as directory:
        yield lambda content: check(content, Path(directory))


def check(content: bytes, directory: Path) -> None:
    name, raw = msgspec.msgpack.decode(content, type=tuple[str, bytes])
    kind, path = BY_NAME[name], directory / name
    path.write_bytes(raw)
    try:
        kind.read(path)
    except kind.errors as error:
        if kind.named and name not in str(error):
            raise CheckFailedError(f"the error of {name} does not name the file: {str(error)[:80]}") from error


TARGET = Target(name="files", make=make, opened=_opened, num_inputs=1500)
