"""One supervisor a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config.run_directory import RunDir, find_run, journal_of, newest_name, next_free_name
from orchestrator.errors import ConfigError
from orchestrator.observability.report.record import read_run
from transport.errors import DirectoryError, ForeignError, RunExistsError
from transport.process import files


def test_a_live_run_keeps_others_out_and_says_who_it_is(tmp_path: Path):
    first, second = RunDir(tmp_path / "a"), RunDir(tmp_path / "a")
    first.create()
    first.lock()
    with pytest.raises(RunExistsError, match=rf"live \(process {os.getpid()}\)"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_only_its_user_enters_the_directory_of_a_run_and_what_lies_above_stays_as_it_is(tmp_path: Path):
    RunDir(tmp_path / "runs" / "a").create()
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o777 & ~_umask()
    (tmp_path / "runs" / "a").chmod(0o750)  # its owner lets others in
    RunDir(tmp_path / "runs" / "a").create()
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o750


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    run = RunDir(tmp_path / "a")
    run.create()
    (run.path / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        run.lock()
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_the_run_of_another_user_is_refused_with_both_names(tmp_path: Path):
    run = RunDir(tmp_path / "a")
    run.claim("", resume=False)
    run.unlock()
    os.chown(run.config, 12345, 12345)
    with pytest.raises(ForeignError, match=r"config\.toml belongs to user 12345, you are user"):
        find_run(run.path)
    os.chown(run.path, 12345, 12345)
    for use in (lambda: find_run(run.path), lambda: run.claim("", resume=True)):
        with pytest.raises(ForeignError, match=r"a belongs to user 12345, you are user .*let its owner do this, or"):
            use()


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")])
def test_a_configuration_that_is_no_plain_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / "config.toml")
    with pytest.raises(ForeignError, match=r"config\.toml is "):
        find_run(tmp_path)


MADE_ODD: list[Callable[[Path, Path], None]] = [
    lambda path, _: os.mkfifo(path),
    lambda path, target: path.symlink_to(target),
]


@pytest.mark.parametrize("make", MADE_ODD)
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "samples.jsonl", "lock", "logs", "checkpoints", "logs/trainer.log", "journal/lock", "journal/x"],
)
def test_nothing_of_a_run_is_opened_through_a_link_or_a_pipe(
    tmp_path: Path, name: str, make: Callable[[Path, Path], None]
):
    """As in a copy of another's run. A pipe would hang whoever opens it, a link has a run write elsewhere."""
    run, target = RunDir(tmp_path / "a"), tmp_path / "mine"
    run.claim("", resume=False)
    run.unlock()
    run.journal.mkdir()
    target.write_text("precious")
    if name == "logs":
        run.logs.rmdir()
    (run.path / name).unlink(missing_ok=True)
    make(run.path / name, target)
    uses = (
        lambda: run.claim("changed", resume=True),
        lambda: find_run(run.path),
        lambda: journal_of(run.path),
        lambda: read_run(run.path),
    )
    for use in uses:
        with pytest.raises((ForeignError, DirectoryError), match=f"{run.path / name}"):
            use()
    assert (run.config.read_text(), target.read_text()) == ("", "precious")


def test_what_a_live_run_removes_meanwhile_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDir(tmp_path / "a")
    run.create()
    (run.logs / "x").touch()
    inside = files._inside
    monkeypatch.setattr(files, "_inside", lambda path: [*inside(path), path / "gone"])
    run.check_own()


def test_a_password_goes_to_no_address_that_only_the_run_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.toml").write_text('[broker]\nurl = "redis://elsewhere:6379"\n')
    assert find_run(tmp_path)[1].broker.url == "redis://elsewhere:6379"  # there is no password to be had
    monkeypatch.setenv("STREAMRL_BROKER_PASSWORD", "hush")
    with pytest.raises(ConfigError, match=r'"redis://elsewhere:6379" is named by that file alone') as caught:
        find_run(tmp_path)
    assert "environment STREAMRL_BROKER_PASSWORD" in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "--broker URL" in str(caught.value)
    _, settings = find_run(tmp_path, "redis://mine:6379")
    assert (settings.broker.url, settings.broker.password) == ("redis://mine:6379", "hush")


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "a").write_text("")
    with pytest.raises(RunExistsError, match="is a file"):
        RunDir(tmp_path / "a").claim("", resume=False)


def test_a_run_that_did_not_begin_leaves_what_was_there_before_it(tmp_path: Path):
    for name in ("new", "mine"):
        run = RunDir(tmp_path / name)
        if name == "mine":
            run.path.mkdir()
            (run.path / "notes.txt").write_text("my own")
        run.claim("", resume=False)
        run.journal.mkdir()
        (run.journal / "epoch-1.log").touch()
        run.discard()
        run.unlock()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["mine", "mine/notes.txt"]


def test_a_name_that_is_taken_is_numbered(tmp_path: Path):
    assert next_free_name(tmp_path, "a") == "a"
    assert newest_name(tmp_path, "a") == "a"
    for expected in ("a", "a-2", "a-3"):
        name = next_free_name(tmp_path, "a")
        assert name == expected
        RunDir(tmp_path / name).create()
        RunDir(tmp_path / name).config.write_text("")
    assert newest_name(tmp_path, "a") == "a-3"


def test_a_directory_that_is_removed_or_moved_while_it_is_held_is_named(tmp_path: Path):
    run = RunDir(tmp_path / "a")
    run.check_there()  # nothing was claimed
    run.claim("", resume=False)
    run.check_there()
    run.path.rename(tmp_path / "b")
    (run.path / "checkpoints").mkdir(parents=True)  # by a trainer that has not noticed
    with pytest.raises(DirectoryError, match=r"/a, was removed or moved away while the run was live\. If it was moved"):
        run.check_there()
    assert not run.path.exists()  # so that it can be moved back
    (tmp_path / "b").rename(run.path)
    run.check_there()
    run.config.unlink()
    (run.path / "model").mkdir()
    (run.path / "model" / "weights").touch()
    with pytest.raises(DirectoryError, match=r"what its processes wrote after that is there"):
        run.check_there()
    assert (run.path / "model" / "weights").exists()
    run.unlock()
