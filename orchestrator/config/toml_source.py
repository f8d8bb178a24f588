"""TOML with positions: what a configuration file sets, and on which line; and values back to TOML.

What a key means is not known here. Invariant: every value carries where it came from, so that an error can say it.
"""

from __future__ import annotations

import difflib
import enum
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that someone set.

    path: the parts of its key, e.g. ("trainer", "lr").  where: e.g. "file.toml:7" or "--set".
    text: what was typed after ``--set key=``, None in a file; a string setting takes it as it is.
    """

    path: tuple[str, ...]
    value: object
    where: str
    text: str | None = None

    @property
    def key(self) -> str:
        return ".".join(self.path)


MAX_DOCUMENT_BYTES = 1024 * 1024
"""Of a configuration: all settings with their comments are a hundredth of it."""
MAX_NESTING, MAX_KEY_PARTS = 32, 16
"""Of lists and inline tables, and of a dotted key: tomllib recurses into the former, and its time grows with the cube
of the latter (41 s for a file of 20 kB). No setting has more than two of either."""
INTEGERS = range(-(2**63), 2**63)
"""As TOML says; tomllib reads any number of digits, and Python then refuses to print some."""
TOO_LARGE = "not valid TOML: a whole number of more than 64 bits"

_TOKEN = re.compile(
    r"""
      "{3} (?:\\.|[^\\])*? (?:"{3,5}|\\?\Z)    # of several lines; it may end in quotes of its own
    | '{3} .*? (?:'{3,5}|\Z)
    | "(?:\\[^\n]|[^"\\\n])*"? | '[^'\n]*'?
    | \#[^\n]*
    | [^"'#\[\]{}\n.,=]+
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
"""A string, a comment, or the rest. A string that does not end is one token too, so that the time stays linear."""


def read_document(document: str, name: str) -> list[Setting]:
    """The settings of a TOML document of ``[section]`` tables, in order. name: of the file, for ``where``.

    A table inside a section (``[data.params]``) is one value. Raises ConfigError for text that is not TOML, or is more
    than a configuration.
    """
    tables = _parsed(document, name)
    lines = key_lines(document)
    settings: list[Setting] = []
    for section, content in tables.items():
        leaves: dict[str, Any] = content if isinstance(content, dict) else {}
        for path, value in [((section, name), leaf) for name, leaf in leaves.items()] or [((section,), content)]:
            settings.append(Setting(path=path, value=value, where=f"{name}:{lines[path]}"))
            _check_integers(value, settings[-1].where)
    return settings


def _parsed(document: str, name: str) -> dict[str, Any]:
    """Bounded first, so that tomllib takes time in proportion to the document."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MiB, the most that a configuration may have", where=name
        )
    for statement in _statements(document):
        if statement.depth > MAX_NESTING or statement.key_parts > MAX_KEY_PARTS:
            raise ConfigError(
                f"lists and tables of more than {MAX_NESTING} levels, or a key of more than {MAX_KEY_PARTS} parts: no "
                "setting has them",
                where=f"{name}:{statement.line}",
            )
    try:
        return tomllib.loads(document)
    except ValueError as error:
        if not isinstance(error, tomllib.TOMLDecodeError):  # a number of more digits than Python reads
            raise ConfigError(TOO_LARGE, where=name) from error
        line = re.search(r"at line (\d+)", str(error))
        number = line[1] if line else document.count("\n") + 1  # "at end of document"
        raise ConfigError(f"not valid TOML: {error}", where=f"{name}:{number}") from error


def _check_integers(value: object, where: str) -> None:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _check_integers(item, where)
    if isinstance(value, int) and value not in INTEGERS:
        raise ConfigError(TOO_LARGE, where=where)


def key_lines(document: str) -> dict[tuple[str, ...], int]:
    """The line (from 1) on which each key, and each table above it, is first set. ``document`` must be valid TOML.

    Source: ours, because tomllib gives no positions. Each statement of a TOML document is itself a document.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for statement in _statements(document):
        if (text := statement.text.lstrip())[:1] in ("", "#"):
            continue
        content = tomllib.loads(text)
        paths = sorted(_paths(content), key=len)
        if text.startswith("["):
            table = paths[-1]
            paths = [table[:depth] for depth in range(1, len(table) + 1)]
        else:
            paths = [table + path for path in paths]
        for path in paths:
            lines.setdefault(path, statement.line)
    return lines


@dataclass(frozen=True, slots=True)
class _Statement:
    """A key and its value, a table's header, or a comment. line: it starts on.  depth: of brackets in it.

    key_parts: dots in a row, and one: of its longest key, but also of a number.
    """

    text: str
    line: int
    depth: int
    key_parts: int


def _statements(document: str) -> Iterator[_Statement]:
    """Cut where a line ends outside of strings and brackets. One pass; invalid TOML may be cut anywhere."""
    start, line = 0, 1
    depth = deepest = dots = most_dots = 0
    for token in _TOKEN.finditer(document):
        match token[0]:
            case "[" | "{":
                depth, dots = depth + 1, 0
            case "]" | "}":
                depth, dots = depth - 1, 0
            case "," | "=":
                dots = 0
            case ".":
                dots += 1
            case "\n" if depth <= 0:
                text = document[start : token.end()]
                yield _Statement(text, line, deepest, most_dots + 1)
                start, line = token.end(), line + text.count("\n")
                depth = deepest = dots = most_dots = 0
        deepest, most_dots = max(deepest, depth), max(most_dots, dots)
    yield _Statement(document[start:], line, deepest, most_dots + 1)


def _paths(content: object) -> Iterator[tuple[str, ...]]:
    """Every path of nested tables; those of an array of tables end at the array."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield (name,)
            yield from ((name, *rest) for rest in _paths(value))


def parse_override(argument: str) -> Setting:
    """``"trainer.lr=1e-5"`` -> its setting. The value is TOML; what is no TOML is a string. Raises ConfigError."""
    key, separator, text = argument.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not separator or len(path) < 2 or not all(path):
        raise ConfigError(f"{key!r} is not of the form section.key=value", where="--set")
    if key != key.rstrip():  # "key = value"; in "data.suffix= End so" the blank is part of the string
        text = text.strip()
    try:
        value = _parsed(f"value = {text}", "--set")["value"]
        _check_integers(value, "--set")
    except ConfigError:
        value = text
    return Setting(path=path, value=value, where="--set", text=text)


FIELD_WORDS = {
    "learning_rate": "trainer.lr",
    "batch_size": "pipeline.groups_per_batch",
    "num_generations": "pipeline.group_size",
    "max_tokens": "sampling.max_new_tokens",
    "gradient_clip": "trainer.grad_clip",
    "steps": "run.batches",
}
"""What other trainers call some of our settings."""


def nearest(word: str, known: Sequence[str]) -> str:
    """`` (did you mean trainer.lr?)`` for what ``word`` most likely was meant to be, "" when nothing is close.

    In this order: the key it would be an entry of, the same key under another section, a similar key of the same
    section, a similar key anywhere; FIELD_WORDS are similar to themselves.
    """
    section, _, leaf = word.rpartition(".")
    parent = [section] if section in known else []
    same_leaf = [key for key in known if "." in key and key.rpartition(".")[2] == leaf]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    similar = _similar(leaf, siblings, cutoff=0.6) or _similar(leaf, known, cutoff=0.7)
    found = parent or same_leaf or similar
    return f" (did you mean {found[0]}?)" if found else ""


def _similar(leaf: str, keys: Sequence[str], *, cutoff: float) -> list[str]:
    leaves = {name: key for name, key in FIELD_WORDS.items() if key in keys}
    leaves |= {key.rpartition(".")[2]: key for key in reversed(keys)}
    return [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=cutoff)]


def to_toml(value: object) -> str:
    """One value as TOML. Raises TypeError for what no setting can be."""
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
        case dict():
            items = typing.cast("Mapping[str, object]", value).items()
            return "{" + ", ".join(f"{_toml_key(name)} = {to_toml(item)}" for name, item in items) + "}"
        case _:
            raise TypeError(f"{type(value)} is not a setting")


def _toml_key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else json.dumps(name)
