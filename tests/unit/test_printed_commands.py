"""What users are told to type runs as it is printed, and what they are told to open opens."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.run_directory import resume_command
from orchestrator.http import page_links
from tests.fakes.command_line import REPOSITORY
from transport.contracts.settings import BrokerSettings, Settings
from transport.process.programs import MAKE_FROM, command

SCRIPTS = Path(sys.executable).parent


def shell(line: str, *, cwd: Path) -> str:
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.parametrize("path", ["/usr/bin:/bin", f"{SCRIPTS}:/usr/bin:/bin"])
@pytest.mark.parametrize("program", ["streamrl-orchestrator", "streamrl-worker"])
def test_a_command_runs_whether_or_not_path_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, program: str
):
    monkeypatch.setenv("PATH", path)
    monkeypatch.chdir(tmp_path)
    line = command(program, "--help")
    assert line.startswith(program) == (path != "/usr/bin:/bin")
    assert "Usage" in shell(line, cwd=tmp_path)


@pytest.mark.parametrize("interpreter", [sys.executable, "/opt/other/bin/python"])
def test_a_script_that_lies_elsewhere_is_named_if_it_is_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str
):
    script = tmp_path / "streamrl-worker"
    script.write_text(f"#!{interpreter}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command("streamrl-worker").startswith("streamrl-worker") == (interpreter == sys.executable)


def test_a_path_is_named_from_where_its_reader_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "my runs"
    (place / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert command("x", place / "a").endswith(" 'my runs/a'")
    monkeypatch.chdir(place / "a")
    assert command("x", place).endswith(f" {shlex.quote(str(place))}")
    assert shell(f"ls {shlex.quote(str(place))}", cwd=place / "a") == "a"


def test_what_make_started_goes_on_by_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    for start, typed in ((REPOSITORY, "make run ARGS="), (tmp_path, f"make -C {REPOSITORY} run ARGS=")):
        monkeypatch.setenv(MAKE_FROM, str(start))
        line = resume_command(Path("runs/$x 1"), Settings())
        assert line.startswith(typed)
        would_run = shell(line.replace("make", "make -n", 1), cwd=start)
        (recipe,) = [each for each in would_run.splitlines() if "streamrl-orchestrator run" in each]
        assert shlex.split(recipe)[-3:] == ["--resume", "--name", "$x 1"]


def test_a_run_elsewhere_is_named_with_its_directory_and_its_own_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    settings = Settings(broker=BrokerSettings(url="redis://host"))
    line = resume_command(Path("elsewhere/x"), settings)
    assert line.endswith("run --resume --name x --dir elsewhere --set broker.url=redis://host")
    monkeypatch.chdir(tmp_path.parent)
    assert f"--name x --dir {tmp_path.name}/elsewhere" in resume_command(tmp_path / "elsewhere" / "x", settings)


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("127.0.0.1:80", ["127.0.0.1:80"]),
        ("0.0.0.0:80", ["127.0.0.1:80", f"{os.uname().nodename}:80"]),
        ("[::]:80", ["[::1]:80", f"{os.uname().nodename}:80"]),
    ],
)
def test_a_link_of_the_page_is_an_address_that_a_browser_reaches(tmp_path: Path, address: str, hosts: list[str]):
    files = tmp_path / "api.address", tmp_path / "api.secret"
    assert page_links(*files, keyed=True) == []
    for path, text in zip(files, (address, "key"), strict=True):
        path.write_text(f"{text}\n")
    assert page_links(*files, keyed=True) == [f"http://{host}/#key=key" for host in hosts]
    assert page_links(*files, keyed=False) == [f"http://{host}/ (its key is in {files[1]})" for host in hosts]
