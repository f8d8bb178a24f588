"""Processes on several hosts that pass weights on: a trainer, and workers of which each follows its planned route."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.core.broadcast import Plan
from orchestrator.loop.routes import plan_of, plan_routes
from tests.fakes.several_hosts import Host
from transport.contracts.messages import Addresses, WeightManifest, WorkerStatus, encode, manifest_decoder
from transport.contracts.types import WorkerId, WorkerKind
from transport.process.secret import SHARED_SECRET
from workers.weights.updates import along


class WeightPeer:
    """A process of ``weight_peer.py`` on ``host``."""

    def __init__(self, host: Host, *arguments: str) -> None:
        self.host = host
        environment = {**os.environ, SHARED_SECRET: "a secret that all these hosts share", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*host.run, sys.executable, "-m", "tests.fakes.weight_peer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def pull(self, manifest: WeightManifest) -> None:
        self.tell(json.dumps({"manifest": base64.b64encode(encode(manifest)).decode()}))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class Site:
    """A trainer, whose host has the broker, and workers elsewhere. plan: of the version that was published last."""

    def __init__(
        self,
        hosts: Sequence[Host],
        directory: Path,
        megabytes: float,
        *,
        site: str = "far",
        wait_s: float = 10.0,
        ranks: int = 1,
    ) -> None:
        """wait_s: how long the workers bear silence.  ranks: of the trainer, on the first hosts."""
        self._site = site
        self.ranks = [
            WeightPeer(host, "publish", host.address, str(megabytes), str(directory / str(rank)), str(rank), str(ranks))
            for rank, host in enumerate(hosts[:ranks])
        ]
        broker = f"{hosts[0].address}:6379"
        self.workers = [WeightPeer(host, "receive", broker, str(wait_s)) for host in hosts[ranks:]]
        self._said = [worker.answer() for worker in self.workers]

    @property
    def trainer(self) -> WeightPeer:
        """Its first rank."""
        return self.ranks[0]

    def _published(self, version: int) -> WeightManifest:
        for rank in self.ranks:
            rank.tell(str(version))
        said = [manifest_decoder.decode(base64.b64decode(rank.answer()["manifest"])) for rank in self.ranks]
        parts = tuple(manifest.parts[rank] for rank, manifest in enumerate(said)) if len(said) > 1 else ()
        return replace(said[0], parts=parts)

    def _statuses(self, number: int) -> dict[WorkerId, WorkerStatus]:
        """What the first ``number`` workers say of themselves."""
        return {
            (worker := worker_name(n)): WorkerStatus(
                worker_id=worker,
                kind=WorkerKind.GENERATE,
                host="",
                pid=1,
                protocol=1,
                host_id=said["host_id"],
                site=self._site,
                relay=said["relay"],
                doing="waiting",
            )
            for n, said in enumerate(self._said[:number])
        }

    def begin(self, version: int, number: int = 0) -> WeightManifest:
        """Publish it; ``number`` workers, 0: all, pull it along the routes that the orchestrator plans."""
        self._manifest, self._plan = self._published(version), None
        self.routes: list[Addresses] = []
        self.routed_by_part = 0
        self.join(number or len(self.workers))
        return self._manifest

    def join(self, number: int) -> None:
        """So many pull the version from now on, those that do already included."""
        statuses = self._statuses(number)
        self._plan = plan_of(self._manifest, statuses, self._plan)
        planned = plan_routes(self.plan, self._manifest, statuses)
        self.routed_by_part = len(planned.parts)
        for worker in range(len(self.routes), number):
            name = worker_name(worker)
            self.routes.append(planned.routes.get(name, ()))
            manifest = along(self._manifest, planned, name)
            assert manifest is not None
            self.workers[worker].pull(manifest)

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def close(self) -> None:
        for peer in (*self.workers, *self.ranks):
            peer.close()


def worker_name(number: int) -> WorkerId:
    return WorkerId(f"generate-{number}.1")
