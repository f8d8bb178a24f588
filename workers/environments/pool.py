"""Keeps environments out of the worker: child processes that each hold many episodes, and are started again.

    EpisodeLink.reset, .step ─► its child, one call at a time ─► what the environment answered, into the journal
                                  │ it crashed, hung, raised or answered garbage
                                  └─► the journal is replayed in a new process or environment; then the call again

A child that dies takes the state of all its episodes with it; each of them is replayed when it is next asked. Where an
environment executes what a model wrote, each episode has a child of its own in a jail of its own, which ends with it.

Owns: the children, the journal of every open episode. Never: tokens, what becomes of an episode that fails (engine.py).
Invariant: an answer follows from a reset and steps that were all answered in one life of one environment, as the
journal says; a call ends with an answer or an EnvironmentFailedError, within (max_replays + 1) x (journal + 1) limits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import structlog

from transport.contracts.messages import part_of
from transport.contracts.settings import EnvironmentSettings, Settings
from transport.errors import DECODE_ERRORS
from transport.process.programs import python_module
from workers.environments.environment import BUILT_IN, Answer, Failed, Observed, Ready, Reset, Setup, Step
from workers.errors import EnvironmentFailedError, EnvironmentSetupError
from workers.scoring.child import GRACE_S, ChildProcess, child_environment
from workers.scoring.jail import Jail, jail_of, private_paths
from workers.user_functions.imports import allowed_functions

log = structlog.get_logger(__name__)

STARTUP_S = 120.0
"""As of a reward: imports, on a machine with ten busy processes and a cold disk."""
STARTS = 3
"""Of the first child: one that ends before it is ready may have been hit by what ends processes at random."""
MEMORY_BYTES = 4 * 1024**3
"""Address space of a child."""
EPISODE_MEMORY_BYTES = 1024**3
"""Of a child with one episode, of which there are as many as samples in work."""
COMMAND = python_module("workers.environments.environment")

_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(cast("type[Answer]", Answer))


OPTIONS = ("--environment", "--environment-path")


def environment_setup(environment: EnvironmentSettings, allowed: str, path: str) -> Setup:
    """One of the run's environments, if this worker may run it. jailed: not known yet.

    Args:   allowed, path: "module:function" and its directory from the worker's own command line; "" allows what is
            built in.
    Raises: EnvironmentSetupError: the run's setting names another function. A setting alone never imports code.
    """
    wanted = environment.name
    allowed_functions("environment", [wanted], allowed, OPTIONS, EnvironmentSetupError)
    return Setup(
        name=wanted,
        path=str(Path(path).resolve()) if path else "",
        params=environment.params,
        timeout_s=environment.timeout_s,
        memory_bytes=EPISODE_MEMORY_BYTES if environment.executes_answers else MEMORY_BYTES,
        jailed=False,
    )


class _CallFailedError(Exception):
    """One call gave no observation; the message says why."""


class EnvironmentChild(ChildProcess):
    """One child and the episodes in it. life: counts its starts, so that an episode knows whether it is still there.

    calling: held during a call; by default one of this child.
    """

    def __init__(
        self, setup: Setup, jail: Jail | None, variables: Sequence[str], calling: asyncio.Semaphore | None = None
    ) -> None:
        super().__init__(jail)
        self._setup = setup
        self._variables = tuple(variables)
        self.life = 0
        self.calling = calling or asyncio.Lock()
        self.over: list[int] = []
        """Episodes that it may forget."""

    async def start(self) -> None:
        """Raises EnvironmentSetupError: it cannot be imported; EnvironmentFailedError: its process ended."""
        self.life += 1
        self.over.clear()
        ready = False
        try:
            await self.spawn(COMMAND, self._variables)
            answer = _decoder.decode(await self.exchange(self._setup, STARTUP_S))
            if not isinstance(answer, Ready):
                reason = answer.reason if isinstance(answer, Failed) else "its process sent an invalid answer"
                raise EnvironmentSetupError(reason)
            ready = True
        except TimeoutError:
            raise EnvironmentFailedError(f"the environment was not ready after {STARTUP_S:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self.ended()
            raise EnvironmentFailedError(f"the environment's process ended with {code} before it was ready") from None
        except DECODE_ERRORS as error:
            raise EnvironmentFailedError(f"the environment's process sent an invalid answer: {error}") from None
        finally:
            if not ready:
                await self.kill()

    async def call(self, request: Reset | Step) -> Observed:
        """Raises _CallFailedError; the child lives on only if it answered."""
        limit_s, answered = self._setup.timeout_s, False
        slow = f"the environment took longer than {limit_s:g} s (environment.timeout_s)"
        asked_s = asyncio.get_running_loop().time()
        try:
            answer = _decoder.decode(await self.exchange(request, limit_s + GRACE_S))
            if isinstance(answer, Ready):
                raise _CallFailedError("the environment's process sent an invalid answer")
            answered = True
        except TimeoutError:
            raise _CallFailedError(slow) from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self.ended()
            took_s = asyncio.get_running_loop().time() - asked_s
            why = slow if took_s >= limit_s else f"the environment's process ended with {code}"
            raise _CallFailedError(why) from None
        except DECODE_ERRORS as error:
            raise _CallFailedError(f"the environment's process sent an invalid answer: {error}") from None
        finally:
            if not answered:
                await self.kill()
        if isinstance(answer, Failed):
            raise _CallFailedError(answer.reason)
        return answer


class EpisodeLink:
    """The environment of one episode, wherever it lives now. Its calls come one after another.

    ended: hears of its end, where its child is its own.  journal: what was asked and answered so far, in order.
    """

    def __init__(
        self,
        child: EnvironmentChild,
        number: int,
        *,
        max_replays: int,
        problems: dict[type[Reset | Step], str],
        ended: Callable[[EnvironmentChild], None] | None = None,
    ) -> None:
        """problems: is written: kind of request -> why the newest call of it failed, "" where it was answered."""
        self._child = child
        self._number = number
        self._max_replays = max_replays
        self._ended = ended
        self._problems = problems
        self._is_over = False
        self._life = 0  # of the child that has it; 0: none
        self.journal: list[tuple[Reset | Step, Observed]] = []
        self.replays = 0

    async def reset(self, prompt: str, entry: bytes) -> Observed:
        """Raises EnvironmentFailedError."""
        return await self._ask(Reset(number=self._number, prompt=prompt, entry=entry))

    async def step(self, text: str, tokens: Sequence[int]) -> Observed:
        """Raises EnvironmentFailedError."""
        return await self._ask(Step(number=self._number, text=text, tokens=tuple(tokens)))

    def close(self) -> None:
        """It is not asked any more; a call that is under way has no answer."""
        self._is_over = True
        self._child.over.append(self._number)
        if self._ended is not None:
            self._ended(self._child)

    async def _ask(self, request: Reset | Step) -> Observed:
        try:
            return await self._answer(request)
        finally:
            if self._is_over and self._ended is not None:  # its child may have started since
                await self._child.kill()

    async def _answer(self, request: Reset | Step) -> Observed:
        reason = ""
        for attempt in range(self._max_replays + 1):
            async with self._child.calling:
                if self._is_over:
                    raise EnvironmentFailedError("the episode was ended in the middle of a call")
                try:
                    answer = await self._try(request)
                except _CallFailedError as error:
                    self._life, reason = 0, str(error)  # what its environment is now is not known
                    log.warning("an environment failed", reason=reason, turn=len(self.journal), attempt=attempt)
                    self._problems[type(request)] = reason
                    continue
            self._problems[type(request)] = ""
            self.journal.append((request, answer))
            return answer
        raise EnvironmentFailedError(f"{reason} (turn {len(self.journal)}, {self._max_replays + 1} attempts)")

    async def _try(self, request: Reset | Step) -> Observed:
        """Raises _CallFailedError; EnvironmentFailedError: a replay went another way, so none can help."""
        child = self._child
        if child.pid is None:
            try:
                await child.start()
            except (
                EnvironmentSetupError,
                EnvironmentFailedError,
            ) as error:  # it did start once: no memory, a busy machine
                raise _CallFailedError(str(error)) from error
        if self._life != child.life:
            for turn, (asked, answered) in enumerate(self.journal):
                self.replays += not turn
                if await self._call(asked) != answered:
                    raise EnvironmentFailedError(f"the environment answered turn {turn} otherwise when it was replayed")
        answer = await self._call(request)
        self._life = child.life
        return answer

    async def _call(self, request: Reset | Step) -> Observed:
        if isinstance(request, Step):
            return await self._child.call(request)
        over, self._child.over = tuple(self._child.over), []
        return await self._child.call(msgspec.structs.replace(request, over=over))


class EnvironmentPool:
    """The children of one environment in a worker. Episodes are spread over them."""

    def __init__(self, settings: Settings, environment: EnvironmentSettings, setup: Setup) -> None:
        self._settings = environment
        self._setup = setup
        self._hidden = private_paths(settings)
        self._children: list[EnvironmentChild] = []
        self._jail: Jail | None = None
        self._calling = asyncio.Semaphore(self._settings.processes)
        self._leaving: set[asyncio.Task[int | None]] = set()
        self._numbers = itertools.count(1)
        self._problems: dict[type[Reset | Step], str] = {}

    async def start(self) -> None:
        """Start the first child; others start when needed. Raises EnvironmentSetupError."""
        self._jail = await self._find_jail()
        number = 1 if self._settings.executes_answers else self._settings.processes
        self._children = [self._child() for _ in range(number)]
        for attempt in range(1, STARTS + 1):
            try:
                await self._children[0].start()
            except EnvironmentFailedError as error:
                if attempt == STARTS:
                    raise EnvironmentSetupError(f"{error}, {STARTS} times") from error
            else:
                break
        if self._settings.executes_answers:  # it was tried, and no episode is to have it
            await self._children.pop().kill()

    def _child(self) -> EnvironmentChild:
        setup = msgspec.structs.replace(self._setup, jailed=self._jail is not None)
        variables = () if self._setup.name in BUILT_IN else self._settings.variables
        return EnvironmentChild(
            setup, self._jail, variables, self._calling if self._settings.executes_answers else None
        )

    async def _find_jail(self) -> Jail | None:
        """Raises EnvironmentSetupError: there is none, and what a model wrote would run."""
        readable, error = self._settings.readable, EnvironmentSetupError
        jail = jail_of(self._setup.path, readable, "environment.readable", hidden=self._hidden, error=error)
        reason = 'environment.jail is "off"'
        if self._settings.jail == "auto" or self._setup.name in BUILT_IN:
            reason = await jail.why_not(COMMAND, child_environment(self._settings.variables))
        if not reason:
            return jail
        if self._settings.executes_answers:
            raise EnvironmentSetupError(
                f"environment {self._setup.name!r} executes what a model wrote (environment.executes_answers), and "
                f"there is no jail for it here: {reason}"
            )
        log.warning("environments run without a jail: limits and a clean environment only", reason=reason)
        return None

    def open(self) -> EpisodeLink:
        """The environment of a new episode; ``close`` it at its end."""
        number, ended = next(self._numbers), None
        if self._settings.executes_answers:
            child, ended = self._child(), self._dismiss
            self._children.append(child)
        else:
            child = self._children[number % len(self._children)]
        replays = self._settings.max_replays
        return EpisodeLink(child, number, max_replays=replays, problems=self._problems, ended=ended)

    @property
    def problem(self) -> str:
        """Why the newest call of a kind failed; "" where those of both kinds were answered."""
        return next(filter(None, self._problems.values()), "")

    def _dismiss(self, child: EnvironmentChild) -> None:
        """End the child of an episode that is over; ``close`` waits for it."""
        self._children.remove(child)
        leaving = asyncio.create_task(child.kill(), name="end of an environment")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    @property
    def busy(self) -> bool:
        """Whether any of them is asked something."""
        return any(child.calling.locked() for child in self._children)

    def pids(self) -> list[int]:
        """Processes of the children that are alive as far as we know."""
        return [child.pid for child in self._children if child.pid is not None]

    async def close(self) -> None:
        for child in self._children:
            await child.kill()
        await asyncio.gather(*self._leaving)


class OneTurn:
    """A link of a response that talks to nobody."""

    async def reset(self, prompt: str, entry: bytes) -> Observed:
        return Observed()

    async def step(self, text: str, tokens: Sequence[int]) -> Observed:
        return Observed(done=True)

    def close(self) -> None:
        pass


class Environments:
    """All environments of a run, each for the rows of its part of ``[data.mix]``."""

    def __init__(self, settings: Settings, allowed: str, path: str) -> None:
        """allowed, path: see ``environment_setup``, several with commas between them. Raises EnvironmentSetupError."""
        wanted = settings.environments
        names = {environment.name for environment in wanted.values()}
        granted = allowed_functions("environment", names, allowed, OPTIONS, EnvironmentSetupError)
        self._pools: dict[str, EnvironmentPool] = {}
        made: list[tuple[EnvironmentSettings, EnvironmentPool]] = []
        for part, environment in wanted.items():
            same = next((pool for known, pool in made if known == environment), None)
            if same is None:
                own = environment.name if environment.name in granted else ""
                same = EnvironmentPool(settings, environment, environment_setup(environment, own, path))
                made.append((environment, same))
            self._pools[part] = same
        self._distinct = [pool for _, pool in made]

    async def start(self) -> None:
        """Raises EnvironmentSetupError."""
        for pool in self._distinct:
            await pool.start()

    @property
    def problem(self) -> str:
        """Why calls of one of them fail just now; "" where all are answered."""
        return next((pool.problem for pool in self._distinct if pool.problem), "")

    def open(self, entry: bytes) -> EpisodeLink | OneTurn:
        """What a new episode talks to. entry: of its row, which names its part."""
        pool = self._pools.get(part_of(entry))
        return OneTurn() if pool is None else pool.open()

    async def close(self) -> None:
        for pool in self._distinct:
            await pool.close()
