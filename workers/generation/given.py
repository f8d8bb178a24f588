"""Responses that rows bring along, to be trained as they are: nothing is sampled for them.

A supervised run has the same life as any other: a prompt's group is dispatched, its worker writes the row that the data
gives instead of asking its engine, and the trainer imitates it. Evaluations are answered by the engine as ever.

Never: the broker. Invariant: a row has the same tokens on whichever worker and attempt it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from transport.contracts.settings import DataSettings
from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.errors import DECODE_ERRORS, MessageError
from workers.generation.engine import Completion
from workers.models import load_tokenizer, stop_token_ids

Encode = Callable[[str], Sequence[int]]


class GivenResponses:
    """encode: text -> token ids, without special ones.  end: the token that ends a response; None: none does."""

    def __init__(self, data: DataSettings, encode: Encode, end: int | None, *, max_tokens: int) -> None:
        self._data = data
        self._encode = encode
        self._end = end
        self._max_tokens = max_tokens

    @staticmethod
    def of(directory: Path, data: DataSettings, *, max_tokens: int) -> GivenResponses:
        """With the tokenizer of the model in ``directory``. Raises ModelError."""
        tokenizer = load_tokenizer(directory)
        ends = stop_token_ids(directory)
        end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends or not ends else ends[0]

        def encode(text: str) -> Sequence[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        return GivenResponses(data, encode, end, max_tokens=max_tokens)

    def text(self, entry: bytes) -> str:
        """The response of a row. entry: its column TASK_ENTRY. Raises MessageError where it has none."""
        try:
            row = msgspec.json.decode(entry, type=dict[str, Any])
        except DECODE_ERRORS as error:
            raise MessageError(f"its entry is not JSON: {error}") from error
        column, metadata = self._data.response_column, row.get("metadata")
        others: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
        text = row.get("answer") if column == self._data.answer_column else others.get(column)
        if not isinstance(text, str) or not text:
            raise MessageError(f"column {column!r} (data.response_column) of its row is no text, or empty")
        return text

    def completion(
        self, group_id: GroupId, sample: int, attempt: int, entry: bytes, weights: WeightIdentity
    ) -> Completion:
        """The row of one sample, as if ``weights`` had sampled it; its logprobs are 0, and mean nothing.

        One that is longer than a response may be is cut, and says so. Raises MessageError.
        """
        ids = [*self._encode(self.text(entry)), *([] if self._end is None else [self._end])]
        kept = np.asarray(ids[: self._max_tokens], dtype=np.int32)
        return Completion(
            group_id=group_id,
            sample=sample,
            attempt=attempt,
            response_ids=kept,
            logprobs=np.zeros(len(kept), dtype=np.float32),
            finish_reason=FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH,
            spans=(VersionSpan(start=0, end=len(kept), weights=weights),),
            queued_s=0.0,
            engine_s=0.0,
        )
