"""What a rank of the trainer is said to hold, which layouts are allowed, and what is answered where nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.load import preset_names, resolve
from orchestrator.sim.llms import LLMS, QWEN_7B, QWEN_72B
from transport.contracts.llms import Llm, from_config
from transport.contracts.settings import ParallelSettings, Settings
from transport.contracts.training_memory import (
    USABLE_SHARE,
    DoesNotFitError,
    Layout,
    LayoutError,
    Training,
    check_layout,
    choose_layout,
    layout_of_run,
    layouts,
    rank_memory,
    stage_layers,
    state_bytes,
    training_of,
    what_fits,
)
from transport.process.files import read_json
from workers.errors import ModelError
from workers.trainer.policy.fit import fit_layout, usable_bytes

GB = 1e9
TRAINING = Training(tokens=4096, longest_tokens=2048)
ANY_LLM = st.sampled_from(sorted(LLMS)).map(LLMS.__getitem__)
ANY_TRAINING = st.builds(
    Training,
    tokens=st.sampled_from([1024, 8192, 65_536]),
    longest_tokens=st.sampled_from([512, 1024]),
    compute_bytes=st.sampled_from([2, 4]),
    recompute=st.sampled_from(["none", "selective", "whole"]),
    offload=st.sampled_from(["none", "optimizer"]),
    lora_rank=st.sampled_from([0, 16]),
    host_is_device=st.booleans(),
)


def test_the_states_of_a_weight():
    one = Layout()
    assert state_bytes(QWEN_7B, one, TRAINING) / QWEN_7B.params == pytest.approx(18, rel=1e-3)
    fp32 = msgspec.structs.replace(TRAINING, compute_bytes=4)
    assert state_bytes(QWEN_7B, one, fp32) / QWEN_7B.params == pytest.approx(16, rel=1e-3)
    assert state_bytes(QWEN_7B, Layout(data=4), fp32) == pytest.approx(state_bytes(QWEN_7B, one, fp32) / 4)
    assert state_bytes(QWEN_7B, Layout(tensor=4), fp32) == pytest.approx(state_bytes(QWEN_7B, one, fp32) / 4, rel=1e-3)
    adapters = msgspec.structs.replace(TRAINING, lora_rank=16)
    assert 2.0 < state_bytes(QWEN_7B, one, adapters) / QWEN_7B.params < 2.2
    moved = msgspec.structs.replace(TRAINING, offload="optimizer")
    assert rank_memory(QWEN_7B, Layout(data=8), moved).optimizer == 0
    on_cpu = msgspec.structs.replace(moved, host_is_device=True)
    assert rank_memory(QWEN_7B, Layout(data=8), on_cpu).optimizer == pytest.approx(QWEN_7B.params, rel=1e-3)


@given(llm=ANY_LLM, training=ANY_TRAINING, ranks=st.sampled_from([1, 2, 4, 8]))
def test_more_ranks_and_more_recomputation_never_take_more(llm, training, ranks):
    fewer, more = (rank_memory(llm, Layout(data=count), training) for count in (ranks, 2 * ranks))
    assert more.masters + more.gradients + more.optimizer <= fewer.masters + fewer.gradients + fewer.optimizer
    none, selective, whole = (
        rank_memory(llm, Layout(data=ranks), msgspec.structs.replace(training, recompute=mode)).total
        for mode in ("none", "selective", "whole")
    )
    assert whole < selective < none


@given(layers=st.integers(1, 80), stages=st.integers(1, 16))
def test_every_layer_is_on_one_stage(layers, stages):
    parts = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert len(parts[0]) - len(parts[-1]) <= 1


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=8), "trainer.parallel.tensor = 8 does not divide the 28 attention heads of Qwen2.5-7B; 1, 2, 4"),
        (Layout(pipeline=29), "trainer.parallel.pipeline = 29 is more than the 28 layers of Qwen2.5-7B"),
        (Layout(data=2), "2 data x 1 tensor x 1 pipeline is for 2 ranks, and trainer.ranks = 4"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_by_name(layout: Layout, message: str):
    with pytest.raises(LayoutError, match=message):
        check_layout(QWEN_7B, layout, ranks=4 if layout.data > 1 else None)


def test_the_least_that_fits_is_chosen():
    usable = 80 * GB * USABLE_SHARE
    assert choose_layout(LLMS["SmolLM2-135M"], 4, usable, TRAINING) == Layout(data=4)
    assert choose_layout(QWEN_7B, 8, usable, TRAINING) == Layout(data=8)
    assert choose_layout(QWEN_7B, 8, usable, TRAINING, max_data=4) == Layout(data=4, tensor=2)
    wide = msgspec.structs.replace(TRAINING, tokens=16_384)
    assert choose_layout(QWEN_7B, 8, usable, wide).tensor > 1
    with pytest.raises(DoesNotFitError, match=r"it takes trainer.micro_batch_tokens = 4096, or trainer.recompute = "):
        choose_layout(QWEN_7B, 8, usable, wide, ParallelSettings(tensor=1))


@given(
    llm=ANY_LLM,
    training=ANY_TRAINING,
    ranks=st.integers(1, 64),
    gigabytes=st.sampled_from([24, 80, 141]),
    parallel=st.builds(
        ParallelSettings,
        data=st.sampled_from(["auto", 1, 2, 8]),
        tensor=st.sampled_from(["auto", 1, 2, 3]),
        pipeline=st.sampled_from(["auto", 1, 2]),
    ),
)
def test_what_is_chosen_divides_and_fits_and_what_is_proposed_does_too(llm, training, ranks, gigabytes, parallel):
    usable = gigabytes * GB * USABLE_SHARE
    try:
        layout = choose_layout(llm, ranks, usable, training, parallel)
    except LayoutError:
        assert not layouts(llm, ranks, parallel)
    except DoesNotFitError:
        for one in layouts(llm, ranks, parallel):
            assert rank_memory(llm, one, training).total > usable
            for proposal in what_fits(llm, one, usable, training):
                assert any(
                    fits(llm, changed, usable, proposed(training, proposal)) for changed in of(proposal, llm, one)
                )
    else:
        check_layout(llm, layout, ranks=ranks)
        assert rank_memory(llm, layout, training).total <= usable
        assert all(wanted in ("auto", got) for wanted, got in axes(parallel, layout))


def axes(parallel: ParallelSettings, layout: Layout) -> list[tuple[object, int]]:
    return [(getattr(parallel, name), getattr(layout, name)) for name in ("data", "tensor", "pipeline")]


def fits(llm, layout: Layout, usable: float, training: Training) -> bool:
    return rank_memory(llm, layout, training).total <= usable


def proposed(training: Training, proposal: str) -> Training:
    names = {"micro_batch_tokens": "tokens", "recompute": "recompute", "offload": "offload", "lora.rank": "lora_rank"}
    changes: dict[str, object] = {}
    for assignment in proposal.split(" with "):
        key, _, value = assignment.removeprefix("trainer.").partition(" = ")
        if key in names:
            changes[names[key]] = int(value) if value.isdigit() else value.strip('"')
    return msgspec.structs.replace(training, **changes)


def of(proposal: str, llm, layout: Layout) -> list[Layout]:
    key, _, value = proposal.partition(" = ")
    return layouts(llm, int(value)) if key == "trainer.ranks" else [layout]


def test_what_does_not_fit_says_which_bytes_are_missing_and_what_would_do():
    with pytest.raises(DoesNotFitError) as refused:
        choose_layout(QWEN_72B, 8, 80 * GB * USABLE_SHARE, TRAINING)
    said = str(refused.value)
    assert "training Qwen2.5-72B as 1 data x 8 tensor x 1 pipeline needs 1" in said
    assert "72.0 GB are usable; it takes " in said
    assert "trainer.lora.rank = 16" in said
    assert "trainer.ranks = 32" in said


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_fits_a_laptop(preset: str):
    settings = resolve(preset, [], ["data.path=x.jsonl"] if preset == "gsm8k" else [], {}).settings
    if settings.model.path.startswith("package:") and settings.trainer.engine == "torch":
        training = training_of(settings, compute_bytes=4, on_gpu=False)
        assert rank_memory(LLMS["SmolLM2-135M"], Layout(), training).total < 16 * GB * USABLE_SHARE


def test_the_trainer_refuses_before_it_loads(tmp_path: Path):
    cpu = torch.device("cpu")
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, '
        '"intermediate_size": 128, "vocab_size": 512, "model_type": "llama"}'
    )
    four = msgspec.structs.replace(Settings().trainer, ranks=4)
    settings = msgspec.structs.replace(Settings(), trainer=four)
    assert fit_layout(tmp_path, settings, cpu) == Layout(data=4)
    with pytest.raises(ModelError, match=r"it takes trainer.micro_batch_tokens = "):
        fit_layout(tmp_path, settings, cpu, memory_bytes=3e6)
    tensor = msgspec.structs.replace(four, parallel=ParallelSettings(tensor=4))
    with pytest.raises(ModelError, match=r"does not divide the 2 key-value heads of .*; 1, 2 would"):
        fit_layout(tmp_path, msgspec.structs.replace(settings, trainer=tensor), cpu)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert fit_layout(tmp_path, settings, cpu, memory_bytes=1.0) == Layout(data=4)
    assert 0 < usable_bytes(cpu, 4, {}) < usable_bytes(cpu, 4, {"LOCAL_WORLD_SIZE": "2"})


def test_where_logprobs_are_recomputed_no_layout_has_stages(tmp_path: Path):
    """Stages that "auto" stands for were chosen, and the first round that records logprobs ended the run."""
    cpu, rows = torch.device("cpu"), {"num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3}
    sizes = {"hidden_size": 48, "intermediate_size": 4096, "vocab_size": 50_000, "model_type": "llama"}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(rows | sizes))
    trainer = msgspec.structs.replace(Settings().trainer, ranks=2, micro_batch_tokens=64, dtype="float32")
    settings = msgspec.structs.replace(Settings(), trainer=trainer)
    llm, training = read_llm(tmp_path), training_of(settings, compute_bytes=4, on_gpu=False)
    stages, data = (rank_memory(llm, layout, training).total for layout in (Layout(pipeline=2), Layout(data=2)))
    assert stages < data
    memory_bytes = (stages + data) / 2
    assert fit_layout(tmp_path, settings, cpu, memory_bytes=memory_bytes) == Layout(pipeline=2)
    algorithm = msgspec.structs.replace(settings.algorithm, old_logprobs="recomputed")
    recomputed = msgspec.structs.replace(settings, algorithm=algorithm)
    assert fit_layout(tmp_path, recomputed, cpu) == Layout(data=2)
    with pytest.raises(ModelError, match=r"2 data x 1 tensor x 1 pipeline needs .*; it takes "):
        fit_layout(tmp_path, recomputed, cpu, memory_bytes=memory_bytes)
    with pytest.raises(DoesNotFitError):
        layout_of_run(llm, recomputed, 2, memory_bytes, compute_bytes=4, on_gpu=False)


def read_llm(directory: Path) -> Llm:
    return from_config(directory.name, read_json(directory / "config.json", dict[str, Any]))
