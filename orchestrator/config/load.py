"""From presets, files, ``--set`` and the environment to one checked ``Settings``, and back to TOML.

    defaults  <  preset  <  files, in order  <  --set, in order  <  environment (secrets only)

Every value keeps its origin, for errors. Invariant: what ``resolve`` returns is complete, of the right types, in range
and possible; a password is in no message.
"""

from __future__ import annotations

import importlib.resources
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.checks import Violation, violations
from orchestrator.config.schema import FIELDS, FROM_ENVIRONMENT, PASSWORD, SECRET, SECTIONS, expected_type, value_of
from orchestrator.config.toml_source import MAX_DOCUMENT_BYTES, Setting, nearest, parse_override, read_document, to_toml
from orchestrator.core.model.settings import chosen_dispatch
from orchestrator.errors import ConfigError
from transport.broker.url import without_password
from transport.contracts.settings import Section, Settings
from transport.process.files import read_own
from transport.process.secret import read_secret

FIXED_ON_RESUME = (
    "model.path",
    *(f"data.{field.name}" for field in msgspec.structs.fields(Settings().data) if field.name != "passes"),
    "pipeline.group_size",
    "pipeline.groups_per_batch",
    "run.seed",
    "eval.problems",
    "eval.seed",
)
"""Another value would train something else under the same name: the position in the data would mean another prompt."""


RENAMED = {
    "replay": "emulated",
    "pipeline.move_running": "pipeline.migrate_running",
    'generation.engine = "replay"': 'generation.engine = "emulated"',
    'pipeline.dispatch = "two_class_sum"': 'pipeline.dispatch = "two_class_max"',
}
"""What 0.1 called a section, a setting or a value -> its name since 0.2. The old name is an error that says the new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration that can be started. origins: dotted key -> where its value came from, for every key."""

    settings: Settings
    origins: Mapping[str, str]


def is_chosen(resolved: Resolved, key: str) -> bool:
    """Whether the user gave ``key`` a value; a default or a preset is no choice."""
    origin = resolved.origins[key]
    return origin != "default" and not origin.startswith("preset ")


def preset_names() -> list[str]:
    """The presets that come with the package."""
    files = importlib.resources.files("orchestrator.config.presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def resolve(
    preset: str | None,
    files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    stored: Path | None = None,
) -> Resolved:
    """Read, merge and check a configuration.

    Args:    preset: its name, None for none.  files: TOML files.  overrides: ``section.key=value``.
             environ: only the variables of FROM_ENVIRONMENT are looked at, and those with _FILE after them.
             stored: config.toml in the directory of a run, under all of ``files``; it must be this user's.
    Raises:  ConfigError: the first thing that is wrong, with its key and where it was set.  SecretError, ForeignError.
    """
    below: list[list[Setting]] = [read_preset(preset)] if preset else []
    if stored is not None:
        below.append(read_document(_text_of(stored, read_own), str(stored)))
    named = [read_file(path) for path in files]
    named.append([parse_override(argument) for argument in overrides])
    for key, variable in FROM_ENVIRONMENT.items():
        if secret := read_secret(environ, variable):
            path = tuple(key.split("."))
            named.append([Setting(path=path, value=secret, where=f"environment {variable}")])
    values: dict[str, object] = {}
    origins = dict.fromkeys(FIELDS, "default")
    for layer in (*below, *named):
        _apply(layer, values, origins)
    settings = _hide_password(_build(values), origins)
    for violation in violations(settings):
        raise _violated(violation, settings, origins)
    if stored is not None:
        _check_recipient(settings, origins, {setting.key for layer in named for setting in layer})
    return Resolved(settings=settings, origins=origins)


def read_preset(name: str) -> list[Setting]:
    """The settings of a preset. Raises ConfigError for a name that is none."""
    known = preset_names()
    if name not in known:
        raise ConfigError(
            f"there is no preset {name!r}{nearest(name, known)}; presets: {', '.join(known)}", where="--preset"
        )
    document = (
        importlib.resources.files("orchestrator.config.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    )
    return read_document(document, f"preset {name}")


def read_file(path: Path) -> list[Setting]:
    """The settings of a file. Raises ConfigError when it cannot be read or is not TOML."""
    return read_document(_text_of(path, _read_bounded), str(path))


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_DOCUMENT_BYTES + 1)


def _text_of(path: Path, read: Callable[[Path], bytes]) -> str:
    try:
        return read(path).decode()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", where=str(path)) from error


# --- merging ----------------------------------------------------------------------------------------------------------


def _apply(layer: Iterable[Setting], values: dict[str, object], origins: dict[str, str]) -> None:
    """Lay ``layer`` over ``values``. Another task or source forgets the parameters of the one before."""
    settings = [setting for setting in layer if not _is_empty_section(setting)]
    for setting in settings:
        if setting.key in ("data.task", "data.source") and values.get(setting.key) != setting.value:
            values.pop("data.params", None)
            origins["data.params"] = "default"
    for setting in settings:
        key = ".".join(setting.path[:2])
        values[key] = _typed(setting, values)
        origins.pop(key)  # so that the origins end in the order in which they were set, see _violated
        origins[key] = setting.where


def _is_empty_section(setting: Setting) -> bool:
    return setting.key in SECTIONS and setting.value == {}


def _typed(setting: Setting, values: Mapping[str, object]) -> object:
    """The value as its field wants it. Raises ConfigError for an unknown key or a value of another type."""
    key = ".".join(setting.path[:2])
    field = FIELDS.get(key)
    if field is None or len(setting.path) > 3:
        raise _unknown(setting)
    value = setting.value
    if len(setting.path) == 3:  # only from --set: one entry of a table, the others stay
        if typing.get_origin(field.type) is not dict:
            raise _unknown(setting)
        value = {**typing.cast("dict[str, object]", values.get(key, {})), setting.path[2]: value}
    elif _is_string(field) and setting.text is not None and not isinstance(value, str):
        value = setting.text  # --set run.name=7
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        shown = "" if key in SECRET else f", not {_shown(setting.value)}"
        problem = _renamed(f'{key} = "{value}"') or f"{setting.key} must be {expected_type(key)}{shown}"
        raise ConfigError(problem, key=key, where=setting.where) from error


def _is_string(field: msgspec.structs.FieldInfo) -> bool:
    of_pattern = typing.get_origin(field.type) is typing.Annotated and typing.get_args(field.type)[0] is str
    return field.type is str or of_pattern


def _shown(value: object) -> str:
    try:
        return to_toml(value)
    except TypeError:  # a date, which no setting can be
        return str(value)


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
        hint = nearest(section, SECTIONS) or nearest(setting.key, list(FIELDS))
        problem = f"unknown section {section}{hint}; sections: {', '.join(SECTIONS)}"
    elif len(setting.path) == 1:
        problem = f"{section} is a section: write [{section}], then one line for each of its keys"
    else:
        keys = ", ".join(key.partition(".")[2] for key in FIELDS if key.startswith(f"{section}."))
        problem = f"unknown key {setting.key}{nearest(setting.key, list(FIELDS))}; keys of {section}: {keys}"
    return ConfigError(problem, key=setting.key, where=setting.where)


def _build(values: Mapping[str, object]) -> Settings:
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    built: dict[str, Any] = {
        field.name: typing.cast("type[Section]", field.type)(**sections[field.name])
        for field in msgspec.structs.fields(Settings)
        if field.name in sections
    }
    return Settings(**built)


def _hide_password(settings: Settings, origins: dict[str, str]) -> Settings:
    """Move a password inside ``broker.url`` to ``broker.password``, so that the URL may be shown."""
    try:
        url, password = without_password(settings.broker.url)
    except ValueError as error:
        raise ConfigError("broker.url is not a URL", key="broker.url", where=origins["broker.url"]) from error
    if not password:
        return settings
    broker = msgspec.structs.replace(settings.broker, url=url)
    if not broker.password:
        broker = msgspec.structs.replace(broker, password=password)
        origins[PASSWORD] = origins["broker.url"]
    return msgspec.structs.replace(settings, broker=broker)


def _check_recipient(settings: Settings, origins: Mapping[str, str], named: Collection[str]) -> None:
    """A password that the user gave goes only to an address that the user named, too.

    The file of a run may have come from anywhere, and name a server that waits for it.
    named: keys of all settings but those of the run's file.  Raises ConfigError.
    """
    if settings.broker.url and PASSWORD in named and "broker.url" not in named:
        raise ConfigError(
            f"broker.url = {to_toml(settings.broker.url)} is named by that file alone, so the password "
            f"({origins[PASSWORD]}) is not sent there; if it is your broker, name it yourself: --broker URL, or with "
            "`run` --set broker.url=URL",
            key="broker.url",
            where=origins["broker.url"],
        )


def _violated(violation: Violation, settings: Settings, origins: Mapping[str, str]) -> ConfigError:
    """The error for a broken rule. Of the settings involved, it blames the one that was set last."""
    first, *others = violation.keys
    given = [f"{_assigned(settings, key)} ({origins[key]})" for key in others]
    message = "; ".join([f"{_assigned(settings, first)} {violation.problem}", *given])
    blamed = next(key for key in reversed(list(origins)) if key in violation.keys)
    return ConfigError(message, key=first, where=origins[blamed])


def _assigned(settings: Settings, key: str) -> str:
    return key if key in SECRET else f"{key} = {to_toml(value_of(settings, key))}"


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


def render(resolved: Resolved) -> str:
    """The configuration as TOML, each line with where its value came from. Secrets are left out."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key in (key for key in FIELDS if key.startswith(f"{section}.")):
            value = value_of(resolved.settings, key)
            origin = resolved.origins[key]
            if key in FROM_ENVIRONMENT and value:
                value, origin = "", f"{origin}; set, not shown"
            if value == "auto" and key == "pipeline.dispatch":
                origin = f"{origin}; {chosen_dispatch(resolved.settings)} here"
            lines.append(f"{key.partition('.')[2]} = {to_toml(value)}  # {origin}")
    return "\n".join(lines) + "\n"
