"""The log of beginnings of samples: what is read of it, whatever was written."""

import numpy as np
import pytest

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Commit, Entry, GroupWrite
from transport.contracts.messages import PartialTokens
from transport.contracts.types import Column, RunName, VersionSpan, WeightIdentity, group_id
from transport.rows.columns import encode_array
from transport.rows.partial import NOTHING, beginnings, joined, partial_append, read_beginnings

GROUP = group_id(3, 0)
V1, V2, V3 = (WeightIdentity(epoch=1, version=version) for version in (1, 2, 3))


def part(start, *spans, attempt=0, sample=0, ids=None):
    """Tokens from ``start`` on, numbered by their place; spans: (tokens, weights)."""
    ends = np.cumsum([start, *(tokens for tokens, _ in spans)]).tolist()
    numbers = np.arange(start, ends[-1], dtype=np.int32) if ids is None else np.array(ids, np.int32)
    return PartialTokens(
        sample=sample,
        attempt=attempt,
        start=start,
        token_ids=encode_array(Column.RESPONSE_IDS, numbers),
        logprobs=encode_array(Column.ROLLOUT_LOGPROBS, -numbers.astype(np.float32)),
        spans=tuple(
            VersionSpan(start=a, end=b, weights=weights)
            for a, b, (_, weights) in zip(ends, ends[1:], spans, strict=False)
        ),
    )


def only(*parts):
    return beginnings(parts).get(0, NOTHING)


def test_parts_of_one_attempt_follow_one_another_under_three_versions():
    whole = only(part(5, (1, V1), (4, V2)), part(0, (5, V1)), part(10, (2, V2), (1, V3)))
    assert whole.token_ids.tolist() == list(range(13))
    assert whole.logprobs.tolist() == [-float(token) for token in range(13)]
    assert [(span.start, span.end, span.weights) for span in whole.spans] == [(0, 6, V1), (6, 12, V2), (12, 13, V3)]
    assert whole.oldest == V1


def test_a_later_attempt_goes_on_from_where_it_began():
    whole = only(part(0, (8, V1)), part(6, (3, V2), attempt=1, ids=[60, 61, 62]), part(8, (2, V1)))
    assert whole.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 60, 61, 62], "and what the first still wrote is not in it"


def test_a_later_attempt_that_started_over_has_nothing_of_the_earlier_one():
    whole = only(part(0, (8, V1)), part(0, (2, V3), attempt=1))
    assert (len(whole), whole.oldest) == (2, V3)


def test_an_older_worker_may_go_on_with_what_a_newer_one_began():
    assert only(part(0, (8, V3)), part(8, (2, V1), attempt=1)).oldest == V1


@pytest.mark.parametrize(
    "bad",
    [
        part(9, (2, V1)),  # a gap
        part(4, (2, V1), ids=[1, 2, 3]),  # more tokens than its spans cover
        part(4),  # nothing
        PartialTokens(sample=0, attempt=0, start=4, token_ids=b"123", logprobs=b"", spans=()),
        PartialTokens(
            sample=0,
            attempt=0,
            start=4,
            token_ids=b"1234",
            logprobs=np.array([np.nan], "<f4").tobytes(),
            spans=(VersionSpan(start=4, end=5, weights=V1),),
        ),
        PartialTokens(
            sample=0,
            attempt=0,
            start=4,
            token_ids=b"1234" * 2,
            logprobs=b"1234" * 2,
            spans=(VersionSpan(start=4, end=7, weights=V1), VersionSpan(start=7, end=6, weights=V2)),
        ),
    ],
)
def test_what_does_not_fit_makes_the_beginning_shorter(bad):
    assert len(only(part(0, (4, V1)), bad, part(11, (3, V1)))) == 4


def test_cutting_keeps_the_weights_of_what_stays():
    cut = only(part(0, (5, V1), (4, V2))).cut(6)
    assert [(span.end, span.weights) for span in cut.spans] == [(5, V1), (6, V2)]
    assert len(cut.logprobs) == 6
    assert not cut.cut(0)
    assert cut.cut(6) is cut


def test_spans_of_the_same_weights_are_one():
    first, second = VersionSpan(start=0, end=2, weights=V1), VersionSpan(start=2, end=5, weights=V1)
    assert joined((first,), (second,)) == (VersionSpan(start=0, end=5, weights=V1),)


async def test_the_log_is_read_by_group_and_goes_with_it():
    broker = MemoryBroker(MemoryServer(), RunName("test"))
    await broker.commit(Commit(groups=[GroupWrite(group_id=GROUP, size=2, columns={Column.PROMPT_IDS: b"1234"})]))
    parts = [part(2 * n, (2, V1), sample=1) for n in range(300)]
    await broker.commit(Commit(appends=[partial_append(GROUP, one) for one in parts]))
    await broker.append(keys.partial(GROUP), Entry(payload=b"nonsense"))
    await broker.commit(Commit(appends=[partial_append(GROUP, part(600, (1, V1), sample=1, attempt=1))]))
    assert {sample: len(one) for sample, one in (await read_beginnings(broker, GROUP, 1)).items()} == {1: 600}
    assert len((await read_beginnings(broker, GROUP, 2))[1]) == 601
    assert await read_beginnings(broker, group_id(3, 1), 1) == {}
    await broker.drop_groups([GROUP])
    assert keys.partial(GROUP) not in await broker.streams()
