"""``streamrl-orchestrator simulate``: a small scenario whole, mistakes by name, and what --paper is made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.core.allocation import Pool, Split
from orchestrator.core.hardware import ASSUMED, GPUS, Assumptions
from orchestrator.core.llms import QWEN_7B, QWEN_72B
from orchestrator.core.settings import chosen_dispatch, core_settings, default_dispatch
from orchestrator.errors import ConfigError, DataError
from orchestrator.report.curves import Series
from orchestrator.report.drawing import to_svg
from orchestrator.report.simulation_drawing import Bar, Effect, draw_bars, draw_scaling, draw_tornado
from orchestrator.sim.allocating import Job
from orchestrator.sim.experiment import Generation, Growing, Pipelined, Transfer
from orchestrator.sim.paper import compare, with_swings
from orchestrator.sim.paper_rows import Cell, Row, rows
from orchestrator.sim.paper_settings import split
from orchestrator.sim.paper_table import as_data, table
from orchestrator.sim.scenarios import PIPELINES, Layout
from orchestrator.sim.trials import SHARES, Trial, moves, run_trials
from transport.settings import GenerationSettings, PipelineSettings, RankerSettings, Settings
from transport.types import UpdateMode

SMALL = ["simulate", "--model", "Qwen2.5-7B", "--generate", "4xH800", "--train", "4xH800", "--batch", "32"]
SMALL += ["--iterations", "6", "--ranks", "1", "--recall", "1"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(100 + 37 * number % 900) for number in range(64)))
    return path


def ask(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_scenario_says_seconds_bubbles_and_its_bound_and_draws_itself(lengths, tmp_path):
    out = tmp_path / "out"
    data = json.loads(ask("--lengths", str(lengths), "--json", "--out", str(out)))
    assert data["iteration_s"] >= data["bound_s"] > 0
    assert data["over_bound"] == pytest.approx(data["iteration_s"] / data["bound_s"], rel=1e-3)
    assert data["oldest_token_age"] <= 1
    assert all(0 <= sum(causes.values()) < 1 for causes in data["idle"].values())
    assert (out / "timeline.svg").read_text().startswith("<svg")
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = ask("--lengths", str(lengths))
    assert f"iteration   {data['iteration_s']:.4g} s" in text
    assert "skew" in text or "pipeline" in text


def test_equal_seeds_give_equal_answers():
    first, again, other = (ask("--json", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_colocated_gpus_work_in_turn(lengths):
    data = json.loads(ask("--lengths", str(lengths), "--train", "colocated", "--pipeline", "serial", "--json"))
    assert data["training_gpus"] == data["generation_gpus"] == 4
    assert data["iteration_s"] >= data["bound_training_s"] + data["bound_generation_s"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--model", "nope"], ConfigError, "neither a known model"),
        (["--generate", "5xH800", "--tensor-parallel", "4"], ConfigError, "no whole instances of 4"),
        (["--generate", "0xH800"], ConfigError, "--generate: 0xH800: from 1"),
        (["--generate", "8xH900"], ConfigError, "--generate: no GPU 'H900'"),
        (["--train", "8xH800,8xH20"], ConfigError, "--train: one pool"),
        (["--model", "Qwen2.5-72B"], ConfigError, "more GPUs, or a smaller --model"),
        (["--ranks", "3"], ConfigError, "cannot be dealt out to 3 ranks"),
        (["--tensor-parallel", "3", "--generate", "6xH800"], ConfigError, "do not split 3 ways"),
        (["--pipeline", "x"], ConfigError, "not one of serial"),
        (["--dispatch", "x"], ConfigError, "not one of even"),
        (["--lengths", "/does/not/exist"], DataError, "cannot be read"),
    ],
)
def test_mistakes_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)


@pytest.mark.parametrize("content", ["0\n", "-3\n", "nan\n", "", "12 13\n"])
def test_lengths_that_are_none_are_refused(content, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(DataError):
        CliRunner().invoke(app, [*SMALL, "--lengths", str(path)], catch_exceptions=False)


@pytest.mark.parametrize("content", ["700\n", "300\n" * 50])
def test_one_length_and_equal_lengths_are_a_workload(content, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert json.loads(ask("--lengths", str(path), "--json"))["over_bound"] > 0.99, "of a few iterations, not of all"


# -- the papers


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
    assert len(moves()) == 2 * len(msgspec.structs.fields(Assumptions))
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
    assert [change.batch for change in changes] == [1, 5, 13]


def test_a_run_is_the_same_in_every_process_and_year():
    """A golden: it changes with the model or a policy, and then on purpose."""
    log = ASYNC.run(0, 6, ASSUMED)
    assert (log.num_events, log.tokens) == GOLDEN_COUNTS
    assert log.published_s == pytest.approx(GOLDEN_PUBLISHED_S, abs=1e-6)


GOLDEN_COUNTS = (269, 11127)
GOLDEN_PUBLISHED_S = [7.4153087859, 11.9444708547, 16.4909392314, 21.0702828854, 25.7099634040, 30.3169326621]


# -- pictures


def test_pictures_hold_every_result():
    bars = draw_bars("bars", [Bar(title="Table 3", ours=(1.2, 1.5), paper=(1.1, 1.1)), Bar(title="new", ours=(2, 2))])
    drawn = to_svg(bars)
    assert "Table 3" in drawn
    assert "1.20 - 1.50" in drawn
    assert all(rect.x + rect.width <= bars.width for rect in bars.rects)
    tornado = draw_tornado("tornado", 1.7, [Effect(constant="mfu", lower=1.5, higher=math.nan)] * 20)
    assert to_svg(tornado).count(">mfu<") == 12
    curve = draw_scaling("scaling", [Series(name="ours", points=[(32, 0.8), (10_000, 200.0)])])
    assert ">10000<" in to_svg(curve)
    assert all(0 <= x <= curve.width and 0 <= y <= curve.height for line in curve.lines for x, y in line.points)


POOL = Pool(gpu=GPUS["H800"], num_gpus=8, price=1.0)
ONE_EACH = Split(
    generation=POOL,
    generation_gpus=1,
    tensor_parallel=1,
    training=POOL,
    training_gpus=1,
    ranks=1,
    training_tensor_parallel=1,
    pipeline_parallel=1,
)


@pytest.mark.parametrize("pipeline", ["stream", "fully_async", "in_flight", "rolling_staggered"])
@pytest.mark.parametrize("instances", [1, 4, 5])
def test_run_plan_and_simulate_choose_the_same_dispatch(pipeline: str, instances: int, lengths: Path):
    core = PIPELINES[pipeline]
    settings = Settings(
        pipeline=PipelineSettings(max_staleness=core.max_staleness, update=core.update),
        generation=GenerationSettings(workers=instances),
        ranker=RankerSettings(kind="text"),
    )
    of_run = chosen_dispatch(settings)
    assert core_settings(settings).dispatch == of_run
    of_split = replace(ONE_EACH, generation_gpus=instances)
    assert Job(llm=QWEN_7B, groups=((1,),), pipeline=pipeline).dispatch(of_split) == of_run
    shape = ["--generate", f"{instances}xH800", "--tensor-parallel", "1", "--pipeline", pipeline]
    assert json.loads(ask("--lengths", str(lengths), *shape, "--json"))["dispatch"] == of_run
    assert ask("--lengths", str(lengths), *shape).startswith(f"Qwen2.5-7B, {pipeline}, {of_run}; ")


@pytest.mark.parametrize(("instances", "usual"), [(4, "least_loaded"), (5, "paced")])
def test_plans_are_the_default_where_many_workers_take_versions_in_flight(instances: int, usual: str):
    asked = {"max_staleness": 1, "update": UpdateMode.IN_FLIGHT, "num_workers": instances}
    assert default_dispatch(**asked) == usual
    assert default_dispatch(**asked, ranked=False) == "least_loaded"
    assert default_dispatch(**asked | {"max_staleness": 0}) == "scored"
