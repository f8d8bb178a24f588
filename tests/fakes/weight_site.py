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

from orchestrator.loop.routes import plan_routes
from tests.fakes.several_hosts import Host
from transport.contracts.messages import WeightManifest, WorkerStatus, encode, manifest_decoder
from transport.contracts.types import WorkerId, WorkerKind
from transport.process.secret import SHARED_SECRET


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
    """A trainer, and workers elsewhere, all of which pass weights on by now."""

    def __init__(self, hosts: Sequence[Host], directory: Path, megabytes: float, site: str = "far") -> None:
        self._site = site
        self.trainer = WeightPeer(hosts[0], "publish", hosts[0].address, str(megabytes), str(directory))
        self.workers = [WeightPeer(host, "receive") for host in hosts[1:]]
        self._relays: list[tuple[str, str]] = []

    def begin_to_pass_on(self) -> None:
        """By a version that each of them gets from the trainer."""
        first = self._published(0)
        for worker in self.workers:
            worker.pull(first)
        for worker in self.workers:
            said = worker.answer()
            self._relays.append((said["host_id"], said["relay"]))

    def _published(self, version: int) -> WeightManifest:
        self.trainer.tell(str(version))
        return manifest_decoder.decode(base64.b64decode(self.trainer.answer()["manifest"]))

    def statuses(self, number: int) -> dict[WorkerId, WorkerStatus]:
        """What the first ``number`` workers say of themselves."""
        return {
            (worker := WorkerId(f"generate-{n}.1")): WorkerStatus(
                worker_id=worker,
                kind=WorkerKind.GENERATE,
                host="",
                pid=1,
                protocol=1,
                host_id=host,
                site=self._site,
                relay=relay,
            )
            for n, (host, relay) in enumerate(self._relays[:number])
        }

    def begin(self, version: int, number: int = 0) -> WeightManifest:
        """Publish it; ``number`` workers, 0: all, pull it along the routes that the orchestrator plans."""
        manifest = self._published(version)
        number = number or len(self.workers)
        routes = plan_routes(manifest, self.statuses(number))
        self.routes = [routes[WorkerId(f"generate-{n}.1")] for n in range(number)]
        for worker, route in zip(self.workers[:number], self.routes, strict=True):
            worker.pull(replace(manifest, sources=(*route, *manifest.sources)))
        return manifest

    def close(self) -> None:
        for peer in (*self.workers, self.trainer):
            peer.close()
