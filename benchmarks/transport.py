"""What moving tensors between processes costs: figure ``transport``.

A sender and a receiver, a process each with one thread of its own; the receiver asks, and a transfer has ended once all
bytes lie in its memory and were compared with their CRC-32, piece by piece, whichever way they came. Ours and the bare
loops take turns in every round, first one and then the other first; a figure is the median over the rounds of the ratio
within a round, against that bare way which is better at it.

    shm8_over_write_map   seconds until 8 processes have checked 512 MiB that one wrote into shared memory, over the
                          same by hand: open, pwrite and mmap, with the same checksums; ``shm8_unchecked_*``: without
                          any, where a reader looks at one byte of each page
    tcp_over_bare         bytes a second, over a loop on one socket (``send`` or ``sendfile``, ``recv_into``)
    ucx_over_bare         the same over UCXX: its asyncio layer, or its binding, waiting or polling
    cpu_over_bare         CPU seconds of both ends, ours over TCP over that loop; ``ucx_cpu_over_bare`` the same for UCX
    small_rtt_over_bare   seconds for 4 KiB over a connection that stands, over that loop; both ends on one core, where
                          a scheduler puts them, so that nothing but work counts; ``small_rtt_two_cores_*``: on two

The others are of the largest size, with a core for each end: a scheduler puts both on one core or on two by chance, and
that makes more difference than what is measured. Beside them in the table is what others take, who are not tuned: each
is used as its manual shows it, with the same checksums in the end. What is not installed is left out, and said.

    python -m benchmarks.transport [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import platform
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from benchmarks.transport_compared import COMPARED, Read, read_by_hand, read_ours, write_by_hand, write_ours
from benchmarks.transport_others import OTHERS
from benchmarks.transport_ways import ENDING_S, STEP_S, End, Inputs, Piece, Side, Transfer, Way, mapped
from transport.tensors.pieces import crc32
from transport.tensors.shm import SHARED_MEMORY, ShmStore

KIB, MIB, GB = 1024, 1024 * 1024, 1e9
SMALL = 4 * KIB
SIZES = (MIB, 64 * MIB, 512 * MIB)
QUICK_SIZES = (MIB, 8 * MIB, 32 * MIB)
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # of RPC, which complains when it is shut down
    "PYTHONWARNINGS": "ignore::UserWarning",  # of gloo, about a call that torch itself makes
}
READERS = 8
PIECE_BYTES = 16 * MIB
"""Checked at once: a matrix of a model of a few billion parameters."""
ROUND_BYTES, ROUND_S, MOST_TRANSFERS = 128 * MIB, 1.0, 1000
"""A round repeats a size until it has moved so much, for so long or so often, and counts the median."""
_CPU_OF_PROCESS = 2  # CPUCLOCK_SCHED: the clock of a process is (~pid << 3) | 2, all of its threads
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A size, and the cores of sender and receiver."""

    nbytes: int
    sender: int
    receiver: int


def begin_child() -> None:
    """Its parent ends it: by a word, or by force where it is deep in a library."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def serve_end(end: End, control: Connection, link: Connection, inputs: Inputs) -> None:
    """One end in a process of its own: answers (nbytes, times) with the seconds of each transfer, None ends it."""
    begin_child()
    side = Side(inputs, link)
    try:
        with end(side) as transfer:
            control.send(side.others)
            while (asked := control.recv()) is not None:
                nbytes, times = asked
                control.send([seconds_of(transfer, nbytes) for _ in range(times)])
    except Exception as error:
        control.send(FailedError(f"{type(error).__name__}: {error}"))


def serve_reader(read: Mapping[str, Read], control: Connection, inputs: Inputs) -> None:
    """One of many readers of shared memory: answers (whose, address, nbytes, checked) once it has read it."""
    begin_child()
    control.send(None)
    while (asked := control.recv()) is not None:
        whose, address, nbytes, checked = asked
        read[whose](address, nbytes, inputs.pieces[nbytes], checked)
        control.send(None)


def seconds_of(transfer: Transfer, nbytes: int) -> float:
    started_s = time.perf_counter()
    transfer(nbytes)
    return time.perf_counter() - started_s


class FailedError(Exception):
    """A way does not work here."""


class Child:
    """A process of ours, until ``close``."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._control, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=tuple(theirs if one is CONTROL else one for one in arguments))
        # Blocked in the child from its first instruction on: Ctrl-C is this process's affair, which ends its children.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        theirs.close()
        self.pid = self._process.pid or 0

    def pin(self, core: int) -> None:
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})

    def ask(self, asked: Any) -> None:
        self._control.send(asked)

    def answer(self) -> Any:
        """Raises FailedError: it failed, ended or is silent."""
        try:
            answer = self._control.recv() if self._control.poll(STEP_S) else FailedError(f"silent for {STEP_S:.0f} s")
        except (EOFError, ConnectionResetError):
            answer = FailedError("its process ended")
        if isinstance(answer, FailedError):
            raise answer
        return answer

    def end(self) -> None:
        with suppress(OSError):
            self._control.send(None)

    def close(self) -> None:
        """Kill it where it has not ended in time."""
        self.end()
        self._process.join(ENDING_S)
        self._process.kill()
        self._process.join()
        self._control.close()


CONTROL = object()
"""Stands for the child's end of its pipe among its arguments."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A transfer: median seconds at the receiver, mean CPU seconds of all its processes."""

    seconds: float
    cpu_s: float


class Pair:
    """A sender, a receiver and whoever works for them."""

    def __init__(self, way: Way, inputs: Inputs) -> None:
        links = multiprocessing.get_context("spawn").Pipe()
        self._children: list[Child] = []
        try:
            for end, link in zip((way.send, way.receive), links, strict=True):
                self._children.append(Child(serve_end, end, CONTROL, link, inputs))
            for link in links:
                link.close()
            others = [pid for child in self._children for pid in child.answer()]
        except BaseException:
            self.close()
            raise
        self._pids = [*(child.pid for child in self._children), *others]

    def take(self, case: Case, times: int) -> Taken:
        for child, core in zip(self._children, (case.sender, case.receiver), strict=True):
            child.pin(core)
        before_s = self._cpu_s()
        for child in self._children:
            child.ask((case.nbytes, times))
        _, seconds = [child.answer() for child in self._children]
        return Taken(statistics.median(seconds), (self._cpu_s() - before_s) / times)

    def _cpu_s(self) -> float:
        return sum(time.clock_gettime(~pid << 3 | _CPU_OF_PROCESS) for pid in self._pids)

    def close(self) -> None:
        for child in self._children:  # both, before one is waited for: some take leave of each other
            child.end()
        for child in self._children:
            child.close()


Rounds = Mapping[Case, Sequence[Taken]]
"""What each round took."""


def take_turns(ways: Mapping[str, Way], inputs: Inputs, cases: Sequence[Case], rounds: int) -> dict[str, Rounds]:
    """All ``ways`` in every round; one transfer of each goes first and is not counted."""
    found: dict[str, dict[Case, list[Taken]]] = {name: {} for name in ways}
    with ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for name, way in ways.items():
            pairs[name] = Pair(way, inputs)
            stack.callback(pairs[name].close)
        for case in cases:
            first = {name: pair.take(case, 1).seconds for name, pair in pairs.items()}
            most = min(MOST_TRANSFERS, ROUND_BYTES // case.nbytes)
            times = {name: max(1, min(most, int(ROUND_S / seconds))) for name, seconds in first.items()}
            for number in range(rounds):
                for name in list(pairs) if number % 2 else reversed(pairs):
                    found[name].setdefault(case, []).append(pairs[name].take(case, times[name]))
    return dict(found)


# --- eight readers ----------------------------------------------------------------------------------------------------

READ: Mapping[str, Read] = {"ours": read_ours, "by hand": read_by_hand}


def shm_rounds(inputs: Inputs, rounds: int) -> dict[tuple[str, bool], list[float]]:
    """Seconds from the first byte written until all READERS have read, of (whose, checked)."""
    nbytes = max(inputs.pieces)
    data = mapped(inputs.content)[:nbytes]
    found: dict[tuple[str, bool], list[float]] = {(whose, checked): [] for whose in READ for checked in (True, False)}
    with ExitStack() as stack:
        store = ShmStore("bench", (inputs.directory,))
        stack.callback(store.close)
        readers: list[Child] = []
        for _ in range(READERS):
            readers.append(Child(serve_reader, READ, CONTROL, inputs))
            stack.callback(readers[-1].close)
        for reader in readers:
            reader.answer()
        for number in range(rounds + 1):
            for whose, checked in list(found) if number % 2 else reversed(found):
                path = inputs.directory / "by-hand"
                started_s = time.perf_counter()
                if whose == "ours":
                    address = write_ours(store, "eight", data, checked=checked)
                else:
                    write_by_hand(path, data, checked=checked)
                    address = str(path)
                for reader in readers:
                    reader.ask((whose, address, nbytes, checked))
                for reader in readers:
                    reader.answer()
                if number:
                    found[whose, checked].append(time.perf_counter() - started_s)
                store.drop("eight")
                path.unlink(missing_ok=True)
    return found


# --- figures ----------------------------------------------------------------------------------------------------------


def median_of(taken: Sequence[Taken], what: str) -> float:
    return statistics.median(getattr(one, what) for one in taken)


def over_best(found: Mapping[str, Rounds], ours: str, case: Case, what: str) -> float:
    """Ours over that bare way which needs the least; median of the rounds."""
    bare = [name for name, way in COMPARED.items() if way.bare_of == ours]
    best = min(bare, key=lambda name: median_of(found[name][case], what))
    return paired(*([getattr(one, what) for one in found[name][case]] for name in (ours, best)))


def paired(ours: Sequence[float], bare: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, bare, strict=True))


def speed(rounds: Rounds, case: Case) -> float:
    """GB a second."""
    return case.nbytes / median_of(rounds[case], "seconds") / GB


def row(name: str, rounds: Rounds) -> str:
    times = "".join(f"{1e6 * median_of(rounds[case], 'seconds'):9.0f}" for case in rounds if case.nbytes == SMALL)
    speeds = "".join(f"{speed(rounds, case):9.3f}" for case in rounds if case.nbytes != SMALL)
    [*_, largest] = rounds
    return f"{name:26}{times}{speeds}{median_of(rounds[largest], 'cpu_s') / largest.nbytes * GB:9.3f}"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Linux {platform.release()}"


def load() -> float:
    return round(os.getloadavg()[0], 1)


@contextmanager
def made_inputs(sizes: Sequence[int]) -> Iterator[Inputs]:
    with tempfile.TemporaryDirectory(prefix="bench-transport-", dir=SHARED_MEMORY) as directory:
        content = Path(directory) / "content"
        content.write_bytes(np.random.default_rng(7).bytes(max(sizes)))
        pieces = {nbytes: pieces_of(mapped(content)[:nbytes]) for nbytes in sizes}
        yield Inputs(
            content=content, directory=Path(directory), pieces=pieces, secret=secrets.token_urlsafe(32).encode()
        )


def pieces_of(data: memoryview) -> Sequence[Piece]:
    cuts = [*range(0, data.nbytes, PIECE_BYTES), data.nbytes]
    return [Piece(start, end, crc32(data[start:end])) for start, end in itertools.pairwise(cuts)]


def compared(inputs: Inputs, cases: Sequence[Case], rounds: int) -> dict[str, Rounds]:
    """Each of ours with its bare ways."""
    found: dict[str, Rounds] = {}
    for ours in (name for name, way in COMPARED.items() if not way.bare_of):
        ways = {name: way for name, way in COMPARED.items() if ours in (name, way.bare_of)}
        if not all(way.is_there for way in ways.values()):
            print(f"{ours:26}left out: {' or '.join(COMPARED[ours].needs)} is not installed", flush=True)
            continue
        found |= take_turns(ways, inputs, cases, rounds)
        for name in ways:
            print(row(name, found[name]), flush=True)
    return found


def others(inputs: Inputs, cases: Sequence[Case], rounds: int) -> dict[str, Rounds]:
    """One after another."""
    found: dict[str, Rounds] = {}
    for name, way in OTHERS.items():
        if not way.is_there:
            print(f"{name:26}left out: {' or '.join(way.needs)} is not installed", flush=True)
            continue
        try:
            found |= take_turns({name: way}, inputs, cases, rounds)
            print(row(name, found[name]), flush=True)
        except FailedError as error:
            print(f"{name:26}left out: {error}", flush=True)
    return found


def figures(sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    first, *_, last = [*sorted(os.sched_getaffinity(0))] * 2
    one_core, two_cores = Case(SMALL, first, first), Case(SMALL, first, last)
    cases = [one_core, two_cores, *(Case(nbytes, first, last) for nbytes in sizes)]
    largest = cases[-1]
    begun = load()
    print(f"{machine()}; load {begun}; {rounds} rounds")
    speeds = "".join(f"{nbytes // MIB:5} MiB" for nbytes in sizes)
    print(f"{'4 KiB: us, others: GB/s':26}{'one core':>9}{'two':>9}{speeds}{'CPU s/GB':>9}", flush=True)
    with made_inputs([SMALL, *sizes]) as inputs:
        found = compared(inputs, cases, rounds)
        mapped_s = shm_rounds(inputs, rounds)
        beside = others(inputs, cases, max(1, rounds // 3))
    for (whose, checked), seconds in mapped_s.items():
        what = "checked" if checked else "one byte of each page"
        middle_ms = 1000 * statistics.median(seconds)
        print(f"{sizes[-1] // MIB} MiB to {READERS} readers, {whose}, {what}: {middle_ms:.0f} ms")
    result = {
        "shm8_over_write_map": paired(mapped_s["ours", True], mapped_s["by hand", True]),
        "shm8_unchecked_over_write_map": paired(mapped_s["ours", False], mapped_s["by hand", False]),
    }
    for ours, prefix in (("ours, TCP", "tcp_"), ("ours, UCX", "ucx_")):
        if ours in found:
            rest = "" if prefix == "tcp_" else prefix
            result |= {
                f"{prefix}over_bare": 1 / over_best(found, ours, largest, "seconds"),
                f"{rest}cpu_over_bare": over_best(found, ours, largest, "cpu_s"),
                f"{rest}small_rtt_over_bare": over_best(found, ours, one_core, "seconds"),
                f"{rest}small_rtt_two_cores_over_bare": over_best(found, ours, two_cores, "seconds"),
            }
    return {key: round(value, 3) for key, value in result.items()} | {
        "sizes_mib": [nbytes // MIB for nbytes in sizes],
        "gb_per_s": {
            name: [round(speed(taken, case), 3) for case in cases[2:]] for name, taken in (found | beside).items()
        },
        "machine": machine(),
        "load": [begun, load()],
    }


def end_once(number: int, _: object) -> NoReturn:
    """Ctrl-C, however often it is pressed: everything that was begun is ended and freed."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and two rounds: whether it runs, no figures")
    parser.add_argument("--rounds", type=int, default=0, help="of ours and the bare ways; others go a third as many")
    options = parser.parse_args()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, end_once)
    os.environ |= QUIET  # of the children, too
    sizes, rounds = (QUICK_SIZES, 2) if options.quick else (SIZES, 11)
    print(json.dumps(figures(sizes, options.rounds or rounds)))


if __name__ == "__main__":
    main()
