"""Named points at which a test may have a process killed; without a test they cost one dictionary look-up.

Owns: the names. Never: anything but SIGKILL of its own process, which is what a crash, an OOM kill or a pulled plug
look like to everyone else. Armed only by a ``__main__`` from STREAMRL_FAULTS, never by a message or a setting.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

POINTS = frozenset(
    {
        "generate.claimed",  # a plan is claimed, nothing of it generated
        "generate.row_ready",  # a sample ended, its row is not written
        "generate.row_committed",  # a row is written
        "generate.kept",  # what running samples have got is on their groups' logs
        "generate.weights_loaded",  # new weights serve, which is not reported
        "score.claimed",  # a unit is claimed, not scored
        "score.committed",  # a score is written
        "train.round_accumulated",  # gradients hold a round, which is not reported
        "train.stepped",  # the optimizer stepped, nothing is published
        "train.published",  # weights are published, StepDone is not sent
        "train.shard_written",  # a rank has written its part of a checkpoint, and did not say so
        "train.checkpoint_written",  # a checkpoint is complete, not in place
        "train.checkpoint_placed",  # a checkpoint is in place, the former one of its version too
        "train.model_removed",  # the former final model made room, the new one is not in place
        "train.checkpoint_saved",  # a checkpoint is in place, which is not reported
        "critic.valued",  # values are computed, not written
        "critic.round_accumulated",  # these as of the trainer
        "critic.stepped",
        "critic.published",
        "critic.checkpoint_saved",
        "orchestrator.applied",  # events were applied, not written down
        "orchestrator.journaled",  # events are written down, their commands not carried out
        "orchestrator.executed",  # commands were carried out
    }
)

_armed: dict[str, tuple[int, Path]] = {}
_passed: dict[str, int] = {}


def arm(specification: str) -> None:
    """Arm points from ``<point>:<n>:<marker file>[,...]``: die at the n-th pass, once, as the marker file remembers.

    Raises ValueError for a point that does not exist.
    """
    for part in filter(None, specification.split(",")):
        point, count, marker = part.split(":", 2)
        if point not in POINTS:
            raise ValueError(f"there is no fault point {point!r}; points: {', '.join(sorted(POINTS))}")
        _armed[point] = (int(count), Path(marker))


def point(name: str) -> None:
    if name not in _armed:
        return
    count, marker = _armed[name]
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] >= count and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
