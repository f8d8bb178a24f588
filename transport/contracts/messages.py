"""Every message that crosses a process boundary, one tagged union per stream.

Events are past tense and flow to the orchestrator; commands are imperative and flow from it. The decision core uses
these types directly. Owns: the schema. Never: behaviour beyond encode/decode. Invariant: any bytes decode to a valid
message or raise MessageError, and nothing here can make a reader import code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from transport.contracts.types import (
    MAX_DIMENSIONS,
    MAX_PARTS,
    Count,
    EntryId,
    FinishReason,
    Finite,
    GroupId,
    Index,
    PromptId,
    SamplingParams,
    Seconds,
    Segment,
    SegmentKind,
    Struct,
    VersionSpan,
    WeightIdentity,
    WireGroupId,
    WireRowId,
    WireWorkerId,
    WorkerId,
    WorkerKind,
)
from transport.errors import DECODE_ERRORS, MessageError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""A control message larger than this is foreign: bulk bytes travel beside the streams, never on them."""


# --- events: what happened, sent to the orchestrator ------------------------------------------------------------------


class WorkerJoined(Struct, frozen=True, kw_only=True, tag=True):
    """A worker's lease appeared. Emitted by membership."""

    worker_id: WorkerId
    kind: WorkerKind
    capacity: int = 0  # generate: samples it can run at once
    weights: WeightIdentity | None = None
    host_id: str = ""  # as it said, and its site
    site: str = ""


class PartialSample(Struct, frozen=True, kw_only=True):
    """A beginning of a sample that is on the log of its group (``PartialTokens``); a later attempt may go on from it.

    oldest, newest: of the weights that sampled it. Its first token is always there, so oldest never changes.
    tokens: that are there, of a sample that runs before the others of its group; 0: not told.
    """

    sample: Index
    oldest: WeightIdentity
    newest: WeightIdentity
    tokens: Count = 0


def has_grown(tokens: int, told: int) -> bool:
    """Whether it is worth another report that a sample has so many tokens: a quarter more than was told."""
    return tokens > told + told // 4


class PartialGroup(Struct, frozen=True, kw_only=True):
    """Samples that one attempt at a group has put on its log."""

    group_id: WireGroupId
    attempt: Count
    samples: tuple[PartialSample, ...]


class WorkerReported(Struct, frozen=True, kw_only=True, tag=True):
    """What a generation worker holds, sent in order with its other events, so that what was lost can be found out."""

    worker_id: WireWorkerId
    held: tuple[WireGroupId, ...] = ()  # groups it has claimed and not finished
    plans_cursor: EntryId = "0-0"  # the last plan entry it claimed
    weights: WeightIdentity | None = None
    capacity: Count = 0  # samples that fit there now, where that changes; 0: as it joined with
    partial: tuple[PartialGroup, ...] = ()  # beginnings of samples that are kept since, or have tokens of new weights


class WorkerLost(Struct, frozen=True, kw_only=True, tag=True):
    """A worker is gone: its process ended, its lease ran out, or it drained. Emitted by membership."""

    worker_id: WireWorkerId
    reason: str
    left: bool = False  # it was asked to go, so nothing that it held can be why


class OwnPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt that an agent brings: its samples are one group, whatever row of the data that was admitted with.

    id: names it among those of its agent.
    """

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    question: Annotated[str, msgspec.Meta(max_length=100_000)] = ""
    answer: str | int | float | None = None
    metadata: dict[str, str | int | float | bool | None] | None = None


class PromptRef(Struct, frozen=True, kw_only=True):
    """A prompt as the core sees it: never its text."""

    prompt_id: PromptId
    prompt_tokens: int
    predicted_tokens: float  # expected response length
    predicted_sigma: float = 0.0  # standard deviation of a response's log length around it; 0: not known
    eval_set: str = ""  # of a held-out problem: the set that asks it, where there are several
    sampling: SamplingParams | None = None  # where its set asks for something else than the run's settings


class PromptsArrived(Struct, frozen=True, kw_only=True, tag=True):
    """Prompts read from the source, in order."""

    prompts: tuple[PromptRef, ...]
    source_positions: tuple[str, ...]  # [len(prompts)] opaque state of the source after each, kept with its batch
    exhausted: bool = False  # the source has no more after these


class HeldOutPromptsArrived(Struct, frozen=True, kw_only=True, tag=True):
    """All held-out problems of the run, in their fixed order; none where the data has none."""

    prompts: tuple[PromptRef, ...]


class PlanShare(Struct, frozen=True, kw_only=True):
    """What one worker is to generate of a batch, in the order of starting."""

    worker_id: WorkerId
    group_ids: tuple[GroupId, ...]


class PlanComputed(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a ComputePlan."""

    plan_id: str
    batch: int
    shares: tuple[PlanShare, ...]
    policy: str = ""  # that made the plan, where several were tried
    end_s: float = 0.0  # when all of the batch is generated (or trained), as forecast then; 0 without a forecast
    compute_s: float = 0.0  # that planning took


class RolloutInfo(Struct, frozen=True, kw_only=True):
    """How one sample came to be; stored in its row."""

    worker_id: WorkerId
    finish_reason: FinishReason
    prompt_tokens: int
    response_tokens: int
    spans: tuple[VersionSpan, ...]  # in order, covering [0, response_tokens)
    attempt: int = 0
    queued_s: float = 0.0  # from claim to admission into a slot
    engine_s: float = 0.0  # from there to the end
    segments: tuple[Segment, ...] = ()  # in order, covering [0, response_tokens); none: all of it is the policy's
    reward: Finite | None = None  # that its environment gave
    resumed_tokens: Count = 0  # the first ones, which earlier attempts sampled

    @property
    def environment_tokens(self) -> int:
        """Response tokens that the policy did not choose."""
        starts = (0, *(segment.end for segment in self.segments))
        of_each = zip(self.segments, starts, strict=False)
        return sum(one.end - start for one, start in of_each if one.kind is not SegmentKind.POLICY)


class RolloutFinished(Struct, frozen=True, kw_only=True, tag=True):
    """A row was inserted (only its first valid insert is reported)."""

    row_id: WireRowId
    worker_id: WireWorkerId
    response_tokens: Count
    finish_reason: FinishReason
    oldest: WeightIdentity  # of its spans
    newest: WeightIdentity
    num_bytes: Count = 0
    queued_s: Seconds = 0.0  # as in RolloutInfo
    engine_s: Seconds = 0.0
    environment_tokens: Count = 0  # of response_tokens, those that the policy did not choose
    resumed_tokens: Count = 0  # as in RolloutInfo

    @property
    def policy_tokens(self) -> int:
        return max(0, self.response_tokens - self.environment_tokens)

    @property
    def sampled_tokens(self) -> int:
        """Those that the policy chose in this attempt."""
        return max(0, self.response_tokens - self.environment_tokens - self.resumed_tokens)


class RolloutFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Samples of a group that will not come from this worker. retryable: another attempt may succeed."""

    group_id: WireGroupId
    worker_id: WireWorkerId
    samples: tuple[Index, ...]
    reason: str
    retryable: bool = True


class GroupScored(Struct, frozen=True, kw_only=True, tag=True):
    """A whole group has its rewards and advantages."""

    group_id: WireGroupId
    rewards: tuple[Finite, ...]
    response_tokens: tuple[Count, ...]
    signal: bool  # rewards differ, so the group carries a gradient
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])  # mean of each named one of a reward
    value_versions: tuple[Count, ...] = ()  # of the critic that valued each sample; without one ()
    environment_tokens: Count = 0  # of all response_tokens together, those that the policy did not choose
    part: str = ""  # of [data.mix] that its prompt is of; "" without


class ScoringFailed(Struct, frozen=True, kw_only=True, tag=True):
    """A unit of a scoring task was dead-lettered: its group will never be whole."""

    group_id: WireGroupId
    reason: str


class RoundDone(Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has accumulated one round."""

    round_id: str
    num_rows: Count
    num_tokens: Count
    busy_s: Seconds  # of compute in it
    refused: tuple[WireRowId, ...] = ()  # rows that its ledger knew
    stepped_s: Seconds = 0.0  # of optimizer steps between the round before and this one (several mini-batches)


class StepDone(Struct, frozen=True, kw_only=True, tag=True):
    """A batch was trained and ``weights`` are published."""

    batch: Index
    weights: WeightIdentity
    num_rows: Count
    num_tokens: Count
    metrics: dict[str, float] = msgspec.field(default_factory=dict[str, float])  # loss, grad_norm, lr, ...
    stepped_s: Seconds = 0.0  # of the optimizer step after its last round


class CheckpointSaved(Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint is durable."""

    weights: WeightIdentity
    cursor: EntryId  # last entry of the rounds log that it contains
    path: str
    seconds: Seconds = 0.0  # that training stood still for it


class TrainerReady(Struct, frozen=True, kw_only=True, tag=True):
    """A trainer holds ``weights`` (published; ``weights.version`` batches are in its lineage)."""

    worker_id: WireWorkerId
    weights: WeightIdentity
    cursor: EntryId = "0-0"  # it reads the rounds log from here on
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1  # ranks that each want a part of every round
    damaged: tuple[str, ...] = ()  # newer checkpoints that it could not use, and what is wrong with each, for people


class CriticReported(Struct, frozen=True, kw_only=True, tag=True):
    """What the critic, the second reader of the rounds log, says of itself; nothing of it is published."""

    worker_id: WireWorkerId
    report: TrainerReady | StepDone | CheckpointSaved


def damage_of(damaged: Sequence[str]) -> str:
    """What to add to an error of a run that cannot go on, because of these checkpoints; "" for none."""
    advice = "put back a copy of one, or begin a new run with another --name"
    return f"; damaged checkpoints: {'; '.join(damaged)}: {advice}" if damaged else ""


class RowsMissing(Struct, frozen=True, kw_only=True, tag=True):
    """Rows that were reported do not exist (the broker lost its tail): they must be generated again."""

    row_ids: tuple[WireRowId, ...]


class WeightsLoaded(Struct, frozen=True, kw_only=True, tag=True):
    """A generation worker serves ``weights``; its checksum held. seconds: transfer and load."""

    worker_id: WireWorkerId
    weights: WeightIdentity
    seconds: Seconds = 0.0


class WeightsFailed(Struct, frozen=True, kw_only=True, tag=True):
    """A generation worker could not load ``weights`` and serves what it had. permanent: asking again cannot help."""

    worker_id: WireWorkerId
    weights: WeightIdentity
    reason: str
    permanent: bool = False


class PromptsSubmitted(Struct, frozen=True, kw_only=True, tag=True):
    """A service run is asked for samples: one group of ``group_size`` for each prompt."""

    request: int  # its number, from 1, one higher than any before
    prompts: tuple[PromptRef, ...]
    group_size: int
    sampling: SamplingParams | None = None  # where it is not as the run's settings say


class SamplesTaken(Struct, frozen=True, kw_only=True, tag=True):
    """The reader of a request has its first ``upto`` results."""

    request: int
    upto: int


class RequestCancelled(Struct, frozen=True, kw_only=True, tag=True):
    """The rest of a request is not wanted any more."""

    request: int
    reason: str


class WeightsPublished(Struct, frozen=True, kw_only=True, tag=True):
    """A service run has newer weights; their manifest is on the weights log."""

    weights: WeightIdentity
    update: str = ""  # the request for them, "" unknown


class UpdateFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Weights that a service run was asked to publish cannot be; it goes on with those it has."""

    update: str
    reason: str


class BrokerUsage(Struct, frozen=True, kw_only=True, tag=True):
    """Bytes of rows that the broker retains for this run, and those that its storage units hold."""

    retained_bytes: int
    unit_bytes: int = 0


class StopRequested(Struct, frozen=True, kw_only=True, tag=True):
    """The run was asked to end: batches in training finish, nothing new is admitted."""

    reason: str


class PauseRequested(Struct, frozen=True, kw_only=True, tag=True):
    """The run was asked to dispatch nothing new; running samples finish, what is ready is trained."""


class ResumeRequested(Struct, frozen=True, kw_only=True, tag=True):
    """The run was asked to end a pause."""


class CheckpointRequested(Struct, frozen=True, kw_only=True, tag=True):
    """The run was asked for a checkpoint after the batch in training."""


class SettingChanged(Struct, frozen=True, kw_only=True, tag=True):
    """A user changed a setting of the running run. key: dotted, one of those that the core can change."""

    key: str
    value: int | float | str


class RankerJudged(Struct, frozen=True, kw_only=True, tag=True):
    """How right the predictions of response lengths were before the lengths were known. See ranker/quality.py."""

    trusted: bool  # dispatch may rely on their order; otherwise it dispatches evenly
    num_groups: int = 0  # judged since the ranker was started
    recall_20: float = 0.0  # of the longest 20 percent, how many are among the predicted longest
    recall_10: float = 0.0
    recall_5: float = 0.0
    kendall_tau: float = 0.0
    drift: float = 0.0  # how far log lengths have moved since the run began, e.g. 0.69 = doubled
    known_prompts: int = 0  # with lengths of their own
    refits: int = 0  # models trained during the run
    measured: bool = False  # ``trusted`` rests on enough groups of the run


class WorkerStarted(Struct, frozen=True, kw_only=True, tag=True):
    """A supervisor started another worker process because the run asked for it. name: without its incarnation."""

    name: str
    reason: str


class RunResumed(Struct, frozen=True, kw_only=True, tag=True):
    """The run was started again (``--resume``): an earlier StopRequested or PauseRequested no longer holds."""


class Tick(Struct, frozen=True, kw_only=True, tag=True):
    """Time passed. Deadlines are looked at here and nowhere else."""


_OfGeneration: TypeAlias = WorkerReported | RolloutFinished | RolloutFailed | WeightsLoaded | WeightsFailed
_OfScoring: TypeAlias = GroupScored | ScoringFailed
_OfTrainer: TypeAlias = RoundDone | StepDone | CheckpointSaved | TrainerReady | CriticReported | RowsMissing
_OfPublisher: TypeAlias = WeightsPublished | UpdateFailed
_OfProcesses: TypeAlias = WorkerLost | WorkerStarted | RunResumed
_OfUsers: TypeAlias = StopRequested | PauseRequested | ResumeRequested | CheckpointRequested | SettingChanged
_OfService: TypeAlias = PromptsSubmitted | SamplesTaken | RequestCancelled
_OfPrompts: TypeAlias = PromptsArrived | HeldOutPromptsArrived
_OfOrchestrator: TypeAlias = WorkerJoined | PlanComputed | BrokerUsage | RankerJudged | Tick

ReportedEvent: TypeAlias = _OfGeneration | _OfScoring | _OfTrainer | _OfPublisher | _OfProcesses | _OfUsers
"""The events log: what other processes report. An event that decodes is one that the core can apply, whatever it says.
"""
Event: TypeAlias = ReportedEvent | _OfService | _OfPrompts | _OfOrchestrator
"""Those, and what the orchestrator itself reports: no other process can."""


# --- commands: what the core decided ----------------------------------------------------------------------------------

EVALUATION = -1  # in place of a batch: the group belongs to an evaluation


class GroupPlan(Struct, frozen=True, kw_only=True):
    """One prompt group for one worker."""

    group_id: WireGroupId
    batch: int  # EVALUATION for an answer to a held-out problem
    prompt_id: PromptId
    samples: tuple[Index, ...]  # to generate (the others already exist)
    group_size: int
    predicted_tokens: float
    priority: float  # higher first; the predicted length, so that the longest starts first
    attempt: int = 0
    sampling: SamplingParams | None = None  # where a request asked for something else than the run's settings
    partial: tuple[PartialSample, ...] = ()  # of ``samples``, those that go on from what earlier attempts sampled

    @property
    def alone(self) -> bool:
        """Whether one sample runs before the others of its group: how far it is says how long they will be."""
        return not self.attempt and len(self.samples) == 1 < self.group_size


class PartialTokens(Struct, frozen=True, kw_only=True):
    """Tokens ``[start, start + N)`` of a running sample, on the log of its group.

    token_ids, logprobs: [N] as in the columns of a row.  spans: in order, covering them, counted from the response's
    first token.
    """

    sample: Index
    attempt: Count
    start: Count
    token_ids: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]


class DispatchGroups(Struct, frozen=True, kw_only=True, tag=True):
    """Put these groups on ``plans:<worker>``, longest first.

    The core emits one command for each group, so that the id of a plan's entry is its command's id.
    """

    worker_id: WorkerId
    plans: tuple[GroupPlan, ...]


class AbortRollouts(Struct, frozen=True, kw_only=True, tag=True):
    """Stop these groups on this worker; their partial tokens are not wanted.

    attempts: [len(group_ids)] the attempt of each group that is meant: a later one was dispatched since and must go on.
    Empty: any attempt.
    """

    worker_id: WorkerId
    group_ids: tuple[GroupId, ...]
    reason: str
    attempts: tuple[int, ...] = ()


class LoadWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Load ``weights`` (their manifest is on the weights log) and serve them.

    full_precision: why nothing may be held in fp8 from now on; empty: as the run is set.
    aside_s: seconds for which the worker has stood aside: its loads failed, so it gets no groups; None: it does not.
    """

    worker_id: WorkerId
    weights: WeightIdentity
    full_precision: str = ""
    aside_s: float | None = None


class DrainWorker(Struct, frozen=True, kw_only=True, tag=True):
    """Leave the run: the worker holds nothing any more, and nothing more will come to it."""

    worker_id: WorkerId
    reason: str


class SpawnWorkers(Struct, frozen=True, kw_only=True, tag=True):
    """More generation workers are wanted. total: asked for so since the run began, so that repeating it is harmless."""

    total: int
    reason: str


class GroupRows(Struct, frozen=True, kw_only=True):
    """The rows of one group that a rank trains together, so that their prompt is computed once."""

    group_id: WireGroupId
    samples: tuple[Index, ...]
    num_tokens: int


class TrainRound(Struct, frozen=True, kw_only=True, tag=True):
    """One micro-batch for every rank.

    kind: "train" accumulates gradients; "logprobs" records old-policy logprobs before the first step of the batch.
    """

    round_id: str
    batch: int
    ranks: tuple[tuple[GroupRows, ...], ...]  # [dp_size] groups of each rank; an empty one is a zero-weight pad
    kind: Literal["train", "logprobs"] = "train"
    pass_index: int = 0  # 0 .. epochs-1: which pass over the batch
    mini_batch: int = 0  # 0 .. mini_batches-1


class CloseMiniBatch(Struct, frozen=True, kw_only=True, tag=True):
    """All rows of this mini-batch have been sent: scale the gradient by what it holds and step.

    num_rows, num_tokens: response rows and loss tokens of the mini-batch over all ranks (the normalisers); both 0 when
    nothing was left of it, and then there is no step.
    """

    batch: int
    num_rows: int
    num_tokens: int
    pass_index: int = 0
    mini_batch: int = 0
    finishes_batch: bool = True  # this was the last mini-batch of the last pass: publish version ``batch + 1``
    source_position: str = ""  # of the prompt source after the last prompt of the batch, for the checkpoint
    checkpoint: bool = False  # save one after this batch
    short_by: int = 0
    num_moved: int = 0  # groups that gave their place to one that was ready (rolling membership)
    moved_tokens: int = 0  # response tokens gained so; below 0 where the batch is shorter than it was admitted
    num_batches: int = 0  # that the learning-rate schedule ends with; 0: the rate is constant


class FinishTraining(Struct, frozen=True, kw_only=True, tag=True):
    """No more rounds will come: save the final checkpoint and the final model, then exit."""

    reason: str


class RequestPrompts(Struct, frozen=True, kw_only=True, tag=True):
    """Read up to ``count`` more prompts from the source."""

    count: int


class GroupAdmitted(Struct, frozen=True, kw_only=True):
    """A prompt got a slot in a batch: its columns are to be written under this group id."""

    group_id: GroupId
    prompt_id: PromptId
    group_size: int


class RequestHeldOutPrompts(Struct, frozen=True, kw_only=True, tag=True):
    """Name the held-out problems of the run, at most ``count``."""

    count: int


class PlannedGroup(Struct, frozen=True, kw_only=True):
    """One group of a batch to be planned. predicted_tokens, predicted_sigma: as experience has corrected them."""

    group_id: GroupId
    predicted_tokens: float
    predicted_sigma: float
    num_samples: int


class PlannedWorker(Struct, frozen=True, kw_only=True):
    """One generation worker that a plan may use."""

    worker_id: WorkerId
    capacity: int
    slowdown: float = 1.0  # its seconds a token, relative to the others
    in_hand: int = 0  # samples it still has to generate
    in_hand_tokens: float = 0.0  # expected of all of them
    in_hand_longest: float = 0.0  # expected of one


class ComputePlan(Struct, frozen=True, kw_only=True, tag=True):
    """Plan which worker generates which groups of ``batch``; answered by PlanComputed.

    It takes longer than an event may, so it is done outside of the core, which checks the plan again before it is used.
    """

    plan_id: str
    batch: int
    policy: str
    groups: tuple[PlannedGroup, ...]
    workers: tuple[PlannedWorker, ...]
    prompt_tokens: float = 0.0


class AdmitGroups(Struct, frozen=True, kw_only=True, tag=True):
    """Write the prompt columns of these groups; precedes their dispatch."""

    groups: tuple[GroupAdmitted, ...]


class SlotOutcome(Struct, frozen=True, kw_only=True, tag=True):
    """How a slot ended, for the prompt source and the metrics."""

    group_id: GroupId
    prompt_id: PromptId
    outcome: Literal["trained", "filtered", "stale", "dead"]
    rewards: tuple[float, ...] = ()
    response_tokens: tuple[int, ...] = ()
    reason: str = ""


class HeldOutAnswer(Struct, frozen=True, kw_only=True):
    """One scored answer to a problem of a named set; answers to the same problem have the same prompt_id."""

    eval_set: str
    prompt_id: PromptId
    reward: float
    components: dict[str, float]
    response_tokens: int


class EvaluationOutcome(Struct, frozen=True, kw_only=True, tag=True):
    """How an evaluation ended, for the metrics: means over the problems whose answer was scored."""

    number: int
    weights: WeightIdentity  # every token of every answer was sampled under these
    problems: int  # asked
    answered: int  # and scored
    reward: float = 0.0
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])  # mean of each named one of a reward
    response_tokens: float = 0.0
    tokens: int = 0  # generated for it, also those of answers not counted
    seconds: float = 0.0  # from the first answer that was asked for to the end
    engine_s: float = 0.0  # of engine slots, like tokens
    reason: str = ""  # why it ended short of all problems, "" when it did not
    answers: tuple[HeldOutAnswer, ...] = ()  # where problems are in named sets: one by one


class DropRows(Struct, frozen=True, kw_only=True, tag=True):
    """Rows of these groups are in a durable checkpoint or will never be trained: free them."""

    group_ids: tuple[GroupId, ...]


class TrimRounds(Struct, frozen=True, kw_only=True, tag=True):
    """Entries of the rounds log up to and including ``cursor`` are in the oldest kept checkpoint: free them."""

    cursor: str


class FinishRun(Struct, frozen=True, kw_only=True, tag=True):
    """The run is over: the trainer has its last command, workers may go. failed: it cannot go on."""

    reason: str
    failed: bool = False


TrainerCommand: TypeAlias = TrainRound | CloseMiniBatch | FinishTraining  # the rounds log
WorkerCommand: TypeAlias = LoadWeights | AbortRollouts | DrainWorker  # the control log of one generation worker
_ForSource: TypeAlias = RequestPrompts | RequestHeldOutPrompts | AdmitGroups | SlotOutcome
_ForRun: TypeAlias = DispatchGroups | SpawnWorkers | ComputePlan | EvaluationOutcome | DropRows | TrimRounds | FinishRun
Command: TypeAlias = TrainerCommand | WorkerCommand | _ForSource | _ForRun


# --- what else is on streams and in keys ------------------------------------------------------------------------------


class UpdateRequest(Struct, frozen=True, kw_only=True):
    """Weights that a service run shall serve."""

    update: str  # names it in the answer
    path: str = ""  # a checkpoint on the publisher's host
    manifest: WeightManifest | None = None  # or: of weights that are served already


Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Addresses: TypeAlias = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=8192)], ...], msgspec.Meta(max_length=64)]


Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One tensor inside a manifest's byte range. dtype: torch's name without the prefix, e.g. "bfloat16"."""

    name: Name
    shape: Shape
    dtype: Name
    offset: Count
    nbytes: Count
    checksum: Name


class Piece(Struct, frozen=True, array_like=True):
    """A box of one tensor, in row-major order inside a part's byte range.

    tensor: its index in the manifest.  start, shape: of the box, in elements, within the tensor.  checksum: that of the
    whole tensor's bytes with zeros everywhere outside of the box (``tensors.pieces``).
    """

    tensor: Count
    start: Shape
    shape: Shape
    offset: Count
    checksum: Name


class TensorPatch(Struct, frozen=True, array_like=True):
    """What changed in a tensor (``tensors.delta``), or a piece. tensor: its index in the manifest, or in the part.
    checksum: of the patch.
    """

    tensor: Count
    offset: Count
    nbytes: Count
    checksum: Name


class WeightDelta(Struct, frozen=True, kw_only=True):
    """What changed against an earlier version, of the same layout. patches: a tensor without one is as it was.

    sources: of all patches in one range, on the host of the manifest or part.
    """

    base: WeightIdentity
    patches: tuple[TensorPatch, ...]
    total_bytes: Count
    sources: Addresses


class WeightPart(Struct, frozen=True, kw_only=True):
    """What one rank holds of a version: a segment of its own, with sources of its own. host: that rank's.

    delta: of this part, a patch for each of ``pieces`` that changed.
    """

    pieces: tuple[Piece, ...]
    total_bytes: Count
    sources: Addresses
    host: Name
    delta: WeightDelta | None = None


class WeightManifest(Struct, frozen=True, kw_only=True):
    """A version of the weights and where to pull its bytes. sources: addresses, e.g. shm://..., tcp://host:port/...

    sources: of all bytes in one range, in which ``tensors`` lie.  parts: the same bytes from several ranks, whose
    pieces make up every tensor once. A trainer of one rank gives sources, one of several ranks parts; either will do.
    What is bounded here is checked when it is decoded; ``tensors.manifest.check_manifest`` checks what must agree.
    delta: a shorter way for who holds just its base; all else is there without it.
    """

    weights: WeightIdentity
    tensors: tuple[TensorSpec, ...]
    total_bytes: Count
    sources: Addresses
    host: Name
    parts: Annotated[tuple[WeightPart, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    delta: WeightDelta | None = None


PartAddresses: TypeAlias = Annotated[tuple[Addresses, ...], msgspec.Meta(max_length=MAX_PARTS)]


class WeightRoutes(Struct, frozen=True, kw_only=True):
    """Whom workers ask for ``weights`` before those that its manifest names, best first; () for who begins there.

    A worker that joins is told in an entry of its own: the way of the others stays as it was.
    parts: of workers that ask others for each part of the manifest, in its order; these are not in ``routes``.
    """

    weights: WeightIdentity
    routes: dict[WireWorkerId, Addresses]
    parts: dict[WireWorkerId, PartAddresses] = msgspec.field(default_factory=dict[WireWorkerId, PartAddresses])


STARTING = "starting"  # what a worker does before it can take work, and before it counts as a worker


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker's lease, renewed every heartbeat; readable by anyone who asks what it is doing."""

    worker_id: WireWorkerId
    kind: WorkerKind
    host: str  # its name
    pid: int
    protocol: int
    host_id: Name = ""  # processes that have it in common can map each other's memory (transport/tensors/base.py)
    site: Name = ""  # as its user calls the datacenter that it is in
    doing: str = STARTING  # one word of its state: "decoding", "waiting", "loading", "training", ...
    since_s: float = 0.0  # in that state
    capacity: Count = 0  # samples it can run at once (generate)
    running: int = 0  # samples
    waiting: int = 0  # samples
    weights: WeightIdentity | None = None
    busy_s: float = 0.0  # cumulative, as what follows
    elapsed_s: float = 0.0
    counters: dict[str, float] = msgspec.field(default_factory=dict[str, float])  # by name: tokens, samples, ...
    kv_use: float = 0.0  # part of its KV memory in use, 0 to 1, where its engine says so (generate)
    way: Name = ""  # how its weights came: inproc, mapped, tcp or ucx (generate)
    trouble: str = ""  # what is wrong while it goes on: its server is lost, there is no checkpoint; "" for nothing
    relay: Name = ""  # tcp://host:port where it passes on the weights that came to it over a network (generate)
    gpus: tuple[Name, ...] = ()  # that it took for itself: "<the driver's id> <what it is>"
    unit: Name = ""  # tcp://host:port where it keeps columns of rows, counters["retained_bytes"] of them (store)
    round_trip_s: float = 0.0  # to the broker: the least of the last beats; 0: none was timed


class JournalRecord(Struct, frozen=True, kw_only=True):
    """One applied event. seq: position, from 1.  cursor: position in the events log once it was applied."""

    seq: int
    now_s: float
    event: Event
    cursor: str = "0-0"


class TrialRow(Struct, frozen=True, kw_only=True):
    """entry: what the row's column TASK_ENTRY holds. response: as a right answer is asked for."""

    prompt: str
    response: str
    entry: str


class TrialRows(Struct, frozen=True, kw_only=True):
    """A few rows of the data. A reward that computes nothing for any of them would compute nothing in the run."""

    rows: list[TrialRow]


# --- bytes ------------------------------------------------------------------------------------------------------------

encode = msgspec.msgpack.Encoder().encode  # any message as MessagePack

T = TypeVar("T")


class MessageDecoder(Generic[T]):
    """Decodes one type or union from MessagePack; anything else is a MessageError, never another exception."""

    def __init__(self, message_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def decode(self, raw: bytes | memoryview) -> T:
        """Raises MessageError when it is oversized, corrupt or of another type."""
        if len(raw) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(raw)
        except (*DECODE_ERRORS, UnicodeDecodeError) as error:
            raise MessageError(f"not a valid message: {error}") from error


# msgspec takes unions at run time; the type checker sees the alias.
event_decoder: MessageDecoder[ReportedEvent] = MessageDecoder(cast("type[ReportedEvent]", ReportedEvent))
trainer_command_decoder: MessageDecoder[TrainerCommand] = MessageDecoder(cast("type[TrainerCommand]", TrainerCommand))
worker_command_decoder: MessageDecoder[WorkerCommand] = MessageDecoder(cast("type[WorkerCommand]", WorkerCommand))
group_plan_decoder = MessageDecoder(GroupPlan)
partial_decoder = MessageDecoder(PartialTokens)
spawn_decoder = MessageDecoder(SpawnWorkers)
manifest_decoder = MessageDecoder(WeightManifest)
routes_decoder = MessageDecoder(WeightRoutes)
update_decoder = MessageDecoder(UpdateRequest)
worker_status_decoder = MessageDecoder(WorkerStatus)
rollout_info_decoder = MessageDecoder(RolloutInfo)


class _EntryOfPart(Struct, frozen=True, kw_only=True):
    """What is read of a prompt's entry; the rest is the reward's, or its environment's."""

    part: str = ""


_entry_decoder = msgspec.json.Decoder(_EntryOfPart)


def part_of(entry: bytes) -> str:
    """The part of ``[data.mix]`` that a prompt is of, by its column TASK_ENTRY; "" where it names none, as that of a
    held-out problem. Raises MessageError."""
    try:
        return _entry_decoder.decode(entry or b"{}").part
    except DECODE_ERRORS as error:
        raise MessageError(f"the entry of a prompt names no part of [data.mix]: {error}") from error
