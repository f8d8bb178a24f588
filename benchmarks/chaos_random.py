"""Figure ``chaos_random``: whole runs in random modes under random faults, each resumed, finished, and audited apart.

Until ``--minutes`` are over: a mode and some settings are drawn, the run is started in real processes, and gets a
drawn number of faults at drawn moments: any role (broker, orchestrator, generate, score, train, supervisor) is killed,
stopped for some seconds, or asked to end, sometimes two at once; whenever the supervisor ends by that, ``--resume``
follows, at once or after a while, also while a process of before is still stopped. Then the run is left alone and must

- end with exit code 0 within its time,
- have trained every row exactly once, by ``plain_audit.py`` and by ``inspect --audit``, which share no code,
- leave no process, no shared memory and no listening socket.

One seed draws the same modes and faults; moments are in seconds, so what they meet differs with the machine's load.
A round that failed keeps its directory, and says how to draw it again. The last line is one JSON object; exit code 1:
some round failed.

    python -m benchmarks.chaos_random [--minutes 10] [--seed 0] [--round N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from benchmarks.faults import ROLES, SIGNALS, How, of_role, send
from benchmarks.plain_audit import Expected, Findings, audit
from benchmarks.run import ROOT
from tests.fakes.redis_servers import ServerProcess
from transport.broker.embedded import packaged_binary

NAME = "chaos"
SUPERVISOR = "supervisor"
NEXT_BATCH_S = 60.0
"""Until something more is trained, on a loaded machine; then the next fault comes all the same."""
FINISH_S = 300.0
"""From the last fault to the end: a lost lease, a reload and some batches, on a machine at load 8."""
GONE_S = 20.0
"""From the end of the supervisor to that of the last process."""
STOPPED_S = (0.5, 9.0)
"""How long a stopped process stays so: below and beyond its lease."""
POLL_S = 0.05
SOON_S = 5.0
"""For a process that is just being started to be there to be hit."""
CODES_OF_ENDS = (-signal.SIGKILL, 130, -signal.SIGTERM)
"""Of a supervisor: killed, asked to end, asked before it could hear."""

ALWAYS: dict[str, object] = {
    "run.name": NAME,
    "generation.engine": "emulated",
    "trainer.engine": "emulated",
    "emulated.time_scale": 0.2,
    "trainer.checkpoint_every": 2,
    "data.size": 128,
    "eval.problems": 8,
    "liveness.lease_s": 4.0,
    "liveness.stall_s": 150.0,
    "scoring.lease_s": 3.0,
    "pipeline.rollout_timeout_s": 20.0,
}
REAL = {"generation.engine": "embedded", "trainer.engine": "torch"}
MODES: dict[str, dict[str, object]] = {
    "serial": {"pipeline.max_staleness": 0, "pipeline.release": "batch", "pipeline.update": "barrier"},
    "mini_batch": {"pipeline.max_staleness": 0, "pipeline.release": "mini_batch", "pipeline.mini_batch_groups": 3},
    "stream": {"pipeline.max_staleness": 0},
    "one_step": {"pipeline.max_staleness": 1, "pipeline.release": "batch", "pipeline.update": "barrier"},
    "enlarged": {"pipeline.max_staleness": 1, "pipeline.rollout_batches": 2, "pipeline.update": "barrier"},
    "full_async": {"pipeline.max_staleness": 1, "pipeline.update": "barrier"},
    "staggered": {"pipeline.max_staleness": 1, "pipeline.update": "staggered"},
    "in_flight": {"pipeline.max_staleness": 1},
    "stale_2": {"pipeline.max_staleness": 2},
    "rolling": {"pipeline.max_staleness": 1, "pipeline.membership": "rolling"},
    "oversampled": {"pipeline.max_staleness": 1, "pipeline.oversampled_groups": 2},
    "planned": {"pipeline.max_staleness": 1, "pipeline.dispatch": "scored", "pipeline.migrate_running": True},
}
BESIDE: list[dict[str, object]] = [
    {"eval.every": 3},
    {"generation.workers": 2},
    {"scoring.workers": 2},
    {"trainer.epochs": 2},
    {"trainer.mini_batches": 2},
    {"trainer.mini_batches": 2, "algorithm.old_logprobs": "recomputed"},
    {"generation.workers": 2, "generation.min_workers": 1, "generation.max_workers": 3},
    {"broker.appendfsync": "always"},
    {"ranker.kind": "history"},
    {**REAL},
    {**REAL, "trainer.ranks": 2},
    {**REAL, "pipeline.drop_no_signal": True},
]
"""What may be added to a mode; a round takes up to three of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """settled: only once another batch was trained.  after_s: since then, or since the fault before.

    both: another role is hit in the same moment.  which: 0 to 1, of several processes of the role.
    stopped_s: for How.STOP.  resume_s: from the end of a supervisor to ``--resume``.
    """

    settled: bool
    after_s: float
    role: str
    how: How
    both: str
    which: float
    stopped_s: float
    resume_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Everything that is drawn of one run."""

    mode: str
    settings: Mapping[str, object]
    faults: Sequence[Fault]

    @property
    def expected(self) -> Expected:
        groups, size = int(str(self.settings["pipeline.groups_per_batch"])), 4
        whole = "pipeline.drop_no_signal" not in self.settings
        return Expected(
            name=NAME,
            batches=int(str(self.settings["run.batches"])),
            group_size=size,
            rows=groups * size if whole else 0,
            passes=int(str(self.settings.get("trainer.epochs", 1))),
            max_staleness=int(str(self.settings["pipeline.max_staleness"])),
            fixed=self.mode != "rolling",
        )


def draw(seed: int, number: int) -> Round:
    """Round ``number`` of ``seed``."""
    chance = random.Random(f"{seed} {number}")
    mode = chance.choice(list(MODES))
    settings = {**ALWAYS, "pipeline.groups_per_batch": 4, "run.batches": chance.randint(20, 40), **MODES[mode]}
    for extra in chance.sample(BESIDE, chance.randint(0, 3)):
        settings |= extra
    if "trainer.ranks" in settings or settings["trainer.engine"] == "torch":
        settings["run.batches"] = chance.randint(10, 20)
    return Round(mode=mode, settings=settings, faults=[draw_fault(chance) for _ in range(chance.randint(3, 9))])


def draw_fault(chance: random.Random) -> Fault:
    roles = [*ROLES, SUPERVISOR]
    role = chance.choice(roles)
    how = chance.choices(list(How), weights=(5, 3, 2))[0]
    both = chance.choice(roles) if chance.random() < 0.25 else ""
    return Fault(
        settled=chance.random() < 0.6,
        after_s=chance.uniform(0.1, 6.0),
        role=role,
        how=how,
        both=both if both != role else "",
        which=chance.random(),
        stopped_s=chance.uniform(*STOPPED_S),
        resume_s=chance.choice((0.0, 0.0, 1.0, 4.0)),
    )


class RunFailed(Exception):
    """The round's promise does not hold; the message says which."""


@dataclass(slots=True)
class Stopped:
    process: psutil.Process
    until_s: float


@dataclass(slots=True)
class ChaosRun:
    """One run, its faults, its end. struck: "<how> <role>" -> number of faults that met a living process."""

    round: Round
    directory: Path
    struck: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    _supervisor: subprocess.Popen[bytes] | None = None
    _seen: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)
    _stopped: list[Stopped] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / NAME

    # -- the run

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "orchestrator", "run", "--plain", "--dir", str(self.directory), *arguments]
        if "--resume" not in arguments:
            command += ["--preset", "tiny"]
            for key, value in self.round.settings.items():
                command += ["--set", f"{key}={json.dumps(value) if isinstance(value, str | bool) else value}"]
        with (self.directory / "out.log").open("ab") as out:
            out.write(f"--- {' '.join(arguments) or 'start'}\n".encode())
            out.flush()
            self._supervisor = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def resume(self) -> None:
        """Go on with the run; start it once more where it was killed before there was one."""
        if not (self.run_dir / "config.toml").exists():
            self.start()
            return
        self.resumes += 1
        self.start("--resume", "--name", NAME)

    def go(self) -> Findings:
        """From start to audit. Raises RunFailed."""
        self.start()
        for fault in self.round.faults:
            if not (self._settle(fault) and self._wait(fault.after_s)):
                break  # all batches were sooner
            self._strike(fault)
        for stopped in self._stopped:
            stopped.until_s = min(stopped.until_s, time.monotonic() + STOPPED_S[1])
        code = self._wait_for_end()
        if code != 0:
            raise RunFailed(f"the run ended with exit code {code}")
        self._check_nothing_left()
        return self._audit()

    def _settle(self, fault: Fault) -> bool:
        """Wait for the next batch where the fault asks for it. Returns whether the run still goes on."""
        metrics = self.run_dir / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        deadline_s = time.monotonic() + NEXT_BATCH_S
        while (
            fault.settled
            and time.monotonic() < deadline_s
            and not (metrics.exists() and metrics.stat().st_size > before)
        ):
            if not self._wait(POLL_S):
                return False
        return True

    def _wait(self, seconds: float) -> bool:
        """Let the run go on. Returns whether it still does; False once it is over. Raises RunFailed when it failed."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._look()
            code = self._code()
            if code == 0:
                return False
            if code is not None:
                raise RunFailed(f"the run ended with exit code {code} between two faults")
            time.sleep(POLL_S)
        return True

    def _wait_for_end(self) -> int:
        deadline_s = time.monotonic() + FINISH_S
        while (code := self._code()) is None:
            if time.monotonic() > deadline_s:
                raise RunFailed(f"the run did not end within {FINISH_S:.0f} s of its last fault")
            self._look()
            time.sleep(POLL_S)
        return code

    def _code(self) -> int | None:
        assert self._supervisor is not None
        return self._supervisor.poll()

    # -- faults

    def _strike(self, fault: Fault) -> None:
        for role in filter(None, (fault.role, fault.both)):
            self._hit(role, fault)
        if self._code() is None and SUPERVISOR not in (fault.role, fault.both):
            return
        if fault.how is How.STOP:
            return
        self._end_of_supervisor(fault)

    def _hit(self, role: str, fault: Fault) -> None:
        deadline_s = time.monotonic() + SOON_S
        while (
            (victim := self._victim(role, fault.which)) is None
            and self._code() is None
            and time.monotonic() < deadline_s
        ):
            self._look()
            time.sleep(POLL_S)
        if victim is None or not send(victim, SIGNALS[fault.how]):
            return
        self.struck[f"{fault.how} {role}"] += 1
        print(f"    {fault.how} {role} ({victim.pid})", flush=True)
        if fault.how is How.STOP:
            self._stopped.append(Stopped(victim, time.monotonic() + fault.stopped_s))

    def _victim(self, role: str, which: float) -> psutil.Process | None:
        if role == SUPERVISOR:
            return self._own()
        there = of_role(self._processes(), role)
        return there[int(which * len(there))] if there else None

    def _end_of_supervisor(self, fault: Fault) -> None:
        """Wait for it and resume. Raises RunFailed for any exit code but the one that its signal has."""
        deadline_s = time.monotonic() + FINISH_S
        while (code := self._code()) is None and time.monotonic() < deadline_s:
            self._look()
            time.sleep(POLL_S)
        if code == 0:
            return  # it was through already
        if code not in CODES_OF_ENDS:
            raise RunFailed(f"the supervisor, hit by {fault.how}, ended with exit code {code}")
        self._pass(fault.resume_s)
        self.resume()

    def _pass(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._look()
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Remember every process of the run, and let those go on whose time has come."""
        self._processes()
        now_s = time.monotonic()
        for stopped in [stopped for stopped in self._stopped if stopped.until_s <= now_s]:
            send(stopped.process, signal.SIGCONT)
            self._stopped.remove(stopped)

    def _own(self) -> psutil.Process | None:
        assert self._supervisor is not None
        try:
            return psutil.Process(self._supervisor.pid) if self._code() is None else None
        except psutil.NoSuchProcess:
            return None

    def _processes(self) -> list[psutil.Process]:
        """The processes of the present supervisor."""
        own = self._own()
        try:
            processes = [own, *own.children(recursive=True)] if own else []
            for process in processes:
                self._seen.setdefault((process.pid, process.create_time()), process)
        except psutil.NoSuchProcess:
            return []
        return processes

    # -- the end

    def survivors(self) -> list[psutil.Process]:
        alive = [process for process in self._seen.values() if process.is_running()]
        return [process for process in alive if _state(process) != psutil.STATUS_ZOMBIE]

    def _check_nothing_left(self) -> None:
        deadline_s = time.monotonic() + GONE_S
        while (left := self.survivors()) and time.monotonic() < deadline_s:
            self._look()
            time.sleep(POLL_S)
        if left:
            raise RunFailed(f"processes outlive the run: {[' '.join(process.cmdline()[:6]) for process in left]}")
        pids = {str(pid) for pid, _ in self._seen}
        segments = [path.name for path in Path("/dev/shm").glob("streamrl-*@*") if path.name.split("@")[1] in pids]
        segments += [str(path) for path in self.run_dir.rglob("streamrl-*@*")]
        if segments:
            raise RunFailed(f"shared memory is left: {segments}")
        answering = [str(path) for path in self.run_dir.rglob("*") if path.is_socket() and _answers(path)]
        if answering:
            raise RunFailed(f"sockets are left that answer: {answering}")

    def _audit(self) -> Findings:
        with served(self.run_dir / "broker" / "aof") as broker:
            found = audit(self.run_dir, broker, self.round.expected)
        command = [sys.executable, "-m", "orchestrator", "inspect", str(self.run_dir), "--audit"]
        own = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=FINISH_S)
        if own.returncode != 0:
            found.problems.append(f"inspect --audit: {own.stdout.strip()} {own.stderr.strip()[-500:]}")
        return found

    def last_words(self) -> list[str]:
        """The end of what its user saw."""
        return (self.directory / "out.log").read_text(errors="replace").splitlines()[-6:]

    def clear(self) -> None:
        """End what is left, whatever happened."""
        self._look()
        for process in self.survivors():
            send(process, signal.SIGKILL)
        if self._supervisor is not None:
            self._supervisor.wait(timeout=GONE_S)


@contextmanager
def served(aof: Path) -> Iterator[redis.Redis]:
    """A client of a bare server with a copy of an append-only file."""
    with tempfile.TemporaryDirectory(prefix="streamrl-audit-") as name:
        shutil.copytree(aof, Path(name) / "aof")
        server = ServerProcess(packaged_binary(), Path(name), "--appendonly", "yes", "--appenddirname", "aof")
        try:
            server.wait_listening()
            client = redis.Redis(port=server.port, socket_timeout=30.0)
            while not _loaded(client):
                time.sleep(POLL_S)
            yield client
            client.close()
        finally:
            server.kill()


def _loaded(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.BusyLoadingError:
        return False


def _state(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


@dataclass(slots=True)
class Tally:
    """What all rounds came to."""

    struck: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    by_mode: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    batches: int = 0
    rows: int = 0
    failed: list[str] = field(default_factory=list)


def play(seed: int, number: int, base: Path, tally: Tally) -> None:
    """One round, from its draw to its verdict."""
    drawn = draw(seed, number)
    directory = base / f"round-{number}"
    directory.mkdir(parents=True)
    changed = {key: value for key, value in drawn.settings.items() if ALWAYS.get(key) != value}
    print(f"round {number}: {drawn.mode} {changed}", flush=True)
    run = ChaosRun(drawn, directory)
    started_s, said = time.monotonic(), ""
    try:
        found = run.go()
        problems = found.problems
        tally.rows += found.rows
        said = ", ".join(f"{name} {count}" for name, count in [("rows", found.rows), *sorted(found.counts.items())])
    except RunFailed as error:
        problems = [str(error), *run.last_words()]
    finally:
        run.clear()
    tally.struck += run.struck
    tally.modes[drawn.mode] += 1
    tally.by_mode[drawn.mode] += sum(run.struck.values())
    tally.resumes += run.resumes
    tally.batches += drawn.expected.batches if not problems else 0
    verdict = "FELL" if problems else "whole"
    print(
        f"    {verdict} after {time.monotonic() - started_s:.0f} s: {found.rows if not problems else ''} rows; {said}"
    )
    if not problems:
        shutil.rmtree(directory)
        return
    again = f"make chaos-random SEED={seed} ARGS='--round {number}'"
    for problem in problems:
        print(f"    ! {problem}")
    print(f"    its directory: {directory}; to draw it again: {again}", flush=True)
    tally.failed.append(f"round {number} ({drawn.mode}): {problems[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--keep", type=Path, help="where rounds lie [a temporary directory]")
    arguments = parser.parse_args()
    base = arguments.keep or Path(tempfile.mkdtemp(prefix="streamrl-chaos-"))
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes, in {base}", flush=True)
    tally, started_s, number = Tally(), time.monotonic(), arguments.round or 0
    while time.monotonic() - started_s < 60 * arguments.minutes:
        play(arguments.seed, number, base, tally)
        number += 1
        if arguments.round is not None:
            break
    figures = {
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - started_s) / 60, 1),
        "rounds": sum(tally.modes.values()),
        "faults": sum(tally.struck.values()),
        "by_role": dict(sorted(tally.struck.items())),
        "by_mode": dict(sorted(tally.by_mode.items())),
        "resumes": tally.resumes,
        "batches": tally.batches,
        "rows": tally.rows,
        "failed": tally.failed,
    }
    if not tally.failed and arguments.keep is None:
        shutil.rmtree(base)
    print(json.dumps(figures))
    sys.exit(1 if tally.failed else 0)


if __name__ == "__main__":
    main()
