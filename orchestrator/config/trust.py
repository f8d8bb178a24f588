"""What a configuration may do beyond being read: name programs, and stand in scripts.

A configuration is a program where it names functions, commands or jails: a run imports and starts what stands there. A
file that somebody else can have written is asked about first. Its texts become parts of batch scripts, manifests and
command lines, where a line break would begin another command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, cast

from transport.process.files import other_writers
from transport.process.words import has_control_characters

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
FUNCTIONS = frozenset({"algorithm.advantage", "algorithm.loss", "environment.name", "scoring.reward"})
FUNCTIONS_OF_PARTS = frozenset({"advantage", "environment", "loss"})
"""Settings, and those of a part of data.mix, that name a function where the value is module:function."""


def programs_in(key: str, value: object) -> Iterator[str]:
    """Keys of the programs, functions and ended jails that ``key`` = ``value`` of a document names."""
    if _is_table(value):
        for name, inner in value.items():
            yield from programs_in(f"{key}.{name}", inner)
        return
    of_part = key.startswith("data.mix.") and key.rpartition(".")[2] in FUNCTIONS_OF_PARTS
    if (
        (key in PROGRAMS and value)
        or (key in JAILS and value == "off")
        or ((key in FUNCTIONS or of_part) and ":" in str(value))
    ):
        yield key


TEXTS = frozenset(
    {
        "data.chat_template_kwargs",
        "data.params",
        "data.suffix",
        "data.system",
        "environment.params",
        "generation.stop",
        "scoring.answer_marker",
    }
)
TEXTS_OF_TABLES = frozenset({"params", "environment_params"})
"""Settings whose text goes to a model or a task, and has any lines; every other may end up in a script."""


def control_character(key: str, value: object) -> str:
    """The first control character of a value that may stand in a script, a manifest or a command line; "" for none."""
    if key in TEXTS or key.rpartition(".")[2] in TEXTS_OF_TABLES:
        return ""
    if _is_table(value):
        found = (control_character(key, name) or control_character(f"{key}.{name}", value[name]) for name in value)
    elif isinstance(value, list):
        found = (control_character(key, item) for item in cast("list[object]", value))
    else:
        found = (char for char in str(value) if has_control_characters(char))
    return next(filter(None, found), "")


def _is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, dict)


def question(path: str, status: os.stat_result, named: Mapping[str, None]) -> str:
    """What is wrong with a file that names programs; "": only its user, or root, can have written it.

    named: the keys of ``programs_in``, in order.
    """
    writers = other_writers(status)
    return f"{path} {writers}, and starts or imports programs: it sets {', '.join(named)}" if writers and named else ""
