"""Trust in a configuration: programs that it names, and characters that would end a line of a script.

A configuration is a program where it names functions, commands or jails: a run imports and starts what stands there. A
file that somebody else can have written is asked about first. Its texts become parts of batch scripts, manifests and
command lines, where a line break would begin another command.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard, cast

from orchestrator.config.schema import ENTRIES, ENTRY, FIELDS, TABLES, expected_type
from transport.process.files import other_writers
from transport.process.words import control_character

PROGRAMS = frozenset(
    {
        "algorithm.functions_path",
        "environment.path",
        "environment.readable",
        "environment.variables",
        "generation.server_args",
        "generation.server_command",
        "launcher.image",
        "launcher.options",
        "launcher.place",
        "model.trust_remote_code",
        "scoring.environment",
        "scoring.readable",
        "scoring.reward_path",
    }
)
"""Settings that lead to a program, or say what one gets, where they are not empty."""
JAILS = frozenset({"environment.jail", "scoring.jail"})
"""Settings that end the jail of a program where they are "off"."""
FUNCTIONS = frozenset(key for key in (*FIELDS, *ENTRIES) if "module:function" in expected_type(key))
"""Settings that name a function where the value is module:function; of a table of tables, as ``data.mix.NAME.loss``."""


def programs_in(key: str, value: object, setting: str = "") -> Iterator[str]:
    """Keys of the programs, functions and ended jails that ``key`` = ``value`` of a document names.

    setting: the key as the schema has it; "": the same.
    """
    setting = setting or key
    if _is_table(value):
        for name, inner in value.items():
            is_entry = f"{setting}.{ENTRY}" in TABLES
            yield from programs_in(f"{key}.{name}", inner, f"{setting}.{ENTRY if is_entry else name}")
    elif (
        (setting in PROGRAMS and value)
        or (setting in JAILS and value == "off")
        or (setting in FUNCTIONS and ":" in str(value))
    ):
        yield key


TEXTS = frozenset(
    {"data.chat_template_kwargs", "data.suffix", "data.system", "generation.stop", "scoring.answer_marker"}
)
TABLES_OF_TEXTS = frozenset({"params", "environment_params"})
"""Settings, and last words of their keys, whose text goes to a model or a task, and has any lines; every other may end
up in a script."""


def misplaced_character(key: str, value: object) -> str:
    """The first control character of a value that may stand in a script, a manifest or a command line; "" for none."""
    if key in TEXTS or key.rpartition(".")[2] in TABLES_OF_TEXTS:
        return ""
    if _is_table(value):
        found = (misplaced_character(key, name) or misplaced_character(f"{key}.{name}", value[name]) for name in value)
    elif isinstance(value, list):
        found = (misplaced_character(key, item) for item in cast("list[object]", value))
    else:
        return control_character(str(value))
    return next(filter(None, found), "")


def _is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, dict)


def distrust(status: os.stat_result, named: Collection[str]) -> str:
    """Reason not to use a file that names programs; "": only this user, or root, can have written it.

    named: the keys of ``programs_in``, in order. Parts of them are the file's own words, and are shown as such.
    """
    writers = other_writers(status)
    if not writers or not named:
        return ""
    keys = (ascii(key) if control_character(key) else key for key in named)
    return f"{writers}, and starts or imports programs: it sets {', '.join(keys)}"
