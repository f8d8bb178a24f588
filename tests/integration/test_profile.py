"""``streamrl-orchestrator profile`` with real workers: it finds what the emulated engine was told, and writes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from orchestrator.planning.profiles import read_profile
from tests.fakes.command_line import orchestrator
from transport.contracts.llms import Fp8


def profile(directory: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    changes = [part for setting in settings for part in ("--set", setting)]
    return orchestrator("profile", "--preset", "tiny", "--out", str(directory / "here"), *changes, cwd=directory)


def test_the_emulated_engine_is_measured_as_it_was_told(tmp_path: Path):
    told = (
        "generation.engine=emulated",
        "generation.slots=8",
        "generation.max_context=600",
        "emulated.time_scale=0.02",
        "emulated.step_s=0.05",
    )
    done = profile(tmp_path, *told, "emulated.sample_step_s=0.005")
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path / "here.json").measured.decode
    for batch in (1, 5, 8):
        assert found.step_s(batch, 100.0 * batch) == pytest.approx(0.02 * (0.05 + 0.005 * batch), rel=0.15)
    assert found.prefill_token_s < 5e-4, "a step takes 1 ms and more, a prompt nothing but noise"
    assert "[decode_cost]" in (tmp_path / "here.toml").read_text()
    assert "held-out error on batches that a fit did not see" in done.stdout
    assert re.search(r"10 of \d+ measured in", done.stderr), "what it does is shown meanwhile"


def test_an_engine_is_measured_once_more_with_fp8_and_plans_choose_it(tmp_path: Path):
    told = (
        "generation.engine=emulated",
        "generation.slots=4",
        "generation.max_context=300",
        "emulated.time_scale=0.01",
    )
    changes = [part for setting in told for part in ("--set", setting)]
    out = tmp_path / "here"
    done = orchestrator("profile", "--preset", "tiny", "--out", str(out), "--fp8-kv", *changes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the engine once more, with --fp8-kv" in done.stdout
    profile = read_profile(out.with_suffix(".json"))
    (variant,) = profile.variants
    assert (variant.fp8, variant.slots) == (Fp8(kv=True), 4)
    assert variant.decode_cost.fixed_s > 0


def test_what_cannot_hold_fp8_is_refused_before_anything_is_measured(tmp_path: Path):
    done = orchestrator("profile", "--preset", "tiny", "--out", str(tmp_path / "here"), "--fp8-kv", cwd=tmp_path)
    assert done.returncode == 2
    assert "fp8 needs generation.engine" in done.stderr


def test_an_engine_of_too_few_slots_is_refused(tmp_path: Path):
    done = profile(tmp_path, "generation.engine=emulated", "generation.slots=1", "emulated.time_scale=0.01")
    assert done.returncode == 2
    assert "generation.slots must be at least" in done.stderr
    assert not (tmp_path / "here.json").exists()


def test_an_engine_of_too_short_samples_is_refused(tmp_path: Path):
    done = profile(tmp_path, "generation.max_context=40", "generation.slots=4", "sampling.max_new_tokens=8")
    assert done.returncode != 0
    assert "too short to profile: 68 are needed" in done.stderr
