"""The SGLang engine on a server that errs: what it refuses, sends again, and gives up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from aiohttp import web

from tests.fakes.sglang_servers import FakeServer, events, fake_server, loader_says, says
from transport.contracts.llms import Fp8
from transport.contracts.types import FinishReason, GroupId, SamplingParams, WeightIdentity
from transport.errors import PeerUnavailableError
from transport.process.clock import MonotonicClock
from workers.errors import EngineCrashedError, ModelError, WeightsMismatchError
from workers.generation.engine import Completion, EngineFailure, GenerationRequest, serving
from workers.generation.server import engine as server_engine
from workers.generation.server import sender
from workers.generation.server.client import ServerSettings
from workers.generation.server.engine import ServerEngine
from workers.generation.server.sglang import LOADER, SGLANG
from workers.models import character_tokenizer

WEIGHTS = WeightIdentity(epoch=1, version=1)
TENSORS = {"a": torch.ones(2)}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"model_type": "qwen3", "vocab_size": 50, "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def settings(model_dir: Path, server: FakeServer | None = None) -> ServerSettings:
    return ServerSettings(
        directory=model_dir,
        log=model_dir / "s.log",
        url=server.url if server else "",
        key=server.key if server else "",
        slots=4,
        startup_s=5.0,
        silence_s=2.0,
        request_s=5.0,
    )


@asynccontextmanager
async def started(model_dir: Path, server: FakeServer) -> AsyncIterator[ServerEngine]:
    engine = ServerEngine(SGLANG, settings(model_dir, server), MonotonicClock())
    async with serving(engine):
        yield engine


def request(group: str = "0/0", *, prompt: int = 3, tokens: int = 5, samples: int = 2) -> GenerationRequest:
    return GenerationRequest(
        group_id=GroupId(group),
        prompt_ids=np.arange(prompt, dtype=np.int32),
        samples=tuple(range(samples)),
        sampling=SamplingParams(max_new_tokens=tokens),
    )


async def results(engine: ServerEngine, count: int) -> list[Completion | EngineFailure]:
    found: list[Completion | EngineFailure] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await engine.results()
    return found


async def test_tokens_are_told_as_chunks_come_and_none_behind_a_stop_string(model_dir: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(model_dir)
    said = tokenizer.encode("4. so <end>and", add_special_tokens=False)
    end, asked, told = len(said) - len("and"), dict[str, object](), list[tuple[int, list[int], list[float]]]()

    async with fake_server() as server:

        async def generate(http: web.Request) -> web.StreamResponse:
            asked.update((await http.json())["sampling_params"])

            def chunk(ids: list[int], finish: str | None = None) -> dict[str, object]:
                meta = {
                    "finish_reason": {"type": finish} if finish else None,
                    "weight_versions": [{"version": server.label, "start": 0, "end": len(ids)}],
                    "output_token_logprobs": [[-token / 100, token, None] for token in ids],
                }
                return {"output_ids": ids, "meta_info": meta}

            return await events(http, chunk(said[:4]), chunk(said[:7]), chunk(said, "length"))

        server.answers["/generate"] = generate
        engine = ServerEngine(SGLANG, replace(settings(model_dir, server), stop=("<end>",)), MonotonicClock())
        async with serving(engine):
            wanted = replace(
                request(tokens=40, samples=1),
                on_tokens=lambda start, ids, logprobs: told.append((start, list(ids), list(logprobs))),
            )
            engine.submit(wanted)
            (made,) = await results(engine, 1)
    assert isinstance(made, Completion)
    assert made.response_ids.tolist() == said[:end]
    assert [start for start, *_ in told] == [0, 4, 7]
    assert [one for _, ids, _ in told for one in ids] == said[:end]
    assert [one for *_, logprobs in told for one in logprobs] == [-token / 100 for token in said[:end]]
    assert asked["stream_interval"] == sender.STREAM_TOKENS


async def test_a_stop_string_calls_the_sample_off_and_nothing_after_it_is_kept(model_dir: Path) -> None:
    """The server does not know the string: it goes on until it is told, and sends what it made meanwhile."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(model_dir)
    said, more = (
        tokenizer.encode("4. so <end>", add_special_tokens=False),
        tokenizer.encode("and", add_special_tokens=False),
    )
    called_off, asked = asyncio.Event(), dict[str, object]()

    def answer(ids: list[int], finish: str | None, label: str) -> dict[str, object]:
        meta = {
            "finish_reason": {"type": finish} if finish else None,
            "weight_versions": [{"version": label, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-token / 100, token, None] for token in ids],
        }
        return {"output_ids": ids, "meta_info": meta}

    async with fake_server() as server:

        async def generate(http: web.Request) -> web.StreamResponse:
            asked.update((await http.json())["sampling_params"])
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            for ids, finish in ((said[:4], None), (said + more[:1], None), (said + more, "abort")):
                if finish:
                    await called_off.wait()
                text = json.dumps(answer(ids, finish, server.label))
                await response.write(b"data: " + text.encode() + b"\n\n")
            return response

        async def abort(_: web.Request) -> web.StreamResponse:
            called_off.set()
            return web.json_response({})

        server.answers |= {"/generate": generate, "/abort_request": abort}
        made_of = replace(settings(model_dir, server), stop=["<end>", "zz"])
        engine = ServerEngine(SGLANG, made_of, MonotonicClock())
        async with serving(engine):
            await engine.load_weights(WEIGHTS, TENSORS)
            engine.submit(request(tokens=50, samples=1))
            (found,) = await results(engine, 1)
    assert isinstance(found, Completion)
    assert (found.finish_reason, tokenizer.decode(found.response_ids)) == (FinishReason.STOP, "4. so <end>")
    assert found.logprobs == pytest.approx([-token / 100 for token in said])
    assert [(span.start, span.end, span.weights) for span in found.spans] == [(0, len(said), WEIGHTS)]
    assert asked["stream_interval"] == sender.STOP_TOKENS


async def test_who_leaves_fp8_sends_what_ran_again_under_the_weights_that_were_held(model_dir: Path) -> None:
    """Here the server is one elsewhere, which is only waited for; ``test_own_servers.py`` starts one again."""
    asked, over, calls = asyncio.Event(), asyncio.Event(), list[str]()

    async with fake_server() as server:

        async def generate(http: web.Request) -> web.StreamResponse:
            calls.append(server.label)
            if len(calls) == 1:
                asked.set()
                await over.wait()
            return await server.generate(http)

        server.answers["/generate"] = generate
        made_of = replace(settings(model_dir, server), fp8=Fp8(kv=True))
        engine = ServerEngine(SGLANG, made_of, MonotonicClock())
        async with serving(engine):
            await engine.load_weights(WEIGHTS, TENSORS)
            engine.submit(request(samples=1))
            async with asyncio.timeout(60):
                await asked.wait()
            await engine.use_full_precision("too far off")
            (made,) = await results(engine, 1)
            await engine.use_full_precision("said with every load")
            restarts = engine.server.restarts
        over.set()
    assert isinstance(made, Completion)
    assert [span.weights for span in made.spans] == [WEIGHTS]
    assert (len(calls), restarts) == (2, 1)


# --- what it is -------------------------------------------------------------------------------------------------------


async def test_a_server_of_another_model_is_refused(model_dir: Path) -> None:
    async with fake_server() as server:
        server.answers["/model_info"] = says({"model_path": "them/llama", "model_type": "llama"})
        with pytest.raises(ModelError, match="'them/llama' of type 'llama'"):
            async with started(model_dir, server):
                pass


async def test_a_server_with_another_vocabulary_is_refused(model_dir: Path) -> None:
    async with fake_server() as server:
        server.answers["/get_weights_by_name"] = loader_says("a vocabulary of 60 tokens, not 50", mismatch=True)
        with pytest.raises(ModelError, match="another model than the run's: a vocabulary of 60"):
            async with started(model_dir, server):
                pass


async def test_a_server_without_our_loader_is_refused_with_what_to_do(model_dir: Path) -> None:
    async with fake_server() as server:
        server.answers["/server_info"] = says({"version": "0.5.23", "max_total_num_tokens": 100})
        with pytest.raises(ModelError, match=rf"--custom-weight-loader {LOADER}"):
            async with started(model_dir, server):
                pass


async def test_an_untested_version_is_told_about(model_dir: Path) -> None:
    newer = {"version": "9.0", "max_total_num_tokens": 100, "custom_weight_loader": [LOADER]}
    async with fake_server() as server:
        server.answers["/server_info"] = says(newer)
        with structlog.testing.capture_logs() as logs:
            async with started(model_dir, server):
                pass
        assert [line["version"] for line in logs if line["event"] == "untested SGLang version"] == ["9.0"]


async def test_a_server_that_is_not_there_ends_the_start_in_time(model_dir: Path) -> None:
    engine = ServerEngine(
        SGLANG, replace(settings(model_dir), url="http://127.0.0.1:9", startup_s=0.3), MonotonicClock()
    )
    with pytest.raises(EngineCrashedError, match=r"127\.0\.0\.1:9"):
        await engine.start()
    await engine.close()


async def test_a_command_that_cannot_be_run_says_which_setting_it_is(model_dir: Path) -> None:
    engine = ServerEngine(SGLANG, replace(settings(model_dir), command=("/no/such/python",)), MonotonicClock())
    with pytest.raises(ModelError, match=r"'/no/such/python'.*generation.server_command"):
        await engine.start()
    await engine.close()


async def test_a_server_that_ends_at_once_is_tried_again_and_its_last_words_are_told(model_dir: Path) -> None:
    command = ("sh", "-c", "echo no GPU here; exit 3", "sh")
    engine = ServerEngine(SGLANG, replace(settings(model_dir), command=command), MonotonicClock())
    with pytest.raises(EngineCrashedError, match="no GPU here"):
        await engine.start()
    await engine.close()
    assert (model_dir / "s.log").read_text().count("no GPU here") == 3, "one log over all starts"


# --- samples ----------------------------------------------------------------------------------------------------------


async def test_what_can_never_run_fails_before_it_is_sent(model_dir: Path) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:
        engine.submit(request(prompt=99, tokens=5))
        (failure,) = await results(engine, 1)
        assert isinstance(failure, EngineFailure)
        assert "over the engine's max_context of 100" in failure.reason
        assert not failure.retryable
        assert "/generate" not in server.asked


async def test_a_request_that_the_server_refuses_is_not_tried_again(model_dir: Path) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:

        async def refuse(request: web.Request) -> web.StreamResponse:
            return await events(request, {"error": {"message": "too long for me", "code": 400}})

        server.answers["/generate"] = refuse
        engine.submit(request(samples=1))
        (failure,) = await results(engine, 1)
        assert isinstance(failure, EngineFailure)
        assert (failure.reason, failure.retryable) == ("too long for me", False)
        assert server.asked.count("/generate") == 1


@pytest.mark.parametrize(
    ("what", "reason"),
    [("error", "answers 500"), ("garbage", "nonsense"), ("cut", "unavailable"), ("half", "ended before the sample")],
)
async def test_a_broken_answer_is_asked_for_again_once(model_dir: Path, what: str, reason: str) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:

        async def broken(request: web.Request) -> web.StreamResponse:
            if what == "error":
                return web.Response(status=500, text="CUDA error")
            if what == "garbage":
                return await events(request, b"<html>not JSON</html>")
            if what == "half":
                return await events(request, {"output_ids": [7], "meta_info": {}})
            response = web.StreamResponse()
            await response.prepare(request)
            assert request.transport is not None
            request.transport.close()
            return response

        server.answers["/generate"] = broken
        engine.submit(request(samples=1))
        (failure,) = await results(engine, 1)
        assert isinstance(failure, EngineFailure)
        assert reason in failure.reason
        assert failure.retryable
        assert server.asked.count("/generate") == 2


async def test_a_server_that_keeps_answering_nonsense_is_lost_and_what_it_had_is_sent_to_the_next(
    model_dir: Path,
) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:
        broken = 0

        async def recovers(request: web.Request) -> web.StreamResponse:
            nonlocal broken
            broken += 1
            return web.Response(status=500) if broken <= 8 else await server.generate(request)

        server.answers["/generate"] = recovers
        for number in range(4):
            engine.submit(request(f"0/{number}", samples=4))
        found = await results(engine, 16 - 3 * 4 + 3)
        assert engine.server.restarts == 1
        assert any(isinstance(one, Completion) for one in found)


async def test_what_waits_for_memory_lowers_what_fits_and_what_runs_raises_it_again(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "STUCK_S", 0.1)
    monkeypatch.setattr(server_engine, "POLL_S", 0.05)
    async with fake_server() as server, started(model_dir, server) as engine:
        release = asyncio.Event()

        async def one_at_a_time(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            if server.asked.count("/generate") == 1:
                await response.write(b'data: {"output_ids": [7], "meta_info": {}}\n\n')
            await release.wait()
            await response.write(b"data: " + json.dumps(server.sample(5)).encode() + b"\n\n")
            return response

        server.answers["/generate"] = one_at_a_time
        for number in range(4):
            engine.submit(request(f"0/{number}", samples=1))
        await until(lambda: engine.load().capacity == 1)
        assert (engine.load().running, engine.load().waiting, engine.load().kv_use) == (1, 3, 0.25)
        release.set()
        assert all(isinstance(one, Completion) for one in await results(engine, 4))
        await until(lambda: engine.load().capacity == 4)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 the watch looks now and then
            await asyncio.sleep(0.01)


# --- weights ----------------------------------------------------------------------------------------------------------


async def test_a_version_is_served_once_the_loader_says_that_it_is_there(model_dir: Path) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:
        server.asked.clear()
        await engine.load_weights(WEIGHTS, TENSORS)
        assert [path for path in server.asked if path not in ("/v1/loads", "/health", "/model_info")] == [
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/get_weights_by_name",
            "/end_weight_update",
            "/continue_generation",
        ]
        assert server.label == str(WEIGHTS)
        engine.submit(request(samples=1))
        (completion,) = await results(engine, 1)
        assert isinstance(completion, Completion)
        assert [span.weights for span in completion.spans] == [WEIGHTS]


@pytest.mark.parametrize(("mismatch", "error"), [(True, WeightsMismatchError), (False, PeerUnavailableError)])
async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_service(
    model_dir: Path, mismatch: bool, error: type[Exception]
) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:
        server.answers["/get_weights_by_name"] = loader_says("it is gone", mismatch=mismatch)
        server.asked.clear()
        with pytest.raises(error, match="it is gone"):
            await engine.load_weights(WEIGHTS, TENSORS)
        assert server.label == "default", "what tokens are of is what it was"
        assert server.asked.count("/continue_generation") == 1
        engine.submit(request(samples=1))
        (completion,) = await results(engine, 1)
        assert isinstance(completion, Completion), "it goes on with what it had"


async def test_a_server_with_half_of_a_version_is_not_used_before_it_has_the_whole_old_one(model_dir: Path) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:
        await engine.load_weights(WEIGHTS, TENSORS)
        fresh = server.answers.copy()

        async def spoiled(request: web.Request) -> web.StreamResponse:
            server.answers = fresh
            return await loader_says("boom", spoiled=True)(request)

        server.answers["/get_weights_by_name"] = spoiled
        server.asked.clear()
        with pytest.raises(WeightsMismatchError, match="loaded half-way: boom"):
            await engine.load_weights(WeightIdentity(epoch=1, version=2), TENSORS)
        engine.submit(request(samples=1))
        (completion,) = await results(engine, 1)
        assert isinstance(completion, Completion)
        assert [span.weights for span in completion.spans] == [WEIGHTS]
        assert server.asked.count("/update_weights_from_tensor") == 3, "the new one, a look, the old one"


async def test_waiting_samples_sit_out_a_server_that_refuses_connections(model_dir: Path) -> None:
    """Sixteen, four at a time: those that ran lose one sending, none its second one to a port where nobody listens."""
    async with fake_server() as server:
        reached = asyncio.Event()

        async def hang(_: web.Request) -> web.Response:
            reached.set()
            await asyncio.Event().wait()
            raise AssertionError

        server.answers["/generate"] = hang
        patient = replace(settings(model_dir, server), silence_s=10.0)
        engine = ServerEngine(SGLANG, patient, MonotonicClock())
        await engine.start()
        for group in range(8):
            engine.submit(request(f"0/{group}"))
        async with asyncio.timeout(60):
            await reached.wait()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):  # the watch looks every second
                await engine.results()
        assert engine.load().waiting == 16
        async with fake_server(int(server.url.rpartition(":")[2])) as again:
            assert all(isinstance(one, Completion) for one in await results(engine, 16))
            assert again.asked.count("/generate") == 16
    finally:
        await engine.close()


async def test_a_server_that_was_started_anew_gets_its_weights_again(model_dir: Path) -> None:
    async with fake_server() as server, started(model_dir, server) as engine:
        await engine.load_weights(WEIGHTS, TENSORS)
        server.label = "default"  # as a new process would say, and of which its tokens are

        engine.submit(request())
        found = await results(engine, 2)
        assert {span.weights for one in found if isinstance(one, Completion) for span in one.spans} <= {WEIGHTS}
        await until(lambda: server.label == str(WEIGHTS))
        engine.submit(request("0/1"))
        assert all(isinstance(one, Completion) for one in await results(engine, 2))
