"""How near the prediction of a rank's memory comes: ``predicted_over_measured`` of the bench ``parallel``.

Real learners train real rows on the CPU, as many gloo processes as the layout has ranks. States are the bytes of the
tensors that a rank holds between two steps; the peak is that of torch's memory tracker over a whole step, the largest
of the ranks. Both are counted, not timed, so neighbours on the machine do not matter.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fakes.parallel_ranks import run_layout
from transport.contracts.llms import Llm, from_config
from transport.contracts.settings import ParallelSettings, TrainerSettings
from transport.contracts.training_memory import Layout, RankMemory, Training, rank_memory, state_bytes
from transport.contracts.types import GroupId, RowId
from workers.algorithms.loss import Objective
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy import attention
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import Ranks, local_part
from workers.trainer.policy.policy_learner import TrainStep
from workers.trainer.policy.recompute import Recompute, recompute_activations

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small model, how its ranks share it, and what each trains: a group of ``samples`` for each stage."""

    family: str = "llama"
    dtype: str = "bfloat16"
    layers: int = 4
    hidden: int = 256
    mlp: int = 768
    words: int = 4096
    tied: bool = False
    prompt_tokens: int = 100
    response_tokens: int = 300
    samples: int = 4
    recompute: Recompute = "none"
    offload: Literal["none", "optimizer"] = "none"
    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def layout(self) -> Layout:
        return Layout(data=self.data, tensor=self.tensor, pipeline=self.pipeline)

    @property
    def shape(self) -> dict[str, Any]:
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.hidden // 4,
            "intermediate_size": self.mlp,
            "vocab_size": self.words,
            "tie_word_embeddings": self.tied,
        }

    @property
    def llm(self) -> Llm:
        return from_config(self.family, self.shape | {"model_type": self.family})

    @property
    def tokens(self) -> int:
        """Of a micro-batch: the last token of a response is no input."""
        return self.prompt_tokens + self.samples * (self.response_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one rank: between two steps, and at the fullest moment of one."""

    states: int
    peak: int


def said(case: Case) -> RankMemory:
    """Of the fullest rank."""
    return rank_memory(case.llm, case.layout, training_of(case))


def training_of(case: Case) -> Training:
    return Training(
        tokens=case.tokens,
        compute_bytes=getattr(torch, case.dtype).itemsize,
        recompute=case.recompute,
        offload=case.offload,
        host_is_device=True,
    )


def measure(case: Case) -> Measured:
    """Of the fullest rank. The second step is the one that counts: the optimizer's state is made in the first."""
    return measure_all(case.layout, [case])[0]


def measure_all(layout: Layout, cases: Sequence[Case]) -> list[Measured]:
    """Of cases of one layout, whose processes start once. One rank is this process."""
    of_ranks = run_layout(layout, measure_on_rank, cases)
    return [
        Measured(states=max(one.states for one in found), peak=max(one.peak for one in found))
        for found in zip(*of_ranks, strict=True)
    ]


def measure_on_rank(ranks: Ranks, cases: Sequence[Case]) -> list[Measured]:
    with as_on_a_gpu():
        return [_measure(case, ranks) for case in cases]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Attention by the fused kernel, which keeps no scores: a CPU keeps those of short rows, being faster so."""
    kept = attention.MAX_SCORES
    attention.MAX_SCORES = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tracker's, of gradients that are None
        yield
    attention.MAX_SCORES = kept


def _measure(case: Case, ranks: Ranks) -> Measured:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    config = FAMILIES[case.family](**case.shape)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION).eval()
    recompute_activations(module, case.recompute)
    dtype = getattr(torch, case.dtype)
    policy = PolicyModel(cast(PreTrainedModel, module), dtype=dtype, temperature=1.0, ranks=ranks)
    settings = TrainerSettings(
        micro_batch_tokens=case.tokens, offload=case.offload, parallel=ParallelSettings(buckets=[case.tokens])
    )
    step = TrainStep(policy, settings, Objective())
    small = replace(case, prompt_tokens=4, response_tokens=4)
    step.accumulate(some_groups(small))
    close(step, [small])
    step.accumulate(some_groups(small))  # its gradient sum is there from the first round on
    held = held_tensors(step)
    tracker = Totals()
    tracker.track_external(*held)
    with tracker:
        step.accumulate(some_groups(case))
        close(step, [small, case])
    peak = tracker.get_tracker_snapshot("peak")
    return Measured(states=num_bytes(held), peak=sum(device["Total"] for device in peak.values()))


class Totals(MemTracker):
    """Not by module, of which it allows one call in a step; a pipeline's have more."""

    def _nothing(self, *arguments: Any) -> None:
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = cast(Any, _nothing)


def held_tensors(step: TrainStep) -> list[Tensor]:
    """What a rank holds between two rounds: its parts of weights, of their gradient sums, and of moments."""
    policy, module = step.policy, step.policy.module
    weights = [*module.parameters(), *policy.masters.values(), *policy.locals.values()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    moments = [value for state in step.optimizer.state.values() for value in state.values()]
    return [local_part(tensor.detach()) for tensor in (*weights, *module.buffers(), *gradients, *moments)]


def close(step: TrainStep, cases: Sequence[Case]) -> None:
    """The optimizer's step, on what all ranks accumulated."""
    rows = [case.data * case.pipeline * case.samples for case in cases]
    tokens = sum(number * case.response_tokens for number, case in zip(rows, cases, strict=True))
    step.close(batch=0, num_rows=sum(rows), num_tokens=tokens)


def some_groups(case: Case) -> list[PromptGroup]:
    """A micro-batch for each stage that there is."""
    return [some_group(case)] * case.pipeline


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def some_group(case: Case) -> PromptGroup:
    chance = np.random.default_rng(0)
    rows = [
        TrainingSample(
            row_id=RowId(f"0/0/{sample}"),
            response_ids=chance.integers(0, case.words, case.response_tokens).astype(np.int32),
            rollout_logprobs=np.full(case.response_tokens, -6.0, np.float32),
            advantage=1.0,
        )
        for sample in range(case.samples)
    ]
    prompt = chance.integers(0, case.words, case.prompt_tokens).astype(np.int32)
    return PromptGroup(group_id=GroupId("0/0"), prompt_ids=prompt, samples=rows)


CASES = [
    Case(),
    Case(dtype="float32"),
    Case(family="qwen3", prompt_tokens=50, response_tokens=150),
    Case(family="qwen2", words=32_768, prompt_tokens=20, response_tokens=60),
    Case(dtype="float32", layers=8, hidden=512, mlp=1536, tied=True, prompt_tokens=20, response_tokens=50),
    Case(recompute="whole"),
    Case(recompute="selective"),
    Case(offload="optimizer"),
    Case(data=2),
    Case(data=2, dtype="float32", recompute="whole"),
    Case(tensor=2),
    Case(tensor=2, family="qwen3", recompute="selective"),
    Case(pipeline=2),
    Case(pipeline=2, tied=True, recompute="whole"),
    Case(data=4),
    Case(data=2, tensor=2),
    Case(data=2, pipeline=2),
]


def compared(cases: Sequence[Case]) -> dict[str, float]:
    """The least and the largest ratio of what was said to what was measured."""
    states: list[float] = []
    peaks: list[float] = []
    for layout, alike in groupby(cases, key=lambda case: case.layout):
        of_layout = list(alike)
        for case, measured in zip(of_layout, measure_all(layout, of_layout), strict=True):
            states.append(state_bytes(case.llm, layout, training_of(case)) / measured.states)
            peaks.append(said(case).total / measured.peak)
            print(f"states {states[-1]:.3f}  peak {peaks[-1]:.3f}  {case}", file=sys.stderr, flush=True)
    return {
        "layouts": len(cases),
        "states_least": min(states),
        "states_most": max(states),
        "peak_least": min(peaks),
        "peak_most": max(peaks),
    }


def state_bytes_share(ranks: int = 4) -> float:
    """Weights, gradients and optimizer of one of so many data ranks, over those of one rank alone."""
    alone = Case(layers=2, hidden=128, mlp=384, words=2048, dtype="float32", prompt_tokens=4, response_tokens=4)
    return measure(replace(alone, data=ranks)).states / measure(alone).states


def figures() -> dict[str, float]:
    predicted = compared(CASES)
    return {f"predicted_over_measured_{name}": value for name, value in predicted.items()} | {
        "state_bytes_share": state_bytes_share()
    }


if __name__ == "__main__":
    print(json.dumps({name: round(value, 3) for name, value in figures().items()}))
