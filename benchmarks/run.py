"""Figure ``run``: what a newcomer sees. ``make run`` in a fresh clone with empty caches, and what the model learned.

Every seed pays for making the model ready, as on a bare machine; the set-up is timed once and counted in every seed's
``seconds_total``. Means over the first 3 and the last 5 batches, with the groups that were filtered, come from
``metrics.jsonl``; the held-out problems are answered by the model before and after, greedily, outside of the time that
is measured.

    python -m benchmarks.run [--seeds 0,1,2] [--preset smollm2] [--in-place] [--args "--set trainer.lr=2e-5"]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from orchestrator.observability.metrics import taught_nothing

ROOT = Path(__file__).parents[1]
FIRST, LAST = 3, 5
SETUP_LIMIT_S = 1800.0
EVALUATE_LIMIT_S = 600.0
STOP_S = 30.0

Metrics = Sequence[Mapping[str, Any]]
Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """checkout: where ``make`` is called.  work: caches and runs, empty at first.  limit_s: for one run."""

    checkout: Path
    work: Path
    preset: str
    arguments: str
    limit_s: float

    def environment(self, seed: int | None = None) -> dict[str, str]:
        """Ours, without what an outer ``make bench`` hands down, and with caches that start empty."""
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        }
        return inherited | {
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "STREAMRL_CACHE": str(self.work / f"models-{seed}"),
        }

    def set_up(self) -> float:
        """Seconds of the set-up of ``make run``."""
        started_s = time.perf_counter()
        call(["make", ".venv/.ready-run"], cwd=self.checkout, env=self.environment(), limit_s=SETUP_LIMIT_S)
        return time.perf_counter() - started_s

    def measure(self, seed: int, setup_s: float) -> Figures:
        """One seed's figures."""
        name = f"bench-{self.preset}-{seed}"
        arguments = f"--plain --dir {self.work}/runs --name {name} --set run.seed={seed} {self.arguments}"
        command = ["make", "run", f"PRESET={self.preset}", f"ARGS={arguments}"]
        started_s = time.perf_counter()
        call(command, cwd=self.checkout, env=self.environment(seed), limit_s=self.limit_s)
        seconds_s = time.perf_counter() - started_s
        run_dir = self.work / "runs" / name
        before, after = (self.evaluate(seed, run_dir, model) for model in ("base", "final"))
        return {
            "seconds_total": round(setup_s + seconds_s, 1),
            **rise(batches := read_batches(run_dir / "metrics.jsonl")),
            "no_gradient_share": no_gradient_share(batches),
            "eval_before": before.get("right"),
            "eval_after": after.get("right"),
            "eval_well_formed_before": before.get("well_formed"),
            "eval_well_formed_after": after.get("well_formed"),
        }

    def evaluate(self, seed: int, run_dir: Path, model: str) -> dict[str, float]:
        """Mean reward components of ``model`` on the run's held-out problems."""
        command = [".venv/bin/streamrl-worker", "evaluate", "--run-dir", str(run_dir), "--model", model]
        output = call(command, cwd=self.checkout, env=self.environment(seed), limit_s=EVALUATE_LIMIT_S, keep=True)
        print(f"evaluated {model}: {output.strip()}", flush=True)
        return json.loads(output.strip().splitlines()[-1])


def call(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], limit_s: float, keep: bool = False) -> str:
    """Run a command to its end. Returns its output if it is to be kept, else lets it through to ours.

    Raises SystemExit when it fails, or when it takes longer than ``limit_s``; then it is asked to stop, and all that it
    has started is killed after STOP_S.
    """
    stdout = subprocess.PIPE if keep else None
    process = subprocess.Popen(command, cwd=cwd, env=dict(env), stdout=stdout, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as ending:
        stop(process)
        raise SystemExit(f"{command[0]} was stopped: {type(ending).__name__} (limit {limit_s:.0f} s)") from None
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return output or ""


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and its whole session."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_batches(path: Path) -> list[dict[str, Any]]:
    """The batches of the surviving lineage in order: of one that was trained again, the last line counts."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_batch = {line["batch"]: line for line in lines if "batch" in line}  # without those of evaluations
    return [by_batch[batch] for batch in sorted(by_batch)]


def rise(batches: Metrics) -> Figures:
    """Means of the first and last batches; None for a component that the run's reward does not have."""
    parts = {f"first{FIRST}": batches[:FIRST], f"last{LAST}": batches[-LAST:]}
    return {f"{name}_{part}": mean_of(name, some) for name in ("well_formed", "right") for part, some in parts.items()}


def no_gradient_share(batches: Metrics) -> float:
    """Share of all batches that taught nothing."""
    return round(sum(map(taught_nothing, batches)) / len(batches), 4)


def mean_of(name: str, batches: Metrics) -> float | None:
    """Over the answers of filtered groups, too: those that are trained alone are the ones that are partly right."""
    values = [batch.get(f"{name}_with_filtered", batch[name]) for batch in batches if name in batch]
    return round(fmean(values), 4) if values else None


def summary(seeds: Mapping[int, Figures]) -> dict[str, Any]:
    """Per figure the median over the seeds, and each seed's own figures."""
    names = (
        "seconds_total",
        *(f"{name}_{part}" for name in ("well_formed", "right") for part in (f"first{FIRST}", f"last{LAST}")),
        "no_gradient_share",
        "eval_before",
        "eval_after",
    )
    known = {name: [value for figures in seeds.values() if (value := figures[name]) is not None] for name in names}
    medians = {name: median(values) if values else None for name, values in known.items()}
    return medians | {"seeds": [{"seed": seed, **figures} for seed, figures in seeds.items()]}


def clone(target: Path) -> Path:
    """A fresh clone of the last commit of this checkout."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if changed.stdout:
        print("the clone holds the last commit; this checkout has uncommitted changes", file=sys.stderr)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--preset", default="smollm2")
    parser.add_argument("--args", default="", help="further arguments of streamrl-orchestrator run")
    parser.add_argument("--in-place", action="store_true", help="use this checkout and its .venv, not a clone")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for one run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        work = Path(directory)
        checkout = ROOT if options.in_place else clone(work / "clone")
        bench = Bench(
            checkout=checkout, work=work, preset=options.preset, arguments=options.args, limit_s=options.limit_s
        )
        setup_s = bench.set_up()
        seeds: dict[int, Figures] = {}
        for seed in map(int, options.seeds.split(",")):
            seeds[seed] = bench.measure(seed, setup_s)
            print(f"seed {seed}: {json.dumps(seeds[seed])}", flush=True)
    print(json.dumps(summary(seeds)))


if __name__ == "__main__":
    main()
