"""Several ranks of a trainer from one command line: what a container with several GPUs runs.

They live and end together. The ranks that are left by one that died could only wait for it; whoever started this
command (a container engine) starts it again, and all go on from the checkpoint.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Sequence

from transport.process.programs import end_children, ending_signals, ending_with_this_process

GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: a rank that is asked to end gives its work back, and may be in a step."""
SIGNALLED = 143
"""As a shell reports SIGTERM."""


def run_ranks(commands: Sequence[Sequence[str]]) -> int:
    """Run a process for each command until all have done their work; end the others once one fails, or a signal comes.

    Returns: 0; else the exit code of the first that failed, as a shell reports it, or SIGNALLED.
    """
    return asyncio.run(_run(commands))


async def _run(commands: Sequence[Sequence[str]]) -> int:
    stopping = asyncio.Event()
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    ended_with = ending_with_this_process()
    ranks = [await asyncio.create_subprocess_exec(*command, preexec_fn=ended_with) for command in commands]
    try:
        return await _first_failure(ranks, stopping)
    finally:
        await end_children(ranks, grace_s=GRACE_S)


async def _first_failure(ranks: Sequence[Process], stopping: asyncio.Event) -> int:
    """0 once all have ended well."""
    signalled = asyncio.create_task(stopping.wait(), name="signal")
    running = {asyncio.create_task(rank.wait(), name="rank") for rank in ranks}
    try:
        while running:
            done, _ = await asyncio.wait({*running, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if signalled in done:
                return SIGNALLED
            running -= done
            for code in (int(task.result()) for task in done):
                if code:
                    return code if code > 0 else 128 - code
        return 0
    finally:
        for task in (signalled, *running):
            task.cancel()
