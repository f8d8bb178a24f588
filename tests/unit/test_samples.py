"""Samples as people see them: few, cut, and otherwise what the model wrote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.errors import DataError
from orchestrator.runtime.samples import MAX_RESPONSE_CHARS, MAX_SHOWN, Detokenize, RecentSamples, best_and_worst
from transport.broker.base import Commit, GroupWrite, RowWrite
from transport.broker.memory import MemoryBroker, MemoryServer
from transport.clock import ManualClock
from transport.messages import GroupScored, RolloutInfo, encode
from transport.rows import BrokerRows, encode_array
from transport.types import Column, FinishReason, GroupId, RunName, VersionSpan, WeightIdentity, WorkerId, row_id

HOSTILE = "<script>hacked = 1</script>\x1b[2J"


class Tokenizer:
    """Token n is character n. loads: how often it was asked for."""

    def __init__(self, *, missing: bool = False) -> None:
        self.loads = 0
        self._missing = missing

    def load(self) -> Detokenize:
        self.loads += 1
        if self._missing:
            raise DataError("no tokenizer")
        return lambda ids: "".join(map(chr, ids))


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(ManualClock()), RunName("samples"))


async def write(broker: MemoryBroker, group: GroupId, responses: Sequence[str]) -> GroupScored:
    info = RolloutInfo(
        worker_id=WorkerId("generate-0.1"),
        finish_reason=FinishReason.STOP,
        prompt_tokens=3,
        response_tokens=9,
        spans=(
            VersionSpan(start=0, end=4, weights=WeightIdentity(epoch=1, version=6)),
            VersionSpan(start=4, end=9, weights=WeightIdentity(epoch=1, version=7)),
        ),
    )
    columns = {Column.PROMPT_TEXT: b"say \xff it"}
    await broker.commit(Commit(groups=[GroupWrite(group_id=group, size=len(responses), columns=columns)]))
    rows = [
        RowWrite(
            row_id=row_id(group, sample),
            columns={
                Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, [ord(char) for char in text]),
                Column.ROLLOUT_INFO: encode(info),
                Column.REWARD_COMPONENTS: b'{"right": 0.5}',
            },
        )
        for sample, text in enumerate(responses)
    ]
    await broker.commit(Commit(rows=rows))
    rewards = tuple(float(len(text)) for text in responses)
    return GroupScored(group_id=group, rewards=rewards, response_tokens=(9,) * len(responses), signal=True)


async def test_the_best_and_the_worst_of_a_group_are_shown_as_they_are(broker: MemoryBroker):
    recent = RecentSamples(BrokerRows(broker), Tokenizer().load)
    await recent.show(await write(broker, GroupId("0/0"), ["middling", "short", HOSTILE]))
    best, worst = recent.newest_first
    assert (best["row"], best["reward"], best["response"]) == ("0/0/2", float(len(HOSTILE)), HOSTILE)
    assert (worst["row"], worst["response"]) == ("0/0/1", "short")
    assert best["prompt"] == "say \ufffd it"
    assert best["versions"] == [6, 7]
    assert best["components"] == {"right": 0.5}


async def test_a_group_is_fetched_once_and_the_newest_come_first(broker: MemoryBroker):
    recent = RecentSamples(BrokerRows(broker), Tokenizer().load)
    await recent.show(None)
    for number in range(MAX_SHOWN):
        scored = await write(broker, GroupId(f"{number}/0"), ["aa", "b"])
        await recent.show(scored)
        await recent.show(scored)
    assert len(recent.newest_first) == MAX_SHOWN
    assert [sample["row"] for sample in recent.newest_first[:2]] == [f"{MAX_SHOWN - 1}/0/0", f"{MAX_SHOWN - 1}/0/1"]


async def test_a_long_text_is_cut_and_says_so(broker: MemoryBroker):
    recent = RecentSamples(BrokerRows(broker), Tokenizer().load)
    await recent.show(await write(broker, GroupId("0/0"), ["x" * (MAX_RESPONSE_CHARS + 7)]))
    (sample,) = recent.newest_first
    assert (len(sample["response"]), sample["response_cut"]) == (MAX_RESPONSE_CHARS, 7)


async def test_rows_that_are_gone_or_foreign_are_left_out(broker: MemoryBroker):
    recent = RecentSamples(BrokerRows(broker), Tokenizer().load)
    gone = await write(broker, GroupId("0/0"), ["aa", "b"])
    await broker.drop_groups([GroupId("0/0")])
    await recent.show(gone)
    await recent.show(await write(broker, GroupId("0/1"), ["some", "all"]))
    foreign = {Column.RESPONSE_IDS: b"123", Column.ROLLOUT_INFO: b"\xc1"}
    await broker.commit(Commit(groups=[GroupWrite(group_id=GroupId("0/2"), size=1, columns={})]))
    await broker.commit(Commit(rows=[RowWrite(row_id=row_id(GroupId("0/2"), 0), columns=foreign)]))
    await recent.show(GroupScored(group_id=GroupId("0/2"), rewards=(1.0,), response_tokens=(1,), signal=True))
    assert [sample["row"] for sample in recent.newest_first] == ["0/1/0", "0/1/1"]


async def test_without_a_tokenizer_nothing_is_shown_and_it_is_asked_for_once(broker: MemoryBroker):
    tokenizer = Tokenizer(missing=True)
    recent = RecentSamples(BrokerRows(broker), tokenizer.load)
    for number in range(3):
        await recent.show(await write(broker, GroupId(f"{number}/0"), ["a"]))
    assert (recent.newest_first, tokenizer.loads) == ([], 1)


def test_equal_rewards_give_one_sample():
    assert best_and_worst([0.5, 0.5]) == [0]
    assert best_and_worst([0.0, 1.0, -1.0]) == [1, 2]
