"""Files from outside are read within bounds, and what cannot be read is said by file and line."""

from __future__ import annotations

import collections
import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from orchestrator.config.load import resolve
from orchestrator.errors import DataError
from orchestrator.prompts.dataset import load_problems
from ranker.logs import read_log
from ranker.protocol import LengthLogError
from transport.errors import InputFileError
from transport.process import files
from transport.process.files import decode_row, read_json, read_rows

MB = 1024 * 1024


def packed(path: Path, content: bytes, repeated: int) -> Path:
    with gzip.open(path, "wb") as file:
        for _ in range(repeated):
            file.write(content)
    return path


def test_a_small_file_that_unpacks_to_much_is_refused_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """60 MB of one row: refused behind the first 8 MB, and no more than a line of it is held."""
    monkeypatch.setattr(files, "FREE_UNPACKED_BYTES", 8 * MB)
    monkeypatch.setattr(files, "MAX_UNPACKED_RATIO", 20)
    row = b'{"prompt": "' + b"a" * 1000 + b'", "answer": "1", "length": 3}\n'
    bomb = packed(tmp_path / "rows.jsonl.gz", row * 1000, 60)
    tracemalloc.start()
    rows = read_rows(bomb)
    with pytest.raises(
        InputFileError, match=rf"rows\.jsonl\.gz:{8 * MB // len(row) + 1}: it unpacks to more than 20 times"
    ):
        collections.deque(rows, maxlen=0)
    assert tracemalloc.get_traced_memory()[1] < 4 * MB
    tracemalloc.stop()
    with pytest.raises(DataError, match="unpacks to more than"):
        load_problems(resolve("tiny", [], ["data.source=jsonl", f"data.path={bomb}", "data.size=0"], {}).settings)
    with pytest.raises(LengthLogError, match="unpacks to more than"):
        read_log(bomb)


def test_a_line_without_an_end_is_refused_before_it_is_held(tmp_path: Path):
    bomb = packed(tmp_path / "rows.jsonl.gz", b"a" * MB, 64)
    tracemalloc.start()
    with pytest.raises(InputFileError, match=r"rows\.jsonl\.gz:1: longer than 16 MiB"):
        list(read_rows(bomb))
    assert tracemalloc.get_traced_memory()[1] < 40 * MB
    tracemalloc.stop()


def test_text_that_packs_well_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "FREE_UNPACKED_BYTES", 0)
    rows = b"".join(b'{"prompt": "What is %d plus %d?", "answer": %d}\n' % (i, i * 7, i * 8) for i in range(3000))
    assert len(list(read_rows(packed(tmp_path / "rows.jsonl.gz", rows, 1)))) == 3000


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b'{"a": 1}\n{"a": ' + b"[" * 100_000 + b"\n", 2, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", 1, "out of range"),
        (b'\n\n{"a": NaN}\n', 3, "JSON has no NaN"),
    ],
)
def test_a_row_that_is_none_names_its_line(tmp_path: Path, content: bytes, line: int, message: str):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=rf"rows\.jsonl:{line}: not the JSON that belongs here: .*{message}"):
        list(read_rows(path))


def test_a_text_of_another_encoding_is_called_so(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(InputFileError, match=r"rows\.jsonl:1: it is not UTF-8 text: save it as UTF-8"):
        list(read_rows(path))
    with pytest.raises(InputFileError, match=r"rows\.jsonl: it is not UTF-8 text"):
        read_json(path, dict[str, object])


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_document_that_is_none_names_its_file(tmp_path: Path, content: bytes):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=r"config\.json: not the JSON that belongs here"):
        read_json(path, dict[str, object])


def test_a_path_that_none_can_have_is_said(tmp_path: Path):
    with pytest.raises(InputFileError, match="null byte"):
        list(read_rows(tmp_path / "a\0b.jsonl"))
    with pytest.raises(InputFileError, match="Is a directory"):
        read_json(tmp_path, dict[str, object])


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(InputFileError, match="it is a pipe"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_a_row_as_python_prints_it_is_answered_with_double_quotes() -> None:
    with pytest.raises(InputFileError, match="double quotes"):
        decode_row(b"{'prompt': '2+2'}", "rows.jsonl:1")
