"""Errors of the workers, below the data plane's tree.

FatalError (transport.errors)
├── ModelError            a model directory is missing, broken or of an unsupported kind: the message says what to do
├── ModelMismatchError    a worker's model is not the one of the run that it would join: its token ids are other words
├── RewardSetupError      the run's reward cannot be built, or this worker's command line does not allow it
├── EndpointSetupError    the endpoint for agents cannot be listened on
├── EnvironmentSetupError  the same of the run's environment
├── AlgorithmError        a loss or an advantage of the user's is none, or this worker's command line does not allow it
├── CheckpointError       a checkpoint cannot be written, or does not fit; the ones before are untouched
│   └── NoCheckpointRoomError   its disk is full, or its directory or store takes no writes
├── ResumeMismatchError   a checkpoint is of another model, data set or group size than the run that found it
├── RunFilesError         what a command reads of a run's directory is not there: configuration, problems, checkpoint
├── EvaluationError       held-out problems cannot be answered
├── RoundsError           the rounds log says what no trainer can do, or rows that it names never came
└── ClientError           a client asks for what there is not, or what is not its to do: the message says what instead

TransientError (transport.errors): this process ends, and starting it again is worth a try
├── EngineCrashedError    the generation engine's thread ended with an error: its cause is attached
├── EngineHungError       the generation engine's thread did not answer within its deadline
├── ServerUnavailableError  an inference server does not answer: down, hung, starting, or its connection was cut
│   └── ServerUnreachableError  no connection to it can be made: it never got what was to be sent
├── RanksError            the ranks of a trainer did not find one another, or one of them went away
├── PublicationError      a version of the weights was not readable within its deadline
├── RowsChangedError      rows were generated again between two passes over them: back to the checkpoint
├── ClientTimeoutError    a call of a client was not done within its deadline: the message names the call
└── LeaseLostError        rows that a client held went to another consumer: drop what was made of them

StreamError (transport.errors)
├── CheckpointRefusedError  weights that a publisher is asked for are not there, not allowed, or no weights
├── WeightsMismatchError  tensors do not fit the model that should take them: the old weights are still served
│   └── WeightsSpoiledError  a server failed while it took them, and is started again: asking again may help
├── TensorFileError       a file of tensors is cut off, or none: whose it is decides what that means
├── ServerAnswerError     an inference server answers with an error, or with what is no answer
├── EndpointRefusedError  an agent's request cannot be done: its answer has the status and the code of the error
├── EnvironmentFailedError  an episode's environment gave no answer, or another one when it was replayed
└── RewardError           one reward could not be computed (raised, too slow, not a number): try again, then give up
    └── RewardTimeoutError  it took longer than its limit: it would again, so it is not tried again
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.contracts.types import RowId
from transport.errors import DirectoryError, FatalError, StreamError, TransientError
from transport.process.storage import Place


class ModelError(FatalError): ...


class ModelMismatchError(FatalError): ...


class RewardSetupError(FatalError): ...


class AlgorithmError(FatalError): ...


class EndpointSetupError(FatalError): ...


class EnvironmentSetupError(FatalError): ...


class CheckpointError(FatalError):
    """nbytes: what the checkpoint at ``path`` takes; 0 when that is not the matter."""

    def __init__(self, path: Place, nbytes: int, reason: str) -> None:
        size = f" ({nbytes} bytes needed)" if nbytes else ""
        super().__init__(f"checkpoint {path}{size}: {reason}")
        self.path = path
        self.nbytes = nbytes


class NoCheckpointRoomError(CheckpointError, DirectoryError):
    """Where it goes has no room, or takes no writes."""

    def __init__(self, path: Place, nbytes: int, reason: str) -> None:
        super().__init__(path, nbytes, f"{reason}; make room there, or let it be written")


class ResumeMismatchError(FatalError): ...


class RunFilesError(FatalError): ...


class EvaluationError(FatalError): ...


class RoundsError(FatalError): ...


class ClientError(FatalError): ...


class EngineCrashedError(TransientError): ...


class EngineHungError(TransientError): ...


class ServerUnavailableError(TransientError):
    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"server {url} is unavailable: {reason}")
        self.url = url


class ServerUnreachableError(ServerUnavailableError): ...


class RanksError(TransientError): ...


class PublicationError(TransientError): ...


class RowsChangedError(TransientError):
    def __init__(self, row_id: str) -> None:
        super().__init__(f"row {row_id} was generated again between two passes: going back to the checkpoint")
        self.row_id = row_id


class ClientTimeoutError(TransientError): ...


class LeaseLostError(TransientError):
    def __init__(self, task: str, rows: Sequence[RowId]) -> None:
        super().__init__(f"task {task}: {len(rows)} rows went to another consumer: {', '.join(rows[:3])}")
        self.task = task
        self.rows = tuple(rows)


class CheckpointRefusedError(StreamError): ...


class WeightsMismatchError(StreamError): ...


class WeightsSpoiledError(WeightsMismatchError): ...


class TensorFileError(StreamError):
    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} is no whole file of tensors: {reason}")
        self.file = file


class ServerAnswerError(StreamError):
    """status: HTTP's; 0 for what cannot be read. 400 to 499: the request is at fault and would be refused again."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"server {url} answers {status or 'nonsense'}: {reason}")
        self.url = url
        self.status = status
        self.reason = reason


class EndpointRefusedError(StreamError):
    """status: of HTTP.  code, param: as OpenAI's errors have them, ``param`` the field at fault or ""."""

    def __init__(self, status: int, code: str, reason: str, *, param: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.param = param


class EnvironmentFailedError(StreamError): ...


class RewardError(StreamError): ...


class RewardTimeoutError(RewardError): ...


SETUP_MISTAKES = (
    AlgorithmError,
    EndpointSetupError,
    EnvironmentSetupError,
    EvaluationError,
    ModelError,
    ModelMismatchError,
    ResumeMismatchError,
    RewardSetupError,
    RunFilesError,
)
"""What the command line, the environment or the run's settings say must change before this process can do anything."""
