"""Figure ``learning``: what SmolLM2 has learned after 40 batches, by pipeline mode, algorithm and environment.

    sync, staleness_1, staleness_2, staleness_4, delayed_update_off    the papers' modes; within .06 of each other
    ppo, gspo, cispo, rloo                                             >= .45
    two_turn_tool                                                      >= .60, from two_turn_tool_before <= .15

Each is the share of held-out problems that the final model answers right, greedily, mean over the seeds. A cell is one
of these with one seed: a run, then 512 questions. Its result is a file of its own in docs/learning, written when it is
done, with every answer's verdict; cells whose file is there are not run again, a run that was cut off goes on from its
checkpoint. Table and curves are made of what is there:

    python -m benchmarks.learning [--cells sync:0,ppo:0] [--draw] [--work DIR] [--device cuda:0] [--jobs 7]

--draw runs nothing. Without --cells all that are missing are run. With nothing beside it each takes some 6 minutes on
two cores that multiply bf16, and 20 where they have avx2 alone. --jobs runs several at once, also on one GPU: a run
takes no lock on a GPU that --device names. A cell that fails is named, and the others go on.

Last line: JSON; a figure is null until all of its cells are there.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.run import STOP_S, call, read_batches
from transport.process import files
from transport.process.gpus import list_gpus
from transport.process.programs import python_module

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "learning"
PAGE = ROOT / "docs" / "learning.md"
CURVES = "curves.svg"
BATCHES, SEEDS, HELD_OUT = 40, (0, 1, 2), 512
LARGEST, EASY, EASY_ROWS = 35, 9, 60
"""As the preset's own sums, which end at 25 and are 635: too few to hold out 512 of and to train on the rest."""
QUESTION = "State the final answer to the following arithmetic problem: {problem} ="
CELL_LIMIT_S, COMMANDS = 5400.0, 3
"""Of one command, and how many a cell has."""
CONTEXT = 2048
"""Tokens, of ``--device``: the bound that an engine on a CPU has anyway."""
CONFIDENCE = 0.95
SMOOTHED_OVER = 5
"""Batches of a point of a curve: a batch's share varies by about 10 points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """preset: what it changes is in settings.  why: for the page.  group: cells that are drawn together."""

    group: str
    why: str
    preset: str = "smollm2"
    settings: tuple[str, ...] = ()


def _mode(staleness: int, why: str, *more: str) -> Kind:
    return Kind(group="modes", why=why, settings=(f"pipeline.max_staleness={staleness}", *more))


CELLS: Mapping[str, Kind] = {
    "sync": _mode(
        0, "naive serial: whole batches, weights at the barrier", "pipeline.release=batch", "pipeline.update=barrier"
    ),
    "delayed_update_off": _mode(
        0, "streamed, and every batch waits for the weights of the one before", "pipeline.update=barrier"
    ),
    "staleness_1": _mode(1, "as `make run`: AsyncFlow's delayed update, taken in flight"),
    "staleness_2": _mode(2, "the same, two versions behind at most"),
    "staleness_4": _mode(4, "four versions behind at most"),
    "ppo": Kind(
        group="algorithms",
        why="a critic of the policy's size, at three times its rate, as it has 40 steps to learn in; one reward, at "
        "the end of a dozen tokens",
        settings=(
            "algorithm.name=ppo",
            "algorithm.gae_lambda=1.0",
            "critic.lr=1e-4",
            "pipeline.drop_no_signal=false",
        ),
    ),
    "gspo": Kind(
        group="algorithms",
        why="the paper's bounds are for responses of thousands of tokens and a rate thirty times lower: here the "
        "engine's rounding alone exceeds them",
        settings=("algorithm.name=gspo", "algorithm.clip_low=0.1", "algorithm.clip_high=0.13"),
    ),
    "cispo": Kind(group="algorithms", why="as it comes", settings=("algorithm.name=cispo",)),
    "rloo": Kind(
        group="algorithms",
        why="the ratio is that of a whole response, a product of a dozen: these bounds are .06 a token",
        settings=("algorithm.name=rloo", "algorithm.clip_low=0.5", "algorithm.clip_high=0.9"),
    ),
    "two_turn_tool": Kind(
        group="tool", why="the preset: three numbers of two digits and a calculator", preset="two_turn_tool"
    ),
}
BASE = "sync"
"""What the other cells of its preset are compared with, problem by problem; a tool with the untrained model."""


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out problems as one model answers them. right: "1" or "0" of each.  problems: a digest of what was asked."""

    right: str
    well_formed: float
    problems: str


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file. batches: of each trained batch, ``right`` and the like, with the groups that were filtered.

    settings: preset, then what was changed; a file of other settings than CELLS has counts as missing.  machine: where
    it ran, which is no setting.
    """

    cell: str
    settings: list[str]
    evaluated: Evaluated
    seed: int | None = None
    batches: dict[str, list[float]] = {}
    seconds: float = 0.0
    machine: str = ""


# --- what is asked


def sums(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to train on, easy ones first and then all mixed, and HELD_OUT others; always the same ones.

    Two numbers up to LARGEST, one of them below 10, no result below 0; the easy ones have two numbers below 10.
    """
    numbers, draw = range(LARGEST + 1), random.Random(seed)
    pairs = [(a, b) for a, b in itertools.product(numbers, numbers) if min(a, b) <= EASY]
    rows = [(max(a, b), f"{a} + {b}", a + b) for a, b in pairs]
    rows += [(max(a, b), f"{a} - {b}", a - b) for a, b in pairs if a >= b]
    draw.shuffle(rows)
    easy = [row for row in rows if row[0] <= EASY][:EASY_ROWS]
    others = [row for row in rows if row not in easy]
    problems = [
        {"prompt": QUESTION.format(problem=problem), "answer": str(answer)} for _, problem, answer in [*easy, *others]
    ]
    return problems[: len(problems) - HELD_OUT], problems[len(problems) - HELD_OUT :]


def settings_of(kind: Kind, work: Path, more: Sequence[str]) -> list[str]:
    """What a run of it is given, with files of ``work``."""
    data = [f"data.path={work / 'train.jsonl'}", f"eval.path={work / 'held-out.jsonl'}"]
    own = data if kind.preset == "smollm2" else []
    return [*_common(), *own, *kind.settings, *more]


def _common() -> list[str]:
    return [f"run.batches={BATCHES}", f"eval.problems={HELD_OUT}", "eval.every=0", "eval.ends=false"]


def recorded(kind: Kind, more: Sequence[str]) -> list[str]:
    """Of a result, without names of files."""
    return [kind.preset, *_common(), *kind.settings, *more]


# --- cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """results: one file a cell.  work: runs and data.  more: settings over those of every cell, to try it out.

    device: of torch, where all of a run computes; "": where the preset says.  jobs: cells that run at once.
    """

    results: Path
    work: Path
    more: tuple[str, ...] = ()
    device: str = ""
    jobs: int = 1

    def path(self, cell: str, seed: int | None) -> Path:
        return self.results / (f"{cell}.json" if seed is None else f"{cell}-{seed}.json")

    def read(self, cell: str, seed: int | None = None) -> Result | None:
        """None: there is none, or it is of other settings. Raises msgspec.MsgspecError for a file that is broken."""
        path = self.path(cell, seed)
        if not path.exists():
            return None
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        kind = CELLS.get(cell) or Kind(group="", why="", preset=cell.removeprefix("untrained-"))
        return result if result.settings == recorded(kind, self.more) else None

    def write(self, result: Result) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=0)
        files.replace(self.path(result.cell, result.seed), encoded + b"\n")

    def run(self, cell: str, seed: int) -> Result:
        """Train and ask, from where an earlier call was cut off. Raises SystemExit: a command failed."""
        kind, runs = CELLS[cell], self.work / "runs"
        run_dir, named = runs / f"{cell}-{seed}", ["--plain", "--dir", str(runs), "--name", f"{cell}-{seed}"]
        started_s, load = time.monotonic(), psutil.getloadavg()[0]
        if not (run_dir / "model").exists():
            if (run_dir / "config.toml").exists():
                self._call("orchestrator", "run", "--resume", *named)
            else:
                self._write_data()
                chosen = [*placed(kind, self.device), *settings_of(kind, self.work, self.more), f"run.seed={seed}"]
                self._call("orchestrator", "run", "--preset", kind.preset, *named, *(f"--set={one}" for one in chosen))
        trained_s = time.monotonic() - started_s
        where = ", ".join((machine(run_dir), f"load {load:.1f} before", *([f"{self.jobs} jobs"] * (self.jobs > 1))))
        self._ask_untrained(kind.preset, run_dir, where)
        result = Result(
            cell=cell,
            seed=seed,
            settings=recorded(kind, self.more),
            evaluated=self._evaluate(run_dir, "final"),
            batches=curves(read_batches(run_dir / "metrics.jsonl")),
            seconds=round(trained_s, 1),
            machine=where,
        )
        self.write(result)
        # 3 GB a cell: a dozen filled a disk of 50 GB, and the others lost their ends
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        return result

    def _ask_untrained(self, preset: str, run_dir: Path, where: str) -> None:
        """Once, with the problems of any run of the preset: of cells that run at once, one asks."""
        untrained = f"untrained-{preset}"
        try:
            asking = files.locked(self.work / f"{untrained}.lock")
        except files.LockedError:
            return
        with closing(asking):
            if self.read(untrained) is not None:
                return
            settings = recorded(Kind(group="", why="", preset=preset), self.more)
            evaluated = self._evaluate(run_dir, "base")
            self.write(Result(cell=untrained, settings=settings, evaluated=evaluated, machine=where))

    def _write_data(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        for name, rows in zip(("train", "held-out"), sums(), strict=True):
            files.replace(self.work / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def _evaluate(self, run_dir: Path, model: str) -> Evaluated:
        answers = run_dir / f"answers-{model}.jsonl"
        self._call("workers", "evaluate", "--run-dir", str(run_dir), "--model", model, "--answers", str(answers))
        return verdicts([json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()])

    def _call(self, module: str, *arguments: str) -> None:
        alone = {} if self.jobs == 1 else {"OMP_NUM_THREADS": "1"}
        call(python_module(module, *arguments), cwd=self.work, env=os.environ | alone, limit_s=CELL_LIMIT_S)


def placed(kind: Kind, device: str) -> list[str]:
    """Settings that have all models of a run on ``device``, and its KV memory as small as on a CPU; "": none.

    A model's whole context would have each run look for 12 GB of a GPU that several share, and none needs more than
    256 tokens.
    """
    if not device:
        return []
    sections = ["generation", "trainer", *(["critic"] if "algorithm.name=ppo" in kind.settings else [])]
    return [*(f"{section}.device={device}" for section in sections), f"generation.max_context={CONTEXT}"]


def machine(run_dir: Path) -> str:
    """What a run computes on, as its own settings say, which a resumed one keeps."""
    device = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))["generation"]["device"]
    number = int(device.partition(":")[2] or 0)
    gpu = [one.name for one in list_gpus()[number : number + 1] if device != "cpu"]
    return ", ".join([*gpu, f"{os.cpu_count()} cores"])


def run_cells(bench: Bench, cells: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Run those that are missing, ``bench.jobs`` at once, in processes of their own. Returns those that failed.

    A signal that ends this process ends theirs, with all that they have started.
    """
    spawn = multiprocessing.get_context("spawn")
    waiting = [one for one in cells if bench.read(*one) is None][::-1]
    running: dict[int, tuple[BaseProcess, tuple[str, int]]] = {}
    failed: list[tuple[str, int]] = []
    try:
        while waiting or running:
            while waiting and len(running) < bench.jobs:
                process = spawn.Process(target=_run_cell, args=(bench, *(one := waiting.pop())))
                process.start()
                running[process.sentinel] = (process, one)
            for sentinel in connection.wait(list(running), COMMANDS * CELL_LIMIT_S) or [next(iter(running))]:
                process, one = running.pop(int(sentinel))  # pyright: ignore[reportArgumentType] # of a process: an int
                _end(process)
                if process.exitcode:
                    failed.append(one)
                    print(f"{one[0]}:{one[1]}: failed with {process.exitcode}", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            _end(process)
    return failed


def _end(process: BaseProcess) -> None:
    """Of one that has ended, was asked to, or is late."""
    process.join(2 * STOP_S)
    if process.exitcode is None:
        process.kill()
        process.join()


def _run_cell(bench: Bench, cell: str, seed: int) -> None:
    signal.signal(signal.SIGINT, lambda *_: None)  # of a terminal: the parent's, which sends SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = bench.run(cell, seed)
    print(f"{cell}:{seed}: held-out right {right_matrix([result]).mean():.3f}, {result.seconds:.0f} s", flush=True)


def verdicts(answers: Sequence[Mapping[str, Any]]) -> Evaluated:
    """answers: lines of ``evaluate --answers``, one a problem."""
    asked = hashlib.blake2b("\n".join(answer["prompt_id"] for answer in answers).encode(), digest_size=8)
    return Evaluated(
        right="".join("01"[answer["figures"]["right"] >= 1] for answer in answers),
        well_formed=round(fmean(answer["figures"]["well_formed"] for answer in answers), 4),
        problems=asked.hexdigest(),
    )


def curves(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of each batch, the groups included that were filtered because their rewards agree."""
    names = ("right", "well_formed", "reward")
    return {
        name: [round(batch.get(f"{name}_with_filtered", batch[name]), 4) for batch in batches]
        for name in names
        if all(name in batch for batch in batches)
    }


# --- what is made of them


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Of a difference of shares, with its half width at CONFIDENCE."""

    mean: float
    half: float


def right_matrix(results: Sequence[Result]) -> NDArray[np.float64]:
    """[seeds, problems] 1 where right. Raises ValueError: other problems were asked."""
    if len({result.evaluated.problems for result in results}) > 1:
        raise ValueError(f"{', '.join(sorted({one.cell for one in results}))} were asked other problems")
    return np.array([[int(one) for one in result.evaluated.right] for result in results], np.float64)


def over_problems(cell: NDArray[np.float64], base: NDArray[np.float64]) -> Interval:
    """Had other problems been drawn: paired by problem, each the mean over the seeds. [S, P] of each."""
    return _interval(cell.mean(axis=0) - base.mean(axis=0))


def over_seeds(cell: NDArray[np.float64], base: NDArray[np.float64]) -> Interval | None:
    """Had other seeds been drawn: paired by seed; None for fewer than two. [S, P] of each."""
    return _interval(cell.mean(axis=1) - base.mean(axis=1)) if len(cell) == len(base) > 1 else None


def _interval(differences: NDArray[np.float64]) -> Interval:
    from scipy import stats

    number = len(differences)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, number - 1))
    half = quantile * float(differences.std(ddof=1)) / number**0.5
    return Interval(mean=float(differences.mean()), half=half)


Found = Mapping[str, Sequence[Result]]
"""Of each cell the results of its seeds that are there, and of ``untrained-PRESET`` the one."""


def found_in(bench: Bench) -> Found:
    of_cells = {cell: [one for seed in SEEDS if (one := bench.read(cell, seed))] for cell in CELLS}
    presets = dict.fromkeys(kind.preset for kind in CELLS.values())
    untrained = {name: bench.read(name) for name in (f"untrained-{preset}" for preset in presets)}
    return of_cells | {name: [one] for name, one in untrained.items() if one}


def share_of(found: Found, cell: str) -> float | None:
    """Mean over all seeds; None while some are missing."""
    results = found.get(cell, ())
    whole = len(results) == (len(SEEDS) if cell in CELLS else 1)
    return round(float(right_matrix(results).mean()), 4) if whole else None


def figures(found: Found) -> dict[str, Any]:
    """The last line."""
    shares = {cell: share_of(found, cell) for cell in CELLS}
    modes = [shares[cell] for cell, kind in CELLS.items() if kind.group == "modes"]
    known = [share for share in modes if share is not None]
    return {
        **shares,
        "staleness_spread": round(max(known) - min(known), 4) if len(known) == len(modes) else None,
        "untrained": share_of(found, "untrained-smollm2"),
        "two_turn_tool_before": share_of(found, "untrained-two_turn_tool"),
        "cells_missing": [
            f"{cell}:{seed}" for cell in CELLS for seed in SEEDS if seed not in {one.seed for one in found[cell]}
        ],
    }


def compared(found: Found, cell: str) -> tuple[Interval, Interval | None] | None:
    """A cell with its base, over problems and over seeds, on the seeds that both have; None where there are none."""
    with_tool = CELLS[cell].group == "tool"
    base = found.get("untrained-two_turn_tool", ()) if with_tool else found[BASE]
    if cell == BASE or not base or not found[cell]:
        return None
    if with_tool:
        ours = right_matrix(found[cell])
        return over_problems(ours, before := right_matrix(base)), over_seeds(ours, before.repeat(len(ours), axis=0))
    seeds = {one.seed for one in found[cell]} & {one.seed for one in base}
    ours, theirs = ([one for one in some if one.seed in seeds] for some in (found[cell], base))
    if not seeds:
        return None
    matrix = right_matrix([*ours, *theirs])
    return over_problems(*np.split(matrix, 2)), over_seeds(*np.split(matrix, 2))


def table(found: Found) -> str:
    """For the page: a row a cell, and what each is."""
    lines = [
        "| cell | held-out right, by seed | mean | less `sync` (`two_turn_tool`: untrained) | problems | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        shares = {one.seed: one.evaluated.right.count("1") / len(one.evaluated.right) for one in found[cell]}
        by_seed = ", ".join(f"{shares[seed]:.3f}" if seed in shares else "-" for seed in SEEDS)
        mean = share_of(found, cell)
        pair = compared(found, cell)
        beside = ("", "", "")
        if pair is not None:
            problems, seeds = pair
            beside = (f"{problems.mean:+.3f}", f"± {problems.half:.3f}", f"± {seeds.half:.3f}" if seeds else "")
        lines.append("| " + " | ".join((f"`{cell}`", by_seed, "" if mean is None else f"{mean:.3f}", *beside)) + " |")
    lines += [
        f"| {name.replace('-', ', ')} | | {share:.3f} | | | |"
        for name in ("untrained-smollm2", "untrained-two_turn_tool")
        if (share := share_of(found, name)) is not None
    ]
    return "\n".join([*lines, "", ran_on(found), "", *map(described, CELLS)])


def ran_on(found: Found) -> str:
    """Cells by machine: those of a table may have run on several."""
    cells: dict[str, list[str]] = {}
    for one in (one for results in found.values() for one in results):
        where = one.machine.partition(", load ")[0] or "an unnamed machine"
        cells.setdefault(where, []).append(one.cell if one.seed is None else f"{one.cell}:{one.seed}")
    return "Ran on " + "; ".join(f"{where}: {', '.join(names)}" for where, names in cells.items()) + "."


def described(cell: str) -> str:
    kind = CELLS[cell]
    changed = ", ".join(f"`{one}`" for one in kind.settings)
    return f"- `{cell}`: {kind.why}" + (f" ({changed})" if changed else "")


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each and the SMOOTHED_OVER - 1 before it."""
    return [fmean(values[max(0, end - SMOOTHED_OVER) : end]) for end in range(1, len(values) + 1)]


def draw(found: Found, path: Path) -> None:
    """What the samples of each batch had right while the cells trained: mean of the seeds that are there."""
    from matplotlib.figure import Figure

    from orchestrator.observability.report.drawing import style, to_svg

    with style():
        picture = Figure(figsize=(11, 3.4), layout="constrained")
        panels: Any = picture.subplots(1, 2, sharey=True)
        for axes, groups in zip(panels, (("modes",), ("algorithms", "tool")), strict=True):
            for cell, kind in CELLS.items():
                lines = [one.batches["right"] for one in found[cell] if "right" in one.batches]
                if kind.group not in groups or not lines:
                    continue
                shortest = min(map(len, lines))
                mean = smoothed([fmean(line[batch] for line in lines) for batch in range(shortest)])
                axes.plot(range(1, shortest + 1), mean, label=f"{cell} ({len(lines)})")
            axes.set_title(" and ".join(groups) + f": right answers, mean of {SMOOTHED_OVER} batches", loc="left")
            axes.set_xlabel("batch")
            axes.set_ylim(0, 1)
            if axes.lines:
                axes.legend(loc="lower right")
        files.replace(path, to_svg(picture) + "\n")


MARKED = re.compile(r"(<!-- table: begin -->\n).*?(<!-- table: end -->)", re.DOTALL)


def write_page(found: Found, page: Path) -> None:
    """Put the table between its marks. Raises ValueError: the page has none."""
    text = page.read_text(encoding="utf-8")
    written, count = MARKED.subn(lambda marks: f"{marks[1]}{table(found)}\n{marks[2]}", text)
    if count != 1:
        raise ValueError(f"{page} has no place for the table")
    files.replace(page, written)


def chosen_cells(text: str) -> Iterator[tuple[str, int]]:
    """Of ``sync:0,ppo``: without a seed it is all of them; "" is all cells. Raises SystemExit naming a wrong one."""
    for part in text.split(",") if text else CELLS:
        cell, _, seed = part.partition(":")
        if cell not in CELLS:
            raise SystemExit(f"--cells {part}: no such cell; there are {', '.join(CELLS)}")
        if seed and (not seed.isdecimal() or int(seed) not in SEEDS):
            raise SystemExit(f"--cells {part}: the seeds are {', '.join(map(str, SEEDS))}, as {cell}:{SEEDS[0]}")
        yield from ((cell, number) for number in ([int(seed)] if seed else SEEDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="cell:seed,... or cell,...; all of them without")
    parser.add_argument("--draw", action="store_true", help="run nothing: table and curves of what is there")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learning", help="for runs and data; kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another directory, to try it out")
    parser.add_argument("--set", action="append", default=[], help="section.key=value over every cell, to try it out")
    parser.add_argument("--device", default="", help="of torch, where all of a run computes: cuda:0, cpu; as preset")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, 1 or more")
    options = parser.parse_args()
    bench = Bench(
        results=options.results.resolve(),
        work=options.work.resolve(),
        more=tuple(options.set),
        device=options.device,
        jobs=options.jobs,
    )
    if bench.more and bench.results == RESULTS:
        raise SystemExit("--set is for trying it out: give --results another directory")
    if bench.jobs < 1:
        raise SystemExit(f"--jobs {bench.jobs}: 1 or more cells at once")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = [] if options.draw else run_cells(bench, list(chosen_cells(options.cells)))
    found = found_in(bench)
    bench.results.mkdir(parents=True, exist_ok=True)
    draw(found, bench.results / CURVES)
    if bench.results == RESULTS:
        write_page(found, PAGE)
    else:
        print(table(found))
    print(json.dumps(figures(found)))
    if failed:
        raise SystemExit(f"failed: {', '.join(f'{cell}:{seed}' for cell, seed in failed)}; the others are done")


if __name__ == "__main__":
    main()
