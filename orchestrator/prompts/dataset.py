"""Problems before they become prompts: where questions and answers come from, and which of them are held out.

    reasoning_gym   made by seed, with a verifier of their own
    jsonl           one JSON object a line, .gz too, with named columns
    hf              a data set of the ``datasets`` library: hub name, saved directory, or parquet/JSON files

Invariant: no question is in both parts, and the same settings and data give the same problems in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.toml_source import nearest
from orchestrator.errors import DataError
from transport.contracts.settings import DataSettings, Settings
from transport.contracts.types import PromptId
from transport.errors import InputFileError
from transport.process.json_files import read_rows

REASONING_GYM_SIZE = 4096
"""Problems of one pass when ``data.size`` is 0: more than a short run sees, made in a tenth of a second."""
HELD_OUT_DRAWS = 8
"""reasoning_gym problems drawn per held-out problem, so that a task with few different questions is noticed."""
HELD_OUT_SHARE = 10
"""Of a file without its own held-out file, at most one row in so many is held out: the rest is to be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and what its reward needs.

    prompt_id: names its row, e.g. ``chain_sum/17`` or ``train.jsonl/17`` (the line); the same on every pass.
    entry_json: ``{"question", "answer", "metadata"}``; metadata: what reasoning_gym says, or the row's other columns.
    """

    prompt_id: PromptId
    question: str
    entry_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """held_out: ``eval.problems`` of them where the data has as many; the same for every ``run.seed``."""

    training: list[Problem]
    held_out: list[Problem]


def load_problems(settings: Settings) -> Problems:
    """Read or make the data and hold a part of it out. Raises DataError naming the file and the row."""
    if settings.data.source == "reasoning_gym":
        held_out = _held_out_of_task(settings)
        training = list(_made(settings.data, settings.data.size or REASONING_GYM_SIZE, settings.run.seed))
    elif settings.eval.path:
        of_eval = msgspec.structs.replace(settings.data, path=settings.eval.path, split=settings.eval.split, size=0)
        held_out = _sample(list(_read(of_eval)), settings.eval.problems, settings.eval.seed)
        training = list(_read(settings.data))
    else:
        training = list(_read(settings.data))
        number = min(settings.eval.problems, len(training) // HELD_OUT_SHARE)
        held_out = _sample(training, number, settings.eval.seed)
    questions = {problem.question for problem in held_out}
    remaining = [problem for problem in training if problem.question not in questions]
    if not remaining:
        where = settings.data.path or settings.data.task
        reason = "every problem is held out; lower eval.problems" if training else "it is empty"
        raise DataError(f"{where} has no problems to train on: {reason}")
    return Problems(training=remaining, held_out=held_out)


def _sample(problems: list[Problem], number: int, seed: int) -> list[Problem]:
    return random.Random(seed).sample(problems, min(number, len(problems)))


# --- reasoning_gym ----------------------------------------------------------------------------------------------------


def _held_out_of_task(settings: Settings) -> list[Problem]:
    """Different questions as far as possible, but at most half of those that the task has; then they repeat.

    chain_sum with 2 terms of 1 digit has 200 different questions: 128 held out would leave little to train on.
    """
    number = settings.eval.problems
    if number == 0:
        return []
    drawn = list(_made(settings.data, max(number * HELD_OUT_DRAWS, 1024), settings.eval.seed))
    different = list({problem.question: problem for problem in drawn}.values())
    kept = different[: min(number, max(1, len(different) // 2))]
    return [kept[index % len(kept)] for index in range(number)]


def _made(data: DataSettings, size: int, seed: int) -> Iterator[Problem]:
    for index, entry in enumerate(_reasoning_gym(data, size, seed)):
        question, answer = str(entry["question"]), entry["answer"]
        if not question.strip():
            raise DataError(f"reasoning_gym task {data.task} made an empty question (number {index}, seed {seed})")
        yield _problem(f"{data.task}/{seed}-{index}", question, answer, entry.get("metadata", {}), data)


def _reasoning_gym(data: DataSettings, size: int, seed: int) -> Iterable[Mapping[str, Any]]:
    """The task's data set. Raises DataError for a task or a parameter that reasoning_gym does not know."""
    import reasoning_gym  # here: it takes a second, and files do not need it
    from reasoning_gym.factory import DATASETS

    if data.task not in DATASETS:
        raise DataError(f"data.task {data.task!r} is no reasoning_gym task{nearest(data.task, sorted(DATASETS))}")
    config_class = DATASETS[data.task][1]
    known = [name for name in config_class.__dataclass_fields__ if name not in ("seed", "size")]
    for name in data.params:
        if name not in known:
            hint = nearest(name, known)
            raise DataError(f"data.params.{name} is no parameter of {data.task}{hint}; it has {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(data.task, seed=seed, size=size, **data.params)
    except (AssertionError, TypeError, ValueError) as error:  # its ways to refuse parameters
        raise DataError(f"data.params do not suit {data.task}: {error}") from error


# --- files ------------------------------------------------------------------------------------------------------------


def _read(data: DataSettings) -> Iterator[Problem]:
    """Problems of a file or data set, up to ``data.size`` of them. Raises DataError, also when there is none."""
    rows = _jsonl_rows(Path(data.path)) if data.source == "jsonl" else _hf_rows(data)
    name = Path(data.path).name
    count = 0
    for number, row in rows:
        if data.size and count >= data.size:
            return
        question = _column(row, data.prompt_column, "data.prompt_column", f"{data.path}, row {number}")
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"{data.path}, row {number}: column {data.prompt_column!r} must be text that is not empty")
        answer = None
        if data.answer_column:
            answer = _column(row, data.answer_column, "data.answer_column", f"{data.path}, row {number}")
        others = {key: value for key, value in row.items() if key not in (data.prompt_column, data.answer_column)}
        yield _problem(f"{name}/{number}", question, answer, others, data)
        count += 1
    if count == 0:
        raise DataError(f"{data.path} is empty: it has no rows")


def _column(row: Mapping[str, Any], column: str, setting: str, where: str) -> Any:
    if column not in row:
        raise DataError(f"{where}: no column {column!r}; it has {', '.join(map(repr, row))}. Set {setting}")
    return row[column]


def _problem(name: str, question: str, answer: object, metadata: object, data: DataSettings) -> Problem:
    """enc_hook=str: reasoning_gym's metadata holds fractions and the like; data sets hold dates and the like."""
    entry = {"question": question, "answer": answer, "metadata": metadata}
    encoded = msgspec.json.encode(entry, enc_hook=str)
    return Problem(prompt_id=PromptId(name), question=question + data.suffix, entry_json=encoded.decode())


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, row); blank lines are skipped."""
    try:
        yield from read_rows(path)
    except InputFileError as error:
        raise DataError(str(error)) from error


def _hf_rows(data: DataSettings) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 0, row) of a data set of the ``datasets`` library."""
    try:
        import datasets  # here: the extra ``hf``, which files and reasoning_gym do not need
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise DataError('data.source "hf" needs the datasets library: pip install "streamrl[hf]"') from error
    datasets.disable_progress_bars()
    try:
        rows = _hf_split(datasets, data)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().splitlines()
        raise DataError(f"data set {data.path} cannot be loaded: {reason[0] if reason else error!r}") from error
    yield from enumerate(dict(row) for row in rows)


def _hf_split(datasets: Any, data: DataSettings) -> Iterable[Mapping[str, Any]]:
    """``data.split`` of a saved directory, of files, or of a hub name (``name`` or ``name:configuration``)."""
    path = Path(data.path).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if data.split not in loaded:
            raise DataError(f"{data.path} has no split {data.split!r}; it has {', '.join(loaded)}. Set data.split")
        return loaded[data.split]
    if path.is_file():
        kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix, "json")
        return datasets.load_dataset(kind, data_files=str(path), split="train")
    name, _, configuration = data.path.partition(":")
    return datasets.load_dataset(str(path) if path.is_dir() else name, configuration or None, split=data.split)
