"""The child process that runs a reward: what it does harms only itself, and it outlives nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.fakes.unscored_group import settings_for
from workers.errors import RewardError, RewardSetupError, RewardTimeoutError
from workers.scoring.jail import BUBBLEWRAP
from workers.scoring.reward_pool import RewardChild, RewardPool, right_over_wrong
from workers.scoring.rewards import WRONG, Reward, RewardSpec, Sample, Setup, reward_spec

ROOT = str(Path(__file__).parents[2])
"""Where ``tests.fakes.rewards`` lies."""
JAILED = pytest.mark.parametrize(
    "jailed",
    [
        pytest.param(True, marks=pytest.mark.skipif(not shutil.which(BUBBLEWRAP), reason="no bubblewrap here")),
        False,
    ],
    ids=["jailed", "unjailed"],
)


@asynccontextmanager
async def pool(
    reward: str = "as_told", *, timeout_s: float = 5.0, processes: int = 1, jailed: bool = False, **changes: object
) -> AsyncIterator[RewardPool]:
    name = f"tests.fakes.rewards:{reward}"
    spec = msgspec.structs.replace(reward_spec(settings_for(name), name, ROOT), **changes)
    made = RewardPool(spec, timeout_s=timeout_s, processes=processes, jailed=jailed)
    await made.start()
    assert made.jailed == jailed
    try:
        yield made
    finally:
        await made.close()


def told(do: str = "") -> bytes:
    return json.dumps({"do": do}).encode()


@JAILED
@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("leak", "MemoryError"),
        ("exit", "SystemExit"),
        ("exit hard", "ended with 3"),
        ("die", "ended with -9"),
        ("hang", r"longer than 3 s"),
    ],
)
async def test_a_reward_harms_only_itself(do: str, reason: str, jailed: bool) -> None:
    async with pool(timeout_s=3.0 if do == "hang" else 30.0, jailed=jailed) as rewards:
        with pytest.raises(RewardError, match=reason):
            await rewards.score("", "x", told(do))
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_what_a_reward_prints_or_reads_is_not_the_conversation() -> None:
    async with pool() as rewards:
        assert await rewards.score("", "x", told("write")) == Reward(value=1.0)
        assert await rewards.score("", "x", told("read")) == Reward(value=0.0)


@JAILED
async def test_a_killed_child_is_replaced(jailed: bool) -> None:
    async with pool(timeout_s=60.0, jailed=jailed) as rewards:
        (pid,) = rewards.pids()
        # What it scores never ends: a child that is only waiting may still answer before the signal reaches it.
        scoring = asyncio.create_task(rewards.score("", "x", told("hang")))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="ended with -9"):
            await scoring
        assert await rewards.score("", "x", told()) == Reward(value=1.0)
        assert rewards.pids() != [pid]


def start_a_reward_and_die(hanging: bool, jailed: bool, pids: multiprocessing.SimpleQueue[int]) -> None:
    async def work() -> None:
        async with pool(timeout_s=2.0, jailed=jailed) as rewards:
            pids.put(rewards.pids()[0])
            if hanging:
                asyncio.create_task(rewards.score("", "x", told("hang")))  # noqa: RUF006 the process ends first
                await asyncio.sleep(0.2)  # the child has begun to hang, or will
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


@JAILED
@pytest.mark.parametrize("hanging", [False, True], ids=["idle", "hanging"])
def test_the_child_of_a_killed_worker_ends_by_itself(hanging: bool, jailed: bool) -> None:
    context = multiprocessing.get_context("spawn")
    pids = context.SimpleQueue()
    worker = context.Process(target=start_a_reward_and_die, args=(hanging, jailed, pids))
    worker.start()
    pid = pids.get()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_cancelled_score_leaves_no_answer_for_the_next() -> None:
    async with pool(timeout_s=30.0) as rewards:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await rewards.score("", "x", told("hang"))
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_a_hanging_reward_does_not_stop_the_others() -> None:
    async with pool(timeout_s=5.0, processes=2) as rewards:
        hanging = asyncio.create_task(rewards.score("", "x", told("hang")))
        for _ in range(10):
            assert await rewards.score("", "x", told()) == Reward(value=1.0)
        assert not hanging.done()
        with pytest.raises(RewardError, match="longer than"):
            await hanging


async def test_an_own_verifier_scores_in_its_child() -> None:
    rewards = RewardPool(reward_spec(settings_for(), ""), timeout_s=20.0, processes=1)
    await rewards.start()
    try:
        for answer, value in (("\\frac{1}{2}", 1.0), ("\\frac{2}{4}", 1.0), ("0.5", 1.0), ("1/3", 0.1)):
            assert (await rewards.score("", f"Answer: {answer}", b'{"answer": "\\\\frac{1}{2}"}')).value == value, (
                answer
            )
    finally:
        await rewards.close()


# --- a child that does not start -------------------------------------------------------------------------------------


def written(directory: Path, code: str) -> RewardSpec:
    (directory / "mine.py").write_text(code)
    return reward_spec(settings_for("mine:reward"), "mine:reward", str(directory))


async def test_a_child_that_cannot_be_started_again_is_tried_again_and_ends_no_worker(tmp_path: Path) -> None:
    good = "def reward(prompt, response, entry): return 1.0\n"
    made = RewardPool(written(tmp_path, good), timeout_s=5.0, processes=1, jailed=False)
    await made.start()
    try:
        os.kill(made.pids()[0], signal.SIGKILL)
        with pytest.raises(RewardError, match="ended with -9"):
            await made.score("", "x", told())
        written(tmp_path, "import os; os._exit(7)  # as the kernel ends what takes too much memory\n")
        with pytest.raises(RewardError, match=r"did not start again: .* ended with 7"):
            await made.score("", "x", told())
        written(tmp_path, good)
        assert await made.score("", "x", told()) == Reward(value=1.0)
    finally:
        await made.close()


async def test_a_start_that_was_cancelled_leaves_no_answer_for_the_next() -> None:
    name = "tests.fakes.rewards:as_told"
    child = RewardChild(Setup(spec=reward_spec(settings_for(name), name, ROOT), timeout_s=5.0, memory_bytes=2**32))
    starting = asyncio.create_task(child.start())
    async with asyncio.timeout(60):
        while child.pid is None:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert child.pid is None
    try:
        assert await child.score([Sample(prompt="", response="x", entry=told())]) == [Reward(value=1.0)]
    finally:
        await child.kill()


async def test_a_reward_that_writes_into_the_conversation_at_its_import_is_named(tmp_path: Path) -> None:
    code = """
import os
for fd in range(3, 20):
    try: os.write(fd, b"\\0\\0\\0\\1\\xc1")
    except OSError: pass
"""
    made = RewardPool(written(tmp_path, code), timeout_s=5.0, processes=1, jailed=False)
    with pytest.raises(RewardSetupError, match="sent an invalid answer"):
        await made.start()
    assert made.pids() == []


# --- how a function may be written ------------------------------------------------------------------------------------


async def test_an_async_function_is_awaited() -> None:
    async with pool("awaited") as rewards:
        assert await rewards.score("", "four", told()) == Reward(value=4.0)


async def test_a_batch_goes_in_one_call_and_each_of_it_has_its_own_result() -> None:
    async with pool("in_batches") as rewards:
        texts = ["a", "bb", "none", "dddd"]
        results = await asyncio.gather(
            *(rewards.score("", text, told()) for text in ["first", *texts]), return_exceptions=True
        )
    assert isinstance(results[3], RewardError)
    assert [result.value for result in results[1:] if isinstance(result, Reward)] == [1.0, 2.0, 4.0]
    assert isinstance(results[1], Reward)
    assert results[1].components["together"] == 4.0


async def test_a_batch_may_be_async_and_its_parameters_in_any_order() -> None:
    async with pool("awaited_batch") as rewards:
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_a_batch_that_returns_another_number_of_results_fails_by_name() -> None:
    async with pool("too_few") as rewards:
        first, *others = await asyncio.gather(
            *(rewards.score("", "x", told()) for _ in range(3)), return_exceptions=True
        )
    assert first == Reward(value=1.0)
    assert all(isinstance(other, RewardError) and "for 2 responses" in str(other) for other in others)


async def test_one_that_hangs_in_a_batch_is_given_up_alone() -> None:
    async with pool("hangs_for_some", timeout_s=3.0) as rewards:
        texts = ["a", "hang", "bb", "dddd"]
        results = await asyncio.gather(
            *(rewards.score("", text, told()) for text in ["first", *texts]), return_exceptions=True
        )
    assert isinstance(results[2], RewardTimeoutError)
    assert [result.value for result in results if isinstance(result, Reward)] == [5.0, 1.0, 2.0, 4.0]


# --- tried before the run ---------------------------------------------------------------------------------------------


def trial(*do: str) -> list[Sample]:
    return [Sample(prompt="", response="x", entry=told(one)) for one in do]


@pytest.mark.parametrize(
    ("do", "reason"), [("none", "NoneType"), ("nan", "nan"), ("text", "not a number"), ("raise", "KeyError")]
)
async def test_a_reward_that_computes_nothing_is_named_before_the_run(do: str, reason: str) -> None:
    name = "tests.fakes.rewards:as_told"
    made = RewardPool(reward_spec(settings_for(name), name, ROOT), timeout_s=5.0, jailed=False)
    try:
        with pytest.raises(RewardSetupError, match=f"tried on 2 rows of the data and computed nothing: .*{reason}"):
            await made.start(trial(do, do))
        await made.start(trial(do, ""))
    finally:
        await made.close()


async def test_a_function_that_cannot_be_called_is_named_with_its_parameters() -> None:
    with pytest.raises(RewardSetupError, match=r"parameters \(args: .*It is called \(prompt, response, entry\)"):
        async with pool("of_slime"):
            pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("float(entry['answer'] in response)", ""),
        ("float('\\\\boxed{' + entry['answer'] + '}' in response)", ""),
        (
            "float(response == str(entry))",
            r"right answers of the 2 rows that were tried earn no more .*\(0 and 0 at most\)",
        ),
        ("1.0", r"\(1 and 1 at most\)"),
    ],
)
async def test_a_reward_that_knows_no_right_answer_is_doubted(tmp_path: Path, body: str, says: str) -> None:
    made = RewardPool(
        written(tmp_path, f"def reward(prompt, response, entry): return {body}"), timeout_s=20.0, jailed=False
    )
    rows = [Sample(prompt="?", response="", entry=json.dumps({"answer": one}).encode()) for one in ("5", "17")]
    await made.start()
    try:
        doubt = await right_over_wrong(made, rows, "Answer:")
        assert re.search(says, doubt) if says else not doubt
    finally:
        await made.close()


# --- hostile mathematics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9^{9}}}}",
        "\\int_0^{10^9} \\sin(x^{x^{x}})^{999} dx",
        "\\prod_{k=1}^{10^9} \\sum_{n=1}^{10^9} \\frac{k^n}{n^k}",
        "(" * 3000,
        "\\sqrt{" * 500 + "2" + "}" * 500,
        "\\frac{1}{" * 200 + "2" + "}" * 200,
        "{x_1}^{" * 100,
        "7" * 20000,
        "\\binom{10^{12}}{10^{11}}",
    ],
)
async def test_hostile_mathematics_is_a_wrong_answer_and_no_failure(answer: str) -> None:
    rewards = RewardPool(reward_spec(settings_for(), ""), timeout_s=60.0, processes=1)
    await rewards.start()
    entry = json.dumps({"answer": "\\frac{1}{2}"}).encode()
    try:
        assert (await rewards.score("", f"Answer: {answer}", entry)).value < 1
        assert (await rewards.score("", "Answer: \\frac{1}{2}", entry)).value == 1.0
        assert rewards.failures == 0
    finally:
        await rewards.close()


async def test_an_answer_that_keeps_the_child_busy_in_c_is_wrong_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = "import workers.scoring.rewards as r; r.build_reward = lambda spec: (lambda *u: 10**10**9); r.main()"
    monkeypatch.setattr("workers.scoring.reward_pool.COMMAND", [sys.executable, "-c", busy])
    made = RewardPool(reward_spec(settings_for(), ""), timeout_s=60.0, processes=1, jailed=False)
    await made.start()
    try:
        assert (await made.score("", "Answer: 1", b'{"answer": "1"}')) == WRONG
        assert made.failures == 0
    finally:
        await made.close()
