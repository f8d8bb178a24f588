"""The ranker of a run: learns while it is used, says how right it was, survives a restart."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from ranker import online
from ranker.logs import PromptLengths, split
from ranker.model import TextModel
from ranker.online import FIRST_REFIT_GROUPS, OnlineRanker, RefitRequest
from ranker.protocol import LengthEstimate, RankerFileError, RefitError
from tests.fakes.length_logs import synthetic_lengths

SAMPLES = synthetic_lengths(640)


def visit(ranker: OnlineRanker, samples: list[PromptLengths], scale: float = 1.0) -> None:
    """One batch: predictions first, then what came."""
    ranker.predict([sample.prompt_id for sample in samples], [sample.text for sample in samples])
    for sample in samples:
        ranker.observe(sample.prompt_id, [max(1, round(scale * length)) for length in sample.tokens])


@pytest.fixture(scope="module")
def model() -> TextModel:
    parts = split(SAMPLES[:300], 0)
    return TextModel.fit(parts.train, parts.validation)


def test_without_a_model_history_alone_becomes_worth_using():
    ranker = OnlineRanker()
    assert not ranker.trusted
    first, second = ranker.predict(["a", "b"], ["x", "y"])
    assert first == second
    visit(ranker, SAMPLES)
    assert not ranker.trusted
    for _ in range(4):
        visit(ranker, SAMPLES)
    quality = ranker.quality()
    assert ranker.trusted
    assert quality.recall_20 > 0.8
    assert quality.num_groups == 5 * len(SAMPLES)
    assert ranker.predict([SAMPLES[0].prompt_id], [SAMPLES[0].text])[0].observations > 4


def test_a_model_is_used_from_the_first_batch_and_its_history_makes_it_better(model: TextModel):
    ranker = OnlineRanker(model)
    assert ranker.trusted
    visit(ranker, SAMPLES)
    once = ranker.quality().kendall_tau
    for _ in range(4):
        visit(ranker, SAMPLES)
    assert ranker.quality().kendall_tau > once > 0.7


def test_predictions_are_judged_by_what_came_later():
    """The prediction that counts is the one made before; observing twice does not make it look better."""
    ranker = OnlineRanker()
    ranker.observe("never predicted", [5])
    assert ranker.quality().num_groups == 0
    ranker.predict(["p"], ["x"])
    ranker.observe("p", [1000] * 4)
    assert ranker.quality().num_groups == 1


def test_the_base_policys_lengths_count_as_a_first_visit():
    ranker = OnlineRanker(first_guess_tokens=500.0)
    ranker.cold_start({"long": [5000, 6000], "short": [20, 30], "unknown": []})
    long, short, unknown = ranker.predict(["long", "short", "unknown"], ["x", "x", "x"])
    assert long.mean_tokens > 4 * unknown.mean_tokens > 16 * short.mean_tokens
    assert unknown.observations == 0.0


def test_a_model_that_knows_the_base_policy_gets_its_lengths_as_features():
    draw = random.Random(0)
    samples = [
        PromptLengths(prompt_id=f"p{index}", text="the same words", tokens=(3 * base,), base_tokens=(base,))
        for index, base in enumerate(draw.randrange(10, 2000) for _ in range(200))
    ]
    ranker = OnlineRanker(TextModel.fit(samples[:150], samples[150:]))
    ranker.cold_start({"long": [1500], "short": [20]})
    long, short = ranker.predict(["long", "short"], ["the same words"] * 2)
    assert long.mean_tokens > 10 * short.mean_tokens
    assert long.observations == 0.0


@pytest.mark.parametrize("tokens", [[-1], [3, -2], [2.5]])
def test_a_length_that_is_none_is_refused(tokens: list[int]):
    with pytest.raises(ValueError, match="whole numbers of tokens"):
        OnlineRanker().observe("p", tokens)


def test_an_empty_response_is_one_token_and_no_response_is_no_news():
    ranker = OnlineRanker()
    ranker.predict(["p"], ["x"])
    ranker.observe("p", [])
    assert ranker.quality().num_groups == 0
    ranker.observe("p", [0, 0])
    assert ranker.predict(["p"], ["x"])[0].mean_tokens < 20


def test_observations_and_predictions_go_on_while_it_trains(monkeypatch: pytest.MonkeyPatch):
    """The lock is not held over training: the run's thread gets its answers before training may end."""
    training, release = threading.Event(), threading.Event()

    def slow(*arguments: object) -> TextModel:
        training.set()
        assert release.wait(20)
        raise RefitError("cancelled")

    monkeypatch.setattr(online, "refit_in_process", slow)
    ranker = OnlineRanker()
    visit(ranker, SAMPLES[:FIRST_REFIT_GROUPS])
    failures: list[RefitError] = []

    def train() -> None:
        try:
            ranker.refit(10.0)
        except RefitError as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert training.wait(20)
    visit(ranker, SAMPLES[:10])
    release.set()
    thread.join(20)
    assert len(failures) == 1
    assert ranker.quality().num_groups == FIRST_REFIT_GROUPS + 10
    assert ranker.quality().refits == 0
    assert not ranker.refit_due


def test_scores_give_way_to_a_model_that_the_run_has_trained_also_after_a_restart(tmp_path: Path):
    text, scores = SAMPLES[0].text, {"scored": LengthEstimate(mean_tokens=5000.0, level_sigma=0.1, sample_sigma=0.1)}
    ranker = OnlineRanker()
    ranker.expect(scores)
    assert ranker.predict(["scored"], [text])[0].mean_tokens == pytest.approx(5000.0)
    visit(ranker, SAMPLES[:FIRST_REFIT_GROUPS])
    ranker.refit(60.0)
    learnt = ranker.predict(["scored"], [text])[0].mean_tokens
    assert learnt < 4000.0
    ranker.save(tmp_path / "ranker.bin")
    again = OnlineRanker.load(tmp_path / "ranker.bin")
    again.expect(scores)
    assert again.predict(["scored"], [text])[0].mean_tokens == pytest.approx(learnt, rel=0.01)
    assert again.quality().refits == 1


def test_few_new_prompts_add_trees_and_many_start_anew(model: TextModel):
    few = online.refit(RefitRequest(old=model.stored, samples=SAMPLES[300:400], seed=1))
    many = online.refit(RefitRequest(old=model.stored, samples=SAMPLES[300:], seed=1))
    assert few.stored.log_trees[: len(model.stored.log_trees)] == model.stored.log_trees
    assert many.stored.terms != model.stored.terms


def test_a_ranker_survives_a_restart(model: TextModel, tmp_path: Path):
    ranker = OnlineRanker(model)
    visit(ranker, SAMPLES)
    ranker.save(tmp_path / "ranker.bin")
    restored = OnlineRanker.load(tmp_path / "ranker.bin")
    ids, texts = [sample.prompt_id for sample in SAMPLES[:20]], [sample.text for sample in SAMPLES[:20]]
    assert restored.predict(ids, texts) == ranker.predict(ids, texts)
    assert restored.trusted == ranker.trusted
    (tmp_path / "ranker.bin").write_bytes(b"\x93\x01\x02")
    with pytest.raises(RankerFileError):
        OnlineRanker.load(tmp_path / "ranker.bin")


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "MAX_KNOWN", 10)
    ranker = OnlineRanker()
    ids = [f"p{index}" for index in range(50)]
    assert len(ranker.predict(ids, ids)) == 50
    for prompt_id in ids:
        ranker.observe(prompt_id, [7])
    assert ranker.quality().num_groups == 10  # the others' predictions are forgotten, their lengths are not
    assert ranker.quality().known_prompts == 50
