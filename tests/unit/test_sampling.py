"""The drawn tokens follow the distribution that brute force computes, and each sample has a stream of its own."""

import math

import numpy as np
import pytest
import torch

from workers.generation.embedded.slots import Draw, sample_tokens, stream_key, uniforms

CPU = torch.device("cpu")


def draw_of(rows, *, temperature=1.0, top_p=1.0, top_k=0, points=None):
    points = np.full(rows, 0.5) if points is None else points
    return Draw(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int64),
        uniforms=np.asarray(points, np.float64),
    ).to(CPU)


def brute_force(logits, *, temperature, top_p, top_k):
    """The distribution after the cuts, one token at a time, in plain Python floats."""
    scores = [x / temperature for x in logits]
    top = max(scores)
    probs = [math.exp(s - top) for s in scores]
    total = sum(probs)
    probs = [p / total for p in probs]
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        ranked = ranked[:top_k]
    mass = sum(probs[i] for i in ranked)
    kept, before = {}, 0.0
    for i in ranked:
        if before < top_p * mass or top_p == 1:
            kept[i] = probs[i]
        before += probs[i]
    mass = sum(kept.values())
    return np.array([kept.get(i, 0.0) / mass for i in range(len(probs))])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1, 1, 0), (0.7, 1, 0), (1, 0.8, 0), (1, 1, 5), (1.3, 0.6, 7), (1, 0.05, 3)]
)
@pytest.mark.parametrize("vocabulary", [11, 700])
def test_an_even_grid_of_uniforms_gives_the_brute_force_distribution(temperature, top_p, top_k, vocabulary):
    """The inverse CDF on an even grid counts each token in proportion, to one grid point per edge: no statistics."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    points = (np.arange(6_000) + 0.5) / 6_000
    draw = draw_of(len(points), temperature=temperature, top_p=top_p, top_k=top_k, points=points)
    tokens, _ = sample_tokens(logits.expand(len(points), -1), draw)
    expected = brute_force(logits.tolist(), temperature=temperature, top_p=top_p, top_k=top_k)
    counts = np.bincount(tokens, minlength=vocabulary)
    assert np.abs(counts - expected * len(points)).max() < 2
    assert (counts[expected == 0] == 0).all()


def test_a_top_p_too_small_for_a_float_leaves_the_likeliest():
    tokens, _ = sample_tokens(torch.tensor([[0.1, 2.0, 2.0]]), draw_of(1, top_p=1e-300))
    assert tokens.tolist() == [1]


def test_hashed_uniforms_pass_a_chi_square_test():
    keys = np.array([stream_key(7, sample) for sample in range(200)])
    points = np.concatenate([uniforms(keys, np.full(200, position)) for position in range(500)])
    counts = np.histogram(points, bins=100, range=(0, 1))[0]
    expected = len(points) / 100
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 99 - 4 * math.sqrt(198) < chi_square < 99 + 4 * math.sqrt(198)


def test_streams_of_neighbouring_seeds_and_samples_are_uncorrelated():
    position = np.arange(4000)

    def stream(seed, sample):
        return uniforms(np.full(4000, stream_key(seed, sample)), position)

    streams = np.array([stream(seed, sample) for seed in (0, 1) for sample in (0, 1, 2)])
    correlation = np.corrcoef(streams) - np.eye(6)
    assert np.abs(correlation).max() < 5 / math.sqrt(4000)
    assert np.abs([np.corrcoef(s[1:], s[:-1])[0, 1] for s in streams]).max() < 5 / math.sqrt(4000)


def test_a_uniform_depends_on_its_stream_and_position_alone():
    keys = np.array([stream_key(3, 0), stream_key(3, 1), stream_key(-5, 2**40)])
    together = uniforms(keys, np.array([4, 9, 0]))
    alone = [uniforms(keys[i : i + 1], np.array([p]))[0] for i, p in enumerate((4, 9, 0))]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == 3


def test_logprobs_are_of_the_whole_distribution_before_the_cuts():
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)) * 3
    points = np.linspace(0, 0.999, 64)
    tokens, logprobs = sample_tokens(logits, draw_of(64, temperature=0.7, top_p=0.5, top_k=9, points=points))
    expected = torch.log_softmax(logits.double() / 0.7, -1)[torch.arange(64), torch.from_numpy(tokens).long()]
    assert np.abs(logprobs - expected.numpy()).max() < 1e-5


def test_temperature_zero_is_greedy_with_the_logprob_of_temperature_one():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = sample_tokens(logits, draw_of(8, temperature=0.0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert np.abs(logprobs - torch.log_softmax(logits, -1).max(-1).values.numpy()).max() < 1e-6


def test_each_row_has_its_own_parameters():
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(3)).expand(3, -1)
    draw = Draw(
        temperature=np.array([0, 1, 1], np.float32),
        top_p=np.array([1, 1, 1e-6], np.float32),
        top_k=np.array([0, 1, 0]),
        uniforms=np.array([0.9, 0.9, 0.9]),
    ).to(CPU)
    tokens, _ = sample_tokens(logits, draw)
    assert tokens.tolist() == [int(logits[0].argmax())] * 3


def test_the_ends_of_the_uniform_range_draw_tokens_that_can_be_drawn():
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 300], logits[:, 999] = 0.0, 0.0
    tokens, logprobs = sample_tokens(logits, draw_of(2, points=[0.0, np.nextafter(1.0, 0.0)]))
    assert tokens.tolist() == [300, 999]
    assert np.abs(logprobs - math.log(0.5)).max() < 1e-6


def test_exactly_k_of_equal_logits_stay():
    points = (np.arange(1000) + 0.5) / 1000
    tokens, _ = sample_tokens(torch.zeros(1000, 40), draw_of(1000, top_k=4, points=points))
    assert np.bincount(tokens).tolist() == [250, 250, 250, 250]


def test_logits_that_are_not_finite_give_a_logprob_that_is_not_finite():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    logits[1, 3] = torch.nan
    _, logprobs = sample_tokens(logits, draw_of(2))
    assert np.isfinite(logprobs).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_logits_are_normalised_in_float32(dtype):
    logits = (torch.randn(16, 5000, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    tokens, logprobs = sample_tokens(logits, draw_of(16, temperature=0.6))
    expected = torch.log_softmax(logits.double() / 0.6, -1)[torch.arange(16), torch.from_numpy(tokens).long()]
    assert np.abs(logprobs - expected.numpy()).max() < 1e-5
