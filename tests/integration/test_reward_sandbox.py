"""The child process that runs a reward: what it does harms only itself, and it outlives nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.fakes.unscored_group import settings_for
from workers.errors import RewardError
from workers.scoring.rewards import Reward, reward_spec
from workers.scoring.sandbox import RewardSandbox


@asynccontextmanager
async def sandbox(
    reward: str = "as_told", *, timeout_s: float = 5.0, processes: int = 1
) -> AsyncIterator[RewardSandbox]:
    name = f"tests.fakes.rewards:{reward}"
    made = RewardSandbox(reward_spec(settings_for(name), name), timeout_s=timeout_s, processes=processes)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def told(do: str = "") -> bytes:
    return json.dumps({"do": do}).encode()


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("leak", "MemoryError"),
        ("exit", "SystemExit"),
        ("exit hard", "ended with 3"),
        ("die", "ended with -9"),
        ("hang", r"longer than 0\.5 s"),
    ],
)
async def test_a_reward_harms_only_itself(do: str, reason: str) -> None:
    async with sandbox(timeout_s=0.5) as rewards:
        with pytest.raises(RewardError, match=reason):
            await rewards.score("", "x", told(do))
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_what_a_reward_prints_or_reads_is_not_the_conversation() -> None:
    async with sandbox() as rewards:
        assert await rewards.score("", "x", told("write")) == Reward(value=1.0)
        assert await rewards.score("", "x", told("read")) == Reward(value=0.0)


async def test_a_killed_child_is_replaced() -> None:
    async with sandbox() as rewards:
        (pid,) = rewards.pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="ended with -9"):
            await rewards.score("", "x", told())
        assert await rewards.score("", "x", told()) == Reward(value=1.0)
        assert rewards.pids() != [pid]


def start_a_reward_and_die(hanging: bool, pids: multiprocessing.SimpleQueue[int]) -> None:
    async def work() -> None:
        async with sandbox(timeout_s=2.0) as rewards:
            pids.put(rewards.pids()[0])
            if hanging:
                asyncio.create_task(rewards.score("", "x", told("hang")))  # noqa: RUF006 the process ends first
                await asyncio.sleep(0.2)  # the child has begun to hang, or will
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


@pytest.mark.parametrize("hanging", [False, True], ids=["idle", "hanging"])
def test_the_child_of_a_killed_worker_ends_by_itself(hanging: bool) -> None:
    context = multiprocessing.get_context("spawn")
    pids = context.SimpleQueue()
    worker = context.Process(target=start_a_reward_and_die, args=(hanging, pids))
    worker.start()
    pid = pids.get()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_cancelled_score_leaves_no_answer_for_the_next() -> None:
    async with sandbox(timeout_s=30.0) as rewards:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await rewards.score("", "x", told("hang"))
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_a_hanging_reward_does_not_stop_the_others() -> None:
    async with sandbox(timeout_s=3.0, processes=2) as rewards:
        hanging = asyncio.create_task(rewards.score("", "x", told("hang")))
        for _ in range(50):
            assert await rewards.score("", "x", told()) == Reward(value=1.0)
        assert not hanging.done()
        with pytest.raises(RewardError, match="longer than"):
            await hanging


async def test_a_reward_does_not_see_the_brokers_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_BROKER_PASSWORD", "hush")
    async with sandbox("secrets") as rewards:
        assert (await rewards.score("", "x", told())).value == 0.0


async def test_an_own_verifier_scores_in_its_child() -> None:
    rewards = RewardSandbox(reward_spec(settings_for(), ""), timeout_s=20.0, processes=1)
    await rewards.start()
    try:
        for answer, value in (("\\frac{1}{2}", 1.0), ("\\frac{2}{4}", 1.0), ("0.5", 1.0), ("1/3", 0.1)):
            assert (await rewards.score("", f"Answer: {answer}", b'{"answer": "\\\\frac{1}{2}"}')).value == value, (
                answer
            )
    finally:
        await rewards.close()
