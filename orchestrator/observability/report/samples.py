"""A few samples of a run as text, kept in ``samples.jsonl`` for its report.

They are what the orchestrator shows on the live page (observability/samples.py): the best and the worst of a group,
already cut, so nothing is fetched or decoded twice. Owns: the file and its bound: at most MAX_OF_BATCH of each batch.
Never: escapes; who shows them does.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

SAMPLES = "samples.jsonl"
MAX_OF_BATCH = 2
MAX_SHOWN = 24
"""Samples in a report: the newest. Enough to see what the model writes now; the file keeps more."""


class SampleKeeper:
    """Appends to ``path`` the samples it has not seen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = _read(path)
        self._rows = {sample.get("row") for sample in known}
        self._of_batch = Counter(_batch(sample) for sample in known)

    def keep(self, sample: dict[str, Any]) -> None:
        """Keep one, if it is new and its batch has not had its share."""
        if self._is_wanted(sample):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")

    def _is_wanted(self, sample: dict[str, Any]) -> bool:
        batch = _batch(sample)
        if sample.get("row") in self._rows or self._of_batch[batch] >= MAX_OF_BATCH:
            return False
        self._rows.add(sample.get("row"))
        self._of_batch[batch] += 1
        return True


def _batch(sample: dict[str, Any]) -> str:
    return str(sample.get("row", "")).partition("/")[0]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The newest samples that were kept, newest first; [] if there are none."""
    return _read(path)[: -MAX_SHOWN - 1 : -1]


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines, in order. A torn one (a kill while writing) is left out."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            sample = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(sample, dict):
            found.append(sample)
    return found
