"""Users' logs of (prompt, length) pairs: JSON lines, also gzipped.

One line is one response or one prompt with all its lengths:

    {"prompt": "Add 2 and 3.", "output_tokens": 41}
    {"prompt": "Add 2 and 3.", "output_tokens": [41, 38, 52], "base_tokens": [20, 25]}
    {"id": "a7", "output_tokens": 41}       with a second file for the prompts: {"id": "a7", "prompt": "Add 2 and 3."}

Lines with the same text are joined, so that a prompt is never on two sides of a split. Nothing is repaired: what is no
length (zero, negative, not whole, missing) or no such line is skipped and counted, and a log with too much of it is
refused by its first (``transport/contracts/user_files.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranker.protocol import UNKNOWN_LEVEL_SIGMA, UNKNOWN_SAMPLE_SIGMA, LengthEstimate, LengthLogError
from transport.contracts.user_files import MAX_TOKENS, Say, Skipping, warn
from transport.errors import InputFileError
from transport.process.files import decode_row, read_lines

SPLIT = (0.7, 0.2, 0.1)  # train, validation, test. Source: StreamRL sec. 7.1, dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """One prompt and the lengths of its samples."""

    prompt_id: str
    text: str
    tokens: tuple[int, ...]  # one a sample, each >= 1
    base_tokens: tuple[int, ...] = ()  # those of another policy, usually the base model, on the same prompt

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1 or min(self.base_tokens, default=1) < 1:
            raise ValueError(f"prompt {self.prompt_id}: lengths are positive and there is at least one")


def mean_tokens(samples: Sequence[PromptLengths]) -> NDArray[np.float64]:
    """[N] mean length of each prompt's samples, tokens: the truth that ranks are measured against."""
    return np.array([sum(sample.tokens) / len(sample.tokens) for sample in samples], dtype=np.float64)


def log_means(samples: Sequence[PromptLengths]) -> NDArray[np.float64]:
    return np.array([float(np.mean(np.log(sample.tokens))) for sample in samples], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Split:
    """Disjoint sets of prompts: all samples of a prompt are on one side."""

    train: list[PromptLengths]
    validation: list[PromptLengths]
    test: list[PromptLengths]


def shuffled(samples: Sequence[PromptLengths], seed: int) -> list[PromptLengths]:
    """The same samples in an order that depends on the seed alone."""
    order = list(samples)
    random.Random(seed).shuffle(order)
    return order


def split(samples: Sequence[PromptLengths], seed: int) -> Split:
    """7:2:1 by prompt; the same seed and samples give the same split."""
    order = shuffled(samples, seed)
    first, second = round(SPLIT[0] * len(order)), round((SPLIT[0] + SPLIT[1]) * len(order))
    return Split(train=order[:first], validation=order[first:second], test=order[second:])


PROMPT_COLUMNS = ("prompt", "text", "question")
LENGTH_COLUMNS = ("output_tokens", "response_tokens", "tokens", "length")
BASE_COLUMN, ID_COLUMN, MODEL_COLUMN = "base_tokens", "id", "model"
MIN_PROMPTS = 30  # fewer leave three for the test


def read_log(
    path: Path, prompts: Path | None = None, model: str | None = None, *, say: Say = warn
) -> list[PromptLengths]:
    """Prompts in the order of their first line. prompts: file with the texts, joined by id.  model: only its lines.

    say: called with what was skipped.
    Raises: LengthLogError: unreadable, too many lines that are not as above, or no line (of this model) at all.
    """
    texts = dict(read_prompts(prompts, say=say)) if prompts is not None else None
    skipping = Skipping(path)
    found: dict[str, tuple[str, list[int], list[int]]] = {}  # text: id, lengths, lengths of the base policy
    for where, line in _lines(path):
        try:
            row = _row(line, where)
            if model is not None and row.get(MODEL_COLUMN) != model:
                continue
            prompt_id, text = _prompt(row, texts, where)
            tokens = _lengths(row, LENGTH_COLUMNS, where, skipping)
        except LengthLogError as error:
            skipping.skip(error.problem, where)
            continue
        base = _lengths(row, (BASE_COLUMN,), where, skipping) if BASE_COLUMN in row else []
        if tokens:
            known = found.setdefault(text, (prompt_id, [], []))
            known[1].extend(tokens)
            known[2].extend(base)
    if refusal := skipping.end(say):
        raise LengthLogError(refusal)
    if not found:
        of_model = f" of model {model!r}" if model is not None else ""
        raise LengthLogError(f"there is no prompt with a length{of_model} in it", where=str(path))
    return [
        PromptLengths(prompt_id=prompt_id, text=text, tokens=tuple(tokens), base_tokens=tuple(base))
        for text, (prompt_id, tokens, base) in found.items()
    ]


def read_prompts(path: Path, *, say: Say = warn) -> list[tuple[str, str]]:
    """(id, text) of every line; the id is the text where there is none.

    Raises LengthLogError: unreadable, too many lines that have no prompt, or no prompt at all.
    """
    skipping = Skipping(path, "prompts")
    found: list[tuple[str, str]] = []
    for where, line in _lines(path):
        try:
            found.append(_prompt(_row(line, where), None, where))
        except LengthLogError as error:
            skipping.skip(error.problem, where)
        else:
            skipping.count()
    if refusal := skipping.end(say):
        raise LengthLogError(refusal)
    if not found:
        raise LengthLogError("there is no prompt in it", where=str(path))
    return found


def read_scores(path: Path, *, say: Say = warn) -> dict[str, LengthEstimate]:
    """Expected lengths by id, and by prompt where a line has one: what `rank score` writes, or any other ranker.

        {"id": "a7", "mean_tokens": 413.5, "level_sigma": 0.4, "sample_sigma": 0.3}

    Without the spreads it is as uncertain as when nothing is known; ``prompt`` may stand beside ``id`` or for it.
    Raises LengthLogError: unreadable, or too many lines that are not so.
    """
    skipping = Skipping(path, "scores")
    found: dict[str, LengthEstimate] = {}
    for where, line in _lines(path):
        try:
            row = _row(line, where)
            names = [str(row[column]) for column in (ID_COLUMN, *PROMPT_COLUMNS) if column in row]
            said = _score(row, names, where)
        except LengthLogError as error:
            skipping.skip(error.problem, where)
            continue
        skipping.count()
        found.update(dict.fromkeys(names, said))
    if refusal := skipping.end(say):
        raise LengthLogError(refusal)
    if not found:
        raise LengthLogError("there is no score in it", where=str(path))
    return found


def _score(row: dict[str, Any], names: Sequence[str], where: str) -> LengthEstimate:
    if not names:
        raise LengthLogError(f"no column {ID_COLUMN!r} or {PROMPT_COLUMNS[0]!r} to find its prompt by", where=where)
    unknown = {"level_sigma": UNKNOWN_LEVEL_SIGMA, "sample_sigma": UNKNOWN_SAMPLE_SIGMA}
    values = {column: row.get(column, other) for column, other in unknown.items()}
    values["mean_tokens"] = _first(row, ("mean_tokens",), where)
    for column, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
            raise LengthLogError(f"{column} is a number from 0 to {MAX_TOKENS:,}, not {value!r:.40}", where=where)
    return LengthEstimate(**{**values, "mean_tokens": max(1.0, values["mean_tokens"])})


def check_rankable(samples: Sequence[PromptLengths], where: str) -> None:
    """Raises LengthLogError: too few prompts to split, or lengths that are all equal, which no ranker can order."""
    if len(samples) < MIN_PROMPTS:
        raise LengthLogError(f"{len(samples)} different prompts; ranking needs {MIN_PROMPTS} or more", where=where)
    if len({length for sample in samples for length in sample.tokens}) == 1:
        raise LengthLogError(
            f"every response has {samples[0].tokens[0]} tokens: there is nothing to rank (cut by a limit?)", where=where
        )


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        return decode_row(line, where)
    except InputFileError as error:
        raise LengthLogError(error.problem, where=where) from error


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        for number, line in read_lines(path):
            yield f"{path}:{number}", line
    except InputFileError as error:
        raise LengthLogError(error.problem, where=error.where) from error


def _prompt(row: dict[str, Any], texts: dict[str, str] | None, where: str) -> tuple[str, str]:
    """(id, text) of a line; the id is the text where there is none. texts: by id, None where the line has it."""
    if texts is None:
        text = _first(row, PROMPT_COLUMNS, where)
        if not isinstance(text, str):
            raise LengthLogError("the prompt is not a text", where=where)
        return str(row.get(ID_COLUMN, text)), text
    if ID_COLUMN not in row:
        raise LengthLogError(f"no column {ID_COLUMN!r} to find its prompt by", where=where)
    prompt_id = str(row[ID_COLUMN])
    if prompt_id not in texts:
        raise LengthLogError(f"its prompt {prompt_id!r} is not among the prompts", where=where)
    return prompt_id, texts[prompt_id]


def _first(row: dict[str, Any], columns: Sequence[str], where: str) -> Any:
    for column in columns:
        if column in row:
            return row[column]
    raise LengthLogError(f"no column {' or '.join(map(repr, columns))}, only {', '.join(row) or 'none'}", where=where)


def _lengths(row: dict[str, Any], columns: Sequence[str], where: str, skipping: Skipping) -> list[int]:
    """Those of a line that are lengths; the others are counted as skipped."""
    value = _first(row, columns, where)
    values = value if isinstance(value, list) else [value]
    if not values:
        skipping.skip("a prompt without a length", where)
    lengths = (skipping.take(each, where) for each in values)
    return [length for length in lengths if length is not None]
