"""The table of settings is what the code says, and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.commands import app
from orchestrator.config.schema import ENTRIES, FIELDS, descriptions, expected_type, keys_of, settings_table
from orchestrator.errors import ConfigError

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_document_is_up_to_date():
    remedy = "make it anew: .venv/bin/streamrl-orchestrator settings > docs/settings.md"
    assert DOCUMENT.read_text(encoding="utf-8") == settings_table() + "\n", remedy


def test_every_setting_stands_in_the_table_with_default_unit_and_reason():
    rows = [line for line in settings_table().splitlines() if line.startswith("| `")]
    assert len(rows) == len(FIELDS | ENTRIES)
    lease = next(row for row in rows if "a worker silent for so long" in row)
    assert lease.startswith("| `lease_s` | `10.0` | a number >= 1 (seconds) | a worker silent")
    assert expected_type("tensors.min_mb_s") == "a number > 0 (MB/s)"
    assert "(environment: STREAMRL_BROKER_PASSWORD)" in next(row for row in rows if "`password`" in row)
    assert not [row for row in rows if row.endswith("\\ |")]


COUNTED = re.compile(
    r"batches|batch\b|groups|samples|prompts|problems|tokens|versions|workers|ranks|processes|threads|slots|steps|passes"
    r"|attempts|dispatches|units|replacements|restarts|checkpoints|requests|seconds|share|ratio|reward|factor|rate|norm"
    r"|turns|seed|port|softmax|logprob|GPUs|parts|stages|dimensions"
)


def test_every_setting_is_described_and_a_number_says_what_it_counts():
    """By the end of its name (seconds, bytes, tokens), or in words: a new setting without is refused here."""
    assert descriptions().keys() == (FIELDS | ENTRIES).keys()
    assert not [key for key, text in descriptions().items() if len(text.split()) < 2]
    kinds = {key: expected_type(key) for key in FIELDS | ENTRIES}
    numbers = [
        key for key, kind in kinds.items() if re.match("a (whole )?number|a list of 2", kind) and kind[-2:] != "s)"
    ]
    assert len(numbers) > 40
    assert not [key for key in numbers if not COUNTED.search(descriptions()[key])]


def test_the_command_explains_a_setting_and_a_section():
    def explain(*names: str) -> str:
        return CliRunner().invoke(app, ["settings", *names], catch_exceptions=False).stdout

    assert explain("liveness.lease_s").startswith(
        "liveness.lease_s = 10.0\n    a number >= 1 (seconds)\n    a worker silent"
    )
    assert explain("trainer.lora").count("\ntrainer.lora.") == len(keys_of("trainer.lora")) > 0
    inside = [*keys_of("trainer"), *keys_of("trainer.parallel"), *keys_of("trainer.lora")]
    assert explain("trainer").count("\ntrainer.") == len(inside)
    assert explain("eval.sets").count("\neval.sets.NAME.") == len(keys_of("eval.sets.NAME"))
    assert explain("eval.sets.NAME.samples").startswith("eval.sets.NAME.samples = 1\n    a whole number in [1, 4096]")
    with pytest.raises(ConfigError, match=r"no setting trainer.learning_rate \(did you mean trainer.lr\?\)"):
        explain("trainer.learning_rate")
