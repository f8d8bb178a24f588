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
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

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
    """Run ``streamrl-orchestrator`` with ``arguments`` to its end. environ: as ``more`` of its environment."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=cwd,
        env=environment(environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


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
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup may have started these tests
    )
    os.close(theirs)
    return started, ours


def ask_status(run_dir: Path) -> dict[str, Any]:
    """What the orchestrator of a run answers to ``/status``. Raises OSError where nobody does."""
    address, key = ((run_dir / name).read_text().strip() for name in ("api.address", "api.secret"))
    request = Request(f"http://{address}/status", headers={"Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=5.0) as answer:
        return json.load(answer)
