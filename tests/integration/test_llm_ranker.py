"""The small LLM as ranker: a real (random) LLM, frozen, whose vectors still tell kinds of prompts apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from ranker.errors import RankerFileError
from ranker.evaluate import evaluate
from ranker.lengths import split
from ranker.llm import BATCH_TOKENS, LlmRanker, PromptVectors, batches
from tests.fakes.length_logs import synthetic_lengths
from workers.models.random_model import build_qwen3_tiny

transformers_logging.disable_progress_bar()  # its monitor thread would outlive the test


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> PromptVectors:
    directory = tmp_path_factory.mktemp("llm")
    build_qwen3_tiny(directory)
    return PromptVectors(directory, dtype="float32")


def test_it_ranks_prompts_that_it_never_saw_and_survives_a_file(vectors: PromptVectors, tmp_path: Path):
    parts = split(synthetic_lengths(300), 0)
    ranker = LlmRanker.fit(vectors, parts.train, parts.validation)
    ids, texts = [sample.prompt_id for sample in parts.test], [sample.text for sample in parts.test]
    estimates = ranker.predict(ids, texts)
    assert evaluate(estimates, parts.test).kendall_tau > 0.5
    ranker.save(tmp_path / "head.bin")
    assert LlmRanker.load(tmp_path / "head.bin", vectors).predict(ids, texts) == estimates
    (tmp_path / "head.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(RankerFileError, match="is not the head"):
        LlmRanker.load(tmp_path / "head.bin", vectors)
    assert ranker.predict([], []) == []


def test_a_prompts_vector_is_its_own(vectors: PromptVectors):
    texts = ["one", "two words here", "", "a much longer prompt " * 200, "one"]
    together = vectors.vectors(texts)
    assert together[0] == pytest.approx(vectors.vectors(["one"])[0], abs=1e-4)
    assert together[0] == pytest.approx(together[4], abs=1e-4)
    assert together[0] != pytest.approx(together[1], abs=1e-2)


def test_every_prompt_is_in_one_batch_of_its_length():
    lengths = [5, 3, 5, 256, 3, 5] + [200] * 30
    parts = list(batches(lengths))
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len({lengths[index] for index in part}) == 1
        assert sum(lengths[index] for index in part) <= BATCH_TOKENS
