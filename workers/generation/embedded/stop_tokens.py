"""The tokens that end a response, as the model's own files name them."""

from __future__ import annotations

from pathlib import Path

from transport.contracts.types import Struct
from transport.errors import InputFileError
from transport.process.json_files import read_json
from workers.errors import ModelError


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
