"""Of figure ``agents``: a run whose environments are killed, and turns that are continued token by token."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import psutil

from orchestrator.journal import read_whole_records
from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from transport.contracts.ledger import newest_checkpoint
from transport.contracts.messages import GroupScored
from transport.contracts.settings import EnvironmentSettings, GenerationSettings, Settings
from transport.contracts.types import GroupId, SamplingParams, is_evaluation
from transport.process.clock import MonotonicClock
from workers.environments.encoder import ObservationEncoder
from workers.environments.engine import EpisodeEngine
from workers.environments.pool import Environments
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.engine import Completion, GenerationEngine, GenerationRequest, Result, serving
from workers.models import random_model

ROOT = Path(__file__).parents[1]
CHILD = "workers.environments.environment"
GROUP_SIZE = 8
GROUPS = 5
"""Of a batch: 40 episodes."""
TURNS = 3
LIMIT_S = 1800.0
"""For the first batch, and for all of them: a machine at load 10 took four minutes to start the run."""


class Paying:
    """An environment that pays each episode for what it said, so that only a made-up reward is 0."""

    def reset(self, prompt: str, entry: dict[str, object]) -> None:
        self.heard = 0

    def step(self, text: str, tokens: Sequence[int]) -> tuple[str | None, bool, float]:
        time.sleep(0.002)
        self.heard += 1
        over = self.heard == TURNS
        return None if over else f"{self.heard}", over, 1.0 + sum(tokens) % 7


def killed_run(episodes: int, kills: int) -> dict[str, float | bool]:
    """Episodes of a real run whose environments' processes are killed, one as soon as the last one was replaced."""
    batches = -(-episodes // (GROUPS * GROUP_SIZE))
    settings = (
        "environment.name=benchmarks.agents_episodes:Paying",
        f"environment.path={ROOT}",
        "environment.jail=off",  # a jail's child has another command line
        "environment.max_replays=20",  # a call that is killed again and again is no failure of the environment's
        f"pipeline.groups_per_batch={GROUPS}",
        f"pipeline.group_size={GROUP_SIZE}",
        "sampling.max_new_tokens=60",
        "environment.max_turn_tokens=12",
        "generation.workers=2",
        "eval.problems=0",
        "emulated.time_scale=0.5",
        "trainer.checkpoint_every=1",
        "liveness.stall_s=300.0",
        f"run.batches={batches}",
    )
    with tempfile.TemporaryDirectory(prefix="streamrl-agents-") as name:
        with LiveRun(Path(name), *QUICK, *EMULATED, *settings) as run:
            # A child that is only tried out before the run is none of it.
            run.wait_until(lambda: bool(run.metrics()), "first batch", timeout_s=LIMIT_S)
            killed: set[int] = set()
            while len(killed) < kills and run.is_running:
                for pid in run.survivors(CHILD):
                    if pid not in killed and len(killed) < kills:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            psutil.Process(pid).kill()
                            killed.add(pid)
                        time.sleep(0.3)
                time.sleep(0.1)
            code = run.wait_for_end(timeout_s=LIMIT_S)
            audit = run.audit()
            scored: dict[GroupId, Sequence[float]] = {}
            for record in read_whole_records(run.run_dir / "journal"):
                if isinstance(record.event, GroupScored) and not is_evaluation(record.event.group_id):
                    scored[record.event.group_id] = record.event.rewards
            checkpoint = newest_checkpoint(run.run_dir / "checkpoints")
            trained = sum(map(len, checkpoint[1].rows().values())) if checkpoint else 0
            if code or audit.returncode:
                print(run.describe(), audit.stdout, sep="\n")
        sealed = sum(map(len, scored.values()))
        return {
            "episodes": trained,
            "kills": len(killed),
            "trained_over_sealed": trained / max(1, sealed),
            "zero_by_crash": sum(reward == 0 for rewards in scored.values() for reward in rewards),
            "audit_clean": code == 0 and audit.returncode == 0,
        }


class Recording:
    """An engine of the model, and what it was asked and answered: by (group, sample), the ids up to each turn's end."""

    def __init__(self, inner: EmbeddedEngine) -> None:
        self._inner = inner
        self._ends: dict[tuple[GroupId, int], list[int]] = {}
        self.policy_tokens = self.retokenised = self.later_prompt_tokens = 0

    def submit(self, request: GenerationRequest) -> None:
        for sample in request.samples:
            before = self._ends.get((request.group_id, sample), [])
            now = request.prompt_ids.tolist()
            self.later_prompt_tokens += len(now) if before else 0
            self.retokenised += sum(a != b for a, b in zip(before, now, strict=False)) + max(0, len(before) - len(now))
            self._ends[request.group_id, sample] = now
        self._inner.submit(request)

    async def results(self) -> list[Result]:
        results = await self._inner.results()
        for result in results:
            if isinstance(result, Completion):
                self.policy_tokens += len(result.response_ids)
                self._ends[result.group_id, result.sample] += result.response_ids.tolist()
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def exact_turns(groups: int = 16) -> dict[str, float]:
    """Episodes over the embedded engine and its random model, which samples tokens that no text is encoded to."""
    with tempfile.TemporaryDirectory(prefix="streamrl-agents-") as name:
        directory = Path(name)
        random_model("qwen3-tiny")(directory)
        settings = Settings(
            environment=EnvironmentSettings(name="benchmarks.agents_episodes:Paying", path=str(ROOT), jail="off")
        )
        generation = GenerationSettings(slots=16, dtype="float32", max_context=400)
        engine = Recording(EmbeddedEngine(generation, directory, MonotonicClock()))
        pool = Environments(settings, settings.environment.name, str(ROOT))
        encoder = ObservationEncoder.of(directory, templated=True)
        chosen = msgspec.structs.replace(settings.environment, max_turn_tokens=12)
        episodes = EpisodeEngine(cast("GenerationEngine", engine), pool, encoder, chosen)
        async with asyncio.timeout(300), serving(episodes):
            for group in range(groups):
                episodes.submit(
                    GenerationRequest(
                        group_id=GroupId(f"0/{group}"),
                        prompt_ids=np.random.default_rng(group).integers(4, 60, 20).astype(np.int32),
                        samples=range(GROUP_SIZE),
                        sampling=SamplingParams(max_new_tokens=200, seed=group),
                    )
                )
            left = groups * GROUP_SIZE
            while left:
                left -= len(await episodes.results())
            reused = engine.load().cached_tokens
        return {
            "policy_tokens": engine.policy_tokens,
            "retokenised": engine.retokenised,
            "prefill_saved": round(reused / max(1, engine.later_prompt_tokens), 4),
        }
