"""Trainer and embedded engine on one GPU: speed as a share of what the GPU can, and memory as it was predicted.

Figure ``gpu``. Models of known shapes with random weights, made on the GPU; groups of 8 samples of random tokens with a
prompt of 256 and responses of 512 to 1,536. First the ceilings of the GPU at hand: a product of 8,192 x 8,192 in bf16,
a copy within its memory, counting bytes read and written, and one from page-locked host memory.

A training case accumulates micro-batches as a run does, forward and backward through the packed rows, then closes the
mini-batch with an optimizer step. ``mfu`` is 6 operations a weight and token (with frozen weights 4), and attention,
over the time and the measured product; what is computed again is not counted. ``predicted_over_measured`` is
``training_memory.rank_memory`` over torch's peak of allocated bytes. ``over_padded``: response tokens a second over
those of a plain padded loop (``benchmarks/trainer.py``), in turns.

The engine decodes with all its slots full; ``bound_share`` is the time that reading weights and keys at the measured
copy rate takes, over the time of a step.

    python -m benchmarks.gpu [--cases 1.5B,3B-offloaded] [--rows 128,512] [--seconds N]

Needs a GPU that nothing else uses. Last line: JSON with the GPU's name.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from benchmarks.engine import GROUP_SIZE, Workload, make_decoder, requests_of
from benchmarks.trainer import Contestant, padded_loop, take_turns
from orchestrator.sim.llms import LLMS
from transport.contracts.llms import Llm
from transport.contracts.settings import LoraSettings, TrainerSettings
from transport.contracts.training_memory import Layout, Training, rank_memory
from transport.contracts.types import GroupId, RowId
from workers.algorithms.loss import Objective
from workers.generation.embedded.forward import FusedForward, LoadedModel
from workers.models import random_model
from workers.trainer.policy import head
from workers.trainer.policy.loading import materialise
from workers.trainer.policy.model import PolicyModel, empty_policy
from workers.trainer.policy.packing import PromptGroup, TrainingSample
from workers.trainer.policy.policy_learner import TrainStep, num_inputs
from workers.trainer.policy.recompute import recompute_activations

GPU = torch.device("cuda")
GIGA, TERA = 1e9, 1e12
PROMPT_TOKENS, RESPONSE_TOKENS = 256, (512, 1536)
OBJECTIVE = Objective(clip_high=0.28)
WARM_UP, ROUNDS, MICRO_BATCHES = 2, 4, 4
"""Micro-batches before time is taken, mini-batches that count, and micro-batches of each."""


class Case:
    """A model, and how it is trained: settings of ``[trainer]`` over those of all cases."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.llm = LLMS[model]
        self.settings = TrainerSettings(**{"dtype": "bfloat16", "micro_batch_tokens": 16384} | settings)

    @property
    def training(self) -> Training:
        settings = self.settings
        return Training(
            tokens=settings.micro_batch_tokens,
            longest_tokens=PROMPT_TOKENS + RESPONSE_TOKENS[1],
            recompute=settings.recompute,
            offload=settings.offload,
            lora_rank=settings.lora.rank,
        )


CASES = {
    "0.5B": Case("Qwen2.5-0.5B"),
    "1.5B": Case("Qwen2.5-1.5B", micro_batch_tokens=8192),
    "1.5B-selective": Case("Qwen2.5-1.5B", recompute="selective"),
    "1.5B-whole": Case("Qwen2.5-1.5B", recompute="whole"),
    "3B-offloaded": Case("Qwen2.5-3B", recompute="whole", offload="optimizer"),
    "7B-adapters": Case("Qwen2.5-7B", recompute="whole", lora=LoraSettings(rank=16), micro_batch_tokens=8192),
}


# --- what is trained


def config_of(llm: Llm) -> Qwen2Config:
    """head_dim of these models is hidden / heads."""
    return Qwen2Config(
        vocab_size=llm.vocabulary,
        hidden_size=llm.hidden,
        intermediate_size=llm.mlp,
        num_hidden_layers=llm.layers,
        num_attention_heads=llm.heads,
        num_key_value_heads=llm.kv_heads,
        tie_word_embeddings=llm.tied,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    )


def groups_of(llm: Llm, num_tokens: int, seed: int) -> list[PromptGroup]:
    """As many packed tokens as whole samples have, and no more."""
    random = np.random.default_rng(seed)
    groups: list[PromptGroup] = []
    room = num_tokens
    for number in itertools.count():
        samples: list[TrainingSample] = []
        prompt = random.integers(0, llm.vocabulary, PROMPT_TOKENS).astype(np.int32)
        room -= len(prompt)
        for index, length in enumerate(random.integers(*RESPONSE_TOKENS, GROUP_SIZE).tolist()):
            room -= length - 1  # its last token is nobody's input
            if room < 0:
                break
            samples.append(
                TrainingSample(
                    row_id=RowId(f"{seed}/{number}/{index}"),
                    response_ids=random.integers(0, llm.vocabulary, length).astype(np.int32),
                    rollout_logprobs=np.full(length, -np.log(llm.vocabulary), np.float32),
                    advantage=float(random.normal()),
                )
            )
        if samples:
            groups.append(PromptGroup(group_id=GroupId(f"{seed}/{number}"), prompt_ids=prompt, samples=samples))
        if room < 0:
            break
    return groups


def operations(llm: Llm, groups: Sequence[PromptGroup], *, frozen: bool) -> float:
    """Forward and backward. frozen: no weight has a gradient of its own, but for adapters, which are not counted."""
    passes = 4 if frozen else 6
    packed = num_inputs(groups)
    chosen = sum(len(sample.response_ids) for group in groups for sample in group.samples)
    products = passes * (llm.layers * llm.layer_params * packed + llm.embedding_params * chosen)
    pairs = 0.0
    for group in groups:
        prompt = len(group.prompt_ids)
        pairs += prompt * prompt / 2
        pairs += sum(one.num_inputs * (prompt + one.num_inputs / 2) for one in group.samples)
    attention = 12 * llm.layers * llm.heads * llm.head_dim * pairs
    return products + attention


def step_of(case: Case) -> TrainStep:
    with tempfile.TemporaryDirectory() as directory:
        random_model("qwen3-tiny")(Path(directory))  # a directory has a tokenizer and weights; neither is read here
        config_of(case.llm).save_pretrained(directory)
        module = empty_policy(Path(directory))
    recompute_activations(module, case.settings.recompute)

    def fill(empty: Any) -> None:
        materialise(empty, GPU)
        empty.initialize_weights()

    policy = PolicyModel(module, dtype=torch.bfloat16, temperature=1.0, fill=fill, lora=case.settings.lora)
    return TrainStep(policy, case.settings, OBJECTIVE)


def trained(case: Case, ceilings: Mapping[str, float]) -> dict[str, float]:
    """What one case takes."""
    started_s = time.perf_counter()
    step = step_of(case)
    torch.cuda.synchronize()
    made_s = time.perf_counter() - started_s
    torch.cuda.reset_peak_memory_stats()
    micro_batch = groups_of(case.llm, case.settings.micro_batch_tokens, seed=0)
    for _ in range(WARM_UP):
        step.accumulate(micro_batch)
    close(step, micro_batch, WARM_UP)
    passes_s: list[float] = []
    steps_s: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(MICRO_BATCHES):
            step.accumulate(micro_batch)
        torch.cuda.synchronize()
        computed_s = time.perf_counter()
        close(step, micro_batch, MICRO_BATCHES)
        torch.cuda.synchronize()
        passes_s.append((computed_s - began_s) / MICRO_BATCHES)
        steps_s.append(time.perf_counter() - computed_s)
    pass_s, step_s = statistics.median(passes_s), statistics.median(steps_s)
    measured = torch.cuda.max_memory_allocated()
    packed = num_inputs(micro_batch)
    counted = operations(case.llm, micro_batch, frozen=case.settings.lora.rank > 0)
    predicted = rank_memory(case.llm, Layout(), case.training)
    return {
        "packed_tokens": packed,
        "tokens_per_s": round(packed / pass_s),
        "tflops": round(counted / pass_s / TERA, 1),
        "mfu": round(counted / pass_s / TERA / ceilings["product_tflops"], 3),
        "step_s": round(step_s, 4),
        "predicted_gb": round(predicted.total / GIGA, 2),
        "measured_gb": round(measured / GIGA, 2),
        "predicted_over_measured": round(predicted.total / measured, 3),
        "made_s": round(made_s, 1),
    }


def close(step: TrainStep, groups: Sequence[PromptGroup], times: int) -> None:
    rows = times * sum(len(group.samples) for group in groups)
    tokens = times * sum(sample.num_loss_tokens for group in groups for sample in group.samples)
    metrics = step.close(batch=0, num_rows=rows, num_tokens=tokens)
    if metrics["skipped_nonfinite"]:
        raise ValueError(f"a gradient was not finite: {metrics}")


def over_padded(name: str, turns: int = 3) -> dict[str, float]:
    """Ours over a padded loop of the same model, weights in bf16 on both sides, a group a micro-batch for the loop."""
    case = CASES[name]
    step, groups = step_of(case), groups_of(case.llm, case.settings.micro_batch_tokens, seed=1)
    with GPU:
        padded: Any = AutoModelForCausalLM.from_config(config_of(case.llm), dtype=torch.bfloat16).eval()

    def waited(train: Callable[[Sequence[PromptGroup]], object]) -> Contestant:
        def turn(some: Sequence[PromptGroup]) -> None:
            train(some)
            torch.cuda.synchronize()

        return Contestant(turn, groups)

    speeds = take_turns({"packed": waited(step.accumulate), "padded": waited(partial(padded_loop, padded))}, turns)
    ratios = [fast / slow for fast, slow in zip(speeds["packed"], speeds["padded"], strict=True)]
    return {"over_padded": round(statistics.median(ratios), 3)}


# --- what is generated


def decoded(name: str, slots: int, ceilings: Mapping[str, float], tokens: int = 256) -> dict[str, float]:
    """A full batch of ``slots`` samples that all take ``tokens`` tokens."""
    llm = LLMS[name]
    with GPU:
        model: Any = AutoModelForCausalLM.from_config(config_of(llm), dtype=torch.bfloat16).eval()
    loaded = LoadedModel(
        forward=FusedForward(model, max_context=2048),
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        max_context=2048,
        vocab_size=llm.vocabulary,
    )
    decoder, random = make_decoder(loaded, slots=slots), np.random.default_rng(0)
    prompts = random.integers(0, llm.vocabulary, (slots // GROUP_SIZE, PROMPT_TOKENS)).astype(np.int32)
    for request in requests_of(Workload(list(prompts), [tokens] * slots)):
        decoder.submit(request)
    steps_s: list[float] = []
    while decoder.has_work:
        began_s = time.perf_counter()
        decoder.step()  # ends with tokens on the host
        if decoder.num_running == slots:
            steps_s.append(time.perf_counter() - began_s)
    step_s = statistics.median(steps_s[len(steps_s) // 4 :])
    held = slots * (PROMPT_TOKENS + tokens / 2) * llm.kv_bytes
    bound_s = (llm.weight_bytes + held) / (ceilings["copy_tb_s"] * TERA)
    return {
        "step_ms": round(1000 * step_s, 2),
        "tokens_per_s": round(slots / step_s),
        "bound_share": round(bound_s / step_s, 3),
    }


# --- the GPU


def measured_ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: a @ b)
    big = torch.randn(1 << 30, device=GPU)
    copy_s = median_s(big.clone)
    pinned = torch.empty(1 << 28, pin_memory=True)
    to_device_s = median_s(lambda: big[: 1 << 28].copy_(pinned, non_blocking=True))
    return {
        "product_tflops": round(2 * 8192**3 / product_s / TERA, 1),
        "copy_tb_s": round(2 * 4 * (1 << 30) / copy_s / TERA, 2),
        "host_to_device_gb_s": round(4 * (1 << 28) / to_device_s / GIGA, 1),
    }


def median_s(run: Callable[[], object], times: int = 10) -> float:
    taken: list[float] = []
    for turn in range(times + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= 3:
            taken.append(begin.elapsed_time(end) / 1000)
    return statistics.median(taken)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure trainer and embedded engine on one GPU.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of training, some of {', '.join(CASES)}")
    parser.add_argument("--rows", default="", help="rows of logits held at once, tried with the case 1.5B-selective")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further part is begun")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.gpu: torch sees no GPU here\n")
    transformers_logging.disable_progress_bar()
    began_s = time.monotonic()
    ceilings = measured_ceilings()
    free()
    gpu = torch.cuda.get_device_properties(GPU)
    result: dict[str, Any] = {"gpu": gpu.name, "gpu_gb": round(gpu.total_memory / GIGA, 1), "torch": torch.__version__}
    result |= ceilings
    print(json.dumps(result), flush=True)

    def part(label: str, run: Callable[[], dict[str, float]]) -> None:
        if time.monotonic() - began_s > arguments.seconds:
            print(f"{label}: left out, no time", flush=True)
            return
        try:
            result[label] = run()
        except (RuntimeError, ValueError, TypeError) as error:  # one that does not fit keeps none of the others
            result[label] = {"error": str(error).splitlines()[0][:300]}
        free()
        print(f"{label}: {json.dumps(result[label])}", flush=True)

    for name in filter(None, arguments.cases.split(",")):
        part(f"train {name}", lambda name=name: trained(CASES[name], ceilings))
    for rows in map(int, filter(None, arguments.rows.split(","))):
        kept, head.SOFTMAX_ROWS["cuda"] = head.SOFTMAX_ROWS["cuda"], rows
        part(f"train 1.5B-selective, {rows} rows", lambda: trained(CASES["1.5B-selective"], ceilings))
        head.SOFTMAX_ROWS["cuda"] = kept
    part("padded 0.5B", lambda: over_padded("0.5B"))
    for slots in (64, 256):
        part(f"decode 1.5B, {slots} slots", lambda slots=slots: decoded("Qwen2.5-1.5B", slots, ceilings))
    part("decode SmolLM2, 64 slots", lambda: decoded("SmolLM2-135M", 64, ceilings))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
