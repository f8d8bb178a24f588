"""Figure ``pipeline``: seconds per iteration of each pipeline mode over the slower stage's own time.

Real processes (orchestrator, broker, two generation workers, scoring, trainer) with the emulated engine and the
emulated trainer: what is emulated is only how long decoding, training and the transfer of weights take. Lengths are
pinned in ``long_tail_lengths.txt``, the same in every batch; the training cost is set so that both stages take equally
long.

A stage's own time is what it needs for one batch when nothing else takes any time: of generation, from the first
dispatch of a batch to its last sample; of training, the trainer's busy seconds in the serial run.

    python -m benchmarks.pipeline [--modes serial,stream] [--batches 6]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.run import ROOT, call, read_batches
from orchestrator.sim.replay import recorded_commands
from transport.contracts.messages import DispatchGroups, RolloutFinished

LENGTHS = Path(__file__).with_name("long_tail_lengths.txt")
TIME_SCALE = 0.5
"""The emulated hardware takes some 10 s an iteration, we some 5 s."""
WARM_UP = 2
"""Batches that are not counted: the pipeline fills."""
LIMIT_S = 300.0
ROUND_S = 0.02

WORKLOAD: dict[str, object] = {
    "generation.engine": "emulated",
    "generation.workers": 2,
    "generation.slots": 32,
    "generation.lengths": LENGTHS,
    "trainer.engine": "emulated",
    "trainer.micro_batch_tokens": 4096,
    "trainer.checkpoint_every": 1000,
    "sampling.max_new_tokens": 400,
    "pipeline.groups_per_batch": 32,
    "pipeline.group_size": 4,
    "data.size": 512,
    "eval.problems": 0,
    "emulated.time_scale": TIME_SCALE,
    "emulated.step_s": 0.015,
    "emulated.sample_step_s": 0.0003,
}
NOTHING_ELSE: dict[str, object] = {
    "emulated.round_s": 0,
    "emulated.train_token_s": 0,
    "emulated.optimizer_s": 0,
    "emulated.load_s": 0,
}

SYNCHRONOUS: dict[str, object] = {"pipeline.max_staleness": 0, "pipeline.update": "barrier"}
ONE_STEP: dict[str, object] = {"pipeline.max_staleness": 1, "pipeline.update": "barrier"}
MODES: dict[str, dict[str, object]] = {
    "serial": SYNCHRONOUS | {"pipeline.release": "batch"},
    "batch": ONE_STEP | {"pipeline.rollout_batches": 2},
    "mini_batch": SYNCHRONOUS | {"pipeline.release": "mini_batch", "pipeline.mini_batch_groups": 8},
    "stream": SYNCHRONOUS,
    "one_step_batch": ONE_STEP | {"pipeline.release": "batch"},
    "full_async": ONE_STEP,
    "in_flight": {"pipeline.max_staleness": 1, "pipeline.update": "in_flight"},
}
"""As in docs/modes.md; ``batch`` is the enlarged rollout batch: two batches generated with one version."""


class Runs:
    """Runs of the workload, one at a time. directory: for what they write.  batches: of each."""

    def __init__(self, directory: Path, batches: int) -> None:
        self._directory = directory
        self._batches = batches

    def run(self, name: str, *changes: Mapping[str, object]) -> Path:
        """Run the workload with these settings to its end. Returns its directory."""
        settings: dict[str, object] = dict(WORKLOAD)
        for change in changes:
            settings |= change
        command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain"]
        command += ["--dir", str(self._directory), "--name", name, "--set", f"run.batches={self._batches}"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        call(command, cwd=self._directory, env=environment, limit_s=LIMIT_S, keep=True)
        return self._directory / name


def generation_s(run_dir: Path) -> float:
    """Seconds from the first dispatch of a batch to its last sample, mean over the counted batches."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for record, commands in list(recorded_commands(run_dir / "journal")):
        if isinstance(record.event, RolloutFinished):
            last[int(record.event.row_id.partition("/")[0])] = record.now_s
        for command in commands:
            if isinstance(command, DispatchGroups):
                first.setdefault(command.plans[0].batch, record.now_s)
    return fmean(last[batch] - first[batch] for batch in sorted(last)[WARM_UP:])


def iteration_s(batches: Sequence[Mapping[str, Any]]) -> float:
    """Seconds per iteration between the end of the warm-up and the end of the run."""
    counted = batches[WARM_UP - 1 :]
    return (counted[-1]["time_s"] - counted[0]["time_s"]) / (len(counted) - 1)


def training_costs(stage_s: float, tokens: int) -> dict[str, object]:
    """Costs with which training a batch takes as long as generating it, and its weights a twentieth of that."""
    emulated_s = stage_s / TIME_SCALE
    fixed_s = 0.02 * emulated_s
    return {
        "emulated.optimizer_s": round(fixed_s, 3),
        "emulated.round_s": ROUND_S,
        "emulated.train_token_s": round((emulated_s - fixed_s - ROUND_S * 6) / tokens, 8),
        "emulated.transfer_s": round(0.05 * emulated_s, 3),
        "emulated.load_s": round(0.005 * emulated_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--batches", type=int, default=6, help=f"of each run; {WARM_UP} of them are not counted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        runs = Runs(Path(directory), options.batches)
        alone = runs.run("generation-alone", SYNCHRONOUS, NOTHING_ELSE)
        generating_s = generation_s(alone)
        costs = training_costs(generating_s, int(read_batches(alone / "metrics.jsonl")[-1]["tokens_in_steps"]))
        print(f"generation alone: {generating_s:.2f} s a batch; training set to {costs}", flush=True)
        seconds: dict[str, float] = {}
        stage_s = generating_s
        for mode in options.modes.split(","):
            batches = read_batches(runs.run(mode, costs, MODES[mode]) / "metrics.jsonl")
            seconds[mode] = iteration_s(batches)
            training_s = fmean(batch["train_s"] for batch in batches[WARM_UP:])
            if mode == "serial":
                stage_s = max(generating_s, training_s)
            print(
                f"{mode}: {seconds[mode]:.2f} s an iteration, training {training_s:.2f} s, "
                f"staleness {batches[-1]['staleness']:.2f}",
                flush=True,
            )
    figures: dict[str, float] = {mode: round(value / stage_s, 3) for mode, value in seconds.items()}
    print(json.dumps(figures | {"stage_s": round(stage_s, 2)}))


if __name__ == "__main__":
    main()
