"""What people ask of a run while it goes on: what the core makes of it, and what may be asked at all."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from orchestrator.core.model.settings import CHANGEABLE, CoreSettings, changeable, core_settings
from orchestrator.core.state import PipelineState
from orchestrator.errors import ConfigError
from orchestrator.loop.intake import REQUESTS, append_event, change
from orchestrator.loop.watchdog import Watchdog
from orchestrator.observability.http.routes import ControlRoutes
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from tests.fakes.pipeline_world import PipelineWorld
from transport.broker import keys
from transport.broker.base import ZERO_ID
from transport.contracts.messages import (
    BrokerUsage,
    CheckpointRequested,
    PauseRequested,
    ResumeRequested,
    RunResumed,
    SettingChanged,
    StopRequested,
    event_decoder,
)
from transport.contracts.settings import LivenessSettings, PipelineSettings, RunSettings, Settings
from transport.contracts.types import RunName, UpdateMode
from transport.process.http import name_error


def running_world(**changes: Any) -> PipelineWorld:
    """One turn into a run of 4 batches: the first is trained, groups of the next are dispatched."""
    defaults = {"num_batches": 4, "groups_per_batch": 3, "group_size": 2, "checkpoint_every": 0}
    settings = CoreSettings(**(defaults | changes))
    world = PipelineWorld(settings)
    world.start_trainer()
    world.join()
    for _ in range(3):
        world.turn()
    assert 0 < world.state.view().trained_version < 4
    return world


def num_plans(world: PipelineWorld) -> int:
    return sum(len(worker.plans) for worker in world.workers.values())


# --- pause, resume, drain


def test_a_paused_run_dispatches_nothing_and_finishes_what_runs():
    world = running_world()
    world.tell(PauseRequested())
    for _ in range(5):
        world.turn()
    view = world.state.view()
    assert (view.paused, view.running, view.scoring, view.ready) == (True, 0, 0, 0)
    assert view.pending > 0
    assert view.wait is not None
    assert view.wait.waits_for.startswith("the end of the pause, to dispatch ")
    world.tell(ResumeRequested())
    assert num_plans(world) > 0
    world.run_to_end()
    assert world.trainer.version == 4


@pytest.mark.parametrize("event", [StopRequested(reason="drained by request"), RunResumed()])
def test_a_drain_and_a_resumed_run_end_a_pause(event):
    world = running_world()
    world.tell(PauseRequested())
    world.tell(event)
    assert not world.state.paused
    world.run_to_end()


def test_a_run_that_stops_cannot_be_paused():
    world = running_world()
    world.tell(StopRequested(reason="drained by request"))
    world.tell(PauseRequested())
    assert not world.state.paused
    world.run_to_end()
    assert world.finished == "drained by request"


def test_a_pause_is_no_stall():
    world = running_world()
    clock = ManualClock()
    watchdog = Watchdog(LivenessSettings(warn_s=4.0, stall_s=10.0), clock)
    world.tell(PauseRequested())
    for _ in range(5):
        clock.advance(9.0)
        watchdog.check(world.state)
        clock.advance(3.0)
        watchdog.check(world.state)
        assert watchdog.blocked(world.state) is None


# --- a checkpoint now


def test_a_requested_checkpoint_follows_the_next_batch_once():
    world = running_world(num_batches=12)
    closed = len(world.closes())
    world.tell(CheckpointRequested())
    world.tell(BrokerUsage(retained_bytes=1))  # which has its own opinion on checkpoints
    assert world.state.view().checkpoint_requested
    while len(world.closes()) < closed + 2:
        world.turn()
    assert [close.checkpoint for close in world.closes()[closed : closed + 2]] == [True, False]
    assert not world.state.view().checkpoint_requested


# --- settings


def test_more_and_fewer_batches():
    world = running_world()
    world.tell(SettingChanged(key="run.batches", value=6))
    world.run_to_end()
    assert world.trainer.version == 6
    world = running_world(num_batches=100)
    world.tell(SettingChanged(key="run.batches", value=1))
    world.run_to_end()
    assert world.finished == "all batches are trained"
    assert world.trainer.version < 8, "those that were admitted are trained, and no others"


def test_a_falling_rate_follows_the_number_of_batches_that_will_be_trained():
    world = running_world(num_batches=100, lr_schedule="linear")
    before = len(world.closes())
    world.tell(SettingChanged(key="run.batches", value=1))
    world.run_to_end()
    told = [close.num_batches for close in world.closes()]
    assert set(told[:before]) <= {100}
    assert set(told[before:]) == {len(told)}, "those that were admitted already count"
    constant = running_world()
    constant.run_to_end()
    assert {close.num_batches for close in constant.closes()} == {0}


def test_after_the_trainers_last_command_nothing_changes():
    world = running_world()
    world.run_to_end()
    world.tell(SettingChanged(key="run.batches", value=9))
    assert world.state.view().settings["run.batches"] == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.batches", 0),
        ("run.batches", 1.5),
        ("run.batches", "many"),
        ("pipeline.max_staleness", -1),
        ("pipeline.update", "sideways"),
        ("pipeline.update", 1),
        ("pipeline.rollout_timeout_s", 0.0),
        ("pipeline.rollout_timeout_s", float("nan")),
        ("pipeline.rollout_timeout_s", float("inf")),
        ("pipeline.group_size", 4),
        ("num_batches", 9),
        ("", 1),
    ],
)
def test_the_core_takes_only_what_is_safe(key: str, value: Any):
    """Whatever is on the events log: the checks of its sender are not the core's."""
    world = running_world()
    before = world.state.settings
    world.tell(SettingChanged(key=key, value=value))
    assert world.state.settings == before


def test_the_core_keeps_the_staleness_that_an_enlarged_rollout_batch_needs():
    world = running_world(max_staleness=2, rollout_batches=3)
    world.tell(SettingChanged(key="pipeline.max_staleness", value=1))
    assert world.state.settings.max_staleness == 2
    world.tell(SettingChanged(key="pipeline.max_staleness", value=4))
    assert world.state.settings.max_staleness == 4


def test_all_workers_load_at_once_when_nobody_waits_for_turns_any_more():
    world = running_world(update=UpdateMode.STAGGERED, max_staleness=2)
    world.join()
    world.join()
    before = sum(worker.to_load is not None for worker in world.workers.values())
    world.tell(SettingChanged(key="pipeline.update", value="in_flight"))
    behind = [worker for worker in world.workers.values() if worker.weights != world.state.view().newest]
    assert len(behind) >= max(before, 2)
    assert all(worker.to_load is not None for worker in behind)
    world.run_to_end()


def test_a_change_outlives_a_restart_and_yields_to_a_new_configuration():
    world = running_world()
    configured = world.state.pipeline.configured
    world.tell(SettingChanged(key="run.batches", value=7))
    world.tell(SettingChanged(key="pipeline.max_staleness", value=0))
    same = PipelineState.restore(world.state.snapshot(), settings=configured)
    assert (same.settings.num_batches, same.settings.max_staleness) == (7, 0)
    wanted = msgspec.structs.replace(configured, num_batches=9)
    other = PipelineState.restore(world.state.snapshot(), settings=wanted)
    assert (other.settings.num_batches, other.settings.max_staleness) == (9, 0)
    assert other.pipeline.configured == wanted


def test_what_may_change_is_shown_under_its_configured_name():
    settings = Settings()
    assert changeable(core_settings(settings)) == {
        "run.batches": settings.run.batches,
        "pipeline.max_staleness": settings.pipeline.max_staleness,
        "pipeline.update": settings.pipeline.update,
        "pipeline.max_refills": settings.pipeline.max_refills,
        "pipeline.max_attempts": settings.pipeline.max_attempts,
        "pipeline.rollout_timeout_s": settings.pipeline.rollout_timeout_s,
        "trainer.checkpoint_every": settings.trainer.checkpoint_every,
    }


# --- what may be asked


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("trainer.lr", 1.0, r"trainer\.lr cannot change while a run goes on; these can: run\.batches, "),
        ("run.batch", 1, r"run\.batch cannot change while a run goes on \(did you mean run\.batches\?\)"),
        ("run.batches", "many", r'run\.batches must be a whole number >= 1, not "many"'),
        ("run.batches", 0, r"run\.batches must be a whole number >= 1, not 0"),
        ("pipeline.max_staleness", 99, r"pipeline\.max_staleness must be a whole number in \[0, 16\]"),
        ("pipeline.update", "sideways", r'pipeline\.update must be one of "barrier"'),
        (
            "pipeline.rollout_timeout_s",
            1000.0,
            r"with pipeline\.rollout_timeout_s = 1000\.0: liveness\.stall_s must be",
        ),
    ],
)
def test_a_change_that_cannot_be_granted_says_why(key: str, value: object, problem: str):
    with pytest.raises(ConfigError, match=problem):
        change(Settings(), {}, 0, key, value)


def test_no_fewer_batches_than_are_begun():
    with pytest.raises(ConfigError, match=r"run\.batches must be at least 30: so many batches are begun"):
        change(Settings(), {}, 30, "run.batches", 29)
    assert change(Settings(), {}, 30, "run.batches", 30).value == 30
    assert change(Settings(), {}, 30, "trainer.checkpoint_every", 1).value == 1


def test_a_change_is_judged_with_the_changes_before_it():
    settings = Settings(run=RunSettings(), pipeline=PipelineSettings(max_staleness=0))
    event = change(settings, {"pipeline.max_staleness": 3}, 0, "run.batches", 7)
    assert event == SettingChanged(key="run.batches", value=7)
    with pytest.raises(ConfigError, match=r"liveness\.stall_s"):
        change(settings, {"pipeline.rollout_timeout_s": 900.0}, 0, "run.batches", 7)


def test_every_changeable_setting_can_be_set_to_what_it_is():
    now = changeable(core_settings(Settings()))
    for key in CHANGEABLE:
        value = json.loads(json.dumps(now[key]))
        assert change(Settings(), {}, 0, key, value).key == key


# --- over HTTP


async def ask(
    broker: MemoryBroker, path: str, body: bytes = b"", state: PipelineState | None = None
) -> tuple[int, dict[str, Any]]:
    """POST ``path`` to the control route alone, of a run in ``state``."""
    state = state or PipelineState(core_settings(Settings()))
    control = ControlRoutes(broker, Settings(), state.view)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    app = Starlette(routes=control.routes(), exception_handlers={HTTPException: name_error})
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def new_broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), RunName("r"))


@pytest.mark.parametrize("request_name", sorted(REQUESTS))
async def test_a_request_becomes_an_event(request_name: str):
    broker = new_broker()
    status, answer = await ask(broker, f"/control/{request_name}")
    (entry,) = await broker.read(keys.EVENTS, ZERO_ID, count=10)
    assert (status, answer) == (202, {"asked": request_name, "entry": entry.entry_id})
    assert event_decoder.decode(entry.entry.payload) == REQUESTS[request_name]()
    assert entry.entry.fields["by"] == "http"


async def test_a_setting_is_changed_by_its_key():
    broker = new_broker()
    status, _ = await ask(broker, "/control/set", b'{"key": "run.batches", "value": 80}')
    (entry,) = await broker.read(keys.EVENTS, ZERO_ID, count=10)
    assert status == 202
    assert event_decoder.decode(entry.entry.payload) == SettingChanged(key="run.batches", value=80)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/control/explode", b"", 404),
        ("/control/set", b"", 400),
        ("/control/set", b"\xff\xfe", 400),
        ("/control/set", b"[" * 100_000, 400),
        ("/control/set", b'{"key": "run.batches"}', 400),
        ("/control/set", b'{"key": "run.batches", "value": [1]}', 400),
        ("/control/set", b'{"key": "run.batches", "value": 1, "more": 1}', 400),
        ("/control/set", b'{"key": "trainer.lr", "value": 1}', 400),
        ("/control/set", b'{"key": "run.batches", "value": 1e999}', 400),
        ("/control/set", b'{"key": "run.batches", "value": 1}', 400),  # of 2 that are begun
    ],
)
async def test_a_bad_request_is_named_and_nothing_is_asked(path: str, body: bytes, status: int):
    broker, state = new_broker(), running_world(checkpoint_every=1).state
    answered, answer = await ask(broker, path, body, state)
    assert answered == status
    assert answer["error"]
    assert await broker.read(keys.EVENTS, ZERO_ID, count=10) == []


async def test_events_carry_readable_fields():
    broker = new_broker()
    entry_id = await append_event(broker, PauseRequested(), by="test")
    (entry,) = await broker.read(keys.EVENTS, ZERO_ID, count=10)
    assert (entry.entry_id, entry.entry.fields) == (entry_id, {"event": "PauseRequested", "by": "test"})
