"""A child process that answers one framed message at a time, in a jail where there is one, and is killed as a whole.

    frame = length (4 bytes, big-endian) | MessagePack

Owns: its pipes, its end. Never: what the messages mean; when it is started again. Invariant: a child that was not heard
out is killed by whoever asked it, since its answer would be taken for that to the next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from workers.scoring.jail import Jail, clean_environment

GRACE_S = 1.0
"""A child ends itself at the limit of a call (and says where it hung); this much later it is killed."""
MAX_ANSWER_BYTES = 1024 * 1024


def frame(message: msgspec.Struct) -> bytes:
    raw = msgspec.msgpack.encode(message)
    return len(raw).to_bytes(4, "big") + raw


def child_environment(allowed: Sequence[str]) -> dict[str, str]:
    """Of the variables of this process those that every child gets, and ``allowed``."""
    search = os.pathsep.join(filter(None, sys.path))
    return {**clean_environment(os.environ, allowed), "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}


class ChildProcess:
    """One child, alive or not. jail: what it is started in, None where there is none."""

    def __init__(self, jail: Jail | None = None) -> None:
        self._jail = jail
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def spawn(self, command: Sequence[str], allowed: Sequence[str]) -> None:
        """allowed: names of variables that it gets. Raises OSError."""
        options: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "start_new_session": True}
        options["env"] = child_environment(allowed)
        if self._jail is None:
            self._process = await asyncio.create_subprocess_exec(*command, **options)
        else:
            self._process = await self._jail.start(command, **options)

    async def exchange(self, message: msgspec.Struct, limit_s: float) -> bytes:
        """Its answer to ``message``. Raises TimeoutError; OSError, IncompleteReadError: it ended; DecodeError."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: PT018 PIPE
        if process.stdin.is_closing():  # it ended since the last call: uvloop would raise RuntimeError
            raise BrokenPipeError("the process has ended")
        async with asyncio.timeout(limit_s):
            process.stdin.write(frame(message))
            await process.stdin.drain()
            length = int.from_bytes(await process.stdout.readexactly(4), "big")
            if length > MAX_ANSWER_BYTES:
                raise msgspec.DecodeError(f"an answer of {length} bytes")
            return await process.stdout.readexactly(length)

    async def ended(self) -> int | None:
        """The exit code of a child that closed its stream: its own, if it ends by itself."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        return await self.kill()

    async def kill(self) -> int | None:
        """End the child and what it started. Returns its exit code (negative: the signal), None when there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # in a jail all ends with bubblewrap
        if process.stdin is not None:
            process.stdin.close()
        code = await process.wait()
        return 128 - code if self._jail is not None and code > 128 else code  # as bubblewrap reports a signal


# --- in the child -----------------------------------------------------------------------------------------------------


def own_streams() -> tuple[BinaryIO, BinaryIO]:
    """(messages, answers); from now on what is printed goes to stderr, and code that reads from stdin gets nothing."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    return requests, answers


def read_frame(requests: BinaryIO) -> bytes:
    """The next message, b"" at the end."""
    length = requests.read(4)
    return requests.read(int.from_bytes(length, "big")) if len(length) == 4 else b""
