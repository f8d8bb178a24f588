"""Silence counts only while it could be observed; leases that appear become members."""

from __future__ import annotations

import asyncio

import msgspec

from orchestrator.loop.intake import RETURN_POLLS, Membership, Newcomers, SilenceClock, new_inbox
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.contracts.messages import STARTING, WorkerJoined, WorkerStatus, encode
from transport.contracts.types import PROTOCOL_VERSION, RunName, WorkerId, WorkerKind

A, B = WorkerId("generate-0.1"), WorkerId("generate-1.1")


def status(worker: WorkerId, doing: str = "decoding") -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker, kind=WorkerKind.GENERATE, host="h", pid=1, protocol=PROTOCOL_VERSION, doing=doing
    )


def test_a_silent_worker_is_lost_once_after_its_lease():
    clock = SilenceClock(lease_s=2.0)
    lost = [clock.poll([A, B], [B], now_s) for now_s in (0.0, 1.0, 2.0, 3.0)]
    assert lost == [[], [], [], [A]]


def test_a_worker_that_answers_again_starts_anew():
    clock = SilenceClock(lease_s=1.5)
    alive: list[list[WorkerId]] = [[A], [], [A], [], [], []]
    lost = [clock.poll([A], living, float(second)) for second, living in enumerate(alive)]
    assert lost == [[], [], [], [], [A], []]


def test_an_outage_of_the_broker_costs_nobody_a_place():
    clock = SilenceClock(lease_s=2.0)
    assert clock.poll([A], [A], 0.0) == []
    assert clock.poll([A], [], 100.0) == []
    assert clock.poll([A], [], 101.0) == []


def test_a_new_lease_joins_at_once_unless_it_is_still_starting():
    newcomers = Newcomers()
    assert [found.worker_id for found in newcomers.poll([], {A: status(A), B: status(B, STARTING)})] == [A]


def test_a_worker_given_up_must_be_seen_several_times_to_return():
    newcomers = Newcomers()
    newcomers.poll([A], {A: status(A)})
    answers = [newcomers.poll([], {A: status(A)}) for _ in range(RETURN_POLLS)]
    assert [len(found) for found in answers] == [0] * (RETURN_POLLS - 1) + [1]


async def test_a_worker_of_another_protocol_and_one_that_cannot_be_read_never_join():
    broker = MemoryBroker(MemoryServer(), RunName("r"))
    newer = msgspec.structs.replace(status(A), protocol=PROTOCOL_VERSION + 1)
    await broker.beat(A, encode(newer), ttl_s=60.0)
    await broker.beat(WorkerId("generate-2.1"), b"\xc1 not a status", ttl_s=60.0)
    placed = msgspec.structs.replace(status(B), host_id="0123", site="east")
    await broker.beat(B, encode(placed), ttl_s=60.0)
    membership, inbox = Membership(broker, 10.0, ManualClock()), new_inbox()
    watching = asyncio.create_task(membership.watch(inbox, lambda: []))
    arrival = await asyncio.wait_for(inbox.get(), timeout=30)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(arrival.event, WorkerJoined)
    assert arrival.event.worker_id == B
    assert (arrival.event.host_id, arrival.event.site) == ("0123", "east")
    assert inbox.empty()
    assert set(membership.statuses) == {B}
