"""Figure ``sim``: StreamRL's Table 3 (72B, 20K, 128 H800) and beyond, by the code that decides live.

Throughput of each pipeline over the same simulator's colocated baseline, with its distance to the physical bound, the
age of the tokens that were trained (counted token by token, not read from a setting), and the worst and the best value
when each constant of the model moves by 20%: with the layout as it was, and with the split of the GPUs chosen anew for
that constant. Policies were tuned on seed 0; reported are others.

    python -m benchmarks.sim [--seeds 11,12,13] [--parts table,acceptance,moved,bound,speed,live]
        [--cases sync_plain,async_plain] [--jobs N] [--quick]

--quick: one seed, fewer batches, nothing moved, no live runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.dispatch import over_bounds
from benchmarks.live_error import live_errors
from benchmarks.papers.comparison import Compared, with_swings
from benchmarks.papers.experiments import PAPER_RECALL, Bound, Generation, Pipelined
from benchmarks.papers.rows import Cell, Row
from benchmarks.papers.settings import (
    AIDED_SPLIT,
    MICRO_BATCH_TOKENS,
    aided,
    colocated,
    deferring,
    fully_async,
    in_flight,
    in_fp8,
    rolling,
    split,
    sync_stream,
)
from benchmarks.papers.trials import MOVE, Kept, ProgressLine, Trial, moves, run_trials
from orchestrator.core.model.settings import CoreSettings
from orchestrator.sim.costs import ASSUMED, H800, Assumptions, DoesNotFitError, decode_cost
from orchestrator.sim.engine import SimulationLog
from orchestrator.sim.llms import QWEN_72B
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, bound
from orchestrator.sim.simulate import simulate
from transport.contracts.llms import Fp8

SEEDS = (11, 12, 13)
WARM_UP, COOL_DOWN = 4, 2
ITERATIONS = 20
BATCHES = WARM_UP + ITERATIONS + COOL_DOWN
"""20 iterations count, after those that fill the pipeline (StreamRL sec. 7)."""


def aids_of(layout: Layout) -> dict[str, Any]:
    """What its engines have beyond plain ones."""
    return {"drafts": layout.drafts, "fp8": layout.fp8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline on a split of the GPUs (``papers/settings.py``), and what the paper has for it."""

    title: str
    experiment: Pipelined
    paper: str = "-"

    @property
    def layout(self) -> Layout:
        return self.experiment.layout

    @property
    def aided(self) -> bool:
        """Whether its engines have something that the plain baseline's have not."""
        return any(aids_of(self.layout).values())

    @property
    def armed(self) -> Case:
        """The colocated baseline with the same aids."""
        baseline = aided(BASELINE.experiment, **aids_of(self.layout))
        return Case(title="colocated", experiment=baseline)

    def run(self, seed: int, batches: int) -> SimulationLog:
        return self.experiment.run(seed, batches, ASSUMED)


BASELINE = Case(title="colocated", experiment=colocated(QWEN_72B), paper="1.00")
DRAFTS = ASSUMED.draft_acceptance
CASES = {
    "colocated_ranked": Case(
        title="colocated, ranked", experiment=colocated(QWEN_72B, dispatch="scored"), paper="1.08"
    ),
    "sync_plain": Case(title="disaggregated stream, synchronous", experiment=sync_stream(QWEN_72B), paper="1.23"),
    "async_paper": Case(
        title="fully asynchronous, the paper's dispatch", experiment=fully_async(QWEN_72B), paper="1.48"
    ),
    "async_plain": Case(title="in flight, at most one version old", experiment=in_flight()),
    "mean1_plain": Case(title="rolling, at most two versions old", experiment=rolling()),
    "sync_aided": Case(
        title="synchronous stream with drafts",
        experiment=aided(replace(sync_stream(QWEN_72B), layout=split(QWEN_72B, AIDED_SPLIT["sync"])), drafts=DRAFTS),
    ),
    "async_aided": Case(
        title="in flight with drafts", experiment=aided(in_flight(AIDED_SPLIT["async"]), drafts=DRAFTS)
    ),
    "async_fp8": Case(
        title="in flight with fp8 caches", experiment=aided(in_flight(AIDED_SPLIT["async"]), fp8=Fp8(kv=True))
    ),
    "async_fp8_weights": Case(title="in flight with caches and weights in fp8", experiment=in_fp8()),
    "colocated_deferred": Case(
        title="colocated, an eighth more prompts whose slowest go on", experiment=deferring(BASELINE.experiment, 1 / 8)
    ),
    "sync_deferred": Case(
        title="synchronous stream, a quarter more prompts whose slowest go on",
        experiment=deferring(replace(sync_stream(QWEN_72B), layout=split(QWEN_72B, AIDED_SPLIT["sync"])), 1 / 4),
    ),
    "mean1_aided": Case(title="rolling with drafts", experiment=aided(rolling(AIDED_SPLIT["async"]), drafts=DRAFTS)),
}
"""Over the plain colocated baseline; those with aids also over one that has the same ("_armed")."""


def _over_bound(what: str, recall: float | None) -> Row:
    alone = Generation(llm=QWEN_72B, gpus=128, tensor_parallel=8, dispatch="scored", recall=recall)
    cell = Cell(label="72B", of=Bound(of=alone), over=alone)
    return Row(key="over_bound", source="ours", what=f"generation alone over its bound, {what}", cells=(cell,))


OVER_BOUND = [_over_bound(f"recall {PAPER_RECALL}", PAPER_RECALL), _over_bound("known lengths", None)]
SPLITS = [split(QWEN_72B, generation_gpus) for generation_gpus in (24, 32, 40, 48, 56, 64)]


def best_bound(workload: Workload, layouts: Sequence[Layout], pipeline: CoreSettings) -> tuple[float, Layout]:
    """The lowest bound of several splits, with slots that memory alone limits, and its split."""
    bounds = [bound(workload, replace(layout, slots=100_000)).iteration_s(pipeline) for layout in layouts]
    index = min(range(len(bounds)), key=bounds.__getitem__)
    return bounds[index], layouts[index]


def iteration_s(log: SimulationLog) -> float:
    return log.iteration_s(WARM_UP, COOL_DOWN)


# -- the table


def report(cases: Sequence[str], seeds: Sequence[int], batches: int) -> dict[str, float]:
    """Print a line for every case; returns its throughput over the baseline, means over the seeds."""
    base = {seed: iteration_s(BASELINE.run(seed, batches)) for seed in seeds}
    print(
        f"{BASELINE.title}: {fmean(base.values()):.0f} s an iteration; bound of its stages one after the other ", end=""
    )
    serial = bound(BASELINE.experiment.workload(seeds[0], batches), BASELINE.layout)
    print(f"{serial.iteration_s(BASELINE.experiment.core, in_turn=True):.0f} s")
    figures: dict[str, float] = {}
    for name in cases:
        case = CASES[name]
        logs = {seed: case.run(seed, batches) for seed in seeds}
        ratios = [base[seed] / iteration_s(log) for seed, log in logs.items()]
        figures[name] = round(fmean(ratios), 3)
        print(f"{name}: {describe(case, logs, ratios, base)}")
        if case.aided:
            armed = {seed: iteration_s(case.armed.run(seed, batches)) for seed in seeds}
            figures[f"{name}_armed"] = round(fmean(armed[seed] / iteration_s(log) for seed, log in logs.items()), 3)
            over = f"{figures[f'{name}_armed']:.3f} over colocated with the same"
            print(f"{name}_armed: {over}, {fmean(armed.values()):.0f} s")
    return figures


def describe(case: Case, logs: dict[int, SimulationLog], ratios: list[float], base: dict[int, float]) -> str:
    seed, log = next(iter(logs.items()))
    pipeline = case.experiment.core
    workload = case.experiment.workload(seed, len(log.published_s))
    own_s = bound(workload, replace(case.layout, slots=100_000)).iteration_s(pipeline)
    layouts = [replace(one, **aids_of(case.layout)) for one in SPLITS]
    best_s, best_layout = best_bound(workload, layouts, pipeline)
    text = f"{fmean(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}), paper {case.paper}; {case.title}; "
    text += f"{case.layout.generation_gpus} + {case.layout.training_gpus} GPUs"
    if case.layout.colocated:
        return text
    return (
        f"{text}; token age at most {max(log.oldest_age for log in logs.values())}, mean "
        f"{fmean(log.mean_age for log in logs.values()):.2f}; {iteration_s(log) / own_s:.3f} of its bound {own_s:.0f} "
        f"s, {iteration_s(log) / best_s:.3f} of that of the best split ({best_layout.generation_gpus} GPUs generate: "
        f"{best_s:.0f} s, {base[seed] / best_s:.2f} times the baseline)"
    )


ACCEPTANCES = (0.35, 0.45, 0.65, 0.75)
"""Of drafts, beside the one that is assumed: from what a sample alone shows to what a trained draft model reaches."""


def acceptances(cases: Sequence[str], seed: int, batches: int) -> dict[str, float]:
    """Each case with drafts at other acceptances, over the plain baseline and over one that drafts as well."""
    base_s = iteration_s(BASELINE.run(seed, batches))
    figures: dict[str, float] = {}
    for acceptance in ACCEPTANCES:
        baseline = aided(BASELINE.experiment, drafts=acceptance)
        armed_s = iteration_s(baseline.run(seed, batches, ASSUMED))
        for name in [one for one in cases if CASES[one].layout.drafts]:
            own_s = iteration_s(aided(CASES[name].experiment, drafts=acceptance).run(seed, batches, ASSUMED))
            key = f"{name}_at_{100 * acceptance:.0f}"
            figures |= {key: round(base_s / own_s, 3), f"{key}_armed": round(armed_s / own_s, 3)}
            print(
                f"{name} at an acceptance of {acceptance:g}: {base_s / own_s:.3f}, {armed_s / own_s:.3f} over colocated"
                f" with the same ({armed_s:.0f} s)",
                flush=True,
            )
    return figures


# -- what it rests on


HEADLINES = ("sync_plain", "sync_aided", "async_plain", "async_aided", "async_fp8", "mean1_aided")
NODES = (-16, -8, 8, 16)
"""GPUs more or fewer that generate when a split is chosen anew: whole nodes."""
TRIED = 2
"""Of these splits, that are simulated: the best by arithmetic."""


def moved(cases: Sequence[str], seed: int, jobs: int, kept: Kept, least: float) -> dict[str, float]:
    """Every headline with constants of the model 20% lower and higher: the worst and the best, and by what; then
    the same two with the best of several splits. The generation alone over its bound likewise, without a split.

    least: share of what a stage takes by arithmetic that a constant must move, of a headline, to be moved.
    """
    headlines = [row for name in HEADLINES if name in cases for row in _headline_rows(name)]
    figures: dict[str, float] = {}
    for row in (*headlines, *OVER_BOUND):
        progress = ProgressLine(f"{row.key}, moved:")
        plain = _as_it_is(row, seed, jobs, kept)
        (one,) = with_swings([plain], seed=seed, jobs=jobs, progress=progress, kept=kept, least=least)
        swing = one.swing
        if swing is None:
            raise SystemExit(f"{row.key}: interrupted, or no constant moves a stage by --least {least:g}")
        worst, best, num_moves = swing.worst, swing.best, len(one.moved or {})
        print(
            f"{row.key}: {row.what}, {one.low:.3f}; when one of {num_moves} moves by {MOVE:.0%}: {worst:.3f} "
            f"({swing.worst_by}) to {best:.3f} ({swing.best_by}); moved most by {swing.most or '-'}; "
            f"does not fit: {', '.join(swing.refused) or '-'}",
            flush=True,
        )
        figures |= {f"{row.key}_worst": round(worst, 3), f"{row.key}_best": round(best, 3)}
        if row in headlines:
            for end, by in (("worst", swing.worst_by), ("best", swing.best_by)):
                value, gpus = _planned_anew(one, moves()[by], seed, jobs, kept)
                print(f"  {end} ({by}), planned anew: {value:.3f}, {gpus} GPUs generate", flush=True)
                figures[f"{row.key}_{end}_planned"] = round(value, 3)
    return figures


def _as_it_is(row: Row, seed: int, jobs: int, kept: Kept) -> Compared:
    """With nothing moved, over as few iterations as what is moved takes."""
    (cell,) = row.cells
    assert cell.over is not None
    trials = [Trial(side, seed, side.short) for side in (cell.of, cell.over)]
    found = run_trials(trials, jobs=jobs, kept=kept)
    of_s, over_s = (found[trial] for trial in trials)
    assert isinstance(of_s, float) and isinstance(over_s, float)  # noqa: PT018 they fit
    return Compared(row=row, values=(cell.factor * over_s / of_s,), over_bounds=(0.0,))


def _headline_rows(name: str) -> list[Row]:
    """Over the plain colocated baseline, and over one with the same aids."""
    case = CASES[name]
    bases = {name: BASELINE, **({f"{name}_armed": case.armed} if case.aided else {})}
    return [
        Row(
            key=key,
            source="ours",
            what=f"{case.title}, over colocated{'' if base is BASELINE else ' with the same'}",
            cells=(Cell(label="72B 20K", of=case.experiment, over=base.experiment),),
        )
        for key, base in bases.items()
    ]


def _planned_anew(one: Compared, assumed: Assumptions, seed: int, jobs: int, kept: Kept) -> tuple[float, int]:
    """(the headline under other assumptions with the best of some splits, the GPUs that generate there)."""
    (cell,) = one.row.cells
    of, over = cell.of, cell.over
    assert isinstance(of, Pipelined) and over is not None  # noqa: PT018 headlines have both
    nearby = [_with_split(of, of.layout.generation_gpus + more) for more in NODES]
    others = [of, *sorted(nearby, key=lambda other: _estimated_s(other, assumed))[:TRIED]]
    trials = [Trial(of, seed, of.short), Trial(over, seed, over.short), Trial(over, seed, over.short, assumed)]
    again = [Trial(other, seed, of.short, assumed) for other in others]
    found = run_trials([*trials, *again], jobs=jobs, kept=kept)
    plain_s, base_s, moved_base_s = (found[trial] for trial in trials)
    fitting = {trial: seconds for trial in again if isinstance(seconds := found[trial], float)}
    best = min(fitting, key=fitting.__getitem__)
    assert isinstance(plain_s, float) and isinstance(base_s, float) and isinstance(moved_base_s, float)  # noqa: PT018
    change = (moved_base_s / fitting[best]) / (base_s / plain_s)
    assert isinstance(best.experiment, Pipelined)
    return one.low * change, best.experiment.layout.generation_gpus


def _estimated_s(of: Pipelined, assumed: Assumptions) -> float:
    """Of an iteration, for choosing among splits; infinite where it does not fit."""
    try:
        generation_s, longest_s, training_s = of.stages_s(assumed)
    except DoesNotFitError:
        return math.inf
    staleness = PIPELINES[of.pipeline].max_staleness
    if not staleness:
        return max(generation_s, longest_s) + training_s
    return max(generation_s, training_s, longest_s / (staleness + 1))


def _with_split(of: Pipelined, generation_gpus: int) -> Pipelined:
    """The same with so many GPUs that generate, and the ranks and rounds that ours have with the others."""
    layout, small = of.layout, of.layout.micro_batch_tokens < MICRO_BATCH_TOKENS
    changes = {"micro_batch_tokens": layout.micro_batch_tokens} if small else {}
    other = split(of.llm, generation_gpus, **changes)
    return replace(of, layout=replace(other, tensor_parallel=layout.tensor_parallel, **aids_of(layout)))


# -- speed


def speed() -> tuple[float, float]:
    """(actions of the heap and events of the core per CPU second, without planning; CPU seconds of 20 iterations on 128
    GPUs, with it), the best of three."""
    case = CASES["async_plain"]
    prepared = case.experiment.scenario(0, ITERATIONS, ASSUMED)
    log, run_s = _timed(lambda: simulate(prepared))
    without_planning = replace(prepared, core=msgspec.structs.replace(prepared.core, dispatch="least_loaded"))
    plain, plain_s = _timed(lambda: simulate(without_planning))
    print(
        f"{ITERATIONS} iterations on 128 GPUs: {run_s:.2f} s of CPU, planning included; {log.num_events} events of the "
        f"core and {log.num_actions} actions; without planning {plain.num_events / plain_s:,.0f} of the first and "
        f"{plain.num_actions / plain_s:,.0f} of the second a second"
    )
    return (plain.num_actions + plain.num_events) / plain_s, run_s


def _timed(run: Callable[[], SimulationLog]) -> tuple[SimulationLog, float]:
    best_s, log = float("inf"), SimulationLog()
    for _ in range(3):
        gc.collect()
        started_s = time.process_time()
        log = run()
        best_s = min(best_s, time.process_time() - started_s)
    return log, best_s


PARTS = ("table", "acceptance", "moved", "bound", "speed", "live")
QUICK = ("table", "bound", "speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer batches, nothing moved, no live runs")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="of lengths and of the ranker's errors")
    parser.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}; all by default")
    parser.add_argument("--cases", default=",".join(CASES), help="of the table and of moved constants; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, for moved constants")
    parser.add_argument("--kept", type=Path, help="file in which simulations with moved constants are kept")
    parser.add_argument("--least", type=float, default=0.05, help="share that a constant moves a stage by, to be moved")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    quick: bool = options.quick
    parts = options.parts.split(",") if options.parts else [one for one in PARTS if not quick or one in QUICK]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    cases: list[str] = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}: {', '.join(CASES)}")
    figures: dict[str, float] = {}
    if "table" in parts:
        figures |= report(cases, seeds[:1] if quick else seeds, 9 if quick else BATCHES)
    if "acceptance" in parts:
        figures |= acceptances(cases, seeds[0], BATCHES)
    if "moved" in parts:
        figures |= moved(cases, seeds[0], options.jobs, Kept.read(options.kept), options.least)
    if "bound" in parts:
        cost = decode_cost(QWEN_72B, H800, 8)
        for key, recall in (("generation_over_bound", PAPER_RECALL), ("generation_over_bound_oracle", None)):
            physical, reachable = over_bounds(cost, seeds, recall)["scored"]
            print(f"{key}: {physical:.3f} over max(work / capacity, longest alone), {reachable:.3f} over the reachable")
            figures[key] = round(reachable, 3)
    if "speed" in parts:
        figures["events_per_s"], figures["run_128_s"] = (round(value, 2) for value in speed())
    if "live" in parts:
        figures |= live_errors()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
