"""Rewards as users write them, good and bad, for the scoring tests; named ``tests.fakes.rewards:<function>``."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32


def length(prompt: str, response: str, entry: dict[str, Any]) -> dict[str, float]:
    """A good one: longer responses are worth more."""
    return {"reward": len(response) / 10, "prompted": float(prompt == "say it"), "even": float(len(response) % 2 == 0)}


def as_told(prompt: str, response: str, entry: dict[str, Any]) -> object:
    """Misbehaves as the entry says; else 1."""
    print("noise on standard output")
    match entry.get("do"):
        case "raise":
            raise KeyError("no such thing")
        case "hang":
            while True:
                pass
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "none":
            return None
        case "leak":
            return float(len(bytearray(64 * 1024**3)))
        case "die":
            os.kill(os.getpid(), 9)
        case "exit":
            sys.exit(3)
        case "exit hard":
            os._exit(3)
        case "write":
            os.write(1, b"\xff" * 64)
        case "read":
            return float(len(sys.stdin.read()))
        case "raise once":
            marker = Path(entry["marker"])
            if not marker.exists():
                marker.touch()
                raise RuntimeError("not yet")
    return 1.0


def raises_for_some(prompt: str, response: str, entry: dict[str, Any]) -> float:
    """Raises for one question in four, and always for the same."""
    if crc32(entry["question"].encode()) % 4 == 0:
        raise ValueError(f"cannot judge {entry['question']!r}")
    return sum(char.isdigit() for char in response) / max(1, len(response))


def alike_for_some(prompt: str, response: str, entry: dict[str, Any]) -> float:
    """The length of the response, but the same for one question in three, whose groups so have no signal."""
    return 1.0 if crc32(entry["question"].encode()) % 3 == 0 else float(len(response))


def escapes(prompt: str, response: str, entry: dict[str, Any]) -> dict[str, float]:
    """Tries to get out. Each component is 1 where it succeeded; entry: where to (see test_jail.py)."""
    attempts: dict[str, Callable[[], object]] = {
        "environment": lambda: 1 / any(entry["secret"] in value for value in os.environ.values()),
        "environment of others": lambda: 1 / any(_holds(path, entry["secret"]) for path in _others("environ")),
        "network": lambda: socket.create_connection(("127.0.0.1", entry["port"]), timeout=2).close(),
        "processes of others": lambda: 1 / any(_holds(path, entry["program"]) for path in _others("cmdline")),
        "read": lambda: Path(entry["file"]).read_text(),
        "read the run": lambda: Path(entry["run"]).read_text(),
        "write beside the reward": lambda: Path(__file__).with_name("planted").touch(),
        "write the library": lambda: Path(json.__file__).with_name("planted").touch(),
        "become root": lambda: os.setuid(0),
        "namespaces": lambda: 1 / (ctypes.CDLL(None).unshare(NEW_USER) == 0),
        "core dumps": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
        "memory": lambda: bytearray(6 * 1024**3),
        "disk": _fill_disk,
        "processes": _many_processes,
    }
    return {"reward": 0.0, **{name: _succeeds(attempt) for name, attempt in attempts.items()}}


NEW_USER = 0x10000000


def _succeeds(attempt: Callable[[], object]) -> float:
    try:
        attempt()
    except (OSError, ValueError, MemoryError, ZeroDivisionError):
        return 0.0
    return 1.0


def _others(what: str) -> list[Path]:
    return [path for path in Path("/proc").glob(f"[0-9]*/{what}") if path.parent.name != str(os.getpid())]


def _holds(path: Path, secret: str) -> bool:
    try:
        return secret.encode() in path.read_bytes()
    except OSError:
        return False


def _fill_disk() -> None:
    """Up to 300 MiB, in several files, and removed again."""
    with tempfile.TemporaryDirectory() as directory:
        for number in range(3):
            Path(directory, str(number)).write_bytes(b"x" * (100 * 1024**2))


def _many_processes() -> None:
    """300 that wait for this one; all are ended again."""
    pids: list[int] = []
    try:
        for _ in range(300):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            pids.append(pid)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


async def awaited(prompt: str, response: str, entry: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return len(response)


def in_batches(prompts: list[str], responses: list[str], entries: list[dict[str, Any]]) -> list[object]:
    """As long as the response; how many came together as a component."""
    return [
        None if response == "none" else {"reward": len(response), "together": len(responses)} for response in responses
    ]


def hangs_for_some(prompts: list[str], responses: list[str], entries: list[Any]) -> list[float]:
    while "hang" in responses:
        pass
    return [float(len(response)) for response in responses]


async def awaited_batch(*, entries: list[Any], prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0] * len(responses)


def too_few(prompts: list[str], responses: list[str], entries: list[Any]) -> list[float]:
    return [1.0]


def of_slime(args: Any, sample: Any) -> float:
    return 1.0


def remembers(prompt: str, response: str, entry: dict[str, Any]) -> float:
    """1 for what an answer is told of the one before it."""
    told = float(bool(_memory))
    _memory.append(response)
    return told


_memory: list[str] = []
