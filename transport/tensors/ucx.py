"""Bytes of a connection over UCX: InfiniBand, RoCE or what else it finds between the two ends, from memory to memory.

    reader ── request, with its UCX address and a tag ──► server       over the TCP connection (wire.py, tcp.py)
    reader ◄════════ chunks, tags in their order ════════ server       over UCX, into the reader's own memory

The TCP connection stays what it is: who may ask, what is asked, and until when. It also tells at once when the other
side has died, whatever UCX notices, so both are waited for together, in the thread of the connection, without polling.
UCX is loaded when the first process needs it, and never beside a second one (nixl brings its own): two crash.

UCX ends a process that gives it an address which is none, so each travels with the version that made it and a checksum.

What is under way when a transfer fails has to end before anything of it can be freed. A reader ends it by force, for
which it has an endpoint to the server. A server cannot (forced, UCXX never frees a send), but hears of its reader's
end, so it waits; what a reader that is stopped holds on to is kept, looked after whenever a connection begins, and
where too much is kept, this process does without UCX.

Owns: context, worker and endpoint of one connection, and the library. Never: decides whether UCX is used (tcp.py asks
both sides), or what the bytes mean. Invariants: no byte goes into memory that the reader did not give for it, but for
the connection's own; when a reader's connection is closed, nothing of UCX touches its memory any more.
Errors: what UCX says becomes PeerUnavailableError of the connection, so that another source, or TCP, goes on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import secrets
import select
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from transport.contracts.settings import UcxChoice
from transport.contracts.types import Struct
from transport.errors import PeerUnavailableError
from transport.process.logs import get_logger
from transport.tensors.base import Deadline
from transport.tensors.manifest import checksum_of

if TYPE_CHECKING:
    from transport.tensors.wire import Channel

log = get_logger(__name__)

CHUNK_BYTES = 2 * 1024 * 1024
"""Of one message. A stretch that is no whole number of them has its last bytes copied once."""
AHEAD = 8
"""Messages under way: a link stays busy while those that came are looked after. Where it is not known yet into what
they are read, they come into the connection's own memory, of so many: .82 of the best bare way without that, 1.0 with
it."""
MAX_ADDRESS_BYTES = 16 * 1024
MAX_KEPT = 4
"""Transfers that are not given back: each holds some 13 descriptors, and what it was to send in memory."""
FIRST_S = 5.0
"""Seconds within which the first bytes of a connection come by UCX, or TCP is used instead. Setting it up takes 10 ms;
what a firewall drops never comes, and the time of one pull has to be enough for the same bytes by TCP."""
SETTLE_S = 1.0
"""For what was under way to end: a reader that lives ends it within milliseconds."""
QUIET_S = 0.05
"""UCX without anything to do for so long has ended what an endpoint's end was to end, also on a card."""
_TAG_BITS = 48
_DEVICES = Path("/sys/class/infiniband")


@functools.cache
def is_installed() -> bool:
    """Whether the extra ``ucx`` is. It is not loaded for that."""
    return importlib.util.find_spec("ucxx") is not None and importlib.util.find_spec("libucxx") is not None


def wants_ucx(choice: UcxChoice) -> bool:
    """Whether this process should offer UCX: "auto" where this machine has a fabric that TCP does not use well."""
    if choice == "auto":
        return is_installed() and _DEVICES.is_dir() and any(_DEVICES.iterdir())
    return choice == "on" and is_installed()


@functools.cache
def _library() -> Any:
    """UCXX's own binding, without its asyncio layer: a thread a connection needs none. Raises ImportError, OSError."""
    # Its handlers of signals would replace Python's, and print the stack of a process that is told to end.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    for library in ("libucx", "libucxx"):
        importlib.import_module(library).load_library()
    return importlib.import_module("ucxx._lib.libucxx")


def version() -> str:
    """Of UCX itself. Raises ImportError, OSError."""
    return ".".join(map(str, _library().get_ucx_version()))


class UcxAddress(Struct, frozen=True, kw_only=True):
    """Where one end of a connection is reached. ucx: the version that says so.  checksum: of both."""

    ucx: str
    address: Annotated[bytes, msgspec.Meta(max_length=MAX_ADDRESS_BYTES)]
    checksum: str


def sealed(ucx: str, address: bytes) -> UcxAddress:
    return UcxAddress(ucx=ucx, address=address, checksum=checksum_of([ucx.encode(), b" ", address]))


class _Worker:
    """Context and worker of one connection, for one thread: UCX then needs no lock.

    endpoint: to the other side, once it is connected.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._under_way: deque[tuple[Any, memoryview]] = deque()
        self.endpoint: Any = None
        self.worker: Any = None
        _look_after_kept(channel.address)
        with self._named():
            ucx = self.ucx = _library()
            self._version = version()
            self._as_array = importlib.import_module("ucxx._lib.arr").Array
            self._context = ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
            self.worker = ucx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
            self.worker.init_blocking_progress_mode()
            self._active, self._woken = select.poll(), select.poll()
            self._active.register(self.worker.epoll_file_descriptor, select.POLLIN)
            self._woken.register(self.worker.epoll_file_descriptor, select.POLLIN)
            self._woken.register(channel.fileno(), select.POLLRDHUP)  # not POLLIN: a reader may ask for more already

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        try:
            yield
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # UCXX's own are RuntimeErrors
            raise PeerUnavailableError(self._channel.address, f"UCX: {error}") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "ucxx":
                raise
            raise PeerUnavailableError(self._channel.address, f"UCX: {error}") from error

    def address(self) -> UcxAddress:
        with self._named():
            return sealed(self._version, self.worker.address.tobytes())

    def connect(self, there: UcxAddress) -> None:
        """With errors handled: else a killed peer is never noticed. Raises PeerUnavailableError: not ours to use."""
        if there.ucx != self._version:
            reason = f"UCX: it has version {there.ucx[:20]!r}, we have {self._version}"
            raise PeerUnavailableError(self._channel.address, reason)
        if not there.address or there != sealed(there.ucx, there.address):
            raise PeerUnavailableError(self._channel.address, "UCX: its address there is torn")
        with self._named():
            address = self.ucx.UCXAddress.create_from_buffer(there.address)
            self.endpoint = self.ucx.UCXEndpoint.create_from_worker_address(self.worker, address, True)

    def finish(self, request: Any, limit: Deadline | None = None) -> None:
        """Wait for ``request``, for ``limit`` at most.

        Raises PeerUnavailableError: it failed, or the other side left or is silent.
        """
        channel = self._channel
        while not request.completed:
            self.worker.progress()
            if request.completed:
                break
            remaining_s = channel.deadline.remaining_s()
            if limit is not None:
                remaining_s = min(remaining_s, limit.remaining_s())
            if remaining_s and not self.worker.arm():
                continue
            ready = [fd for fd, _ in self._woken.poll(1000 * remaining_s)]
            if not (remaining_s and ready):
                raise self.silence(limit or channel.deadline)
            if ready == [channel.fileno()]:
                raise PeerUnavailableError(channel.address, "UCX: closed while bytes were under way")
        with self._named():
            request.check_error()

    def silence(self, deadline: Deadline) -> PeerUnavailableError:
        reason = (
            f"UCX {self._version}: silent for longer than {deadline.seconds:.1f} s, on a port that UCX chose; the port "
            "of this address does answer (docs/quickstarts.md says which ports UCX needs)"
        )
        return PeerUnavailableError(self._channel.address, reason)

    def begin(self, begin: Callable[[Any, int], Any], view: memoryview, tag: int) -> None:
        """Send or receive ``view``, behind what is under way. Raises PeerUnavailableError."""
        array = self._as_array(view)
        with self._named():
            self._under_way.append((begin(array, self.ucx.UCXXTag(tag)), view))

    def finish_first(self, limit: Deadline | None = None) -> memoryview:
        """Wait for what was begun first of what is under way, for ``limit`` at most. Returns it.

        Raises PeerUnavailableError; what is under way then is for ``close`` to end.
        """
        self.finish(self._under_way[0][0], limit)
        return self._under_way.popleft()[1]

    def first_limit(self) -> Deadline:
        """Until when the first bytes come; half of the time is left for the same bytes by TCP."""
        return Deadline(min(FIRST_S, self._channel.deadline.left_s / 2))

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def end(self) -> None:
        """Let nothing more come: a closed endpoint ends what was sent, a dropped request what was not yet."""
        with contextlib.suppress(Exception):
            if self.endpoint is not None and self._under_way:
                self.endpoint.close_blocking()
                self._progress(SETTLE_S, QUIET_S, lambda: False)
        self._free()

    def settle(self, within_s: float) -> bool:
        """Wait until the other side has taken what was sent, or is gone. Returns False where neither is so in time."""
        if self.worker is not None and self._under_way:
            if not self._progress(within_s, within_s, lambda: all(request.completed for request, _ in self._under_way)):
                return False
            self.worker.progress()  # UCXX lets go of what has ended with an error in the round after
        self._free()
        return True

    def _progress(self, within_s: float, quiet_s: float, is_done: Callable[[], bool]) -> bool:
        """Until ``is_done``, which is returned, or UCX has been quiet for so long."""
        deadline = Deadline(within_s, quiet_s)
        self.worker.progress()
        while not is_done() and (remaining_s := deadline.remaining_s()):
            if self.worker.arm() and not self._active.poll(1000 * remaining_s):
                break
            self.worker.progress()
        return is_done()

    def keep(self) -> None:
        log.warning("a transfer by UCX has stalled, and its reader does not give it back", to=self._channel.address)
        with _keeping:
            _kept.append(self)

    def _free(self) -> None:
        self._under_way.clear()
        self.endpoint = self.worker = self._context = None


_keeping = threading.Lock()
_kept: list[_Worker] = []


def _look_after_kept(address: str) -> None:
    """Raises PeerUnavailableError: too many peers hold on to what they were sent; bytes go by TCP."""
    with _keeping:
        _kept[:] = [one for one in _kept if not one.settle(0.0)]
        if len(_kept) >= MAX_KEPT:
            raise PeerUnavailableError(address, f"UCX: {len(_kept)} transfers have stalled and cannot be given back")


class UcxSending:
    """The serving end: sends to one reader."""

    def __init__(self, channel: Channel, there: UcxAddress) -> None:
        """there: the reader's. Raises PeerUnavailableError: UCX finds no way there, or cannot be loaded."""
        self._worker = _Worker(channel)
        try:
            self._worker.connect(there)
            self.address = self._worker.address()
        except BaseException:
            self.close()
            raise

    def send(self, tag: int, views: Iterable[memoryview]) -> int:
        """Send ``views`` under ``tag`` and those after it. Each stays as it is until this returns.

        Returns the next tag. Raises PeerUnavailableError: bytes may still be read from the views.
        """
        worker = self._worker
        for view in views:
            worker.begin(worker.endpoint.tag_send, view, tag)
            tag += 1
            if worker.num_under_way > AHEAD:
                worker.finish_first()
        while worker.num_under_way:
            worker.finish_first()
        return tag

    def close(self) -> None:
        """Its memory is free again, or is kept, and so is what it lies in, until the reader is gone."""
        if not self._worker.settle(SETTLE_S):
            self._worker.keep()


class UcxReceiving:
    """The reading end of one connection. address: what the server sends to."""

    def __init__(self, channel: Channel, failed: Callable[[str], None] = lambda _: None) -> None:
        """failed: called with the reason where bytes did not come.

        Raises PeerUnavailableError: UCX cannot be loaded, or has no way out.
        """
        self._worker = _Worker(channel)
        self._failed = failed
        self.address = self._worker.address()
        self._tag = 0
        self._left = 0  # not begun yet
        self._ahead: deque[tuple[int, bytearray | None]] = deque()  # of what is under way: its size, what it lies in
        self._buffers: list[bytearray] = []  # for what comes before it is read
        self._rest: tuple[memoryview, bytearray] | None = None
        self.has_come = False
        """Whether any bytes did."""

    def first_limit(self) -> Deadline:
        return self._worker.first_limit()

    def unanswered(self, deadline: Deadline) -> PeerUnavailableError:
        """What to raise where the other side did not even answer within ``deadline``."""
        error = self._worker.silence(deadline)
        self._failed(error.reason)
        return error

    def next_tag(self) -> int:
        """Where the tags of the next answer begin: drawn, so that nobody else sends what passes for it."""
        self._tag = secrets.randbits(_TAG_BITS)
        return self._tag

    def expect(self, nbytes: int, there: UcxAddress) -> None:
        """So many bytes answer what was asked with ``next_tag``. there: the server's. Raises PeerUnavailableError."""
        self._left = nbytes
        if self._worker.endpoint is None:
            with self._or_failed():
                self._worker.connect(there)

    @contextlib.contextmanager
    def _or_failed(self) -> Generator[None]:
        try:
            yield
        except PeerUnavailableError as error:
            self._failed(error.reason)
            self._worker.end()
            raise

    def read(self, view: memoryview) -> int:
        """Put the next bytes at the beginning of ``view``: whole chunks straight there. Returns how many.

        Those behind ``view`` come meanwhile, while its reader compares it, and are copied when they are read.
        """
        if self._rest is None:
            with self._or_failed():
                self._go_ahead(view)
                chunk = self._worker.finish_first(None if self.has_come else self._worker.first_limit())
                self.has_come = True
            nbytes, buffer = self._ahead.popleft()
            if buffer is None:
                return nbytes
            self._rest = chunk, buffer
        rest, buffer = self._rest
        count = min(view.nbytes, rest.nbytes)
        view[:count] = rest[:count]
        self._rest = (rest[count:], buffer) if count < rest.nbytes else None
        if self._rest is None:
            self._buffers.append(buffer)
        return count

    def _go_ahead(self, view: memoryview) -> None:
        """Begin to receive up to AHEAD chunks, of which the next one belongs at the beginning of ``view``."""
        if self._worker.worker is None:
            raise PeerUnavailableError("", "UCX: closed")
        at = sum(nbytes for nbytes, _ in self._ahead)
        while self._left and len(self._ahead) < AHEAD:
            nbytes = min(CHUNK_BYTES, self._left)
            buffer = None
            if at + nbytes > view.nbytes:
                buffer = self._buffers.pop() if self._buffers else bytearray(CHUNK_BYTES)
            into = view[at : at + nbytes] if buffer is None else memoryview(buffer)[:nbytes]
            self._worker.begin(self._worker.worker.tag_recv, into, self._tag)
            self._ahead.append((nbytes, buffer))
            self._tag, self._left, at = self._tag + 1, self._left - nbytes, at + nbytes

    def close(self) -> None:
        self._worker.end()


def chunks(view: memoryview) -> Iterator[memoryview]:
    """``view`` as messages."""
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
