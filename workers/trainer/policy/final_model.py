"""The trained policy as a plain Hugging Face directory, which transformers and SGLang load.

Owns: that directory. Invariant: it is there whole or not at all, and a trainer that was killed in between writes it
again when the run is resumed; weights have the dtype of the base model's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

from transport.process import faults
from workers.errors import CheckpointError
from workers.trainer.policy.model import PolicyModel


def save_final_model(policy: PolicyModel, model_dir: Path, target: Path, *, trust_remote_code: bool = False) -> None:
    """Write weights, configuration, tokenizer and chat template to ``target``, replacing what is there.

    model_dir: the base model's directory; configuration and tokenizer are its own.
    Raises: CheckpointError: the disk is full or refuses.
    """
    dtype = source_dtype(model_dir)
    weights = {name: parameter.detach().to(dtype) for name, parameter in policy.masters.items()}
    needed = sum(tensor.nbytes for tensor in weights.values())
    aside = target.with_name(f"{target.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        policy.module.save_pretrained(aside, state_dict=weights)
        shutil.copyfile(model_dir / "config.json", aside / "config.json")  # the module's names our attention
        AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code).save_pretrained(aside)
        shutil.rmtree(target, ignore_errors=True)
        faults.point("train.model_removed")
        aside.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(target, needed, str(error)) from error


def source_dtype(model_dir: Path) -> torch.dtype:
    """The dtype that the base model's configuration names; bf16 where it names none."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."))
