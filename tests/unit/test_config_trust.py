"""A configuration file that others can have written names no program without its user's word."""

from __future__ import annotations

import grp
import os
import pwd
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.config.load import resolve
from orchestrator.config.schema import ENTRY, FIELDS
from orchestrator.config.trust import FUNCTIONS, JAILS, PROGRAMS, programs_in
from orchestrator.errors import ConfigError
from transport.process import programs
from transport.process.files import other_writers
from transport.process.programs import quoted


def status(uid: int, gid: int, mode: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """me (1000) with a group of that name, in which nobody else is; staff (50), with two."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    names = {0: "root", 1000: "me", 1001: "eve", 1002: "bob"}
    groups = {1000: ("me", ["me"]), 50: ("staff", ["me", "eve"]), 1002: ("bob", ["eve"])}
    first = {0: 0, 1000: 1000, 1001: 50, 1002: 1002}
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=names[uid], pw_gid=first[uid]))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=groups[gid][0], gr_mem=groups[gid][1]))


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("of", "words"),
    [
        ((1000, 1000, 0o644), ""),
        ((0, 0, 0o664), ""),
        ((1000, 1000, 0o664), ""),  # umask 002 with a group of one's own
        ((0, 50, 0o644), ""),
        ((1001, 50, 0o600), "belongs to user eve (1001)"),
        ((4242, 50, 0o600), "belongs to user 4242"),
        ((1000, 1000, 0o646), "can be written by everybody"),
        ((0, 0, 0o666), "can be written by everybody"),
        ((1000, 50, 0o664), "can be written by group staff (50)"),
        ((0, 50, 0o664), "can be written by group staff (50)"),
        ((1000, 1002, 0o664), "can be written by group bob (1002)"),
        ((1000, 77, 0o664), "can be written by group 77"),
    ],
)
def test_who_else_can_have_written_a_file(of: tuple[int, int, int], words: str):
    assert other_writers(status(*of)) == words


NAMED = """
[scoring]
reward = "mine:score"
jail = "off"
[data.mix.a]
environment = "mine:Game"
"""
HARMLESS = """
[scoring]
reward = ""
jail = "auto"
reward_path = ""
[environment]
name = "calculator"
[data.mix.a]
loss = "ppo_clip"
[trainer]
lr = 1e-5
"""


def written(path: Path, text: str, mode: int) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_others_that_names_programs_needs_a_word(tmp_path: Path):
    theirs = written(tmp_path / "theirs.toml", NAMED, 0o666)
    asked: list[str] = []
    with pytest.raises(ConfigError) as refused:
        resolve("tiny", [theirs], [], {}, trusts=lambda question: bool(asked.append(question)))
    sets = "can be written by everybody, and starts or imports programs: it sets scoring.reward, scoring.jail, "
    assert str(refused.value) == (
        f"{theirs}: {sets}data.mix.a.environment. Read it; then pass --trust, or --config a copy of yours"
    )
    assert asked == [f"{theirs} {sets}data.mix.a.environment"]
    settings = resolve("tiny", [theirs], ["data.mix={}"], {}, trusts=lambda _: True).settings
    assert settings.scoring.reward == "mine:score"


@pytest.mark.parametrize(("text", "mode"), [(NAMED, 0o600), (HARMLESS, 0o666)], ids=["own", "harmless"])
def test_other_files_are_read_without_a_question(tmp_path: Path, text: str, mode: int):
    resolve("tiny", [written(tmp_path / "one.toml", text, mode)], ["data.mix={}"], {}, trusts=pytest.fail)


def test_each_setting_that_leads_to_a_program_is_asked_about():
    for key in PROGRAMS:
        assert [*programs_in(key, ["x"] if FIELDS[key].type is not str else "x")] == [key]
        assert not [*programs_in(key, type(FIELDS[key].default)() if isinstance(FIELDS[key].default, str) else [])]
    assert FIELDS.keys() >= PROGRAMS | JAILS
    for key in FUNCTIONS:
        named = key.replace(ENTRY, "a")
        assert [*programs_in(named, "mine:own", key)] == [named]
    assert {"scoring.reward", "environment.name", "algorithm.loss", "data.mix.NAME.loss"} <= FUNCTIONS
    lists = {key for key, field in FIELDS.items() if field.type == list[str]}
    assert lists - PROGRAMS == {"trainer.lora.targets"}  # names of a model's matrices


def test_a_question_shows_no_control_characters_of_the_file(tmp_path: Path):
    text = '[data.mix."a\\u001b[2K\\r"]\nloss = "mine:loss"\n'
    asked: list[str] = []
    with pytest.raises(ConfigError):
        resolve("tiny", [written(tmp_path / "a.toml", text, 0o666)], [], {}, trusts=lambda q: bool(asked.append(q)))
    assert len(asked) == 1
    assert asked[0].isprintable()


@pytest.mark.parametrize("char", ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u2028"], ids=ascii)
@pytest.mark.parametrize(
    "assignment",
    [
        "launcher.place=a{}b",
        "data.path=a{}b",
        "run.dir=a{}b",
        'launcher.options=["--account=mine", "a{}b"]',
        'eval.sets.a.path="a{}b"',
        'data.mix.a.path="a{}b"',
    ],
)
def test_no_control_character_gets_into_a_script(tmp_path: Path, assignment: str, char: str):
    key, _, value = assignment.partition("=")
    escaped = f"\\u{ord(char):04x}"
    document = f"{key} = {value if value[0] in '[' + chr(34) else chr(34) + value + chr(34)}".format(escaped)
    with pytest.raises(ConfigError, match=f"{re.escape(key)} has the control character"):
        resolve("tiny", [written(tmp_path / "a.toml", document, 0o600)], [], {})


def test_a_text_for_the_model_has_any_lines():
    settings = resolve(
        "tiny", [], ['generation.stop=["\\n\\n"]', "data.system=a\nb", "data.params.x=a\nb"], {}
    ).settings
    assert settings.generation.stop == ["\n\n"]
    assert settings.data.system == settings.data.params["x"] == "a\nb"


@pytest.mark.parametrize(
    "word", ["", "a b", "it's", "$(id)", "a\nb", "a\n#SBATCH --x", "\x1b[2J'\\", "\u2028 \x85é", "日本"]
)
def test_a_quoted_word_is_one_line_and_itself_again(word: str):
    line = quoted(word, "next")
    assert len(line.splitlines()) == 1
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], env={"LC_ALL": "C.UTF-8"}, capture_output=True, check=True
    )
    assert printed.stdout.decode().split("\0") == [word, "next", ""]


def test_only_one_function_quotes_for_shells():
    root = Path(programs.__file__).parents[2]
    split_only = {"workers/__main__.py", "orchestrator/launch/processes.py"}  # a list within one argument, and no shell
    using = {
        str(path.relative_to(root))
        for folder in ("orchestrator", "workers", "transport", "ranker")
        for path in (root / folder).rglob("*.py")
        if "shlex" in path.read_text()
    }
    assert using == {"transport/process/programs.py", *split_only}
