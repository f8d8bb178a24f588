"""Which model a directory holds, as far as processes must agree on it: its tokenizer and its shape, not its weights.

Owns: what of the files counts. Never: loads a model. Invariant: equal identities mean that a token id is the same word
and that weights of one fit the other; what writers of files add for themselves (versions, names) does not count.
Source: ours; rollouts of another tokenizer would be trained as other words without a sign.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from transport.contracts.types import Struct
from transport.process.json_files import read_json

UNIMPORTANT = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "_attn_implementation")
"""Keys of config.json that differ between copies of one model."""
OF_TOKENIZER = ("normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model")
"""Keys of tokenizer.json that decide which words a text becomes; padding and truncation are its caller's."""


class ModelIdentity(Struct, frozen=True, kw_only=True):
    """12 hex digits each, "" for what the directory has not got."""

    config: str = ""
    tokenizer: str = ""

    def differs_in(self, other: ModelIdentity) -> str:
        """ "tokenizer", "config.json" or both in words; "" when nothing that both have differs."""
        names = {"tokenizer": (self.tokenizer, other.tokenizer), "config.json": (self.config, other.config)}
        return " and ".join(name for name, (ours, theirs) in names.items() if ours and theirs and ours != theirs)


def identify_model(directory: Path) -> ModelIdentity:
    """Raises InputFileError for a file that is there and cannot be read. Some 0.1 s for 150,000 words."""
    config = _read(directory / "config.json")
    tokenizer = _read(directory / "tokenizer.json")
    return ModelIdentity(
        config=_digest({key: value for key, value in config.items() if key not in UNIMPORTANT}),
        tokenizer=_digest({key: tokenizer[key] for key in OF_TOKENIZER if key in tokenizer}),
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_json(path, dict[str, Any])


def _digest(content: dict[str, Any]) -> str:
    if not content:
        return ""
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=6).hexdigest()
