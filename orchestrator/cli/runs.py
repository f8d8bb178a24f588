"""``list`` and ``stop``: the runs of a directory, and the end of one that goes on.

``stop`` asks the process that holds the run's lock, as Ctrl-C in its terminal does, and waits until it has let go.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

from orchestrator.errors import ConfigError, RunFailedError, printable
from orchestrator.observability.live import plain_console
from orchestrator.observability.standing import State, read_standing
from transport.errors import StreamError
from transport.process.files import is_locked
from transport.process.programs import command, shown

POLL_S = 0.2
SAY_S = 5.0
"""Between two words on a run that still stops."""
STYLES = {State.LIVE: "green", State.FAILED: "red", State.CRASHED: "red", State.STOPPED: "yellow"}


# --- list


def main_list(directory: Path, *, chosen: bool, as_json: bool) -> int:
    """Print the runs below ``directory``, the newest first. chosen: the user named it. Returns 0.

    Raises ConfigError: it is not there, though it was named.
    """
    if chosen and not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}", where="--dir")
    rows = sorted(map(_row, find_runs(directory)), key=lambda row: row["when"], reverse=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no runs below {shown(directory)}; start one: {command('streamrl-orchestrator', 'run')}")
    else:
        plain_console(pipe_columns=1000).print(_table(rows))
    return 0


def find_runs(directory: Path) -> Sequence[Path]:
    """Directories of runs in ``directory``, or in one of its own."""
    return sorted(path.parent for depth in ("*", "*/*") for path in directory.glob(f"{depth}/config.toml"))


def _row(run_dir: Path) -> dict[str, Any]:
    """What ``list --json`` prints of a run. One with a damaged file is "unreadable", and ``why`` says which."""
    try:
        standing = read_standing(run_dir)
    except StreamError as error:
        modified = datetime.fromtimestamp(run_dir.stat().st_mtime, UTC)
        return {"run": str(run_dir), "state": "unreadable", "why": str(error), "when": modified.isoformat()}
    return {
        "run": str(run_dir),
        "state": standing.state,
        "why": standing.why,
        "batches": standing.trained,
        "num_batches": standing.num_batches,
        "reward": standing.lines[-1].get("reward") if standing.lines else None,
        "when": datetime.fromtimestamp(round(standing.at_s), UTC).isoformat(),
        "model": standing.settings.model.path,
        "go_on": standing.go_on,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "state", "batches", "reward", "when", "model"):
        table.add_column(title, justify="right" if title in ("batches", "reward") else "left", overflow="fold")
    for row in rows:
        total = f"/{row['num_batches']}" if row.get("num_batches") else ""
        reward = row.get("reward")
        table.add_row(
            printable(shown(Path(row["run"]))),
            Text(row["state"], style=STYLES.get(row["state"], "")),
            f"{row['batches']}{total}" if "batches" in row else "",
            "" if reward is None else f"{reward:.3f}",
            datetime.fromisoformat(row["when"]).astimezone().strftime("%Y-%m-%d %H:%M"),
            Text(printable(row.get("model") or row["why"]), overflow="ellipsis", no_wrap=True),
        )
    return table


# --- stop


def main_stop(run_dir: Path, *, wait_s: float) -> int:
    """End the run as Ctrl-C does, and wait for it. Returns 0, also where it is not live.

    Raises: RunFailedError: it has not ended within ``wait_s``, or its process is on another host; ConfigError.
    """
    lock = run_dir / "lock"
    if read_standing(run_dir).state is not State.LIVE:
        print(f"{shown(run_dir)} is not running: {_outcome(run_dir)}")
        return 0
    process = _holder(lock)
    serves = "serve" in process.cmdline()
    process.send_signal(signal.SIGTERM)
    started_s = said_s = time.monotonic()
    while is_locked(lock):
        waited_s = time.monotonic() - started_s
        left = _descendants(process)
        if waited_s > wait_s:
            raise RunFailedError(
                f"{run_dir} has not ended within {wait_s:.0f} s and goes on stopping; processes left: {left}. Wait "
                f"longer (--wait), or end it at once, and go on from its last checkpoint: kill -9 {process.pid}"
            )
        if time.monotonic() - said_s > SAY_S:
            said_s = time.monotonic()
            print(f"stopping for {waited_s:.0f} s; processes left: {left}", flush=True)
        time.sleep(POLL_S)
    print(f"{shown(run_dir)} {_outcome(run_dir)}")
    if serves:
        print("its workers wait for it; go on with the command that started it, and --resume")
    return 0


def _outcome(run_dir: Path) -> str:
    standing = read_standing(run_dir)
    return f"{standing}" + (f"\ngo on with: {standing.go_on}" if standing.go_on else "")


def _holder(lock: Path) -> psutil.Process:
    """The process of this host that holds ``lock``. Raises RunFailedError: it is none of this host's, or gone."""
    holder = lock.read_text(encoding="ascii", errors="replace").strip()
    if holder.isdecimal() and int(holder) > 0:
        open_files = Path(f"/proc/{holder}/fd")
        try:
            if any(os.path.samefile(path, lock) for path in open_files.iterdir() if path.exists()):
                return psutil.Process(int(holder))
        except (OSError, psutil.NoSuchProcess):
            pass
    raise RunFailedError(
        f"process {holder} holds {lock}, and is none of this machine: the run goes on in another container, or "
        "on another host; stop it there"
    )


def _descendants(process: psutil.Process) -> int:
    try:
        return 1 + len(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return 0
