"""A user's lengths: read as they are, refused by file and line, and made into batches that are all alike."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from orchestrator.errors import DataError
from orchestrator.launch.checks import check_workers_inputs
from orchestrator.sim.lengths import read_lengths, representative, tail_recall, within
from transport.contracts.settings import GenerationSettings, Settings
from transport.contracts.user_files import read_lengths as lengths_of_workers


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_number_a_line_and_groups_of_them(tmp_path):
    path = write(tmp_path / "lengths.txt", "# tokens\n12\n\n7  # short\n1e3\n40\n5\n")
    assert read_lengths(path) == [(12,), (7,), (1000,), (40,), (5,)]
    assert read_lengths(path, group_size=2) == [(12, 7), (1000, 40), (5,)]


def test_the_log_of_a_ranker_is_read_too(tmp_path):
    rows = [{"prompt": "a", "output_tokens": [3, 4]}, {"prompt": "b", "output_tokens": 9}]
    path = write(tmp_path / "log.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_lengths(path, group_size=2) == [(3, 4), (9,)]


@pytest.mark.parametrize("bad", ["0", "-5", "nan", "inf", "2.5", "many", "1e400"])
def test_what_is_no_length_is_named_with_its_line(tmp_path, bad):
    path = write(tmp_path / "lengths.txt", f"10\n{bad}\n")
    with pytest.raises(
        DataError, match=rf"lengths.txt:2: a length is a whole number of tokens, 1 or more, not '{bad}'"
    ):
        read_lengths(path)


ODD = ["0", "-3", "many", "2.5", "nan"]


def test_a_few_values_that_are_no_lengths_are_skipped_and_counted(tmp_path):
    said: list[str] = []
    path = write(tmp_path / "lengths.txt", "\n".join([*ODD, *["8"] * 45]))
    assert read_lengths(path, say=said.append) == [(8,)] * 45
    (sentence,) = said
    assert "5 of 50 values are no lengths and were skipped; the first: " in sentence
    assert "lengths.txt:1: a length is a whole number of tokens, 1 or more, not '0'" in sentence


def test_what_is_skipped_moves_no_other_line_to_another_prompt(tmp_path):
    path = write(tmp_path / "lengths.txt", "\n".join(["1", "2", "0", "4", "0", "0", *["9"] * 44]))
    assert read_lengths(path, 2, say=lambda _: None)[:3] == [(1, 2), (4,), (9, 9)]


def test_a_tenth_of_a_file_may_be_no_length_and_not_more(tmp_path):
    assert read_lengths(write(tmp_path / "a.txt", "0\n" + "8\n" * 9), say=lambda _: None) == [(8,)] * 9
    with pytest.raises(DataError, match=r"b\.txt:1: .* not '0' \(1 of 9 values are no lengths, more than 10%\)"):
        read_lengths(write(tmp_path / "b.txt", "0\n" + "8\n" * 8))


def test_a_run_is_forced_to_the_lengths_that_are_some(tmp_path):
    path = write(tmp_path / "lengths.txt", "0\n" + "12\n" * 20)
    check_workers_inputs(Settings(generation=GenerationSettings(lengths=str(path))))
    assert lengths_of_workers(path, lambda _: None) == [12] * 20


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    with pytest.raises(DataError, match="no length in it"):
        read_lengths(write(tmp_path / "lengths.txt", text))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"missing\.txt cannot be read"):
        read_lengths(tmp_path / "missing.txt")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary\.txt cannot be read"):
        read_lengths(binary)


def test_a_run_whose_file_of_lengths_is_bad_does_not_begin(tmp_path):
    path = write(tmp_path / "lengths.txt", "10\nmany\n")
    settings = Settings(generation=GenerationSettings(lengths=str(path)))
    with pytest.raises(DataError, match=r"generation\.lengths: .*lengths\.txt:2: .*'many'"):
        check_workers_inputs(settings)


def test_every_batch_holds_the_same_quantiles_in_another_order():
    groups = [(length,) for length in range(1, 1001)]
    lengths = representative(groups, batch=10, group_size=1, batches=3, prompt_tokens=5, recall=None)
    batches = [[group[0] for group in lengths.lengths[start : start + 10]] for start in (0, 10, 20)]
    assert [sorted(batch) for batch in batches] == [[51, 151, 251, 351, 451, 551, 651, 751, 851, 951]] * 3
    assert batches[0] != batches[1]
    assert lengths.predicted == pytest.approx([group[0] for group in lengths.lengths])
    assert lengths.sigma == 0.0


def test_the_ranker_has_its_recall_whatever_the_spread():
    groups = [(round(50 * 1.002**place),) for place in range(2000)]
    lengths = representative(groups, batch=2000, group_size=1, batches=2, prompt_tokens=5, recall=0.75)
    actual = [float(group[0]) for group in lengths.lengths]
    assert tail_recall(actual, lengths.predicted, 0.2) == pytest.approx(0.75, abs=0.06)  # uniform, not lognormal
    assert fmean(lengths.predicted) == pytest.approx(fmean(actual), rel=0.05)


@pytest.mark.parametrize("groups", [[(100,)], [(100,)] * 50], ids=["one prompt", "all equal"])
def test_lengths_without_a_spread_are_known_exactly(groups):
    lengths = representative(groups, batch=4, group_size=1, batches=2, prompt_tokens=5, recall=0.75)
    assert lengths.lengths == [(100,)] * 8
    assert lengths.predicted == pytest.approx([100.0] * 8)
    assert lengths.sigma == 0.0


def test_samples_of_a_prompt_have_a_spread_that_no_ranker_knows():
    assert within([(100,), (100, 100)]) == 0.0
    assert within([(50, 200)]) == pytest.approx(0.6931, abs=1e-3)
    assert representative([(50, 200)], batch=1, group_size=2, batches=1, prompt_tokens=5, recall=None).sigma > 0.69
