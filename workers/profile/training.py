"""The trainer's half of a profile: micro-batches, ends of mini-batches, versions that leave it; and one kept busy.

Owns: which amounts of training are measured. Never: an engine. A trainer that works beside an engine is a process of
its own, as in a run (``python -m workers.profile.training``): it trains one micro-batch after another, writes the
seconds of each on a line, and ends with its standard input.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.contracts.measurements import TrainRun
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, row_id
from workers.profile.engine import ENOUGH_S, TOKEN_ID
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy.policy_learner import PolicyLearner
from workers.weights.publish import WeightPublisher

REPEATS = 3
"""Of each measurement, at most."""
TrainShape: TypeAlias = tuple[int, int, tuple[int, ...]]
TRAIN_SHAPES: tuple[TrainShape, ...] = (
    (1, 32, (32, 32)),
    (1, 32, (64, 64, 64, 64)),
    (1, 32, (16, 32, 64, 256)),
    (1, 64, (192, 192, 192, 192)),
    (2, 32, (32, 32, 32, 32)),
    (2, 32, (128, 128, 128, 128)),
    (2, 64, (64, 96, 160, 320)),
    (4, 32, (64, 64, 64, 64)),
    (4, 64, (192, 192, 192, 192)),
    (4, 32, (32, 64, 96, 320)),
    (8, 64, (64, 64, 64, 64)),
    (8, 64, (192, 192, 192, 192)),
)
"""(groups, prompt tokens, response tokens of each sample) of a micro-batch; none is past ``micro_batch_tokens``.
Samples of a group that differ in length show what attention takes for the shorter ones."""
BUSY_SHAPE: TrainShape = (2, 32, (128, 128, 128, 128))
"""Seconds for a model of 135M on one core: long enough to meet many decode steps, short enough to be repeated."""


@contextmanager
def learner_of(settings: Settings, directory: Path) -> Iterator[PolicyLearner]:
    """The trainer that ``settings`` name, loaded, without a run around it. directory: of the model."""
    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        learner = PolicyLearner(settings, directory, WeightPublisher("profile", Path(scratch)))
        try:
            learner.load(None)
            yield learner
        finally:
            learner.retract()


def samples_of(shape: TrainShape, number: int) -> PromptGroup:
    """One of the groups to train, every sample with a gradient."""
    _, prompt_tokens, response_tokens = shape
    group_id = GroupId(f"profile/{number}")
    responses: list[NDArray[np.int32]] = [np.full(tokens, TOKEN_ID, dtype=np.int32) for tokens in response_tokens]
    return PromptGroup(
        group_id=group_id,
        prompt_ids=np.full(prompt_tokens, TOKEN_ID, dtype=np.int32),
        samples=[
            TrainingSample(
                row_id=row_id(group_id, sample),
                response_ids=response,
                rollout_logprobs=np.full(len(response), -1.0, dtype=np.float32),
                advantage=1.0 if sample % 2 else -1.0,
            )
            for sample, response in enumerate(responses)
        ],
    )


def micro_batch(shape: TrainShape) -> list[PromptGroup]:
    return [samples_of(shape, number) for number in range(shape[0])]


def shapes_within(max_tokens: int) -> list[TrainShape]:
    """Those of at most ``max_tokens``, and at least one."""
    return [shape for shape in TRAIN_SHAPES if tokens_of(shape) <= max_tokens] or [TRAIN_SHAPES[0]]


def tokens_of(shape: TrainShape) -> int:
    """Packed: prompts once, and responses."""
    groups, prompt, responses = shape
    return groups * (prompt + sum(responses))


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def train_runs(learner: PolicyLearner, max_tokens: int) -> Iterator[TrainRun]:
    """Each shape of at most ``max_tokens``, in turn and again, the median of each; the first call warms up."""
    shapes = shapes_within(max_tokens)
    batches = [micro_batch(shape) for shape in shapes]
    learner.accumulate(batches[0])
    started_s = time.perf_counter()
    passes: list[list[float]] = []
    while len(passes) < REPEATS and (not passes or time.perf_counter() - started_s < ENOUGH_S):
        passes.append([timed(partial(learner.accumulate, batch)) for batch in batches])
    for shape, seconds in zip(shapes, zip(*passes, strict=True), strict=True):
        groups, prompt, responses = shape
        yield TrainRun(
            tokens=tokens_of(shape),
            squared_tokens=float(groups * sum((prompt + response) ** 2 for response in responses)),
            padded_tokens=float(groups * len(responses) * (prompt + max(responses)) ** 2),
            seconds=median(seconds),
        )


def optimizer_runs(learner: PolicyLearner) -> Iterator[float]:
    """Ends of mini-batches."""
    group = samples_of(TRAIN_SHAPES[0], 0)
    for batch in range(REPEATS + 1):
        learner.accumulate([group])
        num_tokens = sum(TRAIN_SHAPES[0][2])
        yield timed(partial(learner.close, batch=batch, num_rows=len(group.samples), num_tokens=num_tokens))


def keep_busy(settings: Settings, directory: Path, ended: threading.Event) -> None:
    """Train a micro-batch again and again; a line with its seconds each."""
    with learner_of(settings, directory) as learner:
        batch = micro_batch(BUSY_SHAPE)
        while not ended.is_set():
            print(timed(partial(learner.accumulate, batch)), flush=True)


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    keep_busy(settings, Path(sys.argv[1]), ended)


if __name__ == "__main__":
    main()
