"""Figure ``dispatch``: what plans of dispatch gain, what a useless ranker costs, how long planning takes.

Generation of one batch by itself, on the cost model of Qwen2.5-72B on 16 instances of 8 H800 and the exact forecast of
``finish_times``: everything is there at the start, samples stay where they start, and the batch is
done with its last sample. Recorded lengths are scaled to a 99th percentile of ``P99_TOKENS``, as those of a reasoning
model would be, because on this hardware answers of a few hundred tokens leave nothing to decide.

    generation      over max(work / capacity, longest sample alone), and over the end that no placement can beat
    useless ranker  random predictions that claim to be good; experience of two batches has found them out
    gain            even dispatch's time over ours, on recorded lengths, with a ranker of the paper's recall

    python -m benchmarks.dispatch [--data DIRECTORY] [--quick]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.papers.bounds import bound_s
from benchmarks.papers.rules import plan_of
from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Plan, Problem
from orchestrator.core.model.pipeline import Calibration
from orchestrator.sim.costs import H800, decode_cost
from orchestrator.sim.lengths import error_of_recall, long_tailed, tail_recall
from orchestrator.sim.llms import QWEN_72B
from transport.contracts.continuous_batching import DecodeCost, finish_times
from transport.contracts.types import GroupId, WorkerId

DATA = "STREAMRL_DATA"
"""Directory with ``trace_azure2023_conv.csv.gz`` and ``lengths_castillo.jsonl.gz``."""
CASTILLO_MODEL = "Qwen--Qwen2.5-32B-Instruct"
P99_TOKENS = 12_000
MAX_TOKENS = 20_000
PROMPT_TOKENS = 500
PAPER_RECALL = 0.87
PROMPTS, INSTANCES = 1024, 16
POLICIES = ("even", "two_class_sum", "two_class_max", "slicing", "scored")
MAX_RUNNING = 1024

Lengths = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch: what is predicted, and the lengths that come."""

    problem: Problem
    actual: dict[GroupId, float]

    @classmethod
    def of(cls, lengths: Lengths, predicted: Lengths, sigmas: Lengths, cost: DecodeCost, seed: int) -> Case:
        groups = tuple(
            GroupLength(group_id=GroupId(f"0/{place}"), mean_tokens=tokens, sigma=sigma)
            for place, (tokens, sigma) in enumerate(zip(predicted, sigmas, strict=True))
        )
        instances = tuple(
            Instance(worker_id=WorkerId(f"generate-{place}"), cost=cost, max_running=MAX_RUNNING)
            for place in range(INSTANCES)
        )
        problem = Problem(
            groups=groups, instances=instances, prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, seed=seed
        )
        return cls(problem=problem, actual=dict(zip((group.group_id for group in groups), lengths, strict=True)))

    def generation_s(self, plan: Plan) -> float:
        """When the last sample ends under ``plan``."""
        return max(
            max(
                finish_times(
                    instance.cost,
                    [self.actual[group.group_id] for group in share],
                    prompt_tokens=PROMPT_TOKENS,
                    max_running=instance.max_running,
                ),
                default=0.0,
            )
            for instance, share in zip(self.problem.instances, plan.shares, strict=True)
        )

    def ratio(self, policy: str, against: str = "even") -> float:
        """Time under ``policy`` over that under ``against``."""
        return self.generation_s(plan_of(policy, self.problem)) / self.generation_s(plan_of(against, self.problem))


# -- generation over its bounds


def over_bounds(cost: DecodeCost, seeds: Iterable[int], recall: float | None) -> dict[str, tuple[float, float]]:
    """Policy -> (over the physical bound, over the end that no placement beats), means."""
    ratios: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for seed in seeds:
        drawn = long_tailed(PROMPTS, seed=seed, recall=recall)
        lengths = [samples[0] for samples in drawn.lengths]
        case = Case.of(lengths, drawn.predicted, [drawn.sigma] * PROMPTS, cost, seed)
        physical_s = physical_bound_s(cost, lengths)
        reachable_s = bound_s(cost, lengths, INSTANCES, prompt_tokens=PROMPT_TOKENS)
        for policy, found in ratios.items():
            end_s = case.generation_s(plan_of(policy, case.problem))
            found.append((end_s / physical_s, end_s / reachable_s))
    return {policy: (fmean(a for a, _ in found), fmean(b for _, b in found)) for policy, found in ratios.items()}


def physical_bound_s(cost: DecodeCost, lengths: Lengths) -> float:
    """max(work / capacity, longest sample alone), work at the batch that memory has room for."""
    mean_tokens = fmean(lengths)
    batch = min(MAX_RUNNING, cost.kv_capacity_tokens / (PROMPT_TOKENS + mean_tokens))
    token_s = cost.step_s(batch, batch * (PROMPT_TOKENS + mean_tokens / 2)) / batch
    alone_s = cost.steps_s(1, PROMPT_TOKENS, max(lengths))
    return max(sum(lengths) * token_s / INSTANCES, alone_s)


# -- a ranker that knows nothing


def useless_ranker(cost: DecodeCost, draw: Callable[[random.Random], list[float]], draws: int) -> list[float]:
    """[draws] what "scored" costs against even dispatch when predictions are drawn from the lengths of other prompts.

    They claim a spread of 0.2, like a very good ranker's. What comes of two batches is known.
    """
    losses: list[float] = []
    for seed in range(draws):
        chance = random.Random(f"useless/{seed}")
        calibration = Calibration()
        for _ in range(2):
            for predicted, actual in zip(draw(chance), draw(chance), strict=True):
                calibration.add(predicted, 0.2, round(actual))
        corrected = [calibration.corrected(predicted, 0.2) for predicted in draw(chance)]
        case = Case.of(draw(chance), [mean for mean, _ in corrected], [sigma for _, sigma in corrected], cost, seed)
        losses.append(case.ratio("scored") - 1.0)
    return losses


def believed(cost: DecodeCost, draw: Callable[[random.Random], list[float]], draws: int) -> float:
    """The same without experience and without a score: what slicing loses when it believes such a ranker."""
    ratios: list[float] = []
    for seed in range(draws):
        chance = random.Random(f"believed/{seed}")
        lengths, predicted = draw(chance), draw(chance)
        ratios.append(Case.of(lengths, predicted, [0.2] * len(lengths), cost, seed).ratio("slicing") - 1.0)
    return fmean(ratios)


# -- recorded lengths


def azure(directory: Path) -> list[float]:
    """Generated tokens of the requests of a conversation service."""
    with gzip.open(directory / "trace_azure2023_conv.csv.gz", "rt") as lines:
        return [float(row["GeneratedTokens"]) for row in csv.DictReader(lines) if float(row["GeneratedTokens"]) > 0]


def castillo(directory: Path) -> list[list[float]]:
    """[prompts][samples] response tokens of one model, ten samples a prompt."""
    with gzip.open(directory / "lengths_castillo.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [[float(tokens) for tokens in row["output_tokens"]] for row in rows if row["model"] == CASTILLO_MODEL]


def scaled(lengths: Lengths) -> list[float]:
    """With a 99th percentile of P99_TOKENS, cut at MAX_TOKENS."""
    factor = P99_TOKENS / sorted(lengths)[int(0.99 * len(lengths))]
    return [min(float(MAX_TOKENS), max(1.0, round(length * factor))) for length in lengths]


def azure_gains(cost: DecodeCost, lengths: Lengths, seeds: Iterable[int]) -> tuple[dict[str, float], float]:
    """(policy -> mean gain over even dispatch, recall) of predictions with the error of the paper's recall."""
    logs = [math.log(length) for length in lengths]
    spread = stdev(logs)
    error = error_of_recall(PAPER_RECALL, sigma=spread)
    trust = spread**2 / (spread**2 + error**2)
    left = error * math.sqrt(trust)

    def case(seed: int) -> tuple[Case, float]:
        chance = random.Random(f"azure/{seed}")
        actual = chance.sample(list(lengths), PROMPTS)
        seen = [math.log(length) + chance.gauss(0.0, error) for length in actual]
        predicted = [math.exp(fmean(logs) + trust * (log - fmean(logs)) + left**2 / 2) for log in seen]
        return Case.of(actual, predicted, [left] * PROMPTS, cost, seed), tail_recall(actual, predicted, 0.2)

    return gains([case(seed) for seed in seeds])


def castillo_gains(
    cost: DecodeCost, prompts: Sequence[Lengths], seeds: Iterable[int]
) -> tuple[dict[str, float], float]:
    """The same with real predictions: mean and spread of five former samples of the prompt; a sixth is generated."""
    factor = (
        P99_TOKENS
        / sorted(tokens for samples in prompts for tokens in samples)[
            int(0.99 * sum(len(samples) for samples in prompts))
        ]
    )

    def case(seed: int) -> tuple[Case, float]:
        chance = random.Random(f"castillo/{seed}")
        chosen = [
            [min(float(MAX_TOKENS), max(1.0, tokens * factor)) for tokens in chance.sample(list(samples), 6)]
            for samples in chance.sample([samples for samples in prompts if len(samples) >= 6], PROMPTS)
        ]
        actual = [samples[5] for samples in chosen]
        predicted = [fmean(samples[:5]) for samples in chosen]
        spreads = [stdev(math.log(tokens) for tokens in samples[:5]) for samples in chosen]
        typical = median(spreads)  # five samples say little of a spread: half of it is everyone's
        sigmas = [math.hypot(spread, typical) / math.sqrt(2) * math.sqrt(6 / 5) for spread in spreads]
        return Case.of(actual, predicted, sigmas, cost, seed), tail_recall(actual, predicted, 0.2)

    return gains([case(seed) for seed in seeds])


def gains(cases: Sequence[tuple[Case, float]]) -> tuple[dict[str, float], float]:
    found = {policy: fmean(1 / case.ratio(policy) for case, _ in cases) for policy in POLICIES}
    return found, fmean(recall for _, recall in cases)


# -- speed


def plan_s(cost: DecodeCost, num_prompts: int, num_instances: int, *, train_token_s: float = 0.0) -> float:
    """CPU seconds of the slowest policy, the best of three."""
    drawn = long_tailed(num_prompts, seed=0, recall=PAPER_RECALL)
    case = Case.of([1.0] * num_prompts, drawn.predicted, [drawn.sigma] * num_prompts, cost, seed=0)
    one = case.problem.instances[0]
    problem = replace(case.problem, instances=(one,) * num_instances, train_token_s=train_token_s)
    best_s = math.inf
    for _ in range(3):
        started_s = time.process_time()
        plan_of("scored", problem)
        best_s = min(best_s, time.process_time() - started_s)
    return best_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get(DATA, ""), help=f"recorded lengths; default: ${DATA}")
    parser.add_argument("--quick", action="store_true", help="fewer draws")
    options = parser.parse_args()
    draws, seeds = (20, range(100, 104)) if options.quick else (200, range(100, 130))
    cost = decode_cost(QWEN_72B, H800, 8)
    for name, recall in (("known lengths", None), (f"recall {PAPER_RECALL}", PAPER_RECALL)):
        for policy, (physical, reachable) in over_bounds(cost, seeds, recall).items():
            print(f"{name:>13}, {policy:13} {physical:.3f} over the physical bound, {reachable:.3f} over the reachable")
    losses = useless_ranker(cost, draw_long_tailed, draws)
    half = 1.96 * stdev(losses) / math.sqrt(draws)
    print(
        f"useless ranker: {fmean(losses):+.2%} +- {half:.2%} (95%, {draws} draws); slicing that believes it: ", end=""
    )
    print(f"{believed(cost, draw_long_tailed, draws // 5):+.1%}")
    figures: dict[str, float | None] = {"useless_ranker_loss": round(fmean(losses), 4)}
    figures |= gains_recorded(cost, Path(options.data), seeds) if options.data else no_data()
    figures["plan_ms_1024x16"] = round(1e3 * max(plan_s(cost, 1024, 16), plan_s(cost, 1024, 16, train_token_s=1e-6)), 1)
    figures["plan_s_16384x256"] = round(max(plan_s(cost, 16384, 256), plan_s(cost, 16384, 256, train_token_s=1e-6)), 3)
    print(json.dumps(figures))


def gains_recorded(cost: DecodeCost, directory: Path, seeds: Iterable[int]) -> dict[str, float | None]:
    """The gains on recorded lengths, printed for every policy."""
    found: dict[str, float | None] = {}
    seeds = list(seeds)
    for name, (by_policy, recall) in {
        "azure": azure_gains(cost, scaled(azure(directory)), seeds),
        "castillo": castillo_gains(cost, castillo(directory), seeds),
    }.items():
        print(f"{name}: recall {recall:.2f}, gain over even dispatch: ", end="")
        print(", ".join(f"{policy} {gain:.3f}" for policy, gain in by_policy.items()))
        found[f"{name}_gain"] = round(by_policy["scored"], 3)
    return found


def no_data() -> dict[str, float | None]:
    print(f"no recorded lengths: name their directory with --data or {DATA}")
    return {"azure_gain": None, "castillo_gain": None}


def draw_long_tailed(chance: random.Random) -> list[float]:
    """Lengths of one batch of the paper's workload."""
    return [float(min(MAX_TOKENS, round(4500 * math.exp(chance.gauss(0.0, 0.8))))) for _ in range(PROMPTS)]


if __name__ == "__main__":
    main()
