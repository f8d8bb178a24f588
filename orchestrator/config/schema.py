"""The schema of the settings in words: every key, what it must be, and the table in docs/settings.md.

The comments of ``transport/contracts/settings.py`` are the only text about a setting; a setting without one is named by
its section and type alone, never left out.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect

from orchestrator.config.toml_source import to_toml
from transport.contracts import settings as definitions
from transport.contracts.settings import Section, Settings
from transport.process.secret import BROKER_PASSWORD, SHARED_SECRET

PASSWORD = "broker.password"
FROM_ENVIRONMENT = {PASSWORD: BROKER_PASSWORD, "api.secret": SHARED_SECRET}
"""Secrets, and the variable that may hold each: it wins, and no file repeats it."""
SECRET = (*FROM_ENVIRONMENT, "broker.url")
"""Shown in no error: a mistyped URL may hold a password that was not recognised as one."""


def _fields() -> dict[str, msgspec.structs.FieldInfo]:
    sections = msgspec.structs.fields(Settings)
    return {
        f"{section.name}.{field.name}": field
        for section in sections
        for field in msgspec.structs.fields(typing.cast("type[Section]", section.type))
    }


FIELDS = _fields()
"""Dotted key -> its field, in the order of the schema."""
SECTIONS = tuple(field.name for field in msgspec.structs.fields(Settings))


def value_of(settings: Settings, key: str) -> Any:
    """The value of the dotted ``key``."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}
"""A unit is the end of a setting's name."""


def expected_type(key: str) -> str:
    """What the setting ``key`` must be, in words, with its range and unit: ``a number > 0 (seconds)``."""
    unit = next((f" ({unit})" for suffix, unit in UNITS.items() if key.endswith(suffix)), "")
    return _in_words(FIELDS[key].type) + unit


def _in_words(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(arguments)}, each {_in_words(arguments[0])}"
    if typing.get_origin(kind) is list:
        return f"a list, each {_in_words(arguments[0])}"
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


# -- the table

TABLE_HEAD = """# Settings

Made from [transport/contracts/settings.py](../transport/contracts/settings.py) by
`streamrl-orchestrator settings`; do not edit it here.

A run takes them from a preset, from TOML files (`--config`), and from `--set section.key=value`; the later wins. Names
end in their unit: `_s` seconds, `_bytes` bytes, `_tokens` tokens. A secret comes from its variable, or from the file
that the variable with `_FILE` after it names.
"""


def settings_table() -> str:
    """The whole document."""
    comments = _comments(inspect.getsource(definitions))
    return "\n".join([TABLE_HEAD, *(line for section in SECTIONS for line in _section(section, comments))])


def _section(section: str, comments: dict[tuple[str, str], str]) -> Iterator[str]:
    kind = typing.cast("type[Section]", next(f.type for f in msgspec.structs.fields(Settings) if f.name == section))
    yield f"## [{section}]\n\n{inspect.getdoc(kind)}\n"
    yield "| setting | default | value | what it does |"
    yield "|---|---|---|---|"
    for key in (key for key in FIELDS if key.startswith(f"{section}.")):
        name = key.partition(".")[2]
        about = comments.get((kind.__name__, name), "")
        if key in FROM_ENVIRONMENT:
            about = f"{about} (environment: {FROM_ENVIRONMENT[key]})".strip()
        yield _row(f"`{name}`", f"`{_default(key)}`", expected_type(key), about)
    yield ""


def _default(key: str) -> str:
    return to_toml(value_of(Settings(), key))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


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
