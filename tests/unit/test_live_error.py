"""The comparison of simulation and reality: which settings it has, and that its simulated half follows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.live_error import (
    CALIBRATION,
    SETTINGS,
    WARM_UP,
    Overheads,
    Setting,
    iterations_s,
    off_by,
    predicted,
)
from orchestrator.config.load import resolve

NO_OVERHEADS = Overheads(dispatch_s=0.0, scoring_s=0.0, load_s=0.0, publish_s=0.0)


def simulated_s(setting: Setting, found: Overheads = NO_OVERHEADS) -> float:
    settings = resolve("tiny", [], setting.overrides(Path(".")), {}).settings
    return fmean(predicted(setting, settings, found, None))


@pytest.mark.parametrize("setting", [*SETTINGS, *CALIBRATION.values()], ids=lambda setting: setting.name)
def test_every_setting_is_one_that_a_run_takes(setting: Setting):
    settings = resolve("tiny", [], setting.overrides(Path(".")), {}).settings
    assert (settings.generation.engine, settings.generation.workers) == (setting.engine, setting.workers)
    assert settings.run.batches == setting.batches
    once = replace(setting, iterations=1 - WARM_UP)
    assert resolve("tiny", [], once.overrides(Path(".")), {}).settings.run.batches == 1, "--check"


def test_a_version_that_is_long_on_its_way_delays_those_who_would_take_it_at_once():
    def slower(mode: str) -> float:
        setting = next(one for one in SETTINGS if one.mode == mode and one.transfer_s)
        return simulated_s(setting) / simulated_s(replace(setting, transfer_s=0.0))

    assert slower("fully_async") < 1.05, "it comes while the batch before is generated"
    assert slower("in_flight") > 1.05, "there are two batches under way, and the next waits for the version"


def test_memory_that_holds_a_third_of_the_slots_is_reckoned_with():
    setting = next(one for one in SETTINGS if one.kv_tokens and one.engine == "emulated")
    free = replace(setting, kv_tokens=0)
    assert setting.lengths() == free.lengths()
    assert simulated_s(setting) > 1.2 * simulated_s(free)


def test_neither_the_first_batches_nor_one_that_was_held_up_count():
    assert iterations_s([5.0, 9.0, 10.0, 12.0]) == [1.0, 2.0]
    assert off_by([1.1, 2.2, 1.1], [1.0, 2.0, 9.0]) == pytest.approx(0.1)
