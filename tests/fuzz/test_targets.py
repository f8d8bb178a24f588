"""A short slice of every fuzz target: what once failed, inputs of a fixed seed, and as many of a fresh one.

``make fuzz`` goes on from here for minutes. A seed that failed is in the failure; the input is kept as it says.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.harness import CheckFailedError, Target, failure_of, fuzz, save, unopened
from tests.fuzz.targets import TARGETS

FRESH = random.randrange(2**31)


@pytest.mark.parametrize("seed", [1, FRESH], ids=["fixed", "fresh"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_falls(target: Target, seed: int):
    tried = fuzz(target, seed, max_inputs=target.num_inputs)
    assert tried.num_inputs >= target.num_inputs
    if tried.failures:
        directory = Path(tempfile.mkdtemp(prefix="streamrl-fuzz-"))
        kept = [f"{failure.place}: {save(failure, directory)}\n{failure.report}" for failure in tried.failures.values()]
        again = f"python -m tests.fuzz --target {target.name} --input FILE"
        pytest.fail("\n".join([f"{target.name}, seed {seed}; to try one again: {again}", *kept]))


def test_what_falls_is_found_once_and_kept(tmp_path: Path):
    """A target that cannot take an x: fuzzing finds it by its place, and the file that is kept falls again."""

    def check(content: bytes) -> None:
        if b"x" in content:
            raise CheckFailedError("an x came")

    target = Target(name="x", make=lambda source: source.choice((b"x", b"y")), opened=unopened(check), num_inputs=50)
    tried = fuzz(target, 3, max_inputs=50)
    (failure,) = tried.failures.values()
    assert tried.num_inputs == 50
    assert failure_of(check, save(failure, tmp_path).read_bytes()) is not None
    assert fuzz(target, 3, max_inputs=50).failures.keys() == tried.failures.keys()


def test_an_input_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.fuzz.harness.MAX_CPU_S", 0.1)

    def check(content: bytes) -> None:
        while True:
            pass

    failure = failure_of(check, b"")
    assert failure is not None
    assert "HungError" in failure.place
