"""The table of settings is what the code says, and complete."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.schema import FIELDS, settings_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_document_is_up_to_date():
    remedy = "make it anew: .venv/bin/streamrl-orchestrator settings > docs/settings.md"
    assert DOCUMENT.read_text(encoding="utf-8") == settings_table() + "\n", remedy


def test_every_setting_stands_in_the_table_with_default_unit_and_reason():
    rows = [line for line in settings_table().splitlines() if line.startswith("| `")]
    assert len(rows) == len(FIELDS)
    lease = next(row for row in rows if "a worker silent for so long" in row)
    assert lease.startswith("| `lease_s` | `10.0` | a number > 0 (seconds) | a worker silent")
    assert "(environment: STREAMRL_BROKER_PASSWORD)" in next(row for row in rows if "`password`" in row)
    assert not [row for row in rows if row.endswith("\\ |")]
