"""What the run is doing now, as one JSON object: for the live view, ``/status`` and redis-cli.

run, elapsed_s       name; seconds on the run's clock
events_cursor        id of the last entry of the events log that is applied
...                  every field of ``core.view.PipelineView``: trained_version, num_admitted, num_batches, newest
                     {epoch, version, digest}, waiting_prompts, pending, running, scoring, ready, in_flight_samples,
                     rounds_outstanding, retained_bytes, paused, checkpoint_requested, stop_reason, finish_reason,
                     settings {key: value} of those that may change, ...
                     num_requests: that a service run got so far, null where the run trains
                     batches: [{batch, stages {stage: groups}, ended {outcome: groups}, sent, pending_refills,
                     closed, trained}]
                     evaluation: null, or the one under way: {number, weights, problems, waiting, running, scoring,
                     answered, seconds, held}
                     ranker: null, or how right predictions of lengths were: {state (not_yet_measured, trusted,
                     not_trusted), num_groups, recall_20, recall_10, recall_5, kendall_tau, drift, known_prompts,
                     refits}
                     scaling: null, or how many generation workers there are to be: {min_workers, max_workers, draining,
                     changed (batch, -1 never), from_workers, to_workers, reason, judged (batch, -1 none yet), delta_s,
                     saved_s}
                     probes: null, or what samples that ran before the others of their group came to: {num_started,
                     num_followed (by the others, before they had ended), num_running}
wait                 null, or what is waited for now, also when all is well: {stage, waits_for, owner, waited_s},
                     and why where the owner said it
broker               only over HTTP, and only while the broker is away: {address, away_s, reason, until_s (this process
                     waits so long)}; wait and blocked then say that, too, with stage "broker"
blocked              null, or the same once nothing progressed for liveness.warn_s, with still_s, seconds since then,
                     and pending {process: reason} where an engine has not started processes yet
generation           the core's side of each generation worker: [{worker_id, capacity, in_flight, groups, loaded,
                     loading, healthy, aside_s (seconds for which it has stood aside, null: it does not),
                     load_failures (in a row), load_problem (of the last)}]
longest              groups that have been generated for the longest: [{group_id, worker_id, running_s, missing
                     [sample], group_size, predicted_tokens, attempt}]
queues               {stream: entries}
workers              every live worker, by its lease: [{worker, kind, doing, since_s, running, waiting, weights
                     "epoch.version.digest", counters {name: total}, kv_use 0..1, way its weights came, idle 0..1,
                     tokens_per_s}]; the last two are missing in the first seconds
gpus                 of the machine that `run` started the processes on: [{number, name, memory_mib, workers [name],
                     share (of its memory, of each of them), held (by another run)}]; then those on which workers say
                     that they compute whom it did not start, with number, memory_mib and share null
requests             of a service run, those that are not all taken: {number: {samples, started, ended, failed, taken}}
last                 the last line of metrics.jsonl, {} before the first batch
last_evaluation      numbers of the newest evaluation, as in metrics.jsonl
failed               attempts that failed since the orchestrator started: {samples or scores: {count, last (why)}}
remarks              what a user should know of the prompts: [sentence]
warnings             what is wrong with that batch, and loggers that were left out: [sentence]
num_lost, lost       workers that were lost since the orchestrator started, and the newest of them, oldest first:
                     [{worker, reason, at_s}]; those that were asked to go do not count
given_up             why the oldest dead letter was given up, "" where there is none
age_s, stopped,      only over HTTP: how old all this is, seconds; what the run is just stopped by, "" else; the command
go_on                that then goes on with it

And what the live page shows of the past, gathered while the run goes on (``/history``):

lanes        {cell_s, cells, until_s, states [name], lanes [{place, kind, doing, busy}], lanes_left_out}
             doing, busy: a character a cell, the newest last: the state's letter (a is states[0], a space: not there),
             and the share of the cell in which it computed, in ninths
curves       {name: [number or null]}, one list a number of metrics.jsonl, a point a batch (thinned)
bubbles      {batches [first, last], stages {generation, trainer: {"computing" or a cause: seconds}}}, {} at first
evaluations  the newest lines of evaluations in metrics.jsonl, oldest first
components   names of the reward's components among the curves
samples      newest first: [{row, reward, components, worker, tokens, finish, versions, engine_s, question, expected,
             prompt, prompt_cut, response, response_cut, response_end}]; cuts are characters that were left out before
             the prompt, and between response and its end; what a model wrote is there as it is: the page escapes it

Invariant: what is kept does not grow with the length of the run. After a restart lanes and events begin anew, curves
come from ``metrics.jsonl``.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import structlog

from orchestrator.config.starts import GpuUse
from orchestrator.core.view import longest_running
from orchestrator.loop.decide import Decider
from orchestrator.loop.intake import Membership
from orchestrator.loop.watchdog import Watchdog, shown_wait, wait_for_broker
from orchestrator.observability.loggers import read_left_out
from orchestrator.observability.metrics import MetricsLog, NewLines, warnings_of
from orchestrator.observability.report.bubbles import stages, total, usage_by_window
from orchestrator.observability.report.spans import build_timeline
from orchestrator.observability.samples import RecentSamples
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.reach import Away
from transport.contracts.messages import (
    STARTING,
    CheckpointSaved,
    Event,
    GroupScored,
    JournalRecord,
    RolloutFailed,
    RolloutFinished,
    RoundDone,
    ScoringFailed,
    StepDone,
    TrainerReady,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerStatus,
)
from transport.contracts.types import WorkerId, is_evaluation, natural_order
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

RATE_WINDOW_S = 10.0  # rates and idle shares are taken over this long
PUBLISH_S = 0.5
MAX_SHARE = 0.005  # of one core, to make the status: with ten thousand groups it comes every second or two
TIME_TO_LIVE_S = 10.0  # a status older than this is none: the orchestrator is away


MAX_LOST = 8  # workers that are named


LAST_WORDS_S = 1.5  # a page asks every second
SLOW_PAGE_S = 5.0  # and one on a busy machine within this long


class StatusBoard:
    """The newest status, and how old it is; who was lost; why the run stops. ``latest`` is empty before the first."""

    def __init__(self, clock: Clock, *, go_on: str = "", away: Callable[[], Away | None] = lambda: None) -> None:
        """go_on: the command that goes on with the run once it was stopped.  away: whether the broker is."""
        self.clock = clock
        self.away = away
        self._go_on, self._stopped = go_on, ""
        self._at_s = clock.now_s()
        self._asked_s = -math.inf
        self.latest: dict[str, Any] = {}
        self.remarks: tuple[str, ...] = ()
        """Sentences that a user should read about the run's prompts."""
        self.num_lost = 0
        self.failed: dict[str, dict[str, Any]] = {}
        """"samples" (an engine's, or an environment's) and "scores": attempts that failed, why the last one did."""
        self.lost: deque[dict[str, Any]] = deque(maxlen=MAX_LOST)

    def observe(self, event: Event, now_s: float) -> None:
        if isinstance(event, WorkerLost) and not event.left:
            self.num_lost += 1
            self.lost.append({"worker": event.worker_id, "reason": event.reason, "at_s": round(now_s, 1)})
        elif isinstance(event, RolloutFailed | ScoringFailed):
            of = "samples" if isinstance(event, RolloutFailed) else "scores"
            self.failed[of] = {"count": self.failed.get(of, {"count": 0})["count"] + 1, "last": event.reason}

    def put(self, status: dict[str, Any]) -> None:
        self.latest = status
        self._at_s = self.clock.now_s()

    def answer(self) -> dict[str, Any]:
        """``latest`` as HTTP clients get it; while the broker is away, that is what the run waits for."""
        self._asked_s = self.clock.now_s()
        return {
            **self.latest,
            **broker_fields(self.away()),
            "age_s": round(self.age_s, 1),
            "stopped": self._stopped,
            "go_on": self._go_on,
        }

    async def last_words(self, stopped: str) -> None:
        """Answer with why the run stops, where a page asked lately: for as long as pages take to ask again, and until
        one has asked, ``SLOW_PAGE_S`` at most."""
        self._stopped, stopped_s = stopped, self.clock.now_s()
        if stopped_s - self._asked_s >= SLOW_PAGE_S:
            return
        await asyncio.sleep(LAST_WORDS_S)
        late_s = stopped_s + SLOW_PAGE_S
        while self._asked_s < stopped_s and self.clock.now_s() < late_s:  # noqa: ASYNC110 an answer wakes no task
            await asyncio.sleep(LAST_WORDS_S / 10)

    @property
    def age_s(self) -> float:
        """Seconds since the newest status, or since the start where there was none."""
        return self.clock.now_s() - self._at_s


def broker_fields(away: Away | None) -> dict[str, Any]:
    """Fields of a status that say whether the broker is away, and what then replaces ``wait`` and ``blocked``."""
    if away is None:
        return {}
    seen = {"address": away.address, "away_s": round(away.seconds, 1), "reason": away.reason, "until_s": away.until_s}
    return {"broker": seen, "wait": wait_for_broker(away), "blocked": wait_for_broker(away)}


async def publish_status(
    board: StatusBoard,
    broker: Broker,
    decider: Decider,
    membership: Membership,
    watchdog: Watchdog,
    metrics: MetricsLog,
    mismatch_limit: float,
    gpus: Sequence[GpuUse],
    run_dir: Path,
) -> None:
    """Make the status, on the board and in the broker, forever. gpus: of this machine, who of the run has them."""
    state, clock = decider.state, board.clock
    usage = UsageWindow()
    dead, given_up = 0, ""
    said_aside: frozenset[str] = frozenset()
    while True:
        streams = await broker.streams()
        queues = {name: length for name, length in streams.items() if not keys.is_of_group(name)}
        watchdog.pending = msgspec.json.decode(await broker.get_meta(keys.PENDING) or b"{}", type=dict[str, str])
        watchdog.troubles = {
            str(worker_id): status.trouble for worker_id, status in membership.statuses.items() if status.trouble
        }
        watchdog.starting = {
            str(worker_id): status.since_s
            for worker_id, status in membership.statuses.items()
            if status.doing == STARTING
        }
        if queues.get(keys.DEAD, 0) != dead:
            dead, letters = queues.get(keys.DEAD, 0), await broker.dead_letters(count=1)
            given_up = letters[0].reason if letters else ""
        began_s = time.thread_time()
        view = msgspec.to_builtins(state.view())
        status = {
            "run": broker.run,
            "elapsed_s": round(clock.now_s(), 1),
            "events_cursor": decider.cursor,
            **view,
            "wait": shown_wait(state.wait(), clock.now_s()),
            "blocked": watchdog.blocked(state),
            "generation": view["workers"],
            "longest": msgspec.to_builtins(longest_running(state.pipeline)),
            "queues": queues,
            "workers": usage.update(membership.statuses),
            "last": metrics.last_line,
            "last_evaluation": metrics.last_evaluation,
            "warnings": [
                *map(str, read_left_out(run_dir)),
                *_warnings(view["full_precision"], metrics.last_line, mismatch_limit),
            ],
            "remarks": board.remarks,
            "failed": board.failed,
            "num_lost": board.num_lost,
            "lost": list(board.lost),
            "given_up": given_up,
            "gpus": [*msgspec.to_builtins(gpus), *reported_gpus(gpus, membership.statuses)],
            "requests": {number: request.counts() for number, request in state.pipeline.requests.items()},
        }
        board.put(status)
        said_aside = log_aside(view["workers"], said_aside)
        encoded = msgspec.json.encode(status)
        took_s = time.thread_time() - began_s
        await broker.put_meta(keys.STATUS, encoded, ttl_s=TIME_TO_LIVE_S)
        await asyncio.sleep(min(max(PUBLISH_S, took_s / MAX_SHARE), TIME_TO_LIVE_S / 4))


def log_aside(generation: Sequence[Mapping[str, Any]], said: frozenset[str]) -> frozenset[str]:
    """Log each worker that begins to stand aside, and each that ends it.

    generation: of the status.  said: workers that stood aside at the last call.  Returns those of now.
    """
    aside = {worker["worker_id"]: worker for worker in generation if worker["aside_s"] is not None}
    for worker_id in sorted(aside.keys() - said):
        worker = aside[worker_id]
        log.warning(
            "worker stands aside: its loads failed; it is asked again",
            worker=worker_id,
            since_s=worker["aside_s"],
            reason=worker["load_problem"],
        )
    for worker_id in sorted(said - aside.keys()):
        log.info("worker stands aside no more", worker=worker_id)
    return frozenset(aside)


def _warnings(full_precision: str, line: Mapping[str, Any], mismatch_limit: float) -> list[str]:
    """Of the last batch; and that fp8 was given up, for as long as that is so."""
    return [*filter(None, [full_precision]), *(warnings_of(line, mismatch_limit) if line else [])]


async def read_status(broker: Broker) -> dict[str, Any] | None:
    """What ``publish_status`` wrote last; None while no orchestrator is alive."""
    raw = await broker.get_meta(keys.STATUS)
    return None if raw is None else msgspec.json.decode(raw)


def reported_gpus(placed: Sequence[GpuUse], leases: Mapping[WorkerId, WorkerStatus]) -> list[dict[str, Any]]:
    """Rows of ``gpus`` from the leases of workers that are not on ``placed``, by host."""
    known = {name for gpu in placed for name in gpu.workers}
    found: dict[tuple[str, str], list[str]] = {}
    for worker_id in sorted(leases, key=natural_order):
        place = worker_id.rpartition(".")[0]
        for gpu in () if place in known else leases[worker_id].gpus:
            found.setdefault((leases[worker_id].host, gpu), []).append(place)
    return [
        {
            "number": None,
            "name": f"{gpu.partition(' ')[2]} on {host}",
            "memory_mib": None,
            "workers": list(dict.fromkeys(workers)),
            "share": None,
            "held": False,
        }
        for (host, gpu), workers in sorted(found.items())
    ]


class UsageWindow:
    """Busy shares and token rates of the workers over the last RATE_WINDOW_S, from their leases."""

    def __init__(self) -> None:
        self._seen: dict[WorkerId, deque[WorkerStatus]] = {}

    def update(self, leases: Mapping[WorkerId, WorkerStatus]) -> list[dict[str, Any]]:
        for gone in self._seen.keys() - leases.keys():
            del self._seen[gone]
        for worker_id, status in leases.items():
            history = self._seen.setdefault(worker_id, deque())
            if not history or status.elapsed_s > history[-1].elapsed_s:
                history.append(status)
            while history[-1].elapsed_s - history[0].elapsed_s > RATE_WINDOW_S:
                history.popleft()
        rows: list[dict[str, Any]] = []
        for worker_id in sorted(leases):
            first, last = self._seen[worker_id][0], self._seen[worker_id][-1]
            row: dict[str, Any] = {
                "worker": last.worker_id,
                "kind": last.kind.value,
                "doing": last.doing,
                "since_s": round(last.since_s, 1),
                "running": last.running,
                "waiting": last.waiting,
                "weights": str(last.weights) if last.weights else "",
                "counters": last.counters,
                "kv_use": last.kv_use,
                "way": last.way,
                "trouble": last.trouble,
            }
            if elapsed_s := max(0.0, last.elapsed_s - first.elapsed_s):
                tokens = last.counters.get("tokens", 0.0) - first.counters.get("tokens", 0.0)
                idle = 1.0 - (last.busy_s - first.busy_s) / elapsed_s
                row["idle"] = max(0.0, round(idle, 3))  # a lease may count a second of work before it counts the second
                row["tokens_per_s"] = tokens / elapsed_s
            rows.append(row)
        return rows


# --- the past ---------------------------------------------------------------------------------------------------------

LOOK_S = 0.5  # a cell of a lane is looked at twice
LOOKS_A_BUBBLE = 4  # a page asks every two seconds; curves and bubbles are as old at most
PATIENCE_S = 10.0  # bubbles are accounted for while a page asked not longer ago


class PageHistory:
    """Gathers; ``latest`` puts the answer to a page together, about 1 ms for a long run. One ``watch`` at a time."""

    def __init__(self, metrics: Path, membership: Membership, samples: RecentSamples, clock: Clock) -> None:
        self._metrics = NewLines(metrics)
        self._membership = membership
        self._samples = samples
        self._clock = clock
        self._lanes = LaneHistory()
        self._curves = Curves()
        self._events = RecentEvents()
        self._evaluations: deque[Mapping[str, Any]] = deque(maxlen=MAX_POINTS)
        self._components: set[str] = set()
        self._bubbles: dict[str, Any] = {}
        self._asked_s = -PATIENCE_S

    def observe(self, event: Event, now_s: float) -> None:
        self._events.add(event, now_s)
        if isinstance(event, GroupScored) and not is_evaluation(event.group_id):
            self._components |= event.components.keys()

    async def watch(self) -> None:
        """Note what the workers do, and account for bubbles while a page asks, forever."""
        while True:
            for line in await asyncio.to_thread(self._metrics.read):
                if "batch" in line:
                    self._curves.add(line)
                else:
                    self._evaluations.append(line)
            for _ in range(LOOKS_A_BUBBLE):
                self._lanes.note(self._membership.statuses, self._clock.now_s())
                await asyncio.sleep(LOOK_S)
            if self._clock.now_s() - self._asked_s < PATIENCE_S:
                self._bubbles = await asyncio.to_thread(recent_bubbles, self._events.records())

    def latest(self) -> dict[str, Any]:
        self._asked_s = self._clock.now_s()
        return {
            "lanes": self._lanes.as_dict(),
            "curves": self._curves.as_dict(),
            "bubbles": self._bubbles,
            "evaluations": list(self._evaluations),
            "components": sorted(self._components),
            "samples": list(self._samples.newest_first),
        }


# --- lanes ------------------------------------------------------------------------------------------------------------

CELL_S = 1.0  # one cell of a lane: a heartbeat says what its worker does about once a second
CELLS = 300  # five minutes: two or three batches of a small model on two cores, and no more than a screen is wide
MAX_LANES = 64  # a page of more lanes cannot be read; the rest is only counted
BLANK = (" ", "0")
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of states; those beyond share the last one, since no worker has so many


class LaneHistory:
    """What each place in the fleet did, a cell a second: a letter for its state and a digit for its busy share."""

    def __init__(self) -> None:
        self._states: list[str] = []
        self._lanes: dict[str, _Lane] = {}
        self._cell = -1

    def note(self, statuses: Mapping[WorkerId, WorkerStatus], now_s: float) -> None:
        """Mark the cell of ``now_s`` with what the leases say. Call it about twice a cell."""
        cell = int(now_s / CELL_S)
        for lane in self._lanes.values():
            silent = min(CELLS, cell - self._cell)
            lane.silent_cells += silent
            lane.cells.extend([BLANK] * silent)
        self._cell = max(cell, self._cell)
        for status in sorted(statuses.values(), key=lambda status: natural_order(status.worker_id)):  # by incarnation
            place = status.worker_id.rpartition(".")[0]  # a process goes on in the lane of the one that it replaces
            if status.doing not in self._states and len(self._states) < len(LETTERS):
                self._states.append(status.doing)
            known = status.doing in self._states
            lane = self._lanes.setdefault(place, _Lane(kind=status.kind.value))
            lane.mark(LETTERS[self._states.index(status.doing)] if known else LETTERS[-1], status)
        self._lanes = {place: lane for place, lane in self._lanes.items() if lane.silent_cells < CELLS}

    def as_dict(self) -> dict[str, Any]:
        lanes: list[dict[str, str]] = []
        for place in sorted(self._lanes, key=natural_order)[:MAX_LANES]:
            doing, busy = map("".join, zip(*self._lanes[place].cells, strict=True))
            lanes.append({"place": place, "kind": self._lanes[place].kind, "doing": doing, "busy": busy})
        return {
            "cell_s": CELL_S,
            "cells": CELLS,
            "until_s": (self._cell + 1) * CELL_S,
            "states": self._states,
            "lanes": lanes,
            "lanes_left_out": max(0, len(self._lanes) - MAX_LANES),
        }


@dataclass(slots=True, kw_only=True)
class _Lane:
    """cells: letter and busy share of one place.  last: what its worker said last.  share: up to then."""

    kind: str
    cells: deque[tuple[str, str]] = field(default_factory=lambda: deque([BLANK] * CELLS, maxlen=CELLS))
    last: WorkerStatus | None = None
    share: str = "0"
    silent_cells: int = 0

    def mark(self, letter: str, status: WorkerStatus) -> None:
        if self.last is None or self.last.worker_id != status.worker_id:
            self.share = "0"
        elif status.elapsed_s > self.last.elapsed_s:
            share = (status.busy_s - self.last.busy_s) / (status.elapsed_s - self.last.elapsed_s)
            self.share = str(round(9 * min(1.0, max(0.0, share))))
        self.last, self.silent_cells = status, 0
        self.cells[-1] = (letter, self.share)


# --- bubbles ----------------------------------------------------------------------------------------------------------

MAX_EVENTS = 4000  # ten batches of a small run; accounting for so many takes about 40 ms
WORK = (RolloutFinished, GroupScored, RoundDone, StepDone, CheckpointSaved, WeightsLoaded)
PRESENCE = (WorkerJoined, WorkerLost, TrainerReady)
BATCHES = 10  # enough to even out one odd batch
UNSETTLED = 2  # the newest batches are left out: samples that still run are not in any event yet, and would look idle


class RecentEvents:
    """The newest events of work, and of workers that joined and left."""

    def __init__(self) -> None:
        self._work: deque[tuple[float, Event]] = deque(maxlen=MAX_EVENTS)
        self._presence: deque[tuple[float, Event]] = deque(maxlen=MAX_EVENTS)

    def add(self, event: Event, now_s: float) -> None:
        if isinstance(event, PRESENCE):
            self._presence.append((now_s, event))
        elif isinstance(event, WORK):
            self._work.append((now_s, event))

    def records(self) -> list[JournalRecord]:
        """In order of time; positions are not those of the journal."""
        events = heapq.merge(self._presence, self._work, key=itemgetter(0))
        return [JournalRecord(seq=seq, now_s=now_s, event=event) for seq, (now_s, event) in enumerate(events, 1)]


def recent_bubbles(records: Sequence[JournalRecord]) -> dict[str, Any]:
    """Seconds by cause over the last whole batches in ``records``, {} before there are any; about 10 us an event."""
    timeline = build_timeline(records)
    settled = timeline.trained[: len(timeline.trained) - UNSETTLED][-BATCHES - 1 :]
    if len(settled) < 2:
        return {}
    before, last = settled[0], settled[-1]
    usage = usage_by_window(timeline, [before.at_s, last.at_s])
    by_stage: dict[str, dict[str, float]] = {}
    for stage, tracks in stages(timeline).items():
        of_stage = total([usage[track][0] for track in tracks])
        idle = {cause.value: round(seconds, 3) for cause, seconds in of_stage.idle_s.items()}
        by_stage[stage] = {"computing": round(of_stage.busy_s, 3), **idle}
    return {"batches": [before.batch + 1, last.batch], "stages": by_stage}


# --- curves -----------------------------------------------------------------------------------------------------------

MAX_POINTS = 240  # of a curve: about one a pixel where it is drawn small


class Curves:
    """One point a trained batch; of a long run every second, fourth, ... and always the newest."""

    def __init__(self) -> None:
        self._lines: list[Mapping[str, Any]] = []
        self._stride = 1

    def add(self, line: Mapping[str, Any]) -> None:
        def key(of: Mapping[str, Any]) -> tuple[int, int]:
            return of.get("incarnation", 0), of["batch"]

        if self._lines and key(line) < key(self._lines[-1]):
            return  # the late line of an earlier batch
        # A batch that is trained again after a restart removes what came after it.
        kept = [known for known in self._lines if known["batch"] < line["batch"]]
        if kept and kept[-1]["batch"] % self._stride:
            kept.pop()  # it was there only as the newest
        self._lines = [*kept, line]
        if len(self._lines) > MAX_POINTS:
            self._stride *= 2
            self._lines = [known for known in kept if not known["batch"] % self._stride] + [line]

    def as_dict(self) -> dict[str, list[float | None]]:
        """Numbers by name, one list a name, all of one length; None where a batch has no such number."""

        def shown(value: float | None) -> float | None:
            """Five digits: more cannot be seen. What JSON has no number for is no point."""
            if isinstance(value, int):
                return value
            return float(f"{value:.5g}") if value is not None and abs(value) < float("inf") else None

        names = sorted({name for line in self._lines for name, value in line.items() if isinstance(value, int | float)})
        return {name: [shown(line.get(name)) for line in self._lines] for name in names}
