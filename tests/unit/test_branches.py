"""A member of a group that is several samples: one row of branches, each trained by itself, and every token once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fakes.tiny_models import tiny_model
from tests.fakes.training import make_groups
from tests.property.exploring import SEED
from transport.contracts.messages import GroupPlan, RolloutFinished, event_decoder
from transport.contracts.types import (
    Column,
    FinishReason,
    GroupId,
    PromptId,
    SamplingParams,
    SegmentKind,
    VersionSpan,
    WeightIdentity,
    WorkerId,
)
from transport.errors import MessageError
from transport.rows.columns import check_columns, decode_array, encode_array, loss_mask
from workers.endpoint.conversation import Conversation, Exchange
from workers.generation.engine import Completion, GenerationRequest
from workers.generation.worker import HeldPlan, row_write
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy import attention
from workers.trainer.policy.model import packed_logprobs
from workers.trainer.policy.packing import pack, split_by_tokens

REQUEST = GenerationRequest(
    group_id=GroupId("0/0"),
    prompt_ids=np.array([7], np.int32),
    samples=(0,),
    sampling=SamplingParams(max_new_tokens=10_000),
)


def turn(ids: list[int], version: int = 0) -> Completion:
    return Completion(
        group_id=GroupId("0/0~1"),
        sample=0,
        attempt=0,
        response_ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
        finish_reason=FinishReason.STOP,
        spans=(VersionSpan(start=0, end=len(ids), weights=WeightIdentity(epoch=1, version=version)),),
        queued_s=0.0,
        engine_s=0.0,
    )


def conversation(random: Random) -> Conversation:
    """A tree of exchanges; every token of the policy is another number."""
    made, ids = Conversation([7]), iter(range(1000, 100_000))
    for _ in range(random.randint(1, 9)):
        parent = random.choice([None, *made.exchanges])
        said = [random.randint(10, 99) for _ in range(random.randint(0 if parent else 1, 4))]
        answer = [next(ids) for _ in range(random.randint(1, 4))]
        kind = random.choice([SegmentKind.ENVIRONMENT, SegmentKind.TOOL])
        made.add(Exchange(parent=parent, added=said, kind=kind, turn=turn(answer, random.randint(0, 3))))
    return made


@pytest.mark.parametrize("number", range(200))
def test_every_branch_is_whole_and_every_token_of_the_policy_is_trained_once(number: int) -> None:
    random = Random(f"{SEED}/{number}")
    made, room = conversation(random), random.randint(0, 60)
    ends, longest = made.branches(room), made.longest
    assert longest is not None
    assert longest in ends
    row = made.transcript(ends).completion(REQUEST, 0, FinishReason.STOP, reward=None)
    stops = row.branch_ends or (len(row.response_ids),)
    assert [row.response_ids[a:b].tolist() for a, b in pairwise((0, *stops))] == [made.ids(end)[1:] for end in ends]
    chosen = loss_mask(row.segments).astype(bool)
    trained = row.response_ids[chosen].tolist()
    assert sorted(trained) == sorted(tokens_of(ends))
    assert (row.logprobs[chosen] == -np.array(trained, np.float32)).all()
    assert len(row.response_ids) <= max(room, len(made.ids(longest)) - 1)
    everything = made.branches(10_000)
    assert len(everything) == made.num_branches
    assert len(tokens_of(everything)) == made.policy_tokens


def tokens_of(ends: list[Exchange]) -> set[int]:
    """Of the policy, in the branches with these ends."""
    return {int(token) for end in ends for one in end.branch for token in one.turn.response_ids}


def columns(ends: list[int], mask: list[int] | None, tokens: int = 6) -> dict[Column, bytes]:
    found = {Column.RESPONSE_IDS: np.arange(tokens), Column.BRANCH_ENDS: np.array(ends, np.int32)}
    if mask is not None:
        found[Column.LOSS_MASK] = np.array(mask, np.uint8)
    return {column: encode_array(column, values) for column, values in found.items()}


def test_branches_that_follow_one_another_are_taken() -> None:
    check_columns(columns([2, 6], [0, 1, 1, 1, 0, 0]))


@pytest.mark.parametrize(
    ("ends", "mask", "message"),
    [
        ([], [1] * 6, "end at"),
        ([2, 5], [1] * 6, "end at"),
        ([4, 2, 6], [1] * 6, "end at"),
        ([2, 2, 6], [1] * 6, "end at"),
        ([0, 6], [1] * 6, "end at"),
        ([-1, 6], [1] * 6, "end at"),
        ([2**31 - 1, -(2**31), -5, 6], [1] * 6, "end at"),
        ([2, 6], [0, 0, 1, 1, 1, 1], "no token of the policy"),
        ([2, 6], None, "no loss mask"),
    ],
)
def test_other_branches_are_refused_before_they_are_stored(ends: list[int], mask: list[int] | None, message: str):
    with pytest.raises(MessageError, match=message):
        check_columns(columns(ends, mask))


def joined(group: PromptGroup) -> PromptGroup:
    """The samples of a group as one row."""
    parts = group.samples
    return replace(
        group,
        samples=[
            TrainingSample(
                row_id=parts[0].row_id,
                response_ids=np.concatenate([one.response_ids for one in parts]),
                rollout_logprobs=np.concatenate([one.rollout_logprobs for one in parts]),
                advantage=0.5,
                loss_mask=np.concatenate([one.loss_mask for one in parts if one.loss_mask is not None]),
                branch_ends=np.cumsum([len(one.response_ids) for one in parts]).astype(np.int32),
            )
        ],
    )


def test_a_branch_is_computed_as_if_it_were_alone_and_shares_its_rows_advantage_and_weight() -> None:
    groups = make_groups(masked=True)
    together = [joined(group) for group in groups]
    module = tiny_model("qwen3")
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    module.set_attn_implementation(attention.ATTENTION)
    alone = [replace(group, samples=[one]) for group in groups for one in group.samples]
    expected = torch.cat([packed_logprobs(module, pack([one], "token_mean"), 1.0) for one in alone])
    batch = pack(together, "sequence_mean")
    torch.testing.assert_close(packed_logprobs(module, batch, 1.0), expected, rtol=1e-4, atol=1e-5)
    assert batch.row_ids == tuple(group.samples[0].row_id for group in groups)
    assert batch.row_lengths == tuple(sum(one.num_loss_tokens for one in group.samples) for group in groups)
    weights = batch.tokens.weights_N.split(batch.row_lengths)
    assert [float(part.sum()) for part in weights] == pytest.approx([1.0] * len(groups))
    assert {float(value) for value in batch.tokens.advantages_N} == {0.5}
    sizes = [pack(piece, "token_mean").input_ids.shape[1] for piece in split_by_tokens(together, 23)]
    assert sizes == [19, 23], "the last token of each branch is no input"


def test_branches_of_a_row_that_do_not_reach_its_end_are_no_batch() -> None:
    group = joined(make_groups(masked=True)[0])
    for ends in ([], [4, 5], [5, 4, 12]):
        torn = replace(group.samples[0], branch_ends=np.array(ends, np.int32))
        with pytest.raises(ValueError, match=f"branches of row {torn.row_id}"):
            pack([replace(group, samples=[torn])], "token_mean")


def test_a_row_says_where_its_branches_end_and_how_old_its_oldest_token_is() -> None:
    made = Conversation([7])
    first = Exchange(parent=None, added=[10], kind=SegmentKind.ENVIRONMENT, turn=turn([1], 2))
    made.add(first)
    made.add(Exchange(parent=first, added=[], kind=SegmentKind.TOOL, turn=turn([2], 3)))
    made.add(Exchange(parent=None, added=[11], kind=SegmentKind.ENVIRONMENT, turn=turn([3], 1)))
    row = made.transcript(made.branches(100)).completion(REQUEST, 0, FinishReason.STOP, reward=1.0)
    plan = GroupPlan(
        group_id=REQUEST.group_id,
        batch=0,
        prompt_id=PromptId("p"),
        samples=(0,),
        group_size=1,
        predicted_tokens=1.0,
        priority=1.0,
    )
    written = row_write(row, HeldPlan(entry_id="1-0", plan=plan, to_come={0}, prompt_tokens=1), WorkerId("w"))
    check_columns(written.columns)
    assert decode_array(Column.BRANCH_ENDS, written.columns[Column.BRANCH_ENDS]).tolist() == [3, 5]
    (reported,) = written.on_insert
    finished = event_decoder.decode(reported.entry.payload)
    assert isinstance(finished, RolloutFinished)
    assert (finished.oldest.version, finished.newest.version, finished.environment_tokens) == (1, 3, 2)
