"""Requests to a slot decoder of a tiny model, run to their ends, and what their results must be."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from tests.fakes.manual_clock import ManualClock
from tests.fakes.tiny_models import VOCAB, full_logprobs
from transport.contracts.types import GroupId, SamplingParams, WeightIdentity
from transport.rows.partial import Beginning
from workers.generation.embedded.forward import FusedForward, LoadedModel, ModuleForward
from workers.generation.embedded.slots import SlotDecoder
from workers.generation.engine import NO_STOPS, GenerationRequest

V0, V1 = WeightIdentity(epoch=1, version=0), WeightIdentity(epoch=1, version=1)


def decoder_of(model, *, slots=4, fused=True, max_context=256, stops=NO_STOPS, kv_tokens=0):
    own = copy.deepcopy(model)
    forward = FusedForward(own, max_context=max_context) if fused else ModuleForward(own)
    parameters = dict(own.named_parameters(remove_duplicate=False))
    model = LoadedModel(forward=forward, parameters=parameters, max_context=max_context, vocab_size=VOCAB)
    return SlotDecoder(model, slots=slots, weights=V0, clock=ManualClock(), stops=stops, kv_tokens=kv_tokens)


def prompt_of(length, seed=0):
    return np.random.default_rng([seed, length]).integers(2, VOCAB, length).astype(np.int32)


def request(slot, *, prompt=None, samples=(0, 1, 2), new_tokens=12, priority=0.0, limits=(), **sampling):
    sampling = {"ignore_eos": True, "seed": slot} | sampling
    return GenerationRequest(
        group_id=GroupId(f"0/{slot}"),
        prompt_ids=prompt_of(7 + slot, slot) if prompt is None else prompt,
        samples=samples,
        sampling=SamplingParams(max_new_tokens=new_tokens, **sampling),
        priority=priority,
        limits=limits,
    )


def run_all(decoder, requests=(), max_steps=1000, check=None):
    """All results. check: is called with the decoder after each step."""
    results = [result for each in requests for result in decoder.submit(each)]
    for _ in range(max_steps):
        if not decoder.has_work:
            return results
        results += decoder.step()
        if check is not None:
            check(decoder)
    raise AssertionError(f"not done after {max_steps} steps")


def by_sample(results):
    return {(result.group_id, result.sample): result for result in results}


def check_logprobs(model, requests, results, tolerance=1e-4):
    prompts = {each.group_id: each for each in requests}
    errors = []
    for result in results:
        asked = prompts[result.group_id]
        expected = full_logprobs(model, asked.prompt_ids, result.response_ids, asked.sampling.temperature or 1.0)
        errors.append(np.abs(expected - result.logprobs).max())
    assert max(errors) < tolerance


def next_turn(before, completion, *, added=5, seed=9, **more):
    """The request that follows: what was asked, what was answered, and what is said to that."""
    said = prompt_of(added, seed)
    prompt = np.concatenate([before.prompt_ids, completion.response_ids, said])
    sampling = {"temperature": before.sampling.temperature, "new_tokens": 8} | more
    asked = request(3, prompt=prompt, samples=(completion.sample,), **sampling)
    return replace(asked, group_id=before.group_id, priority=1e6, keep=True)


def first_turns(decoder, **more):
    """Three samples of a group that wait for what is said to them, beside another group that goes on."""
    asked = replace(request(0, new_tokens=9, **more), keep=True)
    return asked, by_sample(run_all(decoder, [asked]))


def beginning_of(result, tokens):
    whole = Beginning(token_ids=result.response_ids, logprobs=result.logprobs, spans=result.spans)
    return whole.cut(tokens)
