"""Advice for words of a command line that no command takes."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.config.run_directory import RunDir
from orchestrator.config.schema import FIELDS, nearest

WORKER_COMMANDS = [
    "prepare",
    "generate",
    "score",
    "train",
    "critic",
    "publish",
    "store",
    "storage-unit",
    "evaluate",
    "export",
]  # what only that one has
WITH_SETTINGS = ("run", "serve", "collect", "profile")
"""Commands with --set and --config."""
ASSIGNED = "a setting is given as --set SECTION.KEY=VALUE, without blanks around ="


def advice(message: str, typed: list[str]) -> str:
    """What to type instead, "" where the error says enough.

    Args:  message: of the usage error.  typed: the words behind the program's name.
    """
    command = typed[0] if typed else ""
    if message.startswith("No such command"):
        return f"it is one of streamrl-worker: streamrl-worker {command}" if command in WORKER_COMMANDS else ""
    if found := re.match(r"No such option: --?([\w-]+)", message):
        return _of_option(found[1], command)
    if found := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return _of_words(found[1].split(), command, typed)
    return ""


def _of_option(option: str, command: str) -> str:
    if command not in WITH_SETTINGS:
        takes = f"{command} takes no settings" if option in ("set", "preset", "config") else ""
        return takes and f"{takes}; streamrl-orchestrator {command} --help lists its options"
    found = re.search(r"mean (.*)\?", nearest(option.replace("-", "_"), list(FIELDS)))
    return f"a setting is given as --set {found[1]}=VALUE" if found else ""


def _of_words(words: list[str], command: str, typed: list[str]) -> str:
    first = words[0]
    if command == "set" and len(typed) > 2 and "=" not in typed[2]:
        return f"name and value are one word: {typed[2]}={first}"
    if command not in WITH_SETTINGS:
        return ""
    if first.endswith(".toml"):
        return f"each file of settings has its own --config: --config {first}"
    if RunDir(Path(first)).exists():
        run = Path(first).absolute()
        return f"a run is named as --resume --name {run.name} --dir {run.parent}"
    return ASSIGNED if "=" in first else ""
