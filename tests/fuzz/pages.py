"""Hostile text through everything that shows a run: its report, a comparison, its trace, and the live page's JSON.

An input is the strings of a run: names, reasons, rewards' components, answers, configuration. The markup of a page is
that of the same run with plain strings: no string becomes a tag, an attribute or a link, and JSON stays JSON.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import msgspec

from orchestrator.config.schema import to_toml
from orchestrator.journal import Journal
from orchestrator.observability.http.status import LaneHistory
from orchestrator.observability.report.comparison import compare_runs
from orchestrator.observability.report.drawing import write_trace
from orchestrator.observability.report.pages import render_comparison, render_report
from orchestrator.observability.report.record import RunRecord, read_run
from tests.fuzz.harness import Check, CheckFailedError, Target
from tests.fuzz.hostile import packed, text
from transport.contracts.messages import (
    Event,
    GroupScored,
    JournalRecord,
    RolloutFailed,
    RolloutFinished,
    StepDone,
    TrainerReady,
    WorkerJoined,
    WorkerLost,
    WorkerStatus,
)
from transport.contracts.types import (
    PROTOCOL_VERSION,
    FinishReason,
    GroupId,
    RowId,
    WeightIdentity,
    WorkerId,
    WorkerKind,
)
from transport.process.http import answer

NUM_STRINGS = 12
MARKUP = (
    "<",
    ">",
    '"',
    "'",
    "&",
    "</pre>",
    "</text>",
    "</title>",
    "<svg onload=alert(1)>",
    "<a href=javascript:alert(1)>",
    "-->",
    "&lt;",
    "&#60;",
)
W0, W1 = (WeightIdentity(epoch=1, version=version) for version in (0, 1))


class _Markup(HTMLParser):
    """Every tag of a page with the names of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[tuple[str, tuple[str, ...]]] = set()
        self.values: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(sorted({name for name, _ in attrs}))))
        self.values += [
            value or "" for name, value in attrs if name in ("href", "src", "action", "style", "xlink:href")
        ]

    def handle_comment(self, data: str) -> None:
        self.tags.add(("comment", ()))


def _write_run(run_dir: Path, strings: list[str]) -> RunRecord:
    """A run of one batch that names and says what ``strings`` have."""
    name, reason, part, prompt, response, finish, key, config, row, kind, why, word = strings
    run_dir.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[\x00-\x20\x7f]", "_", name)[:150]  # no other name of a worker is taken
    worker, trainer = WorkerId(f"generate-{name}.1"), WorkerId("train-0.1")
    events: list[Event] = [
        WorkerJoined(worker_id=worker, kind=WorkerKind.GENERATE, capacity=2),
        TrainerReady(worker_id=trainer, weights=W0),
        RolloutFinished(
            row_id=RowId("0/0/0"),
            worker_id=worker,
            response_tokens=9,
            finish_reason=FinishReason.STOP,
            oldest=W0,
            newest=W0,
            engine_s=1.0,
        ),
        RolloutFailed(group_id=GroupId("0/1"), worker_id=worker, samples=(0,), reason=why),
        GroupScored(group_id=GroupId("0/0"), rewards=(0.5,), response_tokens=(9,), signal=True, components={part: 1.0}),
        StepDone(batch=0, weights=W1, num_rows=1, num_tokens=9, metrics={key: 1.0}),
        WorkerLost(worker_id=worker, reason=reason),
    ]
    journal, _ = Journal.open(run_dir / "journal")
    journal.append([JournalRecord(seq=seq, now_s=float(seq), event=event) for seq, event in enumerate(events, 1)])
    journal.close()
    line = {"batch": 0, "version": 1, "incarnation": 1, "time_s": 6.0, "reward": 0.5, part: 1.0, key: 2.0}
    evaluation = {
        "eval": 0, "version": 1, "incarnation": 1, "time_s": 6.5, "eval_reward": 0.5, "eval_problems": 2,
        "eval_answered": 1, "eval_tokens": 4, "eval_seconds": 1.0, "eval_share": 0.1, "eval_short": word,
    }  # fmt: skip
    (run_dir / "metrics.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(evaluation)}\n", encoding="utf-8")
    (run_dir / "config.toml").write_text(f"[run]\nname = {to_toml(config)}\n", encoding="utf-8")
    sample = {
        "row": f"0/0/0{row}",
        "reward": kind,
        "prompt": prompt,
        "response": response,
        "components": {part: kind},
        "finish": finish,
    }
    (run_dir / "samples.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    return read_run(run_dir)


@contextmanager
def _opened() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="streamrl-fuzz-") as name:
        directory = Path(name)
        plain = _write_run(directory / "plain", [f"plain{number}" for number in range(NUM_STRINGS)])
        pages = _Markup(render_report(plain)), _Markup(render_comparison(compare_runs([plain, plain])))
        yield lambda content: check(content, directory, plain, pages)


def check(content: bytes, directory: Path, plain: RunRecord, pages: tuple[_Markup, _Markup]) -> None:
    strings = msgspec.msgpack.decode(content, type=list[str])
    run_dir = directory / "hostile"
    for path in (run_dir / "journal").glob("*"):
        path.unlink()
    run = _write_run(run_dir, strings)
    for page, expected in zip((render_report(run), render_comparison(compare_runs([plain, run]))), pages, strict=True):
        markup = _Markup(page)
        if more := markup.tags - expected.tags:
            raise CheckFailedError(f"a string became markup: {sorted(more)[:3]}")
        if any("script:" in value or "url(" in value for value in markup.values):
            raise CheckFailedError("a string became a link or a style")
        if odd := {char for char in page if not char.isprintable()} - {"\n"}:
            raise CheckFailedError(f"control characters: {sorted(odd)!r}")
    write_trace(run.timeline, directory / "trace.json")
    json.loads((directory / "trace.json").read_text(encoding="utf-8"))
    _check_live(strings)


def _check_live(strings: list[str]) -> None:
    """What the live page fetches: JSON by its type, in which the strings are strings."""
    lanes = LaneHistory()
    worker_id = WorkerId(f"generate-{strings[0]}.1")
    status = WorkerStatus(
        worker_id=worker_id,
        kind=WorkerKind.GENERATE,
        host=strings[1],
        pid=1,
        protocol=PROTOCOL_VERSION,
        doing=strings[2],
    )
    lanes.note({worker_id: status}, 1.0)
    response = answer({"lanes": lanes.as_dict(), "strings": strings})
    if response.media_type != "application/json" or json.loads(bytes(response.body))["strings"] != strings:
        raise CheckFailedError("the live page is told something else")


def make(random: Random) -> bytes:
    def string() -> str:
        parts = [random.choice((text(random), random.choice(MARKUP))) for _ in range(random.choice((1, 2, 4)))]
        return "".join(parts)

    return packed([string() for _ in range(NUM_STRINGS)])


TARGET = Target(name="pages", make=make, opened=_opened, num_inputs=6)
