"""docs/models-and-machines.md is what the planner says now, and its commands are ones that the trainer accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from benchmarks.models_and_machines import MACHINES, page
from orchestrator.config.load import resolve
from orchestrator.sim.llms import HUB, LLMS
from transport.contracts.training_memory import USABLE_SHARE, choose_layout, training_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "models-and-machines.md"


def test_the_document_is_up_to_date():
    remedy = "make it anew: .venv/bin/python -m benchmarks.models_and_machines > docs/models-and-machines.md"
    assert DOCUMENT.read_text(encoding="utf-8") == page(), remedy


def test_every_command_is_one_that_the_trainer_accepts(tmp_path: Path):
    """As it is printed, with a file that says what the page says of it."""
    mine = tmp_path / "mine.toml"
    mine.write_text("[sampling]\nmax_new_tokens = 4000\n")
    names = {path: LLMS[name] for name, path in HUB.items()}
    sections = re.split(r"^## (\d+) x (\d+) GB$", page(), flags=re.MULTILINE)[1:]
    assert len(sections) == 3 * len(MACHINES)
    for num_gpus, gigabytes, text in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
        commands = re.findall(r"`\.venv/bin/streamrl-orchestrator run (.*?)`", text)
        assert commands
        for command in commands:
            overrides = [word for word in shlex.split(command) if "=" in word]
            settings = resolve(None, [mine], overrides, {}).settings
            usable = float(gigabytes) * 1e9 * USABLE_SHARE * (0.5 if num_gpus == "1" else 1)
            training = training_of(settings, compute_bytes=2, on_gpu=True)
            llm, trainer = names[settings.model.path], settings.trainer
            choose_layout(llm, trainer.num_ranks, usable, training, trainer.parallel)
            taken = trainer.num_ranks + settings.generation.num_workers * settings.generation.gpus_per_worker
            assert taken <= max(2, int(num_gpus)), command
