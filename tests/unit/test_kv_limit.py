"""The slot decoder where memory does not hold all slots: what it gives is what it gives where memory does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fakes.decoding import (
    V0,
    V1,
    beginning_of,
    by_sample,
    check_logprobs,
    decoder_of,
    first_turns,
    next_turn,
    prompt_of,
    request,
    run_all,
)
from tests.fakes.tiny_models import tiny_model
from tests.unit.test_draft_decoding import drafted_by, drafting_of
from transport.contracts.types import FinishReason, GroupId
from workers.generation.embedded.forward import FIRST_CAPACITY, LIMITED_STEP, KVShape, SlotKV
from workers.generation.engine import Completion, EngineFailure

CONTEXT = 256
LIMIT = 300
SHAPE = KVShape(layers=2, heads=2, head_dim=8)


@pytest.fixture(autouse=True)
def little_headroom(monkeypatch):
    """Samples of these tests grow by tens of tokens, not by hundreds: with all head-room none would be retracted."""
    monkeypatch.setattr("transport.contracts.continuous_batching.HEADROOM_TOKENS", 4)


def limited(model, *, slots=8, kv_tokens=LIMIT, **more):
    return decoder_of(model, slots=slots, max_context=CONTEXT, kv_tokens=kv_tokens, **more)


def run_within(decoder, requests=(), max_steps=2000):
    """All results; after every step memory is within its limit."""
    return run_all(decoder, requests, max_steps, check=check_memory)


def check_memory(decoder):
    kv = decoder._kv
    assert {tuple(layer.shape) for layer in (*kv.keys, *kv.values)} == {(kv.slots, 2, kv.capacity + 32, 16)}
    kept = sum(len(turn.token_ids) for turn in decoder._kept._turns.values())
    assert kv.slots * kv.capacity + kept <= decoder.kv_tokens
    assert decoder.num_running <= kv.slots
    assert max((sample.kv_tokens for sample in decoder._running), default=0) <= kv.capacity


def check_same(found, expected, resumed=0):
    found, expected = by_sample(found), by_sample(expected)
    assert found.keys() == expected.keys()
    for key, one in found.items():
        assert one.response_ids.tolist() == expected[key].response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, expected[key].logprobs, atol=1e-4)
        assert (one.spans, one.finish_reason, one.resumed) == (
            expected[key].spans,
            expected[key].finish_reason,
            resumed,
        )


# --- memory


def memory(limit, *, slots=6, max_tokens=1500):
    return SlotKV(
        SHAPE, slots=slots, max_tokens=max_tokens, dtype=torch.float32, device=torch.device("cpu"), limit=limit
    )


def test_below_its_limit_memory_grows_as_without_one():
    free, tight = memory(0), memory(6 * 1024)
    for tokens in (1, FIRST_CAPACITY, FIRST_CAPACITY + 1, 600):
        for kv in (free, tight):
            kv.reserve(tokens, 6, 6)
        assert (tight.slots, tight.capacity) == (free.slots, free.capacity)
    assert (tight.slots, tight.capacity) == (6, 600)


def test_at_its_limit_memory_grows_by_steps_and_has_the_more_slots_the_shorter_they_are():
    kv = memory(2000)
    assert (kv.slots, kv.capacity) == (6, FIRST_CAPACITY)
    kv.reserve(350, 3, 0)
    assert (kv.slots, kv.capacity) == (3, 2 * LIMITED_STEP), "six of 350 do not fit"
    kv.reserve(600, 3, 3)
    assert (kv.slots, kv.capacity) == (3, 2000 // 3), "less than a step is left"
    kv.reserve(700, 2, 2)
    assert (kv.slots, kv.capacity) == (2, 3 * LIMITED_STEP)
    kv.reserve(1500, 1, 1)
    assert (kv.slots, kv.capacity) == (1, 1500)
    kv.reserve(30, 5, 0)
    assert (kv.slots, kv.capacity) == (6, LIMITED_STEP), "the long one has left"


def test_memory_that_is_laid_out_anew_keeps_what_running_slots_hold():
    kv = memory(2000)
    keys, values = torch.randn(2, 40, 2, 8), torch.randn(2, 40, 2, 8)

    def check():
        for slot in range(2):
            live_keys, live_values = kv.live(1, 2, 40)
            assert torch.equal(live_keys[slot].permute(2, 0, 1), keys[slot])
            assert torch.equal(live_values[slot].transpose(0, 1), values[slot])

    for slot in range(2):
        kv.fill(1, slice(slot, slot + 1), keys[slot], values[slot])
    for tokens, slots in ((900, 2), (40, 6), (300, 4), (1000, 2), (41, 3)):
        kv.reserve(tokens, slots, 2)
        check()
        assert kv.slots * kv.capacity <= 2000


@pytest.mark.parametrize(("tokens", "slots"), [(1501, 1), (10, 7), (700, 3)])
def test_memory_says_what_does_not_fit(tokens, slots):
    with pytest.raises(ValueError, match=f"{slots} slots of {tokens} tokens do not fit"):
        memory(2000).reserve(tokens, slots, 0)
    with pytest.raises(ValueError, match="do not hold one slot"):
        memory(1499)


# --- samples


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("llama", True), ("olmo2", False)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_sample_is_the_one_that_was_not_retracted(family, fused, temperature):
    model = tiny_model(family)
    requests = [
        request(slot, samples=(0, 1, 2), new_tokens=20 + 25 * slot, temperature=temperature) for slot in range(4)
    ]
    decoder = limited(model, fused=fused)
    found = run_within(decoder, requests)
    assert decoder.num_retracted > 3
    check_same(found, run_all(decoder_of(model, slots=8, fused=fused), requests))
    assert decoder.tokens == sum(len(one.response_ids) for one in found), "none is counted twice"


def test_a_limit_that_holds_all_slots_is_none():
    model = tiny_model()
    decoder = decoder_of(model, slots=4, kv_tokens=4 * CONTEXT)
    assert decoder.kv_tokens == 0
    requests = [request(slot, new_tokens=100) for slot in range(3)]
    check_same(run_all(decoder, requests), run_all(decoder_of(model, slots=4), requests))
    assert decoder.num_retracted == 0


def test_with_drafts_they_are_the_same_and_no_draft_goes_beyond_memory():
    model = tiny_model("llama")
    same = prompt_of(9)
    requests = [request(slot, prompt=same, samples=range(4), new_tokens=90, temperature=0.3) for slot in range(2)]
    decoder = drafted_by(limited(model), drafting_of())
    found = run_within(decoder, requests)
    assert decoder.num_retracted > 0
    assert decoder.accepted > 0
    check_same(found, run_all(decoder_of(model, slots=8), requests))


def test_a_sample_that_was_begun_elsewhere_says_so_however_often_it_is_retracted():
    model = tiny_model("llama")
    asked = request(0, samples=range(4), new_tokens=90)
    whole = by_sample(run_all(decoder_of(model, slots=4), [asked]))
    begun = {sample: beginning_of(whole["0/0", sample], 10) for sample in range(4)}
    decoder = limited(model)
    found = run_within(decoder, [replace(asked, begun=begun)])
    assert decoder.num_retracted > 0
    check_same(found, whole.values(), resumed=10)


def test_new_weights_meanwhile_are_those_of_the_tokens_that_follow():
    model = tiny_model("llama")
    requests = [request(slot, samples=(0, 1, 2), new_tokens=90) for slot in range(2)]
    decoder = limited(model)
    results = [result for each in requests for result in decoder.submit(each)]
    while decoder.num_retracted < 2:
        results += decoder.step()
    waits = [group.retracted for group in decoder._waiting if group.retracted]
    had = {(one.request.group_id, one.sample): len(one.token_ids) for one in waits}
    decoder.load_weights(V1, {})
    found = by_sample([*results, *run_within(decoder)])
    plain = by_sample(run_all(decoder_of(model, slots=8), requests))
    assert {key: one.response_ids.tolist() for key, one in found.items()} == {
        key: one.response_ids.tolist() for key, one in plain.items()
    }
    for key, tokens in had.items():
        first, last = found[key].spans
        assert ((first.weights, first.end), (last.weights, last.end)) == ((V0, tokens), (V1, 90))


def retracting(decoder, requests):
    """Step until one has been retracted, and return its group: it waits."""
    for each in requests:
        decoder.submit(each)
    while not decoder.num_retracted:
        assert decoder.step() == []
    (group,) = [group for group in decoder._waiting if group.retracted is not None]
    return group


def test_the_one_with_the_least_to_compute_again_is_retracted_of_equal_ones_the_last():
    group = retracting(limited(tiny_model()), [request(2, new_tokens=90), request(0, new_tokens=90)])
    assert (group.request.group_id, group.samples) == ("0/0", [2]), "its prompt is shorter"


def test_it_comes_back_before_what_came_later_but_not_before_what_is_of_more_worth():
    decoder = limited(tiny_model())
    group = retracting(decoder, [request(0, samples=range(6), new_tokens=60)])
    decoder.submit(request(1, samples=(0,)))
    assert decoder._waiting.first() is group
    decoder.submit(request(2, samples=(0,), priority=1.0))
    first = decoder._waiting.first()
    assert first is not None
    assert first.request.group_id == "0/2"


def test_a_retracted_one_is_reported_told_of_and_timed_as_if_it_ran():
    told = []
    decoder = limited(tiny_model())
    waits = replace(
        request(0, samples=(0,), new_tokens=90),
        on_tokens=lambda start, ids, logprobs: told.append((start, len(ids), len(logprobs))),
    )
    group = retracting(decoder, [request(1, samples=range(4), new_tokens=90), waits])
    assert group.request is waits
    (sample,), had = group.samples, len(group.begun)
    assert had > 0
    (progress,) = [one for one in decoder.progress({}) if one.key == (*group.request.key, sample)]
    assert (progress.start, progress.end) == (0, had)
    assert progress.token_ids.tolist() == group.begun.token_ids.tolist()
    decoder._clock.advance(10.0)
    found = by_sample(run_within(decoder))
    assert (found["0/0", sample].queued_s, found["0/0", sample].engine_s) == (0.0, 10.0)
    for call in decoder.told:
        call()
    assert [start for start, _, _ in told] == list(range(90)), "each token once, and in order"


def test_an_aborted_one_comes_out_once_with_what_it_had():
    decoder = limited(tiny_model())
    group = retracting(decoder, [request(0, samples=range(6), new_tokens=90)])
    had = group.begun.token_ids.tolist()
    results = decoder.abort([group.request.key])
    assert not decoder.has_work
    found = {one.sample: one for one in results if isinstance(one, Completion)}
    failed = [sample for one in results if isinstance(one, EngineFailure) for sample in one.samples]
    assert sorted([*found, *failed]) == list(range(6))
    ((sample, finished),) = [(one.sample, one) for one in found.values() if one.response_ids.tolist() == had]
    assert sample == group.samples[0]
    assert finished.finish_reason is FinishReason.ABORT


# --- turns that are continued


def test_kept_turns_have_their_part_of_memory_and_no_more():
    model = tiny_model("qwen3")
    decoder = limited(model, kv_tokens=400)
    assert decoder._kept.max_tokens == 100
    asked, answered = first_turns(decoder)
    turns = [next_turn(asked, one, added=4) for one in answered.values()]
    others = [request(slot, samples=range(4), new_tokens=60) for slot in (1, 2)]
    found = run_within(decoder, [*others, *turns])
    plain = decoder_of(model, slots=8)
    check_same(found, run_all(plain, [*others, *turns]))
    assert decoder.reused_tokens > 0
    assert decoder.num_retracted > 0


def test_where_memory_holds_one_sample_alone_no_turn_is_kept():
    decoder = limited(tiny_model("qwen3"), kv_tokens=CONTEXT)
    asked, answered = first_turns(decoder)
    turns = [next_turn(asked, one) for one in answered.values()]
    found = by_sample(run_within(decoder, turns))
    assert decoder.reused_tokens == 0
    for turn in turns:
        check_logprobs(tiny_model("qwen3"), [turn], [found[turn.group_id, turn.samples[0]]])


def test_a_turn_that_is_retracted_while_it_is_fed_is_computed_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.generation.embedded.slots.MAX_DECODE_ROWS", 4)  # so much of it at once
    model = tiny_model("qwen3")
    decoder = limited(model, kv_tokens=400)
    asked, answered = first_turns(decoder)
    turn = replace(next_turn(asked, answered[asked.group_id, 0], added=14), priority=-1.0)
    others = [replace(request(1, samples=range(7), new_tokens=60), group_id=GroupId("0/9"))]
    decoder.submit(turn)
    decoder.step()
    fed = decoder._running[0]
    assert fed.unfed > 0
    # As if memory had become full now: the others' admission leaves head-room for it.
    decoder._waiting.push(decoder._leave(0).waiting())
    found = by_sample(run_within(decoder, others))
    check_logprobs(model, [turn], [found[turn.group_id, 0]])
    assert found[turn.group_id, 0].resumed == 0


def test_what_is_fed_at_once_stays_within_memory():
    """A later turn is fed as much as its slot may hold beside the others, which have grown since it came."""
    model = tiny_model("qwen3")
    decoder = limited(model, kv_tokens=400)
    asked, answered = first_turns(decoder)
    turns = [next_turn(asked, one, added=added) for one, added in zip(answered.values(), (3, 9, 14, 6), strict=False)]
    others = [request(1, samples=range(5), new_tokens=40)]
    found = run_within(decoder, [*others, *turns])
    check_same(found, run_all(decoder_of(model, slots=8), [*others, *turns]))
