"""An engine that says what a test wrote down, a tokenizer of printable ASCII, the endpoint on both; a lease."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from tests.fakes.manual_clock import ManualClock
from transport.broker.base import Broker
from transport.contracts.settings import EndpointSettings
from transport.contracts.types import FinishReason, GroupId, SamplingParams, VersionSpan, WeightIdentity, group_id
from workers.endpoint.engine import SessionEngine
from workers.endpoint.http import EndpointServer
from workers.endpoint.prompts import BrokerPrompts
from workers.environments.encoder import ObservationEncoder
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    BASE_WEIGHTS,
    Completion,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Progress,
    Result,
    ResultQueue,
    SampleKey,
    serving,
)

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}" + START + "tools\n{{ tools | tojson }}" + END + "{% endif %}"
    "{% for message in messages %}" + START + "{{ message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    + END
    + ""
    "{% endfor %}{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
KEY = "the-key-of-the-run"
MODEL = "tiny"
GROUP = group_id(3, 1)


def ascii_tokenizer() -> Any:
    """One token a character, upper and lower case."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<unk>", END, START, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
    )


def leased(run: httpx.Client, **asked: object) -> dict[str, Any]:
    """A sample's session of a real run, whose first samples come when its engine serves weights."""
    for _ in range(20):
        if (answer := run.post("/sessions", json=asked)).status_code != 429:
            break
    return answer.raise_for_status().json()


class ScriptedEngine:
    """A GenerationEngine: the next of ``answers`` to each request, with the end of a turn behind it; "ok" after them.

    held: while it is cleared, nothing is answered.
    """

    def __init__(self, tokenizer: Any, *answers: str, max_context: int = 4000) -> None:
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.requests: list[GenerationRequest] = []
        self.aborted: list[tuple[GroupId, int]] = []
        self.max_context = max_context
        self.weights = BASE_WEIGHTS
        self.held = asyncio.Event()
        self.held.set()
        self.failure = ""
        self.closed = False
        self.asked, self.called_off = asyncio.Event(), asyncio.Event()
        self._waiting: dict[tuple[GroupId, int], GenerationRequest] = {}
        self._results = ResultQueue()

    async def start(self) -> EngineInfo:
        self._results.serving = asyncio.get_running_loop().create_future()
        return EngineInfo(
            name="scripted", capacity=4, max_context=self.max_context, vocab_size=len(self.tokenizer.get_vocab())
        )

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._waiting[request.key] = request
        self.asked.set()
        if self.held.is_set():
            self.release()

    def release(self) -> None:
        """Answer all that waits."""
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            if self.failure:
                self._results.put(request.failure(request.samples, self.failure))
            else:
                self._results.put(self._completion(request))

    def _completion(self, request: GenerationRequest) -> Completion:
        text = self.answers.pop(0) if self.answers else "ok"
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        reason = FinishReason.STOP
        if (end := request.stops.end(ids)) is not None:
            ids = ids[:end]
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], FinishReason.LENGTH
        return Completion(
            group_id=request.group_id,
            sample=request.samples[0],
            attempt=request.attempt,
            response_ids=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 64,
            finish_reason=reason,
            spans=(VersionSpan(start=0, end=len(ids), weights=self.weights),),
            queued_s=0.1,
            engine_s=0.2,
        )

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        self.aborted += groups
        self.called_off.set()
        for key in groups:
            if (request := self._waiting.pop(key, None)) is not None:
                self._results.put(request.failure(request.samples, ABORTED_UNSTARTED))

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        return []

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, Any]) -> None:
        self.weights = weights

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._waiting), waiting=0, busy_s=0.0, tokens=0)

    async def close(self) -> None:
        self.closed = True
        if self._results.serving is not None:
            self._results.serving.cancel()


@dataclass(kw_only=True)
class Endpoint:
    """engine: around ``inner``.  run: asks with the run's key."""

    engine: SessionEngine
    inner: ScriptedEngine
    clock: ManualClock
    base_url: str
    run: httpx.AsyncClient

    def offer(
        self, *samples: int, group: GroupId = GROUP, attempt: int = 0, max_new_tokens: int = 1000
    ) -> GenerationRequest:
        request = GenerationRequest(
            group_id=group,
            prompt_ids=np.array([self.inner.tokenizer.convert_tokens_to_ids(START)], np.int32),
            samples=samples or (0,),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.7, seed=5),
            attempt=attempt,
            prompt_text="1+1=",
            entry=msgspec.json.encode({"question": "1+1", "answer": "2", "metadata": {"level": 1}}),
        )
        self.engine.submit(request)
        return request

    async def lease(self, **asked: object) -> dict[str, Any]:
        answer = await self.run.post("/sessions", json={"wait_s": 0.0, **asked})
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def results(self) -> list[Result]:
        async with asyncio.timeout(30):
            return await self.engine.results()


@asynccontextmanager
async def endpoint(
    directory: Path,
    *answers: str,
    settings: EndpointSettings | None = None,
    max_context: int = 4000,
    broker: Broker | None = None,
) -> AsyncIterator[Endpoint]:
    """The endpoint on a free port of this machine. broker: keeps own prompts, of groups of two."""
    tokenizer, clock = ascii_tokenizer(), ManualClock()
    inner = ScriptedEngine(tokenizer, *answers, max_context=max_context)
    sampling = SamplingParams(max_new_tokens=100)
    engine = SessionEngine(
        inner,
        ObservationEncoder(tokenizer, templated=True),
        settings or EndpointSettings(wait_s=0.0),
        clock,
        model=MODEL,
        sampling=sampling,
        group_size=2,
        prompts=BrokerPrompts(broker) if broker else None,
    )
    engine.listener = server = EndpointServer(
        engine,
        host="127.0.0.1",
        port=0,
        key=KEY,
        address_file=directory / "endpoint" / "0.address",
        key_file=directory / "endpoint.key",
    )
    async with serving(engine):
        authorized = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.base_url, headers=authorized, timeout=30) as run:
            yield Endpoint(engine=engine, inner=inner, clock=clock, base_url=server.base_url, run=run)
    assert inner.closed


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
