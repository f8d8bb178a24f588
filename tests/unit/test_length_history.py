"""What prompts turned out to be: shrinkage, forgetting, drift, and a text that is not worth listening to."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from ranker.history import LengthHistory, PromptRecord
from ranker.model import StoredRanker, decode_ranker
from ranker.protocol import LengthEstimate, RankerFileError

PRIOR = LengthEstimate(mean_tokens=100.0, level_sigma=0.5, sample_sigma=0.3)


def drawn(draw: random.Random, tokens: float, count: int, noise: float = 0.2) -> list[int]:
    return [max(1, round(tokens * draw.lognormvariate(0.0, noise))) for _ in range(count)]


def settled_history(draw: random.Random, groups: int = 200) -> LengthHistory:
    """One that has seen prompts which are what their text says."""
    history = LengthHistory()
    for index in range(groups):
        history.observe(f"other{index}", drawn(draw, 95.0 * draw.lognormvariate(0.0, 0.5), 4), PRIOR)
    return history


def test_an_unseen_prompt_is_what_its_text_says():
    unseen = LengthHistory().posterior("new", PRIOR)
    assert unseen.mean_tokens == pytest.approx(PRIOR.mean_tokens)
    assert (unseen.level_sigma, unseen.observations) == (pytest.approx(PRIOR.level_sigma), 0.0)


def test_samples_pull_from_the_text_and_more_of_them_further():
    draw = random.Random(1)
    history = settled_history(draw)
    before = history.posterior("p", PRIOR)
    history.observe("p", drawn(draw, 1000.0, 1), PRIOR)
    one = history.posterior("p", PRIOR)
    history.observe("p", drawn(draw, 1000.0, 32), PRIOR)
    many = history.posterior("p", PRIOR)
    assert before.mean_tokens < one.mean_tokens < many.mean_tokens
    assert many.mean_tokens == pytest.approx(1000.0, rel=0.15)
    assert before.level_sigma > one.level_sigma > many.level_sigma


def test_a_noisy_prompt_has_a_longer_longest_sample():
    history = settled_history(random.Random(2))
    history.observe("calm", [200] * 8, PRIOR)
    history.observe("wild", [20, 60, 100, 200, 300, 500, 900, 2000], PRIOR)
    calm, wild = history.posterior("calm", PRIOR), history.posterior("wild", PRIOR)
    assert wild.sample_sigma > 2 * calm.sample_sigma
    assert wild.group(8).max_tokens / wild.mean_tokens > calm.group(8).max_tokens / calm.mean_tokens


def test_old_visits_fade():
    history = settled_history(random.Random(3))
    for _ in range(3):
        history.observe("p", [100] * 8, PRIOR)
    for _ in range(3):
        history.observe("p", [400] * 8, PRIOR)
    assert history.posterior("p", PRIOR).mean_tokens > 300


def test_a_prompt_of_an_epoch_ago_moves_with_the_others():
    """All responses grow fourfold; a prompt that was not seen since is expected to have grown too."""
    draw = random.Random(4)
    history = settled_history(draw)
    levels = {f"p{index}": 95.0 * draw.lognormvariate(0.0, 0.5) for index in range(200)}
    for prompt_id, level in levels.items():
        history.observe(prompt_id, drawn(draw, level, 8), PRIOR)
    before = history.posterior("p0", PRIOR).mean_tokens
    drift_before = history.drift
    for step in range(600):
        prompt_id = f"p{1 + step % 199}"
        history.observe(prompt_id, drawn(draw, levels[prompt_id] * 4 ** (step / 600), 8), PRIOR)
    assert history.drift - drift_before == pytest.approx(math.log(4), rel=0.15)
    assert history.posterior("p0", PRIOR).mean_tokens == pytest.approx(4 * before, rel=0.2)


def test_learning_how_wrong_the_text_is_is_no_drift():
    """The text says 100, everything is 1,000: that is the text's bias, not a policy that moved."""
    draw = random.Random(5)
    history = LengthHistory()
    for index in range(300):
        history.observe(f"p{index}", drawn(draw, 1000.0, 8), PRIOR)
    assert history.posterior("new", PRIOR).mean_tokens == pytest.approx(1000.0, rel=0.35)
    assert abs(history.drift) < 0.3
    assert history.posterior("p0", PRIOR).mean_tokens == pytest.approx(1000.0, rel=0.35)


def test_a_useless_text_is_soon_not_listened_to():
    """Where texts are wrong by far more than they claim, one's own samples count for more."""
    draw = random.Random(6)
    sure = LengthEstimate(mean_tokens=100.0, level_sigma=0.1, sample_sigma=0.3)
    good, bad = LengthHistory(), LengthHistory()
    for index in range(300):
        good.observe(f"p{index}", drawn(draw, 95.0 * draw.lognormvariate(0.0, 0.1), 4), sure)
        bad.observe(f"p{index}", drawn(draw, 95.0 * draw.lognormvariate(0.0, 1.0), 4), sure)
    for history in (good, bad):
        history.observe("p", [2000, 2000], sure)
    assert bad.posterior("p", sure).mean_tokens > 2 * good.posterior("p", sure).mean_tokens


def test_one_runaway_response_is_no_trend():
    history = settled_history(random.Random(7))
    before = history.posterior("new", PRIOR).mean_tokens
    history.observe("p", [1_000_000], PRIOR)
    assert history.posterior("new", PRIOR).mean_tokens < 1.1 * before


def test_a_history_survives_a_file():
    history = settled_history(random.Random(8))
    restored = decode_ranker(msgspec.msgpack.encode(StoredRanker(history=history)), "file").history
    assert restored is not None
    assert restored.posterior("other3", PRIOR) == history.posterior("other3", PRIOR)
    assert restored.posterior("new", PRIOR) == history.posterior("new", PRIOR)


@pytest.mark.parametrize(
    "damage",
    [
        {"drift": math.nan},
        {"bias": math.inf},
        {"noise": 0.0},
        {"prior_scale": -1.0},
        {"groups": -1},
        {"prompts": {"p": PromptRecord(0.0, 1.0, 0.0, 0.0)}},
        {"prompts": {"p": PromptRecord(1.0, math.nan, 0.0, 0.0)}},
        {"prompts": {"p": PromptRecord(1.0, 1.0, -1.0, 0.0)}},
    ],
)
def test_impossible_numbers_are_refused(damage: dict[str, object]):
    history = msgspec.structs.replace(settled_history(random.Random(9), groups=3), **damage)
    with pytest.raises(RankerFileError, match="is not a stored ranker"):
        decode_ranker(msgspec.msgpack.encode(StoredRanker(history=history)), "file")
