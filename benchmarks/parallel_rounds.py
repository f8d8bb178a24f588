"""What streaming costs a sharded trainer: a figure of the bench ``parallel``.

    streamed_over_whole      seconds of a batch trained in the rounds that are released while its groups arrive, over
                             the same batch trained once all of it is there
    unthrottled_over_whole   the same with trainer.round_tokens = 0: a round goes as soon as every rank has a group

Two FSDP ranks over gloo, one thread each. Groups arrive in the order in which they would end, shortest first, one at a
time; which of them make a round, and on which rank, the core decides (``fills_round``, ``pack_round``), with the
``round_tokens`` that "auto" stands for in such a run. Only training is timed, not the wait for arrivals. The three ways
take turns, and a ratio is the median of the turns of rank 0.

    python -m benchmarks.parallel_rounds [--turns N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orchestrator.core.model.settings import core_settings
from orchestrator.core.training import fills_round, pack_round
from tests.fakes.parallel_ranks import run_layout
from tests.fakes.training import make_groups
from transport.contracts.settings import PipelineSettings, SamplingSettings, Settings, TrainerSettings
from transport.contracts.training_memory import Layout
from workers.algorithms.loss import Objective
from workers.trainer.learner import PromptGroup
from workers.trainer.policy import attention
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import Ranks
from workers.trainer.policy.policy_learner import TrainStep

RANKS = 2
GROUPS, SAMPLES = 32, 4
PROMPT_TOKENS = 60
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 60.0, 0.7, 400
"""Of responses, log-normal, cut: a tail six times the median."""
MICRO_BATCH_TOKENS = 1024
WORDS = 4096
RUN = Settings(
    trainer=TrainerSettings(ranks=RANKS, micro_batch_tokens=MICRO_BATCH_TOKENS),
    pipeline=PipelineSettings(groups_per_batch=GROUPS, group_size=SAMPLES),
    sampling=SamplingSettings(max_new_tokens=MOST_TOKENS),
)
WAYS = {"whole": -1, "streamed": core_settings(RUN).round_tokens, "unthrottled": 0}
"""Way -> round_tokens; -1: nothing arrives while the batch is trained."""

Rounds = Sequence[Sequence[Sequence[int]]]
"""Of each round, of each rank: which groups."""


def batch_of(step: int) -> list[PromptGroup]:
    """Groups in the order of their ends: that of the longest sample."""
    random = np.random.default_rng(step)
    lengths = np.minimum(MEDIAN_TOKENS * np.exp(SPREAD * random.normal(size=(GROUPS, SAMPLES))), MOST_TOKENS)
    lengths = np.maximum(lengths.astype(int), 4)
    ordered = lengths[np.argsort(lengths.max(axis=1))]
    return make_groups(
        seed=step,
        prompt_tokens=[PROMPT_TOKENS] * GROUPS,
        response_tokens=[tuple(map(int, row)) for row in ordered],
        vocabulary=WORDS,
        logprob=-8.0,
    )


def tokens_of(group: PromptGroup) -> int:
    return len(group.prompt_ids) + sum(len(sample.response_ids) for sample in group.samples)


def rounds_of(groups: Sequence[PromptGroup], round_tokens: int) -> Iterator[list[list[int]]]:
    """As the core releases them. round_tokens: -1: all groups are there before the first round."""
    queue: list[int] = []
    given = [0] * RANKS

    def send() -> list[list[int]]:
        packed = pack_round([tokens_of(groups[index]) for index in queue], RANKS, MICRO_BATCH_TOKENS, given)
        found = [[queue[place] for place in rank] for rank in packed]
        for rank, indices in enumerate(found):
            given[rank] += sum(tokens_of(groups[index]) for index in indices)
        queue[:] = [index for index in queue if all(index not in indices for indices in found)]
        return found

    for index in range(len(groups)):
        queue.append(index)
        tokens = sum(tokens_of(groups[waiting]) for waiting in queue)
        if round_tokens >= 0 and len(queue) >= RANKS and fills_round(tokens, RANKS, round_tokens):
            yield send()
    while queue:
        yield send()


def new_step(ranks: Ranks) -> TrainStep:
    torch.manual_seed(0)
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION).eval()
    policy = PolicyModel(cast(PreTrainedModel, module), dtype=torch.float32, temperature=1.0, ranks=ranks)
    return TrainStep(policy, TrainerSettings(micro_batch_tokens=MICRO_BATCH_TOKENS), Objective())


def timed(ranks: Ranks, step: TrainStep, groups: Sequence[PromptGroup], rounds: Rounds) -> float:
    """Seconds of a batch."""
    rows = sum(len(group.samples) for group in groups)
    tokens = sum(sample.num_loss_tokens for group in groups for sample in group.samples)
    ranks.gather(b"")  # both begin at once
    start_s = time.perf_counter()
    for packed in rounds:
        step.accumulate([groups[index] for index in packed[ranks.rank]])
    step.close(batch=0, num_rows=rows, num_tokens=tokens)
    return time.perf_counter() - start_s


def take_turns(ranks: Ranks, turns: int) -> dict[str, list[float]]:
    """Seconds of each way, turn by turn, after one that is not counted."""
    step = new_step(ranks)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        groups = batch_of(turn)
        for way in (list(WAYS) * 2)[turn % len(WAYS) :][: len(WAYS)]:  # each is first as often as the others
            seconds = timed(ranks, step, groups, list(rounds_of(groups, WAYS[way])))
            if turn:
                found[way].append(seconds)
    return found


def num_rounds(turns: int) -> Counter[str]:
    """Of all counted turns."""
    return Counter({w: sum(len(list(rounds_of(batch_of(t + 1), n))) for t in range(turns)) for w, n in WAYS.items()})


def figures(turns: int = 6) -> dict[str, float]:
    seconds = run_layout(Layout(data=RANKS), take_turns, turns, limit_s=1800.0)[0]

    def ratio(way: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[way], seconds["whole"], strict=True))

    rounds = num_rounds(turns)
    return {
        "streamed_over_whole": ratio("streamed"),
        "unthrottled_over_whole": ratio("unthrottled"),
        "rounds_whole": rounds["whole"] / turns,
        "rounds_streamed": rounds["streamed"] / turns,
        "rounds_unthrottled": rounds["unthrottled"] / turns,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="batches that each way trains")
    print(json.dumps({name: round(value, 3) for name, value in figures(parser.parse_args().turns).items()}))
