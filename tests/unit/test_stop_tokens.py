"""Where a response ends is the model's own business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.errors import ModelError
from workers.models import stop_token_ids


def test_generation_config_goes_before_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert stop_token_ids(tmp_path) == (2, 9)


def test_a_model_without_an_end_runs_to_the_limit(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(tmp_path) == ()


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not the JSON that belongs here"):
        stop_token_ids(tmp_path)
