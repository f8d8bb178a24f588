"""The orchestrator as a process of its own: settings, logs, broker, event loop, then ``app.serve``.

    main            a child of ``run``: its directory is there and locked by its supervisor
    main_alone      the control plane by itself: workers join it over the broker, at any time

Invariants: what ends it is one StreamError, whose exit code says whether starting it again is of use; when a control
plane by itself has ended the run, its workers have left, so that its broker may be stopped.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import structlog
import uvloop

from orchestrator.config.load import Resolved, render, resolve
from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError, Interrupted
from orchestrator.launch.app import serve
from orchestrator.launch.console import RunConsole
from orchestrator.launch.fleet import reward_arguments
from orchestrator.launch.input_files import check_inputs
from orchestrator.launch.processes import prepare_model
from orchestrator.loop.control import append_event
from orchestrator.observability.http.server import check_secret
from orchestrator.observability.live import PlainView
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.connect import connect
from transport.broker.url import without_password
from transport.contracts.messages import RunResumed
from transport.contracts.settings import Settings
from transport.contracts.types import RunName, WorkerId
from transport.errors import TransientError, first_error
from transport.process import faults
from transport.process.logs import configure_logs
from transport.tensors.shm import segment_directories, sweep_stale

log = structlog.get_logger(__name__)

POLL_S = 0.1
FIRST_ANSWER_S = 5.0
"""A broker that does not answer its user's first call so soon is down or misspelt: say so, do not wait for it."""


def main(*, run: str, broker_url: str, run_dir: Path, model_dir: Path, environ: Mapping[str, str]) -> int:
    """Serve ``run`` until it is over. Raises StreamError, or ConfigError for a damaged config.toml in ``run_dir``."""
    configure_logs(process="orchestrator")
    faults.arm(environ.get("STREAMRL_FAULTS", ""))
    settings = resolve(None, [], [f"broker.url={broker_url}"], environ, stored=RunDir(run_dir).config).settings
    return _run(_serve(settings, RunName(run), run_dir, model_dir))


def main_alone(resolved: Resolved, *, resume: bool, reopen: bool, model_dir: Path | None) -> int:
    """Claim the run's directory and serve it.

    resume: the run is there already.  reopen: end its pause, too; its end is undone in any case.
    model_dir: None prepares ``model.path``; only its tokenizer is used here.
    Raises: ConfigError without a broker; RunExistsError; Interrupted when a signal came before the run was over.
    """
    settings = resolved.settings
    if not settings.broker.url:
        raise ConfigError("serve starts no broker: name one with --broker", key="broker.url")
    check_secret(settings.api)
    check_inputs(settings)
    configure_logs(process="orchestrator")
    return _run(_serve_alone(resolved, resume=resume, reopen=reopen, model_dir=model_dir))


def _run(work: Coroutine[Any, Any, bool]) -> int:
    try:
        finished = uvloop.run(work)
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    if not finished:
        raise Interrupted("stopped before the run was over; everything is kept for --resume")
    return 0


async def _serve_alone(resolved: Resolved, *, resume: bool, reopen: bool, model_dir: Path | None) -> bool:
    settings = resolved.settings
    name = RunName(settings.run.name)
    broker = await connect(settings.broker, name, outage_s=FIRST_ANSWER_S)
    reopen = reopen or await broker.get_meta(keys.STATE) == keys.STATE_FINISHED
    await broker.close()  # it answers: worth a directory and a model
    rundir = RunDir(Path(settings.run.dir) / name)
    rundir.claim(render(resolved), resume=resume)
    try:
        model_dir = model_dir or await prepare_model(settings.model.path, rundir.logs, say)
        say(f"run {name} in {rundir.path}; workers join with")
        for line in join_commands(settings):
            say(f"  {line}")
        if settings.api.enabled:
            say(f"live page http://$(cat {rundir.api_address})/#key=$(cat {rundir.api_secret})")
        console, started_s = RunConsole(settings, rundir, PlainView()), time.monotonic()
        finished = await _serve(settings, name, rundir.path, model_dir, reopen=resume and reopen, alone=True)
        if finished:
            console.write_report()
            say(console.summary(time.monotonic() - started_s, restarts=0))
        return finished
    finally:
        sweep_stale(*segment_directories(rundir.path))  # of workers on this machine that were killed
        rundir.unlock()


def join_commands(settings: Settings) -> list[str]:
    """What to type, on any host, for each kind of worker that the run needs."""
    serves_only = settings.trainer.engine == "none"
    score = shlex.join(["score", *reward_arguments(settings.scoring)])
    kinds = ["publish", "generate"] if serves_only else ["generate", score, "train"]
    where = f"--broker {without_password(settings.broker.url)[0]} --run {settings.run.name}"
    return [f"streamrl-worker {kind} {where}" for kind in kinds]


def say(line: str) -> None:
    """To the person who started it; logs go to standard error."""
    print(line, flush=True)


async def _serve(
    settings: Settings, run: RunName, run_dir: Path, model_dir: Path, *, reopen: bool = False, alone: bool = False
) -> bool:
    broker = await connect(settings.broker, run, url=settings.broker.url)
    try:
        if reopen:
            await append_event(broker, RunResumed())
        return await serve(settings, broker, run_dir, model_dir)
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
