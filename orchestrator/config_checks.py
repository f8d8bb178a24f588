"""What a configuration must satisfy beyond its types: ranges, forms, and combinations that can work.

Owns: the rules, each with its reason. Never: reads files. Invariant: settings that pass can be started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transport.secret import HOW_TO_MAKE, MIN_CHARACTERS
from transport.settings import SERVER_ENGINES, Settings
from transport.tensors.endpoint import parse_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that does not hold. keys: the settings it is about, the first of them first in the message."""

    keys: tuple[str, ...]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """``low <= value <= high``; ``above`` excludes low, ``below`` excludes high. Not-a-number is never inside."""

    low: float
    high: float = float("inf")
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        low_holds = value > self.low if self.above else value >= self.low
        return low_holds and (value < self.high if self.below or self.high == float("inf") else value <= self.high)

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"> {self.low:g}" if self.above else f">= {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"


_AT_LEAST_0, _AT_LEAST_1, _AT_LEAST_2 = Range(low=0), Range(low=1), Range(low=2)
_ABOVE_0 = Range(low=0, above=True)

RANGES: dict[str, Range] = {
    "run.seed": Range(low=0, high=2**31 - 1),  # numpy and torch both take it
    "run.batches": _AT_LEAST_1,
    "data.size": _AT_LEAST_0,
    "data.passes": _AT_LEAST_0,
    "sampling.max_new_tokens": _AT_LEAST_1,
    "sampling.temperature": _ABOVE_0,  # 0 makes the samples of a group equal, and equal rewards carry no gradient
    "sampling.top_p": Range(low=0, high=1, above=True),
    "sampling.top_k": _AT_LEAST_0,
    "generation.workers": _AT_LEAST_1,
    "generation.min_workers": _AT_LEAST_0,
    "generation.max_workers": _AT_LEAST_0,
    "generation.min_gain": Range(low=0.01, high=1, above=True),  # at 0.01 and below, workers come and go in turn
    "generation.slots": _AT_LEAST_1,
    "generation.threads": _AT_LEAST_1,
    "generation.max_context": _AT_LEAST_0,
    "generation.server_silence_s": Range(low=2),  # a health check takes one
    "scoring.workers": _AT_LEAST_1,
    "scoring.timeout_s": _ABOVE_0,
    "scoring.max_deliveries": _AT_LEAST_1,
    "scoring.lease_s": _ABOVE_0,
    "scoring.max_failed_share": Range(low=0, high=1, above=True),
    "scoring.well_formed_reward": Range(low=0, high=1),
    "algorithm.clip_low": Range(low=0, high=1, above=True),
    "algorithm.clip_high": _ABOVE_0,
    "algorithm.kl_coef": _AT_LEAST_0,
    "algorithm.importance_cap": _AT_LEAST_0,
    "algorithm.mismatch_limit": _AT_LEAST_0,
    "trainer.lr": _ABOVE_0,
    "trainer.warmup_batches": _AT_LEAST_0,
    "trainer.weight_decay": _AT_LEAST_0,
    "trainer.grad_clip": _AT_LEAST_0,
    "trainer.mini_batches": _AT_LEAST_1,
    "trainer.epochs": _AT_LEAST_1,
    "trainer.micro_batch_tokens": _AT_LEAST_1,
    "trainer.threads": _AT_LEAST_1,
    "trainer.ranks": _AT_LEAST_1,
    "trainer.checkpoint_every": _AT_LEAST_1,
    "trainer.keep_checkpoints": _AT_LEAST_1,
    "pipeline.groups_per_batch": _AT_LEAST_1,
    "pipeline.group_size": _AT_LEAST_2,  # an advantage is relative to the other samples of the group
    "pipeline.max_staleness": Range(low=0, high=16),  # AReaL v0.3, table 3: beyond 8 the trained policy is worse
    "pipeline.mini_batch_groups": _AT_LEAST_1,
    "pipeline.rollout_batches": _AT_LEAST_1,
    "pipeline.oversampled_groups": _AT_LEAST_0,
    "pipeline.max_refills": _AT_LEAST_0,
    "pipeline.max_attempts": _AT_LEAST_1,
    "pipeline.rollout_timeout_s": _ABOVE_0,
    "pipeline.plan_wait_s": _AT_LEAST_0,
    "ranker.refit_s": _ABOVE_0,
    "decode_cost.fixed_s": _ABOVE_0,
    "decode_cost.weights_s": _AT_LEAST_0,
    "decode_cost.gemm_sample_s": _AT_LEAST_0,
    "decode_cost.sample_s": _AT_LEAST_0,
    "decode_cost.kv_token_s": _AT_LEAST_0,
    "decode_cost.prefill_token_s": _AT_LEAST_0,
    "decode_cost.kv_capacity_tokens": _AT_LEAST_0,
    "decode_cost.train_token_s": _AT_LEAST_0,
    "emulated.time_scale": _ABOVE_0,
    "emulated.step_s": _ABOVE_0,
    "emulated.sample_step_s": _AT_LEAST_0,
    "emulated.prefill_token_s": _AT_LEAST_0,
    "emulated.round_s": _AT_LEAST_0,
    "emulated.train_token_s": _AT_LEAST_0,
    "emulated.optimizer_s": _AT_LEAST_0,
    "emulated.transfer_s": _AT_LEAST_0,
    "emulated.load_s": _AT_LEAST_0,
    "broker.max_retained_bytes": Range(low=1_000_000),  # less does not hold one batch
    "broker.outage_s": _ABOVE_0,
    "liveness.heartbeat_s": _ABOVE_0,
    "liveness.lease_s": _ABOVE_0,
    "liveness.startup_s": _ABOVE_0,
    "liveness.warn_s": _ABOVE_0,
    "liveness.stall_s": _ABOVE_0,
    "liveness.max_restarts": _AT_LEAST_0,
    "service.window": _AT_LEAST_1,
    "service.max_requests": Range(low=1, high=128),  # each may have a reader, of server.MAX_CONNECTIONS
    "service.max_prompts": _AT_LEAST_1,
    "service.keep_s": _ABOVE_0,
    "api.port": Range(low=0, high=65535),
    "eval.every": _AT_LEAST_0,
    "eval.temperature": _AT_LEAST_0,
    "eval.budget": Range(low=0, high=1, above=True),
    "eval.hold_s": _AT_LEAST_0,
    "eval.timeout_s": _ABOVE_0,
    "eval.problems": _AT_LEAST_0,
    "eval.seed": _AT_LEAST_0,
}

FORMS: dict[str, tuple[str, str]] = {
    # a name becomes a directory and part of every key
    "run.name": (
        r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
        "1 to 64 letters, digits, - _ . beginning with a letter or digit",
    ),
    "run.dir": (r".+", "a directory"),
    "model.path": (r".+", "a directory, a hub name, package:<name> or random:<name>"),
    "generation.device": (r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:<n>"),
    "generation.engine_url": (r"|https?://[^\s/]+/?", "http://host:port"),
    "trainer.device": (r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:<n>"),
    "scoring.reward": (r"|[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:function"),
    "api.host": (r"\S+", "an address or a host name"),
    "api.secret": (rf"|.{{{MIN_CHARACTERS},}}", f"{MIN_CHARACTERS} characters or more; make one with {HOW_TO_MAKE}"),
    "tensors.host": (r"\S+", "an address or a host name"),
    "tensors.advertise": (r"[^\s/]*", "an address or a host name, without a port"),
    "broker.url": (r"|(rediss?|unix)://.+", "redis://host:port, rediss://host:port or unix://path"),
}


UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}
"""A unit is the end of a setting's name."""


def unit_of(key: str) -> str:
    """`` (seconds)`` for a setting in seconds, "" for one without a unit."""
    return next((f" ({unit})" for suffix, unit in UNITS.items() if key.endswith(suffix)), "")


def value_of(settings: Settings, key: str) -> Any:
    """The value of the dotted ``key``."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def violations(settings: Settings) -> Iterator[Violation]:
    """Every rule that ``settings`` break: those about one setting first."""
    for key, allowed in RANGES.items():
        if value_of(settings, key) not in allowed:
            yield Violation(keys=(key,), problem=f"must be {allowed}{unit_of(key)}")
    for key, (form, words) in FORMS.items():
        if not re.fullmatch(form, value_of(settings, key)):
            yield Violation(keys=(key,), problem=f"must be {words}")
    try:
        parse_ports(settings.tensors.ports)
    except ValueError:
        yield Violation(keys=("tensors.ports",), problem='must be a port or a range of ports, like "7400-7409"')
    if not all(0 <= beta < 1 for beta in settings.trainer.betas):
        yield Violation(keys=("trainer.betas",), problem="must both be in [0, 1)")
    for keys, holds, problem in COMBINATIONS:
        if not holds(settings):
            yield Violation(keys=keys, problem=problem)


COMBINATIONS: list[tuple[tuple[str, ...], Callable[[Settings], bool], str]] = [
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
        'must be 1 with trainer.engine "emulated", which is as fast as it is told',
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
