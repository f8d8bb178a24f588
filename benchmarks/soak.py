"""Figure ``soak``: emulated hardware at full speed for long, a fault every few seconds, nothing lost and nothing grown.

Real processes with the emulated engine and the emulated trainer, whose hardware takes almost no time: the orchestrator,
the broker and the workers' own code are what works. Every ``--every`` seconds comes one fault, drawn with a fixed seed:
a kill of any process of the run but the supervisor, or a stall (SIGSTOP for some seconds). At the end the audit must be
clean; memory, open descriptors and the broker's size are read all along and compared between the second quarter and the
last.

    python -m benchmarks.soak [--minutes 30] [--every 10] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.faults import ROLES, SIGNALS, How, of_role, send
from benchmarks.run import ROOT, read_batches

STALL_S = 3.0
STOP_S = 300.0
"""For the processes to leave and for the report, which takes half a minute after a long run."""
SAY_S = 60.0
SAMPLE_S = 5.0
SETTINGS: dict[str, object] = {
    "run.name": "soak",
    "run.batches": 1_000_000,
    "generation.engine": "emulated",
    "generation.workers": 2,
    "generation.slots": 32,
    "trainer.engine": "emulated",
    "trainer.checkpoint_every": 10,
    "pipeline.groups_per_batch": 16,
    "pipeline.group_size": 4,
    "pipeline.rollout_timeout_s": 20.0,
    "sampling.max_new_tokens": 64,
    "data.size": 512,
    "eval.problems": 0,
    "liveness.lease_s": 5.0,
    "liveness.stall_s": 120.0,
    "liveness.max_restarts": 1000,
    "scoring.lease_s": 4.0,
    "emulated.step_s": 0.0005,
    "emulated.sample_step_s": 0.0,
    "emulated.round_s": 0.001,
    "emulated.train_token_s": 0.0,
    "emulated.optimizer_s": 0.005,
    "emulated.load_s": 0.001,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the run occupies at one moment. rss_mb, descriptors: of all its processes but the broker."""

    at_s: float
    rss_mb: float
    descriptors: int
    broker_mb: float


class Soak:
    """One run and the faults that it gets."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.readings: list[Reading] = []
        command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain", "--dir", str(directory)]
        for key, value in SETTINGS.items():
            command += ["--set", f"{key}={json.dumps(value) if isinstance(value, str) else value}"]
        with (directory / "out.log").open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def say(self, at_s: float) -> None:
        """Where it stands, for whoever waits for it."""
        last = self.readings[-1]
        batches = len(read_batches(self._directory / "soak" / "metrics.jsonl"))
        print(
            f"{at_s / 60:.0f} min: {batches} batches, {sum(self.faults.values())} faults, {last.rss_mb:.0f} MB, "
            f"{last.descriptors} descriptors, broker {last.broker_mb:.0f} MB",
            flush=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        try:
            supervisor = psutil.Process(self._process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def disturb(self) -> None:
        """One fault: of what kind, and whom it hits, is drawn."""
        role = self._random.choice(tuple(ROLES))
        victims = of_role(self.processes(), role)
        if not victims:
            return  # it is just being started again
        victim = self._random.choice(victims)
        how = How.STOP if self._random.random() < 0.3 else How.KILL
        self.faults[f"{how} {role}"] += 1
        if send(victim, SIGNALS[how]) and how is How.STOP:
            time.sleep(STALL_S)
            send(victim, signal.SIGCONT)

    def read(self, at_s: float) -> None:
        """Take note of what the run occupies now."""
        rss, descriptors, broker = 0, 0, 0
        processes = self.processes()
        brokers = of_role(processes, "broker")
        for process in processes:
            try:
                memory = process.memory_info().rss
                if process in brokers:
                    broker += memory
                else:
                    rss += memory
                    descriptors += process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.readings.append(Reading(at_s=at_s, rss_mb=rss / 1e6, descriptors=descriptors, broker_mb=broker / 1e6))

    def stop(self) -> int:
        """Interrupt the run, as its user would. Returns its exit code: 130, unless it had ended by itself."""
        if self.alive:
            self._process.send_signal(signal.SIGINT)
        return self._process.wait(timeout=STOP_S)


def growth(readings: Sequence[Reading], name: str) -> float:
    """The median of the last quarter over that of the second: the first still fills caches."""
    quarter = max(1, len(readings) // 4)
    values = [float(getattr(reading, name)) for reading in readings]
    return median(values[-quarter:]) / max(1e-9, median(values[quarter : 2 * quarter]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-soak-") as name:
        directory = Path(name)
        soak = Soak(directory, arguments.seed)
        started_s = time.monotonic()
        next_fault_s, next_say_s = 30.0, SAY_S
        while soak.alive and (at_s := time.monotonic() - started_s) < 60 * arguments.minutes:
            soak.read(at_s)
            if at_s >= next_fault_s:
                soak.disturb()
                next_fault_s = at_s + arguments.every
            if at_s >= next_say_s:
                soak.say(at_s)
                next_say_s = at_s + SAY_S
            time.sleep(min(SAMPLE_S, arguments.every / 2))
        survived = soak.alive
        code = soak.stop()
        batches = read_batches(directory / "soak" / "metrics.jsonl")
        audit = subprocess.run(
            [sys.executable, "-m", "orchestrator", "inspect", str(directory / "soak"), "--audit"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        print(audit.stdout, audit.stderr, dict(soak.faults), f"exit {code}", sep="\n")
        if not survived:
            print((directory / "out.log").read_text(errors="replace")[-3000:])
        figures = {
            "minutes": round((time.monotonic() - started_s) / 60, 1),
            "faults": sum(soak.faults.values()),
            "batches": len(batches),
            "survived": survived,
            "audit_clean": audit.returncode == 0,
            "rss_growth": round(growth(soak.readings, "rss_mb"), 3),
            "descriptor_growth": round(growth(soak.readings, "descriptors"), 3),
            "broker_growth": round(growth(soak.readings, "broker_mb"), 3),
            "rss_mb": round(soak.readings[-1].rss_mb),
            "broker_mb": round(soak.readings[-1].broker_mb),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
