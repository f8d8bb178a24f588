"""Products whose rows do not depend on each other: float32 on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from workers.generation.embedded.products import FEWEST_ROWS, Linear, enough_rows, rounds_by_row

needs_onednn = pytest.mark.skipif(not rounds_by_row(torch.zeros(1)), reason="this torch has no oneDNN")


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_onednn
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("k", "m"), [(64, 192), (576, 1536), (17, 5)])
def test_a_row_has_the_same_bits_in_any_company(k, m, with_bias):
    weight, bias, x = drawn(m, k), drawn(m, seed=1) if with_bias else None, drawn(33, k, seed=2)
    linear = Linear(weight, bias)
    whole = linear(x)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 5, 8, 32):
        assert torch.equal(torch.cat([linear(part) for part in x.split(rows)]), whole), f"{rows} rows at once"


@needs_onednn
def test_attention_rows_have_the_same_bits_once_there_are_enough():
    query, keys, mask = drawn(6, 24, 64), drawn(6, 64, 48, seed=1), torch.zeros(6, 1, 48)
    whole = torch.baddbmm(mask, query, keys)
    for rows in (1, 2, 3, 4, 7, 23):
        padded = enough_rows(query[:, :rows])
        assert padded.shape[1] == max(rows, FEWEST_ROWS)
        assert torch.equal(torch.baddbmm(mask, padded, keys)[:, :rows], whole[:, :rows])


def test_a_changed_weight_counts_once_it_is_packed():
    weight, x = drawn(8, 16), drawn(3, 16, seed=1)
    linear = Linear(weight, None)
    weight.copy_(drawn(8, 16, seed=2))
    linear.pack()
    torch.testing.assert_close(linear(x), F.linear(x, weight))


def test_other_types_are_multiplied_as_ever():
    weight, x = drawn(8, 16, dtype=torch.bfloat16), drawn(3, 16, seed=1, dtype=torch.bfloat16)
    assert torch.equal(Linear(weight, None)(x), F.linear(x, weight))
    assert enough_rows(x[None]).shape == (1, 3, 16)
