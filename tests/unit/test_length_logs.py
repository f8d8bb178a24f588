"""Users' logs: what is read, and what is refused with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ranker.logs import check_rankable, read_log, read_prompts
from ranker.protocol import LengthLogError
from tests.fakes.length_logs import synthetic_lengths


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_lines_of_one_prompt_are_joined(tmp_path: Path):
    log = written(
        tmp_path / "log.jsonl",
        {"prompt": "a", "output_tokens": 5},
        {"prompt": "b", "output_tokens": [7.0, 8], "base_tokens": [3]},
        "",
        {"prompt": "a", "output_tokens": [6]},
    )
    a, b = read_log(log)
    assert (a.text, a.tokens, a.base_tokens) == ("a", (5, 6), ())
    assert (b.text, b.tokens, b.base_tokens) == ("b", (7, 8), (3,))


def test_prompts_of_another_file_are_found_by_id_and_models_kept_apart(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl.gz"
    prompts.write_bytes(gzip.compress(b'{"id": 1, "prompt": "one"}\n{"id": 2, "prompt": "two"}\n'))
    log = written(
        tmp_path / "log.jsonl",
        {"id": 1, "model": "m", "tokens": 5},
        {"id": 1, "model": "n", "tokens": 50},
        {"id": 2, "model": "m", "tokens": 6},
    )
    assert [(sample.text, sample.tokens) for sample in read_log(log, prompts, "m")] == [("one", (5,)), ("two", (6,))]
    with pytest.raises(LengthLogError, match="of model 'x'"):
        read_log(log, prompts, "x")
    unknown = written(tmp_path / "unknown.jsonl", {"id": 3, "tokens": 5})
    with pytest.raises(LengthLogError, match=r"unknown\.jsonl:1: its prompt '3' is not among"):
        read_log(unknown, prompts)


@pytest.mark.parametrize("length", [0, -3, 2.5, "12", None, True, [], [4, 0], 1e12, {"n": 1}])
def test_a_length_that_is_none_names_its_line(tmp_path: Path, length: object):
    log = written(tmp_path / "log.jsonl", {"prompt": "a", "length": 3}, {"prompt": "b", "length": length})
    with pytest.raises(LengthLogError, match=r"log\.jsonl:2: (a length is a whole number|a prompt without)"):
        read_log(log)


def test_values_that_are_no_lengths_are_skipped_and_said(tmp_path: Path):
    said: list[str] = []
    rows = [{"prompt": f"p{number}", "output_tokens": [5, 6], "base_tokens": 4} for number in range(10)]
    odd = [{"prompt": "p0", "output_tokens": [0, 7]}, {"prompt": "none", "output_tokens": None}, "{"]
    samples = read_log(written(tmp_path / "log.jsonl", *rows, *odd), say=said.append)
    assert len(samples) == 10, "a prompt without any length is none"
    assert (samples[0].tokens, samples[0].base_tokens) == ((5, 6, 7), (4,))
    assert "3 of 34 values are no lengths and were skipped; the first: " in said[0]
    assert "log.jsonl:11: a length is a whole number of tokens, 1 or more, not 0" in said[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a", "length": NaN}', "JSON has no NaN"),
        ("[1, 2]", "not the JSON that belongs here"),
        ("{", "not the JSON that belongs here"),
        ("[" * 100_000, "not the JSON that belongs here"),
        ({"prompt": "a", "size": 3}, "no column 'output_tokens' or .* only prompt, size"),
        ({"length": 3}, "no column 'prompt'"),
        ({"prompt": 3, "length": 3}, "not a text"),
    ],
)
def test_a_line_that_is_no_pair_is_refused(tmp_path: Path, row: object, message: str):
    with pytest.raises(LengthLogError, match=message):
        read_log(written(tmp_path / "log.jsonl", row))


def test_an_empty_missing_or_cut_file_is_refused(tmp_path: Path):
    with pytest.raises(LengthLogError, match="no prompt with a length"):
        read_log(written(tmp_path / "empty.jsonl"))
    with pytest.raises(LengthLogError, match="No such file"):
        read_log(tmp_path / "missing.jsonl")
    whole = gzip.compress(b'{"prompt": "a", "length": 3}\n' * 100)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(LengthLogError, match="cannot be read"):
        read_log(tmp_path / "cut.jsonl.gz")
    (tmp_path / "fake.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(LengthLogError, match="cannot be read"):
        read_log(tmp_path / "fake.jsonl.gz")


def test_nothing_to_rank_is_said():
    samples = synthetic_lengths(40)
    check_rankable(samples, "log")
    with pytest.raises(LengthLogError, match="1 different prompts; ranking needs 30"):
        check_rankable(samples[:1], "log")
    equal = synthetic_lengths(40, samples=1, noise=0.0)
    same = [type(sample)(prompt_id=sample.prompt_id, text=sample.text, tokens=(2048,)) for sample in equal]
    with pytest.raises(LengthLogError, match="every response has 2048 tokens"):
        check_rankable(same, "log")


def test_prompts_without_an_id_are_named_by_their_text(tmp_path: Path):
    prompts = written(tmp_path / "p.jsonl", {"prompt": "a"}, {"id": 7, "text": "b"})
    assert read_prompts(prompts) == [("a", "a"), ("7", "b")]


def test_prompts_to_be_scored_are_read_as_logs_are(tmp_path: Path):
    said: list[str] = []
    prompts = written(tmp_path / "p.jsonl", *({"prompt": f"p{n}"} for n in range(19)), {"id": 7})
    assert len(read_prompts(prompts, say=said.append)) == 19
    assert "1 of 20 values are no prompts and were skipped; the first: " in said[0]
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(LengthLogError, match="there is no prompt in it"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(LengthLogError, match=r"1 of 2 values are no prompts, more than 10%"):
        read_prompts(written(tmp_path / "odd.jsonl", {"prompt": "a"}, {"id": 7}))
