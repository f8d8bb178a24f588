"""What inspect shows of a broker, and which dead letters may go back."""

from __future__ import annotations

import io
import json

from rich.console import Console

from orchestrator.cli.control import DISPATCHED_AGAIN, FOREIGN, GONE, why_not
from orchestrator.cli.inspect import follow_run, snapshot_line, snapshot_view, take_snapshot
from orchestrator.core.model.settings import CoreSettings
from tests.fakes.explicit_ids import append_at
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.pipeline_world import PipelineWorld
from transport.broker import keys
from transport.broker.base import Commit, Entry, GroupWrite
from transport.contracts.messages import GroupScored, ScoringFailed, WorkerStatus, encode
from transport.contracts.types import Column, GroupId, RunName, WorkerId, WorkerKind

TIME_S = 1_763_627_143.0
STATUS = {"elapsed_s": 12.0, "trained_version": 3, "num_batches": 9, "newest": {"epoch": 1, "version": 3}}
BLOCKED = {"stage": "scoring", "waits_for": "the scores of 2 groups", "owner": "score-0.1", "still_s": 70.0}
REWARDS = keys.tasks("reward")


def notice(group: str) -> Entry:
    return Entry(fields={"task": "reward", "unit": f"{group}/1", "group": group})


class World:
    """A broker with two waiting units, one of them held for 4 s, and a worker."""

    def __init__(self) -> None:
        self.clock = ManualClock(TIME_S)
        self.broker = MemoryBroker(MemoryServer(self.clock), RunName("r"))

    async def fill(self) -> None:
        await self.broker.enqueue(REWARDS, notice("0/0"))
        self.clock.advance(1.0)
        await self.broker.enqueue(REWARDS, notice("0/\x1b[31m1"))
        await self.broker.claim(REWARDS, "score-0.1", count=1)
        await append_at(self.broker, keys.plans(WorkerId("generate-0.1")), notice("1/0"), "7-0", is_queue=True)
        status = WorkerStatus(
            worker_id=WorkerId("score-0.1"),
            kind=WorkerKind.SCORE,
            host="here",
            site="east",
            pid=7,
            protocol=1,
            doing="scoring",
        )
        await self.broker.beat(status.worker_id, encode(status), ttl_s=60.0)
        await self.broker.beat(WorkerId("foreign"), b"\xc1", ttl_s=60.0)
        self.clock.advance(4.0)

    async def bury(self, queue: str, entry: Entry) -> None:
        await self.broker.enqueue(queue, entry)
        (delivery,) = await self.broker.claim(queue, "c", count=1)
        await self.broker.reject(delivery, "it raised")

    async def tell(self, status: dict) -> None:
        await self.broker.put_meta(keys.STATUS, json.dumps(status).encode())

    async def view(self) -> str:
        out = io.StringIO()
        snapshot = await take_snapshot(self.broker, now_ms=int(self.clock.now_s() * 1000))
        Console(file=out, width=200).print(snapshot_view(snapshot))
        return out.getvalue()


def row(shown: str, *words: str) -> list[str]:
    (line,) = [line for line in shown.splitlines() if all(word in line for word in words)]
    return line.split()


async def test_the_oldest_entries_are_shown_with_age_holder_idle_and_deliveries():
    world = World()
    await world.fill()
    shown = await world.view()
    assert row(shown, REWARDS, "0/0/1")[2:] == ["5.0", "s", "0/0/1", "score-0.1", "4.0", "s", "1"]
    assert row(shown, REWARDS, "31m1")[2:] == ["4.0", "s", "0/[31m1/1"], "waits for a holder; escapes are stripped"
    assert row(shown, "plans:", "7-0") == ["plans:generate-0.1", "7-0", "1/0/1"], "a chosen id tells no time"
    assert row(shown, REWARDS, "4.0 s", "2 ")[:4] == [REWARDS, "2", "1", "4.0"]
    assert row(shown, "scoring")[:2] == ["score-0.1", "scoring"]
    assert "here in east" in shown
    assert shown.startswith("0.0 MB of rows retained"), "how far it is, only a live orchestrator knows"


async def test_what_blocks_is_said_first():
    world = World()
    await world.fill()
    await world.tell({**STATUS, "blocked": BLOCKED})
    first, second, *_ = (await world.view()).splitlines()
    assert first.startswith("trained 3/9  newest weights e1v3")
    assert second.startswith("blocked: scoring waits for the scores of 2 groups; to act: score-0.1; no progress for 70")
    line = snapshot_line(await take_snapshot(world.broker, now_ms=int(world.clock.now_s() * 1000)))
    assert line.startswith("12 s  trained 3/9  plans:generate-0.1 1 (0 held)  tasks:reward 2 (1 held, oldest 5.0 s)")
    assert "blocked: scoring" in line


async def test_dead_letters_are_shown_with_id_and_reason_and_the_rest_is_counted():
    world = World()
    for number in range(25):
        await world.bury(REWARDS, notice(f"{number}/0"))
    (letter, *_) = await world.broker.dead_letters()
    shown = await world.view()
    assert f"dead {letter.letter_id} from tasks:reward: it raised  task=reward unit=0/0/1" in shown
    assert "and 5 more dead letters" in shown


class EndingBroker(MemoryBroker):
    """Its run is over at the third look."""

    looks = 0

    async def get_meta(self, name: str) -> bytes | None:
        if name != keys.STATE:
            return await super().get_meta(name)
        self.looks += 1
        return keys.STATE_FINISHED if self.looks > 2 else keys.STATE_RUNNING


async def test_following_ends_with_the_run():
    world = World()
    world.broker = EndingBroker(MemoryServer(world.clock), RunName("r"))
    await world.tell(STATUS)
    out = io.StringIO()
    await follow_run(Console(file=out), world.broker, every_s=0.0)
    assert out.getvalue().splitlines() == ["12 s  trained 3/9", "12 s  trained 3/9", "the run is over"]


async def test_following_ends_with_the_broker():
    world = World()
    world.broker._server.down = True
    out = io.StringIO()
    await follow_run(Console(file=out), world.broker, every_s=0.0)
    assert out.getvalue() == "the broker is gone: the run is over, or was stopped\n"


async def test_following_a_run_that_is_not_live_ends_at_once():
    world = World()
    out = io.StringIO()
    await follow_run(Console(file=out), world.broker, every_s=0.0)
    assert out.getvalue() == "no orchestrator is alive\n"


async def test_a_letter_goes_back_only_while_its_rows_are_wanted():
    world = World()
    group = GroupWrite(group_id=GroupId("4/0"), size=2, columns={Column.PROMPT_IDS: b"\0\0\0\0"})
    await world.broker.commit(Commit(groups=[group]))
    await world.bury(REWARDS, notice("4/0"))
    await world.bury(REWARDS, notice("0/0"))
    await world.bury(keys.plans(WorkerId("generate-0.1")), notice("4/0"))
    await world.broker.append(keys.DEAD, Entry(fields={"foreign": "yes"}))
    letters = await world.broker.dead_letters()
    assert [await why_not(world.broker, letter) for letter in letters] == ["", GONE, DISPATCHED_AGAIN, FOREIGN]


def test_scores_of_a_slot_that_ended_dead_are_ignored():
    """A dead letter that was retried all the same does no harm."""
    world = PipelineWorld.ready(CoreSettings(num_batches=2, groups_per_batch=2, group_size=2))
    group = GroupId("0/0")
    world.generate(group)
    world.tell(ScoringFailed(group_id=group, reason="it raised"))
    assert world.outcomes[group].outcome == "dead"
    assert world.tell(GroupScored(group_id=group, rewards=(0.0, 1.0), response_tokens=(3, 4), signal=True)) == []
