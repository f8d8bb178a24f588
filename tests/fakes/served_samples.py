"""Samples asked of an engine that is a server, for tests of what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.fakes.tiny_models import VOCAB, full_logprobs
from transport.contracts.types import GroupId, SamplingParams, WeightIdentity
from workers.generation.engine import Completion, EngineFailure, GenerationEngine, GenerationRequest

EXACT = 1e-4
"""Between float32 logprobs of two implementations; the tiny models' are apart by 1 and more under other weights."""
OLD, NEW = WeightIdentity(epoch=1, version=1, digest="aa"), WeightIdentity(epoch=1, version=2, digest="bb")


def weights_of(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    return dict(model.named_parameters())


def prompt(seed: int, tokens: int = 12) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(2, VOCAB, tokens).astype(np.int32)


def request(
    group: str,
    prompt_ids: NDArray[np.int32],
    *,
    tokens: int = 24,
    samples: int = 1,
    temperature: float = 0.0,
    **changes: Any,
) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
    made = GenerationRequest(
        group_id=GroupId(group), prompt_ids=prompt_ids, samples=tuple(range(samples)), sampling=sampling
    )
    return replace(made, **changes)


async def completions(engine: GenerationEngine, *requests: GenerationRequest) -> dict[tuple[str, int], Completion]:
    """All samples of ``requests``, by group and sample."""
    for one in requests:
        engine.submit(one)
    return await collected(engine, sum(len(one.samples) for one in requests))


async def collected(engine: GenerationEngine, count: int, deadline_s: float = 60) -> dict[tuple[str, int], Completion]:
    found: list[Completion | EngineFailure] = []
    async with asyncio.timeout(deadline_s):
        while len(found) < count:
            found += await engine.results()
    assert [one for one in found if isinstance(one, EngineFailure)] == []
    return {(one.group_id, one.sample): one for one in found if isinstance(one, Completion)}


async def until_running(engine: GenerationEngine, count: int) -> None:
    async with asyncio.timeout(20):
        while engine.load().running < count:  # noqa: ASYNC110 the engine tells nobody of a first token
            await asyncio.sleep(0.01)


def spans_of(completion: Completion) -> list[tuple[int, int, WeightIdentity]]:
    return [(span.start, span.end, span.weights) for span in completion.spans]


def assert_logprobs(model: PreTrainedModel, prompt_ids: NDArray[np.int32], completion: Completion, t: float) -> None:
    expected = full_logprobs(model, prompt_ids, completion.response_ids, t)
    np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)
