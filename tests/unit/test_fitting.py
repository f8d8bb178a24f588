"""Fits of the cost model: they find what measurements were made from, and never a coefficient below zero."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli.profile import report, section
from orchestrator.config.load import resolve
from orchestrator.core.model.settings import core_settings
from orchestrator.errors import ConfigError
from orchestrator.planning.profiles import (
    fit,
    fit_decode,
    fit_train,
    held_out_errors,
    held_out_train_errors,
    read_profile,
    variant_of,
    with_variant,
)
from orchestrator.sim.costs import ROUND_SHARE, TrainCost
from transport.contracts.continuous_batching import DecodeCost, DecodeRun, Measurements, PrefillRun, TrainRun
from transport.contracts.llms import Fp8
from workers.commands.profile import longer_prompts

TRUE = DecodeCost(fixed_s=0.004, weights_s=0.02, gemm_sample_s=0.00125, sample_s=0.0002, kv_token_s=1e-6)
STEPS = 48


def runs(cost: DecodeCost = TRUE, noise: float = 0.0) -> list[DecodeRun]:
    chance = random.Random(3)
    return [
        DecodeRun(
            batch=batch,
            context_tokens=float(batch * prompt),
            padded_tokens=float(batch * prompt),
            steps=STEPS,
            seconds=cost.steps_s(batch, batch * prompt, STEPS) * chance.uniform(1 - noise, 1 + noise),
        )
        for batch in (1, 2, 4, 8, 16, 32, 64)
        for prompt in (16, 128, 512)
    ]


def measurements(**changes: object) -> Measurements:
    train = TrainCost(token_s=3e-4, squared_token_s=2e-8, round_s=0.01)
    made = Measurements(
        model="m",
        engine="embedded",
        host="here",
        config={
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 64,
        },
        context_tokens=372,
        decode=runs(noise=0.03),
        prefill=[PrefillRun(tokens=tokens, seconds=0.02 + 1e-4 * tokens) for tokens in (16, 64, 256)],
        train=[
            TrainRun(
                tokens=tokens,
                squared_tokens=squared,
                padded_tokens=squared,
                seconds=train.micro_batch_s(tokens, squared),
            )
            for tokens, squared in ((96, 8e3), (160, 2e4), (544, 9e4), (448, 1.5e5), (784, 1e5))
        ],
        optimizer_s=[9.0, 0.5, 0.6],
        publish_s=[0.1, 0.3, 0.2],
        load_s=[0.05],
        beside_training=[1.3, 1.2, 2.0],
        beside_decoding=[0.9, 0.95, 1.1],
        decode_share=0.25,
        train_share=0.5,
    )
    return msgspec.structs.replace(made, **changes)


def test_exact_measurements_give_their_coefficients_knee_included():
    cost = fit_decode(runs(), [])
    for name in ("fixed_s", "weights_s", "gemm_sample_s", "sample_s", "kv_token_s"):
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert cost.step_s(40, 9000) == pytest.approx(TRUE.step_s(40, 9000), rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_step_that_is_linear_in_its_batch_gets_no_knee(noise: float):
    linear = DecodeCost(fixed_s=0.02, sample_s=0.0005)
    cost = fit_decode(runs(linear, noise), [])
    assert cost.weights_s == 0.0
    assert cost.step_s(24, 0) == pytest.approx(linear.step_s(24, 0), rel=2 * noise + 1e-6)


def test_noise_of_three_percent_is_no_error_of_fifteen_on_batches_that_were_not_seen():
    errors = held_out_errors(runs(noise=0.03))
    assert len(errors) == len(runs()), "each was held back once"
    assert max(errors) < 0.08


@pytest.mark.parametrize("padded", [False, True])
def test_samples_of_different_lengths_tell_what_the_shorter_ones_take(padded: bool):
    mixed = [
        DecodeRun(
            batch=batch,
            context_tokens=batch * 168.0,
            padded_tokens=batch * 320.0,
            steps=STEPS,
            seconds=TRUE.steps_s(batch, batch * (320.0 if padded else 168.0), STEPS),
        )
        for batch in (2, 8, 32)
    ]
    cost = fit_decode([*runs(), *mixed], [])
    assert cost.padded is padded
    assert cost.kv_token_s == pytest.approx(TRUE.kv_token_s, rel=1e-3)
    true = TrainCost(token_s=3e-4, squared_token_s=2e-7, round_s=0.01)
    shapes = ((96, 8e3, 8e3), (160, 2e4, 2e4), (544, 9e4, 2e5), (448, 1.5e5, 1.5e5), (784, 1e5, 3e5))
    learned = fit_train(
        [
            TrainRun(
                tokens=tokens,
                squared_tokens=squared,
                padded_tokens=longest,
                seconds=true.micro_batch_s(tokens, longest if padded else squared),
            )
            for tokens, squared, longest in shapes
        ],
        [],
    )
    assert learned.padded is padded
    assert learned.squared_token_s == pytest.approx(true.squared_token_s, rel=1e-6)


def test_a_run_that_is_held_back_does_not_decide_its_own_fit():
    wrong = runs()
    wrong[4] = msgspec.structs.replace(wrong[4], seconds=3 * wrong[4].seconds)
    assert max(held_out_errors(wrong)) > 0.5
    train = measurements().train
    assert max(held_out_train_errors([*train, *train])) < 1e-6
    assert held_out_errors(runs()[:4]) == [], "too few to hold any back"


def test_no_coefficient_is_negative_whatever_was_measured():
    chance = random.Random(1)
    for _ in range(20):
        wild = [msgspec.structs.replace(run, seconds=chance.uniform(0.01, 1.0)) for run in runs()]
        cost = fit_decode(wild, [])
        assert min(cost.fixed_s, cost.weights_s, cost.gemm_sample_s, cost.sample_s, cost.kv_token_s) >= 0


def test_a_profile_is_read_by_runs_and_by_the_cost_model(tmp_path: Path):
    profile = fit(measurements())
    assert profile.train is not None
    assert profile.train.token_s == pytest.approx(3e-4, rel=1e-3)
    assert profile.train.optimizer_s == pytest.approx(0.55)
    assert (profile.publish_s, profile.load_s) == (0.2, 0.05)
    assert profile.decode_cost.prefill_token_s == pytest.approx(1e-4, rel=1e-6)
    path = tmp_path / "here.json"
    path.write_bytes(msgspec.json.encode(profile))
    assert read_profile(path) == profile
    toml = tmp_path / "here.toml"
    own = msgspec.structs.replace(profile.decode_cost, model="random:qwen3-tiny")
    toml.write_text(section(profile))
    with pytest.raises(ConfigError, match=r"must be model\.path: profile the model that runs"):
        resolve("tiny", [toml], [], {})
    toml.write_text(section(msgspec.structs.replace(profile, decode_cost=own)))
    core = core_settings(resolve("tiny", [toml], [], {}).settings)
    assert core.decode_cost == profile.measured.decode
    assert core.train_token_s == pytest.approx(3e-4, rel=1e-3)
    assert core.round_tokens == profile.round_tokens > 0
    train = profile.train
    assert train is not None
    saturated = train.round_s / (train.round_s + profile.round_tokens * train.token_s)
    assert saturated <= ROUND_SHARE or profile.round_tokens == profile.micro_batch_tokens
    assert profile.decode_beside == 1.3
    assert profile.train_beside == 1.0, "nothing is faster for company"
    assert (profile.decode_share, profile.measured.sharing.train_share) == (0.25, 0.5)
    assert profile.llm is not None
    assert profile.llm.layers == 2
    said = report(profile)
    assert f"held-out error on batches that a fit did not see: median {profile.held_out.median:.1%}" in said
    assert "held-out error on micro-batches" in said


def test_a_profile_carries_its_engine_in_fp8_beside_what_it_is(tmp_path: Path):
    cheaper = DecodeCost(fixed_s=0.004, weights_s=0.01, gemm_sample_s=0.00125, sample_s=0.0002, kv_token_s=5e-7)
    both = Fp8(kv=True, weights=True)
    made = with_variant(fit(measurements()), both, measurements(decode=runs(cheaper), kv_tokens=9000, train=[]))
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(made))
    profile = read_profile(path)
    assert "with --fp8-kv --fp8-weights: 4 ms + max(10 ms" in report(profile)
    found = variant_of(profile, both)
    assert found.decode_cost.weights_s == pytest.approx(0.01, rel=0.02)
    assert found.decode_cost.train_token_s == profile.decode_cost.train_token_s > 0
    assert (found.train, found.decode_cost.kv_capacity_tokens) == (profile.train, 9000)
    assert profile.decode_cost.weights_s == pytest.approx(0.02, rel=0.02), "what the profile is stays as it is"
    assert variant_of(found, both) is found
    with pytest.raises(ConfigError, match=r"has no engine with that in fp8: measure it, too .*profile --fp8-kv"):
        variant_of(profile, Fp8(kv=True))


def test_what_cannot_be_fitted_or_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="too few"):
        fit(measurements(decode=runs()[:3]))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ConfigError, match="make a profile: "):
        read_profile(tmp_path / "torn.json")


def test_memory_of_the_engine_limits_plans_and_simulations(tmp_path: Path):
    profile = fit(measurements(kv_tokens=20_000))
    assert profile.measured.decode.kv_capacity_tokens == 20_000
    assert "memory holds 20,000 tokens of context, all samples together" in report(profile)
    assert "kv_capacity_tokens = 20000" in section(profile)
    assert fit(measurements()).measured.decode.kv_capacity_tokens == math.inf


def test_an_engine_that_says_that_it_pads_is_believed():
    assert not fit(measurements()).measured.decode.padded
    padded = fit(measurements(kv_tokens=20_000, kv_padded=True)).measured.decode
    assert (padded.padded, padded.kv_capacity_tokens) == (True, 20_000)


@pytest.mark.parametrize(
    ("max_context", "longer"),
    [(300, []), (372, []), (400, [348]), (2048, [640, 1996]), (8192, [640, 1280, 2560, 8140])],
)
def test_prompts_of_a_profile_go_on_to_the_longest_sample_of_a_run(max_context: int, longer: list[int]):
    assert longer_prompts(max_context) == longer


def test_without_a_trainer_only_the_engine_is_fitted():
    nothing: list[float] = []
    profile = fit(
        measurements(train=[], optimizer_s=nothing, publish_s=nothing, load_s=nothing, beside_training=nothing)
    )
    assert profile.train is None
    assert profile.decode_cost.train_token_s == 0.0
