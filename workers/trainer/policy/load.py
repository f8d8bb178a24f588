"""Loads the policy for training, and makes sure that it computes packed rows as it computes samples alone.

Owns: device, dtype and loading. Never: training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from transport.contracts.types import GroupId, RowId
from workers.errors import ModelError
from workers.models.resolve import check_model_dir
from workers.trainer.policy import packing
from workers.trainer.policy.head import target_logprobs
from workers.trainer.policy.model import plain_head, predictor_hidden
from workers.trainer.policy.packing import PromptGroup, TrainingSample, pack

PROBE_TOLERANCE = 1e-3
"""Largest difference between our logprobs and the model's own that passes for rounding (fp32)."""


def load_module(model_dir: Path, *, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a checkpoint directory in fp32 with our attention.

    Raises: ModelError: the directory is missing or broken, or its model cannot be trained packed.
    """
    check_model_dir(model_dir)
    packing.register_attention()
    transformers_logging.disable_progress_bar()  # its monitor thread outlives the call, and logs are no terminals
    try:
        module = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation=packing.ATTENTION,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"cannot load a causal language model from {model_dir}: {error}") from error
    module = cast(nn.Module, module).to(device).eval()
    check_packing(cast(PreTrainedModel, module))
    return cast(PreTrainedModel, module)


def choose_device(name: str) -> torch.device:
    """The device of setting ``trainer.device``; "auto" is cuda when there is one. Raises ModelError where it is not."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ModelError(
            f"trainer.device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs here: use auto or cpu"
        )
    return device


def choose_dtype(name: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """The dtype of the forward pass.

    "auto" is bf16 where the hardware multiplies it: a GPU, or a CPU with avx512_bf16 or amx (3x the fp32 step on one
    core of such a CPU). Elsewhere oneDNN emulates it, slower than fp32.
    """
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    return torch.bfloat16 if device.type == "cuda" or _cpu_multiplies_bf16() else torch.float32


def _cpu_multiplies_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@torch.no_grad()
def check_packing(module: PreTrainedModel) -> None:
    """Compare packed logprobs with the model's own on two short samples, once, in fp32.

    A model may ignore our attention function, scale its logits, or place tokens by something else than position ids;
    it would train, wrongly. Raises ModelError naming the model.
    """
    vocabulary = int(cast(Any, module).get_input_embeddings().weight.shape[0])
    ids = np.random.default_rng(0).integers(0, vocabulary, size=12).astype(np.int32)
    prompt, responses = ids[:4], (ids[4:9], ids[9:])
    samples = [
        TrainingSample(
            row_id=RowId(f"0/0/{i}"), response_ids=r, rollout_logprobs=np.zeros(len(r), np.float32), advantage=0.0
        )
        for i, r in enumerate(responses)
    ]
    batch = pack(
        [PromptGroup(group_id=GroupId("0/0"), prompt_ids=prompt, samples=samples)], "token_mean", module.device
    )
    ours = target_logprobs(predictor_hidden(module, batch), batch.target_N, plain_head(module), 1.0)
    module.set_attn_implementation("eager")
    theirs: list[Tensor] = []
    for response in responses:
        row = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)).to(module.device)[None]
        logits = cast(Any, module)(input_ids=row, use_cache=False).logits
        logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        theirs.append(logprobs.gather(1, row[0, len(prompt) :, None])[:, 0])
    module.set_attn_implementation(packing.ATTENTION)
    error = (ours - torch.cat(theirs)).abs().max().item()
    if not error < PROBE_TOLERANCE:
        raise ModelError(
            f"{type(module).__name__} cannot be trained packed: its logprobs then differ by {error:.3g} from those of"
            " its own forward pass"
        )
