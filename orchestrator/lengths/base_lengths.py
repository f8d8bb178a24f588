"""Lengths that the base policy gave the run's prompts, from a log that the user names.

Owns: which line of the log is which prompt. Never: what a ranker makes of it. Invariant: a log of other data is
refused, one of a part of the data is not.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from orchestrator.prompts.dataset import load_problems
from ranker.errors import LengthLogError
from ranker.logs import read_log
from transport.contracts.settings import Settings

log = structlog.get_logger(__name__)


def base_lengths(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Lengths by prompt id, of the prompts that ``ranker.base_lengths`` names; {} where it is not set.

    A line names its prompt by the run's own id for it or by its text, with or without ``data.suffix``; every prompt of
    that text gets its lengths. Of a line with ``base_tokens``, those count.
    Blocks. Raises: LengthLogError: unreadable, malformed, or not one line is of the run's prompts; DataError.
    """
    if not settings.ranker.base_lengths:
        return {}
    path = Path(settings.ranker.base_lengths)
    named: dict[str, tuple[int, ...]] = {}
    for sample in read_log(path):
        named[sample.text] = named[sample.prompt_id] = sample.base_tokens or sample.tokens
    problems = load_problems(settings).training
    suffix = settings.data.suffix
    found: dict[str, tuple[int, ...]] = {}
    for problem in problems:
        names = (problem.prompt_id, problem.question, problem.question.removesuffix(suffix))
        tokens = next((named[name] for name in names if name in named), None)
        if tokens is not None:
            found[problem.prompt_id] = tokens
    if not found:
        raise LengthLogError(
            f"none of its prompts is among the run's {len(problems)}, of which one is {problems[0].prompt_id!r}: "
            f"{problems[0].question!r}",
            where=str(path),
        )
    log.info("lengths of the base policy are known", prompts=len(found), of=len(problems))
    return found
