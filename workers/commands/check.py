"""``streamrl-worker check``: what would end a run's workers on this host, found before the run begins.

A reward that cannot be imported or computes nothing, a device that is not there, an engine that is not installed: each
worker would say so by itself, but only after its broker, its model and its neighbours were started.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil

from transport.contracts.messages import TrialRows
from transport.contracts.settings import SERVER_ENGINES, GenerationSettings, Settings
from workers.errors import ModelError
from workers.models import choose_device
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import Sample, reward_spec


def check_workers(settings: Settings, trial: TrialRows) -> None:
    """trial: rows to try the reward on; none where it was tried before. Raises ModelError, RewardSetupError."""
    generation, trainer = settings.generation, settings.trainer
    _check_engine(generation)
    if trainer.engine == "torch" and trainer.device.startswith("cuda"):  # "auto" and "cpu" need no look: no torch
        choose_device(trainer.device, "trainer.device")
    if settings.has_critic and trainer.engine == "torch" and settings.critic.device.startswith("cuda"):
        choose_device(settings.critic.device, "critic.device")
    if generation.engine == "embedded" and generation.device.startswith("cuda"):
        choose_device(generation.device, "generation.device")
    if settings.scoring.reward:
        asyncio.run(_try_reward(settings, trial))


def _check_engine(generation: GenerationSettings) -> None:
    if generation.engine not in SERVER_ENGINES or generation.engine_url:
        return
    if not generation.server_command:
        if importlib.util.find_spec(generation.engine) is None:
            raise ModelError(
                f'generation.engine "{generation.engine}" is not installed in this Python: install it, or name how it '
                "is started (generation.server_command) or a server that runs (generation.engine_url)"
            )
    elif shutil.which(generation.server_command[0]) is None:
        raise ModelError(
            f"generation.server_command: there is no program {generation.server_command[0]!r} here; give its path"
        )


async def _try_reward(settings: Settings, trial: TrialRows) -> None:
    scoring = settings.scoring
    pool = open_pool(settings, reward_spec(settings, scoring.reward, scoring.reward_path), processes=1)
    samples = [Sample(prompt=row.prompt, response=row.response, entry=row.entry.encode()) for row in trial.rows]
    try:
        await pool.start(samples)
    finally:
        await pool.close()
