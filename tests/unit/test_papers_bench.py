"""The bench ``papers``: rows that can be read alone, simulations that are kept, constants that are not worth a move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.papers.__main__ import chosen_rows
from benchmarks.papers.comparison import compare, mattering
from benchmarks.papers.experiments import ENOUGH_LARGE, Experiment, Transfer
from benchmarks.papers.rows import Cell, Row, rows
from benchmarks.papers.settings import aided, asyncflow, fully_async, in_flight
from benchmarks.papers.trials import Kept, Trial, moves, run_trials
from orchestrator.sim.costs import ASSUMED, Assumptions
from orchestrator.sim.llms import QWEN_7B, QWEN_72B


@dataclass(frozen=True, slots=True)
class Counted(Experiment):
    """Takes as long as the trainer's utilisation says; each call leaves a line."""

    path: Path

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        with self.path.open("a") as file:
            file.write("x")
        return 1 / assumed.mfu

    def key(self, assumed: Assumptions) -> float:
        return assumed.mfu


def test_every_row_says_the_papers_number_and_why_ours_differs():
    found = rows()
    assert len({row.key for row in found}) == len(found)
    for row in found:
        assert row.paper, row.key
        assert row.note, f"{row.key}: why does ours differ, or what is to be known of it?"


def test_rows_are_chosen_by_how_their_keys_begin():
    assert {row.key for row in chosen_rows("transfer,fig11")} == {"transfer", "transfer_share", "fig11"}
    assert len(chosen_rows("")) == len(rows())
    with pytest.raises(SystemExit, match="no key begins with nothing_so; there are fig2"):
        chosen_rows("fig8,nothing_so")


def test_an_interrupted_bench_goes_on_with_what_was_kept(tmp_path: Path):
    calls, kept = tmp_path / "calls", tmp_path / "kept"
    trials = [Trial(Counted(calls), seed, 1) for seed in range(3)]
    first = run_trials(trials[:2], kept=Kept.read(kept))
    with kept.open("ab") as file:
        file.write(b'{"trial": "cut o')
    again = run_trials(trials, kept=Kept.read(kept))
    assert calls.read_text() == "xxx", "the third alone is new"
    assert again == {**first, trials[2]: 1 / ASSUMED.mfu}
    moved = msgspec.structs.replace(ASSUMED, mfu=0.5)
    assert run_trials([Trial(Counted(calls), 0, 1, moved)], kept=Kept.read(kept)) == {
        Trial(Counted(calls), 0, 1, moved): 2.0
    }


def test_what_other_code_came_to_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls, kept = tmp_path / "calls", tmp_path / "kept"
    trial = Trial(Counted(calls), 0, 1)
    run_trials([trial], kept=Kept.read(kept))
    monkeypatch.setattr("benchmarks.papers.trials._code", lambda: "another")
    run_trials([trial], kept=Kept.read(kept))
    assert calls.read_text() == "xx"


def test_large_batches_are_not_simulated_longer_than_is_of_use():
    assert asyncflow(QWEN_7B, 512, "fully_async").enough == ENOUGH_LARGE
    assert fully_async(QWEN_72B).enough > 26


def test_a_constant_that_moves_no_stage_is_not_moved():
    cell = Cell(label="72B", of=fully_async(QWEN_72B))
    few = mattering([cell], 0.05)
    assert {"mfu x 0.8", "mfu x 1.2"} <= {*few} < {*moves()}
    assert not any(name.startswith("scoring_s") for name in few)
    assert {*mattering([cell], 0.0)} == {*moves()}
    assert {*mattering([Cell(label="other", of=Transfer(bytes_per_s=1e9))], 9.0)} == {*moves()}, "no pipeline, no stage"


def test_an_acceptance_that_moves_moves_engines_that_draft():
    drafting = aided(in_flight(), drafts=ASSUMED.draft_acceptance)
    moved = msgspec.structs.replace(ASSUMED, draft_acceptance=0.8 * ASSUMED.draft_acceptance)
    assert drafting.laid_out(moved).drafts == pytest.approx(0.8 * ASSUMED.draft_acceptance)
    assert drafting.key(moved) != drafting.key(ASSUMED)
    assert in_flight().laid_out(moved).drafts == 0.0


def test_a_row_of_the_table_is_what_its_experiments_take(tmp_path: Path):
    row = Row(key="r", source="s", what="w", cells=(Cell(label="c", of=Counted(tmp_path / "c")),))
    (one,) = compare([row], seeds=(0,), iterations=3)
    assert one.values == (1 / ASSUMED.mfu,)
