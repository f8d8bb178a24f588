"""Training beside a run: a real process, its deadline, its failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from ranker.logs import PromptLengths, split
from ranker.model import TextModel
from ranker.online import OnlineRanker, refit_in_process
from ranker.protocol import RefitError
from tests.fakes.length_logs import synthetic_lengths

SAMPLES = synthetic_lengths(640)


def visit(ranker: OnlineRanker, samples: list[PromptLengths]) -> None:
    """One batch: predictions first, then what came."""
    ranker.predict([sample.prompt_id for sample in samples], [sample.text for sample in samples])
    for sample in samples:
        ranker.observe(sample.prompt_id, sample.tokens)


def unseen_texts() -> tuple[list[str], list[str]]:
    fresh = synthetic_lengths(40, seed=99)
    return [f"new{index}" for index in range(len(fresh))], [sample.text for sample in fresh]


def test_training_beside_the_run_teaches_the_text_of_prompts_never_seen():
    ranker = OnlineRanker()
    visit(ranker, SAMPLES)
    assert ranker.refit_due
    ids, texts = unseen_texts()
    before = {estimate.mean_tokens for estimate in ranker.predict(ids, texts)}
    ranker.refit(deadline_s=120.0)
    after = ranker.predict(ids, texts)
    assert len(before) == 1
    assert len({estimate.mean_tokens for estimate in after}) > 20
    assert ranker.quality().refits == 1
    assert not ranker.refit_due


def test_training_past_its_deadline_is_ended_and_the_old_model_stays():
    parts = split(SAMPLES[:300], 0)
    ranker = OnlineRanker(TextModel.fit(parts.train, parts.validation))
    visit(ranker, SAMPLES)
    ids, texts = unseen_texts()
    before = ranker.predict(ids, texts)
    with pytest.raises(RefitError, match="longer than"):
        ranker.refit(deadline_s=0.01)
    assert ranker.predict(ids, texts) == before
    assert not ranker.refit_due


def test_training_that_fails_says_why():
    with pytest.raises(RefitError, match="too few to learn from"):
        refit_in_process(None, SAMPLES[:2], 0, 50.0)


def test_a_refit_ends_with_the_process_that_wanted_it():
    reader, writer = os.pipe()  # open here, so that the child does not end of its own accord
    argv = "[sys.executable, '-m', 'ranker.online', str(os.getpid())]"
    starts = f"import os, subprocess, sys; print(subprocess.Popen({argv}, stdout=sys.stderr).pid)"
    try:
        parent = subprocess.run(
            [sys.executable, "-c", starts], stdin=reader, stdout=subprocess.PIPE, timeout=120, check=True
        )
        child = int(parent.stdout)
        deadline_s = time.monotonic() + 60.0
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "it outlives its parent"
            time.sleep(0.05)
    finally:
        os.close(reader)
        os.close(writer)
