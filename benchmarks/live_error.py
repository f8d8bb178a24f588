"""Simulation against reality: seconds per iteration of live runs, and of the simulator for the same settings.

Both sides decide with the same code from the same settings and forced lengths. What the simulator must be told is how
long things take: of the emulated engine and trainer, what their settings say; of the embedded engine
and the real trainer, what ``streamrl-orchestrator profile`` measures here, also of both at once. From one run of each
kind that is not among those predicted come the seconds between them (a plan on its way, scoring, publishing).

Iterations are compared one by one, as both sides train the same rows in each; the median counts, so that one that
something held up does not decide.

Emulated and real settings are reported apart: of the first the simulator is told the very formula, so that they show
that both sides decide alike and lose no time between the parts; only the second say what a simulation is worth.

    live_error_real_*       the embedded engine and the real trainer: two sizes of models, one and two workers, versions
                            that are long on their way, KV memory that holds a third of the slots
    live_error_emulated_*   emulated engine and trainer, every mode, and the same two
    live_error_paced_*      the real ones, had the machine been as quick in the run as in the profile: one piece of work
                            is timed before and after both, and seconds that were simulated are scaled by it. A virtual
                            machine may differ by a third from one minute to the next; the difference to the first
                            figure is what that was worth

It wants the machine for itself, for some twenty minutes, and says how much of it other programs took.

    python -m benchmarks.live_error [--only emulated|embedded] [--iterations N] [--check] (part of bench ``sim``)

--check: every setting is run for one batch and nothing is compared, on however busy a machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from orchestrator.cli.profile import QUIET_SHARE, MachineLoad
from orchestrator.config.load import resolve
from orchestrator.core.model.settings import core_settings
from orchestrator.observability.metrics import read_metrics
from orchestrator.planning.profiles import Profile, read_profile
from orchestrator.sim.costs import ALONE, TrainCost
from orchestrator.sim.engine import CostModel, Scenario
from orchestrator.sim.lengths import prompt_id
from orchestrator.sim.replay import recorded_commands
from orchestrator.sim.simulate import simulate
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.messages import (
    DispatchGroups,
    GroupScored,
    PromptRef,
    PromptsArrived,
    RolloutFinished,
    WeightsLoaded,
)
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, PromptId, RowId, parse_row_id
from transport.contracts.user_files import ForcedLengths

ROOT = Path(__file__).parents[1]
WARM_UP = 2
ITERATIONS = 20
"""That count; the first ones fill the pipeline."""
LIMIT_S = 600.0
BUSY_LIMIT_S = 1800.0
"""Of a run for one batch, whatever else the machine does."""

MODES: Mapping[str, Sequence[str]] = {
    "synchronous": ("pipeline.max_staleness=0", "pipeline.release=batch", "pipeline.update=barrier"),
    "stream": ("pipeline.max_staleness=0", "pipeline.release=stream", "pipeline.update=barrier"),
    "mini_batch": ("pipeline.max_staleness=0", "pipeline.release=mini_batch", "pipeline.mini_batch_groups=4"),
    "one_step": ("pipeline.max_staleness=1", "pipeline.release=batch", "pipeline.update=barrier"),
    "fully_async": ("pipeline.max_staleness=1", "pipeline.update=barrier"),
    "in_flight": ("pipeline.max_staleness=1", "pipeline.update=in_flight"),
    "staggered": ("pipeline.max_staleness=1", "pipeline.update=staggered"),
    "two_old": ("pipeline.max_staleness=2", "pipeline.update=in_flight"),
}
COMMON = (
    "ranker.kind=none",
    "trainer.checkpoint_every=1000",
    "trainer.lr=1e-12",  # or rewards come to agree within a group, and a trainer computes nothing of such rows
    "pipeline.groups_per_batch=16",
    "pipeline.group_size=4",
    "trainer.micro_batch_tokens=8192",
    "eval.problems=0",
)
ENGINES: Mapping[str, Sequence[str]] = {
    "emulated": ("generation.engine=emulated", "trainer.engine=emulated", "emulated.time_scale=0.2"),
    "embedded": (),
}


SMALL, TINY = "random:qwen3-small", "random:qwen3-tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run. mean, sigma: of its lognormal lengths, tokens.  model: of the embedded engine.  transfer_s: that a
    version is on its way, before ``emulated.time_scale``.  kv_tokens: that an engine's memory holds, 0: all slots.
    iterations: that count."""

    engine: str
    mode: str
    workers: int
    slots: int
    mean: float
    sigma: float
    model: str = SMALL
    transfer_s: float = 0.0
    kv_tokens: int = field(default=0, repr=False)  # lengths are drawn from the rest: with and without it they are equal
    iterations: int = ITERATIONS

    @property
    def name(self) -> str:
        model = f"{self.model}, " if self.engine == "embedded" else ""
        memory = f" in {self.kv_tokens} tokens" if self.kv_tokens else ""
        return (
            f"{self.engine} {self.mode}, {model}transfer {self.transfer_s:g} s, {self.workers} x {self.slots} slots"
            f"{memory}, lengths {self.mean:g} +- {self.sigma:g}"
        )

    @property
    def batches(self) -> int:
        return WARM_UP + self.iterations

    def lengths(self) -> list[int]:
        chance = random.Random(repr(self))
        count = 16 * 4 * self.batches
        draws = (self.mean * chance.lognormvariate(-(self.sigma**2) / 2, self.sigma) for _ in range(count))
        return [max(1, min(MAX_TOKENS, round(draw))) for draw in draws]

    def overrides(self, directory: Path) -> list[str]:
        """Of a run in ``directory``, which holds its lengths."""
        return [
            *COMMON,
            *ENGINES[self.engine],
            *MODES[self.mode],
            *([f"model.path={self.model}"] if self.engine == "embedded" else []),
            f"emulated.transfer_s={self.transfer_s}",
            f"run.batches={self.batches}",
            f"generation.workers={self.workers}",
            f"generation.slots={self.slots}",
            *(
                [f"generation.kv_tokens={self.kv_tokens}", f"generation.max_context={CONTEXT}"]
                if self.kv_tokens
                else []
            ),
            f"generation.lengths={directory / LENGTHS}",
            f"sampling.max_new_tokens={MAX_TOKENS}",
        ]


MAX_TOKENS = 400
LENGTHS = "lengths.txt"
CONTEXT = 512
"""Tokens that the models allow."""
LITTLE_KV = 8 * CONTEXT
"""Of 32 slots, some 8 to 15 run in it, by the longest of them; many of 300 tokens and more outgrow it."""
CALIBRATION = {
    "emulated": Setting(engine="emulated", mode="in_flight", workers=2, slots=16, mean=90, sigma=0.5),
    "embedded": Setting(engine="embedded", mode="stream", workers=1, slots=16, mean=70, sigma=0.4),
}
SETTINGS = (
    Setting(engine="emulated", mode="synchronous", workers=2, slots=16, mean=100, sigma=0.6),
    Setting(engine="emulated", mode="stream", workers=1, slots=32, mean=120, sigma=0.3),
    Setting(engine="emulated", mode="mini_batch", workers=3, slots=16, mean=150, sigma=0.6),
    Setting(engine="emulated", mode="one_step", workers=2, slots=32, mean=150, sigma=0.5),
    Setting(engine="emulated", mode="fully_async", workers=2, slots=16, mean=140, sigma=0.7),
    Setting(engine="emulated", mode="in_flight", workers=3, slots=8, mean=110, sigma=0.4),
    Setting(engine="emulated", mode="staggered", workers=2, slots=32, mean=150, sigma=0.6),
    Setting(engine="emulated", mode="two_old", workers=1, slots=64, mean=120, sigma=0.8),
    Setting(engine="emulated", mode="fully_async", workers=2, slots=16, mean=120, sigma=0.5, transfer_s=5.0),
    Setting(engine="emulated", mode="in_flight", workers=2, slots=16, mean=120, sigma=0.5, transfer_s=5.0),
    Setting(engine="emulated", mode="stream", workers=1, slots=32, mean=370, sigma=0.08, kv_tokens=LITTLE_KV),
    Setting(engine="embedded", mode="synchronous", workers=1, slots=16, mean=100, sigma=0.3),
    Setting(engine="embedded", mode="stream", workers=1, slots=32, mean=80, sigma=0.6),
    Setting(engine="embedded", mode="fully_async", workers=1, slots=16, mean=90, sigma=0.5),
    Setting(engine="embedded", mode="in_flight", workers=1, slots=8, mean=60, sigma=0.4),
    Setting(engine="embedded", mode="stream", workers=2, slots=16, mean=80, sigma=0.5),
    Setting(engine="embedded", mode="in_flight", workers=2, slots=16, mean=90, sigma=0.5),
    Setting(engine="embedded", mode="synchronous", workers=1, slots=16, mean=120, sigma=0.5, model=TINY),
    Setting(engine="embedded", mode="in_flight", workers=2, slots=16, mean=150, sigma=0.4, model=TINY),
    Setting(engine="embedded", mode="fully_async", workers=1, slots=16, mean=80, sigma=0.4, transfer_s=2.0),
    Setting(engine="embedded", mode="in_flight", workers=1, slots=16, mean=80, sigma=0.4, transfer_s=2.0),
    Setting(engine="embedded", mode="fully_async", workers=1, slots=32, mean=120, sigma=0.6, kv_tokens=LITTLE_KV),
    Setting(
        engine="embedded", mode="stream", workers=1, slots=32, mean=370, sigma=0.08, kv_tokens=LITTLE_KV, model=TINY
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds between the parts of a live run, medians of one: a plan until it is claimed, a group's scores, the rest
    of a load beyond what the engine was told to take, the publishing of a version."""

    dispatch_s: float
    scoring_s: float
    load_s: float
    publish_s: float


@dataclass(frozen=True, slots=True)
class Forced:
    """Lengths of the simulator, row for row those of the live run. each_prompt: tokens of a prompt, their mean."""

    forced: ForcedLengths
    each_prompt: int

    def prompt(self, index: int) -> PromptRef:
        return PromptRef(prompt_id=prompt_id(index), prompt_tokens=self.each_prompt, predicted_tokens=float(MAX_TOKENS))

    def prompt_tokens(self, prompt: PromptId) -> int:
        return self.each_prompt

    def tokens(self, prompt: PromptId, row: RowId) -> int:
        group_id, sample = parse_row_id(row)
        return self.forced.limits(group_id, [sample])[0]


# -- reality


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A run that was. others: share of the machine's CPU time that other programs took meanwhile."""

    iterations_s: list[float]
    run_dir: Path
    others: float


def live(setting: Setting, directory: Path, limit_s: float = LIMIT_S) -> Live:
    """Raises SystemExit when the run fails, or computes less than it trains: the simulator charges for all rows."""
    directory.mkdir(parents=True)
    (directory / LENGTHS).write_text("\n".join(map(str, setting.lengths())))
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain"]
    for override in setting.overrides(directory):
        command += ["--set", override]
    load = MachineLoad()
    with (directory / "out.log").open("wb") as out:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=out,
            timeout=limit_s,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"{setting.name} failed: {(directory / 'out.log').read_text()[-2000:]}")
    run_dir = directory / "runs" / "tiny"
    batches = read_metrics(run_dir / "metrics.jsonl")
    trained, computed = (sum(line[name] for line in batches) for name in ("tokens_trained", "computed_tokens"))
    if setting.engine == "embedded" and computed < 0.99 * trained:
        raise SystemExit(f"{setting.name}: rewards agree in groups, so that {computed / trained:.0%} were computed")
    return Live(
        iterations_s=iterations_s([line["time_s"] for line in batches]),
        run_dir=run_dir,
        others=load.share(),
    )


def iterations_s(ended_s: Sequence[float]) -> list[float]:
    """Seconds between versions, without the first ones, which fill the pipeline."""
    return [later - earlier for earlier, later in itertools.pairwise(ended_s[WARM_UP - 1 :])]


def off_by(simulated_s: Sequence[float], real_s: Sequence[float]) -> float:
    """Relative error of the simulator: the median over iterations."""
    return median(simulated / real for simulated, real in zip(simulated_s, real_s, strict=True)) - 1.0


def overheads(run_dir: Path, told_load_s: float) -> Overheads:
    """Read from a live run's journal and metrics."""
    sent_s: dict[GroupId, float] = {}
    whole_s: dict[GroupId, float] = {}
    dispatch: list[float] = []
    scoring: list[float] = []
    load: list[float] = []
    for record, commands in recorded_commands(run_dir / "journal"):
        event = record.event
        if isinstance(event, RolloutFinished):
            group_id, _ = parse_row_id(event.row_id)
            whole_s[group_id] = record.now_s
            dispatch.append(record.now_s - sent_s[group_id] - event.engine_s - event.queued_s)
        elif isinstance(event, GroupScored):
            scoring.append(record.now_s - whole_s[event.group_id])
        elif isinstance(event, WeightsLoaded):
            load.append(event.seconds - told_load_s)
        for command in commands:
            if isinstance(command, DispatchGroups):
                sent_s[command.plans[0].group_id] = record.now_s
    published = [line["publish_s"] for line in read_metrics(run_dir / "metrics.jsonl")[WARM_UP:]]
    return Overheads(
        dispatch_s=max(0.0, median(dispatch)),
        scoring_s=max(0.0, median(scoring)),
        load_s=max(0.0, median(load)),
        publish_s=max(0.0, median(published)),
    )


# -- simulation


def prompt_tokens(run_dir: Path) -> int:
    """Mean over the prompts that a run read."""
    arrived = [record.event for record, _ in recorded_commands(run_dir / "journal")]
    return round(fmean(ref.prompt_tokens for one in arrived if isinstance(one, PromptsArrived) for ref in one.prompts))


def predicted(
    setting: Setting, settings: Settings, found: Overheads, profile: Profile | None, each_prompt: int = 0
) -> list[float]:
    """Seconds of each iteration by the simulator. each_prompt: tokens; the emulated hardware counts them where its
    memory is limited."""
    decode, train, load_s = emulated(settings) if profile is None else measured(profile)
    costs = CostModel(
        decode=decode.limited(settings.generation.kv_tokens),  # the profile was made without
        train=train,
        dispatch_s=found.dispatch_s,
        scoring_s=found.scoring_s,
        publish_s=found.publish_s,
        transfer_s=found.load_s + setting.transfer_s * settings.emulated.time_scale,
        load_s=load_s,
        sharing=profile.measured.sharing if profile is not None else ALONE,
    )
    pipeline = settings.pipeline
    forced = ForcedLengths(
        setting.lengths(), groups_per_batch=pipeline.groups_per_batch, group_size=pipeline.group_size
    )
    scenario = Scenario(
        core=core_settings(settings),
        workers=setting.workers,
        capacity=setting.slots,
        max_context=settings.generation.max_context or math.inf,
        lengths=Forced(forced, each_prompt),
        costs=costs,
        max_s=1e6,
    )
    return iterations_s(simulate(scenario).published_s)


def emulated(settings: Settings) -> tuple[DecodeCost, TrainCost, float]:
    """What the emulated engine and the emulated trainer are told."""
    emulated, scale = settings.emulated, settings.emulated.time_scale
    decode = DecodeCost(fixed_s=emulated.step_s * scale, sample_s=emulated.sample_step_s * scale)
    train = TrainCost(
        round_s=emulated.round_s * scale,
        token_s=emulated.train_token_s * scale,
        optimizer_s=emulated.optimizer_s * scale,
    )
    return decode, train, emulated.load_s * scale


def measured(profile: Profile) -> tuple[DecodeCost, TrainCost, float]:
    """What was profiled."""
    if profile.train is None:
        raise SystemExit("the profile has no trainer in it")
    return profile.measured.decode, profile.train, profile.load_s


# -- the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Relative errors of the simulator, one of each setting. paced: at the pace of the run; empty where none is timed.
    others: the largest share of the machine that other programs took."""

    errors: list[float]
    paced: list[float]
    others: float


WORK = """
import time, torch
torch.set_num_threads(1)
weights, rows, took_s = [torch.randn(512, 512) for _ in range(64)], torch.ones(32, 512), []
with torch.inference_mode():
    until_s = time.perf_counter() + 3
    while (began_s := time.perf_counter()) < until_s:
        for weight in weights:
            rows = torch.tanh(rows @ weight)
        took_s.append(time.perf_counter() - began_s)
print(sorted(took_s)[len(took_s) // 2])
"""


def pace_s() -> float:
    """Seconds of one piece of work that is always the same, in one thread like a worker's: how quick this machine is
    now."""
    done = subprocess.run(
        [sys.executable, "-c", WORK], capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=ROOT
    )
    return float(done.stdout)


def compare(engine: str, settings: Iterable[Setting], work: Path) -> Compared:
    """Run each and simulate it, a line each."""
    profiles: dict[str, tuple[Profile, float]] = {}
    calibrated = live(CALIBRATION[engine], work / "calibration")
    others = calibrated.others
    found: Overheads | None = None
    errors: list[float] = []
    paced: list[float] = []
    before_s = pace_s() if engine == "embedded" else 0.0
    for number, setting in enumerate(settings):
        if engine == "embedded" and setting.model not in profiles:
            made = profiled(work, setting.model)
            before_s, earlier_s = pace_s(), before_s
            profiles[setting.model] = made, fmean((earlier_s, before_s))
        profile, profile_pace_s = profiles.get(setting.model, (None, 0.0))
        if found is None:  # of the model that calibrates, which is the first one's
            found = overheads(calibrated.run_dir, profile.load_s if profile is not None else 0.02)
            print(f"{engine}: between the parts, from one other run: {found}", flush=True)
        real = live(setting, work / str(number))
        resolved = resolve(None, [real.run_dir / "config.toml"], [], os.environ).settings
        each_prompt = prompt_tokens(real.run_dir) if profile is not None or setting.kv_tokens else 0
        simulated_s = predicted(setting, resolved, found, profile, each_prompt)
        off = off_by(simulated_s, real.iterations_s)
        errors.append(abs(off))
        others = max(others, real.others)
        pace = ""
        if profile is not None:
            before_s, earlier_s = pace_s(), before_s
            slower = fmean((earlier_s, before_s)) / profile_pace_s
            paced.append(abs(slower * (1 + off) - 1))
            pace = f" ({slower * (1 + off) - 1:+.1%} at its pace, {slower:.2f} of the profile's seconds)"
        print(
            f"{setting.name}: live {median(real.iterations_s):.3f} s, simulated {median(simulated_s):.3f} s, off by "
            f"{off:+.1%}{pace}; others took {real.others:.0%} of the machine",
            flush=True,
        )
    return Compared(errors=errors, paced=paced, others=others)


def profiled(work: Path, model: str) -> Profile:
    """Of the model on this machine, now."""
    out = work / f"profile-{model.rpartition(':')[2]}"
    command = [sys.executable, "-m", "orchestrator", "profile", "--preset", "tiny", "--out", str(out)]
    for setting in ("generation.slots=32", "trainer.micro_batch_tokens=8192", f"model.path={model}"):
        command += ["--set", setting]
    subprocess.run(command, cwd=work, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=LIMIT_S, check=True)
    return read_profile(out.with_suffix(".json"))


KINDS = {"emulated": "emulated", "embedded": "real"}
"""Engine -> what its figures are called."""


def live_errors(engines: Sequence[str] = tuple(ENGINES), iterations: int = ITERATIONS) -> dict[str, Any]:
    """The figures ``live_error_<kind>_median`` and ``_worst``, of emulated and of real settings."""
    figures: dict[str, Any] = {}
    others = 0.0
    for engine in engines:
        chosen = [replace(one, iterations=iterations) for one in SETTINGS if one.engine == engine]
        with tempfile.TemporaryDirectory(prefix="streamrl-live-") as directory:
            compared = compare(engine, chosen, Path(directory))
        for kind, errors in ((KINDS[engine], compared.errors), ("paced", compared.paced)):
            if errors:
                print(f"{kind}: {len(errors)} settings off by {median(errors):.1%} (median), {max(errors):.1%} (worst)")
                figures |= {
                    f"live_error_{kind}_median": round(median(errors), 4),
                    f"live_error_{kind}_worst": round(max(errors), 4),
                }
        others = max(others, compared.others)
    if others > QUIET_SHARE:
        print(f"other programs took up to {others:.0%} of this machine: measure again when it is quiet")
    return figures


def check(engines: Sequence[str]) -> int:
    """Run each setting for one batch. Returns how many started and ended; raises SystemExit: one did not."""
    done = 0
    for one in SETTINGS:
        if one.engine in engines:
            with tempfile.TemporaryDirectory(prefix="streamrl-live-") as directory:
                live(replace(one, iterations=1 - WARM_UP), Path(directory) / "run", limit_s=BUSY_LIMIT_S)
            done += 1
            print(f"{one.name}: runs", flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ENGINES), help="one kind of engine")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="that count, of each run, at least 2")
    parser.add_argument("--check", action="store_true", help="only run each setting for one batch")
    arguments = parser.parse_args()
    engines = [arguments.only] if arguments.only else tuple(ENGINES)
    if arguments.check:
        print(json.dumps({"settings_that_run": check(engines)}))
        return
    print(json.dumps(live_errors(engines, max(2, arguments.iterations))))


if __name__ == "__main__":
    main()
