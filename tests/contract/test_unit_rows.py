"""Rows in storage units: what the broker keeps of them, and units that are full, gone or new."""

from __future__ import annotations

import pytest

from tests.fakes.stored_rows import BOTH, GROUP, admit, ids_of, new_unit, response
from transport.broker.base import Broker, Commit
from transport.errors import ChecksumError, PeerRejectedError, PeerUnavailableError
from transport.tensors.endpoint import Endpoint
from transport.tensors.manifest import checksum
from transport.types import group_id, row_id
from transport.unit_rows import UNIT_COLUMNS, UnitRows
from transport.units import GroupParts, Part, StorageUnit, UnitClient

VALUE = GroupParts(group_id=GROUP, parts=(Part(key="key", nbytes=5, checksum=checksum(b"value")),))


async def test_the_broker_holds_no_bulky_column(unit_rows: UnitRows, broker: Broker, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    row = row_id(GROUP, 0)
    await unit_rows.commit(Commit(rows=[response(row, list(range(1000)))]))
    (held,) = await broker.read_rows([row], list(UNIT_COLUMNS))
    assert all(len(raw) < 250 for raw in held.values())
    assert units[0].retained_bytes == 8000


async def test_a_lost_insert_takes_its_bytes_back(unit_rows: UnitRows, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    for ids in ([1, 2], [3, 4, 5]):
        await unit_rows.commit(Commit(rows=[response(row_id(GROUP, 0), ids)]))
    assert units[0].retained_bytes == 16


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
    later = UnitRows(broker, [*addresses[1:], new_unit(units)])
    await later.commit(Commit(rows=[response(row_id(groups[0], 1), [1, 2])]))
    assert await ids_of(rows, row_id(groups[0], 1)) == [1, 2]
    await rows.drop_groups(groups)  # the unit that is gone does not stop it
    assert units[2].retained_bytes == 0
    rows.close()
    later.close()


async def test_a_reader_needs_no_list_of_units(unit_rows: UnitRows, broker: Broker, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    await unit_rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1])]))
    second = UnitRows(broker, [new_unit(units)])
    await second.commit(Commit(rows=[response(row_id(GROUP, 1), [2])]))
    reader = UnitRows(broker, [])
    assert [await ids_of(reader, row_id(GROUP, sample)) for sample in (0, 1)] == [[1], [2]]
    await reader.drop_groups([GROUP])
    assert [unit.retained_bytes for unit in units] == [0, 0]
    second.close()
    reader.close()


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
