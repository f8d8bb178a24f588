"""The generation engine that is a vLLM server.

Its interface has the same parts as SGLang's: token ids in and out, versions of each token, a cache divided by a salt, a
pause that keeps what runs. So queue, gate, updates and watch are those of the SGLang engine, and this file is the
client: the same calls, in vLLM's words. What differs:

- the loader is called by ``/collective_rpc`` (vllm_loader.py), which also tells what the server is;
- logprobs are of the distribution that was sampled from, so top-p and top-k, which cut it, are refused;
- a chunk brings what is new, not everything so far.

Needs of the server, beside its usual arguments: those of ``VllmSettings.arguments`` and VLLM_SERVER_DEV_MODE=1, which
opens the calls for weights to whoever reaches it: a server of the worker's own therefore listens on a socket in a
directory of its user's, and one elsewhere belongs into a network of your own.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from transport.contracts.messages import encode
from transport.process.programs import python_module
from workers.errors import ModelError
from workers.generation.engine import GenerationRequest
from workers.generation.server.order import LoadOrder, read_outcome
from workers.generation.server.process import LaunchSettings
from workers.generation.server.sglang import SglangEngine
from workers.generation.server.sglang_http import (
    CALL_S,
    UPDATE_S,
    Answer,
    Chunk,
    ErrorDetail,
    FinishedBy,
    GenerateBody,
    Load,
    MetaInfo,
    ModelInfo,
    ServedSpan,
    ServerInfo,
    ServerKind,
    SglangClient,
)
from workers.generation.server.upkeep import SglangSettings

LOADER = "workers.generation.server.vllm_loader.Loader"
DEFAULT_COMMAND = tuple(python_module("vllm.entrypoints.openai.api_server"))
LOGPROBS_MODE = "processed_logprobs"
"""After the temperature; vLLM's default is before it."""
CUTS_THE_TAIL = "vLLM's logprobs are of what top-p and top-k leave over: sampling.top_p must be 1 and sampling.top_k 0"
_KV_USE = re.compile(rb"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.M)


class About(Answer, frozen=True, kw_only=True):
    """What the loader tells of the server (vllm_loader.py). kv_tokens: that its KV memory holds.  processes: of it."""

    model_type: str
    logprobs_mode: str
    max_context: int
    kv_tokens: int
    slots: int
    processes: int


class _Version(Answer, frozen=True, kw_only=True):
    version: str


class _WeightInfo(Answer, frozen=True, kw_only=True):
    weight_version: str


class _Abouts(Answer, frozen=True, kw_only=True):
    results: tuple[About, ...]


class _Outcomes(Answer, frozen=True, kw_only=True):
    results: tuple[list[int], ...]


class _TokenLogprob(Answer, frozen=True, kw_only=True):
    token_id: int
    logprob: float


class _Logprobs(Answer, frozen=True, kw_only=True):
    content: list[_TokenLogprob] = msgspec.field(default_factory=list[_TokenLogprob])


class _Choice(Answer, frozen=True, kw_only=True):
    """token_ids, logprobs: new ones only.  weight_versions: of all tokens, with the last of them."""

    token_ids: list[int] = msgspec.field(default_factory=list[int])
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: tuple[ServedSpan, ...] | None = None


class _PromptDetails(Answer, frozen=True, kw_only=True):
    cached_tokens: int = 0


class _Usage(Answer, frozen=True, kw_only=True):
    prompt_tokens_details: _PromptDetails | None = None


class _Event(Answer, frozen=True, kw_only=True):
    """One event of a stream; the last has no choice, but the usage."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: ErrorDetail | None = None


class VllmClient(SglangClient):
    """The server at ``url``."""

    kind = ServerKind(name="vLLM", tested=("0.32.0",), loader=LOADER, option="--worker-extension-cls")

    def __init__(self, url: str, *, connections: int, request_s: float, key: str = "") -> None:
        super().__init__(url, connections=connections, request_s=request_s, key=key)
        self._outcome = b""

    # --- what it is and how it is -------------------------------------------------------------------------------------

    async def health(self, deadline_s: float) -> None:
        """/health alone is answered by a process that computes nothing."""
        await super().health(deadline_s)
        await self._rpc("streamrl_about", deadline_s=deadline_s)

    async def about(self) -> About:
        abouts = self._read(_Abouts, await self._rpc("streamrl_about")).results
        return abouts[0]

    async def model_info(self) -> ModelInfo:
        label = self._read(_WeightInfo, await self._call("GET", "/weight_info")).weight_version
        return ModelInfo(model_path=self.url, weight_version=label, model_type=(await self.about()).model_type)

    async def server_info(self) -> ServerInfo:
        """Raises ModelError when its logprobs are not those that training needs."""
        about = await self.about()
        if about.logprobs_mode != LOGPROBS_MODE:
            raise ModelError(f"{self.url} has to be started with --logprobs-mode {LOGPROBS_MODE}")
        return ServerInfo(
            version=self._read(_Version, await self._call("GET", "/version")).version,
            max_total_num_tokens=about.kv_tokens,
            context_length=about.max_context,
            max_running_requests=about.slots,
            tp_size=about.processes,
            custom_weight_loader=[LOADER],
        )

    async def load(self) -> Load:
        found = _KV_USE.search(await self._call("GET", "/metrics"))
        return Load(token_usage=float(found[1]) if found else 0.0)

    # --- samples ------------------------------------------------------------------------------------------------------

    def _samples(self, body: GenerateBody) -> tuple[str, bytes]:
        return "/inference/v1/generate", msgspec.json.encode(request_body(body))

    async def _told(self, events: AsyncIterator[bytes]) -> AsyncGenerator[Chunk, None]:
        """Everything so far, from what is new each time. The last event is held back for the usage that follows it."""
        so_far = Chunk(meta_info=MetaInfo())
        async for raw in events:
            event = self._read(_Event, raw)
            if event.error is not None:
                yield Chunk(error=event.error)
            elif event.choices:
                so_far = _with(so_far, event.choices[0])
                if event.choices[0].finish_reason is None:
                    yield so_far
            elif event.usage is not None:
                yield _with_usage(so_far, event.usage)

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]})

    # --- weights ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._call("POST", "/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def begin_update(self) -> None:
        """Nothing has to be told of before."""

    async def end_update(self) -> None:
        """Nor after."""

    async def update(self, order: LoadOrder, ranks: int, label: str | None) -> None:
        """All processes tell how it went; the first that failed counts."""
        raw = await self._rpc("streamrl_load", base64.b64encode(encode(order)).decode(), deadline_s=UPDATE_S)
        outcomes = [bytes(numbers) for numbers in self._read(_Outcomes, raw).results]
        self._outcome = next((one for one in outcomes if read_outcome(one).error), outcomes[0])
        if label is not None and not read_outcome(self._outcome).error:
            await self.label(label)

    async def outcome(self, number: int) -> bytes:
        return self._outcome

    async def label(self, version: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def _rpc(self, method: str, *args: str, deadline_s: float = CALL_S) -> bytes:
        return await self._call("POST", "/collective_rpc", {"method": method, "args": args}, deadline_s)


def request_body(body: GenerateBody) -> dict[str, Any]:
    """What SGLang would be asked, in vLLM's words."""
    asked = body.sampling_params
    sampling: dict[str, Any] = {
        "max_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "stop_token_ids": () if asked.ignore_eos else asked.stop_token_ids,
        "ignore_eos": asked.ignore_eos,
        "stream_interval": asked.stream_interval,
        "logprobs": 0,  # none but the sampled token's
        "detokenize": False,
    }
    return {
        "request_id": body.rid,
        "token_ids": body.input_ids,
        "sampling_params": sampling,
        "cache_salt": body.extra_key,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _with(so_far: Chunk, new: _Choice) -> Chunk:
    meta = so_far.meta_info or MetaInfo()
    logprobs = [(one.logprob, one.token_id, None) for one in new.logprobs.content] if new.logprobs else []
    return Chunk(
        output_ids=so_far.output_ids + new.token_ids,
        meta_info=MetaInfo(
            finish_reason=FinishedBy(type=new.finish_reason) if new.finish_reason else None,
            weight_versions=new.weight_versions or (),
            output_token_logprobs=meta.output_token_logprobs + logprobs,
        ),
    )


def _with_usage(whole: Chunk, usage: _Usage) -> Chunk:
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    meta = msgspec.structs.replace(whole.meta_info or MetaInfo(), cached_tokens=cached)
    return msgspec.structs.replace(whole, meta_info=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(SglangSettings):
    """The same of a vLLM server."""

    command: tuple[str, ...] = DEFAULT_COMMAND
    environment: ClassVar[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}
    default_command: ClassVar[tuple[str, ...]] = DEFAULT_COMMAND

    def client(self, url: str, key: str) -> VllmClient:
        return VllmClient(url, connections=self.slots, request_s=self.request_s, key=key)

    def launch(self) -> LaunchSettings:
        """On a socket: vLLM asks for a key where samples are asked for, and not where weights are."""
        return replace(SglangSettings.launch(self), key_option="", key_variable="VLLM_API_KEY", socket_option="--uds")

    def arguments(self) -> list[str]:
        arguments = [
            *("--model", str(self.directory)),
            *("--dtype", self.dtype),
            *("--max-num-seqs", str(self.slots)),
            *("--worker-extension-cls", LOADER),
            *("--logprobs-mode", LOGPROBS_MODE),
            *("--generation-config", "vllm"),  # what a sample is drawn with, we say
            "--enable-scale-out",  # token ids in, token ids out
            "--enable-prompt-tokens-details",  # how many of them came from its cache
            "--skip-tokenizer-init",
        ]
        arguments += ["--max-model-len", str(self.max_context)] if self.max_context else []
        return arguments + (["--trust-remote-code"] if self.trust_remote_code else [])


class VllmEngine(SglangEngine):
    """A GenerationEngine (engine.py). ``start`` before anything else, ``close`` at the end, also after an error."""

    name = "vllm"

    def _refusal(self, request: GenerationRequest) -> str:
        cut = request.sampling.top_p < 1 or request.sampling.top_k
        return CUTS_THE_TAIL if cut else super()._refusal(request)
