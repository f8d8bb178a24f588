"""Between the engine's words and SGLang's: a sample as a request body, its last chunk as a completion.

Pure. Invariant: a completion's tokens, logprobs and spans cover each other, or there is none.
"""

from __future__ import annotations

import numpy as np

from transport.contracts.types import FinishReason, VersionSpan, WeightIdentity
from workers.generation.engine import Completion
from workers.generation.server.queue import SentSample
from workers.generation.server.sglang_http import (
    BASE_LABEL,
    NEVER,
    Chunk,
    GenerateBody,
    MetaInfo,
    SamplingBody,
    ServedSpan,
    ServerInfo,
)

SEED_BITS = 31
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class BadAnswerError(ValueError):
    """The last chunk of a sample contradicts itself; the message says how."""


def request_body(sent: SentSample, server: ServerInfo) -> GenerateBody:
    """priority: only where the server has them; seed: only where it is deterministic, or it is not honoured."""
    request, sampling = sent.group.request, sent.group.request.sampling
    return GenerateBody(
        rid=sent.rid,
        input_ids=sent.group.prompt,
        sampling_params=SamplingBody(
            max_new_tokens=request.limit(sent.sample),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            sampling_seed=_seed(sampling.seed, sent.sample) if server.enable_deterministic_inference else None,
            stream_interval=NEVER,
        ),
        extra_key=sent.label,
        stream=True,
        return_logprob=True,
        priority=round(request.priority) if server.enable_priority_scheduling else None,
    )


def _seed(seed: int, sample: int) -> int:
    """A stream of its own for each sample of a group."""
    return int(np.random.SeedSequence((seed, sample)).generate_state(1)[0]) >> (32 - SEED_BITS)


def completion(sent: SentSample, chunk: Chunk, known: dict[str, WeightIdentity], now_s: float) -> Completion:
    """known: weights by label. Raises BadAnswerError."""
    meta = chunk.meta_info
    if meta is None or meta.finish_reason is None or meta.finish_reason.type not in _REASONS:
        raise BadAnswerError("it says nothing of how the sample ended")
    started_at_s = now_s if sent.started_at_s is None else sent.started_at_s
    return Completion(
        group_id=sent.group.request.group_id,
        sample=sent.sample,
        attempt=sent.group.request.attempt,
        response_ids=np.array(chunk.output_ids, dtype=np.int32),
        logprobs=_logprobs(meta, chunk.output_ids),
        finish_reason=_REASONS[meta.finish_reason.type],
        spans=_spans(meta.weight_versions, len(chunk.output_ids), _loaded(known, sent.label)),
        queued_s=started_at_s - sent.queued_at_s,
        engine_s=now_s - started_at_s,
    )


def _logprobs(meta: MetaInfo, output_ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    entries = meta.output_token_logprobs
    if [entry[1] for entry in entries] != output_ids:
        raise BadAnswerError(f"its {len(entries)} logprobs are not of its {len(output_ids)} tokens")
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)  # None becomes NaN
    if not np.isfinite(logprobs).all():
        raise BadAnswerError("a logprob is not finite")
    return logprobs


def _loaded(known: dict[str, WeightIdentity], label: str) -> dict[str, WeightIdentity]:
    """A sample sent under weights of ours cannot have tokens of those that a server starts with: it was another one."""
    return {name: weights for name, weights in known.items() if label == BASE_LABEL or name != BASE_LABEL}


def _spans(served: tuple[ServedSpan, ...], tokens: int, known: dict[str, WeightIdentity]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    end = 0
    for span in served:
        if span.version not in known:
            raise BadAnswerError(f"its tokens are of weights {span.version!r}, which nobody loaded")
        if span.start != end or span.end < span.start:
            raise BadAnswerError(f"its spans leave a gap at token {end}")
        end = span.end
        if span.end > span.start:
            spans.append(VersionSpan(start=span.start, end=span.end, weights=known[span.version]))
    if end != tokens or not tokens:
        raise BadAnswerError(f"its spans cover {end} of {tokens} tokens")
    return tuple(spans)
