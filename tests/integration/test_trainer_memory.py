"""What is said of a rank's memory is what a rank takes; ``benchmarks/parallel_predicted.py`` compares more layouts."""

from __future__ import annotations

import pytest

from benchmarks.parallel_predicted import Case, measure, said


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_states_and_peak_of_one_rank_are_as_predicted(family: str, dtype: str):
    case = Case(
        family=family, dtype=dtype, hidden=128, mlp=384, layers=3, words=2048, prompt_tokens=40, response_tokens=100
    )
    measured, predicted = measure(case), said(case)
    assert predicted.states / measured.states == pytest.approx(1.0, rel=0.01)
    assert 0.85 < predicted.total / measured.peak < 1.15
