"""Every documented value works, or is refused before anything starts: a drawn part of the bench ``settings``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.settings import Trial, all_values, is_refused, values_of
from orchestrator.config.schema import FIELDS
from tests.fakes.command_line import REPOSITORY

RUNS, DRAWS = 12, 4
"""Single values and pairs: about 5 minutes on two idle cores."""


def test_values_come_from_the_types():
    values, free = all_values()
    assert {one.key for one in values} | {*free} >= FIELDS.keys()
    assert [*values_of(FIELDS["trainer.lora.rank"].type)] == [(0, True), (1, True), (-1, False)]
    assert dict(values_of(FIELDS["algorithm.loss"].type)).keys() == {"ppo_clip", "cispo", "gspo", "sequence_clip"}
    assert {one.key for one in values if one.skipped} < {one.key for one in values}


def test_what_a_type_forbids_is_refused_and_a_default_is_not():
    values, _ = all_values()
    forbidden = [one for one in values if not one.allowed]
    assert len(forbidden) > 100
    assert [str(one) for one in forbidden if not is_refused(Trial(values=(one,)))] == []


@pytest.mark.long
def test_a_drawn_part_of_all_values_works():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.settings", "--sample", str(RUNS), "--draws", str(DRAWS)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout.splitlines()[-1])["faults"] == 0, done.stdout + done.stderr
