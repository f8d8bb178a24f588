"""From the events of a run to spans, a trace that opens, and a picture."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from matplotlib.colors import same_color

from orchestrator.config.run_directory import journal_of
from orchestrator.errors import ConfigError
from orchestrator.journal import Journal
from orchestrator.observability.report import pages
from orchestrator.observability.report.drawing import (
    BAND,
    BUSY,
    Section,
    draw_timeline,
    section,
    sections,
    to_svg,
    trace_events,
    waits,
    write_png,
    write_trace,
)
from orchestrator.observability.report.record import newest_records
from orchestrator.observability.report.spans import (
    NO_BATCH,
    SCORING,
    TRAINER,
    Presence,
    Span,
    SpanKind,
    Timeline,
    Trained,
    build_timeline,
)
from transport.contracts.messages import (
    CheckpointSaved,
    Event,
    GroupScored,
    JournalRecord,
    RolloutFailed,
    RolloutFinished,
    RoundDone,
    RunResumed,
    StepDone,
    TrainerReady,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
)
from transport.contracts.types import (
    FinishReason,
    GroupId,
    RowId,
    WeightIdentity,
    WorkerId,
    WorkerKind,
    evaluation_id,
    row_id,
)

W0, W1 = (WeightIdentity(epoch=1, version=version) for version in (0, 1))
WORKER = WorkerId("generate-0.1")
HOSTILE = "<script>alert(1)</script>\x1b[2J"


def finished(sample: int, engine_s: float, queued_s: float = 0.0) -> RolloutFinished:
    return RolloutFinished(
        row_id=RowId(f"0/0/{sample}"),
        worker_id=WORKER,
        response_tokens=7,
        finish_reason=FinishReason.STOP,
        oldest=W0,
        newest=W0,
        engine_s=engine_s,
        queued_s=queued_s,
    )


def long_run(batches: int) -> Timeline:
    """Batches of one second each; number 100 takes ten."""
    at_s = accumulate((10.0 if batch == 100 else 1.0 for batch in range(1, batches + 1)), initial=2.0)
    ends = [Trained(incarnation=1, batch=batch, at_s=each) for batch, each in enumerate(list(at_s)[1:])]
    presence = Presence(track=TRAINER, start_s=2.0, end_s=ends[-1].at_s)
    return Timeline(spans=(), marks=(), presences=[presence], trained=ends, end_s=ends[-1].at_s)


def test_a_long_run_is_drawn_in_means_and_some_batches_as_they_were():
    assert [part.per_column for part in sections(long_run(20))] == [0]
    timeline = long_run(300)
    whole, *close = sections(timeline)
    assert (whole.per_column, len(whole.edges)) == (3, 101)
    assert [part.name for part in close] == ["batches 1 to 8", "batches 96 to 103", "batches 293 to 300"]
    assert [part.per_column for part in close] == [0, 0, 0]
    part = section(timeline, 7, 7)
    assert (part.edges[0], part.edges[-1]) == (8.0, 9.0), "from the end of the one before to its own"
    words = {each.text for each in ElementTree.fromstring(to_svg(draw_timeline(timeline, part=whole))).iter()}
    assert {"batch 20", "300", "all batches: a column is the mean of 3"} <= words
    with pytest.raises(ConfigError, match="no batch from 301 to 310"):
        section(timeline, 301, 310)


def test_a_column_is_as_full_as_its_worker_was_there():
    """One column of ten seconds, of which its worker was there for five, and busy for all of them."""
    late = Presence(track=WORKER, start_s=5.0, end_s=10.0)
    sample = Span(track=WORKER, kind=SpanKind.SAMPLE, start_s=5.0, end_s=10.0, name="0/0/0 stop", batch=0)
    timeline = Timeline(spans=[sample], marks=(), presences=[late], trained=(), end_s=10.0)
    part = Section(name="", edges=[0.0, 10.0], trained=(), per_column=1)
    boxes = draw_timeline(timeline, part=part).axes[0].patches
    (busy,) = [box.get_path().get_extents() for box in boxes if same_color(box.get_facecolor(), BUSY)]
    assert busy.height == pytest.approx(BAND / 2)


def test_numbers_of_batches_do_not_lie_on_each_other():
    ends = [Trained(incarnation=1, batch=batch, at_s=100.0 + batch / 100) for batch in range(20)]
    presence = Presence(track=TRAINER, start_s=0.0, end_s=101.0)
    timeline = Timeline(spans=(), marks=(), presences=[presence], trained=ends, end_s=101.0)
    words = {each.text for each in ElementTree.fromstring(to_svg(draw_timeline(timeline))).iter()}
    assert "batch 1" in words
    assert not {"2", "3", "19"} & words


@pytest.mark.parametrize("wrong", ["x", "0", "8-7", "1-2-3"])
def test_a_range_of_batches_is_one(tmp_path: Path, wrong: str):
    Journal.open(tmp_path / "journal")
    with pytest.raises(ConfigError, match="--batches"):
        pages.timeline(tmp_path, svg=True, png=False, out=None, batches=wrong)


def records(*events: tuple[float, Event]) -> list[JournalRecord]:
    return [JournalRecord(seq=seq, now_s=now_s, event=event) for seq, (now_s, event) in enumerate(events, 1)]


STEP = StepDone(batch=0, weights=W1, num_rows=2, num_tokens=14, stepped_s=0.5, metrics={"publish_s": 0.5})
RUN = records(
    (1.0, WorkerJoined(worker_id=WORKER, kind=WorkerKind.GENERATE, capacity=4)),
    (1.0, WorkerJoined(worker_id=WorkerId("train-0.1"), kind=WorkerKind.TRAIN)),
    (2.0, TrainerReady(worker_id=WorkerId("train-0.1"), weights=W0)),
    (5.0, finished(0, 2.0, queued_s=1.0)),
    (6.0, finished(1, 3.0)),
    (6.5, GroupScored(group_id=GroupId("0/0"), rewards=(1.0, 0.0), response_tokens=(7, 7), signal=True)),
    (8.0, RoundDone(round_id="0.0", num_rows=2, num_tokens=14, busy_s=1.0)),
    (9.0, STEP),
    (9.5, CheckpointSaved(weights=W1, cursor="9-0", path="somewhere", seconds=0.5)),
    (10.0, WeightsLoaded(worker_id=WORKER, weights=W1, seconds=0.5)),
    (11.0, RolloutFailed(group_id=GroupId("1/0"), worker_id=WORKER, samples=(0,), reason=HOSTILE)),
)


def times(timeline: Timeline, kind: SpanKind) -> list[tuple[str, float, float]]:
    return [(span.track, span.start_s, span.end_s) for span in timeline.spans if span.kind is kind]


def test_spans_begin_where_the_events_say():
    timeline = build_timeline(RUN)
    assert times(timeline, SpanKind.SAMPLE) == [(WORKER, 3.0, 5.0), (WORKER, 3.0, 6.0)]
    assert times(timeline, SpanKind.SCORING) == [(SCORING, 6.0, 6.5)]
    assert times(timeline, SpanKind.ROUND) == [(TRAINER, 7.0, 8.0)]
    assert times(timeline, SpanKind.STEP) == [(TRAINER, 8.0, 8.5)]
    assert times(timeline, SpanKind.PUBLISH) == [(TRAINER, 8.5, 9.0)]
    assert times(timeline, SpanKind.CHECKPOINT) == [(TRAINER, 9.0, 9.5)]
    assert times(timeline, SpanKind.LOAD) == [(WORKER, 9.5, 10.0)]
    assert [(trained.batch, trained.at_s) for trained in timeline.trained] == [(0, 9.0)]
    assert timeline.end_s == 11.0


def test_an_answer_of_an_evaluation_is_work_of_no_batch():
    group = evaluation_id(0, 3)
    answer = msgspec.structs.replace(finished(0, 2.0), row_id=row_id(group, 0))
    scored = GroupScored(group_id=group, rewards=(1.0,), response_tokens=(7,), signal=False)
    timeline = build_timeline([*RUN[:3], *records((4.0, answer), (4.5, scored))])
    assert times(timeline, SpanKind.SAMPLE) == [(WORKER, 2.0, 4.0)]
    assert times(timeline, SpanKind.SCORING) == [(SCORING, 4.0, 4.5)]
    assert {span.batch for span in timeline.spans} == {NO_BATCH}
    assert any("eval0/3/0" in event["name"] for event in trace_events(timeline))


def test_samples_that_run_together_get_lanes_of_their_own():
    timeline = build_timeline(records((5.0, finished(0, 4.0)), (5.0, finished(1, 2.0)), (9.0, finished(2, 3.0))))
    assert [(span.start_s, span.lane) for span in timeline.spans] == [(1.0, 0), (3.0, 1), (6.0, 0)]


def test_what_is_told_again_counts_once():
    again = records(*((r.now_s, r.event) for r in RUN), *((12.0, RUN[told].event) for told in (2, 5, 6, 7, 8)))
    timeline = build_timeline(again)
    assert len(timeline.trained) == 1
    for kind in (SpanKind.ROUND, SpanKind.CHECKPOINT, SpanKind.SCORING, SpanKind.PUBLISH):
        assert len(times(timeline, kind)) == 1


def test_a_lost_worker_is_present_until_it_was_lost():
    timeline = build_timeline(
        [*RUN[:1], JournalRecord(seq=2, now_s=4.0, event=WorkerLost(worker_id=WORKER, reason=""))]
    )
    (presence,) = timeline.presences
    assert (presence.start_s, presence.end_s, presence.capacity) == (1.0, 4.0, 4)


def test_what_an_interruption_cost_is_known():
    """The broker and a worker died; the run was resumed, and its first batch was trained again."""
    replaced = (WorkerId("generate-0.2"), WorkerId("train-0.2"))
    told: list[tuple[float, Event]] = [
        (20.0, RunResumed()),
        (21.0, WorkerJoined(worker_id=replaced[0], kind=WorkerKind.GENERATE, capacity=4)),
        (30.0, WorkerLost(worker_id=WORKER, reason="its lease ran out")),
        (31.0, TrainerReady(worker_id=replaced[1], weights=W0)),
        (32.0, msgspec.structs.replace(finished(0, 1.0), worker_id=replaced[0])),
        (33.0, msgspec.structs.replace(STEP, weights=msgspec.structs.replace(STEP.weights, epoch=2))),
        (34.0, WorkerLost(worker_id=replaced[0], reason="its process ended")),
        (36.0, WorkerJoined(worker_id=WorkerId("generate-0.3"), kind=WorkerKind.GENERATE, capacity=4)),
        (40.0, WorkerLost(worker_id=WorkerId("generate-0.3"), reason="it was told to leave", left=True)),
    ]
    timeline = build_timeline(records(*((r.now_s, r.event) for r in RUN), *told))
    ends = {presence.track: presence.end_s for presence in timeline.presences if presence.track != TRAINER}
    assert ends == {WORKER: 20.0, replaced[0]: 34.0, "generate-0.3": 40.0}
    assert [
        (mark.name, mark.back_s) for mark in timeline.marks if mark.at_s >= 20.0 and " joined" not in mark.name
    ] == [
        ("run resumed", 13.0),
        ("generate-0.1 lost: its lease ran out", None),
        ("ready at e1v0", None),
        ("generate-0.2 lost: its process ended", 2.0),
        ("generate-0.3 left: it was told to leave", None),
    ]
    assert (timeline.num_again, timeline.batches_again) == (1, [0])


def test_a_step_between_mini_batches_lies_before_the_next_round():
    one = RoundDone(round_id="0.0", num_rows=1, num_tokens=1, busy_s=1.0)
    two = RoundDone(round_id="0.1", num_rows=1, num_tokens=1, busy_s=1.0, stepped_s=0.5)
    timeline = build_timeline(records((1.0, one), (3.0, two)))
    assert times(timeline, SpanKind.STEP) == [(TRAINER, 1.5, 2.0)]


def test_events_that_come_together_keep_their_lengths():
    round_done = RoundDone(round_id="0.0", num_rows=1, num_tokens=1, busy_s=2.0)
    timeline = build_timeline(records((9.0, round_done), (9.0, STEP)))
    assert times(timeline, SpanKind.ROUND) == [(TRAINER, 6.0, 8.0)]
    assert times(timeline, SpanKind.STEP) == [(TRAINER, 8.0, 8.5)]
    assert times(timeline, SpanKind.PUBLISH) == [(TRAINER, 8.5, 9.0)]


def test_waits_are_named_by_their_cause():
    found = [(wait.track, wait.start_s, wait.end_s, wait.name) for wait in waits(build_timeline(RUN))]
    assert (TRAINER, 2.0, 7.0, "wait: pipeline") in found
    assert (WORKER, 6.0, 11.0, "wait: pipeline") in found


def test_the_trace_is_whole(tmp_path: Path):
    path = tmp_path / "trace.json"
    write_trace(build_timeline(RUN), path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(named.values()) == {"orchestrator", "trainer", "scoring", WORKER}
    assert all(event["pid"] in named for event in events)
    sample = next(event for event in events if event["name"] == "0/0/0 stop")
    assert (sample["ts"], sample["dur"], sample["args"]) == (3_000_000, 2_000_000, {"tokens": 7, "queued_s": 1.0})
    spans = sorted((e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X")
    for (pid, tid, ts, dur), (next_pid, next_tid, next_ts, _) in pairwise(spans):
        assert (pid, tid) != (next_pid, next_tid) or ts + dur <= next_ts, "spans of one thread overlap"


def test_a_trace_of_nothing_is_a_trace(tmp_path: Path):
    write_trace(build_timeline([]), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_drawing_is_well_formed_and_shows_every_track():
    svg = to_svg(draw_timeline(build_timeline(RUN), title=f"run {HOSTILE}"))
    words = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {WORKER, "scoring", "trainer", "skew bubble"} <= set(words)
    hints = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("title")]
    assert "round 0.0: 1.000 s at 7.00 s" in hints
    assert "<script" not in svg
    assert "\x1b" not in svg
    assert "url(" not in svg, "several pictures stand in one page: none refers to an id"


def test_the_drawing_of_an_empty_run_is_well_formed():
    ElementTree.fromstring(to_svg(draw_timeline(build_timeline([]))))


def test_a_png_is_drawn(tmp_path: Path):
    image_module = pytest.importorskip("PIL.Image")
    write_png(draw_timeline(build_timeline(RUN)), tmp_path / "timeline.png")
    with image_module.open(tmp_path / "timeline.png") as image:
        assert image.width == 2400
        assert len(image.getcolors(1 << 20)) > 5


# --- the command ------------------------------------------------------------------------------------------------------


def written_journal(run_dir: Path) -> Path:
    journal, _ = Journal.open(run_dir / "journal")
    journal.append(RUN)
    journal.close()
    (segment,) = (run_dir / "journal").glob("segment-*.log")
    return segment


def test_the_command_writes_what_was_asked_for(tmp_path: Path):
    written_journal(tmp_path / "run")
    assert pages.timeline(tmp_path / "run", svg=True, png=False, out=tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["timeline.svg", "trace.json"]


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no run"):
        build_timeline(newest_records(journal_of(tmp_path)))
