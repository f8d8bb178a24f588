"""Figure ``ranker``: tail recall of the length ranker on real prompts and lengths, and what it costs.

Reads the data sets of ``--data`` (or STREAMRL_LENGTH_DATA; default ../shared/data): prompts_NAME.jsonl.gz with
{id, prompt} and lengths_NAME.jsonl.gz with {id, model, output_tokens}. Every figure is the mean over split seeds 0-4,
7:2:1 by prompt, measured on the test prompts; parameters were tuned on seeds 100 and up.

- gym, math: the text alone. The truth is the mean of a prompt's samples.
- math_base: the text and the base policy's length of the same prompt (a cold start before RL).
- castillo_history5: five samples of a prompt seen, the mean of its other five predicted, with the text as prior.
- drift: the policy changes under a ranker. text: trained before the run on the base policy's lengths (math), then every
  prompt comes once, answered by the RL-tuned policy; recall at 20% before the change, in the first 1,024 groups after
  it, and in the last 1,024, when the run has trained it again. history: prompts seen under one model (CASTILLO, 7B)
  come back under another (32B), and once more.
- ceiling: what samples are worth knowing. A prompt's own other five samples, or all ten but one, are the prediction:
  hardly any ranker of prompts finds more; and ``true``: as if a prompt's ten samples were all that there is to it,
  which flatters.

    python -m benchmarks.ranker [--data DIR] [--seeds 0,1,2,3,4] [--all] [--only drift,ceiling] [--out FILE]

``--all`` prints text-only recall of every model of every set as well. Last line: JSON; ``*_sd`` is the standard
deviation over the seeds; the costs are those of the dearer set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from ranker.history import LengthHistory
from ranker.logs import PromptLengths, mean_tokens, read_log, shuffled, split
from ranker.model import TextModel, train
from ranker.online import OnlineRanker
from ranker.protocol import RankerError
from ranker.quality import RankQuality, evaluate, tail_recall

DEFAULT_DATA = Path(__file__).parents[2] / "shared" / "data"
GYM, GYM_MODEL = "reasoning_gym", "meta-llama_llama-4-maverick"
MATH, MATH_MODEL, MATH_BASE_MODEL = "matheval", "starzmustdie/Qwen-2.5-3B-rlft", "Qwen/Qwen2.5-3B-Instruct"
CASTILLO, CASTILLO_MODEL = "castillo", "Qwen--Qwen2.5-32B-Instruct"
CASTILLO_SMALL_MODEL = "Qwen--Qwen2.5-7B-Instruct-1M"
SEEN = 5
BATCH = 128
"""Groups that are predicted before any of them ends."""
DRIFT_WINDOW = 1_024
"""Groups of which recall is told: its standard error at 20% is .03."""
REFIT_S = 600.0
PARTS = ("recall", "drift", "ceiling")


def data_folder(argument: str | None) -> Path:
    folder = Path(argument or os.environ.get("STREAMRL_LENGTH_DATA") or DEFAULT_DATA)
    if not (folder / f"lengths_{GYM}.jsonl.gz").is_file():
        sys.exit(
            f"no length data in {folder}: name a folder with --data or STREAMRL_LENGTH_DATA, "
            "or measure your own log with `streamrl-orchestrator rank evaluate LOG`"
        )
    return folder


def load(folder: Path, name: str, model: str) -> list[PromptLengths]:
    return read_log(folder / f"lengths_{name}.jsonl.gz", folder / f"prompts_{name}.jsonl.gz", model)


def with_base(samples: Sequence[PromptLengths], base: Sequence[PromptLengths]) -> list[PromptLengths]:
    """Give each prompt the lengths that the base policy had on it."""
    known = {sample.prompt_id: sample.tokens for sample in base}
    return [replace(sample, base_tokens=known.get(sample.prompt_id, ())) for sample in samples]


def history_quality(samples: Sequence[PromptLengths], seed: int) -> RankQuality:
    """Five samples of every test prompt, drawn by the seed, are seen; the mean of the others is predicted."""
    parts = split([sample for sample in samples if len(sample.tokens) == 2 * SEEN], seed)
    model = TextModel.fit(parts.train, parts.validation, seed)
    priors = model.predict([sample.text for sample in parts.test])
    history, draw = LengthHistory(), random.Random(seed)
    halves = [draw.sample(sample.tokens, 2 * SEEN) for sample in parts.test]
    for sample, tokens, prior in zip(parts.test, halves, priors, strict=True):
        history.observe(sample.prompt_id, tokens[:SEEN], prior)
    estimates = [history.posterior(sample.prompt_id, prior) for sample, prior in zip(parts.test, priors, strict=True)]
    rest = [replace(sample, tokens=tuple(tokens[SEEN:])) for sample, tokens in zip(parts.test, halves, strict=True)]
    return evaluate(estimates, rest)


def text_drift(before: Sequence[PromptLengths], after: Sequence[PromptLengths], seed: int) -> dict[str, float]:
    """A ranker trained on ``before``, whose policy then becomes that of ``after``: the same prompts, each visited once.

    Recall at 20%: of the old policy, then of the new one's first and last DRIFT_WINDOW groups, with what the run
    learns in between; and how many refits that were.
    """
    trained = train(before, seed)
    ranker, pairs, order = OnlineRanker(trained.model), list[tuple[float, float]](), shuffled(after, seed)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        said = ranker.predict([one.prompt_id for one in batch], [one.text for one in batch])
        pairs += [(one.mean_tokens, mean) for one, mean in zip(said, mean_tokens(batch), strict=True)]
        for one in batch:
            ranker.observe(one.prompt_id, one.tokens)
        if ranker.refit_due:
            ranker.refit(REFIT_S)
    said, came = np.array(pairs).T
    return {
        "drift_text_before_20": trained.quality.recall_20,
        "drift_text_first_20": tail_recall(came[:DRIFT_WINDOW], said[:DRIFT_WINDOW], 0.2),
        "drift_text_last_20": tail_recall(came[-DRIFT_WINDOW:], said[-DRIFT_WINDOW:], 0.2),
        "drift_text_refits": float(ranker.quality().refits),
    }


def history_drift(before: Sequence[PromptLengths], after: Sequence[PromptLengths], seed: int) -> dict[str, float]:
    """Prompts with five samples under one policy come back under another, five samples each time.

    Recall at 20% of the mean of those five: when the last visit was the old policy's, and when it was the new one's.
    """
    chance, new = random.Random(seed), {one.prompt_id: one for one in after}
    both = [one for one in shuffled(before, seed) if one.prompt_id in new]
    ranker, figures = OnlineRanker(), dict[str, float]()
    draws = {one.prompt_id: chance.sample(new[one.prompt_id].tokens, 2 * SEEN) for one in both}
    visits = [
        [chance.sample(one.tokens, SEEN) for one in both],
        [draws[one.prompt_id][:SEEN] for one in both],
        [draws[one.prompt_id][SEEN:] for one in both],
    ]
    for name, visit in zip(("unseen", "after_old", "after_new"), visits, strict=True):
        said: list[float] = []
        for start in range(0, len(both), BATCH):
            batch = list(zip(both, visit, strict=True))[start : start + BATCH]
            estimates = ranker.predict([one.prompt_id for one, _ in batch], [one.text for one, _ in batch])
            said += [estimate.mean_tokens for estimate in estimates]
            for one, tokens in batch:
                ranker.observe(one.prompt_id, tokens)
        if name != "unseen":
            came = np.array([statistics.fmean(tokens) for tokens in visit])
            figures[f"drift_history_{name}_20"] = tail_recall(came, np.array(said), 0.2)
    return figures


def ceiling(samples: Sequence[PromptLengths], seed: int) -> dict[str, float]:
    """Recall at 20% of means of one and five samples: by the mean of a prompt's others, and of all that it has."""
    chance = random.Random(seed)
    draws = [chance.sample(one.tokens, 2 * SEEN) for one in samples if len(one.tokens) == 2 * SEEN]
    again = [[chance.choice(tokens) for _ in range(SEEN)] for tokens in draws]

    def recall(came: Sequence[Sequence[int]], known: Sequence[Sequence[int]]) -> float:
        means = [np.array([statistics.fmean(tokens) for tokens in of]) for of in (came, known)]
        return tail_recall(means[0], means[1], 0.2)

    return {
        "ceiling_1_20": recall([tokens[:1] for tokens in draws], [tokens[1:] for tokens in draws]),
        "ceiling_5_20": recall([tokens[:SEEN] for tokens in draws], [tokens[SEEN:] for tokens in draws]),
        "ceiling_1_true_20": recall([tokens[:1] for tokens in again], draws),
        "ceiling_5_true_20": recall(again, draws),
    }


def summary(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Print and return means over seeds."""
    means = {name: round(statistics.fmean(one[name] for one in results), 4) for name in results[0]}
    print("  ".join(f"{name} {value:.3f}" for name, value in means.items()), flush=True)
    return means


def report(name: str, results: Sequence[RankQuality]) -> dict[str, float]:
    """Print one line; return its keys of the figure."""
    figures: dict[str, float] = {}
    for tail in (20, 10, 5):
        values = [getattr(result, f"recall_{tail}") for result in results]
        figures[f"{name}_{tail}"] = round(statistics.fmean(values), 4)
        figures[f"{name}_{tail}_sd"] = round(statistics.pstdev(values), 4)
    recalls = "  ".join(f"{figures[f'{name}_{tail}']:.3f}±{figures[f'{name}_{tail}_sd']:.3f}" for tail in (20, 10, 5))
    tau = statistics.fmean(result.kendall_tau for result in results)
    coverage = statistics.fmean(result.coverage for result in results)
    print(f"{name:44} {recalls}  tau {tau:.2f}  80% interval {coverage:.2f}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with the data sets")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--only", default="", help="parts, comma-separated: recall, drift, ceiling; all by default")
    parser.add_argument("--all", action="store_true", help="every model of every set, text only")
    parser.add_argument(
        "--out", type=Path, help="file that gets the last line, too; benchmarks/papers/ranker_drift.json"
    )
    arguments = parser.parse_args()
    folder, seeds = data_folder(arguments.data), [int(seed) for seed in arguments.seeds.split(",")]
    try:
        parts = arguments.only.split(",") if arguments.only else PARTS
        figures = json.dumps(measure(folder, seeds, parts, every_model=arguments.all))
    except RankerError as error:
        sys.exit(str(error))
    if arguments.out:
        arguments.out.write_text(figures + "\n")
    print(figures)


def measure(folder: Path, seeds: Sequence[int], parts: Sequence[str], *, every_model: bool) -> dict[str, float]:
    math, castillo = load(folder, MATH, MATH_MODEL), load(folder, CASTILLO, CASTILLO_MODEL)
    figures: dict[str, float] = {}
    if "recall" in parts:
        figures |= recalls(folder, math, castillo, seeds)
    if "drift" in parts:
        base, small = load(folder, MATH, MATH_BASE_MODEL), load(folder, CASTILLO, CASTILLO_SMALL_MODEL)
        figures |= summary([text_drift(base, math, seed) for seed in seeds])
        figures |= summary([history_drift(small, castillo, seed) for seed in seeds])
    if "ceiling" in parts:
        figures |= summary([ceiling(castillo, seed) for seed in seeds])
    if every_model:
        for name in (GYM, MATH, CASTILLO):
            for model in models_of(folder, name):
                report(f"{name} {model}"[:44], [train(load(folder, name, model), seed).quality for seed in seeds])
    return figures


def recalls(
    folder: Path, math: Sequence[PromptLengths], castillo: Sequence[PromptLengths], seeds: Sequence[int]
) -> dict[str, float]:
    """Of the text alone, with the base policy's length, with five samples seen; and what it costs."""
    gym, based = load(folder, GYM, GYM_MODEL), with_base(math, load(folder, MATH, MATH_BASE_MODEL))
    text = {name: [train(samples, seed) for seed in seeds] for name, samples in (("gym", gym), ("math", math))}
    figures: dict[str, float] = {}
    for name, results in text.items():
        figures |= report(name, [result.quality for result in results])
    figures |= report("math_base", [train(based, seed).quality for seed in seeds])
    figures |= report("castillo_history5", [history_quality(castillo, seed) for seed in seeds])
    for cost in ("train_cpu_s_per_1000", "score_cpu_s_per_1000"):
        by_set = [statistics.fmean(getattr(result, cost) for result in results) for results in text.values()]
        figures[cost] = round(max(by_set), 3)
    return figures


def models_of(folder: Path, name: str) -> list[str]:
    """Every model with lengths in a set."""
    with gzip.open(folder / f"lengths_{name}.jsonl.gz") as file:
        return sorted({msgspec.json.decode(line)["model"] for line in file})


if __name__ == "__main__":
    main()
