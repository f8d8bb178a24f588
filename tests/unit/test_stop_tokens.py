"""Where a response ends is the model's own business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.errors import ModelError
from workers.models import character_tokenizer, remarks_on_ends, stop_token_ids, try_chat_template


def test_ends_of_both_configurations_and_of_their_text_part_are_ends(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [5]}}))
    assert stop_token_ids(tmp_path) == (5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert stop_token_ids(tmp_path) == (2, 5, 7, 9)


ADDED = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    ("file", "token", "ends"),
    [
        ("tokenizer_config.json", "<|im_end|>", (1, 3)),
        ("tokenizer_config.json", ADDED, (1, 3)),
        ("special_tokens_map.json", "<|im_end|>", (1, 3)),
        ("tokenizer_config.json", None, (1,)),
        ("tokenizer_config.json", "a", (1, 6)),  # a word of the vocabulary, which is no added token
    ],
)
def test_the_end_of_the_tokenizer_is_an_end(tmp_path: Path, file: str, token: object, ends: tuple[int, ...]):
    character_tokenizer().save_pretrained(tmp_path)
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del named["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    written = tmp_path / file
    former = json.loads(written.read_text()) if written.is_file() else {}
    written.write_text(json.dumps(former | {"eos_token": token}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert stop_token_ids(tmp_path) == ends


def test_an_end_that_is_no_token_is_left_out_and_remarked_on(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "eos_token_id": [7, 151645, -1]}))
    assert stop_token_ids(tmp_path) == (7,)
    said = remarks_on_ends(tmp_path)
    assert len(said) == 2
    assert "config.json" in said[0]
    assert "151645" in said[0]


def test_an_end_of_turn_that_no_file_names_is_remarked_on(tmp_path: Path):
    character_tokenizer().save_pretrained(tmp_path)
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | {"eos_token": "<|unk|>"}))
    behind = try_chat_template(tmp_path)
    assert behind == "<|im_end|>"
    (said,) = remarks_on_ends(tmp_path, behind)
    assert "ends a turn with <|im_end|> (3), which no file of it names as an end" in said
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert remarks_on_ends(tmp_path, behind) == []


def test_a_model_without_an_end_runs_to_the_limit(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(tmp_path) == ()
    assert "names no end of a response" in remarks_on_ends(tmp_path)[0]


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not the JSON that belongs here"):
        stop_token_ids(tmp_path)
