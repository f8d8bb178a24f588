"""``streamrl-orchestrator profile``: measure this machine's engine and trainer, fit the cost model, write both files.

    <out>.json   everything that was fitted, for `simulate`, `plan` and benchmarks (profiles.read_profile)
    <out>.toml   sections [decode_cost] and [trainer], for runs: `run --config <out>.toml`

A child measures (torch stays out of this process), ``planning/profiles.py`` fits.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import msgspec

from orchestrator.config.rules import broken_of_fp8
from orchestrator.config.schema import to_toml
from orchestrator.errors import ChildFailedError, ConfigError, check_out, writing_out
from orchestrator.planning.profiles import Errors, Profile, Variant, fit, with_variant
from transport.contracts.continuous_batching import Measurements
from transport.contracts.llms import BF16, Fp8
from transport.contracts.settings import Settings
from transport.process.files import replace
from transport.process.programs import python_module

MEASURE_LIMIT_S = 1800.0
"""The worker has its own limits; this one is for a machine that hangs."""
QUIET_SHARE = 0.1
"""Of the machine that other programs may take; beyond it a measurement is theirs, too."""
STAT = Path("/proc/stat")


def main(settings: Settings, out: Path, fp8: Fp8 = BF16) -> int:
    """Measure, fit, write, say. Returns 0. fp8: measure the engine once more with this in it, where there is something.

    Raises ChildFailedError, ConfigError.
    """
    check_out(out)
    cheaper = in_fp8(settings, fp8) if fp8 else None
    load = MachineLoad()
    profile = msgspec.structs.replace(fit(measure(settings)), fp8=settings.generation.fp8)
    if cheaper is not None:
        print(f"the engine once more, with {fp8.options}")
        profile = with_variant(profile, fp8, measure(cheaper))
    json_path, toml_path = out.with_suffix(".json"), out.with_suffix(".toml")
    with writing_out(out):
        replace(json_path, msgspec.json.format(msgspec.json.encode(profile)))
        replace(toml_path, section(profile))
    print(report(profile))
    if (share := load.share()) > QUIET_SHARE:
        print(f"other programs took {share:.0%} of this machine meanwhile: profile again when it is quiet")
    print(f"wrote {json_path}, for simulate and plan: --profile {json_path}")
    print(f"wrote {toml_path}, for run: --config {toml_path}")
    return 0


def in_fp8(settings: Settings, fp8: Fp8) -> Settings:
    """Settings of an engine alone, with this in fp8. Raises ConfigError: it cannot, or has it already."""
    generation = settings.generation
    if generation.fp8:
        raise ConfigError(
            f"{fp8.options}: leave out generation.kv_dtype and generation.weights_dtype, which say the same",
            where=fp8.options.split()[0],
        )
    changed = msgspec.structs.replace(generation, **fp8.settings)
    untrained = msgspec.structs.replace(settings.trainer, engine="none")
    found = msgspec.structs.replace(settings, generation=changed)
    for keys, reason in broken_of_fp8(found):
        key = keys.split()[0]
        raise ConfigError(f"{key} {reason}", key=key, where=fp8.options.split()[0])
    return msgspec.structs.replace(found, trainer=untrained)


def measure(settings: Settings) -> Measurements:
    """Have a worker process measure. Raises ChildFailedError; what it says goes to our standard error."""
    try:
        done = subprocess.run(
            python_module("workers", "profile"),
            input=msgspec.json.encode(settings),
            stdout=subprocess.PIPE,
            timeout=MEASURE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        slow = f"it took longer than {MEASURE_LIMIT_S:.0f} s: measure with fewer generation.slots"
        raise ChildFailedError("profile", -signal.SIGKILL, slow) from None
    if done.returncode != 0:
        raise ChildFailedError("profile", done.returncode, "see above")
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Measurements)


def section(profile: Profile) -> str:
    """The part of a configuration: what plans of dispatch and the adjustment of workers read, and the least round."""
    lines = [f"# {profile.engine} engine, {profile.model}, on {profile.host}", "[decode_cost]"]
    costs = msgspec.structs.asdict(profile.decode_cost)
    lines += [f"{name} = {to_toml(value)}" for name, value in costs.items() if value]
    if profile.round_tokens:
        lines += ["", "[trainer]", f"round_tokens = {profile.round_tokens}"]
    return "\n".join(lines) + "\n"


def report(profile: Profile) -> str:
    """The coefficients, and how good they are."""
    cost = profile.decode_cost
    parts = [
        f"decode step: {1e3 * cost.fixed_s:.3g} ms + max({1e3 * cost.weights_s:.3g} ms, samples x "
        f"{1e3 * cost.gemm_sample_s:.3g} ms) + samples x {1e3 * cost.sample_s:.3g} ms + context x "
        f"{1e6 * cost.kv_token_s:.3g} us; prefill: {1e3 * cost.prefill_token_s:.3g} ms a token",
        f"  {_room(cost.kv_capacity_tokens)}",
        f"  up to {profile.slots} samples of {profile.context_tokens} tokens; {_held_out(profile.held_out, 'batches')}",
        *map(_variant, profile.variants),
    ]
    if (train := profile.train) is not None:
        parts += [
            f"trainer: {1e3 * train.round_s:.3g} ms a micro-batch + {1e3 * train.token_s:.3g} ms a token + "
            f"{1e6 * train.squared_token_s:.3g} us a squared token; optimizer {train.optimizer_s:.3g} s; "
            f"a version published in {profile.publish_s:.3g} s, loaded in {profile.load_s:.3g} s",
            f"  a rank is saturated by rounds of {profile.round_tokens} tokens (trainer.round_tokens)",
            f"  up to {profile.micro_batch_tokens} tokens; {_held_out(profile.train_held_out, 'micro-batches')}",
            f"at once: decode steps take {profile.decode_beside:.2f} times as long, micro-batches "
            f"{profile.train_beside:.2f} times",
        ]
    if profile.decode_share or profile.train_share:
        parts.append(
            f"  a worker computes on {profile.decode_share:.0%} of the cores, a rank on {profile.train_share:.0%}: "
            "more of them than fit take turns"
        )
    padded = [("decode steps", cost.padded), ("micro-batches", train is not None and train.padded)]
    if names := [name for name, is_padded in padded if is_padded]:
        padded_names = " and of ".join(names)
        parts.append(f"attention of {padded_names} is padded: a short sample takes as long as the longest there")
    return "\n".join(parts)


def _variant(variant: Variant) -> str:
    cost = variant.decode_cost
    return (
        f"with {variant.fp8.options}: {1e3 * cost.fixed_s:.3g} ms + max({1e3 * cost.weights_s:.3g} ms, samples x "
        f"{1e3 * cost.gemm_sample_s:.3g} ms) + samples x {1e3 * cost.sample_s:.3g} ms + context x "
        f"{1e6 * cost.kv_token_s:.3g} us; {_room(cost.kv_capacity_tokens)}; {_held_out(variant.held_out, 'batches')}"
    )


def _room(kv_capacity_tokens: float) -> str:
    if not kv_capacity_tokens:
        return "every sample has memory of its own for its context"
    return f"memory holds {kv_capacity_tokens:,.0f} tokens of context, all samples together"


def _held_out(errors: Errors, what: str) -> str:
    return f"held-out error on {what} that a fit did not see: median {errors.median:.1%}, worst {errors.worst:.1%}"


class MachineLoad:
    """What other programs take of this machine, from its making on. Our processes count once they were waited for.

    Linux only; elsewhere nothing is known, and 0 is said.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s = machine_busy_s()
        self._own_s = own_s()

    def share(self) -> float:
        """Of the CPU time that the machine had, 0 to 1; 0 where that is unknown."""
        others_s = machine_busy_s() - self._busy_s - (own_s() - self._own_s)
        had_s = (time.monotonic() - self._started_s) * (os.cpu_count() or 1)
        return max(0.0, others_s / had_s)


def machine_busy_s() -> float:
    """CPU seconds that anything has used on this machine; 0 where that is unknown."""
    if not STAT.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process, of its children that have ended, and of theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
