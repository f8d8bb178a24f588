"""What a reward that executes hostile code reaches: with the jail nothing, without it not the worker's environment."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from orchestrator.config.load import resolve
from tests.fakes.unscored_group import settings_for
from transport.process.programs import bare_python
from workers.errors import RewardSetupError
from workers.scoring import jail
from workers.scoring.jail import BUBBLEWRAP, clean_environment, hide_from_children
from workers.scoring.reward_pool import COMMAND, RewardPool
from workers.scoring.rewards import Reward, RewardSpec, reward_spec

needs_bubblewrap = pytest.mark.skipif(not shutil.which(BUBBLEWRAP), reason="no bubblewrap here")
SECRET = "hush-hush-hush"


@pytest.fixture
def reward_dir(tmp_path: Path) -> Path:
    """A user's directory: a reward, and a run beside it."""
    shutil.copy(Path(__file__).parents[1] / "fakes" / "rewards.py", tmp_path / "mine.py")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "broker.password").write_text(SECRET)
    return tmp_path


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def spec_of(directory: Path, reward: str, *, executes: bool = False) -> RewardSpec:
    spec = reward_spec(settings_for(f"mine:{reward}"), f"mine:{reward}", str(directory))
    return msgspec.structs.replace(spec, executes_answers=executes)


async def attempts(made: RewardPool, entry: dict[str, object]) -> dict[str, float]:
    await made.start()
    try:
        return (await made.score("", "", json.dumps(entry).encode())).components
    finally:
        await made.close()


def targets(directory: Path, port: int) -> dict[str, object]:
    elsewhere = directory.with_name(directory.name + "-elsewhere")
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "file").write_text(SECRET)
    run = directory / "runs" / "x" / "broker.password"
    program = Path("/proc/self/cmdline").read_text()
    return {"secret": SECRET, "port": port, "program": program, "file": str(elsewhere / "file"), "run": str(run)}


@needs_bubblewrap
@pytest.mark.parametrize("executes", [False, True])
async def test_nothing_leads_out_of_the_jail(
    reward_dir: Path, listener: int, monkeypatch: pytest.MonkeyPatch, executes: bool
) -> None:
    monkeypatch.setenv("STREAMRL_BROKER_PASSWORD", SECRET)
    made = RewardPool(
        spec_of(reward_dir, "escapes", executes=executes),
        timeout_s=30.0,
        processes=1,
        hidden=[reward_dir / "runs"],
        environment=["STREAMRL_BROKER_PASSWORD"],  # named by mistake
    )
    succeeded = await attempts(made, targets(reward_dir, listener))
    assert len(succeeded) == 14
    root_is_not_limited = {"processes"} if os.getuid() == 0 else set[str]()  # by Linux; they end with the time limit
    assert {name for name, value in succeeded.items() if value} <= root_is_not_limited
    assert made.jailed


def _attempts_without_jail(directory: Path, port: int, found: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    """As the worker does it, which keeps the secret in its environment."""
    os.environ["STREAMRL_BROKER_PASSWORD"] = SECRET
    hide_from_children()
    made = RewardPool(spec_of(directory, "escapes"), timeout_s=30.0, processes=1, jailed=False)
    found.put(asyncio.run(attempts(made, targets(directory, port))))


def test_without_a_jail_the_environment_and_the_limits_still_hold(
    reward_dir: Path, listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_BROKER_PASSWORD", SECRET)  # so that it is in what /proc shows of the child
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    worker = context.Process(target=_attempts_without_jail, args=(reward_dir, listener, found))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    succeeded = found.get()
    held = ("environment", "environment of others", "core dumps", "memory", "namespaces")
    assert [name for name in held if succeeded[name]] == []
    reached = ("network", "read", "processes of others")
    assert [succeeded[name] for name in reached] == [1.0] * 3, "or the docs say too little"


async def test_a_reward_that_executes_answers_is_refused_without_the_jail(
    reward_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail, "BUBBLEWRAP", "no-such-bwrap")
    executing = RewardPool(spec_of(reward_dir, "length", executes=True), timeout_s=5.0)
    with pytest.raises(RewardSetupError, match=r"executes what a model wrote.*apt-get install bubblewrap"):
        await executing.start()
    reading = RewardPool(spec_of(reward_dir, "length"), timeout_s=5.0)
    await reading.start()
    await reading.close()
    assert not reading.jailed


@needs_bubblewrap
async def test_a_jail_that_cannot_be_made_is_told_with_bubblewraps_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a default container: bubblewrap is there, user namespaces are not."""
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(jail, "BUBBLEWRAP", str(refusing))
    assert "No permissions to create new namespace (it needs unprivileged user namespaces" in await jail.Jail().why_not(
        COMMAND, os.environ
    )


@needs_bubblewrap
@pytest.mark.parametrize(("executes", "told"), [(True, 0.0), (False, 1.0)])
async def test_an_answer_that_is_executed_leaves_nothing_to_the_next(
    reward_dir: Path, executes: bool, told: float
) -> None:
    made = RewardPool(spec_of(reward_dir, "remembers", executes=executes), timeout_s=5.0, processes=1)
    await made.start()
    try:
        await made.score("", "first", b"{}")
        assert await made.score("", "second", b"{}") == Reward(value=told)
    finally:
        await made.close()


def test_no_secret_of_ours_is_handed_on_by_name() -> None:
    environ = {"PATH": "/bin", "OPENAI_API_KEY": "k", "STREAMRL_SECRET": "s", "OTHER": "o"}
    assert clean_environment(environ, ["OPENAI_API_KEY", "STREAMRL_SECRET"]) == {"PATH": "/bin", "OPENAI_API_KEY": "k"}


# --- what is seen and what can be written -----------------------------------------------------------------------------


async def says_no(made: jail.Jail, code: str) -> str:
    """Why a program of ``code`` does not end well in it, "" if it does."""
    program = bare_python() if made.bare else [sys.executable, "-P", "-c"]
    return await made.why_not([*program, code], clean_environment(os.environ))


@pytest.fixture
def below_tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@needs_bubblewrap
async def test_what_lies_below_tmp_is_seen_in_a_tmp_of_its_own(below_tmp: Path) -> None:
    (below_tmp / "mine.py").write_text("reward = lambda prompt, response, entry: 1.0\n")
    made = jail.Jail(readable=(below_tmp,))
    assert await says_no(made, f"open({str(below_tmp / 'mine.py')!r}).close(); open('/tmp/own', 'w').close()") == ""
    assert "Read-only" in await says_no(made, f"open({str(below_tmp / 'planted')!r}, 'w')")


@needs_bubblewrap
@pytest.mark.parametrize("directory", ["/", "/etc", "/dev"])
async def test_memory_of_the_machine_cannot_be_filled_through_the_jails_own_directories(directory: str) -> None:
    assert "Read-only" in await says_no(jail.Jail(), f"open({directory!r} + '/planted', 'w')")


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="only root may write them anywhere")
@pytest.mark.parametrize("name", ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness"])
async def test_root_outside_is_not_root_to_the_kernels_settings(name: str) -> None:
    assert "Read-only" in await says_no(jail.Jail(), f"same = open({name!r}).read(); open({name!r}, 'w').write(same)")


@needs_bubblewrap
@pytest.mark.parametrize("directory", ["/tmp", "/dev/shm"])
async def test_what_can_be_written_has_a_size(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "TEMPORARY_BYTES", 1024**2)
    write = f"open({directory!r} + '/planted', 'wb').write(b'x' * {{}})"
    assert await says_no(jail.Jail(), write.format(1000) + "; import multiprocessing; multiprocessing.Lock()") == ""
    assert "No space left" in await says_no(jail.Jail(), write.format(2 * 1024**2))


@needs_bubblewrap
async def test_what_is_hidden_is_hidden_below_every_bind_and_what_is_named_in_it_is_seen(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    rewards, run = runs / "rewards", runs / "x"
    link = tmp_path / "link"
    for directory in (rewards, run):
        directory.mkdir(parents=True)
        (directory / "file").touch()
    link.symlink_to(runs)
    see, hide = f"open({str(rewards / 'file')!r})", f"open({str(run / 'file')!r})"
    for readable in ((tmp_path, rewards), (rewards,), (rewards, tmp_path, link)):
        made = jail.Jail(readable=readable, hidden=(runs,))
        assert await says_no(made, see) == ""
        assert "No such file" in await says_no(made, hide)
    linked = jail.Jail(readable=(link,), hidden=(run,))
    assert await says_no(linked, f"open({str(link / 'rewards' / 'file')!r})") == ""
    assert "No such file" in await says_no(linked, f"open({str(link / 'x' / 'file')!r})")
    assert "Read-only" in await says_no(linked, f"open({str(link / 'x' / 'planted')!r}, 'w')")


@needs_bubblewrap
async def test_what_lies_beside_the_interpreter_is_not_seen() -> None:
    with tempfile.TemporaryDirectory(dir=sys.prefix) as run, tempfile.NamedTemporaryFile(dir=run) as secret:
        for made in (jail.Jail(), jail.Jail(bare=True)):
            assert "No such file" in await says_no(made, f"open({secret.name!r})")


@needs_bubblewrap
async def test_data_is_not_seen_unless_it_is_named(reward_dir: Path) -> None:
    """It has the expected answers."""
    data = reward_dir / "data.jsonl"
    data.write_text(SECRET)
    settings = resolve(None, [], ["data.source=jsonl", f"data.path={data}"], {}).settings
    empty = f"assert not open({str(data)!r}).read()"
    for readable, seen in (((reward_dir,), False), ((reward_dir, data), True)):
        made = jail.Jail(readable=readable, hidden=jail.private_paths(settings))
        assert ("AssertionError" in await says_no(made, empty)) == seen


def test_what_a_setting_names_and_is_not_there_is_refused_by_its_name() -> None:
    with pytest.raises(RewardSetupError, match=r"scoring\.readable: there is no file or directory /no/such on "):
        jail.jail_of("", ["/no/such"], "scoring.readable", hidden=(), error=RewardSetupError)


@needs_bubblewrap
async def test_the_secret_of_the_user_is_hidden(reward_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(reward_dir))
    own = reward_dir / ".local" / "state" / "streamrl"
    own.mkdir(parents=True)
    (own / "secret").write_text(SECRET)
    made = RewardPool(spec_of(reward_dir, "escapes"), timeout_s=30.0, processes=1)
    succeeded = await attempts(made, {**targets(reward_dir, 1), "run": str(own / "secret")})
    assert succeeded["read the run"] == 0.0


@needs_bubblewrap
async def test_packages_that_were_installed_into_a_directory_are_seen(tmp_path: Path) -> None:
    """As pip install --user and --target do."""
    root, site = Path(__file__).parents[2], tmp_path / "site"
    for package in ("workers", "transport"):
        shutil.copytree(root / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "streamrl-1.dist-info").mkdir()
    (site / "only_there.py").touch()
    program = (
        "import asyncio, os, sys; from workers.scoring.jail import Jail; assert __import__('only_there')\n"
        "argv = [sys.executable, '-P', '-c', 'import only_there']\n"
        "print(asyncio.run(Jail().why_not(argv, dict(os.environ))) or 'seen')"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", program),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert said.decode().strip() == "seen"


@needs_bubblewrap
async def test_a_jail_in_which_the_reward_does_not_start_is_none_and_says_so() -> None:
    told = await says_no(jail.Jail(), "import no_such_library")
    assert told.startswith("the reward's process does not start in it: ModuleNotFoundError")
    assert "namespaces" not in told
    assert await jail.Jail().why_not(COMMAND, clean_environment(os.environ) | {"PYTHONPATH": ":".join(sys.path)}) == ""


async def test_an_evaluation_hides_itself_from_its_rewards() -> None:
    program = (
        "import ctypes, workers.commands.evaluate as evaluate\n"
        "evaluate.evaluate_run = lambda *_, **__: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE\n"
        "from workers.__main__ import app\n"
        "app(['evaluate', '--run-dir', 'x'])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert said.decode().strip() == "0"
