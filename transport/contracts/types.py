"""Nouns that every process shares: identities, versions, sampling, and the columns of a row.

Owns: names and shapes only. Never: I/O, decisions. Invariant: everything here is immutable and encodes to MessagePack.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal, NewType, TypeAlias

import msgspec

RunName = NewType("RunName", str)
WorkerId = NewType("WorkerId", str)  # <kind>-<index>.<incarnation>, e.g. generate-0.2: a replaced process is a new one
PromptId = NewType("PromptId", str)
GroupId = NewType("GroupId", str)
"""``<batch>/<slot>``, e.g. ``12/3``; a refill takes the next unused slot number, so no id is ever used twice."""
RowId = NewType("RowId", str)  # <batch>/<slot>/<sample> without the attempt, so that the first valid insert wins

USER_PREFIX = "x_"
"""How names of columns and tasks begin that a user declared: nothing of a run ever reads, replaces or removes them."""
_USER_NAME = re.compile(rf"{USER_PREFIX}[a-z0-9_]{{1,60}}")

_EVALUATION = "eval"  # how groups of an evaluation begin; those of batches begin with a digit

# What a field of a message must hold to be decoded at all, so that readers of a message need not check it again.
# Numbers end where sums of many of them would leave 64 bits, beyond which no state can be written down.
_MAX_DIGITS = 9
_NUMBER = rf"(?:0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}})"
_GROUP = rf"(?:{_EVALUATION})?{_NUMBER}/{_NUMBER}"
WireGroupId: TypeAlias = Annotated[GroupId, msgspec.Meta(pattern=rf"^{_GROUP}\Z")]
WireRowId: TypeAlias = Annotated[RowId, msgspec.Meta(pattern=rf"^{_GROUP}/{_NUMBER}\Z")]
WireWorkerId: TypeAlias = Annotated[WorkerId, msgspec.Meta(pattern=r"^[^\x00-\x20\x7f]{1,200}\Z")]
EntryId: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}-[0-9]{1,18}\Z")]  # of an entry of a stream
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]  # of a batch or a sample: what fits an id
MAX_NUMBER = 1e15  # of every number that is reported: beyond it float32 advantages lose all meaning
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]  # for NaN no comparison holds
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]  # of clocks: below 0 at most by what they err

MAX_DIMENSIONS = 8  # of an array in a user's column, or in a version of the weights
MAX_PARTS = 4096  # of a version of the weights: ranks of a trainer
PROTOCOL_VERSION = 1  # raised when a message changes its meaning; readers accept this version and the one before


def group_id(batch: int, slot: int) -> GroupId:
    return GroupId(f"{batch}/{slot}")


def evaluation_id(number: int, slot: int) -> GroupId:
    """Name the answer to one held-out problem: ``eval3/12``; another attempt takes the next unused slot."""
    return GroupId(f"{_EVALUATION}{number}/{slot}")


def is_evaluation(group_or_row: str) -> bool:
    """Whether a group or row belongs to an evaluation: it is in no batch, and never trained."""
    return group_or_row.startswith(_EVALUATION)


def batch_of(group_or_row: str) -> int:
    """The batch in a group id or row id: the one that it was admitted to, which need not be the one that trains it."""
    return int(group_or_row.partition("/")[0])


def row_id(group: GroupId, sample: int) -> RowId:
    return RowId(f"{group}/{sample}")


def parse_row_id(row: RowId) -> tuple[GroupId, int]:
    """Split a row id into its group and its sample index. Raises ValueError on any other string."""
    group, _, sample = row.rpartition("/")
    if not group or not (sample.isdigit() and sample.isascii()) or len(sample) > _MAX_DIGITS:
        raise ValueError(f"{row!r} is not a row id (batch/slot/sample)")
    return GroupId(group), int(sample)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key of workers and of their places: ``generate-2.1`` before ``generate-10.1``."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isascii() and part.isdigit() and len(part) < 19 else (0, part) for part in parts]


class WorkerKind(StrEnum):
    """What a worker process does. The value is the word on its command line."""

    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"
    CRITIC = "critic"
    PUBLISH = "publish"
    STORE = "store"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class UpdateMode(StrEnum):
    """How generation workers take a new version of the weights.

    barrier: each at its own boundary between two batches.  together: all at once, when none has any of a batch left.
    staggered: one after another.  in_flight: between two decode steps, with running samples kept.
    """

    BARRIER = "barrier"
    TOGETHER = "together"
    STAGGERED = "staggered"
    IN_FLIGHT = "in_flight"


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every wire type: immutable, keyword-only, unknown fields ignored (a newer writer is readable)."""


class WeightIdentity(Struct, frozen=True, kw_only=True, order=True):
    """What a set of weights is."""

    epoch: Count  # the trainer's fencing token; it rises at every restart of the trainer
    version: Count  # number of batches trained since the base model
    digest: str = ""  # hex, over all tensors; empty only where the bytes were never read

    def __str__(self) -> str:
        return f"e{self.epoch}v{self.version}" + (f":{self.digest[:8]}" if self.digest else "")


class SegmentKind(StrEnum):
    """Who chose the tokens of a segment. Only those of the policy are trained.

    repeated: a branch begins with what an earlier branch of its row has, where it is trained if the policy chose it.
    """

    POLICY = "policy"
    ENVIRONMENT = "environment"
    TOOL = "tool"
    REPEATED = "repeated"


class Segment(Struct, frozen=True, kw_only=True):
    """Response tokens from the end of the segment before up to ``end`` were chosen by ``kind``."""

    kind: SegmentKind
    end: int


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Response tokens ``[start, end)`` were sampled under ``weights``; what nobody sampled stands with what was."""

    start: int
    end: int
    weights: WeightIdentity


MAX_TOP_K = 2**31 - 1
"""More than any vocabulary; engines hold it in 32 bits."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to sample one completion."""

    max_new_tokens: int  # limit, >= 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 is off; at most MAX_TOP_K
    stop_token_ids: tuple[int, ...] = ()  # any of them ends the completion and is its last token
    ignore_eos: bool = False  # generate to the limit
    seed: int = 0  # of this group's samples; sample i uses its own stream derived from (seed, i)


def is_user_name(name: str) -> bool:
    """Whether ``name`` is one that a user may give to a column or a task: ``x_``, then letters, digits, underscores."""
    return _USER_NAME.fullmatch(name) is not None


class Column(StrEnum):
    """The columns of a row (one sample) and of its group (what its samples share).

    ``Column("x_anything")`` is a user's column: it behaves like a member and is equal to every other of its name, but
    is not listed. See transport/rows/columns.py for what it holds.
    """

    @classmethod
    def _missing_(cls, value: object) -> Column | None:
        if not isinstance(value, str) or not is_user_name(value):
            return None
        column = str.__new__(cls, value)
        column._name_ = column._value_ = value
        return column

    # of the group, written when its prompt is admitted
    PROMPT_IDS = "prompt_ids"  # int32 [P]
    PROMPT_TEXT = "prompt_text"  # utf-8
    TASK_ENTRY = "task_entry"  # JSON: what the reward function needs (answer, metadata)
    # of the row, written by the generation worker in one atomic step
    RESPONSE_IDS = "response_ids"  # int32 [R]
    ROLLOUT_LOGPROBS = "rollout_logprobs"  # float32 [R], log_softmax(logits / temperature) of what the policy sampled
    LOSS_MASK = "loss_mask"  # uint8 [R], 1 where the policy chose the token; absent means all ones
    BRANCH_ENDS = "branch_ends"  # int32 [B], rising to R: each branch stands behind the prompt by itself; absent: one
    ROLLOUT_INFO = "rollout_info"  # MessagePack of messages.RolloutInfo
    # of the row, written by scoring
    REWARD = "reward"  # float32 [1]
    REWARD_COMPONENTS = "reward_components"  # JSON: name -> number
    REFERENCE_LOGPROBS = "reference_logprobs"  # float32 [R]; 0 where the loss of the row's part has no KL
    ADVANTAGE = "advantage"  # float32 [1]
    # likewise, with a critic (docs/ppo.md); 0 at tokens that the policy did not choose
    VALUES = "values"  # float32 [R], return that the critic expected before each token
    VALUE_WEIGHTS = "value_weights"  # int32 [2], epoch and version of the critic's weights then
    TOKEN_ADVANTAGES = "token_advantages"  # float32 [R], beside ADVANTAGE, their mean; also of a user's estimator
    RETURNS = "returns"  # float32 [R], what the critic is trained towards


GROUP_COLUMNS = frozenset({Column.PROMPT_IDS, Column.PROMPT_TEXT, Column.TASK_ENTRY})


class TaskSpec(Struct, frozen=True, kw_only=True):
    """A task of the dataflow: the row columns it reads and writes, and its unit.

    A "sample" unit is ready when the row has all of ``reads``; a "group" unit when every row of the group has.
    Group columns are written before any row exists, so they need not be named.
    """

    name: str
    unit: Literal["sample", "group"]
    reads: frozenset[Column]
    writes: frozenset[Column] = frozenset()
