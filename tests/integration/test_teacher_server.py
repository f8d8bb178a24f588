"""A teacher behind a server, of either kind: what it says of a response, and what is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from tests.fakes.sglang_servers import serving_app
from transport.contracts.settings import AlgorithmSettings, Settings
from transport.contracts.types import GroupId, RowId
from workers.errors import ModelError, RewardError
from workers.models import load_tokenizer, random_model
from workers.scoring import teacher as teachers
from workers.scoring.teacher import Teacher, teacher_of
from workers.trainer.learner import PromptGroup, TrainingSample

KINDS = ["sglang", "vllm"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    random_model("qwen3-tiny")(directory)
    return directory


def logprob(token: int) -> float:
    return -(token % 7 + 1) / 8


class FakeTeacher:
    """Answers as a server of ``kind`` does, over the tokenizer of ``model_dir``.

    shifted: encodes a text to other ids.  status: answers so, as often as it says.  wrong: says of the tokens what
    belongs to others.  key: that it asks for.
    """

    def __init__(self, kind: str, model_dir: Path) -> None:
        self.kind, self.tokenizer = kind, load_tokenizer(model_dir)
        self.shifted = self.wrong = False
        self.statuses: list[int] = []
        self.key = ""
        self.asked = 0
        self.url = ""

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [token + self.wrong for token in prompt]
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return [0, *(token + self.shifted for token in ids)]  # as servers that put a token before a text

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/models" and self.kind == "vllm":
            return web.json_response({"data": [{"id": "the-teacher"}]})
        wanted = {"sglang": "/generate", "vllm": "/v1/completions"}[self.kind]
        if request.path != wanted:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.asked += 1
        if self.statuses:
            return web.json_response({"error": "not now"}, status=self.statuses.pop())
        body = await request.json()
        if self.kind == "sglang":
            assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
            ids = self.ids(body.get("text", body.get("input_ids")))[body["logprob_start_len"] :]
            entries: list[Any] = [[None if not place else logprob(one), one, None] for place, one in enumerate(ids)]
            return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})
        assert (body["model"], body["temperature"]) == ("the-teacher", 1.0)
        ids = self.ids(body["prompt"])
        scored = [
            None if not place else {str(one): {"logprob": logprob(one), "rank": 1}} for place, one in enumerate(ids)
        ]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": scored, "prompt_token_ids": ids}]})


@asynccontextmanager
async def serving_teacher(kind: str, model_dir: Path) -> AsyncIterator[FakeTeacher]:
    server, app = FakeTeacher(kind, model_dir), web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with serving_app(app) as server.url:
        yield server


@asynccontextmanager
async def asked(server: FakeTeacher, model_dir: Path, key: str = "") -> AsyncIterator[Teacher]:
    settings = Settings(algorithm=AlgorithmSettings(kl_coef=1.0, teacher_url=server.url))
    teacher = teacher_of(settings, server.url, key, model_dir)
    assert teacher is not None
    try:
        await teacher.start()
        yield teacher
    finally:
        await teacher.close()


def group_of(*response: int) -> PromptGroup:
    ids, unused = np.array(response, np.int32), np.zeros(len(response), np.float32)
    sample = TrainingSample(row_id=RowId("0/0/0"), response_ids=ids, rollout_logprobs=unused, advantage=0.0)
    return PromptGroup(group_id=GroupId("0/0"), prompt_ids=np.array([5, 6, 7], np.int32), samples=[sample])


@pytest.mark.parametrize("kind", KINDS)
async def test_it_says_how_likely_each_token_of_a_response_is(kind: str, model_dir: Path) -> None:
    async with serving_teacher(kind, model_dir) as server:
        server.key = "s3cret-of-the-teacher"
        async with asked(server, model_dir, server.key) as teacher:
            found = await teacher.logprobs(RowId("0/0/0"), group_of(11, 12, 13))
    assert found.dtype == np.float32
    assert found.tolist() == [logprob(token) for token in (11, 12, 13)]


@pytest.mark.parametrize("kind", KINDS)
async def test_another_vocabulary_is_refused_by_name(kind: str, model_dir: Path) -> None:
    async with serving_teacher(kind, model_dir) as server:
        server.shifted = True
        with pytest.raises(ModelError, match=r"algorithm\.teacher_url = .* has another vocabulary than model\.path"):
            async with asked(server, model_dir):
                pass


async def test_a_server_that_gives_no_logprobs_or_asks_for_a_key_is_refused(model_dir: Path) -> None:
    async with serving_teacher("sglang", model_dir) as server:
        server.key = "another"
        with pytest.raises(ModelError, match=r"gives no logprobs of a prompt.*STREAMRL_ENGINE_KEY"):
            async with asked(server, model_dir, "mine"):
                pass
    settings = Settings(algorithm=AlgorithmSettings(kl_coef=1.0, teacher_url="http://127.0.0.1:1"))
    with pytest.raises(ModelError, match=r"--teacher-url http://127\.0\.0\.1:1"):
        teacher_of(settings, "", "", model_dir)
    plain = msgspec.structs.replace(settings, algorithm=AlgorithmSettings())
    assert teacher_of(plain, "", "", model_dir) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_teacher_that_is_busy_is_waited_for_and_a_wrong_answer_is_an_error(
    kind: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "RETRY_S", 0.01)
    async with serving_teacher(kind, model_dir) as server:
        async with asked(server, model_dir) as teacher:
            server.statuses, before = [503, 503], server.asked
            assert len(await teacher.logprobs(RowId("0/0/0"), group_of(11, 12))) == 2
            assert server.asked - before == 3
            server.statuses, before = [400], server.asked
            with pytest.raises(RewardError, match="no logprobs of 0/0/0"):
                await teacher.logprobs(RowId("0/0/0"), group_of(11))
            assert server.asked - before == 1
            if kind == "sglang":  # vLLM is asked, and answers, by id
                server.wrong = True
                with pytest.raises(RewardError, match="other tokens"):
                    await teacher.logprobs(RowId("0/0/0"), group_of(11, 12))
            monkeypatch.setattr(teachers, "OUTAGE_S", 0.0)
        gone = server.url
    settings = Settings(algorithm=AlgorithmSettings(kl_coef=1.0, teacher_url=gone))
    with pytest.raises(ModelError, match=r"algorithm\.teacher_url: server .* is unavailable"):
        await Teacher(gone, "", settings, model_dir).start()
