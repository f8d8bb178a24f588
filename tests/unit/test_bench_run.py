"""What the figure ``run`` makes of metrics files and of several seeds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.run import call, no_gradient_share, read_batches, rise, summary


def test_the_rise_is_read_from_the_surviving_lineage(tmp_path: Path) -> None:
    rights = [0.0, 0.1, 0.2, 0.9, 0.3, 0.5, 0.5, 0.5, 0.7]
    lines = [{"batch": batch, "epoch": 1, "right": right} for batch, right in enumerate(rights)]
    lines[-1] |= {"right": 0.1, "right_with_filtered": 0.7}
    again = {"batch": 3, "epoch": 2, "right": 0.4}  # trained again after a restart: the first line no longer counts
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, again]))
    figures = rise(read_batches(tmp_path / "metrics.jsonl"))
    assert figures == {
        "well_formed_first3": None,
        "well_formed_last5": None,
        "right_first3": pytest.approx(0.1),
        "right_last5": pytest.approx(0.5),
    }


def test_batches_whose_gradient_is_zero_are_counted() -> None:
    assert no_gradient_share([{"grad_norm": 0.0}, {"grad_norm": 1e-9}, {"grad_norm": 2.0}, {}]) == 0.25
    assert no_gradient_share([{"rows_in_steps": 0}, {"rows_in_steps": 8}]) == 0.5


def test_the_summary_has_the_named_keys_and_medians() -> None:
    names = ["seconds_total", "well_formed_first3", "well_formed_last5", "right_first3", "right_last5"]
    names += ["no_gradient_share", "eval_before", "eval_after"]
    seeds = {seed: dict.fromkeys(names, value) for seed, value in enumerate([3.0, 1.0, 2.0])}
    figures = summary(seeds)
    assert list(figures) == [*names, "seeds"]
    assert {figures[name] for name in names} == {2.0}
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1, 2]


def test_a_run_over_its_limit_is_stopped_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.run.STOP_S", 1.0)  # an interpreter that is still starting swallows SIGINT
    child = "import time; print('up', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(SystemExit, match="limit"):
        call([sys.executable, "-c", parent], cwd=tmp_path, env=os.environ, limit_s=1.0)


def test_a_run_that_fails_ends_the_bench(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="failed with 3"):
        call([sys.executable, "-c", "raise SystemExit(3)"], cwd=tmp_path, env=os.environ, limit_s=30.0)
    assert call(["echo", "kept"], cwd=tmp_path, env=os.environ, limit_s=30.0, keep=True) == "kept\n"
