"""Errors of the workers, below the data plane's tree.

FatalError (transport.errors)
├── ModelError            a model directory is missing, broken or of an unsupported kind: the message says what to do
├── ModelMismatchError    a worker's model is not the one of the run that it would join
├── GpuError              a GPU that this worker should take is not there, or none is free
├── RewardSetupError      the run's reward cannot be built, or this worker's command line does not allow it
├── CheckpointError       a checkpoint cannot be written (full disk) or does not fit; the ones before are untouched
├── ResumeMismatchError   a checkpoint is of another model, data set or group size than the run that found it
├── EvaluationError       held-out problems cannot be read or answered
├── RoundsError           the rounds log says what no trainer can do, or rows that it names never came
└── ClientError           a client asks for what there is not, or what is not its to do: the message says what instead

TransientError (transport.errors): this process ends, and starting it again is worth a try
├── EngineCrashedError    the generation engine's thread ended with an error: its cause is attached
├── EngineHungError       the generation engine's thread did not answer within its deadline
├── ServerUnavailableError  an inference server does not answer: down, hung, starting, or its connection was cut
│   └── ServerUnreachableError  no connection to it can be made: it never got what was to be sent
├── RanksError            the ranks of a trainer did not find one another, or one of them went away
├── RowsChangedError      rows were generated again between two passes over them: back to the checkpoint
├── ClientTimeoutError    a call of a client was not done within its deadline
└── LeaseLostError        rows that a client held went to another consumer: drop what was made of them

StreamError (transport.errors)
├── CheckpointRefusedError  weights that a publisher is asked for are not there, not allowed, or no weights
├── WeightsMismatchError  tensors do not fit the model that should take them: the old weights are still served
├── ServerAnswerError     an inference server answers with an error, or with what is no answer
└── RewardError           one reward could not be computed (raised, too slow, not a number): try again, then give up
    └── RewardTimeoutError  it took longer than its limit: it would again, so it is not tried again
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transport.contracts.types import RowId
from transport.errors import FatalError, StreamError, TransientError


class ModelMismatchError(FatalError):
    """A worker's tokenizer or model is not the run's: its token ids would be other words."""


class CheckpointRefusedError(StreamError):
    """Weights that a publisher was asked for cannot be published; those that are served stay."""


class ModelError(FatalError):
    """A model cannot be found, read or converted."""


class GpuError(FatalError):
    """A GPU that this worker should take is not there, or all are held by others; the message names them."""


class EngineCrashedError(TransientError):
    """The generation engine's thread ended with the error that is this one's cause."""


class EngineHungError(TransientError):
    """The generation engine's thread did not answer within its deadline."""


class ServerUnavailableError(TransientError):
    """The inference server at ``url`` does not answer."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"server {url} is unavailable: {reason}")
        self.url = url


class ServerUnreachableError(ServerUnavailableError):
    """No connection to the inference server at ``url`` can be made, so it never got the request."""


class ServerAnswerError(StreamError):
    """The inference server at ``url`` answers with an error. status: HTTP's; 0 for what cannot be read."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"server {url} answers {status or 'nonsense'}: {reason}")
        self.url = url
        self.status = status
        self.reason = reason

    @property
    def is_refusal(self) -> bool:
        """The request is at fault, not the server: it would be refused again."""
        return 400 <= self.status < 500


class WeightsMismatchError(StreamError):
    """Tensors do not fit the model that should take them; it keeps the weights it had."""


class RewardError(StreamError):
    """One reward could not be computed. It is never taken for a reward of zero."""


class RewardTimeoutError(RewardError):
    """One reward took longer than its limit."""


class RewardSetupError(FatalError):
    """The run's reward does not exist, or this worker's own command line does not name it."""


class CheckpointError(FatalError):
    """The checkpoint at ``path`` cannot be written or used. nbytes: what it takes; 0 when that is not the matter."""

    def __init__(self, path: Path, nbytes: int, reason: str) -> None:
        size = f" ({nbytes} bytes needed)" if nbytes else ""
        super().__init__(f"checkpoint {path}{size}: {reason}")
        self.path = path
        self.nbytes = nbytes


class EvaluationError(FatalError):
    """Held-out problems cannot be read or answered."""


class ResumeMismatchError(FatalError):
    """The run's checkpoint rests on other settings; the message names them."""


class RanksError(TransientError):
    """The ranks of a trainer did not find one another in time, or one of them went away."""


class RowsChangedError(TransientError):
    """Row ``row_id`` has other tokens than when its old-policy logprobs were recorded: its batch must start over."""

    def __init__(self, row_id: str) -> None:
        super().__init__(f"row {row_id} was generated again between two passes: going back to the checkpoint")
        self.row_id = row_id


class RoundsError(FatalError):
    """The trainer cannot go on with the rounds log; the message names the entry, the round or the rows."""


class ClientError(FatalError):
    """A client asks for a task that does not exist, or for what belongs to the run's own workers."""


class ClientTimeoutError(TransientError):
    """A call of a client was not done within its deadline; the message names the call."""


class LeaseLostError(TransientError):
    """These rows were given to another consumer, because this one could not renew its lease on them in time."""

    def __init__(self, task: str, rows: Sequence[RowId]) -> None:
        super().__init__(f"task {task}: {len(rows)} rows went to another consumer: {', '.join(rows[:3])}")
        self.task = task
        self.rows = tuple(rows)
