"""The slot decoder with drafts: the tokens that it gives without them, and which of them it computes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fakes.decoding import V0, V1, by_sample, check_logprobs, decoder_of, next_turn, prompt_of, request, run_all
from tests.fakes.tiny_models import VOCAB, tiny_model
from transport.contracts.types import FinishReason, GroupId
from transport.rows.partial import Beginning
from workers.generation.embedded.drafts import SaidBefore
from workers.generation.embedded.products import rounds_by_row
from workers.generation.embedded.slots import Drafting
from workers.generation.engine import Completion


def flat(tokens, context):
    """A step takes a second whatever it computes, so that every draft pays."""
    return 1.0


def each(tokens, context):
    """Every token takes a second, so that none does."""
    return float(tokens)


def drafting_of(step_s=flat, max_tokens=8, memory=10_000):
    return Drafting(said=SaidBefore(memory), max_tokens=max_tokens, step_s=step_s)


def drafted_by(decoder, drafting):
    decoder.drafting = drafting
    return decoder


def ids(results):
    return {key: (one.response_ids.tolist(), one.finish_reason) for key, one in by_sample(results).items()}


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("llama", True), ("qwen2", True), ("olmo2", False)])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_with_drafts_every_sample_is_the_one_without(family, fused, temperature):
    model = tiny_model(family)
    same = prompt_of(9)
    requests = [
        *(request(slot, prompt=same, samples=range(4), new_tokens=30, temperature=temperature) for slot in range(2)),
        request(2, new_tokens=17, temperature=temperature, top_p=0.9, top_k=20),
    ]
    plain = run_all(decoder_of(model, slots=5, fused=fused), requests)
    decoder = drafted_by(decoder_of(model, slots=5, fused=fused), drafting_of())
    results = run_all(decoder, requests)
    assert ids(results) == ids(plain)
    if fused and rounds_by_row(model.get_input_embeddings().weight):
        kept = by_sample(plain)
        assert all((one.logprobs == kept[key].logprobs).all() for key, one in by_sample(results).items()), "to the bit"
    assert decoder.tokens == sum(len(one.response_ids) for one in results)
    assert decoder.drafted > 0
    assert (0 if temperature else 1) <= decoder.accepted <= decoder.drafted
    check_logprobs(model, requests, results)


def test_a_greedy_group_takes_few_steps_and_an_earlier_visit_helps_the_next():
    model = tiny_model()
    decoder = drafted_by(decoder_of(model, slots=2), drafting_of())
    visits = [replace(request(0, samples=(0,), new_tokens=41, temperature=0.0), attempt=one) for one in range(2)]
    steps = []
    for visit in visits:
        decoder.submit(visit)
        steps.append(0)
        while decoder.has_work:
            decoder.step()
            steps[-1] += 1
    assert steps[1] <= 6 < steps[0] <= 41, "one for the prompt, then nine tokens a step"


def test_nothing_is_drafted_where_it_loses_and_the_samples_are_the_same():
    model = tiny_model()
    requests = [request(slot, prompt=prompt_of(9), new_tokens=20, temperature=0.3) for slot in range(3)]
    decoder = drafted_by(decoder_of(model), drafting_of(each))
    assert ids(run_all(decoder, requests)) == ids(run_all(decoder_of(model), requests))
    assert (decoder.drafted, decoder.accepted) == (0, 0)


@pytest.mark.parametrize("right", [True, False])
def test_drafts_that_are_always_right_or_never(right):
    """Acceptance 1 and 0. A draft is cut to what is left of the sample: of 12 tokens, 11 are drafted at most."""
    model = tiny_model()
    asked = request(0, samples=(0,), new_tokens=12, temperature=0.8)
    (plain,) = run_all(decoder_of(model), [asked])
    own = plain.response_ids.tolist()

    class Knows(SaidBefore):
        place = 0

        def draft(self, text, max_tokens, stop_token_ids=()):
            at = len(decoder._running[0].token_ids)
            tokens = [token if right else (token + 1) % VOCAB for token in own[at : at + max_tokens]]
            return super().draft(text, 0)._replace(token_ids=tokens, chances=[1.0] * len(tokens))

    decoder = drafted_by(decoder_of(model), Drafting(said=Knows(1000), max_tokens=50, step_s=flat))
    (result,) = run_all(decoder, [asked])
    assert result.response_ids.tolist() == own
    assert decoder.drafted == (10 if right else sum(range(11))), "the first token comes with the prompt"
    assert decoder.accepted == (10 if right else 0)
    check_logprobs(model, [asked], [result])


def test_a_draft_ends_with_the_context():
    model = tiny_model()
    asked = request(0, prompt=prompt_of(40), samples=(0, 1), new_tokens=24, temperature=0.0)
    decoder = drafted_by(decoder_of(model, max_context=64), drafting_of(max_tokens=100))
    results = run_all(decoder, [asked, replace(asked, attempt=1)])
    assert [len(one.response_ids) for one in results] == [24] * 4
    assert ids(results) == ids(run_all(decoder_of(model, max_context=64), [asked]))


def test_a_stop_token_inside_a_draft_ends_the_sample_there():
    model = tiny_model()
    free = replace(request(0, samples=(0, 1), new_tokens=40, temperature=0.0))
    (one, _) = run_all(decoder_of(model), [free])
    stop = one.response_ids.tolist()[11]
    drafting = drafting_of()
    decoder = drafted_by(decoder_of(model), drafting)
    run_all(decoder, [free])  # texts that go on behind it
    stopped = replace(
        request(0, samples=(0, 1), new_tokens=40, temperature=0.0, ignore_eos=False, stop_token_ids=(stop,)), attempt=1
    )
    results = run_all(decoder, [stopped])
    assert ids(results) == ids(run_all(decoder_of(model), [stopped]))
    assert {result.finish_reason for result in results} == {FinishReason.STOP}
    assert all(result.response_ids.tolist().index(stop) == len(result.response_ids) - 1 for result in results)


def test_a_sibling_with_another_prompt_changes_nothing():
    model = tiny_model()
    requests = [
        replace(request(slot, new_tokens=20, temperature=0.2), group_id=GroupId("0/0"), attempt=slot, prompt_ids=prompt)
        for slot, prompt in enumerate([prompt_of(9), prompt_of(9, 1), prompt_of(5)])
    ]
    for asked in requests:
        alone = run_all(decoder_of(model), [asked])
        decoder = drafted_by(decoder_of(model, slots=9), drafting_of())
        found = [one for one in run_all(decoder, requests) if one.attempt == asked.attempt]
        assert ids(found) == ids(alone)


def test_new_weights_in_mid_sample_take_effect_with_the_next_step():
    old, new = tiny_model(), tiny_model(seed=5)
    asked = request(0, samples=range(3), new_tokens=24, temperature=0.3)

    def switched(drafting):
        decoder = drafted_by(decoder_of(old), drafting)
        results = [*decoder.submit(asked), *decoder.step()]
        lengths = []
        while min(len(sample.token_ids) for sample in decoder._running) < 6:
            decoder.step()
        lengths = {sample.sample: len(sample.token_ids) for sample in decoder._running}
        decoder.load_weights(V1, dict(new.named_parameters()))
        return lengths, by_sample([*results, *run_all(decoder)])

    lengths, drafted = switched(drafting_of())
    for key, one in drafted.items():
        assert [span.end for span in one.spans] == [lengths[key[1]], 24]
        assert [span.weights for span in one.spans] == [V0, V1]
    _, plain = switched(None)
    for key, one in plain.items():  # until the earlier of the two switches they are the same
        same = min(lengths[key[1]], one.spans[0].end)
        assert one.response_ids[:same].tolist() == drafted[key].response_ids[:same].tolist()


def test_a_sample_that_goes_on_elsewhere_and_a_turn_that_is_kept_are_drafted_alike():
    model = tiny_model("qwen3")
    asked = replace(request(0, samples=(0, 1), new_tokens=14, temperature=0.3), keep=True)
    whole = by_sample(run_all(decoder_of(model), [asked]))
    one = whole["0/0", 1]
    part = {1: Beginning(token_ids=one.response_ids, logprobs=one.logprobs, spans=one.spans).cut(5)}
    decoder = drafted_by(decoder_of(model), drafting_of())
    again = run_all(decoder, [replace(asked, begun=part)])
    assert ids(again) == ids(whole.values())
    turn = next_turn(asked, whole["0/0", 0])
    (plain,) = run_all(decoder_of(model), [turn])
    (fed,) = run_all(decoder, [turn])
    assert decoder.reused_tokens > 0
    assert fed.response_ids.tolist() == plain.response_ids.tolist()


def test_what_is_told_as_it_comes_is_all_of_it_once():
    told = []
    asked = replace(
        request(0, samples=(0,), new_tokens=30, temperature=0.0), on_tokens=lambda *heard: told.append(heard)
    )
    decoder = drafted_by(decoder_of(tiny_model()), drafting_of())
    (result,) = run_all(decoder, [asked])
    for tell in decoder.told:
        tell()
    assert [token for _, tokens, _ in told for token in tokens] == result.response_ids.tolist()
    assert [start for start, _, _ in told] == list(np.cumsum([0, *(len(tokens) for _, tokens, _ in told)])[:-1])
    assert len(told) < 30


def test_an_aborted_sample_keeps_whole_steps_and_memory_lets_its_text_go():
    drafting = drafting_of(memory=60)
    decoder = drafted_by(decoder_of(tiny_model()), drafting)
    decoder.submit(request(0, new_tokens=30, temperature=0.0))
    for _ in range(4):
        decoder.step()
    results = decoder.abort([(GroupId("0/0"), 0)])
    assert all(isinstance(one, Completion) and one.finish_reason is FinishReason.ABORT for one in results)
    assert all(len(one.logprobs) == len(one.response_ids) for one in results)
    run_all(decoder, [request(slot, new_tokens=20) for slot in range(1, 4)])
    assert drafting.said.num_tokens <= 60
    assert not any(said.open for said in drafting.said._prompts.values())


def test_logits_that_are_not_finite_end_the_sample_as_without_drafts():
    model = tiny_model()
    decoder = drafted_by(decoder_of(model), drafting_of())
    asked = request(0, samples=(0, 1), new_tokens=30, temperature=0.0)
    decoder.submit(asked)
    for _ in range(3):
        decoder.step()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.named_parameters() if "norm" in name}
    decoder.load_weights(V1, broken)
    results = run_all(decoder)
    assert len(results) == 2
    assert all("not finite" in one.reason for one in results)
    decoder.load_weights(V0, dict(model.named_parameters()))
    check_logprobs(model, [asked], run_all(decoder, [asked]))


def test_the_distribution_is_that_of_the_policy():
    """2,000 samples of two tokens by seed: chi-square of the second one, given the most frequent first one."""
    model = tiny_model(vocabulary=VOCAB)
    prompt = prompt_of(6)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    decoder = drafted_by(decoder_of(model, slots=50), drafting_of(memory=100_000))
    requests = [
        request(slot, prompt=prompt, samples=range(50), new_tokens=3, temperature=0.5, seed=seed + slot)
        for slot in range(40)
    ]
    results = run_all(decoder, requests)
    assert decoder.accepted > 300  # of 2,000 that were drafted; 500 to 580, by seed
    firsts, counts = np.unique([one.response_ids[0] for one in results], return_counts=True)
    first = int(firsts[counts.argmax()])
    seconds = np.array([one.response_ids[1] for one in results if one.response_ids[0] == first])
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.append(prompt, first)).long()[None]).logits[0, -1] / 0.5
    expected = torch.softmax(logits.double(), -1).numpy() * len(seconds)
    often = expected >= 5
    seen = np.bincount(seconds, minlength=VOCAB)
    statistic = sum((seen[often] - expected[often]) ** 2 / expected[often])
    if (rest := expected[~often].sum()) >= 5:
        statistic += (seen[~often].sum() - rest) ** 2 / rest
    degrees = int(often.sum())
    assert degrees >= 5
    # Wilson-Hilferty: normal to a good approximation; one in a million fails by chance
    deviation = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert deviation < 4.75, f"seed {seed}"
