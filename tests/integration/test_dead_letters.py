"""``inspect``, ``retry`` and ``drop`` as commands, on the broker of a run that is over."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.test_cli import cli
from transport.broker import keys
from transport.broker.base import Broker, Commit, Entry, GroupWrite
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import Column, GroupId, RunName

REWARDS = keys.tasks("reward")
RUN = "runs/tiny"


async def bury(broker: Broker, group: str) -> None:
    await broker.enqueue(REWARDS, Entry(fields={"task": "reward", "unit": f"{group}/0", "group": group}))
    (delivery,) = await broker.claim(REWARDS, "score-0.1", count=1)
    await broker.reject(delivery, f"the reward of {group} raised")


async def make_run(directory: Path) -> None:
    """A run's directory whose broker holds three dead letters; only the rows of group 0/1 are still there."""
    run_dir = directory / RUN
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(cli("run", "--preset", "tiny", "--dry-run", cwd=directory).stdout)
    server = EmbeddedServer(run_dir / "broker", appendfsync="always")
    await server.start()
    broker = await connect(BrokerSettings(), RunName("tiny"), url=server.url, password=server.password)
    group = GroupWrite(group_id=GroupId("0/1"), size=1, columns={Column.PROMPT_IDS: b"\0\0\0\0"})
    await broker.commit(Commit(groups=[group]))
    for name in ("0/0", "0/1", "0/2"):
        await bury(broker, name)
    await broker.close()
    await server.stop()


async def test_dead_letters_are_shown_retried_and_dropped(tmp_path: Path):
    await make_run(tmp_path)
    shown = cli("inspect", RUN, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    ids = re.findall(r"dead (\d+-\d+) from tasks:reward: the reward of 0/\d raised", shown.stdout)
    assert len(ids) == 3

    retried = cli("retry", RUN, ids[1], cwd=tmp_path)
    assert (retried.returncode, retried.stdout) == (0, f"retried {ids[1]} of tasks:reward 0/1/0\n")
    refused = cli("retry", RUN, ids[0], "1-1", cwd=tmp_path)
    assert refused.returncode == 1
    assert f"kept {ids[0]} of tasks:reward 0/0/0: its group has ended" in refused.stdout
    assert "1-1: there is no such dead letter" in refused.stdout

    dropped = cli("drop", RUN, "--all", cwd=tmp_path)
    assert (dropped.returncode, len(dropped.stdout.splitlines())) == (0, 2)
    assert cli("drop", RUN, "--all", cwd=tmp_path).stdout == "there are no dead letters\n"
    asked = cli("pause", RUN, cwd=tmp_path)
    assert (asked.returncode, asked.stdout) == (1, "")
    assert f"{RUN} is not running: not begun" in asked.stderr
    shown = cli("inspect", RUN, "--follow", cwd=tmp_path).stdout
    assert re.search(r"tasks:reward\s+\d+-\d+\s+\d+\.\d s\s+0/1/0", shown), "the retried unit waits for a worker"
    assert "raised" not in shown
    assert shown.endswith("no orchestrator is alive\n")


def test_what_to_take_must_be_said(tmp_path: Path):
    for arguments in (("retry", RUN), ("drop", RUN, "--all", "1-1"), ("retry", RUN, "all"), ("drop", RUN, "1-1")):
        done = cli(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(r"name the dead letters|is no id of a dead letter|holds no run", done.stderr)
        assert len(done.stderr.splitlines()) == 1
