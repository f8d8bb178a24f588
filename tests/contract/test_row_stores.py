"""One contract over both row stores, each over every broker: the broker's hashes, and storage units beside it."""

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from transport.broker import keys
from transport.broker.base import ZERO_ID, Append, Broker, Commit, Entry, GroupWrite, RowWrite
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError
from transport.rows import BrokerRows, RowStore, decode_array, encode_array
from transport.tensors.endpoint import Endpoint
from transport.tensors.manifest import checksum
from transport.types import Column, GroupId, RowId, TaskSpec, group_id, row_id
from transport.unit_rows import UNIT_COLUMNS, UnitRows
from transport.units import GroupParts, Part, StorageUnit, UnitClient

GROUP = group_id(0, 0)
VALUE = GroupParts(group_id=GROUP, parts=(Part(key="key", nbytes=5, checksum=checksum(b"value")),))
BOTH = (Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS)


@pytest.fixture
def units() -> Iterator[list[StorageUnit]]:
    """Started by the tests that want them, closed here."""
    started: list[StorageUnit] = []
    yield started
    for unit in started:
        unit.close()


def new_unit(units: list[StorageUnit], max_bytes: int = 1 << 20) -> str:
    units.append(StorageUnit(max_bytes=max_bytes))
    return units[-1].start()


@pytest.fixture(params=["broker", "units"])
async def rows(request: pytest.FixtureRequest, broker: Broker, units: list[StorageUnit]) -> AsyncIterator[RowStore]:
    if request.param == "broker":
        yield BrokerRows(broker)
        return
    store = UnitRows(broker, [new_unit(units), new_unit(units)])
    yield store
    store.close()


def admit(*groups: GroupId, size: int = 2) -> Commit:
    prompt = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, [7, 8])}
    return Commit(groups=[GroupWrite(group_id=group, size=size, columns=prompt) for group in groups])


def response(row: RowId, ids: list[int], *, told: str = "") -> RowWrite:
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [-0.5] * len(ids)),
    }
    told_to = [Append(stream=keys.EVENTS, entry=Entry(fields={"told": told}))] if told else []
    return RowWrite(row_id=row, columns=columns, on_insert=told_to)


async def ids_of(rows: RowStore, row: RowId) -> list[int] | None:
    (columns,) = await rows.read_rows([row], BOTH)
    return decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]).tolist() if columns else None


async def test_what_was_committed_is_read(rows: RowStore) -> None:
    await rows.commit(admit(GROUP))
    first, second = row_id(GROUP, 0), row_id(GROUP, 1)
    result = await rows.commit(Commit(rows=[response(first, [1, 2, 3]), response(second, [4])]))
    assert result.inserted == (True, True)
    read = await rows.read_rows([second, first, row_id(GROUP, 9)], BOTH)
    assert [sorted(columns) for columns in read] == [sorted(BOTH), sorted(BOTH), []]
    assert await ids_of(rows, first) == [1, 2, 3]
    assert await ids_of(rows, second) == [4]
    (group,) = await rows.read_groups([GROUP], [Column.PROMPT_IDS])
    assert decode_array(Column.PROMPT_IDS, group[Column.PROMPT_IDS]).tolist() == [7, 8]


async def test_the_first_insert_wins_and_is_told_once(rows: RowStore, broker: Broker) -> None:
    await rows.commit(admit(GROUP))
    row = row_id(GROUP, 0)
    first = await rows.commit(Commit(rows=[response(row, [1], told="first")]))
    second = await rows.commit(Commit(rows=[response(row, [2], told="second")]))
    assert (first.inserted, second.inserted) == ((True,), (False,))
    assert await ids_of(rows, row) == [1]
    assert [entry.entry.fields["told"] for entry in await broker.read(keys.EVENTS, ZERO_ID, count=9)] == ["first"]


async def test_nothing_bad_is_stored(rows: RowStore, broker: Broker) -> None:
    await rows.commit(admit(GROUP))
    bad = RowWrite(
        row_id=row_id(GROUP, 0),
        columns={
            Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, [1, 2]),
            Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [np.nan, 0.0]),
        },
    )
    with pytest.raises(MessageError, match="0/0/0"):
        await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [1]), bad]))
    assert await rows.read_rows([row_id(GROUP, 0), row_id(GROUP, 1)], BOTH) == [{}, {}]


async def test_a_dropped_group_is_gone_and_takes_no_late_rows(rows: RowStore, units: list[StorageUnit]) -> None:
    kept = group_id(0, 1)
    await rows.commit(admit(GROUP, kept))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1, 2]), response(row_id(kept, 0), [3])]))
    assert await rows.drop_groups([GROUP]) >= 8 + 8 + 4 + 4
    late = await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [5, 6])]))
    assert late.inserted == (False,)
    assert await ids_of(rows, row_id(GROUP, 0)) is None
    assert await ids_of(rows, row_id(kept, 0)) == [3]
    await rows.drop_groups([kept])
    assert [unit.retained_bytes for unit in units] == [0] * len(units)


async def test_complete_inputs_start_a_task_wherever_the_bytes_are(rows: RowStore, broker: Broker) -> None:
    await broker.declare_tasks([TaskSpec(name="reward", unit="sample", reads=frozenset({Column.RESPONSE_IDS}))])
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [1])]))
    (notice,) = await broker.claim(keys.tasks("reward"), "score-0.1", count=9)
    assert notice.entry.fields["unit"] == "0/0/1"


# --- storage units ----------------------------------------------------------------------------------------------------


async def test_the_broker_holds_no_bulky_column(broker: Broker, units: list[StorageUnit]) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    await rows.commit(admit(GROUP))
    row = row_id(GROUP, 0)
    await rows.commit(Commit(rows=[response(row, list(range(1000)))]))
    (held,) = await broker.read_rows([row], list(UNIT_COLUMNS))
    assert all(len(raw) < 250 for raw in held.values())
    assert units[0].retained_bytes == 8000
    rows.close()


async def test_a_lost_insert_takes_its_bytes_back(broker: Broker, units: list[StorageUnit]) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    await rows.commit(admit(GROUP))
    for ids in ([1, 2], [3, 4, 5]):
        await rows.commit(Commit(rows=[response(row_id(GROUP, 0), ids)]))
    assert units[0].retained_bytes == 16
    rows.close()


async def test_another_unit_takes_over_from_one_that_is_full_or_gone(broker: Broker, units: list[StorageUnit]) -> None:
    addresses = [new_unit(units), new_unit(units, max_bytes=8)]
    rows = UnitRows(broker, addresses)
    groups = [group_id(0, slot) for slot in range(20)]
    assert len({rows.ranked_units(group)[0] for group in groups}) == 2
    await rows.commit(admit(*groups))
    await rows.commit(Commit(rows=[response(row_id(group, 0), [1, 2]) for group in groups]))
    assert [await ids_of(rows, row_id(group, 0)) for group in groups] == [[1, 2]] * 20
    assert units[1].retained_bytes == 0

    units[0].close()
    with pytest.raises(PeerUnavailableError):
        await rows.commit(Commit(rows=[response(row_id(groups[0], 1), [1, 2])]))
    with pytest.raises(PeerUnavailableError):
        await rows.read_rows([row_id(groups[0], 0)], BOTH)
    rows.add_unit(new_unit(units))
    rows.remove_unit(addresses[0])
    await rows.commit(Commit(rows=[response(row_id(groups[0], 1), [1, 2])]))
    assert await ids_of(rows, row_id(groups[0], 1)) == [1, 2]
    await rows.drop_groups(groups)  # the unit that is gone does not stop it
    assert units[2].retained_bytes == 0
    rows.close()


async def test_rows_of_a_removed_unit_stay_readable(broker: Broker, units: list[StorageUnit]) -> None:
    first = new_unit(units)
    rows = UnitRows(broker, [first])
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1])]))
    rows.add_unit(new_unit(units))
    rows.remove_unit(first)
    await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [2])]))
    other = UnitRows(broker, [])  # a reader needs no list of units
    assert [await ids_of(other, row_id(GROUP, sample)) for sample in (0, 1)] == [[1], [2]]
    await rows.drop_groups([GROUP])
    assert [unit.retained_bytes for unit in units] == [0, 0]
    rows.close()
    other.close()


async def test_a_column_that_a_unit_lost_is_missing(broker: Broker, units: list[StorageUnit]) -> None:
    address = new_unit(units)
    rows = UnitRows(broker, [address])
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1])]))
    units[0].close()
    port = int(address.rpartition("/")[0].rpartition(":")[2])
    units.append(StorageUnit(max_bytes=1 << 20, endpoint=Endpoint(ports=(port,))))  # the unit was restarted, empty
    units[-1].start()
    assert await rows.read_rows([row_id(GROUP, 0)], BOTH) == [{}]
    rows.close()


def test_a_unit_asks_for_the_secret(units: list[StorageUnit]) -> None:
    units.append(StorageUnit(max_bytes=100, endpoint=Endpoint(secret=b"right")))
    address = units[-1].start()
    client = UnitClient(address, secret=b"wrong")
    with pytest.raises(PeerRejectedError):
        client.put([VALUE], [b"value"])
    friend = UnitClient(address, secret=b"right")
    friend.put([VALUE], [b"value"])
    assert units[-1].retained_bytes == 5
    friend.close()


def test_a_value_of_another_size_or_content_than_located_is_refused(units: list[StorageUnit]) -> None:
    client = UnitClient(new_unit(units))
    client.put([VALUE], [b"value"])
    for part in (Part(key="key", nbytes=1 << 40, checksum=""), Part(key="key", nbytes=5, checksum="crc32:00000000")):
        with pytest.raises(ChecksumError):
            client.get([part])
    client.close()
