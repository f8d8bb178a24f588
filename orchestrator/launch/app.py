"""The orchestrator process: wiring, and the one TaskGroup.

                       events log ──► read_events ─┐
                            leases ──► membership ─┤            ┌─► journal (first)
     prompt source ──► prompt desk ────────────────┼─► inbox ─► decide ─► PipelineState.handle ─► commands
                   ranker, its judge ──────────────┤
                             clock ──► tick ───────┤            └─► metrics, watchdog, status ─► HTTP │
                     retained bytes ─► watch_usage ┘                                                  ▼
      rounds, plans:<worker>, control:<worker>, group columns ◄── broker ◄───────────────────── executor

Back-pressure: the inbox is bounded, so when deciding is behind, events wait in the broker; the core admits no more
than its staleness bound allows, so what the executor may have to do is bounded too; ``max_retained_bytes`` bounds the
broker.
Recovery: newest snapshot, then the journal's tail through the same ``handle``; then everything that was commanded and
not confirmed is carried out again (entry ids make that harmless).
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from starlette.types import ASGIApp

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.dataflow import grpo_tasks
from orchestrator.core.state import PipelineState
from orchestrator.errors import RunFailedError
from orchestrator.journal import Journal, is_new, newest_epoch, read_records, sole_writer
from orchestrator.lengths.ranking import Ranking, open_ranker
from orchestrator.loop.decide import Decider, recover_state
from orchestrator.loop.execute import Executor
from orchestrator.loop.intake import READ_COUNT, Inbox, burying, new_inbox, read_events, tick, watch_usage
from orchestrator.loop.membership import Membership
from orchestrator.loop.planner import Planner
from orchestrator.loop.prompt_server import Desk
from orchestrator.loop.reconcile import keep_reconciled
from orchestrator.loop.trimming import Trimmer
from orchestrator.loop.watchdog import Watchdog
from orchestrator.observability.http.control import Control
from orchestrator.observability.http.page_history import LookBack
from orchestrator.observability.http.routes import Api, build_app
from orchestrator.observability.http.server import open_listener, run_key, serve_http
from orchestrator.observability.http.status import StatusBoard, publish_status
from orchestrator.observability.metrics import MetricsLog
from orchestrator.observability.report.samples import SAMPLES, SampleKeeper
from orchestrator.observability.samples import RecentSamples
from orchestrator.prompts.held_out import write_held_out
from orchestrator.prompts.source import PromptSource, ShuffledSource, held_out, load_detokenizer, open_source
from orchestrator.serving.http import BODY_LIMITS, ServiceApi
from orchestrator.serving.prompts import ServicePrompts
from orchestrator.serving.request_store import REQUESTS, NoPrompts, Spool
from orchestrator.serving.service import Service
from ranker.protocol import ConstantPredictor
from transport.broker import keys
from transport.broker.base import Broker, Commit, Fence
from transport.contracts.ledger import checkpoint_dirs
from transport.contracts.messages import FinishRun, RunResumed, SlotOutcome, TrainRound, TrialRows, encode
from transport.contracts.model_identity import ModelIdentity, identify_model
from transport.contracts.settings import Settings, public
from transport.errors import FencedError, RunExistsError
from transport.process.clock import Clock, MonotonicClock
from transport.rows.columns import BrokerRows

log = structlog.get_logger(__name__)

RECALLED = 20_000
"""Events of before a restart that metrics still need: about 0.2 s to read, more than the batches that are open."""
FLUSH_S = 10.0
"""At the end, how long the last commands may take to reach the broker."""


async def serve(settings: Settings, broker: Broker, run_dir: Path, model_dir: Path) -> bool:
    """Orchestrate the run until it is finished or a signal comes. Returns whether it is finished.

    First the epoch, so that the broker refuses whatever an orchestrator before this one still commands; then the
    journal's lock, for which that one must have left; then the journal, which nobody changes any more.

    Raises: StalledError, RunFailedError, FencedError (another orchestrator took the run over), RunExistsError,
    JournalError (history is damaged), JournalHeldError (the orchestrator before this one does not leave).
    """
    rundir = RunDir(run_dir)
    if is_new(rundir.journal):
        await check_new(broker, rundir)
    epoch = await broker.acquire_epoch("orchestrator", at_least=newest_epoch(rundir.journal))
    async with sole_writer(rundir.journal):
        return await _serve(settings, broker, rundir, model_dir, Fence(role="orchestrator", epoch=epoch))


async def _serve(settings: Settings, broker: Broker, rundir: RunDir, model_dir: Path, fence: Fence) -> bool:
    """``serve`` with the right to write."""
    journal, recovered = Journal.open(rundir.journal, epoch=fence.epoch)
    state, restated = recover_state(settings, journal, recovered)
    spool = Spool(rundir.path / REQUESTS) if settings.trainer.engine == "none" else None
    source, problems = await open_prompts(settings, model_dir, state)
    trial = source.trial_rows(settings.scoring.answer_marker) if isinstance(source, ShuffledSource) else None
    clock = MonotonicClock(origin_s=recovered.now_s)
    ranking = await open_ranking(settings, rundir, clock)
    predictor = ranking or ConstantPredictor(tokens=float(settings.sampling.max_new_tokens))
    told = {command.group_id for _, command in restated if isinstance(command, SlotOutcome)}
    desk = Desk(source, predictor, held_out=problems, learnt=told)
    metrics = MetricsLog(rundir.metrics, trains=spool is None, passes=settings.trainer.epochs)
    rounds = [command for _, command in restated if isinstance(command, TrainRound)]
    metrics.recall(read_records(rundir.journal, from_seq=max(1, state.seq - RECALLED)), rounds)
    watchdog = Watchdog(settings.liveness, clock, max_failed_share=settings.scoring.max_failed_share)
    ended = Ending()
    planner = Planner(lambda: state.settings)
    executor = Executor(broker, fence, spool or desk, planner, on_finish=ended.finish, last_seq=state.seq)
    inbox = new_inbox()
    if ranking is not None:
        ranking.introduce(inbox)
    service = await open_service(settings, state, broker, inbox, spool, model_dir) if spool is not None else None
    keeper = SampleKeeper(rundir.path / SAMPLES)
    samples = RecentSamples(BrokerRows(broker), lambda: load_detokenizer(model_dir), keeper.keep)
    on_events = service.on_events if service is not None else samples.on_events
    decider = Decider(state, journal, executor, metrics, watchdog, clock, recovered.cursor, Trimmer(broker), on_events)

    async def restore() -> None:
        await furnish(broker, settings, state.trainer_epoch, model, trial)
        decider.restate()

    if await was_resumed(broker, recovered.cursor):
        restated = [issued for issued in restated if not isinstance(issued[1], FinishRun)]
    model = await asyncio.to_thread(identify_model, model_dir)
    await furnish(broker, settings, state.trainer_epoch, model, trial)
    executor.submit(restated)
    log.info("serving", run=broker.run, epoch=fence.epoch, events=state.seq, replayed=len(recovered.tail))
    if recovered.num_void:
        log.warning(
            "the journal had two writers; records of the one that was replaced are void", records=recovered.num_void
        )

    board = StatusBoard(clock)
    membership = Membership(broker, settings.liveness.lease_s, clock)
    look_back = LookBack(membership, metrics, samples, clock)
    ended.heed_signals()
    listener = open_listener(settings.api, rundir.api_address) if settings.api.enabled else None
    gc.freeze()  # modules and what was restored are no garbage: collections need not walk through them again and again
    async with asyncio.TaskGroup() as group:
        loops: list[asyncio.Task[None]] = []

        def run(name: str, loop: Coroutine[Any, Any, None]) -> None:
            loops.append(group.create_task(loop, name=name))

        run("events", read_events(broker, inbox, recovered.cursor))
        run("tick", tick(inbox))
        run("usage", watch_usage(broker, fence, inbox))
        run("membership", membership.watch(inbox, state.worker_ids))
        run("desk", desk.run(inbox))
        run("planner", planner.run(inbox))
        run("executor", executor.run())
        run("decide", burying(decider.run(inbox), broker))
        run("reconcile", keep_reconciled(broker, inbox, state.rows_told, state.rows_scored, restore))
        run("held out", asyncio.to_thread(write_held_out, settings, model_dir, rundir.held_out))
        run("status", publish_status(broker, state, membership, metrics, watchdog, clock, board, decider))
        run("watchdog", watchdog.watch(state))
        run("look back", look_back.watch())
        if service is None:
            run("samples", samples.watch())
        if ranking is not None:
            run("judge ranker", ranking.judge(inbox))
            if settings.ranker.kind == "text":
                run("refit ranker", ranking.learn())
        if listener is not None:
            api, control = Api(board, rundir.metrics, look_back.latest), Control(broker, settings, state.view)
            web = await open_web(settings, rundir, model_dir, api, control, service)
            run("http", serve_http(web, listener))
        if service is not None:
            await service.recover()
        await ended.wait()
        await flush(decider)
        for loop in loops:
            loop.cancel()
    if ranking is not None:
        await asyncio.to_thread(ranking.save)
    journal.close()
    if ended.failure:
        raise RunFailedError(ended.failure)
    return ended.finished


async def open_prompts(
    settings: Settings, model_dir: Path, state: PipelineState
) -> tuple[PromptSource, PromptSource | None]:
    """Prompts, from where the state left off, and the problems of evaluations where there are any. Raises DataError."""
    trains = settings.trainer.engine != "none"
    source = await asyncio.to_thread(open_source, settings, model_dir) if trains else NoPrompts()
    source.seek(state.source_position)
    evaluates = settings.eval.every > 0 or state.evaluation() is not None
    return source, await asyncio.to_thread(held_out, settings, model_dir) if evaluates else None


async def open_ranking(settings: Settings, rundir: RunDir, clock: Clock) -> Ranking | None:
    """Who predicts lengths and learns them; None where nobody does. Raises RankerError."""
    if settings.ranker.kind == "none" or settings.trainer.engine == "none":
        return None  # nobody predicts prompts of a service: each has a reader who waits for it
    ranker = await asyncio.to_thread(open_ranker, settings, rundir.ranker)
    return Ranking(ranker, rundir.ranker, clock, refit_s=settings.ranker.refit_s)


async def open_web(
    settings: Settings, rundir: RunDir, model_dir: Path, api: Api, control: Control, service: Service | None
) -> ASGIApp:
    """Everything that is answered over HTTP, behind the run's key."""
    routes = [*api.routes(), *control.routes()]
    if service is not None:
        prompts = await asyncio.to_thread(ServicePrompts, settings, model_dir)
        routes += ServiceApi(service, prompts, settings).routes()
    key = run_key(settings.api, rundir.api_secret)
    return build_app(routes, host=settings.api.host, key=key, body_limits=BODY_LIMITS)


async def open_service(
    settings: Settings, state: PipelineState, broker: Broker, inbox: Inbox, spool: Spool, model_dir: Path
) -> Service:
    """The service of a run that trains nothing."""
    detokenize = await asyncio.to_thread(load_detokenizer, model_dir)
    return Service(settings, state, broker, BrokerRows(broker), inbox, spool, detokenize)


async def flush(decider: Decider) -> None:
    """Let the last commands reach the broker, and keep the state after them. Never raises on a time-out."""
    try:
        async with asyncio.timeout(FLUSH_S):
            await decider.snapshot()
    except TimeoutError:
        log.warning("the broker did not take the last commands; they are carried out at the next start")


class Ending(asyncio.Event):
    """Set when the run is over, or when this process shall end.

    finished: the run is over.  failure: why the run failed, "" when it did not.
    """

    finished = False
    failure = ""

    def heed_signals(self) -> None:
        """A first SIGTERM or SIGINT ends this process, not the run."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.set)

    def finish(self, command: FinishRun) -> None:
        """The core ends the run."""
        self.finished = True
        self.failure = command.reason if command.failed else ""
        self.set()


async def check_new(broker: Broker, rundir: RunDir) -> None:
    """A run without a journal begins, so nothing of its name may be there yet. Raises RunExistsError."""
    if await broker.get_meta(keys.STATE) is not None:
        raise RunExistsError(
            f"the broker already holds a run named {broker.run!r}, and it is not the one in {rundir.path}: "
            "choose another --name"
        )
    if checkpoint_dirs(rundir.checkpoints):
        raise RunExistsError(
            f"{rundir.checkpoints} holds checkpoints, but {rundir.journal} nothing that says how they came to be: put "
            "the journal back, or start a run of another --name from a model directory (model.path)"
        )


async def furnish(
    broker: Broker, settings: Settings, trainer_epoch: int, model: ModelIdentity, trial: TrialRows | None = None
) -> None:
    """What workers need in the broker beside entries and rows; again after it lost its tail, which may reach so far.

    trainer_epoch: the highest that was told, so that no later trainer gets it once more.  model: what workers have.
    trial: what rewards are tried on; there before the settings, for which workers wait.
    """
    trains = settings.trainer.engine != "none"
    await broker.declare_tasks(grpo_tasks(with_reference=settings.algorithm.kl_coef > 0) if trains else ())
    with suppress(FencedError):  # the broker knows a newer one
        await broker.commit(Commit(fence=Fence(role="trainer", epoch=trainer_epoch)))
    await broker.put_meta(keys.MODEL, encode(model))
    if trial is not None:
        await broker.put_meta(keys.TRIAL, encode(trial))
    await broker.put_meta(keys.SETTINGS, encode(public(settings)))
    await broker.put_meta(keys.STATE, keys.STATE_RUNNING)


async def was_resumed(broker: Broker, cursor: str) -> bool:
    """Whether an event that was not read yet says that the run goes on: then its former end is no end any more."""
    while entries := await broker.read(keys.EVENTS, cursor, count=READ_COUNT):
        if any(entry.entry.fields.get("event") == RunResumed.__name__ for entry in entries):
            return True
        cursor = entries[-1].entry_id
    return False
