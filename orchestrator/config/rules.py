"""What must hold of several settings together. The range of one stands on its field (transport/contracts/settings.py).

Owns: the rules, and how each is told, with the keys that it is about, the one to change first. Never: where a setting
came from (load.py says).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.config.schema import to_toml
from transport.contracts.code_tasks import CODE_REWARD
from transport.contracts.settings import (
    SERVER_ENGINES,
    AlgorithmSettings,
    DataPart,
    DataSettings,
    EvalSet,
    Settings,
    data_parts,
    eval_sets,
)
from transport.process.secret import HOW_TO_MAKE, MIN_CHARACTERS
from transport.tensors.base import parse_ports

TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size", "-tp")
"""Options of servers for what ``generation.gpus_per_worker`` says."""
A_SERVER = " or ".join(f'"{engine}"' for engine in SERVER_ENGINES)


def violations(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every rule that ``settings`` break: the keys it is about, and what is wrong with the first of them."""
    of_sets = (
        (keys, f"{problem} (in {name})")
        for name, one in settings.eval.sets.items()
        for keys, problem in _broken_in_set(settings, one)
    )
    whole = data_parts(settings.data)
    of_parts = (
        (keys, f"{problem} (in {name})")
        for name, part in settings.data.mix.items()
        for keys, problem in _broken_in_part(settings, part, whole[name])
    )
    by_parts = (
        _told_of_part(settings, name, keys.split(), problem)
        for name, algorithm in settings.algorithms.items()
        for keys, problem in _broken_by_algorithm(settings, algorithm)
        if name
    )
    of_all = (
        broken
        for rules in (_broken_of_processes, _broken_of_training, _broken_of_generation, _broken_of_data)
        for broken in rules(settings)
    )
    return ((tuple(keys.split()), problem) for keys, problem in (*of_all, *of_sets, *of_parts, *by_parts))


NO_PORTS = 'must be a port or a range of ports, like "7400-7409"'


def _are_ports(text: str) -> bool:
    try:
        parse_ports(text)
    except ValueError:
        return False
    return True


def _broken_of_processes(s: Settings) -> Iterator[tuple[str, str]]:
    """How processes meet, and for how long they bear silence."""
    if not _are_ports(s.tensors.ports):
        yield "tensors.ports", NO_PORTS
    if not _are_ports(s.rows.ports):
        yield "rows.ports", NO_PORTS
    if s.api.secret and len(s.api.secret) < MIN_CHARACTERS:
        yield "api.secret", f"must be {MIN_CHARACTERS} characters or more; make one with {HOW_TO_MAKE}"
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if getattr(s.broker, name) and not s.broker.url.startswith("rediss"):
            yield f"broker.{name} broker.url", "needs a broker.url that starts with rediss://"
    if bool(s.broker.tls_cert) != bool(s.broker.tls_key):
        yield "broker.tls_cert broker.tls_key", "go together: a certificate is shown with its private key"
    if s.liveness.lease_s < 2 * s.liveness.heartbeat_s:
        yield (
            "liveness.lease_s liveness.heartbeat_s",
            "must be at least twice liveness.heartbeat_s, or one late heartbeat loses a healthy worker",
        )
    if s.liveness.warn_s >= s.liveness.stall_s:
        yield (
            "liveness.warn_s liveness.stall_s",
            "must be below liveness.stall_s, or the run stops before it has said what blocks it",
        )
    if s.liveness.stall_s <= max(s.liveness.lease_s, s.pipeline.rollout_timeout_s):
        yield (
            "liveness.stall_s liveness.lease_s pipeline.rollout_timeout_s",
            "must be above liveness.lease_s and pipeline.rollout_timeout_s, or the run gives up before it has retried",
        )


def broken_by_probes(s: Settings) -> Iterator[tuple[str, str]]:
    """What shows the lengths of a group before the group itself has to be needed, and used."""
    if not s.pipeline.probes:
        return
    if s.pipeline.group_size == 1:
        yield (
            "pipeline.probes pipeline.group_size",
            "must be false with pipeline.group_size 1: a probe is for the others of its group",
        )
    if s.ranker.kind == "oracle":
        yield "pipeline.probes ranker.kind", 'must be false with ranker.kind "oracle", which knows what a probe shows'
    if s.pipeline.dispatch not in ("auto", "pulled", "least_loaded"):
        yield (
            "pipeline.dispatch pipeline.probes",
            'must be "auto", "pulled" or "least_loaded" with pipeline.probes: others plan before a probe has run',
        )


def _broken_of_training(s: Settings) -> Iterator[tuple[str, str]]:
    """What is trained, and from which rounds."""
    if s.pipeline.groups_per_batch % s.trainer.mini_batches:
        yield (
            "pipeline.groups_per_batch trainer.mini_batches",
            "must be divisible by trainer.mini_batches, so that every optimizer step sees as many groups",
        )
    yield from _broken_by_layout(s)
    yield from _broken_by_adapters(s)
    if s.pipeline.rollout_batches > s.pipeline.max_staleness + 1:
        yield (
            "pipeline.rollout_batches pipeline.max_staleness",
            "must be at most max_staleness + 1, or the last of them is too old when it is trained",
        )
    yield from broken_by_deferring(s)
    yield from broken_by_probes(s)
    yield from _broken_by_streams(s)
    yield from _broken_by_algorithm(s, s.algorithm)
    if s.algorithm.advantage == "gae" and s.pipeline.drop_no_signal:
        yield (
            "pipeline.drop_no_signal algorithm.advantage",
            'must be false with algorithm.advantage "gae": a group whose rewards agree still has advantages',
        )
    if s.algorithm.advantage != "gae" and s.critic != Settings().critic:
        yield (
            "critic.lr critic.model critic.value_clip critic.device critic.gpus algorithm.advantage",
            'and all of [critic] need algorithm.advantage "gae": without, there is no critic',
        )
    if s.trainer.micro_batch_tokens < s.sampling.max_new_tokens:
        yield (
            "trainer.micro_batch_tokens sampling.max_new_tokens",
            "must be at least sampling.max_new_tokens, or one response does not fit into a micro-batch",
        )
    if s.trainer.lr_schedule != "constant" and s.trainer.warmup_batches >= s.run.batches:
        yield (
            "trainer.warmup_batches run.batches trainer.lr_schedule",
            f'must be below run.batches with trainer.lr_schedule "{s.trainer.lr_schedule}", which falls after it',
        )
    if s.pipeline.membership == "rolling" and s.pipeline.max_staleness == 0:
        yield (
            "pipeline.membership pipeline.max_staleness",
            'must be "fixed" with pipeline.max_staleness 0: no other batch runs whose place a group could take',
        )
    if s.trainer.lr_min_share and s.trainer.lr_schedule == "constant":
        yield "trainer.lr_min_share trainer.lr_schedule", 'needs trainer.lr_schedule "linear" or "cosine"'
    if s.trainer.engine == "emulated" and s.trainer.num_ranks != 1:
        yield "trainer.ranks trainer.engine", 'must be 1 with trainer.engine "emulated", whose speed is a setting'


def broken_by_deferring(s: Settings) -> Iterator[tuple[str, str]]:
    """The slowest groups of a batch are left to the next, with their tokens."""
    pipeline = s.pipeline
    if pipeline.oversampled_tail != "defer":
        return
    if not 0 < pipeline.oversampled_groups < pipeline.groups_per_batch:
        yield (
            "pipeline.oversampled_groups pipeline.oversampled_tail pipeline.groups_per_batch",
            'must be above 0 with pipeline.oversampled_tail "defer", and below pipeline.groups_per_batch: so many '
            "groups are left to the next batch, which trains all of them",
        )
    if pipeline.membership == "rolling":
        yield (
            "pipeline.membership pipeline.oversampled_tail",
            'must be "fixed" with pipeline.oversampled_tail "defer": both move a slow group to a later batch',
        )
    if not s.generation.partial_s:
        yield (
            "generation.partial_s pipeline.oversampled_tail",
            'must be above 0 with pipeline.oversampled_tail "defer": a deferred sample goes on from the tokens it has',
        )
    if (s.environments or s.endpoint.enabled) and pipeline.update != "in_flight":
        yield (
            "pipeline.update pipeline.oversampled_tail environment.name endpoint.enabled",
            'must be "in_flight" with pipeline.oversampled_tail "defer" and several turns: an episode that is taken '
            "back starts over",
        )


def _broken_of_endpoint(s: Settings) -> Iterator[tuple[str, str]]:
    """An endpoint whose samples are conversations of agents."""
    if s.trainer.engine == "none":
        yield "endpoint.enabled trainer.engine", 'needs a trainer; a service (trainer.engine "none") has /generate'
    if s.environments:
        yield (
            "endpoint.enabled environment.name",
            "must be false with environment.name: a sample talks to an agent or to an environment",
        )
    if s.data.response_column:
        yield (
            "endpoint.enabled data.response_column",
            "must be false with data.response_column: what is given is no conversation",
        )
    if s.generation.lengths:
        yield (
            "endpoint.enabled generation.lengths",
            "must be false with generation.lengths: an agent decides how much is said",
        )
    if s.endpoint.branches == "all" and s.algorithm.advantage == "gae":
        yield (
            "endpoint.branches algorithm.advantage",
            'must be "longest" with algorithm.advantage "gae": a critic\'s values follow one line of turns',
        )
    if s.endpoint.max_turn_tokens > s.sampling.max_new_tokens:
        yield (
            "endpoint.max_turn_tokens sampling.max_new_tokens",
            "must be at most sampling.max_new_tokens, which bounds the whole conversation",
        )
    if s.endpoint.max_session_s >= s.pipeline.rollout_timeout_s:
        yield (
            "endpoint.max_session_s pipeline.rollout_timeout_s",
            "must be below pipeline.rollout_timeout_s, or a session that may still go on is taken back",
        )


def _broken_of_generation(s: Settings) -> Iterator[tuple[str, str]]:
    """Engines, what they sample, and what plans of dispatch know of them."""
    if s.trainer.engine == "emulated" and s.generation.engine != "emulated":
        yield (
            "generation.engine trainer.engine",
            'must be "emulated" with trainer.engine "emulated", which has no weights to serve',
        )
    if s.environments and s.data.response_column:
        yield (
            "environment.name data.response_column",
            "must be empty with data.response_column: a response that is given talks to nobody",
        )
    if s.endpoint.enabled:
        yield from _broken_of_endpoint(s)
    if s.environment.path and not s.own_environments:
        yield "environment.path environment.name", "is where a module:function lies: name it (environment.name)"
    if s.environment.max_turn_tokens > s.sampling.max_new_tokens:
        yield (
            "environment.max_turn_tokens sampling.max_new_tokens",
            "must be at most sampling.max_new_tokens, which bounds the whole episode",
        )
    if s.generation.stop and s.generation.engine == "emulated":
        yield (
            "generation.stop generation.engine",
            'must be empty with generation.engine "emulated", which writes no text',
        )
    if s.generation.gpus_per_worker > 1 and (s.generation.engine not in SERVER_ENGINES or s.generation.engine_url):
        yield (
            "generation.gpus_per_worker generation.engine",
            f"needs generation.engine {A_SERVER}, which a worker starts itself: others compute on one GPU",
        )
    if split := [one for one in s.generation.server_args if one.partition("=")[0] in TENSOR_PARALLEL]:
        yield (
            "generation.server_args generation.gpus_per_worker",
            f"must not name {split[0]}: set generation.gpus_per_worker, so that each worker gets as many GPUs",
        )
    if s.generation.engine_url and s.generation.engine not in SERVER_ENGINES:
        yield "generation.engine_url generation.engine", f"needs generation.engine {A_SERVER}"
    if s.generation.engine_url and s.generation.num_workers != 1:
        yield (
            "generation.workers generation.engine_url",
            "must be 1 with generation.engine_url: a server takes new weights from one worker",
        )
    own_server = s.generation.server_command or s.generation.server_args
    if own_server and s.generation.engine not in SERVER_ENGINES:
        yield (
            "generation.server_command generation.engine",
            f"and generation.server_args need generation.engine {A_SERVER}",
        )
    if s.generation.drafts and s.generation.engine_url:
        yield (
            "generation.drafts generation.engine_url",
            "must be 0 with generation.engine_url: whether that server drafts is said where it is started",
        )
    drafted = [one for one in s.generation.server_args if one.startswith("--speculative")]
    if s.generation.drafts and drafted:
        yield (
            "generation.drafts generation.server_args",
            f"must be 0 with {drafted[0].partition('=')[0]} in generation.server_args: leave out one of them",
        )
    yield from broken_of_fp8(s)
    if s.generation.engine == "vllm" and (s.sampling.top_p != 1 or s.sampling.top_k != 0):
        yield (
            "sampling.top_p sampling.top_k",
            'must be 1 and 0 with generation.engine "vllm", whose logprobs are of what they leave over',
        )
    if own_server and s.generation.engine_url:
        yield (
            "generation.server_command generation.engine_url",
            "and generation.server_args are for a server of the workers' own; leave them out, or generation.engine_url",
        )
    if 0 < s.generation.max_context <= s.sampling.max_new_tokens:
        yield (
            "generation.max_context sampling.max_new_tokens",
            "must be 0 or above sampling.max_new_tokens, or no prompt fits",
        )
    yield from _broken_of_memory(s)
    if 0 < s.generation.max_workers < s.generation.min_workers:
        yield "generation.min_workers generation.max_workers", "must be at most generation.max_workers"
    elif s.generation.min_workers > s.generation.num_workers:
        yield (
            "generation.min_workers generation.workers",
            "must be at most generation.workers, with which the run starts",
        )
    if 0 < s.generation.max_workers < s.generation.num_workers:
        yield (
            "generation.max_workers generation.workers",
            "must be 0 or at least generation.workers, with which the run starts",
        )
    if s.generation.engine_url and s.generation.max_workers > 1:
        yield (
            "generation.max_workers generation.engine_url",
            "must be 0 or 1 with generation.engine_url: a server takes new weights from one worker",
        )
    if s.decode_cost.engine not in ("", s.generation.engine):
        yield (
            "decode_cost.engine generation.engine",
            "must be generation.engine: profile the engine that runs, or leave [decode_cost] out",
        )
    if s.decode_cost.model not in ("", s.model.path):
        yield (
            "decode_cost.model model.path",
            "must be model.path: profile the model that runs, or leave [decode_cost] out",
        )
    if s.ranker.model and s.ranker.kind != "text":
        yield "ranker.model ranker.kind", 'needs ranker.kind "text"'
    for key in ("base_lengths", "scores"):
        if getattr(s.ranker, key) and s.ranker.kind in ("none", "oracle"):
            yield f"ranker.{key} ranker.kind", 'needs ranker.kind "text" or "history"'
    if s.ranker.base_lengths and s.ranker.scores:
        yield "ranker.scores ranker.base_lengths", "must be empty beside measured lengths: one of the two"
    if s.ranker.kind == "oracle" and not s.generation.lengths:
        yield "ranker.kind generation.lengths", 'must not be "oracle" without forced lengths: it knows no others'
    if s.ranker.kind == "oracle" and s.pipeline.drop_no_signal:
        yield (
            "ranker.kind pipeline.drop_no_signal",
            'must not be "oracle" where groups are replaced: it knows lengths by the order of prompts',
        )
    if s.ranker.kind == "oracle" and s.pipeline.oversampled_tail == "defer":
        yield (
            "ranker.kind pipeline.oversampled_tail",
            'must not be "oracle" where batches take in different numbers of prompts: it knows lengths by their order',
        )


def _broken_of_memory(s: Settings) -> Iterator[tuple[str, str]]:
    """Whose memory is limited, and what it has to hold."""
    generation = s.generation
    if not generation.kv_tokens:
        return
    if generation.engine in SERVER_ENGINES:
        yield (
            "generation.kv_tokens generation.engine",
            f'must be 0 with generation.engine "{generation.engine}": its server is told by generation.server_args',
        )
    if generation.kv_tokens < generation.max_context:
        yield (
            "generation.kv_tokens generation.max_context",
            "must be 0 or at least generation.max_context, or one sample alone may not fit",
        )
    if generation.kv_tokens <= s.sampling.max_new_tokens:
        yield (
            "generation.kv_tokens sampling.max_new_tokens",
            "must be 0 or above sampling.max_new_tokens, or one sample alone may not fit",
        )


FP8_OPTIONS = {"kv_dtype": "--kv-cache-dtype", "weights_dtype": "--quantization"}
"""Of SGLang and vLLM."""


def broken_of_fp8(s: Settings) -> Iterator[tuple[str, str]]:
    """Who can hold in fp8 what is asked for, and go back."""
    generation = s.generation
    for key, option in FP8_OPTIONS.items():
        if getattr(generation, key) != "fp8":
            continue
        if generation.engine == "embedded":
            yield f"generation.{key} generation.engine", f'must be "auto": fp8 needs generation.engine {A_SERVER}'
        if generation.engine_url:
            yield (
                f"generation.{key} generation.engine_url",
                'must be "auto" with generation.engine_url: what that server holds in fp8 is said where it is started',
            )
        if [one for one in generation.server_args if one.partition("=")[0] == option]:
            yield (
                f"generation.{key} generation.server_args",
                f'must be "auto" with {option} in generation.server_args, which no mismatch takes back: leave that out',
            )
    if generation.weights_dtype == "fp8" and generation.dtype != "bfloat16":
        yield "generation.weights_dtype generation.dtype", 'needs generation.dtype "bfloat16", of which fp8 is rounded'
    if s.emulated.fp8_mismatch and not (generation.fp8 and generation.engine == "emulated"):
        yield "emulated.fp8_mismatch generation.kv_dtype", "is read with an emulated engine and fp8 in it alone"


def _broken_of_data(s: Settings) -> Iterator[tuple[str, str]]:
    """Problems, held-out ones, and how answers are scored."""
    makes_problems = s.data.source == "reasoning_gym"
    if not makes_problems and not s.data.path and not s.data.mix:
        yield "data.path data.source", "must name the data that data.source reads"
    if not makes_problems and s.data.task not in ("", Settings().data.task):
        yield "data.task data.source", 'is read by data.source "reasoning_gym" alone: set that, too'
    if makes_problems and s.data.path:
        yield "data.path data.source", 'is not read by data.source "reasoning_gym"; set data.source to "jsonl" or "hf"'
    if s.data.source != "hf" and (s.data.config or s.data.revision):
        yield "data.config data.revision data.source", 'and data.revision need data.source "hf"'
    if s.data.source != "hf" and s.eval.config:
        yield "eval.config data.source", 'needs data.source "hf"'
    if s.eval.config and not s.eval.path:
        yield "eval.config eval.path", "needs eval.path, the data set that has it"
    if s.scoring.executes_answers and not s.scoring.reward:
        yield (
            "scoring.executes_answers scoring.reward",
            "is about a reward of yours: name it (scoring.reward); the own verifiers execute nothing",
        )
    if s.data.rewards and all(one.min_reward is one.max_reward is None for one in s.data.mix.values()):
        yield "data.rewards data.mix", "is read for parts with min_reward or max_reward alone: name some in data.mix"
    if s.scoring.reward == CODE_REWARD and s.data.source == "reasoning_gym" and not s.data.mix:
        yield "scoring.reward data.source", 'needs rows with tests: data.source "jsonl" or "hf", docs/code-rewards.md'
    if s.scoring.reward == CODE_REWARD and s.scoring.jail != "auto":
        yield "scoring.jail scoring.reward", 'must be "auto" with scoring.reward "code", which runs in a jail alone'
    if s.scoring.reward == CODE_REWARD and s.scoring.reward_path:
        yield "scoring.reward_path scoring.reward", 'is for a reward of yours: leave it out with scoring.reward "code"'
    if s.scoring.reward_model and s.scoring.reward:
        yield (
            "scoring.reward_model scoring.reward",
            "is the reward, and so is scoring.reward: leave one of them out (a reward of yours may ask a model, too)",
        )
    if unknown := [task for task in s.scoring.pools if task not in s.scoring_tasks]:
        yield (
            "scoring.pools algorithm.kl_coef",
            f"has {unknown[0]}, and without algorithm.kl_coef this run has no such task: take the pool out",
        )
    if s.environment.executes_answers and not s.own_environments:
        yield (
            "environment.executes_answers environment.name",
            "is about an environment of yours: name it (environment.name); the calculator executes nothing",
        )
    if s.environment.executes_answers and s.environment.jail != "auto":
        yield "environment.jail environment.executes_answers", 'must be "auto" with environment.executes_answers'
    if s.scoring.executes_answers and s.scoring.jail != "auto":
        yield "scoring.jail scoring.executes_answers", 'must be "auto" with scoring.executes_answers'
    if makes_problems and s.eval.path:
        yield (
            "eval.path data.source",
            'is not read by data.source "reasoning_gym", which makes its own held-out problems',
        )
    if s.eval.every and s.trainer.engine == "none":
        yield (
            "eval.every trainer.engine",
            'must be 0 with trainer.engine "none": nothing is trained that could be evaluated',
        )
    if s.eval.every and any(one.problems <= 0 for one in eval_sets(s).values()):
        yield "eval.every eval.problems", "needs eval.problems above 0"
    if s.eval.seed == s.run.seed:
        yield "eval.seed run.seed", "must differ from run.seed, or the held-out problems are the ones trained on"


NOT_BESIDE_BATCH_STD = (
    'must be 0 with algorithm.advantage "batch_std", which divides the whole gradient by the deviation'
)


def _broken_by_algorithm(s: Settings, algorithm: AlgorithmSettings) -> Iterator[tuple[str, str]]:
    """Rules of what rows are trained with: those of the run, or of a part that has its own."""
    if algorithm.old_logprobs == "rollout" and 0 < algorithm.importance_cap <= 1 + algorithm.clip_high:
        yield (
            "algorithm.importance_cap algorithm.clip_high algorithm.old_logprobs",
            'must be 0 (off) or above 1 + algorithm.clip_high with algorithm.old_logprobs "rollout", or it caps what '
            "the clip is there to stop",
        )
    if algorithm.advantage == "batch_std" and algorithm.kl_coef:
        yield "algorithm.kl_coef algorithm.advantage", NOT_BESIDE_BATCH_STD
    if algorithm.advantage == "batch_std" and algorithm.ce_coef:
        yield "algorithm.ce_coef algorithm.advantage", NOT_BESIDE_BATCH_STD
    if not (algorithm.rl_coef or algorithm.ce_coef or algorithm.kl_coef):
        yield (
            "algorithm.rl_coef algorithm.ce_coef algorithm.kl_coef",
            "must be above 0 where algorithm.ce_coef and algorithm.kl_coef are 0, or nothing is trained",
        )
    if s.pipeline.drop_no_signal and not algorithm.rl_coef:
        yield (
            "pipeline.drop_no_signal algorithm.rl_coef",
            "must be false with algorithm.rl_coef 0, which trains groups whose rewards agree, too",
        )
    if s.pipeline.group_size < 2 and algorithm.rl_coef and algorithm.advantage != "gae" and s.trainer.engine != "none":
        yield (
            "pipeline.group_size algorithm.rl_coef algorithm.advantage",
            f'must be 2 or more with algorithm.advantage "{algorithm.advantage}", which compares siblings',
        )
    if algorithm.ce_above != s.algorithm.ce_above and not algorithm.ce_coef:
        yield "algorithm.ce_above algorithm.ce_coef", "needs algorithm.ce_coef above 0: nothing of it is imitated"
    if ":" in algorithm.loss and s.trainer.engine != "torch":
        yield "algorithm.loss trainer.engine", 'needs trainer.engine "torch", which alone computes with it'


def _told_of_part(s: Settings, name: str, keys: Sequence[str], problem: str) -> tuple[str, str]:
    """A rule that a part breaks, with the value that it has there. keys: as of the run."""
    section, _, key = keys[0].partition(".")
    value = getattr(s.algorithms[name] if section == "algorithm" else getattr(s, section), key)
    others = [one for one in keys if not one.startswith("algorithm.")]
    return " ".join(["data.mix", *others]), f"has {name}, where {keys[0]} = {to_toml(value)} {problem}"


def _broken_by_streams(s: Settings) -> Iterator[tuple[str, str]]:
    """Rules of what the loss of the whole run is a sum of."""
    algorithm = s.algorithm
    if algorithm.ce_above != Settings().algorithm.ce_above and not any(one.ce_coef for one in s.algorithms.values()):
        yield "algorithm.ce_above algorithm.ce_coef", "needs algorithm.ce_coef above 0: nothing is imitated"
    parts = s.algorithms.values()
    taught = algorithm.teacher or algorithm.teacher_url
    if s.has_reference and not taught and not any(one.rl_coef or one.ce_coef for one in parts):
        yield (
            "algorithm.teacher algorithm.rl_coef algorithm.ce_coef",
            "must name a model, or algorithm.teacher_url a server of one, where nothing else is learnt: the policy "
            "begins as the base model, and has nothing to learn from it",
        )
    if algorithm.teacher and not s.has_reference:
        yield "algorithm.teacher algorithm.kl_coef", "needs algorithm.kl_coef above 0, its factor in the loss"
    if algorithm.teacher_url and not s.has_reference:
        yield "algorithm.teacher_url algorithm.kl_coef", "needs algorithm.kl_coef above 0, its factor in the loss"
    if algorithm.teacher_url and algorithm.teacher:
        yield (
            "algorithm.teacher algorithm.teacher_url",
            "must be empty with algorithm.teacher_url, whose server has loaded its own model",
        )
    if algorithm.teacher_url and s.sampling.temperature != 1:
        yield (
            "sampling.temperature algorithm.teacher_url",
            "must be 1 with algorithm.teacher_url: servers give logprobs of a prompt at temperature 1 alone, and the "
            "trainer's are at this one",
        )
    if algorithm.kl_estimator != "k3" and not s.has_reference:
        yield "algorithm.kl_estimator algorithm.kl_coef", "needs algorithm.kl_coef above 0, its factor in the loss"
    if s.data.response_column and s.data.source == "reasoning_gym":
        yield "data.response_column data.source", 'needs data.source "jsonl" or "hf", whose rows have columns'
    if s.data.response_column and s.algorithm.age_decay < 1:
        yield "algorithm.age_decay data.response_column", "must be 1 with data.response_column: no weights sampled it"
    if s.data.response_column and any(one.rl_coef for one in s.algorithms.values()):
        yield (
            "data.response_column algorithm.rl_coef",
            'needs algorithm.rl_coef 0: what is given was not sampled by the policy; algorithm.name = "sft" sets it',
        )
    if s.data.response_column and algorithm.kl_estimator != "k3":
        yield (
            "data.response_column algorithm.kl_estimator",
            'needs algorithm.kl_estimator "k3": the other holds of what the policy samples',
        )
    if s.data.response_column and s.pipeline.group_size != 1:
        yield (
            "data.response_column pipeline.group_size",
            'needs pipeline.group_size 1: a row gives one response; algorithm.name = "sft" sets it',
        )
    if s.data.response_column and (s.generation.lengths or s.trainer.engine == "none"):
        yield (
            "data.response_column generation.lengths trainer.engine",
            "needs a trainer, and no forced lengths: given responses have their own",
        )
    if algorithm.name == "sft" and not s.data.response_column:
        yield "algorithm.name data.response_column", "needs data.response_column, which names what is to be imitated"
    if algorithm.functions_path and not (s.own_functions("advantage") or s.own_functions("loss")):
        yield (
            "algorithm.functions_path algorithm.advantage algorithm.loss",
            "needs a module:function as algorithm.advantage or algorithm.loss",
        )


def _broken_by_layout(s: Settings) -> Iterator[tuple[str, str]]:
    """Rules of how the ranks of the trainer share the work. What a model allows is checked when the trainer starts."""
    parallel, ranks = s.trainer.parallel, s.trainer.num_ranks
    axes, numbers = (parallel.data, parallel.tensor, parallel.pipeline), parallel.num_named
    if ranks % numbers or (ranks != numbers and "auto" not in axes):
        multiple = "a multiple of " if "auto" in axes else ""
        yield (
            "trainer.ranks trainer.parallel.data trainer.parallel.tensor trainer.parallel.pipeline",
            f"must be {multiple}{numbers}, which is data x tensor x pipeline: every rank has one place in it",
        )
    parts = s.trainer.num_parts
    if parts * s.trainer.mini_batches > s.pipeline.groups_per_batch:
        most = s.pipeline.groups_per_batch // s.trainer.mini_batches
        yield (
            "trainer.ranks trainer.parallel.data pipeline.groups_per_batch trainer.mini_batches",
            f"divides a round into {parts} parts, and there may be at most groups_per_batch / mini_batches = {most}, "
            "or some ranks never get a group; more ranks need trainer.parallel.tensor or pipeline",
        )
    if ranks > 1 and ":" in s.trainer.device:
        yield (
            "trainer.device trainer.ranks",
            f'must be "cuda" or "auto" with {ranks} ranks, each of which has a GPU of its own; trainer.gpus names them',
        )
    if parallel.pipeline not in (1, "auto") and s.algorithm.old_logprobs == "recomputed":
        yield (
            "algorithm.old_logprobs trainer.parallel.pipeline",
            'must be "rollout": "recomputed" is not supported with pipeline stages',
        )
    if parallel.buckets and parallel.pipeline == 1:
        yield "trainer.parallel.buckets trainer.parallel.pipeline", "needs trainer.parallel.pipeline above 1"
    if parallel.buckets and max(parallel.buckets) <= s.sampling.max_new_tokens:
        yield (
            "trainer.parallel.buckets sampling.max_new_tokens",
            "must reach beyond sampling.max_new_tokens, or one response fits into none of them",
        )


def _broken_by_adapters(s: Settings) -> Iterator[tuple[str, str]]:
    """Rules of training low-rank adapters."""
    lora = s.trainer.lora
    if lora.rank and s.trainer.engine != "torch":
        yield "trainer.lora.rank trainer.engine", 'needs trainer.engine "torch", which alone trains adapters'
    if lora.rank and not lora.targets:
        yield (
            "trainer.lora.targets trainer.lora.rank",
            'must name layers that get adapters, as "q_proj", or be ["all-linear"]',
        )
    if lora.publish == "adapters" and not lora.rank:
        yield "trainer.lora.publish trainer.lora.rank", "needs trainer.lora.rank above 0: there are no adapters"


def _broken_in_part(s: Settings, part: DataPart, whole: DataSettings) -> Iterator[tuple[str, str]]:
    """Rules of one of the parts that a run trains on. whole: with what it leaves out."""
    made = whole.source == "reasoning_gym"
    if not made and not whole.path:
        yield "data.mix data.path", "has no path, and data.path names none: set one of them"
    if made and part.path:
        yield "data.mix data.source", 'has a path, which source "reasoning_gym" does not read: set source, too'
    if not made and (part.task or part.params):
        yield "data.mix data.source", 'has a task or params, which are read by source "reasoning_gym" alone: set source'
    if whole.source != "hf" and (part.config or part.split or part.revision):
        yield "data.mix data.source", 'has a config, split or revision, which need source "hf"'
    if s.scoring.reward == CODE_REWARD and made:
        yield "data.mix scoring.reward", 'has no tests, which scoring.reward "code" needs: docs/code-rewards.md'
    if part.environment_params and part.environment in ("", "none"):
        yield "data.mix environment.name", "has environment_params, and names no environment of its own that takes them"
    if part.advantage and s.algorithm.advantage in ("gae", "batch_std"):
        yield (
            "data.mix algorithm.advantage",
            f'has an advantage of its own, which algorithm.advantage "{s.algorithm.advantage}" leaves no room for: it '
            "is of a critic, or of the whole batch",
        )
    bounds = [bound for bound in (part.min_reward, part.max_reward) if bound is not None]
    if bounds and not s.data.rewards:
        yield "data.mix data.rewards", "has min_reward or max_reward, which need data.rewards, a file of `collect`"
    if len(bounds) == 2 and bounds[0] >= bounds[1]:
        yield "data.mix", "has a min_reward that is not below its max_reward: no prompt is between them"


def _broken_in_set(s: Settings, one: EvalSet) -> Iterator[tuple[str, str]]:
    """Rules of one of the sets of held-out problems."""
    if one.samples > 1 and one.temperature == 0:
        yield (
            "eval.sets sampling.temperature",
            "needs a temperature above 0 with several samples, which are all the same otherwise: left out, it is "
            "that of training",
        )
    if s.data.source == "reasoning_gym" and one.path:
        yield (
            "eval.sets data.source",
            'has a path, which data.source "reasoning_gym" does not read: leave it out, or set params',
        )
    if s.data.source != "reasoning_gym" and one.params:
        yield "eval.sets data.source", 'has params, which need data.source "reasoning_gym": set path'
    if s.data.source != "hf" and (one.config or one.split):
        yield "eval.sets data.source", 'has a config or split, which need data.source "hf"'
    if one.config and not (one.path or s.eval.path):
        yield "eval.sets eval.path", "has a config, which needs a path, the data set that has it"
