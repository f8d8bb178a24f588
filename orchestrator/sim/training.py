"""The simulated trainer: reads the rounds log, steps, publishes, checkpoints, dies and replays.

Owns: what the trainer would hold. Never: decisions. Invariant: a trainer that starts again reads the log from its
checkpoint's cursor, and what it had trained beyond is trained again.
"""

from __future__ import annotations

from functools import partial

from orchestrator.core.outbox import CommandId
from orchestrator.sim.engine import Simulation
from orchestrator.sim.rows import SimulatedRows
from transport.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    Command,
    FinishTraining,
    RoundDone,
    RowsMissing,
    StepDone,
    TrainerCommand,
    TrainerReady,
    TrainRound,
)
from transport.types import RowId, WeightIdentity, WorkerId, row_id


class SimulatedTrainer:
    """Reads the rounds log entry by entry; its checkpoint holds a version and a place on the log."""

    def __init__(self, simulation: Simulation, rows: SimulatedRows) -> None:
        self._simulation = simulation
        self._rows = rows
        self._log: list[tuple[CommandId, TrainerCommand]] = []
        self._saved = (0, CommandId(0, 0))
        self._epoch = 0
        self._version = 0
        self._cursor = CommandId(0, 0)
        self._busy = False
        self._trained = simulation.log.trained
        simulation.attach(self._obey)
        self._start()

    def _start(self) -> None:
        self._epoch += 1
        self._version, self._cursor = self._saved
        self._busy = False
        for batch in [batch for batch in self._trained if batch >= self._version]:
            del self._trained[batch]
        simulation = self._simulation
        worker_id = WorkerId(f"train-0.{self._epoch}")
        ready = TrainerReady(
            worker_id=worker_id,
            weights=self._weights(),
            cursor=self._cursor.entry,
            dp_size=simulation.scenario.dp_size,
        )
        simulation.tell(ready)
        self._work()
        if simulation.scenario.faults.trainer_loss_s:
            life_s = simulation.chance.expovariate(1.0 / simulation.scenario.faults.trainer_loss_s)
            simulation.after(life_s, partial(self._die, self._epoch))

    def _die(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        faults = self._simulation.scenario.faults
        if self._simulation.clock.now_s() <= faults.until_s:
            self._epoch += 1  # whatever the dead one had scheduled is void
            self._busy = True
            self._simulation.after(faults.restart_s, self._start)

    def _weights(self) -> WeightIdentity:
        return WeightIdentity(epoch=self._epoch, version=self._version)

    def _obey(self, command_id: CommandId, command: Command) -> None:
        if isinstance(command, TrainRound | CloseMiniBatch | FinishTraining):
            self._log.append((command_id, command))
            self._simulation.after(0.0, self._work)

    def _work(self) -> None:
        """Take the next entry of the log, if idle."""
        following = next(((at, command) for at, command in self._log if at > self._cursor), None)
        if self._busy or following is None:
            return
        at, command = following
        self._busy = True
        seconds = self._seconds(command)
        if seconds is None:  # rows of it are being made again
            self._simulation.after(self._simulation.scenario.costs.heartbeat_s, partial(self._look_again, self._epoch))
            return
        self._simulation.log.trainer_busy_s += seconds
        self._simulation.after(seconds, partial(self._complete, self._epoch, at, command))

    def _look_again(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._busy = False
            self._work()

    def _seconds(self, command: TrainerCommand) -> float | None:
        """What the entry costs, or None when rows of it are missing, which is told."""
        costs = self._simulation.scenario.costs
        if isinstance(command, TrainRound):
            if self._some_missing(command):
                return None
            return costs.train_round_s(max(sum(rows.num_tokens for rows in rank) for rank in command.ranks))
        if isinstance(command, CloseMiniBatch):
            publish = costs.publish_s if command.finishes_batch else 0.0
            return costs.optimizer_s + publish + (costs.checkpoint_s if command.checkpoint else 0.0)
        return costs.checkpoint_s

    def _some_missing(self, command: TrainRound) -> bool:
        rows = _rows_of(command)
        for row in rows:
            if self._rows.has(row) and self._simulation.strikes(self._simulation.scenario.faults.row_loss):
                self._rows.lose(row)
        missing = tuple(row for row in rows if not self._rows.has(row))
        if missing:
            self._simulation.tell(RowsMissing(row_ids=missing))
        return bool(missing)

    def _complete(self, epoch: int, at: CommandId, command: TrainerCommand) -> None:
        if epoch != self._epoch:
            return
        self._busy = False
        self._cursor = at
        if isinstance(command, TrainRound):
            rows = _rows_of(command)
            if command.kind == "train" and command.pass_index == 0:
                self._trained.setdefault(command.batch, []).extend(rows)
            tokens = sum(rows.num_tokens for rank in command.ranks for rows in rank)
            busy_s = self._simulation.scenario.costs.train_round_s(tokens)
            self._simulation.tell(
                RoundDone(round_id=command.round_id, num_rows=len(rows), num_tokens=tokens, busy_s=busy_s)
            )
        elif isinstance(command, CloseMiniBatch):
            self._close(at, command)
        else:
            self._save(at)
        self._work()

    def _close(self, at: CommandId, command: CloseMiniBatch) -> None:
        if not command.finishes_batch:
            return
        self._version += 1
        step = StepDone(
            batch=command.batch, weights=self._weights(), num_rows=command.num_rows, num_tokens=command.num_tokens
        )
        self._simulation.tell(step)
        if command.checkpoint:
            self._save(at)

    def _save(self, at: CommandId) -> None:
        self._saved = (self._version, at)
        self._simulation.tell(CheckpointSaved(weights=self._weights(), cursor=at.entry, path="simulated"))


def _rows_of(command: TrainRound) -> list[RowId]:
    return [row_id(rows.group_id, sample) for rank in command.ranks for rows in rank for sample in rows.samples]
