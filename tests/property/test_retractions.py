"""The embedded engine's slots against their model: the same samples start, are retracted and end in every step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.manual_clock import ManualClock
from transport.contracts import continuous_batching
from transport.contracts.continuous_batching import ContinuousBatching, DecodeCost, Sample
from transport.contracts.types import GroupId, SamplingParams, WeightIdentity
from workers.generation.embedded.forward import KVShape, LoadedModel, SlotKV, StepBatch
from workers.generation.embedded.slots import SlotDecoder
from workers.generation.engine import Completion, GenerationRequest

CONTEXT = 60
VOCABULARY = 4


class Evenly:
    """A Forward that finds every token alike; which samples run does not depend on what they say."""

    kv_shape = KVShape(layers=1, heads=1, head_dim=1)

    def run(self, batch: StepBatch, kv: SlotKV) -> torch.Tensor:
        assert batch.max_tokens <= kv.capacity
        return torch.zeros(batch.num_decode + len(batch.prompts), VOCABULARY)

    def weights_changed(self) -> None: ...


def decoder_of(slots: int, kv_tokens: int) -> SlotDecoder:
    model = LoadedModel(
        forward=Evenly(), parameters={"any": torch.zeros(1)}, max_context=CONTEXT, vocab_size=VOCABULARY
    )
    weights = WeightIdentity(epoch=1, version=0)
    return SlotDecoder(model, slots=slots, weights=weights, clock=ManualClock(), kv_tokens=kv_tokens)


GROUPS = st.lists(
    st.tuples(
        st.integers(1, 30),  # tokens of the prompt
        st.lists(st.integers(1, 30), min_size=1, max_size=5),  # of each sample's response
        st.integers(0, 2),  # priority, of those that are there at the start
        st.integers(0, 40),  # steps after which it comes, of the others
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25)
@given(
    groups=GROUPS, slots=st.integers(1, 12), limit=st.floats(0, 1), headroom=st.integers(0, 20), at_once=st.booleans()
)
def test_the_engine_does_what_its_model_does(groups, slots, limit, headroom, at_once):
    kv_tokens = int(CONTEXT + limit * (slots - 1) * CONTEXT)
    decoder = decoder_of(slots, kv_tokens)
    cost = DecodeCost(fixed_s=1.0, kv_capacity_tokens=kv_tokens, padded=True)
    batching = ContinuousBatching[GenerationRequest](cost, slots, max_context=CONTEXT)
    requests = [
        (
            0 if at_once else step,
            GenerationRequest(
                group_id=GroupId(f"0/{place}"),
                prompt_ids=np.zeros(prompt, np.int32),
                samples=range(len(lengths)),
                sampling=SamplingParams(max_new_tokens=max(lengths), ignore_eos=True, seed=place),
                priority=float(priority) if at_once else 0.0,
                limits=lengths,
            ),
        )
        for place, (prompt, lengths, priority, step) in enumerate(groups)
    ]
    requests.sort(key=lambda arrival: arrival[0])
    ended: Counter[tuple[str, int]] = Counter()
    before, continuous_batching.HEADROOM_TOKENS = continuous_batching.HEADROOM_TOKENS, headroom
    try:
        step = 0
        while requests or decoder.has_work:
            while requests and requests[0][0] <= step:
                _, request = requests.pop(0)
                assert decoder.submit(request) == []
                for sample, length in zip(request.samples, request.limits, strict=True):
                    batching.submit(Sample(request, sample, len(request.prompt_ids), length))
            batching.admit()
            modelled = batching.advance(1, float(step)) if batching.running else []
            results = decoder.step()
            assert all(isinstance(one, Completion) for one in results)
            found = sorted((one.group_id, one.sample) for one in results)
            assert found == sorted((one.request.group_id, one.sample) for one in modelled)
            assert sorted((one.request.group_id, one.sample) for one in decoder._running) == sorted(
                (one.request.group_id, one.sample) for _, _, one in batching.running
            )
            assert decoder.num_retracted == batching.num_retracted
            assert decoder._kv.slots * decoder._kv.capacity <= max(kv_tokens, CONTEXT)
            ended.update(found)
            step += 1
    finally:
        continuous_batching.HEADROOM_TOKENS = before
    assert ended == Counter(
        (f"0/{place}", sample) for place, group in enumerate(groups) for sample in range(len(group[1]))
    )
