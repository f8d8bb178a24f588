"""Errors of the workers, below the data plane's tree.

FatalError (transport.errors)
├── ModelError            a model directory is missing, broken or of an unsupported kind: the message says what to do
├── EngineCrashedError    the generation engine's thread ended with an error: its cause is attached; start again
├── EngineHungError       the generation engine's thread did not answer within its deadline; start again
└── RewardSetupError      the run's reward cannot be built, or this worker was not told to allow it

StreamError (transport.errors)
├── WeightsMismatchError  tensors do not fit the model that should take them: the old weights are still served
└── RewardError           one reward could not be computed (raised, too slow, not a number): try again, then give up
"""

from __future__ import annotations

from transport.errors import FatalError, StreamError


class ModelError(FatalError):
    """A model cannot be found, read or converted."""


class EngineCrashedError(FatalError):
    """The generation engine's thread ended with the error that is this one's cause."""


class EngineHungError(FatalError):
    """The generation engine's thread did not answer within its deadline."""


class WeightsMismatchError(StreamError):
    """Tensors do not fit the model that should take them; it keeps the weights it had."""


class RewardError(StreamError):
    """One reward could not be computed. It is never taken for a reward of zero."""


class RewardSetupError(FatalError):
    """The run's reward does not exist, or this worker's own command line does not name it."""


def first_error(group: BaseExceptionGroup[StreamError]) -> StreamError:
    """The first error of a TaskGroup, which cancelled the others: what a worker's caller should hear of."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StreamError)  # the group was split off by that type
    return error
