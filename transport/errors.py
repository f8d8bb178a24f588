"""Every error of the data plane, named by what the caller should do.

    StreamError
    ├── TransientError              retry with back-off
    │   ├── BrokerUnavailableError  the broker does not answer (down, restarting, network)
    │   │   └── BrokerFullError     it answers, and refuses writes: its memory or its disk is full
    │   └── PeerUnavailableError    the other end of a tensor connection does not answer or went away
    ├── FatalError                  stop, with a clear exit
    │   ├── BrokerRejectedError     wrong password, too old, evicts: no retry will help; the message says what to change
    │   ├── FencedError             a newer incarnation of this role has taken over: this process must stop writing
    │   ├── ProtocolMismatchError   the other side speaks another protocol version
    │   ├── PeerRejectedError       the other end of a tensor connection refuses us, or cannot prove to be ours
    │   ├── SecretError             a secret is missing, or cannot be read: the message names the variable or file
    │   ├── ListenError             no port that others should reach us by is free here
    │   ├── DirectoryError          a directory cannot be written: full, read-only, or not ours
    │   ├── ForeignError            a file or directory that must be this user's own is not: nothing of it was used
    │   ├── InputFileError          a file of rows from outside cannot be read: the message names file and line
    │   ├── LengthFileError         a file of lengths is missing, or holds what is no length: the message names its line
    │   ├── GpuError                a GPU that a process should take is not there, or is not free: the message names it
    │   ├── SegmentSpaceError       no place on this host holds another version of the weights
    │   └── RunExistsError          a live run has this name
    │       └── OtherRunError       another run has this name on the broker, or another directory goes on with this run
    ├── TailLostError               the broker came back without what was written last: write all of it again
    ├── MessageError                one message is corrupt, foreign or oversized: dead-letter it, keep going
    └── ChecksumError               bytes arrived and are not what the manifest says: pull again

Bugs (ValueError, a broken invariant) are not caught.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, RecursionError)
"""Errors of msgspec over what others wrote: not what it should be, or nested too deep."""


class StreamError(Exception): ...


class TransientError(StreamError): ...


class FatalError(StreamError): ...


class _AddressedError(StreamError):
    """One about ``address``. problem: how its message begins."""

    problem: str

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(self.problem.format(address) + f": {reason}")
        self.address = address
        self.reason = reason


class BrokerUnavailableError(_AddressedError, TransientError):
    problem = "broker {} is unavailable"


class BrokerFullError(BrokerUnavailableError):
    problem = "broker {} is full"


class PeerUnavailableError(_AddressedError, TransientError):
    problem = "peer {} is unavailable"


class PeerRejectedError(_AddressedError, FatalError):
    problem = "peer {} is refused"


class BrokerRejectedError(FatalError): ...


FENCED = "is fenced off"


class FencedError(FatalError):
    """newest: the run's newest start, for people; "" where nothing is known of it."""

    def __init__(self, role: str, epoch: int, current_epoch: int, newest: str = "") -> None:
        said = f"{role} of epoch {epoch} {FENCED}: epoch {current_epoch} has taken over"
        if newest:
            said += f". Another start of this run did that; its newest start is that of {newest}"
        super().__init__(f"{said}. Go on there, or stop the other one first")
        self.role = role
        self.epoch = epoch
        self.current_epoch = current_epoch


class ProtocolMismatchError(FatalError): ...


class SecretError(FatalError): ...


class ListenError(FatalError): ...


class DirectoryError(FatalError): ...


class ForeignError(FatalError): ...


class InputFileError(FatalError):
    """where: the file, and its line where one is to blame."""

    def __init__(self, problem: str, *, where: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.problem = problem
        self.where = where


class LengthFileError(FatalError): ...


class GpuError(FatalError): ...


class SegmentSpaceError(FatalError):
    def __init__(self, nbytes: int, tried: str) -> None:
        super().__init__(f"no room for a segment of {nbytes} bytes: {tried}; free some, or enlarge /dev/shm")
        self.nbytes = nbytes
        self.tried = tried


class RunExistsError(FatalError): ...


class OtherRunError(RunExistsError):
    """owner_id: the run that has the name, "" where it has gone again."""

    def __init__(self, problem: str, *, owner_id: str = "") -> None:
        super().__init__(problem)
        self.owner_id = owner_id


class TailLostError(StreamError): ...


class MessageError(StreamError): ...


class ChecksumError(StreamError): ...


MISTAKES = (
    BrokerRejectedError,
    ForeignError,
    GpuError,
    InputFileError,
    LengthFileError,
    ListenError,
    RunExistsError,
    SecretError,
)
"""Those that a command answers with exit code 2: what its user gave must change before it can work."""


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
