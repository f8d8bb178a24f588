"""Rewards as users write them, good and bad, for the scoring tests; named ``tests.fakes.rewards:<function>``."""

from __future__ import annotations

import os
import sys
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


def secrets(prompt: str, response: str, entry: dict[str, Any]) -> float:
    """Looks for the broker's password."""
    return float("STREAMRL_BROKER_PASSWORD" in os.environ)
