"""A growing metrics file is read once: any batches' lines are found without reading it again."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from orchestrator.observability import metrics
from orchestrator.observability.metrics import BatchLines, NewLines, read_metrics


def line(batch: int, **more: object) -> str:
    return json.dumps({"batch": batch, **more}) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_are_those_of_read_metrics_while_the_file_grows(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = BatchLines(path)
    assert lines.read(0, 10) == []
    for text in (line(0), '{"eval": 0}\n' + line(1, loss=0.5), '{"torn', line(2), line(3), "[]\n7\n\n" + line(4)):
        append(path, text)
        assert lines.read(0, 10) == read_metrics(path)
    assert [found["batch"] for found in lines.read(1, 2)] == [1, 3]
    assert lines.read(9, 5) == []
    assert str(BatchLines(path).read(10**18, 1)) == "[]"


def test_a_number_that_is_none_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(0, loss=float("nan")))
    assert BatchLines(path).read(0, 1)[0]["loss"] != 0.0


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_anew(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(0) + line(1) + line(2))
    lines = BatchLines(path)
    assert len(lines.read(0, 10)) == 3
    path.write_text(line(5))
    assert [found["batch"] for found in lines.read(0, 10)] == [5]


def test_what_is_not_asked_for_is_neither_kept_nor_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(batch, text="x" * 2000) for batch in range(10_000)))
    lines = BatchLines(path)
    tracemalloc.start()
    try:
        assert [found["batch"] for found in lines.read(9_999, 5)] == [9_999]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < path.stat().st_size / 10
    looked_at: list[bytes] = []
    parse_line = metrics.parse_line
    monkeypatch.setattr(metrics, "parse_line", lambda raw: looked_at.append(raw) or parse_line(raw))
    append(path, line(10_000))
    assert [found["batch"] for found in lines.read(9_998, 5)] == [9_998, 9_999, 10_000]
    assert len(looked_at) == 4, "the new one, and those that were asked for"


def test_every_line_is_new_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    early, late = NewLines(path), NewLines(path, skip=True)
    assert (early.read(), late.read()) == ([], [])
    append(path, line(0) + '{"eval": 0}\nnonsense\n' + line(1)[:-1])
    late = NewLines(path, skip=True)
    assert [found.get("batch") for found in early.read()] == [0, None]
    append(path, "\n" + line(2))
    for lines in (early, late):
        assert [found["batch"] for found in lines.read()] == [1, 2]
        assert lines.read() == []


def test_the_lines_of_a_file_that_was_replaced_are_not_new_again(tmp_path: Path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_text(line(0) + line(1))
    lines = NewLines(path)
    assert len(lines.read()) == 2
    other.write_text(line(0, bubble=1.0) + line(1, bubble=1.0) + line(2))
    other.replace(path)
    assert [found["batch"] for found in lines.read()] == [2]
