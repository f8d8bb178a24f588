"""Figure ``mutants``: do the tests notice when the product is wrong?

60 mutations of product code (``benchmarks/mutations.py`` says which kinds), spread over all folders by their lines and
drawn by ``--seed``, are made one after another in a copy of the tree. Each is tried against

1. the tests that import its module, directly or through others: the nearest ones first, fast tiers before slow ones
   that are as near or little nearer; for half of its time at most,
2. every other test of ``make test``, in its order, as far as the time goes: ``--minutes``, 2 for both.

A mutation is found when a test fails or hangs that passes alone in a copy without the mutation; a test that is not of
a fast tier must fail a second time. Tests that fail without a mutation, too, are named once and count for none. A
mutation that survives is printed as a difference: its reader decides whether tests lack something or whether it changes
nothing.

The tree itself is never changed, however the bench ends. Each of ``--jobs`` jobs has a copy of the files that git knows
or would add, with an environment that takes the libraries of the tree's ``.venv`` and the product of the copy: so does
every process that a test starts. The bench checks that first, with a copy that cannot be imported.

``--tree DIR`` takes another checkout with its own tests, such as the commit before a change. ``--save FILE`` writes the
drawn mutations, ``--list FILE`` tries the ones of such a file: they are found by function and text. One that no longer
fits is said, and counted as ``gone``.

The last line is one JSON object; ``found_share`` is found over found and survived. The exit code is 0 unless the bench
itself fails.

    python -m benchmarks.mutants [--seed 0] [--sample 12] [--only PATTERN] [--minutes 2] [--jobs 2] [--tree DIR]
                                 [--save FILE] [--list FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from benchmarks.checkouts import CheckoutError, copy_files, environment_of, make_environment
from benchmarks.house import PACKAGES, Product
from benchmarks.mutations import Mutation, Point, draw, locate

ROOT = Path(__file__).parents[1]
MUTANTS = 60
JOBS = 2
FAST = ("unit", "contract", "property", "sim", "golden", "fuzz")
"""Tiers whose tests are tried first, where they are about as near as others."""
SLOW_AWAY = 1
"""Imports that the tests of other tiers count as further away."""
NOT_OF_MAKE_TEST = ("chaos", "gpu", "compose")
MARKED = "not chaos and not long and not sglang"
FEW, MANY = 8, 64
"""Files that the first call of pytest collects, and any later one: to collect all of them takes 20 s."""
HANG_S = 20.0
HANG_RATIO = 3.0
"""A test hangs that is stopped after so many seconds, and so many times of what it takes without a mutation."""
CLEAN_S = 120.0
"""For one test alone, without a mutation."""
GRACE_S = 10.0
NO_TESTS = 5
"""Exit code of pytest where no test is left to run."""
PLUGIN = "streamrl_one_mutant"
NOT_INHERITED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
MARK = "STREAMRL_MUTANT"
"""Variable that all processes of a try inherit, so that those that outlive it are found."""

PLUGIN_TEXT = """
import json, os, time

WHERE = os.environ["STREAMRL_TRY"]


def say(what, nodeid):
    with open(WHERE + "/report", "a") as out:
        out.write(json.dumps([what, nodeid, time.time()]) + "\\n")


def pytest_collection_modifyitems(items):
    with open(WHERE + "/skipped") as file:
        skipped = set(json.load(file))
    items[:] = [item for item in items if item.nodeid not in skipped]


def pytest_runtest_logstart(nodeid):
    say("began", nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        say("failed", report.nodeid)
    elif report.when == "teardown":
        say("passed", report.nodeid)


def pytest_collectreport(report):
    if report.failed:
        say("failed", report.nodeid)
"""


class MutantsError(Exception):
    """The bench cannot do its work; the message says why."""


# --- copies of the tree ---------------------------------------------------------------------------------------------


class Copy:
    """A copy of a tree, with an environment of its own that imports the product from it and nothing else."""

    def __init__(self, tree: Path, directory: Path, seed: int) -> None:
        self.root, self._home = directory / "tree", directory / "home"
        self._scratch, self._runs = directory / "0", 0
        self._seed = seed
        self._mark = uuid.uuid4().hex
        self._edits = 0
        self._closed = False
        copy_files(tree, self.root)
        for words in (("init", "-q"), ("add", "-A")):  # some tests ask git for the files
            subprocess.run(["git", *words], cwd=self.root, check=True, capture_output=True)
        self.python = make_environment(environment_of(tree), self.root)
        (site,) = self.root.glob(".venv/lib/python3*/site-packages")
        (site / f"{PLUGIN}.py").write_text(PLUGIN_TEXT)
        self._share_caches()

    def _share_caches(self) -> None:
        """A home with the caches of libraries (fonts, browsers), and without models that a mutant may have spoilt."""
        shutil.rmtree(self._home, ignore_errors=True)
        (self._home / ".cache").mkdir(parents=True)
        with suppress(OSError):
            for entry in (Path.home() / ".cache").iterdir():
                if entry.name != "streamrl":
                    (self._home / ".cache" / entry.name).symlink_to(entry)

    @contextmanager
    def mutated(self, file: str, point: Point) -> Iterator[None]:
        """The copy with one mutation in it."""
        path = self.root / file
        source, was = path.read_bytes(), path.stat()
        self._edits += 1
        try:
            path.write_bytes(point.apply(source))
            # Bytecode is told apart by size and seconds: the mutant gets a second of its own.
            os.utime(path, (was.st_atime, was.st_mtime + 1000 * self._edits))
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, (was.st_atime, was.st_mtime))

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        return inherited | {
            MARK: self._mark,
            "HOME": str(self._home),
            "TMPDIR": str(self._scratch),
            "VIRTUAL_ENV": str(self.root / ".venv"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "STREAMRL_SEED": str(self._seed),  # property tests draw the same again
        }

    def run(self, arguments: Sequence[str], seconds: float, where: Path) -> tuple[int | None, str]:
        """Exit code and output of pytest in this copy; None: it was not through. Nothing of it is left running.

        where: the folder of what the plugin reads and writes. Raises MutantsError after ``close``.
        """
        if self._closed:
            raise MutantsError("the bench was interrupted")
        shutil.rmtree(self._scratch, ignore_errors=True)  # as far as it goes: what was just killed may still write
        self._runs += 1
        self._scratch = self._scratch.with_name(str(self._runs))
        self._scratch.mkdir()
        self._share_caches()
        command = [str(self.python), "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-n0", "-x", *arguments]
        command += [f"--basetemp={self._scratch / 'b'}", "-o", "faulthandler_timeout=0"]
        with (self._scratch / "out").open("w+b") as out:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment() | {"STREAMRL_TRY": str(where)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=seconds)
                if code is None:
                    process.send_signal(signal.SIGINT)  # fixtures end what they started
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=GRACE_S)
            finally:
                self._end_all()
                process.wait()
            out.seek(0)
            return code, out.read().decode(errors="replace")

    def close(self) -> None:
        """End what runs here; nothing is started any more."""
        self._closed = True
        self._end_all()

    def _end_all(self) -> None:
        """Kill every process that began in this copy, also those that left their parent."""
        pids: set[int] = set()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                # A server that writes its own title over its environment has no mark any more.
                if one.environ().get(MARK) == self._mark or Path(one.cwd()).is_relative_to(self.root.parent):
                    pids.add(one.pid)
                    one.kill()
        for segment in Path("/dev/shm").glob("streamrl-*@*"):
            if segment.name.split("@")[1] in map(str, pids):
                segment.unlink(missing_ok=True)


def check_copy(copy: Copy) -> None:
    """Raises MutantsError unless processes in the copy import the copy's product, however they are started."""
    file = "transport/contracts/types.py"
    nothing = Mutation(file=file, function="", kind="", before="", after="")
    broken = Point(nothing, 0, (copy.root / file).stat().st_size, b"raise SystemExit(77)\n", 0)
    ways = (
        [str(copy.python), "-P", "-c", "import transport.contracts.types"],
        [str(copy.python), "-I", "-c", "import transport.contracts.types"],
        [str(copy.python.with_name("streamrl-orchestrator")), "settings"],
    )
    with copy.mutated(file, broken):
        for way in ways:
            code = subprocess.run(way, cwd="/", env=copy.environment(), capture_output=True, check=False).returncode
            if code != 77:
                raise MutantsError(
                    f"`{' '.join(way)}` does not import {copy.root / file}: mutations would not be tried"
                )


# --- which tests come first -----------------------------------------------------------------------------------------


class Nearness:
    """How far a test is from a module: the number of imports between them, by what the files say."""

    def __init__(self, root: Path) -> None:
        product = Product.read(root, (*PACKAGES, "tests"))
        self._importers: defaultdict[str, set[str]] = defaultdict(set)
        for file, imported in product.imports().items():
            for one in imported:
                self._importers[one].add(file)
        self.tests = sorted(filter(_is_test, product.trees))
        self._texts = {test: (root / test).read_text(encoding="utf-8") for test in self.tests}

    def tests_of(self, mutation: Mutation, file: str) -> list[str]:
        """The test files that import ``file``, directly or through others: those to try first come first."""
        away = {file: 0}
        waiting = deque([file])
        while waiting:
            one = waiting.popleft()
            for importer in sorted(self._importers[one]):
                if importer not in away:
                    away[importer] = away[one] + 1
                    waiting.append(importer)
        words = {word for word in mutation.function.split(".") if not word.startswith(("_", "<"))}

        def rank(test: str) -> tuple[int, int, str]:
            names_it = bool(words) and all(word in self._texts[test] for word in words)
            names_it = names_it or Path(test).stem == f"test_{Path(file).stem}"
            tier = FAST.index(_tier(test)) if _tier(test) in FAST else len(FAST)
            return away[test] - names_it + SLOW_AWAY * (tier == len(FAST)), tier, test

        return sorted((test for test in away if _is_test(test)), key=rank)


def _tier(test: str) -> str:
    return test.split("/")[1]


def _is_test(file: str) -> bool:
    return bool(re.match(r"tests/\w+/test_\w+\.py$", file)) and _tier(file) not in NOT_OF_MAKE_TEST


# --- one mutant -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdict:
    """What became of a mutation. by: the test that found it; empty: it survived. tried: how many tests passed."""

    mutation: Mutation
    by: str = ""
    seconds: float = 0.0
    tried: int = 0
    gone: bool = False

    def __str__(self) -> str:
        if self.gone:
            return f"gone      {self.mutation}"
        if self.by:
            return f"found     {self.mutation} by {self.by} in {self.seconds:.0f} s"
        return f"survived  {self.mutation} {self.tried} tests in {self.seconds:.0f} s\n{self.mutation.diff}"


@dataclass(slots=True)
class Known:
    """What is known of tests without a mutation; shared by the jobs. fails: they count for nothing."""

    copy: Copy
    fails: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_sound(self, test: str) -> bool:
        """Whether a test passes, or a file is collected, without a mutation; ``seconds`` says how long that takes."""
        with self.lock:
            if test not in self.seconds and test not in self.fails:
                alone = [test] if "::" in test else ["--collect-only", test]
                began_s = time.monotonic()
                outcome = attempt(self.copy, alone, CLEAN_S)
                if not outcome.failed and outcome.code == 0:
                    self.seconds[test] = time.monotonic() - began_s
                else:
                    self.fails.add(test)
                    print(f"fails without a mutation, counts for none: {test}", flush=True)
            return test in self.seconds


@dataclass(slots=True)
class Outcome:
    """code: of pytest, None where it was stopped. running: the test in which it was stopped, and for how long."""

    code: int | None
    passed: set[str]
    failed: str
    running: str
    running_s: float


def attempt(copy: Copy, arguments: Sequence[str], seconds: float, skipped: Sequence[str] = ()) -> Outcome:
    """Run tests in a copy up to the first failure, or for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="streamrl-try-") as name:
        report = Path(name) / "report"
        report.touch()
        (Path(name) / "skipped").write_text(json.dumps(skipped))
        code, output = copy.run(arguments, seconds, Path(name))
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    passed = {nodeid for what, nodeid, _ in lines if what == "passed"}
    failed = next((nodeid for what, nodeid, _ in lines if what == "failed"), "")
    running, at_s = next(((nodeid, at_s) for what, nodeid, at_s in reversed(lines) if what == "began"), ("", 0.0))
    if running in passed | {failed}:
        running = ""
    if not failed and code is not None:
        if running:  # the interpreter ended in the midst of it
            failed = running
        elif code not in (0, NO_TESTS):
            failed = "tests/conftest.py"
            print(output[-2000:], flush=True)
    return Outcome(code, passed, failed, running, time.time() - at_s if running else 0.0)


def try_mutant(copy: Copy, known: Known, nearness: Nearness, mutation: Mutation, minutes: float) -> Verdict:
    """Make one mutation in the copy, and run tests until one fails or the time is up."""
    located = locate(copy.root, mutation)
    if located is None:
        return Verdict(mutation=mutation, gone=True)
    file, point = located
    verdict = Verdict(mutation=mutation)
    started_s = time.monotonic()
    passed: set[str] = set()
    through: set[str] = set()
    with copy.mutated(file, point):
        for tests, limit_s in ((nearness.tests_of(mutation, file), 30 * minutes), (nearness.tests, 60 * minutes)):
            waiting, few = [test for test in tests if test not in through], FEW
            while waiting and not verdict.by and (left_s := limit_s - (time.monotonic() - started_s)) > 1.0:
                outcome = attempt(copy, ["-m", MARKED, *waiting[:few]], left_s, sorted(passed | known.fails))
                passed |= outcome.passed
                if outcome.failed and _holds(copy, known, outcome.failed):
                    verdict.by = outcome.failed
                elif outcome.code is None:
                    verdict.by = outcome.running if _hangs(known, outcome) else ""
                    break
                elif not outcome.failed:
                    through |= set(waiting[:few])
                    waiting, few = waiting[few:], min(2 * few, MANY)
    verdict.seconds, verdict.tried = time.monotonic() - started_s, len(passed)
    return verdict


def _holds(copy: Copy, known: Known, failed: str) -> bool:
    """Whether a failure is the mutation's: not where the test fails without it, nor where it fails by chance."""
    if failed == "tests/conftest.py":
        return True  # the copy without a mutation was collected at the start
    if not known.is_sound(failed):
        return False
    if _tier(failed) in FAST or "::" not in failed:
        return True
    again = attempt(copy, [failed], CLEAN_S)
    if not again.failed and again.code == 0:
        print(f"failed once and not again, counts for none: {failed}", flush=True)
        with known.lock:
            known.fails.add(failed)
        return False
    return True


def _hangs(known: Known, outcome: Outcome) -> bool:
    """Whether the test that was stopped would not have ended."""
    if outcome.running_s < HANG_S or not known.is_sound(outcome.running):
        return False
    return outcome.running_s > HANG_RATIO * known.seconds[outcome.running]


# --- the whole ------------------------------------------------------------------------------------------------------


def chosen(options: argparse.Namespace) -> list[Mutation]:
    """The mutations to try, as the options ask for them."""
    for folder in ("orchestrator", "tests"):
        if not (options.tree / folder).is_dir():
            raise MutantsError(f"{options.tree} has no folder {folder}: --tree names a checkout of StreamRL")
    if options.list:
        try:
            mutations = msgspec.json.decode(Path(options.list).read_bytes(), type=list[Mutation])
        except (OSError, msgspec.MsgspecError) as error:
            raise MutantsError(f"--list {options.list} is no file that --save wrote: {error}") from error
    else:
        mutations = draw(options.tree, MUTANTS, options.seed)
    if options.save:
        Path(options.save).write_bytes(msgspec.json.format(msgspec.json.encode(mutations)) + b"\n")
    try:
        mutations = [one for one in mutations if re.search(options.only, f"{one} {one.before}")]
    except re.error as error:
        raise MutantsError(f"--only {options.only!r} is no regular expression: {error}") from error
    if not mutations:
        raise MutantsError(f"--only {options.only!r} matches none of the mutations: --save FILE writes them")
    if options.sample and options.sample < len(mutations):
        mutations = [mutations[number * len(mutations) // options.sample] for number in range(options.sample)]
    return mutations


def measure(options: argparse.Namespace, mutations: Sequence[Mutation], directory: Path) -> list[Verdict]:
    """Try every mutation; a line for each as soon as it is decided."""
    clean = Copy(options.tree, directory / "c", options.seed)
    check_copy(clean)
    nearness = Nearness(clean.root)
    if attempt(clean, ["--collect-only", nearness.tests[-1]], CLEAN_S).code != 0:
        raise MutantsError(f"tests of {options.tree} cannot be collected, with no mutation in it: `make test` says why")
    known = Known(clean)
    copies = [Copy(options.tree, directory / str(number), options.seed) for number in range(options.jobs)]
    idle = deque(copies)

    def one(mutation: Mutation) -> Verdict:
        copy = idle.popleft()
        try:
            verdict = try_mutant(copy, known, nearness, mutation, options.minutes)
        finally:
            idle.append(copy)
        print(verdict, flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(one, mutation) for mutation in mutations]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in (clean, *copies):
                copy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="what the mutations are drawn by")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="try only N of them, spread over all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="try only those whose file, function, kind match")
    parser.add_argument("--minutes", type=float, default=2.0, help="for one mutation at most")
    parser.add_argument("--jobs", type=int, default=JOBS, choices=range(1, JOBS + 1), help="how many at once")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="another checkout, with its own tests")
    parser.add_argument("--save", metavar="FILE", help="write the mutations as JSON")
    parser.add_argument("--list", metavar="FILE", help="try the mutations of such a file")
    options = parser.parse_args()
    options.tree = options.tree.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started_s = time.monotonic()
    try:
        mutations = chosen(options)
        print(f"seed {options.seed}: {len(mutations)} mutations of {options.tree}", flush=True)
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
            verdicts = measure(options, mutations, Path(name).resolve())
    except (CheckoutError, MutantsError) as error:
        sys.exit(f"mutants: {error}")
    found = sum(bool(verdict.by) for verdict in verdicts)
    gone = sum(verdict.gone for verdict in verdicts)
    survived = len(verdicts) - found - gone
    figures = {
        "mutants": len(verdicts),
        "found": found,
        "found_share": round(found / max(1, found + survived), 3),
        "survived": survived,
        "gone": gone,
        "seed": options.seed,
        "minutes": round((time.monotonic() - started_s) / 60, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
