"""A text model on generated prompts: it ranks, believes the right spread, and survives a file; hostile files do not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ranker import model as model_module
from ranker.logs import split
from ranker.model import (
    Calibration,
    StoredModel,
    StoredRanker,
    TextModel,
    Tree,
    check_trees,
    decode_ranker,
    read_ranker,
    train,
    write_ranker,
)
from ranker.protocol import RankerFileError
from tests.fakes.length_logs import synthetic_lengths

SAMPLES = synthetic_lengths(400)
TEXTS = [sample.text for sample in SAMPLES]


@pytest.fixture(scope="module")
def model() -> TextModel:
    parts = split(SAMPLES, 0)
    return TextModel.fit(parts.train, parts.validation)


def test_it_ranks_prompts_that_it_never_saw():
    trained = train(synthetic_lengths(600, seed=1))
    assert trained.quality.recall_20 >= 0.8
    assert trained.quality.kendall_tau >= 0.75
    assert 0.7 <= trained.quality.coverage <= 0.95
    assert trained.quality.num_prompts == 60


def test_the_spread_of_samples_is_told_from_that_of_levels(model: TextModel):
    estimates = model.predict(TEXTS)
    noise = sum(estimate.sample_sigma for estimate in estimates) / len(estimates)
    assert noise == pytest.approx(0.2, abs=0.05)
    assert all(estimate.observations == 0.0 for estimate in estimates)


def test_a_prompts_estimate_does_not_depend_on_its_company(model: TextModel):
    together = model.predict(TEXTS[:10])
    alone = [model.predict([text])[0] for text in TEXTS[:10]]
    assert [estimate.mean_tokens for estimate in together] == pytest.approx([e.mean_tokens for e in alone])
    assert model.predict([]) == []


@pytest.mark.parametrize("text", ["", " ", "\x00", "数" * 50_000, "9" * 5_000, "\ud800", "x" * 3_000_000])
def test_any_text_has_an_estimate(model: TextModel, text: str):
    assert model.predict([text])[0].mean_tokens > 0


def test_equal_data_give_an_equal_model(model: TextModel):
    parts = split(SAMPLES, 0)
    assert TextModel.fit(parts.train, parts.validation).stored == model.stored


def test_prompts_without_a_common_word_are_ranked_by_their_surface():
    samples = [type(s)(prompt_id=s.prompt_id, text="?" * (1 + s.tokens[0] // 10), tokens=s.tokens) for s in SAMPLES]
    assert train(samples).quality.kendall_tau > 0.8


def test_a_file_gives_back_the_same_model(model: TextModel, tmp_path: Path):
    write_ranker(tmp_path / "ranker.bin", StoredRanker(model=model.stored))
    stored = read_ranker(tmp_path / "ranker.bin")
    assert stored.model is not None
    assert TextModel(stored.model).predict(TEXTS) == model.predict(TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["ranker.bin"]


def test_more_trees_learn_what_changed_and_keep_the_rest(model: TextModel):
    """Proofs became ten times as long; a few recent prompts of that kind are enough to know."""
    proofs = [sample for sample in synthetic_lengths(300, seed=2) if sample.text.startswith("Prove")]
    longer = [type(s)(prompt_id=s.prompt_id, text=s.text, tokens=tuple(10 * n for n in s.tokens)) for s in proofs]
    others = [sample for sample in synthetic_lengths(300, seed=3) if not sample.text.startswith("Prove")][:60]
    recent = [*longer, *others]
    newer = model.continued(recent[::2], recent[1::2])
    before = [estimate.mean_tokens for estimate in model.predict([sample.text for sample in longer])]
    after = [estimate.mean_tokens for estimate in newer.predict([sample.text for sample in longer])]
    assert sum(after) > 4 * sum(before)
    sorting = "Sort these numbers in ascending order: 5 7 3 1"
    assert newer.predict([sorting])[0].mean_tokens < 0.1 * after[0]


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"\xc1", b"\x93\x01", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"{}"]
)
def test_bytes_that_are_no_ranker_are_refused(content: bytes, tmp_path: Path):
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(RankerFileError, match="is not a stored ranker"):
        read_ranker(tmp_path / "bad.bin")


def test_a_missing_a_foreign_and_an_endless_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RankerFileError, match="cannot be read: No such file"):
        read_ranker(tmp_path / "missing.bin")
    (tmp_path / "other.bin").write_bytes(msgspec.msgpack.encode(StoredRanker(version=99)))
    with pytest.raises(RankerFileError, match="of version 99"):
        read_ranker(tmp_path / "other.bin")
    monkeypatch.setattr(model_module, "MAX_BYTES", 10)
    with pytest.raises(RankerFileError, match="more than"):
        read_ranker(tmp_path / "other.bin")
    with pytest.raises(RankerFileError, match="cannot be written"):
        write_ranker(tmp_path / "no" / "such.bin", StoredRanker())


def changed(stored: StoredModel, **changes: object) -> bytes:
    """A file of the model in which some values are others."""
    return msgspec.msgpack.encode(
        {"format": "streamrl-ranker", "version": 1, "model": {**msgspec.to_builtins(stored), **changes}}
    )


def test_a_damaged_model_is_refused(model: TextModel):
    good = model.stored

    def other(**changes: object) -> dict[str, object]:
        return {**msgspec.to_builtins(good.calibration), **changes}

    worse = [
        changed(good, terms=[*good.terms[:-1], good.terms[0]]),
        changed(good, terms=good.terms[:-1]),
        changed(good, terms=["x" * 1000, *good.terms[1:]]),
        changed(good, idf=[float("nan"), *good.idf[1:]]),
        changed(good, idf=[-1.0, *good.idf[1:]]),
        changed(good, median_tokens=0.0),
        changed(good, recall_20=7.0),
        changed(good, log_trees=[]),
        changed(good, mean_trees=msgspec.to_builtins(good.mean_trees) * 10),
        changed(good, calibration=other(slope=-1.0)),
        changed(good, calibration=other(centers=[])),
        changed(good, calibration=other(level_sigmas=[float("inf")])),
        changed(good, calibration=other(intercept=float("nan"))),
    ]
    assert decode_ranker(changed(good), "file").model == good
    for content in worse:
        with pytest.raises(RankerFileError):
            TextModel(decode_ranker(content, "file").model or good)
    assert isinstance(good.calibration, Calibration)


TREE = Tree(
    features=[0, 1],
    thresholds=[0.5, 0.5],
    decisions=[2, 2],
    left=[1, -1],
    right=[-2, -3],
    leaves=[1.0, 2.0, 3.0],
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": [0, 2]}, "not among 2"),
        ({"features": [0, -1]}, "not among 2"),
        ({"left": [1, 0]}, "do not form a tree"),  # a cycle
        ({"left": [1, 1]}, "do not form a tree"),  # a node that is its own child
        ({"left": [7, -1]}, "do not form a tree"),  # a child that does not exist
        ({"right": [-2, -9]}, "do not form a tree"),
        ({"left": [-1, 1], "right": [-2, -3]}, "do not form a tree"),  # a part that nobody reaches
        ({"decisions": [2, 1]}, "kind of split"),
        ({"thresholds": [0.5]}, "differ in length"),
        ({"thresholds": [0.5, float("nan")]}, "not finite"),
        ({"leaves": [1.0, 2.0, float("inf")]}, "not finite"),
        ({"leaves": [1.0, 2.0]}, "2 leaves and 2 inner"),
        ({"leaves": []}, "0 leaves"),
    ],
)
def test_what_is_no_tree_never_reaches_the_library(change: dict[str, object], message: str):
    check_trees([TREE], 2)
    with pytest.raises(RankerFileError, match=message):
        check_trees([msgspec.structs.replace(TREE, **change)], 2)
