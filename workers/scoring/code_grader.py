"""The program in the jail of one answer: runs it in a process of its own and the problem's tests against it.

    grader (first process of the jail)                     solution (its child, forked before any test was read)
      tests ── call of an entry point: plain data ──────►    the model's code
            ◄── result or the exception's name ──────────
      one verdict to stdout

The solution can end neither the tests nor itself into a pass: what it returns is data, compared in the grader's
process; expected values are never in its memory. The kernel lets it neither signal the first process of the jail nor
read it (not dumpable), and a filter of system calls (code.py) leaves it no other way to it.

Owns: the limits of all processes of the jail together, and which side ran out of time. Imports the standard library
only: it is started from its source text, by an interpreter without packages. Invariant: one verdict, or the process
ends without one.
"""

from __future__ import annotations

import builtins
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
MAX_MESSAGE_BYTES = 1024 * 1024
"""Of a call's arguments or its result."""
WATCH_S = 0.02
"""Between two looks at all processes: a process can take some 100 MB in it."""
ASLEEP_LOOKS = 10
"""In a row, after which an answer that is late waits for something; in one look it may just have been woken."""
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
    raw = json.dumps(value).encode()
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
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_MEMLOCK: 0,
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

    def __init__(self, job: dict[str, Any], channel: socket.socket) -> None:
        self._job = job
        self._channel = channel.fileno()
        self._socket = channel
        self._awaits_solution = False
        self._killed = ""
        self._finishing = threading.Lock()
        self._looking = threading.Lock()
        self._started_s = time.monotonic()

    def run(self, tests: dict[str, Any]) -> NoReturn:
        defined = self._ask(None)
        verdict: dict[str, Any] = {"well_formed": False, "passed": 0, "total": len(tests["tests"]), "limit": ""}
        if isinstance(defined, list) and all(name in defined for name in self._job["entry_points"]):
            verdict["well_formed"] = True
            space: dict[str, Any] = {"__name__": "tests"}
            space.update({name: self._proxy(name) for name in self._job["entry_points"]})
            try:
                exec(compile(tests["setup"], "<setup>", "exec", dont_inherit=True), space)
            except BaseException as error:
                self.finish({"error": f"the problem's setup raises {type(error).__name__}: {error}"})
            for source in tests["tests"]:
                try:
                    exec(compile(source, "<test>", "exec", dont_inherit=True), space)
                    verdict["passed"] += not self._killed
                except BaseException:
                    continue
        if self._killed:
            verdict |= {"limit": self._killed, "passed": 0}
        self.finish(verdict)

    def _proxy(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            said = self._ask([name, pack(args), pack(named)])
            if not isinstance(said, list) or not said:
                raise SolutionError("no answer")
            if said[0] == "ok" and len(said) == 2:
                return unpack(said[1])
            kind = getattr(builtins, str(said[1]), None) if len(said) == 3 else None
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, AssertionError):
                raise kind(str(said[2]))
            raise SolutionError(str(said[1:]))

        return call

    def _ask(self, call: object) -> Any:
        """The solution's next message; None where it ended or sent none."""
        try:
            if call is not None:
                write_frame(self._channel, call)
            self._awaits_solution = True
            said = read_frame(self._channel, MAX_MESSAGE_BYTES + 4096)
            with self._looking:  # also where the watch is late: what an answer holds when it answers counts
                self._hold()
            return said
        except (EOFError, OSError, ValueError, RecursionError, MemoryError):
            return None
        finally:
            self._awaits_solution = False

    def finish(self, verdict: dict[str, Any]) -> NoReturn:
        """The first verdict counts."""
        if not self._finishing.acquire(blocking=False):
            threading.Event().wait()
        write_frame(1, verdict)
        os._exit(0)

    # -- limits

    def watch(self) -> NoReturn:
        asleep = 0
        while True:
            time.sleep(WATCH_S)
            with self._looking:
                processes = self._hold()
            waited_s = time.monotonic() - self._started_s
            waits = self._awaits_solution and not any(one[0] in "RD" for one in processes)
            asleep = asleep + 1 if waits else 0
            if waited_s <= self._job["wall_s"]:
                continue
            if not self._awaits_solution:
                self.finish({"error": "the problem's tests did not end in time, or the machine is too busy"})
            if asleep >= ASLEEP_LOOKS:  # one that computes gets its CPU time, however busy the machine
                self._kill("time")
            elif waited_s > self._job["most_s"]:
                self.finish({"error": "the machine is too busy to run the answer in time"})

    def _hold(self) -> list[tuple[str, float, int, int]]:
        """Look at all processes, and end them where together they are over a limit."""
        _reap()
        names = _names()
        if len(names) > self._job["processes"]:  # before their files are read: a fork bomb has thousands
            self._kill("processes")
            return []
        processes = _others(names)
        if sum(one[3] for one in processes) > self._job["processes"]:
            self._kill("processes")
        elif sum(one[2] for one in processes) > self._job["memory_bytes"]:
            self._kill("memory")
        elif sum(one[1] for one in processes) + sum(os.times()[2:4]) > self._job["cpu_s"] + 0.5:
            self._kill("time")
        return processes

    def _kill(self, reason: str) -> None:
        """End everything in the jail but this process, what was just forked, too."""
        self._killed = self._killed or reason
        for _ in range(3):
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                break
            _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _names() -> list[str]:
    """Numbers of all other processes of the jail, also of those that ended and that no process waited for."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _others(names: list[str]) -> list[tuple[str, float, int, int]]:
    """(state, CPU seconds, resident bytes, threads) of each of these processes."""
    found: list[tuple[str, float, int, int]] = []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        used = sum(int(ticks) for ticks in fields[11:15]) * TICKS_S
        found.append((fields[0].decode(), used, int(fields[21]) * PAGE_BYTES, max(1, int(fields[17]))))
    return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no signal reaches the first process that has no handler for it
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.getpid() != 1:
        sys.exit("is not the first process of a jail")
    job = read_frame(0)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        solve(theirs.fileno(), job)
    theirs.close()
    resource.setrlimit(resource.RLIMIT_AS, (job["memory_bytes"], job["memory_bytes"]))  # the tests come from a file
    grader = Grader(job, ours)
    threading.Thread(target=grader.watch, name="watch", daemon=True).start()
    grader.run(read_frame(0))


if __name__ == "__main__":
    main()
