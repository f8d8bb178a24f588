"""The processes of a run on one machine: which there are, and their command lines, on which no secret stands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.launch.processes import ChildSpec
from transport.contracts.settings import ScoringSettings, Settings
from transport.contracts.types import WorkerKind
from transport.process.spawn import python_module


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleet:
    """Of one run. url: of the broker, without its password.  env: what no command line may show."""

    settings: Settings
    run_dir: Path
    model_dir: Path
    url: str
    env: Mapping[str, str]

    def orchestrator(self) -> ChildSpec:
        return ChildSpec(
            name="orchestrator", argv=python_module("orchestrator", "serve", *self._common()), env=self.env
        )

    def worker(self, kind: WorkerKind, index: int) -> ChildSpec:
        broker = self.settings.broker
        reach = ["--tls-ca", broker.tls_ca, "--outage-s", str(broker.outage_s)]
        argv = python_module("workers", kind.value, "--index", str(index), *self._common(), *reach)
        return ChildSpec(name=f"{kind.value}-{index}", argv=[*argv, *self._local_arguments(kind)], env=self.env)

    def workers(self) -> list[tuple[WorkerKind, int]]:
        """How many of each kind it begins with."""
        settings = self.settings
        if settings.trainer.engine == "none":
            return [(WorkerKind.PUBLISH, 1), (WorkerKind.GENERATE, settings.generation.workers)]
        return [
            (WorkerKind.TRAIN, settings.trainer.ranks),
            (WorkerKind.GENERATE, settings.generation.workers),
            (WorkerKind.SCORE, settings.scoring.workers),
        ]

    def _local_arguments(self, kind: WorkerKind) -> list[str]:
        """What only this machine's owner may allow: code named here was named on the user's own command line."""
        if kind is WorkerKind.PUBLISH:
            weights_dir = self.settings.service.weights_dir
            return ["--weights-dir", weights_dir] if weights_dir else []
        if kind is WorkerKind.SCORE:
            return reward_arguments(self.settings.scoring)
        arguments = ["--trust-remote-code"] if self.settings.model.trust_remote_code else []
        return arguments + (self._server_arguments() if kind is WorkerKind.GENERATE else [])

    def _server_arguments(self) -> list[str]:
        """Which inference server a generation worker uses, or how it starts its own."""
        generation = self.settings.generation
        arguments = ["--engine-url", generation.engine_url] if generation.engine_url else []
        arguments += ["--server-command", shlex.join(generation.server_command)] if generation.server_command else []
        return arguments + (["--server-args", shlex.join(generation.server_args)] if generation.server_args else [])

    def _common(self) -> list[str]:
        """The arguments of every process of the run."""
        joined = ["--broker", self.url, "--run", self.settings.run.name]
        return [*joined, "--run-dir", str(self.run_dir), "--model-dir", str(self.model_dir)]


def reward_arguments(scoring: ScoringSettings) -> list[str]:
    """What allows a scoring worker the user's reward: its name, and the directory that it lies in."""
    path = ["--reward-path", scoring.reward_path] if scoring.reward_path else []
    return ["--reward", scoring.reward, *path] if scoring.reward else []
