"""Our programs as a person types them, from a directory of the test's; and a run's status, as curl gets it.

Those of the benches that run programs in a terminal start them here too.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import tempfile
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.fakes.preloaded import Program

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 150.0
"""Less than an integration test may take, so that its message names the command."""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a process that finds our packages wherever it is started. more: over what this process has."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def orchestrator(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``streamrl-orchestrator`` with ``arguments`` to its end. environ: as ``more`` of its environment.

    The process is forked from one that has imported the program: a start takes 0.05 s of CPU instead of 0.6 to 3 s.
    """
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name for name in ("out", "err")]
        program = Program("orchestrator", arguments, cwd=cwd, environ=environment(environ), outputs=outputs)
        try:
            code = program.join(TIMEOUT_S)
        finally:
            program.kill()
        return subprocess.CompletedProcess(arguments, code, *(output.read_text() for output in outputs))


def start_in_terminal(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    rows: int = 24,
    columns: int = 80,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``command`` in a terminal and a session of its own.

    environ: all of its environment; None: this process's.
    Returns: the process, and the end of its terminal that the person sits at: reading gets what it wrote, and EIO once
    it has ended. Closing it closes the terminal.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    started = subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=hear_hang_up,
    )
    os.close(theirs)
    return started, ours


def hear_hang_up() -> None:
    """For a process that is about to start: SIGHUP ends it, also where nohup has started these tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ask_status(run_dir: Path) -> dict[str, Any]:
    """What the orchestrator of a run answers to ``/status``. Raises OSError where nobody does."""
    address, key = ((run_dir / name).read_text().strip() for name in ("api.address", "api.secret"))
    request = Request(f"http://{address}/status", headers={"Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=5.0) as answer:
        return json.load(answer)
