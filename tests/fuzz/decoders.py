"""Every decoder of bytes that another process sent: a value comes out, or the one documented error.

An input is ``(name of the decoder, bytes)``. What decodes can be encoded again and decodes to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from tests.fuzz.harness import CheckFailedError, Target, unopened
from tests.fuzz.hostile import damaged, packed, raw_message, text
from transport.broker.base import check_entry, entry_from_fields, parse_entry_id
from transport.contracts import messages
from transport.contracts.ledger import Ledger
from transport.contracts.types import Column, RowId, parse_row_id
from transport.contracts.user_files import ModelIdentity
from transport.errors import MessageError
from transport.rows import columns, unit_rows, units
from transport.tensors import tcp, wire
from transport.tensors.base import parse_address
from transport.tensors.manifest import check_manifest
from workers.client import consumption, tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """decode: what is tried.  make: its input.  errors: what it says to raise."""

    decode: Callable[[bytes], object]
    make: Callable[[Random], bytes]
    errors: tuple[type[Exception], ...] = (MessageError,)


def _of_message(decoder: messages.MessageDecoder[Any], kind: object) -> Decoder:
    """A decoder of MessagePack: what came out goes in again."""

    def there_and_back(raw: bytes) -> None:
        decoded = decoder.decode(raw)
        again = messages.encode(decoded)
        if len(again) <= messages.MAX_MESSAGE_BYTES and messages.encode(decoder.decode(again)) != again:
            raise CheckFailedError(f"{type(decoded).__name__} is another after it was sent on")

    return Decoder(decode=there_and_back, make=lambda random: raw_message(random, kind))


def _of_text(decode: Callable[[str], object], *errors: type[Exception]) -> Decoder:
    return Decoder(
        decode=lambda raw: decode(raw.decode(errors="replace")),
        make=lambda random: _some_text(random).encode(errors="replace"),
        errors=errors,
    )


def _some_text(random: Random) -> str:
    """One string, or several put together: an address of a wrong port, an id of foreign digits."""
    parts = [text(random) for _ in range(random.choice((1, 1, 2, 3)))]
    return random.choice(("", "/", ":", "-", "tcp://h:1/")).join(parts)


def _array(random: Random) -> bytes:
    elements = random.randbytes(4 * random.randrange(6))
    return random.choice((elements, damaged(random, elements), b"", b"\xff" * 8, b"\x00\x00\x80\x7f"))


def _column_value(random: Random) -> bytes:
    value = random.choice(([1, 2, 3], [[1.0], [2.0]], "text", [True], [2**40]))
    try:
        raw = columns.encode_value(value)
    except ValueError:
        raw = b""
    return random.choice((raw, damaged(random, raw), raw[:10] + damaged(random, raw[10:])))


def _row(raw: bytes) -> None:
    row = msgspec.msgpack.decode(raw, type=dict[str, bytes])
    columns.check_columns({Column(name): value for name, value in row.items()})


def _row_input(random: Random) -> bytes:
    info = raw_message(random, messages.RolloutInfo)
    known = (
        *(Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.LOSS_MASK, Column.REWARD, Column.REFERENCE_LOGPROBS),
        Column.BRANCH_ENDS,
    )
    row = {str(column): _array(random) for column in known if random.random() < 0.6}
    return packed(row | ({str(Column.ROLLOUT_INFO): info} if random.random() < 0.7 else {}))


def _entry(raw: bytes) -> None:
    entry = entry_from_fields(msgspec.msgpack.decode(raw, type=list[bytes]))
    check_entry(entry)


def _entry_input(random: Random) -> bytes:
    pairs: Sequence[bytes] = [
        random.choice((b"payload", b"unit", random.randbytes(3))) for _ in range(random.randrange(4))
    ]
    return packed([part for name in pairs for part in (name, random.randbytes(5))])


def _manifest(raw: bytes) -> None:
    check_manifest(messages.manifest_decoder.decode(raw))


def _locator(raw: bytes) -> None:
    found = unit_rows.locator_decoder.decode(raw)
    messages.encode(found)


def _locator_input(random: Random) -> bytes:
    return raw_message(random, unit_rows.Locator)


def _manifest_input(random: Random) -> bytes:
    return raw_message(random, messages.WeightManifest)


def _ledger(raw: bytes) -> None:
    ledger = Ledger.from_bytes(raw)
    ledger.rows()
    ledger.add(0, [RowId("0/0/0")])
    Ledger.from_bytes(ledger.to_bytes())


def _ledger_input(random: Random) -> bytes:
    if random.random() < 0.5:
        return raw_message(random, Ledger)
    passes = {random.randrange(-1, 3): {0: {random.randrange(-1, 9): random.choice((1, 255, -1, 2**63, 0))}}}
    return packed({"version": 1, "cursor": "1-0", "passes": passes})


DECODERS: dict[str, Decoder] = {
    "event": _of_message(messages.event_decoder, messages.ReportedEvent),
    "trainer command": _of_message(messages.trainer_command_decoder, messages.TrainerCommand),
    "worker command": _of_message(messages.worker_command_decoder, messages.WorkerCommand),
    "group plan": _of_message(messages.group_plan_decoder, messages.GroupPlan),
    "spawn": _of_message(messages.spawn_decoder, messages.SpawnWorkers),
    "update": _of_message(messages.update_decoder, messages.UpdateRequest),
    "status": _of_message(messages.worker_status_decoder, messages.WorkerStatus),
    "rollout info": _of_message(messages.rollout_info_decoder, messages.RolloutInfo),
    "journal record": _of_message(messages.MessageDecoder(messages.JournalRecord), messages.JournalRecord),
    "model identity": _of_message(messages.MessageDecoder(ModelIdentity), ModelIdentity),
    "hello": _of_message(wire._hello_decoder, wire.Hello),
    "proof": _of_message(wire._proof_decoder, wire.Proof | wire.Refused),
    "tensor request": _of_message(tcp.read_range_decoder, tcp.ReadRange),
    "tensor answer": _of_message(tcp._answer_decoder, tcp.RangeFollows | wire.Refused),
    "unit request": _of_message(units._request_decoder, units.UnitRequest),
    "unit values": _of_message(units._values_decoder, units.Values | wire.Refused),
    "unit allocated": _of_message(units._allocated_decoder, units.Allocated | wire.Refused),
    "task options": _of_message(tasks._options_decoder, tasks.TaskOptions),
    "portion": _of_message(consumption._part_decoder, consumption.Part),
    "manifest": Decoder(decode=_manifest, make=_manifest_input),
    "locator": Decoder(decode=_locator, make=_locator_input),
    "ledger": Decoder(decode=_ledger, make=_ledger_input),
    "column": Decoder(decode=lambda raw: columns.decode_array(Column.RESPONSE_IDS, raw), make=_array),
    "scalar": Decoder(decode=lambda raw: columns.decode_scalar(Column.REWARD, raw), make=_array),
    "user column": Decoder(decode=lambda raw: columns.decode_value(Column("x_a"), raw), make=_column_value),
    "user columns": Decoder(
        decode=lambda raw: columns.decode_table(Column("x_a"), [raw, raw]) if raw else None, make=_column_value
    ),
    "row": Decoder(decode=_row, make=_row_input),
    "entry": Decoder(decode=_entry, make=_entry_input, errors=(MessageError, ValueError)),
    "entry id": _of_text(parse_entry_id, ValueError),
    "row id": _of_text(lambda word: parse_row_id(RowId(word)), ValueError),
    "address": _of_text(parse_address, MessageError),
}


def make(random: Random) -> bytes:
    name = random.choice(list(DECODERS))
    return packed((name, DECODERS[name].make(random)))


def check(content: bytes) -> None:
    name, raw = msgspec.msgpack.decode(content, type=tuple[str, bytes])
    decoder = DECODERS[name]
    try:
        decoder.decode(raw)
    except decoder.errors:
        return


TARGET = Target(name="decoders", make=make, opened=unopened(check), num_inputs=4000)
