"""How long training stands still for a version: ``publish_blocks_share`` of the bench ``parallel``.

    make bench NAME=parallel_publish        last line: {"publish_blocks_share": ..., ...}

Real learners train rounds and publish each batch's version as the trainer worker does: on a thread beside the rounds
of the next batch, and the next step waits for it. Measured is how long the training thread stands for that, over the
seconds of all batches but the first; the larger of one process and of two ranks that share the model by FSDP. Also
told: what a publication takes, for which training would stand still without the thread.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fakes.parallel_ranks import run_layout
from tests.fakes.training import make_groups
from transport.contracts.settings import TrainerSettings
from transport.contracts.training_memory import Layout
from workers.algorithms.loss import Objective
from workers.trainer.policy import attention
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import Ranks, place_of
from workers.trainer.policy.policy_learner import TrainStep
from workers.weights.publish import WeightPublisher

LIMIT = 0.03
"""Of ``publish_blocks_share`` (issue 12)."""
BATCHES = 4
"""The first of which nothing is published beside."""
ROUNDS = 4
PROMPT_TOKENS, RESPONSE_TOKENS = (64, 64), ((96, 64, 128, 96), (128, 96, 64, 96))
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one rank, means of a batch. blocked: the training thread stood still.  publishing: of a version."""

    batch: float
    blocked: float
    publishing: float

    @property
    def share(self) -> float:
        return self.blocked / self.batch


def learner(ranks: Ranks) -> TrainStep:
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    module.set_attn_implementation(attention.ATTENTION)
    policy = PolicyModel(module, dtype=torch.float32, temperature=1.0, ranks=ranks)
    return TrainStep(policy, TrainerSettings(micro_batch_tokens=1024), Objective())


def train_and_publish(ranks: Ranks, directory: Path) -> Seconds:
    step = learner(ranks)
    layout = ranks.layout
    part, beside = place_of(layout, ranks.rank).data, ranks.beside if layout.num_ranks > 1 else None
    publisher = WeightPublisher(f"bench-{layout.num_ranks}", directory / str(ranks.rank))

    def publish(version: int) -> float:
        started_s = time.perf_counter()
        publisher.publish(1, version, step.policy.masters, torch.bfloat16, beside)
        return time.perf_counter() - started_s

    rounds = [
        make_groups(seed=number, prompt_tokens=PROMPT_TOKENS, response_tokens=RESPONSE_TOKENS, vocabulary=8000)
        for number in range(ROUNDS)
    ]
    rows = [one for groups in rounds for group in groups for one in group.samples]
    publication: Future[float] | None = None
    blocked: list[float] = []
    publishing: list[float] = []
    started_s = 0.0
    with ThreadPoolExecutor(1, "publisher") as thread:
        for batch in range(BATCHES):
            if batch == 1:
                started_s = time.perf_counter()
            for groups in rounds:
                step.accumulate(groups[part :: layout.data])
            waited_s = time.perf_counter()
            if publication is not None:
                publishing.append(publication.result())
                blocked.append(time.perf_counter() - waited_s)
            step.close(batch=batch, num_rows=len(rows), num_tokens=sum(row.num_loss_tokens for row in rows))
            handed_s = time.perf_counter()
            publication = thread.submit(publish, batch + 1)
            if batch:
                blocked[-1] += time.perf_counter() - handed_s
        ended_s = time.perf_counter()
    publisher.close()
    return Seconds((ended_s - started_s) / (BATCHES - 1), fmean(blocked), fmean(publishing))


def figures() -> dict[str, float]:
    """``publish_blocks_share`` and what it is made of, by number of processes; seconds of the slowest rank."""
    found: dict[str, float] = {}
    shares: list[float] = []
    for layout in (Layout(), Layout(data=2)):
        with tempfile.TemporaryDirectory() as directory:
            of_ranks: list[Seconds] = run_layout(layout, train_and_publish, Path(directory))
        slowest = max(of_ranks, key=lambda seconds: seconds.share)
        name = f"_{layout.num_ranks}"
        found[f"batch_s{name}"] = round(slowest.batch, 3)
        found[f"publishing_s{name}"] = round(slowest.publishing, 4)
        found[f"publish_blocks_share{name}"] = round(slowest.share, 5)
        shares.append(slowest.share)
    return {"publish_blocks_share": round(max(shares), 5), **found}


def main() -> None:
    found = figures()
    print(json.dumps(found))
    if found["publish_blocks_share"] > LIMIT:
        raise SystemExit(f"publish_blocks_share {found['publish_blocks_share']} is above {LIMIT}")


if __name__ == "__main__":
    main()
