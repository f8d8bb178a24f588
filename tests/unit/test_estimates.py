"""What an advantages task writes of a group's rows, by what it reads of them. Pure: no broker, no torch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.broker.base import Commit, GroupWrite, RowWrite
from transport.contracts.messages import RolloutInfo, encode
from transport.contracts.settings import AlgorithmSettings, DataPart, DataSettings, Settings
from transport.contracts.types import (
    Column,
    FinishReason,
    RunName,
    VersionSpan,
    WeightIdentity,
    WorkerId,
    group_id,
    row_id,
)
from transport.errors import MessageError
from transport.rows.columns import RowStore, decode_array, decode_scalar, encode_array
from workers.errors import AlgorithmError
from workers.scoring.estimates import OfSamples, OfTokens, estimates_of
from workers.scoring.tasks import AdvantageTask, Unit

OWN = "tests.fakes.algorithms:later_less"
MIXED = Settings(
    data=DataSettings(
        mix={
            "tokens": DataPart(advantage=OWN),
            "others": DataPart(advantage="rloo", overlong_share=0.5),
            "rest": DataPart(loss="gspo"),
        }
    ),
    algorithm=AlgorithmSettings(advantage="mean_only"),
)

INFO = encode(
    RolloutInfo(
        worker_id=WorkerId("generate-0.1"),
        finish_reason=FinishReason.STOP,
        prompt_tokens=1,
        response_tokens=2,
        spans=(VersionSpan(start=0, end=2, weights=WeightIdentity(epoch=1, version=0)),),
    )
)


def row(tokens: int, mask: list[int] | None = None) -> dict[Column, bytes]:
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, range(tokens)),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [-1.0] * tokens),
    }
    return columns | ({Column.LOSS_MASK: encode_array(Column.LOSS_MASK, np.array(mask, np.uint8))} if mask else {})


def test_each_part_has_its_own_and_what_has_none_is_the_runs():
    estimates = estimates_of(MIXED, OWN, "")
    assert estimates.keys() == {"", "tokens", "others", "rest"}
    assert isinstance(estimates["tokens"], OfTokens)
    rewards = np.array([0.0, 1.0, 2.0], np.float32)
    for part, expected in (("", [-1, 0, 1]), ("rest", [-1, 0, 1]), ("others", [-1.5, 0, 1.5])):
        assert isinstance(estimates[part], OfSamples)
        written = estimates[part].written(rewards, [row(1)] * 3)
        assert [float(columns[Column.ADVANTAGE][0]) for columns in written] == pytest.approx(expected)
        assert estimates[part].has_signal(rewards, written)
        assert not estimates[part].has_signal(np.ones(3, np.float32), written)
    with pytest.raises(AlgorithmError, match="start it with --advantage"):
        estimates_of(MIXED, "", "")


def test_a_number_for_each_token_and_their_mean_as_that_of_the_row():
    estimate = estimates_of(MIXED, OWN, "")["tokens"]
    rows = [row(1), row(3), row(4, [1, 0, 1, 1])]
    written = estimate.written(np.array([0.0, 1.0, 2.0], np.float32), rows)
    expected = [[-1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.25, 0.125]]
    assert [one[Column.TOKEN_ADVANTAGES].tolist() for one in written] == expected
    assert [float(one[Column.ADVANTAGE][0]) for one in written] == pytest.approx([-1.0, 0.0, 1.375 / 3])
    assert estimate.has_signal(np.zeros(3, np.float32), written), "the function knows, not the spread of rewards"
    silent = estimate.written(np.zeros(3, np.float32), rows)
    assert not estimate.has_signal(np.zeros(3, np.float32), silent)


async def scored(part: object, *, without: Column | None = None) -> tuple[RowStore, Commit]:
    """What the task does of a group of two rows with the rewards 0 and 1. without: what was lost of the second."""
    broker = MemoryBroker(MemoryServer(), RunName("scored"))
    store, group = RowStore(broker), group_id(0, 0)
    entry = {Column.TASK_ENTRY: json.dumps({"part": part}).encode()}
    await store.commit(Commit(groups=(GroupWrite(group_id=group, size=2, columns=entry),)))
    for sample in (0, 1):
        columns = {**row(2), Column.REWARD: encode_array(Column.REWARD, [float(sample)]), Column.ROLLOUT_INFO: INFO}
        kept = {column: raw for column, raw in columns.items() if not sample or column is not without}
        await store.commit(Commit(rows=(RowWrite(row_id=row_id(group, sample), columns=kept),)))
    estimates = estimates_of(MIXED, OWN, "")
    worker = WorkerId("score-0.1")
    task = AdvantageTask(store, worker, MIXED.algorithms, estimates, max_group_size=2, max_tokens=8, mixed=True)
    return store, await task(Unit(unit_id=group, group_id=group))


async def test_the_task_writes_what_the_part_of_a_group_has():
    for part, of_tokens, first in (("tokens", [[-0.5, -0.25], [0.5, 0.25]], -0.375), ("rest", None, -0.5)):
        _, commit = await scored(part)
        columns = [write.columns for write in commit.rows]
        assert decode_scalar(Column.ADVANTAGE, columns[0][Column.ADVANTAGE]) == pytest.approx(first)
        assert ([Column.TOKEN_ADVANTAGES in one for one in columns] == [True, True]) == (of_tokens is not None)
        if of_tokens is not None:
            found = [decode_array(Column.TOKEN_ADVANTAGES, one[Column.TOKEN_ADVANTAGES]).tolist() for one in columns]
            assert found == of_tokens


async def test_rows_that_lost_what_an_estimator_reads_are_asked_for_again():
    _, commit = await scored("tokens", without=Column.ROLLOUT_LOGPROBS)
    assert not commit.rows
    assert [entry.entry.fields["row"] for entry in commit.appends] == ["0/0/1"]
    _, whole = await scored("rest", without=Column.ROLLOUT_LOGPROBS)
    assert len(whole.rows) == 2, "an estimator of samples reads rewards alone"


async def test_a_group_whose_part_cannot_be_read_is_named():
    with pytest.raises(MessageError, match="names no part"):
        await scored(7)
