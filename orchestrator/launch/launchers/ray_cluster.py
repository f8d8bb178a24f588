"""Workers as processes that actors of Ray hold: an actor a worker, a placement group for the ranks of the trainer.

    this process (a driver) ──create──► Host actor ──► the worker, its child, which the kernel ends with it
                            ◄── what it wrote, and in the end its exit code: next_output(), a call at a time

Without ``launcher.place`` Ray is started in this process, for this machine alone. An actor is never started again by
Ray: a node that dies is a worker that died, and ``processes.Children`` starts it again, elsewhere. An actor that was
created and has no node yet is pending; Ray says no reason, so what is asked for and what is free is said.

Source: ours. Ray carries our actor's class by reference: a node without this package cannot create it, and says so.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from orchestrator.errors import ConfigError
from orchestrator.launch.launchers.base import NODE_LOST, ProcessSpec, Resources, resources_of
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerKind
from transport.errors import TransientError
from transport.process.programs import ending_with_this_process

log = structlog.get_logger(__name__)

CONNECT_S = 180.0
"""For a cluster to answer; Ray starts eight processes, which take minutes on a machine that is very busy."""
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "180", "RAY_raylet_start_wait_time_s": "180"}
"""Of Ray's own settings, unless its user chose: after 60 s without its head Ray ends the whole program."""
READ_S = 2.0
MAX_READ_BYTES = 65_536


class RayUnavailableError(TransientError):
    """The cluster does not take an actor, or has lost one while it was created."""


class Host:
    """What runs on the node: one worker as a child. All calls come from the launcher; two run at once."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], directory: str) -> None:
        """directory: to run in, where this node has it, so that relative paths mean the same."""
        self._child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
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

    async def open(self, *, resume: bool) -> None:
        for variable, value in PATIENCE.items():  # Ray reads them when it is imported
            os.environ.setdefault(variable, value)
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)  # what else it has to say is not about the run
        address = self._settings.launcher.place
        own: dict[str, Any] = {}
        if not address:  # on one machine processes share its cores, as under the local launcher
            num_cpus = max(os.cpu_count() or 1, self._most * self._settings.launcher.cpus)
            own = {"num_cpus": num_cpus, "include_dashboard": False}
        connecting = asyncio.to_thread(  # in a thread: in the first one Ray takes SIGTERM, which is ours
            ray.init,
            address=address or "local",
            namespace=f"streamrl-{self._settings.run.name}",
            log_to_driver=False,
            configure_logging=False,
            **own,
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                await connecting
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            where = f"no cluster of Ray answers at {address}" if address else "Ray does not start here"
            why = str(error) or f"nothing was heard for {CONNECT_S:.0f} s"
            raise ConfigError(f"launcher.place: {where}: {why}", key="launcher.place") from error
        self._check_total(ray.cluster_resources())

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
        process = RayProcess(actors, output, next(self._starts), spec.resources, group)
        self._started[spec.name] = process
        return process

    async def pending(self) -> Mapping[str, str]:
        import ray

        waiting = {name: one for name, one in self._started.items() if one.returncode is None and not one.has_begun}
        if not waiting:
            return {}
        total, free = ray.cluster_resources(), ray.available_resources()
        return {name: f"Ray: {_missing(one.asks, len(one.actors), total, free)}" for name, one in waiting.items()}

    async def close(self) -> None:
        import ray

        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)


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

    def __init__(self, actors: Sequence[Any], output: Path, number: int, asks: Resources, group: Any) -> None:
        self.actors = actors
        self.asks = asks
        self.pid = number
        self.returncode: int | None = None
        self.has_begun = False
        self._group = group
        self._output = output
        self._ended = asyncio.create_task(self._follow(), name=f"follow {output.stem}")

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def _follow(self) -> int:
        import ray

        following = {asyncio.create_task(self._follow_one(actor)) for actor in self.actors}
        code, left = 0, set(following)
        try:
            while left and code == 0:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                code = next((task.result() for task in done if task.result()), 0)
        finally:
            for task in left:
                task.cancel()
            for actor in self.actors:
                ray.kill(actor, no_restart=True)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            self.returncode = code
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
                    log_file.write(f"its actor is gone: {str(error).splitlines()[0]}\n".encode())
                    return NODE_LOST
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
        import ray

        for actor in self.actors:  # its child ends with it
            ray.kill(actor, no_restart=True)
