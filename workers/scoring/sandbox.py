"""Keeps rewards out of the worker: child processes with limits of time and memory, started again when they die.

A reward may raise, hang, leak, print or crash; the worker goes on and the unit fails by name. The children persist, so
a reward costs a message there and back (well under 1 ms), not a process. This protects from mistakes. It is no jail for
hostile code: rewards that execute model output need more than this, and are not offered.

Owns: the children. Never: delivery, retries (consumer.py). Invariant: ``score`` ends within its limit plus GRACE_S,
with a Reward or a RewardError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import TypeAlias, cast

import msgspec

from transport.programs import python_module
from transport.secret import BROKER_PASSWORD, SHARED_SECRET
from workers.errors import RewardError, RewardSetupError
from workers.scoring.reward_process import Failed, Ready, Scored, ScoreRequest, Setup, frame
from workers.scoring.rewards import Reward, RewardSpec

STARTUP_S = 120.0
"""Importing reasoning_gym takes 2-3 s of CPU; on a machine with ten busy processes and a cold disk, much more."""
GRACE_S = 1.0
"""The child ends itself at the limit (and says where it hung); this much later it is killed."""
MEMORY_BYTES = 4 * 1024**3
"""Address space of a child; reasoning_gym and what it imports take .4 GiB of it."""
MAX_ANSWER_BYTES = 1024 * 1024
_SECRETS = tuple(name + end for name in (BROKER_PASSWORD, SHARED_SECRET) for end in ("", "_FILE"))
"""What a reward has no business with."""

Answer: TypeAlias = Ready | Scored | Failed
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(cast("type[Answer]", Answer))


class RewardChild:
    """One child process, alive or not; one request at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the child and wait until the reward is imported. Raises RewardSetupError if it cannot be."""
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment["OMP_NUM_THREADS"] = "1"
        command = python_module("workers.scoring.reward_process")
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
        try:
            answer = await self._exchange(self._setup, STARTUP_S)
        except TimeoutError:
            await self.kill()
            raise RewardSetupError(f"the reward was not ready after {STARTUP_S:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._ended()
            raise RewardSetupError(f"the reward's process ended with {code} before it was ready") from None
        if isinstance(answer, Failed):
            await self.kill()
            raise RewardSetupError(answer.reason)

    async def score(self, request: ScoreRequest) -> Reward:
        """One reward. Raises RewardError; the child is then alive only if it answered."""
        if self._process is None:
            await self.start()
        started_s = time.monotonic()
        try:
            answer = await self._exchange(request, self._setup.timeout_s + GRACE_S)
        except TimeoutError:
            await self.kill()
            raise RewardError(self._too_slow()) from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._ended()
            if time.monotonic() - started_s >= self._setup.timeout_s:
                raise RewardError(self._too_slow()) from None
            raise RewardError(f"the reward's process ended with {code}") from None
        except msgspec.MsgspecError as error:
            await self.kill()
            raise RewardError(f"the reward's process answered with nonsense: {error}") from None
        except asyncio.CancelledError:
            await self.kill()  # its answer would be taken for that to the next request
            raise
        match answer:
            case Scored(reward=reward):
                return reward
            case Failed(reason=reason):
                raise RewardError(reason)
            case Ready():
                await self.kill()
                raise RewardError("the reward's process answered with nonsense: ready twice")

    def _too_slow(self) -> str:
        return f"the reward took longer than {self._setup.timeout_s:g} s"

    async def _exchange(self, message: msgspec.Struct, limit_s: float) -> Answer:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: PT018 PIPE
        async with asyncio.timeout(limit_s):
            process.stdin.write(frame(message))
            await process.stdin.drain()
            length = int.from_bytes(await process.stdout.readexactly(4), "big")
            if length > MAX_ANSWER_BYTES:
                raise msgspec.DecodeError(f"an answer of {length} bytes")
            return _decoder.decode(await process.stdout.readexactly(length))

    async def _ended(self) -> int | None:
        """The exit code of a child that closed its stream: its own, if it ends by itself."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        return await self.kill()

    async def kill(self) -> int | None:
        """End the child. Returns its exit code (negative: the signal), None when there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        return await process.wait()


class RewardSandbox:
    """A few children that take requests in turn.

    timeout_s: of one reward.  processes: children; a hanging reward blocks one of them until its limit.
    """

    def __init__(
        self, spec: RewardSpec, *, timeout_s: float, processes: int = 2, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        setup = Setup(spec=spec, timeout_s=timeout_s, memory_bytes=memory_bytes)
        self._children = [RewardChild(setup) for _ in range(processes)]
        self._free: asyncio.LifoQueue[RewardChild] = asyncio.LifoQueue()
        self.failures = 0

    async def start(self) -> None:
        """Start the first child, so that a reward that cannot be built is known now; others start when needed."""
        await self._children[0].start()
        for child in reversed(self._children):
            self._free.put_nowait(child)

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward:
        """Compute one reward in a child. Raises RewardError."""
        child = await self._free.get()
        try:
            return await child.score(ScoreRequest(prompt=prompt, response=response, entry=entry))
        except RewardError:
            self.failures += 1
            raise
        finally:
            self._free.put_nowait(child)

    def pids(self) -> list[int]:
        """Processes of the children that are alive as far as we know."""
        return [child.pid for child in self._children if child.pid is not None]

    async def close(self) -> None:
        for child in self._children:
            await child.kill()
