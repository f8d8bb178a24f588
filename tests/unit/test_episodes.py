"""Episodes over a fake engine: which tokens a turn begins with, whose they are, and how every episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import pytest

from tests.fakes.engine import FakeEngine
from transport.contracts.settings import EnvironmentSettings
from transport.contracts.types import (
    FinishReason,
    SamplingParams,
    Segment,
    SegmentKind,
    VersionSpan,
    WeightIdentity,
    group_id,
)
from transport.rows.columns import loss_mask
from workers.endpoint.messages import Message as ChatMessage
from workers.environments.encoder import ObservationEncoder
from workers.environments.engine import EpisodeEngine
from workers.environments.environment import ROLES, GarbageError, Message, Observed, read_messages, read_step
from workers.environments.transcript import turn_seed
from workers.errors import EngineCrashedError, EnvironmentFailedError, ModelError
from workers.generation.engine import Completion, EngineFailure, GenerationRequest, Result
from workers.models import prepare_model

GROUP = group_id(3, 0)
PROMPT = [5, 6, 7]
V1, V2 = (WeightIdentity(epoch=1, version=version) for version in (1, 2))
NOTHING = Observed()
POLICY, TOOL, ENVIRONMENT = SegmentKind.POLICY, SegmentKind.TOOL, SegmentKind.ENVIRONMENT


class Script:
    """Environments that answer as the test says: what ``answers`` gives next for a sample, an exception is raised."""

    def __init__(self, *answers: Observed | Exception, greeting: Observed = NOTHING) -> None:
        self.answers, self.greeting = answers, greeting
        self.heard: list[tuple[str, tuple[int, ...]]] = []
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.opened = self.closed = 0
        self.problem = ""

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def open(self, entry: bytes) -> Link:
        self.opened += 1
        return Link(self)


class Link:
    def __init__(self, script: Script) -> None:
        self.script, self.turn = script, 0

    async def reset(self, prompt: str, entry: bytes) -> Observed:
        assert (prompt, entry) == ("say it", b"{}")
        return self.script.greeting

    async def step(self, text: str, tokens: Sequence[int]) -> Observed:
        self.script.heard.append((text, tuple(tokens)))
        self.script.asked.set()
        await self.script.may_answer.wait()
        answer = self.script.answers[self.turn]
        self.turn += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.script.closed += 1


class Encoder:
    """Tokens as their own text; what is said becomes its length times the token 40, behind the token 41."""

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def behind_turn(self, messages: Sequence[Message], last_token: int) -> list[int]:
        if any(message.role == "refused" for message in messages):
            raise ModelError("the model's chat template refuses messages of refused: no")
        return [41, *[40] * sum(len(message.content) for message in messages)]

    def behind_prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.behind_turn(messages, -1)


def said(content: str, role: str = "tool", reward: float | None = None) -> Observed:
    return Observed(messages=(Message(role=role, content=content),), reward=reward)


def done(reward: float | None = None) -> Observed:
    return Observed(done=True, reward=reward)


class World:
    def __init__(self, script: Script, **settings: int) -> None:
        self.inner, self.script = FakeEngine(), script
        chosen = EnvironmentSettings(name="calculator", **settings)  # type: ignore[arg-type]
        self.engine = EpisodeEngine(self.inner, script, Encoder(), chosen)  # type: ignore[arg-type]

    def submit(self, samples: Sequence[int] = (0,), limit: int = 20, limits: Sequence[int] = ()) -> None:
        self.engine.submit(
            GenerationRequest(
                group_id=GROUP,
                prompt_ids=np.array(PROMPT, np.int32),
                samples=samples,
                sampling=SamplingParams(max_new_tokens=limit, seed=9, ignore_eos=bool(limits)),
                priority=3.0,
                attempt=1,
                limits=limits,
                prompt_text="say it",
                entry=b"{}",
            )
        )

    async def turn(self, number: int) -> GenerationRequest:
        """The request of this number that the inner engine gets, from 1."""
        return (await self.inner.wait_submitted(number))[number - 1]

    def say(
        self,
        request: GenerationRequest,
        ids: Sequence[int],
        *,
        sample: int = 0,
        reason: FinishReason = FinishReason.STOP,
    ) -> None:
        self.inner.give(
            Completion(
                group_id=request.group_id,
                sample=sample,
                attempt=request.attempt,
                response_ids=np.array(ids, np.int32),
                logprobs=np.full(len(ids), -1.0, np.float32),
                finish_reason=reason,
                spans=(VersionSpan(start=0, end=len(ids), weights=self.inner.weights),),
                queued_s=1.0,
                engine_s=2.0,
            )
        )

    async def results(self, count: int = 1) -> list[Result]:
        found: list[Result] = []
        async with asyncio.timeout(30):
            while len(found) < count:
                found += await self.engine.results()
        assert len(found) == count
        return found

    async def completion(self) -> Completion:
        (result,) = await self.results()
        assert isinstance(result, Completion), result
        return result

    async def failure(self) -> EngineFailure:
        (result,) = await self.results()
        assert isinstance(result, EngineFailure), result
        return result


@asynccontextmanager
async def world(*answers: Observed | Exception, greeting: Observed = NOTHING, **settings: int) -> AsyncIterator[World]:
    made = World(Script(*answers, greeting=greeting), **settings)
    try:
        await made.engine.start()
        yield made
    finally:
        await made.engine.close()
        assert made.inner.closed
    assert made.script.opened == made.script.closed, "every episode is closed"


async def test_a_turn_begins_with_the_exact_ids_so_far_and_only_the_policys_are_trained() -> None:
    async with world(said("abc"), done()) as one:
        one.submit()
        first = await one.turn(1)
        assert (first.prompt_ids.tolist(), first.sampling.max_new_tokens, first.sampling.seed) == (PROMPT, 20, 9)
        one.say(first, [10, 11])
        second = await one.turn(2)
        assert second.prompt_ids.tolist() == [*PROMPT, 10, 11, 41, 40, 40, 40]
        assert (second.key, tuple(second.samples), second.sampling.max_new_tokens) == (first.key, (0,), 14)
        assert second.sampling.seed == turn_seed(9, 1) != 9, "else it would draw as the turn before did"
        assert second.priority > first.priority
        await one.inner.load_weights(V2, {})
        one.say(second, [12])
        row = await one.completion()
    assert row.response_ids.tolist() == [10, 11, 41, 40, 40, 40, 12]
    assert row.logprobs.tolist() == [-1, -1, 0, 0, 0, 0, -1]
    assert row.segments == tuple(Segment(kind=k, end=e) for k, e in ((POLICY, 2), (TOOL, 6), (POLICY, 7)))
    assert loss_mask(row.segments).tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert [(span.start, span.end, span.weights.version) for span in row.spans] == [(0, 2, 0), (2, 7, 2)]
    assert (row.finish_reason, row.reward, row.queued_s, row.engine_s) == (FinishReason.STOP, None, 2.0, 4.0)
    assert one.script.heard == [("10 11", (10, 11)), ("12", (12,))]


async def test_what_begins_anew_stands_behind_the_prompt_alone_as_another_sample_of_the_row() -> None:
    begun = Observed(messages=(Message(role="user", content="ab"),), anew=True)
    async with world(begun, Observed(anew=True), done(reward=1.0)) as one:
        one.submit()
        one.say(await one.turn(1), [10, 11])
        second = await one.turn(2)
        assert second.prompt_ids.tolist() == [*PROMPT, 41, 40, 40]
        assert second.sampling.max_new_tokens == 20 - 5, "what was forgotten counts, too: it is trained"
        one.say(second, [12])
        third = await one.turn(3)
        assert third.prompt_ids.tolist() == PROMPT
        one.say(third, [13])
        row = await one.completion()
    assert row.response_ids.tolist() == [10, 11, 41, 40, 40, 12, 13]
    assert row.branch_ends == (2, 6, 7)
    assert loss_mask(row.segments).tolist() == [1, 1, 0, 0, 0, 1, 1]


async def test_an_episode_that_was_stopped_before_the_first_turn_of_a_branch_has_none_there() -> None:
    async with world(Observed(messages=(Message(role="user", content="ab"),), anew=True)) as one:
        one.submit()
        one.say(await one.turn(1), [10, 11])
        second = await one.turn(2)
        await one.engine.abort([second.key])
        one.say(second, [], reason=FinishReason.ABORT)
        row = await one.completion()
    assert (row.finish_reason, row.branch_ends) == (FinishReason.ABORT, ())


@pytest.mark.parametrize(
    ("returned", "observed"),
    [
        (({"anew": "go on"}, False, None), Observed(messages=(Message(role="tool", content="go on"),), anew=True)),
        (({"anew": None}, False, 1), Observed(anew=True, reward=1.0)),
        (({"anew": None}, np.bool_(True), np.float32(0.5)), Observed(anew=True, done=True, reward=0.5)),
        (({"anew": None}, np.ones(2, bool), 1), "ndarray for done"),
        (({"anew": "a", "b": "c"}, False, None), "neither a text nor a list"),
        (({"anew": {"anew": "a"}}, False, None), "neither a text nor a list"),
        (({}, False, None), "neither a text nor a list"),
        (
            ({"anew": [{"role": "robot", "content": "a"}]}, False, None),
            "of the role 'robot', which is none of",
        ),
    ],
)
def test_only_a_step_that_says_so_begins_anew(returned: object, observed: Observed | str) -> None:
    if isinstance(observed, Observed):
        assert read_step(returned) == observed
    else:
        with pytest.raises(GarbageError, match=observed):
            read_step(returned)


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_role_that_the_endpoint_takes_is_one_that_an_environment_may_say(role: str) -> None:
    shown = ChatMessage(role=cast("Any", role), content="a").for_template()
    assert read_messages([{"role": role, "content": "a"}]) == (Message(role=shown["role"], content="a"),)
    assert set(get_args(get_type_hints(ChatMessage)["role"])) == set(ROLES)


@pytest.mark.parametrize("role", ["robot", "Tool", "function"])
def test_a_role_that_templates_do_not_know_is_refused_by_name(role: str) -> None:
    with pytest.raises(GarbageError, match=f"a message of the role '{role}', which is none of assistant, developer, "):
        read_messages([{"role": role, "content": "a"}])


async def test_one_turn_is_the_sample_that_it_would_be_without_an_environment() -> None:
    async with world(done()) as one:
        one.submit((0, 1), limit=9)
        request = await one.turn(1)
        assert tuple(request.samples) == (0, 1), "their prompt is computed once"
        one.say(request, [10, 11], sample=1)
        row = await one.completion()
        assert (row.segments, row.reward, row.sample, row.response_ids.tolist()) == ((), None, 1, [10, 11])
        one.say(request, [12])
        await one.completion()


async def test_rewards_of_steps_add_up() -> None:
    async with world(said("a", reward=0.25), done(reward=0.5)) as one:
        one.submit()
        one.say(await one.turn(1), [10])
        one.say(await one.turn(2), [11])
        assert (await one.completion()).reward == 0.75


async def test_what_is_said_before_the_first_turn_is_of_the_environment() -> None:
    async with world(done(), greeting=said("ab", role="user")) as one:
        one.submit()
        first = await one.turn(1)
        assert first.prompt_ids.tolist() == [*PROMPT, 41, 40, 40]
        one.say(first, [10])
        row = await one.completion()
    assert row.segments == (Segment(kind=ENVIRONMENT, end=3), Segment(kind=POLICY, end=4))
    assert [(span.start, span.end) for span in row.spans] == [(0, 4)]


async def test_an_episode_without_room_for_another_turn_ends_and_says_so() -> None:
    """20 tokens in all: 2 of the policy, and 18 are said, which leaves none to answer with."""
    async with world(said("x" * 17)) as one:
        one.submit()
        one.say(await one.turn(1), [10, 11])
        row = await one.completion()
    assert (row.finish_reason, row.response_ids.tolist(), row.segments) == (FinishReason.LENGTH, [10, 11], ())


async def test_an_episode_ends_after_its_last_turn_which_the_environment_still_judges() -> None:
    async with world(said("a"), said("b", reward=1.0), max_turns=2) as one:
        one.submit()
        one.say(await one.turn(1), [10])
        one.say(await one.turn(2), [11])
        row = await one.completion()
    assert (row.finish_reason, row.reward, len(row.segments)) == (FinishReason.LENGTH, 1.0, 3)


async def test_a_turn_that_is_cut_at_its_own_limit_is_not_the_end() -> None:
    async with world(said("a"), done(), max_turn_tokens=2) as one:
        one.submit()
        first = await one.turn(1)
        assert first.sampling.max_new_tokens == 2
        one.say(first, [10, 11], reason=FinishReason.LENGTH)
        one.say(await one.turn(2), [12])
        assert (await one.completion()).finish_reason is FinishReason.STOP


async def test_forced_lengths_are_spread_over_the_turns() -> None:
    async with world(said(""), done(), max_turns=2) as one:
        one.submit((0, 1), limits=(9, 5))
        first = await one.turn(1)
        assert (first.limits, first.sampling.ignore_eos) == ([4, 2], True)
        one.say(first, [1] * 4, reason=FinishReason.LENGTH)
        second = await one.turn(2)
        assert (second.limits, tuple(second.samples)) == ([4], (0,)), "9 - 4 - the one that is said"
        one.say(second, [1] * 4)
        await one.completion()
        one.say(first, [1] * 2, sample=1)
        one.say(await one.turn(3), [1], sample=1)
        await one.completion()


async def test_an_environment_that_failed_gives_no_row_and_may_be_tried_again() -> None:
    async with world(said("a"), EnvironmentFailedError("it hung (turn 2, 3 attempts)")) as one:
        one.submit()
        one.say(await one.turn(1), [10])
        one.say(await one.turn(2), [11])
        lost = await one.failure()
    assert (lost.group_id, lost.samples, lost.attempt) == (GROUP, (0,), 1)
    assert (lost.reason, lost.retryable) == ("it hung (turn 2, 3 attempts)", True)


async def test_what_the_template_cannot_say_is_not_tried_again() -> None:
    async with world(said("a", role="refused")) as one:
        one.submit()
        one.say(await one.turn(1), [10])
        lost = await one.failure()
    assert (lost.retryable, "refuses messages of refused" in lost.reason) == (False, True)


async def test_what_can_never_fit_is_refused_before_it_begins() -> None:
    async with world() as one:
        one.submit(limit=98)
        lost = await one.failure()
    assert (lost.retryable, "over the engine's max_context of 100" in lost.reason) == (False, True)


async def test_failures_of_the_engine_end_their_episode() -> None:
    async with world(said("a")) as one:
        one.submit((0, 1))
        request = await one.turn(1)
        one.say(request, [10])
        second = await one.turn(2)
        one.inner.fail(request, (1,))
        one.inner.fail(second, (0,))
        assert [(lost.samples, lost.reason) for lost in await one.results(2)] == [  # type: ignore[union-attr]
            ((1,), "out of luck"),
            ((0,), "out of luck"),
        ]


async def test_a_waiting_turn_leaves_its_slot_to_others() -> None:
    async with world(said("a"), done()) as one:
        one.script.may_answer.clear()
        one.submit()
        request = await one.turn(1)
        assert one.engine.load().capacity == 4
        one.say(request, [10])
        await one.script.asked.wait()
        assert (one.engine.load().capacity, one.engine.load().waiting) == (5, 1)
        one.script.may_answer.set()
        one.say(await one.turn(2), [11])
        await one.completion()
        assert one.engine.load().capacity == 4


async def test_calls_of_an_environment_that_fail_are_the_trouble_of_its_worker() -> None:
    async with world(done()) as one:
        assert one.engine.load().trouble == ""
        one.script.problem = "it took longer than 2 s"
        assert one.engine.load().trouble == "its environment fails: it took longer than 2 s"


@pytest.mark.parametrize("where", ["at its environment", "in the engine", "between them"])
async def test_an_aborted_episode_comes_out_once_and_gets_no_other_turn(where: str) -> None:
    async with world(said("a"), done()) as one:
        one.submit()
        request = await one.turn(1)
        if where == "at its environment":
            one.script.may_answer.clear()
            one.say(request, [10])
            await one.script.asked.wait()
        await one.engine.abort([(GROUP, 1)])
        assert one.inner.aborted == [(GROUP, 1)]
        if where != "at its environment":  # an engine gives back what it has, or what had ended just before
            one.say(request, [10], reason=FinishReason.ABORT if where == "in the engine" else FinishReason.STOP)
        row = await one.completion()
        assert (row.finish_reason, row.response_ids.tolist()) == (FinishReason.ABORT, [10])
        one.script.may_answer.set()
        await asyncio.sleep(0)
        assert len(one.inner.requests) == 1


async def test_a_crash_of_the_engine_is_the_end() -> None:
    async with world() as one:
        one.inner.crash(EngineCrashedError("out of memory"))
        with pytest.raises(EngineCrashedError, match="out of memory"):
            await one.engine.results()


# --- the tokens between two turns -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


def test_what_stands_between_two_turns_is_what_the_template_puts_there(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    encoder = ObservationEncoder.of(model_dir, templated=True)
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "calc"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    turn = tokenizer("calc<|im_end|>", add_special_tokens=False)["input_ids"]
    whole = tokenizer.apply_chat_template(
        [*messages, {"role": "tool", "content": "5"}], tokenize=False, add_generation_prompt=True
    )
    between = encoder.behind_turn([Message(role="tool", content="5")], turn[-1])
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert [*ids, *turn, *between] == tokenizer(whole, add_special_tokens=False)["input_ids"]
    cut = encoder.behind_turn([Message(role="tool", content="5")], turn[0])
    assert cut == [turn[-1], *between], "a turn that was cut is ended"
    assert encoder.text(turn) == "calc"


def test_without_a_template_texts_are_added_as_they_are(model_dir: Path) -> None:
    encoder = ObservationEncoder.of(model_dir, templated=False)
    ids = encoder.behind_turn([Message(role="tool", content="5"), Message(role="user", content="!")], 3)
    assert encoder.text(ids) == "5!"


def test_a_template_that_loses_the_turn_or_refuses_a_message_is_named(model_dir: Path) -> None:
    encoder = ObservationEncoder.of(model_dir, templated=True)
    encoder._tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ModelError, match="leaves out what the assistant said"):
        encoder.behind_turn([Message(role="tool", content="5")], 3)
    encoder._tokenizer.chat_template = "{{ raise_exception('no tools') }}"
    with pytest.raises(ModelError, match="refuses messages of tool: no tools"):
        encoder.behind_turn([Message(role="tool", content="5")], 3)
