"""The program in the jail of one answer: runs it in a process of its own and the problem's tests against it.

    grader (first process of the jail)                     solution (its child, forked before any test was read)
      tests ── call of an entry point: plain data ──────►    the model's code: one process, some threads
            ◄── result or the exception's name ──────────
      to stdout: whose time it is, at each change; one verdict

The solution can end neither the tests nor itself into a pass: what it returns is data, compared in the grader's
process; expected values are never in its memory. The kernel lets it neither signal the first process of the jail nor
read it (not dumpable), and a filter of system calls (code.py) leaves it no other way to it, and no second process.

Whatever an answer can bring about is its own fault: once a test has called it, also the time of the test is the
answer's, which may have returned a number that the test counts up to. Only a wait for a core is nobody's fault.

Owns: the limits of the solution, and which side ran out of time. Imports the standard library only: it is started from
its source text, by an interpreter without packages. Invariant: one verdict, or the process ends without one.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 4, 22, 38, 2
PR_SET_THP_DISABLE = 41
MAX_MESSAGE_BYTES = 1024 * 1024
"""Of a call's arguments or its result."""
WATCH_S = 0.02
"""Between two looks at the solution, which can take some 100 MB in it."""
BUSY_SHARE = 0.5
"""Share of its time that an answer may wait for a core before the machine is to blame, and not the answer."""
ANSWERS, OURS = b"answer", b"tests"
"""Messages to who started the jail: from now on time is the answer's, or the tests' own."""
WRITABLE = ("/tmp", "/dev/shm")
TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


# --- frames and plain data --------------------------------------------------------------------------------------------


def read_exactly(fd: int, length: int) -> bytes:
    """Raises EOFError where the other side ended."""
    parts = bytearray()
    while len(parts) < length:
        part = os.read(fd, length - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def read_frame(fd: int, limit: int = 1 << 31) -> Any:
    """A JSON value. Raises EOFError, ValueError for one that is too long or is none."""
    (length,) = struct.unpack(">I", read_exactly(fd, 4))
    if length > limit:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(read_exactly(fd, length))


def write_frame(fd: int, value: object) -> None:
    write_bytes(fd, json.dumps(value).encode())


def write_bytes(fd: int, raw: bytes) -> None:
    raw = struct.pack(">I", len(raw)) + raw
    while raw:
        raw = raw[os.write(fd, raw) :]


def pack(value: Any) -> Any:
    """Plain data as JSON. Raises TypeError for anything else, which the other side must not be handed."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 1 << 62 else ["i", hex(number)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", *([pack(key), pack(one)] for key, one in dict.items(value))]
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(value, kind):
            return [tag, *map(pack, value)]
    raise TypeError(f"{type(value).__name__} is no plain data")


def unpack(value: Any) -> Any:
    """Raises ValueError, TypeError, IndexError for what ``pack`` did not make."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("no plain data")
        return value
    tag, *items = value
    match tag:
        case "i":
            return int(items[0], 16)
        case "c":
            return complex(float(items[0]), float(items[1]))
        case "b":
            return bytes.fromhex(items[0])
        case "d":
            return {unpack(key): unpack(one) for key, one in items}
        case "l":
            return [unpack(one) for one in items]
        case "t":
            return tuple(unpack(one) for one in items)
        case "s":
            return {unpack(one) for one in items}
        case "f":
            return frozenset(unpack(one) for one in items)
        case _:
            raise ValueError("no plain data")


# --- the solution's process -------------------------------------------------------------------------------------------


def solve(channel: int, job: dict[str, Any]) -> NoReturn:
    """Limit this process, run the code, answer calls until the channel ends. Nothing in here is trusted afterwards."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(devnull, fd)
    channel = os.dup2(channel, 3, inheritable=False)
    os.closerange(4, 4096)
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: job["files"],
        resource.RLIMIT_NPROC: job["threads"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: job["files"],  # counted for all of the user's processes
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    _filter_calls(bytes.fromhex(job["filter"]))
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    try:
        exec(compile(job["code"], "<answer>", "exec", dont_inherit=True), space)
        write_frame(channel, [name for name in job["entry_points"] if callable(space.get(name))])
        while True:
            name, args, named = read_frame(channel)
            try:
                said = ["ok", pack(space[name](*unpack(args), **unpack(named)))]
                raw = json.dumps(said)
                if len(raw) > MAX_MESSAGE_BYTES:
                    said = ["error", "OverflowError", "the result is too long"]
            except BaseException as error:
                said = ["error", type(error).__name__, str(error)[:200]]
            write_frame(channel, said)
    finally:
        os._exit(0)


def _filter_calls(program: bytes) -> None:
    """Install a seccomp filter (struct sock_filter[]) for this process and all that it starts; b"": none."""
    if not program:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0):
        os._exit(1)


# --- the grader -------------------------------------------------------------------------------------------------------


class SolutionError(Exception):
    """The solution raised something that is no exception of Python's own, or did not answer."""


class Grader:
    """One verdict about one solution; the process ends with it."""

    def __init__(self, job: dict[str, Any], channel: socket.socket, solution: int) -> None:
        self._job = job
        self._channel = channel.fileno()
        self._socket = channel
        self._solution = solution
        self._is_answers = True
        self._killed = ""
        self._finishing = threading.Lock()
        self._looking = threading.Lock()
        self._started_s = time.monotonic()
        self._well_formed = False
        self._num_tests = 0

    def run(self, tests: dict[str, Any]) -> NoReturn:
        self._num_tests, passed = len(tests["tests"]), 0
        defined = self._ask(None)
        if isinstance(defined, list) and all(name in defined for name in self._job["entry_points"]):
            self._well_formed = True
            space: dict[str, Any] = {"__name__": "tests"}
            space.update({name: self._proxy(name) for name in self._job["entry_points"]})
            self._turn(answers=False)
            try:
                exec(compile(tests["setup"], "<setup>", "exec", dont_inherit=True), space)
            except BaseException as error:
                self.finish({"error": f"the problem's setup raises {type(error).__name__}: {error}"})
            for source in tests["tests"]:
                self._turn(answers=False)
                try:
                    exec(compile(source, "<test>", "exec", dont_inherit=True), space)
                    passed += not self._killed
                except BaseException:
                    continue
        self._judge(passed)

    def _judge(self, passed: int) -> NoReturn:
        """passed: tests; none counts once the solution was over a limit."""
        counted = {"passed": 0 if self._killed else passed, "total": self._num_tests, "limit": self._killed}
        self.finish({"well_formed": self._well_formed, **counted})

    def _turn(self, *, answers: bool) -> None:
        """From here on time is the answer's, or the tests' own. Who started the jail ends it where this process cannot:
        one operation of a test can keep the interpreter for hours."""
        if answers is not self._is_answers:
            self._is_answers = answers
            write_bytes(1, ANSWERS if answers else OURS)

    def _proxy(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            packed = [name, pack(args), pack(named)]
            self._turn(answers=True)
            said = self._ask(packed)
            if not isinstance(said, list) or not said:
                raise SolutionError("no answer")
            if said[0] == "ok" and len(said) == 2:
                return unpack(said[1])
            raise _exception(said)

        return call

    def _ask(self, call: object) -> Any:
        """The solution's next message; None where it ended or sent none."""
        try:
            if call is not None:
                write_frame(self._channel, call)
            said = read_frame(self._channel, MAX_MESSAGE_BYTES + 4096)
            with self._looking:  # also where the watch is late: what an answer holds when it answers counts
                self._hold()
            return said
        except (EOFError, OSError, ValueError, RecursionError, MemoryError):
            return None

    def finish(self, verdict: dict[str, Any]) -> NoReturn:
        """The first verdict counts."""
        if not self._finishing.acquire(blocking=False):
            threading.Event().wait()
        write_frame(1, verdict)
        os._exit(0)

    # -- limits

    def watch(self) -> NoReturn:
        while True:
            time.sleep(WATCH_S)
            with self._looking:
                used_s, delayed_s = self._hold()
            if self._killed == "memory" and self._is_answers:  # the test may hold what the answer made it hold
                self._judge(0)
            waited_s = time.monotonic() - self._started_s
            if waited_s <= self._job["wall_s"]:
                continue
            used_s += time.process_time()  # for as long, the threads of the solution can delay each other
            if used_s < self._job["cpu_s"] and delayed_s - used_s > BUSY_SHARE * waited_s:
                self.finish({"error": "the machine is too busy to run the answer in time"})
            if not self._is_answers:
                self.finish({"error": "the problem's tests do not end in time by themselves"})
            self._kill("time")
            self._judge(0)

    def _hold(self) -> tuple[float, float]:
        """Look at the solution, and end it where it is over a limit.

        Returns: CPU seconds that it used; seconds that it and the tests waited for a core.
        """
        used_s, held_bytes, num_threads, delayed_s = _look(self._solution)
        if num_threads > self._job["threads"]:
            self._kill("processes")
        elif held_bytes + _resident_bytes("/proc/self") > self._job["memory_bytes"]:
            self._kill("memory")
        elif sum(map(_num_files, WRITABLE)) > self._job["inodes"]:
            self._kill("files")
        elif used_s > self._job["cpu_s"] + 0.5:
            self._kill("time")
        return used_s, delayed_s + _delay_s("/proc/self/task/1")

    def _kill(self, reason: str) -> None:
        """End everything in the jail but this process."""
        self._killed = self._killed or reason
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def _exception(said: list[Any]) -> Exception:
    """The solution's exception, where it is one of Python's own that does not steer who called.

    StopIteration would end the test's loop, and AssertionError is the test's word.
    """
    kind = getattr(builtins, str(said[1]), None) if len(said) == 3 else None
    steering = (AssertionError, StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, steering):
        try:
            return kind(str(said[2]))
        except TypeError:  # one that is made of more than a text
            pass
    return SolutionError(str(said[1:]))


def _look(solution: int) -> tuple[float, int, int, float]:
    """CPU seconds, resident bytes, threads, and seconds that one of its threads waited for a core; 0 once it ended.

    Its memory is read by any thread: that of a process whose first thread ended is not in the process's own numbers.
    """
    place = f"/proc/{solution}"
    try:
        with open(f"{place}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        threads = [f"{place}/task/{thread}" for thread in os.listdir(f"{place}/task")]
    except OSError:
        return 0.0, 0, 0, 0.0
    used_s = sum(int(ticks) for ticks in fields[11:13]) * TICKS_S
    held = max((_resident_bytes(thread) for thread in threads[:64]), default=0)
    return used_s, held, len(threads), max(map(_delay_s, threads[:64]), default=0.0)


def _resident_bytes(thread: str) -> int:
    try:
        with open(f"{thread}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _delay_s(thread: str) -> float:
    """Seconds that it could have run, and waited for a core; 0 from a kernel that does not count them."""
    try:
        with open(f"{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _num_files(directory: str) -> int:
    """Files of any kind, also empty ones, which take the kernel's memory."""
    counted = os.statvfs(directory)
    return counted.f_files - counted.f_ffree


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no signal reaches the first process that has no handler for it
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # the solution's, too: a pipe can hold a huge page by its first bytes
    if os.getpid() != 1:
        sys.exit("is not the first process of a jail")
    job = read_frame(0)
    ours, theirs = socket.socketpair()
    solution = os.fork()
    if solution == 0:
        solve(theirs.fileno(), job)
    theirs.close()
    resource.setrlimit(resource.RLIMIT_AS, (job["memory_bytes"], job["memory_bytes"]))  # the tests come from a file
    grader = Grader(job, ours, solution)
    write_bytes(1, ANSWERS)
    threading.Thread(target=grader.watch, name="watch", daemon=True).start()
    grader.run(read_frame(0))


if __name__ == "__main__":
    main()
