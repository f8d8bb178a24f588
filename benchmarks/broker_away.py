"""How soon a broker that is away is said, and by whom: ``make bench NAME=broker_away``.

Two hosts as network namespaces on a bridge: the broker on the first, and on the second a whole run (``run --plain``:
supervisor, orchestrator, generation, scoring, trainer), which calls the broker's host by its name. The broker is taken
away in four ways, each for AWAY_S seconds, and a fifth time for good:

    stopped    SIGSTOP: connections stay, nothing is answered
    killed     its process ends: connection refused
    dropped    a firewall rule on its host drops all packets
    unnamed    its process ends, and its name goes from the hosts' file: as a container that is stopped
    for good   as unnamed; every process has to end within broker.outage_s, OUTAGE_S

    said_within_s    of each way and process: from the fault to the line in its log; terminal, /status
    back_after_s     of each way: from its end to the next trained batch
    blamed           lines of a log, and looks at /status, that name another culprit meanwhile
    noise            lines of asyncio about futures that nobody retrieved
    ended_after_s    for good: until the last process was gone
    audit            whether the run's audit is clean after the first four

Needs root, iproute2, unshare and iptables; takes 5 minutes.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hosts import PORT, Processes, lines, until
from tests.fakes.several_hosts import Host, several_hosts

NAME = "broker.example"
AWAY_S, OUTAGE_S, START_S, BACK_S = 15.0, 40.0, 240.0, 90.0
CHILDREN = ("supervisor", "orchestrator", "generate-0", "score-0", "train-0")


class Broken:
    """The broker of ``run``, and the ways to take it away and to bring it back."""

    def __init__(self, run: Processes, host: Host, names: Path) -> None:
        self._run, self._host, self._names = run, host, names
        self._named = names.read_text()
        self.ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "stopped": (lambda: self._signal(signal.SIGSTOP), lambda: self._signal(signal.SIGCONT)),
            "killed": (lambda: self._signal(signal.SIGKILL), self._start),
            "dropped": (lambda: self._firewall("-A"), lambda: self._firewall("-D")),
            "unnamed": (self.unname, self._name_again),
        }

    def _signal(self, number: signal.Signals) -> None:
        process = self._run.started["broker"]
        process.send_signal(number)
        if number is signal.SIGKILL:
            process.wait()

    def _start(self) -> None:
        self._run.start_broker()

    def _firewall(self, what: str) -> None:
        rule = ("INPUT", "-p", "tcp", "--dport", str(PORT), "-j", "DROP")
        command = ["ip", "netns", "exec", self._host.name, "iptables", what, *rule]
        subprocess.run(command, check=True, capture_output=True, timeout=10)

    def unname(self) -> None:
        self._names.write_text("127.0.0.1 localhost\n")  # in place: it is mounted where the run looks
        self._signal(signal.SIGKILL)

    def _name_again(self) -> None:
        self._start()
        self._names.write_text(self._named)


def said_at(log: Path, since: float) -> float | None:
    """Wall clock of the first line since then that says that the broker is away."""
    for line in lines(log):
        at = datetime.fromisoformat(line["timestamp"]).timestamp()
        if at >= since and str(line["event"]).startswith("broker ") and " is away since " in line["event"]:
            return at
    return None


def blames(log: Path, since: float) -> int:
    """Lines since then that name somebody else: the wait of a watchdog, workers that are lost."""
    return sum(
        line["event"] in ("no progress", "worker lost", "no sign of life; ending it")
        for line in lines(log)
        if datetime.fromisoformat(line["timestamp"]).timestamp() >= since
    )


def measure(directory: Path) -> dict[str, Any]:
    within: dict[str, dict[str, float | None]] = {}
    back: dict[str, float] = {}
    blamed = 0
    with several_hosts(2) as (first, second):
        names = Path("/etc/netns") / second.name / "hosts"  # what `ip netns exec` mounts over /etc/hosts
        names.parent.mkdir(parents=True)
        names.write_text(f"127.0.0.1 localhost\n{first.address} {NAME}\n")
        (names.parent / "resolv.conf").write_text("")
        try:
            with Processes(directory, broker_on=first, name=NAME) as run:
                broken = Broken(run, first, names)
                size = ("run.batches=100000", "eval.problems=0", f"broker.outage_s={OUTAGE_S:g}", "liveness.warn_s=5")
                settings = [part for one in size for part in ("--set", one)]
                running = run.start(second, "orchestrator", "run", "--preset", "tiny", "--plain", *settings)
                metrics, logs, terminal = run.home / "metrics.jsonl", run.home / "logs", run.log_of("run")

                def batches() -> int:
                    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

                until(lambda: batches() >= 3, START_S, "the first batches", running)
                for way, (take_away, bring_back) in broken.ways.items():
                    since, notes, found = time.time(), terminal.read_text().count(" is away since "), {}
                    take_away()
                    while time.time() < since + AWAY_S:
                        if "terminal" not in found and terminal.read_text().count(" is away since ") > notes:
                            found["terminal"] = round(time.time() - since, 1)
                        seen = run.status(second)
                        if "/status" not in found and seen.get("broker"):
                            found["/status"] = round(time.time() - since, 1)
                        blamed += bool(found) and (seen.get("blocked") or {"stage": "broker"})["stage"] != "broker"
                        time.sleep(0.2)
                    for process in CHILDREN:
                        at = said_at(logs / f"{process}.log", since)
                        found[process] = None if at is None else round(at - since, 1)
                        blamed += blames(logs / f"{process}.log", since)
                    within[way] = {name: found.get(name) for name in (*CHILDREN, "terminal", "/status")}
                    before, healed_s = batches(), time.monotonic()
                    bring_back()
                    until(lambda: batches() > before, BACK_S, f"a batch after {way}", running)  # noqa: B023
                    back[way] = round(time.monotonic() - healed_s, 1)
                    print(f"{way}: said within {within[way]} s, back after {back[way]} s", flush=True)
                    time.sleep(5.0)
                audit = run.audit(second)
                processes = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
                begun_s = time.monotonic()
                broken.unname()
                _, alive = psutil.wait_procs(processes, timeout=3 * OUTAGE_S)
                ended_s = round(time.monotonic() - begun_s, 1)
                last = terminal.read_text().strip().splitlines()[-1]
                noise = sum(log.read_text().count("never retrieved") for log in logs.glob("*.log"))
        finally:
            shutil.rmtree(names.parent)
    return {
        "said_within_s": max((s if s is not None else 1e9) for one in within.values() for s in one.values()),
        "said": within,
        "back_after_s": back,
        "blamed": blamed,
        "noise": noise,
        "ended_after_s": ended_s,
        "left": len(alive),
        "last_line": last,
        "audit": audit,
    }


def main() -> None:
    if os.geteuid() or not shutil.which("iptables"):
        raise SystemExit("this needs root and iptables (apt-get install iptables)")
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory))
    print(json.dumps({**figures, "python": platform.python_version()}))


if __name__ == "__main__":
    main()
