"""The architecture, as imports: who may know whom, what the decision core may use, and what nobody uses."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import pytest

from benchmarks.house import Product, folder_circles

ROOT = Path(__file__).parents[2]
OURS = ("orchestrator", "workers", "transport", "ranker")

CONTRACTS = ("transport", "transport/process", "transport/contracts")
CHANNELS = (*CONTRACTS, "transport/broker", "transport/tensors", "transport/rows")
CORE = ("orchestrator/core", "orchestrator/core/model")
WORKER = ("workers", "workers/leases", "workers/weights", *CHANNELS)

MAY_IMPORT: Mapping[str, Sequence[str]] = {
    "transport": (),
    "transport/process": ("transport",),
    "transport/contracts": ("transport", "transport/process"),
    "transport/broker": CONTRACTS,
    "transport/tensors": CONTRACTS,
    "transport/rows": (*CONTRACTS, "transport/broker", "transport/tensors"),
    "ranker": CONTRACTS,
    # --- orchestrator: the decisions, from the model of the run to its one door, state.py
    "orchestrator/core/model": ("transport/contracts",),
    "orchestrator/core/rollout": ("orchestrator/core/model", "transport/contracts"),
    "orchestrator/core/dispatch/policies": ("transport/contracts",),
    "orchestrator/core/dispatch": (
        "orchestrator/core/model",
        "orchestrator/core/rollout",
        "orchestrator/core/dispatch/policies",
        "transport/contracts",
    ),
    "orchestrator/core/lanes": ("orchestrator/core/model", "orchestrator/core/rollout", "transport/contracts"),
    "orchestrator/core": ("orchestrator/core/*", "transport/contracts"),
    # --- orchestrator: what carries them out, and who looks on
    "orchestrator": CONTRACTS,
    "orchestrator/__main__.py": ("orchestrator/cli",),
    "orchestrator/config": (*CHANNELS, "orchestrator", "orchestrator/core/model"),
    "orchestrator/prompts": (*CONTRACTS, "orchestrator", "orchestrator/config"),
    "orchestrator/loop": (
        *CHANNELS,
        *CORE,
        "ranker",
        "orchestrator",
        "orchestrator/config",
        "orchestrator/core/dispatch",  # plans are computed beside the loop
        "orchestrator/prompts",
    ),
    "orchestrator/observability": (*CHANNELS, *CORE, "orchestrator", "orchestrator/config"),
    "orchestrator/observability/report": (
        *CHANNELS,
        *CORE,
        "orchestrator",
        "orchestrator/config",
        "orchestrator/observability",
    ),
    "orchestrator/observability/http": (
        *CHANNELS,
        *CORE,
        "orchestrator",
        "orchestrator/config",
        "orchestrator/loop",
        "orchestrator/observability",
        "orchestrator/observability/report",
    ),
    "orchestrator/serving": (
        *CHANNELS,
        *CORE,
        "orchestrator",
        "orchestrator/config",
        "orchestrator/prompts",
        "orchestrator/loop",
    ),
    "orchestrator/launch/launchers": (*CONTRACTS, "orchestrator", "orchestrator/config"),
    "orchestrator/launch": (
        *CHANNELS,
        *CORE,
        "ranker",
        "orchestrator",
        "orchestrator/config",
        "orchestrator/launch/launchers",
        "orchestrator/prompts",
        "orchestrator/loop",
        "orchestrator/serving",
        "orchestrator/observability/*",
    ),
    # --- orchestrator: without a run
    "orchestrator/sim": (
        *CONTRACTS,
        "ranker",
        "orchestrator",
        "orchestrator/config",
        "orchestrator/core/*",
        "orchestrator/observability/report",
    ),
    "orchestrator/planning": (*CONTRACTS, "orchestrator", "orchestrator/core/model", "orchestrator/sim"),
    "orchestrator/cli": ("transport/*", "ranker", "orchestrator/*"),
    # --- workers
    "workers": CONTRACTS,
    "workers/__main__.py": ("transport/*", "workers/*"),
    "workers/algorithms": (),
    "workers/user_functions": ("workers", "workers/algorithms"),
    "workers/leases": (*CHANNELS, "workers"),
    "workers/weights": (*CHANNELS, "workers", "workers/leases"),
    "workers/generation": WORKER,
    "workers/generation/embedded": (*WORKER, "workers/generation"),
    "workers/generation/server": (*WORKER, "workers/generation"),
    "workers/trainer": (*WORKER, "workers/algorithms"),
    "workers/trainer/policy": (*WORKER, "workers/algorithms", "workers/trainer"),
    "workers/scoring": (
        *WORKER,
        "workers/generation",  # a teacher may be one of its servers
        "workers/generation/server",
        "workers/algorithms",
        "workers/user_functions",
        "workers/trainer",
        "workers/trainer/policy",  # the reference model is computed as the trainer computes its own
    ),
    "workers/critic": (
        *WORKER,
        "workers/algorithms",
        "workers/scoring",  # values are a scoring task
        "workers/trainer",
        "workers/trainer/policy",
    ),
    "workers/environments": (*WORKER, "workers/generation", "workers/scoring", "workers/user_functions"),
    "workers/endpoint": (*WORKER, "workers/generation", "workers/environments"),
    "workers/storage": WORKER,
    "workers/client": WORKER,
    "workers/commands": (
        *WORKER,
        "workers/algorithms",
        "workers/endpoint",
        "workers/environments",
        "workers/user_functions",
        "workers/generation/*",
        "workers/critic",
        "workers/scoring",
        "workers/storage",
        "workers/trainer/*",
    ),
}
"""Which folders a folder may import, besides itself; ``folder/*`` is the folder and all below it. A file may have a row
of its own. The rows stand in an order in which each imports what stands above it, but for a folder and its rooms."""

PURE_CONTRACTS = {f"transport/contracts/{name}.py" for name in ("types", "messages", "settings", "continuous_batching")}
"""What the decision core may know of the contracts; others of them read files."""

CORE_LIBRARIES = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "operator",
    "random",
    "statistics",
    "typing",
    "types",
}
"""What is free of I/O, clocks and hidden state. ``random`` is: as ``random.Random(seed)``, which is looked at below."""
CORE_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "hash", "id"}
"""Not for the core: I/O, code from strings, and numbers that differ from process to process."""

ONLY_IN = {
    "redis": {
        "transport/broker/redis_link.py",
        "transport/broker/primary.py",
    },  # which raises its errors for the former
    "ucxx": {"transport/tensors/ucx.py"},
    "fsspec": {"transport/process/storage.py"},
}
"""Libraries whose types and errors only these see."""

UNPICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

CATCH_ALL = {
    "orchestrator/launch/launchers/ray_cluster.py",  # in a thread: what it raises is raised where it is awaited
    "transport/process/storage.py",  # fsspec's file systems share no root of errors
    "workers/models.py",  # foreign code: whatever it raises, it has ended
    "workers/weights/publish.py",  # the guard of one delivery: what it asks for is written by others
    "workers/generation/server/loader.py",  # a server ends as a whole when a loader raises
    "workers/scoring/rewards.py",  # foreign code: the guard of one unit of scoring
    "workers/scoring/code_grader.py",  # foreign code in a jail: what an answer or its tests raise fails the test
    "workers/environments/environment.py",  # foreign code: the guard of one call
}
"""The named guards. Anywhere else ``except Exception`` hides a bug, unless it cleans up and raises again."""


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def product() -> Product:
    return Product.read(ROOT)


@functools.cache
def imports() -> Mapping[str, set[str]]:
    return product().imports()


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> None:
    """Before any test of this file, none of which parses the product itself."""
    imports()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return product().trees.get(name_of(path)) or ast.parse(path.read_bytes())


def modules_of(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports; ``from a import b`` counts as ``a.b``, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(module: str) -> str:
    return module.partition(".")[0]


def may_import(importer: str, imported: str) -> bool:
    """Whether the table lets one of our files import the other."""
    home, other = (PurePosixPath(name).parent.as_posix() for name in (importer, imported))
    rows = [*MAY_IMPORT[home], *MAY_IMPORT.get(importer, ())]
    if home == other or other in rows:
        return True
    return any(f"{row.removesuffix('/*')}/" in f"{other}/" for row in rows if row.endswith("/*"))


def impurities(tree: ast.AST) -> list[str]:
    """What makes a module of the core depend on more than its arguments."""
    found = [m for m in modules_of(tree) if top(m) not in {*CORE_LIBRARIES, *OURS}]
    found += [m for m in modules_of(tree) if top(m) == "random" and m not in ("random", "random.Random")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            unseeded = called in ("random.Random", "Random") and not node.args
            if unseeded or called in CORE_BUILTINS:
                found.append(f"{called}(...) in line {node.lineno}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random" and node.attr != "Random":
            found.append(f"random.{node.attr} in line {node.lineno}")
    return found


def unpickling(tree: ast.AST) -> list[str]:
    """Ways to run code out of bytes: pickle and its kin, also behind torch.load and numpy.load."""
    found = [m for m in modules_of(tree) if top(m) in UNPICKLERS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unrestricted = ast.unparse(node.func) == "torch.load" and flags.get("weights_only") != "True"
            if unrestricted or flags.get("allow_pickle", "False") != "False":
                found.append(f"{ast.unparse(node.func)} in line {node.lineno}")
    return found


def catch_alls(tree: ast.AST) -> list[int]:
    """Lines of handlers that catch everything and do not raise again."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and is_broad(node.type)]
    return [h.lineno for h in handlers if not any(isinstance(node, ast.Raise) for node in ast.walk(h))]


def is_broad(caught: ast.expr | None) -> bool:
    """Nothing named at all, or Exception or BaseException among the names."""
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name is None or ast.unparse(name) in ("Exception", "BaseException") for name in names)


def violations(paths: Sequence[Path], rule: Callable[[str, ast.Module], Sequence[object]]) -> dict[str, list[object]]:
    """Per file that breaks the rule, what breaks it."""
    assert paths
    found = {name_of(path): list(rule(name_of(path), parsed(path))) for path in paths}
    return {name: broken for name, broken in found.items() if broken}


def test_imports_point_one_way() -> None:
    wrong = {(name, other) for name, others in imports().items() for other in others if not may_import(name, other)}
    assert wrong == set()


def test_the_core_knows_only_contracts_without_io() -> None:
    core = [others for name, others in imports().items() if name.startswith(CORE[0])]
    known = {other for others in core for other in others if not other.startswith(CORE[0])}
    assert known == PURE_CONTRACTS


def test_every_folder_has_a_row_in_the_table() -> None:
    modules = [name for name in product().trees if not name.endswith("/__init__.py")]
    files = {name for name in MAY_IMPORT if name.endswith(".py")}
    assert {*MAY_IMPORT} - files == {PurePosixPath(name).parent.as_posix() for name in modules}
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_no_folders_import_one_another_in_a_circle() -> None:
    assert folder_circles(product()) == {}


def test_only_the_named_files_import_a_library() -> None:
    def rule(name: str, tree: ast.Module) -> list[str]:
        return [m for m in modules_of(tree) if name not in ONLY_IN.get(top(m), {name})]

    assert violations(python_files(*OURS), rule) == {}


def test_the_core_is_pure() -> None:
    assert violations(python_files("orchestrator/core"), lambda _, tree: impurities(tree)) == {}


def test_nothing_is_unpickled() -> None:
    words = re.compile("|".join((*UNPICKLERS, "torch.load", "allow_pickle")))  # parsing every test takes 5 s
    paths = [path for path in python_files(*OURS, "tests", "benchmarks") if words.search(path.read_text())]
    assert violations(paths, lambda _, tree: unpickling(tree)) == {}


def test_only_the_named_guards_catch_everything() -> None:
    found = violations(python_files(*OURS), lambda _, tree: catch_alls(tree))
    assert {name: lines for name, lines in found.items() if name not in CATCH_ALL} == {}
    assert set(found) == CATCH_ALL  # a guard that went has no entry here


def test_nothing_is_raised_inside_except_star() -> None:
    """Before Python 3.11.4 it comes out wrapped in a group again; see transport.errors.first_error."""

    def rule(_: str, tree: ast.Module) -> list[int]:
        stars = [node for node in ast.walk(tree) if isinstance(node, ast.TryStar)]
        handlers = [handler for star in stars for handler in star.handlers]
        return [node.lineno for handler in handlers for node in ast.walk(handler) if isinstance(node, ast.Raise)]

    assert violations(python_files(*OURS), rule) == {}


def test_a_package_names_its_api_and_does_no_work() -> None:
    def rule(_: str, tree: ast.Module) -> list[int]:
        return [node.lineno for node in tree.body if not _is_declaration(node)]

    assert violations([path for path in python_files(*OURS) if path.name == "__init__.py"], rule) == {}


def _is_declaration(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return is_docstring or is_all or isinstance(node, ast.Import | ast.ImportFrom)


def test_every_package_is_in_the_distribution() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed, carried = setuptools["packages"], setuptools["package-data"]
    used = {name_of(path.parent).replace("/", ".") for path in python_files(*OURS)}
    assert sorted(listed) == sorted(used)
    assert [package for package in listed if not (ROOT / package.replace(".", "/") / "__init__.py").exists()] == []
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*") if path.suffix in (".toml", ".lua")]
    assert files
    for path in files:
        assert f"*{path.suffix}" in carried[name_of(path.parent).replace("/", ".")], name_of(path)


MANY_FILES = 5
"""A folder with more has a README that says what they are for and in which order to read them."""


def modules_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]


def missing_files(readme: Path, text: str) -> list[str]:
    """Files of ours that a README names and that are not there: a path from the README's folder or one above it, or the
    name alone of a file in the folder or below it."""
    bases = [readme.parent, *(base for base in readme.parents if base.is_relative_to(ROOT))]
    return [
        name
        for name in re.findall(r"[\w./-]+\.py\b", text)
        if not any((base / name).is_file() for base in bases) and ("/" in name or not [*readme.parent.rglob(name)])
    ]


def test_a_folder_of_many_files_says_what_they_are_for() -> None:
    """Where a file went or came, its line in the README goes or comes with it."""
    folders = {path.parent for path in python_files(*OURS)}
    crowded = {folder for folder in folders if len(modules_in(folder)) > MANY_FILES}
    assert [name_of(folder) for folder in crowded if not (folder / "README.md").exists()] == []
    for folder in crowded:
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert [path.name for path in modules_in(folder) if path.name not in text] == [], name_of(folder)


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by their last name alone, and gives up on the whole run when it has two of one."""
    names = Counter(path.name for path in python_files("tests") if path.name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


def test_every_file_that_a_readme_names_exists() -> None:
    readmes = [readme for package in OURS for readme in (ROOT / package).rglob("README.md")]
    readmes.append(ROOT / "docs" / "life-of-a-sample.md")
    missing = {name_of(readme): missing_files(readme, readme.read_text(encoding="utf-8")) for readme in readmes}
    assert {name: files for name, files in missing.items() if files} == {}
    assert missing_files(readmes[0], "`no_such.py`, ranker/no.py") == ["no_such.py", "ranker/no.py"]


# --- the rules themselves: each must refuse what it is there to refuse -----------------------------------------------


@pytest.mark.parametrize(
    ("importer", "imported", "may"),
    [
        ("orchestrator/core/state.py", "orchestrator/core/dispatch/policies/even.py", True),  # a row of folder/*
        ("orchestrator/core/state.py", "transport/contracts/types.py", True),
        ("orchestrator/core/state.py", "orchestrator/loop/decide.py", False),
        ("orchestrator/core/state.py", "transport/broker/base.py", False),
        ("orchestrator/__main__.py", "orchestrator/cli/commands.py", True),  # a file's own row
        ("orchestrator/errors.py", "orchestrator/cli/commands.py", False),
        ("orchestrator/launch/app.py", "workers/leases/lifecycle.py", False),
    ],
)
def test_what_the_table_names_may_be_imported_and_nothing_else(importer: str, imported: str, may: bool) -> None:
    assert may_import(importer, imported) == may


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import time",
        "import torch",
        "from datetime import datetime",
        "from random import shuffle",
        "import random; random.random()",
        "import random; random.Random()",
        "hash('a')",
        "open('x')",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    assert len(impurities(ast.parse(source))) >= 1
    assert impurities(ast.parse("import random; random.Random(7).choice([1])")) == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "torch.load(x)", "torch.load(x, weights_only=False)", "np.load(x, allow_pickle=True)"],
)
def test_unpickling_is_found(source: str) -> None:
    assert len(unpickling(ast.parse(source))) == 1
    assert unpickling(ast.parse("torch.load('x', weights_only=True)")) == []


@pytest.mark.parametrize("handler", ["except:", "except Exception:", "except (OSError, BaseException) as error:"])
def test_a_catch_all_is_found(handler: str) -> None:
    assert catch_alls(ast.parse(f"try:\n    pass\n{handler}\n    pass")) == [3]
    assert catch_alls(ast.parse(f"try:\n    pass\n{handler}\n    close()\n    raise")) == []
