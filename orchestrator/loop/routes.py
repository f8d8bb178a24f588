"""Which worker of another host pulls a new version from whom: the plan of the core, for who is there now.

    weights log ─► who lives where (leases) ─► core/broadcast.py ─► routes log: whom each worker asks first

A log of its own, since commands are the executor's alone. Nothing of it must be kept: a worker that hears nothing asks
the trainer, and one whose source died turns to the next of its route.

Owns: what is known of hosts and sites. Never: a transfer, or the choice.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from orchestrator.core.broadcast import Links, Peer, Plan, Source, plan_broadcast, routes
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Entry, LogEntry
from transport.broker.events import read_statuses
from transport.contracts.messages import Addresses, WeightManifest, WeightRoutes, WorkerStatus, encode, manifest_decoder
from transport.contracts.types import WorkerId, WorkerKind
from transport.errors import MessageError
from transport.tensors.relay import relayed_address

log = structlog.get_logger(__name__)

TRAINER = "trainer"
LINKS = Links(
    site_bytes_per_s=1.25e9,
    card_bytes_per_s=1.25e9,
    slow_bytes_per_s=1.25e8,
    site_round_trip_s=2e-4,
    slow_round_trip_s=2e-2,
)
"""What is supposed of networks nobody measured: 10 Gbit/s, and a tenth of it between sites. Only ratios count here."""


def plan_of(manifest: WeightManifest, statuses: Mapping[WorkerId, WorkerStatus]) -> Plan | None:
    """The way of a version to every generation worker that is on another host; None where there is none."""
    sites = {status.host_id: status.site for status in statuses.values() if status.kind is WorkerKind.TRAIN}
    peers = [
        Peer(name=worker, host=status.host_id, site=status.site)
        for worker, status in sorted(statuses.items())
        if status.kind is WorkerKind.GENERATE and status.host_id not in ("", manifest.host)
    ]
    if not peers:
        return None
    source = Source(name=TRAINER, host=manifest.host, site=sites.get(manifest.host, ""))
    piece_bytes = max(1, manifest.total_bytes // max(1, len(manifest.tensors)))
    return plan_broadcast([manifest.total_bytes], [source], peers, LINKS, piece_bytes=piece_bytes, most_trees=1)


def plan_routes(manifest: WeightManifest, statuses: Mapping[WorkerId, WorkerStatus]) -> dict[WorkerId, Addresses]:
    """Whom each worker of ``plan_of`` asks, best first; nobody: it asks the trainer."""
    plan = plan_of(manifest, statuses)
    return {
        WorkerId(worker): tuple(
            relayed_address(relay, manifest.weights) for name in names if (relay := statuses[WorkerId(name)].relay)
        )
        for worker, names in (routes(plan) if plan else {}).items()
    }


async def route_weights(broker: Broker) -> None:
    """Plan the way of every version that is published, forever; of the newest also for workers that join."""
    cursor = await broker.last_id(keys.WEIGHTS) or ZERO_ID
    newest: WeightManifest | None = None
    told: set[WorkerId] = set()
    while True:
        entries = await broker.read(keys.WEIGHTS, cursor, count=64, wait_s=1.0)
        if entries:
            cursor = entries[-1].entry_id
            if manifest := _manifest(entries[-1]):
                newest, told = manifest, set()
        if newest is None:
            continue
        planned = plan_routes(newest, read_statuses(await broker.leases()))
        untold = {worker: sources for worker, sources in planned.items() if worker not in told}
        if not untold:
            continue
        told |= untold.keys()
        direct = sum(not sources for sources in untold.values())
        fields = {"weights": str(newest.weights), "workers": str(len(untold)), "from_trainer": str(direct)}
        payload = encode(WeightRoutes(weights=newest.weights, routes=untold))
        await broker.append(keys.ROUTES, Entry(fields=fields, payload=payload))
        log.info("way of weights planned", weights=str(newest.weights), workers=len(untold), from_trainer=direct)


def _manifest(entry: LogEntry) -> WeightManifest | None:
    try:
        return manifest_decoder.decode(entry.entry.payload)
    except MessageError as error:
        log.warning("unreadable manifest", entry=entry.entry_id, reason=str(error))
        return None
