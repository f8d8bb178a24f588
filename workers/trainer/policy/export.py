"""A trained policy as a plain Hugging Face directory, which transformers, SGLang and vLLM load.

Owns: what is in that directory: the base model's configuration, tokenizer and chat template beside the trained weights.
Invariants: it is there whole or not at all; its config.json names the dtype that its tensors have, and is the base
model's to the byte where that is the base model's, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from transport.process import faults
from workers.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """Writes trained weights beside what the base model in ``model_dir`` says of itself.

    dtype: of the tensors, "float32" or "bfloat16"; "auto" for the base model's.
    """

    model_dir: Path
    dtype: str = "auto"
    trust_remote_code: bool = False

    def write(self, module: PreTrainedModel, weights: Mapping[str, Tensor], target: Path) -> None:
        """Put the directory in place of what is at ``target``. weights: by the names of ``module``'s parameters.

        Raises CheckpointError: the disk refuses; nothing of the attempt is left, and what was there before is.
        """
        config = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
        of_base = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        named = of_base if self.dtype == "auto" else self.dtype
        cast = {name: tensor.detach().to(getattr(torch, named)) for name, tensor in weights.items()}
        aside = target.with_name(f"{target.name}.writing")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            module.save_pretrained(aside, state_dict=cast)
            shutil.copyfile(self.model_dir / "config.json", aside / "config.json")  # the module's names our attention
            if named != of_base:
                (aside / "config.json").write_text(json.dumps(_with_dtype(config, named), indent=2), encoding="utf-8")
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir, trust_remote_code=self.trust_remote_code)
            tokenizer.save_pretrained(aside)
            shutil.rmtree(target, ignore_errors=True)
            faults.point("train.model_removed")
            aside.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(target, sum(tensor.nbytes for tensor in cast.values()), str(error)) from error

    def write_tensors(self, weights: Mapping[str, Tensor], target: Path) -> None:
        """``write`` for weights without a module, such as a checkpoint's. Raises CheckpointError: not of this model."""
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, trust_remote_code=self.trust_remote_code
        )
        check_names(target, weights, dict(module.named_parameters()))
        self.write(module, weights, target)


def check_names(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError, which names ``path``: the tensors found are not those of the model."""
    wrong = sorted(found.keys() ^ wanted.keys()) or [n for n, p in wanted.items() if found[n].shape != p.shape]
    if wrong:
        raise CheckpointError(path, 0, f"its tensors are not those of this model: {', '.join(wrong[:4])}")


def _with_dtype(config: dict[str, Any], named: str) -> dict[str, Any]:
    """A configuration whose every dtype is ``named``; the parts of a model of several modalities have their own."""
    nested = {
        key: _with_dtype(part, named) for key, part in config.items() if isinstance(part, dict) and "dtype" in part
    }
    old = {"torch_dtype": named} if "torch_dtype" in config else {}
    return config | nested | old | ({} if old and "dtype" not in config else {"dtype": named})
