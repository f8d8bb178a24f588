"""The held-out problems of a run, written once beside its metrics, so that any model can be asked them later."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.prompts.source import held_out
from transport.contracts.settings import Settings
from transport.process.files import replace


def write_held_out(settings: Settings, model_dir: Path, path: Path) -> None:
    """Write ``eval.problems`` prompts to ``path`` as JSON lines, unless it is there. Raises DataError."""
    if path.exists() or not settings.eval.problems or settings.trainer.engine == "none":
        return
    batch = held_out(settings, model_dir).next(settings.eval.problems)
    lines = [
        json.dumps(
            {
                "prompt_id": prompt.prompt_id,
                "text": prompt.text,
                "prompt_ids": prompt.prompt_ids.tolist(),
                "entry": prompt.entry_json,
            }
        )
        for prompt in batch.prompts
    ]
    replace(path, "".join(line + "\n" for line in lines))
