"""When a broker counts as away, whatever keeps it from answering, and the lines that say so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

import pytest
import structlog

from tests.fakes.manual_clock import ManualClock
from transport.broker import redis_link
from transport.broker.reach import SAY_AFTER_S, Reach, reason_of
from transport.broker.redis_link import RedisLink
from transport.errors import BrokerUnavailableError

REFUSED, UNNAMED = ConnectionRefusedError(111, "refused"), socket.gaierror(-3, "no name")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the log says, in order."""
    lines = list[str]()

    def keep(_: object, __: str, event: MutableMapping[str, Any]) -> NoReturn:
        lines.append(event["event"])
        raise structlog.DropEvent

    configured = structlog.get_config()
    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    yield lines
    structlog.configure(**configured)


def fails(reach: Reach, error: BaseException) -> None:
    reach.failed(reach.sent(), error)


def is_silent(reach: Reach) -> None:
    reach.sent()


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (lambda reach: fails(reach, REFUSED), "connection refused"),
        (lambda reach: fails(reach, UNNAMED), "name does not resolve"),
        (is_silent, "no answer"),
    ],
    ids=["refused", "no name", "silent"],
)
async def test_an_outage_of_any_cause_is_said_once_and_so_is_its_end(
    begin: Callable[[Reach], None], reason: str, said: list[str]
):
    clock = ManualClock()
    reach = Reach("redis:6379", 60.0, now_s=clock.now_s)
    reach.answered(reach.sent())
    begin(reach)
    clock.advance(SAY_AFTER_S - 0.1)
    reach.look()
    assert (said, reach.away()) == ([], None)
    clock.advance(0.1)
    reach.look()
    clock.advance(20.0)
    reach.look()
    assert said == [f"broker redis:6379 is away since 2 s ({reason}), waiting until 60 s"]
    assert str(reach.away()) == f"broker redis:6379 is away since 22 s ({reason}), waiting until 60 s"
    reach.answered(reach.sent())
    assert reach.away() is None
    assert said[1:] == ["broker redis:6379 is back after 22 s"]
    reach.close()


async def test_an_answer_that_a_broker_may_hold_back_is_not_late_before_its_time():
    clock = ManualClock()
    reach = Reach("redis:6379", 60.0, now_s=clock.now_s)
    waits = reach.sent(block_s=5.0)
    clock.advance(5.0 + SAY_AFTER_S - 0.1)
    assert reach.away() is None
    reach.answered(reach.sent())  # another connection: the broker lives
    clock.advance(SAY_AFTER_S)
    assert reach.away() is None
    reach.failed(waits, TimeoutError())
    reach.close()


async def test_the_last_answers_of_a_broker_whose_packets_are_dropped_do_not_vouch_for_it(said: list[str]):
    """What it owed when the wall went up still comes out: a read that it held back."""
    clock = ManualClock()
    reach = Reach("redis:6379", 60.0, now_s=clock.now_s)
    first, second = reach.sent(block_s=2.0), reach.sent(block_s=5.0)
    clock.advance(0.5)
    reach.sent()  # a heartbeat that never arrives
    clock.advance(2.0)
    reach.answered(first)
    clock.advance(SAY_AFTER_S - 2.0)
    reach.look()
    assert said == ["broker redis:6379 is away since 2 s (no answer), waiting until 60 s"]
    clock.advance(1.0)
    reach.answered(second)
    assert len(said) == 1
    reach.answered(reach.sent())
    assert len(said) == 2
    reach.close()


async def test_an_exchange_that_nobody_waits_for_says_nothing_of_the_broker():
    clock = ManualClock()
    reach = Reach("redis:6379", 60.0, now_s=clock.now_s)
    reach.dropped(reach.sent())
    clock.advance(60.0)
    assert reach.away() is None
    reach.close()


async def test_a_process_that_stood_still_judges_nobody_before_it_has_read_what_came(said: list[str]):
    clock = ManualClock()
    reach = Reach("redis:6379", 60.0, now_s=clock.now_s)
    number = reach.sent()
    clock.advance(60.0)
    reach.on_timer()
    assert said == []
    reach.answered(number)
    assert said == []
    reach.close()


def test_the_reason_is_what_people_can_act_on():
    outer = RuntimeError("Error -3 connecting to broker:6379")
    outer.__context__ = UNNAMED  # as where redis-py raises its own
    assert reason_of(outer) == "name does not resolve"
    assert reason_of(RuntimeError("LOADING the dataset\nmore")) == "LOADING the dataset"


async def test_a_name_that_does_not_resolve_keeps_to_the_bound_and_leaves_no_noise(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
):
    """A resolver that hangs, too: it is asked once, not by the event loop's own threads, and nobody waits for it."""
    asked, release = list[str](), asyncio.Event()
    loop, noise = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: noise.append(context))

    def look_up(host: str, *_: object, **__: object) -> Any:
        asked.append(host)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30.0)
        raise UNNAMED

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    link = RedisLink("redis://broker:6379", outage_s=0.05, timeout_s=0.02)
    with pytest.raises(BrokerUnavailableError):
        await asyncio.gather(*(link.command("PING") for _ in range(3)))
    assert asked == ["broker"]
    looking = redis_link.look_up("broker")
    release.set()
    with pytest.raises(socket.gaierror):
        await asyncio.wrap_future(looking)
    with pytest.raises(BrokerUnavailableError, match="no name") as failed:
        await link.command("PING")
    assert reason_of(failed.value) == "name does not resolve"
    await link.close()
    assert noise == []
