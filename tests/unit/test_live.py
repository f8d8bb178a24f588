"""What reaches the terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from orchestrator.core.model.settings import CoreSettings
from orchestrator.errors import printable
from orchestrator.observability.http.status import broker_fields
from orchestrator.observability.live import (
    PlainView,
    TableView,
    TimeLeft,
    batch_line,
    evaluation_lines,
    progress,
)
from orchestrator.observability.metrics import mismatch_line, warnings_of
from tests.fakes.command_line import environment
from tests.fakes.pipeline_world import PipelineWorld
from transport.broker.reach import Away
from transport.contracts.messages import RankerJudged


def test_a_batch_is_one_line_of_what_is_known():
    line = {"batch": 2, "reward": 0.25, "right": 0.5, "seconds": 4.0}
    assert batch_line(line, 40, left_s=148.0) == "batch 3/40   reward 0.250  right  50%  4.0 s  2 min 28 s left"
    assert batch_line({"batch": 2, "right_with_filtered": 0.75}) == "batch 3  right-with-filtered  75%"


def test_a_batch_has_the_users_own_components_and_fits_100_columns():
    numbers = {"loss": -0.01, "grad_norm": 0.0, "kl": 0.01, "tokens_per_s": 9999.0, "response_tokens": 512.0}
    line = {"batch": 9, "reward": 0.9, "too_short": 0.25, "no_signal": 0.5, "truncated": 0.0, "seconds": 4.0, **numbers}
    ended = {"bubble_trainer_skew_s": 1.0, "trainer_present_s": 9.0, "ranker_tau": 0.1}
    said = batch_line({**line, "staleness": 1.0, **ended}, 1000, left_s=4000.0)
    assert said.startswith("batch 10/1000    reward 0.900  too-short 0.25  no signal 50%  ")
    assert said.endswith("  grad 0.00  1 h 6 min left")
    assert 80 < len(said) <= 100
    assert not {"cut", "bubble", "tau", "present"} & set(said.replace("-", " ").split())


def test_an_evaluation_has_a_line_for_each_of_its_sets():
    line = {"eval": 0, "version": 4, "eval_reward": 0.25, "eval_problems": 20, "eval_answered": 20}
    assert evaluation_lines(line) == ["evaluation of version 4  reward 0.250  20 of 20 problems"]
    plain = {"eval/plain/reward": 0.5, "eval/plain/right": 0.5, "eval/plain/problems": 4}
    hard = {"eval/hard/reward": 0.125, "eval/hard/pass@1": 0.125, "eval/hard/pass@2": 0.25, "eval/hard/pass@4": 0.5}
    assert evaluation_lines({**line, **plain, **hard}) == [
        "evaluation of version 4  reward 0.250  20 of 20 answers",
        "  plain  reward 0.500  right 50%  4 problems",
        "  hard  reward 0.125  pass@1 12%  pass@4 50%",
    ]


def test_the_time_left_is_that_of_the_last_batches():
    left = TimeLeft()
    left.add({"batch": 0, "seconds": 100.0})
    assert left.left_s is None
    left.num_batches = 21
    for batch in range(1, 11):
        left.add({"batch": batch, "seconds": 2.0})
    assert left.left_s == 20.0


def test_a_mismatch_beyond_the_limit_is_a_warning_that_says_by_how_much():
    line = {"batch": 2, "logprob_mismatch": 0.25, "logprob_mismatch_max": 3.0, "staleness": 1.0}
    assert mismatch_line(line, 0.25) == mismatch_line(line, 0.0) == mismatch_line({"batch": 0}, 0.1) == ""
    assert "batch 3" in mismatch_line(line, 0.2)
    assert "differ by 0.250 on average (largest 3.00, staleness 1.00)" in mismatch_line(line, 0.2)
    assert (warnings_of(line, 0.2), warnings_of(line, 0.25)) == ([mismatch_line(line, 0.2)], [])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"grad_norm": 0.0, "groups_trained": 8, "no_signal": 1.0}, "batch 3 carries no gradient: the rewards within"),
        ({"grad_norm": 0.0, "groups_filtered": 16}, "all of its groups were dropped"),
        ({"rows_in_steps": 0, "groups_filtered": 16}, "all of its groups were dropped"),
        ({"grad_norm": 0.0, "groups_trained": 8, "no_signal": 0.5, "computed_tokens": 9}, "although rewards differ"),
        ({"grad_norm": 0.0, "groups_trained": 8, "no_signal": 0.5, "computed_tokens": 0}, "above algorithm.ce_above"),
        ({"groups_trained": 8, "skipped_nonfinite": 1.0}, "batch 3 did not take 1 of its optimizer steps: loss"),
    ],
)
def test_a_batch_without_a_gradient_is_a_warning_that_says_why(line: dict[str, float], why: str):
    (warning,) = warnings_of({"batch": 2, **line}, 0.1)
    assert why in warning
    well = {"rows_in_steps": 8, "grad_norm": 0.1, "skipped_nonfinite": 0.0}
    assert warnings_of({"batch": 2, **line, **well}, 0.1) == []
    assert warnings_of({"batch": 2, "rows_in_steps": 8}, 0.1) == [], "an emulated trainer has no gradient"


def test_terminal_escapes_of_a_model_are_stripped():
    assert printable("a\x1b[31mred\x07\nb\x9b") == "a[31mred\nb"


def test_how_far_a_run_is_says_what_it_does():
    assert progress({"trained_version": 3, "num_batches": 9}) == "trained 3/9"
    assert progress({"trained_version": 0, "num_batches": 9, "num_requests": 4, "requests": {"4": {}}}) == (
        "requests 4, 1 of them open"
    )
    assert progress({"trained_version": 3, "num_batches": 9, "paused": True}) == "trained 3/9  paused"
    assert progress({"stop_reason": "drain was asked for"}) == "trained 0/0  stopping"


def test_plain_lines_go_out_at_once(capsys: pytest.CaptureFixture[str]):
    view = PlainView()
    view.status({"num_batches": 3})
    for restarts in (1, 1):
        view.status({"num_batches": 3, "restarts": restarts, "queues": {"dead": 2}})
    view.note("model x")
    view.batch({"batch": 0})
    assert capsys.readouterr().out == "1 restart  2 dead letters\nmodel x\nbatch 1/3\n"


@pytest.mark.parametrize("gone", ["terminal", "pager"])
def test_a_reader_that_goes_away_ends_nothing(gone: str):
    """Written before, while, and after: what is left in a buffer must not spoil the exit code."""
    code = (
        "import sys; from orchestrator.observability.live import open_view; view = open_view(plain=True);"
        "sys.stdin.readline(); [view.note('x' * 9000) for _ in range(3)]; view.close();"
        "print('more'); print('more', file=sys.stderr); sys.exit(7)"
    )
    ours, theirs = pty.openpty() if gone == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment()
    )
    os.close(theirs)
    os.close(ours)
    process.communicate(b"go\n", timeout=60)
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (RankerJudged(trusted=False), "nothing judged yet"),
        (
            RankerJudged(trusted=False, num_groups=16),
            "recall 0.00/0.00/0.00 at 20/10/5% of 16 groups, too few to judge",
        ),
        (RankerJudged(trusted=False, num_groups=300, measured=True), "of 300 groups, not trusted: plans are even"),
        (RankerJudged(trusted=True, num_groups=16), "of 16 groups, dispatch may rely on it"),
    ],
)
def test_the_table_shows_whether_the_ranker_is_trusted(judged: RankerJudged, words: str):
    world = PipelineWorld(CoreSettings(num_batches=6, groups_per_batch=4, group_size=2))
    world.tell(judged)
    status = msgspec.to_builtins(world.state.view())
    screen = io.StringIO()
    view = TableView(Console(file=screen, force_terminal=True, width=200))
    view.status({**status, "wait": None, "workers": []})
    view.close()
    assert words in screen.getvalue()


def headline(**changes: object) -> list[str]:
    worker = {
        "worker": "train-0.1",
        "kind": "train",
        "doing": "training",
        "since_s": 1.0,
        "running": 0,
        "waiting": 0,
        "weights": "",
    }
    status = {
        "run": "r",
        "trained_version": 3,
        "num_batches": 9,
        "elapsed_s": 70.0,
        "workers": [worker],
    }
    screen = io.StringIO()
    view = TableView(Console(file=screen, force_terminal=True, width=100, no_color=True))
    view.batch({"batch": 2, "seconds": 20.0})
    view.status({**status, **changes})
    view.close()
    return [line.strip() for line in screen.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "healthy"),
        ({"workers": []}, "starting"),
        ({"paused": True}, "paused"),
        ({"stop_reason": "drained"}, "ending"),
        (
            {"blocked": {"stage": "scoring", "waits_for": "scores", "owner": "score-0", "still_s": 70.0}},
            "blocked",
        ),
    ],
)
def test_the_first_line_of_the_table_says_how_the_run_is(changes: dict[str, object], state: str):
    (first,) = [line for line in headline(**changes) if "trained 3/9" in line]
    assert state in first
    assert first.endswith("1 min 10 s, 2 min 0 s left") or "\x1b" in first


def test_what_went_wrong_is_in_the_headline():
    shown = "\n".join(headline(num_lost=2, restarts=1, queues={"dead": 3}, given_up="it \x1braised"))
    assert "2 workers lost  1 restart  3 dead letters" in shown
    assert "given up: it raised" in shown


ASIDE = {
    "newest": {"epoch": 1, "version": 17},
    "generation": [
        {"worker_id": "generate-0.1", "aside_s": 90.0, "load_problem": "peer tcp://a:7400/x is unavailable: timed out"},
        {"worker_id": "generate-1.1", "aside_s": None, "load_problem": ""},
    ],
}


def test_a_worker_that_stands_aside_is_said_with_since_when_and_why(capsys: pytest.CaptureFixture[str]):
    said = (
        "generate-0.1 stands aside since 1 min 30 s: it cannot load weights e1v17 "
        "(peer tcp://a:7400/x is unavailable: timed out); it is asked again"
    )
    assert said in " ".join(headline(**ASIDE))
    view = PlainView()
    for _ in range(2):
        view.status(ASIDE)
    view.status({**ASIDE, "generation": []})
    assert capsys.readouterr().out.splitlines() == [said, "generate-0.1 stands aside no more"]


def test_a_broker_that_is_away_is_how_the_run_is():
    away = Away(address="redis:6379", seconds=12.0, reason="name does not resolve", until_s=60.0)
    shown = " ".join(headline(**broker_fields(away)))
    assert "broker away" in shown
    assert "broker waits for broker redis:6379 to answer, until 60 s" in shown
    assert "(name does not resolve)" in shown
