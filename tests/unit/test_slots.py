"""The slot decoder against full forwards of the Hugging Face model, in float32."""

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
from tests.fakes.tiny_models import VOCAB, full_logprobs, tiny_model, two_phase_logprobs
from transport.contracts.types import FinishReason, GroupId, VersionSpan
from transport.rows.partial import Beginning
from workers.generation.embedded.forward import (
    FIRST_CAPACITY,
    KVShape,
    SlotKV,
    can_fuse,
)
from workers.generation.engine import Completion, EngineFailure


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_equal_a_full_forward(family, tied):
    model = tiny_model(family, tied=tied)
    assert can_fuse(model)
    requests = [request(slot, new_tokens=5 + 9 * slot, temperature=0.8) for slot in range(5)]
    results = run_all(decoder_of(model, slots=5), requests)
    assert len(results) == 15
    assert {len(r.response_ids) for r in results} == {5, 14, 23, 32, 41}
    check_logprobs(model, requests, results)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_a_model_that_is_not_fused_runs_on_its_own_forward(family):
    model = tiny_model(family)
    requests = [request(slot, new_tokens=5 + 9 * slot) for slot in range(4)]
    results = run_all(decoder_of(model, slots=5, fused=False), requests)
    check_logprobs(model, requests, results)
    assert family in ("qwen3",) or not can_fuse(model)


def test_both_ways_to_run_a_step_draw_the_same_tokens():
    model = tiny_model()
    requests = [request(slot) for slot in range(4)]
    fused, module = (run_all(decoder_of(model, fused=fused), requests) for fused in (True, False))
    assert {key: r.response_ids.tolist() for key, r in by_sample(fused).items()} == {
        key: r.response_ids.tolist() for key, r in by_sample(module).items()
    }


def test_greedy_decoding_equals_generate():
    model = tiny_model()
    asked = request(0, samples=(0,), new_tokens=30, temperature=0.0)
    (result,) = run_all(decoder_of(model), [asked])
    ids = torch.from_numpy(asked.prompt_ids).long()[None]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, attention_mask=ids > -1)
    assert result.response_ids.tolist() == expected[0, len(asked.prompt_ids) :].tolist()


def test_a_group_prompt_is_computed_once_even_when_its_samples_enter_one_by_one():
    model = tiny_model()
    asked = request(0, samples=range(8), new_tokens=6)
    decoder = decoder_of(model, slots=3)
    results = run_all(decoder, [asked])
    assert decoder.prefill_tokens == len(asked.prompt_ids)
    assert sorted(r.sample for r in results) == list(range(8))
    check_logprobs(model, [asked], results)


def test_each_sample_is_handed_out_by_the_step_that_ends_it():
    decoder = decoder_of(tiny_model(), slots=6)
    for slot, new_tokens in enumerate((1, 3, 5)):
        assert decoder.submit(request(slot, samples=(0, 1), new_tokens=new_tokens)) == []
    ended = [[str(r.group_id) for r in decoder.step()] for _ in range(5)]
    assert ended == [["0/0"] * 2, [], ["0/1"] * 2, [], ["0/2"] * 2]
    assert not decoder.has_work


def test_tokens_that_are_wanted_as_they_come_are_told_by_the_step_that_drew_them():
    told: list[tuple[int, int, float]] = []
    decoder = decoder_of(tiny_model(), slots=2)
    wanted = replace(
        request(0, samples=(0,), new_tokens=4),
        on_tokens=lambda start, ids, logprobs: told.append((start, *ids, *logprobs)),
    )
    decoder.submit(wanted)
    decoder.submit(request(1, samples=(0,), new_tokens=4))
    results = []
    for step in range(4):
        results += decoder.step()
        calls, decoder.told = decoder.told, []
        for tell in calls:
            tell()
        assert len(told) == step + 1
    made = by_sample(results)[wanted.group_id, 0]
    assert told == [*zip(range(4), made.response_ids.tolist(), made.logprobs.tolist(), strict=True)]


def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside_it():
    model = tiny_model()
    asked = [request(slot, samples=range(4), new_tokens=10 + 7 * slot) for slot in range(6)]
    crowd = by_sample(run_all(decoder_of(model, slots=7), asked))
    for one in asked:
        alone = by_sample(run_all(decoder_of(model, slots=1), [one]))
        assert {key: r.response_ids.tolist() for key, r in alone.items()} == {
            key: crowd[key].response_ids.tolist() for key in alone
        }
    other_seed = run_all(decoder_of(model), [request(0, seed=99)])
    assert any(r.response_ids.tolist() != crowd[r.group_id, r.sample].response_ids.tolist() for r in other_seed)
    assert len({tuple(crowd[GroupId("0/5"), sample].response_ids) for sample in range(4)}) == 4


def test_a_reused_slot_keeps_nothing_of_its_previous_occupant():
    """Long samples first, then shorter ones into the same slots: each equals its solo run."""
    model = tiny_model()
    asked = [request(slot, samples=(0, 1), new_tokens=60 - 9 * slot, priority=-slot) for slot in range(6)]
    shared = run_all(decoder_of(model, slots=2), asked)
    check_logprobs(model, asked, shared, tolerance=1e-5)


def test_logits_that_are_not_finite_fail_their_samples_and_poison_no_slot():
    model = tiny_model()
    decoder = decoder_of(model, slots=3)
    good = {name: tensor.clone() for name, tensor in decoder.parameters.items()}
    decoder.submit(request(0))
    decoder.step()
    decoder.load_weights(V1, {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()})
    failures = decoder.step()
    assert sorted(sample for f in failures for sample in f.samples) == [0, 1, 2]
    assert all(isinstance(f, EngineFailure) and f.retryable and "e1v1" in f.reason for f in failures)
    decoder.load_weights(V0, good)
    again = request(1)
    check_logprobs(model, [again], run_all(decoder, [again]))


def test_running_samples_go_on_from_their_kv_when_the_weights_change():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    decoder = decoder_of(old, slots=4)
    asked = request(0, samples=range(4), new_tokens=20)
    decoder.submit(asked)
    for _ in range(8):
        assert decoder.step() == []
    decoder.load_weights(V1, dict(new.named_parameters()))
    results = run_all(decoder)
    for result in results:
        assert result.spans == (
            VersionSpan(start=0, end=8, weights=V0),
            VersionSpan(start=8, end=20, weights=V1),
        )
        expected = two_phase_logprobs(old, new, asked.prompt_ids, result.response_ids, 8)
        assert np.abs(expected - result.logprobs).max() < 1e-4
        assert np.abs(full_logprobs(new, asked.prompt_ids, result.response_ids) - result.logprobs).max() > 1e-2


def test_a_kept_prompt_is_computed_again_after_the_weights_changed():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    decoder = decoder_of(old, slots=2)
    asked = request(0, samples=range(4), new_tokens=6)
    decoder.submit(asked)
    decoder.step()
    decoder.load_weights(V1, dict(new.named_parameters()))
    results = by_sample(run_all(decoder))
    assert decoder.prefill_tokens == 2 * len(asked.prompt_ids)
    for sample in (2, 3):
        late = results[asked.group_id, sample]
        assert late.spans == (VersionSpan(start=0, end=6, weights=V1),)
        assert np.abs(full_logprobs(new, asked.prompt_ids, late.response_ids) - late.logprobs).max() < 1e-4


def test_loading_copies_so_the_source_may_be_overwritten():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    decoder = decoder_of(old)
    tensors = {name: tensor.detach().clone() for name, tensor in new.named_parameters()}
    decoder.load_weights(V1, tensors)
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    asked = request(0)
    check_logprobs(new, [asked], run_all(decoder, [asked]))


@pytest.mark.parametrize("prompt", [7, FIRST_CAPACITY], ids=["as the cache begins", "after it grew"])
def test_an_abort_keeps_the_partial_tokens_and_names_what_never_started(prompt: int):
    model = tiny_model()
    decoder = decoder_of(model, slots=4)
    stopped, kept, waiting = (
        request(slot, samples=range(samples), prompt=prompt_of(prompt, slot)) for slot, samples in enumerate((3, 2, 2))
    )
    for each in (stopped, kept, waiting):
        decoder.submit(each)
    for _ in range(5):
        decoder.step()
    results = decoder.abort({stopped.key, waiting.key, (kept.group_id, 1)})
    completions = [r for r in results if isinstance(r, Completion)]
    assert sorted(r.sample for r in completions) == [0, 1, 2]
    assert {r.finish_reason for r in completions} == {FinishReason.ABORT}
    assert {len(r.response_ids) for r in completions} == {5}
    check_logprobs(model, [stopped], completions)
    (failure,) = [r for r in results if isinstance(r, EngineFailure)]
    assert (failure.group_id, failure.samples, failure.retryable) == (waiting.group_id, (0, 1), True)
    rest = run_all(decoder)
    assert sorted(r.sample for r in rest) == [0, 1]
    check_logprobs(model, [kept], rest)


def test_a_higher_priority_is_admitted_first_then_the_earlier():
    decoder = decoder_of(tiny_model(), slots=1)
    order = [(0, 1.0), (1, 5.0), (2, 5.0), (3, 9.0)]
    requests = [request(slot, samples=(0,), new_tokens=1, priority=priority) for slot, priority in order]
    assert [str(r.group_id) for r in run_all(decoder, requests)] == ["0/3", "0/1", "0/2", "0/0"]


def test_a_started_group_is_finished_before_a_higher_priority_starts():
    decoder = decoder_of(tiny_model(), slots=2)
    decoder.submit(request(0, samples=range(3), new_tokens=1))
    first = decoder.step()
    decoder.submit(request(1, samples=range(2), new_tokens=1, priority=9.0))
    second = decoder.step()
    assert sorted(str(r.group_id) for r in first + second) == ["0/0", "0/0", "0/0", "0/1"]


def test_a_stop_token_ends_a_sample_and_is_its_last_token():
    model = tiny_model()
    asked = request(0, samples=range(6), new_tokens=200, ignore_eos=False, stop_token_ids=(3, 4, 5, 6))
    results = run_all(decoder_of(model, slots=6), [asked])
    assert {r.finish_reason for r in results} == {FinishReason.STOP}
    for result in results:
        assert result.response_ids[-1] in (3, 4, 5, 6)
        assert not np.isin(result.response_ids[:-1], (3, 4, 5, 6)).any()
    ignoring = run_all(decoder_of(model), [request(0, new_tokens=40, stop_token_ids=(3, 4, 5, 6))])
    assert {(r.finish_reason, len(r.response_ids)) for r in ignoring} == {(FinishReason.LENGTH, 40)}


def test_each_sample_may_have_its_own_limit():
    model = tiny_model()
    asked = request(0, samples=(4, 7, 2), limits=(3, 20, 11), new_tokens=20)
    results = run_all(decoder_of(model, slots=2), [asked])
    assert {r.sample: len(r.response_ids) for r in results} == {4: 3, 7: 20, 2: 11}
    check_logprobs(model, [asked], results)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": prompt_of(250), "new_tokens": 7}, "max_context of 256"),
        ({"prompt": np.array([], np.int32)}, "at least one prompt token"),
        ({"samples": ()}, "one sample"),
        ({"prompt": np.array([VOCAB], np.int32)}, f"[0, {VOCAB})"),
        ({"prompt": np.array([-1], np.int32)}, f"[0, {VOCAB})"),
        ({"new_tokens": 0}, "out of range"),
        ({"limits": (1, 2)}, "one for each sample"),
        ({"limits": (1, 2, 13)}, "none above max_new_tokens"),
        ({"limits": (1, 2, 0)}, "out of range"),
        ({"top_p": 0.0}, "out of range"),
        ({"temperature": -1.0}, "out of range"),
        ({"top_k": 2**31}, "out of range"),
    ],
)
def test_a_request_that_can_never_run_fails_at_once(change, said):
    decoder = decoder_of(tiny_model())
    (failure,) = decoder.submit(request(0, **change))
    assert isinstance(failure, EngineFailure)
    assert not failure.retryable
    assert said in failure.reason
    assert not decoder.has_work


def test_a_sample_may_fill_the_context_exactly():
    model = tiny_model()
    asked = request(0, prompt=prompt_of(200), samples=(0,), new_tokens=56)
    check_logprobs(model, [asked], run_all(decoder_of(model), [asked]))


def test_kv_memory_grows_with_the_longest_sample_and_is_bounded():
    shape = KVShape(layers=2, heads=2, head_dim=8)
    kv = SlotKV(shape, slots=3, max_tokens=300, dtype=torch.float32, device=torch.device("cpu"))
    assert kv.capacity == FIRST_CAPACITY
    keys, values = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    kv.append(1, torch.arange(3), torch.tensor([5, 5, 5]), keys, values)
    kv.reserve(FIRST_CAPACITY + 1, 3, 3)
    live_keys, live_values = kv.live(1, 3, 6)
    assert torch.equal(live_keys[..., 5], keys)
    assert torch.equal(live_values[:, :, 5], values)
    kv.reserve(300, 3, 3)
    held = sum(t.nbytes for t in kv.keys + kv.values)
    assert held == shape.num_bytes(3, 3 * 300, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        kv.reserve(301, 3, 3)


def test_samples_longer_than_the_first_capacity_equal_a_full_forward():
    model = tiny_model()
    requests = [request(0, samples=(0,), new_tokens=180), request(1, samples=(0, 1), new_tokens=100)]
    check_logprobs(model, requests, run_all(decoder_of(model, slots=3), requests))


# --- turns that are continued


@pytest.fixture(params=[0, 8, 128])
def rows_of_a_step(request, monkeypatch):
    """What is added is fed token by token, in several steps, and at once."""
    monkeypatch.setattr("workers.generation.embedded.slots.MAX_DECODE_ROWS", request.param)


@pytest.mark.usefixtures("rows_of_a_step")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_later_turn_is_exact_and_computes_nothing_of_the_earlier_ones(fused, temperature):
    model = tiny_model("qwen3")
    decoder, plain = decoder_of(model, fused=fused), decoder_of(model, fused=fused)
    asked, answered = first_turns(decoder, temperature=temperature)
    turns = [next_turn(asked, one, added=4 + one.sample) for one in answered.values()]
    prefilled = decoder.prefill_tokens
    other = request(2, new_tokens=30)  # decoded beside them
    found, expected = by_sample(run_all(decoder, [other, *turns])), by_sample(run_all(plain, [other, *turns]))
    assert decoder.prefill_tokens - prefilled == len(other.prompt_ids)
    assert decoder.reused_tokens == sum(len(asked.prompt_ids) + 9 - 1 for _ in turns)
    assert plain.reused_tokens == 0
    for key, completion in found.items():
        assert completion.response_ids.tolist() == expected[key].response_ids.tolist()
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
        assert completion.spans == (VersionSpan(start=0, end=len(completion.response_ids), weights=V0),)
    for turn in turns:
        check_logprobs(model, [turn], [found[turn.group_id, turn.samples[0]]])


def test_what_is_added_is_fed_at_once_where_a_step_has_room():
    decoder = decoder_of(tiny_model("qwen3"))
    asked, answered = first_turns(decoder)
    turn = next_turn(asked, answered[asked.group_id, 0], added=9, new_tokens=1)
    assert decoder.submit(turn) == []
    (completion,) = decoder.step()
    assert len(completion.response_ids) == 1


def test_what_is_told_of_a_later_turn_is_its_answer_alone():
    told = []
    decoder = decoder_of(tiny_model("qwen3"))
    asked, answered = first_turns(decoder)
    turn = replace(next_turn(asked, answered[asked.group_id, 0]), on_tokens=lambda *heard: told.append(heard))
    (completion,) = run_all(decoder, [turn])
    for tell in decoder.told:
        tell()
    assert [start for start, _, _ in told] == list(range(8))
    assert [token for _, tokens, _ in told for token in tokens] == completion.response_ids.tolist()
    assert [one for _, _, logprobs in told for one in logprobs] == completion.logprobs.tolist()


def test_a_third_turn_goes_on_from_the_second():
    model = tiny_model("qwen3")
    decoder = decoder_of(model)
    asked, answered = first_turns(decoder)
    second = next_turn(asked, answered[asked.group_id, 1])
    (completion,) = run_all(decoder, [second])
    third = next_turn(second, completion)
    reused = decoder.reused_tokens
    (last,) = run_all(decoder, [third])
    check_logprobs(model, [third], [last])
    assert decoder.reused_tokens - reused == len(third.prompt_ids) - 5 - 1


@pytest.mark.parametrize(("conversation", "reuses"), [("c", True), ("d", False)])
def test_turns_of_one_conversation_are_found_whatever_their_groups_are_called(conversation: str, reuses: bool):
    model = tiny_model("qwen3")
    decoder = decoder_of(model)
    asked = replace(request(0, samples=(0,), new_tokens=9), keep=True, conversation="c")
    (answered,) = run_all(decoder, [asked])
    turn = replace(next_turn(asked, answered), group_id=GroupId("0/7"), conversation=conversation)
    (completion,) = run_all(decoder, [turn])
    assert (decoder.reused_tokens > 0) == reuses
    check_logprobs(model, [turn], [completion])


def test_an_aborted_group_keeps_nothing_whatever_its_conversation():
    decoder = decoder_of(tiny_model("qwen3"))
    asked = replace(request(0, samples=(0,), new_tokens=9), keep=True, conversation="c")
    (answered,) = run_all(decoder, [asked])
    decoder.abort({asked.key})
    run_all(decoder, [replace(next_turn(asked, answered), conversation="c")])
    assert decoder.reused_tokens == 0


@pytest.mark.parametrize("why", ["weights", "history", "not asked", "long", "no room"])
def test_a_turn_whose_beginning_is_not_what_is_kept_is_computed_anew(why, monkeypatch):
    model = tiny_model("qwen3")
    if why == "no room":
        monkeypatch.setattr("workers.generation.embedded.slots.KEPT_SHARE", 0.0)
    decoder = decoder_of(model)
    asked, answered = first_turns(decoder)
    turn = next_turn(asked, answered[asked.group_id, 0], added=40 if why == "long" else 5)
    if why == "weights":
        decoder.load_weights(V1, {})
    elif why == "history":
        edited = turn.prompt_ids.copy()
        edited[3] = 2 + (edited[3] - 1) % (VOCAB - 2)
        turn = replace(turn, prompt_ids=edited)
    elif why == "not asked":
        turn = replace(turn, group_id=GroupId("0/1"))
    (completion,) = run_all(decoder, [turn])
    assert decoder.reused_tokens == 0
    check_logprobs(model, [turn], [completion])


def test_a_turn_that_saw_two_weights_is_not_kept():
    decoder = decoder_of(tiny_model("qwen3"))
    asked = replace(request(0, samples=(0,), new_tokens=9), keep=True)
    results = [*decoder.submit(asked), *decoder.step()]
    decoder.load_weights(V1, {})
    (completion,) = [*results, *run_all(decoder)]
    assert len(completion.spans) == 2
    run_all(decoder, [next_turn(asked, completion)])
    assert decoder.reused_tokens == 0


def test_new_weights_while_a_turn_is_fed_are_its_own_and_it_is_not_kept(monkeypatch):
    monkeypatch.setattr("workers.generation.embedded.slots.MAX_DECODE_ROWS", 2)
    decoder = decoder_of(tiny_model("qwen3"))
    asked, answered = first_turns(decoder)
    turn = next_turn(asked, answered[asked.group_id, 0])
    results = [*decoder.submit(turn), *decoder.step(), *decoder.step()]
    decoder.load_weights(V1, {})
    (completion,) = [*results, *run_all(decoder)]
    assert completion.spans == (VersionSpan(start=0, end=8, weights=V1),)
    reused = decoder.reused_tokens
    run_all(decoder, [next_turn(turn, completion)])
    assert decoder.reused_tokens == reused


def test_a_turn_that_is_aborted_while_it_is_fed_comes_out_once(monkeypatch):
    monkeypatch.setattr("workers.generation.embedded.slots.MAX_DECODE_ROWS", 2)
    decoder = decoder_of(tiny_model("qwen3"))
    asked, answered = first_turns(decoder)
    turn = next_turn(asked, answered[asked.group_id, 0])
    assert [*decoder.submit(turn), *decoder.step()] == []
    (failure,) = decoder.abort([turn.key])
    assert isinstance(failure, EngineFailure)
    assert not decoder.has_work


@pytest.mark.usefixtures("rows_of_a_step")
def test_turns_wait_for_slots_as_all_samples_do_and_move_as_they_do():
    """More turns than slots, which end at different steps, so that fed samples change their slots."""
    model = tiny_model("qwen3")
    decoder = decoder_of(model, slots=2)
    asked, answered = first_turns(decoder)
    turns = [next_turn(asked, one, added=3 + 3 * one.sample, new_tokens=2 + one.sample) for one in answered.values()]
    found = by_sample(run_all(decoder, [request(2, samples=(0, 1), new_tokens=3), *turns]))
    assert len(found) == 5
    for turn in turns:
        check_logprobs(model, [turn], [found[turn.group_id, turn.samples[0]]])
    assert decoder.reused_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sample_that_goes_on_elsewhere_is_the_one_that_was_not_interrupted(temperature):
    model = tiny_model("llama")
    asked = request(0, new_tokens=12, temperature=temperature)
    whole = by_sample(run_all(decoder_of(model), [asked]))
    begun = {sample: beginning_of(whole["0/0", sample], tokens) for sample, tokens in ((0, 5), (2, 11))}
    again = by_sample(run_all(decoder_of(model, slots=2), [replace(asked, begun=begun)]))
    for sample, resumed in ((0, 5), (1, 0), (2, 11)):
        one, other = whole["0/0", sample], again["0/0", sample]
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert other.logprobs[:resumed].tolist() == one.logprobs[:resumed].tolist(), "kept as they were"
        assert (other.spans, other.resumed, other.finish_reason) == (one.spans, resumed, FinishReason.LENGTH)


def test_a_sample_is_taken_back_twice_and_has_the_weights_of_each_of_its_tokens():
    model = tiny_model("llama")
    asked = request(0, samples=(1,), new_tokens=9)
    (first,) = run_all(decoder_of(model), [asked])
    older = replace(beginning_of(first, 3), spans=(VersionSpan(start=0, end=3, weights=V1),))
    decoder = decoder_of(model)
    decoder.submit(replace(asked, begun={1: older}))
    for _ in range(4):
        decoder.step()
    (got,) = decoder.progress({("0/0", 0, 1): 3})
    assert (got.start, got.end, len(got.logprobs)) == (3, 7, 4)
    assert got.spans == (VersionSpan(start=3, end=7, weights=V0),)
    assert decoder.progress({("0/0", 0, 1): 7}) == []
    (all_of_it,) = decoder.progress({})
    begun = Beginning(token_ids=all_of_it.token_ids, logprobs=all_of_it.logprobs, spans=all_of_it.spans)
    (last,) = run_all(decoder_of(model), [replace(asked, attempt=2, begun={1: begun})])
    assert last.response_ids.tolist() == first.response_ids.tolist()
    assert last.spans == (VersionSpan(start=0, end=3, weights=V1), VersionSpan(start=3, end=9, weights=V0))
    assert (last.resumed, last.attempt) == (7, 2)
