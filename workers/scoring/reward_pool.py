"""Keeps rewards out of the worker: child processes with limits of time and memory, started again when they die.

    own verifiers, rewards that read text    in a jail where it works here, else with limits and a clean environment
    a reward that executes what a model wrote   in a jail of its own for each answer, or it is refused

A reward may raise, hang, leak, print or crash; the worker goes on and the unit fails by name. The children persist, so
a reward costs a message there and back (well under 1 ms), not a process. jail.py says what the jail holds. Without it
the limits protect from mistakes and the environment from being read, but not from hostile code.

Owns: the children, and which samples share a call. Never: delivery, retries (worker.py). Invariant: ``score`` ends with
a Reward or a RewardError: once it has a child that runs, within its limit plus GRACE_S, and as much for each of its
batch where that as a whole took too long.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, cast

import msgspec
import structlog

from transport.contracts.code_tasks import CODE_REWARD
from transport.contracts.settings import Settings
from transport.errors import DECODE_ERRORS
from transport.process.programs import python_module
from workers.errors import RewardError, RewardSetupError, RewardTimeoutError
from workers.scoring.child import GRACE_S, ChildProcess, child_environment
from workers.scoring.code import CodePool
from workers.scoring.jail import Jail, jail_of, private_paths
from workers.scoring.rewards import (
    WRONG,
    Failed,
    Ready,
    Reward,
    RewardSource,
    RewardSpec,
    Sample,
    Scored,
    ScoreRequest,
    Scores,
    Setup,
    read_entry,
    right_answers,
)

log = structlog.get_logger(__name__)

STARTUP_S = 120.0
"""Importing reasoning_gym takes 2-3 s of CPU; on a machine with ten busy processes and a cold disk, much more."""
MEMORY_BYTES = 4 * 1024**3
"""Address space of a child; reasoning_gym and what it imports take .4 GiB of it."""
MAX_BATCH = 16
"""Samples in one call of a reward that takes a batch: as many as a worker holds (worker.AT_ONCE)."""

COMMAND = python_module("workers.scoring.rewards")

_Unit: TypeAlias = tuple[Sample, asyncio.Future[Reward]]
Answer: TypeAlias = Ready | Scores | Failed
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(cast("type[Answer]", Answer))


class RewardChild(ChildProcess):
    """One child process that computes rewards. allowed: names of variables that it gets."""

    def __init__(self, setup: Setup, jail: Jail | None = None, allowed: Sequence[str] = ()) -> None:
        super().__init__(jail)
        self._setup = setup
        self._allowed = allowed
        self.takes_batches = False

    async def start(self) -> None:
        """Start the child and wait until the reward is imported. Raises RewardSetupError if it cannot be."""
        await self.spawn(COMMAND, self._allowed)
        ready = False
        try:
            answer = await self._ask(self._setup, STARTUP_S)
            if not isinstance(answer, Ready):
                invalid = "the reward's process sent an invalid answer"
                raise RewardSetupError(answer.reason if isinstance(answer, Failed) else invalid)
            self.takes_batches, ready = answer.takes_batches, True
        except TimeoutError:
            raise RewardSetupError(f"the reward was not ready after {STARTUP_S:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self.ended()
            name = self._setup.spec.function or "(own verifier)"
            raise RewardSetupError(f"the process of reward {name!r} ended with {code} before it was ready") from None
        except DECODE_ERRORS as error:
            raise RewardSetupError(f"the reward's process sent an invalid answer: {error}") from None
        finally:
            if not ready:
                await self.kill()  # its Ready would be taken for the answer to the next request

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardError]:
        """One call, in a new child where the last one died.

        Raises RewardError where it failed as a whole, also where no child started; one is then alive only if it
        answered.
        """
        if self._process is None:
            try:
                await self.start()
            except (RewardSetupError, OSError) as error:  # it did start once: no memory, a busy machine
                raise RewardError(f"the reward's process did not start again: {error}") from error
        started_s = time.monotonic()
        answered = False
        try:
            answer = await self._ask(ScoreRequest(samples=list(samples)), self._setup.timeout_s + GRACE_S)
            if not isinstance(answer, Scores) or len(answer.results) != len(samples):
                raise RewardError("the reward's process sent an invalid answer")
            answered = True
            return [one.reward if isinstance(one, Scored) else RewardError(one.reason) for one in answer.results]
        except TimeoutError:
            raise self._too_slow() from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self.ended()
            if code == -signal.SIGXCPU and not self._setup.spec.function:
                log.warning("an answer took too much CPU to compare, and counts as wrong")
                return [WRONG for _ in samples]
            if time.monotonic() - started_s >= self._setup.timeout_s:
                raise self._too_slow() from None
            raise RewardError(f"the reward's process ended with {code}") from None
        except DECODE_ERRORS as error:
            raise RewardError(f"the reward's process sent an invalid answer: {error}") from None
        finally:
            if not answered:
                await self.kill()  # its answer would be taken for that to the next request

    def _too_slow(self) -> RewardTimeoutError:
        return RewardTimeoutError(f"the reward took longer than {self._setup.timeout_s:g} s (scoring.timeout_s)")

    async def _ask(self, message: msgspec.Struct, limit_s: float) -> Answer:
        return _decoder.decode(await self.exchange(message, limit_s))


class RewardPool:
    """A few children that take requests in turn.

    timeout_s: of one call.  processes: children; a hanging reward blocks one of them until its limit.
    jailed: whether a jail may be used. Without it a reward that executes answers is refused.
    hidden, readable: as of a Jail.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        timeout_s: float,
        processes: int = 2,
        memory_bytes: int = MEMORY_BYTES,
        jailed: bool = True,
        hidden: Sequence[Path] = (),
        readable: Sequence[str] = (),
        environment: Sequence[str] = (),
    ) -> None:
        self._spec = msgspec.structs.replace(spec, path=str(Path(spec.path).resolve()) if spec.path else "")
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._wants_jail = jailed
        self._hidden, self._readable = tuple(hidden), tuple(readable)
        self._environment = tuple(environment)
        self._num_processes = processes
        self._children: list[RewardChild] = []
        self._free: asyncio.LifoQueue[RewardChild] = asyncio.LifoQueue()
        self._waiting: list[_Unit] = []
        self.failures = 0
        self.jailed = False
        """Whether the children are in a jail; known once started."""

    async def start(self, trial: Sequence[Sample] = ()) -> None:
        """Start the first child and score ``trial`` with it; others start when needed.

        Raises RewardSetupError: the reward cannot be built, may not run here, or computes nothing for any of ``trial``.
        """
        jail = await self._find_jail()
        self.jailed = jail is not None
        setup = Setup(spec=self._spec, timeout_s=self._timeout_s, memory_bytes=self._memory_bytes, jailed=self.jailed)
        self._children = [RewardChild(setup, jail, self._environment) for _ in range(self._num_processes)]
        try:
            await self._children[0].start()
            await self._try(trial)
        except RewardSetupError:
            await self.close()
            raise
        for child in reversed(self._children):
            self._free.put_nowait(child)

    async def _find_jail(self) -> Jail | None:
        """Where rewards run. Raises RewardSetupError for one that executes answers where there is no jail."""
        readable, error = self._readable, RewardSetupError
        jail = jail_of(self._spec.path, readable, "scoring.readable", hidden=self._hidden, error=error)
        reason = 'scoring.jail is "off"'
        if self._wants_jail:
            reason = await jail.why_not(COMMAND, child_environment(self._environment))
        if not reason:
            return jail
        if self._spec.executes_answers:
            raise RewardSetupError(
                f"reward {self._spec.function!r} executes what a model wrote (scoring.executes_answers), and there is "
                f"no jail for it here: {reason}"
            )
        log.warning("rewards run without a jail: limits and a clean environment only", reason=reason)
        return None

    async def _try(self, trial: Sequence[Sample]) -> None:
        """A reward may fail on a hard row; one that fails on all of ``trial`` would fail throughout the run."""
        failures: list[str] = []
        for sample in trial:
            try:
                (result,) = await self._children[0].score([sample])
            except RewardError as error:
                result = error
            if not isinstance(result, RewardError):
                return
            failures.append(str(result))
        if failures:
            raise RewardSetupError(
                f"reward {self._spec.function or '(own verifier)'!r} was tried on {len(failures)} rows of the data and "
                f"computed nothing: {failures[0]}"
            )

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward:
        """Compute one reward in a child, together with others that wait where it takes a batch. Raises RewardError."""
        mine: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        unit = (Sample(prompt=prompt, response=response, entry=entry), mine)
        self._waiting.append(unit)
        try:
            child = await self._free.get()
            try:
                if unit in self._waiting:  # else it goes along with another one
                    await self._call(child, unit)
            finally:
                self._free.put_nowait(child)
            return await mine
        except RewardError:
            self.failures += 1
            raise
        finally:
            if unit in self._waiting:
                self._waiting.remove(unit)
            mine.cancel()

    async def _call(self, child: RewardChild, first: _Unit) -> None:
        """Score one unit, with others that wait if the reward takes batches; every future gets an outcome."""
        others = [unit for unit in self._waiting if unit is not first]
        one_by_one = not child.takes_batches or self._spec.executes_answers
        taken = [first] if one_by_one else [first, *others[: MAX_BATCH - 1]]
        self._waiting = [unit for unit in self._waiting if unit not in taken]
        try:
            if await _score_together(child, taken):
                return
            for unit in taken:  # one of them hangs, and which one is not known
                if not unit[1].done():
                    await _score_together(child, [unit])
        finally:
            for _, future in taken:
                _settle(future, RewardError("the call that scored it was cancelled"))
            if self._spec.executes_answers:
                await child.kill()  # what an answer left behind is not there for the next one

    def pids(self) -> list[int]:
        """Processes of the children that are alive as far as we know."""
        return [child.pid for child in self._children if child.pid is not None]

    async def close(self) -> None:
        for child in self._children:
            await child.kill()


TRIAL_S = 30.0
"""Seconds that ``right_over_wrong`` may take; a judge that is slower is not compared."""
FORMS = ("{marker} {answer}", "{answer}", "\\boxed{{{answer}}}", "The answer is {answer}.")
"""How a model may give an answer."""


async def right_over_wrong(pool: RewardSource, trial: Sequence[Sample], marker: str) -> str:
    """Why a reward looks as if it did not know right answers, "" where one of ``trial`` earns more than wrong ones.

    Wrong are no answer and the answers of other rows. Rows without answers, calls that fail and a reward that takes
    over TRIAL_S give no reason.
    """
    answers = [right_answers(read_entry(sample.entry)) for sample in trial]
    compared = [(sample, own) for sample, own in zip(trial, answers, strict=True) if own]
    best: tuple[float, float] | None = None
    try:
        async with asyncio.timeout(TRIAL_S):
            for sample, own in compared:
                others = [one[0] for one in answers if one and one[0] not in own][:1]
                for form in FORMS:
                    right, *wrong = [
                        (await pool.score(sample.prompt, said, sample.entry)).value
                        for said in (form.format(marker=marker, answer=one) for one in (own[0], "", *others))
                    ]
                    if right > max(wrong):
                        return ""
                    best = max(best or (right, max(wrong)), (right, max(wrong)))
    except (RewardError, TimeoutError):
        return ""
    if best is None:
        return ""
    return (
        f"right answers of the {len(compared)} rows that were tried earn no more than wrong ones ({best[0]:g} and "
        f"{best[1]:g} at most): check the reward (scoring.reward) and the column of answers (data.answer_column)"
    )


def open_pool(settings: Settings, spec: RewardSpec, *, processes: int) -> RewardSource:
    """As the run says. A reward that this machine's owner did not write is jailed whatever the run says."""
    scoring = settings.scoring
    if scoring.reward_model:
        from workers.scoring.reward_model import RewardModelPool  # torch: only where it is needed

        return RewardModelPool(settings)
    if spec.function == CODE_REWARD:
        return CodePool(
            timeout_s=scoring.timeout_s,
            well_formed_reward=scoring.well_formed_reward,
            processes=processes,
            hidden=private_paths(settings),
        )
    return RewardPool(
        spec,
        timeout_s=scoring.timeout_s,
        processes=processes,
        jailed=scoring.jail == "auto" or not spec.function,
        hidden=private_paths(settings),
        readable=scoring.readable if spec.function else (),
        environment=scoring.environment if spec.function else (),
    )


async def _score_together(child: RewardChild, units: Sequence[_Unit]) -> bool:
    """Give each unit its result of one call. False: none has one, because more than one together took too long."""
    try:
        results: Sequence[Reward | RewardError] = await child.score([sample for sample, _ in units])
    except RewardError as error:
        if isinstance(error, RewardTimeoutError) and len(units) > 1:
            return False
        results = [type(error)(str(error)) for _ in units]
    for (_, future), result in zip(units, results, strict=True):
        _settle(future, result)
    return True


def _settle(future: asyncio.Future[Reward], result: Reward | RewardError) -> None:
    if future.done():
        return
    if isinstance(result, RewardError):
        future.set_exception(result)
    else:
        future.set_result(result)
