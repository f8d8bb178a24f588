"""Processes of one run on hosts that are network namespaces, for benches that break what lies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.several_hosts import Host
from transport.broker.embedded import packaged_binary
from transport.process.secret import SHARED_SECRET

SECRET = "a secret that all these hosts share"
RUN, PORT = "hosts", 6379
AUDIT_S, LEAVE_S = 120.0, 30.0


class Processes:
    """Started on hosts, with a log each, and ended with the block. name: what they call the broker's host."""

    def __init__(self, directory: Path, *, broker_on: Host, name: str = "") -> None:
        self._directory = directory
        self._broker_on = broker_on
        self.broker_url = f"redis://{name or broker_on.address}:{PORT}"
        self.home = directory / "runs" / RUN
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.start_broker()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self.started.values():
            process.kill()
            process.wait()
        if kind is not None:
            for name in self.started:
                sys.stderr.write(f"--- {name}\n{self.log_of(name).read_text()[-3000:]}\n")

    def start_broker(self) -> subprocess.Popen[bytes]:
        """Also again, on what it wrote."""
        listen = ("--bind", self._broker_on.address, "--port", str(PORT), "--requirepass", SECRET)
        files = ("--appendonly", "yes", "--save", "", "--dir", str(self._directory))
        argv = [*self._broker_on.run, str(packaged_binary()), *listen, *files]
        return self._add("broker", argv)

    def start(self, host: Host, *command: str) -> subprocess.Popen[bytes]:
        """``python -m command`` of this run. Its log has the name of the command."""
        where = ("--broker", self.broker_url, "--run", RUN)
        if command[:2] == ("orchestrator", "run"):
            where = ("--set", f"broker.url={self.broker_url}", "--name", RUN)
        argv = [*host.run, sys.executable, "-m", *command, *where]
        return self._add(command[1], argv)

    def _add(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        own = {SHARED_SECRET: SECRET, "STREAMRL_BROKER_PASSWORD": SECRET, "OMP_NUM_THREADS": "1"}
        with self.log_of(name).open("ab") as said:
            process = subprocess.Popen(argv, env={**os.environ, **own}, cwd=self._directory, stdout=said, stderr=said)
        self.started[name] = process
        return process

    def log_of(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def status(self, host: Host) -> dict[str, Any]:
        """``/status``, as it is seen on ``host``; {} where it does not answer in time."""
        address = (self.home / "api.address").read_text().strip().rstrip("/")
        key = (self.home / "api.secret").read_text().strip()
        read = ["curl", "-s", "-m", "5", "-H", f"Authorization: Bearer {key}", f"{address}/status"]
        looked = subprocess.run([*host.run, *read], capture_output=True, check=False, timeout=AUDIT_S)
        return json.loads(looked.stdout) if looked.returncode == 0 else {}

    def audit(self, host: Host) -> str:
        """The last line of the audit of a run that goes on."""
        command = ("-m", "orchestrator", "inspect", f"runs/{RUN}", "--audit", "--broker", self.broker_url)
        env = {**os.environ, "STREAMRL_BROKER_PASSWORD": SECRET}
        looked = subprocess.run(
            [*host.run, sys.executable, *command],
            env=env,
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=AUDIT_S,
        )
        return (looked.stdout.strip().splitlines() or [looked.stderr.strip()])[-1]


def until(is_so: Callable[[], bool], limit_s: float, what: str, needed: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError: it was not so in time, or the process that it needs ended."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s or needed.poll() is not None:
            raise RuntimeError(f"{what}: not within {limit_s:g} s (exit code {needed.poll()})")
        time.sleep(0.2)


def lines(log: Path) -> list[dict[str, Any]]:
    """What a process said of itself; a line that it still writes, and what is no JSON, are left out."""
    whole = log.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0] if log.exists() else ""
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
