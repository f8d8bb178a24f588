"""Micro-batches through the stages of a pipeline, by torch's own schedule.

A schedule is made for one number of micro-batches of one size, because a stage receives into buffers that were made
before: so all of a round are padded to the same number of tokens, one of a few (``bucket``), and schedules are kept.

Invariant: all stages enter with the same numbers: ``Ranks.agree_round`` (unequal ones end gloo by SIGABRT).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workers.trainer.policy.packing import PackedBatch
from workers.trainer.policy.parallel import PIPELINE, Ranks

MAX_SCHEDULES = 4
"""Kept, with their buffers: those used last."""


class Call(Protocol):
    batch: PackedBatch


def bucket(tokens: int, sizes: Sequence[int]) -> int:
    """The least of ``sizes`` that holds so many tokens; beyond the largest, that one doubled as often as it takes."""
    fitting = [size for size in sorted(sizes) if size >= tokens]
    if fitting:
        return fitting[0]
    size = max(sizes)
    while size < tokens:
        size *= 2
    return size


class Pipeline:
    """Runs rounds on this rank's stage. dtype: of what stages hand on."""

    def __init__(self, stage: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
        mesh = ranks.axis(PIPELINE)
        assert mesh is not None  # of two ranks or more
        self._group = mesh.get_group()
        self._number, self._count = mesh.get_local_rank(), mesh.size()
        self._tensor = ranks.layout.tensor
        self._adapter = MicroBatches(stage, is_first=self._number == 0)
        self._dtype = dtype
        self._schedules: OrderedDict[tuple[int, int], Schedule1F1B] = OrderedDict()

    def backward(self, calls: Sequence[Any]) -> None:
        """Forward and backward of as many micro-batches, of the same number of tokens each."""
        tokens = {call.batch.input_ids.shape[1] for call in calls}
        if len(tokens) != 1:
            raise ValueError(f"micro-batches of {sorted(tokens)} tokens cannot share a pipeline's buffers")
        self._adapter.calls = calls
        schedule = self._schedule(len(calls), tokens.pop())
        numbers = torch.arange(len(calls))[:, None]
        first = (numbers,) if self._number == 0 else ()
        target = numbers if self._number == self._count - 1 else None
        try:
            schedule.step(*first, target=target, number=numbers, return_outputs=False)
        finally:
            self._adapter.calls = ()

    def _schedule(self, count: int, tokens: int) -> Schedule1F1B:
        key = (count, tokens)
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(count, tokens)
            if len(self._schedules) > MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _new_schedule(self, count: int, tokens: int) -> Schedule1F1B:
        adapter = self._adapter
        hidden = torch.empty(1, tokens // self._tensor, adapter.hidden_size, dtype=self._dtype, device="meta")
        received = torch.empty(1, 1, dtype=torch.int64, device="meta") if self._number == 0 else hidden
        handed_on = torch.empty((), dtype=self._dtype, device="meta") if self._number == self._count - 1 else hidden
        stage = PipelineStage(
            adapter,
            self._number,
            self._count,
            adapter.device,
            input_args=(received.requires_grad_() if self._number else received,),
            output_args=(handed_on.requires_grad_(),),
            group=self._group,
        )
        return Schedule1F1B(stage, count, loss_fn=lambda loss, _: loss, scale_grads=False)


class MicroBatches(nn.Module):
    """The stage as torch's schedule calls it: with what the stage before sent, and the number of the micro-batch.

    It hides the stage: a schedule that is entered for the first time drops the gradients of all FSDP modules that it
    finds below its own, and a mini-batch has several schedules (torch 2.13, ``_post_metadata_inference_cleanup``).
    """

    def __init__(self, stage: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self._hidden = (stage,)  # an attribute that is a module would be found
        self.calls: Sequence[Any] = ()
        self._is_first = is_first

    @property
    def hidden_size(self) -> int:
        return int(cast(Any, self._hidden[0]).module.config.hidden_size)

    @property
    def device(self) -> torch.device:
        return cast(Any, self._hidden[0]).module.device

    def forward(self, received: Tensor, *, number: Tensor) -> Tensor:
        return self._hidden[0](None if self._is_first else received, self.calls[int(number)])
