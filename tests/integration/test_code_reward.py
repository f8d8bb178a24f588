"""Reward ``code``: what an answer earns, what its jail holds, and that without one nothing is run."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator

import psutil
import pytest

from benchmarks.jail_escapes import ATTEMPTS, try_all
from tests.fakes.unscored_group import settings_for
from transport.contracts.code_tasks import CodeTask
from workers.errors import RewardError, RewardSetupError
from workers.scoring import code, jail, system_calls
from workers.scoring.code import CodePool, extract_code
from workers.scoring.jail import BUBBLEWRAP
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import Sample, reward_spec

needs_bubblewrap = pytest.mark.skipif(not shutil.which(BUBBLEWRAP), reason="no bubblewrap here")
ADD = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]


@pytest.fixture
async def pool() -> AsyncIterator[CodePool]:
    made = CodePool(timeout_s=6.0, well_formed_reward=0.1)
    await made.start()
    yield made
    await made.close()
    assert made.pids() == []


async def sleeping(pool: CodePool) -> None:
    """Until bubblewrap, the grader and the answer are there."""
    async with asyncio.timeout(60):
        while len(pool.pids()) < 1 or len(psutil.Process(pool.pids()[0]).children(recursive=True)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def entry(tests: object = ADD, **columns: object) -> bytes:
    return json.dumps({"question": "", "answer": None, "metadata": {"tests": tests, **columns}}).encode()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("response", "value", "passed"),
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", 1.0, 1.0),
        ("def add(a, b):\n    return a + b", 1.0, 1.0),
        (
            "Try\n```\nadd = 1\n```\nor\n```\ndef add(a, b): return a + b\n```\nas in\n```\nadd(1, 2)\n```",
            1.0,
            1.0,
        ),
        ("```python\ndef add(a, b):\n    return a + b", 1.0, 1.0),  # cut short by the end of the response
        ("```python\ndef add(a, b):\n    return 3\n```", 0.1, 1 / 3),
        ("```python\ndef plus(a, b):\n    return a + b\n```", 0.0, 0.0),
        ("```python\ndef add(a, b) return a + b\n```", 0.0, 0.0),
        ("I cannot.", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
async def test_an_answer_earns_what_its_tests_say(pool: CodePool, response: str, value: float, passed: float) -> None:
    reward = await pool.score("", response, entry())
    assert (reward.value, reward.components["passed"]) == (value, pytest.approx(passed))


@needs_bubblewrap
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(n): return (n, {n: {1, 2}}, [None, True, 1.5, b'x', 10**30, 2j, frozenset()])",
         ["assert f(3) == (3, {3: {1, 2}}, [None, True, 1.5, b'x', 10**30, 2j, frozenset()])"]),
        ("def f(n):\n    if n < 0: raise ValueError('below')\n    return n",
         ["try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'below'\nelse:\n    assert False"]),
        ("import math\ndef f(*, n=1): return math.sqrt(n)", ["assert f(n=4) == 2", "assert f() == 1"]),
        ("state = []\ndef f(n):\n    state.append(n)\n    return len(state)", ["assert f(0) == 1", "assert f(0) == 2"]),
        ("def f(candidate): return candidate", ["def check(candidate):\n    assert candidate(1) == 1\n", "check(f)"]),
        ("def f(n): return float('nan')", ["import math", "assert math.isnan(f(1))"]),
    ],
)  # fmt: skip
async def test_values_and_exceptions_come_back_as_they_are(pool: CodePool, code: str, tests: list[str]) -> None:
    verdict = await pool.judge(code, CodeTask(entry_points=["f"], setup="", tests=tests))
    assert (verdict.passed, verdict.limit) == (len(tests), "")


@needs_bubblewrap
async def test_the_columns_of_mbpp_are_read(pool: CodePool) -> None:
    columns = {"test_list": ["assert area(2) == approx(12.57)"], "test_setup_code": "approx = lambda n: 12.57"}
    response = "def area(r): return 12.57"
    reward = await pool.score("", response, json.dumps({"metadata": {"task_id": 1, **columns}}).encode())
    assert reward.value == 1


@needs_bubblewrap
@pytest.mark.parametrize("name", ATTEMPTS)
async def test_nothing_escapes(pool: CodePool, name: str) -> None:
    (outcome,) = await try_all(pool, (name,))
    assert outcome.escaped == ""


def test_the_suite_of_attempts_is_long_enough() -> None:
    assert len(ATTEMPTS) >= 30


@needs_bubblewrap
async def test_an_attempt_that_nothing_stops_counts_as_an_escape(
    pool: CodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite can see: with the host's files and network in it, the jail holds neither."""
    command = jail.Jail.command

    def open_jail(self: jail.Jail, argv: list[str]) -> list[str]:
        words = [word for word in command(self, argv) if word != "--unshare-net"]
        return [*words[: words.index("--proc")], "--bind", "/tmp", "/tmp", *words[words.index("--proc") :]]

    monkeypatch.setattr(jail.Jail, "command", open_jail)
    monkeypatch.setattr(code, "MAX_INODES", 1 << 62)
    names = ("an abstract socket of the host", "read a file by its path", "write the host's temporary directory")
    assert [bool(one.escaped) for one in await try_all(pool, names)] == [True] * 3


@needs_bubblewrap
async def test_an_answer_over_its_limit_is_wrong_and_not_an_error(pool: CodePool) -> None:
    never = "def f(n):\n    while True:\n        n += 1"
    verdict = await pool.judge(never, CodeTask(entry_points=["f"], setup="", tests=["assert f(1) == 1"]))
    assert (verdict.well_formed, verdict.passed) == (True, 0)
    reward = await pool.score("", f"{never}\ndef add(a, b): return f(a)", entry())
    assert reward.value == 0.1


@needs_bubblewrap
async def test_tests_that_do_not_end_are_an_error_and_no_reward() -> None:
    made = CodePool(timeout_s=2.0)
    with pytest.raises(RewardError, match="tests do not end in time"):
        await made.judge("def f(): return 1", CodeTask(entry_points=["f"], setup="", tests=["f\nwhile True: pass"]))
    with pytest.raises(RewardError, match="setup raises ZeroDivisionError"):
        await made.judge("def f(): return 1", CodeTask(entry_points=["f"], setup="1/0", tests=["f()"]))


@needs_bubblewrap
async def test_a_grader_that_is_killed_is_an_error_and_no_reward(
    pool: CodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = asyncio.create_task(
        pool.judge("import time\ndef f(): time.sleep(60)", CodeTask(entry_points=["f"], setup="", tests=["f()"]))
    )
    await sleeping(pool)
    psutil.Process(pool.pids()[0]).children()[0].kill()
    with pytest.raises(RewardError, match="ended without a verdict"):
        await judging


@needs_bubblewrap
async def test_a_cancelled_answer_leaves_nothing(pool: CodePool) -> None:
    judging = asyncio.create_task(
        pool.judge("import time\ndef f(): time.sleep(60)", CodeTask(entry_points=["f"], setup="", tests=["f()"]))
    )
    await sleeping(pool)
    started = [psutil.Process(pool.pids()[0]), *psutil.Process(pool.pids()[0]).children(recursive=True)]
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    psutil.wait_procs(started, timeout=60)
    assert not any(one.is_running() for one in started)


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_without_bubblewrap_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "BUBBLEWRAP", "no-such-bwrap")
    with pytest.raises(RewardSetupError, match=r"'code' executes what a model wrote.*apt-get install bubblewrap"):
        await CodePool(timeout_s=1.0).start()


@needs_bubblewrap
async def test_a_kernel_that_gives_no_jail_is_refused_with_its_words(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(jail, "BUBBLEWRAP", str(refusing))
    with pytest.raises(RewardSetupError, match="No permissions to create new namespace"):
        await CodePool(timeout_s=1.0).start()


@needs_bubblewrap
async def test_a_processor_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_calls.platform, "machine", lambda: "riscv64")
    with pytest.raises(RewardSetupError, match="no filter of system calls for riscv64"):
        await CodePool(timeout_s=1.0).start()
    assert system_calls.answer_filter("aarch64")


@needs_bubblewrap
async def test_rows_whose_own_answers_fail_their_tests_are_refused_at_the_start() -> None:
    made = CodePool(timeout_s=6.0)
    wrong = Sample(prompt="", response="def add(a, b): return 0", entry=entry())
    with pytest.raises(RewardSetupError, match=r"none is right: the row's own answer does not pass.*answer_column"):
        await made.start([wrong, wrong])
    await made.start([wrong, Sample(prompt="", response="def add(a, b): return a + b", entry=entry())])
    await made.start([Sample(prompt="", response="", entry=entry())])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({}, "no column 'tests'"),
        ({"tests": []}, "not empty"),
        ({"tests": ["assert add(1"]}, "is no Python"),
        ({"tests": ["assert 1 == 1"]}, "set column 'entry_point'"),
        ({"tests": ["assert add(1) == 1"], "entry_point": "sub"}, "never uses sub"),
        ({"tests": ["assert add(1) == 1"], "entry_point": "a b"}, "must be the name of a function"),
    ],
)
async def test_a_row_that_is_no_problem_is_an_error_and_no_reward(columns: dict[str, object], reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        await CodePool(timeout_s=1.0).score("", "def add(n): return n", json.dumps({"metadata": columns}).encode())


def test_a_run_with_reward_code_opens_its_pool_only_where_the_worker_allows_it() -> None:
    settings = settings_for("code")
    with pytest.raises(RewardSetupError, match="start it with --reward code"):
        reward_spec(settings, "")
    assert isinstance(open_pool(settings, reward_spec(settings, "code"), processes=1), CodePool)


def test_the_block_that_defines_the_function_is_the_answer() -> None:
    response = "```py\ndef f(): ...\n```\n```\nf()\n```"
    assert extract_code(response, ["f"]) == "def f(): ...\n"
    assert extract_code(response, ["g"]) == "f()\n"
