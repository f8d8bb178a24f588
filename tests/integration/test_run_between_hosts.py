"""A whole run over four hosts: a trainer's, and three workers of another site that pass versions on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.several_hosts import several_hosts
from transport.broker.embedded import packaged_binary
from transport.process.secret import SHARED_SECRET

pytestmark = pytest.mark.long  # seven processes that import torch

SECRET = "a secret that all these hosts share"
RUN_S = 400


def test_workers_of_another_site_get_versions_from_each_other(tmp_path: Path) -> None:
    environment = {**os.environ, SHARED_SECRET: SECRET, "STREAMRL_BROKER_PASSWORD": SECRET, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []

    with several_hosts(4) as hosts:
        first = hosts[0].address
        listen = ("--bind", first, "--port", "6379", "--requirepass", SECRET, "--save", "", "--dir", str(tmp_path))
        started.append(subprocess.Popen([*hosts[0].run, str(packaged_binary()), *listen], stdout=subprocess.DEVNULL))
        join = ("--broker", f"redis://{first}:6379", "--run", "hosts")

        def start(index: int, *command: str) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{index}-{command[1]}.log").open("wb") as log:
                argv = [*hosts[index].run, sys.executable, "-m", *command, *join]
                started.append(subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=log, stderr=log))
            return started[-1]

        try:
            size = ("--set", "run.batches=6", "--set", "eval.problems=0")
            orchestrator = start(0, "orchestrator", "serve", "--preset", "tiny", *size)
            start(0, "workers", "score", "--reward", "workers.scoring.rewards:digit_share")
            start(0, "workers", "train", "--listen", first)
            for index in (1, 2, 3):
                start(index, "workers", "generate", "--index", "auto", "--site", "far")
            assert orchestrator.wait(RUN_S) == 0, (tmp_path / "0-serve.log").read_text()[-3000:]
            for process in started[2:]:  # of the broker's own accord nothing ends
                assert process.wait(60) == 0
        finally:
            for process in started:
                process.kill()
                process.wait()
    planned = [said for said in lines(tmp_path / "0-serve.log") if said["event"] == "way of weights planned"]
    told, direct = Counter[str](), Counter[str]()
    for said in planned:  # those of the first version are told one after another, as they come
        told[said["weights"]] += said["workers"]
        direct[said["weights"]] += said["from_trainer"]
    assert len(told) >= 6
    assert max(told.values()) == 3, told
    assert set(direct.values()) == {1}, "the link between the sites carries each version once, the first too"


def lines(log: Path) -> list[dict[str, Any]]:
    """What a process said of itself; what it says to people is left out."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
