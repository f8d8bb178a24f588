"""The orchestrator as a process of its own: settings, logs, broker, event loop, then ``app.serve``.

Owns: what comes before the first event and after the last. Never: decides. Invariant: what ends it is one StreamError,
whose exit code tells the supervisor whether to start it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import uvloop

from orchestrator.config import resolve
from orchestrator.runtime.app import serve
from orchestrator.runtime.rundir import RunDir
from transport import faults
from transport.broker.connect import connect
from transport.errors import first_error
from transport.logs import configure_logs
from transport.settings import Settings
from transport.types import RunName


def main(*, run: str, broker_url: str, run_dir: Path, model_dir: Path, environ: Mapping[str, str]) -> int:
    """Serve ``run`` until it is over. Raises StreamError, or ConfigError for a damaged config.toml in ``run_dir``."""
    configure_logs(process="orchestrator")
    faults.arm(environ.get("STREAMRL_FAULTS", ""))
    settings = resolve(None, [RunDir(run_dir).config], [f"broker.url={broker_url}"], environ).settings
    try:
        uvloop.run(_serve(settings, RunName(run), run_dir, model_dir))
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return 0


async def _serve(settings: Settings, run: RunName, run_dir: Path, model_dir: Path) -> None:
    broker = await connect(settings.broker, run, url=settings.broker.url)
    try:
        await serve(settings, broker, run_dir, model_dir)
    finally:
        await broker.close()
