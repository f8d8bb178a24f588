"""The files of docker compose agree with the programs that they start and look at. No container engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from orchestrator.cli.commands import app as orchestrator_app
from orchestrator.config.load import resolve
from orchestrator.observability.http.routes import GAUGES, GROUP_STAGES, OF_LAST_BATCH, exposition
from transport.broker.embedded import REMOVED
from workers.__main__ import app as worker_app

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
WORKER = {"worker": "generate-0.1", "kind": "generate", "running": 8, "idle": 0.25, "counters": {"tokens": 70.0}}
STATUS: dict[str, Any] = {
    **dict.fromkeys((*GAUGES, *GROUP_STAGES, "trained_version"), 1),
    "last": dict.fromkeys(OF_LAST_BATCH, 1.0),
    "blocked": {"stage": "scoring", "still_s": 70.0},
    "queues": {"events": 2},
    "workers": [WORKER],
}


def test_every_series_of_the_dashboards_is_exposed():
    exposed = set(re.findall(r"^(streamrl_\w+)", exposition(STATUS).decode(), re.MULTILINE))
    for file in (COMPOSE / "grafana" / "dashboards").glob("*.json"):
        asked = {name for expression in expressions(json.loads(file.read_text())) for name in series(expression)}
        assert asked, file
        assert asked <= exposed, file


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def series(expression: str) -> list[str]:
    return re.findall(r"streamrl_\w+", expression)


@pytest.mark.parametrize("name", ["run.toml", "run-cpu.toml", "run-sglang-cpu.toml"])
def test_the_runs_configuration_is_valid_over_every_preset_and_opens_the_port_that_is_published(name: str):
    for preset in ("tiny", "smollm2"):
        api = resolve(preset, [COMPOSE / name], [], {"STREAMRL_SECRET": 24 * "s"}).settings.api
        assert (api.host, api.port) == ("0.0.0.0", 8000)
    published = re.findall(r'ports: \["(.*)"\]', (ROOT / "docker-compose.yml").read_text())
    assert any(port.endswith(":8000") for port in published)
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_variable_of_the_compose_files_is_explained_in_the_sample():
    used = set()
    for file in (ROOT / "docker-compose.yml", *COMPOSE.glob("*.yml")):
        used |= set(re.findall(r"\$\{(\w+)", file.read_text()))
    explained = set(re.findall(r"^#?([A-Z_]+)=", (COMPOSE / "sample.env").read_text(), re.MULTILINE))
    assert used <= explained | {"STREAMRL_TAG", "STREAMRL_BUILD_NETWORK"}


@pytest.mark.parametrize("name", ["docker-compose.yml", "compose/cpu.yml"])
def test_the_run_has_as_many_ranks_as_the_trainer_starts(name: str):
    text = (ROOT / name).read_text()
    ranks = "${TRAINER_RANKS:-1}"
    assert f"- --set=trainer.ranks={ranks}\n" in text
    assert f"- --ranks={ranks}\n" in text[text.index("\n  trainer:\n") :]


class Loader(yaml.SafeLoader):
    """Which knows what Compose adds to YAML."""


Loader.add_constructor("!reset", lambda loader, node: None)
FILES = [ROOT / "docker-compose.yml", *sorted(COMPOSE.glob("*.yml"))]
PROGRAMS = {"streamrl-worker": worker_app, "streamrl-orchestrator": orchestrator_app}
OF_GPUS = {"--gpus", "--gpus-each", "--gpu-share"}


def commands_of(file: Path) -> dict[str, list[str]]:
    """Service -> what it runs of ours."""
    services: dict[str, Any] = yaml.load(file.read_text(), Loader)["services"]
    commands = {name: service.get("command", []) for name, service in services.items()}
    return {name: command for name, command in commands.items() if command and command[0] in PROGRAMS}


def options_of(command: Sequence[str]) -> dict[str, str]:
    return {part.partition("=")[0]: part.partition("=")[2] for part in command if part.startswith("--")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_option_that_a_service_is_started_with_is_one_of_its_command(file: Path):
    for program, name, *rest in commands_of(file).values():
        known = {option for one in get_command(PROGRAMS[program]).commands[name].params for option in one.opts}  # type: ignore[attr-defined]
        assert options_of(rest).keys() <= known, name


@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.name)
def test_a_command_that_a_file_says_again_lacks_nothing_but_gpus(file: Path):
    usual = commands_of(FILES[0])
    for name, command in commands_of(file).items():
        if name in usual:
            assert options_of(usual[name]).keys() - options_of(command).keys() <= OF_GPUS, name


def test_who_computes_on_gpus_may_share_them():
    services = commands_of(FILES[0]) | {"scoring": commands_of(COMPOSE / "reference-gpu.yml")["scoring"]}
    for name, variable in {"trainer": "TRAINER", "generation": "GENERATION", "scoring": "SCORING"}.items():
        assert options_of(services[name])["--gpu-share"] == f"${{{variable}_GPU_SHARE:-1}}"


def test_storage_units_are_called_by_their_own_names_and_scoring_can_read_from_them():
    services = yaml.load((COMPOSE / "units.yml").read_text(), Loader)["services"]
    options = options_of(services["store"]["command"])
    assert options["--listen"] == "0.0.0.0"
    assert "--advertise" not in options, "replicas have one command line"
    for service in services.values():
        assert service["secrets"] == ["broker_password", "streamrl_secret"]
        assert service["environment"]["STREAMRL_SECRET_FILE"] == "/run/secrets/streamrl_secret"


def test_the_broker_does_not_start_without_its_password(tmp_path: Path):
    def start(secret: Path) -> str:
        environment = {"PATH": "/usr/bin:/bin", "BROKER_PASSWORD_FILE": str(secret)}
        done = subprocess.run(
            ["bash", str(COMPOSE / "broker.sh")], env=environment, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 2, done
        return done.stderr

    assert "there is no password" in start(tmp_path / "absent")
    weak = tmp_path / "weak"
    weak.write_text("hush\n")
    assert "needs 8 or more" in start(weak)
    assert "hush" not in start(weak)


def test_the_service_that_runs_rewards_has_no_shared_secret_and_limits():
    text = (ROOT / "docker-compose.yml").read_text()
    scoring = text[text.index("\n  scoring:\n") : text.index("\n  trainer:\n")]
    assert "secrets: [broker_password]\n" in scoring
    assert 'STREAMRL_SECRET_FILE: ""' in scoring
    for line in ("tmpfs: [/tmp]", "pids_limit:", "mem_limit:"):
        assert line in scoring, line


def test_the_broker_of_the_containers_is_without_the_commands_that_the_embedded_one_is_without():
    script = (COMPOSE / "broker.sh").read_text().replace("\\\n", " ")
    (commands,) = re.findall(r"^for command in (.*?); do", script, re.MULTILINE)
    assert commands.split() == list(REMOVED)
