"""A group as generation leaves it for scoring, and what is told of it."""

from __future__ import annotations

import json
from typing import Literal

from orchestrator.loop.intake import scoring_tasks
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Commit, GroupWrite, RowWrite
from transport.contracts.messages import Event, RolloutInfo, encode, event_decoder
from transport.contracts.settings import (
    AlgorithmSettings,
    DataSettings,
    PipelineSettings,
    SamplingSettings,
    ScoringSettings,
    Settings,
    TrainerSettings,
)
from transport.contracts.types import (
    Column,
    FinishReason,
    GroupId,
    Segment,
    VersionSpan,
    WeightIdentity,
    WorkerId,
    group_id,
    row_id,
)
from transport.rows.columns import RowStore, encode_array, loss_mask

GROUP = group_id(0, 0)
PROMPT = [5, 6, 7]


def settings_for(
    reward: str = "",
    *,
    kl_coef: float = 0.0,
    teacher: str = "",
    advantage: str = "group_std",
    timeout_s: float = 5.0,
    attempts: int = 3,
    jail: Literal["auto", "off"] = "auto",
    offload: Literal["none", "reference"] = "none",
) -> Settings:
    return Settings(
        data=DataSettings(source="jsonl"),
        scoring=ScoringSettings(
            reward=reward, timeout_s=timeout_s, max_deliveries=attempts, lease_s=60.0, jail=jail, offload=offload
        ),
        algorithm=AlgorithmSettings(kl_coef=kl_coef, teacher=teacher, advantage=advantage, gamma=0.9, gae_lambda=0.8),
        sampling=SamplingSettings(temperature=0.7),
        trainer=TrainerSettings(dtype="float32"),
        pipeline=PipelineSettings(group_size=3),
    )


async def admit(
    broker: Broker,
    entry: object,
    *,
    group: GroupId = GROUP,
    size: int = 3,
    reference: bool = False,
    critic: bool = False,
) -> None:
    await broker.declare_tasks(scoring_tasks(with_reference=reference, with_critic=critic))
    columns = {
        Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, PROMPT),
        Column.PROMPT_TEXT: b"say it",
        Column.TASK_ENTRY: json.dumps(entry).encode(),
    }
    await broker.commit(Commit(groups=[GroupWrite(group_id=group, size=size, columns=columns)]))


async def generate(
    broker: Broker, *responses: list[int], group: GroupId = GROUP, segments: tuple[Segment, ...] = ()
) -> None:
    """segments: of each of them."""
    rows = [_row(group, sample, ids, segments) for sample, ids in enumerate(responses)]
    await RowStore(broker).commit(Commit(rows=rows))


def _row(group: GroupId, sample: int, ids: list[int], segments: tuple[Segment, ...]) -> RowWrite:
    info = RolloutInfo(
        worker_id=WorkerId("generate-0.1"),
        finish_reason=FinishReason.STOP,
        prompt_tokens=len(PROMPT),
        response_tokens=len(ids),
        spans=(VersionSpan(start=0, end=len(ids), weights=WeightIdentity(epoch=1, version=0)),),
        segments=segments,
    )
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [-1.0] * len(ids)),
        Column.ROLLOUT_INFO: encode(info),
    }
    if segments:
        columns[Column.LOSS_MASK] = encode_array(Column.LOSS_MASK, loss_mask(segments))
    return RowWrite(row_id=row_id(group, sample), columns=columns)


async def next_event(broker: Broker, after: str = ZERO_ID) -> tuple[str, Event]:
    entries = await broker.read(keys.EVENTS, after, count=1, wait_s=40.0)
    assert entries, "no event came"
    return entries[0].entry_id, event_decoder.decode(entries[0].entry.payload)


async def all_events(broker: Broker) -> list[Event]:
    return [event_decoder.decode(entry.entry.payload) for entry in await broker.read(keys.EVENTS, ZERO_ID, count=1000)]
