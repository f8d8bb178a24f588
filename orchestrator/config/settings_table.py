"""Every setting as a table in Markdown, made from ``transport/contracts/settings.py``, whose comments hold units and
reasons.

Owns: reading the comments, the table's form. Never: a text about a setting; a comment is the only place for it.
Invariant: a setting without a comment is named by its section and type alone, never left out.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator

import msgspec

from orchestrator.config.checks import value_of
from orchestrator.config.load import FIELDS, FROM_ENVIRONMENT, SECTIONS, expected_type
from orchestrator.config.toml_source import to_toml
from transport.contracts import settings as schema
from transport.contracts.settings import Section, Settings

HEAD = """# Settings

Made from [transport/contracts/settings.py](../transport/contracts/settings.py) by
`streamrl-orchestrator settings`; do not edit it here.

A run takes them from a preset, from TOML files (`--config`), and from `--set section.key=value`; the later wins. Names
end in their unit: `_s` seconds, `_bytes` bytes, `_tokens` tokens. A secret comes from its variable, or from the file
that the variable with `_FILE` after it names.
"""


def settings_table() -> str:
    """The whole document."""
    comments = _comments(inspect.getsource(schema))
    return "\n".join([HEAD, *(line for section in SECTIONS for line in _section(section, comments))])


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
