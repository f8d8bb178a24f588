"""The orchestrator process: wiring, and the one TaskGroup.

                       events log ──► read_events ─┐
                            leases ──► membership ─┤            ┌─► journal (first)
     prompt source ──► prompt server ──────────────┼─► inbox ─► decide ─► PipelineState.handle ─► commands
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
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog
from starlette.types import ASGIApp

from orchestrator.config.run_directory import RunDir
from orchestrator.core.state import PipelineState
from orchestrator.errors import RunFailedError
from orchestrator.journal import Journal, is_new, newest_epoch, read_records, sole_writer
from orchestrator.lengths.ranking import Ranking, open_ranker
from orchestrator.loop.decide import Decider, Trimmer, recover_state
from orchestrator.loop.execute import Executor, Issued
from orchestrator.loop.intake import Arrival, Inbox, burying, new_inbox, read_events, tick, watch_usage
from orchestrator.loop.membership import Membership
from orchestrator.loop.planner import Planner
from orchestrator.loop.prompt_server import PromptServer
from orchestrator.loop.reconcile import check_new, keep_reconciled, publish_run_metadata, was_resumed
from orchestrator.loop.watchdog import Watchdog
from orchestrator.observability.http.page_history import PageHistory
from orchestrator.observability.http.routes import Api, ControlRoutes, build_app
from orchestrator.observability.http.server import open_listener, run_key, serve_http
from orchestrator.observability.http.status import StatusBoard, publish_status
from orchestrator.observability.metrics import MetricsLog
from orchestrator.observability.samples import SAMPLES, RecentSamples, SampleKeeper
from orchestrator.prompts.source import ShuffledSource, held_out, load_detokenizer, open_source, write_held_out
from orchestrator.serving.http import BODY_LIMITS, ServiceApi
from orchestrator.serving.prompts import ServicePrompts
from orchestrator.serving.request_store import REQUESTS, RequestStore
from orchestrator.serving.service import Service
from ranker.protocol import ConstantPredictor
from transport.broker.base import Broker, Fence
from transport.contracts.messages import Command, Event, FinishRun, SlotOutcome, TrainRound, TrialRows
from transport.contracts.model_identity import identify_model
from transport.contracts.settings import Settings
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
    journal's lock, for which that one must have left; then the journal, which no other process changes any more.

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
    """``serve`` with the right to write: recover, wire, run every loop until the end, flush."""
    journal, recovered = Journal.open(rundir.journal, epoch=fence.epoch)
    state, restated = recover_state(settings, journal, recovered)
    if await was_resumed(broker, recovered.cursor):
        restated = [issued for issued in restated if not isinstance(issued[1], FinishRun)]
    clock, inbox, ended = MonotonicClock(origin_s=recovered.now_s), new_inbox(), Ending()
    requests = RequestStore(rundir.path / REQUESTS) if settings.trainer.engine == "none" else None

    ranking = await open_ranking(settings, rundir, clock, inbox)
    prompts, trial = await open_prompts(settings, model_dir, state, requests, ranking, restated)
    planner = Planner(lambda: state.settings)
    executor = Executor(broker, fence, prompts, planner.request, on_finish=ended.finish, last_seq=state.seq)
    metrics = open_metrics(settings, rundir, state, restated)
    watchdog = Watchdog(settings.liveness, clock, max_failed_share=settings.scoring.max_failed_share)
    samples = RecentSamples(
        BrokerRows(broker), lambda: load_detokenizer(model_dir), SampleKeeper(rundir.path / SAMPLES).keep
    )
    service = await open_service(settings, state, broker, inbox, requests, model_dir) if requests is not None else None

    membership = Membership(broker, settings.liveness.lease_s, clock)
    history = PageHistory(rundir.metrics, membership, samples, clock)

    def observe(event: Event, commands: Sequence[Command], now_s: float) -> None:
        watchdog.observe(event)
        metrics.observe(event, commands, now_s)
        history.observe(event, now_s)

    on_events = samples.on_events if service is None else service.on_events
    decider = Decider(
        state, journal, executor, Trimmer(broker), clock, recovered.cursor, observe=observe, on_events=on_events
    )
    board = StatusBoard(clock)
    api, control = Api(board, rundir.metrics, history.latest), ControlRoutes(broker, settings, state.view)
    model = await asyncio.to_thread(identify_model, model_dir)

    async def publish_metadata() -> None:
        await publish_run_metadata(broker, settings, state.trainer_epoch, model, trial)

    async def restore() -> None:
        await publish_metadata()
        decider.restate()

    await publish_metadata()
    executor.submit(restated)
    log.info("serving", run=broker.run, epoch=fence.epoch, events=state.seq, replayed=len(recovered.tail))
    if recovered.num_void:
        log.warning(
            "the journal had two writers; records of the one that was replaced are void", records=recovered.num_void
        )
    ended.end_on_signals()
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
        run("prompts", prompts.run(inbox))
        run("planner", planner.run(inbox))
        run("executor", executor.run())
        run("decide", burying(decider.run(inbox), broker))
        run("reconcile", keep_reconciled(broker, inbox, state.rows_reported, state.rows_scored, restore))
        run("held out", asyncio.to_thread(write_held_out, settings, model_dir, rundir.held_out))
        run("status", publish_status(broker, state, membership, metrics, watchdog, clock, board, decider))
        run("watchdog", watchdog.watch(state))
        run("page history", history.watch())
        if service is None:
            run("samples", samples.watch())
        if ranking is not None:
            run("judge ranker", ranking.judge(inbox))
            if settings.ranker.kind == "text":
                run("refit ranker", ranking.learn())
        if listener is not None:
            run("http", serve_http(await open_web(settings, rundir, model_dir, api, control, service), listener))
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


async def open_ranking(settings: Settings, rundir: RunDir, clock: Clock, inbox: Inbox) -> Ranking | None:
    """Predicts lengths and learns them; None where there is no ranker. Raises RankerError."""
    if settings.ranker.kind == "none" or settings.trainer.engine == "none":
        return None  # prompts of a service are not predicted: each has a reader who waits for it
    ranker = await asyncio.to_thread(open_ranker, settings, rundir.ranker)
    ranking = Ranking(ranker, rundir.ranker, clock, refit_s=settings.ranker.refit_s)
    ranking.introduce(inbox)
    return ranking


async def open_prompts(
    settings: Settings,
    model_dir: Path,
    state: PipelineState,
    requests: RequestStore | None,
    ranking: Ranking | None,
    restated: Sequence[Issued],
) -> tuple[PromptServer, TrialRows | None]:
    """Prompts, from where the state left off, with the problems of evaluations where there are any; and the rows that a
    reward is tried on. Raises DataError."""
    source = requests or await asyncio.to_thread(open_source, settings, model_dir)
    source.seek(state.source_position)
    evaluates = settings.eval.every > 0 or state.evaluation() is not None
    problems = await asyncio.to_thread(held_out, settings, model_dir) if evaluates else None
    predictor = ranking or ConstantPredictor(tokens=float(settings.sampling.max_new_tokens))
    learnt = {command.group_id for _, command in restated if isinstance(command, SlotOutcome)}
    trial = source.trial_rows(settings.scoring.answer_marker) if isinstance(source, ShuffledSource) else None
    return PromptServer(source, predictor, held_out=problems, learnt=learnt), trial


def open_metrics(settings: Settings, rundir: RunDir, state: PipelineState, restated: Sequence[Issued]) -> MetricsLog:
    """The run's metrics, with what they need of the time before a restart."""
    metrics = MetricsLog(rundir.metrics, trains=settings.trainer.engine != "none", passes=settings.trainer.epochs)
    rounds = [command for _, command in restated if isinstance(command, TrainRound)]
    metrics.recall(read_records(rundir.journal, from_seq=max(1, state.seq - RECALLED)), rounds)
    return metrics


async def open_service(
    settings: Settings, state: PipelineState, broker: Broker, inbox: Inbox, requests: RequestStore, model_dir: Path
) -> Service:
    """The service of a run that trains nothing."""
    detokenize = await asyncio.to_thread(load_detokenizer, model_dir)

    async def report(event: Event) -> None:
        await inbox.put(Arrival(event))

    return Service(settings, state, broker, BrokerRows(broker), report, requests, detokenize)


async def open_web(
    settings: Settings, rundir: RunDir, model_dir: Path, api: Api, control: ControlRoutes, service: Service | None
) -> ASGIApp:
    """Everything that is answered over HTTP, behind the run's key."""
    routes = [*api.routes(), *control.routes()]
    if service is not None:
        prompts = await asyncio.to_thread(ServicePrompts, settings, model_dir)
        routes += ServiceApi(service, prompts, settings).routes()
    key = run_key(settings.api, rundir.api_secret)
    return build_app(routes, host=settings.api.host, key=key, body_limits=BODY_LIMITS)


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

    def end_on_signals(self) -> None:
        """A first SIGTERM or SIGINT ends this process, not the run."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.set)

    def finish(self, command: FinishRun) -> None:
        """The core ends the run."""
        self.finished = True
        self.failure = command.reason if command.failed else ""
        self.set()
