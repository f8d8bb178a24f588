"""What a generation worker does with plans, results and aborts, over the in-memory broker and a fake engine."""

import asyncio

import numpy as np
import pytest

from tests.fakes.explicit_ids import append_at
from tests.fakes.generation_world import ME, PROMPT, V1, V2, World, running
from transport.broker import keys
from transport.broker.base import ZERO_ID, Commit, Entry
from transport.contracts.messages import (
    AbortRollouts,
    LoadWeights,
    PartialSample,
    RolloutFinished,
    WeightsLoaded,
    WorkerReported,
    rollout_info_decoder,
)
from transport.contracts.settings import DataSettings
from transport.contracts.types import (
    Column,
    FinishReason,
    RowId,
    SamplingParams,
    Segment,
    SegmentKind,
    VersionSpan,
    evaluation_id,
    group_id,
)
from transport.contracts.user_files import ForcedLengths
from transport.rows.columns import decode_array
from transport.rows.partial import partial_append, read_beginnings
from workers.errors import EngineCrashedError
from workers.generation.engine import GenerationRequest, Progress
from workers.generation.given import GivenResponses
from workers.generation.worker import group_seed, partial_tokens


async def test_a_plan_becomes_a_request():
    async with running() as world:
        request = await world.asked(0, priority=7.0)
    assert request.key == ("3/0", 0)
    assert request.prompt_ids.tolist() == PROMPT.tolist()
    assert (tuple(request.samples), request.priority) == ((0, 1), 7.0)
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.stop_token_ids) == (9, 0.7, (2, 4))
    assert sampling.seed == group_seed(0, group_id(3, 0))
    assert not sampling.ignore_eos


async def test_a_held_out_problem_is_answered_greedily():
    async with running() as world:
        request = await world.asked(0, samples=(0,), group=evaluation_id(1, 0))
    assert request.key == ("eval1/0", 0)
    assert (request.sampling.max_new_tokens, request.sampling.temperature) == (9, 0.0)


async def test_a_problem_of_a_set_is_sampled_as_its_plan_says():
    async with running() as world:
        sampling = SamplingParams(max_new_tokens=5, temperature=0.3, top_p=0.9)
        request = await world.asked(0, samples=(0,), group=evaluation_id(1, 0), sampling=sampling)
    asked = request.sampling
    assert (asked.max_new_tokens, asked.temperature, asked.top_p) == (5, 0.3, 0.9)


async def test_forced_lengths_are_limits_that_no_stop_token_ends():
    forced = ForcedLengths(range(1, 9), groups_per_batch=1, group_size=2)
    async with running(lengths=forced) as world:
        request = await world.asked(0, samples=(1,))
    assert (request.limits, request.limit(1), request.sampling.ignore_eos) == ((8,), 8, True)


def given(**data: object) -> GivenResponses:
    """With a token a character, and 2 as the end."""
    settings = DataSettings(source="jsonl", response_column="response", **data)  # type: ignore[arg-type]
    return GivenResponses(settings, lambda text: [ord(letter) - 90 for letter in text], 2, max_tokens=5)


async def test_given_responses_are_written_and_the_engine_is_not_asked():
    async with running(given=given()) as world:
        entry_id = await world.plan(0, samples=(0,), entry=b'{"answer": "x", "metadata": {"response": "abc"}}')
        (event,) = await world.events(1)
        assert (event.row_id, event.response_tokens, event.finish_reason) == ("3/0/0", 4, FinishReason.STOP)
        assert (event.oldest, event.newest) == (world.engine.weights, world.engine.weights)
        (row,) = await world.broker.read_rows([RowId("3/0/0")], list(Column))
        assert decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS]).tolist() == [7, 8, 9, 2]
        assert rollout_info_decoder.decode(row[Column.ROLLOUT_INFO]).prompt_tokens == len(PROMPT)
        await world.until_acknowledged()
        assert entry_id
        assert world.engine.requests == []
        await world.plan(1, samples=(0,), entry=b'{"metadata": {"response": "abcdefgh"}}')
        (event,) = await world.events(1)
        assert (event.response_tokens, event.finish_reason) == (5, FinishReason.LENGTH)


async def test_held_out_problems_are_still_answered_by_the_engine():
    async with running(given=given()) as world:
        request = await world.asked(0, samples=(0,), group=evaluation_id(1, 0))
    assert request.key == ("eval1/0", 0)


@pytest.mark.parametrize(
    "entry", [b"", b"[]", b'{"metadata": {}}', b'{"metadata": {"response": 7}}', b'{"metadata": 1}']
)
async def test_a_row_without_its_response_fails_by_name(entry: bytes):
    async with running(given=given()) as world:
        await world.plan(0, samples=(0,), entry=entry)
        (failed,) = await world.events(1)
        assert (failed.samples, failed.retryable) == ((0,), True)
        assert "response_column" in failed.reason or "not JSON" in failed.reason
        await world.until_acknowledged()


def test_the_answer_can_be_the_response():
    answers = given(answer_column="response")
    assert answers.text(b'{"answer": "12"}') == "12"


async def test_seeds_differ_by_group_and_run_and_stay_the_same_otherwise():
    seeds = {group_seed(run, group_id(batch, slot)) for run in (0, 1) for batch in (0, 1) for slot in range(50)}
    assert len(seeds) == 200
    assert group_seed(5, group_id(1, 2)) == group_seed(5, group_id(1, 2))
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_each_sample_is_a_row_at_once_and_the_last_one_acknowledges_the_plan():
    async with running() as world:
        entry_id = await world.plan(0)
        (request,) = await world.engine.wait_submitted(1)
        world.engine.finish(request, 1)
        (event,) = await world.events(1)
        assert (event.row_id, event.response_tokens, event.worker_id) == ("3/0/1", 2, ME)
        assert (event.oldest, event.newest) == (world.engine.weights, world.engine.weights)
        (row,) = await world.broker.read_rows([RowId("3/0/1")], list(Column))
        assert decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS]).tolist() == [0, 1]
        assert decode_array(Column.ROLLOUT_LOGPROBS, row[Column.ROLLOUT_LOGPROBS]).tolist() == [0.0, -1.0]
        info = rollout_info_decoder.decode(row[Column.ROLLOUT_INFO])
        assert (info.prompt_tokens, info.response_tokens, info.queued_s, info.engine_s) == (3, 2, 0.5, 1.5)
        assert event.num_bytes == sum(map(len, row.values()))
        assert await world.unacknowledged() == [entry_id]
        world.engine.finish(request, 0)
        await world.events(1)
        assert await world.unacknowledged() == []


async def test_a_row_says_who_chose_its_tokens():
    segments = (Segment(kind=SegmentKind.POLICY, end=1), Segment(kind=SegmentKind.TOOL, end=2))
    async with running() as world:
        request = await world.asked(0)
        world.engine.finish(request, 1, segments=segments)
        world.engine.finish(request, 0)
        mixed, plain = await world.events(2)
    assert (mixed.response_tokens, mixed.environment_tokens, mixed.policy_tokens) == (2, 1, 1)
    assert (plain.response_tokens, plain.environment_tokens) == (1, 0)
    episode, own = await world.broker.read_rows([mixed.row_id, plain.row_id], list(Column))
    assert decode_array(Column.LOSS_MASK, episode[Column.LOSS_MASK]).tolist() == [1, 0]
    assert rollout_info_decoder.decode(episode[Column.ROLLOUT_INFO]).segments == segments
    assert Column.LOSS_MASK not in own, "what the policy chose alone is written as ever"


async def test_the_ack_never_overtakes_a_row_when_several_are_ready():
    async with running() as world:
        await world.plan(0)
        await world.plan(1)
        first, second = await world.engine.wait_submitted(2)
        for request, sample in ((first, 0), (second, 1), (second, 0), (first, 1)):
            world.engine.finish(request, sample)
        events = await world.events(4)
        assert [event.row_id for event in events] == ["3/0/0", "3/1/1", "3/1/0", "3/0/1"]
        assert await world.unacknowledged() == []


async def test_plans_are_claimed_only_while_there_is_room_for_another_group():
    """4 slots and groups of 2: three groups at once, and one more for each that ends."""
    async with running(capacity=4) as world:
        for slot in range(5):
            await world.plan(slot)
        requests = await world.engine.wait_submitted(3)
        for _ in range(5):
            await world.events(1, of=WorkerReported)
        assert len(requests) == 3
        assert await world.broker.length(keys.plans(ME)) == 5
        assert len(await world.unacknowledged()) == 3
        for sample in (0, 1):
            world.engine.finish(requests[1], sample)
        await world.engine.wait_submitted(4)


async def test_a_failure_is_told_and_acknowledged_with_the_last_sample():
    async with running() as world:
        request = await world.asked(0)
        world.engine.fail(request, (1,), retryable=False)
        (failed,) = await world.events(1)
        assert (failed.group_id, failed.samples, failed.reason, failed.retryable) == ("3/0", (1,), "out of luck", False)
        assert len(await world.unacknowledged()) == 1
        world.engine.finish(request, 0)
        await world.events(1)
        await world.until_acknowledged()


async def test_a_plan_without_its_prompt_fails_and_may_be_tried_again():
    async with running() as world:
        await world.plan(0, samples=(0, 1), prompt=False)
        (failed,) = await world.events(1)
        assert (failed.samples, failed.retryable) == ((0, 1), True)
        assert "prompt" in failed.reason
        await world.until_acknowledged()
        assert world.engine.requests == []


async def test_a_plan_that_cannot_be_read_is_dead_lettered_and_the_next_one_runs():
    async with running() as world:
        await append_at(world.broker, keys.plans(ME), Entry(payload=b"\xc1 nonsense"), "0-1", is_queue=True)
        await world.plan(0)
        await world.engine.wait_submitted(1)
        (dead,) = await world.broker.dead_letters()
        assert dead.queue == keys.plans(ME)
        assert "not a valid message" in dead.reason


async def test_aborted_samples_are_not_written_and_their_plan_is_acknowledged():
    async with running() as world:
        request = await world.asked(0)
        world.engine.finish(request, 0)
        await world.events(1)
        await world.command(AbortRollouts(worker_id=ME, group_ids=(group_id(3, 0),), reason="stale", attempts=(0,)))
        while not world.engine.aborted:
            await world.events(1, of=WorkerReported)
        assert world.engine.aborted == [("3/0", 0)]
        world.engine.finish(request, 1, reason=FinishReason.ABORT)
        await world.until_acknowledged()
        assert await world.broker.read_rows([RowId("3/0/1")], [Column.RESPONSE_IDS]) == [{}]


async def test_an_abort_means_its_attempt_and_spares_a_later_one():
    async with running() as world:
        await world.plan(0)
        await world.plan(0, attempt=1)
        await world.engine.wait_submitted(2)
        await world.command(AbortRollouts(worker_id=ME, group_ids=(group_id(3, 0),), reason="late", attempts=(0,)))
        while not world.engine.aborted:
            await world.events(1, of=WorkerReported)
        assert world.engine.aborted == [("3/0", 0)]


async def test_an_abort_that_comes_before_its_plan_is_claimed_still_counts():
    async with running() as world:
        await world.command(AbortRollouts(worker_id=ME, group_ids=(group_id(3, 0),), reason="late", attempts=(0,)))
        await world.command(LoadWeights(worker_id=ME, weights=V1))  # answered after the abort was read
        await world.manifest(V1)
        await world.events(1, of=WeightsLoaded)
        entry_id = await world.plan(0)
        while (await world.events(1, of=WorkerReported))[-1].plans_cursor != entry_id:
            pass
        await world.until_acknowledged()
        assert world.engine.requests == []


async def test_reports_say_what_is_held_and_never_before_it_is_claimed():
    async with running() as world:
        (empty,) = await world.events(1, of=WorkerReported)
        assert (empty.held, empty.plans_cursor, empty.weights) == ((), ZERO_ID, None)
        await world.plan(0)
        last = await world.plan(1)
        first, second = await world.engine.wait_submitted(2)
        while (report := (await world.events(1, of=WorkerReported))[0]).plans_cursor != last:
            pass
        assert report.held == ("3/0", "3/1")
        for sample in (0, 1):
            world.engine.finish(first, sample)
        reports = []
        while not reports or getattr(reports[-1], "held", ()) != ("3/1",):
            reports += await world.events(1, of=(RolloutFinished, WorkerReported))
        finished = [event for event in reports if isinstance(event, RolloutFinished)]
        assert [event.row_id for event in finished] == ["3/0/0", "3/0/1"]  # told before the report without the group
        assert second.key == ("3/1", 0)


async def test_leases_are_renewed_while_the_engine_works():
    async with running() as world:
        entry_id = await world.plan(0)
        await world.engine.wait_submitted(1)
        async with asyncio.timeout(30):
            for _ in range(2):
                assert await world.broker.renewed.get() == (keys.plans(ME), ME, [entry_id], [entry_id])


async def test_a_plan_whose_lease_went_to_another_is_dropped():
    async with running() as world:
        request = await world.asked(0)
        taken, _ = await world.broker.reclaim(keys.plans(ME), "thief", idle_s=0.0, max_deliveries=9, count=9)
        assert len(taken) == 1
        while not world.engine.aborted:
            await world.events(1, of=WorkerReported)
        world.engine.finish(request, 0, reason=FinishReason.ABORT)
        await world.plan(1)
        await world.engine.wait_submitted(2)
        assert [pending.consumer for pending in await world.broker.pending(keys.plans(ME))] == ["thief", ME]


async def test_a_crash_of_the_engine_ends_the_worker_by_its_name():
    world = World(4)
    task = asyncio.create_task(world.worker.run())
    await world.events(1, of=WorkerReported)
    world.engine.crash(EngineCrashedError("the engine's thread ended"))
    async with asyncio.timeout(30):
        with pytest.raises(EngineCrashedError):
            await task
    assert world.engine.closed


async def test_activity_says_starting_until_the_engine_is_there():
    world = World(4)
    assert world.worker.activity().doing == "starting"
    task = asyncio.create_task(world.worker.run())
    await world.events(1, of=WorkerReported)
    activity = world.worker.activity()
    assert (activity.doing, activity.capacity) == ("waiting", 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def got(request, sample, start, tokens, weights=V1):
    return Progress(
        key=(*request.key, sample),
        start=start,
        token_ids=np.arange(start, start + tokens, dtype=np.int32) + 10,
        logprobs=-np.arange(start, start + tokens, dtype=np.float32),
        spans=(VersionSpan(start=start, end=start + tokens, weights=weights),),
    )


async def kept(world, count):
    """The partial samples of the next ``count`` reports that have any."""
    found = []
    while len(found) < count:
        (report,) = await world.events(1, of=WorkerReported)
        found += [report.partial] if report.partial else []
    return found


def beginnings_of(world, before):
    return read_beginnings(world.broker, group_id(3, 0), before)


async def test_what_running_samples_get_is_on_the_log_of_their_group_and_reported_when_it_is_news():
    async with running(partial_s=0.01) as world:
        request = await world.asked(0)
        world.engine.got = [got(request, 1, 0, 2)]
        ((group,),) = await kept(world, 1)
        assert (group.group_id, group.attempt) == ("3/0", 0)
        assert group.samples == (PartialSample(sample=1, oldest=V1, newest=V1),)
        world.engine.got = [got(request, 1, 2, 3)]
        await world.until_log(keys.partial(group_id(3, 0)), 2)
        world.engine.got = [got(request, 1, 5, 1, weights=V2)]
        ((group,),) = await kept(world, 1)
        assert group.samples == (PartialSample(sample=1, oldest=V1, newest=V2),)
        assert (await beginnings_of(world, 1))[1].token_ids.tolist() == [10, 11, 12, 13, 14, 15]
        world.engine.got = []
        world.engine.finish(request, 0)
        world.engine.finish(request, 1)
        await world.until_acknowledged()
        await world.until_log(keys.partial(group_id(3, 0)), 0)


async def leave_beginning(world, *parts):
    request = GenerationRequest(
        group_id=group_id(3, 0), prompt_ids=PROMPT, samples=(), sampling=SamplingParams(max_new_tokens=9)
    )
    appends = [partial_append(group_id(3, 0), partial_tokens(got(request, *part))) for part in parts]
    await world.broker.commit(Commit(appends=appends))


def resumed(sample, oldest=V1):
    return PartialSample(sample=sample, oldest=oldest, newest=oldest)


async def test_a_sample_goes_on_from_the_log_as_far_as_its_plan_says():
    async with running(partial_s=0.01) as world:
        await leave_beginning(world, (0, 0, 4), (1, 0, 3), (1, 4, 2))
        await world.plan(0, attempt=0, prompt=True, samples=())
        await world.plan(0, attempt=1, partial=(resumed(1),))
        request = (await world.engine.wait_submitted(2))[-1]
        assert {sample: len(begun) for sample, begun in request.begun.items()} == {1: 3}
        world.engine.got = [got(request, 1, 0, 5)]  # an engine says no more than what is new: from 3 on
        world.engine.got = [got(request, 1, 3, 2)]
        await world.until_log(keys.partial(group_id(3, 0)), 4)
        assert len((await beginnings_of(world, 2))[1]) == 5


@pytest.mark.parametrize(
    ("tokens", "limit", "used"), [(9, 9, 8), (30, 9, 8), (1, 9, 1), (0, 9, 0)], ids=["last", "more", "one", "none"]
)
async def test_what_would_be_a_whole_response_ends_by_being_sampled(tokens: int, limit: int, used: int):
    async with running() as world:
        if tokens:
            await leave_beginning(world, (1, 0, tokens))
        await world.plan(0, attempt=0, samples=())
        await world.plan(0, attempt=1, partial=(resumed(1),))
        request = (await world.engine.wait_submitted(2))[-1]
        assert len(request.begun.get(1, ())) == used
        assert request.limit(1) == limit


async def test_what_the_log_has_under_other_weights_is_not_gone_on_from():
    async with running() as world:
        await leave_beginning(world, (1, 0, 3, V2))
        await world.plan(0, attempt=0, samples=())
        await world.plan(0, attempt=1, partial=(resumed(1, oldest=V1), resumed(0)))
        request = (await world.engine.wait_submitted(2))[-1]
        assert request.begun == {}


async def test_a_worker_that_is_told_to_leave_keeps_what_it_has():
    async with running(partial_s=1000.0) as world:
        request = await world.asked(0)
        world.engine.got = [got(request, 0, 0, 4)]
    assert len((await beginnings_of(world, 1))[0]) == 4


async def test_how_far_a_sample_is_that_runs_before_its_others_is_told_as_it_grows():
    async with running(partial_s=0.01) as world:
        request = await world.asked(0, samples=(0,))
        told = []
        for start, tokens in [(0, 8), (8, 1), (9, 3)]:
            world.engine.got = [got(request, 0, start, tokens)]
            if tokens > 1:  # a ninth token is no news
                ((group,),) = await kept(world, 1)
                told += [sample.tokens for sample in group.samples]
            else:
                await world.until_log(keys.partial(group_id(3, 0)), 2)
        assert told == [8, 12]


async def test_the_others_run_beside_it_and_what_they_have_got_outlasts_it():
    async with running(partial_s=0.01) as world:
        await world.plan(0, samples=(0,))
        await world.plan(0, samples=(1,), attempt=1)
        probe, others = await world.engine.wait_submitted(2)
        assert (probe.samples, others.samples) == ((0,), (1,))
        world.engine.got = [got(probe, 0, 0, 2), got(others, 1, 0, 3)]
        await world.until_log(keys.partial(group_id(3, 0)), 2)
        world.engine.got = []
        world.engine.finish(probe, 0)
        (event,) = await world.events(1)
        assert event.row_id == "3/0/0"
        world.engine.finish(others, 1)
        await world.until_acknowledged()
        await world.until_log(keys.partial(group_id(3, 0)), 0)
