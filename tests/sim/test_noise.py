"""Noise: nothing is faster for it, it is the same again, and it costs what it says."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from orchestrator.sim.costs import ASSUMED
from orchestrator.sim.lengths import long_tailed
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, scenario
from orchestrator.sim.simulate import simulate

WORKLOAD = Workload(lengths=long_tailed(128, seed=3, recall=0.87), batch=64)
LAYOUT = Layout(generation_gpus=16, training_gpus=32, ranks=2)


def end_s(noise: float, seed: int = 0) -> float:
    assumed = msgspec.structs.replace(ASSUMED, noise=noise)
    prepared = scenario(WORKLOAD, LAYOUT, PIPELINES["stream"], iterations=2, assumed=assumed)
    return simulate(replace(prepared, faults=replace(prepared.faults, seed=seed))).end_s


def test_slower_workers_and_micro_batches_make_a_run_longer_and_the_same_seed_the_same_run():
    quiet, noisy = end_s(0.0), end_s(0.05)
    assert quiet < noisy < 1.2 * quiet
    assert end_s(0.05) == noisy != end_s(0.05, seed=1)
