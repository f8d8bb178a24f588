"""``streamrl-orchestrator timeline``: a run's trace and picture, from its journal alone.

Works on a run that is over, that crashed, and on a live one: the journal is read as far as it is whole. Owns: files.
Never: what a span or a bubble is (orchestrator/report).
"""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.outputs import writing_out
from orchestrator.report.drawing import to_svg, write_png
from orchestrator.report.newest import newest_records
from orchestrator.report.spans import Timeline, build_timeline
from orchestrator.report.timeline_drawing import draw_timeline
from orchestrator.report.trace import trace_events
from orchestrator.runtime.rundir import journal_of
from transport.files import replace, replacing

TRACE = "trace.json"


def main(run_dir: Path, *, svg: bool, png: bool, out: Path | None) -> int:
    """Write ``trace.json``, and with ``svg`` or ``png`` a picture, into ``out`` (the run's directory). Returns 0."""
    timeline = read_timeline(run_dir)
    directory = out or run_dir
    with writing_out(directory):
        directory.mkdir(parents=True, exist_ok=True)
        written = _write(timeline, directory, title=run_dir.name, svg=svg, png=png)
    for path in written:
        print(path)
    print("open trace.json in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _write(timeline: Timeline, directory: Path, *, title: str, svg: bool, png: bool) -> list[Path]:
    written = [directory / TRACE]
    write_trace(timeline, directory / TRACE)
    drawing = draw_timeline(timeline, title=title)
    if svg:
        written.append(directory / "timeline.svg")
        replace(written[-1], to_svg(drawing))
    if png:
        written.append(directory / "timeline.png")
        write_png(drawing, written[-1])
    return written


def read_timeline(run_dir: Path) -> Timeline:
    """The timeline of the run in ``run_dir``. Raises: ConfigError: there is none; JournalError: it is damaged."""
    return build_timeline(newest_records(journal_of(run_dir)))


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the Chrome trace, one event a line."""
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(timeline)):
            file.write(((",\n" if number else "") + json.dumps(event)).encode())
        file.write(b"\n]}\n")
