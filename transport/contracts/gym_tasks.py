"""What grades the answers to reasoning_gym's tasks: its own scorer where it was read, a grader of ours, or nothing.

Some of its scorers ``eval`` the answer or hand it to sympy's parser, which does; a run on such a task runs what a model
writes. So each scorer was read, with what it calls: whether it executes text, imports, opens or starts anything. The
digest says which source was read; a scorer of another release is refused until it was read.
``python -m benchmarks.verifier_tasks`` tries answers without content on each task.

Owns: the lists (gym_scorers.toml has those that were read). Never: grades (workers/scoring/graders.py). Invariant: a
task that is on neither list has no verifier.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import tomllib
from importlib.util import find_spec
from pathlib import Path

from transport.process.programs import command

OURS = frozenset(
    {
        *("arc_agi", "binary_matrix", "bitwise_arithmetic", "boxnet", "calendar_arithmetic", "codeio", "coin_flip"),
        *("complex_arithmetic", "countdown", "decimal_arithmetic", "emoji_mystery", "figlet_font"),
        *("fraction_simplification", "game_of_life", "game_of_life_halting", "gsm_symbolic"),
        *("intermediate_integration", "knights_knaves", "letter_jumble", "n_queens", "number_sorting"),
        *("polynomial_equations", "polynomial_multiplication", "puzzle24", "rearc", "rush_hour"),
        *("sentence_reordering", "simple_integration", "spell_backward", "spiral_matrix", "string_insertion"),
        *("time_intervals", "word_sorting"),
    }
)
"""Tasks whose scorers execute the answer or the entry that comes with it, pay an answer that is not right (nan, 0, a
sentence of the prompt, one word too many), pay no right answer after a way through JSON, or can be made slow;
ours, in workers/scoring/graders.py, do not."""

REFUSED = {
    "composite": "it hands the answer to the scorer of another task; name that task",
    "propositional_logic": "P \u2228 Q follows from the premises of four problems in five, and a premise with anything "
    "joined to it from those of all, so that a policy learns to say the same every time; name another task",
}
"""Tasks whose scorers are not run here -> why."""

_READ: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("gym_scorers.toml").read_text("utf-8"))
READ = {task: (digest, files) for task, (digest, *files) in _READ.items()}
"""By task: (digest, files) of a scorer that was read: it compares text, numbers, JSON or moves."""

_INSTEAD = "name a reward of your own (scoring.reward), which gets the same entry"


def refusal(task: str) -> str:
    """Why the answers to ``task`` are not graded here, "" if they are. Imports nothing of reasoning_gym."""
    if task in OURS:
        return ""
    if task in REFUSED:
        return f"reasoning_gym's task {task} is refused: {REFUSED[task]}"
    if task not in READ:
        return f"reasoning_gym's task {task} is refused: it is not known if its scorer executes answers; {_INSTEAD}"
    digest, files = READ[task]
    if source_digest(files) != digest:
        return (
            f"reasoning_gym's task {task} is refused: the installed scorer is not the one that was checked, so it may "
            f"execute answers; install the release that StreamRL requires ({_pinned()}), or {_INSTEAD}"
        )
    return ""


def _pinned() -> str:
    release = next(one for one in importlib.metadata.requires("streamrl") or () if one.startswith("reasoning-gym"))
    return command("pip", "install", release)


def source_digest(files: list[str]) -> str:
    """SHA-256 of the installed source, 32 digits; "" where there is none. A star stands for all files of a folder."""
    found = [path for name in files for path in _paths(name)]
    if not all(path.is_file() for path in found):
        return ""
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()[:32]


def _paths(name: str) -> list[Path]:
    package = name.partition("/")[0] if name.startswith("magiccube") else "reasoning_gym"
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return [Path(name)]
    path = Path(spec.submodule_search_locations[0]) / name.removeprefix(f"{package}/")
    return sorted(path.parent.glob("*.py")) if path.name == "*" else [path.with_suffix(".py")]
