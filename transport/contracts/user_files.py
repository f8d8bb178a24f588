"""Files of a user that several programs read: response lengths, and which model a directory holds.

**Lengths.** A text file has one number of tokens a line; ``#`` begins a comment. Workers are forced to them
(``generation.lengths``), ``plan`` and ``simulate`` count with them. Logs with prompts are read by ``ranker/logs.py``.

Real logs hold answers of no token, lines that were cut, and columns without a value. Invariant: such a value is skipped
and counted, never repaired; a file in which more than MAX_SKIPPED are so is refused, and the first of them is named.

**Models.** Processes must agree on tokenizer and shape, not on weights. Invariant: equal identities mean that a token
id is the same word and that weights of one fit the other; what writers of files add for themselves (versions, names)
does not count. Source: ours; rollouts of another tokenizer would be trained as other words without a sign.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, Struct, is_evaluation
from transport.errors import LengthFileError
from transport.process.files import read_json

MAX_TOKENS = 100_000_000
MAX_SKIPPED = 0.1
"""Share of values that may be no lengths. Source: ours; chat logs have up to a few percent of empty answers."""

Say = Callable[[str], None]
"""Gets one sentence about what was skipped, where something was."""


def warn(sentence: str) -> None:
    structlog.get_logger(__name__).warning(sentence)


class Skipping:
    """Takes the values of one file, and counts those that are no lengths; or no ``kind``, of another file."""

    def __init__(self, path: Path, kind: str = "lengths") -> None:
        self._path = path
        self._kind = kind
        self._num_read = 0
        self._num_skipped = 0
        self._first = ""

    def take(self, value: object, where: str, shown: object = None) -> int | None:
        """The length that ``value`` is, tokens, or None. where: file and line.  shown: as it stands there."""
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if 1 <= number <= MAX_TOKENS and number == int(number):
            self.count()
            return int(number)
        said = repr(value if shown is None else shown)[:40]
        self.skip(f"a length is a whole number of tokens, 1 or more, not {said}", where)
        return None

    def count(self) -> None:
        """A value was as it should be."""
        self._num_read += 1

    def skip(self, problem: str, where: str) -> None:
        """There is none at ``where``."""
        self._num_read += 1
        self._num_skipped += 1
        self._first = self._first or f"{where}: {problem}"

    def end(self, say: Say) -> str:
        """All was read. Returns why the file is refused, "" where it is not; then ``say`` hears what was skipped."""
        skipped = f"{self._num_skipped} of {self._num_read} values are no {self._kind}"
        if self._num_skipped > MAX_SKIPPED * self._num_read:
            return f"{self._first} ({skipped}, more than {MAX_SKIPPED:.0%})"
        if self._num_skipped:
            say(f"{self._path}: {skipped} and were skipped; the first: {self._first}")
        return ""


def read_lengths(path: Path, say: Say = warn) -> list[int]:
    """At least one, each >= 1. Raises LengthFileError that names the file, and the first bad line."""
    return [tokens for group in read_groups(path, 1, say) for tokens in group]


def read_groups(path: Path, group_size: int, say: Say = warn) -> list[tuple[int, ...]]:
    """The same by prompt: ``group_size`` lines are one. What is skipped moves no other line to another prompt; a prompt
    without any length is left out."""
    skipping = Skipping(path)
    try:
        words = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise LengthFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LengthFileError(f"{path} cannot be read: it is no text") from error
    values = [skipping.take(_number(word), f"{path}:{n}", shown=word) for n, word in enumerate(words, 1) if word]
    if refusal := skipping.end(say):
        raise LengthFileError(refusal)
    places = range(0, len(values), group_size)
    groups = [tuple(value for value in values[start : start + group_size] if value is not None) for start in places]
    if not any(groups):
        raise LengthFileError(f"{path} has no length in it; it takes a number of tokens a line")
    return [group for group in groups if group]


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


class ForcedLengths:
    """Forced output lengths: which row gets how many tokens, from a file instead of from a model.

    Runs of different modes, engines and hardware then generate the same work, as in StreamRL's evaluation (sec. 7.1):
    a row has the same length on whichever worker, and whenever, it is generated.
    lengths: tokens, each >= 1; batch after batch, slot after slot, sample after sample takes the next, in a circle.

    groups_per_batch, group_size: of the run. A replaced slot's lengths are those of a later batch, and those of every
    evaluation are the same from the first batch on.
    """

    def __init__(self, lengths: Sequence[int], *, groups_per_batch: int, group_size: int) -> None:
        self._lengths = tuple(lengths)
        self._groups_per_batch = groups_per_batch
        self._group_size = group_size

    @classmethod
    def of(cls, settings: Settings) -> ForcedLengths:
        """Those of ``generation.lengths``, cut at ``sampling.max_new_tokens``. Blocks. Raises LengthFileError."""
        most = settings.sampling.max_new_tokens
        return cls(
            [min(tokens, most) for tokens in read_lengths(Path(settings.generation.lengths))],
            groups_per_batch=settings.pipeline.groups_per_batch,
            group_size=settings.pipeline.group_size,
        )

    def limits(self, group_id: GroupId, samples: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each of these samples of the group."""
        batch, slot = group_id.split("/")
        place = 0 if is_evaluation(group_id) else int(batch) * self._groups_per_batch
        first = (place + int(slot)) * self._group_size
        return tuple(self._lengths[(first + sample) % len(self._lengths)] for sample in samples)


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
    config, tokenizer = (
        read_json(path, dict[str, Any]) if path.is_file() else {}
        for path in (directory / "config.json", directory / "tokenizer.json")
    )
    return ModelIdentity(
        config=_digest({key: value for key, value in config.items() if key not in UNIMPORTANT}),
        tokenizer=_digest({key: tokenizer[key] for key in OF_TOKENIZER if key in tokenizer}),
    )


def _digest(content: dict[str, Any]) -> str:
    if not content:
        return ""
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=6).hexdigest()
