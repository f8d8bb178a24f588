"""Events that decode and lie: whoever reaches the broker may write them, and the run must outlive them.

An input is ``(number of a state, events)``; the states are of several kinds of run, each in the middle of its work, and
most ids in the events are theirs. The state takes every event without an exception, its invariants hold, and what a
snapshot restores decides the same.
"""

from __future__ import annotations

import functools
from random import Random

import msgspec

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_invariants import check as check_invariants
from tests.fakes.pipeline_world import PipelineWorld
from tests.fuzz.harness import CheckFailedError, Target, unopened
from tests.fuzz.hostile import Maker, packed
from transport.contracts.messages import PromptRef, PromptsSubmitted, ReportedEvent, event_decoder
from transport.contracts.types import PromptId, UpdateMode
from transport.errors import MessageError

MOST_EVENTS = 12

KINDS = (
    CoreSettings(num_batches=4, groups_per_batch=3, group_size=2),
    CoreSettings(num_batches=4, groups_per_batch=3, group_size=2, update=UpdateMode.BARRIER, max_staleness=0),
    CoreSettings(
        num_batches=4,
        groups_per_batch=2,
        group_size=2,
        max_staleness=2,
        rollout_batches=2,
        membership="rolling",
        mini_batches=2,
        epochs=2,
        record_logprobs=True,
    ),
    CoreSettings(
        num_batches=4,
        groups_per_batch=3,
        group_size=2,
        eval_every=1,
        eval_problems=5,
        dispatch="even",
        migrate_running=True,
    ),
    CoreSettings(num_batches=4, groups_per_batch=3, group_size=2, service=True, max_staleness=2**31),
)


@functools.cache
def states() -> list[tuple[bytes, tuple[str, ...]]]:
    """(snapshot, ids that it knows): each kind of run before it began, at work, and further on."""
    found: list[tuple[bytes, tuple[str, ...]]] = []
    for settings in KINDS:
        world = PipelineWorld(settings)
        for turns in (0, 1, 2):
            for _ in range(turns):
                _turn(world)
            found.append((world.state.snapshot(), _ids(world)))
    return found


def _turn(world: PipelineWorld) -> None:
    if world.settings.service:
        prompts = tuple(
            PromptRef(prompt_id=PromptId(f"1/{i}"), prompt_tokens=2, predicted_tokens=5.0) for i in range(3)
        )
        world.tell(PromptsSubmitted(request=1, prompts=prompts, group_size=2))
    if not world.num_joined:
        world.start_trainer()
        for _ in range(2):
            world.load(world.join())
    world.now_s += 1.0
    world.answer_requests()
    while world.plan_requests:
        world.answer_plan()
    if world.held_out_asked:
        world.answer_held_out()
    for worker_id, worker in list(world.workers.items())[:1]:
        for group_id in list(worker.plans)[:2]:
            world.finish_sample(worker_id, group_id)
    if not world.settings.service:
        for _ in range(len(world.unscored)):
            world.score()
        for _ in range(len(world.unread())):
            world.train()


def _ids(world: PipelineWorld) -> tuple[str, ...]:
    rows = [f"{group}/{sample}" for group in world.sizes for sample in (0, 1, 2)]
    rounds = [str(getattr(command, "round_id", "")) for _, command in world.log]
    settings = ("run.batches", "pipeline.max_staleness", "pipeline.update", "trainer.checkpoint_every")
    return (*world.workers, *world.sizes, *rows, *rounds, *settings, "p0", "h0", "generate-9.1", "train-0.1", "1-0")


def make(random: Random) -> bytes:
    number = random.randrange(len(states()))
    maker = Maker(random, wild=random.choice((0.0, 0.0, 0.01)), strings=states()[number][1])
    return packed((number, [packed(maker.value(ReportedEvent)) for _ in range(random.randrange(1, MOST_EVENTS))]))


def check(content: bytes) -> None:
    number, raws = msgspec.msgpack.decode(content, type=tuple[int, list[bytes]])
    state = PipelineState.restore(states()[number][0])
    for at, raw in enumerate(raws):
        try:
            event = event_decoder.decode(raw)
        except MessageError:
            continue
        twin = PipelineState.restore(state.snapshot()) if at == len(raws) - 1 else None
        commands = state.handle(event, 10.0 + at)
        check_invariants(state.pipeline)
        state.view()
        if twin is not None and twin.handle(event, 10.0 + at) != commands:
            raise CheckFailedError("a restored state decides otherwise")


TARGET = Target(name="events", make=make, opened=unopened(check), num_inputs=800)
