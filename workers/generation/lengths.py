"""Forced output lengths: which row gets how many tokens, from a file instead of from a model.

Every engine takes them, so that runs of different modes, engines and hardware generate exactly the same work, as in
StreamRL's evaluation (sec. 7.1). The file is text, one whole number of tokens a line; ``#`` begins a comment.

Owns: that file and its order. Invariant: a row has the same length whoever generates it, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transport.types import GroupId, is_evaluation
from workers.errors import LengthsError


class ForcedLengths:
    """lengths: tokens, each >= 1; batch after batch, slot after slot, sample after sample takes the next, in a circle.

    groups_per_batch, group_size: of the run. A replaced slot's lengths are those of a later batch, and those of every
    evaluation are the same from the first batch on.
    """

    def __init__(self, lengths: Sequence[int], *, groups_per_batch: int, group_size: int) -> None:
        self._lengths = tuple(lengths)
        self._groups_per_batch = groups_per_batch
        self._group_size = group_size

    def limits(self, group_id: GroupId, samples: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each of these samples of the group."""
        batch, slot = group_id.split("/")
        place = 0 if is_evaluation(group_id) else int(batch) * self._groups_per_batch
        first = (place + int(slot)) * self._group_size
        return tuple(self._lengths[(first + sample) % len(self._lengths)] for sample in samples)


def read_lengths(path: Path, *, max_tokens: int) -> list[int]:
    """The lengths in a file, those above ``max_tokens`` cut to it. Raises LengthsError naming the first bad line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LengthsError(f"generation.lengths: {path} cannot be read: {error}") from error
    lengths: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise LengthsError(f"generation.lengths: {path}:{number}: {text!r} is not a number of tokens >= 1")
        lengths.append(min(int(text), max_tokens))
    if not lengths:
        raise LengthsError(f"generation.lengths: {path} holds no lengths")
    return lengths
