"""What is said of a rank's memory is what a rank takes; ``benchmarks/parallel_predicted.py`` compares more layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parallel_memory import step_bytes
from benchmarks.parallel_predicted import Case, measure, measure_all, said, training_of
from transport.contracts.training_memory import state_bytes

SMALL = Case(hidden=64, mlp=192, layers=2, words=512, prompt_tokens=40)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_states_and_peak_of_one_rank_are_as_predicted(family: str, dtype: str):
    case = Case(
        family=family, dtype=dtype, hidden=128, mlp=384, layers=3, words=2048, prompt_tokens=40, response_tokens=100
    )
    measured, predicted = measure(case), said(case)
    assert predicted.states / measured.states == pytest.approx(1.0, rel=0.01)
    assert 0.85 < predicted.total / measured.peak < 1.15


@pytest.mark.long  # a minute: the formula is one for all layouts, and one rank is measured above
@pytest.mark.parametrize(
    "cases",
    [
        [Case(tensor=2), Case(tensor=2, family="qwen3", recompute="selective")],
        [Case(pipeline=2), Case(pipeline=2, tied=True, recompute="whole")],
        [Case(data=2, tensor=2)],
    ],
    ids=lambda cases: str(cases[0].layout),
)
def test_several_ranks_take_what_is_said(cases: list[Case]):
    for case, measured in zip(cases, measure_all(cases[0].layout, cases), strict=True):
        predicted = state_bytes(case.llm, case.layout, training_of(case))
        assert predicted / measured.states == pytest.approx(1.0, rel=0.01), case
        assert 0.8 < said(case).total / measured.peak < 1.2, case


def test_a_long_sample_takes_memory_linear_in_its_tokens():
    shorter, longer = (step_bytes(replace(SMALL, samples=1, response_tokens=tokens)) for tokens in (2048, 4096))
    assert 1.8 < longer / shorter < 2.2


def test_recomputed_activations_are_not_there():
    deep = replace(SMALL, layers=8)
    none, selective, whole = (step_bytes(replace(deep, recompute=mode)) for mode in ("none", "selective", "whole"))
    assert whole / none < 0.4 < selective / none < 0.7


def test_more_loss_tokens_add_no_logits():
    """Of 4096 more tokens, the bf16 logits alone would be 134 MB."""
    wide = replace(SMALL, hidden=32, mlp=32, layers=1, words=16_384, samples=16)
    fewer, more = (step_bytes(replace(wide, response_tokens=tokens)) for tokens in (256, 512))
    assert more - fewer < 134e6 / 4
