"""The glossary names every stage, column, stream and section that there is."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.config.schema import SECTIONS
from orchestrator.core.model.groups import Stage
from transport.broker import keys
from transport.contracts.types import Column, WorkerId

NAMED = set(re.findall(r"`([^`]+)`", (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")))


def test_stages_columns_and_sections_are_in_the_glossary():
    assert {*map(str, Stage), *map(str, Column), *SECTIONS} <= NAMED


def test_streams_are_in_the_glossary():
    logs = {keys.EVENTS, keys.ROUNDS, keys.WEIGHTS, keys.ROUTES, keys.UPDATES, keys.DEAD}
    of_workers = {keys.plans(WorkerId("<worker>")), keys.control(WorkerId("<worker>")), keys.tasks("<task>")}
    assert logs | of_workers <= NAMED
