"""Models of what the simulator does not run: speeds and faults.

Owns: numbers. Never: the order of things (``engine.py``), lengths (``lengths.py``). Invariant: what is left to chance
follows from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.costs.cost_model import TrainCost
from transport.contracts.continuous_batching import DecodeCost

SMALL_DECODE = DecodeCost(fixed_s=0.02, sample_s=0.0005)
SMALL_TRAIN = TrainCost(round_s=0.05, token_s=0.0002, optimizer_s=0.5)
"""Round figures of a small model, for runs whose order matters and whose seconds do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """How long things take, seconds.

    decode: a step of a worker, where workers do not differ.  train: a rank of the trainer.
    dispatch_s: of a plan on its way to a worker.  scoring_s: of a group.  publish_s: of the trainer, for every version.
    transfer_s: of a version on its way, while generation goes on.  load_s: of putting it into an engine between two
    steps.  switch_s: of colocated GPUs between the stages, paid by the trainer before and after every batch.
    spawn_s: until a worker that was asked for has joined.
    decode_beside, train_beside: decode steps and the trainer's work take so many times as long while both go on, where
    they share a machine (``colocated.py``).
    """

    decode: DecodeCost = SMALL_DECODE
    train: TrainCost = SMALL_TRAIN
    dispatch_s: float = 0.005
    scoring_s: float = 0.05
    publish_s: float = 0.1
    transfer_s: float = 0.1
    load_s: float = 0.1
    switch_s: float = 0.0
    checkpoint_s: float = 0.3
    prompts_s: float = 0.01
    heartbeat_s: float = 1.0
    spawn_s: float = 10.0
    decode_beside: float = 1.0
    train_beside: float = 1.0

    @property
    def shares_a_machine(self) -> bool:
        return (self.decode_beside, self.train_beside) != (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """What goes wrong. A mean time of 0 means never; ``until_s`` ends all faults, so that every run can end.

    worker_loss_s, trainer_loss_s: mean seconds between kills.  detect_s: until the loss is known.  restart_s: until a
    replacement joins.  row_loss: chance that a row has vanished when the trainer asks for it.
    rollout_failure: chance that a dispatched group fails at once.  repeat: chance that an event is told twice.
    """

    worker_loss_s: float = 0.0
    trainer_loss_s: float = 0.0
    detect_s: float = 3.0
    restart_s: float = 2.0
    row_loss: float = 0.0
    rollout_failure: float = 0.0
    repeat: float = 0.0
    until_s: float = 300.0
    seed: int = 0
