"""Workers as processes that actors of Ray hold: an actor a worker, a placement group for the ranks of the trainer.

    this process (a driver) ──create──► Host actor ──► the worker, its child, which the kernel ends with it
                            ◄── what it wrote, and in the end its exit code: next_output(), a call at a time

Without ``launcher.place`` Ray is started in this process, for this machine alone: it listens on loopback and asks for a
token of this run's own, since whoever reaches a Ray without one runs programs as its user. An actor is never started
again by Ray: a node that dies is a worker that died, and ``processes.Children`` starts it again, elsewhere. An actor
that was created and has no node yet is pending; Ray says no reason, so what is asked for and what is free is said.

While the head of a cluster that was joined takes no connection, workers go on, and all of them are pending with that
reason. Ray would end this whole program after RECONNECT, in the middle of whatever it does; so the run ends by itself
before: EngineLostError. Calls of Ray that may wait for the head are made in threads, with a deadline.

Source: ours. Ray carries our actor's class by reference: a node without this package cannot create it, and says so.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import itertools
import logging
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from orchestrator.errors import ConfigError, EngineLostError
from orchestrator.launch.launchers.base import NODE_LOST, ProcessSpec, Resources, resources_of
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerKind
from transport.errors import TransientError
from transport.process.clock import Clock, MonotonicClock
from transport.process.programs import ending_with_this_process

log = structlog.get_logger(__name__)

CONNECT_S = 180.0
"""For a cluster to answer; Ray starts eight processes, which take minutes on a machine that is very busy."""
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
PATIENCE = {RECONNECT: "180", "RAY_raylet_start_wait_time_s": "180"}
"""Of Ray's own settings, unless its user chose: after 60 s without its head Ray ends the whole program."""
HEAD_SHARE = 0.75
"""Of that time, after which a run without its head ends by itself: what is left is for its end."""
ANSWER_S = 20.0
"""For one question to a cluster, which a busy head answers in a second."""
KNOCK_S = 5.0
"""For the head to take a connection."""
READ_S = 2.0
MAX_READ_BYTES = 65_536
MAX_WORDS = 500
"""Characters of what Ray says of an actor's end."""


AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
OLDEST = (2, 59)
"""First release of Ray whose own clusters ask for a token by default."""
LOOPBACK = "127.0.0.1"


class RayUnavailableError(TransientError):
    """The cluster does not take an actor, or has lost one while it was created."""


T = TypeVar("T")


async def in_time(
    call: Callable[[], T],
    limit_s: float = ANSWER_S,
    *,
    undo: Callable[[T], object] | None = None,
    until: threading.Event | None = None,
) -> T:
    """The result of a call of Ray that may wait for its head. Raises RayUnavailableError after ``limit_s``.

    In a daemon thread: one that hangs keeps neither the loop nor the end of the program.

    undo: called in such a thread with a result that comes when nobody waits for it any more.
    until: after a result the thread lives on until it is set: Linux ends Ray's own processes with the thread that
    started them.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not answer.done():
            answer.set_exception(error)

    def succeed(result: T) -> None:
        if not answer.done():
            answer.set_result(result)
        elif undo is not None:
            threading.Thread(target=undo, args=(result,), name="ray", daemon=True).start()

    def work() -> None:
        try:
            tell, ends = partial(succeed, call()), until
        except BaseException as error:  # whatever it is, who waits raises it
            tell, ends = partial(fail, error), None
        with suppress(RuntimeError):  # the loop is closed: the program has left Ray, which ends what it made
            loop.call_soon_threadsafe(tell)
        if ends is not None:
            ends.wait()

    threading.Thread(target=work, name="ray", daemon=True).start()
    try:
        await asyncio.wait({answer}, timeout=limit_s)
        if answer.done():
            return answer.result()
        raise RayUnavailableError(f"Ray did not answer for {limit_s:.0f} s")
    finally:
        answer.cancel()


class HeadWatch:
    """How long the head of a cluster has taken no connection. address: of its GCS, "host:port"."""

    def __init__(self, address: str, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._silent_since_s: float | None = None

    async def silent_s(self) -> float | None:
        """Knock once. Returns None where it answers."""
        now_s, (host, _, port) = self._clock.now_s(), self.address.rpartition(":")
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            self._silent_since_s = now_s if self._silent_since_s is None else self._silent_since_s
            return now_s - self._silent_since_s
        writer.close()
        self._silent_since_s = None
        return None


class Host:
    """What runs on the node: one worker as a child. All calls come from the launcher; two run at once."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], directory: str) -> None:
        """directory: to run in, where this node has it, so that relative paths mean the same."""
        self._child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**{key: value for key, value in os.environ.items() if key != AUTH_TOKEN}, **env},
            cwd=directory if os.path.isdir(directory) else None,
            start_new_session=True,
            preexec_fn=ending_with_this_process(),
        )
        self._written = bytearray()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        while chunk := os.read(self._child.stdout.fileno(), MAX_READ_BYTES):
            with self._changed:
                self._written += chunk
                self._changed.notify_all()
        self._child.wait()
        with self._changed:
            self._changed.notify_all()

    def next_output(self) -> tuple[bytes, int | None]:
        """What was written since, after at most READ_S; and its exit code once there will be no more."""
        with self._changed:
            if not self._written and self._child.returncode is None:
                self._changed.wait(READ_S)
            said = bytes(self._written)
            self._written.clear()
            return said, self._child.returncode

    def send(self, number: int) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)


class RayLauncher:
    is_local = False

    def __init__(self, settings: Settings, num_begun: int) -> None:
        """num_begun: workers that the run begins with."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "launcher.kind: Ray is not installed; install it with: pip install 'streamrl[ray]'", key="launcher.kind"
            )
        self._settings = settings
        self._most = num_begun + settings.generation.max_workers
        self._starts = itertools.count(1)
        self._started: dict[str, RayProcess] = {}
        self._head: HeadWatch | None = None
        self._head_limit_s = 0.0
        self._head_lost = asyncio.Event()
        self._left = threading.Event()

    async def open(self, *, resume: bool) -> None:
        for variable, value in PATIENCE.items():  # Ray reads them when it is imported
            os.environ.setdefault(variable, value)
        address = self._settings.launcher.place
        if not address:
            _set_token(os.environ)
        import ray

        _check_release(ray.__version__)
        logging.getLogger("ray").setLevel(logging.ERROR)  # what else it has to say is not about the run
        own: dict[str, Any] = {}
        if not address:  # on one machine processes share its cores, as under the local launcher
            num_cpus = max(os.cpu_count() or 1, self._most * self._settings.launcher.cpus)
            own = {"num_cpus": num_cpus, "include_dashboard": False, "_node_ip_address": LOOPBACK}
            _stay_on_loopback()
        connect = partial(  # in a thread: in the first one Ray takes SIGTERM, which is ours
            ray.init,
            address=address or "local",
            namespace=f"streamrl-{self._settings.run.name}",
            log_to_driver=False,
            configure_logging=False,
            **own,
        )
        try:
            await in_time(connect, CONNECT_S, until=self._left)
            total = await in_time(ray.cluster_resources, CONNECT_S)
        except (ConnectionError, ValueError, RuntimeError, RayUnavailableError) as error:
            where = f"no cluster of Ray answers at {address}" if address else "Ray does not start here"
            raise ConfigError(f"launcher.place: {where}: {error}", key="launcher.place") from error
        gcs = ray.get_runtime_context().gcs_address
        if address:
            self.watch_head(gcs, MonotonicClock())
            if os.environ.get(AUTH_MODE, "").lower() != "token":  # Ray sets it where it has a token
                log.warning(
                    "this cluster of Ray asks for no token: whoever reaches it can run programs as its user; start its "
                    f"nodes with {AUTH_MODE}=token",
                    place=address,
                )
        elif not gcs.startswith(f"{LOOPBACK}:"):
            log.warning("Ray listens on every address of this machine, and asks for this run's token", address=gcs)
        self._check_total(total)

    def watch_head(self, address: str, clock: Clock) -> None:
        """From now on ``pending`` and ``start`` see first whether the head of the cluster is there."""
        self._head = HeadWatch(address, clock)
        self._head_limit_s = HEAD_SHARE * float(os.environ.get(RECONNECT, PATIENCE[RECONNECT]))

    def _check_total(self, total: Mapping[str, float]) -> None:
        """Raises ConfigError: the cluster has no node with a GPU at all, and one is asked for by name."""
        kinds = (WorkerKind.GENERATE, WorkerKind.TRAIN, WorkerKind.CRITIC)
        wanted = sum(resources_of(self._settings, kind).gpus for kind in kinds)
        if wanted and not total.get("GPU"):
            raise ConfigError(
                f'launcher.place: this cluster of Ray has no GPU, and the run asks for {wanted}; set device = "auto", '
                "or start its nodes with --num-gpus",
                key="launcher.place",
            )

    async def start(self, spec: ProcessSpec, output: Path) -> RayProcess:
        if self._head is not None and (silent_s := await self._head.silent_s()) is not None:
            raise RayUnavailableError(self._without_head(silent_s))
        actors, group = await in_time(partial(self._make, spec), ANSWER_S, undo=lambda made: _end(*made))
        process = RayProcess(actors, output, next(self._starts), spec.resources, group, self._head_lost)
        self._started[spec.name] = process
        return process

    def _make(self, spec: ProcessSpec) -> tuple[Sequence[Any], Any]:
        """Actors, and the placement group of several."""
        import ray

        ask = spec.resources
        options: dict[str, Any] = {"num_cpus": ask.cpus, "num_gpus": ask.gpus, "max_restarts": 0, "max_concurrency": 2}
        options |= {"memory": ask.memory_mib * 2**20} if ask.memory_mib else {}
        group = None
        if spec.ranks > 1:
            bundle = {"CPU": float(ask.cpus)} | ({"GPU": float(ask.gpus)} if ask.gpus else {})
            group = ray.util.placement_group([bundle] * spec.ranks, strategy="PACK")
        together = {"STREAMRL_RANKS": os.urandom(8).hex()} if spec.ranks > 1 else {}
        make, actors = ray.remote(Host), []
        for rank in range(spec.ranks):
            env = {**spec.env, **together, **({"RANK": str(rank)} if spec.ranks > 1 else {})}
            if group is not None:
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, rank)
            actors.append(make.options(**options).remote(list(spec.argv), env, os.getcwd()))
        return actors, group

    async def pending(self) -> Mapping[str, str]:
        living = {name: one for name, one in self._started.items() if one.returncode is None}
        if self._head is not None and (silent_s := await self._head.silent_s()) is not None:
            if silent_s > self._head_limit_s:
                self._head_lost.set()
                raise EngineLostError(f"Ray: its head at {self._head.address} took no connection for {silent_s:.0f} s")
            return dict.fromkeys(living, self._without_head(silent_s))
        waiting = {name: one for name, one in living.items() if not one.has_begun}
        if not waiting:
            return {}
        import ray

        try:
            total, free = await in_time(lambda: (ray.cluster_resources(), ray.available_resources()))
        except RayUnavailableError as error:
            return {name: f"Ray: {error}" for name in waiting}
        return {name: f"Ray: {_missing(one.asks, len(one.actors), total, free)}" for name, one in waiting.items()}

    def _without_head(self, silent_s: float) -> str:
        assert self._head is not None
        return (
            f"Ray: its head at {self._head.address} has taken no connection for {silent_s:.0f} s; without it the run "
            f"ends after {self._head_limit_s:.0f} s"
        )

    async def close(self) -> None:
        import ray

        try:
            if ray.is_initialized():
                await in_time(ray.shutdown)
        except RayUnavailableError as error:
            atexit.unregister(ray.shutdown)  # it would wait again
            log.warning("Ray was not left", error=str(error))
        finally:
            self._left.set()


def _set_token(environ: MutableMapping[str, str]) -> None:
    """Have Ray ask for a token that is made here. Raises ConfigError: its user switched that off."""
    mode = environ.get(AUTH_MODE, "token")
    if mode.lower() != "token":
        raise ConfigError(
            f"launcher.kind: {AUTH_MODE}={mode} lets everyone who reaches this machine's ports run programs as you: "
            "unset it, or name a cluster of yours in launcher.place",
            key="launcher.kind",
        )
    environ.update({AUTH_MODE: "token", AUTH_TOKEN: secrets.token_hex(32)})


def _check_release(version: str) -> None:
    """Raises ConfigError: this release of Ray does not hold strangers off."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"launcher.kind: Ray {version} lets everyone who reaches it run programs as its user; install {least} or "
            "later: pip install -U 'streamrl[ray]'",
            key="launcher.kind",
        )


def _stay_on_loopback() -> None:
    """Have Ray take the address that it is given. It replaces a loopback address by the machine's, and then listens on
    all of them; a release that has no such function is asked afterwards where it listens.
    """
    with suppress(ImportError, AttributeError):
        from ray._private import services

        services.resolve_ip_for_localhost = lambda host: host


def _missing(ask: Resources, count: int, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What is asked for, beside what the cluster has."""
    kinds = {"CPU": ask.cpus * count, "GPU": ask.gpus * count}
    parts = [
        f"{wanted} {kind}, of which the cluster has {free.get(kind, 0):g} free of {total.get(kind, 0):g}"
        for kind, wanted in kinds.items()
        if wanted
    ]
    return f"asks for {' and '.join(parts)}"


class RayProcess:
    """One worker, or all ranks of the trainer, which end together: the first that fails ends the others."""

    def __init__(
        self,
        actors: Sequence[Any],
        output: Path,
        number: int,
        asks: Resources,
        group: Any,
        lost: asyncio.Event,
    ) -> None:
        """lost: set once nothing will be heard of any process."""
        self.actors = actors
        self.asks = asks
        self.pid = number
        self.returncode: int | None = None
        self.has_begun = False
        self._group = group
        self._output = output
        self._lost = lost
        self._ended = asyncio.create_task(self._follow(), name=f"follow {output.stem}")

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def _follow(self) -> int:
        following = {asyncio.create_task(self._follow_one(actor)) for actor in self.actors}
        lost = asyncio.create_task(self._lost.wait())
        code, left = 0, set(following)
        try:
            while left and code == 0 and not lost.done():
                done, _ = await asyncio.wait({*left, lost}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                code = next((task.result() for task in done & following if task.result()), 0)
            if left and lost.done():
                code = code or NODE_LOST
        finally:
            for task in (*left, lost):
                task.cancel()
            self.returncode = code
            if not self._lost.is_set():
                with suppress(RayUnavailableError):
                    await in_time(partial(_end, self.actors, self._group))
        return code

    async def _follow_one(self, actor: Any) -> int:
        """Append what it writes to the log until it has ended."""
        from ray.exceptions import RayActorError, RayError

        code: int | None = None
        with self._output.open("ab", buffering=0) as log_file:
            while code is None:
                try:
                    said, code = await actor.next_output.remote()
                except RayActorError as error:
                    said, code = _why_gone(error)
                    log_file.write(f"error: {said}\n".encode())
                    return code
                except RayError as error:
                    log_file.write(f"error: Ray cannot run it: {error}\n".encode())
                    return 1
                self.has_begun = True
                log_file.write(said)
        return code

    def terminate(self) -> None:
        if not self.has_begun:
            self.kill()
        for actor in self.actors:
            actor.send.remote(int(signal.SIGTERM))

    def kill(self) -> None:
        threading.Thread(target=_end, args=(self.actors, self._group), name="ray", daemon=True).start()


def _why_gone(error: Any) -> tuple[str, int]:
    """What a RayActorError says, and the exit code of its process: 1 where the node could not even begin it."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if error.actor_init_failed:  # a traceback of the node, as of a package that it does not have
        return f"Ray cannot start it on a node: {lines[-1].strip()}", 1
    return f"Ray: {' '.join(lines)[:MAX_WORDS]}", NODE_LOST


def _end(actors: Sequence[Any], group: Any) -> None:
    """The child of each actor ends with it. group: the placement group of several, or None."""
    import ray
    from ray.exceptions import RayError

    with suppress(RayError):  # the program has left Ray
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if group is not None:
            ray.util.remove_placement_group(group)
