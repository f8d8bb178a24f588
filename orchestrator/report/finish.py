"""What is left to write when a run has ended, however it ended; and the commands that write it again.

Owns: ``report.html``, ``trace.json``, and the keys of ``metrics.jsonl`` that only the journal knows. Those come at the
end and not with each line, because how long a sample ran is known when it ends: at a batch's step the samples of the
next one that already run are still unknown, and full slots would look empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api.timeline import TRACE, write_trace
from orchestrator.errors import ConfigError
from orchestrator.outputs import writing_out
from orchestrator.report.comparison import render_comparison
from orchestrator.report.page import render_report
from orchestrator.report.record import read_run
from orchestrator.runtime.rundir import RunDir
from transport.files import replace

REPORT = "report.html"


LONG_RUN = 50_000
"""Spans from which on the user is told what is being written: it takes longer than a few seconds."""


def finish_run(rundir: RunDir, note: Callable[[str], None] = lambda _: None) -> Path:
    """Write everything. Returns the report's path. The caller holds the run's lock: nobody else writes its metrics.

    note: told what comes next where that takes long (60 us a sample and file, on one core).
    Raises: ConfigError: it has no journal yet; JournalError; OSError.
    """
    run = read_run(rundir.path)
    if run.timeline.start_s:
        note(f"a long run: {REPORT} and {TRACE} show what came after its first {run.timeline.start_s:.0f} s")
    tell = note if len(run.timeline.spans) > LONG_RUN else lambda _: None
    if run.damage:
        note(f"{run.damage}; the file stays as it is")  # a new one would be without them for good
    elif run.all_lines:
        write_metrics(rundir.metrics, run.all_lines)
    tell(f"writing {TRACE} of {len(run.timeline.spans)} spans")
    write_trace(run.timeline, rundir.path / TRACE)
    tell(f"writing {REPORT}")
    path = rundir.path / REPORT
    replace(path, render_report(run))
    return path


def write_metrics(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a metrics file whole."""
    replace(path, "".join(json.dumps(line) + "\n" for line in lines))


# --- the commands -----------------------------------------------------------------------------------------------------


def report(run_dir: Path, out: Path | None) -> int:
    """``streamrl-orchestrator report``: write the page of a run, which may be live. Returns 0."""
    page = render_report(read_run(run_dir))
    path = out or run_dir / REPORT
    with writing_out(path):
        replace(path, page)
    print(path)
    return 0


def compare(run_dirs: Sequence[Path], out: Path) -> int:
    """``streamrl-orchestrator compare``: several runs on one page. Returns 0."""
    if len(run_dirs) < 2:
        raise ConfigError("a comparison needs two runs or more")
    page = render_comparison([read_run(run_dir) for run_dir in run_dirs])
    with writing_out(out):
        replace(out, page)
    print(out)
    return 0
