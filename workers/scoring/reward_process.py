"""The child process that runs rewards: reads requests from its stdin, writes answers to its stdout, both framed.

    frame = length (4 bytes, big-endian) | MessagePack
    parent: Setup once, then a ScoreRequest at a time;  child: Ready once, then Scores to each

Started by reward_pool.py as ``python -m workers.scoring.reward_process``, in a jail where that works (jail.py). What a
reward prints goes to stderr. One that does not come back is ended by faulthandler's own thread, which needs no GIL and
prints where it hangs.

Owns: nothing that outlives a request. Invariant: every request is answered, or the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import BinaryIO, TypeAlias

import msgspec

from transport.contracts.types import Struct
from workers.errors import RewardError, RewardSetupError
from workers.scoring.graders import forbid_code_from_text
from workers.scoring.jail import confine
from workers.scoring.rewards import Reward, RewardSpec, Scorer, UserReward, build_reward, read_entry


class Setup(Struct, frozen=True, kw_only=True):
    """timeout_s: of one request.  memory_bytes: address space of the child.  jailed: whether it is in a jail."""

    spec: RewardSpec
    timeout_s: float
    memory_bytes: int
    jailed: bool = False


class Sample(Struct, frozen=True, kw_only=True):
    """entry: the column TASK_ENTRY as it is."""

    prompt: str
    response: str
    entry: bytes


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """Several samples only where the child is ``Ready`` for batches."""

    samples: list[Sample]


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """No reward, and why. Also the answer to a Setup that cannot be done."""

    reason: str


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """The reward is imported. takes_batches: one call may score several samples."""

    takes_batches: bool = False


class Scored(Struct, frozen=True, kw_only=True, tag=True):
    reward: Reward


Result: TypeAlias = Scored | Failed


class Scores(Struct, frozen=True, kw_only=True, tag=True):
    """One for each sample of the request, in their order."""

    results: list[Result]


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(ScoreRequest)  # here: it makes code of annotations, which the guard refuses


def frame(message: msgspec.Struct) -> bytes:
    raw = _encoder.encode(message)
    return len(raw).to_bytes(4, "big") + raw


def main() -> None:
    """Serve until stdin ends."""
    requests, answers = _take_over_streams()
    if not (raw := _read(requests)):  # tried only, whether it starts (Jail.why_not)
        return
    setup = msgspec.msgpack.decode(raw, type=Setup)
    confine(memory_bytes=setup.memory_bytes, jailed=setup.jailed)
    if setup.spec.path:
        sys.path.append(setup.spec.path)  # last: a file of the user's never takes the place of a library
    try:
        scorer = build_reward(setup.spec)
    except RewardSetupError as error:
        answers.write(frame(Failed(reason=str(error))))
        return
    if not setup.spec.function:
        forbid_code_from_text()
    answers.write(frame(Ready(takes_batches=isinstance(scorer, UserReward) and scorer.takes_batches)))
    while raw := _read(requests):
        answers.write(frame(_answer(scorer, _request_decoder.decode(raw), setup.timeout_s)))


def _answer(scorer: Scorer, request: ScoreRequest, timeout_s: float) -> Scores:
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
    try:
        return Scores(results=_results(scorer, request.samples))
    except RewardError as error:
        return _all_failed(request, str(error))
    except (Exception, SystemExit) as error:  # the guard of one unit: foreign code may raise anything
        return _all_failed(request, f"the reward raised {type(error).__name__}: {error}"[:500])
    finally:
        faulthandler.cancel_dump_traceback_later()


def _results(scorer: Scorer, samples: list[Sample]) -> list[Result]:
    if isinstance(scorer, UserReward) and scorer.takes_batches:
        scored = scorer.score_batch([(one.prompt, one.response, read_entry(one.entry)) for one in samples])
        return [Failed(reason=str(one)) if isinstance(one, RewardError) else Scored(reward=one) for one in scored]
    return [Scored(reward=scorer(one.prompt, one.response, read_entry(one.entry))) for one in samples]


def _all_failed(request: ScoreRequest, reason: str) -> Scores:
    return Scores(results=[Failed(reason=reason) for _ in request.samples])


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for frames; code that reads or prints gets nothing and stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: BinaryIO) -> bytes:
    """The next frame, b"" at the end."""
    length = requests.read(4)
    return requests.read(int.from_bytes(length, "big")) if len(length) == 4 else b""


if __name__ == "__main__":
    main()
