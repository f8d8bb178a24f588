"""docker compose as a person uses it, for tests and benchmarks: a project of its own, on ports of its own.

Nothing is faked here: the engine is the one that ``docker`` on PATH reaches (DOCKER_HOST), the images are ours.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transport.process.secret import Purpose, derive

ROOT = Path(__file__).parents[2]
CPU = ("docker-compose.yml", "compose/cpu.yml")
BUILD_S = 1800.0
KINDS = ("broker", "orchestrator", "generation", "scoring", "trainer")


def why_not() -> str:
    """Why no stack can be brought up here, "" where one can."""
    if shutil.which("docker") is None:
        return "there is no docker on PATH"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return f"`{' '.join(command)}` fails: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    return ""


def provide_torch_wheel() -> None:
    """Put the CPU build of torch where builds look first, if this machine's pip has it; else builds ask their index."""
    wheels = ROOT / "compose" / "wheels"
    if not list(wheels.glob("torch-*")):
        pip = [str(ROOT / ".venv" / "bin" / "python"), "-m", "pip", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "-d", str(wheels), "torch==2.13.0+cpu"], capture_output=True, timeout=600)


class Stack:
    """One project. files: compose files.  variables: over those of a fresh .env."""

    def __init__(self, directory: Path, config: str, *, files: Sequence[str] = CPU, **variables: str) -> None:
        self.directory = directory
        self.files = files
        self.secret = secrets.token_hex(16)
        self.key = derive(self.secret, Purpose.HTTP)
        self.port = free_port()
        (directory / "run.toml").write_text(config, encoding="utf-8")
        self.environment = {
            "STREAMRL_BROKER_PASSWORD": secrets.token_hex(16),
            "STREAMRL_SECRET": self.secret,
            "STREAMRL_HTTP_KEY": self.key,
            "GRAFANA_PASSWORD": secrets.token_hex(16),
            "STREAMRL_PORT": str(self.port),
            "STREAMRL_CONFIG": str(directory / "run.toml"),
            "COMPOSE_PROJECT_NAME": f"streamrl-test-{os.getpid()}-{secrets.token_hex(2)}",
            **variables,
        }

    def compose(
        self, *arguments: str, timeout_s: float = 180.0, check: bool = True, without: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """One command. without: variables to leave out."""
        files = [part for file in self.files for part in ("-f", str(ROOT / file))]
        environment = {**os.environ, **self.environment}
        for name in without:
            del environment[name]
        command = ["docker", "compose", *files, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}\n{done.stderr}\n{self.words()}"
        return done

    def build(self) -> None:
        self.compose("build", timeout_s=BUILD_S)

    def up(self, *arguments: str, timeout_s: float = 300.0) -> None:
        self.compose("up", "-d", "--no-build", *arguments, timeout_s=timeout_s)

    def down(self) -> None:
        """Containers, network and volumes are gone afterwards."""
        self.compose(
            "--profile", "*", "down", "--volumes", "--timeout", "5", "--remove-orphans", timeout_s=180.0, check=False
        )

    def containers(self, service: str, *, all_states: bool = False) -> list[dict[str, Any]]:
        """As ``docker compose ps`` tells of them."""
        states = ["--all"] if all_states else []
        files = [part for file in self.files for part in ("-f", str(ROOT / file))]
        done = subprocess.run(
            ["docker", "compose", *files, "ps", *states, "--format", "json", service],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def signal(self, service: str, name: str, *, rank: int | None = None) -> Signalled:
        """Send a signal to every process in one container of ``service``, as another program there would; or to one
        rank of the trainer's.

        Not ``docker kill``: the engine takes that for the wish of a person, and starts nothing again.
        """
        container = str(self.containers(service)[0]["ID"])
        signalled = Signalled(container, restarts_of(container))
        of_rank = f"""for of in /proc/[0-9]*; do
          if [[ $(tr '\\0' ' ' < $of/cmdline) == *" --index {rank} " ]]; then kill -{name} ${{of#/proc/}}; fi
        done"""
        command = ["docker", "exec", container, "bash", "-c", f"kill -{name} -1" if rank is None else of_rank]
        subprocess.run(command, capture_output=True, timeout=60, check=False)  # it dies with the container
        return signalled

    def status(self) -> dict[str, Any]:
        """The run's status, empty while nobody answers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/status")
        request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                return json.load(answer)
        except (OSError, urllib.error.URLError, json.JSONDecodeError):
            return {}

    def trained(self) -> int:
        """Batches, -1 while nobody answers."""
        return int(self.status().get("trained_version", -1))

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 180.0) -> float:
        """Returns the seconds that it took."""
        begun_s = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - begun_s
            assert waited_s < timeout_s, f"no {what} after {timeout_s:.0f} s: {self.status()}\n{self.words()}"
            time.sleep(0.2)
        return time.monotonic() - begun_s

    def wait_for_batches(self, more: int, *, timeout_s: float = 180.0) -> None:
        self.wait_until(lambda: self.trained() >= 0, "answer of the orchestrator", timeout_s=timeout_s)
        wanted = self.trained() + more
        self.wait_until(lambda: self.trained() >= wanted, f"batch {wanted}", timeout_s=timeout_s)

    def orchestrate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of streamrl-orchestrator in a container of its own, beside the run's files."""
        run = ["run", "--rm", "--no-deps", "-T", "orchestrator", "streamrl-orchestrator"]
        return self.compose(*run, *arguments, timeout_s=120.0, check=False)

    def words(self) -> str:
        """What the containers said last."""
        files = [part for file in self.files for part in ("-f", str(ROOT / file))]
        command = ["docker", "compose", *files, "logs", "--no-color", "--tail", "15"]
        environment: Mapping[str, str] = {**os.environ, **self.environment}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60).stdout


class Signalled(NamedTuple):
    """A container that got a signal. restarts: until then."""

    container: str
    restarts: int

    def is_started_again(self) -> bool:
        return restarts_of(self.container) > self.restarts


def restarts_of(container: str) -> int:
    return int(inspected(container, "{{.RestartCount}}"))


def inspected(thing: str, form: str) -> str:
    """``docker inspect`` in a form of one line."""
    command = ["docker", "inspect", "--format", form, thing]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def layer_bytes(images: Sequence[str]) -> int:
    """What images take together: a layer that several have counts once."""
    sizes: dict[str, int] = {}
    for image in images:
        layers = json.loads(inspected(image, "{{json .RootFS.Layers}}"))
        command = ["docker", "history", "--no-trunc", "--human=false", "--format", "{{.Size}}", image]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        steps = [int(size) for size in reversed(done.stdout.split()) if int(size)]
        sizes.update(zip(layers, steps, strict=True))
    return sum(sizes.values())
