"""Small random models for tests of the engine, and what a full forward of theirs says."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from workers.generation.embedded.forward import cache_argument

transformers_logging.disable_progress_bar()  # its monitor thread would outlive the test

VOCAB = 97
_CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}


def tiny_model(
    family: str = "qwen3",
    *,
    seed: int = 0,
    tied: bool = True,
    max_context: int = 256,
    head_dim: int = 16,
    vocabulary: int = VOCAB,
    layers: int = 2,
) -> PreTrainedModel:
    """Two layers, 4 heads on 2 key heads, with weights large enough that attention and positions matter."""
    config_class, model_class = _CLASSES[family]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.25 + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def in_float64(module: PreTrainedModel) -> PreTrainedModel:
    """The model in float64 throughout: the norms of transformers compute in float32 whatever they are given."""
    for norm in module.double().modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_rms_norm, norm)
    return module


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return norm.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def full_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """[R] logprobs of ``response`` after ``prompt``, from one forward over both."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return _picked(logits, response, temperature)


def two_phase_logprobs(
    old: PreTrainedModel, new: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, switch: int
) -> np.ndarray:
    """[R] logprobs when the weights changed after ``switch`` tokens were drawn: KV of the old ones stays in use.

    The last token drawn before the change has no KV yet, so the new weights compute it.
    """
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    seen = len(prompt) + switch - 1
    with torch.inference_mode():
        cache = DynamicCache(config=old.config)
        before = old(ids[:, :seen], **{cache_argument(old): cache}, use_cache=True).logits[0, len(prompt) - 1 :]
        after = new(ids[:, seen:-1], **{cache_argument(old): cache}, use_cache=True).logits[0]
    return _picked(torch.cat([before, after]).float(), response, 1.0)


def _picked(logits: torch.Tensor, response: np.ndarray, temperature: float) -> np.ndarray:
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response).long()[:, None]).squeeze(1).numpy()
