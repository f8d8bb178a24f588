"""What leaves an engine, and what ends a wait on it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from transport.contracts.types import GroupId, SamplingParams
from workers.errors import EngineCrashedError, ModelError
from workers.generation.engine import EngineFailure, GenerationRequest, ResultQueue


def failures(*samples: int) -> list[EngineFailure]:
    request = GenerationRequest(
        group_id=GroupId("0/0"),
        prompt_ids=np.ones(4, np.int32),
        samples=samples,
        sampling=SamplingParams(max_new_tokens=8),
        attempt=3,
    )
    return [request.failure([sample], "a reason") for sample in samples]


@pytest.fixture
async def results() -> ResultQueue:
    made = ResultQueue()
    made.serving = asyncio.get_running_loop().create_future()
    return made


async def test_results_are_taken_once_and_all_at_a_time(results: ResultQueue) -> None:
    one, two, three = failures(0, 1, 2)
    results.put(one, two)
    assert await results.take() == [one, two]
    taking = asyncio.create_task(results.take())
    await asyncio.sleep(0)
    results.put()
    results.put(three)
    assert await taking == [three]
    assert (three.attempt, three.samples, three.retryable) == (3, (2,), True)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(ModelError("no server: it is gone"), "no server: it is gone"), (KeyError("x"), "the engine ended: KeyError")],
)
async def test_what_ends_serving_ends_a_wait_after_the_last_results(
    results: ResultQueue, cause: Exception, reason: str
) -> None:
    (last,) = failures(0)
    assert results.serving is not None
    results.put(last)
    results.serving.set_exception(cause)
    assert await results.take() == [last]
    with pytest.raises(EngineCrashedError, match=reason) as raised:
        await results.take()
    assert raised.value.__cause__ is cause


async def test_what_was_awaited_is_over_before_a_close_is_told(results: ResultQueue) -> None:
    began, over = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            over.set()

    waiting = asyncio.create_task(results.until(call()))
    await began.wait()
    assert results.serving is not None
    results.serving.cancel()
    with pytest.raises(EngineCrashedError, match="closed"):
        await waiting
    assert over.is_set()
