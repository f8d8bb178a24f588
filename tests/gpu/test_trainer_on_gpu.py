"""The trainer on a GPU gives what it gives on a CPU: kernels, sums, steps, and what passes between host and device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakes.tiny_models import tiny_model
from tests.fakes.training import make_groups
from tests.unit.test_attention import GROUPS, HEADS, KEY_HEADS, NUM_PADS, one_by_one, outputs_and_gradients
from tests.unit.test_offload import ADAM, give_gradients, groups, parameters
from transport.contracts.settings import LoraSettings, TrainerSettings
from transport.tensors.base import TimeLimit
from workers.algorithms.loss import Objective
from workers.trainer.policy import attention
from workers.trainer.policy.attention import group_attention, shared_prompt_attention
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.offload import OffloadedAdamW
from workers.trainer.policy.packing import PromptGroup
from workers.trainer.policy.policy_learner import TrainStep, _beside_compute
from workers.trainer.policy.recompute import recompute_activations
from workers.trainer.policy.streamed_layers import stream_layers
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).norm() / expected.norm()).item()


# --- attention


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_attention_of_a_packed_row(dtype: torch.dtype, limit: float, head_dim: int) -> None:
    """bf16 by the variable-length kernel, which is told apart by its name in the graph; float32 by plain attention."""
    packed = tuple(group_attention(*one, device=GPU) for one in GROUPS)
    num_tokens = sum(group.num_tokens for group in packed) + NUM_PADS
    chance = torch.Generator().manual_seed(0)
    made = (
        torch.randn(1, num_tokens, one, head_dim, generator=chance).to(dtype) for one in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    leaves = [one.transpose(1, 2).double().requires_grad_() for one in made]
    on_gpu = [one.detach().to(GPU, dtype).requires_grad_() for one in leaves]

    def attend(*parts: Tensor) -> Tensor:
        return shared_prompt_attention(nn.Identity(), *parts, None, scaling=0.3, groups=packed)[0]

    assert attention._has_varlen(on_gpu[0]) == (dtype is torch.bfloat16)
    expected = outputs_and_gradients(lambda *some: one_by_one(*some, packed), *leaves)
    for ours, theirs in zip(outputs_and_gradients(attend, *on_gpu), expected, strict=True):
        assert ours.isfinite().all()
        assert error(ours, theirs) < limit


# --- steps


def step_on(device: torch.device, dtype: torch.dtype, *, recompute: Any = "none", **settings: Any) -> TrainStep:
    module = copy.deepcopy(tiny_model("qwen3", vocabulary=96, layers=3, head_dim=64))
    module.config._attn_implementation = attention.ATTENTION
    recompute_activations(module, recompute)
    chosen = TrainerSettings(lr=1e-3, micro_batch_tokens=32, recompute=recompute, **settings)
    policy = PolicyModel(module.to(device), dtype=dtype, temperature=0.8, lora=chosen.lora)  # pyright: ignore[reportArgumentType]
    return TrainStep(policy, chosen, Objective(clip_high=0.28, kl_coef=0.01))


def trained(step: TrainStep, batches: int = 3) -> tuple[Tensor, dict[str, float]]:
    """(change of all masters, metrics of the first batch)."""
    before = flat(step.policy.masters.values())
    metrics: list[dict[str, float]] = []
    for batch in range(batches):
        some = make_groups(seed=batch, batch=batch, masked=True, all_columns=True)
        done = [step.accumulate(part) for part in (some[1:], some[:1])]
        tokens = sum(one.num_tokens for one in done)
        metrics.append(step.close(batch=batch, num_rows=sum(one.num_rows for one in done), num_tokens=tokens))
    return flat(step.policy.masters.values()) - before, metrics[0]


def flat(tensors: Any) -> Tensor:
    return torch.cat([one.detach().reshape(-1).cpu().double() for one in tensors])


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": "whole"},
        {"recompute": "selective"},
        {"offload": "optimizer"},
        {"lora": LoraSettings(rank=4)},
    ],
    ids=["whole", "recomputed", "selective", "offloaded", "adapters"],
)
def test_steps_in_float32(settings: dict[str, Any]) -> None:
    expected, said = trained(step_on(CPU, torch.float32, **settings))
    found, ours = trained(step_on(GPU, torch.float32, **settings))
    assert expected.norm() > 0
    assert error(found, expected) < 1e-2  # Adam divides by roots of squares, some of them of rounding alone
    assert ours["loss"] == pytest.approx(said["loss"], rel=1e-4, abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(said["grad_norm"], rel=1e-4)
    assert ours.keys() == said.keys()


@pytest.mark.parametrize("recompute", ["none", "selective", "whole"])
def test_gradients_in_bf16(recompute: str) -> None:
    """The kernel's own backward pass, layers computed again included; against float32 on the CPU."""
    some = make_groups(masked=True, all_columns=True)
    gradients: list[Tensor] = []
    for device, dtype in ((CPU, torch.float32), (GPU, torch.bfloat16)):
        step = step_on(device, dtype, recompute=recompute)
        step.accumulate(some)
        gradients.append(step.policy.gradient.cpu().double())
    expected, found = gradients
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.99


# --- host and device


@pytest.mark.parametrize("piece", [64, 1 << 24])
def test_offloaded_moments_step_as_torch_does(piece: int) -> None:
    theirs, ours = ([nn.Parameter(one.detach().to(GPU)) for one in parameters(torch.float32)] for _ in range(2))
    expected = torch.optim.AdamW(groups(theirs), fused=True, **ADAM)  # type: ignore[arg-type]
    offloaded = OffloadedAdamW(groups(ours), piece=piece, **ADAM)  # type: ignore[arg-type]
    for number in range(4):
        on_host = parameters(torch.float32)
        give_gradients(on_host, number)
        for some, optimizer in ((theirs, expected), (ours, offloaded)):
            for parameter, host in zip(some, on_host, strict=True):
                assert host.grad is not None
                parameter.grad = host.grad.to(GPU)
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for name in ("exp_avg", "exp_avg_sq"):
            moments = offloaded.state[one][name]
            assert moments.is_pinned()
            assert torch.equal(moments, expected.state[other][name].cpu())


@torch.no_grad()
def test_streamed_layers_take_the_memory_of_a_few(tmp_path: Path) -> None:
    """24 layers of 12 MB: the same bits, and never many on the device, though the host runs ahead."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=512, intermediate_size=1408, num_hidden_layers=24, num_attention_heads=8
    )
    whole: Any = LlamaForCausalLM(config).eval()
    layer_bytes = sum(one.numel() * 4 for one in whole.model.layers[0].parameters())
    streamed: Any = copy.deepcopy(whole)
    whole.to(GPU)
    expected = [whole(input_ids=ids_of(seed), use_cache=False).logits.cpu() for seed in range(2)]
    del whole
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    stream_layers(streamed, GPU)
    torch.cuda.reset_peak_memory_stats()
    for seed in range(2):
        assert torch.equal(streamed(input_ids=ids_of(seed), use_cache=False).logits.cpu(), expected[seed])
    assert (torch.cuda.max_memory_allocated() - before) / layer_bytes < 6


def ids_of(seed: int) -> Tensor:
    return torch.randint(96, (4, 256), generator=torch.Generator().manual_seed(seed)).to(GPU)


def test_what_is_published_is_what_was_trained_while_the_next_batch_is(tmp_path: Path) -> None:
    step = step_on(GPU, torch.bfloat16)
    publisher = WeightPublisher("gpu-test", tmp_path, keep=2)
    try:
        for version in range(1, 3):
            trained(step, batches=1)
            expected = {name: one.detach().to(torch.bfloat16).cpu() for name, one in step.policy.masters.items()}
            busy = torch.randn(4096, 4096, device=GPU)
            for _ in range(20):
                busy = busy @ busy / 64
            with _beside_compute(GPU):
                manifest = publisher.publish(1, version, step.policy.published, torch.bfloat16)
            with WeightPuller(limit=TimeLimit(10)).pull(manifest) as tensors:
                found = {name: tensor.clone() for name, tensor in tensors.items()}
            assert found.keys() == expected.keys()
            for name, one in expected.items():
                assert torch.equal(found[name], one)
    finally:
        publisher.close()


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    step = step_on(GPU, torch.float32)
    before = flat(step.policy.masters.values())
    some: Sequence[PromptGroup] = make_groups(all_columns=True)
    for group in some:
        for sample in group.samples:
            sample.rollout_logprobs[:] = float("nan")
    done = step.accumulate(some)
    metrics = step.close(batch=0, num_rows=done.num_rows, num_tokens=done.num_tokens)
    assert metrics["skipped_nonfinite"] == 1.0
    assert torch.equal(flat(step.policy.masters.values()), before)
