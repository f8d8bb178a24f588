"""The loader inside an SGLang server, on a model that takes weights as SGLang's do: what it loads, refuses, says."""

from __future__ import annotations

import base64
import logging
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tests.fakes.tiny_models import VOCAB, tiny_model
from transport.contracts.messages import encode
from transport.contracts.types import WeightIdentity
from workers.generation.server.loader import RESULT, LoadOrder, LoadResult, load_into_sglang, read_result
from workers.generation.server.upkeep import HeldWeights, hold

NEW = WeightIdentity(epoch=1, version=2)


class ServedModel:
    """config: as the server has it.  loaded: what ``load_weights`` was given, copied as SGLang copies."""

    def __init__(self, config: object, *, fails: bool = False) -> None:
        self.config = config
        self.loaded: dict[str, torch.Tensor] = {}
        self._fails = fails

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()
            if self._fails:
                raise AssertionError("a shape that only this model checks")


OURS_ALONE = (
    "structlog",
    "redis",
    "hiredis",
    "uvloop",
    "aiohttp",
    "httpx",
    "rich",
    "typer",
    "fsspec",
    "starlette",
    "ucxx",
    "isal",
)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_it_needs_nothing_that_a_servers_python_lacks(scheme: str) -> None:
    """What it imports, by name and on first use, with the packages missing that only our own processes have."""
    lacks = f"import sys; sys.modules.update(dict.fromkeys({OURS_ALONE!r}))"
    works = f"import workers.generation.server.loader, transport.tensors.{scheme}"
    logs = "from transport.tensors.tcp import log; log.warning('bytes come by TCP', reason='none')"
    tried = subprocess.run([sys.executable, "-c", f"{lacks}; {works}; {logs}"], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    assert "bytes come by TCP {'reason': 'none'}" in tried.stderr


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    return tiny_model("qwen2", tied=False)


@pytest.fixture
def held(policy: PreTrainedModel) -> Iterator[HeldWeights]:
    kept = hold(NEW, dict(policy.named_parameters()))
    yield kept
    kept.close()


def told(model: ServedModel, order: LoadOrder) -> LoadResult:
    """Give the order as SGLang does, and ask how it went as the engine does."""
    load_into_sglang(model, [(base64.b64encode(encode(order)).decode(), torch.Tensor())])
    return read_result(model.get_weights_by_name(f"{RESULT}{order.number}", 1))  # type: ignore[attr-defined]


def order_of(held: HeldWeights, number: int = 1, **changes: object) -> LoadOrder:
    manifest = held.offer(same_host=True)
    return msgspec.structs.replace(LoadOrder(number=number, vocab_size=VOCAB, manifest=manifest), **changes)


def expected(policy: PreTrainedModel) -> Mapping[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in policy.named_parameters()}


@pytest.mark.parametrize("verified", [True, False])
def test_the_model_gets_every_tensor_of_the_manifest(
    policy: PreTrainedModel, held: HeldWeights, verified: bool
) -> None:
    model = ServedModel(policy.config)
    outcome = told(model, order_of(held, verified=verified))
    assert (outcome.error, outcome.seconds > 0) == ("", True)
    assert {name: tensor.flatten().tolist() for name, tensor in model.loaded.items()} == expected(policy)


def test_what_was_mapped_is_unmapped_behind_the_answer(policy: PreTrainedModel, held: HeldWeights) -> None:
    told(ServedModel(policy.config), order_of(held, verified=True))
    for thread in threading.enumerate():
        if thread.name == "unmap weights":
            thread.join(10)
    assert str(NEW) not in Path("/proc/self/maps").read_text()


def test_sizes_that_the_server_padded_are_looked_up_in_the_model_s_own_files(
    policy: PreTrainedModel, held: HeldWeights, tmp_path: Path
) -> None:
    policy.config.save_pretrained(tmp_path)
    served = AutoConfig.from_pretrained(tmp_path)
    served.intermediate_size *= 2
    assert not told(ServedModel(served), order_of(held)).error


def test_a_look_writes_nothing(policy: PreTrainedModel) -> None:
    model = ServedModel(policy.config)
    outcome = told(model, LoadOrder(number=3, vocab_size=VOCAB))
    assert (outcome.number, outcome.error) == (3, "")
    assert model.loaded == {}
    refused = told(model, LoadOrder(number=4, vocab_size=VOCAB + 1))
    assert (refused.number, refused.mismatch) == (4, True)
    assert f"a vocabulary of {VOCAB} tokens, not {VOCAB + 1}" in refused.error


def test_weights_of_another_model_are_refused_before_one_is_written(policy: PreTrainedModel) -> None:
    other = hold(NEW, dict(tiny_model("qwen3", tied=False).named_parameters()))
    try:
        model = ServedModel(policy.config)
        outcome = told(model, order_of(other))
    finally:
        other.close()
    assert (outcome.mismatch, outcome.spoiled, model.loaded) == (True, False, {})
    assert "q_norm" in outcome.error


def test_bytes_that_are_gone_are_an_outcome_and_not_the_end_of_the_server(
    policy: PreTrainedModel, held: HeldWeights
) -> None:
    model = ServedModel(policy.config)
    order = order_of(held)
    held.close()
    outcome = told(model, order)
    assert (outcome.mismatch, outcome.spoiled, model.loaded) == (False, False, {})
    assert "PeerUnavailableError" in outcome.error


def test_a_number_that_another_version_got_is_not_taken_for_the_old_one(
    policy: PreTrainedModel, held: HeldWeights
) -> None:
    model = ServedModel(policy.config)
    order, number = order_of(held, verified=True), held.fd
    held.close()
    other = hold(NEW, {name: tensor + 1 for name, tensor in policy.named_parameters()})
    try:
        assert other.fd == number
        assert "PeerUnavailableError" in told(model, order).error
    finally:
        other.close()
    assert model.loaded == {}


def test_a_model_that_fails_half_way_says_that_it_is_spoiled(policy: PreTrainedModel, held: HeldWeights) -> None:
    outcome = told(ServedModel(policy.config, fails=True), order_of(held))
    assert (outcome.error, outcome.spoiled) == ("AssertionError: a shape that only this model checks", True)


def test_what_is_no_order_of_ours_leaves_no_outcome(policy: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    model = ServedModel(policy.config)
    with caplog.at_level(logging.ERROR):
        load_into_sglang(model, [("lm_head.weight", torch.ones(1))])
    assert "not an order to load weights" in caplog.text
    assert not hasattr(model, "get_weights_by_name")


def test_other_questions_are_answered_as_before(policy: PreTrainedModel) -> None:
    model = ServedModel(policy.config)
    model.get_weights_by_name = lambda name, count: [name, count]  # type: ignore[attr-defined]
    for number in (1, 2):
        assert told(model, LoadOrder(number=number, vocab_size=VOCAB)).number == number
    assert model.get_weights_by_name("lm_head.weight", 5) == ["lm_head.weight", 5]  # type: ignore[attr-defined]
    bare = ServedModel(policy.config)
    told(bare, LoadOrder(number=1, vocab_size=VOCAB))
    assert bare.get_weights_by_name("lm_head.weight", 5) is None  # type: ignore[attr-defined]
