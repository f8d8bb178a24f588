"""The predicted time of a broadcast against one that is played through, step by step: pieces over links that are shared
from moment to moment, each transfer as fast as it can go with what has come in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from orchestrator.core.broadcast import Links, Peer, Plan, Source, arrivals_s, broadcast_time, num_bytes, plan_broadcast

PIECE = 10**6
STEPS = 600  # of the predicted time


@dataclass
class Flow:
    """inputs: the flows that bring ``above`` what it sends, none where it has it.  over: what it shares with others."""

    above: str
    name: str
    nbytes: int
    inputs: Sequence[int]
    over: Sequence[tuple[str, ...]]


def flows_of(plan: Plan) -> list[Flow]:
    flows: list[Flow] = []
    for tree in plan.trees:
        fed = {name: [place for place, flow in enumerate(flows) if flow.name == name] for name, _ in tree.feeds}
        into: dict[str, list[int]] = {}
        for name, ranges in tree.feeds:
            into.setdefault(tree.root, []).append(len(flows))
            flows.append(Flow(name, tree.root, num_bytes(ranges), fed[name], ways(plan, name, tree.root)))
        for name, above in tree.parents.items():  # of a fresh plan: who feeds comes first
            into[name] = [len(flows)]
            flows.append(Flow(above, name, tree.nbytes, into.get(above, []), ways(plan, above, name)))
    return flows


def ways(plan: Plan, above: str, name: str) -> list[tuple[str, ...]]:
    one, other = plan.peer(above), plan.peer(name)
    if one.host == other.host:
        return []
    link = [(one.site, other.site, "link")] if one.site != other.site else []
    return [(one.host, "out"), (other.host, "in"), *link]


def room(plan: Plan, way: tuple[str, ...]) -> float:
    return plan.links.card(way[0]) if len(way) == 2 else plan.links.bytes_per_s(way[0], way[1])


def fair(member: np.ndarray, capacity: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Equal shares of what is narrowest, and of the rest again."""
    rates, left, waiting = np.zeros(len(active)), capacity.copy(), active.copy()
    while waiting.any():
        users = member[:, waiting].sum(1)
        share = np.where(users > 0, left / np.maximum(users, 1), math.inf)
        narrow = share <= share.min() * (1 + 1e-12)
        given = waiting & ((member[narrow].sum(0) > 0) | (member.sum(0) == 0))
        rates[given] = np.where(member[:, given].sum(0) > 0, share.min(), 1e15)
        left = np.maximum(0.0, left - member[:, given] @ np.minimum(rates[given], 1e15))
        waiting &= ~given
    return rates


def played_s(plan: Plan) -> float:
    flows, step_s = flows_of(plan), broadcast_time(plan) / STEPS
    names = list(dict.fromkeys(way for flow in flows for way in flow.over))
    member = np.array([[way in flow.over for flow in flows] for way in names], float)
    capacity = np.array([room(plan, way) for way in names])
    size, got = np.array([flow.nbytes for flow in flows], float), np.zeros(len(flows))
    for step in range(3 * STEPS):
        share = [min((got[one] / size[one] for one in flow.inputs), default=1.0) for flow in flows]
        ready = np.minimum(size, np.floor(np.array(share) * size / PIECE + 1e-9) * PIECE)
        ready = np.where(np.array(share) >= 1 - 1e-9, size, ready)
        got = np.minimum(ready, got + fair(member, capacity, (ready - got) > 1e-3) * step_s)
        if (size - got).max() <= 1e-3:
            return (step + 1) * step_s
    return math.inf


def cluster(
    *, hosts: int, ranks: int = 1, sites: int = 1, a_host: int = 1, slow: float = math.inf, pieces: int = 24
) -> Plan:
    """Cards of 100 MB/s each way, and links between sites of ``slow``."""
    links = Links(site_bytes_per_s=math.inf, card_bytes_per_s=100e6, slow_bytes_per_s=slow)
    sources = [Source(name=f"rank{number}", host=f"rank{number}", site="0") for number in range(ranks)]
    receivers = [
        Peer(name=f"w{number}", host=f"h{number // a_host}", site=str(number // a_host % sites))
        for number in range(hosts * a_host)
    ]
    return plan_broadcast([pieces * PIECE], sources, receivers, links, piece_bytes=PIECE)


@pytest.mark.parametrize(
    "plan",
    [
        cluster(hosts=8),
        cluster(hosts=8, ranks=2),
        cluster(hosts=6, ranks=3, pieces=36),
        cluster(hosts=4, ranks=2, a_host=3),
        cluster(hosts=6, sites=2, slow=10e6),
        cluster(hosts=6, sites=2, slow=100e6, ranks=2),
        cluster(hosts=6, sites=3, slow=20e6),
    ],
)
def test_the_prediction_is_within_15_percent(plan: Plan):
    assert broadcast_time(plan) == pytest.approx(played_s(plan), rel=0.15)


def test_a_slow_link_leaves_the_rest_of_a_card_to_the_workers_nearby():
    alone, beside = cluster(hosts=4), cluster(hosts=8, sites=2, slow=5e6)
    near = max(arrivals_s(beside)[name] for name in arrivals_s(beside) if beside.receivers[name].site == "0")
    assert near < 1.2 * broadcast_time(alone)
