"""Figure ``core``: events a second through ``PipelineState.handle``, whether a replay decides the same, and the memory
that a million rollouts take (million.py).

The stream is a whole simulated run of thousands of groups on 32 workers, with kills, failures and repeated events,
recorded once and then fed to fresh states. Seconds are those of the one core that decides (CPU time), and the best of a
few passes counts, because whatever else runs on the machine only ever makes it slower.

    python -m benchmarks.core [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

from benchmarks.million import memory_of
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.journal import Journal
from orchestrator.sim.engine import FaultModel, Scenario, SimulationLog
from orchestrator.sim.replay import recorded_commands
from orchestrator.sim.simulate import simulate
from tests.fakes.histories import digest

PASSES = 5
JOURNAL_BATCH = 512


def scenario(num_batches: int) -> Scenario:
    """256 groups of 8 a batch on 32 workers, one step asynchronous, weights taken in flight, a few faults."""
    core = CoreSettings(
        num_batches=num_batches, groups_per_batch=256, group_size=8, max_staleness=1, micro_batch_tokens=32768
    )
    faults = FaultModel(worker_loss_s=600.0, rollout_failure=0.002, repeat=0.01, until_s=1e9)
    return Scenario(core=core, workers=32, capacity=64, dp_size=4, faults=faults, max_s=1e9)


def events_per_s(log: SimulationLog) -> float:
    """Feed the recorded events to a fresh state, several times; the fastest pass."""
    events = [(record.event, record.now_s) for record, _ in log.history]
    best_s = float("inf")
    for _ in range(PASSES):
        state = PipelineState.restore(log.initial)
        gc.collect()
        gc.freeze()  # the recording is not part of a live orchestrator's memory
        started_s = time.process_time()
        for event, now_s in events:
            state.handle(event, now_s)
        best_s = min(best_s, time.process_time() - started_s)
        gc.unfreeze()
    return len(events) / best_s


def replay_identical(log: SimulationLog) -> bool:
    """Journal the run to disk, replay the journal, compare every command."""
    with tempfile.TemporaryDirectory() as directory:
        journal, _ = Journal.open(Path(directory))
        journal.snapshot(log.initial, 0)
        records = [record for record, _ in log.history]
        for start in range(0, len(records), JOURNAL_BATCH):
            journal.append(records[start : start + JOURNAL_BATCH])
        journal.close()
        return digest(recorded_commands(Path(directory))) == digest(log.history)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller run")
    quick = parser.parse_args().quick
    num_batches = 4 if quick else 20
    num_rollouts = 100_000 if quick else 1_000_000
    memory = memory_of(num_rollouts)  # first: what the other parts record would be reused by it
    print(f"{num_rollouts:,} rollouts: {memory.early_mb:.1f} MB after the first tenth, {memory.peak_mb:.1f} MB at most")
    log = simulate(scenario(num_batches))
    groups = len(log.trained) * scenario(num_batches).core.groups_per_batch
    print(f"{len(log.history)} events of a run of {groups} groups on 32 workers, {log.end_s:.0f} virtual seconds")
    rate = events_per_s(log)
    print(f"{rate:,.0f} events/s through handle")
    peak_mb = {} if quick else {"peak_mb_million": round(memory.peak_mb, 1)}
    print(json.dumps({"events_per_s": round(rate), **peak_mb, "replay_identical": replay_identical(log)}))


if __name__ == "__main__":
    main()
