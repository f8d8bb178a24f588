"""Figure ``names``: two runs of one name on one broker, again and again: one has the name, the other is refused.

A pair is two starts, or a live run and a newcomer; each must end so:

- the one with the name goes on to its end: exit code 0, its batches and no other in its metrics, a clean audit, and by
  ``plain_audit.py``, which shares no code with that, every row once and none of another run;
- the other ends with 2 and names directory and host of the first; nothing is left of a start, nothing is changed in the
  directory of a resumed run;
- a live run feels nothing: none of its processes is started again.

    instant, apart   two new runs from two directories, 0 to 10 s apart
    resumed          a run that was stopped is resumed 0 to 10 s before or after another one began on its emptied broker
    live             newcomers beside a live run: new starts, resumes of a stopped run, a copy of the live directory
    emptied          as live, after the broker lost its data, or was killed and came back without them
    worker           a worker of the stopped run, started by hand, joins the broker that has another run by now
    torch            live and instant, with the torch trainer
    hosts            live and instant, from two hosts: network and host names of their own (root)

The broker is a redis-server on a free port. The last line is one JSON object; exit code 1: some pair ended otherwise.

    python -m benchmarks.names [--seconds 1100] [--side-by-side 3] [--only live,torch] [--keep DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.faults import ROLES, of_role
from benchmarks.plain_audit import Expected, audit
from tests.fakes.redis_servers import ServerProcess

GROUPS, SIZE = 2, 2
FAST = {
    "generation.engine": "emulated",
    "trainer.engine": "emulated",
    "emulated.time_scale": 0.05,
    "trainer.checkpoint_every": 2,
    "pipeline.groups_per_batch": GROUPS,
    "pipeline.group_size": SIZE,
    "data.size": 64,
    "eval.every": 0,
    "api.enabled": "false",
    "liveness.lease_s": 6.0,
}
TORCH = {
    "generation.engine": "embedded",
    "trainer.engine": "torch",
    "sampling.max_new_tokens": 4,
    "generation.slots": 4,
}
LIVE_BATCHES = 100_000
"""More than are trained while anyone looks: a live run is drained in the end."""
BATCHES = 4
END_S = 240.0
STOPPED, REFUSED = (130, -signal.SIGTERM), 2
SPACING_S = (0.0, 0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 7.0, 10.0)


def settings(values: dict[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@dataclass
class Run:
    """One directory's run. inside: what begins its command line, on another host."""

    home: Path
    name: str
    url: str
    trainer: str = "emulated"
    inside: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None

    @property
    def path(self) -> Path:
        return self.home / "runs" / self.name

    @property
    def out(self) -> Path:
        return self.home / f"{self.name}.out"

    def command(self, *words: str) -> list[str]:
        return [*self.inside, sys.executable, "-m", "orchestrator", *words]

    def environment(self) -> dict[str, str]:
        cache = str(self.home.parent / "cache")
        root = str(Path(__file__).parents[1])
        return {**os.environ, "OMP_NUM_THREADS": "1", "STREAMRL_CACHE": cache, "PYTHONPATH": root}

    def start(self, *, batches: int = BATCHES, resume: bool = False) -> Run:
        self.home.mkdir(parents=True, exist_ok=True)
        more = {"broker.url": self.url, "run.batches": batches}
        first = ["--resume"] if resume else ["--preset", "tiny", *settings(FAST | (TORCH if self.is_torch else {}))]
        place = ["--name", self.name, "--dir", str(self.home / "runs"), "--plain"]
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                self.command("run", *first, *settings(more), *place),
                cwd=self.home,
                env=self.environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return self

    @property
    def is_torch(self) -> bool:
        return self.trainer == "torch"

    def lines(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        found = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        return [line for line in found if "batch" in line]

    def until(self, batches: int, limit_s: float = END_S) -> bool:
        """Whether it has trained so many."""
        deadline_s = time.monotonic() + limit_s
        while len(self.lines()) < batches and self.is_live and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return len(self.lines()) >= batches

    @property
    def is_live(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, limit_s: float = END_S) -> int:
        """Its exit code, once it has ended; it is killed after ``limit_s``."""
        assert self.process is not None
        try:
            self.code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.code = self.process.wait()
        return self.code

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def drain(self) -> int:
        self.ask("drain", str(self.path), "--broker", self.url)
        return self.end()

    def ask(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            self.command(*words), cwd=self.home, env=self.environment(), capture_output=True, text=True, check=False
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def said(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def workers(self) -> set[int]:
        if not self.is_live:
            return set()
        assert self.process is not None
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return {child.pid for role in ROLES for child in of_role(children, role)}
        return set()

    def forget(self) -> None:
        """For the next start in this directory."""
        shutil.rmtree(self.home, ignore_errors=True)


def digest(path: Path) -> str:
    """Of all that a run did: events, checkpoints, metrics. A start of it that was refused leaves a line in others."""
    total = hashlib.sha256()
    done = ("journal/s*", "checkpoints/**/*", "metrics.jsonl", "samples.jsonl", "model/*", "broker/**/*")
    for file in sorted(file for pattern in done for file in path.glob(pattern) if file.is_file()):
        total.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return total.hexdigest()


@dataclass
class Figures:
    work: Path
    deadline_s: float
    port: int = 0
    pairs: Counter[str] = field(default_factory=Counter)
    live_ended: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pair(self, kind: str, what: str, problems: Sequence[str]) -> None:
        with self.lock:
            self.pairs[kind] += 1
            if problems:
                self.wrong.append(f"{kind} {what}: {'; '.join(problems)}")
            print(f"{time.strftime('%H:%M:%S')} {kind:8} {what}: {'; '.join(problems) or 'as it should'}", flush=True)

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline_s

    # -- what must be so

    def refused(self, loser: Run, winner: Run, *, before: str = "") -> list[str]:
        """before: digest of the directory of a run that was resumed; "": a start, of which nothing is left."""
        said = " ".join(loser.said()[-2000:].split())
        problems: list[str] = []
        if loser.code != REFUSED:
            problems.append(f"the newcomer ended with {loser.code}: {said[-300:]}")
        elif str(winner.path.resolve()) not in said or "on host" not in said:
            problems.append(f"the newcomer does not say whose name it is: {said[-300:]}")
        if before and digest(loser.path) != before:
            problems.append("something was changed in the directory of the one that was refused")
        if not before and loser.path.exists():
            problems.append(f"the newcomer left {sorted(path.name for path in loser.path.iterdir())}")
        return problems

    def whole(self, run: Run, *, batches: int, what: str) -> list[str]:
        """A finished run: each batch once, and two clean audits."""
        problems: list[str] = []
        if run.code != 0:
            problems.append(f"the run with the name ended with {run.code}: {run.said()[-300:]}")
        trained = sorted({line["batch"] for line in run.lines()})  # one trained again after a resume has two lines
        if trained != list(range(batches)):
            with self.lock:
                self.mixed.append(what)
            problems.append(f"metrics have batches {trained[:40]}, not 0 to {batches - 1}")
        code, text = run.ask("inspect", str(run.path), "--audit", "--broker", run.url)
        expected = Expected(name=run.name, batches=batches, group_size=SIZE, rows=GROUPS * SIZE)
        found = audit(run.path, redis.Redis.from_url(run.url), expected)
        if code or found.problems:
            with self.lock:
                self.mixed.append(what)
            problems.append(f"audits: {text[-300:]}; {found.problems}")
        return problems

    def undisturbed(self, run: Run, workers: set[int], what: str) -> list[str]:
        """A live run, which must train more, in the same processes."""
        if run.until(len(run.lines()) + 2, 60) and workers <= run.workers():
            return []
        with self.lock:
            self.live_ended.append(what)
        return [f"the live run was disturbed: exit {run.code}, {run.said()[-300:]}"]

    # -- the pairs

    @contextmanager
    def server(self) -> Iterator[ServerProcess]:
        """A broker that forgets all when it ends."""
        binary = shutil.which("redis-server")
        if binary is None:
            raise SystemExit("there is no redis-server: make setup")
        server = ServerProcess(Path(binary), Path(tempfile.mkdtemp(dir=self.work)))
        try:
            server.wait_listening()
            yield server
        finally:
            server.kill()

    def together(
        self, kind: str, number: int, apart_s: float, url: str, trainer: str = "emulated", hosts: int = 0
    ) -> None:
        """Two new runs, apart by ``apart_s``."""
        name, home = f"{kind}-{number}", self.work / f"{kind}-{number}"
        inside = [on_host(index) if hosts else () for index in range(2)]
        first, second = (Run(home / side, name, url, trainer, inside[at]) for at, side in enumerate("ab"))
        first.start()
        time.sleep(apart_s)
        second.start()
        for run in (first, second):
            run.end()
        winner, loser = (first, second) if first.code == 0 else (second, first)
        what = f"{name}, {apart_s} s apart"
        problems = self.refused(loser, winner) + self.whole(winner, batches=BATCHES, what=what)
        if any(run.code not in (0, REFUSED) for run in (first, second)):
            with self.lock:
                self.live_ended.append(what)
        self.pair(kind, what, problems)
        if not problems:
            home.exists() and shutil.rmtree(home)

    def resumed(self, number: int, apart_s: float, url: str) -> None:
        """A stopped run and a new one on an emptied broker: the first to come has the name."""
        name, home = f"resumed-{number}", self.work / f"resumed-{number}"
        old, new = Run(home / "old", name, url), Run(home / "new", name, url)
        old.start(batches=LIVE_BATCHES)
        old.until(4)
        if old.stop() not in STOPPED:
            self.pair("resumed", name, [f"the first did not stop: {old.code}"])
            return
        forget(url, name)
        before, had = digest(old.path), len({line["batch"] for line in old.lines()})
        if number % 2:
            new.start()
            time.sleep(apart_s)
            old.start(batches=had + 6, resume=True)
        else:
            old.start(batches=had + 6, resume=True)
            time.sleep(apart_s)
            new.start()
        for run in (old, new):
            run.end()
        what = f"{name}, {apart_s} s apart"
        if new.code == 0:
            problems = self.refused(old, new, before=before) + self.whole(new, batches=BATCHES, what=what)
        else:
            problems = self.refused(new, old) + self.whole(old, batches=had + 6, what=what)
        if any(run.code not in (0, REFUSED) for run in (old, new)):
            with self.lock:
                self.live_ended.append(what)
        self.pair("resumed", what, problems)
        if not problems:
            shutil.rmtree(home, ignore_errors=True)

    def live(self, trainer: str, rounds: int, *, hosts: bool = False) -> None:
        """Newcomers beside one live run, whose broker is emptied between them."""
        kind = "hosts" if hosts else "torch" if trainer == "torch" else "live"
        name, home = f"{kind}-live", self.work / f"{kind}-live"
        here, there = (on_host(0), on_host(1)) if hosts else ((), ())
        with self.server() if not hosts else server_of_hosts(self.work) as server:
            old = Run(home / "old", name, server.url, trainer, there).start(batches=LIVE_BATCHES)
            old.until(4)
            old.stop()
            forget(server.url, name)
            run = Run(home / "live", name, server.url, trainer, here).start(batches=LIVE_BATCHES)
            run.until(3)
            worker_of_old = run_id_of(old)
            for number in range(rounds):
                if self.is_late() or not run.is_live:
                    break
                workers, how = run.workers(), ("start", "resume", "copy", "worker")[number % 4]
                lost = "" if hosts else ("", "emptied", "", "restarted")[number // 4 % 4]
                if lost == "emptied":
                    empty(server.url)
                elif lost:
                    server = restarted(server, self.work)
                what = f"{how} beside a live run{lost and f', broker {lost}'} ({number})"
                newcomer, before = Run(home / "new", name, server.url, trainer, there), ""
                newcomer.forget()
                if how == "resume":
                    newcomer, before = old, digest(old.path)
                    old.out.unlink(missing_ok=True)
                if how == "copy":
                    newcomer.home.mkdir(parents=True)
                    shutil.copytree(run.path, newcomer.path, ignore=shutil.ignore_patterns("*.tmp"))
                    before = digest(newcomer.path)
                if how == "worker":
                    problems = worker_refused(newcomer, run, worker_of_old)
                else:
                    newcomer.start(batches=LIVE_BATCHES if before else BATCHES, resume=bool(before)).end()
                    problems = self.refused(newcomer, run, before=before)
                self.pair(kind, what, problems + self.undisturbed(run, workers, what))
            if run.is_live:
                run.drain()
            self.said += self.whole(
                run, batches=len({line["batch"] for line in run.lines()}), what=f"{kind}, the live run at its end"
            )
        for path in (home,):
            shutil.rmtree(path, ignore_errors=True)


def worker_refused(newcomer: Run, run: Run, run_id: str) -> list[str]:
    """A worker of another run of that name, which was given its id."""
    newcomer.home.mkdir(parents=True, exist_ok=True)
    words = [*newcomer.inside, sys.executable, "-m", "workers", "train", "--broker", newcomer.url, "--run", run.name]
    with newcomer.out.open("ab") as out:
        newcomer.code = subprocess.run(
            [*words, "--run-id", run_id],
            cwd=newcomer.home,
            env=newcomer.environment(),
            stdout=out,
            stderr=out,
            check=False,
        ).returncode
    said = " ".join(newcomer.said().split())
    ok = newcomer.code == REFUSED and str(run.path.resolve()) in said
    return [] if ok else [f"the worker of another run ended with {newcomer.code}: {said[-300:]}"]


def run_id_of(run: Run) -> str:
    return json.loads((run.path / "journal" / "run.json").read_bytes())["run_id"]


def forget(url: str, name: str) -> None:
    """The broker loses all of one run."""
    with redis.Redis.from_url(url) as server:
        if found := [*server.scan_iter(f"streamrl:{{{name}}}:*")]:
            server.unlink(*found)


def empty(url: str) -> None:
    """The broker loses all, and goes on."""
    with redis.Redis.from_url(url) as server:
        server.flushall()


def restarted(server: ServerProcess, work: Path) -> ServerProcess:
    """Another server in its place, without its data."""
    port = server.port
    server.kill()
    time.sleep(1.0)
    binary = shutil.which("redis-server")
    assert binary is not None
    again = ServerProcess(Path(binary), Path(tempfile.mkdtemp(dir=work)), port=port)
    again.wait_listening()
    return again


# -- two hosts on this machine: a network of their own each, and a name of their own

SUBNET = "10.203.77"
HOSTS = ("streamrl-a", "streamrl-b")


def on_host(index: int) -> list[str]:
    host = HOSTS[index]
    name = f'hostname {host} && ip link set lo up && exec "$@"'
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", name, "sh"]


@contextmanager
def two_hosts() -> Iterator[bool]:
    """Whether there are two; they reach each other and this machine over a bridge."""

    def run(*words: str) -> bool:
        return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0

    def clear() -> None:
        for host in HOSTS:
            run("ip", "netns", "del", host)
        run("ip", "link", "del", "srl-names")

    clear()
    made = os.geteuid() == 0 and run("ip", "link", "add", "srl-names", "type", "bridge")
    made = made and run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", "srl-names")
    made = made and run("ip", "link", "set", "srl-names", "up")
    for index, host in enumerate(HOSTS):
        link = f"srl-n{index}"
        made = made and run("ip", "netns", "add", host)
        made = made and run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host)
        made = made and run("ip", "link", "set", link, "master", "srl-names", "up")
        made = made and run("ip", "-n", host, "addr", "add", f"{SUBNET}.{index + 2}/24", "dev", "eth0")
        made = made and run("ip", "-n", host, "link", "set", "eth0", "up")
    try:
        yield made
    finally:
        clear()


@contextmanager
def server_of_hosts(work: Path) -> Iterator[ServerProcess]:
    """A broker that both hosts reach."""
    binary = shutil.which("redis-server")
    assert binary is not None
    bind = ("--bind", f"{SUBNET}.1", "127.0.0.1", "--protected-mode", "no")
    server = ServerProcess(Path(binary), Path(tempfile.mkdtemp(dir=work)), *bind)
    try:
        try:
            server.wait_listening()
        except RuntimeError:  # another process took the port that was free
            server = ServerProcess(Path(binary), Path(tempfile.mkdtemp(dir=work)), *bind)
            server.wait_listening()
        server.url = f"redis://{SUBNET}.1:{server.port}"
        yield server
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1100.0)
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--only", default="together,resumed,live,torch,hosts")
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    began_s = time.monotonic()
    work = asked.keep or Path(tempfile.mkdtemp(prefix="streamrl-names-"))
    work.mkdir(parents=True, exist_ok=True)
    figures, only = Figures(work=work, deadline_s=began_s + asked.seconds), asked.only.split(",")
    hosts = "not asked for"
    with figures.server() as server, two_hosts() as made, ThreadPoolExecutor(asked.side_by_side) as pool:
        jobs: list[Callable[[], None]] = []
        if "live" in only:
            jobs.append(lambda: figures.live("emulated", 24))
        if "torch" in only:
            jobs.append(lambda: figures.live("torch", 8))
        if "hosts" in only and made:
            jobs.append(lambda: figures.live("emulated", 6, hosts=True))
        if "resumed" in only:
            jobs += [
                lambda n=n, s=s: figures.resumed(n, s, server.url)
                for n, s in enumerate((0.0, 0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 10.0))
            ]
        if "together" in only:
            jobs += [
                lambda n=n, s=s: figures.together("instant" if s < 0.1 else "apart", n, s, server.url)
                for n, s in enumerate((*SPACING_S, 0.0, 1.5))
            ]
        if "torch" in only:
            jobs += [
                lambda n=n, s=s: figures.together("torch", n, s, server.url, "torch") for n, s in enumerate((0.0, 3.0))
            ]
        done = [pool.submit(lambda job=job: None if figures.is_late() else job()) for job in jobs]
        for one in done:
            one.result()
        if "hosts" in only:
            hosts = "two network namespaces" if made else "not tried: making network namespaces takes root and ip"
        if "hosts" in only and made:
            with server_of_hosts(work) as own:
                for number, apart_s in enumerate((0.0, 0.0, 1.0, 4.0)):
                    figures.together("hosts", number, apart_s, own.url, hosts=2)
    for text in (*figures.wrong, *figures.said):
        print(text)
    result = {
        "figure": "names",
        "pairs": sum(figures.pairs.values()),
        "of": dict(figures.pairs),
        "live_runs_ended": len(figures.live_ended),
        "mixed": len(figures.mixed),
        "otherwise": len(figures.wrong) + len(figures.said),
        "hosts": hosts,
        "seconds": round(time.monotonic() - began_s),
        "load": round(os.getloadavg()[0], 1),
        "machine": socket.gethostname(),
    }
    if not (figures.wrong or figures.said or asked.keep):
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(result))
    raise SystemExit(1 if figures.wrong or figures.said else 0)


if __name__ == "__main__":
    main()
