"""The simulated trainer: reads the rounds log, steps, publishes, checkpoints, dies and replays.

A trainer that starts again reads the log from its checkpoint's cursor, and what it had trained beyond is trained again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.core.model.outbox import CommandId
from orchestrator.sim.engine import Simulation, slowdown
from orchestrator.sim.generation import SimulatedRows
from transport.contracts.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    Command,
    FinishTraining,
    GroupRows,
    RoundDone,
    RowsMissing,
    StepDone,
    TrainerCommand,
    TrainerReady,
    TrainRound,
)
from transport.contracts.types import RowId, WeightIdentity, WorkerId, row_id


class Ranks:
    """Data-parallel ranks: each does its part of a round alone and waits for the others only where a mini-batch closes.

    A rank with little in one round is ahead in the next, as live ranks are. Rank 0 reports.

    free_s: when each rank is done with what it had.
    """

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def start(self, now_s: float) -> None:
        """All of them begin anew."""
        self._free_s = [now_s] * len(self._free_s)

    def do(self, parts_s: Sequence[float], sent_s: float, idle_s: float) -> float:
        """Each does its part of a round that was sent at ``sent_s``; one that was idle then takes ``idle_s`` longer.

        Returns when rank 0 is done.
        """
        for rank, seconds in enumerate(parts_s):
            free_s = self._free_s[rank]
            if seconds:
                self._free_s[rank] = seconds + (sent_s + idle_s if free_s < sent_s else free_s)
        return self._free_s[0]

    def meet(self, now_s: float, seconds: float) -> float:
        """All of them do something together, once the last is there. Returns when it is done."""
        end_s = max(now_s, *self._free_s) + seconds
        self._free_s = [end_s] * len(self._free_s)
        return end_s

    def delay(self, seconds: float) -> None:
        """What they do takes longer than was thought."""
        self._free_s = [free_s + seconds for free_s in self._free_s]


@dataclass(slots=True, kw_only=True)
class _Work:
    """An entry under way. left_s: seconds of it that are left at ``since_s``, if no engine decodes.

    spent_s: until then.  alone_s: what it takes if no engine decodes at all.  pieces: how often its end was planned;
    only the last counts."""

    epoch: int
    at: CommandId
    command: TrainerCommand
    began_s: float
    alone_s: float
    left_s: float
    since_s: float = 0.0
    spent_s: float = 0.0
    pieces: int = 0


class SimulatedTrainer:
    """Reads the rounds log entry by entry; its checkpoint holds a version and a place on the log."""

    def __init__(self, simulation: Simulation, rows: SimulatedRows) -> None:
        self._simulation = simulation
        self._rows = rows
        self._log: list[tuple[CommandId, TrainerCommand, float]] = []
        self._ranks = Ranks(simulation.scenario.dp_size)
        self._next = 0
        self._saved = (0, CommandId(0, 0))
        self._epoch = 0
        self._version = 0
        self._cursor = CommandId(0, 0)
        self._busy = False
        self._stepped_s = 0.0
        self._trained = simulation.log.trained
        self._work_now: _Work | None = None
        self._slowdown = 1.0
        self._noise = random.Random(f"noise/{simulation.scenario.faults.seed}/trainer")
        if simulation.machine is not None:
            simulation.machine.trainers.append(self._company_changed)
        simulation.attach(self._execute, TrainRound, CloseMiniBatch, FinishTraining)
        self._start()

    def _start(self) -> None:
        self._epoch += 1
        self._version, self._cursor = self._saved
        self._busy = False
        self._next = sum(at <= self._cursor for at, _, _ in self._log)
        for batch in [batch for batch in self._trained if batch >= self._version]:
            del self._trained[batch]
        simulation = self._simulation
        self._ranks.start(simulation.now_s)
        ready = TrainerReady(
            worker_id=WorkerId(f"train-0.{self._epoch}"),
            weights=self._weights(),
            cursor=self._cursor.entry,
            dp_size=simulation.scenario.dp_size,
        )
        simulation.report(ready)
        self._work()
        if simulation.scenario.faults.trainer_loss_s:
            life_s = simulation.chance.expovariate(1.0 / simulation.scenario.faults.trainer_loss_s)
            simulation.after(life_s, partial(self._die, self._epoch))

    def _die(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        faults = self._simulation.scenario.faults
        if self._simulation.now_s <= faults.until_s:
            self._epoch += 1  # whatever the dead one had scheduled is void
            self._busy = True
            self._work_now = None
            if self._simulation.machine is not None:
                self._simulation.machine.note_training(trains=False)
            self._simulation.after(faults.restart_s, self._start)

    def _weights(self) -> WeightIdentity:
        return WeightIdentity(epoch=self._epoch, version=self._version)

    def _execute(self, command_id: CommandId, command: Command) -> None:
        assert isinstance(command, TrainRound | CloseMiniBatch | FinishTraining)
        self._log.append((command_id, command, self._simulation.now_s))
        self._simulation.after(0.0, self._work)

    def _work(self) -> None:
        """Take the next entry of the log, if idle."""
        if self._busy or self._next == len(self._log):
            return
        at, command, sent_s = self._log[self._next]
        self._busy = True
        seconds = self._seconds(command, sent_s)
        if seconds is None:  # rows of it are being made again
            self._simulation.after(self._simulation.scenario.costs.heartbeat_s, partial(self._look_again, self._epoch))
            return
        began_s = self._simulation.now_s
        work = _Work(epoch=self._epoch, at=at, command=command, began_s=began_s, alone_s=seconds, left_s=seconds)
        self._work_now = work
        if self._simulation.machine is not None:
            self._simulation.machine.note_training(trains=True)
        self._go_on(work, began_s)

    # -- at work, which takes longer beside an engine that decodes, where they share a machine

    def _go_on(self, work: _Work, now_s: float) -> None:
        """What is left of it, at the pace of now."""
        work.since_s = now_s
        work.pieces += 1
        self._simulation.after(work.left_s * self._slowdown, partial(self._end, work, work.pieces))

    def _company_changed(self, slowdown: float) -> None:
        work, now_s = self._work_now, self._simulation.now_s
        if work is not None:
            work.spent_s += now_s - work.since_s
            work.left_s -= (now_s - work.since_s) / self._slowdown
        self._slowdown = slowdown
        if work is not None:
            self._go_on(work, now_s)

    def _end(self, work: _Work, piece: int) -> None:
        if piece != work.pieces or work.epoch != self._epoch:
            return
        self._work_now = None
        seconds = work.spent_s + work.left_s * self._slowdown
        if self._simulation.machine is not None:
            self._ranks.delay(seconds - work.alone_s)
        self._simulation.log.trainer_busy_s += seconds
        if self._simulation.scenario.trace:
            self._simulation.log.training.append((work.began_s, seconds, work.command))
        self._complete(work.at, work.command, seconds)
        if self._work_now is None and self._simulation.machine is not None:
            self._simulation.machine.note_training(trains=False)

    def _look_again(self, epoch: int) -> None:
        if epoch == self._epoch:
            at, command, _ = self._log[self._next]
            self._log[self._next] = at, command, self._simulation.now_s
            self._busy = False
            self._work()

    def _seconds(self, command: TrainerCommand, sent_s: float) -> float | None:
        """What the entry costs rank 0, or None when rows of it are missing, which is reported."""
        costs, now_s = self._simulation.scenario.costs, self._simulation.now_s
        if isinstance(command, TrainRound):
            if self._some_missing(command):
                return None
            return max(0.0, self._ranks.do(self._parts_s(command), sent_s, costs.train.fill_s) - now_s)
        together_s = costs.checkpoint_s
        if isinstance(command, CloseMiniBatch):
            publish = costs.publish_s + costs.switch_s if command.finishes_batch else 0.0
            together_s = costs.train.step_s() + publish + (costs.checkpoint_s if command.checkpoint else 0.0)
        return self._ranks.meet(now_s, together_s) - now_s

    def _parts_s(self, command: TrainRound) -> list[float]:
        """[ranks] seconds of each one's part of a round."""
        costs = self._simulation.scenario.costs
        switch = costs.switch_s if command.batch not in self._trained else 0.0
        return [
            switch
            + costs.train.micro_batch_s(
                sum(rows.num_tokens for rows in rank),
                sum(map(self._squared, rank)) if costs.train.squared_token_s else 0.0,
            )
            * (slowdown(self._noise, costs.noise) if costs.noise else 1.0)
            if rank
            else switch
            for rank in command.ranks
        ]

    def _squared(self, rows: GroupRows) -> int:
        """Squares of the group's sequences, each with the prompt that they share."""
        lengths = [self._rows.num_tokens(row_id(rows.group_id, sample)) for sample in rows.samples]
        prompt_tokens = rows.num_tokens - sum(lengths)
        if self._simulation.scenario.costs.train.padded:
            lengths = [max(lengths)] * len(lengths)
        return sum((prompt_tokens + length) ** 2 for length in lengths)

    def _some_missing(self, command: TrainRound) -> bool:
        rows = _rows_of(command)
        for row in rows:
            if self._rows.has(row) and self._simulation.strikes(self._simulation.scenario.faults.row_loss):
                self._rows.lose(row)
        missing = tuple(row for row in rows if not self._rows.has(row))
        if missing:
            self._simulation.report(RowsMissing(row_ids=missing))
        return bool(missing)

    def _complete(self, at: CommandId, command: TrainerCommand, seconds: float) -> None:
        self._busy = False
        self._cursor = at
        self._next += 1
        if isinstance(command, TrainRound):
            self._finish_round(command, seconds)
        elif isinstance(command, CloseMiniBatch):
            self._close(at, command)
        else:
            self._save(at)
        self._work()

    def _finish_round(self, command: TrainRound, seconds: float) -> None:
        rows = _rows_of(command)
        if command.kind == "train" and command.pass_index == 0:
            self._trained.setdefault(command.batch, []).extend(rows)
            for row in rows:  # batch b is trained on top of version b: a token of version v is b - v versions old
                for weights, tokens in self._rows.spans(row):
                    self._simulation.log.token_ages[command.batch - weights.version] += tokens
        done = RoundDone(
            round_id=command.round_id,
            num_rows=len(rows),
            num_tokens=sum(rows.num_tokens for rank in command.ranks for rows in rank),
            busy_s=seconds,
            stepped_s=self._stepped_s,
        )
        self._stepped_s = 0.0
        self._simulation.report(done)

    def _close(self, at: CommandId, command: CloseMiniBatch) -> None:
        step_s = self._simulation.scenario.costs.train.step_s()
        if not command.finishes_batch:
            self._stepped_s += step_s
            return
        self._version += 1
        published = self._simulation.log.published_s
        del published[self._version - 1 :]
        published.append(self._simulation.now_s)
        self._simulation.published_s[self._weights()] = self._simulation.now_s
        step = StepDone(
            batch=command.batch,
            weights=self._weights(),
            num_rows=command.num_rows,
            num_tokens=command.num_tokens,
            stepped_s=step_s,
        )
        self._simulation.report(step)
        if command.checkpoint:
            self._save(at)

    def _save(self, at: CommandId) -> None:
        self._saved = (self._version, at)
        self._simulation.report(CheckpointSaved(weights=self._weights(), cursor=at.entry, path="simulated"))


def _rows_of(command: TrainRound) -> list[RowId]:
    return [row_id(rows.group_id, sample) for rank in command.ranks for rows in rank for sample in rows.samples]
