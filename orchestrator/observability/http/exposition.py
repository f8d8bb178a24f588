"""A run's status as Prometheus text.

Every number is read off the status at the moment it is asked for: nothing is counted twice, and nothing is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

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
        if status:
            yield from _run(status)
            yield from _workers(status["workers"])


def _run(status: Mapping[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily("streamrl_trained_batches", "Batches trained.", value=status["trained_version"])
    for name, text in GAUGES.items():
        if name in status:
            yield GaugeMetricFamily(f"streamrl_{name}", text, value=float(status[name]))
    for name, text in OF_LAST_BATCH.items():
        if name in status["last"]:
            yield GaugeMetricFamily(f"streamrl_batch_{name}", text, value=float(status["last"][name]))
    if status.get("num_requests") is not None:
        yield from _requests(status["num_requests"], status["requests"].values())
    blocked = status.get("blocked")
    still_s = {blocked["stage"]: blocked["still_s"]} if blocked else {}
    yield _labelled("streamrl_blocked_seconds", "Seconds without progress, past the first limit.", "stage", still_s)
    yield _labelled("streamrl_groups", "Groups by stage.", "stage", {stage: status[stage] for stage in GROUP_STAGES})
    yield _labelled("streamrl_queue_entries", "Entries of each stream.", "stream", status["queues"])


def _requests(num_requests: int, open_ones: Collection[Mapping[str, float]]) -> Iterator[Metric]:
    """Of a service run. open_ones: how many samples of each open request there are, and how far they are."""
    yield CounterMetricFamily("streamrl_requests", "Requests that came.", value=num_requests)
    yield GaugeMetricFamily("streamrl_open_requests", "Requests that are not all taken.", value=len(open_ones))
    sums = {name: sum(each[name] for each in open_ones) for name in REQUEST_SAMPLES}
    text = "Samples of open requests: all, let pass by the window, ended, of those failed, taken by the reader."
    yield _labelled("streamrl_request_samples", text, "are", sums)


def _workers(workers: list[Mapping[str, Any]]) -> Iterator[Metric]:
    kinds = Counter(worker["kind"] for worker in workers)
    yield _labelled("streamrl_workers", "Live workers by kind.", "kind", kinds)
    idle = {worker["worker"]: worker["idle"] for worker in workers if "idle" in worker}
    yield _labelled("streamrl_worker_idle_ratio", "Share of the last 10 s without work.", "worker", idle)
    running = {worker["worker"]: worker["running"] for worker in workers}
    yield _labelled("streamrl_worker_running_samples", "Samples that a worker decodes now.", "worker", running)
    tokens = CounterMetricFamily("streamrl_worker_tokens", "Tokens since the worker started.", labels=["worker"])
    for worker in workers:
        if "tokens" in worker["counters"]:
            tokens.add_metric([worker["worker"]], worker["counters"]["tokens"])
    yield tokens


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
