"""Reward ``code``: a response is a Python program, and its reward is whether the problem's tests pass.

    response ──► extract_code ──► one jail an answer (jail.py): code_grader.py runs code and tests apart ──► Reward

The code and the tests run nowhere but in a jail; where there is none the reward is refused by name when it starts.
An answer that crashes, hangs, or takes more than its limits has failed its tests, also where it makes the tests hang. A
jail that does not start, a machine too busy to run the answer and tests that are broken are RewardErrors, never a zero.

Owns: what of a response is its code, limits, one jail's life. Never: what a test means
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
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

import msgspec

from transport.contracts.code_tasks import CodeTask, read_task
from transport.contracts.types import Struct
from transport.errors import DECODE_ERRORS
from transport.process.programs import bare_python
from workers.errors import RewardError, RewardSetupError, RewardTimeoutError
from workers.scoring import jail
from workers.scoring.code_grader import ANSWERS, BUSY_SHARE, OURS
from workers.scoring.jail import Jail
from workers.scoring.rewards import Reward, Sample, read_entry
from workers.scoring.system_calls import answer_filter

MAX_CODE_BYTES = 256 * 1024
MEMORY_BYTES = 1024**3
"""Limit of an answer and its tests together, and of the address space of each."""
TEMPORARY_BYTES = 32 * 1024**2
"""Of an answer's /tmp, and of its /dev/shm."""
FILE_BYTES = 16 * 1024**2
MAX_FILES = 64
"""Open at once."""
MAX_INODES = 1024
"""Files, directories and links of an answer: an empty one takes a kilobyte of the kernel's."""
MAX_VERDICT_BYTES = 64 * 1024
MAX_THREADS = 16
"""Root's are not counted by the kernel but by the grader, 50 times a second."""
CPU_SHARE = 0.2
"""Of ``scoring.timeout_s`` as CPU time: an answer that used it has failed."""
GRACE_S = 1.0
"""The grader judges at the limit of time; this much later its jail is ended for it."""
POLL_S = 0.002
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

    timeout_s: of one answer, from when its jail runs.
    well_formed_reward: of a wrong answer that runs.  hidden: what no answer sees, wherever it lies.
    """

    def __init__(
        self, *, timeout_s: float, well_formed_reward: float = 0.0, processes: int = 2, hidden: Sequence[Path] = ()
    ) -> None:
        self._timeout_s = timeout_s
        self._cpu_s = max(1, round(timeout_s * CPU_SHARE))
        self._well_formed_reward = well_formed_reward
        self._free = asyncio.Semaphore(processes)
        self._running: set[Process] = set()
        self._jail = Jail(bare=True, temporary_bytes=TEMPORARY_BYTES, hidden=tuple(hidden))
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
        if not answer_filter():
            raise RewardSetupError(f"{refusal}no filter of system calls for {platform.machine()} processors")
        if reason := await self._jail.why_not([*bare_python(), "pass"], {}):
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
            "inodes": MAX_INODES,
            "threads": MAX_THREADS,
            "cpu_s": self._cpu_s,
            "wall_s": self._timeout_s,
            "filter": answer_filter().hex(),
        }
        tests = {"setup": task.setup, "tests": task.tests}
        async with self._free:
            said = await self._run(b"".join(_frame(one) for one in (job, tests)))
        if said == ANSWERS:
            return Verdict(well_formed=True, total=len(task.tests), limit="time")
        try:
            verdict = msgspec.json.decode(said, type=Verdict)
        except DECODE_ERRORS:
            raise RewardError("the grader's process ended without a verdict") from None
        if verdict.error:
            raise RewardError(verdict.error)
        return verdict

    async def _run(self, request: bytes) -> bytes:
        """The verdict of the jail's first process; b"" if it ends without one; ANSWERS if the answer keeps it from one.

        Whatever is in the jail then ends. Raises RewardTimeoutError.
        """
        process = await self._jail.start(
            [*bare_python(), GRADER],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018 PIPE
        self._running.add(process)
        reader, turn = process.stdout, b""
        try:
            async with asyncio.timeout(STARTING_S):
                await _offer_to_oom_killer(process.pid)
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(request)
                    await process.stdin.drain()
                turn = await _message(reader)
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                while (said := await _message(reader)) in (ANSWERS, OURS):
                    turn = said
                return said
        except asyncio.IncompleteReadError:
            return b""
        except TimeoutError:
            if turn == ANSWERS and not _waits_for_a_core(process.pid, self._timeout_s, self._cpu_s):
                return ANSWERS
            if not turn:
                raise RewardTimeoutError("the jail does not start: the machine is too busy, or it hangs") from None
            raise RewardTimeoutError(
                "the problem's tests do not end in time by themselves, or the machine is too busy"
            ) from None
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


async def _message(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(min(length, MAX_VERDICT_BYTES))


async def _offer_to_oom_killer(pid: int) -> None:
    """Have the kernel end what is in the jail of bubblewrap, ``pid``, before all else where the machine has no memory.

    The first process there waits for its request meanwhile, and what it starts has the same place.
    """
    first = ""
    while not first:
        try:
            first = _first_process(pid)
        except OSError:  # it ended, or this kernel does not say
            return
        await asyncio.sleep(0 if first else POLL_S)
    with contextlib.suppress(OSError), open(f"/proc/{first}/oom_score_adj", "w") as file:  # noqa: ASYNC230 no disk
        file.write("1000")


def _first_process(pid: int) -> str:
    """Number of the first process in the jail of bubblewrap, ``pid``; "" before it is there. Raises OSError."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().partition(" ")[0]


def _waits_for_a_core(pid: int, limit_s: float, cpu_s: float) -> bool:
    """Whether the tests in the jail of bubblewrap, ``pid``, got less than ``cpu_s``, since they waited for a core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        used_ns, delayed_ns, _ = map(int, Path(f"/proc/{_first_process(pid)}/schedstat").read_text().split())
        return used_ns < 1e9 * cpu_s and delayed_ns > 1e9 * BUSY_SHARE * limit_s
    return False


def _frame(value: object) -> bytes:
    raw = json.dumps(value).encode()
    return len(raw).to_bytes(4, "big") + raw
