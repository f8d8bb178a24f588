"""What settings must be: types and ranges in words, the rules that hold of several, the table in docs/settings.md.

The comments of ``transport/contracts/settings.py`` are the only text about a setting; a setting without one is named by
its section and type alone, never left out. Invariant: settings of the right types that break no rule can be started.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import io
import json
import re
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import msgspec.inspect

from transport.contracts import settings as definitions
from transport.contracts.settings import (
    Section,
    Settings,
)
from transport.process.secret import BROKER_PASSWORD, SHARED_SECRET
from transport.process.words import closest, did_you_mean

PASSWORD = "broker.password"
FROM_ENVIRONMENT = {PASSWORD: BROKER_PASSWORD, "api.secret": SHARED_SECRET}
"""Secrets, and the variable that may hold each: it wins, and no file repeats it."""
SECRET = (*FROM_ENVIRONMENT, "broker.url")
"""Shown in no error: a mistyped URL may hold a password that was not recognised as one."""


def is_section(kind: object) -> typing.TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _sections(kind: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    for field in msgspec.structs.fields(kind):
        if is_section(field.type):
            inside = f"{name}{field.name}"
            yield inside, field.type
            yield from _sections(field.type, f"{inside}.")


SECTIONS: Mapping[str, type[Section]] = dict(_sections(Settings, ""))
"""Name -> class, in the order of the schema. A section inside of another has a dotted name: ``trainer.parallel``."""
FIELDS = {
    f"{name}.{field.name}": field
    for name, kind in SECTIONS.items()
    for field in msgspec.structs.fields(kind)
    if not is_section(field.type)
}
"""Dotted key -> its field, in the order of the schema."""

ENTRY = "NAME"
"""In the key of a table of tables, as ``eval.sets.NAME.samples``: the name that its user gives to one of them."""
TABLES: Mapping[str, type[Section]] = {
    f"{key}.{ENTRY}": kind
    for key, field in FIELDS.items()
    for kind in typing.get_args(field.type)[1:]
    if is_section(kind)
}
ENTRIES = {f"{table}.{field.name}": field for table, kind in TABLES.items() for field in msgspec.structs.fields(kind)}
"""Dotted key -> its field, of every table in TABLES."""


def value_of(settings: Settings, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), settings)


UNITS = {"_mb_s": "MB/s", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}
"""A unit is the end of a setting's name, the longest that fits first."""


def expected_type(key: str) -> str:
    """What the setting ``key`` must be, in words, with its range and unit: ``a number > 0 (seconds)``."""
    unit = next((f" ({unit})" for suffix, unit in UNITS.items() if key.endswith(suffix)), "")
    return _in_words((FIELDS | ENTRIES)[key].type) + unit


def _in_words(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        return _in_words(arguments[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return ", or ".join(map(_in_words, arguments))
    if typing.get_origin(kind) is typing.Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(f'"{choice}"' for choice in arguments)
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(arguments)}, each {_in_words(arguments[0])}"
    if typing.get_origin(kind) is list:
        return f"a list, each {_in_words(arguments[0])}"
    if kind in [FIELDS[table.removesuffix(f".{ENTRY}")].type for table in TABLES]:
        return f"a table of tables, each with a name: {_in_words(arguments[0])}"
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case msgspec.inspect.EnumType(cls=choices):
            return "one of " + ", ".join(f'"{choice.value}"' for choice in choices)
        case msgspec.inspect.IntType() as number:
            return "a whole number" + _range(number)
        case msgspec.inspect.FloatType() as number:
            return "a number" + _range(number)
        case msgspec.inspect.DictType():
            return "a table of numbers, strings, true or false, or lists of whole numbers"
        case msgspec.inspect.BoolType():
            return "true or false"
        case _:
            return "a string"


def _range(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    """`` > 0``, or `` in [0, 1)``; "" without limits."""
    least, most = (kind.gt if kind.ge is None else kind.ge), (kind.lt if kind.le is None else kind.le)
    if least is None or most is None:
        return "" if least is None else f" {'>' if kind.ge is None else '>='} {least}"
    return f" in {'(' if kind.ge is None else '['}{least}, {most}{')' if kind.le is None else ']'}"


FIELD_WORDS = {
    "learning_rate": "trainer.lr",
    "batch_size": "pipeline.groups_per_batch",
    "num_generations": "pipeline.group_size",
    "stop_strings": "generation.stop",
    "max_tokens": "sampling.max_new_tokens",
    "lr_scheduler_type": "trainer.lr_schedule",
    "warmup_steps": "trainer.warmup_batches",
    "min_lr_rate": "trainer.lr_min_share",
    "gradient_clip": "trainer.grad_clip",
    "steps": "run.batches",
    "dataset_name": "data.path",
    "dataset_config": "data.config",
    "lora_rank": "trainer.lora.rank",
    "lora_alpha": "trainer.lora.alpha",
    "target_modules": "trainer.lora.targets",
    "tensor_parallel_size": "trainer.parallel.tensor",
    "pipeline_parallel_size": "trainer.parallel.pipeline",
    "gradient_checkpointing": "trainer.recompute",
    "per_device_train_batch_size": "trainer.micro_batch_tokens",
    "train_batch_size": "pipeline.groups_per_batch",
    "rollout_batch_size": "pipeline.groups_per_batch",
    "n": "pipeline.group_size",
    "n_samples_per_prompt": "pipeline.group_size",
    "max_completion_length": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "max_model_len": "generation.max_context",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "kl_loss_coef": "algorithm.kl_coef",
    "init_kl_coef": "algorithm.kl_coef",
    "epsilon_high": "algorithm.clip_high",
    "max_grad_norm": "trainer.grad_clip",
    "max_steps": "run.batches",
    "total_training_steps": "run.batches",
    "num_train_epochs": "data.passes",
    "output_dir": "run.dir",
    "experiment_name": "run.name",
    "report_to": "run.loggers",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "eval_steps": "eval.every",
    "train_files": "data.path",
    "prompt_data": "data.path",
    "val_files": "eval.path",
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
    "reward_funcs": "scoring.reward",
}
"""What other trainers call some of our settings."""


def nearest(word: str, known: Sequence[str]) -> str:
    """`` (did you mean trainer.lr?)`` for what ``word`` most likely was meant to be, "" when nothing is close.

    In this order: the key it would be an entry of, the same key under another section, a similar key of the same
    section, a similar key anywhere; FIELD_WORDS are similar to themselves.
    """
    section, _, leaf = word.rpartition(".")

    def similar(keys: Sequence[str], *, cutoff: float) -> list[str]:
        leaves = {name: key for name, key in FIELD_WORDS.items() if key in keys}
        leaves |= {key.rpartition(".")[2]: key for key in reversed(keys)}
        found = closest(leaf, leaves, cutoff=cutoff)
        return [leaves[found]] if found else []

    found = (
        [key for key in known if key == section]
        or [key for key in known if "." in key and key.rpartition(".")[2] == leaf]
        or similar([key for key in known if key.rpartition(".")[0] == section], cutoff=0.6)
        or similar(known, cutoff=0.7)
    )
    return did_you_mean(found[0] if found else "")


def choices_of(kind: object) -> list[str]:
    """The words that a setting of type ``kind`` may be; none where it may be any other text."""
    match msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind:
        case msgspec.inspect.Metadata(type=msgspec.inspect.StrType(pattern=str(pattern)), extra_json_schema=schema):
            words = str((schema or {}).get("description", ""))
            if any(re.search(pattern, word) for word in ("zqx", "12", "/zqx", "0-1")):
                return []  # a pattern of any name, or any path
            named = re.findall(r'"([^"]*)"', words) or re.split(r"[\s,]+", words)
            return list(
                dict.fromkeys(word for word in named if re.search(pattern, word) and word and "://" not in word)
            )
        case msgspec.inspect.Metadata(type=inner):
            return choices_of(inner)
        case msgspec.inspect.LiteralType(values=choices):
            return [choice for choice in choices if isinstance(choice, str)]
        case msgspec.inspect.EnumType(cls=choices):
            return [str(choice.value) for choice in choices]
        case msgspec.inspect.UnionType(types=kinds):
            return [choice for one in kinds for choice in choices_of(one)]
        case msgspec.inspect.ListType(item_type=item):
            return choices_of(item)
        case msgspec.inspect.DictType(key_type=key):
            return choices_of(key)
        case _:
            return []


def nearest_choice(kind: object, value: object) -> str:
    """`` (did you mean gspo?)`` for the first word of ``value`` that is no choice of ``kind`` and near one."""
    choices = choices_of(kind)
    words: list[object] = [value]
    if isinstance(value, list | dict):
        words = [*typing.cast("Sequence[object]", value)]
    unknown = [word for word in words if isinstance(word, str) and word and word not in choices]
    return did_you_mean(closest(unknown[0], choices)) if unknown else ""


def nearest_value(kind: object, value: object) -> str:
    """`` (did you mean 0.7?)`` for a number or a switch as other systems write it: 0,7 or 1e3 or False."""
    written = value if isinstance(value, str) else repr(value) if isinstance(value, float) else ""
    for text in (written.lower(), written.translate(NUMBER_SIGNS)):
        read: list[object] = [text == "true"] if text in ("true", "false") else []
        with suppress(ValueError, OverflowError):
            number = float(text)
            read += [int(number), number] if number.is_integer() else [number]
        for one in read:
            with suppress(msgspec.ValidationError):
                msgspec.convert(one, typing.cast("Any", kind))
                return did_you_mean(str(one) if isinstance(one, int) and not isinstance(one, bool) else text)
    return ""


NUMBER_SIGNS = str.maketrans({",": ".", "\u2212": "-", "\u2013": "-", "\u2010": "-"})
"""A comma for the point, and a minus or a dash for the hyphen."""


def to_toml(value: object) -> str:
    """One value as TOML. Raises TypeError for what no setting can be."""

    def key(name: str) -> str:
        bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
        return name if bare else json.dumps(name)

    match value:
        case bool():
            return "true" if value else "false"
        case enum.Enum() | str():
            text = value.value if isinstance(value, enum.Enum) else value
            return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(to_toml(item) for item in typing.cast("Sequence[object]", value)) + "]"
        case Section():
            return to_toml(msgspec.to_builtins(value))
        case dict():
            items = typing.cast("Mapping[str, object]", value).items()
            return "{" + ", ".join(f"{key(name)} = {to_toml(item)}" for name, item in items) + "}"
        case _:
            raise TypeError(f"{type(value)} is not a setting")


# -- the table

TABLE_HEAD = """# Settings

Made from [transport/contracts/settings.py](../transport/contracts/settings.py) by
`streamrl-orchestrator settings`; do not edit it here.

A run takes them from a preset, from TOML files (`--config`), and from `--set section.key=value`; the later wins. Names
end in their unit: `_s` seconds, `_mb_s` megabytes a second, `_bytes` bytes, `_tokens` tokens. A secret comes from its
variable, or from the file that the variable with `_FILE` after it names.
"""


def settings_table() -> str:
    lines = [TABLE_HEAD]
    for section in SECTIONS:
        lines += [f"##{'#' * section.count('.')} [{section}]", *_rows(section)]
        for table in TABLES:
            of_section = table.rsplit(".", 2)[0] == section
            lines += [f"### [{table}]", *_rows(table)] if of_section else []
    return "\n".join(lines)


def _rows(table: str) -> Iterator[str]:
    texts = descriptions()
    yield f"\n{_about(table)}\n"
    yield from ["| setting | default | value | what it does |", "|---|---|---|---|"]
    for key in keys_of(table):
        cells = (f"`{key.rpartition('.')[2]}`", _default(key) and f"`{_default(key)}`", expected_type(key), texts[key])
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"
    yield ""


def explained(name: str) -> str:
    """A setting, or all of a section, for a terminal. Raises KeyError for what is neither."""
    if name in SECTIONS or name in TABLES:
        inside = [section for section in SECTIONS if section.rpartition(".")[0] == name]
        return "\n\n".join([f"[{name}]\n{_about(name)}", *map(explained, keys_of(name)), *map(explained, inside)])
    said = f"{name} = {_default(name)}\n    {expected_type(name)}\n    {descriptions()[name]}"
    tables = [explained(table) for table in TABLES if table == f"{name}.{ENTRY}"]
    return "\n\n".join([said, *tables])


def keys_of(table: str) -> list[str]:
    """The keys of a section without those of sections inside of it, or of one of TABLES."""
    return [key for key in FIELDS | ENTRIES if key.rpartition(".")[0] == table]


def _default(key: str) -> str:
    """As TOML; "" where it is to be left out, or the setting is none."""
    value = getattr(_class_of(key.rpartition(".")[0])(), key.rpartition(".")[2])
    return "" if value is None else to_toml(value)


def _about(table: str) -> str:
    return inspect.getdoc(_class_of(table)) or ""


def _class_of(table: str) -> type[Section]:
    return TABLES[table] if table in TABLES else SECTIONS[table]


@functools.cache
def descriptions() -> Mapping[str, str]:
    """Dotted key -> what the setting does: the comment beside its field, and the variable that may hold it."""
    comments = _comments(inspect.getsource(definitions))
    found: dict[str, str] = {}
    for key in FIELDS | ENTRIES:
        section, _, name = key.rpartition(".")
        about = comments.get((_class_of(section).__name__, name), "")
        found[key] = f"{about} (environment: {FROM_ENVIRONMENT[key]})" if key in FROM_ENVIRONMENT else about
    return found


def _comments(source: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the comment in the lines of its definition."""
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
                words = [by_line[line] for line in lines if line in by_line]
                found[node.name, field.target.id] = " ".join(words)
    return found
