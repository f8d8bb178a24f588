"""A trained policy as a plain Hugging Face directory, which transformers, SGLang and vLLM load.

Of adapters it holds the base with them added, and in ``adapter/`` the adapters alone, in the format of peft.

Owns: what is in that directory: the base model's configuration, tokenizer and chat template beside the trained weights.
Invariants: it is there whole or not at all; its config.json names the dtype that its tensors have, and is the base
model's to the byte where that is the base model's, too.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from transport.contracts.ledger import META_FILE, CheckpointMeta
from transport.contracts.settings import LoraSettings
from transport.errors import DECODE_ERRORS
from transport.process import faults
from transport.process.files import is_no_room
from transport.process.storage import Place
from workers.errors import CheckpointError, ModelError, NoCheckpointRoomError, TensorFileError
from workers.models import INDEX_FILE, MODEL_FILE
from workers.trainer.checkpoint import model_files, shard_name
from workers.trainer.policy import lora as lora_layers
from workers.trainer.policy.loading import empty_module, open_weights, stored_names
from workers.trainer.policy.stored import NAMES, StoredTensors, bytes_of
from workers.trainer.tensor_files import file_content
from workers.weights.adapters import Merging, check_adapters
from workers.weights.names import names_in_files
from workers.weights.parts import shard_of

MAX_FILE_BYTES = 5 * 10**9
"""Of a file of weights: what Hugging Face splits at, and some stores take no more."""
ADAPTER_DIR, ADAPTER_FILE, ADAPTER_CONFIG = "adapter", "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."
"""Of names in peft's files."""


class Weights(Protocol):
    """Tensors by name, each made when it is asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def whole(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """Writes trained weights beside what the base model in ``model_dir`` says of itself.

    dtype: of the tensors, "float32" or "bfloat16"; "auto" for the base model's.  lora: what was trained.
    """

    model_dir: Path
    dtype: str = "auto"
    lora: LoraSettings = field(default_factory=LoraSettings)
    trust_remote_code: bool = False

    def write_checkpoint(self, checkpoint: Place, target: Path) -> None:
        """``write`` for the weights of a checkpoint. Raises CheckpointError."""
        try:
            meta = CheckpointMeta.from_bytes((checkpoint / META_FILE).read_bytes())
            with closing(StoredTensors.open(checkpoint, model_files(meta))) as stored:
                self.write(stored, target)
        except (OSError, *DECODE_ERRORS, ValueError, TensorFileError) as error:
            raise CheckpointError(checkpoint, 0, str(error)) from error

    def write(self, weights: StoredTensors, target: Path) -> None:
        """Put the directory in place of what is at ``target``. No more than one tensor is in memory at once.

        weights: by the names of the model's parameters, tied ones once; with adapters, theirs.
        Raises CheckpointError: they are of another model, or the disk refuses; nothing of the attempt is left, and what
        was there before is.
        """
        module = empty_module(self.model_dir, trust_remote_code=self.trust_remote_code)
        in_files = names_in_files(module, (name for name, _ in module.named_parameters()))
        layers = lora_layers.adapted_layers(module, self.lora)
        if layers:
            lora_layers.attach(module, layers, self.lora)
        trained = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
        check_names(target, weights.shapes, trained)
        config = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
        of_base = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        named = of_base if self.dtype == "auto" else self.dtype
        aside = target.with_name(f"{target.name}.writing")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            with ExitStack() as opened:
                merged: Weights = weights
                if layers:
                    _write_adapter(weights, self.lora, layers, self.model_dir, aside / ADAPTER_DIR)
                    adapters = {name: weights.whole(name) for name in weights.shapes}
                    merged = opened.enter_context(closing(MergedWeights(module, self.model_dir, adapters, self.lora)))
                _write_weights(merged, getattr(torch, named), in_files, aside)
            for name in ("config.json", "generation_config.json"):
                if (self.model_dir / name).is_file():
                    shutil.copyfile(self.model_dir / name, aside / name)
            if named != of_base:
                (aside / "config.json").write_text(json.dumps(_with_dtype(config, named), indent=2), encoding="utf-8")
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir, trust_remote_code=self.trust_remote_code)
            tokenizer.save_pretrained(aside)
            shutil.rmtree(target, ignore_errors=True)
            faults.point("train.model_removed")
            aside.rename(target)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            nbytes = sum(map(math.prod, weights.shapes.values())) * getattr(torch, named).itemsize
            if is_no_room(error):
                raise NoCheckpointRoomError(target, nbytes, str(error)) from error
            if isinstance(error, OSError | TensorFileError | ModelError):
                raise CheckpointError(target, nbytes, str(error)) from error
            raise


class MergedWeights:
    """The base model's parameters with adapters added. module: the model, empty.  adapters: by name, each whole.

    Raises WeightsMismatchError: the adapters do not fit.  ModelError: the base cannot be read.
    """

    def __init__(
        self, module: PreTrainedModel, model_dir: Path, adapters: Mapping[str, Tensor], lora: LoraSettings
    ) -> None:
        parameters = dict(module.named_parameters())
        check_adapters(adapters, {name: parameter.shape for name, parameter in parameters.items()}, lora)
        self._merging = Merging(adapters, lora)
        self._base = open_weights(model_dir)
        stored = stored_names(module, model_dir, self._base.shapes)
        self._stored = {name: where for name, where in stored.items() if name in parameters}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._base.shapes[stored] for name, stored in self._stored.items()}

    def whole(self, name: str) -> Tensor:
        return self._merging(name, shard_of(self._base.whole(self._stored[name])))

    def close(self) -> None:
        self._base.close()


def _write_adapter(
    adapters: Weights, lora: LoraSettings, layers: Sequence[str], model_dir: Path, directory: Path
) -> None:
    """Adapters as they were trained, for peft and for servers that take them beside their base."""
    every = lora_layers.ALL_LINEAR in lora.targets
    directory.mkdir()
    tensors = {
        f"{ADAPTER_PREFIX}{name}": (NAMES[torch.float32], shape, partial(_cast_bytes, adapters, name, torch.float32))
        for name, shape in adapters.shapes.items()
    }
    with (directory / ADAPTER_FILE).open("wb") as opened:
        opened.writelines(file_content(tensors, {"format": "pt"}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora_layers.short_names(layers) if every else list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_weights(weights: Weights, dtype: torch.dtype, in_files: Mapping[str, str], directory: Path) -> None:
    """As ``model.safetensors``, or, where that is too large, several files and an index. in_files: names there."""
    files: list[list[str]] = [[]]
    room = MAX_FILE_BYTES
    for name, shape in weights.shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > room and files[-1]:
            files.append([])
            room = MAX_FILE_BYTES
        files[-1].append(name)
        room -= nbytes
    placed: dict[str, str] = {}
    for number, names in enumerate(files):
        file = shard_name(MODEL_FILE, number, len(files))
        placed |= dict.fromkeys((in_files[name] for name in names), file)
        tensors = {
            in_files[name]: (NAMES[dtype], weights.shapes[name], partial(_cast_bytes, weights, name, dtype))
            for name in names
        }
        with (directory / file).open("wb") as opened:
            opened.writelines(file_content(tensors, {"format": "pt"}))
    if len(files) > 1:
        total = sum(map(math.prod, weights.shapes.values())) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _cast_bytes(weights: Weights, name: str, dtype: torch.dtype) -> memoryview:
    return bytes_of(weights.whole(name).to(dtype))


def check_names(path: Place, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError, which names ``path``: the shapes found are not those of the model."""
    wrong = sorted(found.keys() ^ wanted.keys()) or [name for name, shape in wanted.items() if found[name] != shape]
    if wrong:
        raise CheckpointError(path, 0, f"its tensors are not those of this model: {', '.join(wrong[:4])}")


def _with_dtype(config: dict[str, Any], named: str) -> dict[str, Any]:
    """A configuration whose every dtype is ``named``; the parts of a model of several modalities have their own."""
    nested = {
        key: _with_dtype(part, named) for key, part in config.items() if isinstance(part, dict) and "dtype" in part
    }
    old = {"torch_dtype": named} if "torch_dtype" in config else {}
    return config | nested | old | ({} if old and "dtype" not in config else {"dtype": named})
