"""Bytes of a connection over UCX: InfiniBand, RoCE or what else it finds between the two ends, from memory to memory.

    reader ── request, with its UCX address and a tag ──► server       over the TCP connection (wire.py, tcp.py)
    reader ◄════════ chunks, tags in their order ════════ server       over UCX, into the reader's own memory

The TCP connection stays what it is: who may ask, what is asked, and until when. It also tells at once when the other
side has died, whatever UCX notices, so both are waited for together, in the thread of the connection, without polling.
UCX is loaded when the first process needs it, and never beside a second one (nixl brings its own): two crash.

Owns: context, worker and endpoint of one connection, and the library. Never: decides whether UCX is used (tcp.py asks
both sides), or what the bytes mean. Invariants: no byte goes into memory that the reader did not give for it; when a
segment or a connection is closed, nothing of UCX touches its memory any more.
Errors: what UCX says becomes PeerUnavailableError of the connection, so that another source, or TCP, goes on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import secrets
import select
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transport.contracts.settings import UcxChoice
from transport.errors import PeerUnavailableError
from transport.process.logs import get_logger

if TYPE_CHECKING:
    from transport.tensors.wire import Channel

log = get_logger(__name__)

CHUNK_BYTES = 2 * 1024 * 1024
"""Of one message. A stretch that is no whole number of them has its last bytes copied once."""
AHEAD = 8
"""Messages under way: enough for a link to stay busy while one of them is looked after."""
MAX_ADDRESS_BYTES = 16 * 1024
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


class _Worker:
    """Context and worker of one connection, for one thread: UCX then needs no lock."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.endpoint: Any = None
        self.worker: Any = None
        with self._named():
            ucx = self.ucx = _library()
            self._as_array = importlib.import_module("ucxx._lib.arr").Array
            self._context = ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
            self.worker = ucx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
            self.worker.init_blocking_progress_mode()
            self._woken = select.poll()
            self._woken.register(self.worker.epoll_file_descriptor, select.POLLIN)
            self._woken.register(channel.fileno(), select.POLLIN)

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

    def address(self) -> bytes:
        with self._named():
            return self.worker.address.tobytes()

    def connect(self, address: bytes) -> None:
        """With errors handled: else a killed peer is never noticed."""
        with self._named():
            there = self.ucx.UCXAddress.create_from_buffer(address)
            self.endpoint = self.ucx.UCXEndpoint.create_from_worker_address(self.worker, there, True)

    def finish(self, request: Any) -> None:
        """Wait for ``request``. Raises PeerUnavailableError: it failed, or the other side left or is silent."""
        while not request.completed:
            self.worker.progress()
            if request.completed or not self.worker.arm():
                continue
            channel = self._channel
            ready = {fd for fd, _ in self._woken.poll(1000 * channel.deadline.remaining_s())}
            if not ready:
                raise PeerUnavailableError(channel.address, f"silent for longer than {channel.deadline.seconds:.1f} s")
            if ready == {channel.fileno()}:  # nobody speaks there while bytes are under way
                raise PeerUnavailableError(channel.address, "closed while bytes were under way")
        with self._named():
            request.check_error()

    def all(self, begin: Callable[[Any, int], Any], views: Iterable[memoryview], tag: int) -> int:
        """Begin a request for each view, some of them ahead, and finish all. Returns the tag after the last one's.

        Raises PeerUnavailableError; UCX has let go of the views then, too, and is closed.
        """
        under_way: deque[tuple[Any, memoryview]] = deque()
        try:
            for view in views:
                array = self._as_array(view)
                with self._named():
                    under_way.append((begin(array, self.ucx.UCXXTag(tag)), view))
                tag += 1
                if len(under_way) > AHEAD:
                    self.finish(under_way.popleft()[0])
            while under_way:
                self.finish(under_way[0][0])
                under_way.popleft()
        except BaseException:
            self.close()
            raise
        return tag

    def close(self) -> None:
        """Cancel what is under way; nothing touches the memory of it then."""
        if self.worker is not None:
            with contextlib.suppress(Exception):
                self.worker.cancel_inflight_requests()
        self.endpoint = self.worker = self._context = None


class UcxSending:
    """The serving end: sends to one reader."""

    def __init__(self, channel: Channel, address: bytes) -> None:
        """address: the reader's. Raises PeerUnavailableError: UCX finds no way there, or cannot be loaded."""
        self._worker = _Worker(channel)
        self._worker.connect(address)

    def send(self, tag: int, views: Iterable[memoryview]) -> None:
        """Send ``chunks``, each of which stays as it is until this returns. Raises PeerUnavailableError."""
        endpoint = self._worker.endpoint
        if endpoint is None:
            raise PeerUnavailableError("", "UCX: closed")
        self._worker.all(endpoint.tag_send, views, tag)

    def close(self) -> None:
        self._worker.close()


class UcxReceiving:
    """The reading end of one connection. address: what the server sends to."""

    def __init__(self, channel: Channel, failed: Callable[[], None] = lambda: None) -> None:
        """failed: called where bytes did not come.

        Raises PeerUnavailableError: UCX cannot be loaded, or has no way out.
        """
        self._worker = _Worker(channel)
        self._failed = failed
        self.address: bytes = self._worker.address()
        self._tag = 0
        self._left = 0
        self._rest = memoryview(b"")

    def next_tag(self) -> int:
        """Where the tags of the next answer begin: drawn, so that nobody else sends what passes for it."""
        self._tag = secrets.randbits(_TAG_BITS)
        return self._tag

    def expect(self, nbytes: int) -> None:
        """So many bytes answer what was asked with ``next_tag``."""
        self._left, self._rest = nbytes, memoryview(b"")

    def read(self, view: memoryview) -> int:
        """Put the next bytes at the beginning of ``view``: whole chunks straight there. Returns how many."""
        if not self._rest and view.nbytes < min(CHUNK_BYTES, self._left):
            chunk = memoryview(bytearray(min(CHUNK_BYTES, self._left)))
            self._receive([chunk])
            self._rest = chunk
        if self._rest:
            count = min(view.nbytes, self._rest.nbytes)
            view[:count], self._rest = self._rest[:count], self._rest[count:]
            return count
        whole = view[: self._left] if self._left <= view.nbytes else view[: view.nbytes // CHUNK_BYTES * CHUNK_BYTES]
        parts = list(itertools.islice(chunks(whole), AHEAD))
        self._receive(parts)
        return sum(part.nbytes for part in parts)

    def _receive(self, views: Sequence[memoryview]) -> None:
        worker = self._worker.worker
        try:
            if worker is None:
                raise PeerUnavailableError("", "UCX: closed")
            self._tag = self._worker.all(worker.tag_recv, views, self._tag)
        except PeerUnavailableError:
            self._failed()
            raise
        self._left -= sum(view.nbytes for view in views)

    def close(self) -> None:
        self._worker.close()


def chunks(view: memoryview) -> Iterator[memoryview]:
    """``view`` as messages."""
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
