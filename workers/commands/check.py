"""``streamrl-worker check``: what would end a run's workers on this host, found before the run begins.

A reward, a loss or an advantage that cannot be imported or computes nothing, a device, a teacher or a reward model that
is not there, an engine that is not installed, adapters of layers that the model does not have: each worker would say so
by itself, but only after its broker, its model and its neighbours were started.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path

from transport.contracts.messages import TrialRows, part_of
from transport.contracts.settings import SERVER_ENGINES, GenerationSettings, Settings
from workers.environments.pool import Environments
from workers.errors import EnvironmentFailedError, EnvironmentSetupError, ModelError
from workers.models import (
    brings_code,
    check_kind,
    choose_device,
    model_cache,
    prepare_model,
    prepare_reward_model,
    try_chat_template,
)
from workers.scoring.reward_pool import RewardPool, open_pool, right_over_wrong
from workers.scoring.rewards import Sample, digit_share, reward_spec, unrewarded
from workers.user_functions.advantage import own_advantages


def check_workers(settings: Settings, trial: TrialRows) -> None:
    """trial: rows to try reward and environment on; none where they were tried before.

    Raises: ModelError, RewardSetupError, AlgorithmError, EnvironmentSetupError.
    """
    generation, trainer = settings.generation, settings.trainer
    _check_engine(generation)
    if trainer.engine == "torch" and trainer.device.startswith("cuda"):  # "auto" and "cpu" need no look: no torch
        choose_device(trainer.device, "trainer.device")
    if settings.has_critic and trainer.engine == "torch" and settings.critic.device.startswith("cuda"):
        choose_device(settings.critic.device, "critic.device")
    if generation.engine == "embedded" and generation.device.startswith("cuda"):
        choose_device(generation.device, "generation.device")
    _try_functions(settings)
    if trainer.engine == "torch" and trainer.lora.rank:
        _check_adapters(settings)
    if settings.scoring.reward:
        asyncio.run(_try_reward(settings, trial))
    if settings.algorithm.teacher and settings.algorithm.teacher_url:
        prepare_model(settings.algorithm.teacher, cache_dir=model_cache(os.environ), setting="algorithm.teacher")
    computed = {"algorithm.teacher": "" if settings.algorithm.teacher_url else settings.algorithm.teacher}
    computed |= {"critic.model": settings.critic.model if settings.has_critic else ""}
    for setting, path in computed.items():
        if path:
            _check_computed(settings, path, setting)
    if settings.scoring.reward_model:
        try_chat_template(prepare_reward_model(settings.scoring.reward_model, cache_dir=model_cache(os.environ)))
    if settings.environments:
        asyncio.run(_try_environment(settings, trial))


def _check_computed(settings: Settings, path: str, setting: str) -> None:
    """Raises ModelError, which names ``setting``: the trainer's code cannot compute this model's samples."""
    kept = model_cache(os.environ)
    try:
        directory = prepare_model(path, cache_dir=kept, setting=setting)
        if directory.parent != kept:
            check_kind(directory)
            check_trained(directory, settings.generation.max_context)
    except ModelError as error:
        if setting in str(error):
            raise
        raise ModelError(f"{setting}: {error}") from error


def check_trained(
    directory: Path, max_context: int, *, served: bool = False, trust_remote_code: bool = False
) -> list[str]:
    """Whether a trainer can train a model, or compute with it as with its own, and reads of its directory what others
    read; a model with code of its own is not looked at where that code may not run.

    max_context: generation.max_context.  served: SGLang or vLLM generates.
    Returns: remarks, a sentence each.  Raises: ModelError.
    """
    if brings_code(directory) and not trust_remote_code:
        return []
    from workers.trainer.policy.model import check_window, empty_policy  # torch

    remarks: list[str] = []
    module = empty_policy(directory, trust_remote_code=trust_remote_code, say=remarks.append)
    check_window(module.config, max_context, served=served)
    return remarks


def _try_functions(settings: Settings) -> None:
    """Raises AlgorithmError: an advantage or a loss of the user's is none."""
    path, names = settings.algorithm.functions_path, settings.own_functions("advantage")
    own_advantages(names, ",".join(names), path)
    if names := settings.own_functions("loss"):
        from workers.trainer.policy.policy_learner import objective_of
        from workers.user_functions.loss import own_losses, try_losses  # torch

        try_losses(objective_of(settings, own_losses(names, ",".join(names), path)))


def _check_adapters(settings: Settings) -> None:
    """Look for the layers of trainer.lora in the model, without its weights. A model of its own code is left alone.

    Raises ModelError.
    """
    directory = prepare_model(settings.model.path, cache_dir=model_cache(os.environ))
    if brings_code(directory):
        return
    from workers.trainer.policy.loading import empty_module
    from workers.trainer.policy.lora import adapted_layers  # torch

    adapted_layers(empty_module(directory), settings.trainer.lora)


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
    """Raises RewardSetupError. Prints why a user's reward looks as if it did not know right answers."""
    scoring = settings.scoring
    pool = open_pool(settings, reward_spec(settings, scoring.reward, scoring.reward_path), processes=1)
    samples = [Sample(prompt=row.prompt, response=row.response, entry=row.entry.encode()) for row in trial.rows]
    try:
        await pool.start(samples)
        compared = isinstance(pool, RewardPool) and scoring.reward not in KNOW_NO_ANSWERS
        if compared and (doubt := await right_over_wrong(pool, samples, scoring.answer_marker)):
            print(doubt)
    finally:
        await pool.close()


KNOW_NO_ANSWERS = tuple(f"workers.scoring.rewards:{reward.__name__}" for reward in (digit_share, unrewarded))
"""Rewards of ours that look at no answer."""


async def _try_environment(settings: Settings, trial: TrialRows) -> None:
    """Begin an episode and play one turn on each row of ``trial``.

    It may fail on a hard row. Raises EnvironmentSetupError: it fails on all rows of a part, as it would in the run.
    """
    pool = Environments(settings, ",".join(settings.own_environments), settings.environment.path)
    failures: dict[str, list[str]] = {}
    played: set[str] = set()
    try:
        await pool.start()
        for row in trial.rows:
            part, episode = part_of(row.entry.encode()), pool.open(row.entry.encode())
            try:
                await episode.reset(row.prompt, row.entry.encode())
                turn = row.response or "?"
                await episode.step(turn, tuple(turn.encode()))  # ids that every vocabulary has
            except EnvironmentFailedError as error:
                failures.setdefault(part, []).append(str(error))
            else:
                played.add(part)
            finally:
                episode.close()
    finally:
        await pool.close()
    for part in failures.keys() - played:
        raise EnvironmentSetupError(
            f"environment {settings.environments[part].name!r} was tried on {len(failures[part])} rows of "
            f"{f'data.mix.{part}' if part else 'the data'} and played a turn on none: {failures[part][0]}"
        )
