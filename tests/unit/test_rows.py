"""Columns as bytes: what encodes, and what is refused before it is stored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from transport.broker.base import Commit, GroupWrite, RowWrite
from transport.contracts.messages import RolloutInfo, encode, rollout_info_decoder
from transport.contracts.types import (
    Column,
    FinishReason,
    GroupId,
    RowId,
    Segment,
    SegmentKind,
    VersionSpan,
    WeightIdentity,
    WorkerId,
)
from transport.errors import MessageError
from transport.rows.columns import check_columns, check_commit, decode_array, decode_scalar, encode_array, loss_mask


@given(arrays(np.int32, st.integers(0, 50)))
def test_ids_survive_encoding(ids: np.ndarray) -> None:
    raw = encode_array(Column.RESPONSE_IDS, ids.astype(np.int64))
    assert len(raw) == 4 * len(ids)
    assert np.array_equal(decode_array(Column.RESPONSE_IDS, raw), ids)


def test_bytes_are_little_endian_whatever_the_input() -> None:
    assert encode_array(Column.RESPONSE_IDS, np.array([1, 258], ">i4")) == b"\x01\0\0\0\x02\x01\0\0"
    assert encode_array(Column.LOSS_MASK, np.array([True, False])) == b"\x01\0"
    assert decode_scalar(Column.REWARD, encode_array(Column.REWARD, [0.5])) == 0.5


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Column.RESPONSE_IDS, [1.5]),
        (Column.RESPONSE_IDS, [[1]]),
        (Column.RESPONSE_IDS, ["a"]),
        (Column.LOSS_MASK, np.array([-1])),
        (Column.PROMPT_TEXT, [1]),
    ],
)
def test_values_of_another_kind_are_a_bug(column: Column, values: object) -> None:
    with pytest.raises(ValueError, match=column):
        encode_array(column, values)  # type: ignore[arg-type]


def test_decoded_columns_cannot_be_written_to() -> None:
    array = decode_array(Column.RESPONSE_IDS, b"\0" * 4)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


IDS = encode_array(Column.RESPONSE_IDS, [1, 2])
LOGPROBS = encode_array(Column.ROLLOUT_LOGPROBS, [-0.5, -1.0])


def info(response_tokens: int, *ends: int, segments: tuple[Segment, ...] = ()) -> bytes:
    spans = [
        VersionSpan(start=start, end=end, weights=WeightIdentity(epoch=1, version=0))
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    return encode(
        RolloutInfo(
            worker_id=WorkerId("generate-0.1"),
            finish_reason=FinishReason.STOP,
            prompt_tokens=3,
            response_tokens=response_tokens,
            spans=tuple(spans),
            segments=segments,
        )
    )


LONG = (Segment(kind=SegmentKind.POLICY, end=2**40),)
CALLED = (Segment(kind=SegmentKind.POLICY, end=1), Segment(kind=SegmentKind.TOOL, end=2))


def test_a_loss_mask_is_what_the_segments_say() -> None:
    assert loss_mask((*CALLED, Segment(kind=SegmentKind.POLICY, end=5))).tolist() == [1, 0, 1, 1, 1]
    told = rollout_info_decoder.decode(info(2, 2, segments=CALLED))
    assert (told.environment_tokens, rollout_info_decoder.decode(info(2, 2)).environment_tokens) == (1, 0)
    check_columns(
        {Column.RESPONSE_IDS: IDS, Column.LOSS_MASK: b"\x01\0", Column.ROLLOUT_INFO: info(2, 2, segments=CALLED)}
    )


def test_columns_that_fit_together_pass() -> None:
    check_columns(
        {
            Column.RESPONSE_IDS: IDS,
            Column.ROLLOUT_LOGPROBS: LOGPROBS,
            Column.LOSS_MASK: b"\x01\0",
            Column.ROLLOUT_INFO: info(2, 1, 2),
        }
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_LOGPROBS: LOGPROBS[:4]}, "differ in length"),
        ({Column.RESPONSE_IDS: IDS, Column.LOSS_MASK: b"\x01"}, "differ in length"),
        ({Column.RESPONSE_IDS: b""}, "no tokens"),
        ({Column.RESPONSE_IDS: IDS[:-1]}, "7 bytes"),
        ({Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [np.nan])}, "not finite"),
        ({Column.REFERENCE_LOGPROBS: encode_array(Column.REFERENCE_LOGPROBS, [-np.inf])}, "not finite"),
        ({Column.REWARD: encode_array(Column.REWARD, [np.nan])}, "not finite"),
        ({Column.REWARD: LOGPROBS}, "instead of one"),
        ({Column.LOSS_MASK: b"\x02"}, "0 and 1"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: info(3, 3)}, "of 2 tokens says 3"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: info(2, 1)}, "spans up to 1"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: info(2, 2, 2)}, "follow one another"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: b"junk"}, "not a valid message"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: info(2, 2, segments=CALLED[:1])}, r"end at \[1\]"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: info(2, 2, segments=(*CALLED[1:],) * 2)}, r"end at \[2, 2\]"),
        ({Column.RESPONSE_IDS: IDS, Column.ROLLOUT_INFO: info(2, 2, segments=CALLED)}, "not what its segments say"),
        ({Column.LOSS_MASK: b"\x01", Column.ROLLOUT_INFO: info(2**40, 2**40, segments=LONG)}, "of 1 tokens says"),
        (
            {Column.LOSS_MASK: b"\x01\x01", Column.ROLLOUT_INFO: info(2, 2, segments=CALLED)},
            "not what its segments say",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[Column, bytes], message: str) -> None:
    with pytest.raises(MessageError, match=message):
        check_columns(columns)


def test_a_commit_names_the_unit_that_does_not_fit() -> None:
    bad_row = RowWrite(row_id=RowId("3/1/0"), columns={Column.REWARD: b"\0"})
    with pytest.raises(MessageError, match="3/1/0: column reward"):
        check_commit(Commit(rows=(bad_row,)))
    bad_group = GroupWrite(group_id=GroupId("3/2"), size=2, columns={Column.PROMPT_IDS: b"\0"})
    with pytest.raises(MessageError, match="3/2: column prompt_ids"):
        check_commit(Commit(groups=(bad_group,)))
