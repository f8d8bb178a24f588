"""The emulated engine: exact lengths, continuous batching, time that passes as its costs say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from transport.contracts.llms import Fp8
from transport.contracts.settings import EMULATED_LOGPROB, EmulatedSettings
from transport.contracts.types import FinishReason, GroupId, SamplingParams, VersionSpan, WeightIdentity
from transport.process.clock import MonotonicClock
from transport.rows.partial import Beginning
from workers.generation.emulated import EmulatedEngine
from workers.generation.engine import Completion, EngineFailure, GenerationRequest

OLD, NEW = WeightIdentity(epoch=1, version=1), WeightIdentity(epoch=1, version=2)
COSTS = EmulatedSettings(time_scale=0.01, step_s=0.02, sample_step_s=0.005, load_s=0.0)


class Engine:
    """An engine as a context, and the results of it."""

    def __init__(self, slots: int, costs: EmulatedSettings = COSTS, drafts: int = 0, kv_tokens: int = 0) -> None:
        self.engine = EmulatedEngine(costs, slots, MonotonicClock(), weights=OLD, drafts=drafts, kv_tokens=kv_tokens)

    async def __aenter__(self) -> Engine:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    def submit(self, slot: int, *limits: int, priority: float = 0.0, prompt: int = 4) -> None:
        request = GenerationRequest(
            group_id=GroupId(f"0/{slot}"),
            prompt_ids=np.ones(prompt, np.int32),
            samples=tuple(range(len(limits))),
            sampling=SamplingParams(max_new_tokens=1000, seed=7),
            priority=priority,
            limits=limits,
        )
        self.engine.submit(request)

    async def results(self, count: int) -> list[Completion | EngineFailure]:
        found: list[Completion | EngineFailure] = []
        async with asyncio.timeout(30):
            while len(found) < count:
                found += await self.engine.results()
        return found


def names(results: list[Completion | EngineFailure]) -> Iterator[tuple[str, int]]:
    return ((one.group_id, one.sample) for one in results if isinstance(one, Completion))


async def test_samples_have_their_lengths_and_end_in_the_order_of_them():
    async with Engine(slots=4) as engine:
        engine.submit(0, 30, 10, 20)
        results = await engine.results(3)
    assert list(names(results)) == [("0/0", 1), ("0/0", 2), ("0/0", 0)]
    for one in results:
        assert isinstance(one, Completion)
        assert len(one.response_ids) == len(one.logprobs) == {0: 30, 1: 10, 2: 20}[one.sample]
        assert one.finish_reason is FinishReason.LENGTH
        assert one.spans == (VersionSpan(start=0, end=len(one.response_ids), weights=OLD),)


async def test_a_step_costs_what_its_batch_size_says():
    async with Engine(slots=4) as engine:
        engine.submit(0, 10, 30)
        await engine.results(2)
        load = engine.engine.load()
    assert load.busy_s == pytest.approx(0.01 * (10 * (0.02 + 2 * 0.005) + 20 * (0.02 + 0.005)))
    assert load.tokens == 40


@pytest.mark.parametrize(("acceptance", "tokens_a_step"), [(0.0, 1), (0.5, 1.5), (1.0, 2)])
async def test_drafts_shorten_the_tail_as_in_the_simulator(acceptance: float, tokens_a_step: float):
    """One drafted token of a sample that decodes alone: taken where its chance is worth more than a row costs."""
    costs = EmulatedSettings(time_scale=0.01, step_s=0.02, sample_step_s=0.02, load_s=0.0, draft_acceptance=acceptance)
    async with Engine(slots=1, costs=costs, drafts=1) as engine:
        engine.submit(0, 40)
        (result,) = await engine.results(1)
        busy_s = engine.engine.load().busy_s
    assert isinstance(result, Completion)
    assert len(result.response_ids) == 40
    a_token_s = min(0.04, 0.06 / tokens_a_step)
    assert busy_s == pytest.approx(0.01 * 40 * a_token_s)


async def test_a_slot_that_falls_free_is_filled_at_once_by_priority():
    async with Engine(slots=1) as engine:
        engine.submit(0, 5, priority=1.0)
        engine.submit(1, 7, priority=0.0)
        engine.submit(2, 9, priority=0.5)
        results = await engine.results(3)
        busy_s = engine.engine.load().busy_s
    assert [name for name, _ in names(results)] == ["0/0", "0/2", "0/1"]
    assert busy_s == pytest.approx(0.01 * 21 * 0.025), "no step is lost between two samples"


async def test_running_samples_go_on_under_new_weights_and_say_from_which_token():
    async with Engine(slots=2, costs=EmulatedSettings(time_scale=0.1, step_s=0.02, load_s=0.0)) as engine:
        engine.submit(0, 3, 100)
        (first,) = await engine.results(1)
        await engine.engine.load_weights(NEW, {})
        (second,) = await engine.results(1)
    assert isinstance(first, Completion)
    assert isinstance(second, Completion)
    assert [span.weights for span in first.spans] == [OLD]
    before, after = second.spans
    assert (before.weights, after.weights) == (OLD, NEW)
    assert before.start == 0
    assert 3 <= before.end == after.start < after.end == 100


async def test_tokens_that_are_wanted_as_they_come_are_told_before_the_end():
    async with Engine(slots=4, costs=EmulatedSettings(time_scale=0.1, step_s=0.02, load_s=0.0)) as engine:
        told: list[tuple[int, list[int], list[float]]] = []
        asked = GenerationRequest(
            group_id=GroupId("0/0"),
            prompt_ids=np.ones(4, np.int32),
            samples=(0,),
            sampling=SamplingParams(max_new_tokens=50, seed=7),
            on_tokens=lambda start, ids, logprobs: told.append((start, list(ids), list(logprobs))),
        )
        engine.engine.submit(asked)
        engine.submit(1, 20)
        one, two = await engine.results(2)
    assert [name for name, _ in names([one, two])] == ["0/1", "0/0"]
    assert isinstance(two, Completion)
    assert len(told) > 2
    assert [len(ids) for _, ids, _ in told] == sorted({len(ids) for _, ids, _ in told})
    assert all(ids == two.response_ids[: len(ids)].tolist() and len(ids) == len(logs) for _, ids, logs in told)
    assert told[-1][1] == two.response_ids.tolist()


async def test_decoding_stands_still_while_weights_are_taken():
    costs = EmulatedSettings(time_scale=0.01, step_s=0.02, sample_step_s=0.0, load_s=10.0)
    async with Engine(slots=1, costs=costs) as engine:
        clock = MonotonicClock()
        engine.submit(0, 5)
        loading = asyncio.create_task(engine.engine.load_weights(NEW, {}))
        started_s = clock.now_s()
        await engine.results(1)
        await loading
        assert clock.now_s() - started_s >= 0.1
        assert engine.engine.load().busy_s == pytest.approx(0.01 * 5 * 0.02)


async def test_what_is_aborted_comes_out_once_running_or_waiting():
    async with Engine(slots=1, costs=EmulatedSettings(time_scale=1.0, step_s=1.0)) as engine:
        engine.submit(0, 100, 100)
        engine.submit(1, 1, 1)
        await asyncio.sleep(0)
        await engine.engine.abort([(GroupId("0/0"), 0)])
        results = await engine.results(2)
        load = engine.engine.load()
    aborted = {(one.group_id, type(one).__name__) for one in results}
    assert aborted == {("0/0", "Completion"), ("0/0", "EngineFailure")}
    assert (load.running, load.waiting) in ((1, 1), (0, 2))


async def test_a_prompt_is_paid_once_for_its_group():
    costs = EmulatedSettings(time_scale=0.01, step_s=0.02, sample_step_s=0.0, prefill_token_s=1.0)
    async with Engine(slots=4, costs=costs) as engine:
        clock = MonotonicClock()
        started_s = clock.now_s()
        engine.submit(0, 1, 1, 1, prompt=50)
        await engine.results(3)
        assert 0.5 <= clock.now_s() - started_s < 1.5, "1.5 s are three prompts"


async def test_the_same_sample_has_the_same_tokens_on_every_engine():
    tokens: list[list[int]] = []
    for slots in (1, 4):
        async with Engine(slots=slots) as engine:
            engine.submit(0, 6, 6)
            results = await engine.results(2)
            tokens.append([t for one in results if isinstance(one, Completion) for t in one.response_ids.tolist()])
    assert sorted(tokens[0]) == sorted(tokens[1])
    assert len(set(tokens[0])) > 1


async def test_what_a_sample_has_got_is_where_it_goes_on_on_another_engine():
    async with Engine(slots=2) as engine:
        engine.submit(0, 900)
        async with asyncio.timeout(30):
            while not (got := await engine.engine.progress({})):  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.001)
        assert await engine.engine.progress({("0/0", 0, 0): 900}) == []
        await engine.engine.abort({(GroupId("0/0"), 0)})
        (stopped,) = await engine.results(1)
    assert isinstance(stopped, Completion)
    assert 0 < got[0].end <= len(stopped.response_ids)
    assert stopped.response_ids[: got[0].end].tolist() == got[0].token_ids.tolist()
    begun = Beginning(token_ids=got[0].token_ids, logprobs=got[0].logprobs, spans=got[0].spans)
    request = GenerationRequest(
        group_id=GroupId("0/0"),
        prompt_ids=np.ones(4, np.int32),
        samples=(0,),
        sampling=SamplingParams(max_new_tokens=1000, seed=7),
        limits=(got[0].end + 3,),
        begun={0: begun},
    )
    other = EmulatedEngine(COSTS, 2, MonotonicClock(), weights=NEW)
    await other.start()
    other.submit(request)
    (whole,) = await other.results()
    tokens = other.load().tokens
    await other.close()
    assert isinstance(whole, Completion)
    assert (len(whole.response_ids), whole.resumed, tokens) == (got[0].end + 3, got[0].end, 3)
    assert [(span.end, span.weights) for span in whole.spans] == [(got[0].end, OLD), (got[0].end + 3, NEW)]


async def test_in_little_memory_samples_are_retracted_as_by_the_embedded_engine():
    """Two of 4 + 600 tokens do not fit into 1,000: at 496 each the second one waits, with what it has."""
    async with Engine(slots=4, kv_tokens=1000) as engine:
        engine.submit(0, 600, 600)
        results = await engine.results(2)
        load = engine.engine.load()
    assert (load.retracted_samples, load.kv_use, load.tokens) == (1, 0.0, 1200)
    assert list(names(results)) == [("0/0", 0), ("0/0", 1)]
    for one in results:
        assert isinstance(one, Completion)
        assert (len(one.response_ids), one.resumed) == (600, 0)
        assert one.spans == (VersionSpan(start=0, end=600, weights=OLD),)


async def test_a_retracted_sample_is_reported_and_comes_out_when_it_is_aborted():
    """The other one goes on alone for half a minute, as if it fitted."""
    async with Engine(slots=4, kv_tokens=1000) as engine:
        engine.submit(0, 120_000, 120_000)
        async with asyncio.timeout(30):
            while not (load := engine.engine.load()).retracted_samples:  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.001)
        assert (load.running, load.waiting) == (1, 1)
        assert 0 < load.kv_use <= 1
        assert {one.key[2]: one.end for one in await engine.engine.progress({})}[1] == 496
        await engine.engine.abort({(GroupId("0/0"), 0)})
        lengths = {one.sample: len(one.response_ids) for one in await engine.results(2) if isinstance(one, Completion)}
    assert lengths[1] == 496 <= lengths[0]


async def test_an_emulated_engine_says_what_its_memory_holds():
    engine = EmulatedEngine(COSTS, 4, MonotonicClock(), kv_tokens=1000)
    info = await engine.start()
    await engine.close()
    assert (info.kv_tokens, info.kv_padded) == (1000, True)


async def test_in_fp8_its_logprobs_are_off_until_it_is_told_to_leave_that():
    costs = EmulatedSettings(time_scale=0.01, step_s=0.02, load_s=0.0, fp8_mismatch=0.25)
    engine = EmulatedEngine(costs, 2, MonotonicClock(), weights=OLD, fp8=Fp8(kv=True))
    wrapped = Engine(2)
    wrapped.engine = engine
    async with wrapped:
        wrapped.submit(0, 3)
        (before,) = await wrapped.results(1)
        await engine.use_full_precision("too far off")
        wrapped.submit(1, 3)
        (after,) = await wrapped.results(1)
    assert isinstance(before, Completion)
    assert isinstance(after, Completion)
    assert before.logprobs.tolist() == [EMULATED_LOGPROB - 0.25] * 3
    assert after.logprobs.tolist() == [EMULATED_LOGPROB] * 3
