"""What holds for every test: it leaves nothing behind, and its tier says how long it may take.

Left behind means: an asyncio task, a socket, a child process, a thread, or a shared-memory segment of ours. What a
fixture of a wider scope opened before the test is not the test's.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import pytest_asyncio
from hypothesis import settings

from tests.alone import CLONE_NEWNS, unshare
from tests.costs import Costs
from tests.fakes.gpu_driver import FakeDriver
from tests.fakes.preloaded import stop_server
from tests.property.exploring import SEED

os.environ["STREAMRL_SEED"] = str(SEED)  # the processes that share the tests draw from one seed
# Before torch reads it, and for the processes that tests start: several of them share few cores, and threads that wait
# for each other made the engine's tests 20 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a hub

TIMEOUTS_S = {
    "unit": 60,
    "property": 300,
    "contract": 180,
    "sim": 180,
    "golden": 60,
    "integration": 300,
    "fuzz": 300,
    "chaos": 600,
    "gpu": 600,
}
"""Seconds after which a test of each tier hangs; a test that needs another limit says so with its own mark.

A guard against hangs, not against neighbours: a machine at load 8 keeps them. How fast code is, benchmarks say.
"""
GRACE_S = 20.0
"""For a thread or a process that was told to end and is about to; a busy machine may let it wait for its turn."""
settings.register_profile("ours", deadline=None)  # a loaded machine is no failure
settings.load_profile("ours")
SHARED_MEMORY = Path("/dev/shm")
SHARES_TESTS = "PYTEST_XDIST_WORKER" in os.environ
"""Whether other processes of this session test at the same time."""
SEGMENTS_BEFORE = pytest.StashKey[set[str]]()
TESTS = Path(__file__).parent

T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
    unshare(CLONE_NEWNS)  # before any thread or process that must see what tests mount
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep all that was imported and collected out of every later collection of garbage.

    It lives as long as the process: looking through it cost 4 s of CPU while it came, and 0.8 s each time after.
    """
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier's time-out, and each coroutine test the check of its tasks."""
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if tier in TIMEOUTS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[tier]))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            _check_tasks(item.fixturenames)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[SEGMENTS_BEFORE] = _segments()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail when segments of processes that are gone outlive a session of several processes: none of them knew whose."""
    stop_server()
    if SHARES_TESTS or not session.config.getoption("numprocesses", None):
        return
    left = {name for name in _segments() - session.stash[SEGMENTS_BEFORE] if _is_orphan(name)}
    if left:
        print(f"\nthe tests leave behind shared-memory segments: {sorted(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/property explored from seed {SEED}; again: STREAMRL_SEED={SEED} make test")


def _check_tasks(fixtures: list[str]) -> None:
    """Ask for ``no_leaked_tasks`` before the test's own fixtures, so that it is torn down after them: what they start,
    they may still end. But after those of a wider scope, whose servers are not the test's."""
    if "no_leaked_tasks" not in fixtures:
        fixtures.insert(fixtures.index("no_leaks") + 1, "no_leaked_tasks")


@pytest_asyncio.fixture
async def no_leaked_tasks(no_leaks: None) -> AsyncIterator[None]:
    """Fail when a task outlives the test and its fixtures: nobody would hear of its end.

    After ``no_leaks``, so that this one sees the loop, and that one what is left when the loop is closed.
    """
    before = asyncio.all_tasks()
    yield
    for _ in range(3):  # a task that was cancelled without being awaited ends within a few turns of the loop
        await asyncio.sleep(0)
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not leaked, f"asyncio tasks outlive the test: {sorted(task.get_name() for task in leaked)}"


@pytest.fixture(scope="session", autouse=True)
def no_survivors() -> Iterator[None]:
    """Kill what leaked, at the very end: the next run wants the cores."""
    yield
    survivors = _children()
    for process in survivors:
        process.kill()
    psutil.wait_procs(survivors, timeout=GRACE_S)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail when sockets, child processes, threads or segments outlive the test and its fixtures."""
    threads, children, sockets, segments = set(threading.enumerate()), _children(), _sockets(), _segments()
    yield
    leaks = {
        "threads": _leaked_threads(threads),
        "child processes": _leaked_children(children),
        "sockets": _still(lambda: _sockets() - sockets),
        "shared-memory segments": _still(lambda: {name for name in _segments() - segments if _is_orphan(name)}),
    }
    found = {kind: sorted(map(str, left)) for kind, left in leaks.items() if left}
    assert not found, f"the test leaves behind: {found}"


def _still(look: Callable[[], set[T]]) -> set[T]:
    """What ``look`` finds, also after the garbage that may hold it is gone (collecting it each time costs 0.2 s)."""
    if look():
        gc.collect()
    return look()


def _leaked_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    new = {
        thread for thread in set(threading.enumerate()) - before if thread.name != "tqdm_monitor"
    }  # transformers' own
    for thread in new:
        thread.join(GRACE_S)
    return {thread for thread in new if thread.is_alive()}


def _children() -> set[psutil.Process]:
    """Our child processes, but for multiprocessing's own helpers, which live as long as the interpreter."""
    return {child for child in psutil.Process().children() if not _is_helper(child)}


HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any(helper in word for word in process.cmdline() for helper in HELPERS)
    except psutil.Error:  # it is gone, or a zombie
        return False


def _leaked_children(before: set[psutil.Process]) -> set[psutil.Process]:
    """Children that are new and alive after their grace."""
    _, alive = psutil.wait_procs(_children() - before, timeout=GRACE_S)
    return set(alive)


def _sockets() -> set[str]:
    """Names of this process's open sockets, ``socket:[<inode>]``; none where the system does not list them."""
    links: set[str] = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        try:
            links.add(os.readlink(descriptor))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return {link for link in links if link.startswith("socket:")}


def _segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("streamrl-*")}


def _is_orphan(segment: str) -> bool:
    """``streamrl-<run>@<pid>@<name>``: ours, or of a process that is gone. Others may run on this machine.

    A process that is gone may have been a neighbour's, where others test beside us: the session looks at its end.
    """
    pid = segment.split("@")[1] if segment.count("@") >= 2 else ""
    if not pid.isdigit() or int(pid) == os.getpid():
        return True
    return not SHARES_TESTS and not psutil.pid_exists(int(pid))


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Of GPUs; called with their number."""
    return FakeDriver(tmp_path, monkeypatch)
