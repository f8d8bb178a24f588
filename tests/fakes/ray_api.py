"""The part of Ray that the launcher calls, in this process: actors that hold no process and do what a test says."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

LATE_S = 30.0


class RayError(Exception):
    pass


class RayActorError(RayError):
    actor_init_failed = False


NODE_DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Host\n\tactor_id: 0\n"
    "The actor died because its node has died. Node Id: 1"
)
NO_PACKAGE = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::Host.__init__()\x1b[39m\n"
    "RuntimeError: The actor with name Host failed to import on the worker.\n\nTraceback (most recent call last):\n"
    "ModuleNotFoundError: No module named 'orchestrator'\n"
)
"""What Ray 2.60 says."""


class FakeActor:
    """options, given: of its creation.  sent: signals.  was_killed: by Ray, as somebody asked."""

    def __init__(self, options: dict[str, Any], given: tuple[Any, ...]) -> None:
        self.options = options
        self.given = given
        self.sent: list[int] = []
        self.was_killed = False
        self.next_output = SimpleNamespace(remote=self._next_output)
        self.send = SimpleNamespace(remote=self.sent.append)
        self._said: asyncio.Queue[tuple[bytes, int | None] | RayActorError] = asyncio.Queue()

    async def _next_output(self) -> tuple[bytes, int | None]:
        said = await self._said.get()
        if isinstance(said, RayActorError):
            raise said
        return said

    def says(self, text: bytes, code: int | None = None) -> None:
        """What its process writes; its exit code where it has ended. Also before anybody asks."""
        self._said.put_nowait((text, code))

    def lost(self, why: str = NODE_DIED) -> None:
        """With its node, or since the node could not begin it."""
        error = RayActorError(why)
        error.actor_init_failed = why == NO_PACKAGE
        self._said.put_nowait(error)


class RayApi(ModuleType):
    """A cluster with ``resources``, all of them free. actors: every one that was created, in order."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.resources = {"CPU": 1000.0, "GPU": 8.0}
        self.actors: list[FakeActor] = []
        self.groups: list[list[dict[str, float]]] = []
        self.initialized: dict[str, Any] | None = None
        self.refuses: Exception | None = None
        self.exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)
        self.__version__ = "2.60.0"
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=lambda group: None)
        self._numbers = itertools.count()
        self.answers = threading.Event()
        """While it is not set, nothing that was asked for is created, and the call waits."""
        self.answers.set()

    def init(self, **given: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.initialized = given

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=f"{(self.initialized or {}).get('_node_ip_address', '10.0.0.1')}:6379")

    def is_initialized(self) -> bool:
        return self.initialized is not None

    def shutdown(self, _exiting_interpreter: bool = False) -> None:
        self.initialized = None

    def cluster_resources(self) -> dict[str, float]:
        return dict(self.resources)

    available_resources = cluster_resources

    def remote(self, made: type) -> Any:
        def options(**asked: Any) -> Any:
            return SimpleNamespace(remote=lambda *given: self._create(asked, given))

        return SimpleNamespace(options=options)

    def _create(self, asked: dict[str, Any], given: tuple[Any, ...]) -> FakeActor:
        assert self.answers.wait(LATE_S)
        actor = FakeActor(asked, given)
        self.actors.append(actor)
        return actor

    def kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        actor.was_killed = True
        with suppress(RuntimeError):  # from a thread, as late as it likes: the loop may be closed
            self.loop.call_soon_threadsafe(actor.lost)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> int:
        self.groups.append(bundles)
        return next(self._numbers)


@contextmanager
def ray_api() -> Iterator[RayApi]:
    """In the place of Ray. From a running loop."""
    api = RayApi()
    RayApi.loop = asyncio.get_running_loop()
    scheduling = ModuleType("ray.util.scheduling_strategies")
    scheduling.PlacementGroupSchedulingStrategy = lambda group, index: (group, index)  # pyright: ignore[reportAttributeAccessIssue]
    modules = {
        "ray": api,
        "ray.exceptions": api.exceptions,
        "ray.util": api.util,
        "ray.util.scheduling_strategies": scheduling,
    }
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield api
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
