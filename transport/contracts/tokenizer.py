"""The tokenizer of a model directory, read alike by every program that turns tokens into text or text into tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transport.errors import InputFileError

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that add nothing to tokenizer.json."""


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer that transformers would choose, without torch where that is possible: 0.4 s instead of 3 s.

    A directory whose tokenizer is of a PLAIN class is all in tokenizer.json; others name a class of their model.
    Raises InputFileError: there is none, or it cannot be read. Nothing is fetched, and no code of the directory runs.
    """
    import transformers

    fast: Any = transformers.PreTrainedTokenizerFast
    config = model_dir / "tokenizer_config.json"
    try:
        named = json.loads(config.read_bytes()).get("tokenizer_class") if config.is_file() else None
        if named in PLAIN and (model_dir / "tokenizer.json").is_file():
            return fast.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        chosen: Any = transformers.AutoTokenizer
        return chosen.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputFileError(str(error), where=str(model_dir)) from error
