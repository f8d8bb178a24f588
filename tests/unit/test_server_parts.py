"""What travels to and from an inference server, and the order in which samples go there."""

from __future__ import annotations

import base64
import pickletools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from transport.contracts.llms import Fp8
from transport.contracts.messages import TensorSpec, WeightManifest
from transport.contracts.types import FinishReason, GroupId, SamplingParams, WeightIdentity
from transport.tensors.base import Deadline, parse_address
from transport.tensors.shm import ShmReader
from workers.errors import ModelError
from workers.generation.engine import GenerationRequest
from workers.generation.server.client import Chunk, ServedSpan, ServerSettings
from workers.generation.server.loader import LoadOrder, LoadResult, from_name, read_result, result_numbers, to_payload
from workers.generation.server.sender import BadAnswerError, SampleQueue, SentSample, completion, sample_request
from workers.generation.server.sglang import SGLANG
from workers.generation.server.upkeep import hold
from workers.generation.server.vllm import VLLM
from workers.models import model_facts
from workers.weights.pull import WeightPuller

OLD, NEW = WeightIdentity(epoch=1, version=1), WeightIdentity(epoch=1, version=2)
KNOWN = {"default": WeightIdentity(epoch=0, version=0), str(OLD): OLD, str(NEW): NEW}


def request(group: str, *, samples: int = 2, priority: float = 0.0, limits: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        group_id=GroupId(group),
        prompt_ids=np.array([5, 6], dtype=np.int32),
        samples=tuple(range(samples)),
        sampling=SamplingParams(max_new_tokens=9, stop_token_ids=(1, 2), top_k=0),
        priority=priority,
        limits=limits,
    )


def test_servers_of_our_own_are_told_to_draft_and_how_deep():
    settings = ServerSettings(directory=Path("/m"), log=Path("/l"))
    for kind in (SGLANG, VLLM):
        assert not any("speculative" in argument for argument in kind.arguments(settings))
    drafting = replace(settings, drafts=6)
    sglang, vllm = SGLANG.arguments(drafting), VLLM.arguments(drafting)
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "NGRAM"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "7", "the last drawn one is verified, too"
    told = msgspec.json.decode(vllm[vllm.index("--speculative-config") + 1])
    assert (told["method"], told["num_speculative_tokens"]) == ("ngram", 6)


def test_servers_of_our_own_are_told_what_to_hold_in_fp8():
    settings = ServerSettings(directory=Path("/m"), log=Path("/l"))
    options = {"--kv-cache-dtype": Fp8(kv=True), "--quantization": Fp8(weights=True)}
    for kind in (SGLANG, VLLM):
        assert not {*options} & {*kind.arguments(settings)}
        for option, fp8 in options.items():
            told = kind.arguments(replace(settings, fp8=fp8))
            assert {*options} & {*told} == {option}
            assert told[told.index(option) + 1].startswith("fp8")


def queue(*requests: GenerationRequest) -> SampleQueue:
    made = SampleQueue("w")
    for one in requests:
        made.push(one, 0.0)
    return made


def take(queue: SampleQueue, label: str = "a") -> SentSample:
    sent = queue.next(label, 1.0)
    assert sent is not None
    return sent


def named(sent: SentSample) -> tuple[str, int]:
    return sent.group.request.group_id, sent.sample


# --- the order of samples ---------------------------------------------------------------------------------------------


def test_the_longest_prediction_goes_first_and_one_of_a_group_before_its_others() -> None:
    waiting = queue(request("0/0", priority=1), request("0/1", priority=9))
    first, second = take(waiting), take(waiting)
    assert [named(first), named(second)] == [("0/1", 0), ("0/0", 0)]
    assert waiting.next("a", 1.0) is None, "the others wait for their group's prompt"
    waiting.started(second, 2.0)
    assert named(take(waiting)) == ("0/0", 1)


def test_after_new_weights_a_group_computes_its_prompt_again() -> None:
    waiting = queue(request("0/0", samples=4))
    waiting.started(take(waiting), 2.0)
    take(waiting)
    again = take(waiting, "b")
    assert again.label == "b"
    assert waiting.next("b", 1.0) is None, "what is cached is of other weights"


def test_a_leader_that_never_started_is_replaced() -> None:
    waiting = queue(request("0/0"), request("0/1"))
    first = take(waiting)
    waiting.back(first)
    assert named(take(waiting)) == ("0/0", 0), "before what came after it"


def test_no_rid_is_the_beginning_of_another() -> None:
    waiting = queue(request("1/1", samples=12), request("11/1", samples=12), request("1/11", samples=12))
    for sent in [take(waiting) for _ in range(3)]:
        waiting.started(sent, 1.0)
    rids = [take(waiting).rid for _ in range(33)]
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]


def test_an_aborted_group_leaves_the_queue_as_one_failure() -> None:
    waiting = queue(request("0/0"), request("0/1"))
    sent = take(waiting)
    (failure,) = waiting.take_out([("0/0", 0)])
    assert (failure.group_id, failure.samples, failure.retryable) == ("0/0", (1,), True)
    assert (waiting.num_waiting, list(waiting.sent.values())) == (2, [sent])


# --- requests and answers ---------------------------------------------------------------------------------------------


def test_a_request_says_all_that_the_sample_needs() -> None:
    waiting = queue(request("0/0", limits=(3, 4), priority=6.6))
    first = take(waiting)
    asked = sample_request(first)
    assert (bytes(asked.prompt), asked.label, asked.max_new_tokens, asked.priority) == (b"[5,6]", "a", 3, 6.6)
    waiting.started(first, 1.0)
    second = sample_request(take(waiting))
    assert second.max_new_tokens == 4
    assert second.seed != asked.seed, "each sample of a group has a stream of its own"


def chunk(*spans: tuple[str, int, int], tokens: int = 3, logprob: float | None = -0.5) -> Chunk:
    return Chunk(
        token_ids=list(range(tokens)),
        logprobs=[(logprob, token) for token in range(tokens)],
        spans=tuple(ServedSpan(version=v, start=s, end=e) for v, s, e in spans),
        finish_reason="stop",
    )


def answered(last: Chunk, label: str = str(OLD)) -> list[tuple[int, int, WeightIdentity]]:
    sent = take(queue(request("0/0")), label)
    sent.started_at_s = 3.0
    result = completion(sent, last, KNOWN, 5.0)
    assert (result.queued_s, result.engine_s, result.finish_reason) == (3.0, 2.0, FinishReason.STOP)
    return [(span.start, span.end, span.weights) for span in result.spans]


def test_tokens_carry_the_weights_that_sampled_them() -> None:
    assert answered(chunk((str(OLD), 0, 2), (str(NEW), 2, 3))) == [(0, 2, OLD), (2, 3, NEW)]
    assert answered(chunk((str(OLD), 0, 0), (str(NEW), 0, 3))) == [(0, 3, NEW)], "no span without tokens"


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (chunk((str(OLD), 0, 2)), "cover 2 of 3"),
        (chunk((str(OLD), 0, 1), (str(NEW), 2, 3)), "gap at token 1"),
        (chunk(("e9v9", 0, 3)), "never loaded"),
        (chunk(("default", 0, 3)), "never loaded"),
        (chunk((str(OLD), 0, 3), logprob=None), "not finite"),
        (chunk((str(OLD), 0, 0), tokens=0), "0 of 0"),
        (Chunk(token_ids=[1]), "how the sample ended"),
        (Chunk(token_ids=[1], finish_reason="stop"), "0 logprobs"),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(last: Chunk, problem: str) -> None:
    with pytest.raises(BadAnswerError, match=problem):
        answered(last)


def test_a_sample_sent_under_the_base_weights_may_have_their_tokens() -> None:
    spans = answered(chunk(("default", 0, 1), (str(OLD), 1, 3)), label="default")
    assert spans == [(0, 1, KNOWN["default"]), (1, 3, OLD)]


# --- orders and what they are about -----------------------------------------------------------------------------------


def test_an_order_is_the_name_of_an_empty_tensor() -> None:
    spec = TensorSpec(name="a", shape=(2,), dtype="float32", offset=0, nbytes=8, checksum="crc32:0")
    manifest = WeightManifest(weights=NEW, tensors=(spec,) * 3000, total_bytes=64, sources=("shm://x/y",), host="x")
    order = LoadOrder(number=7, vocab_size=9, manifest=manifest, verified=True)
    code = [(op.name, arg) for op, arg, _ in pickletools.genops(base64.b64decode(to_payload(order)))]
    assert [name for name, _ in code] == (
        ["PROTO", "EMPTY_LIST", "BINUNICODE", "GLOBAL", "EMPTY_TUPLE", "REDUCE", "TUPLE2", "APPEND", "STOP"]
    )
    assert code[3][1] == "torch Tensor"
    assert from_name(str(code[2][1])) == order


def test_an_outcome_comes_back_as_numbers() -> None:
    outcome = LoadResult(number=3, error="böse", mismatch=True)
    assert read_result(result_numbers(outcome)) == outcome


def test_held_weights_outlive_what_they_were_made_of() -> None:
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(3)}
    held = hold(NEW, tensors)
    try:
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors["a"].zero_()
        (address,) = held.offer(same_host=True).sources
        manifest = msgspec.structs.replace(held.manifest, sources=(address,))
        with WeightPuller().pull(manifest) as views:
            assert {name: view.tolist() for name, view in views.items()} == {
                name: tensor.tolist() for name, tensor in expected.items()
            }
            assert manifest.weights.digest != NEW.digest, "of the bytes, so that a reader can check it"
    finally:
        held.close()
    with pytest.raises(Exception, match="unavailable"):
        ShmReader().open(parse_address(address), manifest.total_bytes, Deadline(1.0))


def test_a_model_directory_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="vocab_size"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "x", "text_config": {"vocab_size": 5}}')
    assert model_facts(tmp_path).vocab_size == 5
