"""A few finished samples as text, for people who watch the run.

Owns: which samples are shown, how much of them, and the only look that the orchestrator takes at what was generated: at
most two rows every few seconds. Never: rewards or decisions. Invariant: text is cut before it leaves; it stays exactly
what the model wrote otherwise, so whoever shows it must escape it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from orchestrator.errors import DataError
from transport.errors import MessageError
from transport.messages import GroupScored, RolloutInfo, rollout_info_decoder
from transport.rows import RowStore, decode_array
from transport.types import Column, RowId, row_id

log = structlog.get_logger(__name__)

Detokenize = Callable[[Sequence[int]], str]

MAX_SHOWN = 12
MAX_PROMPT_CHARS = 1_500
MAX_RESPONSE_CHARS = 3_000
COLUMNS = (Column.RESPONSE_IDS, Column.ROLLOUT_INFO, Column.REWARD_COMPONENTS)


class RecentSamples:
    """The newest samples, two of a group: its best and its worst."""

    def __init__(
        self,
        rows: RowStore,
        load_detokenizer: Callable[[], Detokenize],
        keep: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        """load_detokenizer: slow, may raise DataError; called once, off the loop, when there is something to show.

        keep: called with each sample that is shown, for the run's report.
        """
        self._rows = rows
        self._load = load_detokenizer
        self._keep = keep
        self._detokenize: Detokenize | None = None
        self._unreadable = False
        self._shown: deque[dict[str, Any]] = deque(maxlen=MAX_SHOWN)
        self._last: GroupScored | None = None

    @property
    def newest_first(self) -> list[dict[str, Any]]:
        return list(self._shown)

    async def show(self, scored: GroupScored | None) -> None:
        """Fetch the samples of a group that was just scored. One that is gone again is not shown."""
        if scored is None or scored is self._last or not await self._can_read():
            return
        self._last = scored
        chosen = best_and_worst(scored.rewards)
        ids = [row_id(scored.group_id, sample) for sample in chosen]
        rows = await self._rows.read_rows(ids, COLUMNS)
        (group,) = await self._rows.read_groups([scored.group_id], [Column.PROMPT_TEXT])
        prompt = group.get(Column.PROMPT_TEXT, b"").decode(errors="replace")
        for row, columns, sample in reversed(list(zip(ids, rows, chosen, strict=True))):
            if {Column.RESPONSE_IDS, Column.ROLLOUT_INFO} <= columns.keys():
                self._add(row, columns, reward=scored.rewards[sample], prompt=prompt)

    async def _can_read(self) -> bool:
        """Whether there is a tokenizer: a run of made-up tokens has none, and then no text either."""
        if self._detokenize is None and not self._unreadable:
            try:
                self._detokenize = await asyncio.to_thread(self._load)
            except DataError as error:
                self._unreadable = True
                log.warning("samples cannot be shown", error=str(error))
        return self._detokenize is not None

    def _add(self, row: RowId, columns: Mapping[Column, bytes], *, reward: float, prompt: str) -> None:
        assert self._detokenize is not None
        try:
            info = rollout_info_decoder.decode(columns[Column.ROLLOUT_INFO])
            ids = decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]).tolist()
            response = self._detokenize(ids)
            components = msgspec.json.decode(columns.get(Column.REWARD_COMPONENTS, b"{}"), type=dict[str, float])
        except (MessageError, msgspec.MsgspecError, OverflowError, IndexError) as error:
            log.warning("a sample cannot be shown", row=row, error=str(error))
            return
        sample = sample_view(row, info, reward, components, prompt, response)
        self._shown.appendleft(sample)
        self._keep(sample)


def best_and_worst(rewards: Sequence[float]) -> list[int]:
    """Indices of the highest and the lowest reward, of the first among equals; one index when all are equal."""
    best = max(range(len(rewards)), key=rewards.__getitem__, default=0)
    worst = min(range(len(rewards)), key=rewards.__getitem__, default=0)
    return [best] if best == worst else [best, worst]


def sample_view(
    row: RowId, info: RolloutInfo, reward: float, components: Mapping[str, float], prompt: str, response: str
) -> dict[str, Any]:
    """One sample for JSON. Of a long prompt the end is kept, of a long response the beginning."""
    return {
        "row": row,
        "reward": round(reward, 4),
        "components": {name: round(value, 4) for name, value in components.items()},
        "worker": info.worker_id,
        "tokens": info.response_tokens,
        "finish": info.finish_reason.value,
        "versions": sorted({span.weights.version for span in info.spans}),
        "engine_s": round(info.engine_s, 2),
        "prompt": prompt[-MAX_PROMPT_CHARS:],
        "prompt_cut": max(0, len(prompt) - MAX_PROMPT_CHARS),
        "response": response[:MAX_RESPONSE_CHARS],
        "response_cut": max(0, len(response) - MAX_RESPONSE_CHARS),
    }
