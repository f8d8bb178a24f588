"""vLLM's words: what is asked of a server, and what is made of its answers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from tests.fakes.sglang_servers import FakeServer, events, fake_server, says
from transport.contracts.messages import MessageDecoder
from workers.errors import ModelError, ServerAnswerError
from workers.generation.server.order import LoadOrder, Outcome, outcome_numbers, read_outcome
from workers.generation.server.sglang_http import NEVER, GenerateBody, Load, SamplingBody
from workers.generation.server.vllm import LOADER, VllmClient, request_body

ABOUT = {
    "model_type": "qwen3",
    "logprobs_mode": "processed_logprobs",
    "max_context": 2048,
    "kv_tokens": 4096,
    "slots": 16,
    "processes": 2,
}
SAMPLING = SamplingBody(
    max_new_tokens=5, temperature=0.5, top_p=1.0, stop_token_ids=(7,), ignore_eos=False, stream_interval=NEVER
)
BODY = GenerateBody(
    rid="t:0/1;",
    input_ids=msgspec.Raw(b"[5,6]"),
    sampling_params=SAMPLING,
    extra_key="1.2",
    stream=True,
    return_logprob=True,
)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as server:
        yield server


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[VllmClient]:
    client = VllmClient(server.url, connections=2, request_s=5.0, key=server.key)
    await client.open()
    yield client
    await client.close()


def test_a_sample_is_asked_for_in_its_words() -> None:
    asked = request_body(BODY)
    assert (asked["request_id"], bytes(asked["token_ids"]), asked["cache_salt"]) == ("t:0/1;", b"[5,6]", "1.2")
    sampling = asked["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop_token_ids"]) == (5, 0.5, (7,))
    to_the_end = msgspec.structs.replace(SAMPLING, ignore_eos=True)
    forced = request_body(msgspec.structs.replace(BODY, sampling_params=to_the_end))
    assert forced["sampling_params"]["stop_token_ids"] == (), "a length that is forced is not cut by a stop token"


def choice(ids: list[int], finish: str | None = None, spans: object = None) -> dict[str, object]:
    logprobs = {"content": [{"token_id": token, "logprob": -token / 10, "rank": 1} for token in ids]}
    return {
        "choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "weight_versions": spans}],
    }


async def test_new_tokens_of_each_chunk_become_all_so_far(server: FakeServer, client: VllmClient) -> None:
    spans = [{"version": "1.1", "start": 0, "end": 1}, {"version": "1.2", "start": 1, "end": 3}]
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    server.answers["/inference/v1/generate"] = lambda request: events(
        request, choice([3]), choice([4, 5], "length", spans), usage
    )
    first, last = [chunk async for chunk in client.generate(BODY)]
    assert first.output_ids == [3]
    assert last.output_ids == [3, 4, 5]
    meta = last.meta_info
    assert meta is not None
    assert meta.finish_reason is not None
    assert (meta.finish_reason.type, meta.cached_tokens) == ("length", 128)
    assert [entry[:2] for entry in meta.output_token_logprobs] == [(-0.3, 3), (-0.4, 4), (-0.5, 5)]
    assert [(span.version, span.start, span.end) for span in meta.weight_versions] == [("1.1", 0, 1), ("1.2", 1, 3)]


async def test_an_error_in_the_middle_of_a_stream_is_one(server: FakeServer, client: VllmClient) -> None:
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}
    server.answers["/inference/v1/generate"] = lambda request: events(request, choice([3]), error)
    with pytest.raises(ServerAnswerError, match="out of memory"):
        _ = [chunk async for chunk in client.generate(BODY)]


async def test_of_several_processes_the_one_that_failed_counts(server: FakeServer, client: VllmClient) -> None:
    """And then tokens stay labelled as they were."""
    asked: list[LoadOrder] = []

    async def rpc(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(MessageDecoder(LoadOrder).decode(base64.b64decode(body["args"][0])))
        outcomes = [Outcome(number=3), Outcome(number=3, error="no such shape", mismatch=True)]
        return web.json_response({"results": [outcome_numbers(one) for one in outcomes]})

    server.answers["/collective_rpc"] = rpc
    await client.update(LoadOrder(number=3, vocab_size=97), 2, "1.2")
    assert asked == [LoadOrder(number=3, vocab_size=97)]
    assert read_outcome(await client.outcome(3)) == Outcome(number=3, error="no such shape", mismatch=True)
    assert "/update_weight_version" not in server.asked

    server.answers["/collective_rpc"] = says({"results": [outcome_numbers(Outcome(number=4))]})
    await client.update(LoadOrder(number=4, vocab_size=97), 1, "1.2")
    assert server.label == "1.2"


async def test_what_the_server_is_comes_from_its_loader(server: FakeServer, client: VllmClient) -> None:
    server.answers |= {
        "/collective_rpc": says({"results": [ABOUT, ABOUT]}),
        "/version": says({"version": "0.32.0"}),
        "/weight_info": says({"weight_version": "1.1"}),
    }
    info = await client.server_info()
    assert (info.version, info.context_length, info.max_total_num_tokens, info.tp_size) == ("0.32.0", 2048, 4096, 2)
    assert info.custom_weight_loader == [LOADER]
    model = await client.model_info()
    assert (model.model_type, model.weight_version) == ("qwen3", "1.1")
    server.answers["/collective_rpc"] = says({"results": [ABOUT | {"logprobs_mode": "raw_logprobs"}]})
    with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
        await client.server_info()


async def test_its_load_is_read_from_its_metrics(server: FakeServer, client: VllmClient) -> None:
    text = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""

    async def metrics(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    server.answers["/metrics"] = metrics
    assert await client.load() == Load(token_usage=0.25)
