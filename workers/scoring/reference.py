"""The task "reference": logprobs of each response under the model that training started from.

Runs only with ``algorithm.kl_coef`` > 0. Rows that wait together are computed together, packed as the trainer packs
them: no padding, and the prompt once for the samples of its group.

Owns: the frozen model. Invariant: the logprobs are the trainer's at version 0: log_softmax(logits / temperature), same
packing, same dtype.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from transport.broker.base import RowWrite
from transport.contracts.settings import Settings
from transport.contracts.types import Column, GroupId, RowId, WorkerId
from transport.rows.columns import RowStore, decode_array, encode_array
from workers.scoring.consumer import Outcome, Unit
from workers.scoring.tasks import lost_row
from workers.trainer.policy.head import target_logprobs
from workers.trainer.policy.load import choose_device, choose_dtype, load_module
from workers.trainer.policy.model import plain_head, predictor_hidden
from workers.trainer.policy.packing import PromptGroup, TrainingSample, pack, split_by_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """prompt_ids: [P] int32.  response_ids: [R] int32."""

    row_id: RowId
    group_id: GroupId
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]


class ReferenceModel:
    """The base model, frozen. Called on one thread at a time."""

    def __init__(self, model_dir: Path, settings: Settings) -> None:
        device = choose_device(settings.trainer.device)
        self._module = load_module(model_dir, device=device)
        self._module.to(dtype=choose_dtype(settings.trainer.dtype, device))  # pyright: ignore[reportCallIssue]
        self._temperature = settings.sampling.temperature or 1.0
        self._max_tokens = settings.trainer.micro_batch_tokens

    @torch.no_grad()
    def logprobs(self, rows: Sequence[ReferenceRow]) -> dict[RowId, NDArray[np.float32]]:
        """Per row [R] float32, in packed passes of at most ``trainer.micro_batch_tokens``."""
        result: dict[RowId, NDArray[np.float32]] = {}
        for piece in split_by_tokens(_groups(rows), self._max_tokens):
            batch = pack(piece, "token_mean", self._module.device)
            hidden = predictor_hidden(self._module, batch)
            logprobs = target_logprobs(hidden, batch.target_N, plain_head(self._module), self._temperature)
            parts = logprobs.cpu().split(list(batch.row_lengths))
            result.update((row, part.numpy()) for row, part in zip(batch.row_ids, parts, strict=True))
        return result


def _groups(rows: Sequence[ReferenceRow]) -> list[PromptGroup]:
    by_group: dict[GroupId, list[ReferenceRow]] = {}
    for row in rows:
        by_group.setdefault(row.group_id, []).append(row)
    return [
        PromptGroup(group_id=group_id, prompt_ids=members[0].prompt_ids, samples=[_sample(row) for row in members])
        for group_id, members in by_group.items()
    ]


def _sample(row: ReferenceRow) -> TrainingSample:
    unused = np.zeros(len(row.response_ids), np.float32)
    return TrainingSample(row_id=row.row_id, response_ids=row.response_ids, rollout_logprobs=unused, advantage=0.0)


class ReferenceTask:
    """Computes units together: what arrives during one pass of the model is the next pass."""

    def __init__(self, rows: RowStore, worker_id: WorkerId, model: ReferenceModel) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._model = model
        self._computing = asyncio.Lock()
        self._waiting: dict[RowId, ReferenceRow] = {}
        self._computed: dict[RowId, NDArray[np.float32]] = {}

    async def __call__(self, unit: Unit) -> Outcome:
        """Reference logprobs of one row. Raises MessageError for columns that do not decode."""
        row_id = RowId(unit.unit_id)
        (row,) = await self._rows.read_rows([row_id], [Column.RESPONSE_IDS])
        (group,) = await self._rows.read_groups([unit.group_id], [Column.PROMPT_IDS])
        if Column.RESPONSE_IDS not in row or Column.PROMPT_IDS not in group:
            return lost_row(row_id, group, self._worker_id)
        logprobs = await self._compute(
            ReferenceRow(
                row_id=row_id,
                group_id=unit.group_id,
                prompt_ids=decode_array(Column.PROMPT_IDS, group[Column.PROMPT_IDS]),
                response_ids=decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS]),
            )
        )
        column = Column.REFERENCE_LOGPROBS
        return Outcome(rows=(RowWrite(row_id=row_id, columns={column: encode_array(column, logprobs)}),))

    async def _compute(self, row: ReferenceRow) -> NDArray[np.float32]:
        self._waiting[row.row_id] = row
        try:
            async with self._computing:
                if row.row_id not in self._computed:
                    batch = list(self._waiting.values())
                    self._computed.update(await asyncio.to_thread(self._model.logprobs, batch))
                    self._waiting = {name: new for name, new in self._waiting.items() if name not in self._computed}
                return self._computed[row.row_id]
        finally:
            self._waiting.pop(row.row_id, None)
            self._computed.pop(row.row_id, None)
