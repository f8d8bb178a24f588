"""How a run comes back after its generation worker was cut off from the trainer: ``make bench NAME=cut_off``.

Two hosts as network namespaces on a bridge: broker, orchestrator, scoring and trainer on the first, the only generation
worker on the second. A firewall rule there drops all packets to the trainer's ports, the broker stays reachable; after
some seconds the rule goes. ARGS="30 150" names the seconds of each cut (30, 150 and 600 by default, one after another,
14 minutes; "600" alone takes 11).

    back_after_heal_s   from the end of the rule to the next trained batch, by the seconds of the cut
    aside_said_s        from the beginning of the rule until the worker is said to stand aside: status, both logs
    audit               whether the run's audit is clean in the end

Needs root, iproute2, unshare and iptables.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hosts import Processes, lines, until
from tests.fakes.several_hosts import several_hosts

CUTS_S = (30.0, 150.0, 600.0)
PORTS = "7400-7409"
START_S, BACK_S = 240.0, 120.0
ENOUGH_BATCHES = 100_000


def cut(host: str, trainer: str, *, begin: bool) -> None:
    rule = ("OUTPUT", "-p", "tcp", "-d", trainer, "--dport", PORTS.replace("-", ":"), "-j", "DROP")
    command = ["ip", "netns", "exec", host, "iptables", "-A" if begin else "-D", *rule]
    subprocess.run(command, check=True, capture_output=True, timeout=10)


def has_said(log: Path, words: str) -> Callable[[], bool]:
    """Whether ``log`` has a line more than now that begins with ``words``."""

    def count() -> int:
        return sum(str(line["event"]).startswith(words) for line in lines(log))

    before = count()
    return lambda: count() > before


def measure(directory: Path, cuts_s: list[float]) -> dict[str, Any]:
    back: dict[str, float] = {}
    aside: dict[str, dict[str, float]] = {}
    with several_hosts(2) as (first, second), Processes(directory, broker_on=first) as run:
        size = ("--set", f"run.batches={ENOUGH_BATCHES}", "--set", "eval.problems=0", "--set", "tensors.ucx=off")
        serving = run.start(first, "orchestrator", "serve", "--preset", "tiny", *size)
        run.start(first, "workers", "score", "--reward", "workers.scoring.rewards:digit_share")
        run.start(first, "workers", "train", "--listen", first.address, "--ports", PORTS)
        run.start(second, "workers", "generate", "--index", "0")
        metrics = run.home / "metrics.jsonl"

        def batches() -> int:
            return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

        until(lambda: batches() >= 3, START_S, "the first batches", serving)
        for seconds in cuts_s:
            said = {
                "orchestrator": has_said(run.log_of("serve"), "worker stands aside: "),
                "worker": has_said(run.log_of("generate"), "standing aside: "),
                "status": lambda: any(one["aside_s"] is not None for one in run.status(first).get("generation", ())),
            }
            found: dict[str, float] = {}
            begun_s = time.monotonic()
            cut(second.name, first.address, begin=True)
            while time.monotonic() < begun_s + seconds:
                for name, is_said in said.items():
                    if name not in found and is_said():
                        found[name] = round(time.monotonic() - begun_s, 1)
                time.sleep(0.5)
            before, healed_s = batches(), time.monotonic()
            cut(second.name, first.address, begin=False)
            until(lambda: batches() > before, BACK_S, f"a batch after {seconds:g} s", serving)  # noqa: B023
            name = f"{seconds:g}"
            back[name], aside[name] = round(time.monotonic() - healed_s, 1), found
            print(f"cut off for {name} s: back after {back[name]} s, said to stand aside after {found} s", flush=True)
            time.sleep(5.0)
        audit = run.audit(first)
        return {"back_after_heal_s": back, "aside_said_s": aside, "audit": audit, "batches": batches()}


def main() -> None:
    if not shutil.which("iptables"):
        raise SystemExit("this needs iptables (apt-get install iptables)")
    cuts_s = [float(one) for one in sys.argv[1:]] or list(CUTS_S)
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), cuts_s)
    print(json.dumps({**figures, "python": platform.python_version()}))


if __name__ == "__main__":
    main()
