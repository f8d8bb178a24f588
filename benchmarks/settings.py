"""Figure ``settings``: does every documented value of every setting work, alone and with others?

The values come from the types in transport/contracts/settings.py, by which settings are also checked and documented:
each choice of a setting, each bound of a number, the number just inside of a bound, and the one just outside of it. For
each value a real ``run --preset tiny`` of 3 batches is started with it; for each of ``--draws`` pairs and triples of
values of different settings, drawn from ``--seed``, too. A run is right when

- it ends with exit code 0, has trained rows, and ``inspect --audit`` says that it is clean; or
- it is refused before anything starts: exit code 2, the key in the answer, no traceback, and its name is free.

Anything else is a fault. A value that a type forbids (just outside of a bound) must be refused. Settings that stand in
the way of the others of their section are set beside them (``BESIDE``); the emulated engine and trainer run where the
setting does not concern the real ones (``REAL``). ``SKIPPED`` names what cannot run here, and why.

    python -m benchmarks.settings [--draws 200] [--seed N] [--only PATTERN] [--sample N] [--jobs 2] [--together 1]

``--together N`` tries up to N values of different settings in one run, and each alone where that run is no good: a
quick first look, as values may hide one another. The last line is one JSON object; above it stands every fault with the
command and its last words, and at the end of a fault's line where its directory is kept.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec.inspect

from orchestrator.config.load import resolve
from orchestrator.config.schema import ENTRIES, ENTRY, FIELDS, choices_of, to_toml
from orchestrator.errors import ConfigError

ROOT = Path(__file__).parents[1]
END_S = 240.0
"""Seconds that a run may take before it counts as hanging; a real one takes 25 on two idle cores."""
STOP_S = 30.0
INSIDE = 1e-6
"""Distance of the number "just inside" of a bound, where a number may have a fraction."""
NAME_OF_PART = "a"

EMULATED = ("trainer.engine=emulated", "generation.engine=emulated", "emulated.time_scale=0.01", "ranker.kind=none")
SHORT = ("run.batches=3", "data.size=64")
"""Laid below each case."""
REAL = (
    "model.*",
    "sampling.*",
    "generation.*",
    "scoring.*",
    "environment.*",
    "algorithm.*",
    "trainer.*",
    "critic.*",
    "tensors.*",
    "data.mix.*",
    "pipeline.release",
    "pipeline.update",
)
"""Settings that concern the real engine and trainer."""
BESIDE = {
    "critic.*": ("algorithm.name=ppo",),
    "algorithm.gamma": ("algorithm.name=ppo",),
    "algorithm.gae_lambda": ("algorithm.name=ppo",),
    "algorithm.kl_estimator": ("algorithm.kl_coef=0.1",),
    "algorithm.ce_above": ("algorithm.ce_coef=0.1",),
    "trainer.lora.*": ("trainer.lora.rank=4",),
    "trainer.lr_min_share": ("trainer.lr_schedule=cosine",),
    "environment.*": ("environment.name=calculator", "sampling.max_new_tokens=32"),
    "rows.*": ("rows.store=units",),
    "eval.*": ("eval.every=1",),
    "pipeline.oversampled_tail": ("pipeline.oversampled_groups=2",),
    "pipeline.mini_batch_groups": ("pipeline.release=mini_batch",),
    "pipeline.tail_share": ("pipeline.dispatch=two_class_max", "generation.workers=2"),
    "pipeline.plan_wait_s": ("pipeline.dispatch=paced", "generation.workers=2"),
    "data.mix.*": ("data.mix.b.weight=1",),
    "data.mix.*.kl_coef": ("data.mix.b.weight=1", "algorithm.kl_coef=0.1"),
    "data.mix.*.ce_above": ("data.mix.b.weight=1", "algorithm.ce_coef=0.1"),
}
"""Settings without which a value of these would be refused, or would change nothing."""
SKIPPED = {
    "endpoint.*": "needs agents that lease its samples",
    "trainer.engine=none": "is a service, which ends when it is drained",
    "service.*": "is read by a service alone",
    "launcher.kind=ray": "needs a Ray cluster",
    "launcher.kind=slurm": "needs Slurm",
    "launcher.kind=kubernetes": "needs Kubernetes",
    "generation.engine=sglang": "needs SGLang",
    "generation.engine=vllm": "needs vLLM",
    "run.loggers=*wandb*": "needs an account, see tests/unit/test_loggers.py",
    "run.loggers=*mlflow*": "needs a server",
    "*device=cuda": "needs a GPU",
    "*.ucx=on": "needs UCX",
}
"""``key=value``, or all of a key's, that cannot be tried here -> why."""


# --- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value of one setting. allowed: by its type; any other must be refused."""

    key: str
    value: object
    allowed: bool = True

    def __str__(self) -> str:
        return f"{self.key}={self.value if isinstance(self.value, str) else to_toml(self.value)}"

    @property
    def skipped(self) -> str:
        """Why it is not tried; "" where it is."""
        found = (why for pattern, why in SKIPPED.items() if fnmatch.fnmatch(str(self), pattern.replace("[", "[[]")))
        by_key = (why for pattern, why in SKIPPED.items() if fnmatch.fnmatch(self.key, pattern))
        return next(found, "") or next(by_key, "")


def all_values() -> tuple[list[Value], list[str]]:
    """Every value to try, and the settings that have none: any text, or tables of it."""
    found: list[Value] = []
    free: list[str] = []
    for key, field in (FIELDS | ENTRIES).items():
        name = key.replace(ENTRY, "reward" if key.startswith("scoring.pools") else NAME_OF_PART)
        values = [Value(key=name, value=value, allowed=allowed) for value, allowed in values_of(field.type)]
        found += values
        free += [] if values else [key]
    return found, free


def values_of(kind: object) -> Iterator[tuple[object, bool]]:
    """(value, whether the type allows it)."""
    yield from _values(msgspec.inspect.type_info(kind))


def _values(info: msgspec.inspect.Type) -> Iterator[tuple[object, bool]]:
    match info:
        case msgspec.inspect.Metadata(type=msgspec.inspect.StrType(pattern=str(pattern))):
            if choices := choices_of(info):
                yield from ((choice, True) for choice in ([""] if re.search(pattern, "") else []) + choices)
        case msgspec.inspect.Metadata(type=inner):
            yield from _values(inner)
        case msgspec.inspect.BoolType():
            yield from ((choice, True) for choice in (True, False))
        case msgspec.inspect.LiteralType(values=choices):
            yield from ((choice, True) for choice in choices)
            yield "no_such_choice", False
        case msgspec.inspect.EnumType(cls=choices):
            yield from ((choice.value, True) for choice in choices)
            yield "no_such_choice", False
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            yield from _numbers(info)
        case msgspec.inspect.UnionType(types=types):
            for one in types:
                yield from ((v, ok) for v, ok in _values(one) if ok or not isinstance(v, str))
        case msgspec.inspect.ListType(item_type=item):
            inner = [*_values(item)]
            yield from (([value], ok) for value, ok in inner)
            yield from ([([], True)] if inner else [])
        case msgspec.inspect.TupleType(item_types=items):
            for place, item in enumerate(items):
                for value, ok in _values(item):
                    yield [value if place == index else 0.5 for index in range(len(items))], ok
        case _:
            return


def _numbers(info: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> Iterator[tuple[object, bool]]:
    whole = isinstance(info, msgspec.inspect.IntType)
    for closed, opened, inwards in ((info.ge, info.gt, 1), (info.le, info.lt, -1)):
        bound = opened if closed is None else closed
        if bound is None:
            continue
        if whole:
            yield from ((int(bound), closed is not None), (int(bound) + inwards, True), (int(bound) - inwards, False))
        else:
            bound = float(bound)
            span = max(1.0, abs(bound)) * INSIDE
            yield bound, closed is not None
            yield bound + inwards * span, True
            yield (
                (bound - inwards * span, False)
                if closed is not None
                else (math.nextafter(bound, bound + inwards), True)
            )


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with some values, and what is set beside them."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.values))

    @property
    def is_real(self) -> bool:
        return any(fnmatch.fnmatch(value.key, pattern) for value in self.values for pattern in REAL)

    @property
    def beside(self) -> tuple[str, ...]:
        """What else is set; nothing of what the values set themselves."""
        found: dict[str, None] = {}
        for value in self.values:
            fitting = [pattern for pattern in BESIDE if fnmatch.fnmatch(value.key, pattern)]
            found |= dict.fromkeys(BESIDE[max(fitting, key=len)] if fitting else ())
        if not self.is_real:
            found |= dict.fromkeys(EMULATED)
        own = {value.key for value in self.values}
        return tuple(one for one in (*SHORT, *found) if one.partition("=")[0] not in own)

    @property
    def assignments(self) -> list[str]:
        return [*self.beside, *map(str, self.values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """fault: "" where the trial is right.  ran: it came to its end, and was not refused."""

    trial: Trial
    ran: bool
    seconds: float
    fault: str = ""
    words: str = ""


def attempt(trial: Trial, directory: Path) -> Outcome:
    """Start the run of ``trial`` in ``directory``, which is made for it and removed where all is well."""
    directory.mkdir()
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain", "--dir", str(directory)]
    command += [word for one in trial.assignments for word in ("--set", one)]
    if not any(value.key == "run.name" for value in trial.values):
        command += ["--name", "run"]
    started_s = time.monotonic()
    code, said = call(command)
    outcome = Outcome(trial=trial, ran=code == 0, seconds=time.monotonic() - started_s, words=said)
    fault = judge(trial, code, said, directory)
    if fault:
        return _with_fault(outcome, fault, command)
    shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _with_fault(outcome: Outcome, fault: str, command: Sequence[str]) -> Outcome:
    last = "\n".join(outcome.words.strip().splitlines()[-8:])
    typed = shlex.join(["streamrl-orchestrator", *command[3:]])
    return Outcome(trial=outcome.trial, ran=outcome.ran, seconds=outcome.seconds, fault=fault, words=f"{typed}\n{last}")


def judge(trial: Trial, code: int | None, said: str, directory: Path) -> str:
    """What is wrong; "" where nothing is."""
    forbidden = [value for value in trial.values if not value.allowed]
    runs = [path for path in directory.iterdir() if path.is_dir()]
    if code is None:
        return f"did not end within {END_S:.0f} s"
    if "Traceback" in said:
        return f"exit code {code}, with a traceback"
    if code == 2:
        if runs:
            return f"refused, and {runs[0].name} is left: its name is not free"
        keys = [one.partition("=")[0] for one in trial.assignments]
        if not any(key in said or key.split(".")[0] in said for key in keys):
            return "refused without the name of a setting"
        return ""
    if code != 0:
        return f"exit code {code}"
    if forbidden:
        return f"ran with {forbidden[0]}, which its type forbids"
    audit, found = call([sys.executable, "-m", "orchestrator", "inspect", str(runs[0]), "--audit"])
    if audit != 0 or "audit clean" not in found:
        return f"the audit: {found.strip()}"
    trained = re.search(r"\((\d+) batch(?:es)?, (\d+) rows?\)", found)
    if trained and (int(trained[2]) or "no batch carried a gradient" in said):  # it says that it dropped all groups
        return ""
    return f"nothing was trained: {found.strip()}"


def call(command: Sequence[str]) -> tuple[int | None, str]:
    """Exit code (None: ended by us), and what was said."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=END_S)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            said, _ = process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        return None, said


# --- what is tried ----------------------------------------------------------------------------------------------------


def drawn(values: Sequence[Value], number: int, chance: random.Random) -> list[Trial]:
    """Pairs and triples of allowed values of different settings."""
    allowed = [value for value in values if value.allowed]
    by_key: dict[str, list[Value]] = {}
    for value in allowed:
        by_key.setdefault(value.key, []).append(value)
    trials: list[Trial] = []
    while len(trials) < number and len(by_key) > 2:
        keys = chance.sample(sorted(by_key), chance.choice((2, 3)))
        trials.append(Trial(values=tuple(chance.choice(by_key[key]) for key in keys)))
    return trials


def is_refused(trial: Trial) -> bool:
    """Whether its configuration is refused at once."""
    try:
        resolve("tiny", [], trial.assignments, {})
    except ConfigError:
        return True
    return False


def packed(trials: Sequence[Trial], most: int) -> list[Trial]:
    """Trials of several values each, whose configuration is allowed; what is refused alone stays alone."""
    done: list[Trial] = [trial for trial in trials if is_refused(trial)]
    left = [trial for trial in trials if trial not in done]
    while left:
        together, rest = left[0], []
        for other in left[1:]:
            joined = Trial(values=(*together.values, *other.values))
            fits = len(together.values) < most and other.is_real == together.is_real
            distinct = len({value.key for value in joined.values}) == len(joined.values)
            named = {value.key for value in joined.values}
            meant = {one for trial in (together, other) for one in trial.beside} <= {*joined.beside}
            if fits and distinct and meant and not is_refused(joined) and named:
                together = joined
            else:
                rest.append(other)
        done.append(together)
        left = rest
    return done


def try_all(trials: Sequence[Trial], jobs: int, base: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Each trial; the values of one that is no good, each alone."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        numbered = [(trial, base / str(number)) for number, trial in enumerate(trials)]
        for done, outcome in enumerate(pool.map(lambda one: attempt(*one), numbered), start=1):
            outcomes.append(outcome)
            how = outcome.fault or ("ran" if outcome.ran else "refused")
            say(f"{done}/{len(trials)} {outcome.seconds:.0f} s  {outcome.trial}  {how}")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=200, help="pairs and triples")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of what is drawn")
    parser.add_argument("--only", default="*", help="settings to try, as trainer.*; several, with commas between them")
    parser.add_argument("--sample", type=int, default=0, help="values to try, drawn from all; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--together", type=int, default=1, help="values in one run")
    parser.add_argument("--list", action="store_true", help="print what would be tried")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    known, free = all_values()
    chosen = [one for one in known if any(fnmatch.fnmatch(one.key, only) for only in options.only.split(","))]
    skipped = [value for value in chosen if value.skipped]
    values = [value for value in chosen if not value.skipped]
    trials = [Trial(values=(value,)) for value in values]
    if options.sample:
        trials = chance.sample(trials, min(options.sample, len(trials)))
    pairs = drawn(values, options.draws, chance)
    if options.together > 1:
        trials = packed(trials, options.together)
    print(
        f"seed {options.seed}: {len(trials)} runs with single values, {len(pairs)} with pairs and triples", flush=True
    )
    if options.list:
        for trial in (*trials, *pairs):
            print(trial)
        return
    base = Path(tempfile.mkdtemp(prefix="streamrl-settings-"))
    outcomes = try_all(trials, options.jobs, base, _say)
    unclear = [one for one in outcomes if len(one.trial.values) > 1 and (one.fault or not one.ran)]
    if again := [Trial(values=(value,)) for one in unclear for value in one.trial.values]:
        (base / "alone").mkdir()
        outcomes = [one for one in outcomes if one not in unclear]
        outcomes += try_all(again, options.jobs, base / "alone", _say)
    (base / "drawn").mkdir()
    combined = try_all(pairs, options.jobs, base / "drawn", _say)
    faults = [one for one in (*outcomes, *combined) if one.fault]
    for one in faults:
        print(f"\nFAULT {one.trial}: {one.fault}\n{one.words}")
    for value in skipped:
        print(f"skipped: {value}: it {value.skipped}")
    if not faults:
        shutil.rmtree(base, ignore_errors=True)
    ran = [value for one in outcomes if one.ran for value in one.trial.values]
    print(
        json.dumps(
            {
                "figure": "settings",
                "seed": options.seed,
                "values": sum(len(one.trial.values) for one in outcomes),
                "values_ran": len(ran),
                "combinations": len(combined),
                "combinations_ran": sum(one.ran for one in combined),
                "skipped": len(skipped),
                "settings_without_choices": len(free),
                "faults": len(faults),
            }
        )
    )
    sys.exit(bool(faults))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
