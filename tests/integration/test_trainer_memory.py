"""What the planner says of the trainer's memory is what the trainer takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orchestrator.planning.plan_search import PLANNED
from orchestrator.sim.costs import HEAD_ROWS, activation_bytes, state_bytes
from transport.contracts.llms import BYTES, from_config
from transport.contracts.settings import TrainerSettings
from transport.contracts.types import GroupId, RowId
from workers.algorithms.loss import Objective
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy import attention, packing
from workers.trainer.policy.model import PolicyModel, predictor_hidden
from workers.trainer.policy.policy_learner import TrainStep

SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "vocab_size": 512,
}


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
def test_states_and_activations_are_as_predicted(kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "MAX_SCORES", 0)  # the fused kernel, as on a GPU
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    module = AutoModelForCausalLM.from_config(kind(**SHAPE), attn_implementation=attention.ATTENTION).eval()
    policy = PolicyModel(module, dtype=torch.bfloat16, temperature=1.0)
    group = some_group(prompt_tokens=100, response_tokens=300, samples=4)
    batch = packing.pack([group], "token_mean")
    kept: dict[int, torch.UntypedStorage] = {}
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        predictor_hidden(module, batch)
    llm = from_config("small", SHAPE)
    head = BYTES * llm.vocabulary * (HEAD_ROWS + llm.hidden)
    said = activation_bytes(llm, batch.input_ids.shape[1], 400, PLANNED) - head
    assert 0.85 < said / sum(storage.nbytes() for storage in kept.values()) < 1.25  # it counts a mask

    step = TrainStep(policy, TrainerSettings(), Objective())
    step.accumulate([group])
    step.close(batch=0, num_rows=4, num_tokens=1200)
    moments = [value for state in step.optimizer.state.values() for value in state.values() if value.ndim]
    held = [*module.parameters(), *policy.masters.values(), policy.gradient, *moments]
    assert sum(tensor.nbytes for tensor in held) == pytest.approx(state_bytes(llm, 1, 1, PLANNED), rel=0.02)


def some_group(*, prompt_tokens: int, response_tokens: int, samples: int) -> PromptGroup:
    chance = np.random.default_rng(0)
    rows = [
        TrainingSample(
            row_id=RowId(f"0/0/{sample}"),
            response_ids=chance.integers(0, 512, response_tokens).astype(np.int32),
            rollout_logprobs=np.full(response_tokens, -6.0, np.float32),
            advantage=1.0,
        )
        for sample in range(samples)
    ]
    prompt = chance.integers(0, 512, prompt_tokens).astype(np.int32)
    return PromptGroup(group_id=GroupId("0/0"), prompt_ids=prompt, samples=rows)
