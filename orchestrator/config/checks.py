"""What a configuration must satisfy beyond the types and ranges of its fields: combinations that can work.

Each rule has its reason. Invariant: settings that pass can be started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transport.contracts.settings import SERVER_ENGINES, Settings
from transport.process.secret import HOW_TO_MAKE, MIN_CHARACTERS
from transport.tensors.address import parse_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that does not hold. keys: the settings it is about, the first of them first in the message."""

    keys: tuple[str, ...]
    problem: str


def violations(settings: Settings) -> Iterator[Violation]:
    """Every rule that ``settings`` break."""
    for keys, holds, problem in COMBINATIONS:
        if not holds(settings):
            yield Violation(keys=keys, problem=problem)


def _are_ports(text: str) -> bool:
    try:
        parse_ports(text)
    except ValueError:
        return False
    return True


COMBINATIONS: list[tuple[tuple[str, ...], Callable[[Settings], bool], str]] = [
    (
        ("tensors.ports",),
        lambda s: _are_ports(s.tensors.ports),
        'must be a port or a range of ports, like "7400-7409"',
    ),
    (
        ("api.secret",),
        lambda s: not s.api.secret or len(s.api.secret) >= MIN_CHARACTERS,
        f"must be {MIN_CHARACTERS} characters or more; make one with {HOW_TO_MAKE}",
    ),
    (
        ("pipeline.groups_per_batch", "trainer.mini_batches"),
        lambda s: s.pipeline.groups_per_batch % s.trainer.mini_batches == 0,
        "must be divisible by trainer.mini_batches, so that every optimizer step sees as many groups",
    ),
    (
        ("trainer.ranks", "pipeline.groups_per_batch", "trainer.mini_batches"),
        lambda s: s.trainer.ranks * s.trainer.mini_batches <= s.pipeline.groups_per_batch,
        "must be at most groups_per_batch / mini_batches, or some ranks never get a group",
    ),
    (
        ("pipeline.rollout_batches", "pipeline.max_staleness"),
        lambda s: s.pipeline.rollout_batches <= s.pipeline.max_staleness + 1,
        "must be at most max_staleness + 1, or the last of them is too old when it is trained",
    ),
    (
        ("algorithm.importance_cap", "algorithm.clip_high", "algorithm.old_logprobs"),
        lambda s: (
            s.algorithm.old_logprobs != "rollout"
            or s.algorithm.importance_cap == 0
            or s.algorithm.importance_cap > 1 + s.algorithm.clip_high
        ),
        'must be 0 (off) or above 1 + algorithm.clip_high with algorithm.old_logprobs "rollout", or it caps what the '
        "clip is there to stop",
    ),
    (
        ("trainer.micro_batch_tokens", "sampling.max_new_tokens"),
        lambda s: s.trainer.micro_batch_tokens >= s.sampling.max_new_tokens,
        "must be at least sampling.max_new_tokens, or one response does not fit into a micro-batch",
    ),
    (
        ("trainer.ranks", "trainer.engine"),
        lambda s: s.trainer.engine != "emulated" or s.trainer.ranks == 1,
        'must be 1 with trainer.engine "emulated", whose speed is a setting',
    ),
    (
        ("generation.engine", "trainer.engine"),
        lambda s: s.generation.engine == "emulated" or s.trainer.engine != "emulated",
        'must be "emulated" with trainer.engine "emulated", which has no weights to serve',
    ),
    (
        ("generation.engine_url", "generation.engine"),
        lambda s: not s.generation.engine_url or s.generation.engine in SERVER_ENGINES,
        'needs generation.engine "sglang" or "vllm"',
    ),
    (
        ("generation.workers", "generation.engine_url"),
        lambda s: not s.generation.engine_url or s.generation.workers == 1,
        "must be 1 with generation.engine_url: a server takes new weights from one worker",
    ),
    (
        ("generation.server_command", "generation.engine"),
        lambda s: (
            s.generation.engine in SERVER_ENGINES or not (s.generation.server_command or s.generation.server_args)
        ),
        'and generation.server_args need generation.engine "sglang" or "vllm"',
    ),
    (
        ("sampling.top_p", "sampling.top_k"),
        lambda s: s.generation.engine != "vllm" or (s.sampling.top_p == 1 and s.sampling.top_k == 0),
        'must be 1 and 0 with generation.engine "vllm", whose logprobs are of what they leave over',
    ),
    (
        ("generation.server_command", "generation.engine_url"),
        lambda s: not s.generation.engine_url or not (s.generation.server_command or s.generation.server_args),
        "and generation.server_args are for a server of the workers' own; leave them out, or generation.engine_url",
    ),
    (
        ("generation.max_context", "sampling.max_new_tokens"),
        lambda s: s.generation.max_context == 0 or s.generation.max_context > s.sampling.max_new_tokens,
        "must be 0 or above sampling.max_new_tokens, or no prompt fits",
    ),
    (
        ("data.path", "data.source"),
        lambda s: s.data.source == "reasoning_gym" or bool(s.data.path),
        "must name the data that data.source reads",
    ),
    (
        ("data.path", "data.source"),
        lambda s: s.data.source != "reasoning_gym" or not s.data.path,
        'is not read by data.source "reasoning_gym"; set data.source to "jsonl" or "hf"',
    ),
    (
        ("scoring.executes_answers", "scoring.reward"),
        lambda s: not s.scoring.executes_answers or bool(s.scoring.reward),
        "is about a reward of yours: name it (scoring.reward); the own verifiers execute nothing",
    ),
    (
        ("scoring.jail", "scoring.executes_answers"),
        lambda s: s.scoring.jail == "auto" or not s.scoring.executes_answers,
        'must be "auto" with scoring.executes_answers',
    ),
    (
        ("eval.path", "data.source"),
        lambda s: s.data.source != "reasoning_gym" or not s.eval.path,
        'is not read by data.source "reasoning_gym", which makes its own held-out problems',
    ),
    (
        ("generation.min_workers", "generation.workers"),
        lambda s: s.generation.min_workers <= s.generation.workers,
        "must be at most generation.workers, with which the run starts",
    ),
    (
        ("generation.max_workers", "generation.workers"),
        lambda s: not s.generation.max_workers or s.generation.max_workers >= s.generation.workers,
        "must be 0 or at least generation.workers, with which the run starts",
    ),
    (
        ("generation.max_workers", "generation.engine_url"),
        lambda s: not s.generation.engine_url or s.generation.max_workers <= 1,
        "must be 0 or 1 with generation.engine_url: a server takes new weights from one worker",
    ),
    (
        ("decode_cost.engine", "generation.engine"),
        lambda s: s.decode_cost.engine in ("", s.generation.engine),
        "must be generation.engine: profile the engine that runs, or leave [decode_cost] out",
    ),
    (
        ("decode_cost.model", "model.path"),
        lambda s: s.decode_cost.model in ("", s.model.path),
        "must be model.path: profile the model that runs, or leave [decode_cost] out",
    ),
    (
        ("ranker.model", "ranker.kind"),
        lambda s: not s.ranker.model or s.ranker.kind == "text",
        'needs ranker.kind "text"',
    ),
    (
        ("ranker.base_lengths", "ranker.kind"),
        lambda s: not s.ranker.base_lengths or s.ranker.kind != "none",
        'needs ranker.kind "text" or "history"',
    ),
    (
        ("eval.every", "trainer.engine"),
        lambda s: not s.eval.every or s.trainer.engine != "none",
        'must be 0 with trainer.engine "none": nothing is trained that could be evaluated',
    ),
    (
        ("eval.every", "eval.problems"),
        lambda s: not s.eval.every or s.eval.problems > 0,
        "needs eval.problems above 0",
    ),
    (
        ("eval.seed", "run.seed"),
        lambda s: s.eval.seed != s.run.seed,
        "must differ from run.seed, or the held-out problems are the ones trained on",
    ),
    (
        ("broker.tls_ca", "broker.url"),
        lambda s: not s.broker.tls_ca or s.broker.url.startswith("rediss://"),
        "needs a broker.url that starts with rediss://",
    ),
    (
        ("liveness.lease_s", "liveness.heartbeat_s"),
        lambda s: s.liveness.lease_s >= 2 * s.liveness.heartbeat_s,
        "must be at least twice liveness.heartbeat_s, or one late heartbeat loses a healthy worker",
    ),
    (
        ("liveness.warn_s", "liveness.stall_s"),
        lambda s: s.liveness.warn_s < s.liveness.stall_s,
        "must be below liveness.stall_s, or the run stops before it has said what blocks it",
    ),
    (
        ("liveness.stall_s", "liveness.lease_s", "pipeline.rollout_timeout_s"),
        lambda s: s.liveness.stall_s > max(s.liveness.lease_s, s.pipeline.rollout_timeout_s),
        "must be above liveness.lease_s and pipeline.rollout_timeout_s, or the run gives up before it has retried",
    ),
]
"""(settings it is about, whether it holds, what is wrong with the first of them otherwise)"""
