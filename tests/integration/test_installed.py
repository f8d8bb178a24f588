"""What is built is whole, and works where it is installed: without ``make``, the repository, or its working directory.

The environment is empty but for the wheel and, so that nothing is downloaded, the libraries of this one.
"""

from __future__ import annotations

import email
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from benchmarks.checkouts import copy_files

pytest.importorskip("setuptools", "77", reason="it builds, and nothing is downloaded")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("orchestrator", "workers", "transport", "ranker")
DATA = ("*.toml", "*.jsonl", "*.lua", "*.html", "*.js", "*.css", "LICENSE")
"""Files of the packages that programs read; the others are theirs to import, or for readers of the code."""
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both distributions, built as `python -m build` does, of a copy of the checkout."""
    checkout = tmp_path_factory.mktemp("checkout")
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout says which files are the project's")
    copy_files(ROOT, checkout)
    (checkout / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    return checkout / "dist"


def wanted() -> set[str]:
    """Every file that an installation needs."""
    found = {path for package in PACKAGES for kind in ("*.py", *DATA) for path in (ROOT / package).rglob(kind)}
    return {str(path.relative_to(ROOT)) for path in found}


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(dist: Path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (head,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(head).decode())
    info = {name for name in names if name.startswith(f"streamrl-{PROJECT['version']}.dist-info/")}
    assert names - info == wanted()
    assert {"LICENSE", "entry_points.txt"} <= {Path(name).name for name in info}
    assert metadata["Name"] == "streamrl"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert len([line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]) == len(
        PROJECT["dependencies"]
    )


def test_the_source_distribution_holds_what_the_wheel_is_built_from_and_no_tests(dist: Path):
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {str(Path(*Path(name).parts[1:])) for name in archive.getnames()}
    assert wanted() | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "runs"))]


def test_an_installation_trains_in_a_directory_whose_files_have_the_names_of_ours(dist: Path, tmp_path: Path):
    environment, here = tmp_path / "env", tmp_path / "here"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # A path in a .pth file is searched for modules, but its own .pth files, as of an editable StreamRL, are not read.
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    here.mkdir()
    for name in (*PACKAGES, "benchmarks", "tests"):
        (here / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        command = [str(environment / "bin" / arguments[0]), *arguments[1:]]
        ended = subprocess.run(command, cwd=here, env=bare, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    where = run("python", "-P", "-c", "import orchestrator; print(orchestrator.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    run("streamrl-orchestrator", "run", "--preset", "tiny", "--plain", "--set", "run.batches=6")
    assert (here / "runs" / "tiny" / "report.html").stat().st_size > 10_000
    run("streamrl-orchestrator", "inspect", "runs/tiny", "--audit")
    run("streamrl-worker", "evaluate", "--run-dir", "runs/tiny", "--reward", "workers.scoring.rewards:digit_share")
