"""Processes of tests that are forked from one which has imported what takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

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
    context.set_forkserver_preload([*MODULES])
    return context


def server_cpu_s() -> float:
    """CPU seconds of the server and of its children that have ended; 0 where none was started."""
    try:
        return sum(psutil.Process(_pid()).cpu_times()[:4]) if _pid() else 0.0
    except psutil.NoSuchProcess:
        return 0.0


def stop_server() -> None:
    """End it and wait for it, so that what it computed counts among this process's children."""
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]


def _pid() -> int | None:
    return forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
