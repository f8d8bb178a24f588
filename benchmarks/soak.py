"""Figure ``soak``: one run for an hour or a night, with faults all along: nothing is lost, trained twice, or grows.

Real processes with the emulated engine and the emulated trainer, whose hardware takes almost no time: the supervisor,
the orchestrator, the broker and the workers' own code are what works. Time passes in rounds of an hour (one shorter
round, where less is asked for). In the first half of a round a process is hit every ``--every`` seconds, drawn with a
fixed seed: killed, or stopped (SIGSTOP) for some seconds; where it is the supervisor, ``--resume`` follows. In the
second half processes are only stopped, so that each grows old enough to show what it gathers. At the end the run is
resumed once more, trains its last batches, and is audited twice, by ``inspect --audit`` and by ``plain_audit.py``,
which share no code.

    soak_lost      rows of batches that were trained and do not hold them
    soak_twice     rows that were sent or trained more than once
    soak_growth    bytes of its own memory that a process gains in an hour, as a share of them: the largest of all
                   processes that lived long enough, after the first ten minutes of each. Target: .02
    descriptors_gained, threads_gained    the most that any such process has more at its end
    growth_of_lives    the same as soak_growth, of what young processes of one role occupy, early and late in the run:
                   what every new process has to take over; the largest of all roles
    journal_bytes_a_batch, journal_growth    of the journal's directory; late in the run over early
    resume_s, resume_growth    median seconds from ``--resume`` to the next batch; late in the run over early

``--curve FILE`` writes what every process occupied, a line a reading. Exit code 1: something was lost, trained twice,
or grew, the run ended by itself, or an audit found something.

    python -m benchmarks.soak [--hours 1] [--every 10] [--seed 0] [--curve FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.chaos_random import served
from benchmarks.faults import ROLES, SIGNALS, How, of_role, send
from benchmarks.plain_audit import Expected, Findings, audit
from benchmarks.run import ROOT, read_batches
from benchmarks.soak_growth import SAMPLE_S, Reading, Written, bytes_a_batch, gains, gains_of_lives, ratio

STALL_S = 3.0
STOP_S = 300.0
"""For the processes to leave and for the report, which takes half a minute after a long run."""
FINISH_S = 600.0
"""For the last batches, and for the report."""
LAST_BATCHES = 20
SAY_S = 60.0
POLL_S = 0.2
FIRST_FAULT_S = 30.0
SHORTEST_H = 0.05
ROUND_S = 3600.0
"""Kills in its first half, stops alone in its second."""
SETTLE_S = 600.0
"""A process fills its caches that long. Of a soak shorter than an hour, the same share."""
SUPERVISOR = "supervisor"
SUPERVISOR_SHARE = 0.15
STOP_SHARE = 0.3
GROWTH_LIMIT = 0.02
SLACK = 5
"""Descriptors and threads that a process may have more at its end: connections and pools that come and go."""
TAIL_BYTES = 50_000
NAME = "soak"
SETTINGS: dict[str, object] = {
    "run.name": NAME,
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


@dataclass(slots=True)
class Soak:
    """One run, the faults that it gets, and what is read of it. resumes: (moment, seconds to the next batch)."""

    directory: Path
    seed: int
    hours: float
    faults: Counter[str] = field(default_factory=Counter)
    readings: list[Reading] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    resumes: list[tuple[float, float]] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _batches: int = 0
    _resumed: tuple[float, int] | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    @property
    def run_dir(self) -> Path:
        return self.directory / NAME

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def settle_s(self) -> float:
        return SETTLE_S * min(1.0, self.hours)

    @property
    def kills(self) -> bool:
        """Whether processes are killed now, and not only stopped."""
        round_s = min(ROUND_S, 3600 * self.hours)
        return self.now_s % round_s < round_s / 2

    # -- the run

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "orchestrator", "run", "--plain", "--dir", str(self.directory), *arguments]
        if "--resume" not in arguments:
            command += ["--preset", "tiny"]
            for key, value in SETTINGS.items():
                command += ["--set", f"{key}={json.dumps(value) if isinstance(value, str) else value}"]
        with (self.directory / "out.log").open("ab") as out:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def resume(self, *arguments: str) -> None:
        """Go on with the run; started once more where it was killed before there was one."""
        if not (self.run_dir / "config.toml").exists():
            self.start()
            return
        self._resumed = (self.now_s, self._count_batches())
        self.start("--resume", "--name", NAME, *arguments)

    @property
    def code(self) -> int | None:
        """Exit code of the supervisor; None while it lives."""
        assert self._process is not None
        return self._process.poll()

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            supervisor = psutil.Process(self._process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> int:
        """Interrupt the run, as its user would. Returns its exit code: 130, unless it had ended by itself."""
        assert self._process is not None
        if self.code is None:
            self._process.send_signal(signal.SIGINT)
        return self._process.wait(timeout=STOP_S)

    def finish(self) -> int | None:
        """Let the run train its last batches, undisturbed. Returns its exit code: 0; None where it did not end."""
        self.resume("--set", f"run.batches={self._count_batches() + LAST_BATCHES}")
        deadline_s = self.now_s + FINISH_S
        while self.code is None and self.now_s < deadline_s:
            self.watch_resume()
            time.sleep(POLL_S)
        return self.code

    def clear(self) -> None:
        """End what is left, whatever happened."""
        for process in self.processes():
            send(process, signal.SIGCONT)
            send(process, signal.SIGKILL)

    # -- faults

    def disturb(self) -> None:
        """One fault: its kind and its process are drawn."""
        role = SUPERVISOR if self._chance.random() < SUPERVISOR_SHARE else self._chance.choice(tuple(ROLES))
        how = How.STOP if self._chance.random() < STOP_SHARE or not self.kills else How.KILL
        processes = self.processes()
        victims = processes[:1] if role == SUPERVISOR else of_role(processes, role)
        if not victims or (role == SUPERVISOR and self._resumed):
            return  # it is just being started again, or a resume is being timed
        victim = self._chance.choice(victims)
        if not send(victim, SIGNALS[how]):
            return
        self.faults[f"{how} {role}"] += 1
        if how is How.STOP:
            time.sleep(STALL_S)
            send(victim, signal.SIGCONT)
        elif role == SUPERVISOR:
            assert self._process is not None
            self._process.wait(timeout=STOP_S)
            self.resume()

    # -- what it occupies

    def read(self) -> None:
        """Note what the run occupies now, and whether it trains again after a resume."""
        at_s, now = self.now_s, time.time()
        processes = self.processes()
        for number, process in enumerate(processes):
            with contextlib.suppress(psutil.Error):
                role = SUPERVISOR if number == 0 else self._role_of(process, processes)
                if not role:
                    continue
                self.readings.append(
                    Reading(
                        at_s=at_s,
                        role=role,
                        pid=process.pid,
                        age_s=now - process.create_time(),
                        nbytes=process.memory_full_info().uss,
                        descriptors=process.num_fds(),
                        threads=process.num_threads(),
                    )
                )
        journal = self.run_dir / "journal"
        nbytes = 0
        for path in journal.glob("*-*"):
            with contextlib.suppress(FileNotFoundError):  # an older snapshot goes
                nbytes += path.stat().st_size
        self.written.append(Written(at_s=at_s, batches=self._count_batches(), journal_bytes=nbytes))

    def watch_resume(self) -> None:
        """Note how long a resume took, as soon as the next batch is trained."""
        if self._resumed and self._count_batches() > self._resumed[1]:
            self.resumes.append((self._resumed[0], self.now_s - self._resumed[0]))
            self._resumed = None

    @staticmethod
    def _role_of(process: psutil.Process, processes: Sequence[psutil.Process]) -> str:
        return next((role for role in ROLES if process in of_role(processes, role)), "")

    def _count_batches(self) -> int:
        """How many batches are trained, by the last line of the metrics: a night's file is too long to read whole."""
        with contextlib.suppress(FileNotFoundError), (self.run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            found = re.findall(rb'^\{"batch": (\d+),', file.read(), re.MULTILINE)
            self._batches = int(found[-1]) + 1 if found else self._batches
        return self._batches

    def say(self) -> None:
        """Print where it stands."""
        at_s = self.readings[-1].at_s
        now = [reading for reading in self.readings if reading.at_s == at_s]
        last = self.written[-1]
        print(
            f"{at_s / 60:.0f} min: {last.batches} batches, {sum(self.faults.values())} faults, "
            f"{len(self.resumes)} resumes, {sum(one.nbytes for one in now) / 1e6:.0f} MB, "
            f"{sum(one.descriptors for one in now)} descriptors, "
            f"{sum(one.threads for one in now)} threads, journal {last.journal_bytes / 1e6:.0f} MB",
            flush=True,
        )


def audited(run_dir: Path, batches: int) -> Findings:
    """The finished run by ``plain_audit.py``; what ``inspect --audit`` finds is added."""
    rows = int(str(SETTINGS["pipeline.groups_per_batch"])) * int(str(SETTINGS["pipeline.group_size"]))
    size = int(str(SETTINGS["pipeline.group_size"]))
    with served(run_dir / "broker" / "aof") as broker:
        found = audit(run_dir, broker, Expected(name=NAME, batches=batches, group_size=size, rows=rows))
    found.counts["lost"] = max(0, batches * rows - found.rows)
    command = [sys.executable, "-m", "orchestrator", "inspect", str(run_dir), "--audit"]
    own = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(own.stdout, flush=True)
    if own.returncode != 0:
        found.problems.append(f"inspect --audit: {own.stdout.strip()[-500:]} {own.stderr.strip()[-500:]}")
    return found


def figures_of(soak: Soak, found: Findings, survived: bool) -> dict[str, object]:
    """The figures of the head of this file."""
    gained = gains(soak.readings, soak.settle_s)
    lives = gains_of_lives(soak.readings, soak.settle_s)
    for name, (share, descriptors, threads) in gained.items():
        print(f"{name}: {share:+.3f} an hour, {descriptors:+d} descriptors, {threads:+d} threads")
    for role, share in lives.items():
        print(f"young processes of {role}: {share:+.3f} an hour")
    journal = bytes_a_batch(soak.written, soak.settle_s)
    resumes = [seconds for _, seconds in soak.resumes]
    return {
        "soak_lost": found.counts["lost"],
        "soak_twice": found.counts["twice"],
        "soak_growth": round(max((share for share, _, _ in gained.values()), default=0.0), 4),
        "descriptors_gained": max((number for _, number, _ in gained.values()), default=0),
        "threads_gained": max((number for _, _, number in gained.values()), default=0),
        "growth_of_lives": round(max(lives.values(), default=0.0), 4),
        "journal_bytes_a_batch": round(median(value for _, value in journal)) if journal else None,
        "journal_growth": ratio(journal),
        "resume_s": round(median(resumes), 1) if resumes else None,
        "resume_growth": ratio(soak.resumes),
        "processes_measured": len(gained),
        "hours": soak.hours,
        "faults": sum(soak.faults.values()),
        "resumes": len(soak.resumes),
        "batches": soak.written[-1].batches,
        "survived": survived,
        "audit_clean": not found.problems,
    }


def write_curve(path: Path, readings: Sequence[Reading]) -> None:
    """A line of JSON a reading."""
    lines = ({name: getattr(one, name) for name in Reading.__dataclass_fields__} for one in readings)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def endure(soak: Soak, every_s: float) -> bool:
    """Disturb the run until its time is over. Returns whether it still went on."""
    next_fault_s, next_say_s, next_read_s = FIRST_FAULT_S, SAY_S, 0.0
    while soak.code is None and soak.now_s < 3600 * soak.hours:
        if soak.now_s >= next_read_s:
            soak.read()
            next_read_s = soak.now_s + SAMPLE_S
        if soak.now_s >= next_fault_s:
            soak.disturb()
            next_fault_s = soak.now_s + every_s
        if soak.now_s >= next_say_s:
            soak.say()
            next_say_s = soak.now_s + SAY_S
        soak.watch_resume()
        time.sleep(POLL_S)
    return soak.code is None


def is_reached(figures: Mapping[str, object]) -> bool:
    """Whether nothing was lost, trained twice, or grew."""
    limits = {"soak_lost": 0, "soak_twice": 0, "soak_growth": GROWTH_LIMIT}
    limits |= {"descriptors_gained": SLACK, "threads_gained": SLACK}
    within = all(float(str(figures[name])) <= limit for name, limit in limits.items())
    return bool(within and figures["survived"] and figures["audit_clean"] and figures["processes_measured"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="how long the run is disturbed")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", type=Path, metavar="FILE", help="write every reading, a line of JSON each")
    options = parser.parse_args()
    if options.hours < SHORTEST_H:
        parser.error(f"--hours {options.hours:g}: a run needs {SHORTEST_H:g} hours to start and to be hit")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="streamrl-soak-", ignore_cleanup_errors=True) as name:
        soak = Soak(directory=Path(name), seed=options.seed, hours=options.hours)
        try:
            soak.start()
            survived = endure(soak, options.every)
            codes: list[int | None] = [soak.stop()]
            if survived:
                codes.append(soak.finish())
            batches = read_batches(soak.run_dir / "metrics.jsonl")
            found = audited(soak.run_dir, len(batches))
        finally:
            soak.clear()
        print(dict(soak.faults), f"exit codes {codes}", *found.problems, sep="\n")
        if codes != [130, 0]:
            survived = False
            print((soak.directory / "out.log").read_text(errors="replace")[-3000:])
        if options.curve:
            write_curve(options.curve, soak.readings)
        figures = figures_of(soak, found, survived)
    print(json.dumps(figures))
    sys.exit(0 if is_reached(figures) else 1)


if __name__ == "__main__":
    main()
