"""What steps take, as timed by a clock that knows."""

import copy

import pytest

from tests.fakes.decoding import V0, check_logprobs, request, run_all
from tests.fakes.tiny_models import VOCAB, tiny_model
from workers.generation.embedded.engine import make_decoder
from workers.generation.embedded.forward import FusedForward, LoadedModel
from workers.generation.embedded.step_cost import StepCost


class KnownForward:
    """A step takes 10 s, and one for each token; so does its clock say."""

    def __init__(self, forward):
        self._forward = forward
        self.kv_shape = forward.kv_shape
        self.now = 0.0
        self.sizes = []

    def now_s(self):
        return self.now

    def run(self, batch, kv):
        self.now += 10.0 + batch.num_decode
        self.sizes.append(batch.num_decode)
        return self._forward.run(batch, kv)


def known(model, max_context=256):
    own = copy.deepcopy(model)
    forward = KnownForward(FusedForward(own, max_context=max_context))
    parameters = dict(own.named_parameters(remove_duplicate=False))
    return forward, LoadedModel(forward=forward, parameters=parameters, max_context=max_context, vocab_size=VOCAB)


def test_between_and_beyond_the_measured_sizes_it_is_a_line():
    cost = StepCost([1, 4, 8], [2.0, 5.0, 6.0], context_token_s=0.5)
    assert [cost(tokens, 0) for tokens in (1, 2, 4, 6, 8, 16)] == [2.0, 3.0, 5.0, 5.5, 6.0, 8.0]
    assert cost(1, 4) == 4.0
    assert StepCost([1], [2.0])(100, 0) == 2.0


@pytest.mark.parametrize(("slots", "drafts"), [(1, 1), (3, 8), (20, 4)])
def test_steps_are_timed_up_to_what_slots_and_drafts_can_ask_for(slots, drafts):
    forward, model = known(tiny_model())
    decoder = make_decoder(model, slots=slots, clock=forward, drafts=drafts, draft_memory=1000)
    assert max(forward.sizes) <= slots * (1 + drafts)
    step_s = decoder.drafting.step_s
    for tokens in (1, slots, slots * (1 + drafts)):
        assert step_s(tokens, 0) == pytest.approx(10 + tokens)


def test_without_drafts_nothing_is_timed():
    forward, model = known(tiny_model())
    assert make_decoder(model, slots=4, clock=forward).drafting is None
    assert forward.sizes == []


def test_what_the_timed_steps_left_in_the_slots_changes_no_sample():
    model = tiny_model()
    forward, loaded = known(model)
    decoder = make_decoder(loaded, slots=4, clock=forward, drafts=4, draft_memory=1000)
    requests = [request(slot, new_tokens=20, temperature=0.3) for slot in range(3)]
    results = run_all(decoder, requests)
    assert decoder.drafted > 0
    assert {one.spans[0].weights for one in results} != {V0}, "those of the model directory"
    check_logprobs(model, requests, results)


def test_a_context_shorter_than_the_timed_one_is_enough():
    forward, model = known(tiny_model(), max_context=12)
    decoder = make_decoder(model, slots=2, clock=forward, drafts=8, draft_memory=1000)
    assert decoder.drafting.step_s(18, 0) == pytest.approx(28)
