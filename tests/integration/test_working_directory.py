"""No process of a run imports anything from the working directory, where others may be able to write.

Only the directory that ``scoring.reward_path`` names is looked into, by the reward's process, after all libraries.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch.checks import prepare_model
from orchestrator.launch.processes import Fleet
from ranker.logs import PromptLengths
from ranker.online import refit_in_process
from transport.contracts.settings import ScoringSettings, Settings
from transport.contracts.types import WorkerKind
from transport.process.programs import python_module
from workers.errors import RewardSetupError
from workers.scoring.reward_pool import RewardPool
from workers.scoring.rewards import RewardSpec, reward_spec

ROOT = Path(__file__).parents[2]
PLANTED = ("typer", "msgspec", "structlog", "json", "numpy", "torch", "orchestrator", "workers", "transport", "ranker")
"""What a stranger writes into the directory that a run is started in: names of libraries, and of ours."""
KINDS = (WorkerKind.GENERATE, WorkerKind.SCORE, WorkerKind.TRAIN, WorkerKind.PUBLISH)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory from now on. A module of it that is imported leaves the file ``imported`` in it."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def imported(directory: Path) -> str:
    path = directory / "imported"
    return path.read_text() if path.exists() else ""


def test_what_is_planted_works(planted: Path):
    subprocess.run([sys.executable, "-c", "import typer"], timeout=60, check=True)
    assert imported(planted) == "typer "


@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind or "orchestrator")
def test_a_child_of_a_run_imports_nothing_from_where_it_was_started(planted: Path, kind: WorkerKind | None):
    fleet = Fleet(settings=Settings(), run_dir=planted, model_dir=planted, url="redis://127.0.0.1:1", env={})
    child = fleet.worker(kind, 0) if kind else fleet.orchestrator()
    subprocess.run([*child.argv, "--help"], timeout=60, check=True, stdout=subprocess.DEVNULL)
    assert imported(planted) == ""


async def test_a_model_is_prepared_with_nothing_from_where_it_was_started(planted: Path):
    (planted / "logs").mkdir()
    with pytest.raises(Exception, match="no-such-model"):
        await prepare_model("no-such-model", planted / "logs", print)
    assert imported(planted) == ""


def test_a_refit_of_the_ranker_imports_nothing_from_where_it_was_started(planted: Path):
    samples = [PromptLengths(prompt_id=str(n), text=f"{n} + {n}", tokens=(10 + n, 12 + n)) for n in range(40)]
    refit_in_process(None, samples, 0, 100.0)
    assert imported(planted) == ""


def spec_of(reward: str, path: str) -> RewardSpec:
    return reward_spec(Settings(scoring=ScoringSettings(reward=reward)), reward, path)


async def test_a_reward_is_imported_from_the_directory_that_is_named_and_from_no_other(
    planted: Path,
):
    (planted / "mine.py").write_text("import json\ndef reward(prompt, response, entry): return len(json.dumps(1))\n")
    unnamed, named = (
        RewardPool(spec_of("mine:reward", path), timeout_s=20.0, processes=1) for path in ("", str(planted))
    )
    with pytest.raises(RewardSetupError, match=r"No module named 'mine'.*name its directory with scoring\.reward_path"):
        await unnamed.start()
    try:
        await named.start()
        assert (await named.score("", "", b"{}")).value == 1.0
    finally:
        await named.close()
    assert imported(planted) == "", "a file beside the reward took the place of a library"


def test_programs_of_ours_are_started_in_one_way_only():
    assert "-P" in python_module("workers")
    packages = [ROOT / name for name in ("orchestrator", "workers", "transport", "ranker")]
    starts = [  # a second one there tells where our scripts are
        str(path.relative_to(ROOT))
        for package in packages
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    ]
    assert sorted(set(starts)) == ["transport/process/programs.py"]
