"""New weights inside an inference server, whichever it is (sglang_loader.py, vllm_loader.py).

It runs in each of the server's model processes, between two steps, and does there what the embedded engine does in the
worker: opens the segment that the manifest names (shared memory is mapped, other hosts are asked), checks that it fits
the model, and has the model take it. Only here do sharding and device come in, so a transport that writes into GPU
memory (UCX, NIXL) becomes a backend of ``transport/tensors`` and this file stays as it is.

Needs in the server's environment: this package, torch, transformers, numpy, msgspec, all but the first the server's
own. Owns: that nothing is written before every process has the bytes and they fit. Never raises: a server may end for
that; how it went is the ``Outcome``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from msgspec.structs import replace

from transport.process.secret import SHARED_SECRET, read_secret
from workers.errors import WeightsMismatchError
from workers.generation.server.order import LoadOrder, Outcome
from workers.weights.pull import WeightPuller, check_tensors

log = logging.getLogger(__name__)


def carry_out(
    model: Any, order: LoadOrder, take: Callable[[Mapping[str, torch.Tensor]], object], processes: Callable[[], Any]
) -> Outcome:
    """take: has ``model`` take tensors.  processes: gloo's group of those that share the model, asked for only where
    there are several.

    What was mapped is unmapped by a thread: 270 MB take 20-50 ms, and running samples need not wait for that.
    """
    started_s = time.perf_counter()
    stack = ExitStack()
    try:
        outcome = _carry_out(stack, model, order, take, processes)
    finally:
        threading.Thread(target=stack.close, name="unmap weights").start()  # which holds the last references now
    return replace(outcome, seconds=time.perf_counter() - started_s)


def _carry_out(
    stack: ExitStack,
    model: Any,
    order: LoadOrder,
    take: Callable[[Mapping[str, torch.Tensor]], object],
    processes: Callable[[], Any],
) -> Outcome:
    """``stack`` holds the tensors' bytes."""
    tensors, failure = _prepare(stack, model, order)
    if not _all_ready(failure is None, processes):
        return failure or Outcome(number=order.number, error="another process of the server could not; see its log")
    return _write(order, tensors, take)


def _prepare(stack: ExitStack, model: Any, order: LoadOrder) -> tuple[Mapping[str, torch.Tensor], Outcome | None]:
    """The tensors, valid until ``stack`` closes, and why they cannot be loaded, if they cannot."""
    try:
        puller = WeightPuller(secret=read_secret(os.environ, SHARED_SECRET).encode())
        _check_vocabulary(model, order)
        if order.manifest is None:
            return {}, None
        tensors = stack.enter_context(puller.pull(order.manifest, verify=not order.verified))
        check_tensors(_expected(model), tensors)
    except WeightsMismatchError as error:
        return {}, Outcome(number=order.number, error=str(error), mismatch=True)
    except Exception as error:  # the server must live, and the other processes wait to hear of it
        return {}, Outcome(number=order.number, error=f"{type(error).__name__}: {error}")
    return tensors, None


def _check_vocabulary(model: Any, order: LoadOrder) -> None:
    """A token that the model does not have would end the server."""
    config = model.config.get_text_config()
    if config.vocab_size != order.vocab_size:
        raise WeightsMismatchError(
            f"the server's model has a vocabulary of {config.vocab_size} tokens, not {order.vocab_size}"
        )


def _write(
    order: LoadOrder, tensors: Mapping[str, torch.Tensor], take: Callable[[Mapping[str, torch.Tensor]], object]
) -> Outcome:
    """From here on the old weights are gone."""
    try:
        if tensors:
            take(tensors)
    except Exception as error:  # the server's model code may raise anything, and the server would end of it
        log.exception("order %d failed half-way", order.number)
        return Outcome(number=order.number, error=f"{type(error).__name__}: {error}", spoiled=True)
    return Outcome(number=order.number)


def _expected(model: Any) -> Mapping[str, torch.Tensor]:
    """Every tensor that a checkpoint of this model has, by its Hugging Face names, without memory behind it.

    A server's own parameters are fused, padded and sharded, and it may leave out in silence what it does not know.
    """
    known: Mapping[str, torch.Tensor] | None = getattr(model, "_streamrl_expected", None)
    if known is None:
        from transformers import AutoConfig, AutoModelForCausalLM

        # From its files: a server changes the sizes in ``model.config`` where its kernels want them padded.
        config = AutoConfig.from_pretrained(model.config.name_or_path) if model.config.name_or_path else model.config
        with torch.device("meta"):
            reference = AutoModelForCausalLM.from_config(config)
        reference.tie_weights()
        known = dict(reference.named_parameters(remove_duplicate=False))
        model._streamrl_expected = known
    return known


def _all_ready(ready: bool, processes: Callable[[], Any]) -> bool:
    """Whether every tensor-parallel process of the server is ready: all write, or none does."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return ready
    flag = torch.tensor([int(ready)])
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=processes())
    return bool(flag.item())
