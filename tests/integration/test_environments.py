"""Environments in real child processes: what they do harms only their episode, and an episode outlives its process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import uvloop
from transformers import AutoModelForCausalLM

from orchestrator.config.load import render, resolve
from orchestrator.config.schema import to_toml
from orchestrator.launch.processes import environment_arguments
from orchestrator.prompts.source import write_held_out
from tests.fakes.tiny_models import full_logprobs
from transport.contracts.messages import TrialRow, TrialRows
from transport.contracts.settings import EmulatedSettings, GenerationSettings, Settings
from transport.contracts.types import FinishReason, GroupId, SamplingParams, SegmentKind
from transport.process.clock import MonotonicClock
from transport.rows.columns import loss_mask
from workers.commands.check import check_workers
from workers.commands.evaluate import evaluate_run
from workers.environments.calculator import Calculator, calculate
from workers.environments.encoder import ObservationEncoder
from workers.environments.engine import EpisodeEngine
from workers.environments.environment import Message
from workers.environments.pool import (
    EnvironmentPool,
    Environments,
    EpisodeLink,
    environment_setup,
)
from workers.errors import EnvironmentFailedError, EnvironmentSetupError, EvaluationError
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.emulated import EmulatedEngine
from workers.generation.engine import Completion, GenerationEngine, GenerationRequest, serving
from workers.models import random_model
from workers.scoring.jail import BUBBLEWRAP

ROOT = str(Path(__file__).parents[2])


def settings_for(name: str, *, jail: str = "off", **more: object) -> Settings:
    return msgspec.convert({"environment": {"name": name, "jail": jail, "path": ROOT, **more}}, Settings)


@asynccontextmanager
async def pool(name: str = "AsTold", *, jail: str = "off", **more: object) -> AsyncIterator[EnvironmentPool]:
    full = f"tests.fakes.environments:{name}"
    settings = settings_for(full, jail=jail, **{"processes": 1, "timeout_s": 20.0, **more})
    made = EnvironmentPool(settings, settings.environment, environment_setup(settings.environment, full, ROOT))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize(
    "jail",
    [pytest.param("auto", marks=pytest.mark.skipif(not shutil.which(BUBBLEWRAP), reason="no bubblewrap here")), "off"],
)
async def test_an_episode_is_begun_told_its_turns_and_ended(jail: str) -> None:
    async with pool("Echo", jail=jail, params={"greeting": "hello"}) as environments:
        episode = environments.open()
        assert (await episode.reset("say it", b"{}")).messages == (Message(role="tool", content="hello"),)
        first, last = await episode.step("one", [1]), await episode.step("two!", [2, 3])
        assert (first.messages, first.done, first.reward) == ((Message(role="tool", content="1:one"),), False, None)
        assert (last.messages, last.done, last.reward) == ((), True, 8.0)


@pytest.mark.parametrize("how", ["crash", "raise", "kill", "hang"])
async def test_an_episode_is_replayed_where_its_environment_failed(how: str, tmp_path: Path) -> None:
    """The journal's steps are told again, so that what comes after is as if nothing had happened."""
    limit_s = 1.0 if how == "hang" else 20.0
    async with pool(params={"turns": 3, "once": str(tmp_path / "failed")}, timeout_s=limit_s) as environments:
        episode, neighbour = environments.open(), environments.open()
        for one in (episode, neighbour):
            await one.reset("say it", b"{}")
            await one.step("one", [1])
        if how == "kill":
            (pid,) = environments.pids()
            os.kill(pid, signal.SIGKILL)
        second = await episode.step(how, [2])
        assert second.messages == (Message(role="tool", content=f"2:{how}"),)
        assert (await episode.step("three", [3])).reward == 1 + len("one" + how + "three")
        assert episode.replays == 1
        assert (await neighbour.step("zwei", [2])).messages == (Message(role="tool", content="2:zwei"),)
        assert neighbour.replays == (how != "raise"), "it lived in the same process"


def test_a_process_that_ended_between_two_calls_is_noticed_on_a_workers_loop() -> None:
    """uvloop raises RuntimeError for a write to a closed pipe, asyncio's own loop an OSError."""

    async def steps() -> None:
        async with pool("Echo", params={"turns": 3}) as environments:
            episode = environments.open()
            await episode.reset("say it", b"{}")
            (pid,) = environments.pids()
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.5)  # for the loop to hear of it
            assert (await episode.step("one", [1])).messages == (Message(role="tool", content="1:one"),)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(steps())


async def test_a_first_process_that_is_hit_while_it_starts_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "hit_once.py").write_text(
        "import os, pathlib\n"
        f"hit = pathlib.Path({str(tmp_path / 'hit')!r})\n"
        "if not hit.exists():\n"
        "    hit.touch()\n"
        "    os._exit(9)\n"
        "from tests.fakes.environments import Echo\n"
    )
    settings = settings_for("hit_once:Echo", processes=1)
    environments = EnvironmentPool(
        settings, settings.environment, environment_setup(settings.environment, "hit_once:Echo", str(tmp_path))
    )
    try:
        await environments.start()
        await environments.open().reset("say it", b"{}")
    finally:
        await environments.close()
    assert (tmp_path / "hit").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("crash", "the environment's process ended with 3"),
        ("raise", "the environment raised KeyError"),
        ("hang", "took longer than 1 s"),
        ("garbage", r"step returned str, not \(observation, done, reward\)"),
        ("nan", "step gave nan as its reward"),
        ("mute", "a message that is not"),
        ("long", "over the limit"),
    ],
)
async def test_one_that_always_fails_is_given_up_with_its_reason_and_others_go_on(text: str, reason: str) -> None:
    async with pool(max_replays=1, timeout_s=1.0 if text == "hang" else 20.0) as environments:
        episode, other = environments.open(), environments.open()
        await episode.reset("say it", b"{}")
        await other.reset("say it", b"{}")
        with pytest.raises(EnvironmentFailedError, match=rf"{reason}.*\(turn 1, 2 attempts\)"):
            await episode.step(text, [1])
        assert re.search(reason, environments.problem)
        assert (await other.step("fine", [1])).messages == (Message(role="tool", content="1:fine"),)
        assert environments.problem == ""


async def test_a_replay_that_goes_another_way_is_no_replay() -> None:
    async with pool("Fickle") as environments:
        episode = environments.open()
        await episode.reset("say it", b"{}")
        await episode.step("one", [1])
        (pid,) = environments.pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailedError, match="answered turn 1 otherwise when it was replayed"):
            await episode.step("two", [2])


async def test_what_is_no_environment_fails_by_name() -> None:
    async with pool("no_environment") as environments:
        with pytest.raises(EnvironmentFailedError, match="it is a object, which has no reset and step"):
            await environments.open().reset("say it", b"{}")
    with pytest.raises(EnvironmentSetupError, match="cannot be imported"):
        async with pool("nowhere"):
            pass
    with pytest.raises(EnvironmentSetupError, match=r"this worker allows '\(ours\)'; start it with --env"):
        environment_setup(settings_for("tests.fakes.environments:Echo").environment, "", "")


# --- several, by part of the data


def mixed(**parts: dict[str, object]) -> Settings:
    echo = "tests.fakes.environments:Echo"
    return msgspec.convert({"environment": {"name": echo, "jail": "off"}, "data": {"mix": parts}}, Settings)


async def test_each_part_of_the_data_talks_to_its_own_environment_and_one_may_have_none() -> None:
    told = {"environment": "tests.fakes.environments:Echo", "environment_params": {"greeting": "told"}}
    settings = mixed(said={}, told=told, again=told, sums={"environment": "calculator"}, alone={"environment": "none"})
    assert settings.own_environments == ["tests.fakes.environments:Echo"]
    environments = Environments(settings, "tests.fakes.environments:Echo", ROOT)
    heard: dict[str, object] = {}
    try:
        await environments.start()
        assert len(environments._distinct) == 3, "told and again share one"
        for part in ("", "said", "told", "again", "sums", "alone"):
            entry = json.dumps({"part": part, "question": "1 + 1"} if part else {"question": "1 + 1"}).encode()
            episode = environments.open(entry)
            first = await episode.reset("say it", entry)
            heard[part] = (*first.messages, *(await episode.step("2 + 3 =", [1])).messages)
            episode.close()
    finally:
        await environments.close()
    echoed, greeting = Message(role="tool", content="1:2 + 3 ="), Message(role="tool", content="told")
    assert heard == {
        "": (echoed,),
        "said": (echoed,),
        "told": (greeting, echoed),
        "again": (greeting, echoed),
        "sums": (Message(role="tool", content="Result: 5"),),
        "alone": (),
    }


def test_environments_of_parts_run_only_where_each_is_allowed_and_are_each_tried() -> None:
    other = {"environment": "tests.fakes.environments:Told"}
    settings = mixed(said={}, told=other)
    assert environment_arguments(settings) == [
        "--environment",
        "tests.fakes.environments:Echo,tests.fakes.environments:Told",
    ]
    with pytest.raises(
        EnvironmentSetupError,
        match=r"start it with --environment tests.fakes.environments:Echo,tests.fakes.environments:Told",
    ):
        Environments(settings, "tests.fakes.environments:Echo", ROOT)
    with pytest.raises(EnvironmentSetupError, match="drop --environment mine:Own"):
        Environments(settings, ",".join([*settings.own_environments, "mine:Own"]), ROOT)
    rows = [TrialRow(prompt="?", response="", entry=json.dumps({"part": part})) for part in ("said", "told")]
    with pytest.raises(
        EnvironmentSetupError, match=r"Told' was tried on 1 rows of data.mix.told and played a turn on none: .*says"
    ):
        check_workers(settings, TrialRows(rows=rows))  # Told wants an entry that says something


def test_an_environment_whose_turns_are_garbage_is_refused_before_anything_starts() -> None:
    trial = TrialRows(rows=[TrialRow(prompt="?", response="Answer: 1", entry="{}")])
    with pytest.raises(EnvironmentSetupError, match=r"played a turn on none: step returned tuple, not \(observation"):
        check_workers(settings_for("tests.fakes.environments:Pair"), trial)


# --- what runs what a model wrote

in_a_jail = pytest.mark.skipif(not shutil.which(BUBBLEWRAP), reason="no bubblewrap here")


async def said(episode: EpisodeLink, code: str) -> str:
    ((message,),) = ((await episode.step(code, [1])).messages,)
    return message.content


@in_a_jail
async def test_an_episode_that_executes_answers_has_a_jail_of_its_own() -> None:
    async with pool("Executes", jail="auto", executes_answers=True) as environments:
        assert environments.pids() == [], "the one that was tried is no episode's"
        first, second = environments.open(), environments.open()
        for episode in (first, second):
            await episode.reset("say it", b"{}")
        assert await said(first, "open('/tmp/mine', 'w').write('secret'); said = open('/tmp/mine').read()") == "secret"
        assert (
            await said(second, "open('/tmp/mine')")
            == "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/mine'"
        )
        others = "import os; said = sorted(int(one) for one in os.listdir('/proc') if one.isdigit())"
        assert len(await said(second, others)) < len("[1, 2, 3, 4]"), "it sees no process but its own"
        reached = await said(second, "import socket; socket.create_connection(('127.0.0.1', 9), timeout=5)")
        assert "Network is unreachable" in reached or "Connection refused" in reached
        assert await said(second, "import os; said = os.environ.get('HOME')") == "/tmp"
        assert "MemoryError" in await said(second, "bytearray(2 * 1024**3)")
        pids = environments.pids()
        assert len(set(pids)) == 2
        first.close()
        await until_gone(pids[0])
        assert await said(second, "said = 'still there'") == "still there"


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while is_there(pid):  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@in_a_jail
async def test_the_example_with_python_as_its_tool_runs_blocks_and_ends_without_one() -> None:
    name, here = "python_tool:PythonTool", str(Path(ROOT) / "docs/examples")
    settings = settings_for(name, jail="auto", path=here, executes_answers=True, params={"limit_s": 5.0})
    environments = EnvironmentPool(settings, settings.environment, environment_setup(settings.environment, name, here))
    try:
        await environments.start()
        episode = environments.open()
        await episode.reset("17 * 23?", b"{}")
        assert await said(episode, "let me see:\n```python\nprint(17 * 23)\n```\n") == "391\n"
        assert "ZeroDivisionError" in await said(episode, "```python\n1 / 0\n```")
        assert await said(episode, "```python\nwhile True: pass\n```") == "no end within 5 s"
        assert await said(episode, "```python\nwhile True: print(7)\n```") == "7\n" * 250, (
            "and no memory is taken by it"
        )
        last = await episode.step("the answer is 391", [1])
        assert (last.messages, last.done, last.reward) == ((), True, None), "the run's reward scores it"
    finally:
        await environments.close()


@in_a_jail
async def test_an_episode_that_ends_in_the_middle_of_what_it_runs_leaves_no_process() -> None:
    async with pool("Executes", jail="auto", executes_answers=True) as environments:
        episode = environments.open()
        await episode.reset("say it", b"{}")
        (pid,) = environments.pids()
        endless = asyncio.create_task(episode.step("while True: pass", [1]))
        while not environments.busy:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)
        episode.close()
        with pytest.raises(EnvironmentFailedError, match="ended in the middle of a call"):
            await endless
        await until_gone(pid)
        begun = environments.open()
        starting = asyncio.create_task(begun.reset("say it", b"{}"))
        await asyncio.sleep(0)
        begun.close()  # before its process is there
        await asyncio.gather(starting, return_exceptions=True)
        assert environments.pids() == []


async def test_without_a_jail_what_executes_answers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        EnvironmentSetupError, match=r"executes what a model wrote .*no jail for it here: bubblewrap is not"
    ):
        async with pool("Executes", jail="auto", executes_answers=True):
            pass


async def test_calls_that_are_cancelled_leave_no_answer_behind() -> None:
    async with pool(params={"turns": 9}) as environments:
        episode = environments.open()
        await episode.reset("say it", b"{}")
        hanging = asyncio.create_task(episode.step("hang", [1]))
        while not environments.busy:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await episode.step("one", [1])).messages == (Message(role="tool", content="1:one"),)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 + 7 * 3", "33"),
        ("12 - 45", "-33"),
        (" (1 + 2) * -3 ", "-9"),
        ("7 / 2", "3.5"),
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "9 ** 9 ** 9 is no arithmetic"),
        ("__import__('os')", "__import__('os') is no arithmetic"),
        ("1" * 300, "no expression"),
        ("999999999999999 * 999999999999999", "999999999999999 * 999999999999999 is no arithmetic"),
        ("(" * 150, "(" * 150 + " is no arithmetic"),
        ("", "no expression"),
        ("twelve", "twelve is no arithmetic"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("turn", "said", "done"),
    [
        ("48 - 15 + 93 =", "Result: 126", False),
        ("1. 27 - 82 =", "Result: -55", False),
        ("Let me see: (1+2)*3 = 10, and 10 - 4 = 5", "Result: 6", False),
        ("12 + 7 =\nAnswer: 19", None, True),
        ("x = 7", None, True),
        ("no idea", None, True),
        ("2 ** 3 =", None, True),
        ("1 - 1 / 0 =", "Result: division by zero", False),
    ],
)
def test_the_calculator_tells_what_is_written_down_until_there_is_an_answer(
    turn: str, said: str | None, done: bool
) -> None:
    calculator = Calculator()
    calculator.reset("", {})
    assert calculator.step(turn, []) == (said, done, None)
    assert Calculator(says="= {result}").step("1 + 1 =", []) == ("= 2", False, None)


def held_out_run(run_dir: Path, name: str, **params: object) -> None:
    """What a run of episodes leaves for ``evaluate``, of four problems."""
    full, directory = f"tests.fakes.environments:{name}", run_dir / "model"
    random_model("qwen3-tiny")(directory)
    environment = {"name": full, "jail": "off", "path": ROOT, "params": params, "max_turn_tokens": 8, "processes": 1}
    overrides = [f"environment.{key}={to_toml(value)}" for key, value in environment.items()]
    few = ["eval.problems=4", "sampling.max_new_tokens=40", "pipeline.max_attempts=2", "environment.max_replays=0"]
    resolved = resolve("tiny", [], [*overrides, *few], {})
    (run_dir / "config.toml").write_text(render(resolved))
    write_held_out(resolved.settings, directory, run_dir / "eval.jsonl")


def evaluate_episodes(run_dir: Path, **more: object) -> dict[str, float]:
    name = msgspec.toml.decode((run_dir / "config.toml").read_bytes())["environment"]["name"]
    allowed = {"environment": name, "environment_path": ROOT} | more
    reward = "workers.scoring.rewards:digit_share"
    return evaluate_run(run_dir, str(run_dir / "model"), cache_dir=run_dir, reward=reward, **allowed)  # type: ignore[arg-type]


def test_held_out_problems_are_answered_in_episodes(tmp_path: Path) -> None:
    held_out_run(tmp_path, "Echo", turns=2)
    told = evaluate_episodes(tmp_path, answers=tmp_path / "answers.jsonl", samples=2, passed_by="reward")
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["sample"] for answer in answers] == [0, 1] * 4
    assert told["pass@2"] == 1.0
    assert len({answer["prompt_id"] for answer in answers}) == 4
    paid = [answer["figures"]["reward"] for answer in answers]
    assert min(paid) > 0  # Echo pays for what it heard
    assert told["reward"] == pytest.approx(sum(paid) / 8)
    assert all(answer["figures"]["response_tokens"] > 16 for answer in answers)  # two turns, and what was said between


def test_where_an_environment_judges_nothing_what_the_policy_wrote_is_scored(tmp_path: Path) -> None:
    held_out_run(tmp_path, "Unpaid", turns=2, says="0123456789")
    told = evaluate_episodes(tmp_path)
    assert told["reward"] < 0.9  # the digits that it was told are none of its own
    with pytest.raises(EnvironmentSetupError, match="--environment"):
        evaluate_episodes(tmp_path, environment="")


def test_an_environment_that_fails_an_evaluation_is_no_wrong_answer(tmp_path: Path) -> None:
    held_out_run(tmp_path, "AsTold", always="raise")
    with pytest.raises(EvaluationError, match=r"held-out problem .*no such thing"):
        evaluate_episodes(tmp_path)


# --- whole episodes ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def episodes(inner: GenerationEngine, directory: Path, **more: object) -> AsyncIterator[EpisodeEngine]:
    """Two turns, the second after the environment has said the first one again."""
    full = "tests.fakes.environments:Echo"
    settings = settings_for(full, **more)
    environments = Environments(settings, full, ROOT)
    encoder = ObservationEncoder.of(directory, templated=True)
    engine = EpisodeEngine(inner, environments, encoder, settings.environment)
    async with serving(engine):
        yield engine


def asked(samples: Sequence[int], *, limit: int, limits: Sequence[int] = ()) -> GenerationRequest:
    return GenerationRequest(
        group_id=GroupId("0/0"),
        prompt_ids=np.arange(4, 30, dtype=np.int32),
        samples=samples,
        sampling=SamplingParams(max_new_tokens=limit, ignore_eos=True, seed=3),
        limits=limits,
    )


async def collected(engine: GenerationEngine, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    async with asyncio.timeout(120):
        while len(found) < count:
            for result in await engine.results():
                assert isinstance(result, Completion), result
                found[result.sample] = result
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    random_model("qwen3-tiny")(tmp_path)
    return tmp_path


async def test_logprobs_of_every_turn_are_those_of_the_whole_episode(directory: Path) -> None:
    """What the trainer computes: one forward over the prompt and all segments, looked at where the mask is 1."""
    settings = GenerationSettings(slots=2, dtype="float32", max_context=256)
    inner = EmbeddedEngine(settings, directory, MonotonicClock())
    async with episodes(inner, directory, max_turn_tokens=5) as engine:
        request = asked((0, 1, 2), limit=40)
        engine.submit(request)
        rows = await collected(engine, 3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for row in rows.values():
        kinds = [segment.kind for segment in row.segments]
        assert kinds == [SegmentKind.POLICY, SegmentKind.TOOL, SegmentKind.POLICY]
        mask = loss_mask(row.segments).astype(bool)
        assert mask.sum() == 10
        assert row.reward is not None
        whole = full_logprobs(model, request.prompt_ids, row.response_ids)
        assert row.logprobs[mask] == pytest.approx(whole[mask], abs=1e-4)
        assert not row.logprobs[~mask].any()
    firsts = {tuple(row.response_ids[:5]) for row in rows.values()}
    seconds = {tuple(row.response_ids[-5:]) for row in rows.values()}
    assert len(firsts) == len(seconds) == 3, "each draws from a stream of its own"
    assert firsts.isdisjoint(seconds)


async def test_the_emulated_engine_takes_the_same_turns_at_forced_lengths(directory: Path) -> None:
    costs = EmulatedSettings(time_scale=0.001)
    inner = EmulatedEngine(costs, 2, MonotonicClock())
    async with episodes(inner, directory, max_turns=2, params={"says": "ok"}) as engine:
        engine.submit(asked((0, 1), limit=200, limits=(200, 180)))
        rows = await collected(engine, 2)
    for row, limit in ((rows[0], 200), (rows[1], 180)):
        ends = [segment.end for segment in row.segments]
        assert ends[0] == limit // 2, "the first of two turns has half of it"
        assert (ends[-1], row.finish_reason, row.spans[0].end) == (limit, FinishReason.LENGTH, limit)
