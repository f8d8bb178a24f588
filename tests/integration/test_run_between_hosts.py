"""Whole runs over several hosts, each with an address and a clock of its own: a trainer's, and three workers of another
site that pass versions on; and the ranks of a trainer on two hosts, with generation on a third.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.several_hosts import Host, several_hosts
from transport.broker.embedded import packaged_binary
from transport.process.secret import SHARED_SECRET

pytestmark = pytest.mark.long  # seven processes that import torch

SECRET = "a secret that all these hosts share"
RUN_S = 400
LEAVE_S = 60
"""For a worker to end after its run."""
TWO_RANKS = ("trainer.ranks=2", "trainer.parallel.tensor=2")
"""A rank has half of every layer: they meet in each forward pass."""


class OnHosts:
    """Processes of run "hosts" on these hosts, whose broker is on the first."""

    def __init__(self, hosts: Sequence[Host], directory: Path) -> None:
        self.hosts = hosts
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        self._workers: list[tuple[Path, subprocess.Popen[bytes]]] = []
        self.broker = f"redis://{hosts[0].address}:6379"
        listen = ("--bind", hosts[0].address, "--port", "6379", "--requirepass", SECRET, "--save", "")
        binary = str(packaged_binary())
        self._add([*hosts[0].run, binary, *listen, "--dir", str(directory)], {}, directory / "broker.log")

    def start(self, host: int, *command: str, **environ: str) -> subprocess.Popen[bytes]:
        log = self._directory / f"{host}-{command[1]}.log"
        argv = [*self.hosts[host].run, sys.executable, "-m", *command, "--broker", self.broker, "--run", "hosts"]
        started = self._add(argv, environ, log)
        if command[0] == "workers":
            self._workers.append((log, started))
        return started

    def _add(self, argv: Sequence[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        own = {SHARED_SECRET: SECRET, "STREAMRL_BROKER_PASSWORD": SECRET, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as said:
            process = subprocess.Popen(
                argv, env={**os.environ, **own, **environ}, cwd=self._directory, stdout=said, stderr=said
            )
        self._started.append(process)
        return process

    def audit(self) -> subprocess.CompletedProcess[str]:
        command = ("-m", "orchestrator", "inspect", "runs/hosts", "--audit", "--broker", self.broker)
        return subprocess.run(
            [*self.hosts[0].run, sys.executable, *command],
            env={**os.environ, "STREAMRL_BROKER_PASSWORD": SECRET},
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=LEAVE_S,
        )

    def workers_leave(self) -> None:
        """Each ends by itself, as the run is over. The broker does not."""
        for log, process in self._workers:
            assert process.wait(LEAVE_S) == 0, log.read_text()[-3000:]

    def kill(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@contextmanager
def run_on(hosts: Sequence[Host], directory: Path) -> Iterator[OnHosts]:
    made = OnHosts(hosts, directory)
    try:
        yield made
    finally:
        made.kill()


def joined(log: Path) -> int:
    """Generation workers that the orchestrator counts on."""
    return sum(said["event"] == "worker joined" and said["worker"].startswith("generate") for said in lines(log))


def test_workers_of_another_site_get_versions_from_each_other(tmp_path: Path) -> None:
    with several_hosts(4) as hosts, run_on(hosts, tmp_path) as run:
        size = ("--set", "run.batches=6", "--set", "eval.problems=0")
        serving = run.start(0, "orchestrator", "serve", "--preset", "tiny", *size)
        run.start(0, "workers", "score", "--reward", "workers.scoring.rewards:digit_share")
        for index in (1, 2, 3):
            run.start(index, "workers", "generate", "--index", "auto", "--site", "far")
        deadline_s = time.monotonic() + RUN_S
        while joined(tmp_path / "0-serve.log") < 3:  # before there is a version that all shall be told of
            assert time.monotonic() < deadline_s, (tmp_path / "0-serve.log").read_text()[-3000:]
            time.sleep(0.1)
        run.start(0, "workers", "train", "--listen", hosts[0].address)
        assert serving.wait(RUN_S) == 0, (tmp_path / "0-serve.log").read_text()[-3000:]
        run.workers_leave()
    planned = [said for said in lines(tmp_path / "0-serve.log") if said["event"] == "way of weights planned"]
    told, direct = Counter[str](), Counter[str]()
    for said in planned:  # those of the first version are told one after another, as they come
        told[said["weights"]] += said["workers"]
        direct[said["weights"]] += said["from_trainer"]
    assert len(told) >= 6
    assert max(told.values()) == 3, told
    assert set(direct.values()) == {1}, "the link between the sites carries each version once, the first too"


def test_ranks_on_two_hosts_that_an_engine_started_meet_at_the_broker_and_generation_is_on_a_third(
    tmp_path: Path,
) -> None:
    """As srun starts them: numbered by it, and named as one start; where rank 0 listens, the others hear of."""
    with several_hosts(3) as hosts, run_on(hosts, tmp_path) as run:
        settings = [part for one in (*TWO_RANKS, "run.batches=3", "eval.problems=0") for part in ("--set", one)]
        serving = run.start(0, "orchestrator", "serve", "--preset", "tiny", *settings)
        run.start(0, "workers", "score", "--reward", "workers.scoring.rewards:digit_share")
        for rank in (0, 1):
            together = {"SLURM_PROCID": str(rank), "STREAMRL_RANKS": "one-start"}
            run.start(rank, "workers", "train", "--listen", hosts[rank].address, **together)
        run.start(2, "workers", "generate", "--index", "0")
        assert serving.wait(RUN_S) == 0, (tmp_path / "0-serve.log").read_text()[-3000:]
        run.workers_leave()
        audit = run.audit()
        assert audit.returncode == 0, audit.stdout + audit.stderr
        trained = [line for line in lines(tmp_path / "runs" / "hosts" / "metrics.jsonl") if "batch" in line]
        assert [line["batch"] for line in trained] == [0, 1, 2]
        first, second, generation = (host.sent_bytes for host in hosts)
        assert min(first, second) > 1_000_000, "activations and gradients cross between the ranks' hosts"
        assert generation > 10_000, "rows come from the third"


def lines(log: Path) -> list[dict[str, Any]]:
    """What a process said of itself; what it says to people, and a line that it still writes, are left out."""
    whole = log.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
