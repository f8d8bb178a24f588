"""Problems before they become prompts: where questions and answers come from, and which of them are held out.

    reasoning_gym   made by seed, with a verifier of their own
    jsonl           one JSON object a line, .gz too, with named columns
    hf              a data set of the ``datasets`` library: hub name, saved directory, or parquet/JSON files

A prompt is text, or a conversation: a list of ``{"role", "content"}`` that ends before the answer (``messages``).

Several of them are one run's data with ``[data.mix]``: which of them gives the next prompt is source.py's.

Invariant: no question is trained on and held out, also not with other white space; the same settings and data give the
same problems in the same order; an answer that our verifier cannot compare is refused with its row.
"""

from __future__ import annotations

import glob
import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import msgspec

from orchestrator.config.schema import nearest
from orchestrator.errors import DataError
from transport.contracts.chat_template import ROLES
from transport.contracts.collection import CollectedPrompt
from transport.contracts.settings import DataSettings, EvalSet, Settings, data_parts, eval_sets
from transport.contracts.types import PromptId
from transport.errors import InputFileError
from transport.process.files import read_rows
from transport.process.programs import command

REASONING_GYM_SIZE = 4096
"""Problems of one pass when ``data.size`` is 0: more than a short run sees, made in a tenth of a second."""
HELD_OUT_DRAWS = 8
"""reasoning_gym problems drawn per held-out problem, so that a task with few different questions is noticed."""
HELD_OUT_SHARE = 10
"""Of a file without its own held-out file, at most one row in so many is held out: the rest is to be trained."""


MESSAGES = "messages"
"""Column of the question where ``data.prompt_column`` is not set and the rows have none of its default name."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation, as a chat template reads it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and what its reward needs.

    prompt_id: names its row, e.g. ``chain_sum/17`` or ``train.jsonl/17`` (the line); the same on every pass.
    question: of a conversation, its texts one after another.  messages: the conversation, () where there is none.
    entry_json: ``{"question", "answer", "metadata"}``, of a conversation ``messages``, too.  metadata: what
    reasoning_gym says, or the row's other columns.
    eval_set: of a held-out one, the set of ``[eval.sets]`` that asks it; its prompt_id then begins with it.
    part: the part of ``[data.mix]`` that it is of; its prompt_id begins with it, and its entry names it.
    """

    prompt_id: PromptId
    question: str
    entry_json: str
    messages: tuple[ChatMessage, ...] = ()
    eval_set: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """held_out: each once, set after set; ``eval.problems`` of a set that names no number, where its data has as many.
    The same for every ``run.seed``.

    also_held_out: rows of files that are not trained on, since another row that is held out asks the same.
    repeated: rows of files that ask what an earlier one asks; they are trained on.
    """

    training: list[Problem]
    held_out: list[Problem]
    also_held_out: int = 0
    repeated: int = 0


def load_problems(settings: Settings, *, scored: bool = True) -> Problems:
    """Read or make the data and hold a part of it out. Raises DataError naming the file and the row.

    scored: responses will be, so that rows need answers.
    """
    parts = data_parts(settings.data)
    compared = scored and not (settings.scoring.reward or settings.scoring.reward_model or settings.environments)
    training = [problem for name in parts for problem in _of_part(settings, name, parts[name], compared=compared)]
    held_out: list[Problem] = []
    for name, asked in eval_sets(settings).items():
        held_out += _held_out(settings, name, asked, training, compared=compared)
    questions = {_asked(problem) for problem in held_out}
    remaining = [problem for problem in training if _asked(problem) not in questions]
    for name in {name: None for name in parts} if remaining else [""]:
        if not any(problem.part == name for problem in remaining):
            where = f"data.mix.{name}" if name else settings.data.path or settings.data.task
            empty = not any(problem.part == name for problem in training)
            reason = "it is empty" if empty else "every problem is held out; lower eval.problems"
            raise DataError(f"{where} has no problems to train on: {reason}")
    if all(data.source == "reasoning_gym" for data in parts.values()):  # it makes the same question again and again
        return Problems(training=remaining, held_out=held_out)
    held_rows = {problem.prompt_id.removeprefix(f"{problem.eval_set}:") for problem in held_out}
    kept = {problem.prompt_id for problem in remaining}
    return Problems(
        training=remaining,
        held_out=held_out,
        also_held_out=sum(one.prompt_id not in kept and one.prompt_id not in held_rows for one in training),
        repeated=len(remaining) - len({_asked(problem) for problem in remaining}),
    )


def _asked(problem: Problem) -> str:
    """The question without what white space adds to it."""
    return " ".join(problem.question.split())


def _of_part(settings: Settings, name: str, data: DataSettings, *, compared: bool) -> list[Problem]:
    """The problems of one part, those of its difficulty alone. name: "" where there is only one part.

    compared: our own verifier compares responses with the answers of rows.
    """
    made = data.source == "reasoning_gym"
    section = f"data.mix.{name}" if name else "data"
    rows = (
        _made(data, data.size or REASONING_GYM_SIZE, settings.run.seed)
        if made
        else _read(data, section, compared=compared)
    )
    if not name:
        return list(rows)
    problems = [_as_part(one, name) for one in rows]
    part = settings.data.mix[name]
    if part.min_reward is part.max_reward is None:
        return problems
    rewards = read_rewards(Path(settings.data.rewards))
    least = -math.inf if part.min_reward is None else part.min_reward
    most = math.inf if part.max_reward is None else part.max_reward
    chosen = [one for one in problems if least <= _mean_reward(rewards, one, name, data.suffix) < most]
    if not chosen:
        raise DataError(
            f"{section} has no problems to train on: none of its {len(problems)} has a mean reward from {least:g} to "
            f"below {most:g} in {settings.data.rewards}"
        )
    return chosen


def _as_part(problem: Problem, name: str) -> Problem:
    entry = {"part": name, **msgspec.json.decode(problem.entry_json)}
    return replace(
        problem,
        prompt_id=PromptId(f"{name}/{problem.prompt_id}"),
        entry_json=msgspec.json.encode(entry).decode(),
        part=name,
    )


def _mean_reward(rewards: Mapping[str, Mapping[str, float]], problem: Problem, part: str, suffix: str) -> float:
    """By its text and, of several with one text, by the id that it has, with or without its part; nan, which is within
    no bounds, for one that was not collected. An id alone does not do: rows of two files may share it.
    """
    texts = (problem.question, problem.question.removesuffix(suffix))
    by_id = next((rewards[text] for text in texts if text in rewards), dict[str, float]())
    ids = (problem.prompt_id, problem.prompt_id.removeprefix(f"{part}/"), *by_id)
    return next((by_id[name] for name in ids if name in by_id), math.nan)


def read_rewards(path: Path) -> dict[str, dict[str, float]]:
    """Prompt's text -> id -> mean reward, of a file of ``collect``. Raises DataError naming the file and the line."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    try:
        for number, row in read_rows(path):
            try:
                line = msgspec.convert(row, CollectedPrompt)
            except msgspec.ValidationError as error:
                raise DataError(f"data.rewards: {path}:{number} is no line of `collect`: {error}") from error
            if line.rewards:
                found[line.prompt][line.id] = fmean(line.rewards)
    except InputFileError as error:
        raise DataError(f"data.rewards: {error}") from error
    if not found:
        raise DataError(f"data.rewards: {path} has no prompt with a reward")
    return found


def _held_out(
    settings: Settings, name: str, asked: EvalSet, training: Sequence[Problem], *, compared: bool
) -> list[Problem]:
    """The problems of one set. name: "" where there is only one.

    Raises DataError, also where a set is to have more than there are.
    """
    key = f"eval.sets.{name}" if name else "eval"
    mixed = bool(settings.data.mix)
    if not mixed and settings.data.source == "reasoning_gym":
        choice = _held_out_of_task(settings, asked, repeat=not name)
        most, of = len(choice), f"the task makes {len(choice)} that may be held out"
    elif asked.path:
        choice = list(_read(_of_eval(settings, asked), key, compared=compared))
        most, of = len(choice), f"{asked.path} has {len(choice)}"
    else:
        choice, most = training, len(training) // HELD_OUT_SHARE
        whole = "data.mix" if mixed else settings.data.path
        of = f"of the {len(training)} of {whole} at most {most} are held out"
    if name and settings.eval.sets[name].problems > most:
        raise DataError(f"{key}.problems is {asked.problems}, but {of}: lower it, or leave it out")
    if mixed or settings.data.source != "reasoning_gym":
        choice = random.Random(settings.eval.seed).sample(choice, min(asked.problems, most))
    if not name:
        return list(choice)
    return [replace(one, prompt_id=PromptId(f"{name}:{one.prompt_id}"), eval_set=name) for one in choice]


def _of_eval(settings: Settings, asked: EvalSet) -> DataSettings:
    """Where held-out problems come from: columns as for training, another file, data set, configuration or split."""
    data = settings.data
    same = asked.path == data.path
    return msgspec.structs.replace(
        data,
        path=asked.path,
        config=asked.config or (data.config if same else ""),
        split=asked.split,
        revision=data.revision if same else "",
        size=0,
    )


# --- reasoning_gym ----------------------------------------------------------------------------------------------------


def _held_out_of_task(settings: Settings, asked: EvalSet, *, repeat: bool) -> list[Problem]:
    """Different questions as far as possible, but at most half of those that the task has; then they may repeat."""
    number = asked.problems
    if number == 0:
        return []
    data = msgspec.structs.replace(settings.data, params={**settings.data.params, **asked.params})
    drawn = list(_made(data, max(number * HELD_OUT_DRAWS, 1024), settings.eval.seed))
    different = list({problem.question: problem for problem in drawn}.values())
    kept = different[: min(number, max(1, len(different) // 2))]
    return [kept[index % len(kept)] for index in range(number)] if repeat else kept


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


def _read(data: DataSettings, section: str = "data", *, compared: bool = False) -> Iterator[Problem]:
    """Problems of a file or data set, up to ``data.size`` of them. section: of the settings that name it.

    compared: our verifier compares with their answers.  Raises DataError, also when there is none.
    """
    count = 0
    for name, place, number, row in _rows(data, section):
        if data.size and count >= data.size:
            return
        where = f"{place}, row {number}"
        prompt_column = data.prompt_column
        if prompt_column == DataSettings().prompt_column and prompt_column not in row and MESSAGES in row:
            prompt_column = MESSAGES
        question = _column(row, prompt_column, "data.prompt_column", where)
        messages = _conversation(question, prompt_column, data, where) if isinstance(question, list) else ()
        text = "\n\n".join(message.content for message in messages) if messages else question
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: column {prompt_column!r} must be text that is not empty, or a list of messages")
        answer = _column(row, data.answer_column, "data.answer_column", where) if data.answer_column else None
        if compared and data.answer_column:
            _check_answer(answer, data.answer_column, where)
        if data.response_column and section == "data":
            response = _column(row, data.response_column, "data.response_column", where)
            if not isinstance(response, str) or not response:
                raise DataError(f"{where}: column {data.response_column!r} must be text that is not empty")
        others = {key: value for key, value in row.items() if key not in (prompt_column, data.answer_column)}
        yield _problem(f"{name}/{number}", text, answer, others, data, messages)
        count += 1
    if count == 0:
        raise DataError(f"{data.path} is empty: it has no rows")


def _rows(data: DataSettings, section: str) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """(name of the file or data set in ids, as a person reads it, number, row)."""
    paths = _files(data, section)
    if data.source == "hf":  # two splits of one data set may be read
        name = "/".join(filter(None, (paths[0].name, data.config, data.split)))
        yield from ((name, data.path, number, row) for number, row in _hf_rows(data, section, paths))
        return
    above = Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        one = len(paths) == 1
        name, place = (path.name, data.path) if one else (path.relative_to(above).as_posix(), str(path))
        yield from ((name, place, number, row) for number, row in _jsonl_rows(path))


MAX_ANSWER_CHARACTERS = 1_000_000
"""Length of an answer that is compared: a longer one is a mistake, and stands in every message of its samples."""


LIKELY_ANSWERS = ("ground_truth", "answer", "value", "label", "solution", "target", "text")
"""Keys that hold the answer in an object of other trainers' data sets."""


def _check_answer(answer: object, column: str, where: str) -> None:
    """Raises DataError for an answer that our verifier cannot compare, with what to write."""
    remedy = "name another column, leave the row out, or score with a reward of yours (scoring.reward)"
    match answer:
        case dict():
            keys = [str(key) for key in cast("dict[object, object]", answer)]
            likely = next((key for key in LIKELY_ANSWERS if key in keys), keys[0] if keys else "")
            within = f'set data.answer_column = "{column}.{likely}", or the key that holds it' if likely else remedy
            named = ", ".join(map(repr, keys[:6])) or "none"
            raise DataError(f"{where}: the answer in column {column!r} is an object with the keys {named}: {within}")
        case list():
            spellings = cast("list[object]", answer)
            if not spellings or not all(isinstance(one, str | int | float) and str(one).strip() for one in spellings):
                raise DataError(
                    f"{where}: the answer in column {column!r} is a list, and not one of texts or numbers that are all "
                    f"right: {remedy}"
                )
        case None:
            raise DataError(f"{where}: column {column!r} has no answer (null): {remedy}")
        case float() if not math.isfinite(answer):
            raise DataError(f"{where}: the answer in column {column!r} is {answer}, which no response equals: {remedy}")
        case str() if not answer.rsplit("####", 1)[-1].strip():
            raise DataError(f"{where}: the answer in column {column!r} is empty: {remedy}")
        case str() if len(answer) > MAX_ANSWER_CHARACTERS:
            raise DataError(
                f"{where}: the answer in column {column!r} has {len(answer)} characters, and one that is compared may "
                f"have {MAX_ANSWER_CHARACTERS}: {remedy}"
            )
        case _:
            pass


def _conversation(column: list[object], name: str, data: DataSettings, where: str) -> tuple[ChatMessage, ...]:
    """Raises DataError for what is none, or has the answer in it, or where no template is to be used."""
    try:
        messages = msgspec.convert(column, tuple[ChatMessage, ...])
    except msgspec.ValidationError as error:
        parts = any(isinstance(one, dict) and isinstance(one.get("content"), list) for one in cast("list[Any]", column))
        only = "; content is one text, not a list of parts: images and sounds are not trained" if parts else ""
        raise DataError(
            f'{where}: column {name!r} is no list of messages {{"role": ..., "content": text}}: {error}{only}'
        ) from error
    if other := next((one.role for one in messages if one.role not in ROLES), None):
        raise DataError(
            f"{where}: column {name!r} has a message of the role {other!r}, which no chat template knows"
            f"{nearest(other, ROLES)}; roles are {', '.join(ROLES)}"
        )
    if messages and messages[-1].role == "assistant":
        raise DataError(
            f"{where}: the messages in column {name!r} end with the assistant's, which the model is to "
            "write: leave it out (and put the right answer into data.answer_column)"
        )
    if not data.chat_template:
        raise DataError(f"{where}: column {name!r} is a list of messages, which needs data.chat_template = true")
    return messages


def _files(data: DataSettings, section: str) -> list[Path]:
    """The files of ``data.path``: one, those that a glob matches, or the lines of JSON in a directory; sorted.

    ``preset:<name>`` is a file beside the presets, which an installed package has, too. A name that is no file here may
    be a data set of a hub. Raises DataError where a glob or a directory has none.
    """
    scheme, _, name = data.path.partition(":")
    if scheme == "preset":
        return [Path(str(files("orchestrator.config.presets") / name))]
    if found := re.match(r"https?://huggingface\.co/(?:datasets/)?([\w.-]+/[\w.-]+)", data.path):
        raise DataError(
            f'{section}.path: {data.path} is a page; with data.source "hf" the data set has the hub name {found[1]}'
        )
    if "://" in data.path and data.source == "jsonl":
        raise DataError(f"{section}.path: {data.path} is no file of this machine: copy it here, and name the copy")
    path = Path(data.path).expanduser()
    if "$" in data.path and not path.exists():
        raise DataError(
            f"{section}.path: {data.path} does not exist; the shell replaces $NAME outside of single quotes, and "
            "nothing does in a file of settings: write the path itself"
        )
    found = [path]
    if not path.exists() and glob.has_magic(data.path):
        found = [Path(one) for one in sorted(glob.glob(str(path), recursive=True)) if Path(one).is_file()]
    elif path.is_dir() and data.source == "jsonl":
        found = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
    if not found:
        what = "is a directory without a .jsonl or .jsonl.gz file" if path.is_dir() else "matches no file"
        raise DataError(f"{section}.path: {data.path} {what}")
    return found


def _column(row: Mapping[str, Any], column: str, setting: str, where: str) -> Any:
    """What a row has in ``column``: a name, or names with dots between them, of objects within objects."""
    if column in row:
        return row[column]
    found: object = row
    for name in column.split("."):
        if isinstance(found, list) and name.isdigit() and int(name) < len(cast("list[object]", found)):
            found = cast("list[object]", found)[int(name)]
        elif isinstance(found, dict) and name in found:
            found = cast("dict[str, object]", found)[name]
        else:
            inside = f"; {name!r} is not in it" if "." in column else ""
            raise DataError(f"{where}: no column {column!r}{inside}; it has {', '.join(map(repr, row))}. Set {setting}")
    return found


def _problem(
    name: str,
    question: str,
    answer: object,
    metadata: object,
    data: DataSettings,
    messages: tuple[ChatMessage, ...] = (),
) -> Problem:
    """enc_hook=str: reasoning_gym's metadata holds fractions and the like; data sets hold dates and the like."""
    entry = {"question": question, "answer": answer, "metadata": metadata}
    if messages:
        entry["messages"] = messages
    encoded = msgspec.json.encode(entry, enc_hook=str)
    if messages:
        last = msgspec.structs.replace(messages[-1], content=messages[-1].content + data.suffix)
        messages = (*messages[:-1], last)
    question += data.suffix
    return Problem(prompt_id=PromptId(name), question=question, entry_json=encoded.decode(), messages=messages)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, row); blank lines are skipped."""
    try:
        yield from read_rows(path)
    except InputFileError as error:
        other = '. data.source "jsonl" reads one JSON object a line'
        other += '; for Parquet, CSV and JSON documents set data.source to "hf" (pip install "streamrl[hf]")'
        raise DataError(f"{error}{other if error.where == f'{path}:1' else ''}") from error


def _hf_rows(data: DataSettings, section: str, paths: Sequence[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 0, row) of a data set of the ``datasets`` library."""
    try:
        import datasets  # here: the extra ``hf``, which files and reasoning_gym do not need
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        how = command("pip", "install", "streamrl[hf]")
        raise DataError(f'data.source "hf" needs the datasets library: {how}') from error
    datasets.disable_progress_bars()
    try:
        rows = _hf_split(datasets, data, section, paths)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split("\nExample")[0].split()) or repr(error)  # it lists what there is
        wrong = next((name for name in ("config", "split") if f"{name} " in reason.lower()), "")
        remedy = f"; set {section}.{wrong}" if wrong else ""
        raise DataError(f"{section}.path: data set {data.path} cannot be loaded: {reason}{remedy}") from error
    yield from enumerate(dict(row) for row in rows)


def _hf_split(datasets: Any, data: DataSettings, section: str, paths: Sequence[Path]) -> Iterable[Mapping[str, Any]]:
    """``data.split`` of a saved directory, of files, or of a hub name."""
    path = paths[0]
    if path.exists() and data.revision:
        raise DataError(f"data.revision is of a data set on the hub; {path} is on this machine: leave it out")
    if data.config and (path.is_file() or (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        raise DataError(
            f"{section}.config: {data.path} is one file, or was saved, and has no configurations: leave it out"
        )
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if data.split not in loaded:
            raise DataError(f"{data.path} has no split {data.split!r}; it has {', '.join(loaded)}. Set {section}.split")
        return loaded[data.split]
    if path.is_file():
        kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix, "json")
        return datasets.load_dataset(kind, data_files=[str(one) for one in paths], split="train")
    where = str(path) if path.is_dir() else data.path
    return datasets.load_dataset(where, data.config or None, split=data.split, revision=data.revision or None)
