"""One page of a run, and pages that compare: complete, self-contained, and safe whatever a model wrote."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from orchestrator.config.load import render, resolve
from orchestrator.config.run_directory import RunDir
from orchestrator.config.starts import GpuUse, note_start, read_starts
from orchestrator.errors import ConfigError, Interrupted
from orchestrator.journal import Journal
from orchestrator.observability.metrics import mismatch_line, no_gradient_line, read_file, read_metrics
from orchestrator.observability.report import pages
from orchestrator.observability.report.comparison import Number, Row, compare_runs, labels
from orchestrator.observability.report.drawing import Series, draw_chart, series_of, to_svg
from orchestrator.observability.report.pages import (
    render_comparison,
    render_report,
)
from orchestrator.observability.report.record import changed_settings, differing, facts, read_run, verdict
from orchestrator.observability.samples import MAX_OF_BATCH, SampleKeeper, read_samples
from orchestrator.observability.standing import noting_end
from transport.contracts.messages import (
    Event,
    GroupScored,
    JournalRecord,
    RolloutFinished,
    StepDone,
    TrainerReady,
    WorkerJoined,
    WorkerLost,
)
from transport.contracts.types import FinishReason, GroupId, RowId, WeightIdentity, WorkerId, WorkerKind

HOSTILE = "</pre><script>alert(1)</script><img src=http://evil onerror=alert(1)>\x1b[2J\x07"
W0, W1, W2 = (WeightIdentity(epoch=1, version=version) for version in range(3))
WORKER = WorkerId("generate-0.1")


def make_run(run_dir: Path, *, lr: float = 1e-5, reward: float = 0.5, hostile: bool = False) -> Path:
    """A directory as a finished run of two batches leaves it."""
    events: list[tuple[float, Event]] = [
        (1.0, WorkerJoined(worker_id=WORKER, kind=WorkerKind.GENERATE, capacity=2)),
        (1.0, TrainerReady(worker_id=WorkerId("train-0.1"), weights=W0)),
    ]
    for batch, weights in enumerate((W1, W2)):
        start_s = 2.0 + 4 * batch
        finished = RolloutFinished(
            row_id=RowId(f"{batch}/0/0"),
            worker_id=WORKER,
            response_tokens=9,
            finish_reason=FinishReason.STOP,
            oldest=W0,
            newest=W0,
            engine_s=1.0,
        )
        scored = GroupScored(
            group_id=GroupId(f"{batch}/0"),
            rewards=(reward,),
            response_tokens=(9,),
            signal=True,
            components={HOSTILE if hostile else "right": 1.0},
        )
        step = StepDone(batch=batch, weights=weights, num_rows=1, num_tokens=9, stepped_s=0.5)
        events += [(start_s + 1, finished), (start_s + 1.5, scored), (start_s + 3, step)]
    events.append((11.0, WorkerLost(worker_id=WORKER, reason=HOSTILE if hostile else "its process ended")))
    journal, _ = Journal.open(run_dir / "journal")
    journal.append([JournalRecord(seq=seq, now_s=now_s, event=event) for seq, (now_s, event) in enumerate(events, 1)])
    journal.close()
    of_all = {"incarnation": 1, "reward": reward, "right": 1.0, "response_tokens_max": 9}
    lines = [{"batch": batch, "version": batch + 1, "time_s": 5.0 + 4 * batch, **of_all} for batch in range(2)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "config.toml").write_text(f'[run]\nname = "x"  # --set\n\n[trainer]\nlr = {lr}  # default\n')
    text = HOSTILE if hostile else "Answer: 3"
    sample = {"row": "1/0/0", "reward": reward, "prompt": text, "response": text, "components": {"right": text}}
    (run_dir / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return run_dir


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def check_harmless(page: str) -> None:
    """Nothing in it runs, loads or links; no control characters."""
    tags = Tags(page)
    assert not {"script", "img", "link", "iframe", "a", "object", "form"} & {tag for tag, _ in tags.tags}
    assert not [name for _, attributes in tags.tags for name in attributes if name.startswith("on") or name == "src"]
    assert not {char for char in page if not char.isprintable()} - {"\n"}
    policies = [
        attributes for tag, attributes in tags.tags if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert [policy["content"] for policy in policies] == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_report_shows_every_part_of_a_run(tmp_path: Path):
    make_run(tmp_path / "first")
    assert pages.report(tmp_path / "first", None) == 0
    page = (tmp_path / "first" / "report.html").read_text()
    check_harmless(page)
    text = Tags(page).text
    for expected in ("reward", "reward components", "response length", "generate-0.1", "its process ended"):
        assert expected in text
    assert "# --set" in text, "the configuration says where each value came from"
    assert "Answer: 3" in text
    assert "11 s" in text
    assert "0.50 → 0.50" in text


def test_the_report_warns_of_batches_as_the_terminal_does(tmp_path: Path):
    run_dir = make_run(tmp_path)
    lines = [
        {**line, "grad_norm": 0.0, "groups_trained": 1, "no_signal": 1.0}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]
    lines[0]["logprob_mismatch"] = 9.0
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (run_dir / "config.toml").open("a") as config:
        config.write("[algorithm]\nmismatch_limit = 0.1\n")
    text = Tags(render_report(read_run(run_dir))).text
    assert f"2 warnings, the last: {no_gradient_line(lines[0])} (and 1 more batch)" in text
    for warning in (mismatch_line(lines[0], 0.1), no_gradient_line(lines[0])):
        assert warning in text


def test_a_batch_of_which_every_answer_is_as_good_is_called_solved():
    line = {"batch": 3, "groups_trained": 4, "grad_norm": 0.0, "no_signal": 1.0, "reward": 1.0, "reward_std": 0.0}
    assert "every answer earns the same reward (1): where that is the best there is, the task is solved" in (
        no_gradient_line(line)
    )
    assert "drop_no_signal=true" in no_gradient_line({**line, "reward": 0.0})


def test_hostile_text_does_nothing_in_the_report(tmp_path: Path):
    make_run(tmp_path / "run", hostile=True)
    pages.report(tmp_path / "run", None)
    page = (tmp_path / "run" / "report.html").read_text()
    check_harmless(page)
    assert "<script>alert(1)</script>" in Tags(page).text, "it is shown as what it is: text"


def test_hostile_names_do_nothing_in_a_comparison(tmp_path: Path):
    runs = [make_run(tmp_path / name, hostile=True) for name in ("<b>one", "two")]
    (runs[1] / "config.toml").write_text("[data]\nsuffix = '<script>alert(1)</script>'\n")
    pages.compare(runs, tmp_path / "comparison.html")
    check_harmless((tmp_path / "comparison.html").read_text())


def test_a_comparison_puts_runs_side_by_side(tmp_path: Path):
    runs = [make_run(tmp_path / "a" / "x", lr=1e-5, reward=0.25), make_run(tmp_path / "b" / "x", lr=2e-5, reward=0.75)]
    pages.compare(runs, tmp_path / "comparison.html")
    text = Tags((tmp_path / "comparison.html").read_text()).text
    for expected in ("x (1)", "x (2)", "0.250", "0.750", "trainer.lr", "2e-05", "generation skew"):
        assert expected in text
    read = [read_run(run) for run in runs]
    assert differing([run.settings for run in read]) == [["trainer.lr", "1e-05", "2e-05"]]
    assert labels(read) == ["x (1)", "x (2)"]


def test_damaged_metrics_are_named_and_stay_for_whoever_audits_the_run(tmp_path: Path):
    run_dir, notes = make_run(tmp_path / "run"), []
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"batch": 0', b'"ba\xffch": 0'))
    before = path.read_bytes()
    page = pages.finish_run(RunDir(run_dir), notes.append).read_text()
    assert path.read_bytes() == before
    assert any("1 damaged, skipped: line 1" in note for note in notes)
    assert "1 damaged, skipped: line 1" in Tags(page).text


def test_one_run_is_no_comparison(tmp_path: Path):
    with pytest.raises(ConfigError, match="two runs"):
        pages.compare([make_run(tmp_path / "run")], tmp_path / "comparison.html")


def test_a_run_without_a_trained_batch_has_a_report(tmp_path: Path):
    Journal.open(tmp_path / "run" / "journal")
    pages.report(tmp_path / "run", None)
    page = (tmp_path / "run" / "report.html").read_text()
    check_harmless(page)
    assert "No batch was trained" in page


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no run"):
        pages.report(tmp_path, None)


def test_the_end_of_a_long_run_says_what_it_is_busy_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir, notes = make_run(tmp_path / "run"), []
    pages.finish_run(RunDir(run_dir), notes.append)
    assert notes == []
    monkeypatch.setattr(pages, "LONG_RUN", 0)
    pages.finish_run(RunDir(run_dir), notes.append)
    assert [note.split()[1] for note in notes] == ["trace.json", "report.html"]


def test_the_end_of_a_run_adds_what_only_the_journal_knows(tmp_path: Path):
    run_dir = make_run(tmp_path / "run")
    before = read_metrics(run_dir / "metrics.jsonl")
    report = pages.finish_run(RunDir(run_dir))
    after = read_metrics(run_dir / "metrics.jsonl")
    assert report == run_dir / "report.html"
    assert json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert [line.items() >= old.items() for line, old in zip(after, before, strict=True)] == [True, True]
    # batch 0 ends at 5 s: joined at 1, its sample runs in [2, 3], is scored at 3.5, the trainer steps in [4.5, 5]
    assert after[0]["bubble_generation_skew_s"] == 0.0
    assert after[0]["bubble_generation_other_s"] == 2.0
    assert after[0]["bubble_generation_scoring_s"] == 0.5
    assert after[0]["bubble_generation_pipeline_s"] == 0.5
    assert after[0]["generation_present_s"] == 4.0
    pages.finish_run(RunDir(run_dir))
    assert read_metrics(run_dir / "metrics.jsonl") == after, "a second time changes nothing"


EVALUATION = {
    "eval": 0,
    "version": 1,
    "incarnation": 1,
    "time_s": 6.0,
    "eval_reward": 0.625,
    "eval_right": 0.5,
    "eval_response_tokens": 7.0,
    "eval_problems": 16,
    "eval_answered": 16,
    "eval_seconds": 1.5,
    "eval_tokens": 112,
    "eval_share": 0.125,
    "eval_short": HOSTILE,
}


def test_evaluations_have_their_place_and_stay_in_the_metrics_in_order(tmp_path: Path):
    run_dir = make_run(tmp_path / "run")
    assert "Held-out problems" not in render_report(read_run(run_dir))
    path = run_dir / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text("\n".join([first, json.dumps(EVALUATION), second]) + "\n")
    page = pages.finish_run(RunDir(run_dir)).read_text()
    check_harmless(page)
    text = Tags(page).text
    for shown in ("Held-out problems", "0.625", "16 of 16", "12.5%"):
        assert shown in text
    lines = read_file(path).lines
    assert [line.get("eval", line.get("batch")) for line in lines] == [0, 0, 1]
    assert lines[1] == EVALUATION
    compared = render_comparison(compare_runs([read_run(run_dir), read_run(make_run(tmp_path / "other"))]))
    check_harmless(compared)
    assert "0.625 at version 1" in Tags(compared).text


def test_named_sets_have_their_table_and_their_rows_in_a_comparison(tmp_path: Path):
    hostile = HOSTILE.replace("/", "")  # which ends the name of a set
    runs = [make_run(tmp_path / name) for name in ("one", "other")]
    for run_dir, passed in zip(runs, (0.25, 0.75), strict=True):
        numbers = {"reward": passed, "pass@1": passed, "pass@4": 1.0, "problems": 16, "answered": 64}
        line = {**EVALUATION, **{f"eval/hard{hostile}/{key}": value for key, value in numbers.items()}}
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    page = render_report(read_run(runs[0]))
    check_harmless(page)
    assert "Held-out set hard" in Tags(page).text
    assert "16 answers" in Tags(page).text
    assert "pass@1 0.25 → 0.25" in Tags(page).text
    for shown in ("pass@4", "0.250", "64"):
        assert shown in Tags(page).text
    rows = compare_runs([read_run(run_dir) for run_dir in runs]).results["held-out problems"]
    (row,) = [row for row in rows if row.name.endswith("pass@1")]
    assert row.cells()[1] == ("0.750", "+0.500 better", "good")


# --- the head ---------------------------------------------------------------------------------------------------------


def test_the_head_says_how_a_run_ended_and_what_was_changed_in_it(tmp_path: Path):
    rundir = RunDir(make_run(tmp_path / "run"))
    resolved = resolve("tiny", [], ["trainer.lr=0.5", "run.batches=2"], {})
    rundir.config.write_text(render(resolved))
    note_start(rundir, resolved)
    with pytest.raises(Interrupted), noting_end(rundir):
        raise Interrupted("stopped", by="Ctrl-C")
    run = read_run(rundir.path)
    assert verdict(run)[:2] == ("open", "Stopped")
    assert verdict(run)[2].startswith("by Ctrl-C; 2/2 batches; go on with: ")
    rundir.lock()
    assert (verdict(read_run(rundir.path))[1], verdict(read_run(rundir.path, over=True))[1]) == ("Live", "Stopped")
    rundir.unlock()
    rundir.config.write_text(render(resolved).replace("preset tiny", "file"))  # as --resume writes it
    against, changed = changed_settings(read_run(rundir.path))
    assert (against, changed) == ("preset tiny", [["run.batches", "24", "2"], ["trainer.lr", "0.01", "0.5"]])
    known = dict(facts(run))
    assert known["model"] == "random:qwen3-tiny"
    assert f"python {platform.python_version()}" in known["versions"]
    assert platform.node() in known["machine"]
    rundir.starts.write_bytes(rundir.starts.read_bytes() + b'\n{"started": "torn')
    gpus = [GpuUse(number=0, name="H100", memory_mib=81559, workers=["train-0"]), GpuUse(number=1, name="H100")]
    note_start(rundir, resolved, gpus)
    assert len(read_starts(rundir)) == 2
    check_harmless(render_report(run))
    page = render_report(read_run(rundir.path))
    check_harmless(page)
    assert "H100, 80 GiB" in page
    assert "<td>train-0</td>" in page
    assert "<td>idle</td>" in page


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_a_difference_is_better_worse_or_noise():
    numbers = [Number(value=0.5, error=0.01), Number(value=0.6, error=0.01), Number(value=0.52, error=0.01), None]
    more = Row(name="reward", numbers=numbers, better=1).cells()
    assert more == [
        ("0.500", "", ""),
        ("0.600", "+0.100 better", "good"),
        ("0.520", "+0.020 noise", "same"),
        ("", "", ""),
    ]
    assert Row(name="truncated", numbers=numbers, better=-1, style=".0%").cells()[1] == ("60%", "+10.0 pp worse", "bad")
    assert Row(name="entropy", numbers=numbers).cells()[1] == ("0.600", "+0.100", ""), "neither is better"


def test_runs_of_different_length_are_compared_at_the_same_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    runs = [make_run(tmp_path / name) for name in ("short", "long")]
    lines = [{"batch": batch, "version": batch + 1, "reward": batch / 10} for batch in range(9)]
    for run, count in zip(runs, (4, 9), strict=True):
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:count]))
    comparison = compare_runs([read_run(run) for run in runs])
    reward = comparison.results["reward"][0]
    assert (comparison.at, [number and number.value for number in reward.numbers]) == (4, [0.25, 0.25])
    more = [make_run(tmp_path / f"{'x' * 40}{number}") for number in range(4)]
    pages.compare([*runs, *more], tmp_path / "comparison.html")
    printed = capsys.readouterr().out.splitlines()[:-1]
    assert max(map(len, printed)) <= 100
    assert sum("short" in line for line in printed) == 2, "six runs are two tables, each beside the first run"


# --- samples ----------------------------------------------------------------------------------------------------------


def keep(path: Path, *rows: str) -> None:
    keeper = SampleKeeper(path)
    for row in rows:
        keeper.keep({"row": row, "response": HOSTILE})


def test_samples_are_kept_once_and_few_of_a_batch(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    keep(path, "0/0/0", "0/1/0", "0/1/0", "0/2/0")
    keep(path, "0/1/0", "0/3/0", "1/0/0")  # the orchestrator was started again
    assert [sample["row"] for sample in read_samples(path)] == ["1/0/0", "0/1/0", "0/0/0"]
    assert MAX_OF_BATCH == 2


def test_a_torn_line_of_samples_is_left_out(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    keep(path, "0/0/0")
    path.write_text(path.read_text() + '{"row": "0/1')
    assert [sample["row"] for sample in read_samples(path)] == ["0/0/0"]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_chart_leaves_out_what_is_no_number():
    series = series_of("loss", [{"batch": 0, "loss": float("nan")}, {"batch": 1, "loss": 2.0}, {"batch": 2}], "loss")
    assert series.points == [(2.0, 2.0)], "people count batches from 1"
    assert draw_chart("loss", [series]) is not None
    assert draw_chart("loss", [Series(name="loss", points=())]) is None


@pytest.mark.parametrize("values", [(0.0, 0.0), (1e-12, 2e-12), (-1e9, 1e9), (3.0,)])
def test_a_chart_has_an_axis_for_any_range(values: tuple[float, ...]):
    chart = draw_chart("x", [Series(name="x", points=list(enumerate(values, 1)))])
    assert chart is not None
    (axes,) = chart.axes
    low, high = axes.get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 8
    assert low <= min(values) <= max(values) <= high


def test_a_long_title_ends_within_the_picture():
    chart = draw_chart("share of tokens " * 9, [Series(name="x", points=[(1, 1.0)])])
    assert chart is not None
    title = chart.texts[0]
    assert title.get_text().endswith("…")
    assert title.get_window_extent(FigureCanvasAgg(chart).get_renderer()).x1 < chart.bbox.x1


def test_a_legend_stays_within_its_picture_however_unequal_the_names():
    names = ("a", "b", "c", "data.mix.a_part_with_a_long_name", "d", "e")
    chart = draw_chart("x", [Series(name=name, points=[(1, 1.0), (2, 3.0)]) for name in names])
    assert chart is not None
    to_svg(chart)
    legend = chart.axes[0].get_legend()
    assert legend is not None
    room, whole = legend.get_window_extent(), chart.bbox
    assert whole.x0 <= room.x0 < room.x1 <= whole.x1
    assert room.y1 <= whole.y1


def test_a_picture_of_the_same_numbers_is_the_same_file_and_its_text_is_text():
    def drawn() -> str:
        names = ("_hidden $\\frac{1}{0}$", "<b>\u4e2d\x1b", "third & last")
        chart = draw_chart("$x$", [Series(name=name, points=[(1, 1.0), (2, 3.0)]) for name in names])
        assert chart
        return to_svg(chart)

    svg = drawn()
    assert svg == drawn()
    assert svg.startswith("<svg")
    words = {element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")}
    assert {"$x$", "_hidden $\\frac{1}{0}$", "<b>\u4e2d", "third & last", "batch 1"} <= words


def test_a_picture_is_drawn_without_a_word_where_the_home_cannot_be_written(tmp_path: Path):
    """As in a container with a read-only file system: matplotlib keeps its list of fonts in a temporary directory."""
    draw = (
        "from orchestrator.observability.report.drawing import Series, draw_chart, to_svg\n"
        "print(to_svg(draw_chart('loss', [Series(name='loss', points=[(1, 2), (2, 3)])]))[:4])"
    )
    environment = {**os.environ, "HOME": "/proc/none", "TMPDIR": str(tmp_path)}
    for name in ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", draw], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("<svg\n", "")
    assert list(tmp_path.iterdir()) == []
