"""The files that settings name, read once before anything starts: a mistake in them is answered at once."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError, DataError
from orchestrator.lengths.ranking import open_ranker
from orchestrator.prompts.dataset import load_problems
from ranker.errors import RankerError
from transport.contracts.given_lengths import read_lengths
from transport.contracts.gym_tasks import REFUSED, refusal
from transport.contracts.settings import Settings
from transport.errors import LengthFileError


def check_inputs(settings: Settings) -> None:
    """Raises DataError naming the file; ConfigError for a task whose answers may not be graded.

    A run without a trainer has neither data nor a ranker.
    """
    if settings.trainer.engine == "none":
        return
    own_verifier = settings.data.source == "reasoning_gym" and not settings.scoring.reward
    reason = refusal(settings.data.task) if own_verifier else ""
    if (
        settings.data.task not in REFUSED or not reason
    ):  # a misspelt name is reported first; a refused task is not even loaded
        load_problems(settings)
    if reason:
        raise ConfigError(f"data.task: {reason}", key="data.task")
    if settings.ranker.model or settings.ranker.base_lengths:
        try:
            open_ranker(settings, RunDir(Path(settings.run.dir) / settings.run.name).ranker)
        except RankerError as error:
            raise DataError(str(error)) from error


def check_workers_inputs(settings: Settings) -> None:
    """The same of what only workers read: for a run whose workers are all on this host."""
    scoring = settings.scoring
    if scoring.reward_path and not Path(scoring.reward_path).is_dir():
        raise DataError(f"scoring.reward_path: there is no directory {scoring.reward_path}")
    if settings.generation.lengths:
        try:
            read_lengths(Path(settings.generation.lengths))
        except LengthFileError as error:
            raise DataError(f"generation.lengths: {error}") from error
