"""A file is replaced whole or not at all, and a directory that cannot be written says why and what to do."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from orchestrator.config.load import resolve
from orchestrator.config.run_directory import RunDir
from orchestrator.journal import Journal, recover
from ranker.history import LengthHistory
from ranker.model import StoredRanker, read_ranker, write_ranker
from ranker.protocol import RankerFileError
from transport.errors import DirectoryError, RunExistsError
from transport.process.files import REMAINS_S, is_no_room, remove_remains, replace, replacing, writing
from workers.__main__ import EXIT_FATAL, EXIT_FULL, exit_code
from workers.errors import CheckpointError, NoCheckpointRoomError

OLD, NEW = b"old" * 1000, b"new" * 100_000

HISTORY = LengthHistory(bias=0.0, bias_variance=1.0, drift=0.1, noise=1.0, prior_scale=1.0, groups=1, prompts={})
KILLED = """
import os, signal, sys
from pathlib import Path
from transport.process.files import replace

step, number = sys.argv[2], int(sys.argv[3])
real, calls = getattr(os, step), []

def dying(*arguments):
    calls.append(arguments)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)

setattr(os, step, dying)
replace(Path(sys.argv[1]), b"new" * 100_000)
"""


@pytest.mark.parametrize(("step", "number", "seen"), [("fsync", 1, OLD), ("replace", 1, OLD), ("fsync", 2, NEW)])
def test_a_kill_before_each_step_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, step: str, number: int, seen: bytes
):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), step, str(number)], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == seen
    replace(path, NEW)
    assert path.read_bytes() == NEW


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of this process may grow beyond ``room`` bytes: a write fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with full_disk(5000), pytest.raises(OSError, match="File too large"):
        replace(path, NEW)
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_resume_on_a_full_disk_keeps_the_configuration(tmp_path: Path):
    rundir = RunDir(tmp_path / "runs" / "mine")
    rundir.claim("[run]\n", resume=False)
    rundir.unlock()
    with full_disk(10), pytest.raises(DirectoryError):
        rundir.claim("[run]\nseed = 1\n", resume=True)
    assert rundir.config.read_text() == "[run]\n"
    assert resolve(None, [rundir.config], [], {}).settings.run.seed == 0


def test_a_snapshot_and_a_ranker_on_a_full_disk_keep_what_was_there(tmp_path: Path):
    journal, _ = Journal.open(tmp_path / "journal")
    journal.snapshot(b"state", 0)
    ranker = StoredRanker(history=HISTORY)
    write_ranker(tmp_path / "ranker.bin", ranker)
    with full_disk(3):
        with pytest.raises(DirectoryError):
            journal.snapshot(b"another", 0)
        with pytest.raises(RankerFileError):
            write_ranker(tmp_path / "ranker.bin", StoredRanker(history=msgspec.structs.replace(HISTORY, groups=2)))
    assert recover(tmp_path / "journal").snapshot == b"state"
    assert read_ranker(tmp_path / "ranker.bin") == ranker
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["snapshot-000000000000.bin"]


def test_a_link_is_replaced_and_what_it_names_is_not_touched(tmp_path: Path):
    target = tmp_path / "mine"
    target.write_bytes(OLD)
    (tmp_path / "file").symlink_to(target)
    replace(tmp_path / "file", "new")
    assert target.read_bytes() == OLD
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("name", [".", "here", "/"])
def test_a_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError):
        replace(Path(name), "new")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_only_the_owner_reads_what_is_private_from_its_first_byte_on(tmp_path: Path):
    with replacing(tmp_path / "file", mode=0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_remains_of_a_kill_are_removed_when_nobody_can_be_writing_them_any_more(tmp_path: Path):
    old, young, other = (tmp_path / name for name in (".file.0.tmp", ".file.1.tmp", "file.tmp"))
    for path in (old, young, other):
        path.touch()
    long_ago = old.stat().st_mtime - REMAINS_S - 1
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    remove_remains(tmp_path)
    assert sorted(tmp_path.iterdir()) == [young, other]


def test_a_full_disk_asks_for_space(tmp_path: Path):
    with pytest.raises(DirectoryError, match="No space left on device; free some space"), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "log"))


def test_a_run_directory_below_a_file_is_named(tmp_path: Path):
    (tmp_path / "runs").touch()
    with pytest.raises(RunExistsError, match="runs is a file; choose another --name or --dir"):
        RunDir(tmp_path / "runs" / "mine").claim("", resume=False)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_a_full_disk_is_known_whatever_library_says_so(error: Exception, full: bool):
    assert is_no_room(error) is full
    wrapped = ValueError("a library's own")
    wrapped.__cause__ = error
    assert is_no_room(wrapped) is full


def test_a_checkpoint_without_room_has_the_exit_code_of_a_full_disk():
    assert exit_code(NoCheckpointRoomError(Path("step-4"), 100, "only 1 bytes are free")) == EXIT_FULL
    assert exit_code(CheckpointError(Path("step-4"), 0, "its tensors are not those of this model")) == EXIT_FATAL
