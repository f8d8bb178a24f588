"""Samples as people see them: few, cut, and otherwise what the model wrote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from orchestrator.errors import DataError
from orchestrator.launch.app import read_own_prompt
from orchestrator.observability.samples import (
    GONE_REST_S,
    MAX_RESPONSE_CHARS,
    MAX_RESPONSE_END,
    MAX_SHOWN,
    REST_S,
    Detokenize,
    RecentSamples,
    best_and_worst,
    readable_problem,
)
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker.base import Commit, GroupWrite, RowWrite
from transport.contracts.messages import Event, GroupScored, OwnPrompt, RolloutInfo, encode
from transport.contracts.types import (
    Column,
    FinishReason,
    GroupId,
    RunName,
    VersionSpan,
    WeightIdentity,
    WorkerId,
    evaluation_id,
    row_id,
)
from transport.rows.columns import RowStore, encode_array
from workers.endpoint.prompts import BrokerPrompts

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
    entry = b'{"question": "2 + 2?", "answer": 4, "metadata": {}}'
    columns = {Column.PROMPT_TEXT: b"say \xff it", Column.TASK_ENTRY: entry}
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


class Watching:
    """Samples that are watched for; a rest is over as soon as it is noted."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.kept: list[dict[str, Any]] = []
        self._rests: asyncio.Queue[float] = asyncio.Queue()
        self.recent = RecentSamples(
            RowStore(broker),
            Tokenizer().load,
            self.kept.append,
            self._rests.put,
            own_prompt=partial(read_own_prompt, broker),
        )

    async def tell(self, *events: Event) -> float:
        """Let it hear of these at once. Returns how long it rests after what it did then, seconds."""
        self.recent.on_events(events)
        return await self._rests.get()


@pytest_asyncio.fixture
async def watching(broker: MemoryBroker) -> AsyncIterator[Watching]:
    watching = Watching(broker)
    task = asyncio.create_task(watching.recent.watch())
    yield watching
    task.cancel()


async def test_the_best_and_the_worst_of_a_group_are_shown_as_they_are(broker: MemoryBroker, watching: Watching):
    assert await watching.tell(await write(broker, GroupId("0/0"), ["middling", "short", HOSTILE])) == REST_S
    best, worst = watching.recent.newest_first
    assert (best["row"], best["reward"], best["response"]) == ("0/0/2", float(len(HOSTILE)), HOSTILE)
    assert (worst["row"], worst["response"]) == ("0/0/1", "short")
    assert best["prompt"] == "say \ufffd it"
    assert (best["question"], best["expected"]) == ("2 + 2?", "4")
    assert best["versions"] == [6, 7]
    assert best["components"] == {"right": 0.5}
    assert watching.kept == [worst, best]


@pytest.mark.parametrize(
    ("answer", "expected"), [(None, ""), ("seven", "seven"), (0, "0")], ids=["none", "a text", "a number"]
)
async def test_of_a_prompt_that_an_agent_brought_nothing_of_the_datas_row_is_shown(
    broker: MemoryBroker, watching: Watching, answer: str | int | None, expected: str
):
    own = OwnPrompt(id="z0", question="MY OWN QUESTION 0?", answer=answer, metadata={"level": 1})
    await BrokerPrompts(broker).keep(GroupId("0/0"), own)
    await watching.tell(await write(broker, GroupId("0/0"), ["aa", "b"]))
    for sample in watching.kept:
        shown = (sample["question"], sample["prompt"], sample["expected"])
        assert shown == ("MY OWN QUESTION 0?", "MY OWN QUESTION 0?", expected)
    assert len(watching.kept) == 2


def test_an_own_prompt_that_cannot_be_read_shows_nothing_of_the_datas_row():
    problem = readable_problem({Column.TASK_ENTRY: b'{"question": "2 + 2?", "answer": 4}'}, b"\xc1")
    assert (problem["question"], problem["prompt"], problem["expected"]) == ("", "", "")


async def test_the_newest_come_first_and_the_oldest_go(broker: MemoryBroker, watching: Watching):
    for number in range(MAX_SHOWN):
        await watching.tell(await write(broker, GroupId(f"{number}/0"), ["aa", "b"]))
    shown = list(watching.recent.newest_first)
    assert len(shown) == MAX_SHOWN
    assert [sample["row"] for sample in shown[:2]] == [f"{MAX_SHOWN - 1}/0/0", f"{MAX_SHOWN - 1}/0/1"]


async def test_of_several_the_newest_group_of_training_is_shown(broker: MemoryBroker, watching: Watching):
    ids = [GroupId("0/0"), GroupId("0/1"), evaluation_id(0, 0)]
    await watching.tell(*[await write(broker, group, ["aa", "b"]) for group in ids])
    assert [sample["row"] for sample in watching.recent.newest_first] == ["0/1/0", "0/1/1"]


async def test_of_a_long_text_the_middle_is_left_out_and_it_says_so(broker: MemoryBroker, watching: Watching):
    text = "x" * MAX_RESPONSE_CHARS + "-" * 7 + "y" * MAX_RESPONSE_END
    await watching.tell(await write(broker, GroupId("0/0"), [text]))
    (sample,) = watching.recent.newest_first
    parts = [sample[name] for name in ("response", "response_cut", "response_end")]
    assert parts == ["x" * MAX_RESPONSE_CHARS, 7, "y" * MAX_RESPONSE_END]


@pytest.mark.parametrize("entry", [b"\xff", b"[1]", b"{}", b'{"question": 7, "answer": null}', b"[" * 100_000])
def test_a_problem_that_nobody_wrote_down_is_empty(entry: bytes):
    problem = readable_problem({Column.TASK_ENTRY: entry})
    assert (problem["question"], problem["expected"]) == ("", "")


async def test_after_a_group_that_is_gone_the_next_one_is_looked_for_soon(broker: MemoryBroker, watching: Watching):
    gone = await write(broker, GroupId("0/0"), ["aa", "b"])
    await broker.drop_groups([GroupId("0/0")])
    assert await watching.tell(gone) == GONE_REST_S
    assert await watching.tell(await write(broker, GroupId("0/1"), ["some", "all"])) == REST_S
    assert [sample["row"] for sample in watching.recent.newest_first] == ["0/1/0", "0/1/1"]


async def test_foreign_rows_are_left_out(broker: MemoryBroker, watching: Watching):
    foreign = {Column.RESPONSE_IDS: b"123", Column.ROLLOUT_INFO: b"\xc1"}
    await broker.commit(Commit(groups=[GroupWrite(group_id=GroupId("0/2"), size=1, columns={})]))
    await broker.commit(Commit(rows=[RowWrite(row_id=row_id(GroupId("0/2"), 0), columns=foreign)]))
    await watching.tell(GroupScored(group_id=GroupId("0/2"), rewards=(1.0,), response_tokens=(1,), signal=True))
    assert (list(watching.recent.newest_first), watching.kept) == ([], [])


async def test_without_a_tokenizer_nothing_is_shown_and_it_is_asked_for_once(broker: MemoryBroker):
    tokenizer = Tokenizer(missing=True)
    recent = RecentSamples(RowStore(broker), tokenizer.load)
    recent.on_events([await write(broker, GroupId("0/0"), ["a"])])
    await recent.watch()
    assert (list(recent.newest_first), tokenizer.loads) == ([], 1)


def test_equal_rewards_give_one_sample():
    assert best_and_worst([0.5, 0.5]) == [0]
    assert best_and_worst([0.0, 1.0, -1.0]) == [1, 2]
