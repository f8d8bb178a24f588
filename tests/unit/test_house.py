"""The measures of ``make bench NAME=house``: each finds what it counts, and only that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.house import Product, folder_circles, old_words, single_importers


def product(root: Path, files: Mapping[str, str]) -> Product:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Product.read(root)


def test_folders_that_import_one_another_are_a_circle_wherever_they_do(tmp_path: Path) -> None:
    late = "def later():\n    from orchestrator.core.training import rounds"
    found = folder_circles(
        product(
            tmp_path,
            {
                "orchestrator/core/rollout/admission.py": late,
                "orchestrator/core/training/rounds.py": "from orchestrator.core.lanes import service",
                "orchestrator/core/lanes/service.py": "from orchestrator.core.rollout.admission import later",
            },
        )
    )
    room = "orchestrator/core/"
    pairs = [("lanes", "rollout"), ("lanes", "training"), ("rollout", "training")]
    assert sorted(found) == [(f"{room}{one}", f"{room}{two}") for one, two in pairs]


def test_a_folder_and_its_child_are_no_circle_but_a_file_between_them_is(tmp_path: Path) -> None:
    files = {
        "orchestrator/core/model.py": "",
        "orchestrator/core/rollout/admission.py": "from orchestrator.core import model",
        "orchestrator/core/state.py": "from orchestrator.core.rollout import admission",
        "orchestrator/core/one.py": "from orchestrator.core import two",  # two files are none, either
        "orchestrator/core/two.py": "from orchestrator.core import one",
    }
    assert folder_circles(product(tmp_path, files)) == {}
    files["orchestrator/core/model.py"] = "from orchestrator.core.rollout.admission import x"
    assert list(folder_circles(product(tmp_path, files))) == [("orchestrator/core/model", "orchestrator/core/rollout")]


def test_a_module_with_one_importer_is_counted_and_an_entry_point_is_not(tmp_path: Path) -> None:
    files = {
        "orchestrator/__main__.py": "from orchestrator import cli, errors",
        "orchestrator/cli.py": "from orchestrator.errors import Bad",
        "orchestrator/errors.py": "",
    }
    assert single_importers(product(tmp_path, files)) == {"orchestrator/cli.py": "orchestrator/__main__.py"}


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("orchestrator/core/fleet.py", "def may(avoid): ...", "avoid"),
        ("orchestrator/core/fleet.py", "class EvaluationTries: ...", "EvaluationTries"),
        ("orchestrator/core/fleet.py", "class Worker:\n    fit: bool", "fit"),
        ("orchestrator/runtime/spool.py", "", "spool.py"),
        ("transport/settings.py", "class S:\n    engine: Literal['sglang', 'replay']", 'engine = "replay"'),
        ("orchestrator/presets/tiny.toml", "[run]\npace = 1", "pace"),
    ],
)
def test_an_old_word_is_found(tmp_path: Path, path: str, source: str, name: str) -> None:
    assert [(where, found) for where, found, _ in old_words(product(tmp_path, {path: source}))] == [(path, name)]


def test_a_word_that_means_something_else_is_not(tmp_path: Path) -> None:
    """Used names of libraries, verbs, curves that are fitted, parts of words, and the map of renamed settings."""
    files = {
        "ranker/model.py": "def fit(x): model.fit(x)",
        "workers/models.py": "def try_lock(entry, returned, space): ...",
        "workers/scoring/jail.py": "NOBODY = 65534",
        "orchestrator/config/load.py": "RENAMED = {'pace': 'slowdown'}",
    }
    assert old_words(product(tmp_path, files)) == []
