"""What is asked of a server of each kind, and what is made of its answers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.fakes.sglang_servers import FakeServer, events, fake_server, says
from transport.contracts.messages import MessageDecoder
from transport.contracts.types import SamplingParams
from workers.errors import ModelError, ServerAnswerError
from workers.generation.server.client import SampleRequest, ServerClient, ServerSettings
from workers.generation.server.loader import LoadOrder, LoadResult, result_numbers
from workers.generation.server.sender import STOP_TOKENS
from workers.generation.server.sglang import SglangClient
from workers.generation.server.vllm import LOADER, VllmClient

ABOUT = {
    "model_type": "qwen3",
    "logprobs_mode": "processed_logprobs",
    "max_context": 2048,
    "kv_tokens": 4096,
    "slots": 16,
    "processes": 2,
}
SAMPLE = SampleRequest(
    rid="t:0/1;",
    prompt=msgspec.Raw(b"[5,6]"),
    label="1.2",
    sampling=SamplingParams(max_new_tokens=9, temperature=0.5, stop_token_ids=(7,)),
    max_new_tokens=5,
    seed=11,
    priority=6.6,
)


async def opened(kind: type[ServerClient], server: FakeServer) -> AsyncIterator[ServerClient]:
    settings = ServerSettings(directory=Path("m"), log=Path("log"), slots=2, request_s=5.0)
    client = kind(server.url, settings, server.key)
    await client.open()
    yield client
    await client.close()


async def asked_of(server: FakeServer, client: ServerClient, path: str, sample: SampleRequest) -> dict[str, Any]:
    """The body with which ``client`` asks for ``sample``."""
    bodies: list[dict[str, Any]] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.Response(status=500)

    server.answers[path] = keep
    with pytest.raises(ServerAnswerError):
        _ = [chunk async for chunk in client.generate(sample)]
    (body,) = bodies
    return body


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as server:
        yield server


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[ServerClient]:
    async for client in opened(VllmClient, server):
        yield client


@pytest.fixture
async def sglang(server: FakeServer) -> AsyncIterator[ServerClient]:
    async for client in opened(SglangClient, server):
        yield client


async def test_sglang_is_asked_for_what_it_can(server: FakeServer, sglang: ServerClient) -> None:
    await sglang.facts()
    body = await asked_of(server, sglang, "/generate", SAMPLE)
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("t:0/1;", [5, 6], "1.2")
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["stop_token_ids"]) == (5, [7])
    assert "priority" not in body, "a server without priorities may refuse them"
    assert "sampling_seed" not in sampling
    able = {"enable_priority_scheduling": True, "enable_deterministic_inference": True}
    server.answers["/server_info"] = says({"version": "0.5.23", "max_total_num_tokens": 1, **able})
    await sglang.facts()
    body = await asked_of(server, sglang, "/generate", SAMPLE)
    assert (body["priority"], body["sampling_params"]["sampling_seed"]) == (7, 11)


async def test_vllm_is_asked_in_its_words(server: FakeServer, client: ServerClient) -> None:
    path = "/inference/v1/generate"
    body = await asked_of(server, client, path, SAMPLE)
    assert (body["request_id"], body["token_ids"], body["cache_salt"]) == ("t:0/1;", [5, 6], "1.2")
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop_token_ids"]) == (5, 0.5, [7])
    forced = replace(SAMPLE, sampling=msgspec.structs.replace(SAMPLE.sampling, ignore_eos=True))
    body = await asked_of(server, client, path, forced)
    assert body["sampling_params"]["stop_token_ids"] == [], "a length that is forced is not cut by a stop token"


@pytest.mark.parametrize(("kind", "path"), [(SglangClient, "/generate"), (VllmClient, "/inference/v1/generate")])
async def test_stop_strings_are_looked_for_here_so_a_server_is_only_asked_to_speak_often(
    server: FakeServer, kind: type[ServerClient], path: str
) -> None:
    """It has no tokenizer, and would say which string ended a response, not which token."""
    async for client in opened(kind, server):
        body = await asked_of(server, client, path, replace(SAMPLE, chunk_tokens=STOP_TOKENS))
        sampling = body["sampling_params"]
        assert sampling["stream_interval"] == STOP_TOKENS
        assert not {"stop", "stop_regex", "no_stop_trim", "include_stop_str_in_output"} & sampling.keys()


def choice(ids: list[int], finish: str | None = None, spans: object = None) -> dict[str, object]:
    logprobs = {"content": [{"token_id": token, "logprob": -token / 10, "rank": 1} for token in ids]}
    return {
        "choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "weight_versions": spans}],
    }


async def test_new_tokens_of_each_chunk_become_all_so_far(server: FakeServer, client: ServerClient) -> None:
    spans = [{"version": "1.1", "start": 0, "end": 1}, {"version": "1.2", "start": 1, "end": 3}]
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    server.answers["/inference/v1/generate"] = lambda request: events(
        request, choice([3]), choice([4, 5], "length", spans), usage
    )
    first, last = [chunk async for chunk in client.generate(SAMPLE)]
    assert first.token_ids == [3]
    assert last.token_ids == [3, 4, 5]
    assert (last.finish_reason, last.cached_tokens) == ("length", 128)
    assert last.logprobs == [(-0.3, 3), (-0.4, 4), (-0.5, 5)]
    assert [(span.version, span.start, span.end) for span in last.spans] == [("1.1", 0, 1), ("1.2", 1, 3)]


async def test_an_error_in_the_middle_of_a_stream_is_one(server: FakeServer, client: ServerClient) -> None:
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}
    server.answers["/inference/v1/generate"] = lambda request: events(request, choice([3]), error)
    with pytest.raises(ServerAnswerError, match="out of memory"):
        _ = [chunk async for chunk in client.generate(SAMPLE)]


async def test_of_several_processes_the_one_that_failed_counts(server: FakeServer, client: ServerClient) -> None:
    """And then tokens stay labelled as they were."""
    asked: list[LoadOrder] = []

    async def rpc(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(MessageDecoder(LoadOrder).decode(base64.b64decode(body["args"][0])))
        outcomes = [LoadResult(number=3), LoadResult(number=3, error="no such shape", mismatch=True)]
        return web.json_response({"results": [result_numbers(one) for one in outcomes]})

    server.answers["/collective_rpc"] = rpc
    outcome = await client.load(LoadOrder(number=3, vocab_size=97), "1.2", 2)
    assert asked == [LoadOrder(number=3, vocab_size=97)]
    assert outcome == LoadResult(number=3, error="no such shape", mismatch=True)
    assert "/update_weight_version" not in server.asked

    server.answers["/collective_rpc"] = says({"results": [result_numbers(LoadResult(number=4))]})
    assert (await client.load(LoadOrder(number=4, vocab_size=97), "1.2", 1)).number == 4
    assert server.label == "1.2"


async def test_what_the_server_is_comes_from_its_loader(server: FakeServer, client: ServerClient) -> None:
    server.answers |= {
        "/collective_rpc": says({"results": [ABOUT, ABOUT]}),
        "/version": says({"version": "0.32.0"}),
        "/weight_info": says({"weight_version": "1.1"}),
    }
    facts = await client.facts()
    assert (facts.version, facts.max_context, facts.kv_tokens, facts.processes) == ("0.32.0", 2048, 4096, 2)
    assert (facts.loaders, facts.model_type, facts.label) == ((LOADER,), "qwen3", "1.1")
    server.answers["/collective_rpc"] = says({"results": [ABOUT | {"logprobs_mode": "raw_logprobs"}]})
    with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
        await client.facts()


async def test_its_load_is_read_from_its_metrics(server: FakeServer, client: ServerClient) -> None:
    text = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""

    async def metrics(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    server.answers["/metrics"] = metrics
    assert await client.kv_use() == 0.25
