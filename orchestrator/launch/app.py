"""The orchestrator process: wiring, and the one TaskGroup.

                       events log ──► read_events ─┐
                            leases ──► membership ─┤            ┌─► journal (first)
     prompt source ──► prompt server ──────────────┼─► inbox ─► decide ─► PipelineState.handle ─► commands
                   ranker, its judge ──────────────┤
                             clock ──► tick ───────┤            └─► metrics, watchdog, status ─► HTTP │
                     retained bytes ─► watch_usage ┘                                                  ▼
      rounds, plans:<worker>, control:<worker>, group columns ◄── broker ◄───────────────────── executor

``main`` is a child of ``run``, whose directory is there and locked by its supervisor; ``main_alone`` is the control
plane by itself, which workers join over the broker at any time.

Back-pressure: the inbox is bounded, so when deciding is behind, events wait in the broker; the core admits no more
than its staleness bound allows, so what the executor may have to do is bounded too; ``max_retained_bytes`` bounds the
broker.
Recovery: newest snapshot, then the journal's tail through the same ``handle``; then everything that was commanded and
not confirmed is carried out again (entry ids make that harmless).
Invariants: what ends the process is one StreamError, whose exit code says whether starting it again is of use; when a
control plane by itself has ended the run, its workers have left, so that its broker may be stopped.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import structlog
import uvloop

from orchestrator.config.load import Resolved, render, resolve
from orchestrator.config.run_directory import RunDir, resume_command, serve_command
from orchestrator.config.starts import note_start, read_starts
from orchestrator.core.model.groups import Stage
from orchestrator.core.state import PipelineState
from orchestrator.core.view import rows_reported
from orchestrator.errors import ConfigError, ExitCode, Interrupted, RunFailedError
from orchestrator.http import check_listening, open_listener
from orchestrator.journal import Journal, is_new, newest_epoch, read_records, sole_writer
from orchestrator.launch.checks import FIRST_ANSWER_S, check_cluster, check_inputs, prepare_model, remarks
from orchestrator.launch.console import RunConsole
from orchestrator.launch.growth import STOP_GRACE_S, add_workers, report_loss, tell_pending
from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.launch.launchers.choice import open_launcher
from orchestrator.launch.ownership import check_name, current_claim, holding, note_start_id, take_name
from orchestrator.launch.processes import Children, Fleet, environment_arguments, score_arguments, train_arguments
from orchestrator.loop.decide import Decider, Trimmer, recover_state, take_out_foreign
from orchestrator.loop.execute import Executor, Issued, Planner
from orchestrator.loop.intake import (
    Arrival,
    Inbox,
    Membership,
    append_event,
    burying,
    check_new,
    keep_reconciled,
    new_inbox,
    publish_run_metadata,
    read_events,
    tick,
    was_resumed,
    watch_usage,
)
from orchestrator.loop.prompt_server import PromptServer
from orchestrator.loop.ranking import Ranking, open_oracle, open_ranker
from orchestrator.loop.routes import route_weights
from orchestrator.loop.watchdog import Watchdog
from orchestrator.observability.http.routes import Api, ControlRoutes, build_app
from orchestrator.observability.http.status import PageHistory, StatusBoard, publish_status
from orchestrator.observability.live import open_view
from orchestrator.observability.loggers import check_loggers, logging_metrics
from orchestrator.observability.metrics import MetricsLog
from orchestrator.observability.samples import SAMPLES, ReadOwnPrompt, RecentSamples, SampleKeeper
from orchestrator.observability.standing import nothing_left, noting_end, read_standing
from orchestrator.prompts.source import (
    MixedSource,
    ShuffledSource,
    held_out,
    load_detokenizer,
    open_source,
    sampling_of_sets,
    trial_rows,
    write_held_out,
)
from orchestrator.serving.http import BODY_LIMITS, ServiceApi, ServicePrompts
from orchestrator.serving.service import REQUESTS, RequestStore, Service
from ranker.protocol import ConstantPredictor
from transport.broker import keys
from transport.broker.base import Broker, Fence, RunClaim, without_password
from transport.broker.redis_streams import connect
from transport.contracts.messages import (
    Command,
    Event,
    FinishRun,
    RunResumed,
    SlotOutcome,
    SpawnWorkers,
    TrainRound,
    TrialRows,
    encode,
)
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, RunName, WorkerId, WorkerKind
from transport.contracts.user_files import identify_model
from transport.errors import StreamError, TransientError, first_error
from transport.process import faults
from transport.process.clock import Clock, MonotonicClock
from transport.process.http import run_key, serve_http
from transport.process.programs import command, configure_logs, ending_signals, leave_terminal
from transport.process.secret import secrets_env
from transport.process.tasks import beside
from transport.rows.run_rows import open_rows
from transport.tensors.base import is_loopback
from transport.tensors.shm import segment_directories, sweep_stale

log = structlog.get_logger(__name__)

RECALLED = 20_000
"""Events of before a restart that metrics still need: about 0.2 s to read, more than the batches that are open."""
FLUSH_S = 10.0
"""At the end, how long the last commands may take to reach the broker."""
POLL_S = 0.1
SHOW_S = 0.5


# -- the process


def main(*, run: str, broker_url: str, run_dir: Path, model_dir: Path, environ: Mapping[str, str]) -> int:
    """Serve ``run`` until it is over. Raises StreamError, or ConfigError for a damaged config.toml in ``run_dir``."""
    configure_logs(process="orchestrator")
    faults.arm(environ.get("STREAMRL_FAULTS", ""))
    stored = RunDir(run_dir).config
    settings = resolve(None, [], [f"broker.url={broker_url}"], environ, stored=stored).settings
    go_on = resume_command(run_dir, resolve(None, [], [], {}, stored=stored).settings)
    claim = current_claim(RunDir(run_dir)) or note_start_id(RunDir(run_dir))[0]
    return _run(_connected(settings, claim, RunName(run), run_dir, model_dir, go_on=go_on))


def main_alone(resolved: Resolved, *, resume: bool, reopen: bool, model_dir: Path | None, grows: bool = False) -> int:
    """Claim the run's directory and serve it. Returns 0, also at once for a finished run, whose files stay as they are.

    resume: the run is there already.  reopen: end its pause, too; its end is undone in any case where more is asked.
    model_dir: None prepares ``model.path``; only its tokenizer is used here.  grows: start the generation workers that
    the run asks for, through its launcher; without it they are waited for.
    Raises: ConfigError without a broker; RunExistsError; Interrupted when a signal came before the run was over.
    """
    settings = resolved.settings
    if not settings.broker.url:
        raise ConfigError("serve starts no broker: name one with --broker", key="broker.url")
    run_dir = Path(settings.run.dir) / settings.run.name
    if resume and (said := nothing_left(read_standing(run_dir), settings, serve_command)):
        print(said)
        return ExitCode.OK
    check_listening(settings.api)
    problems = check_inputs(settings)
    configure_logs(process="orchestrator")
    for remark in remarks(settings, problems):
        log.warning(remark)
    return _run(_alone(resolved, resume=resume, reopen=reopen, model_dir=model_dir, grows=grows))


def _run(work: Coroutine[Any, Any, bool]) -> int:
    try:
        finished = uvloop.run(work)
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    if not finished:
        raise _interrupted()
    return 0


def _interrupted() -> Interrupted:
    return Interrupted("stopped before the run was over; everything is kept for --resume")


async def _alone(resolved: Resolved, *, resume: bool, reopen: bool, model_dir: Path | None, grows: bool) -> bool:
    settings = resolved.settings
    name = RunName(settings.run.name)
    broker = await connect(settings.broker, name, outage_s=FIRST_ANSWER_S)
    rundir = RunDir(Path(settings.run.dir) / name)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(broker.close)
        rundir.check_free(resume=resume)
        await check_name(broker, rundir)  # it answers, and the name is ours: worth a directory and a model
        await check_loggers(settings.run.loggers)
        rundir.claim(render(resolved), resume=resume)
        stack.callback(rundir.unlock)
        claim = await take_name(broker, rundir)
        reopen = reopen or await broker.get_meta(keys.STATE) == keys.STATE_FINISHED
        await stack.enter_async_context(holding(broker, claim))
        return await _alone_with_name(
            resolved, rundir, claim, resume=resume, reopen=reopen, model_dir=model_dir, grows=grows
        )


async def _alone_with_name(
    resolved: Resolved,
    rundir: RunDir,
    claim: RunClaim,
    *,
    resume: bool,
    reopen: bool,
    model_dir: Path | None,
    grows: bool,
) -> bool:
    settings, name = resolved.settings, RunName(resolved.settings.run.name)
    view = open_view(plain=True)
    try:
        if model_dir is None:
            model_dir = await prepare_model(settings.model.path, rundir.logs, view.note, settings=settings)
        view.note(f"run {name} in {rundir.path}; workers join with (on another host, with the streamrl-worker there)")
        for line in join_commands(settings):
            view.note(f"  {line}")
        if is_loopback(settings.tensors.host) and settings.trainer.engine != "none":
            view.note(
                "  workers on other hosts need --listen on the trainer, and STREAMRL_SECRET (docs/quickstarts.md)"
            )
        if settings.api.enabled:  # its key is not for a log that others collect
            look = command("streamrl-orchestrator", "inspect", rundir.path, "--broker", settings.broker.url)
            view.note(f"live page: once it is served, its link is what this prints first:\n  {look}")
        console = RunConsole(settings, rundir, view, links=False)
        note_start(rundir, resolved)
        async with logging_metrics(settings, rundir, view.note):
            with noting_end(rundir) as stopwatch:
                go_on = serve_command(rundir.path, settings)
                serving = partial(
                    _connected,
                    settings,
                    claim,
                    name,
                    rundir.path,
                    model_dir,
                    go_on=go_on,
                    reopen=resume and reopen,
                    alone=True,
                )
                grown = _growing(serving, settings, claim, rundir, model_dir, resume=resume) if grows else serving()
                async with _showing(console, settings, claim):
                    if not await _while_there(rundir, grown):
                        raise _interrupted()
        console.write_report()
        view.note(console.summary(stopwatch.stop()))
        view.note("the run is over: its workers end by themselves, and the broker is left as it is")
        return True
    finally:
        sweep_stale(*segment_directories(rundir.path))  # of workers on this machine that were killed


@asynccontextmanager
async def _showing(console: RunConsole, settings: Settings, claim: RunClaim) -> AsyncGenerator[None]:
    """Report the run to ``console`` within the block: a line a batch, and all that ``run`` says as well."""
    broker = await connect(settings.broker, RunName(settings.run.name))

    async def show() -> None:
        while True:
            await console.show(broker)
            await asyncio.sleep(SHOW_S)

    try:
        await broker.join_run(claim.run_id)
        async with beside(show(), name="show the run"):
            yield
        await console.show(broker)
    finally:
        await broker.close()


async def _while_there(rundir: RunDir, work: Coroutine[Any, Any, bool]) -> bool:
    """``work``. Raises DirectoryError as soon as the run's directory is gone; ``work`` is cancelled then."""
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(rundir.watch(), name="directory")
            result = await work
            watch.cancel()
        return result
    except (StreamError, OSError, BaseExceptionGroup):
        rundir.check_there()
        raise


async def _growing(
    serving: Callable[[], Coroutine[Any, Any, bool]],
    settings: Settings,
    claim: RunClaim,
    rundir: RunDir,
    model_dir: Path,
    *,
    resume: bool,
) -> bool:
    """``serving``, and beside it start the generation workers that the run asks for; they are gone when it is over."""
    check_cluster(settings)
    launcher = open_launcher(settings, rundir, begun=())
    children = Children(rundir.logs, max_restarts=settings.liveness.max_restarts, launcher=launcher)
    url, password = without_password(settings.broker.url)
    fleet = Fleet(
        settings=settings,
        run_dir=rundir.path,
        model_dir=model_dir,
        url=url,
        env=secrets_env(password or settings.broker.password, settings.api.secret),
        is_local=launcher.is_local,
        run_id=claim.run_id,
    )
    async with AsyncExitStack() as stack:
        broker = await connect(settings.broker, RunName(settings.run.name))
        stack.push_async_callback(broker.close)
        await broker.join_run(claim.run_id)
        stack.push_async_callback(launcher.close)
        await launcher.open(resume=resume)
        stack.push_async_callback(children.stop, grace_s=STOP_GRACE_S)
        group = await stack.enter_async_context(asyncio.TaskGroup())

        def start(index: int) -> ProcessSpec:
            spec = fleet.worker(WorkerKind.GENERATE, index)

            async def on_death(pid: int, how: str) -> None:
                await report_loss(broker, spec, pid if launcher.is_local else None)

            tasks.append(group.create_task(children.keep(spec, on_death=on_death), name=spec.name))
            return spec

        tasks = [group.create_task(children.watch_pending(partial(tell_pending, broker)), name="pending")]
        adding = add_workers(broker, start, first=settings.generation.num_workers)
        tasks.append(group.create_task(adding, name="add workers"))
        finished = await serving()
        for task in tasks:
            task.cancel()
    return finished


def join_commands(settings: Settings) -> list[str]:
    """What to type, here, for each kind of worker that the run needs."""
    generate, train = ["generate", *environment_arguments(settings)], ["train", *train_arguments(settings)]
    score = [["score", *score_arguments(settings, pool)] for pool in settings.scorers]
    kinds = [["publish"], generate] if settings.trainer.engine == "none" else [generate, *score, train]
    kinds += [["critic"]] if settings.has_critic else []
    where = ["--broker", without_password(settings.broker.url)[0], "--run", settings.run.name]
    return [command("streamrl-worker", *kind, *where) for kind in kinds]


async def _connected(
    settings: Settings,
    claim: RunClaim,
    run: RunName,
    run_dir: Path,
    model_dir: Path,
    *,
    go_on: str,
    reopen: bool = False,
    alone: bool = False,
) -> bool:
    broker = await connect(settings.broker, run, url=settings.broker.url)
    try:
        await broker.hold_run(claim)
        if reopen:
            await append_event(broker, RunResumed())
            none_yet = encode(SpawnWorkers(total=0, reason="the run was resumed"))
            await broker.put_meta(keys.SPAWN, none_yet)
        return await serve(settings, broker, run_dir, model_dir, go_on=go_on)
    finally:
        if alone:  # a supervisor tells its children itself
            await see_off(broker, limit_s=settings.liveness.lease_s)
        await broker.close()


async def see_off(broker: Broker, *, limit_s: float) -> None:
    """If the run is over, wait until its workers have left. They see it at their next heartbeat.

    limit_s: how long the lease of a worker lasts that died. Never raises for a broker that is away or a worker that
    stays: the run is over all the same.
    """
    staying: list[WorkerId] = []
    try:
        async with asyncio.timeout(limit_s):
            if await broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
                while staying := sorted(await broker.leases()):  # noqa: ASYNC110 a lease that ends wakes no task
                    await asyncio.sleep(POLL_S)
    except (TransientError, TimeoutError):
        log.warning("not all workers are known to have left", workers=staying)


# -- the pipeline


async def serve(settings: Settings, broker: Broker, run_dir: Path, model_dir: Path, *, go_on: str = "") -> bool:
    """Orchestrate the run until it is finished or a signal comes. Returns whether it is finished.

    go_on: the command that goes on with it, for its page.

    First the epoch, so that the broker refuses whatever an orchestrator before this one still commands; then the
    journal's lock, for which that one must have left; then the journal, which no other process changes any more.

    Raises: StalledError, RunFailedError, FencedError (another orchestrator took the run over), RunExistsError,
    JournalError (history is damaged), JournalHeldError (the orchestrator before this one does not leave).
    """
    rundir = RunDir(run_dir)
    if is_new(rundir.journal):
        await check_new(broker, rundir, settings)
    epoch = await broker.acquire_epoch("orchestrator", at_least=newest_epoch(rundir.journal))
    async with sole_writer(rundir.journal):
        fence = Fence(role="orchestrator", epoch=epoch)
        return await _serve(settings, broker, rundir, model_dir, fence, go_on)


async def _serve(settings: Settings, broker: Broker, rundir: RunDir, model_dir: Path, fence: Fence, go_on: str) -> bool:
    """``serve`` with the right to write: recover, wire, run every loop until the end, flush."""
    journal, recovered = Journal.open(rundir.journal, epoch=fence.epoch)
    state, restated = recover_state(settings, journal, recovered)
    await take_out_foreign(broker, state)
    if await was_resumed(broker, recovered.cursor):
        restated = [issued for issued in restated if not isinstance(issued[1], FinishRun | SpawnWorkers)]
    clock, inbox, ended = MonotonicClock(origin_s=recovered.now_s), new_inbox(), Ending()
    trains = settings.trainer.engine != "none"
    rows = open_rows(broker, settings, secret=settings.api.secret.encode())

    requests = None if trains else RequestStore(rundir.path / REQUESTS)
    ranking = await open_ranking(settings, rundir, clock, inbox)
    own_prompt = partial(read_own_prompt, broker) if settings.endpoint.enabled else None
    prompts, trial, remarks = await open_prompts(settings, model_dir, state, requests, ranking, restated, own_prompt)
    planner = Planner(lambda: state.settings)
    executor = Executor(broker, fence, prompts, planner.request, on_finish=ended.finish, last_seq=state.seq)
    passes = settings.trainer.epochs
    metrics = MetricsLog(
        rundir.metrics,
        trains=trains,
        passes=passes,
        held_out=settings.eval,
        no_fp8_since=(lambda: state.pipeline.precision.since) if settings.generation.fp8 else None,
        stages=lambda batch: state.pipeline.elastic.compared(batch),
    )
    rounds = [command for _, command in restated if isinstance(command, TrainRound)]
    metrics.recall(read_records(rundir.journal, from_seq=max(1, state.seq - RECALLED)), rounds)
    watchdog = Watchdog(settings.liveness, clock, max_failed_share=settings.scoring.max_failed_share, away=broker.away)
    keep_sample = SampleKeeper(rundir.path / SAMPLES).keep
    samples = RecentSamples(rows, lambda: load_detokenizer(model_dir), keep_sample, own_prompt=own_prompt)
    service = None
    if requests is not None:
        detokenize = await asyncio.to_thread(load_detokenizer, model_dir)
        service = Service(settings, state, broker, rows, lambda event: inbox.put(Arrival(event)), requests, detokenize)
    membership = Membership(broker, settings.liveness.lease_s, clock)
    gpus = [gpu for start in read_starts(rundir)[-1:] for gpu in start.gpus]
    history = PageHistory(rundir.metrics, membership, samples, clock)
    board = StatusBoard(clock, go_on=go_on, away=broker.away)
    board.remarks = remarks

    def observe(event: Event, commands: Sequence[Command], now_s: float) -> None:
        watchdog.observe(event, commands)
        metrics.observe(event, commands, now_s)
        history.observe(event, now_s)
        board.observe(event, now_s)

    reported = partial(rows_reported, state.pipeline)
    on_events = samples.on_events if service is None else service.on_events
    safe = recovered.tail[0].cursor if recovered.tail else recovered.cursor
    decider = Decider(
        state,
        journal,
        executor,
        Trimmer(broker, safe),
        clock,
        recovered.cursor,
        observe=observe,
        on_events=on_events,
        since_snapshot=len(recovered.tail),
    )
    mismatch_limit = settings.algorithm.mismatch_limit
    model = await asyncio.to_thread(identify_model, model_dir)

    async def publish_metadata() -> None:
        epochs = state.pipeline.lineage.epoch, state.pipeline.critic.epoch
        await publish_run_metadata(broker, settings, epochs[0], model, trial, critic_epoch=epochs[1])

    async def restore() -> None:
        await publish_metadata()
        decider.restate()

    async def answer_http(listener: socket, key: str) -> None:
        routes = Api(board, rundir.metrics, history.latest).routes()
        routes += ControlRoutes(broker, settings, state.view).routes()
        if service is not None:
            prompts = await asyncio.to_thread(ServicePrompts, settings, model_dir)
            routes += ServiceApi(service, prompts, settings).routes()
        web = build_app(routes, host=settings.api.host, key=key, body_limits=BODY_LIMITS)
        await serve_http(web, listener)

    await publish_metadata()
    executor.submit(restated)
    log.info("serving", run=broker.run, epoch=fence.epoch, events=state.seq, replayed=len(recovered.tail))
    if recovered.num_void:
        log.warning(
            "the journal had two writers; records of the one that was replaced are void", records=recovered.num_void
        )
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, ended.stop, number)
    # The key first: whoever finds the address finds it.
    key = run_key(settings.api.secret, rundir.api_secret) if settings.api.enabled else ""
    listener = open_listener(settings.api, rundir.api_address) if settings.api.enabled else None
    gc.freeze()  # modules and what was restored are no garbage: collections need not walk through them again and again
    async with asyncio.TaskGroup() as group:
        loops: list[asyncio.Task[None]] = []

        def run(name: str, loop: Coroutine[Any, Any, None]) -> None:
            loops.append(group.create_task(loop, name=name))

        run("events", read_events(broker, inbox, recovered.cursor))
        run("tick", tick(inbox))
        run("usage", watch_usage(broker, fence, inbox))
        run("membership", membership.watch(inbox, state.pipeline.fleet.ids))
        if settings.tensors.relay:
            run("routes", route_weights(broker))
        run("prompts", prompts.run(inbox))
        run("planner", planner.run(inbox))
        run("executor", executor.run())
        run("decide", burying(decider.run(inbox), broker))
        run("reconcile", keep_reconciled(broker, inbox, reported, partial(reported, Stage.READY), restore))
        run("held out", asyncio.to_thread(write_held_out, settings, model_dir, rundir.held_out))
        run(
            "status",
            publish_status(board, broker, decider, membership, watchdog, metrics, mismatch_limit, gpus, rundir.path),
        )
        run("watchdog", watchdog.watch(state))
        run("page history", history.watch())
        if service is None:
            run("samples", samples.watch())
        if ranking is not None:
            run("judge ranker", ranking.judge(inbox))
            if settings.ranker.kind == "text":
                run("refit ranker", ranking.learn())
        if listener is not None:
            run("http", answer_http(listener, key))
        if service is not None:
            await service.recover()
        await ended.wait()
        try:
            async with asyncio.timeout(FLUSH_S):
                await decider.snapshot()
                if not ended.finished and (why := await _stopped_by(broker)):
                    await board.last_words(why)
        except TimeoutError:
            log.warning("the broker did not take the last commands; they are carried out at the next start")
        for loop in loops:
            loop.cancel()
    if ranking is not None:
        await asyncio.to_thread(ranking.save)
    journal.close()
    if ended.failure:
        raise RunFailedError(ended.failure)
    if ended.finished:
        watchdog.check_groups()  # those since its last look
    return ended.finished


async def _stopped_by(broker: Broker) -> str:
    """What ended this process, where that is the end of the run for now; "" where its supervisor starts it again."""
    with suppress(TransientError):
        if said := await broker.get_meta(keys.STOPPED):
            return said.decode()
        return "" if await broker.get_meta(keys.SUPERVISOR) else "by a signal"
    return ""


async def open_ranking(settings: Settings, rundir: RunDir, clock: Clock, inbox: Inbox) -> Ranking | None:
    """Predicts lengths and learns them; None where there is no ranker. Raises RankerError."""
    if settings.ranker.kind == "none" or settings.trainer.engine == "none":
        return None  # prompts of a service are not predicted: each has a reader who waits for it
    if settings.ranker.kind == "oracle":
        ranker = await asyncio.to_thread(open_oracle, settings)
    else:
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
    own_prompt: ReadOwnPrompt | None,
) -> tuple[PromptServer, TrialRows | None, tuple[str, ...]]:
    """Prompts, from where the state left off, with the problems of evaluations where there are any; the rows that a
    reward is tried on; and what a user should know of the prompts.

    own_prompt: None where agents bring none. Raises DataError.
    """
    source = requests or await asyncio.to_thread(open_source, settings, model_dir)
    source.seek(state.pipeline.prompts.last_position)
    of_core = state.settings
    evaluates = of_core.eval_every > 0 or of_core.eval_ends or state.pipeline.evaluations.current is not None
    problems = await asyncio.to_thread(held_out, settings, model_dir) if evaluates else None
    if ranking is not None and isinstance(source, ShuffledSource | MixedSource):
        ranking.begin_at(source.given)
    predictor = ranking or ConstantPredictor(tokens=float(settings.sampling.max_new_tokens))
    learnt = {command.group_id for _, command in restated if isinstance(command, SlotOutcome)}
    trial = trial_rows(source.problems, settings.scoring) if isinstance(source, ShuffledSource | MixedSource) else None
    sampling = sampling_of_sets(settings)
    server = PromptServer(source, predictor, held_out=problems, sampling=sampling, learnt=learnt, own_prompt=own_prompt)
    return server, trial, source.remarks if isinstance(source, ShuffledSource | MixedSource) else ()


async def read_own_prompt(broker: Broker, group_id: GroupId) -> bytes | None:
    """The prompt that an agent brought for a group, as its worker keeps it; None where none did."""
    return await broker.get_meta(keys.own_prompt(group_id))


class Ending(asyncio.Event):
    """Set when the run is over (``finished``; ``failure``: why it failed, "" when it did not), or by a first
    signal, which ends this process and not the run."""

    finished = False
    failure = ""

    def stop(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            leave_terminal()
        self.set()

    def finish(self, command: FinishRun) -> None:
        self.finished = True
        self.failure = command.reason if command.failed else ""
        self.set()
