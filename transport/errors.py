"""Every error of the data plane, named by what the caller should do.

    StreamError
    ├── TransientError              retry with back-off
    │   ├── BrokerUnavailableError  the broker does not answer (down, restarting, network)
    │   │   └── BrokerFullError     it answers, and refuses writes: its memory or its disk is full
    │   └── PeerUnavailableError    the other end of a tensor connection does not answer or went away
    ├── FatalError                  stop, with a clear exit
    │   ├── BrokerRejectedError     wrong password, too old, evicts: no retry will help; the message says what to change
    │   ├── FencedError             a newer incarnation of this role has taken over
    │   ├── ProtocolMismatchError   the other side speaks another protocol version
    │   ├── PeerRejectedError       the other end of a tensor connection refuses us, or cannot prove to be ours
    │   ├── SecretError             a secret is missing, or cannot be read
    │   ├── ListenError             no port that others should reach us by is free here
    │   ├── DirectoryError          a directory cannot be written: full, read-only, or not ours
    │   ├── ForeignError            a file or directory that must be this user's own is not: nothing of it was used
    │   ├── InputFileError          a file of rows from outside cannot be read: the message names file and line
    │   ├── LengthFileError         a file of lengths is missing, or holds what is no length: the message names its line
    │   ├── SegmentSpaceError       no place on this host holds another version of the weights
    │   └── RunExistsError          a live run has this name
    ├── TailLostError               the broker came back without what was written last: write all of it again
    ├── MessageError                one message is corrupt, foreign or oversized: dead-letter it, keep going
    └── ChecksumError               bytes arrived and are not what the manifest says: pull again

Bugs (ValueError, a broken invariant) are not caught.
"""

from __future__ import annotations


class StreamError(Exception):
    """Root of this tree."""


class TransientError(StreamError):
    """Retry with back-off."""


class BrokerUnavailableError(TransientError):
    """The broker at ``address`` does not answer."""

    state = "unavailable"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"broker {address} is {self.state}: {reason}")
        self.address = address
        self.reason = reason


class BrokerFullError(BrokerUnavailableError):
    """The broker at ``address`` answers, and takes no writes until there is room: the reason says where."""

    state = "full"


class PeerUnavailableError(TransientError):
    """The tensor peer at ``address`` does not answer or closed the connection."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"peer {address} is unavailable: {reason}")
        self.address = address
        self.reason = reason


class FatalError(StreamError):
    """Stop: no retry will help."""


class BrokerRejectedError(FatalError):
    """The broker answers but cannot be used; the message says what to change."""


class FencedError(FatalError):
    """A newer incarnation of ``role`` holds the fence: this process must stop writing."""

    def __init__(self, role: str, epoch: int, current_epoch: int) -> None:
        super().__init__(f"{role} of epoch {epoch} is fenced off: epoch {current_epoch} has taken over")
        self.role = role
        self.epoch = epoch
        self.current_epoch = current_epoch


class ProtocolMismatchError(FatalError):
    """The other side speaks another protocol version."""


class PeerRejectedError(FatalError):
    """The tensor peer at ``address`` answers, but one of the two does not accept the other: check the shared secret."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"peer {address} is refused: {reason}")
        self.address = address
        self.reason = reason


class SecretError(FatalError):
    """A secret is missing, or cannot be read; the message names the variable or file."""


class ListenError(FatalError):
    """This machine cannot listen where it should; the message says why."""


class DirectoryError(FatalError):
    """A directory of ours cannot be written; the message says why and what to do."""


class ForeignError(FatalError):
    """What must be this user's own, and of one kind, is not: the message names it. Nothing of it was used."""


class SegmentSpaceError(FatalError):
    """``nbytes`` more do not fit into shared memory, nor onto the disk behind it."""

    def __init__(self, nbytes: int, tried: str) -> None:
        super().__init__(f"no room for a segment of {nbytes} bytes: {tried}; free some, or enlarge /dev/shm")
        self.nbytes = nbytes


class InputFileError(FatalError):
    """A file that a user names cannot be read. where: the file, and its line where one is to blame."""

    def __init__(self, problem: str, *, where: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.problem = problem
        self.where = where


class LengthFileError(FatalError):
    """A file of lengths cannot be read; the message names the file and its line."""


class RunExistsError(FatalError):
    """A live run already has this name on this broker or in this directory."""


class TailLostError(StreamError):
    """The broker does not hold what this writer wrote last: it came back from a file that ends before that."""


class MessageError(StreamError):
    """One message is corrupt, foreign or oversized."""


class ChecksumError(StreamError):
    """Bytes arrived and are not what the manifest says."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to raise for the errors of a TaskGroup: the first of ours, which cancelled the others; the group as it is
    when there is a bug in it.

    For ``except BaseExceptionGroup``, not ``except*``: before Python 3.11.4 (Debian 12 has 3.11.2), what is raised
    inside an ``except*`` is wrapped in a group again.
    """
    ours, others = group.split(StreamError)
    if ours is None or others is not None:
        return group
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
