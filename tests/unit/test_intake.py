"""The events log is written by everybody: what is no event is buried and passed over, also after a restart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.errors import EventFailedError
from orchestrator.journal import Journal, read_records
from orchestrator.loop.decide import Decider, Trimmer
from orchestrator.loop.execute import Executor
from orchestrator.loop.intake import MAX_BURIED, MAX_EVIDENCE_BYTES, Arrival, burying, new_inbox, read_events
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import ZERO_ID, DeadLetter, Entry, Fence
from transport.contracts.messages import Event, StopRequested, WorkerStarted, encode
from transport.contracts.types import RunName
from transport.process.clock import MonotonicClock

GOOD = StopRequested(reason="the end")
WEIGHTS = {"epoch": 1, "version": 0}
ROLLOUT = {
    "type": "RolloutFinished",
    "row_id": "0/0/0",
    "worker_id": "generate-0.1",
    "response_tokens": 3,
    "finish_reason": "stop",
    "oldest": WEIGHTS,
    "newest": WEIGHTS,
}
SCORED = {"type": "GroupScored", "group_id": "0/0", "rewards": [1.0], "response_tokens": [3], "signal": True}
READY = {"type": "TrainerReady", "worker_id": "train-0.1", "weights": WEIGHTS}
REPORTED = {"type": "WorkerReported", "worker_id": "generate-0.1"}
SAVED = {"type": "CheckpointSaved", "weights": WEIGHTS, "cursor": "1-0", "path": "x"}
BAD: dict[str, dict[str, Any]] = {
    "a row id of one part": ROLLOUT | {"row_id": "nonsense"},
    "a row id without a number": ROLLOUT | {"row_id": "0/0/x"},
    "a digit that int() does not take": ROLLOUT | {"row_id": "0/0/²"},
    "a digit of another script": ROLLOUT | {"row_id": "0/0/٣"},
    "a number too long for int()": ROLLOUT | {"row_id": "0/0/" + "9" * 5000},
    "a line behind the row id": ROLLOUT | {"row_id": "0/0/0\n"},
    "fewer tokens than none": ROLLOUT | {"response_tokens": -1},
    "more tokens than a state can add": ROLLOUT | {"response_tokens": 2**63 - 1},
    "seconds that are no number": ROLLOUT | {"engine_s": math.nan},
    "a version below the first": ROLLOUT | {"oldest": {"epoch": 1, "version": -2}},
    "a batch that is no number": SCORED | {"group_id": "x/0"},
    "a reward that is no number": SCORED | {"rewards": [math.inf]},
    "a sample before the first": {
        "type": "RolloutFailed",
        "group_id": "0/0",
        "worker_id": "generate-0.1",
        "samples": [-9],
        "reason": "x",
    },
    "a cursor that is none": REPORTED | {"plans_cursor": "a-b"},
    "a cursor beyond 64 bits": SAVED | {"cursor": "99999999999999999999-0"},
    "no ranks": READY | {"dp_size": 0},
    "a worker without a name": REPORTED | {"worker_id": ""},
    "rows of nowhere": {"type": "RowsMissing", "row_ids": ["0/0/0", "../../etc/passwd"]},
    "what only the orchestrator tells itself": {"type": "BrokerUsage", "retained_bytes": 2**62},
    "prompts from outside": {"type": "PromptsArrived", "prompts": [], "source_positions": ["1"]},
}


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), RunName("run"))


async def tell(broker: MemoryBroker, *payloads: bytes) -> list[str]:
    ids = [await broker.append(keys.EVENTS, Entry(fields={"by": "a test"}, payload=payload)) for payload in payloads]
    return [entry_id for entry_id in ids if entry_id is not None]


async def first_event(broker: MemoryBroker) -> Arrival:
    """What an orchestrator that starts now reads first."""
    inbox = new_inbox()
    task = asyncio.create_task(read_events(broker, inbox, ZERO_ID))
    async with asyncio.timeout(5):
        arrival = await inbox.get()
    task.cancel()
    return arrival


async def letters(broker: MemoryBroker) -> list[DeadLetter]:
    return await broker.dead_letters(count=2 * MAX_BURIED)


@pytest.mark.parametrize("what", BAD)
async def test_what_is_no_event_is_buried_with_its_reason_and_the_next_one_counts(broker: MemoryBroker, what: str):
    raw = msgspec.msgpack.encode(BAD[what])
    bad, good = await tell(broker, raw, encode(GOOD))
    assert await first_event(broker) == Arrival(GOOD, good)
    (letter,) = await letters(broker)
    assert (letter.queue, letter.entry_id, letter.entry.payload) == (keys.EVENTS, bad, raw[:MAX_EVIDENCE_BYTES])
    assert "not a valid message" in letter.reason


@pytest.mark.parametrize("good", [ROLLOUT, SCORED, READY, REPORTED, SAVED], ids=lambda event: event["type"])
async def test_the_same_events_without_the_lie_are_taken(broker: MemoryBroker, good: dict[str, Any]):
    await tell(broker, msgspec.msgpack.encode(good))
    assert type((await first_event(broker)).event).__name__ == good["type"]


async def test_a_bad_entry_is_buried_once_however_often_it_is_read(broker: MemoryBroker):
    await tell(broker, b"\xc1garbage", encode(GOOD))
    for _ in range(3):
        await first_event(broker)
    assert len(await letters(broker)) == 1


async def test_who_writes_bad_entries_without_end_fills_no_memory(broker: MemoryBroker):
    await tell(broker, *[b"\xc1" * 100_000] * (MAX_BURIED + 5), encode(GOOD))
    assert (await first_event(broker)).event == GOOD
    kept = await letters(broker)
    assert len(kept) == MAX_BURIED
    assert all(len(letter.entry.payload) == MAX_EVIDENCE_BYTES for letter in kept)


@dataclass
class OneBug:
    """Makes the core fail on one kind of event, as a bug of it would, half way."""

    state: PipelineState

    def __post_init__(self) -> None:
        apply = self.state._apply

        def failing(event: Event) -> None:
            apply(event)
            if isinstance(event, WorkerStarted):
                raise KeyError("a bug")

        self.state._apply = failing  # type: ignore[method-assign]


def decider(broker: MemoryBroker, directory: Path, journal: Journal, written: asyncio.Event) -> Decider:
    state = OneBug(PipelineState(CoreSettings(num_batches=2, groups_per_batch=1, group_size=1))).state
    nobody: Any = None
    executor = Executor(broker, Fence(role="orchestrator", epoch=1), nobody, nobody, lambda reason: None, last_seq=0)
    clock = MonotonicClock()
    return Decider(
        state,
        journal,
        executor,
        Trimmer(broker),
        clock,
        ZERO_ID,
        observe=lambda event, commands, now_s: None,
        on_events=lambda _: written.set(),
    )


async def orchestrate(broker: MemoryBroker, directory: Path) -> Sequence[Event]:
    """One life of an orchestrator: read the log and decide, until something is in the journal, or an event fails."""
    journal, _ = Journal.open(directory / "journal")
    inbox, written = new_inbox(), asyncio.Event()
    try:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            loops = [
                group.create_task(read_events(broker, inbox, ZERO_ID)),
                group.create_task(burying(decider(broker, directory, journal, written).run(inbox), broker)),
            ]
            await written.wait()
            for loop in loops:
                loop.cancel()
    finally:
        journal.close()
    return [record.event for record in read_records(directory / "journal")]


async def test_an_event_that_the_core_fails_on_ends_one_life_of_the_orchestrator_not_the_run(
    broker: MemoryBroker, tmp_path: Path
):
    poison = WorkerStarted(name="generate-1", reason="x")
    entry_id, _ = await tell(broker, encode(poison), encode(GOOD))
    with pytest.RaisesGroup(pytest.RaisesExc(EventFailedError, match=f"WorkerStarted, entry {entry_id}.*KeyError")):
        await orchestrate(broker, tmp_path)
    assert list(read_records(tmp_path / "journal")) == [], "what failed is no history"
    (letter,) = await letters(broker)
    assert (letter.queue, letter.entry_id, letter.entry.payload) == (keys.EVENTS, entry_id, encode(poison))
    assert await orchestrate(broker, tmp_path) == [GOOD]
