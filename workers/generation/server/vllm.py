"""A vLLM server: how it is started, its paths, bodies and answers, of the tested version.

- The loader is called by ``/collective_rpc`` (loader.py), which also says what the server is.
- Logprobs are of the distribution that was sampled from, so top-p and top-k, which cut it, are refused.
- A chunk brings what is new, not everything so far.

Needs of the server, beside its usual arguments: those of ``VLLM.flags`` and VLLM_SERVER_DEV_MODE=1, which opens the
calls for weights to whatever reaches it: a server of the worker's own therefore listens on a socket in a directory of
its user's, and one elsewhere belongs into a network of your own.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

import msgspec

from transport.process.programs import python_module
from workers.errors import ModelError, ServerAnswerError
from workers.generation.engine import GenerationRequest
from workers.generation.server.client import (
    CALL_S,
    UPDATE_S,
    Answer,
    Chunk,
    Event,
    SampleRequest,
    ServedSpan,
    ServerClient,
    ServerFacts,
    ServerKind,
)
from workers.generation.server.loader import LoadOrder, LoadResult, read_result, to_name

LOADER = "workers.generation.server.loader.VllmLoader"
LOGPROBS_MODE = "processed_logprobs"
"""After the temperature; vLLM's default is before it."""
CUTS_THE_TAIL = "vLLM's logprobs are of what top-p and top-k leave over: sampling.top_p must be 1 and sampling.top_k 0"
_KV_USE = re.compile(rb"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.M)


class _About(Answer, frozen=True, kw_only=True):
    """What the loader says of the server (loader.py). kv_tokens: that its KV memory holds.  processes: of it."""

    model_type: str
    logprobs_mode: str
    max_context: int
    kv_tokens: int
    slots: int
    processes: int


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


class _Event(Event, frozen=True, kw_only=True):
    """The last has no choice, but the usage."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None


class _PromptLogprob(Answer, frozen=True, kw_only=True):
    logprob: float


class _ScoredPrompt(Answer, frozen=True, kw_only=True):
    """prompt_logprobs: of each token by its id, None for the first."""

    prompt_logprobs: list[dict[str, _PromptLogprob] | None]
    prompt_token_ids: list[int] | None = None


class _Model(Answer, frozen=True, kw_only=True):
    id: str


class VllmClient(ServerClient):
    _served = ""
    """What it calls its model, once it was asked."""

    async def health(self, deadline_s: float) -> None:
        """/health alone is answered by a process that computes nothing."""
        await super().health(deadline_s)
        await self._rpc("streamrl_about", deadline_s=deadline_s)

    async def facts(self) -> ServerFacts:
        """Raises ModelError when its logprobs are not those that training needs."""
        about = self._read_field("results", list[_About], await self._rpc("streamrl_about"))[0]
        if about.logprobs_mode != LOGPROBS_MODE:
            raise ModelError(f"{self.url} has to be started with --logprobs-mode {LOGPROBS_MODE}")
        return ServerFacts(
            version=self._read_field("version", str, await self._call("GET", "/version")),
            model=self.url,
            model_type=about.model_type,
            label=await self.label(),
            kv_tokens=about.kv_tokens,
            max_context=about.max_context,
            slots=about.slots,
            processes=about.processes,
            loaders=(LOADER,),
        )

    async def kv_use(self) -> float:
        found = _KV_USE.search(await self._call("GET", "/metrics"))
        return float(found[1]) if found else 0.0

    def _sample_call(self, sample: SampleRequest) -> tuple[str, object]:
        sampling = sample.sampling
        return "/inference/v1/generate", {
            "request_id": sample.rid,
            "token_ids": sample.prompt,
            "sampling_params": {
                "max_tokens": sample.max_new_tokens,
                "temperature": sampling.temperature,
                "stop_token_ids": () if sampling.ignore_eos else sampling.stop_token_ids,
                "ignore_eos": sampling.ignore_eos,
                "stream_interval": sample.chunk_tokens,
                "logprobs": 0,  # none but the sampled token's
                "detokenize": False,
            },
            "cache_salt": sample.label,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _chunks(self, events: AsyncIterator[bytes]) -> AsyncGenerator[Chunk, None]:
        """Everything so far, from what is new each time. The last event is held back for the usage that follows it."""
        so_far = Chunk(token_ids=[])
        async for raw in events:
            event = self._read_event(_Event, raw)
            if event.choices:
                new = event.choices[0]
                logprobs = [(one.logprob, one.token_id) for one in new.logprobs.content] if new.logprobs else []
                so_far = Chunk(
                    token_ids=so_far.token_ids + new.token_ids,
                    logprobs=so_far.logprobs + logprobs,
                    spans=new.weight_versions or (),
                    finish_reason=new.finish_reason or "",
                )
                if not so_far.finish_reason:
                    yield so_far
            elif event.usage is not None:
                details = event.usage.prompt_tokens_details
                yield replace(so_far, cached_tokens=details.cached_tokens if details else 0)

    async def prompt_logprobs(self, prompt: Sequence[int] | str, start: int) -> list[tuple[int, float | None]]:
        """Over its OpenAI interface, which every vLLM server has."""
        if not self._served:
            models = self._read_field("data", list[_Model], await self._call("GET", "/v1/models"))
            self._served = models[0].id if models else ""
        body = {
            "model": self._served,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,  # none but the prompt's own tokens
            "return_token_ids": True,
        }
        answer = await self._call("POST", "/v1/completions", body, self._request_s)
        (choice,) = self._read_field("choices", tuple[_ScoredPrompt], answer)
        ids = choice.prompt_token_ids if isinstance(prompt, str) else list(prompt)
        if ids is None or len(ids) != len(choice.prompt_logprobs):
            raise ServerAnswerError(self.url, 0, "its logprobs are not one for each token of the prompt")
        found: list[tuple[int, float | None]] = []
        for token, logprobs in list(zip(ids, choice.prompt_logprobs, strict=True))[start:]:
            if logprobs is not None and str(token) not in logprobs:
                raise ServerAnswerError(self.url, 0, "logprobs of other tokens than it was asked for")
            found.append((token, logprobs[str(token)].logprob if logprobs is not None else None))
        return found

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]})

    async def pause(self) -> None:
        await self._call("POST", "/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def load(self, order: LoadOrder, label: str | None, processes: int) -> LoadResult:
        """All processes say how it went; the first that failed counts."""
        raw = await self._rpc("streamrl_load", to_name(order), deadline_s=UPDATE_S)
        results = [read_result(numbers) for numbers in self._read_field("results", list[list[int]], raw)]
        result = next((one for one in results if one.error), results[0])
        if label is not None and not result.error:
            await self.set_label(label)
        return result

    async def label(self) -> str:
        return self._read_field("weight_version", str, await self._call("GET", "/weight_info"))

    async def set_label(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": label})

    async def _rpc(self, method: str, *args: str, deadline_s: float = CALL_S) -> bytes:
        return await self._call("POST", "/collective_rpc", {"method": method, "args": args}, deadline_s)


def refusal(request: GenerationRequest) -> str:
    return CUTS_THE_TAIL if request.sampling.top_p < 1 or request.sampling.top_k else ""


def draft_options(drafts: int) -> list[str]:
    """It drafts from a sample's own prompt and response."""
    config = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    return ["--speculative-config", msgspec.json.encode(config).decode()]


VLLM = ServerKind(
    name="vLLM",
    tested=("0.32.0",),
    client=VllmClient,
    command=tuple(python_module("vllm.entrypoints.openai.api_server")),
    model_option="--model",
    slots_option="--max-num-seqs",
    context_option="--max-model-len",
    gpus_option="--tensor-parallel-size",
    memory_option="--gpu-memory-utilization",
    loader_option="--worker-extension-cls",
    loader=LOADER,
    flags=(
        *("--logprobs-mode", LOGPROBS_MODE),
        *("--generation-config", "vllm"),  # what a sample is drawn with, we say
        "--enable-scale-out",  # token ids in, token ids out
        "--enable-prompt-tokens-details",  # how many of them came from its cache
        "--skip-tokenizer-init",
    ),
    refusal=refusal,
    environment={"VLLM_SERVER_DEV_MODE": "1"},
    key_variable="VLLM_API_KEY",
    socket_option="--uds",  # a socket: vLLM asks for a key where samples are asked for, and not where weights are
    draft_options=draft_options,
    fp8_kv=("--kv-cache-dtype", "fp8"),
    fp8_weights=("--quantization", "fp8"),  # anew in every ``reload_weights``
)
