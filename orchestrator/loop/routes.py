"""Which worker of another host pulls a new version from whom: the plan of the core, for who is there now.

    weights log ─► who lives where (leases) ─► core/broadcast.py ─► routes log: whom each worker asks first

Ranks of a trainer that are on several hosts each root a tree of what they hold, so that all their cards send at once.

A log of its own, since commands are the executor's alone. Nothing of it must be kept: a worker that hears nothing asks
the trainer, and one whose source died turns to the next of its route. Who joins later is attached to what was planned:
a version that is at a site does not come there once more.

Owns: what is known of hosts and sites. Never: a transfer, or the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog

from orchestrator.core.broadcast import Links, Peer, Plan, Source, attach, plan_broadcast, reattach, routes
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Entry, LogEntry
from transport.broker.events import read_statuses
from transport.contracts.messages import (
    STARTING,
    Addresses,
    WeightManifest,
    WeightRoutes,
    WorkerStatus,
    encode,
    manifest_decoder,
)
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
"""What is supposed of networks nobody measured: 10 Gbit/s, and a tenth of it between sites. Only ratios count here.

Round trips are measured, where a worker has told its own."""


def plan_of(
    manifest: WeightManifest, statuses: Mapping[WorkerId, WorkerStatus], plan: Plan | None = None
) -> Plan | None:
    """The way of a version to every generation worker that has started on another host; None where there is none.

    plan: of those that were told: others are attached to it, and those that left are cut out.
    Raises ValueError: nothing can be planned for such a version.
    """
    peers = {
        worker: Peer(name=worker, host=status.host_id, site=status.site)
        for worker, status in sorted(statuses.items(), key=lambda one: (not one[1].relay, one[0]))  # the last feed none
        if status.kind is WorkerKind.GENERATE and status.doing != STARTING  # it would let others wait
        if status.host_id not in ("", manifest.host)
    }
    if not peers:
        return None
    if plan is None:
        sites = {status.host_id: status.site for status in statuses.values() if status.kind is WorkerKind.TRAIN}
        home = sites.get(manifest.host, "")
        held = _held(manifest)
        sources = [
            Source(name=f"{TRAINER}-{number}", host=host, site=sites.get(host, home), parts=frozenset([number]))
            for number, host in enumerate(held)
        ]
        sizes = [sum(nbytes for _, nbytes in parts) for parts in held.values()]
        piece_bytes = max(1, manifest.total_bytes // max(1, len(manifest.tensors)))
        links = replace(LINKS, round_trips_s=_round_trips_s(manifest, statuses))
        return plan_broadcast(sizes, sources, [*peers.values()], links, piece_bytes=piece_bytes, most_trees=1)
    if gone := plan.receivers.keys() - peers.keys():
        plan = reattach(plan, gone, {})
    for worker, peer in peers.items():
        plan = plan if worker in plan.receivers else attach(plan, peer)
    return plan


def _round_trips_s(manifest: WeightManifest, statuses: Mapping[WorkerId, WorkerStatus]) -> dict[tuple[str, str], float]:
    """Between the trainer and each host, as far as the broker, of which workers know it, stands near the trainer.

    Up to a power of two: what is about as far stays so from version to version.
    """
    found: dict[str, float] = {}
    for status in statuses.values():
        if 0 < status.round_trip_s < math.inf:
            found[status.host_id] = min(found.get(status.host_id, math.inf), status.round_trip_s)
    return {(manifest.host, host): 2.0 ** math.ceil(math.log2(seconds)) for host, seconds in found.items()}


def _held(manifest: WeightManifest) -> dict[str, list[tuple[int, int]]]:
    """Host -> (number, bytes) of each part that a rank there holds: a part of the plan, since they share a card."""
    parts = [(part.host, part.total_bytes) for part in manifest.parts] or [(manifest.host, manifest.total_bytes)]
    found: dict[str, list[tuple[int, int]]] = {}
    for number, (host, nbytes) in enumerate(parts):
        found.setdefault(host, []).append((number, nbytes))
    return found


def plan_routes(plan: Plan, manifest: WeightManifest, statuses: Mapping[WorkerId, WorkerStatus]) -> WeightRoutes:
    """Whom each worker of ``plan`` asks, best first; nobody: it asks the trainer."""
    held, ways = _held(manifest), [routes(plan, number) for number in range(len(plan.parts))]

    def addresses(names: Iterable[str], part: int | None = None) -> Addresses:
        relays = (statuses[WorkerId(name)].relay for name in names)
        return tuple(relayed_address(relay, manifest.weights, part) for relay in relays if relay)

    whole: dict[WorkerId, Addresses] = {}
    by_part: dict[WorkerId, tuple[Addresses, ...]] = {}
    for worker in map(WorkerId, plan.receivers):
        asked = [way[worker] for way in ways]
        if len(set(asked)) == 1:
            whole[worker] = addresses(asked[0])
        else:
            pairs = zip(asked, held.values(), strict=True)
            found = {part: addresses(way, part) for way, parts in pairs for part, _ in parts}
            by_part[worker] = tuple(found[part] for part in range(len(found)))
    return WeightRoutes(weights=manifest.weights, routes=whole, parts=by_part)


async def route_weights(broker: Broker) -> None:
    """Plan the way of every version that is published, forever; of the newest also for workers that join."""
    cursor = ZERO_ID
    newest: WeightManifest | None = None
    plan: Plan | None = None
    entries = await broker.tail(keys.WEIGHTS, count=1)
    while True:
        if entries:
            cursor = entries[-1].entry_id
            if manifest := _manifest(entries[-1]):
                newest, plan = manifest, None
        if newest is not None:
            try:
                plan = await _tell(broker, newest, plan)
            except ValueError as error:
                log.warning("way of weights not planned", weights=str(newest.weights), reason=str(error))
                newest = None
        entries = await broker.read(keys.WEIGHTS, cursor, count=64, wait_s=1.0)


async def _tell(broker: Broker, manifest: WeightManifest, told: Plan | None) -> Plan | None:
    """Tell those workers their way that are not in ``told``. Returns the plan with them."""
    statuses = read_statuses(await broker.leases())
    plan = plan_of(manifest, statuses, told)
    if plan is None:
        return None
    known = told.receivers if told is not None else {}
    planned = plan_routes(plan, manifest, statuses)
    whole = {worker: sources for worker, sources in planned.routes.items() if worker not in known}
    by_part = {worker: sources for worker, sources in planned.parts.items() if worker not in known}
    if untold := len(whole) + len(by_part):
        direct = sum(not sources for sources in whole.values())
        fields = {"weights": str(manifest.weights), "workers": str(untold), "from_trainer": str(direct)}
        payload = encode(WeightRoutes(weights=manifest.weights, routes=whole, parts=by_part))
        await broker.append(keys.ROUTES, Entry(fields=fields, payload=payload))
        log.info(
            "way of weights planned",
            weights=str(manifest.weights),
            workers=untold,
            from_trainer=direct,
            from_several=len(by_part),
        )
    return plan


def _manifest(entry: LogEntry) -> WeightManifest | None:
    try:
        return manifest_decoder.decode(entry.entry.payload)
    except MessageError as error:
        log.warning("unreadable manifest", entry=entry.entry_id, reason=str(error))
        return None
