"""The tokens that end a response, as the model's own files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.errors import ModelError


def stop_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence ids of ``generation_config.json``, else of ``config.json``; ascending, () if neither has any.

    A chat model often has several (end of turn, end of text); any of them ends a response.
    Raises: ModelError when a file is there and is not JSON.
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
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(sorted({int(token) for token in ids if token is not None}))
