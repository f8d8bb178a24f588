"""The generation service over HTTP: what a client gets of it, and what a bad one cannot do to it.

Answers are replayed: what is tested is who gets which sample, how often, and under which weights.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.errors import DataError
from orchestrator.journal import read_records
from orchestrator.serving.http import MAX_GENERATE_BYTES, Chat, ChatMessage, ServicePrompts
from tests.fakes.service_run import service_run, settings_of
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.messages import (
    RolloutFinished,
    UpdateFailed,
    UpdateRequest,
    WeightManifest,
    WeightsPublished,
    encode,
)
from transport.contracts.types import WeightIdentity
from transport.process.clock import MonotonicClock
from transport.tensors.base import Endpoint
from transport.tensors.manifest import digest_tensors, layout_bytes
from workers.client import ServiceClient
from workers.client.service import ACK_EVERY
from workers.client.weights import WeightChannel
from workers.commands.build import with_environment
from workers.errors import ClientError
from workers.generation.emulated import EmulatedEngine
from workers.models import prepare_model
from workers.weights.publish import MAX_REASON_CHARACTERS, WeightPublisher

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"))


def samples(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "n" in line]


async def test_samples_come_as_they_end_with_all_that_belongs_to_them(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir) as run:
        status, lines = await run.ask("/generate", {"prompts": ["12+3=", [5, 6, 7]], "samples": 2, "id": "mine"})
    assert status == 200
    assert lines[-1] == {"done": 4}
    assert [line["n"] for line in samples(lines)] == [0, 1, 2, 3]
    assert {(line["prompt"], line["sample"]) for line in samples(lines)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for line in samples(lines):
        assert line["request"] == "mine"
        assert len(line["token_ids"]) == len(line["logprobs"]) == line["versions"][-1]["end"] > 0
        assert isinstance(line["text"], str)
        assert line["finish_reason"] in ("stop", "length")
        assert line["versions"][0]["version"] == 0


async def test_a_sample_is_an_episode_where_the_service_has_an_environment(tmp_path: Path, model_dir: Path):
    name, root = "tests.fakes.environments:Told", str(Path(__file__).parents[2])
    environment = {"name": name, "path": root, "jail": "off", "max_turns": 2, "max_turn_tokens": 3, "processes": 1}
    tokens = {"max_new_tokens": 60}
    async with service_run(tmp_path, model_dir, workers=0, environment=environment, sampling=tokens) as run:
        inner = EmulatedEngine(run.settings.emulated, 64, MonotonicClock())
        run.generate(engine=await with_environment(inner, run.settings, model_dir, name, root))
        entries = [{"says": "no"}, {"says": "yes"}]
        asked = {"prompts": ["12+3=", "1+1="], "entries": entries}
        status, lines = await run.ask("/generate", asked)
        assert status == 200
        assert lines[-1] == {"done": 2}
        for line in samples(lines):
            assert [part["kind"] for part in line["segments"]] == ["policy", "tool", "policy"]
            assert line["segments"][-1]["end"] == len(line["token_ids"]) == len(line["logprobs"])
            assert line["reward"] == 2.0
            assert entries[line["prompt"]]["says"] in line["text"]
        for bad, says in (([{}], "one for each of the 2 prompts"), ([1, 2], "object")):
            status, (refused,) = await run.ask("/generate", {**asked, "entries": bad})
            assert status == 400
            assert says in refused["error"]


async def test_an_update_reaches_what_is_asked_after_it(tmp_path: Path, model_dir: Path):
    weights = tmp_path / "weights"
    weights.mkdir()
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights / "next.safetensors")
    (weights / "broken.safetensors").write_bytes(b"these are no tensors")
    async with service_run(tmp_path / "run", model_dir, workers=2, weights_dir=weights) as run:
        await run.until_serving(2)
        _, before = await run.ask("/generate", {"prompts": [[1, 2]], "samples": 4})
        status, (updated,) = await run.ask("/update", {"path": "next.safetensors"})
        _, after = await run.ask("/generate", {"prompts": [[1, 2]] * 8, "samples": 2})
        refused = {path: await run.ask("/update", {"path": path}) for path in ("broken.safetensors", "../../etc", "no")}
        nothing = await run.ask("/update", {"wait_s": 1})
    assert status == 200
    assert (updated["version"], updated["loaded"], updated["pending"]) == (1, ["generate-0.1", "generate-1.1"], [])
    assert {span["version"] for line in samples(before) for span in line["versions"]} == {0}
    assert {span["version"] for line in samples(after) for span in line["versions"]} == {1}
    assert {span["digest"] for line in samples(after) for span in line["versions"]} == {updated["digest"]}
    assert {status for status, _ in refused.values()} == {400}
    assert "cannot be read as safetensors" in refused["broken.safetensors"][1][0]["error"]
    assert "not below the directory" in refused["../../etc"][1][0]["error"]
    assert "there is no no" in refused["no"][1][0]["error"]
    assert nothing[0] == 400
    events = [record.event for record in read_records(tmp_path / "run" / "journal", from_seq=1)]
    assert [event.weights.version for event in events if isinstance(event, WeightsPublished)] == [0, 1]
    assert sum(isinstance(event, UpdateFailed) for event in events) == 3, "the journal shows what was refused"


async def test_without_a_publisher_or_a_directory_an_update_says_what_is_missing(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir) as run:
        _, (no_paths,) = await run.ask("/update", {"path": "next.safetensors"})
        await run.leave("publish-0.1")
        status, (nobody,) = await run.ask("/update", {"path": "next.safetensors", "wait_s": 0.2})
    assert "--weights-dir" in no_paths["error"]
    assert status == 504
    assert "of kind publish" in nobody["error"]


async def test_a_publisher_that_died_is_followed_by_one_that_serves_the_same(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, weights_dir=model_dir.parent) as run:
        await run.ask("/update", {"path": model_dir.name})
        await run.leave("publish-0.1")
        await run.publish(name="publish-0.2")
        run.generate("generate-1.1")
        _, lines = await run.ask("/generate", {"prompts": [[1]] * 4})
    assert {span["version"] for line in samples(lines) for span in line["versions"]} == {1}


async def test_after_a_broker_lost_its_tail_the_served_version_is_announced_again(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, weights_dir=model_dir.parent) as run:
        await run.until_serving(1)
        before = run.server.snapshot()
        await run.ask("/update", {"path": model_dir.name})
        run.server.restore(before)
        run.generate("generate-1.1")
        await run.until_serving(2)
        _, lines = await run.ask("/generate", {"prompts": [[1]] * 4})
    assert {span["version"] for line in samples(lines) for span in line["versions"]} == {1}


async def test_weights_that_somebody_serves_already_are_taken_by_their_manifest(tmp_path: Path, model_dir: Path):
    tensors = load_file(model_dir / "model.safetensors")
    elsewhere = WeightPublisher("elsewhere", tmp_path / "elsewhere")
    try:
        manifest = await asyncio.to_thread(elsewhere.publish, 3, 17, tensors, torch.float32)
        async with service_run(tmp_path / "run", model_dir) as run:
            await run.until_serving(1)
            status, (updated,) = await run.ask("/update", {"manifest": msgspec.to_builtins(manifest)})
            wrong = msgspec.structs.replace(manifest, total_bytes=1)
            _, (refused,) = await run.ask("/update", {"manifest": msgspec.to_builtins(wrong)})
            _, lines = await run.ask("/generate", {"prompts": [[1]]})
    finally:
        elsewhere.close()
    assert status == 200, updated
    assert (updated["digest"], updated["loaded"]) == (manifest.weights.digest, ["generate-0.1"])
    assert samples(lines)[0]["versions"][0]["digest"] == manifest.weights.digest
    assert "the manifest says 1 bytes" in refused["error"]


async def test_weight_sync_notify_of_a_client_reaches_the_workers(tmp_path: Path, model_dir: Path):
    tensors = load_file(model_dir / "model.safetensors")
    async with service_run(tmp_path, model_dir) as run:
        await run.until_serving(1)
        channel = WeightChannel(run.broker(), MonotonicClock(), Endpoint())
        try:
            manifest = await channel.publish(tensors, version=5)
            while (lines := (await run.ask("/generate", {"prompts": [[1]]}))[1])[0]["versions"][0]["version"] != 5:
                assert lines[0]["versions"][0]["version"] == 0
        finally:
            await channel.close()
    assert lines[0]["versions"][0]["digest"] == manifest.weights.digest


# --- the client of docs/service.md


async def test_the_client_gets_each_sample_once_also_over_a_restart(tmp_path: Path, model_dir: Path):
    """It dies in the middle; another one goes on with the same id, while the orchestrator is started again."""
    async with service_run(tmp_path, model_dir, service={"window": 64}) as run:
        url = f"http://127.0.0.1:{run.port}"

        def some(count: int) -> list[dict]:
            with ServiceClient(url, run.secret) as client:
                return list(islice(client.generate([[1]] * 100, samples=2, request_id="r"), count))

        first = await asyncio.to_thread(some, 70)
        await run.stop()
        going_on = asyncio.create_task(asyncio.to_thread(some, 1000))
        await run.start()
        rest = await going_on
    assert [sample["n"] for sample in first] == list(range(70))
    assert [sample["n"] for sample in rest] == list(range(64, 200)), "64 were acknowledged"
    assert first[64:] == rest[:6]


async def test_the_last_sample_may_be_one_after_which_the_client_acknowledges(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir) as run:

        def ask() -> int:
            with ServiceClient(f"http://127.0.0.1:{run.port}", run.secret) as client:
                return len(list(client.generate([[1]] * 8, samples=ACK_EVERY // 4)))

        for _ in range(3):
            assert await asyncio.to_thread(ask) == 2 * ACK_EVERY


async def test_the_client_says_what_the_service_refuses(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, weights_dir=model_dir.parent) as run:

        def ask() -> dict:
            with ServiceClient(f"http://127.0.0.1:{run.port}", run.secret) as client:
                with pytest.raises(ClientError, match="prompt 0 has no tokens"):
                    next(client.generate([[]]))
                with pytest.raises(ClientError, match="there is no absent below"):
                    client.update("absent")
                return client.update(model_dir.name)

        updated = await asyncio.to_thread(ask)
    assert updated["version"] == 1


# --- exactly once


async def test_a_reader_that_comes_back_goes_on_from_what_it_has_not_acknowledged(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir) as run:
        body = {"prompts": [[1]] * 10, "id": "r", "acknowledge": True}
        async with run.asking("/generate", body) as (_, lines):
            first = [await anext(lines) for _ in range(4)]  # and then its connection is gone
        assert (await run.ask("/generate/r/taken", {"upto": 3}))[0] == 202
        _, rest = await run.ask("/generate/r?from=3")
        assert rest[0] == first[3]
        assert [line["n"] for line in samples(rest)] == list(range(3, 10))
        _, again = await run.ask("/generate", body)
        assert again == rest, "the same id is the same request, from what was not taken"
        gone, _ = await run.ask("/generate/r?from=0")
        too_many, _ = await run.ask("/generate/r/taken", {"upto": 11})
        assert (await run.ask("/generate/r/taken", {"upto": 10}))[0] == 202
        while (status := (await run.ask("/generate/r"))[0]) == 200:
            pass
        retained = await run.broker().retained_bytes()
    assert (gone, too_many, status) == (410, 400, 404)
    assert retained == 0, "what was taken is freed"
    assert not list((tmp_path / "requests").iterdir())


async def test_a_request_outlives_the_orchestrator(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, service={"window": 4}) as run:
        body = {"prompts": [[1]] * 40, "id": "r", "acknowledge": True}
        async with run.asking("/generate", body) as (_, lines):
            first = [await anext(lines) for _ in range(4)]
        assert not await run.stop()
        await run.start()
        await run.ask("/generate/r/taken", {"upto": 4})
        rest: list[dict] = []
        async with run.asking("/generate/r") as (_, lines):
            async for line in lines:
                rest.append(line)
                if "n" in line:
                    await run.ask("/generate/r/taken", {"upto": line["n"] + 1})
    assert [line["n"] for line in [*first, *samples(rest)]] == list(range(40))
    assert {line["prompt"] for line in [*first, *samples(rest)]} == set(range(40))


async def test_a_cancelled_request_ends_for_its_reader(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, service={"window": 2}) as run:
        body = {"prompts": [[1]] * 50, "id": "r", "acknowledge": True}
        async with run.asking("/generate", body) as (_, lines):
            await anext(lines)
            assert (await run.ask("/generate/r", method="DELETE"))[0] == 202
            last = [line async for line in lines][-1]
    assert last == {"error": "the request was cancelled, or expired"}


async def test_a_second_reader_takes_over(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, service={"window": 2}) as run:
        body = {"prompts": [[1]] * 4, "id": "r", "acknowledge": True}
        async with run.asking("/generate", body) as (_, first):
            await anext(first)
            async with run.asking("/generate/r") as (_, second):
                assert (await anext(second))["n"] == 0
                assert [line async for line in first][-1] == {"error": "another reader of this request took over"}


# --- what a bad client, or a bad clock, cannot do


async def test_a_slow_reader_holds_up_nobody_else(tmp_path: Path, model_dir: Path):
    """Its samples are bounded by service.window; what others ask for goes on; it loses nothing."""
    async with service_run(tmp_path, model_dir, service={"window": 32}) as run:
        body = {"prompts": [[1]] * 300, "id": "slow", "acknowledge": True}
        async with run.asking("/generate", body) as (_, slow):
            await anext(slow)
            _, fast = await run.ask("/generate", {"prompts": [[1]] * 100, "samples": 2})
            assert len(samples(fast)) == 200
        _, (status,) = await run.ask("/status")
        made = [record.event for record in read_records(tmp_path / "journal", from_seq=1)]
        of_slow = [event for event in made if isinstance(event, RolloutFinished) and event.row_id.startswith("1/")]
        assert status["blocked"] is None
        assert len(of_slow) <= 32, "samples ahead of a reader are bounded"
        await run.ask("/generate/slow", method="DELETE")


async def test_a_reader_that_reads_nothing_stops_what_is_sent_to_it(tmp_path: Path, model_dir: Path):
    """Without acknowledgements, the socket is the measure: the service stops once its buffers are full."""
    async with service_run(tmp_path, model_dir, sampling={"max_new_tokens": 256}, service={"window": 64}) as run:
        body = {"prompts": [[1]] * 400, "id": "deaf"}
        async with run.asking("/generate", body) as (_, deaf):
            await anext(deaf)
            _, fast = await run.ask("/generate", {"prompts": [[1]] * 20})
            assert len(samples(fast)) == 20
            lines = 1 + len([line async for line in deaf if "n" in line])
        assert lines == 400, "once it reads, it gets each sample once"


async def test_ten_thousand_prompts_at_once(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, service={"window": 2000}) as run:
        _, lines = await run.ask("/generate", {"prompts": [[1, 2, 3]] * 10_000, "max_new_tokens": 1})
        status, (refused,) = await run.ask("/generate", {"prompts": [[1]] * 100_001})
    assert Counter(line["prompt"] for line in samples(lines)) == Counter(range(10_000))
    assert status == 429
    assert "service.max_prompts (100000)" in refused["error"]


async def test_open_requests_are_counted(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, service={"max_requests": 1}) as run:
        async with run.asking("/generate", {"prompts": [[1]], "acknowledge": True, "id": "a"}) as (_, lines):
            await anext(lines)
        status, (refused,) = await run.ask("/generate", {"prompts": [[1]]})
    assert status == 429
    assert "service.max_requests" in refused["error"]


BAD_REQUESTS: list[tuple[object, str]] = [
    (b"", "the body is empty"),
    (b"\xff\xfe garbage", "the body is not what it must be"),
    (b"[" * 100_000, "the body is not what it must be"),
    ({"prompts": []}, "length >= 1"),
    ({"prompts": [""]}, "prompt 0 has no tokens"),
    ({"prompts": [[1], [99_999]]}, "prompt 1 has token ids outside"),
    ({"prompts": [[1] * 5000]}, "prompt 0 has 5000 tokens"),
    ({"prompts": [[1]], "max_new_tokens": 9}, "max_new_tokens is at most 8"),
    ({"prompts": [[1]], "samples": 0}, ">= 1"),
    ({"prompts": [[1]], "temperature": -1}, ">= 0"),
    ({"prompts": [[1]], "id": "../x"}, "id must be"),
    ({"prompts": [[1]], "n": 1}, "unknown field"),
    ({"prompts": [[1]], "entries": [{}]}, "the run has none (environment.name)"),
    ({"prompts": [[1]], "top_k": 10**400}, "<= 2147483648"),
    (b'{"prompts": [[1]], "samples": ' + b"9" * 5000 + b"}", "out of range"),
    ({"prompts": ["x" * 1_000_000]}, "prompt 0 has 1000000 characters; there is room for "),
    ({"prompts": [{"messages": [{"role": "user", "content": "x" * 600_000}] * 2}]}, "prompt 0 has 1200010 characters"),
]
BAD_UPDATES = ["a\0b", "x" * 5000, "\x1b[2J"]
BAD_NUMBERS = ["9" * 5000, "-1", "1e3", "\u0663", ""]


async def test_a_bad_request_is_told_what_is_wrong(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, workers=0) as run:
        answers = [(await run.ask("/generate", body, method="POST"), says) for body, says in BAD_REQUESTS]
    for (status, lines), says in answers:
        assert status == 400
        assert says in lines[0]["error"]


async def test_a_path_or_number_that_is_none_is_refused_at_the_door(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, weights_dir=model_dir.parent) as run:
        for path in BAD_UPDATES:
            status, (refused,) = await run.ask("/update", {"path": path})
            assert (status, "`$.path`" in refused["error"]) == (400, True)
        async with run.asking("/generate", {"prompts": [[1]] * 4, "id": "r", "acknowledge": True}) as (_, lines):
            await anext(lines)
            for number in BAD_NUMBERS:
                status, (refused,) = await run.ask(f"/generate/r?from={quote(number)}")
                assert (status, "from must be a number" in refused["error"]) == (400, True)
            assert (await run.ask("/generate/r/taken", {"upto": 10**400}))[0] == 400


HOSTILE_PATHS = ["a\0b", "x" * 5000, "/".join(["x" * 200] * 30), "loop", "../" * 2000]


async def test_a_publisher_survives_whatever_it_is_asked_for(tmp_path: Path, model_dir: Path):
    """Past the service's own checks, as another program with the broker's password may ask."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "loop").symlink_to("loop")
    async with service_run(tmp_path / "run", model_dir, weights_dir=weights) as run:
        updates = [UpdateRequest(update=str(number), path=path) for number, path in enumerate(HOSTILE_PATHS)]
        updates.append(UpdateRequest(update="m", manifest=manifest_from("tcp://[")))
        for update in updates:
            await run.broker().enqueue(keys.UPDATES, Entry(fields={}, payload=encode(update)))
        status, (refused,) = await run.ask("/update", {"path": "no-such-checkpoint"})
        assert (status, "there is no no-such-checkpoint" in refused["error"]) == (400, True), "it hears the next one"
    events = [record.event for record in read_records(tmp_path / "run" / "journal", from_seq=1)]
    reasons = {event.update: event.reason for event in events if isinstance(event, UpdateFailed)}
    assert reasons.keys() > {"0", "1", "2", "3", "4", "m"}
    assert "no path of a checkpoint" in reasons["0"]
    assert "too long" in reasons["1"]
    assert "tcp://[" in reasons["m"]
    assert max(map(len, reasons.values())) <= MAX_REASON_CHARACTERS


def manifest_from(source: str) -> WeightManifest:
    """Of no tensors, and so without a contradiction."""
    weights = WeightIdentity(epoch=0, version=0, digest=digest_tensors([]))
    return WeightManifest(weights=weights, tensors=(), total_bytes=layout_bytes([]), sources=(source,), host="here")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = ServicePrompts(settings_of(), model_dir)
    tokenised: list[str] = []
    tokenizer = prompts._tokenizer
    ids = tokenizer.ids
    monkeypatch.setattr(tokenizer, "ids", lambda text, special: tokenised.append(text) or ids(text, special=special))
    with pytest.raises(DataError, match="prompt 1 has 31000000 characters; there is room for"):
        prompts.encode(["1+2=", "1" * 31_000_000], 8)
    assert tokenised == ["1+2="]


def test_a_chat_has_arguments_of_the_template_over_those_of_the_run(tmp_path: Path, model_dir: Path):
    shouting = tmp_path / "model"
    shutil.copytree(model_dir, shouting)
    (shouting / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}")
    settings = msgspec.structs.replace(
        settings_of(), data=msgspec.structs.replace(settings_of().data, chat_template_kwargs={"mark": "="})
    )
    prompts = ServicePrompts(settings, shouting)
    said = [ChatMessage(role="user", content="1+2")]
    own = Chat(messages=said, chat_template_kwargs={"mark": "+"})
    assert [one.text for one in prompts.encode([Chat(messages=said), own], 8)] == ["1+2=", "1+2+"]
    with pytest.raises(DataError, match="prompt 0: the model's chat template reads no 'loud'"):
        prompts.encode([Chat(messages=said, chat_template_kwargs={"loud": True})], 8)


def test_a_chat_template_that_hangs_holds_up_nobody_else(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """One may go on for ever for certain messages only, which no trial finds."""
    prompts = ServicePrompts(settings_of(), model_dir)
    rendering, over = threading.Event(), threading.Event()

    def render(*_: object, **__: object) -> str:
        rendering.set()
        assert over.wait(60.0)
        return "1+2="

    monkeypatch.setattr(prompts._tokenizer, "render", render)
    chat = Chat(messages=[ChatMessage(role="user", content="1+2=")])
    with ThreadPoolExecutor(2) as threads:
        hung = threads.submit(prompts.encode, [chat], 8)
        try:
            assert rendering.wait(60.0)
            other = threads.submit(prompts.encode, ["1+2="], 8).result(60.0)
        finally:
            over.set()
        assert hung.result(60.0)[0].ids == other[0].ids


def test_tokenising_ends_when_nobody_waits(model_dir: Path):
    prompts = ServicePrompts(settings_of(), model_dir)
    with pytest.raises(DataError, match="prompt 0 is not wanted any more"):
        prompts.encode(["1+2="], 8, wanted=threading.Event())


async def test_who_does_not_know_the_secret_changes_nothing(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir) as run:
        for path in ("/generate", "/update", "/generate/x/taken"):
            assert (await run.ask(path, {"prompts": [[1]]}, secret="wrong"))[0] == 401
        assert (await run.ask("/generate/x", method="DELETE", secret="wrong"))[0] == 401
        assert (await run.ask("/generate/x", secret="wrong"))[0] == 401, "what it reads is gone for its owner"
    assert not list((tmp_path / "requests").iterdir())


async def test_a_body_of_a_gigabyte_is_refused_before_it_is_read(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, workers=0) as run:
        for path, limit in (("/generate", MAX_GENERATE_BYTES), ("/update", 1024 * 1024)):
            told = await say(run.port, run.secret, path, f"Content-Length: {2**30}")
            assert f"413 |{limit}" in told
        untold = await say(run.port, run.secret, "/update", "Transfer-Encoding: chunked", chunks=17)
        assert "413 |1048576" in untold


async def say(port: int, secret: str, path: str, header: str, *, chunks: int = 0) -> str:
    """Begin a large body, and send as much of it as is taken. Returns "status |limit"."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {secret}\r\n{header}\r\n\r\n"
    writer.write(head.encode())
    try:
        for _ in range(chunks):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
        answer = (await reader.read()).decode()
    except ConnectionError:
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    limit = answer.rpartition("at most ")[2].partition(" ")[0]
    return f"{answer.split()[1]} |{limit}"


async def test_a_worker_whose_clock_is_a_day_off_is_one_like_the_others(tmp_path: Path, model_dir: Path):
    async with service_run(tmp_path, model_dir, workers=0) as run:
        run.generate("generate-0.1", MonotonicClock(origin_s=DAY_S))
        run.generate("generate-1.1", MonotonicClock(origin_s=0.0))
        await run.until_serving(2)
        _, lines = await run.ask("/generate", {"prompts": [[1]] * 400})
        _, (status,) = await run.ask("/status")
    assert len(samples(lines)) == 400
    assert {line["worker"] for line in samples(lines)} == {"generate-0.1", "generate-1.1"}
    assert status["blocked"] is None
    assert max(status["elapsed_s"], status["now_s"]) < DAY_S / 2
