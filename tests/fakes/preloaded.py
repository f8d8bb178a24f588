"""Processes of tests that are forked from one which has imported what takes seconds."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil

MODULES = (
    "tests.fakes.sharded",  # with torch and transformers: 10 s of a core for each rank of a trainer otherwise
    "workers.trainer.policy.pipeline",
    "reasoning_gym",
    "orchestrator.cli.commands",
    "orchestrator.launch.supervisor",
)
"""Imported once for all processes of a test session. Imports start no threads."""


def preloaded() -> ForkServerContext:
    """The context of ``multiprocessing`` whose processes have imported ``MODULES``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.imported"])
    return context


class Program:
    """``python -m module words``, started in a process that has imported it already."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        *,
        cwd: Path,
        environ: Mapping[str, str],
        outputs: Sequence[Path] = (Path(os.devnull), Path(os.devnull)),
    ) -> None:
        """environ: all of its environment.  outputs: the files of stdout and stderr."""
        self._words = words
        self._process = preloaded().Process(target=_run, args=(module, words, cwd, dict(environ), outputs))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def join(self, timeout_s: float) -> int:
        """Its exit code, minus the number of the signal that ended it. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout_s)
        return self._process.exitcode

    async def wait(self, timeout_s: float = 240.0) -> int:
        """``join``, for a coroutine."""
        return await asyncio.to_thread(self.join, timeout_s)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """End it, and wait until it has ended."""
        self._process.kill()
        self._process.join()


def _run(module: str, words: Sequence[str], cwd: Path, environ: Mapping[str, str], outputs: Sequence[Path]) -> None:
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forked_cpu_s() -> float:
    """CPU seconds of the server's children that have ended, without its own imports; 0 where none was started."""
    try:
        return sum(psutil.Process(_pid()).cpu_times()[2:4]) if _pid() else 0.0
    except psutil.NoSuchProcess:
        return 0.0


def stop_server() -> None:
    """End it and wait for it, so that what it computed counts among this process's children."""
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]


def _pid() -> int | None:
    return forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
