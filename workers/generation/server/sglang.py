"""An SGLang server: how it is started, its paths, bodies and answers, of the tested versions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec

from transport.process.programs import python_module
from workers.errors import ModelError, ServerAnswerError
from workers.generation.server.client import (
    UPDATE_S,
    Answer,
    Chunk,
    Event,
    SampleRequest,
    ServedSpan,
    ServerClient,
    ServerFacts,
    ServerKind,
    ServerSettings,
)
from workers.generation.server.loader import RESULT, LoadOrder, LoadResult, read_result, to_payload

LOADER = "workers.generation.server.loader.load_into_sglang"


class _FinishedBy(Answer, frozen=True, kw_only=True):
    type: str
    message: str = ""


class _MetaInfo(Answer, frozen=True, kw_only=True):
    """output_token_logprobs: (logprob, token id, text) of each output token so far."""

    finish_reason: _FinishedBy | None = None
    cached_tokens: int = 0
    weight_versions: tuple[ServedSpan, ...] = ()
    output_token_logprobs: list[tuple[float | None, int, Any]] = msgspec.field(
        default_factory=list[tuple[float | None, int, Any]]
    )


class _PromptInfo(Answer, frozen=True, kw_only=True):
    """input_token_logprobs: (logprob, token id, text) of each token of the prompt from the one asked for on."""

    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Event(Event, frozen=True, kw_only=True):
    """Everything so far, not only what is new."""

    output_ids: list[int] = msgspec.field(default_factory=list[int])
    meta_info: _MetaInfo = msgspec.field(default_factory=_MetaInfo)


class _SamplingBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """top_k: -1 is off.  sampling_seed: honoured only by a deterministic server."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    top_k: int = -1
    sampling_seed: int | None = None
    stream_interval: int = 1


class _GenerateBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """extra_key: the cache's namespace.  priority: refused by a server without priorities."""

    rid: str
    input_ids: msgspec.Raw
    sampling_params: _SamplingBody
    extra_key: str
    stream: bool
    return_logprob: bool
    priority: int | None = None


class _ModelInfo(Answer, frozen=True, kw_only=True):
    """weight_version: the label that the last update gave, "default" before any."""

    model_path: str
    weight_version: str = ""
    model_type: str | None = None
    is_generation: bool = True


class _ServerInfo(Answer, frozen=True, kw_only=True):
    version: str
    max_total_num_tokens: int
    context_length: int | None = None
    max_running_requests: int | None = None
    tp_size: int = 1
    enable_priority_scheduling: bool = False
    enable_deterministic_inference: bool = False
    custom_weight_loader: list[str] | None = None


class _Load(Answer, frozen=True, kw_only=True):
    """Of one scheduler."""

    token_usage: float = 0.0


class _Loads(Answer, frozen=True, kw_only=True):
    loads: tuple[_Load, ...] = ()


class SglangClient(ServerClient):
    def __init__(self, url: str, settings: ServerSettings, key: str = "") -> None:
        super().__init__(url, settings, key)
        self._has_priorities = False
        self._is_deterministic = False

    async def facts(self) -> ServerFacts:
        model = self._read(_ModelInfo, await self._call("GET", "/model_info"))
        if not model.is_generation:
            raise ModelError(f"{self.url} serves {model.model_path!r}, which generates nothing")
        info = self._read(_ServerInfo, await self._call("GET", "/server_info"))
        self._has_priorities = info.enable_priority_scheduling
        self._is_deterministic = info.enable_deterministic_inference
        return ServerFacts(
            version=info.version,
            model=model.model_path,
            model_type=model.model_type or "",
            label=model.weight_version,
            kv_tokens=info.max_total_num_tokens,
            max_context=info.context_length or 0,
            slots=info.max_running_requests or 0,
            processes=info.tp_size,
            loaders=info.custom_weight_loader or (),
        )

    async def kv_use(self) -> float:
        """Of its first scheduler; several (data parallel) cannot take new weights together."""
        loads = self._read(_Loads, await self._call("GET", "/v1/loads?include=core")).loads
        return loads[0].token_usage if loads else 0.0

    def _sample_call(self, sample: SampleRequest) -> tuple[str, object]:
        sampling = sample.sampling
        return "/generate", _GenerateBody(
            rid=sample.rid,
            input_ids=sample.prompt,
            sampling_params=_SamplingBody(
                max_new_tokens=sample.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                stop_token_ids=sampling.stop_token_ids,
                ignore_eos=sampling.ignore_eos,
                sampling_seed=sample.seed if self._is_deterministic else None,
                stream_interval=sample.chunk_tokens,
            ),
            extra_key=sample.label,
            stream=True,
            return_logprob=True,
            priority=round(sample.priority) if self._has_priorities else None,
        )

    async def _chunks(self, events: AsyncIterator[bytes]) -> AsyncGenerator[Chunk, None]:
        async for raw in events:
            event = self._read_event(_Event, raw)
            meta = event.meta_info
            yield Chunk(
                token_ids=event.output_ids,
                logprobs=[(logprob, token) for logprob, token, _ in meta.output_token_logprobs],
                spans=meta.weight_versions,
                finish_reason=meta.finish_reason.type if meta.finish_reason else "",
                message=meta.finish_reason.message if meta.finish_reason else "",
                cached_tokens=meta.cached_tokens,
            )

    async def prompt_logprobs(self, prompt: Sequence[int] | str, start: int) -> list[tuple[int, float | None]]:
        """Its first entry has no logprob, wherever it begins: so it begins one token earlier."""
        before = max(0, start - 1)
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": before,
        }
        answer = await self._call("POST", "/generate", body, self._request_s)
        entries = self._read_field("meta_info", _PromptInfo, answer).input_token_logprobs
        return self._checked([(token, logprob) for logprob, token, _ in entries][start - before :], prompt)

    async def abort(self, rid: str) -> None:
        """The server stops every rid that begins with ``rid``."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def pause(self) -> None:
        """In place: the server's default would abort what runs."""
        await self._call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})  # without a body it answers 400 and stays paused

    async def recover(self) -> None:
        """An update that was left open, and a pause."""
        with contextlib.suppress(ServerAnswerError):  # none was open
            await self._end_update()
        await self.resume()

    async def load(self, order: LoadOrder, label: str | None, processes: int) -> LoadResult:
        """As few calls one after another as can be: samples wait for each."""
        body = {
            "serialized_named_tensors": [to_payload(order)] * processes,
            "load_format": LOADER,
            "flush_cache": False,  # refused while samples run; the cache is divided by extra_key
            "abort_all_requests": False,
            "weight_version": label,
        }
        await self._call("POST", "/begin_weight_update", {}, UPDATE_S)
        try:
            await self._call("POST", "/update_weights_from_tensor", body, UPDATE_S)
        except BaseException:
            await self._end_update()
            raise
        asked = {"name": f"{RESULT}{order.number}", "truncate_size": 1}
        raw, ended = await asyncio.gather(
            self._call("POST", "/get_weights_by_name", asked), self._end_update(), return_exceptions=True
        )
        if isinstance(ended, BaseException):
            raise ended
        if isinstance(raw, BaseException):
            raise raw
        return read_result(self._read(list[int], raw))

    async def _end_update(self) -> None:
        await self._call("POST", "/end_weight_update", {}, UPDATE_S)

    async def label(self) -> str:
        return self._read(_ModelInfo, await self._call("GET", "/model_info")).weight_version

    async def set_label(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": label, "abort_all_requests": False})


def draft_options(drafts: int) -> list[str]:
    """A chain, not a tree: it works with every attention backend. What is verified counts the last drawn token."""
    return [
        *("--speculative-algorithm", "NGRAM"),
        *("--speculative-num-draft-tokens", str(drafts + 1)),
        *("--speculative-ngram-min-bfs-breadth", "1"),
        *("--speculative-ngram-max-bfs-breadth", "1"),
    ]


SGLANG = ServerKind(
    name="SGLang",
    tested=("0.5.23",),
    client=SglangClient,
    command=tuple(python_module("sglang.launch_server")),
    model_option="--model-path",
    slots_option="--max-running-requests",
    context_option="--context-length",
    gpus_option="--tp-size",
    memory_option="--mem-fraction-static",
    loader_option="--custom-weight-loader",
    loader=LOADER,
    flags=(
        "--enable-priority-scheduling",
        "--disable-priority-preemption",  # it would recompute what runs
        "--skip-tokenizer-init",  # token ids in, token ids out
    ),
    key_option="api-key",
    draft_options=draft_options,
    fp8_kv=("--kv-cache-dtype", "fp8_e4m3"),
    fp8_weights=("--quantization", "fp8", "--load-format", "flash_rl"),  # which rounds what later updates bring, too
)
