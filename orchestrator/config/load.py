"""From presets, files, ``--set`` and the environment to one checked ``Settings``, and back to TOML.

    defaults < preset < those of algorithm.name < files, in order < --set, in order < environment (secrets only)

Every value keeps its origin, for errors. Invariant: what ``resolve`` returns is complete, of the right types, in range
and possible; a password is in no message.
"""

from __future__ import annotations

import importlib.resources
import math
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from orchestrator.config.rules import violations
from orchestrator.config.schema import (
    ENTRIES,
    ENTRY,
    FIELDS,
    FROM_ENVIRONMENT,
    PASSWORD,
    SECRET,
    SECTIONS,
    TABLES,
    expected_type,
    is_section,
    keys_of,
    nearest,
    nearest_choice,
    nearest_value,
    to_toml,
    value_of,
)
from orchestrator.config.trust import distrust, misplaced_character, programs_in
from orchestrator.core.model.settings import chosen_dispatch
from orchestrator.errors import ConfigError
from transport.broker.base import without_password
from transport.contracts.settings import Algorithm, DataPart, Section, Settings
from transport.process.files import read_own
from transport.process.secret import read_secret

FIXED_ON_RESUME = (
    "model.path",
    *(f"data.{field.name}" for field in msgspec.structs.fields(Settings().data) if field.name != "passes"),
    "pipeline.group_size",
    "pipeline.groups_per_batch",
    "run.seed",
    "trainer.checkpoint_dir",
    "eval.problems",
    "eval.seed",
    "eval.sets",
    "eval.path",
    "eval.config",
    "eval.split",
    "critic.model",
    "ranker.model",
    "trainer.engine",
    "trainer.lora.rank",
    "trainer.lora.alpha",
    "trainer.lora.targets",
)
"""Another value would train something else under the same name (the position in the data would mean another prompt,
other adapters do not go on from those of the checkpoint, and checkpoints are looked for where they were written), or
would change nothing, as what critic and ranker begin with. The layout of the ranks is none of these: it may change."""

RENAMED = {
    "replay": "emulated",
    "pipeline.move_running": "pipeline.migrate_running",
    'generation.engine = "replay"': 'generation.engine = "emulated"',
    'pipeline.dispatch = "two_class_sum"': 'pipeline.dispatch = "two_class_max"',
}
"""What 0.1 called a section, a setting or a value -> its name since 0.2. The old name is an error that says the new."""


DEFAULT, PRESET = "default", "preset "
"""Origins: of a value that nobody set, and how that of a preset's begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration that can be started.

    origins: dotted key -> where its value came from, for every key.  forgotten: what a preset sets that does not hold,
    a sentence each.
    """

    settings: Settings
    origins: Mapping[str, str]
    forgotten: Sequence[str] = ()


def is_chosen(resolved: Resolved, key: str) -> bool:
    """Whether the user gave ``key`` a value; a default or a preset is no choice."""
    return resolved.origins[key] != DEFAULT and not _is_given(resolved.origins[key])


def _is_given(origin: str) -> bool:
    """Whether a preset or an algorithm set the value."""
    return origin.startswith((PRESET, "algorithm "))


def presets_of(resolved: Resolved) -> list[str]:
    """The presets that values come from."""
    named = (origin for origin in resolved.origins.values() if origin.startswith(PRESET))
    return list(dict.fromkeys(origin.removeprefix(PRESET).partition(":")[0] for origin in named))


def preset_names() -> list[str]:
    files = importlib.resources.files("orchestrator.config.presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def resolve(
    preset: str | None,
    files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    stored: Path | None = None,
    trusts: Callable[[str], bool] = lambda question: False,
) -> Resolved:
    """Read, merge and check a configuration.

    Args:    preset: its name, None for none.  files: TOML files.  overrides: ``section.key=value``.
             environ: only the variables of FROM_ENVIRONMENT are looked at, and those with _FILE after them.
             stored: config.toml in the directory of a run, under all of ``files``; it must be this user's.
             trusts: asked for each of ``files`` that names programs and that others can have written.
    Raises:  ConfigError: every key and value that is wrong by itself, each with where it was set, or the first rule
             of several that is broken.  SecretError, ForeignError.
    """
    wrong: list[ConfigError] = []

    def read(source: Callable[[], list[Setting]]) -> list[Setting]:
        try:
            return source()
        except ConfigError as error:
            wrong.append(error)
            return []

    presets = [read(lambda: read_preset(preset))] if preset else []
    kept = [read(lambda: _read_stored(stored))] if stored else []
    named = [read(lambda path=path: _read_file(path, trusts)) for path in files]
    named.append([one for argument in overrides for one in read(lambda argument=argument: [parse_override(argument)])])
    for key, variable in FROM_ENVIRONMENT.items():
        if secret := read_secret(environ, variable):
            named.append([Setting(path=tuple(key.split(".")), value=secret, where=f"environment {variable}")])
    values: dict[str, object] = {}
    origins = dict.fromkeys(FIELDS, DEFAULT)
    forgotten: dict[str, str] = {}
    # A stored run has all values of its own, over those of its algorithm; another one that is named now goes over it.
    for layer in (*presets, _of_algorithm([*presets, *kept]), *kept, _of_algorithm(named), *named):
        wrong += _apply(layer, values, origins, forgotten)
    if wrong:
        raise _all_of(wrong)
    settings = _hide_password(_build(values), origins)
    for keys, problem in violations(settings):
        assigned = [key if key in SECRET else f"{key} = {to_toml(value_of(settings, key))}" for key in keys]
        given = [f"{text} ({origins[key]})" for key, text in zip(keys[1:], assigned[1:], strict=True)]
        set_last = next(key for key in reversed(list(origins)) if key in keys)
        raise ConfigError("; ".join([f"{assigned[0]} {problem}", *given]), key=keys[0], where=origins[set_last])
    # A password that the user gave goes only to an address that the user named, too: the file of a run may have come
    # from anywhere, and name a server that waits for it.
    keys_named = {setting.key for layer in named for setting in layer}
    if stored and settings.broker.url and PASSWORD in keys_named and "broker.url" not in keys_named:
        raise ConfigError(
            f"broker.url = {to_toml(settings.broker.url)} is named by that file alone, so the password "
            f"({origins[PASSWORD]}) is not sent there; if it is your broker, name it yourself: --broker URL, or with "
            "`run` --set broker.url=URL",
            key="broker.url",
            where=origins["broker.url"],
        )
    sentences = [sentence for key, sentence in forgotten.items() if origins[key] == DEFAULT]
    return Resolved(settings=settings, origins=origins, forgotten=sentences)


MAX_ERRORS = 20
"""Errors that one message names."""


def _all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """One error for several, a line each; the first one's key and place."""
    first, *others = {str(error): error for error in errors}.items()
    lines = [text for text, _ in others[: MAX_ERRORS - 1]]
    if len(others) >= MAX_ERRORS:
        lines.append(f"and {len(others) + 1 - MAX_ERRORS} more")
    if not lines:
        return first[1]
    text, error = first
    problem = text.removeprefix(f"{error.where}: ") if error.where else text
    return ConfigError("\n".join([problem, *lines]), key=error.key, where=error.where)


def read_preset(name: str) -> list[Setting]:
    """The settings of a preset. Raises ConfigError for a name that is none."""
    known = preset_names()
    if name not in known:
        file = f"; a file of settings is named with --config {name}" if name.endswith(".toml") else ""
        raise ConfigError(
            f"there is no preset {name!r}{nearest(name, known)}; presets: {', '.join(known)}{file}", where="--preset"
        )
    path = importlib.resources.files("orchestrator.config.presets").joinpath(f"{name}.toml")
    return read_document(path.read_text(encoding="utf-8"), f"preset {name}")


def _of_algorithm(layers: Sequence[Sequence[Setting]]) -> list[Setting]:
    """What the algorithm that ``layers`` name last sets; nothing for a name that is none, which is refused later."""
    named = [setting.value for layer in layers for setting in layer if setting.path == ("algorithm", "name")]
    name = named[-1] if named else ""
    if name not in get_args(Algorithm):
        return []
    path = importlib.resources.files("orchestrator.config.algorithms").joinpath(f"{name}.toml")
    return read_document(path.read_text(encoding="utf-8"), f"algorithm {name}")


def _read_file(path: Path, trusts: Callable[[str], bool] | None = None) -> list[Setting]:
    """The settings of a file, which must be this user's where nothing is trusted.

    Raises ConfigError: it cannot be read, is not TOML, or names programs, and its user does not trust it.
    """
    try:
        if trusts is None:
            raw, status = read_own(path), None
        else:
            with path.open("rb") as file:
                raw, status = file.read(MAX_DOCUMENT_BYTES + 1), os.fstat(file.fileno())
        document = raw.decode("utf-8-sig")  # an editor's byte order mark is no part of it
    except OSError as error:
        preset = f"; a preset is named with --preset {path}" if str(path) in preset_names() else ""
        raise ConfigError(f"cannot be read: {error.strerror}{preset}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}; save it as UTF-8", where=str(path)) from error
    settings = read_document(document, str(path))
    programs = dict.fromkeys(key for setting in settings for key in programs_in(setting.key, setting.value))
    problem = status and distrust(status, programs)
    if problem and trusts is not None and not trusts(f"{path} {problem}"):
        raise ConfigError(f"{problem}. Read it; then pass --trust, or --config a copy of yours", where=str(path))
    return settings


def _read_stored(path: Path) -> list[Setting]:
    """The settings of a run's config.toml, each with the origin that ``render`` wrote beside it.

    A value whose line says "default" and is another was changed by hand: its origin is that line.
    """
    settings = _read_file(path)
    comments = _comments(read_own(path).decode("utf-8-sig"))
    found: list[Setting] = []
    for setting in settings:
        origin = _NOTES.sub("", comments.get(setting.path, ""))
        is_default = origin == DEFAULT and setting.key in FIELDS and _is_default(setting)
        kept = "" if setting.key in FROM_ENVIRONMENT or (origin == DEFAULT and not is_default) else origin
        found.append(replace(setting, origin=kept))
    return found


_NOTES = re.compile(r"; (set, not shown|\w+ here)\Z")
"""Ends of comments of ``render`` that are no part of an origin."""


def _is_default(setting: Setting) -> bool:
    return to_toml(setting.value) == to_toml(value_of(Settings(), setting.key))


# --- merging ----------------------------------------------------------------------------------------------------------


SET_FOR: Mapping[str, Sequence[str]] = {
    "data.task": ("data.params",),
    "data.source": ("data.params", "data.path", "data.shuffle", "data.mix", "eval.path", "eval.sets"),
    "data.path": ("data.shuffle", "data.mix", "eval.path", "eval.sets"),
    "trainer.lr_schedule": ("trainer.lr_min_share",),
}
"""Setting -> those that a preset sets for its value alone."""


def _apply(
    layer: Iterable[Setting], values: dict[str, object], origins: dict[str, str], forgotten: dict[str, str]
) -> list[ConfigError]:
    """Lay ``layer`` over ``values``. Another task, source or file forgets what a preset set for the one before.

    forgotten: gets a sentence for each key whose value goes so.
    Returns: one error for each setting that is wrong by itself, and therefore left out.
    """

    def forget(keys: Sequence[str], why: str) -> None:
        for key in keys:
            if key in values and _is_given(origins[key]):
                was = f"{key} = {to_toml(values.pop(key))} ({origins[key]})"
                forgotten[key] = f"{was} is not used: {why}"
                origins[key] = DEFAULT

    settings = [one for setting in layer for one in _of_sections(setting)]
    for setting in settings:
        if setting.key in SET_FOR and values.get(setting.key) != setting.value:
            forget(SET_FOR[setting.key], f"{setting.key} is another ({setting.where})")
    wrong: list[ConfigError] = []
    for setting in settings:
        key, _ = setting.field
        try:
            values[key] = _typed(setting, values)
        except ConfigError as error:
            wrong.append(error)
            continue
        origins.pop(key)  # so that they end in the order in which they were set: of a broken rule the last is blamed
        origins[key] = setting.origin or setting.where
    here = {setting.field[0] for setting in settings}
    mix = typing.cast("dict[str, DataPart]", values.get("data.mix", {})) if "data.mix" in here else {}
    if mix and all(part.path or part.source or part.task for part in mix.values()):  # as by another data.path
        others = [key for key in ("data.path", *SET_FOR["data.path"]) if key not in here]
        forget(others, f"each part of data.mix has data of its own ({origins['data.mix']})")
    return wrong


def _of_sections(setting: Setting) -> Iterator[Setting]:
    """``--set 'trainer.parallel={data = 2, tensor = 4}'`` sets what is in the section. Anything else is as it was."""
    if setting.key in SECTIONS and isinstance(setting.value, dict):
        for path, value in _leaves(setting.path, typing.cast("dict[str, object]", setting.value)):
            yield replace(setting, path=path, value=value)
    else:
        yield setting


def _leaves(section: tuple[str, ...], content: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """The paths and values of a section, and of the sections inside of it; any other table is one value."""
    for name, value in content.items():
        path = (*section, name)
        if ".".join(path) in SECTIONS and isinstance(value, dict):
            yield from _leaves(path, typing.cast("dict[str, object]", value))
        else:
            yield path, value


def _typed(setting: Setting, values: Mapping[str, object]) -> object:
    """The value as its field wants it. Raises ConfigError for an unknown key or a value of another type."""
    key, inside = setting.field
    field = FIELDS.get(key)
    if field is None:
        raise _unknown(setting)
    table = f"{key}.{ENTRY}"
    if len(inside) > (2 if table in TABLES else typing.get_origin(field.type) is dict):
        raise _unknown(setting)
    if table in TABLES:
        for entry in _entries(setting):
            _check_entry(entry, table)
    value = setting.value
    if inside:  # only from --set: one entry of a table, the others stay
        value = _replaced(msgspec.to_builtins(values.get(key, {})), inside, value)
    elif _is_text(field.type) and setting.text is not None:
        value = setting.text if not isinstance(value, str) else value  # --set run.name=7
    return _converted(setting, value, field.type, key)


def _is_text(kind: Any) -> bool:
    """Whether a setting of this type is any text, or one within limits."""
    return getattr(kind, "__origin__", kind) is str


NO_VALUES = ("None", "null", "nil")
"""What other languages write for no value, and TOML reads as text."""


def _converted(setting: Setting, value: object, kind: Any, key: str) -> object:
    """Raises ConfigError: what the setting ``key`` of the schema must be."""
    if value in NO_VALUES and _is_text(kind):
        problem = f'{setting.key} = "{value}" is a text of {len(str(value))} letters; leave it out for the default, or '
        raise ConfigError(f'{problem}write "" for an empty text', key=key, where=setting.where)
    if char := misplaced_character(key, value):
        problem = f"{setting.key} has the control character {char!r}, and may become part of a script: leave it out"
        raise ConfigError(problem, key=key, where=setting.where)
    try:
        _check_finite(value)
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        shown = "" if key in SECRET else f", not {setting.value}"
        with suppress(TypeError):  # a date, which no setting can be
            shown = shown and f", not {to_toml(setting.value)}"
        near = "" if key in SECRET else nearest_choice(kind, value) or nearest_value(kind, value)
        problem = _renamed(f'{key} = "{value}"') or f"{setting.key} must be {expected_type(key)}{shown}{near}"
        raise ConfigError(problem, key=key, where=setting.where) from error


def _replaced(table: dict[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """``table`` with another value at ``path``."""
    first, *rest = path
    return {**table, first: _replaced(table.get(first, {}), rest, value) if rest else value}


def _entries(setting: Setting) -> Iterator[Setting]:
    """The settings of the tables that one of a table of tables sets; of one that is none, nothing."""
    field, inside = setting.field
    values: object = setting.value
    for name in reversed(inside):
        values = {name: values}
    for name, table in typing.cast("dict[str, object]", values if isinstance(values, dict) else {}).items():
        path = (*field.split("."), name)
        for key, value in typing.cast("dict[str, object]", table if isinstance(table, dict) else {}).items():
            yield replace(setting, path=(*path, key), value=value)


def _check_entry(setting: Setting, table: str) -> None:
    """Raises ConfigError for one setting of one of the tables that ``table`` stands for."""
    _, (name, entry, *_) = setting.field
    key = f"{table}.{entry}"
    if key not in ENTRIES:
        known = [one.rpartition(".")[2] for one in keys_of(table)]
        where = f"{table.removesuffix(ENTRY)}{name}"
        hint = nearest(entry, known)
        problem = f"unknown key {setting.key}{hint}; keys of {where}: {', '.join(known)}"
        raise ConfigError(problem, key=setting.key, where=setting.where)
    _converted(setting, setting.value, ENTRIES[key].type, key)


def _check_finite(value: object) -> None:
    """TOML has inf and nan, and no range of ours keeps inf out."""
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,):
        if isinstance(item, float) and not math.isfinite(item):
            raise msgspec.ValidationError("not finite")


def _renamed(old: str) -> str | None:
    """What to say of a section, setting or value of 0.1 that has another name now."""
    section, dot, key = old.partition(".")
    new = RENAMED.get(old) or (RENAMED[section] + dot + key if section in RENAMED else None)
    return new and f"{old} is {new} since version 0.2"


def _unknown(setting: Setting) -> ConfigError:
    section = setting.path[0]
    if problem := _renamed(setting.key):
        pass
    elif section not in SECTIONS:
        hint = nearest(section, [*SECTIONS]) or nearest(setting.key, list(FIELDS))
        problem = f"unknown section {section}{hint}; sections: {', '.join(SECTIONS)}"
    elif setting.key in SECTIONS:
        problem = f"{setting.key} is a section: write [{setting.key}], then one line for each of its keys"
    else:
        within = setting.section
        keys = ", ".join(key.rpartition(".")[2] for key in keys_of(within))
        problem = f"unknown key {setting.key}{nearest(setting.key, list(FIELDS))}; keys of {within}: {keys}"
    return ConfigError(problem, key=setting.key, where=setting.where)


def _build(values: Mapping[str, object]) -> Settings:
    def section(kind: type[Section], name: str) -> Section:
        built: dict[str, Any] = {}
        for field in msgspec.structs.fields(kind):
            key = f"{name}{field.name}"
            if is_section(field.type):
                built[field.name] = section(field.type, f"{key}.")
            elif key in values:
                built[field.name] = values[key]
        return kind(**built)

    return typing.cast("Settings", section(Settings, ""))


def _hide_password(settings: Settings, origins: dict[str, str]) -> Settings:
    """Move a password inside ``broker.url`` to ``broker.password``, so that the URL may be shown."""
    try:
        url, password = without_password(settings.broker.url)
    except ValueError as error:
        raise ConfigError("broker.url is not a URL", key="broker.url", where=origins["broker.url"]) from error
    if not password:
        return settings
    if not settings.broker.password:
        origins[PASSWORD] = origins["broker.url"]
    broker = msgspec.structs.replace(settings.broker, url=url, password=settings.broker.password or password)
    return msgspec.structs.replace(settings, broker=broker)


def check_resume(stored: Settings, resolved: Resolved) -> None:
    """Check that a resumed run is still the same run. Raises ConfigError for the first setting that may not change."""
    for key in FIXED_ON_RESUME:
        before, now = value_of(stored, key), value_of(resolved.settings, key)
        if before != now:
            raise ConfigError(
                f"{key} was {to_toml(before)} when the run began and cannot become {to_toml(now)} on --resume; "
                "start a new run with another --name",
                key=key,
                where=resolved.origins[key],
            )


def render(resolved: Resolved, *, defaults: bool = True) -> str:
    """The configuration as TOML, each line with where its value came from. Secrets are left out.

    defaults: also settings that nobody set; a comment says how many there are where they are left out.
    """
    lines: list[str] = []
    for section in SECTIONS:
        keys = [key for key in keys_of(section) if defaults or resolved.origins[key] != DEFAULT]
        if keys:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key in keys:
            value = value_of(resolved.settings, key)
            origin = resolved.origins[key]
            if key in FROM_ENVIRONMENT and value:
                value, origin = "", f"{origin}; set, not shown"
            if value == "auto" and key == "pipeline.dispatch":
                origin = f"{origin}; {chosen_dispatch(resolved.settings)} here"
            lines.append(f"{key.rpartition('.')[2]} = {to_toml(value)}  # {origin}")
    lines += [f"# {sentence}" for sentence in resolved.forgotten]
    if not defaults:
        left = sum(origin == DEFAULT for origin in resolved.origins.values())
        lines.append(f"# {left} more settings have their defaults; --all prints them, too")
    return "\n".join(lines) + "\n"


# --- TOML with positions: every value carries where it came from, so that an error can say it -------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that someone set.

    path: the parts of its key, e.g. ("trainer", "lr").  where: e.g. "file.toml:7" or "--set".
    text: what was typed after ``--set key=``, None in a file; a string setting takes it as it is.
    origin: where the value came from when a run began, in a file that keeps it; "": from ``where``.
    """

    path: tuple[str, ...]
    value: object
    where: str
    text: str | None = None
    origin: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def section(self) -> str:
        """The innermost section that its path names; its first part where that is none."""
        names = (".".join(self.path[:depth]) for depth in range(len(self.path), 0, -1))
        return next((name for name in names if name in SECTIONS), self.path[0])

    @property
    def field(self) -> tuple[str, tuple[str, ...]]:
        """The key of the field that its path leads to, and what is left inside of the field, as in ``data.params.x``.

        The key is no field's where the path ends at a section, or names none.
        """
        depth = self.section.count(".") + 2
        return ".".join(self.path[:depth]), self.path[depth:]


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

    A table inside a section that is no section itself (``[data.params]``) is one value. Raises ConfigError for text
    that is not TOML, or is more than a configuration.
    """
    tables = _parsed(document, name)
    lines = key_lines(document)
    settings: list[Setting] = []
    for section, content in tables.items():
        leaves = _leaves((section,), content if isinstance(content, dict) else {})
        for path, value in [*leaves] or [((section,), content)]:
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


def _comments(document: str) -> dict[tuple[str, ...], str]:
    """The comment at the end of the statement that first sets each key. ``document`` must be valid TOML."""
    comments: dict[int, str] = {}
    for statement in _statements(document):
        tokens = [token[0] for token in _TOKEN.finditer(statement.text) if token[0].startswith("#")]
        comments[statement.line] = tokens[-1].removeprefix("#").strip() if tokens else ""
    return {path: comments[line] for path, line in key_lines(document).items()}


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
