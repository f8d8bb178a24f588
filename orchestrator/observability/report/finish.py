"""What is written of a run: its report, its trace, its pictures; at its end, and by commands of the user.

A command also works on a run that goes on or that crashed: the journal is read as far as it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from orchestrator.observability.report.drawing import to_svg, write_png
from orchestrator.observability.report.page import render_comparison, render_report
from orchestrator.observability.report.record import read_run, read_timeline
from orchestrator.observability.report.timeline_drawing import draw_timeline
from orchestrator.observability.report.trace import TRACE, write_trace
from orchestrator.run_outputs import writing_out
from transport.process.files import replace

REPORT = "report.html"
LONG_RUN = 50_000
"""Spans from which on the user is shown what is being written: it takes longer than a few seconds."""


def finish_run(rundir: RunDir, note: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report, the trace, and those keys of ``metrics.jsonl`` that only the journal knows.

    Those keys come at the end, because how long a sample ran is known when it ends: at a batch's step the samples of
    the next one that already run are still unknown, and full slots would look empty. The caller holds the run's lock:
    nothing else writes its metrics.

    Args: note: called with what comes next where that takes long (60 us a sample and file, on one core).
    Returns: the report's path.  Raises: ConfigError: it has no journal yet; JournalError; OSError.
    """
    run = read_run(rundir.path)
    if run.timeline.start_s:
        note(f"a long run: {REPORT} and {TRACE} show what came after its first {run.timeline.start_s:.0f} s")
    note_long = note if len(run.timeline.spans) > LONG_RUN else lambda _: None
    if run.damage:
        note(f"{run.damage}; the file stays as it is")  # a new one would be without them for good
    elif run.all_lines:
        write_metrics(rundir.metrics, run.all_lines)
    note_long(f"writing {TRACE} of {len(run.timeline.spans)} spans")
    write_trace(run.timeline, rundir.path / TRACE)
    note_long(f"writing {REPORT}")
    path = rundir.path / REPORT
    replace(path, render_report(run))
    return path


def write_metrics(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a metrics file whole."""
    replace(path, "".join(json.dumps(line) + "\n" for line in lines))


# --- the commands: each returns its exit code -------------------------------------------------------------------------


def report(run_dir: Path, out: Path | None) -> int:
    """``streamrl-orchestrator report``: write the page of a run."""
    page = render_report(read_run(run_dir))
    path = out or run_dir / REPORT
    with writing_out(path):
        replace(path, page)
    print(path)
    return 0


def compare(run_dirs: Sequence[Path], out: Path) -> int:
    """``streamrl-orchestrator compare``: several runs on one page."""
    if len(run_dirs) < 2:
        raise ConfigError("a comparison needs two runs or more")
    page = render_comparison([read_run(run_dir) for run_dir in run_dirs])
    with writing_out(out):
        replace(out, page)
    print(out)
    return 0


def timeline(run_dir: Path, *, svg: bool, png: bool, out: Path | None) -> int:
    """``streamrl-orchestrator timeline``: write the trace, and pictures where they are asked for."""
    found = read_timeline(run_dir)
    directory = out or run_dir
    written = [directory / TRACE]
    with writing_out(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_trace(found, directory / TRACE)
        if svg:
            written.append(directory / "timeline.svg")
            replace(written[-1], to_svg(draw_timeline(found, title=run_dir.name)))
        if png:
            written.append(directory / "timeline.png")
            write_png(draw_timeline(found, title=run_dir.name), written[-1])
    for path in written:
        print(path)
    print("open trace.json in https://ui.perfetto.dev or chrome://tracing")
    return 0
