"""Every message that crosses a process boundary, one tagged union per stream.

Events are past tense and flow to the orchestrator; commands are imperative and flow from it. The decision core uses
these types directly. Owns: the schema. Never: behaviour beyond encode/decode. Invariant: any bytes decode to a valid
message or raise MessageError, and nothing here can make a reader import code.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from transport.contracts.types import (
    MAX_DIMENSIONS,
    Count,
    EntryId,
    FinishReason,
    Finite,
    GroupId,
    Index,
    PromptId,
    SamplingParams,
    Seconds,
    Struct,
    VersionSpan,
    WeightIdentity,
    WireGroupId,
    WireRowId,
    WireWorkerId,
    WorkerId,
    WorkerKind,
)
from transport.errors import MessageError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""A control message larger than this is foreign: bulk bytes travel beside the streams, never on them."""


# --- events: what happened, sent to the orchestrator ------------------------------------------------------------------


class WorkerJoined(Struct, frozen=True, kw_only=True, tag=True):
    """A worker's lease appeared. Emitted by membership. capacity: samples it can run at once (generate), else 0."""

    worker_id: WorkerId
    kind: WorkerKind
    capacity: int = 0
    weights: WeightIdentity | None = None


class WorkerReported(Struct, frozen=True, kw_only=True, tag=True):
    """What a generation worker holds, sent in order with its other events, so that what was lost can be found out.

    held: groups it has claimed and not finished.  plans_cursor: id of the last plan entry it claimed, "0-0" if none.
    capacity: samples that fit there now, where that changes; 0: as it joined with.
    """

    worker_id: WireWorkerId
    held: tuple[WireGroupId, ...] = ()
    plans_cursor: EntryId = "0-0"
    weights: WeightIdentity | None = None
    capacity: Count = 0


class WorkerLost(Struct, frozen=True, kw_only=True, tag=True):
    """A worker is gone: its process ended, its lease ran out, or it drained. Emitted by membership.

    left: it was asked to go, so nothing that it held can be why.
    """

    worker_id: WireWorkerId
    reason: str
    left: bool = False


class PromptRef(Struct, frozen=True, kw_only=True):
    """A prompt as the core sees it: never its text. predicted_tokens: expected response length, tokens.

    predicted_sigma: standard deviation of a response's log length around it; 0 where it is not known.
    """

    prompt_id: PromptId
    prompt_tokens: int
    predicted_tokens: float
    predicted_sigma: float = 0.0


class PromptsArrived(Struct, frozen=True, kw_only=True, tag=True):
    """Prompts read from the source, in order. exhausted: the source has no more after these.

    source_positions: [len(prompts)] opaque state of the source after each prompt, kept with the batch that uses it.
    """

    prompts: tuple[PromptRef, ...]
    source_positions: tuple[str, ...]
    exhausted: bool = False


class HeldOutPromptsArrived(Struct, frozen=True, kw_only=True, tag=True):
    """All held-out problems of the run, in their fixed order; none where the data has none."""

    prompts: tuple[PromptRef, ...]


class PlanShare(Struct, frozen=True, kw_only=True):
    """What one worker is to generate of a batch, in the order of starting."""

    worker_id: WorkerId
    group_ids: tuple[GroupId, ...]


class PlanComputed(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a ComputePlan. policy: what made the plan, where several were tried.

    end_s: when all of the batch is generated (or trained), as forecast at that moment; 0 without a forecast.
    compute_s: seconds that planning took.
    """

    plan_id: str
    batch: int
    shares: tuple[PlanShare, ...]
    policy: str = ""
    end_s: float = 0.0
    compute_s: float = 0.0


class RolloutInfo(Struct, frozen=True, kw_only=True):
    """How one sample came to be; stored in its row.

    spans: which weights sampled which response tokens, in order, covering [0, response_tokens).
    engine_s: seconds from admission into a slot to the end.  queued_s: seconds from claim to admission.
    """

    worker_id: WorkerId
    finish_reason: FinishReason
    prompt_tokens: int
    response_tokens: int
    spans: tuple[VersionSpan, ...]
    attempt: int = 0
    queued_s: float = 0.0
    engine_s: float = 0.0


class RolloutFinished(Struct, frozen=True, kw_only=True, tag=True):
    """A row was inserted (only its first valid insert is reported). oldest: weights of its oldest span.

    engine_s: seconds from admission into a slot to the end.  queued_s: seconds from claim to admission.
    """

    row_id: WireRowId
    worker_id: WireWorkerId
    response_tokens: Count
    finish_reason: FinishReason
    oldest: WeightIdentity
    newest: WeightIdentity
    num_bytes: Count = 0
    queued_s: Seconds = 0.0
    engine_s: Seconds = 0.0


class RolloutFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Samples of a group that will not come from this worker. retryable: another attempt may succeed."""

    group_id: WireGroupId
    worker_id: WireWorkerId
    samples: tuple[Index, ...]
    reason: str
    retryable: bool = True


class GroupScored(Struct, frozen=True, kw_only=True, tag=True):
    """A whole group has its rewards and advantages.

    signal: rewards differ, so the group carries a gradient.  components: mean of each named reward component.
    """

    group_id: WireGroupId
    rewards: tuple[Finite, ...]
    response_tokens: tuple[Count, ...]
    signal: bool
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])


class ScoringFailed(Struct, frozen=True, kw_only=True, tag=True):
    """A unit of a scoring task was dead-lettered: its group will never be whole."""

    group_id: WireGroupId
    reason: str


class RoundDone(Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has accumulated one round. busy_s: seconds of compute in it. refused: rows its ledger knew.

    stepped_s: seconds of optimizer steps between the round before and this one (several mini-batches).
    """

    round_id: str
    num_rows: Count
    num_tokens: Count
    busy_s: Seconds
    refused: tuple[WireRowId, ...] = ()
    stepped_s: Seconds = 0.0


class StepDone(Struct, frozen=True, kw_only=True, tag=True):
    """A batch was trained and ``weights`` are published. metrics: loss, grad_norm, lr, ... (floats by name).

    stepped_s: seconds of the optimizer step after its last round.
    """

    batch: Index
    weights: WeightIdentity
    num_rows: Count
    num_tokens: Count
    metrics: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    stepped_s: Seconds = 0.0


class CheckpointSaved(Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint is durable. cursor: last entry of the rounds log that it contains. seconds: writing it took."""

    weights: WeightIdentity
    cursor: EntryId
    path: str
    seconds: Seconds = 0.0


class TrainerReady(Struct, frozen=True, kw_only=True, tag=True):
    """A trainer holds ``weights`` (published) and reads the rounds log from ``cursor`` on.

    ``weights.version`` batches are in its lineage. dp_size: ranks that each want a part of every round.
    damaged: newer checkpoints that it could not use, and what is wrong with each, for people.
    """

    worker_id: WireWorkerId
    weights: WeightIdentity
    cursor: EntryId = "0-0"
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    damaged: tuple[str, ...] = ()


class RowsMissing(Struct, frozen=True, kw_only=True, tag=True):
    """Rows that were reported do not exist (the broker lost its tail): they must be generated again."""

    row_ids: tuple[WireRowId, ...]


class WeightsLoaded(Struct, frozen=True, kw_only=True, tag=True):
    """A generation worker serves ``weights``; its checksum held. seconds: transfer and load."""

    worker_id: WireWorkerId
    weights: WeightIdentity
    seconds: Seconds = 0.0


class WeightsFailed(Struct, frozen=True, kw_only=True, tag=True):
    """A generation worker could not load ``weights`` and serves what it had."""

    worker_id: WireWorkerId
    weights: WeightIdentity
    reason: str


class PromptsSubmitted(Struct, frozen=True, kw_only=True, tag=True):
    """A service run is asked for samples. request: its number, from 1, one higher than any before.

    prompts: one group of ``group_size`` samples each.  sampling: how, where it is not as the run's settings say.
    """

    request: int
    prompts: tuple[PromptRef, ...]
    group_size: int
    sampling: SamplingParams | None = None


class SamplesTaken(Struct, frozen=True, kw_only=True, tag=True):
    """The reader of a request has its first ``upto`` results."""

    request: int
    upto: int


class RequestCancelled(Struct, frozen=True, kw_only=True, tag=True):
    """The rest of a request is not wanted any more."""

    request: int
    reason: str


class WeightsPublished(Struct, frozen=True, kw_only=True, tag=True):
    """A service run has newer weights; their manifest is on the weights log. update: the request for them, ""
    unknown.
    """

    weights: WeightIdentity
    update: str = ""


class UpdateFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Weights that a service run was asked to publish cannot be; it goes on with those it has."""

    update: str
    reason: str


class BrokerUsage(Struct, frozen=True, kw_only=True, tag=True):
    """Bytes of rows that the broker retains for this run."""

    retained_bytes: int


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
    """How right the predictions of response lengths were before the lengths were known. See ranker/quality.py.

    trusted: dispatch may rely on their order; otherwise it dispatches evenly.  measured: that rests on enough groups of
    the run.
    num_groups: judged since the ranker was started.
    recall_20, _10, _5: of the longest so many percent, how many are among the predicted longest.
    drift: how far log lengths have moved since the run began, e.g. 0.69 = doubled.
    known_prompts: with lengths of their own.  refits: models trained during the run.
    """

    trusted: bool
    num_groups: int = 0
    recall_20: float = 0.0
    recall_10: float = 0.0
    recall_5: float = 0.0
    kendall_tau: float = 0.0
    drift: float = 0.0
    known_prompts: int = 0
    refits: int = 0
    measured: bool = False


class WorkerStarted(Struct, frozen=True, kw_only=True, tag=True):
    """A supervisor started another worker process because the run asked for it. name: without its incarnation."""

    name: str
    reason: str


class RunResumed(Struct, frozen=True, kw_only=True, tag=True):
    """The run was started again (``--resume``): an earlier StopRequested or PauseRequested no longer holds."""


class Tick(Struct, frozen=True, kw_only=True, tag=True):
    """Time passed. Deadlines are looked at here and nowhere else."""


ReportedEvent: TypeAlias = (
    WorkerReported
    | WorkerLost
    | RolloutFinished
    | RolloutFailed
    | GroupScored
    | ScoringFailed
    | RoundDone
    | StepDone
    | CheckpointSaved
    | TrainerReady
    | RowsMissing
    | WeightsLoaded
    | WeightsFailed
    | WeightsPublished
    | UpdateFailed
    | StopRequested
    | PauseRequested
    | ResumeRequested
    | CheckpointRequested
    | SettingChanged
    | WorkerStarted
    | RunResumed
)
"""The events log: what other processes report. An event that decodes is one that the core can apply, whatever it
says.
"""

Event: TypeAlias = (
    ReportedEvent
    | WorkerJoined
    | PromptsArrived
    | PlanComputed
    | HeldOutPromptsArrived
    | PromptsSubmitted
    | SamplesTaken
    | RequestCancelled
    | BrokerUsage
    | RankerJudged
    | Tick
)
"""Those, and what the orchestrator itself reports: no other process can."""


# --- commands: what the core decided ----------------------------------------------------------------------------------


EVALUATION = -1
"""In place of a batch: the group belongs to an evaluation."""


class GroupPlan(Struct, frozen=True, kw_only=True):
    """One prompt group for one worker.

    batch: EVALUATION for an answer to a held-out problem.
    samples: sample indices to generate (the others already exist).  priority: higher first; the predicted length, so
    that the longest starts first.  sampling: how, where a request asked for something else than the run's settings.
    """

    group_id: WireGroupId
    batch: int
    prompt_id: PromptId
    samples: tuple[Index, ...]
    group_size: int
    predicted_tokens: float
    priority: float
    attempt: int = 0
    sampling: SamplingParams | None = None


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
    """Load ``weights`` (their manifest is on the weights log) and serve them."""

    worker_id: WorkerId
    weights: WeightIdentity


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

    ranks: [dp_size] groups of each rank; an empty one is a zero-weight pad.
    kind: "train" accumulates gradients; "logprobs" records old-policy logprobs before the first step of the batch.
    pass_index: 0 .. epochs-1 (which pass over the batch).  mini_batch: 0 .. mini_batches-1.
    """

    round_id: str
    batch: int
    ranks: tuple[tuple[GroupRows, ...], ...]
    kind: Literal["train", "logprobs"] = "train"
    pass_index: int = 0
    mini_batch: int = 0


class CloseMiniBatch(Struct, frozen=True, kw_only=True, tag=True):
    """All rows of this mini-batch have been sent: scale the gradient by what it holds and step.

    num_rows, num_tokens: response rows and loss tokens of the mini-batch over all ranks (the normalisers); both 0 when
    nothing was left of it, and then there is no step.
    finishes_batch: this was the last mini-batch of the last pass: publish version ``batch + 1``.
    source_position: prompt-source state after the last prompt of the batch, for the checkpoint.
    checkpoint: save one after this batch.
    num_moved: groups that gave their place to one that was ready (rolling membership), response tokens gained so in
    moved_tokens: below 0 where the batch is shorter than it was admitted.
    """

    batch: int
    num_rows: int
    num_tokens: int
    pass_index: int = 0
    mini_batch: int = 0
    finishes_batch: bool = True
    source_position: str = ""
    checkpoint: bool = False
    short_by: int = 0
    num_moved: int = 0
    moved_tokens: int = 0


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
    """One generation worker that a plan may use. slowdown: its seconds a token, relative to the others.

    in_hand: samples it still has to generate.  in_hand_tokens: expected of all of them.  in_hand_longest: of one.
    """

    worker_id: WorkerId
    capacity: int
    slowdown: float = 1.0
    in_hand: int = 0
    in_hand_tokens: float = 0.0
    in_hand_longest: float = 0.0


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


class EvaluationOutcome(Struct, frozen=True, kw_only=True, tag=True):
    """How an evaluation ended, for the metrics: means over the problems whose answer was scored.

    weights: every token of every answer was sampled under these.  problems, answered: asked, and answered and scored.
    components: mean of each named reward component.  tokens: generated for it, also those of answers not counted.
    seconds: from the first answer that was asked for to the end.  engine_s: seconds of engine slots, like tokens.
    reason: why it ended short of all problems, "" when it did not.
    """

    number: int
    weights: WeightIdentity
    problems: int
    answered: int
    reward: float = 0.0
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    response_tokens: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    engine_s: float = 0.0
    reason: str = ""


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


Command: TypeAlias = (
    DispatchGroups
    | AbortRollouts
    | LoadWeights
    | DrainWorker
    | SpawnWorkers
    | TrainRound
    | CloseMiniBatch
    | FinishTraining
    | RequestPrompts
    | RequestHeldOutPrompts
    | ComputePlan
    | AdmitGroups
    | SlotOutcome
    | EvaluationOutcome
    | DropRows
    | TrimRounds
    | FinishRun
)

TrainerCommand: TypeAlias = TrainRound | CloseMiniBatch | FinishTraining
"""The rounds log."""
WorkerCommand: TypeAlias = LoadWeights | AbortRollouts | DrainWorker
"""The control log of one generation worker."""


# --- what else is on streams and in keys ------------------------------------------------------------------------------


class UpdateRequest(Struct, frozen=True, kw_only=True):
    """Weights that a service run shall serve. update: names it in the answer.

    path: a checkpoint on the publisher's host, or ``manifest``: of weights that are served already.
    """

    update: str
    path: str = ""
    manifest: WeightManifest | None = None


Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Addresses: TypeAlias = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=8192)], ...], msgspec.Meta(max_length=64)]


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One tensor inside a manifest's byte range. dtype: torch's name without the prefix, e.g. "bfloat16"."""

    name: Name
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    dtype: Name
    offset: Count
    nbytes: Count
    checksum: Name


class WeightManifest(Struct, frozen=True, kw_only=True):
    """A version of the weights and where to pull its bytes. sources: addresses, e.g. shm://..., tcp://host:port/...

    What is bounded here is checked when it is decoded; ``tensors.manifest.check_manifest`` checks what must agree.
    """

    weights: WeightIdentity
    tensors: tuple[TensorSpec, ...]
    total_bytes: Count
    sources: Addresses
    host: Name


STARTING = "starting"
"""What a worker does before it can take work, and before it counts as a worker."""


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker's lease, renewed every heartbeat; readable by anyone who asks what it is doing.

    doing: one word of its state ("decoding", "waiting", "loading", "training", ...).  since_s: seconds in that state.
    capacity: samples it can run at once (generate).  running, waiting: samples.
    busy_s, elapsed_s: cumulative.  counters: cumulative numbers by name (tokens, samples, ...).
    kv_use: part of its KV memory in use, 0 to 1, where its engine says so (generate).
    """

    worker_id: WireWorkerId
    kind: WorkerKind
    host: str
    pid: int
    protocol: int
    doing: str = STARTING
    since_s: float = 0.0
    capacity: Count = 0
    running: int = 0
    waiting: int = 0
    weights: WeightIdentity | None = None
    busy_s: float = 0.0
    elapsed_s: float = 0.0
    counters: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    kv_use: float = 0.0


class JournalRecord(Struct, frozen=True, kw_only=True):
    """One applied event. seq: position, from 1.  cursor: position in the events log once it was applied."""

    seq: int
    now_s: float
    event: Event
    cursor: str = "0-0"


_encoder = msgspec.msgpack.Encoder()


class TrialRow(Struct, frozen=True, kw_only=True):
    """entry: what the row's column TASK_ENTRY holds. response: as a right answer is asked for."""

    prompt: str
    response: str
    entry: str


class TrialRows(Struct, frozen=True, kw_only=True):
    """A few rows of the data. A reward that computes nothing for any of them would compute nothing in the run."""

    rows: list[TrialRow]


def encode(message: object) -> bytes:
    """Encode any message to MessagePack."""
    return _encoder.encode(message)


T = TypeVar("T")


class MessageDecoder(Generic[T]):
    """Decodes one type or union from MessagePack; anything else is a MessageError, never another exception."""

    def __init__(self, message_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def decode(self, raw: bytes | memoryview) -> T:
        """Decode ``raw``. Raises MessageError when it is oversized, corrupt or of another type."""
        if len(raw) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"not a valid message: {error}") from error


# msgspec takes unions at run time; the type checker sees the alias.
event_decoder: MessageDecoder[ReportedEvent] = MessageDecoder(cast("type[ReportedEvent]", ReportedEvent))
trainer_command_decoder: MessageDecoder[TrainerCommand] = MessageDecoder(cast("type[TrainerCommand]", TrainerCommand))
worker_command_decoder: MessageDecoder[WorkerCommand] = MessageDecoder(cast("type[WorkerCommand]", WorkerCommand))
group_plan_decoder = MessageDecoder(GroupPlan)
spawn_decoder = MessageDecoder(SpawnWorkers)
manifest_decoder = MessageDecoder(WeightManifest)
update_decoder = MessageDecoder(UpdateRequest)
worker_status_decoder = MessageDecoder(WorkerStatus)
rollout_info_decoder = MessageDecoder(RolloutInfo)
