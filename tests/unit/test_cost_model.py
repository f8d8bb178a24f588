"""Cost model: closed forms against the token-step loop, specifications against the papers, refusals by name."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sim.costs import (
    A100,
    GPUS,
    H20,
    H800,
    DoesNotFitError,
    crossing_s,
    decode_cost,
    gather_s,
    generation_degrees,
    most_ranks,
    save_s,
    switch_s,
    train_cost,
    transfer_s,
)
from orchestrator.sim.llms import LLMS, QWEN_7B, QWEN_32B, QWEN_72B
from orchestrator.sim.scenarios import Layout
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.llms import Fp8, UnknownModelError, from_config

CONTEXT = 32_768

costs = st.builds(
    DecodeCost,
    fixed_s=st.floats(1e-4, 0.1),
    weights_s=st.floats(0, 0.05),
    gemm_sample_s=st.floats(0, 1e-3),
    sample_s=st.floats(0, 1e-3),
    kv_token_s=st.floats(0, 1e-7),
)


@given(costs, st.integers(1, 300), st.integers(0, 500), st.integers(0, 400))
def test_many_steps_equal_the_token_step_loop(cost, batch, context_of_each, steps):
    context = batch * context_of_each
    looped = sum(cost.step_s(batch, context + step * batch) for step in range(steps))
    assert cost.steps_s(batch, context, steps) == pytest.approx(looped, rel=1e-9, abs=1e-12)


@given(costs, st.integers(1, 300), st.integers(1, 20_000), st.floats(0, 30_000))
def test_steps_in_a_time_invert_the_time_of_steps(cost, batch, context_of_each, steps):
    context = batch * context_of_each
    assert cost.steps_in(batch, context, cost.steps_s(batch, context, steps)) == pytest.approx(
        steps, rel=1e-7, abs=1e-7
    )


def test_a_step_is_flat_until_arithmetic_outgrows_the_weights():
    """StreamRL fig. 6, right: memory-bound, then linear."""
    cost = decode_cost(QWEN_7B, H800, 1)
    knee = cost.weights_s / cost.gemm_sample_s
    assert cost.step_s(knee / 2, 0) == pytest.approx(cost.step_s(1, 0))
    assert cost.step_s(4 * knee, 0) > 2 * cost.step_s(1, 0)


def test_parameter_counts_are_those_of_the_model_cards():
    billions = {name: llm.params / 1e9 for name, llm in LLMS.items()}
    cards = {
        "Qwen2.5-3B": 3.09,
        "Qwen2.5-7B": 7.61,
        "Qwen2.5-32B": 32.5,
        "Qwen2.5-72B": 72.7,
        "SmolLM2-135M": 0.135,
        "SmolLM2-1.7B": 1.71,
        "Qwen2.5-0.5B": 0.494,
        "Qwen2.5-1.5B": 1.54,
        "Qwen2.5-14B": 14.8,
        "Qwen3-4B": 4.02,
        "Qwen3-8B": 8.19,
        "Llama-3.1-8B": 8.03,
        "Llama-3.3-70B": 70.6,
    }
    assert billions == pytest.approx(cards, rel=0.01)


def test_a_hugging_face_configuration_gives_the_same_shape():
    config = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    assert from_config("Qwen2.5-72B", config) == QWEN_72B
    del config["intermediate_size"]
    with pytest.raises(UnknownModelError, match="intermediate_size"):
        from_config("broken", config)
    with pytest.raises(UnknownModelError, match="experts"):
        from_config("mixture", config | {"num_experts": 8})


def test_a_model_that_does_not_fit_is_refused_by_name():
    with pytest.raises(DoesNotFitError, match=r"Qwen2.5-72B needs 73 GB .* each of 2 H800"):
        decode_cost(QWEN_72B, H800, 2)
    assert generation_degrees(QWEN_7B, msgspec.structs.replace(A100, name="small", memory_bytes=8e9), CONTEXT) == []
    with pytest.raises(DoesNotFitError, match=r"training Qwen2.5-72B on 16 H800 as 2 ranks"):
        train_cost(QWEN_72B, H800, 16, 2)
    with pytest.raises(ValueError, match="do not split 8 ways"):
        decode_cost(QWEN_7B, H800, 8)


def test_fp8_halves_what_is_read_and_what_is_held():
    plain = decode_cost(QWEN_72B, H800, 4)
    small = decode_cost(QWEN_72B, H800, 4, fp8=Fp8(kv=True))
    light = decode_cost(QWEN_72B, H800, 4, fp8=Fp8(weights=True))
    assert small.kv_token_s == pytest.approx(plain.kv_token_s / 2)
    assert small.kv_capacity_tokens == pytest.approx(2 * plain.kv_capacity_tokens, rel=1e-3)
    assert light.weights_s == pytest.approx(plain.weights_s / 2)
    freed = (light.kv_capacity_tokens - plain.kv_capacity_tokens) * QWEN_72B.kv_bytes
    assert freed == pytest.approx(QWEN_72B.weight_bytes / 2, rel=1e-3)
    assert light.gemm_sample_s == plain.gemm_sample_s, "arithmetic is not counted as faster"
    assert generation_degrees(QWEN_72B, H800, CONTEXT, fp8=Fp8(weights=True))[0] == 2


def test_layouts_that_fit_are_found():
    assert generation_degrees(QWEN_7B, H800, CONTEXT)[0] == 1
    assert generation_degrees(QWEN_32B, H800, CONTEXT)[0] == 2
    assert generation_degrees(QWEN_72B, H800, CONTEXT)[0] == 4
    assert most_ranks(QWEN_72B, H800, 96) == 6, "12 would swap"
    assert most_ranks(QWEN_72B, H800, 88) == 11, "which swap, as 88 are no whole ranks of 16"
    assert most_ranks(QWEN_7B, H800, 32) == 16
    assert most_ranks(QWEN_7B, H800, 32, algorithm="grpo") == 32


def test_generation_prefers_bandwidth_and_training_prefers_flops():
    """StreamRL sec. 2.2: an H20 decodes faster than an H800 and trains far slower."""
    assert decode_cost(QWEN_7B, H20, 1).step_s(16, 64_000) < decode_cost(QWEN_7B, H800, 1).step_s(16, 64_000)
    slow, fast = train_cost(QWEN_7B, H20, 32, 32), train_cost(QWEN_7B, H800, 32, 32)
    assert slow.micro_batch_s(20_000) > 5 * fast.micro_batch_s(20_000)


def test_a_tree_costs_its_depth_and_not_the_number_of_its_leaves():
    one, many = (transfer_s(QWEN_72B, 8 * H800.network_bytes_per_s, instances) for instances in (1, 16))
    assert one < many < 1.5 * one
    assert one == pytest.approx(QWEN_72B.weight_bytes / (0.8 * 8 * H800.network_bytes_per_s) + 0.01)


def test_the_link_to_another_site_is_crossed_once_however_many_nodes_there_are():
    one, many = (crossing_s(QWEN_72B, 8 * H800.network_bytes_per_s, 10e9, hosts) for hosts in (1, 16))
    assert one == pytest.approx(QWEN_72B.weight_bytes / (0.8 * 10e9) + 0.01)
    assert one < many < 1.05 * one
    layout = Layout(generation_gpus=128, training_gpus=64, link_bytes_per_s=10e9)
    assert layout.transfer_s(QWEN_72B) == many
    assert replace(layout, link_bytes_per_s=0.0).transfer_s(QWEN_72B) < one / 10


def test_every_gpu_runs_every_model_on_a_node():
    for gpu in GPUS.values():
        for llm in LLMS.values():
            degree = generation_degrees(llm, gpu, CONTEXT)[0]
            assert decode_cost(llm, gpu, degree).kv_capacity_tokens > 1
            assert switch_s(llm, gpu, 128) > 0


@pytest.mark.parametrize(("ranks", "swaps"), [(10, True), (5, False)])
def test_a_rank_that_cannot_hold_all_models_pays_for_swapping_them_in_every_round(ranks, swaps):
    """72B PPO on 80 H800: a rank of 8 GPUs holds actor or critic with its gradients, one of 16 all three models."""
    cost = train_cost(QWEN_72B, H800, 80, ranks)
    weights, gradients = 2.0 * QWEN_72B.params, 4.0 * QWEN_72B.params
    in_s = (3 * weights + 2 * gradients) / 8 / (0.8 * H800.host_bytes_per_s)
    assert cost.round_s == pytest.approx(0.01 + (in_s if swaps else 0.0))
    assert 2.0 < in_s < 5.0
    assert train_cost(QWEN_72B, H800, 80, ranks, "grpo").round_s == 0.01, "one model is always there"


def test_a_pass_of_few_tokens_is_slow_a_token_and_a_round_takes_as_many_passes_as_memory_wants():
    cost = train_cost(QWEN_72B, H800, 64, 4)
    alone = cost.micro_batch_s(2048) - cost.round_s
    assert alone == pytest.approx(2 * 2048 * cost.token_s), "half of the efficiency"
    full = cost.pass_tokens
    assert cost.micro_batch_s(full + 1) - cost.micro_batch_s(full) == pytest.approx(cost.pass_s + cost.token_s)
    assert msgspec.structs.replace(cost, pass_tokens=0).micro_batch_s(4 * full) == pytest.approx(
        cost.micro_batch_s(4 * full) - 3 * cost.pass_s
    )


def test_what_leaves_the_trainer_is_paid_by_its_bytes():
    assert save_s(QWEN_72B, H800, 64) == pytest.approx(2 * 12 * QWEN_72B.params / 64 / 51.2e9)
    assert save_s(QWEN_72B, H800, 128, "grpo") == save_s(QWEN_72B, H800, 64) / 4
    assert gather_s(QWEN_72B, H800, 64, 8) - gather_s(QWEN_72B, H800, 64, 4) == pytest.approx(
        QWEN_72B.weight_bytes / 16 / 51.2e9
    )
