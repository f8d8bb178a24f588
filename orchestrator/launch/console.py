"""What a run prints for the person who started it: how it goes, where to look, what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.observability.live import View, evaluation_line, mismatch_line
from orchestrator.observability.metrics_file import NewLines, read_metrics
from orchestrator.observability.report.finish import REPORT, finish_run
from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import STARTING
from transport.contracts.settings import Settings
from transport.errors import StreamError, TransientError

log = structlog.get_logger(__name__)


class RunConsole:
    """Reports one run to ``view``, from its files and its broker, and each thing once."""

    def __init__(self, settings: Settings, rundir: RunDir, view: View) -> None:
        self._settings = settings
        self._rundir = rundir
        self._view = view
        self._lines = NewLines(rundir.metrics, skip=True)  # those before --resume were shown
        self._address = ""
        self._given_up = 0
        self._given_up_reason = ""
        self._damaged: set[str] = set()
        self._reported_jail = False
        self._waits_for_broker = False

    async def show(self, broker: Broker) -> None:
        """Show what is new; a broker that is away has nothing new."""
        with suppress(TransientError):
            raw = await broker.get_meta(keys.STATUS)
            if raw is not None:
                status = json.loads(raw)
                self._view.status(status)
                self._show_damaged(status.get("damaged_checkpoints", ()))
                self._show_jail(status.get("workers", ()))
                self._show_address()
            await self._show_given_up(broker)
        for line in self._lines.read():
            if "eval" in line:
                self._view.note(evaluation_line(line))
            else:
                self._view.batch(line)
                if warning := mismatch_line(line, self._settings.algorithm.mismatch_limit):
                    self._view.note(warning)

    async def _show_given_up(self, broker: Broker) -> None:
        """Say the first unit that was given up at once; the last line of the run says how many there were."""
        number = await broker.length(keys.DEAD)
        if number > self._given_up:
            last = (await broker.dead_letters())[-1:]
            self._given_up_reason = last[0].reason if last else self._given_up_reason
            if not self._given_up:
                self._view.note(f"given up: {self._given_up_reason}")
        self._given_up = max(number, self._given_up)

    def _show_damaged(self, damaged: Sequence[str]) -> None:
        """Checkpoints that the trainer could not go on from: once each."""
        for text in damaged:
            if text not in self._damaged:
                self._damaged.add(text)
                self._view.note(f"damaged checkpoint, going on from the one before it: {text}")

    def _show_jail(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Say once that rewards run without a jail."""
        for worker in workers:
            if worker["counters"].get("jailed", 1.0) == 0.0 and worker["doing"] != STARTING and not self._reported_jail:
                self._reported_jail = True
                self._view.note(
                    f"{worker['worker']} runs rewards without a jail, in a clean environment with limits: bubblewrap "
                    "is not installed, or may not start a jail (docs/security.md)"
                )

    def broker_is_away(self, error: StreamError, outage_s: float) -> None:
        """It takes no writes, and everything waits until it does. Said once an outage."""
        if not self._waits_for_broker:
            self._waits_for_broker = True
            self._view.note(f"{error}; everything waits for it, {outage_s:.0f} s at most")

    def broker_is_back(self) -> None:
        """It takes writes again."""
        if self._waits_for_broker:
            self._waits_for_broker = False
            self._view.note("the broker takes writes again; the run goes on")

    def _show_address(self) -> None:
        """Where the live page is, also when the orchestrator had to take another port."""
        files = (self._rundir.api_address, self._rundir.api_secret)
        if not self._settings.api.enabled or not all(path.exists() for path in files):
            return
        address, key = (path.read_text(encoding="ascii").strip() for path in files)
        if address != self._address:
            self._address = address
            self._view.note(f"live page http://{address}/#key={key}")

    def write_report(self) -> None:
        """Leave a report, a trace, and the idle seconds in the metrics. A run that ends well must not fail of this."""
        if not self._rundir.journal.is_dir():
            return  # it ended before anything happened
        try:
            finish_run(self._rundir, self._view.note)
        except (StreamError, OSError) as error:
            log.warning("no report", error=str(error))
            self._view.note(f"no report: {error}")

    def summary(self, seconds: float, restarts: int) -> str:
        """The last line of a run that took so long, in which so many processes were started again."""
        lines = read_metrics(self._rundir.metrics)
        done = f"finished in {seconds:.0f} s"
        if self._settings.trainer.engine == "none":
            parts = [done]
        elif not lines:
            parts = [f"{done} without a trained batch; see {self._rundir.logs}"]
        else:
            ends = (lines[0].get("reward"), lines[-1].get("reward"))
            rewards = " -> ".join("none" if reward is None else f"{reward:.2f}" for reward in ends)
            parts = [f"{done}: {len(lines)} batches", f"reward {rewards}"]
            results = {
                "model": self._rundir.model,
                "metrics": self._rundir.metrics,
                "report": self._rundir.path / REPORT,
            }
            parts += [f"{name} {os.path.relpath(path)}" for name, path in results.items() if path.exists()]
        if self._given_up:
            parts.append(f"{self._given_up} units given up, last: {self._given_up_reason}")
        return "  ".join(parts + ([f"{restarts} processes restarted"] if restarts else []))
