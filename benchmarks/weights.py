"""What a new version costs between hosts: ``make bench NAME=weights``.

Eighteen hosts as network namespaces on one bridge, a process on each; what a host sends goes through a token bucket of
LINK_MBIT_S. A trainer of one rank, or of two on hosts of their own, publishes MEGABYTES of weights; workers pull along
the routes that the orchestrator plans, the first version too.

    tree_16_over_1      time until 16 workers have a version, over the time for one (a star: 16)
    slow_link_copies    versions that the trainer's card carried to 16 workers of another site, of the worst version
    first_link_copies   the same of version 0
    two_roots_over_one  time until 16 workers have what two hosts of ranks hold, over the time from one
    model_error         |predicted / measured - 1|: what core/broadcast.py says of the same plan on these links

Left out: processes share two cores, so that copies and checksums of 18 hosts add up; loading into an engine.
Needs root, iproute2 and unshare.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from orchestrator.core.broadcast import Links, broadcast_time
from tests.fakes.several_hosts import several_hosts
from tests.fakes.weight_site import Site

NUM_WORKERS, LINK_MBIT_S, MEGABYTES, REPEATS = 16, 50.0, 16.0, 3
PAYLOAD_SHARE = 1448 / 1514  # of what a token bucket counts, at 1,500 bytes a packet
BYTES_PER_S = LINK_MBIT_S * 1e6 / 8 * PAYLOAD_SHARE
LINKS = Links(site_bytes_per_s=BYTES_PER_S, card_bytes_per_s=BYTES_PER_S, slow_bytes_per_s=BYTES_PER_S)


def measured(site: Site, version: int, number: int) -> tuple[float, float, float]:
    """Seconds until ``number`` workers have ``version``, what the plan predicts, and copies that its ranks sent."""
    before = [rank.host.sent_bytes for rank in site.ranks]
    manifest = site.begin(version, number)
    seconds = max(worker.answer()["seconds"] for worker in site.workers[:number])
    copies = (
        sum(rank.host.sent_bytes - was for rank, was in zip(site.ranks, before, strict=True)) / manifest.total_bytes
    )
    return seconds, broadcast_time(replace(site.plan, links=LINKS)), copies


def main() -> None:
    found: dict[str, list[tuple[float, float, float]]] = {"1": [], "16": [], "far": [], "two": []}
    with several_hosts(2 + NUM_WORKERS) as hosts, tempfile.TemporaryDirectory() as directory:
        for host in hosts:
            host.shape(LINK_MBIT_S)
        for name, ranks in (("16", 1), ("far", 1), ("two", 2)):
            where = "far" if name == "far" else ""
            site = Site(hosts[2 - ranks :], Path(directory) / name, MEGABYTES, site=where, ranks=ranks)
            try:
                for turn in range(REPEATS):
                    found[name].append(measured(site, 2 * turn, NUM_WORKERS))
                    if name == "16":
                        found["1"].append(measured(site, 2 * turn + 1, 1))
            finally:
                site.close()
    seconds = {name: statistics.median(one[0] for one in taken) for name, taken in found.items()}
    predicted = {name: taken[0][1] for name, taken in found.items()}
    for name, taken in found.items():
        copies = statistics.median(one[2] for one in taken)
        times = f"{seconds[name]:.2f} s, predicted {predicted[name]:.2f} s"
        print(f"{name:>4} workers: {times}, its ranks sent {copies:.3f} copies")
    figures = {
        "tree_16_over_1": round(seconds["16"] / seconds["1"], 3),
        "slow_link_copies": round(max(one[2] for one in found["far"]), 3),
        "first_link_copies": round(found["far"][0][2], 3),
        "two_roots_over_one": round(seconds["two"] / seconds["16"], 3),
        "model_error": round(max(abs(predicted[name] / seconds[name] - 1) for name in found), 3),
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
