"""Figure ``partial``: tokens that are sampled twice because workers die, with partial rollouts over without them.

Real processes: two generation workers with the emulated engine, whose samples take ``LENGTH`` tokens of ``STEP_S``
each. Both are killed once, in the middle of their first samples, one after the other; the run then goes on to its end
and is audited. What a killed worker had sampled is the time from the dispatch of a group to the kill, counted up to
.2 s high and never low, in both runs; what went on from it is what rows say.

    python -m benchmarks.partial [--partial-s 1.0]

Last line: JSON. ``partial`` = tokens sampled twice, with over without; ``lost_tokens_*`` those tokens; ``audit_*``.
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
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.faults import of_role, send
from benchmarks.run import ROOT
from orchestrator.sim.replay import recorded_commands
from transport.contracts.messages import DispatchGroups, GroupPlan, RolloutFinished, WorkerLost
from transport.contracts.settings import GenerationSettings
from transport.contracts.types import row_id

LENGTH = 400
STEP_S = 0.15
KILL_AFTER_S = 40.0
"""From the first dispatch: two thirds of a sample."""
BETWEEN_S = 5.0
LIMIT_S = 400.0
SETTINGS: dict[str, object] = {
    "generation.engine": "emulated",
    "generation.workers": 2,
    "generation.slots": 32,
    "trainer.engine": "emulated",
    "sampling.max_new_tokens": LENGTH,
    "trainer.micro_batch_tokens": 65536,
    "pipeline.groups_per_batch": 16,
    "pipeline.group_size": 4,
    "pipeline.max_staleness": 0,
    "eval.problems": 0,
    "emulated.time_scale": 1.0,
    "emulated.step_s": STEP_S,
    "emulated.sample_step_s": 0,
}


class LimitPassedError(Exception):
    """The run did not come so far in time."""


def wait_for(holds: Callable[[], bool], what: str, run: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> float:
    """Poll. Returns when it did not hold yet, on the monotonic clock. Raises LimitPassedError."""
    before_s = asked_s = time.monotonic()
    deadline_s = asked_s + limit_s
    while not holds():
        if asked_s > deadline_s or run.poll() is not None:
            raise LimitPassedError(f"no {what} within {limit_s:.0f} s, or the run ended before")
        time.sleep(0.1)
        before_s, asked_s = asked_s, time.monotonic()
    return before_s


def first_dispatch_s(run_dir: Path) -> float | None:
    """On the run's clock; None: nothing was dispatched yet."""
    if not any((run_dir / "journal").glob("snapshot-*")):
        return None
    sent_s = (
        record.now_s
        for record, commands in recorded_commands(run_dir / "journal")
        if any(isinstance(one, DispatchGroups) for one in commands)
    )
    return next(sent_s, None)


def killed_run(directory: Path, partial_s: float) -> tuple[Path, list[float]]:
    """A run of one batch whose workers are both killed once. Returns its directory, and the kills: s from dispatch."""
    name = f"partial-{partial_s:g}"
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain"]
    command += ["--dir", str(directory), "--name", name, "--set", "run.batches=1"]
    for key, value in (SETTINGS | {"generation.partial_s": partial_s}).items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    killed_s: list[float] = []
    with (directory / f"{name}.log").open("wb") as log:
        run = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env=environment)
        try:
            dispatched_s = wait_for(lambda: first_dispatch_s(directory / name) is not None, "dispatch", run)
            workers = of_role(psutil.Process(run.pid).children(recursive=True), "generate")
            time.sleep(KILL_AFTER_S)
            for worker in workers:
                send(worker, signal.SIGKILL)
                killed_s.append(time.monotonic() - dispatched_s)
                time.sleep(BETWEEN_S)
            wait_for(lambda: run.poll() is not None, "end", run)
        except LimitPassedError:
            if run.poll() is None:
                raise
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(timeout=30)
    if run.returncode:
        raise SystemExit(f"the run ended with {run.returncode}:\n{(directory / f'{name}.log').read_text()[-2000:]}")
    return directory / name, killed_s


def sampled_twice(run_dir: Path, killed_s: list[float]) -> float:
    """Tokens that workers had sampled when they were killed, and nobody went on from.  killed_s: after the dispatch."""
    running: dict[str, dict[str, tuple[float, GroupPlan]]] = {}
    rows: set[str] = set()
    before: dict[str, float] = {}  # row: tokens that attempts at it had when they were lost
    resumed: dict[str, int] = {}
    num_lost = 0
    dispatched_s = first_dispatch_s(run_dir) or 0.0
    for record, commands in recorded_commands(run_dir / "journal"):
        event = record.event
        if isinstance(event, RolloutFinished):
            rows.add(event.row_id)
            resumed[event.row_id] = event.resumed_tokens
        if isinstance(event, WorkerLost) and event.worker_id in running and not event.left:
            ended_s = dispatched_s + killed_s[num_lost]
            num_lost += 1
            for since_s, plan in running.pop(event.worker_id).values():
                for row in (row_id(plan.group_id, sample) for sample in plan.samples):
                    if row not in rows:
                        before[row] = before.get(row, 0.0) + min(LENGTH, max(0.0, ended_s - since_s) / STEP_S)
        for one in commands:
            if isinstance(one, DispatchGroups):
                plan = one.plans[0]
                running.setdefault(one.worker_id, {})[plan.group_id] = (record.now_s, plan)
    if num_lost < 2:
        raise SystemExit(f"{num_lost} workers of 2 were lost: the run proves nothing")
    return sum(max(0.0, tokens - resumed[row]) for row, tokens in before.items())


def audit(run_dir: Path) -> bool:
    command = [sys.executable, "-m", "orchestrator", "inspect", str(run_dir), "--audit"]
    return subprocess.run(command, cwd=run_dir.parent, capture_output=True, check=False, timeout=120).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partial-s", type=float, default=GenerationSettings().partial_s, help="period, seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        lost: dict[str, float] = {}
        audits: dict[str, bool] = {}
        for name, partial_s in (("without", 0.0), ("with", options.partial_s)):
            run_dir, killed_s = killed_run(Path(directory), partial_s)
            lost[name], audits[name] = sampled_twice(run_dir, killed_s), audit(run_dir)
            print(f"{name} partial rollouts: {lost[name]:.0f} tokens were sampled twice", flush=True)
    figures: dict[str, float | bool] = {"partial": round(lost["with"] / lost["without"], 4)}
    figures |= {f"lost_tokens_{name}": round(tokens) for name, tokens in lost.items()}
    print(json.dumps(figures | {f"audit_{name}": passed for name, passed in audits.items()}))


if __name__ == "__main__":
    main()
