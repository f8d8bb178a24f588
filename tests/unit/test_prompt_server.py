"""The prompt server: prompts to train and held-out problems, each found again by the name it was given."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.errors import DataError
from orchestrator.loop.intake import Arrival, Inbox, new_inbox
from orchestrator.loop.prompt_server import PromptServer
from orchestrator.prompts.dataset import Problem
from orchestrator.prompts.source import PromptEncoder, ShuffledSource
from ranker.protocol import ConstantPredictor, LengthEstimate
from transport.contracts.messages import (
    HeldOutPromptsArrived,
    PromptsArrived,
    RequestHeldOutPrompts,
    RequestPrompts,
    SlotOutcome,
)
from transport.contracts.settings import DataSettings
from transport.contracts.types import GroupId, PromptId, SamplingParams
from workers.models import character_tokenizer


def source(*questions: str) -> ShuffledSource:
    """Both kinds of problems have the same names, as those of two files of one name."""
    problems = [
        Problem(prompt_id=PromptId(f"rows.jsonl/{place}"), question=question, entry_json="{}")
        for place, question in enumerate(questions)
    ]
    encoder = PromptEncoder(character_tokenizer(), DataSettings(chat_template=False))
    return ShuffledSource(problems, encoder, seed=0, shuffle=False, passes=1)


class Hearing(ShuffledSource):
    """Remembers of which groups it heard."""

    def __init__(self, *problems: Any, **order: Any) -> None:
        super().__init__(*problems, **order)
        self.heard: list[str] = []

    def observe(self, outcome: SlotOutcome) -> None:
        self.heard.append(outcome.group_id)


@asynccontextmanager
async def running(held_out: ShuffledSource | None) -> AsyncIterator[tuple[PromptServer, Inbox]]:
    prompts = source("train a", "train b")
    server, inbox = PromptServer(prompts, ConstantPredictor(tokens=9.0), held_out=held_out), new_inbox()
    task = asyncio.create_task(server.run(inbox))
    yield server, inbox
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def next_arrival(inbox: Inbox) -> Arrival:
    async with asyncio.timeout(30):
        return await inbox.get()


async def test_held_out_problems_are_told_from_the_first_on_each_time():
    async with running(source("held a", "held b", "held c")) as (server, inbox):
        for _ in range(2):
            server.request(RequestHeldOutPrompts(count=2))
            event = (await next_arrival(inbox)).event
            assert isinstance(event, HeldOutPromptsArrived)
            assert [prompt.prompt_id for prompt in event.prompts] == ["rows.jsonl/0", "rows.jsonl/1"]
            assert [prompt.predicted_tokens for prompt in event.prompts] == [9.0, 9.0]
        server.request(RequestPrompts(count=1))
        event = (await next_arrival(inbox)).event
        assert isinstance(event, PromptsArrived)
        assert server.prompt(PromptId("rows.jsonl/0")).text == "train a"
        assert server.held_out_prompt(PromptId("rows.jsonl/0")).text == "held a"


class Recorder(ConstantPredictor):
    """Remembers what it was asked and told, and in which thread it was asked."""

    def __init__(self) -> None:
        super().__init__(tokens=9.0)
        self.asked: list[str] = []
        self.told: list[str] = []
        self.threads: set[int] = set()

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        self.asked += prompt_ids
        self.threads.add(threading.get_ident())
        return super().predict(prompt_ids, texts)

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        self.told.append(prompt_id)


async def test_the_predictor_is_asked_beside_the_loop_and_never_takes_a_held_out_problem_for_a_visit():
    recorder, inbox = Recorder(), new_inbox()
    server = PromptServer(source("train a"), recorder, held_out=source("held a"))
    task = asyncio.create_task(server.run(inbox))
    server.request(RequestPrompts(count=1))
    server.request(RequestHeldOutPrompts(count=1))
    for _ in range(2):
        await next_arrival(inbox)
    task.cancel()
    assert recorder.asked == ["rows.jsonl/0", "held out: rows.jsonl/0"]
    assert threading.get_ident() not in recorder.threads


def test_outcomes_that_are_told_again_after_a_restart_teach_nothing_twice():
    recorder = Recorder()
    server = PromptServer(source("train a", "train b"), recorder, learnt=[GroupId("0/0")])
    for slot in (0, 1):
        prompt_id = PromptId(f"rows.jsonl/{slot}")
        server.observe(SlotOutcome(group_id=GroupId(f"0/{slot}"), prompt_id=prompt_id, outcome="trained"))
    assert recorder.told == ["rows.jsonl/1"]


async def test_what_came_of_a_prompt_that_an_agent_brought_is_not_learnt_as_the_datas():
    recorder, inbox = Recorder(), new_inbox()

    async def own_prompt(group_id: GroupId) -> bytes | None:
        return b"an agent's" if group_id == "0/0" else None

    encoder = PromptEncoder(character_tokenizer(), DataSettings(chat_template=False))
    prompts = Hearing(source("a", "b").problems, encoder, seed=0, shuffle=False, passes=1)
    server = PromptServer(prompts, recorder, own_prompt=own_prompt)
    task = asyncio.create_task(server.run(inbox))
    for slot in (0, 1):
        prompt_id = PromptId(f"rows.jsonl/{slot}")
        server.observe(SlotOutcome(group_id=GroupId(f"0/{slot}"), prompt_id=prompt_id, outcome="trained"))
    server.request(RequestPrompts(count=1))
    await next_arrival(inbox)  # what was asked before it is done
    task.cancel()
    assert (recorder.told, prompts.heard) == (["rows.jsonl/1"], ["0/1"])


async def test_a_held_out_problem_says_its_set_and_how_that_is_sampled():
    hard = SamplingParams(max_new_tokens=4, temperature=0.5)
    problems = source("in no set", "in one").problems
    problems = [problems[0], dataclasses.replace(problems[1], eval_set="hard")]
    encoder = PromptEncoder(character_tokenizer(), DataSettings(chat_template=False))
    held_out = ShuffledSource(problems, encoder, seed=0, shuffle=False, passes=1)
    server = PromptServer(source(), ConstantPredictor(tokens=9.0), held_out=held_out, sampling={"hard": hard})
    inbox = new_inbox()
    task = asyncio.create_task(server.run(inbox))
    server.request(RequestHeldOutPrompts(count=2))
    event = (await next_arrival(inbox)).event
    task.cancel()
    assert isinstance(event, HeldOutPromptsArrived)
    assert [(one.eval_set, one.sampling) for one in event.prompts] == [("", None), ("hard", hard)]


async def test_a_run_without_held_out_problems_says_so():
    async with running(None) as (server, inbox):
        server.request(RequestHeldOutPrompts(count=2))
        assert (await next_arrival(inbox)).event == HeldOutPromptsArrived(prompts=())


def test_a_held_out_problem_that_is_none_any_more_is_named():
    server = PromptServer(source("train"), ConstantPredictor(tokens=9.0), held_out=source("held"))
    with pytest.raises(DataError, match=r"rows\.jsonl/7 is not among the held-out problems"):
        server.held_out_prompt(PromptId("rows.jsonl/7"))
