"""The endpoint with OpenAI's own client: what is captured, who gets which sample, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.fakes.agents import END, GROUP, KEY, MODEL, START, Endpoint, endpoint, text_of
from tests.fakes.memory_broker import FillingBroker, MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.contracts.settings import EndpointSettings
from transport.contracts.types import (
    FinishReason,
    GroupId,
    RunName,
    SegmentKind,
    WeightIdentity,
    evaluation_id,
    group_id,
)
from transport.rows.columns import loss_mask
from workers.endpoint.http import run_key
from workers.generation.engine import ABORTED_UNSTARTED, Completion, EngineFailure, OnTokens

HELLO = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

ALL = EndpointSettings(wait_s=0.0, branches="all")


def client(work: dict[str, Any], **changes: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": work["base_url"], "api_key": work["key"], "max_retries": 0, **changes})


@asynccontextmanager
async def session(
    tmp_path: Path, *answers: str, samples: Sequence[int] = (0,), max_new_tokens: int = 1000, **changes: Any
) -> AsyncIterator[tuple[Endpoint, dict[str, Any], openai.AsyncOpenAI]]:
    """An endpoint, the lease of one of its samples, and a client with the key of that lease."""
    async with endpoint(tmp_path, *answers, **changes) as served:
        served.offer(*samples, max_new_tokens=max_new_tokens)
        work = await served.lease()
        async with client(work) as agent:
            yield served, work, agent


async def say(agent: openai.AsyncOpenAI, messages: Sequence[Any], **asked: Any) -> Any:
    return await agent.chat.completions.create(model=MODEL, messages=list(messages), **asked)


async def sealed(served: Endpoint, work: dict[str, Any], reward: float | None = None) -> Completion:
    answer = await served.run.post(f"/sessions/{work['id']}/end", json={} if reward is None else {"reward": reward})
    assert answer.status_code == 200, answer.text
    (result,) = await served.results()
    assert isinstance(result, Completion)
    return result


def parts(served: Endpoint, row: Completion) -> list[tuple[SegmentKind, str]]:
    """Who chose what, as text."""
    start, found = 0, []
    for segment in row.segments:
        found.append((segment.kind, text_of(served.inner.tokenizer, row.response_ids[start : segment.end])))
        start = segment.end
    return found


async def test_a_conversation_is_a_row_of_the_ids_that_were_sampled(tmp_path: Path) -> None:
    async with session(tmp_path, "Hello.", "Fine.", samples=(2,)) as (served, work, agent):
        assert {name: work[name] for name in ("group", "sample", "question", "answer", "prompt")} == {
            "group": GROUP,
            "sample": 2,
            "question": "1+1",
            "answer": "2",
            "prompt": "1+1=",
        }
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, HELLO]
        first = await say(agent, messages, temperature=0.1, max_tokens=50)
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Hello.", "stop")
        served.inner.weights = WeightIdentity(epoch=1, version=4)
        second = await say(agent, [*messages, first.choices[0].message, {"role": "user", "content": "And you?"}])
        assert second.choices[0].message.content == "Fine."
        row = await sealed(served, work, 0.5)
        assert (row.group_id, row.sample, row.reward, row.finish_reason) == (GROUP, 2, 0.5, FinishReason.STOP)
        assert parts(served, row) == [
            (SegmentKind.ENVIRONMENT, f"system\nBe brief.{END}{START}user\nHi{END}{START}assistant\n"),
            (SegmentKind.POLICY, f"Hello.{END}"),
            (SegmentKind.ENVIRONMENT, f"{START}user\nAnd you?{END}{START}assistant\n"),
            (SegmentKind.POLICY, f"Fine.{END}"),
        ]
        one, two = served.inner.requests
        assert two.prompt_ids.tolist() == [*one.prompt_ids, *row.response_ids[len(one.prompt_ids) - 1 : -6]]
        assert int(loss_mask(row.segments).sum()) == len("Hello.") + len("Fine.") + 2
        assert [(span.weights.version, span.end) for span in row.spans] == [
            (0, row.segments[1].end),
            (4, row.segments[3].end),
        ]
        assert one.sampling.temperature == two.sampling.temperature == 0.7, "of the run, whatever an agent asks"
        assert (one.sampling.max_new_tokens, one.sampling.seed != two.sampling.seed) == (50, True)
        assert one.keep, "its KV is there for the next turn"
        assert one.conversation == two.conversation == work["id"]


async def test_calls_of_tools_are_found_continued_and_masked(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    async with session(tmp_path, f"Let me see. {call}", "2.") as (served, work, agent):
        asked = await say(agent, [HELLO], tools=TOOLS)
        choice = asked.choices[0]
        (found,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert (found.function.name, json.loads(found.function.arguments)) == ("add", {"a": 1})
        told = {"role": "tool", "tool_call_id": found.id, "content": "2"}
        await say(agent, [HELLO, choice.message, told], tools=TOOLS)
        row = await sealed(served, work)
        assert [kind for kind, _ in parts(served, row)] == ["environment", "policy", "tool", "policy"]
        assert parts(served, row)[1][1] == f"Let me see. {call}{END}"
        assert parts(served, row)[2][1] == f"{START}tool\n2{END}{START}assistant\n"
        assert row.reward is None, "the run's reward function scores it"


@pytest.mark.parametrize(
    ("echoed", "branches"),
    [
        ({}, 1),
        ({"arguments": '{"a":1,"b":[2]}'}, 1),
        ({"arguments": '{"b": [2], "a": 1}'}, 1),
        ({"name": "adder"}, 1),
        ({"arguments": '{"a": 1, "b": [3]}'}, 2),
        ({"arguments": '{"a": 1, "b": ["2"]}'}, 2),
        ({"arguments": '{"a": 1, "b": [2]'}, 2),
    ],
)
async def test_a_call_that_its_client_writes_anew_is_the_same_as_long_as_it_says_the_same(
    tmp_path: Path, echoed: dict[str, str], branches: int
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
    async with session(tmp_path, call, "3.", "Yes.") as (served, work, agent):
        (found,) = (await say(agent, [HELLO], tools=TOOLS)).choices[0].message.tool_calls
        function = {"name": "add", "arguments": echoed.get("arguments", found.function.arguments)}
        called = {"role": "assistant", "content": None, "tool_calls": [found.model_dump() | {"function": function}]}
        if "name" in echoed:
            called["name"] = echoed["name"]
        told = [HELLO, called, {"role": "tool", "tool_call_id": found.id, "content": "3"}]
        answer = (await say(agent, told, tools=TOOLS)).choices[0].message
        await say(agent, [*told, answer, {"role": "user", "content": "Sure?"}], tools=TOOLS)
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert state["branches"] == branches
        written = [text for kind, text in parts(served, await sealed(served, work, 1.0)) if kind == "policy"]
        assert written == [f"{call}{END}", f"3.{END}", f"Yes.{END}"][: 3 if branches == 1 else 1]


async def test_names_of_messages_that_the_policy_did_not_write_are_compared(tmp_path: Path) -> None:
    async with session(tmp_path, "a", "b") as (served, work, agent):
        for name in ("one", "two"):
            shown = [HELLO, {"role": "assistant", "content": "Shown.", "name": name}, HELLO]
            answer = (await say(agent, shown)).choices[0].message
            assert answer.content == {"one": "a", "two": "b"}[name]
        await say(agent, [*shown, answer, HELLO])
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert (state["answers"], state["branches"]) == (3, 2)


@pytest.mark.parametrize(("between", "branches"), [("END", 1), ("", 2)])
async def test_a_text_goes_on_behind_the_stop_string_that_its_ids_hold(
    tmp_path: Path, between: str, branches: int
) -> None:
    async with session(tmp_path, "b END c", "d") as (served, work, agent):
        first = await agent.completions.create(model=MODEL, prompt="a", stop=["END"], max_tokens=9)
        assert first.choices[0].text == "b "
        await agent.completions.create(model=MODEL, prompt="a" + first.choices[0].text + between + "c")
        assert (await served.run.get(f"/sessions/{work['id']}")).json()["branches"] == branches


@pytest.mark.parametrize("text", ["<tool_call>{add 1}</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>"])
async def test_a_tool_call_that_is_no_json_stays_text(tmp_path: Path, text: str) -> None:
    async with endpoint(tmp_path, text) as served:
        served.offer()
        async with client(await served.lease()) as agent:
            answer = await say(agent, [HELLO], tools=TOOLS)
            assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (text, None)


async def test_streams_logprobs_stops_and_ids(tmp_path: Path) -> None:
    async with session(tmp_path, "one two three", "abc END def", "x") as (served, _, agent):
        chunks = [
            chunk async for chunk in await say(agent, [HELLO], stream=True, stream_options={"include_usage": True})
        ]
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert (text, chunks[-1].usage.completion_tokens) == ("one two three", 14)
        stopped = await say(agent, [{"role": "user", "content": "b"}], stop=["END"], logprobs=True)
        assert stopped.choices[0].message.content == "abc "
        assert len(stopped.choices[0].logprobs.content) == len("abc END")
        plain = await agent.completions.create(
            model=MODEL, prompt="Say", logprobs=0, extra_body={"return_token_ids": True}
        )
        assert plain.choices[0].text == "x"
        assert plain.choices[0].logprobs.token_logprobs == [-1 / 64, -2 / 64]
        assert plain.model_extra["prompt_token_ids"] == served.inner.requests[-1].prompt_ids.tolist()


async def asked_to_tell(served: Endpoint) -> OnTokens:
    """What the one turn that is under way wants to be told its tokens by."""
    await served.inner.asked.wait()
    (request,) = served.inner.requests
    assert request.on_tokens is not None
    return request.on_tokens


async def test_a_stream_brings_tokens_while_the_engine_draws_them(tmp_path: Path) -> None:
    async with session(tmp_path, "one two") as (served, work, agent):
        served.inner.held.clear()
        asking = asyncio.create_task(say(agent, [HELLO], stream=True, logprobs=True))
        async with asyncio.timeout(30):
            tell = await asked_to_tell(served)
            ids = served.inner.tokenizer("one two", add_special_tokens=False)["input_ids"]
            tell(0, ids[:3], [-0.5] * 3)
            chunks = aiter(await asking)
            heard = [await anext(chunks), await anext(chunks)]
            assert [one.choices[0].delta.content for one in heard] == ["", "one"]
            assert [one.logprob for one in heard[1].choices[0].logprobs.content] == [-0.5] * 3
            tell(0, ids[:5], [-0.5] * 5)  # computed again, and the same so far
            assert (await anext(chunks)).choices[0].delta.content == " t"
            served.inner.release()
            rest = [one async for one in chunks]
        assert "".join(one.choices[0].delta.content or "" for one in rest) == "wo"
        assert sum(len(one.choices[0].logprobs.content) for one in rest if one.choices[0].logprobs) == 3
        assert rest[-1].choices[0].finish_reason == "stop"
        row = await sealed(served, work, reward=1.0)
        assert row.response_ids[-8:].tolist() == [*ids, served.inner.tokenizer.eos_token_id]


async def test_an_answer_that_began_anew_ends_its_stream_by_name_and_is_no_part_of_the_sample(tmp_path: Path) -> None:
    async with session(tmp_path, "one") as (served, work, agent):
        served.inner.held.clear()
        asking = asyncio.create_task(say(agent, [HELLO], stream=True))
        async with asyncio.timeout(30):
            tell = await asked_to_tell(served)
            tell(0, [7, 8], [-0.5, -0.5])
            served.inner.release()
            with pytest.raises(openai.APIError, match="began the answer anew"):
                [one async for one in await asking]
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert state["answers"] == 0


async def test_a_client_that_leaves_in_the_middle_of_a_stream_calls_its_turn_off(tmp_path: Path) -> None:
    async with endpoint(tmp_path, "one") as served:
        served.offer()
        work = await served.lease()
        served.inner.held.clear()
        body = {"model": MODEL, "messages": [HELLO], "stream": True}
        key = {"authorization": f"Bearer {work['key']}"}
        async with asyncio.timeout(30), httpx.AsyncClient(base_url=work["base_url"], headers=key) as agent:
            async with agent.stream("POST", "/chat/completions", json=body) as answer:
                tell = await asked_to_tell(served)
                tell(0, [7], [-0.5])
                await anext(answer.aiter_lines())
            await served.inner.called_off.wait()
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert state["answers"] == 0


async def test_text_goes_on_where_it_ended(tmp_path: Path) -> None:
    async with session(tmp_path, "b", "d") as (served, work, agent):
        first = await agent.completions.create(model=MODEL, prompt="a", max_tokens=1)
        await agent.completions.create(model=MODEL, prompt="a" + first.choices[0].text + "c")
        row = await sealed(served, work, 1.0)
        assert parts(served, row) == [
            (SegmentKind.ENVIRONMENT, "a"),
            (SegmentKind.POLICY, "b"),
            (SegmentKind.ENVIRONMENT, "c"),
            (SegmentKind.POLICY, f"d{END}"),
        ]


async def test_forks_and_edited_history_are_branches_and_the_longest_is_trained(tmp_path: Path) -> None:
    async with session(tmp_path, "first", "a", "a longer one", "edited") as (served, work, agent):
        first = (await say(agent, [HELLO])).choices[0].message
        await say(agent, [HELLO, first, {"role": "user", "content": "x"}])
        await say(agent, [HELLO, first, {"role": "user", "content": "y"}])
        await say(agent, [HELLO, {"role": "assistant", "content": "another"}, {"role": "user", "content": "z"}])
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert (state["branches"], state["dropped_tokens"]) == (3, len("a") + len("edited") + 2)
        row = await sealed(served, work)
        assert [text for kind, text in parts(served, row) if kind == "policy"] == [f"first{END}", f"a longer one{END}"]


async def test_all_branches_are_one_row_where_the_settings_say_so(tmp_path: Path) -> None:
    async with session(tmp_path, "first", "a", "bb", settings=ALL) as (served, work, agent):
        first = (await say(agent, [HELLO])).choices[0].message
        await say(agent, [HELLO, first, {"role": "user", "content": "x"}])
        await say(agent, [HELLO, {"role": "assistant", "content": "another"}, {"role": "user", "content": "z"}])
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert (state["branches"], state["policy_tokens"], state["dropped_tokens"]) == (2, 6 + 2 + 3, 0)
        row = await sealed(served, work, reward=0.5)
        told = [text for kind, text in parts(served, row) if kind == "policy"]
        assert told == [f"first{END}", f"a{END}", f"bb{END}"]
        begin, end = row.branch_ends
        assert end == len(row.response_ids)
        assert served.inner.requests[2].prompt_ids[1:].tolist() == row.response_ids[begin : end - 3].tolist()


async def test_branches_that_have_no_room_together_are_dropped_and_counted(tmp_path: Path) -> None:
    answers = ("short", "a longer one")
    async with session(tmp_path, *answers, settings=ALL, max_new_tokens=50) as (served, work, agent):
        await say(agent, [HELLO])
        await say(agent, [{"role": "user", "content": "Yo"}])
        state = (await served.run.get(f"/sessions/{work['id']}")).json()
        assert (state["branches"], state["dropped_tokens"]) == (2, len("short") + 1)
        row = await sealed(served, work, reward=0.5)
        assert [text for kind, text in parts(served, row) if kind == "policy"] == [f"a longer one{END}"]
        assert row.branch_ends == ()


async def test_the_path_names_the_session_too_and_without_one_nothing_is_captured(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        served.offer()
        work = await served.lease()
        async with client(work, base_url=work["session_url"], api_key=KEY) as agent:
            await say(agent, [HELLO])
            assert [model.id async for model in await agent.models.list()] == [MODEL]
        async with client(work, api_key=KEY) as judge:
            await say(judge, [HELLO], temperature=0.0, seed=11, max_tokens=9)
        assert served.inner.requests[-1].sampling.temperature == 0.0
        assert served.inner.requests[-1].sampling.seed == 11
        assert (await served.run.get(f"/sessions/{work['id']}")).json()["answers"] == 1


async def test_a_session_that_lost_its_agent_is_leased_again_and_fails_at_the_limit(tmp_path: Path) -> None:
    settings = EndpointSettings(wait_s=60.0, silence_s=60.0, max_leases=2)
    async with endpoint(tmp_path, settings=settings) as served:
        served.offer()
        first = await served.lease()
        async with client(first) as agent:
            await say(agent, [HELLO])
            served.clock.advance(50)
            assert (await served.run.post(f"/sessions/{first['id']}/heartbeat")).status_code == 200
            served.clock.advance(50)
            again = await served.run.post("/sessions", json={"wait_s": 1.5})
            assert again.status_code == 429, "it was heard 50 s ago"
            served.clock.advance(11)
            second = await until_leased(served)
            assert (second["group"], second["sample"], second["lease"]) == (GROUP, 0, 2)
            with pytest.raises(openai.APIStatusError, match=r"sent nothing for 60 s \(endpoint\.silence_s\)") as ended:
                await say(agent, [HELLO])
            assert (ended.value.status_code, ended.value.code) == (410, "session_ended")
        said = await served.run.post(f"/sessions/{second['id']}/fail", json={"reason": "no memory"})
        assert said.json() == {"given_back": True}
        (result,) = await served.results()
        assert isinstance(result, EngineFailure)
        assert (result.samples, result.retryable) == ((0,), True)
        assert result.reason == "its agent failed: no memory (the last of 2 leases)"


async def until_leased(served: Endpoint) -> dict[str, Any]:
    answer = await served.run.post("/sessions", json={"wait_s": 60.0})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_session_that_never_ends_is_taken_back_also_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    async with session(tmp_path, settings=EndpointSettings(wait_s=60.0, max_session_s=100.0)) as (served, _, agent):
        served.inner.held.clear()
        asking = asyncio.create_task(say(agent, [HELLO]))
        await served.inner.asked.wait()
        served.clock.advance(101)
        with pytest.raises(openai.APIStatusError, match="did not end it within 100 s") as ended:
            await asking
        assert ended.value.status_code == 410
        assert (await until_leased(served))["lease"] == 2


async def test_every_sample_comes_out_once_whatever_is_aborted(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        request = served.offer(0, 1, 2)
        begun, idle = await served.lease(), await served.lease()
        async with client(begun) as agent:
            await say(agent, [HELLO])
            await served.engine.abort([request.key])
            results = {getattr(one, "sample", None): one for one in await served.results()}
            assert isinstance(results[0], Completion)
            assert results[0].finish_reason is FinishReason.ABORT
            failed = [one for one in results.values() if isinstance(one, EngineFailure)]
            assert {one.reason for one in failed} <= {ABORTED_UNSTARTED}
            with pytest.raises(openai.APIStatusError, match="does not want its sample any more"):
                await say(agent, [HELLO])
        assert (await served.run.post(f"/sessions/{idle['id']}/end")).status_code == 410
        assert (served.engine.sessions.seats, served.engine.sessions.open) == ([], {})


async def test_an_end_that_is_repeated_seals_nothing_more(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        served.offer(0, 1)
        work, other = await served.lease(), await served.lease()
        empty = await served.run.post(f"/sessions/{work['id']}/end", json={"reward": 1})
        assert (empty.status_code, empty.json()["error"]["code"]) == (409, "empty_session")
        async with client(work) as agent:
            await say(agent, [HELLO])
        own = {"authorization": f"Bearer {work['key']}"}
        assert (await served.run.post(f"/sessions/{work['id']}/reward", json={"reward": 2}, headers=own)).is_success
        for _ in range(2):
            answer = await served.run.post(f"/sessions/{work['id']}/end", headers=own)
            assert answer.json()["sealed"] is True
        assert (await served.run.post(f"/sessions/{work['id']}/end", headers=own, json={"reward": 2})).is_success
        other_reward = await served.run.post(f"/sessions/{work['id']}/end", headers=own, json={"reward": 3})
        assert (other_reward.status_code, other_reward.json()["error"]["param"]) == (409, "reward")
        assert "its reward is 2" in other_reward.json()["error"]["message"]
        (row,) = await served.results()
        assert isinstance(row, Completion)
        assert row.reward == 2.0
        assert (await served.run.post(f"/sessions/{work['id']}/reward", json={"reward": 3})).status_code == 410
        foreign = await served.run.post(f"/sessions/{other['id']}/end", headers=own)
        assert foreign.status_code in (403, 410)


async def test_a_session_that_ends_while_others_are_stopped_comes_out_once(tmp_path: Path) -> None:
    """The engine takes its time to stop a turn; meanwhile an agent seals its sample."""
    settings = EndpointSettings(wait_s=0.0, max_session_s=100.0)
    async with endpoint(tmp_path, settings=settings) as served:
        stopping, stopped = asyncio.Event(), asyncio.Event()

        async def slow_abort(groups: Collection[tuple[GroupId, int]]) -> None:
            stopping.set()
            await stopped.wait()
            await abort(groups)

        abort, served.inner.abort = served.inner.abort, slow_abort
        request = served.offer(0, 1)
        busy, ready = await served.lease(), await served.lease()
        async with client(ready) as agent, client(busy) as other:
            await say(agent, [HELLO])
            served.inner.held.clear()
            served.inner.asked.clear()
            asking = asyncio.create_task(say(other, [HELLO]))
            async with asyncio.timeout(30):
                await served.inner.asked.wait()
            aborting = asyncio.create_task(served.engine.abort([request.key]))
            async with asyncio.timeout(30):
                await stopping.wait()
            end = await served.run.post(f"/sessions/{ready['id']}/end", json={"reward": 1})
            assert end.status_code == 410, "its result is out: the sample as far as it was"
            stopped.set()
            await aborting
            with pytest.raises(openai.APIStatusError):
                await asking
        results = await served.results()
        assert sorted(getattr(one, "sample", -1) for one in results) == [-1, 1]


async def test_two_ends_whose_bodies_come_late_are_answered_alike(tmp_path: Path) -> None:
    async with session(tmp_path) as (served, work, agent):
        await say(agent, [HELLO])
        address, body = urlsplit(work["base_url"]), b'{"reward": 1}'
        head = f"POST {address.path}/sessions/{work['id']}/end HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"authorization: Bearer {KEY}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        ends = [await asyncio.open_connection(address.hostname, address.port) for _ in range(2)]
        for _, writer in ends:
            writer.write(head.encode())
            await writer.drain()
        await served.run.get("/sessions")  # both heads were read before
        for _, writer in ends:
            writer.write(body)
        answers = [await reader.read() for reader, _ in ends]
        for _, writer in ends:
            writer.close()
        assert [one.split(b"\r\n", 1)[0] for one in answers] == [b"HTTP/1.1 200 OK"] * 2
        assert len(await served.results()) == 1


async def test_leases_are_bounded_and_evaluations_are_named(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        none = await served.run.post("/sessions", json={"wait_s": 0})
        assert (none.status_code, none.json()["error"]["code"], none.headers["retry-after"]) == (429, "no_sample", "1")
        served.offer(0)
        served.offer(0, group=evaluation_id(1, 2))
        work = await served.lease(group="eval1/2")
        assert (work["evaluation"], work["group"]) == (True, "eval1/2")
        assert (await served.run.post("/sessions", json={"group": "9/9"})).status_code == 429
        stranger = await served.run.post("/sessions", headers={"authorization": f"Bearer {work['key']}"})
        assert stranger.json()["error"]["code"] == "run_key_wanted"
        load = served.engine.load()
        assert (load.capacity, load.waiting) == (5, 2), "one whose agent thinks leaves its slot to another"


CALLED_WITH_HALF_A_PAIR = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"place": "\\ud800"}).replace("\\\\", "\\")}}],
}
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": [], "ignore_eos": False, "n": 1}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-4"}, 404, "'gpt-4' is not served here: this run's is 'tiny'"),
    ({"n": 2}, 400, "n must be 1"),
    ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs must be 0"),
    *(
        ({name: value}, 400, f"{name} would change the prompt or what is sampled")
        for name, value in {
            **{"presence_penalty": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True},
            **{"stop_token_ids": [7], "guided_choice": ["a"], "chat_template": "x", "add_generation_prompt": False},
        }.items()
    ),
    ({"enable_thinking": True}, 400, "give it in chat_template_kwargs"),
    ({"chat_template_kwargs": {"no_such": 1}}, 400, "reads no 'no_such'"),
    ({"messages": [CALLED_WITH_HALF_A_PAIR]}, 400, "half of a surrogate pair"),
    ({"tool_choice": "required"}, 400, "nothing forces the policy"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format must be text"),
    ({"messages": []}, 400, "length >= 1"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "king"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'image_url' is not supported"),
    ({"max_tokens": 0}, 400, ">= 1"),
    ({"top_k": 2**31}, 400, "<= 2147483647"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "a conversation may have 300"),
    ({"messages": [{"role": "user", "content": "x" * 9_000_000}]}, 413, "a body has at most"),
]


@pytest.mark.parametrize(("changes", "status", "reason"), REFUSED, ids=[str(next(iter(one[0]))) for one in REFUSED])
async def test_what_is_refused_is_named_in_openais_form(
    tmp_path: Path, changes: dict[str, Any], status: int, reason: str
) -> None:
    async with endpoint(tmp_path) as served:
        served.offer(max_new_tokens=300)
        work = await served.lease()
        headers = {"authorization": f"Bearer {work['key']}"}
        body = {"model": MODEL, "messages": [HELLO], **changes}
        answer = await served.run.post("/chat/completions", json=body, headers=headers)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert reason in error["message"]
        assert error["type"] == "invalid_request_error"
        assert served.inner.requests == []


async def test_a_mistyped_reward_is_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        served.offer()
        assert (await served.run.post("/sessions", json={"waits": 1})).status_code == 400
        work = await served.lease()
        for call in ("reward", "end", "fail"):
            mistyped = await served.run.post(f"/sessions/{work['id']}/{call}", json={"rewrd": 1})
            assert (mistyped.status_code, "rewrd" in mistyped.text) == (400, True)
        assert (await served.run.get(f"/sessions/{work['id']}")).status_code == 200


async def test_half_a_request_and_unknown_keys_are_answered(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        half = await served.run.post("/chat/completions", content=b'{"model": "tiny", "mess')
        assert (half.status_code, half.json()["error"]["code"]) == (400, "invalid_json")
        async with client({"base_url": served.base_url, "key": "sk-wrong"}) as stranger:
            with pytest.raises(openai.AuthenticationError, match=r"endpoint.key of the run's directory"):
                await say(stranger, [HELLO])
        assert (await served.run.get("/sessions/s-none")).json()["error"]["code"] == "no_such_session"


async def test_a_request_that_breaks_off_in_its_body_asks_nothing_and_its_session_goes_on(tmp_path: Path) -> None:
    async with session(tmp_path) as (served, work, agent):
        address = urlsplit(work["base_url"])
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps({"model": MODEL, "messages": [HELLO]}).encode()
        head = f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"authorization: Bearer {work['key']}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-5])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await say(agent, [HELLO])).choices[0].message.content == "ok"
        assert len(served.inner.requests) == 1


async def test_a_client_that_hangs_up_calls_its_turn_off(tmp_path: Path) -> None:
    async with session(tmp_path) as (served, work, agent):
        served.inner.held.clear()
        async with client(work, timeout=0.5) as hasty:
            with pytest.raises(openai.APITimeoutError):
                await say(hasty, [HELLO])
        async with asyncio.timeout(30):
            await served.inner.called_off.wait()
        assert (await served.run.get(f"/sessions/{work['id']}")).json()["answers"] == 0
        served.inner.held.set()
        await say(agent, [HELLO])
        assert (await sealed(served, work)).segments[-1].kind is SegmentKind.POLICY


async def test_a_session_may_ask_in_parallel_up_to_a_limit(tmp_path: Path) -> None:
    async with session(tmp_path, settings=EndpointSettings(wait_s=0.0, max_turns=10)) as (served, _, agent):
        served.inner.held.clear()
        asking = [asyncio.create_task(say(agent, [HELLO])) for _ in range(12)]
        async with asyncio.timeout(30):
            for over in itertools.islice(asyncio.as_completed(asking), 4):
                with pytest.raises(openai.RateLimitError, match="8 requests of the session are under way"):
                    await over
        served.inner.held.set()
        served.inner.release()
        await asyncio.gather(*asking, return_exceptions=True)
        seeds = [request.sampling.seed for request in served.inner.requests]
        assert len(set(seeds)) == len(seeds) == 8, "no two of them draw alike"
        await say(agent, [HELLO])
        await say(agent, [HELLO])
        with pytest.raises(openai.BadRequestError, match=r"may have 10 answers \(endpoint\.max_turns\)"):
            await say(agent, [HELLO])


async def test_a_conversation_longer_than_its_sample_ends_for_its_length(tmp_path: Path) -> None:
    async with session(tmp_path, "x" * 500, max_new_tokens=60) as (served, work, agent):
        first = (await say(agent, [HELLO])).choices[0]
        assert first.finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="a conversation may have 60") as refused:
            await say(agent, [HELLO, first.message, HELLO])
        assert refused.value.code == "context_length_exceeded"
        row = await sealed(served, work)
        assert (len(row.response_ids), row.finish_reason) == (60, FinishReason.LENGTH)


async def test_an_engine_that_fails_is_no_answer_and_no_sample(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        served.offer()
        served.inner.failure = "out of luck"
        async with client(await served.lease()) as agent:
            with pytest.raises(openai.InternalServerError, match="out of luck"):
                await say(agent, [HELLO])
            with pytest.raises(openai.APIError, match="out of luck"):
                [chunk async for chunk in await say(agent, [HELLO], stream=True)]
            served.inner.failure = ""
            assert (await say(agent, [HELLO])).choices[0].message.content == "ok"


async def test_an_agents_own_prompt_is_one_group_also_after_a_restart(tmp_path: Path) -> None:
    broker = MemoryBroker(MemoryServer(), RunName("tiny"))
    own = {"id": "mine-1", "question": "2+2", "answer": "4"}
    async with endpoint(tmp_path, broker=broker) as served:
        served.offer(0, 1)
        served.offer(0, 1, group=group_id(3, 2))
        first = await served.lease(prompt=own, wait_s=30.0)
        assert (first["group"], first["prompt_id"], first["question"], first["answer"]) == (GROUP, "mine-1", "2+2", "4")
        assert (await served.lease())["group"] == "3/2", "the group of another's prompt comes last"
        second = await served.lease(prompt=own)
        assert (second["group"], second["sample"]) == (GROUP, 1)
        none = await served.run.post("/sessions", json={"prompt": own, "wait_s": 0})
        assert none.status_code == 429, "what is left of 3/2 answers the row's question"
        assert none.json()["error"]["message"] == (
            "1 sample waits for an agent, but of groups that were begun, or evaluate, or have a prompt: your own takes "
            "a group of which none of the 2 samples (group_size) was leased; ask again"
        )
        standing = (await served.run.get("/sessions")).json()
        assert (standing["waiting"], standing["group_size"], first["group_size"]) == (1, 2, 2)
        async with client(first) as agent:
            await say(agent, [HELLO])
        assert "needs a reward of yours" in (await served.run.post(f"/sessions/{first['id']}/end")).text
        assert (await sealed(served, first, 1.0)).reward == 1.0
    async with endpoint(tmp_path, broker=broker) as again:
        again.offer(1, attempt=1)
        assert (await again.lease(wait_s=30.0))["prompt_id"] == "mine-1", "the sample that is missing has its prompt"


async def test_a_lease_that_gets_nothing_is_told_what_waits_instead(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        served.offer(0, 1)
        other = await served.run.post("/sessions", json={"group": "9/9"})
        assert other.json()["error"]["message"] == "2 samples wait for an agent, but none of group 9/9; ask again"
        await served.lease()
        await served.lease()
        nothing = await served.run.post("/sessions", json={"group": GROUP})
        assert "the run has given out all that it wants now" in nothing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("own", "param", "said"),
    [
        ({"id": "q7", "messages": [HELLO], "qestion": "typo"}, "prompt.messages", "contains unknown field `messages`"),
        ({"id": "q7", "qestion": "typo"}, "prompt.qestion", "contains unknown field `qestion`"),
        ({"id": "q7"}, "prompt.question", "is empty"),
        ({"id": "q7", "question": " "}, "prompt.question", "is empty"),
        ({"id": "q7", "question": 7}, "prompt.question", "Expected `str`, got `int`"),
        ({"question": "2+2"}, "prompt.id", "missing required field `id`"),
    ],
)
async def test_an_own_prompt_that_asks_nothing_is_refused_by_name(
    tmp_path: Path, own: dict[str, Any], param: str, said: str
) -> None:
    broker = MemoryBroker(MemoryServer(), RunName("tiny"))
    async with endpoint(tmp_path, broker=broker) as served:
        served.offer(0, 1)
        refused = await served.run.post("/sessions", json={"prompt": own, "wait_s": 30})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert said in refused.json()["error"]["message"]
        assert served.engine.sessions.own_prompts == {}


async def test_an_agents_own_prompt_that_could_not_be_kept_is_no_groups(tmp_path: Path) -> None:
    broker = FillingBroker(MemoryServer(), RunName("tiny"))
    broker.full = True
    own = {"id": "mine-1", "question": "2+2"}
    async with endpoint(tmp_path, broker=broker) as served:
        served.offer(0, 1)
        refused = await served.run.post("/sessions", json={"prompt": own, "wait_s": 30})
        assert (refused.status_code, served.engine.sessions.own_prompts) == (503, {})
        broker.full = False
        assert (await served.lease(prompt=own))["prompt_id"] == "mine-1"
    async with endpoint(tmp_path, broker=broker) as again:
        again.offer(0, attempt=1)
        assert (await again.lease(wait_s=30.0))["prompt_id"] == "mine-1"


def test_the_key_of_a_run_is_nothing_that_its_name_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = RunName("tiny")
    monkeypatch.setattr("transport.process.secret.own_directories", lambda: [tmp_path / "one"])
    key = run_key(b"", name)
    assert key == run_key(b"", name), "all workers of a user have it"
    monkeypatch.setattr("transport.process.secret.own_directories", lambda: [tmp_path / "two"])
    assert run_key(b"", name) != key, "and no other user"
    assert run_key(b"a shared secret of many characters", name) not in (key, run_key(b"", name))


async def test_a_lease_that_waits_when_the_worker_ends_is_told_so(tmp_path: Path) -> None:
    async with endpoint(tmp_path, settings=EndpointSettings(wait_s=60.0)) as served:
        waiting = asyncio.create_task(served.run.post("/sessions"))
        async with asyncio.timeout(30):
            while not (await served.run.get("/sessions")).json()["agents_waiting"]:
                pass
        await served.engine.close()
        assert served.inner.closed
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closing")


async def test_the_name_of_a_session_that_has_ended_opens_nothing(tmp_path: Path) -> None:
    async with endpoint(tmp_path) as served:
        served.offer(0)
        session = await served.lease()
        sealed = await served.run.post(f"/sessions/{session['id']}/fail", json={"reason": "gave up"})
        assert sealed.status_code == 200
        for path in ("/models", "/sessions"):
            by_name, by_key = [
                await served.run.get(path, headers={"authorization": f"Bearer {session[word]}"})
                for word in ("id", "key")
            ]
            assert by_name.status_code == 401
            assert by_key.status_code != 401
