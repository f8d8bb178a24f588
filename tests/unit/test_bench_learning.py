"""What the figure ``learning`` makes of its cells: what is asked, intervals, and which cells are run again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import learning
from benchmarks.learning import (
    BATCHES,
    CELLS,
    CURVES,
    HELD_OUT,
    SEEDS,
    Bench,
    Evaluated,
    Result,
    chosen_cells,
    compared,
    curves,
    draw,
    figures,
    found_in,
    over_problems,
    over_seeds,
    placed,
    ran_on,
    recorded,
    run_cells,
    settings_of,
    share_of,
    sums,
    table,
    verdicts,
    write_page,
)
from orchestrator.config.load import resolve
from orchestrator.launch.gpus import place_gpus


def result(cell: str, seed: int | None, right: str, *, problems: str = "p", more: tuple[str, ...] = ()) -> Result:
    evaluated = Evaluated(right=right, well_formed=1.0, problems=problems)
    curve = {"right": [0.1 * seed, 0.5]} if seed is not None else {}
    kind = CELLS.get(cell) or learning.Kind(group="", why="", preset=cell.removeprefix("untrained-"))
    return Result(cell=cell, seed=seed, settings=recorded(kind, more), evaluated=evaluated, batches=curve)


def test_held_out_problems_are_others_than_those_trained_on_and_always_the_same() -> None:
    training, held_out = sums()
    assert len(held_out) == HELD_OUT
    assert len({row["prompt"] for row in [*training, *held_out]}) == len(training) + HELD_OUT
    assert sums() == (training, held_out)
    for row in [*training, *held_out]:
        first, sign, second = row["prompt"].split(": ")[1].removesuffix(" =").split()
        assert int(row["answer"]) == (int(first) + int(second) if sign == "+" else int(first) - int(second)) >= 0
        assert min(int(first), int(second)) <= 9
    easy = [row["prompt"].split(": ")[1].split() for row in training[:60]]
    assert max(int(number) for parts in easy for number in (parts[0], parts[2])) <= 9


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_is_settings_of_a_run_on_one_device_that_its_result_does_not_name(cell: str, tmp_path: Path) -> None:
    kind = CELLS[cell]
    chosen = [*settings_of(kind, tmp_path, ()), *placed(kind, "cuda:0")]
    settings = resolve(kind.preset, [], chosen, {}).settings
    assert (settings.run.batches, settings.eval.problems, settings.eval.every) == (BATCHES, HELD_OUT, 0)
    assert {settings.generation.device, settings.trainer.device, settings.scoring_device} == {"cuda:0"}
    assert not settings.has_critic or settings.critic.device == "cuda:0"
    assert place_gpus(settings) is None  # it takes no lock: others may run there
    assert settings.sampling.max_new_tokens < settings.generation.max_context
    assert not any("device" in one for one in recorded(kind, ()))
    assert placed(kind, "") == []


def test_the_table_says_where_cells_ran(tmp_path: Path) -> None:
    bench = Bench(results=tmp_path, work=tmp_path)
    for seed, where in ((0, "2 cores, load 1.3 before"), (1, "H100, 16 cores, load 9.0 before, 7 jobs")):
        bench.write(msgspec.structs.replace(result("ppo", seed, "01"), machine=where))
    found = found_in(bench)
    assert ran_on(found) == "Ran on 2 cores: ppo:0; H100, 16 cores: ppo:1."
    assert ran_on(found) in table(found)


class Pretended(Bench):
    """Cells that train nothing. Each waits for ``jobs`` others that are there at once, within a deadline."""

    def run(self, cell: str, seed: int) -> Result:
        if cell == "ppo":
            raise SystemExit("no such critic")
        (self.work / f"{cell}-{seed}").touch()
        deadline_s = time.monotonic() + 60
        while len(list(self.work.iterdir())) < self.jobs:
            if time.monotonic() > deadline_s:
                raise SystemExit("was left alone")
            time.sleep(0.01)
        done = result(cell, seed, "01")
        self.write(done)
        return done


def test_cells_run_at_once_and_one_that_fails_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Pretended(results=tmp_path / "results", work=tmp_path / "work", jobs=2)
    bench.work.mkdir()
    bench.write(result("gspo", 0, "01"))
    assert run_cells(bench, [("ppo", 1), ("gspo", 0), ("sync", 0), ("rloo", 2)]) == [("ppo", 1)]
    assert {path.name for path in bench.work.iterdir()} == {"sync-0", "rloo-2"}  # not gspo:0, which is there
    assert bench.read("sync", 0) == result("sync", 0, "01")
    said = capfd.readouterr()
    assert "ppo:1: failed with 1" in said.out
    assert "no such critic" in said.err


def test_an_interval_over_problems_is_paired() -> None:
    """Two cells that differ on one problem of four, by hand: mean 1/4, deviation 1/2, t of three degrees 3.182."""
    cell, base = np.array([[1.0, 1, 0, 1]] * 2), np.array([[1.0, 0, 0, 1]] * 2)
    found = over_problems(cell, base)
    assert (found.mean, found.half) == (0.25, pytest.approx(3.182 * 0.5 / 2, abs=1e-3))
    assert over_problems(base, base).half == 0


def test_an_interval_over_seeds_is_paired() -> None:
    """Differences .5, .25, 0 of three seeds: mean .25, deviation .25, t of two degrees 4.303."""
    cell = np.array([[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 0]])
    base = np.array([[1.0, 0, 1, 0]] * 3)
    found = over_seeds(cell, base)
    assert found is not None
    assert (found.mean, found.half) == (pytest.approx(0.25), pytest.approx(4.303 * 0.25 / 3**0.5, abs=1e-3))
    assert over_seeds(cell[:1], base[:1]) is None


def test_cells_are_compared_on_the_seeds_that_both_have_and_on_the_same_problems(tmp_path: Path) -> None:
    bench = Bench(results=tmp_path, work=tmp_path)
    for one in (result("sync", 0, "0000"), result("sync", 1, "1111"), result("ppo", 1, "1101")):
        bench.write(one)
    pair = compared(found_in(bench), "ppo")
    assert pair is not None
    assert (pair[0].mean, pair[1]) == (-0.25, None)
    bench.write(result("ppo", 1, "1101", problems="others"))
    with pytest.raises(ValueError, match="asked other problems"):
        compared(found_in(bench), "ppo")


def test_the_last_line_has_a_figure_once_all_seeds_are_there(tmp_path: Path) -> None:
    bench = Bench(results=tmp_path, work=tmp_path)
    for cell, right in (("sync", "1100"), ("gspo", "1000")):
        for seed in SEEDS[: 3 if cell == "sync" else 2]:
            bench.write(result(cell, seed, right))
    bench.write(result("untrained-two_turn_tool", None, "1000"))
    found = found_in(bench)
    told = figures(found)
    assert (told["sync"], told["gspo"], told["two_turn_tool_before"]) == (0.5, None, 0.25)
    assert told["staleness_spread"] is None
    assert "gspo:2" in told["cells_missing"]
    assert len(told["cells_missing"]) == len(CELLS) * len(SEEDS) - 5
    assert "0.500, 0.500, 0.500 | 0.500" in table(found)
    for cell, kind in CELLS.items():
        if kind.group == "modes":
            for seed in SEEDS:
                bench.write(result(cell, seed, "1111" if cell == "staleness_4" else "1110"))
    assert figures(found_in(bench))["staleness_spread"] == 0.25
    assert share_of(found_in(bench), "staleness_4") == 1.0


def test_a_cell_that_is_there_is_not_run_again_unless_its_settings_are_others(tmp_path: Path) -> None:
    bench, other = (
        Bench(results=tmp_path, work=tmp_path),
        Bench(results=tmp_path, work=tmp_path, more=("trainer.lr=1",)),
    )
    bench.write(result("ppo", 2, "01"))
    assert bench.read("ppo", 2) == result("ppo", 2, "01")
    assert (bench.read("ppo", 1), other.read("ppo", 2)) == (None, None)
    (tmp_path / "ppo-1.json").write_text("{")
    with pytest.raises(msgspec.MsgspecError):
        bench.read("ppo", 1)


@pytest.mark.parametrize("there", ["nothing", "begun", "trained"])
def test_a_cell_goes_on_where_it_was_cut_off(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called, with commands that only leave what the real ones leave."""
    bench, run_dir = Bench(results=tmp_path / "results", work=tmp_path), tmp_path / "runs" / "ppo-1"
    called: list[list[str]] = []

    def call(command: list[str], **_: object) -> None:
        arguments = command[command.index("-m") + 1 :]
        called.append(arguments)
        if arguments[:2] == ["orchestrator", "run"]:
            (run_dir / "model").mkdir(parents=True, exist_ok=True)
            line = {"batch": 0, "right": 0.5, "well_formed": 1.0, "reward": 0.5, "right_with_filtered": 0.25}
            (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            (run_dir / "config.toml").write_text('[generation]\ndevice = "cpu"\n')
        else:
            scored = {"prompt_id": "a", "figures": {"right": 1.0, "well_formed": 1.0}}
            Path(arguments[-1]).write_text(json.dumps(scored) + "\n")

    monkeypatch.setattr(learning, "call", call)
    if there != "nothing":
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text('[generation]\ndevice = "cpu"\n')
    if there == "trained":
        (run_dir / "model").mkdir()
        (run_dir / "metrics.jsonl").write_text('{"batch": 0, "right": 0.25, "well_formed": 1.0, "reward": 0.5}\n')
    done = bench.run("ppo", 1)
    assert bench.read("ppo", 1) == done
    assert done.batches["right"] == [0.25]
    assert [arguments[1] for arguments in called] == ["run"] * (there != "trained") + ["evaluate"] * 2
    assert ("--resume" in called[0]) == (there == "begun")
    called.clear()
    bench.run("ppo", 1)
    assert [arguments[1] for arguments in called] == ["evaluate"]  # the untrained model is asked once


def test_a_result_is_read_from_answers_and_metrics() -> None:
    answers = [{"prompt_id": str(one), "figures": {"right": one % 2, "well_formed": 1.0}} for one in range(4)]
    found = verdicts(answers)
    assert (found.right, found.well_formed) == ("0101", 1.0)
    assert found.problems != verdicts(answers[::-1]).problems
    batches = [{"right": 0.5, "reward": 1.0, "right_with_filtered": 0.125}, {"right": 0.75, "reward": 1.0}]
    assert curves(batches) == {"right": [0.125, 0.75], "reward": [1.0, 1.0]}


def test_the_page_gets_its_table_and_the_curves_are_drawn(tmp_path: Path) -> None:
    bench = Bench(results=tmp_path, work=tmp_path)
    for seed in SEEDS:
        bench.write(result("rloo", seed, "0110"))
    found = found_in(bench)
    draw(found, tmp_path / CURVES)
    assert "rloo (3)" in (tmp_path / CURVES).read_text()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
    write_page(found, page)
    text = page.read_text()
    assert "old" not in text
    assert "| `rloo` | 0.500, 0.500, 0.500 | 0.500 |" in text
    write_page(found, page)
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no place"):
        write_page(found, page)


def test_cells_are_named_by_setting_and_seed() -> None:
    assert list(chosen_cells("sync:0,ppo")) == [("sync", 0), *(("ppo", seed) for seed in SEEDS)]
    assert len(list(chosen_cells(""))) == len(CELLS) * len(SEEDS)
    for wrong in ("sink:0", "ppo:7", "ppo:x"):
        with pytest.raises(SystemExit, match=wrong):
            list(chosen_cells(wrong))
