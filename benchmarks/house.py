"""Figure ``house``: how the code is laid out and what it calls things, printed from the code itself.

The product is every .py file of the four packages orchestrator, workers, transport and ranker.

    folder_circles        Pairs that import one another, directly or through others, where at least one of the two is a
                          folder. Every folder is looked at on its own: its rooms (each with all that lies below it) and
                          the files beside them are the nodes, so that a folder is never in a circle with its own child,
                          but a file is that both imports a room and is imported by it. All imports count, those inside
                          of functions and under TYPE_CHECKING too.
    single_importer_share Modules that exactly one module of the product imports, of all modules. A module that nothing
                          imports (an entry point, an empty __init__) is no such module, but is one of all.
    files_of_a_sample     Product files in which a function runs while samples go their way, in a run of the preset
                          ``tiny``: in its orchestrator, generation worker, scoring worker (and its reward) and trainer.
                          Counted from the moment when WARM_BATCHES are trained (all workers are ready, and what is done
                          once was done) to the one when all batches but the last COLD_BATCHES are: some twenty batches
                          whole, from the plan of a prompt to the step that trains it, with the weights that go back.
                          What runs by the clock meanwhile (heartbeats, status, metrics, a checkpoint) is counted, since
                          no trace can tell it apart. Start and end are not, nor is the supervisor, nor lines of modules
                          and class bodies. The reward has no jail here, as nothing could write a trace from in there.
    product_lines         Lines of the product, blank ones and comments too.
    old_words             Names of files and names that are bound in them (functions, classes, arguments, variables,
                          attributes, keys of the presets), each once a file, that use a word of WORDS. Texts are not
                          looked at, so the map of renamed settings, which is made of strings, is not.

``--commit`` measures another commit of this repository instead; REFERENCE was measured so.

    python -m benchmarks.house [--list] [--no-run] [--batches 24] [--commit COMMIT]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "workers", "transport", "ranker")

REFERENCE: Mapping[str, str | int | float] = {
    "commit": "21f13b5",  # the last one of version 0.1
    "folder_circles": 4,
    "single_importer_share": 0.319,
    "product_files": 329,
    "product_lines": 45485,
    "old_words": 154,
    "files_of_a_sample": 116,
}
"""The figures of version 0.1, by this file."""

# --- imports --------------------------------------------------------------------------------------------------------

Node = tuple[str, ...]
"""A file (without .py) or a folder, by its parts."""


@dataclass(frozen=True, slots=True)
class Product:
    """Packages below ``root``. Module names and trees are those of all .py files in them."""

    root: Path
    trees: Mapping[str, ast.Module]  # by path from the root
    modules: Mapping[str, str]  # dotted name -> path

    @classmethod
    def read(cls, root: Path, packages: Sequence[str] = PACKAGES) -> Product:
        paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
        trees = {path.relative_to(root).as_posix(): ast.parse(path.read_bytes()) for path in paths}
        return cls(root, trees, {dotted(name): name for name in trees})

    def imports(self) -> dict[str, set[str]]:
        """Per path, the paths of our modules that it imports anywhere in it."""
        return {name: set(self._imports_of(tree)) - {name} for name, tree in self.trees.items()}

    def _imports_of(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted = [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):  # `from a import b`: b may be a module, or a name in a
                wanted = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
            else:
                continue
            for module, package in wanted:
                if found := self.modules.get(module) or self.modules.get(package):
                    yield found


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def single_importers(product: Product) -> dict[str, str]:
    """Per module with exactly one importer, that one."""
    importers = defaultdict[str, list[str]](list)
    for name, imported in product.imports().items():
        for one in imported:
            importers[one].append(name)
    return {name: found[0] for name, found in importers.items() if len(found) == 1}


def folder_circles(product: Product) -> dict[tuple[str, str], list[str]]:
    """Per pair in a circle, an example of what each of the two imports of the other, where it does so directly."""
    files = {name: PurePosixPath(name).with_suffix("").parts for name in product.trees}
    folders = {node[:depth] for node in files.values() for depth in range(1, len(node))}
    direct = defaultdict[Node, dict[Node, str]](dict)
    for name, imported in product.imports().items():
        for other in imported:
            one, two = siblings(files[name], files[other])
            direct[one].setdefault(two, f"{name} imports {other}")
    reached = {node: reachable(node, direct) for node in direct}
    return {
        ("/".join(one), "/".join(two)): [
            example for a, b in ((one, two), (two, one)) if (example := direct[a].get(b)) is not None
        ]
        for one in sorted(reached)
        for two in sorted(reached[one])
        if one < two and one in reached.get(two, ()) and (one in folders or two in folders)
    }


def siblings(one: Node, two: Node) -> tuple[Node, Node]:
    """The two nodes beside one another in the deepest folder that holds both."""
    depth = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return one[: depth + 1], two[: depth + 1]


def reachable(start: Node, direct: Mapping[Node, Mapping[Node, str]]) -> set[Node]:
    found: set[Node] = set()
    open_nodes = [start]
    while open_nodes:
        for node in direct.get(open_nodes.pop(), {}):
            if node not in found:
                found.add(node)
                open_nodes.append(node)
    return found


# --- words ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """An old word and the one that stands for it now.

    old: words of which one may not be part of a name; `avoid` is one in `AvoidWorker` and in `avoid_ids`.
    names: whole names that may not be, where the word alone is an ordinary one.  modules: names of files.
    within, outside: folders that are looked at, and those in them that are not, because the word means something else
    there, which ``why`` says.  but: names in which it means something else.
    """

    now: str
    old: Sequence[str] = ()
    names: Sequence[str] = ()
    modules: Sequence[str] = ()
    within: Sequence[str] = PACKAGES
    outside: Sequence[str] = ()
    but: Sequence[str] = ()
    why: str = ""

    def looks_at(self, path: str) -> bool:
        return is_below(path, self.within) and not is_below(path, self.outside)

    def is_in(self, name: str) -> bool:
        return name not in self.but and (name in self.names or not set(self.old).isdisjoint(words_of(name)))


def is_below(path: str, folders: Sequence[str]) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in folders))


CORE = ("orchestrator/core",)

WORDS = (
    Word(now="attempt", old=("try", "tries", "tried"), within=CORE, why="elsewhere the verb: to try a lock, a reward"),
    Word(now="attempt", old=("turn", "turns"), within=CORE, why="elsewhere that of a chat, which is the field's word"),
    Word(now="slowdown", old=("pace", "paces", "paced"), modules=("paced",)),
    Word(now="migration", old=("moving", "movable"), modules=("moving",)),
    Word(now="excluded_worker", old=("avoid", "avoids", "avoided")),
    Word(now="healthy", names=("fit",), within=CORE, why="of a worker; elsewhere a curve or a model is fitted"),
    Word(now="loads_pending", names=("all_told",)),
    Word(now="pending_refills", old=("owed", "owes")),
    Word(now="cancel_refills", old=("forgive", "forgiven", "forgives")),
    Word(
        now="mini_batch",
        old=("part", "parts"),
        within=CORE,
        outside=("orchestrator/core/dispatch",),
        why="elsewhere a part of a text, of a file, of a sum, of a row in a storage unit",
    ),
    Word(now="PromptServer", old=("desk", "desks"), modules=("desk",)),
    Word(now="RunConsole, StepAnnouncer", old=("teller", "telling"), modules=("teller", "telling")),
    Word(now="RequestStore", old=("spool", "spooled"), modules=("spool",)),
    Word(now="rank_shutdown", old=("parting",)),
    Word(now="follow_rank_0", old=("heed", "heeds")),
    Word(now="publish_run_metadata", old=("furnish",)),
    Word(now="page_history", modules=("look_back",)),
    Word(now="newest_journal", modules=("newest",), why="the adjective is no riddle"),
    Word(now="broker_snapshot", modules=("survey",)),
    Word(now="input_files", modules=("inputs",), why="a model has inputs, too"),
    Word(now="run_outputs", modules=("outputs",)),
    Word(now="terminal_text", modules=("printable",)),
    Word(now="machine_load", modules=("other_programs",)),
    Word(now="user_scenario", modules=("own",)),
    Word(now="colocated", modules=("shared",), within=("orchestrator",), why="shared memory elsewhere"),
    Word(now="dp_ranks", modules=("ranks",), within=("orchestrator",), why="the trainer's own ranks are just that"),
    Word(now="plan_search", modules=("advice",)),
    Word(now="in_flight", modules=("running",)),
    Word(now="wait_reasons", modules=("waits",)),
    Word(now="prediction_feedback", modules=("experience",)),
    Word(
        now="emulated",
        old=("replay", "replays", "replayed"),
        modules=("replay",),
        within=("workers",),
        why="in the orchestrator it is the journal's",
    ),
    Word(now="emulated", names=("ReplaySettings", "replay"), within=("transport",), why="the setting and its section"),
    Word(now="MIN_GAIN_SHARE and other quantities", old=("surely", "alike", "halfway"), names=("FEW", "FEW_GROUPS")),
    Word(now="a quantity", names=("AT_LEAST",), why="the argument at_least=4 says what it is"),
    Word(
        now="report, send, publish",
        old=("tell", "tells", "told", "whoever", "nobody"),
        but=("NOBODY",),
        why="NOBODY is the Unix user of that name",
    ),
)
"""HOUSE.md's table as it can be checked by names. Ordinary words are old ones only where they named the old concept."""


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def bound_names(tree: ast.AST) -> Iterator[str]:
    """What is given a name in a module; what is only used was named elsewhere, perhaps by a library."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case _:
                pass


def keys_of(table: Mapping[str, object]) -> Iterator[str]:
    for key, value in table.items():
        yield key
        if isinstance(value, dict):
            yield from keys_of(value)


def old_words(product: Product) -> list[tuple[str, str, str]]:
    """(file, name, the word of today), each name once a file."""
    named = {path: {*bound_names(tree)} for path, tree in product.trees.items()}
    for path in sorted(path for package in PACKAGES for path in (product.root / package).rglob("*.toml")):
        named[path.relative_to(product.root).as_posix()] = {*keys_of(tomllib.loads(path.read_text(encoding="utf-8")))}
    found: dict[tuple[str, str], str] = {}
    for path, names in named.items():
        stem = PurePosixPath(path).stem
        for word in (word for word in WORDS if word.looks_at(path)):
            found |= {(path, name): word.now for name in names if word.is_in(name)}
            if stem in word.modules or word.is_in(stem):
                found[path, PurePosixPath(path).name] = word.now
    for path, tree in product.trees.items():
        engines = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and _is_named(node, "engine")]
        if any("'replay'" in ast.unparse(node.annotation) for node in engines):
            found[path, 'engine = "replay"'] = "emulated"
    return sorted((path, name, now) for (path, name), now in found.items())


def _is_named(node: ast.AnnAssign, name: str) -> bool:
    return isinstance(node.target, ast.Name) and node.target.id == name


# --- one sample's way -------------------------------------------------------------------------------------------------

WARM_BATCHES, COLD_BATCHES = 3, 2
RUN_LIMIT_S = 900.0
POLL_S = 0.02

ROLES = {
    "orchestrator": ("-m orchestrator serve",),
    "generation": ("-m workers generate",),
    "scoring": ("-m workers score", "-m workers.scoring."),
    "trainer": ("-m workers train",),
}
"""Which command lines are which process of a sample's way. The first that fits."""

TRACER = '''
import mmap, os, sys, threading

def install(directory, root):
    """Write the name of each function of ours that runs while the window is open, once."""
    window = mmap.mmap(os.open(directory + "/window", os.O_RDONLY), 1, prot=mmap.PROT_READ)
    calls = os.open(f"{directory}/{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(calls, " ".join(sys.orig_argv).encode() + b"\\n")
    seen = set()

    def called(frame, event, argument):
        code = frame.f_code
        if window[0] == 49 and code not in seen:  # 49: "1"
            seen.add(code)
            is_function = code.co_flags & 1  # CO_OPTIMIZED: neither a module nor the body of a class
            if is_function and code.co_filename.startswith(root):
                line = f"{code.co_filename[len(root):]}\\t{code.co_qualname}\\n"
                os.write(calls, line.encode())

    sys.settrace(called)
    threading.settrace(called)

'''
"""A sitecustomize that every Python of the run imports: it is on PYTHONPATH, which all children inherit or are given.
settrace with no local tracer costs one call for each call, and sees coroutines whenever they go on."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Per role, the files of the product with the functions that ran in them."""

    files: Mapping[str, Mapping[str, set[str]]]

    @property
    def all_files(self) -> list[str]:
        return sorted({name for files in self.files.values() for name in files})


def trace_a_run(root: Path, batches: int) -> Trace:
    """Run ``tiny`` of the tree at ``root``. Raises SystemExit when it fails."""
    work = Path(tempfile.mkdtemp(prefix="house-"))
    try:
        environment = _traced_environment(work, root)
        command = [sys.executable, "-P", "-m", "orchestrator", "run", "--preset", "tiny", "--plain"]
        command += ["--dir", str(work / "runs"), "--name", "traced", "--set", f"run.batches={batches}"]
        with (work / "output").open("wb") as output:
            process = subprocess.Popen(command, cwd=work, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                _open_window(process, work, batches)
            finally:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise SystemExit(f"{(work / 'output').read_text()}\n{' '.join(command)} ended with {process.returncode}")
        return _read_calls(work)
    finally:
        shutil.rmtree(work)


def _traced_environment(work: Path, root: Path) -> dict[str, str]:
    site, programs = work / "site", work / "programs"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"{TRACER}\ninstall({str(work)!r}, {str(root)!r} + '/')\n")
    (work / "window").write_bytes(b"0")
    programs.mkdir()
    no_jail = programs / "bwrap"  # found first, and fails: a reward that only reads texts then runs without
    no_jail.write_text("#!/bin/sh\nexit 1\n")
    no_jail.chmod(0o755)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(site), str(root))),
        "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
    }


def _open_window(process: subprocess.Popen[bytes], work: Path, batches: int) -> None:
    """Let the run's processes write down what runs, from one batch to another; returns when the run has ended."""
    metrics = work / "runs" / "traced" / "metrics.jsonl"
    until_s = time.monotonic() + RUN_LIMIT_S
    while process.poll() is None and time.monotonic() < until_s:
        trained = metrics.read_bytes().count(b'"batch"') if metrics.exists() else 0
        is_open = WARM_BATCHES <= trained < batches - COLD_BATCHES
        with (work / "window").open("r+b") as window:
            window.write(b"1" if is_open else b"0")
        time.sleep(POLL_S)


def _read_calls(work: Path) -> Trace:
    files: dict[str, dict[str, set[str]]] = {role: defaultdict(set) for role in ROLES}
    for path in work.glob("*.calls"):
        command, *calls = path.read_text().splitlines()
        for role in [role for role, parts in ROLES.items() if any(part in f"{command} " for part in parts)]:
            for name, function in (call.split("\t") for call in calls):
                if is_below(name, PACKAGES):
                    files[role][name].add(function)
    if missing := [role for role, found in files.items() if not found]:
        raise SystemExit(f"nothing ran in {', '.join(missing)}: the window never opened, or its command line is new")
    return Trace(files)


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="what each figure is made of")
    parser.add_argument("--no-run", action="store_true", help="without files_of_a_sample, which takes a minute or two")
    parser.add_argument("--batches", type=int, default=24, help="of the traced run")
    parser.add_argument("--commit", help="measure this commit instead of the working tree")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="house-tree-") as scratch:
        root = check_out(options.commit, Path(scratch)) if options.commit else ROOT
        figures = measure(root, 0 if options.no_run else options.batches, print if options.list else lambda _: None)
    print(json.dumps({"bench": "house", **figures, "reference": REFERENCE}))


def check_out(commit: str, scratch: Path) -> Path:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(scratch, filter="data")
    return scratch.resolve()


def measure(root: Path, batches: int, show: Callable[[str], object]) -> dict[str, object]:
    """The figures of the tree at ``root``; batches: of the traced run, 0 for none."""
    product = Product.read(root)
    circles = folder_circles(product)
    for pair, examples in circles.items():
        show(f"circle  {' <-> '.join(pair)}: {'; '.join(examples) or 'through others'}")
    single = single_importers(product)
    for name, importer in sorted(single.items()):
        show(f"single importer  {name} <- {importer}")
    words = old_words(product)
    for path, name, now in words:
        show(f"old word  {path}: {name} -> {now}")
    lines = {name: (root / name).read_bytes().count(b"\n") for name in product.trees}
    for package in PACKAGES:
        show(f"lines  {package} {sum(n for name, n in lines.items() if is_below(name, [package]))}")
    figures: dict[str, object] = {
        "folder_circles": len(circles),
        "single_importer_share": round(len(single) / len(product.trees), 3),
        "product_files": len(product.trees),
        "product_lines": sum(lines.values()),
        "old_words": len(words),
    }
    if batches:
        trace = trace_a_run(root, batches)
        for name in trace.all_files:
            roles = {role: sorted(files[name]) for role, files in trace.files.items() if name in files}
            show(f"on the way  {name}: " + "; ".join(f"{role}: {', '.join(ran)}" for role, ran in roles.items()))
        figures |= {
            "files_of_a_sample": len(trace.all_files),
            "files_of_a_sample_by_role": {role: len(files) for role, files in trace.files.items()},
            "files_of_a_sample_of_reference": round(
                len(trace.all_files) / max(int(REFERENCE["files_of_a_sample"]), 1), 3
            ),
        }
    return figures


if __name__ == "__main__":
    main()
