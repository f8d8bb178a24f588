"""Rewards: what one response is worth, with named components; and the child process that computes them.

    own verifier     a grader of the task, reasoning_gym's or ours, or a comparison with the entry's answer (jsonl, hf)
    user's function  ``module:function``, called with one response or with a batch of them (UserReward)

The own verifiers pay 1 for a right answer, ``well_formed_reward`` for a wrong one in the asked form, else 0, so that a
model that cannot do the task yet has a first step to climb.

The child is started by reward_pool.py as ``python -m workers.scoring.rewards``, in a jail where that works (jail.py),
for some rewards once an answer: this module imports little.

    parent: Setup once, then a ScoreRequest at a time;  child: Ready once, then Scores to each

Owns: the own verifiers, the meaning of what a user's function returns, the child's end of the frames. Never:
when a child starts or ends. Invariant: a reward is a finite number or a RewardError, never a silent zero; every request
is answered, or the process ends. An answer that a verifier of ours cannot compare in its time is wrong, and no failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal, Protocol, TypeAlias

import msgspec

from transport.contracts.gym_tasks import refusal
from transport.contracts.settings import ParamValue, Settings, data_parts
from transport.contracts.types import Struct
from workers.errors import RewardError, RewardSetupError
from workers.scoring.answers import find_answer
from workers.scoring.child import frame, own_streams, read_frame
from workers.scoring.equality import asks_for_number, load_mathematics, reads_as_number, same_answer
from workers.scoring.graders import OUR_GRADERS, Entry, Grade, bounded, forbid_code_from_text
from workers.scoring.jail import confine
from workers.scoring.user_reward import Reward, UserReward
from workers.user_functions.imports import find_in, import_function, limits, raised


class VerifiedPart(Struct, frozen=True, kw_only=True):
    """What the own verifier grades in one part of ``[data.mix]``."""

    source: Literal["reasoning_gym", "jsonl", "hf"]
    task: str
    params: dict[str, ParamValue]


class RewardSpec(Struct, frozen=True, kw_only=True):
    """Which reward to build.

    function: "module:function", checked against the worker's own command line.  path: directory of its module, from
    there too; "": only what is installed is found.  executes_answers: it runs what a model wrote.
    parts: by the name that an entry gives as its ``part``; {} where the run has only one.
    """

    source: Literal["reasoning_gym", "jsonl", "hf"]
    task: str
    params: dict[str, ParamValue]
    answer_marker: str
    well_formed_reward: float
    function: str = ""
    path: str = ""
    executes_answers: bool = False
    parts: dict[str, VerifiedPart] = msgspec.field(default_factory=dict[str, VerifiedPart])


class RewardSource(Protocol):
    """What a run has its rewards of: processes of a function, jails of answers, or a model. ``close`` comes last.

    failures: calls that ended with an error.  jailed: whether it runs in a jail; None: it runs nobody's code.
    """

    failures: int

    @property
    def jailed(self) -> bool | None: ...

    async def start(self, trial: Sequence[Sample] = ()) -> None:
        """Raises RewardSetupError: there is none here, or it computes nothing for any of ``trial``; ModelError."""
        ...

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward:
        """entry: the column TASK_ENTRY. Raises RewardError."""
        ...

    async def close(self) -> None: ...


Scorer = Callable[[str, str, Entry], Reward]
"""(prompt, response, entry) -> Reward. Raises RewardError."""


def reward_spec(settings: Settings, allowed: str, path: str = "") -> RewardSpec:
    """The run's reward, if this worker may compute it.

    Args:   allowed: "module:function" from the worker's own command line; "" allows the own verifiers only.
            path: where its module lies on this machine.
    Raises: RewardSetupError: the run's setting names another function. A setting alone never imports code.
    """
    wanted = settings.scoring.reward
    if wanted != allowed:
        raise RewardSetupError(
            f"the run wants reward {wanted or '(own verifier)'!r}, this worker allows {allowed or '(own verifier)'!r}; "
            f"start it with --reward {wanted}, and --reward-path where its module is not installed"
            if wanted
            else f"the run uses the data's own verifier; drop --reward {allowed}"
        )
    return RewardSpec(
        source=settings.data.source,
        task=settings.data.task,
        params=settings.data.params,
        answer_marker=settings.scoring.answer_marker,
        well_formed_reward=settings.scoring.well_formed_reward,
        function=wanted,
        path=path,
        executes_answers=settings.scoring.executes_answers,
        parts={
            name: VerifiedPart(source=data.source, task=data.task, params=data.params)
            for name, data in data_parts(settings.data).items()
            if name
        },
    )


def build_reward(spec: RewardSpec) -> Scorer:
    """Import what the reward needs. Takes seconds; raises RewardSetupError that says what is missing."""
    if spec.function:
        return _user_reward(spec.function, spec.path)
    parts = dict(spec.parts)
    if not parts or spec.source != "reasoning_gym":  # held-out rows of a file of their own are of no part
        parts[""] = VerifiedPart(source=spec.source, task=spec.task, params=spec.params)
    compared = {name for name, part in parts.items() if part.source != "reasoning_gym"}
    return _own_verifier(spec, {name: _grade_of(part) for name, part in parts.items()}, compared)


def _grade_of(part: VerifiedPart) -> Grade:
    return _gym_grade(part) if part.source == "reasoning_gym" else _answer_grade()


# --- own verifiers ----------------------------------------------------------------------------------------------------


def right_answers(entry: Entry) -> list[str]:
    """The right answer, or all spellings of it; GSM8K writes its reasoning before ``####``."""
    answer = entry.get("answer")
    spellings = answer if isinstance(answer, list) else [answer]
    texts = [str(one).rsplit("####", 1)[-1].strip() for one in spellings if one is not None]
    return [text for text in texts if text]


UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)
"""What graders raise at an answer that they cannot read, so that it is not right. Running out of memory or time is not
among them: the answer may have been right."""


WRONG = Reward(value=0.0, components={"well_formed": 0.0, "right": 0.0})
"""The reward of an answer that cannot be compared."""
GRADE_CPU_S = 0.7
"""CPU seconds of one answer's grade; the slowest right answer takes a tenth of it. What takes longer is not right."""
KILLED_CPU_S = 3
"""CPU seconds after which the kernel ends a child whose answer keeps a library's C code busy: a wrong answer, too."""


class _OutOfTimeError(BaseException):
    """An answer took its CPU time. No ``except Exception`` of a library stops it."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTimeError in the block after ``seconds`` of CPU; nothing is limited outside of the first thread.

    No garbage is collected meanwhile: what is raised in a collector's callback reaches nobody.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def end(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _OutOfTimeError

    collects = gc.isenabled()
    gc.disable()
    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 10)  # again: what a library swallows comes back
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        if collects:
            gc.enable()


def _own_verifier(spec: RewardSpec, grades: Mapping[str, Grade], compared: Collection[str]) -> Scorer:
    """grades: by the part that an entry is of; "": of an entry that names none.  compared: parts whose entries have the
    right answer.
    """

    def score(prompt: str, response: str, entry: Entry) -> Reward:
        part = str(entry.get("part", ""))
        grade = grades.get(part)
        if grade is None:
            raise RewardError(
                f"the task entry is of part {entry.get('part')!r:.60}, which is none of this run's data.mix"
            )
        spellings = right_answers(entry)
        if not spellings and part in compared:
            raise RewardError("the task entry has no answer to compare with")
        asked = spec.answer_marker.casefold() in prompt.casefold()
        lines = max((len(one.splitlines()) for one in spellings), default=1)
        answer = find_answer(response, spec.answer_marker, marker_asked=asked, lines=lines)
        right = well_formed = False
        try:
            with _cpu_limit(GRADE_CPU_S):
                # a number where a number is asked for, or "Answer: <result>" would pay
                well_formed = answer is not None and (
                    reads_as_number(answer) or not spellings or not asks_for_number(spellings[0])
                )
                right = answer is not None and well_formed and grade(answer, entry)
        except (*UNREADABLE, _OutOfTimeError):
            right = False
        value = 1.0 if right else spec.well_formed_reward if well_formed else 0.0
        return Reward(value=value, components={"well_formed": float(well_formed), "right": float(right)})

    return score


def _gym_grade(spec: VerifiedPart) -> Grade:
    """Of a task whose scorer does not execute answers; full marks only count as right."""
    task, params = spec.task, spec.params
    if reason := refusal(task):
        raise RewardSetupError(reason)
    if task in OUR_GRADERS:
        load_mathematics()
        return bounded(task, OUR_GRADERS[task])
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, size=1, seed=0, **params)
    except (ValueError, TypeError, AssertionError) as error:  # it checks its configuration with assert
        raise RewardSetupError(f"reasoning_gym cannot make task {task!r} with {dict(params)}: {error}") from error
    first = dataset[0]
    with contextlib.suppress(*UNREADABLE):  # it imports what it needs, which takes longer than an answer may
        dataset.score_answer(str(first["answer"]), first)
    return bounded(task, lambda answer, entry: dataset.score_answer(answer, dict(entry)) >= 1.0)


def _answer_grade() -> Grade:
    """The comparison with the entry's answer; loads the libraries of mathematics."""
    load_mathematics()
    return lambda answer, entry: any(same_answer(one, answer) for one in right_answers(entry))


# --- user's functions -------------------------------------------------------------------------------------------------


RENAMED = {"workers.scoring.toy_rewards:digit_share": "workers.scoring.rewards:digit_share"}
"""As configurations of earlier versions name it."""


def _user_reward(name: str, path: str) -> UserReward:
    looked = f"looked for in {path or 'what is installed'}"
    hint = f"{looked}; name its directory with scoring.reward_path, on a worker with --reward-path"
    return UserReward(name, import_function(RENAMED.get(name, name), "reward", hint, RewardSetupError))


def read_entry(raw: bytes) -> Entry:
    """The column TASK_ENTRY. Raises RewardError for anything but a JSON object."""
    try:
        entry = json.loads(raw)
    except ValueError as error:
        raise RewardError(f"the task entry is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RewardError("the task entry is not a JSON object")
    return entry


def digit_share(prompt: str, response: str, entry: Entry) -> dict[str, float]:
    """The share of digits among the response's characters, in [0, 1]; 0 for an empty one.

    For runs that only try the pipeline out, named like a user's own function: "workers.scoring.rewards:digit_share".
    Source: ours. A random model earns about 0.15 and can learn this in a few steps, unlike any sum.
    """
    share = sum(character.isdigit() for character in response) / max(1, len(response))
    return {"reward": share, "empty": float(not response)}


def unrewarded(prompt: str, response: str, entry: Entry) -> float:
    """0 for every response: for data without answers, where nothing looks at rewards ("sft", "distill")."""
    return 0.0


# --- the child process ------------------------------------------------------------------------------------------------


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


_request_decoder = msgspec.msgpack.Decoder(ScoreRequest)  # here: it makes code of annotations, which the guard refuses


def main() -> None:
    """Serve until stdin ends."""
    requests, answers = own_streams()
    if not (raw := read_frame(requests)):  # tried only, whether it starts (Jail.why_not)
        return
    setup = msgspec.msgpack.decode(raw, type=Setup)
    confine(memory_bytes=setup.memory_bytes, jailed=setup.jailed)
    limits.memory_bytes = setup.memory_bytes
    limits.jail, limits.shown = "scoring.jail" if setup.jailed else "", "scoring.reward_path"
    limits.variables = "scoring.environment"
    find_in(setup.spec.path)
    try:
        scorer = build_reward(setup.spec)
    except RewardSetupError as error:
        answers.write(frame(Failed(reason=str(error))))
        return
    if not setup.spec.function:
        forbid_code_from_text()
    answers.write(frame(Ready(takes_batches=isinstance(scorer, UserReward) and scorer.takes_batches)))
    while raw := read_frame(requests):
        if not setup.spec.function:
            most = math.ceil(time.process_time()) + KILLED_CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answers.write(frame(_answer(scorer, _request_decoder.decode(raw).samples, setup.timeout_s)))


def _answer(scorer: Scorer, samples: list[Sample], timeout_s: float) -> Scores:
    # one that does not come back is ended by faulthandler's own thread, which needs no GIL and prints where it hangs
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
    try:
        units = [(one.prompt, one.response, read_entry(one.entry)) for one in samples]
        if isinstance(scorer, UserReward) and scorer.takes_batches:
            scored = scorer.score_batch(units)
        else:
            scored = [scorer(*unit) for unit in units]
        results = [Failed(reason=str(one)) if isinstance(one, RewardError) else Scored(reward=one) for one in scored]
        return Scores(results=results)
    except RewardError as error:
        reason = str(error)
    except (Exception, SystemExit) as error:  # the guard of one unit: foreign code may raise anything
        reason = f"the reward raised {raised(error)}"[:700]
        if isinstance(error, KeyError) and samples:
            reason += f"; the entry has {', '.join(sorted(read_entry(samples[0].entry)))}"[:300]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Scores(results=[Failed(reason=reason) for _ in samples])


if __name__ == "__main__":
    main()
