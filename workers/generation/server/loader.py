"""New weights inside an inference server: what the engine orders, and what carries it out there.

    engine ── LoadOrder: which manifest; no bulk byte passes through HTTP ──► ``load_into_sglang``, ``VllmLoader``
           ◄── LoadResult: how it went ────────────────────────────────────── in each model process, between two steps

The loader does there what the embedded engine does in the worker: it opens the segment that the manifest names (shared
memory is mapped, other hosts are asked), checks that it fits the model, and has the model take it. Only here do
sharding and device come in, so a transport that writes into GPU memory (UCX, NIXL) becomes a backend of
``transport/tensors`` and this file stays as it is.

Owns: that nothing is written before every process has the bytes and they fit. Never: raises, a server may end for that.
Needs in the server's environment: this package, torch, transformers, numpy, msgspec, all but the first the server's
own. The engine imports this file, too: torch only inside the server.
"""

from __future__ import annotations

import base64
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from transport.contracts.messages import MessageDecoder, WeightManifest, encode
from transport.contracts.types import Struct
from transport.process.secret import SHARED_SECRET, read_secret
from workers.errors import WeightsMismatchError
from workers.weights.names import names_in_files
from workers.weights.pull import Renamed, WeightPuller, check_tensors

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class LoadOrder(Struct, frozen=True, kw_only=True):
    """Load the version of ``manifest``, from the nearest of its sources; None: only look whether it could be.

    number: of this order, so that its result is not mistaken for another's.  vocab_size: of the model that is meant.
    verified: its sources were read and compared with the checksums just now.
    """

    number: int
    vocab_size: int
    manifest: WeightManifest | None = None
    verified: bool = False


class LoadResult(Struct, frozen=True, kw_only=True):
    """How an order went. mismatch: the tensors do not fit the model.  spoiled: it failed when some were written.
    seconds: that the loader took, from its call to its return.
    """

    number: int
    error: str = ""
    mismatch: bool = False
    spoiled: bool = False
    seconds: float = 0.0


_order_decoder = MessageDecoder(LoadOrder)
_result_decoder = MessageDecoder(LoadResult)


def to_name(order: LoadOrder) -> str:
    """As text, in base64."""
    return base64.b64encode(encode(order)).decode()


def from_name(name: str) -> LoadOrder:
    """The inverse. Raises MessageError, or ValueError when it is no base64."""
    return _order_decoder.decode(base64.b64decode(name))


def result_numbers(result: LoadResult) -> list[int]:
    """As a server can answer it, whatever it encodes its answers with."""
    return list(encode(result))


def read_result(numbers: list[int]) -> LoadResult:
    """The inverse. Raises MessageError."""
    return _result_decoder.decode(bytes(numbers))


# --- any server -------------------------------------------------------------------------------------------------------

Take = Callable[[Mapping[str, "torch.Tensor"]], object]
"""Has a model take tensors by the names that they have in its files."""


def carry_out(model: Any, order: LoadOrder, take: Take, processes: Callable[[], Any]) -> LoadResult:
    """processes: gloo's group of those that share the model, asked for only where there are several.

    What was mapped is unmapped by a thread: 270 MB take 20-50 ms, and running samples need not wait for that.
    """
    started_s = time.perf_counter()
    stack = ExitStack()
    try:
        result = _carry_out(stack, model, order, take, processes)
    finally:
        threading.Thread(target=stack.close, name="unmap weights").start()  # which holds the last references now
    return replace(result, seconds=time.perf_counter() - started_s)


def _carry_out(stack: ExitStack, model: Any, order: LoadOrder, take: Take, processes: Callable[[], Any]) -> LoadResult:
    """``stack`` holds the tensors' bytes."""
    tensors, failure = _prepare(stack, model, order)
    if not _all_ready(failure is None, processes):
        return failure or LoadResult(number=order.number, error="another process of the server could not; see its log")
    try:  # from here on the old weights are gone
        if tensors:
            take(Renamed(tensors, _names_in_files(model)))
    except Exception as error:  # the server's model code may raise anything, and the server would end of it
        log.exception("order %d failed half-way", order.number)
        return LoadResult(number=order.number, error=f"{type(error).__name__}: {error}", spoiled=True)
    return LoadResult(number=order.number)


def _prepare(stack: ExitStack, model: Any, order: LoadOrder) -> tuple[Mapping[str, torch.Tensor], LoadResult | None]:
    """The tensors, valid until ``stack`` closes, and why they cannot be loaded, if they cannot."""
    try:
        puller = WeightPuller(secret=read_secret(os.environ, SHARED_SECRET).encode())
        vocab_size = model.config.get_text_config().vocab_size
        if vocab_size != order.vocab_size:  # a token that the model does not have would end the server
            raise WeightsMismatchError(
                f"the server's model has a vocabulary of {vocab_size} tokens, not {order.vocab_size}"
            )
        if order.manifest is None:
            return {}, None
        tensors = stack.enter_context(puller.pull(order.manifest, verify=not order.verified))
        if renamed := {where: name for name, where in _names_in_files(model).items() if name != where}:
            tensors = Renamed(tensors, renamed)  # of a publisher of files
        check_tensors(_expected(model), tensors)
    except WeightsMismatchError as error:
        return {}, LoadResult(number=order.number, error=str(error), mismatch=True)
    except Exception as error:  # the server must live, and the other processes wait to hear of it
        return {}, LoadResult(number=order.number, error=f"{type(error).__name__}: {error}")
    return tensors, None


def _expected(model: Any) -> Mapping[str, torch.Tensor]:
    """Every parameter of this model, by its name in transformers, without memory behind it.

    A server's own parameters are fused, padded and sharded, and it may leave out in silence what it does not know.
    """
    return dict(_reference(model).named_parameters(remove_duplicate=False))


def _names_in_files(model: Any) -> Mapping[str, str]:
    """Name of each parameter in transformers -> its name in files, which is what a server's own code reads."""
    try:
        return names_in_files(_reference(model), _expected(model))
    except ImportError:  # transformers below 5 renames nothing
        return {}


def _reference(model: Any) -> Any:
    """The model of transformers on the meta device, built once."""
    kept: tuple[Any] | None = getattr(model, "_streamrl_reference", None)
    if kept is None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        # From its files: a server changes the sizes in ``model.config`` where its kernels want them padded.
        config = AutoConfig.from_pretrained(model.config.name_or_path) if model.config.name_or_path else model.config
        with torch.device("meta"):
            reference: Any = AutoModelForCausalLM.from_config(config)
        reference.tie_weights()
        model._streamrl_reference = kept = (reference,)  # in a tuple: it is no part of the server's model
    return kept[0]


def _all_ready(ready: bool, processes: Callable[[], Any]) -> bool:
    """Whether every tensor-parallel process of the server is ready: all write, or none does."""
    import torch

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return ready
    flag = torch.tensor([int(ready)])
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=processes())
    return bool(flag.item())


# --- SGLang -----------------------------------------------------------------------------------------------------------
# It hands a custom loader what ``/update_weights_from_tensor`` brought: named tensors, as base64 of a pickle. Ours is
# one tensor without elements, whose name is the order; the opcodes are written out here, and nothing is ever unpickled.

RESULT = "streamrl:outcome:"
"""Beginning of the name under which ``/get_weights_by_name`` answers how an order went."""

# [(name, torch.Tensor())] in pickle protocol 4: a list, a string, a global called with no arguments, a pair.
_BEFORE_NAME = b"\x80\x04]X"
_AFTER_NAME = b"ctorch\nTensor\n)R\x86a."


def to_payload(order: LoadOrder) -> str:
    """What goes into ``serialized_named_tensors``."""
    name = to_name(order).encode()
    return base64.b64encode(_BEFORE_NAME + struct.pack("<I", len(name)) + name + _AFTER_NAME).decode()


def load_into_sglang(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's --custom-weight-loader: carry out the order that is the name of the only tensor."""

    def processes() -> Any:
        from sglang.srt.distributed import get_tp_group  # pyright: ignore[reportMissingImports]  only inside the server

        return get_tp_group().cpu_group

    try:
        order = from_name(named_tensors[0][0])
        result = carry_out(model, order, lambda tensors: model.load_weights(iter(tensors.items())), processes)
    except Exception:  # no order of ours: the engine that gave it finds no result
        log.exception("not an order to load weights")
        return
    if result.error:
        log.error("order %d not carried out: %s", result.number, result.error)
    _leave(model, result)


def _leave(model: Any, result: LoadResult) -> None:
    """Answer /get_weights_by_name with ``result`` where its name is asked for, and as before otherwise."""
    ask: Callable[..., Any] | None = getattr(model, "_streamrl_ask", None) or getattr(
        model, "get_weights_by_name", None
    )
    model._streamrl_ask = ask

    def answer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(RESULT):
            return result_numbers(result)
        return ask(name, *args, **kwargs) if ask else None  # as SGLang answers for a model that cannot

    model.get_weights_by_name = answer


# --- vLLM -------------------------------------------------------------------------------------------------------------


class VllmLoader:
    """vLLM's --worker-extension-cls, mixed into the processes that hold the model; ``/collective_rpc`` calls its
    methods there. None may have the name of one that a worker of vLLM has.
    """

    model_runner: Any
    vllm_config: Any

    def streamrl_about(self) -> dict[str, Any]:
        """What the worker serves, and what of it the engine depends on."""
        config = self.vllm_config
        cache = config.cache_config
        return {
            "model_type": config.model_config.hf_config.model_type,
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_context": config.model_config.max_model_len,
            "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "slots": config.scheduler_config.max_num_seqs,
            "processes": config.parallel_config.world_size,
        }

    def streamrl_load(self, order: str) -> list[int]:
        """Carry out the LoadOrder in ``order``. Returns the LoadResult, as bytes."""
        model = self.model_runner.get_model()

        def take(tensors: Any) -> None:
            self.reload_weights(weights_iterator=iter(tensors.items()))  # type: ignore[attr-defined]  the worker's
            head: Any = getattr(model, "lm_head", None)
            if hasattr(head, "cpu_linear"):
                # On a CPU it computes with a packed copy, which a reload leaves as it was where the head is tied.
                head.quant_method.process_weights_after_loading(head)

        def processes() -> Any:
            from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]  only inside the server

            return get_tp_group().cpu_group

        return result_numbers(carry_out(model, from_name(order), take, processes))
