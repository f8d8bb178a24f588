"""What can be asked over HTTP, and the answers; README.md has the table.

Invariant: an answer costs no broker round trip, so that asking often cannot slow the run; every route requires the key
unless the guard lists it as open.

A request to change the run is answered with 202 {"asked": ..., "entry": id}: it is on the events log, and applied once
``events_cursor`` in ``/status`` has reached the entry. 400: it cannot be asked, and why. 503: the broker does not
answer, and whether the request was taken is not known.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from orchestrator.core.view import PipelineView
from orchestrator.errors import ConfigError
from orchestrator.loop.intake import REQUESTS, append_event, change
from orchestrator.observability.http.status import StatusBoard
from orchestrator.observability.metrics import BatchLines, reward_components
from transport.broker.base import Broker
from transport.contracts.settings import Settings
from transport.errors import DECODE_ERRORS, TransientError
from transport.process.http import BodyLimit, Guard, answer, name_error, number_of, same_key

HEALTHY_AGE_S = 5.0  # a status is made twice a second; one that is older says that deciding or the broker stands still
MAX_BATCHES = 1000  # lines in one answer; a page asks on from where the answer ended
STATIC = Path(str(files("orchestrator.observability.http") / "static"))


class Api:
    """The read-only routes over one board."""

    def __init__(self, board: StatusBoard, metrics: Path, page_history: Callable[[], Mapping[str, Any]]) -> None:
        self._board = board
        self._lines = BatchLines(metrics)
        self._page_history = page_history

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/status", self.status),
            Route("/history", self.history),
            Route("/batches", self.batches),
            Route("/metrics", self.metrics),
        ]

    async def health(self, request: Request) -> Response:
        """200 while the broker is away, too: this process waits for it, has a bound, and would wait again if started
        again."""
        age_s, away = self._board.age_s, self._board.away()
        healthy = age_s <= HEALTHY_AGE_S or away is not None
        stale = f"no status for {age_s:.0f} s: the broker does not answer, or deciding stands still"
        reason = str(away) if away is not None else "" if healthy else stale
        return answer({"healthy": healthy, "reason": reason}, 200 if healthy else 503)

    async def status(self, request: Request) -> Response:
        if not self._board.latest:
            raise HTTPException(503, "the run is starting")
        return answer(self._board.answer())

    async def history(self, request: Request) -> Response:
        return answer(self._page_history())

    async def batches(self, request: Request) -> Response:
        first = number_of(request.query_params.get("from", "0"))
        if first is None:
            raise HTTPException(400, "from must be a number of a line, from 0")
        lines = await asyncio.to_thread(self._lines.read, first, MAX_BATCHES)
        return answer({"from": first, "batches": lines})

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._board.latest), media_type=CONTENT_TYPE_PLAIN_0_0_4)


# --- requests to change the run ---------------------------------------------------------------------------------------

APPEND_S = 5.0  # how long a client waits for a broker that is away


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    value: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | float | str


class ControlRoutes:
    """The route that appends requests to the events log; what may be asked is in ``loop/intake.py``."""

    def __init__(self, broker: Broker, settings: Settings, view: Callable[[], PipelineView]) -> None:
        self._broker = broker
        self._settings = settings
        self._view = view

    def routes(self) -> list[Route]:
        return [Route("/control/{request}", self.ask, methods=["POST"])]

    async def ask(self, request: Request) -> Response:
        name = request.path_params["request"]
        if name in REQUESTS:
            event = REQUESTS[name]()
        elif name != "set":
            raise HTTPException(404, f"there is no {name!r}; there are {', '.join([*REQUESTS, 'set'])}")
        else:
            try:
                wanted = msgspec.json.decode(await request.body(), type=Change)
                view = self._view()
                event = change(self._settings, view.settings, view.num_admitted, wanted.key, wanted.value)
            except (*DECODE_ERRORS, UnicodeDecodeError, ConfigError) as error:
                raise HTTPException(400, str(error)) from error
        try:
            async with asyncio.timeout(APPEND_S):
                entry_id = await append_event(self._broker, event, by="http")
        except (TimeoutError, TransientError) as error:
            raise HTTPException(503, "the broker does not answer") from error
        return answer({"asked": name, "entry": entry_id}, 202)


# --- all of it --------------------------------------------------------------------------------------------------------


def build_app(
    routes: Sequence[BaseRoute], *, host: str, key: str, body_limits: Mapping[str, BodyLimit] | None = None
) -> ASGIApp:
    """``routes`` and the live page, behind the guard, whose arguments the others are."""
    open_paths = ["/", *(f"/{file.relative_to(STATIC).as_posix()}" for file in STATIC.rglob("*") if file.is_file())]
    page = Mount("/", StaticFiles(directory=STATIC, html=True))
    app = Starlette(routes=[*routes, page], exception_handlers={HTTPException: name_error})
    return Guard(app, host=host, opens=same_key(key), open_paths=open_paths, body_limits=body_limits)


# --- for Prometheus: each number is read off the status when it is asked for; nothing is counted twice, nothing kept --

OF_LAST_BATCH = {
    "reward": "Mean reward of the last trained batch.",
    "reward_std": "Standard deviation of the rewards of the last trained batch.",
    "no_signal": "Share of its groups, and of those filtered beside it, whose rewards are all equal.",
    "truncated": "Share of its samples that were cut at the limit.",
    "samples_generated": "Samples generated since the batch before it.",
    "samples_trained": "Samples that the last trained batch holds.",
    "tokens_generated": "Response tokens generated since the batch before it.",
    "tokens_trained": "Response tokens that the last trained batch holds.",
    "response_tokens": "Mean response length of the last trained batch, tokens.",
    "response_tokens_max": "Longest response of the last trained batch, tokens.",
    "staleness": "Mean staleness of the last trained batch, versions.",
    "staleness_max": "Largest staleness of the last trained batch, versions.",
    "ranker_recall_20": "Of the longest 20% of responses, how many were among the predicted longest.",
    "ranker_trusted": "1 while dispatch may rely on predicted lengths.",
    "samples_per_s": "Trained samples a second over the last trained batch.",
    "tokens_per_s": "Trained response tokens a second over the last trained batch.",
}
NOT_OF_A_BATCH = ("batch", "version", "incarnation", "time_s")
"""Keys of its line that say which batch it is."""
GAUGES = {
    "num_batches": "Batches that the run trains.",
    "in_flight_samples": "Samples that generation workers owe.",
    "retained_bytes": "Bytes of rows that the broker retains.",
    "paused": "1 while dispatch is paused.",
    "elapsed_s": "Seconds on the run's clock.",
}
REQUEST_SAMPLES = ("samples", "started", "ended", "failed", "taken")
GROUP_STAGES = ("pending", "running", "scoring", "ready")


def exposition(status: Mapping[str, Any]) -> bytes:
    """The text of ``/metrics``; only ``streamrl_up 0`` before there is a status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(status))
    return generate_latest(registry)


class _Status(Collector):
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield GaugeMetricFamily("streamrl_up", "1 once the run has a status.", value=float(bool(status)))
        if not status:
            return
        yield CounterMetricFamily("streamrl_trained_batches", "Batches trained.", value=status["trained_version"])
        for name, text in GAUGES.items():
            if name in status:
                yield GaugeMetricFamily(f"streamrl_{name}", text, value=float(status[name]))
        yield from _of_last_batch(status["last"])
        yield from _of_last_evaluation(status.get("last_evaluation") or {})
        if status.get("num_requests") is not None:
            yield from _requests(status["num_requests"], status["requests"].values())
        blocked = status.get("blocked")
        still_s = {blocked["stage"]: blocked["still_s"]} if blocked else {}
        yield _labelled("streamrl_blocked_seconds", "Seconds without progress, past the first limit.", "stage", still_s)
        stages = {stage: status[stage] for stage in GROUP_STAGES}
        yield _labelled("streamrl_groups", "Groups by stage.", "stage", stages)
        yield _labelled("streamrl_queue_entries", "Entries of each stream.", "stream", status["queues"])
        yield from _workers(status["workers"])
        aside_s = {
            one["worker_id"]: one["aside_s"] for one in status.get("generation", ()) if one["aside_s"] is not None
        }
        text = "Seconds for which a worker has stood aside, since it cannot load the newest weights."
        yield _labelled("streamrl_worker_aside_seconds", text, "worker", aside_s)


def _of_last_batch(line: Mapping[str, Any]) -> Iterator[Metric]:
    """Every number of its line in metrics.jsonl; components of the reward under one name."""
    components = reward_components(line)
    for name, value in line.items():
        if isinstance(value, int | float) and name not in NOT_OF_A_BATCH and name not in components and "/" not in name:
            text = OF_LAST_BATCH.get(name, f"{name} of the last trained batch, see docs/metrics.md.")
            yield GaugeMetricFamily(f"streamrl_batch_{name}", text, value=float(value))
    text = "Mean of a component of the reward over the last trained batch."
    yield _labelled("streamrl_batch_component", text, "component", components)


def _of_last_evaluation(line: Mapping[str, Any]) -> Iterator[Metric]:
    """The newest evaluation: the means over all held-out problems, and those of each named set."""
    if not line:
        return
    text = "Version of the weights of the newest evaluation."
    yield GaugeMetricFamily("streamrl_evaluation_version", text, value=float(line["version"]))
    text = "A number of the newest evaluation: its reward, components, problems, seconds, see docs/evaluation.md."
    family = GaugeMetricFamily("streamrl_evaluation", text, labels=["set", "name"])
    for name, value in sorted(line.items()):
        if isinstance(value, int | float) and name.startswith(("eval_", "eval/")):
            of_set = name.split("/")
            family.add_metric(of_set[1:] if len(of_set) == 3 else ["", name.removeprefix("eval_")], float(value))
    yield family


def _requests(num_requests: int, open_ones: Collection[Mapping[str, float]]) -> Iterator[Metric]:
    """Of a service run. open_ones: how many samples of each open request there are, and how far they are."""
    yield CounterMetricFamily("streamrl_requests", "Requests that came.", value=num_requests)
    yield GaugeMetricFamily("streamrl_open_requests", "Requests that are not all taken.", value=len(open_ones))
    sums = {name: sum(each[name] for each in open_ones) for name in REQUEST_SAMPLES}
    text = "Samples of open requests: all, let pass by the window, ended, of those failed, taken by the reader."
    yield _labelled("streamrl_request_samples", text, "are", sums)


WORKER_COUNTERS = {
    "tokens": "Tokens since the worker started.",
    "drafted_tokens": "Tokens that a draft said would come, and that were computed, since the worker started.",
    "accepted_tokens": "Those of them that the policy drew.",
    "retracted_samples": "How often a sample gave up its slot for others because KV memory was full.",
}


def _workers(workers: list[Mapping[str, Any]]) -> Iterator[Metric]:
    kinds = Counter(worker["kind"] for worker in workers)
    yield _labelled("streamrl_workers", "Live workers by kind.", "kind", kinds)
    idle = {worker["worker"]: worker["idle"] for worker in workers if "idle" in worker}
    yield _labelled("streamrl_worker_idle_ratio", "Share of the last 10 s without work.", "worker", idle)
    running = {worker["worker"]: worker["running"] for worker in workers}
    yield _labelled("streamrl_worker_running_samples", "Samples that a worker decodes now.", "worker", running)
    troubled = {worker["worker"]: 1.0 for worker in workers if worker.get("trouble")}
    yield _labelled("streamrl_worker_trouble", "1 for a worker that goes on with something wrong.", "worker", troubled)
    yield _by_way(workers)
    for counter, text in WORKER_COUNTERS.items():
        family = CounterMetricFamily(f"streamrl_worker_{counter}", text, labels=["worker"])
        for worker in workers:
            if counter in worker["counters"]:
                family.add_metric([worker["worker"]], worker["counters"][counter])
        yield family


def _by_way(workers: list[Mapping[str, Any]]) -> Metric:
    """How the last weights of each generation worker came: the way is a label, as of an info metric."""
    text = "1 for the way by which a worker's last weights came: inproc, mapped, tcp, ucx."
    family = GaugeMetricFamily("streamrl_worker_weights_way", text, labels=["worker", "way"])
    for worker in workers:
        if worker.get("way"):
            family.add_metric([worker["worker"], worker["way"]], 1.0)
    return family


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
