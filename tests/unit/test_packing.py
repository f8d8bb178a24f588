"""Where tokens stand in a packed row, and how rounds are cut to size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.training import make_groups
from workers.trainer.policy.packing import PromptGroup, pack, split_by_tokens


def row_count(groups: list[PromptGroup]) -> int:
    return sum(len(group.samples) for group in groups)


def test_the_prompt_stands_once_and_the_last_token_is_no_input() -> None:
    groups = make_groups(prompt_tokens=(3,), response_tokens=((4, 1, 2),))
    (group,) = groups
    batch = pack(groups, "token_mean")
    first, _, third = group.samples
    expected = [*group.prompt_ids, *first.response_ids[:3], *third.response_ids[:1]]
    assert batch.input_ids.tolist() == [expected]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 3]]
    assert batch.predictor_N.tolist() == [2, 3, 4, 5, 2, 2, 6]
    assert batch.target_N.tolist() == [token for sample in group.samples for token in sample.response_ids]
    assert batch.row_lengths == (4, 1, 2)


def test_a_response_sees_the_prompt_and_itself_only() -> None:
    (attention,) = pack(make_groups(prompt_tokens=(2,), response_tokens=((3, 2),)), "token_mean").attention
    seen = attention.mask.tolist()
    assert seen == [[True, True, True, False], [True, True, True, True]]
    assert attention.key_index.tolist() == [[0, 1, 2, 3], [0, 1, 4, 2]]  # the second's pad points at token 2: not real
    assert attention.real.tolist() == [0, 1, 2]


def test_masked_tokens_are_inputs_but_no_targets() -> None:
    (group,) = make_groups(prompt_tokens=(3,), response_tokens=((5,),))
    mask = np.array([1, 0, 1, 0, 1], dtype=np.uint8)
    batch = pack([replace(group, samples=[replace(group.samples[0], loss_mask=mask)])], "sequence_mean")
    assert batch.input_ids.shape == (1, 7)
    assert batch.predictor_N.tolist() == [2, 4, 6]
    assert batch.tokens.weights_N.tolist() == pytest.approx([1 / 3] * 3)
    assert sum(batch.row_lengths) == 3


def test_columns_of_unequal_length_are_refused_by_row() -> None:
    (group,) = make_groups(prompt_tokens=(3,), response_tokens=((5,),))
    torn = replace(group.samples[0], rollout_logprobs=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="0/0/0"):
        pack([replace(group, samples=[torn])], "token_mean")


def test_pieces_keep_all_rows_and_stay_within_the_cap() -> None:
    groups = make_groups(prompt_tokens=(5, 3, 9, 4), response_tokens=((4, 1, 7), (2, 2), (6, 3, 1, 8), (30,)))
    pieces = split_by_tokens(groups, 20)
    sizes = [int(pack(piece, "token_mean").input_ids.shape[1]) for piece in pieces]
    assert max(size for size, piece in zip(sizes, pieces, strict=True) if row_count(piece) > 1) <= 20
    rows = [sample.row_id for piece in pieces for group in piece for sample in group.samples]
    assert rows == [sample.row_id for group in groups for sample in group.samples]
    assert len(pieces[-1]) == 1  # larger than the cap: alone
    assert split_by_tokens(groups, 1000) == [groups]
