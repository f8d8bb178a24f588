"""The papers beside ours (``make bench NAME=papers``): rows, trials, moved constants and pictures."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec
import pytest

from benchmarks.papers.comparison import as_data, compare, table, with_swings
from benchmarks.papers.experiments import Generation, Growing, Known, Pipelined, Transfer
from benchmarks.papers.pictures import Bar, Effect, draw_bars, draw_scaling, draw_tornado
from benchmarks.papers.rows import Cell, Row, rows
from benchmarks.papers.settings import like_verl, split
from benchmarks.papers.trials import SHARES, Trial, moves, run_trials
from orchestrator.sim.costs import ASSUMED, Assumptions
from orchestrator.sim.llms import QWEN_7B, QWEN_72B
from orchestrator.sim.scenarios import Layout


def test_every_row_of_the_papers_fits_and_names_its_source():
    keys = [row.key for row in rows()]
    assert len(set(keys)) == len(keys)
    for row in rows():
        assert row.source.startswith(("StreamRL", "AsyncFlow"))
        for cell in row.cells:
            cell.of.key(ASSUMED)
            if cell.over is not None:
                cell.over.key(ASSUMED)
    published = {row.key: row.low for row in rows() if row.key.startswith("table3")}
    assert published["table3_ranked"] == 1.08
    assert published["table3_stream"] == 1.23
    assert published["table3_async"] == 1.48


TINY = Layout(generation_gpus=4, training_gpus=4, tensor_parallel=1, ranks=1, slots=64)
ASYNC = Pipelined(
    llm=QWEN_7B, layout=TINY, pipeline="in_flight", dispatch="even", max_tokens=400, batch=16, recall=None
)
STREAM = replace(ASYNC, pipeline="stream")
TINY_ROWS = [
    Row(
        key="gain",
        source="StreamRL Table 3",
        what="asynchronous over synchronous",
        cells=(Cell(label="tiny", of=ASYNC, over=STREAM),),
        paper="1.20",
        low=1.2,
        high=1.2,
        note="a note",
    ),
    Row(
        key="transfer",
        source="StreamRL sec. 7.3",
        what="weights",
        cells=(Cell(label="72B", of=Transfer(bytes_per_s=10e9)),),
        unit=" s",
    ),
]


def test_a_table_has_paper_and_ours_and_what_moves_it_most():
    said: list[tuple[int, int]] = []
    plain = compare(TINY_ROWS, seeds=(3,), iterations=6)
    found = with_swings(plain, seed=3, progress=lambda done, of: said.append((done, of)))
    gain, transfer = found
    assert said[-1][0] == said[-1][1]
    assert gain.swing is not None
    assert transfer.swing is not None
    assert gain.swing.worst <= gain.low <= gain.swing.best
    assert transfer.swing.most == "network_efficiency x 0.8", "nothing else makes a transfer a quarter longer"
    assert transfer.swing.share == pytest.approx(0.25, rel=0.01)
    assert transfer.low == pytest.approx(18.2, rel=0.01), "145 GB over 80% of 10 GB/s"
    text = table(found)
    assert "1.20" in text
    assert "a note" in text
    assert "network_efficiency x 0.8 (25%)" in text
    data = as_data(found)
    assert data[0]["ours"]["tiny"] == pytest.approx(gain.low, abs=1e-4)
    assert data[1]["moved_by_20_percent"]["most"] == "network_efficiency x 0.8"
    assert json.loads(msgspec.json.encode(data)) == data


def test_who_interrupts_the_moved_constants_has_the_rows_that_were_done():
    def interrupt(done: int, of: int) -> None:
        if done == of:
            raise KeyboardInterrupt

    plain = compare(TINY_ROWS[::-1], seeds=(3,), iterations=2)
    transfer, gain = with_swings(plain, seed=3, progress=interrupt)
    assert transfer.swing is not None
    assert gain.swing is None
    assert gain.values == plain[1].values


def test_trials_do_not_depend_on_the_number_of_processes_and_equal_ones_are_done_once():
    slower = msgspec.structs.replace(ASSUMED, switch_s=9.0)  # of colocated GPUs only
    trials = [Trial(ASYNC, 1, 4), Trial(ASYNC, 1, 4), Trial(ASYNC, 1, 4, slower), Trial(STREAM, 1, 4)]
    done: list[int] = []
    alone = run_trials(trials, progress=lambda _, of: done.append(of))
    assert done == [2, 2]
    assert alone == run_trials(trials, jobs=2)
    assert alone[trials[0]] == alone[trials[2]]


def test_moves_are_of_every_constant_and_shares_stay_shares():
    assert len(moves()) == 2 * len({field.name for field in msgspec.structs.fields(Assumptions)} - {"trainer"})
    for assumed in moves().values():
        assert all(getattr(assumed, name) <= 1 for name in SHARES)
    names = {field.name for field in msgspec.structs.fields(Assumptions)}
    assert names >= SHARES


def test_what_does_not_fit_is_a_result():
    crowded = Pipelined(layout=Layout(generation_gpus=8, training_gpus=8, ranks=1), pipeline="stream", dispatch="even")
    (result,) = run_trials([Trial(crowded, 0, 3)]).values()
    assert "does not fit" in str(result) or "needs" in str(result)


def test_known_lengths_make_generation_shorter_than_a_ranker_and_than_chance():
    def seconds(dispatch: str, recall: float | None) -> float:
        one = Generation(llm=QWEN_72B, gpus=64, tensor_parallel=8, dispatch=dispatch, recall=recall, batch=256)
        found = one.seconds(1, 2, ASSUMED)
        assert found >= one.bound_s(1, 2, ASSUMED)
        return found

    assert seconds("scored", None) < seconds("scored", 0.87) < seconds("random", 0.87)


def test_growing_lengths_call_for_nodes_one_after_another():
    """StreamRL's Figure 11: a node corrects the first split, two more follow the lengths; none goes."""
    changes = Growing(nth=1, llm=QWEN_7B, layout=split(QWEN_7B, 8)).changes(0, ASSUMED)
    assert [(change.from_workers, change.to_workers) for change in changes] == [(2, 4), (4, 6), (6, 8)]
    assert [change.batch for change in changes] == [1, 6, 20]


def test_a_run_is_the_same_in_every_process_and_year():
    """A golden: it changes with the model or a policy, and then on purpose."""
    log = ASYNC.run(0, 6, ASSUMED)
    assert (log.num_events, log.tokens) == GOLDEN_COUNTS
    assert log.published_s == pytest.approx(GOLDEN_PUBLISHED_S, abs=1e-6)


GOLDEN_COUNTS = (259, 11127)
GOLDEN_PUBLISHED_S = [10.7260104662, 16.9134184019, 23.0742008313, 29.2806686074, 35.5396900738, 41.7903389434]


# -- pictures


def test_pictures_hold_every_result(tmp_path):
    bars = draw_bars("bars", [Bar(title="Table 3", ours=(1.2, 1.5), paper=(1.1, 1.1)), Bar(title="new", ours=(2, 2))])
    (axes,) = bars.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Table 3", "new"]
    assert {text.get_text() for text in axes.texts} == {"1.20 - 1.50", "1.10", "2.00"}
    tornado = draw_tornado("tornado", 1.7, [Effect(constant="mfu", lower=1.5, higher=math.nan)] * 20)
    assert len(tornado.axes[0].get_yticklabels()) == 12
    curve = draw_scaling("scaling", {"ours": [(32, 0.8), (10_000, 200.0)]})
    assert [label.get_text() for label in curve.axes[0].get_xticklabels()] == ["32", "10000"]
    for number, figure in enumerate((bars, tornado, curve)):
        figure.savefig(tmp_path / f"{number}.svg")


def test_generation_gains_less_from_gpus_and_loses_more_by_lengths_than_training():
    """StreamRL's Figure 2, whose curves have no numbers."""
    shown = {row.key: row for row in rows() if row.key.startswith("fig2")}
    found = {one.row.key: one for one in compare(list(shown.values()), seeds=(1,), iterations=1)}
    generation, training = found["fig2_gpus_generation"], found["fig2_gpus_training"]
    assert 1.0 < generation.high < 2.5 < training.high < 16.0
    assert found["fig2_tokens_generation"].high > 1.5 * found["fig2_tokens_training"].high


def test_a_ranker_saves_a_share_of_what_known_lengths_save():
    (row,) = (row for row in rows() if row.key == "fig9_oracle_share")
    smallest = replace(row, cells=row.cells[:1])
    (found,) = compare([smallest], seeds=(1,), iterations=2)
    assert 0.1 < found.low < 1.0
    known = replace(smallest.cells[0].of, ranked=replace(smallest.cells[0].of.ranked, recall=None))
    assert known.seconds(1, 1, ASSUMED) == pytest.approx(1.0)


def test_verls_defaults_cost_a_colocated_pipeline_what_they_take_from_its_engine():
    plain = replace(ASYNC, pipeline="serial", layout=replace(TINY, colocated=True), batch=256)
    assert like_verl(plain).seconds(1, 5, ASSUMED) > 1.02 * plain.seconds(1, 5, ASSUMED)


def test_a_row_that_was_not_measured_says_so():
    row = Row(
        key="learned", source="StreamRL sec. 7.4", what="reward", cells=(), paper="comparable", note="not measured"
    )
    plain = compare([row], seeds=(1,), iterations=1)
    compared = with_swings(plain, seed=1)
    assert table(compared).splitlines()[-2].split()[-2:] == ["comparable", "-"]
    assert as_data(compared)[0]["ours"] == {}
    measured = replace(row, cells=(Cell(label="SmolLM2", of=Known(0.5), over=Known(0.25)),))
    assert compare([measured], seeds=(1,), iterations=1)[0].values == (0.5,)
