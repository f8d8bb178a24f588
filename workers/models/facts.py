"""What a model's own files say of it: its kind, its vocabulary, its limit, the tokens that end a response."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.contracts.types import Struct
from transport.errors import InputFileError
from transport.process.json_files import read_json
from workers.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's own config.json says. max_context: tokens, 0 where it names no limit."""

    model_type: str
    vocab_size: int
    max_context: int


def model_facts(directory: Path) -> ModelFacts:
    """Raises ModelError when config.json is missing or names no vocabulary."""
    path = directory / "config.json"
    try:
        config = read_json(path, dict[str, Any])
    except InputFileError as error:
        raise ModelError(str(error)) from error
    text: dict[str, Any] = config.get("text_config") or config
    if not isinstance(text.get("vocab_size"), int):
        raise ModelError(f"{path} has no vocab_size")
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        vocab_size=text["vocab_size"],
        max_context=int(text.get("max_position_embeddings") or 0),
    )


class _Config(Struct, frozen=True, kw_only=True):
    """What is read of either file."""

    eos_token_id: int | list[int] | None = None


def stop_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence ids of ``generation_config.json``, else of ``config.json``; ascending, () if neither has any.

    A chat model often has several (end of turn, end of text); any of them ends a response.
    Raises: ModelError when a file is there and is no such JSON.
    """
    for name in ("generation_config.json", "config.json"):
        found = _eos(model_dir / name)
        if found:
            return found
    return ()


def _eos(path: Path) -> tuple[int, ...]:
    if not path.is_file():
        return ()
    try:
        eos = read_json(path, _Config).eos_token_id
    except InputFileError as error:
        raise ModelError(str(error)) from error
    return tuple(sorted({eos} if isinstance(eos, int) else set(eos or ())))
