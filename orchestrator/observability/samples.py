"""A few finished samples as text: for the live page, and kept in ``samples.jsonl`` for the report.

This is the only look that the orchestrator takes at what was generated: at most two rows every few seconds, as soon as
they are scored, because a checkpoint frees them a moment later. Invariant: text is cut before it leaves, and is
otherwise exactly what the model wrote: every page that shows it escapes it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from orchestrator.errors import DataError
from transport.contracts.messages import Event, GroupScored, OwnPrompt, rollout_info_decoder
from transport.contracts.types import Column, GroupId, RowId, is_evaluation, row_id
from transport.errors import DECODE_ERRORS, MessageError
from transport.rows.columns import RowStore, decode_array

log = structlog.get_logger(__name__)

Detokenize = Callable[[Sequence[int]], str]

REST_S = 2.0  # after a group that was shown: people do not read faster
GONE_REST_S = 0.05  # after a group that was gone already: the next one that is scored may be there still
MAX_SHOWN = 12
MAX_PROMPT_CHARS = 1_500
MAX_RESPONSE_CHARS, MAX_RESPONSE_END = 2_000, 1_000  # of a long response its beginning and its end, where the answer is
MAX_QUESTION_CHARS, MAX_EXPECTED_CHARS = 600, 300
COLUMNS = (Column.RESPONSE_IDS, Column.ROLLOUT_INFO, Column.REWARD_COMPONENTS)
ReadOwnPrompt = Callable[[GroupId], Awaitable[bytes | None]]
"""The prompt that an agent brought for a group, as its worker keeps it (keys.own_prompt); None where none did."""


class RecentSamples:
    """The newest samples, two of a group: its best and its worst."""

    def __init__(
        self,
        rows: RowStore,
        load_detokenizer: Callable[[], Detokenize],  # slow, may raise DataError; called once, off the loop
        keep: Callable[[dict[str, Any]], object] = lambda _: None,  # called with each that is shown, for the report
        rest: Callable[[float], Awaitable[object]] = asyncio.sleep,
        own_prompt: ReadOwnPrompt | None = None,  # None: agents bring none
    ) -> None:
        self._rows = rows
        self._load = load_detokenizer
        self._keep = keep
        self._rest = rest
        self._own_prompt = own_prompt
        self.newest_first: deque[dict[str, Any]] = deque(maxlen=MAX_SHOWN)
        self._newest: GroupScored | None = None
        self._is_scored = asyncio.Event()

    def on_events(self, events: Sequence[Event]) -> None:
        """Hear of what happened: the newest group that was scored is the next to be shown. Evaluations are not."""
        for event in events:
            if isinstance(event, GroupScored) and not is_evaluation(event.group_id):
                self._newest = event
                self._is_scored.set()

    async def watch(self) -> None:
        """Show groups as they are scored, forever; without a tokenizer (made-up tokens are no text) it ends at once."""
        try:
            detokenize = await asyncio.to_thread(self._load)
        except DataError as error:
            log.warning("samples cannot be shown", error=str(error))
            return
        while True:
            await self._is_scored.wait()
            self._is_scored.clear()
            assert self._newest is not None
            is_shown = await self._show(self._newest, detokenize)
            await self._rest(REST_S if is_shown else GONE_REST_S)

    async def _show(self, scored: GroupScored, detokenize: Detokenize) -> bool:
        """Returns whether any sample of the group was still there."""
        chosen = best_and_worst(scored.rewards)
        ids = [row_id(scored.group_id, sample) for sample in chosen]
        rows = await self._rows.read_rows(ids, COLUMNS)
        (group,) = await self._rows.read_groups([scored.group_id], [Column.PROMPT_TEXT, Column.TASK_ENTRY])
        own = await self._own_prompt(scored.group_id) if self._own_prompt is not None else None
        problem = readable_problem(group, own)
        found = [
            readable_sample(row, columns, detokenize, reward=scored.rewards[sample], problem=problem)
            for row, columns, sample in zip(ids, rows, chosen, strict=True)
            if {Column.RESPONSE_IDS, Column.ROLLOUT_INFO} <= columns.keys()
        ]
        for sample in reversed([sample for sample in found if sample is not None]):
            self.newest_first.appendleft(sample)
            self._keep(sample)
        return bool(found)


def readable_problem(columns: Mapping[Column, bytes], own: bytes | None = None) -> dict[str, Any]:
    """What is shown of a group: a long prompt's end, and the question and the expected answer, "" where not known.

    own: the prompt that an agent brought; all that is shown is of it then, and nothing of the data's row.
    """
    if own is None:
        prompt = columns.get(Column.PROMPT_TEXT, b"").decode(errors="replace")
        question, expected = _of_row(columns.get(Column.TASK_ENTRY, b"{}"))
    else:
        question, expected = _of_agent(own)
        prompt = question
    return {
        "question": cut(question, MAX_QUESTION_CHARS),
        "expected": cut("" if expected is None else str(expected), MAX_EXPECTED_CHARS),
        "prompt": prompt[-MAX_PROMPT_CHARS:],
        "prompt_cut": max(0, len(prompt) - MAX_PROMPT_CHARS),
    }


def _of_row(entry: bytes) -> tuple[str, object]:
    """(question, expected answer) of a column TASK_ENTRY."""
    try:
        told = msgspec.json.decode(entry, type=dict[str, Any])
    except DECODE_ERRORS:
        return "", None
    question = told.get("question")
    return question if isinstance(question, str) else "", told.get("answer")


def _of_agent(own: bytes) -> tuple[str, object]:
    """Likewise of a prompt that an agent brought."""
    try:
        told = msgspec.msgpack.decode(own, type=OwnPrompt)
    except DECODE_ERRORS:
        return "", None
    return told.question, told.answer


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def readable_sample(
    row: RowId, columns: Mapping[Column, bytes], detokenize: Detokenize, *, reward: float, problem: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What is shown of a row: a long response's beginning and end; None where it is not what we write."""
    try:
        info = rollout_info_decoder.decode(columns[Column.ROLLOUT_INFO])
        response = detokenize(decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]).tolist())
        components = msgspec.json.decode(columns.get(Column.REWARD_COMPONENTS, b"{}"), type=dict[str, float])
    except (MessageError, *DECODE_ERRORS, OverflowError, IndexError) as error:
        log.warning("a sample cannot be shown", row=row, error=str(error))
        return None
    left_out = max(0, len(response) - MAX_RESPONSE_CHARS - MAX_RESPONSE_END)
    return {
        "row": row,
        "reward": round(reward, 4),
        "components": {name: round(value, 4) for name, value in components.items()},
        "worker": info.worker_id,
        "tokens": info.response_tokens,
        "finish": info.finish_reason.value,
        "versions": sorted({span.weights.version for span in info.spans}),
        "engine_s": round(info.engine_s, 2),
        **problem,
        "response": response[:MAX_RESPONSE_CHARS] if left_out else response,
        "response_cut": left_out,
        "response_end": response[-MAX_RESPONSE_END:] if left_out else "",
    }


def best_and_worst(rewards: Sequence[float]) -> list[int]:
    """Indices of the highest and the lowest reward, of the first among equals; one index when all are equal."""
    best = max(range(len(rewards)), key=rewards.__getitem__, default=0)
    worst = min(range(len(rewards)), key=rewards.__getitem__, default=0)
    return [best] if best == worst else [best, worst]


# --- the file of a report ---------------------------------------------------------------------------------------------

SAMPLES = "samples.jsonl"
MAX_OF_BATCH = 2
MAX_REPORTED = 24  # samples in a report: the newest. Enough to see what the model writes now; the file keeps more


class SampleKeeper:
    """Appends to ``path`` the samples it has not seen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = all_samples(path)
        self._rows = {sample.get("row") for sample in known}
        self._of_batch = Counter(_batch(sample) for sample in known)

    def keep(self, sample: dict[str, Any]) -> None:
        batch = _batch(sample)
        if sample.get("row") in self._rows or self._of_batch[batch] >= MAX_OF_BATCH:
            return
        self._rows.add(sample.get("row"))
        self._of_batch[batch] += 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample) + "\n")


def _batch(sample: dict[str, Any]) -> str:
    return str(sample.get("row", "")).partition("/")[0]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The newest samples that were kept, newest first; [] if there are none."""
    return all_samples(path)[: -MAX_REPORTED - 1 : -1]


def all_samples(path: Path) -> list[dict[str, Any]]:
    """All whole lines, in order. A torn one (a kill while writing) is left out."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            sample = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(sample, dict):
            found.append(sample)
    return found
