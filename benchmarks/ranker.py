"""Figure ``ranker``: tail recall of the length ranker on real prompts and lengths, and what it costs.

Reads the data sets of ``--data`` (or STREAMRL_LENGTH_DATA; default ../shared/data): prompts_NAME.jsonl.gz with
{id, prompt} and lengths_NAME.jsonl.gz with {id, model, output_tokens}. Every figure is the mean over split seeds 0-4,
7:2:1 by prompt, measured on the test prompts; parameters were tuned on seeds 100 and up.

- gym, math: the text alone. The truth is the mean of a prompt's samples.
- math_base: the text and the base policy's length of the same prompt (a cold start before RL).
- castillo_history5: five samples of a prompt seen, the mean of its other five predicted, with the text as prior.

    python -m benchmarks.ranker [--data DIR] [--seeds 0,1,2,3,4] [--all]

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

from ranker.history import LengthHistory
from ranker.logs import PromptLengths, read_log, split
from ranker.model import TextModel, train
from ranker.protocol import RankerError
from ranker.quality import RankQuality, evaluate

DEFAULT_DATA = Path(__file__).parents[2] / "shared" / "data"
GYM, GYM_MODEL = "reasoning_gym", "meta-llama_llama-4-maverick"
MATH, MATH_MODEL, MATH_BASE_MODEL = "matheval", "starzmustdie/Qwen-2.5-3B-rlft", "Qwen/Qwen2.5-3B-Instruct"
CASTILLO, CASTILLO_MODEL = "castillo", "Qwen--Qwen2.5-32B-Instruct"
SEEN = 5


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
    parser.add_argument("--all", action="store_true", help="every model of every set, text only")
    arguments = parser.parse_args()
    folder, seeds = data_folder(arguments.data), [int(seed) for seed in arguments.seeds.split(",")]
    try:
        measure(folder, seeds, every_model=arguments.all)
    except RankerError as error:
        sys.exit(str(error))


def measure(folder: Path, seeds: Sequence[int], *, every_model: bool) -> None:
    gym, math = load(folder, GYM, GYM_MODEL), load(folder, MATH, MATH_MODEL)
    based = with_base(math, load(folder, MATH, MATH_BASE_MODEL))
    castillo = load(folder, CASTILLO, CASTILLO_MODEL)
    text = {name: [train(samples, seed) for seed in seeds] for name, samples in (("gym", gym), ("math", math))}
    figures: dict[str, float] = {}
    for name, results in text.items():
        figures |= report(name, [result.quality for result in results])
    figures |= report("math_base", [train(based, seed).quality for seed in seeds])
    figures |= report("castillo_history5", [history_quality(castillo, seed) for seed in seeds])
    for cost in ("train_cpu_s_per_1000", "score_cpu_s_per_1000"):
        by_set = [statistics.fmean(getattr(result, cost) for result in results) for results in text.values()]
        figures[cost] = round(max(by_set), 3)
    if every_model:
        for name in (GYM, MATH, CASTILLO):
            for model in models_of(folder, name):
                report(f"{name} {model}"[:44], [train(load(folder, name, model), seed).quality for seed in seeds])
    print(json.dumps(figures))


def models_of(folder: Path, name: str) -> list[str]:
    """Every model with lengths in a set."""
    with gzip.open(folder / f"lengths_{name}.jsonl.gz") as file:
        return sorted({msgspec.json.decode(line)["model"] for line in file})


if __name__ == "__main__":
    main()
