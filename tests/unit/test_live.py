"""What reaches the terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from orchestrator.core.model.settings import CoreSettings
from orchestrator.observability.live import PlainView, TableView, batch_line, mismatch_line, progress
from orchestrator.terminal_text import printable
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import RankerJudged


def test_a_batch_is_one_line_of_what_is_known():
    line = {"batch": 2, "reward": 0.25, "right": 0.5, "seconds": 4.0}
    assert batch_line(line, 40) == "batch 3/40  reward 0.250  right 50%  4.0 s"


def test_a_mismatch_beyond_the_limit_is_a_warning_that_says_by_how_much():
    line = {"batch": 2, "logprob_mismatch": 0.25, "logprob_mismatch_max": 3.0, "staleness": 1.0}
    assert mismatch_line(line, 0.25) == mismatch_line(line, 0.0) == mismatch_line({"batch": 0}, 0.1) == ""
    assert "batch 3" in mismatch_line(line, 0.2)
    assert "differ by 0.250 on average (largest 3.00, staleness 1.00)" in mismatch_line(line, 0.2)


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
    view.note("model x")
    view.batch({"batch": 0})
    assert capsys.readouterr().out == "model x\nbatch 1/3\n"


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
