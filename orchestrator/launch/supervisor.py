"""``streamrl-orchestrator run``: one command that brings up a whole run and sees it through.

Broker and orchestrator are children on this machine; workers are, too, or an engine starts them (``launchers``).

The orchestrator decides, in a process of its own that may be killed like any other. Invariant: when this returns or
dies, no child is left, and when it returns, no shared memory of theirs.

    supervisor ─┬─ broker (embedded, unless broker.url is set)
                ├─ orchestrator        streamrl-orchestrator serve
                ├─ generate-0..        streamrl-worker generate
                ├─ score-0..           streamrl-worker score
                ├─ critic-0            streamrl-worker critic     where there is one
                └─ train-0..           streamrl-worker train      its clean exit is the end of the run
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from orchestrator.config.load import Resolved, render
from orchestrator.config.run_directory import RunDir, resume_command
from orchestrator.config.starts import note_start
from orchestrator.core.model.settings import chosen_dispatch
from orchestrator.errors import (
    ChildFailedError,
    EngineLostError,
    ExitCode,
    Interrupted,
    StalledError,
    exit_code,
)
from orchestrator.launch.checks import (
    FIRST_ANSWER_S,
    check_cluster,
    check_inputs,
    check_places,
    check_workers,
    check_workers_inputs,
    prepare_model,
    remarks,
)
from orchestrator.launch.console import RunConsole
from orchestrator.launch.gpus import PlacedGpus, place_gpus, with_numbers
from orchestrator.launch.growth import REPORT_S, STOP_GRACE_S, add_workers, report_loss, tell_pending
from orchestrator.launch.launchers.base import Launcher, ProcessSpec
from orchestrator.launch.launchers.choice import open_launcher
from orchestrator.launch.ownership import holding, take_name
from orchestrator.launch.processes import Children, Fleet, Liveness, Restarts, names_of, workers_of
from orchestrator.loop.decide import take_out_foreign
from orchestrator.loop.intake import append_event
from orchestrator.observability.live import View, open_view
from orchestrator.observability.loggers import check_loggers, logging_metrics
from orchestrator.observability.standing import last_state, nothing_left, noting_end, read_standing
from transport.broker import keys
from transport.broker.base import Broker, RunClaim, without_password
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.messages import RunResumed, SpawnWorkers, encode
from transport.contracts.settings import Settings, public
from transport.contracts.types import RunName, WorkerKind
from transport.errors import (
    FENCED,
    BrokerUnavailableError,
    DirectoryError,
    StreamError,
    TransientError,
    first_error,
)
from transport.process.clock import MonotonicClock
from transport.process.programs import (
    configure_logs,
    ending_signals,
    ignore_ending_signals,
    leave_terminal,
    quoted,
    shown,
)
from transport.process.secret import secrets_env
from transport.tensors.shm import segment_directories, sweep_stale

log = structlog.get_logger(__name__)

POLL_S = 0.5
FORGET_S = 30.0
"""Limit of freeing a name on a broker of the user's own."""
LAST_EVENTS_S = 30.0
"""After the trainer's end, how long the orchestrator may take to read of it."""
STOPPED_BY = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM, as the command stop sends",
    signal.SIGHUP: "SIGHUP, as a terminal that is closed sends",
}


def run(resolved: Resolved, *, resume: bool, plain: bool) -> int:
    """Run until the last batch is trained. Returns 0, also at once for a finished run that is resumed, whose files stay
    as they are; or raises what ended it (see orchestrator/errors.py).
    """
    if resume and (said := nothing_left(read_standing(_run_dir(resolved.settings)), resolved.settings)):
        print(said)
        return ExitCode.OK
    try:
        return asyncio.run(_run(resolved, resume=resume, plain=plain))
    except KeyboardInterrupt:  # before there is a handler, which says more
        kept = "nothing was changed" if resume else "nothing of it is kept"
        raise Interrupted(f"stopped by Ctrl-C before the run began; {kept}", by=STOPPED_BY[signal.SIGINT]) from None


def _run_dir(settings: Settings) -> Path:
    return Path(settings.run.dir) / settings.run.name


async def _run(resolved: Resolved, *, resume: bool, plain: bool) -> int:
    """What can be wrong is looked for before anything starts or is made, what takes least time first."""
    settings = resolved.settings
    rundir = RunDir(_run_dir(settings))
    rundir.check_free(resume=resume)
    await check_places(settings)
    check_cluster(settings)
    gpus = place_gpus(settings)
    resolved = with_numbers(resolved, gpus)
    settings = resolved.settings
    launcher = open_launcher(settings, rundir, names_of(settings))
    check_workers_inputs(settings)
    problems = check_inputs(settings)
    await check_loggers(settings.run.loggers)
    doubts = await check_workers(settings, () if resume else problems.training)
    rundir.claim(render(resolved), resume=resume)
    view = open_view(plain=plain)
    log_file = (rundir.logs / "supervisor.log").open("a", encoding="utf-8", buffering=1)
    try:
        configure_logs(process="supervisor", file=log_file)  # what its user should know, the view says
        note_start(rundir, resolved, gpus.uses(workers_of(settings)) if gpus else ())
        for remark in (*resolved.forgotten, *remarks(settings, problems), *doubts):
            view.note(f"note: {remark}")
        supervisor = Supervisor(settings, rundir, view, gpus, launcher, resume=resume)
        try:
            await supervisor.run()
        except StreamError as error:
            rundir.check_there()
            if supervisor.leaves_nothing(error):
                rundir.discard()  # nothing was trained here: the corrected command may use the name again
            raise
        except (OSError, BaseExceptionGroup):
            rundir.check_there()
            raise
    finally:
        ignore_ending_signals()  # the end is under way, and its exit code says how the run went
        view.close()
        sweep_stale(*segment_directories(rundir.path))  # of children that had to be killed
        rundir.unlock()
        log_file.close()
    return 0


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        rundir: RunDir,
        view: View,
        gpus: PlacedGpus | None,
        launcher: Launcher,
        *,
        resume: bool,
    ) -> None:
        self._settings = settings
        self._rundir = rundir
        self._view = view
        self._gpus = gpus
        self._resume = resume
        self._launcher = launcher
        restarts = settings.liveness.max_restarts
        self._children = Children(rundir.logs, max_restarts=restarts, launcher=self._launcher)
        self._stopping = asyncio.Event()
        self._stopped_by = ""
        self._console = RunConsole(settings, rundir, view, restarts=lambda: sum(self._children.restarts.values()))
        self._server: EmbeddedServer | None = None
        self._broker_restarts = Restarts(settings.liveness.max_restarts, MonotonicClock())
        self._disk_full: DirectoryError | None = None
        self.started = False
        """Whether any process of the run was started."""

    async def run(self) -> None:
        """Start everything, wait for the trainer's clean end or for what stops the run, stop everything."""
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._stop, number)
        log.info("resumed" if self._resume else "started", run=self._settings.run.name)
        async with AsyncExitStack() as stack:
            stack.callback(self._console.write_report)  # last of all, however the run ends: it says how
            stopwatch = stack.enter_context(noting_end(self._rundir))
            await stack.enter_async_context(logging_metrics(self._settings, self._rundir, self._view.note))
            if self._settings.trainer.engine != "none":
                run, groups = self._settings.run, self._settings.pipeline
                size = f"{run.batches} batches of {groups.groups_per_batch} groups of {groups.group_size}"
                dispatch = chosen_dispatch(self._settings)
                self._view.note(f"run {run.name} in {shown(self._rundir.path)}: {size}, dispatch {dispatch}")
            for line in self._gpus.lines(workers_of(self._settings)) if self._gpus else ():
                self._view.note(line)
            own = self._settings.broker.url  # the name on it is claimed before anything begins
            broker, claim, url, password = await self._claim_name(stack) if own else (None, None, "", "")
            stack.push_async_callback(self._launcher.close)
            await self._until_stopped(self._launcher.open(resume=self._resume))
            preparing = prepare_model(
                self._settings.model.path, self._rundir.logs, self._view.note, settings=self._settings
            )
            model_dir = await self._until_stopped(preparing)
            if broker is None or claim is None:
                broker, claim, url, password = await self._claim_name(stack)
            stack.push_async_callback(self._children.stop, grace_s=STOP_GRACE_S)  # they leave before the broker does
            stack.push_async_callback(self._announce_stop, broker)
            if self._resume and any(self._rundir.journal.glob("snapshot-*")):  # its orchestrator ever began
                await self._until_stopped(self._take_out_foreign(broker))
                await self._until_stopped(self._reopen(broker))
            self.started = True
            run_dir = self._rundir.path
            fleet = Fleet(
                settings=self._settings,
                run_dir=run_dir,
                model_dir=model_dir,
                url=url,
                env=secrets_env(password, self._settings.api.secret),
                gpus=self._gpus,
                is_local=self._launcher.is_local,
                worker_url=self._server.network_url if self._server else "",
                run_id=claim.run_id,
            )
            await self._until_stopped(self._supervise(broker, fleet))
            seconds = stopwatch.stop()
        self._view.note(self._console.summary(seconds))

    async def _claim_name(self, stack: AsyncExitStack) -> tuple[Broker, RunClaim, str, str]:
        """Connect to the broker and claim the run's name there. Returns also its URL, and its password.

        Raises: RunExistsError: the name is another run's.
        """
        url, password = await self._open_broker(stack)
        name = RunName(self._settings.run.name)
        outage_s = self._settings.broker.outage_s
        broker = await connect(
            self._settings.broker, name, url=url, password=password, outage_s=FIRST_ANSWER_S, bear_s=outage_s
        )
        stack.push_async_callback(broker.close)
        exclusive = self._server is not None
        written = partial(self._until_written, broker) if self._resume else None
        taking = take_name(broker, self._rundir, exclusive=exclusive, written=written)
        claim = await self._until_stopped(taking)
        stack.push_async_exit(partial(self._free_name, broker))
        await stack.enter_async_context(holding(broker, claim))
        return broker, claim, url, password

    async def _free_name(self, broker: Broker, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave nothing on a broker of the user's own of a run that leaves nothing in its directory."""
        if self._server is None and isinstance(error, StreamError) and self.leaves_nothing(error):
            try:
                async with asyncio.timeout(FORGET_S):
                    await broker.forget_run()
            except (StreamError, TimeoutError) as problem:
                self._view.note(
                    f"the broker keeps the name {self._settings.run.name} ({problem}): choose another --name"
                )

    def leaves_nothing(self, error: StreamError) -> bool:
        """Whether the run that ``error`` ended never began, so that its name is free again."""
        mistake = exit_code(error) == ExitCode.BAD_CONFIG and not self._rundir.metrics.exists()
        return not self._resume and not isinstance(error, Interrupted) and (mistake or not self.started)

    def _stop(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            leave_terminal()
        self._stopped_by = self._stopped_by or STOPPED_BY[number]
        log.info("stopping", by=self._stopped_by)
        self._stopping.set()

    async def _announce_stop(self, broker: Broker) -> None:
        """Leave the orchestrator the reason for the signal that it gets next, for the pages that show it."""
        if self._stopped_by:
            with suppress(TransientError, TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await broker.put_meta(keys.STOPPED, f"by {self._stopped_by}".encode(), ttl_s=STOP_GRACE_S)

    async def _take_out_foreign(self, broker: Broker) -> None:
        """``take_out_foreign``, before any worker reads. The orchestrator writes anew what is outstanding."""
        if (state := await asyncio.to_thread(last_state, self._rundir.journal)) is not None:
            for line in await take_out_foreign(broker, state):
                self._view.note(line)

    async def _reopen(self, broker: Broker) -> None:
        """Undo the end of the run before any worker reads it, and have workers start with the settings of now.

        A broker that knows nothing of the run, as for a directory that was copied to another name, gets them from the
        orchestrator, after the epochs: a trainer that starts before would take an epoch that its run has used.
        """
        await self._until_written(broker, lambda: append_event(broker, RunResumed()))
        if await broker.get_meta(keys.SETTINGS) is not None:
            await self._until_written(broker, lambda: broker.put_meta(keys.SETTINGS, encode(public(self._settings))))
        none_yet = encode(SpawnWorkers(total=0, reason="the run was resumed"))
        await self._until_written(broker, lambda: broker.put_meta(keys.SPAWN, none_yet))
        await self._until_written(broker, lambda: broker.put_meta(keys.STATE, keys.STATE_RUNNING))

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``. Raises Interrupted when a signal comes first; ``work`` is then cancelled."""
        task = asyncio.create_task(work, name="run")
        stop = asyncio.create_task(self._stopping.wait(), name="signal")
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted(f"stopped by {self._stopped_by}; {self._go_on}", by=self._stopped_by)
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    @property
    def _go_on(self) -> str:
        return f"go on with: {resume_command(self._rundir.path, self._settings)}"

    async def _open_broker(self, stack: AsyncExitStack) -> tuple[str, str]:
        """Start the embedded broker unless there is a URL. Returns the URL without it, and the password."""
        settings = self._settings.broker
        if settings.url:
            url, password = without_password(settings.url)
            return url, password or settings.password
        address = "" if self._launcher.is_local else self._settings.launcher.address
        server = self._server = EmbeddedServer(self._rundir.broker, appendfsync=settings.appendfsync, listen=address)
        stack.push_async_callback(server.stop)
        await self._until_stopped(self._start_broker(server))
        place = quoted(shown(self._rundir.broker))
        self._view.note(f"broker: (cd {place} && REDISCLI_AUTH=$(cat broker.password) redis-cli -s broker.sock)")
        return server.url, server.password

    async def _keep_broker(self, server: EmbeddedServer) -> None:
        """Start the embedded broker again on its own data whenever it dies.

        Raises: BrokerUnavailableError: it died too often in a row; or what ``_start_broker`` raises.
        """
        while True:
            await server.process.wait()
            if not self._broker_restarts.died():
                often = f"it died {self._broker_restarts.in_a_row} times in a row"
                raise BrokerUnavailableError(server.address, f"{often}; see {self._rundir.broker}/broker.log")
            log.warning("broker ended, starting it again", in_a_row=self._broker_restarts.in_a_row)
            self._view.note("the broker died; starting it again on its append-only file")
            await self._start_broker(server)

    async def _start_broker(self, server: EmbeddedServer) -> None:
        """Start it, also when somebody ends it meanwhile; wait for room on its disk up to ``outage_s``.

        Raises: DirectoryError: there was none; or what else ``EmbeddedServer.start`` raises.
        """
        deadline_s = time.monotonic() + self._settings.broker.outage_s
        while True:
            await asyncio.sleep(self._broker_restarts.pause_s)
            self._broker_restarts.started()
            try:
                await server.start()
            except DirectoryError as error:
                self._disk_full = error
                if time.monotonic() > deadline_s:
                    raise
                self._console.broker_is_away(error, self._settings.broker.outage_s)
                await asyncio.sleep(POLL_S)
            except BrokerUnavailableError:
                raise
            except TransientError:
                if not self._broker_restarts.died():
                    raise
            else:
                self._disk_full = None
                return

    async def _supervise(self, broker: Broker, fleet: Fleet) -> None:
        """All children until the trainer's clean exit. The first fatal failure ends the run."""
        trainers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:

                def keep(spec: ProcessSpec) -> asyncio.Task[None]:
                    async def on_death(pid: int, how: str) -> None:
                        self._view.note(f"{spec.name} ended ({how}); starting it again")
                        await report_loss(broker, spec, pid if spec.name in self._children.here() else None)

                    return group.create_task(self._children.keep(spec, on_death=on_death))

                def add(index: int) -> ProcessSpec:
                    spec = fleet.worker(WorkerKind.GENERATE, index)
                    others.append(keep(spec))
                    return spec

                orchestrator = keep(fleet.orchestrator())
                others = [group.create_task(self._keep_broker(self._server))] if self._server else []
                for spec in fleet.workers():
                    (trainers if spec.kind is WorkerKind.TRAIN else others).append(keep(spec))
                if not self._launcher.is_local:
                    others.append(group.create_task(self._watch_pending(broker), name="pending"))
                others.append(group.create_task(self._watch(broker), name="watch"))
                others.append(group.create_task(self._watch_reach(broker), name="reach"))
                others.append(group.create_task(self._rundir.watch(), name="directory"))
                liveness = Liveness(broker, self._children, MonotonicClock(), self._settings.liveness)
                others.append(group.create_task(liveness.watch(self._view.note), name="liveness"))

                generation = self._settings.generation
                shrinks = 0 < generation.min_workers < generation.num_workers  # so that others may come back
                if shrinks or generation.max_workers > generation.num_workers:
                    adding = add_workers(broker, add, first=generation.num_workers)
                    others.append(group.create_task(adding, name="add workers"))
                if trainers:
                    await asyncio.wait(trainers)
                # It ends by itself, once it has heard of the last batch and written it down; a service when drained.
                await asyncio.wait([orchestrator], timeout=LAST_EVENTS_S if trainers else None)
                if not orchestrator.done():
                    why = f"the trainer ended, and the orchestrator did not within {LAST_EVENTS_S:.0f} s"
                    raise StalledError(f"{why}: the run is not over; --resume goes on with it")
                for task in (orchestrator, *others):
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise self._explained(first_error(failures)) from None
        await self._console.show(broker)

    async def _watch_pending(self, broker: Broker) -> None:
        """Tell the orchestrator's watchdog, and who looks on, what the engine has not started, and why."""
        told: Mapping[str, str] = {}

        async def report(pending: Mapping[str, str]) -> None:
            nonlocal told
            for name in pending.keys() - told.keys():
                self._view.note(f"{name} is waited for: {pending[name]}")
            told = pending
            await tell_pending(broker, pending)

        await self._children.watch_pending(report)

    def _explained(self, error: BaseException) -> BaseException:
        """A stall as one paragraph: what blocked, where to look, how to go on; how to go on once there is room."""
        match error:
            case ChildFailedError(code=ExitCode.UNWRITABLE):
                words = f"{self._children.last_words(error.name)}. Everything is kept; {self._go_on}"
                return ChildFailedError(error.name, error.code, words)
            case ChildFailedError(code=ExitCode.STALLED):
                reason = self._children.last_words(error.name, max_lines=1).removeprefix("streamrl-orchestrator: ")
                return StalledError(
                    f"the run stopped, {reason}. Look into {self._rundir.logs}, at the log of the process that should "
                    f"have acted. Everything is kept; {self._go_on}"
                )
            case EngineLostError():
                return EngineLostError(f"{error}: nothing is heard of its workers. Everything is kept; {self._go_on}")
            case ChildFailedError(code=ExitCode.BAD_CONFIG) if (
                self._rundir.metrics.exists()
            ):  # a user's function failed
                words = f"{self._children.last_words(error.name)}. Once that is mended, {self._go_on}"
                return ChildFailedError(error.name, error.code, words)
            case ChildFailedError(code=ExitCode.FATAL) if FENCED in (said := self._children.last_words(error.name)):
                return ChildFailedError(error.name, error.code, f"{said}. Everything is kept; {self._go_on}")
            case _:
                return error

    async def _watch(self, broker: Broker) -> None:
        """Feed the view from the broker and the metrics file until the broker took no write for ``outage_s``.

        A write, because a server that is full still answers. Raises what ``_until_written`` raises.
        """
        alive, outage_s = str(os.getpid()).encode(), self._settings.broker.outage_s
        while True:
            await self._until_written(broker, lambda: broker.put_meta(keys.SUPERVISOR, alive, ttl_s=outage_s))
            await self._console.show(broker)
            await asyncio.sleep(POLL_S)

    async def _watch_reach(self, broker: Broker) -> None:
        """Say that the broker is away while a call still waits for it, forever."""
        while True:
            await asyncio.sleep(POLL_S)
            if (away := broker.away()) is not None:
                self._console.broker_does_not_answer(away)

    async def _until_written(self, broker: Broker, write: Callable[[], Awaitable[object]]) -> None:
        """Write as soon as the broker takes it, and say so while it does not.

        Raises: BrokerUnavailableError (BrokerFullError), or DirectoryError where its disk is why, after ``outage_s``.
        """
        outage_s = self._settings.broker.outage_s
        deadline_s = time.monotonic() + outage_s
        while True:
            try:
                await _within(write(), deadline_s - time.monotonic(), broker)
            except BrokerUnavailableError as error:
                if time.monotonic() >= deadline_s:
                    reason = f"{error.reason}; it took no write for {outage_s:.0f} s. Everything is kept; {self._go_on}"
                    raise self._disk_full or type(error)(error.address, reason) from error
                self._console.broker_is_away(error, outage_s)
            else:
                self._console.broker_is_back()
                return
            if broker.away() is None:  # it is full, and can be read
                await self._console.show(broker)
            await asyncio.sleep(POLL_S)


async def _within(write: Awaitable[object], seconds: float, broker: Broker) -> None:
    """``write``, for ``seconds`` at most: a call tries on for longer. Raises BrokerUnavailableError."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await write
    except TimeoutError as error:
        away = broker.away()
        raise BrokerUnavailableError(away.address if away else "", away.reason if away else "no answer") from error
