"""Lengths of the base policy: which prompts they are of, what they are good for before anything was generated."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from orchestrator.errors import DataError
from orchestrator.launch.checks import check_inputs
from orchestrator.loop.ranking import base_lengths, open_ranker, scores
from ranker.logs import read_scores
from ranker.protocol import LengthLogError
from transport.contracts.settings import (
    DataSettings,
    EvalSettings,
    RankerSettings,
    RunSettings,
    SamplingSettings,
    Settings,
)

QUESTIONS = ("Add 2 and 3.", "Prove Fermat's last theorem.", "Say yes.", "Say yes.")
IDS = [f"prompts.jsonl/{line}" for line in range(1, 5)]


def settings_of(tmp_path: Path, *lines: object, model: str = "") -> Settings:
    """A run of four prompts, two of the same text, with these lines in its log; without any there is no log."""
    data, lengths = tmp_path / "prompts.jsonl", tmp_path / "lengths.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": question, "answer": "yes"}) for question in QUESTIONS))
    if lines:
        lengths.write_text("\n".join(json.dumps(line) for line in lines))
    return Settings(
        run=RunSettings(dir=str(tmp_path)),
        data=DataSettings(source="jsonl", path=str(data), suffix=" Be brief."),
        sampling=SamplingSettings(max_new_tokens=400),
        eval=EvalSettings(problems=0),
        ranker=RankerSettings(kind="text", model=model, base_lengths=str(lengths)),
    )


def test_a_line_names_its_prompt_by_text_with_or_without_suffix_or_by_id(tmp_path: Path):
    settings = settings_of(
        tmp_path,
        {"prompt": "Say yes.", "output_tokens": 2},
        {"prompt": "Add 2 and 3. Be brief.", "output_tokens": 99, "base_tokens": [20, 30]},
        {"prompt": "of another run", "id": IDS[1], "output_tokens": [1500, 1700]},
    )
    assert base_lengths(settings) == {IDS[0]: (20, 30), IDS[1]: (1500, 1700), IDS[2]: (2,), IDS[3]: (2,)}


def test_the_first_predictions_are_the_base_policys(tmp_path: Path):
    settings = settings_of(
        tmp_path, {"prompt": QUESTIONS[0], "output_tokens": 20}, {"prompt": QUESTIONS[1], "output_tokens": [300, 340]}
    )
    ranker = open_ranker(settings, tmp_path / "ranker.bin")
    short, long, unknown, _ = (one.mean_tokens for one in ranker.predict(IDS, QUESTIONS))
    assert short < 40 < 250 < long < 400
    assert unknown == pytest.approx(400.0), "the longest that is allowed"


def scored_settings(tmp_path: Path, *lines: object) -> Settings:
    settings = settings_of(tmp_path, *lines)
    ranker = RankerSettings(kind="history", scores=settings.ranker.base_lengths)
    return msgspec.structs.replace(settings, ranker=ranker)


def test_scores_of_any_ranker_are_the_first_predictions_and_no_visit(tmp_path: Path):
    said: list[str] = []
    lines = [{"id": f"other/{n}", "mean_tokens": 7} for n in range(20)]
    known = {"id": "mine", "prompt": QUESTIONS[1], "mean_tokens": 312.5, "level_sigma": 0.1, "sample_sigma": 0.2}
    settings = scored_settings(tmp_path, *lines, {"id": IDS[0], "mean_tokens": 20}, known, {"id": "x"})
    assert len(read_scores(Path(settings.ranker.scores), say=said.append)) == 23
    assert "1 of 23 values are no scores" in said[0]
    ranker = open_ranker(settings, tmp_path / "ranker.bin")
    short, long, unknown, _ = ranker.predict(IDS, QUESTIONS)
    assert (short.mean_tokens, long.mean_tokens) == (pytest.approx(20), pytest.approx(312.5))
    assert (long.level_sigma, long.sample_sigma, long.observations) == pytest.approx((0.1, 0.2, 0))
    assert unknown.mean_tokens == pytest.approx(400.0)
    for _ in range(3):
        ranker.observe(IDS[0], [200, 220])
    assert ranker.predict(IDS[:1], QUESTIONS[:1])[0].mean_tokens > 100, "what came counts more than what was expected"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"id": "of other data", "mean_tokens": 5}, r"none of its prompts is among the run's 4"),
        ({"id": IDS[0], "mean_tokens": -1}, r"lengths\.jsonl:1: mean_tokens is a number from 0 to"),
        ({"id": IDS[0], "mean_tokens": "5"}, r"lengths\.jsonl:1: mean_tokens is a number from 0 to"),
        ({"id": IDS[0]}, r"lengths\.jsonl:1: no column 'mean_tokens'"),
        ({"mean_tokens": 5}, r"lengths\.jsonl:1: no column 'id' or 'prompt'"),
    ],
)
def test_scores_that_are_none_of_these_prompts_are_refused(tmp_path: Path, line: object, problem: str):
    with pytest.raises(LengthLogError, match=problem):
        scores(scored_settings(tmp_path, line))
    with pytest.raises(DataError, match=problem):
        check_inputs(scored_settings(tmp_path, line))


def test_after_a_restart_they_count_no_second_time(tmp_path: Path):
    settings, path = settings_of(tmp_path, {"prompt": QUESTIONS[0], "output_tokens": 20}), tmp_path / "ranker.bin"
    ranker = open_ranker(settings, path)
    ranker.predict(IDS[:1], QUESTIONS[:1])
    ranker.observe(IDS[0], [200, 220])
    before = ranker.predict(IDS[:1], QUESTIONS[:1])
    ranker.save(path)
    assert open_ranker(settings, path).predict(IDS[:1], QUESTIONS[:1])[0].mean_tokens == pytest.approx(
        before[0].mean_tokens
    )


def test_a_log_that_is_not_of_these_prompts_is_refused(tmp_path: Path):
    with pytest.raises(LengthLogError, match=r"none of its prompts is among the run's 4, .* 'Add 2 and 3"):
        base_lengths(settings_of(tmp_path, {"prompt": "of other data", "output_tokens": 5}))


def test_a_file_that_is_not_there_is_said_before_anything_starts(tmp_path: Path):
    with pytest.raises(DataError, match=r"lengths\.jsonl: cannot be read: No such file"):
        check_inputs(settings_of(tmp_path))
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        check_inputs(settings_of(tmp_path, {"prompt": "Say yes.", "output_tokens": 2}, model="nowhere"))
