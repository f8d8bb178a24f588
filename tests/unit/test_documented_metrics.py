"""Metrics that the documents name are metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.report.bubbles import Cause

ROOT = Path(__file__).parents[2]
KEYS = {f"bubble_{stage}_{cause}_s" for stage in ("generation", "trainer") for cause in Cause}


def test_idle_seconds_are_called_what_they_are():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    named = {key for text in texts for key in re.findall(r"bubble_[a-z_]+_s\b", text)}
    assert named
    assert named <= KEYS
