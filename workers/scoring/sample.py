"""The task "reward": one sample's tokens become text, its text a reward.

Owns: detokenisation and the two columns a reward has. Never: the reward itself (reward_pool.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from transport.broker.base import RowWrite
from transport.contracts.messages import RowsMissing
from transport.contracts.types import Column, RowId, WorkerId
from transport.errors import MessageError
from transport.rows.columns import RowStore, decode_array, encode_array
from workers.errors import ModelError
from workers.leases.consumer import Outcome, Unit
from workers.leases.events import event_append
from workers.scoring.rewards import Reward

Detokenize = Callable[[Sequence[int]], str]


class Scores(Protocol):
    """What computes rewards (reward_pool.RewardPool)."""

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward: ...


def load_detokenizer(model_dir: Path) -> Detokenize:
    """The model's own tokenizer, special tokens left out. Raises ModelError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {model_dir}: {error}") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def lost_row(row_id: RowId, group: Mapping[Column, bytes], worker_id: WorkerId) -> Outcome:
    """A unit whose columns are not there: nothing to do when its group was dropped; else its bytes were lost."""
    if not group:
        return Outcome()
    return Outcome(appends=(event_append(RowsMissing(row_ids=(row_id,)), row=row_id, worker=worker_id),))


class RewardTask:
    """Scores one sample at a time; many may be in work together."""

    def __init__(self, rows: RowStore, worker_id: WorkerId, scores: Scores, detokenize: Detokenize) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._scores = scores
        self._detokenize = detokenize

    async def __call__(self, unit: Unit) -> Outcome:
        """Reward of one row. Raises RewardError; MessageError for columns that do not decode."""
        row_id = RowId(unit.unit_id)
        (row,) = await self._rows.read_rows([row_id], [Column.RESPONSE_IDS])
        (group,) = await self._rows.read_groups([unit.group_id], [Column.PROMPT_TEXT, Column.TASK_ENTRY])
        if Column.RESPONSE_IDS not in row or not group:
            return lost_row(row_id, group, self._worker_id)
        response = self._text(row[Column.RESPONSE_IDS])
        prompt = group.get(Column.PROMPT_TEXT, b"").decode(errors="replace")
        reward = await self._scores.score(prompt, response, group.get(Column.TASK_ENTRY, b""))
        columns = {
            Column.REWARD: encode_array(Column.REWARD, [reward.value]),
            Column.REWARD_COMPONENTS: msgspec.json.encode(reward.components),
        }
        return Outcome(rows=(RowWrite(row_id=row_id, columns=columns),))

    def _text(self, raw: bytes) -> str:
        try:
            return self._detokenize(decode_array(Column.RESPONSE_IDS, raw).tolist())
        except (OverflowError, IndexError) as error:
            raise MessageError(f"the response has ids that the tokenizer does not know: {error}") from error
