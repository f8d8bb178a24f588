"""What a run prints for the person who started it: how it goes, where to look, what came of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.config.starts import read_starts
from orchestrator.http import endpoint_links, page_links
from orchestrator.observability.http.status import broker_fields, read_status
from orchestrator.observability.live import View, duration, evaluation_lines
from orchestrator.observability.metrics import NewLines, Repeats, read_file, read_metrics, warnings_of
from orchestrator.observability.report.pages import END_BATCHES, finish_run
from orchestrator.observability.report.record import ends_of, held_out_change, last_of_each, of_all_groups
from orchestrator.observability.standing import result_lines
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.reach import Away
from transport.contracts.messages import STARTING
from transport.contracts.settings import Settings
from transport.errors import StreamError, TransientError

log = structlog.get_logger(__name__)


class RunConsole:
    """Reports one run to ``view``, from its files and its broker, and each thing once."""

    def __init__(
        self,
        settings: Settings,
        rundir: RunDir,
        view: View,
        *,
        restarts: Callable[[], int] = lambda: 0,
        links: bool = True,
    ) -> None:
        """restarts: of the processes that this one started, so far.  links: of page and endpoint, which have keys."""
        self._shows_links = links
        self._settings = settings
        self._rundir = rundir
        self._view = view
        self._restarts = restarts
        self._lines = NewLines(rundir.metrics, skip=True)  # those before --resume were shown
        self._newest = max((line["batch"] for line in read_metrics(rundir.metrics)), default=-1)
        self._links: list[str] = []
        self._endpoint: list[str] = []
        self._given_up = 0
        self._given_up_reason = ""
        self._noted: set[str] = set()
        self._warned = Repeats()
        self._troubles: Mapping[str, str] = {}
        self._said_failed: Counter[str] = Counter()  # digits of the number that was said last
        self._waits_for_broker = False
        self._status: Mapping[str, Any] = {}

    async def show(self, broker: Broker) -> None:
        """Show what is new; a broker that is away has nothing new."""
        with suppress(TransientError):
            status = await read_status(broker)
            if status is not None:
                self._status = status
                self._view.status({**status, "restarts": self._restarts()})
                for text in status.get("damaged_checkpoints", ()):  # the trainer could not go on from them
                    version = status.get("went_back_to", 0)
                    where = f"version {version}" if version else "the base model, for want of a whole checkpoint"
                    self._note_once(text, f"damaged checkpoint, going on from {where}: {text}")
                for of, failed in status.get("failed", {}).items():
                    self._show_failed(of, failed["count"], failed["last"])
                for text in status.get("remarks", ()):
                    self._note_once(text, f"note: {text}")
                self._show_troubles({one["worker"]: one.get("trouble", "") for one in status.get("workers", ())})
                for worker in status.get("workers", ()):
                    if worker["counters"].get("jailed", 1.0) == 0.0 and worker["doing"] != STARTING:
                        self._note_once(
                            "jail",
                            f"{worker['worker']} runs rewards without a jail, in a clean environment with limits: "
                            "bubblewrap is not installed, or may not start a jail (docs/security.md)",
                        )
                if self._shows_links:
                    self._show_address()
                    self._show_endpoint()
            await self._show_given_up(broker)
        for line in self._lines.read():
            if "eval" in line:
                for text in evaluation_lines(line):
                    self._view.note(text)
            else:
                if line["batch"] <= self._newest:
                    self._view.note(f"batch {line['batch'] + 1} again: from the newest checkpoint, which it was not in")
                self._newest = max(line["batch"], self._newest)
                self._view.batch(line)
                for warning in warnings_of(line, self._settings.algorithm.mismatch_limit):
                    if said := self._warned.said(warning):
                        self._view.note(f"warning: {said}")

    def _show_failed(self, of: str, count: int, last: str) -> None:
        """Say the first failed attempt, and then at ten times as many."""
        if count >= 10 ** self._said_failed[of]:
            self._said_failed[of] = len(str(count))
            attempts = "1 attempt" if count == 1 else f"{count} attempts"
            self._view.note(
                f"{attempts} at {of} failed and {'is' if count == 1 else 'are'} made again, the last one: {last}"
            )

    def _show_troubles(self, troubles: Mapping[str, str]) -> None:
        """Say what is wrong with a worker that goes on, once each time, and when it is over.

        What differs in numbers alone, as free bytes do, is one trouble.
        """
        for worker, text in troubles.items():
            before = self._troubles.get(worker, "")
            if text and not before:
                self._view.note(f"{worker}: {text}")
            elif before and not text:
                self._view.note(f"{worker}: that is over")
        self._troubles = {worker: text for worker, text in troubles.items() if text}

    def _note_once(self, what: str, text: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._view.note(text)

    async def _show_given_up(self, broker: Broker) -> None:
        """Say the first unit that was given up at once; the last line of the run says how many there were."""
        number = await broker.length(keys.DEAD)
        if number > self._given_up:
            last = (await broker.dead_letters())[-1:]
            self._given_up_reason = last[0].reason if last else self._given_up_reason
            if not self._given_up:
                self._view.note(f"given up: {self._given_up_reason}")
        self._given_up = max(number, self._given_up)

    def broker_is_away(self, error: StreamError, outage_s: float) -> None:
        """It takes no writes, and everything waits until it does. Said once an outage."""
        if not self._waits_for_broker:
            self._waits_for_broker = True
            self._view.note(f"{error}; everything waits for it, {outage_s:.0f} s at most")

    def broker_does_not_answer(self, away: Away) -> None:
        """It is away. Said once an outage, and shown in the status for as long as it lasts."""
        if not self._waits_for_broker:
            self._waits_for_broker = True
            self._view.note(str(away))
        self._view.status({**self._status, **broker_fields(away), "restarts": self._restarts()})

    def broker_is_back(self) -> None:
        if self._waits_for_broker:
            self._waits_for_broker = False
            self._view.note("the broker takes writes again; the run goes on")

    def _show_address(self) -> None:
        """Where the live page is, also when the orchestrator had to take another port."""
        files = self._rundir.api_address, self._rundir.api_secret
        links = page_links(*files, keyed=sys.stdout.isatty()) if self._settings.api.enabled else []
        if links and links != self._links:
            self._links = links
            for link, where in zip(links, ("", " from other machines"), strict=False):
                self._view.note(f"live page{where} {link}")

    def _show_endpoint(self) -> None:
        """Where agents get their work, each generation worker's once."""
        if not self._settings.endpoint.enabled:
            return
        links = endpoint_links(self._rundir.endpoint_addresses, self._rundir.endpoint_key)
        for link in links:
            if link not in self._endpoint:
                self._view.note(f"endpoint for agents {link}, its key is in {self._rundir.endpoint_key}")
        self._endpoint = links

    def write_report(self) -> None:
        """Leave a report, a trace, and the idle seconds in the metrics. A run that ends well must not fail of this."""
        if not self._rundir.has_journal():
            return  # it ended before anything happened
        try:
            finish_run(self._rundir, self._view.note)
        except (StreamError, OSError) as error:
            log.warning("no report", error=str(error))
            self._view.note(f"no report: {error}")

    def _why_fewer(self, trained: int) -> str:
        asked, passes = self._settings.run.batches, self._settings.data.passes
        if trained >= asked or not passes:
            return ""
        return f" of {asked}, as the data ended (data.passes = {passes})"

    def summary(self, seconds: float) -> str:
        """What came of a run that took so long, and where it lies."""
        every = read_file(self._rundir.metrics).lines
        lines = last_of_each([line for line in every if "batch" in line], "batch")
        evaluations = [line for line in every if "eval" in line]
        resumed = " since it was resumed" if len(read_starts(self._rundir)) > 1 else ""
        done = f"finished in {duration(seconds)}{resumed}"
        if self._settings.trainer.engine == "none":
            parts = [done]
        elif not lines:
            parts = [f"{done} without a trained batch; see {self._rundir.logs}"]
        else:
            parts = [f"{done}: {len(lines)} batches{self._why_fewer(len(lines))}"]
            if held_out := held_out_change(last_of_each(evaluations, "version")):  # what the report says first, too
                parts.append("held-out {:.2f} -> {:.2f}".format(*held_out))
            if ends := ends_of(of_all_groups(lines), "reward", END_BATCHES):
                first, last, count = ends
                parts.append(f"reward {first:.2f} -> {last:.2f}" + (f" (means of {count})" if count > 1 else ""))
        if lines and all(line.get("rows_in_steps", 1) == 0 or line.get("no_signal") == 1.0 for line in lines):
            parts.append("no batch carried a gradient: the model is as it was")
        if restarts := self._restarts():
            parts.append(f"{restarts} restart" + "s" * (restarts > 1))
        if self._given_up:
            parts.append(f"{self._given_up} units given up, last: {self._given_up_reason}")
        return "\n".join(["  ".join(parts), *result_lines(self._rundir)])
