"""A run around one trainer: an in-memory broker with rows and a rounds log, and a publisher that keeps digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.fakes.explicit_ids import append_at
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.training import make_groups
from transport.broker import keys
from transport.broker.base import Broker, Commit, Entry, GroupWrite, RowWrite
from transport.contracts.messages import (
    CloseMiniBatch,
    Event,
    FinishTraining,
    GroupRows,
    RolloutInfo,
    TrainerCommand,
    TrainRound,
    WeightManifest,
    encode,
    event_decoder,
)
from transport.contracts.settings import (
    AlgorithmSettings,
    LivenessSettings,
    PipelineSettings,
    Settings,
    TrainerSettings,
)
from transport.contracts.types import Column, FinishReason, RunName, VersionSpan, WeightIdentity, WorkerId
from transport.process.clock import MonotonicClock
from transport.rows.columns import RowStore, encode_array
from transport.tensors.manifest import checksum, digest_tensors, layout_bytes, plan_layout, with_checksums
from workers.trainer.learner import PromptGroup
from workers.trainer.policy.policy_learner import PolicyLearner
from workers.trainer.worker import TrainerWorker
from workers.weights.parts import Shard, TalkingRanks, shard_of


class DigestPublisher:
    """Publishes nothing but the digest, by version."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def publish(
        self,
        epoch: int,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        cast: torch.dtype,
        ranks: TalkingRanks | None = None,
        *,
        content: Callable[[str, Shard], torch.Tensor] = lambda _, shard: shard.local,
    ) -> WeightManifest:
        layout = plan_layout((name, tuple(t.shape), str(cast).removeprefix("torch.")) for name, t in tensors.items())
        now = [content(name, shard_of(tensor)) for name, tensor in tensors.items()]
        raw = [t.detach().to(cast).contiguous().view(torch.uint8).numpy().tobytes() for t in now]
        specs = with_checksums(layout, [checksum(part) for part in raw])
        digest = digest_tensors(specs)
        self.digests[version] = digest
        return WeightManifest(
            weights=WeightIdentity(epoch=epoch, version=version, digest=digest),
            tensors=specs,
            total_bytes=layout_bytes(specs),
            sources=(),
            host="here",
        )

    def close(self) -> None:
        pass


@dataclass
class TrainerRun:
    """One run. Ids on the rounds log are ``<n>-1``, as the orchestrator gives them explicitly.

    broker: in memory, unless a test puts a real one here; then url and environment say how processes reach it.
    """

    model_dir: Path
    run_dir: Path
    settings: Settings
    server: MemoryServer = field(default_factory=MemoryServer)
    sent: int = 0
    incarnation: int = 0
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.broker: Broker = MemoryBroker(self.server, RunName("run"))

    def trainer(self, publisher: DigestPublisher) -> TrainerWorker:
        self.incarnation += 1
        return TrainerWorker(
            self.broker,
            self.settings,
            WorkerId(f"train-0.{self.incarnation}"),
            self.model_dir,
            self.run_dir,
            PolicyLearner(self.settings, self.model_dir, publisher),
            MonotonicClock(),
        )

    async def write_groups(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            prompt = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, group.prompt_ids)}
            if group.part:
                prompt[Column.TASK_ENTRY] = json.dumps({"part": group.part}).encode()
            await RowStore(self.broker).commit(
                Commit(groups=(GroupWrite(group_id=group.group_id, size=len(group.samples), columns=prompt),))
            )

    async def write_rows(self, groups: Sequence[PromptGroup], version: int | None = None) -> None:
        """The rows as generation and scoring leave them: in two commits. version: of the weights that sampled them."""
        for group in groups:
            for sample in group.samples:
                tokens = {
                    Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, sample.response_ids),
                    Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, sample.rollout_logprobs),
                }
                if version is not None:
                    length, weights = len(sample.response_ids), WeightIdentity(epoch=1, version=version)
                    info = RolloutInfo(
                        worker_id=WorkerId("generate-0"),
                        finish_reason=FinishReason.STOP,
                        prompt_tokens=len(group.prompt_ids),
                        response_tokens=length,
                        spans=(VersionSpan(start=0, end=length, weights=weights),),
                    )
                    tokens[Column.ROLLOUT_INFO] = encode(info)
                score = {Column.ADVANTAGE: encode_array(Column.ADVANTAGE, [sample.advantage])}
                if sample.advantages is not None:
                    score[Column.TOKEN_ADVANTAGES] = encode_array(Column.TOKEN_ADVANTAGES, sample.advantages)
                for columns in (tokens, score):
                    await RowStore(self.broker).commit(Commit(rows=(RowWrite(row_id=sample.row_id, columns=columns),)))

    async def send(self, *commands: TrainerCommand) -> None:
        for command in commands:
            self.sent += 1
            await append_at(self.broker, keys.ROUNDS, Entry(payload=encode(command)), f"{self.sent}-1")

    async def send_batch(self, batch: int, *, checkpoint: bool = False) -> None:
        """A batch of three ragged groups in two rounds, and its close."""
        groups = make_groups(seed=batch, batch=batch)
        await self.write_groups(groups)
        await self.write_rows(groups)
        await self.send(round_of(groups[:2], batch, 0), round_of(groups[2:], batch, 1))
        await self.send(close_of(groups, batch, checkpoint=checkpoint))

    async def finish(self) -> None:
        await self.send(FinishTraining(reason="test"))

    async def events(self) -> list[Event]:
        entries = await self.broker.read(keys.EVENTS, "0-0", count=1000)
        return [event_decoder.decode(entry.entry.payload) for entry in entries]

    async def until_told(self, kind: type[Event], count: int = 1) -> None:
        """Wait until ``count`` events of a kind are on the log."""
        cursor = "0-0"
        while count > 0:
            entries = await self.broker.read(keys.EVENTS, cursor, count=1, wait_s=150.0)
            assert entries, f"no {kind.__name__} came"
            cursor = entries[0].entry_id
            count -= isinstance(event_decoder.decode(entries[0].entry.payload), kind)

    async def told(self, *kinds: type[Event]) -> list[Event]:
        return [event for event in await self.events() if isinstance(event, kinds)]


def tiny_settings(**trainer: object) -> Settings:
    """fp32, one thread, deadlines of seconds."""
    return Settings(
        algorithm=AlgorithmSettings(importance_cap=0.0),
        trainer=TrainerSettings(dtype="float32", lr=1e-2, **trainer),  # type: ignore[arg-type]
        pipeline=PipelineSettings(group_size=4, groups_per_batch=3),
        liveness=LivenessSettings(stall_s=20.0),
    )


def round_of(groups: Sequence[PromptGroup], batch: int, number: int, **more: object) -> TrainRound:
    rows = tuple(
        GroupRows(
            group_id=group.group_id,
            samples=tuple(range(len(group.samples))),
            num_tokens=sum(len(s.response_ids) for s in group.samples),
        )
        for group in groups
    )
    return TrainRound(round_id=f"{batch}.{number}", batch=batch, ranks=(rows,), **more)  # type: ignore[arg-type]


def close_of(groups: Sequence[PromptGroup], batch: int, **more: object) -> CloseMiniBatch:
    samples = [sample for group in groups for sample in group.samples]
    return CloseMiniBatch(
        batch=batch,
        num_rows=len(samples),
        num_tokens=sum(len(sample.response_ids) for sample in samples),
        source_position=f"after {batch}",
        **more,  # type: ignore[arg-type]
    )
