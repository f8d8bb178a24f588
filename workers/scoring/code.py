"""Reward ``code``: a response is a Python program, and its reward is whether the problem's tests pass.

    response ──► extract_code ──► one jail an answer (jail.py): code_grader.py runs code and tests apart ──► Reward

The code and the tests run nowhere but in a jail; where there is none the reward is refused by name when it starts.
An answer that crashes, hangs, or takes more than its limits has failed its tests. A jail that does not start, a
machine too busy to run the answer and tests that are broken are RewardErrors, never a zero.

Owns: what of a response is its code, limits, the filter of system calls, one jail's life. Never: what a test means
(code_grader.py), delivery (worker.py). Invariant: ``score`` ends with a Reward or a RewardError, and no process of
its jail is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

import msgspec

from transport.contracts.code_tasks import CodeTask, read_task
from transport.contracts.types import Struct
from transport.process.programs import bare_python
from workers.errors import RewardError, RewardSetupError, RewardTimeoutError
from workers.scoring import jail
from workers.scoring.jail import Jail
from workers.scoring.rewards import Reward, Sample, read_entry

MAX_CODE_BYTES = 256 * 1024
MEMORY_BYTES = 1024**3
"""Of all processes of an answer together, and the address space of each."""
TEMPORARY_BYTES = 32 * 1024**2
"""Of an answer's /tmp, and of its /dev/shm."""
FILE_BYTES = 16 * 1024**2
MAX_FILES = 64
MAX_VERDICT_BYTES = 64 * 1024
MAX_PROCESSES = 16
"""Processes and threads of an answer. Root's are not counted by the kernel but by the grader, 50 times a second."""
CPU_SHARE = 0.2
"""Of ``scoring.timeout_s`` as CPU time: an answer that used it has failed."""
BUSY_FACTOR = 10
"""Times ``scoring.timeout_s`` that an answer which computes may wait for its CPU time on a busy machine."""
STARTING_S = 60.0
"""A jail starts in some 50 ms; on a machine with ten busy processes, much later."""

GRADER = Path(__file__).with_name("code_grader.py").read_text("utf-8")


class Verdict(Struct, frozen=True, kw_only=True):
    """well_formed: the code runs and defines what was asked for.  limit: that it went over, "" if none.

    error: the answer could not be judged, and why.
    """

    well_formed: bool = False
    passed: int = 0
    total: int = 0
    limit: str = ""
    error: str = ""


def extract_code(response: str, entry_points: Sequence[str]) -> str:
    """The last fenced block that defines an entry point, else the last one; all of a response without a fence.

    A block that the end of the response cut short counts.
    """
    parts = response.split("```")
    blocks = [part.partition("\n")[2] if "\n" in part else part for part in parts[1::2]]
    if not blocks:
        return response
    asked = [block for block in blocks if any(f"def {name}" in block for name in entry_points)]
    return (asked or blocks)[-1]


class CodePool:
    """Scores answers, ``processes`` at once, each in a jail of its own.

    timeout_s: of one answer, from when its jail runs; longer on a busy machine, see BUSY_FACTOR.
    well_formed_reward: of a wrong answer that runs.
    """

    def __init__(self, *, timeout_s: float, well_formed_reward: float = 0.0, processes: int = 2) -> None:
        self._timeout_s = timeout_s
        self._well_formed_reward = well_formed_reward
        self._free = asyncio.Semaphore(processes)
        self._running: set[Process] = set()
        self.failures = 0
        self.jailed = False
        """True once it is known that there is a jail."""

    async def start(self, trial: Sequence[Sample] = ()) -> None:
        """Try the jail with an answer that is right and one that is wrong, then ``trial``.

        trial: rows with their own right answers, "" where there is none.  Raises RewardSetupError: there is no jail
        here, or no answer of ``trial`` is right.
        """
        await self._find_jail()
        self.jailed = True
        failures: list[str] = []
        for sample in [one for one in trial if one.response]:
            try:
                if (await self.score(sample.prompt, sample.response, sample.entry)).value == 1:
                    return
                failures.append("the row's own answer does not pass its tests")
            except RewardError as error:
                failures.append(str(error))
        if failures:
            raise RewardSetupError(
                f"reward 'code' was tried on the answers of {len(failures)} rows, and none is right: {failures[0]}; "
                'data.answer_column names a solution, or "" where the data has none'
            )

    async def _find_jail(self) -> None:
        refusal = "reward 'code' executes what a model wrote, and there is no jail for it here: "
        if shutil.which(jail.BUBBLEWRAP) is None:
            raise RewardSetupError(refusal + jail.NOT_INSTALLED)
        if not call_filter():
            raise RewardSetupError(f"{refusal}no filter of system calls for {platform.machine()} processors")
        if reason := await _jail().why_not([*bare_python(), "pass"], {}):
            raise RewardSetupError(refusal + reason)
        task = CodeTask(entry_points=["answer"], setup="", tests=["assert answer(6) == 42"])
        for code, passed in (("def answer(n): return n * 7", 1), ("def answer(n): return n", 0)):
            try:
                verdict = await self.judge(code, task)
            except RewardError as error:
                raise RewardSetupError(f"{refusal}{error}") from error
            if (verdict.well_formed, verdict.passed) != (True, passed):
                raise RewardSetupError(f"{refusal}an answer that is known was judged {verdict}")

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward:
        """1 where all tests pass, ``well_formed_reward`` where the code runs, else 0. Raises RewardError.

        Components: right, passed (share of tests), well_formed, over_limit.
        """
        try:
            columns = read_entry(entry).get("metadata")
            task = read_task(columns if isinstance(columns, dict) else {})
            verdict = await self.judge(extract_code(response, task.entry_points), task)
        except ValueError as error:
            self.failures += 1
            raise RewardError(f"the row is no problem for reward 'code': {error}") from error
        except RewardError:
            self.failures += 1
            raise
        right = verdict.well_formed and not verdict.limit and verdict.passed == verdict.total > 0
        value = 1.0 if right else self._well_formed_reward if verdict.well_formed else 0.0
        parts = {"right": float(right), "passed": verdict.passed / max(1, verdict.total)}
        flags = {"well_formed": float(verdict.well_formed), "over_limit": float(bool(verdict.limit))}
        return Reward(value=value, components={**parts, **flags})

    async def judge(self, code: str, task: CodeTask) -> Verdict:
        """Run ``code`` against the tests. Raises RewardError where that says nothing about the code."""
        if len(code.encode(errors="replace")) > MAX_CODE_BYTES:
            return Verdict(total=len(task.tests), limit="length")
        job = {
            "code": code.encode(errors="replace").decode(),
            "entry_points": task.entry_points,
            "memory_bytes": MEMORY_BYTES,
            "file_bytes": FILE_BYTES,
            "files": MAX_FILES,
            "processes": MAX_PROCESSES,
            "cpu_s": max(1, round(self._timeout_s * CPU_SHARE)),
            "wall_s": self._timeout_s,
            "most_s": BUSY_FACTOR * self._timeout_s,
            "filter": call_filter().hex(),
        }
        tests = {"setup": task.setup, "tests": task.tests}
        async with self._free:
            said = await self._run(b"".join(_frame(one) for one in (job, tests)))
        try:
            verdict = msgspec.json.decode(said, type=Verdict)
        except msgspec.MsgspecError:
            raise RewardError("the grader's process ended without a verdict") from None
        if verdict.error:
            raise RewardError(verdict.error)
        return verdict

    async def _run(self, request: bytes) -> bytes:
        """The one message of the jail's first process, b"" if it ends without. Whatever is in the jail then ends."""
        process = await asyncio.create_subprocess_exec(
            *_jail().command([*bare_python(), GRADER]),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018 PIPE
        self._running.add(process)
        try:
            async with asyncio.timeout(STARTING_S + BUSY_FACTOR * self._timeout_s):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(request)
                    await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(4), "big")
                return await process.stdout.readexactly(min(length, MAX_VERDICT_BYTES))
        except asyncio.IncompleteReadError:
            return b""
        except TimeoutError:
            raise RewardTimeoutError("the jail did not end in time: the machine is too busy, or it hangs") from None
        finally:
            self._running.discard(process)
            await _end(process)

    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    async def close(self) -> None:
        for process in list(self._running):
            await _end(process)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # bubblewrap, with which the jail's first process dies, and so all
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()


def _jail() -> Jail:
    return Jail(bare=True, temporary_bytes=TEMPORARY_BYTES)


def _frame(value: object) -> bytes:
    raw = json.dumps(value).encode()
    return len(raw).to_bytes(4, "big") + raw


# --- the filter of system calls ---------------------------------------------------------------------------------------

# What a program of functions does not need: memory that no process is charged with (memfd, System V, message queues),
# other processes' memory, limits and priorities, the kernel's programs and keys. Numbers: (x86_64, aarch64).
_REFUSED: dict[str, tuple[int, int]] = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "personality": (135, 92),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "mount": (165, 40),
    "sched_setaffinity": (203, 122),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ioprio_set": (251, 30),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "sched_setattr": (314, 274),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "memfd_secret": (447, 447),
}
_PRLIMIT = (302, 261)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Refused with EPERM; a call by the numbers of another architecture ends the process."""
_X32 = 0x40000000


def call_filter(machine: str | None = None) -> bytes:
    """The filter as seccomp's program, struct sock_filter[]; b"" for a processor whose numbers are not known."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return b""
    column, architecture = _ARCHITECTURES[machine]
    numbers = [one[column] for one in _REFUSED.values()]
    program: list[tuple[int, int, int, int]] = [  # code, skip if so, skip if not, operand
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, len(numbers) + 4, 0, _X32),
        *((_EQUAL, len(numbers) + 3 - index, 0, number) for index, number in enumerate(numbers)),
        (_EQUAL, 1, 0, _PRLIMIT[column]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 16),  # whose limits: 0 is the process itself
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *one) for one in program)
