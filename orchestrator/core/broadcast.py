"""Which worker pulls which bytes of a version from whom. Pure.

    inside a site    several trees, each with a share of the bytes: one or more a trainer rank there, rooted at it
    between sites    one transfer into each site, to its gateway; behind it a tree rooted at the gateway
    inside a host    one worker pulls, the others map its copy

Bytes travel in pieces, and whoever has a piece forwards it before the next one came: a tree takes as long as its
slowest link takes for all bytes, and one piece more for each link of its longest way. A wide tree is shallow, and
divides the uplink of its inner nodes; inner nodes of one tree are leaves of the others where there are several. What a
tree's shape is chosen by is what it is predicted to take.

    plan_broadcast   the trees of a version          attach     one worker more, in mid-broadcast
    broadcast_time   what they take, seconds         reattach   processes died; nobody starts over

Owns: the plan. Never: what is known of a worker (the caller says), a transfer. Invariants, after every function: each
byte comes to each host once and into each site that does not have it once, no one waits for itself, and, of what lived,
no one is deeper in its tree or has more to feed than before because another died.

Source: StreamRL sec. 6: trees rooted at data-parallel ranks inside a datacenter; to another, rank 0 sends once, to a
designated instance that broadcasts there. Differs: the paper leaves open fan-out, pieces, shares and what a failure
does; all of them are ours.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias


class BytesLostError(Exception):
    """Nobody who lives has these bytes: the version cannot be completed."""


class Range(NamedTuple):
    """Bytes [start, end) of a part of a version."""

    part: int
    start: int
    end: int


Ranges: TypeAlias = tuple[Range, ...]
Transfer: TypeAlias = tuple[str, str, Ranges]
"""From whom, to whom, what."""
Progress: TypeAlias = Mapping[str, Sequence[Range]]
"""Worker -> what it has, verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process. name: no other has it.  host: whose processes can share a copy.  site: "" where there is but one."""

    name: str
    host: str
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Peer):
    """A trainer rank. parts: those that it has, None for all."""

    parts: frozenset[int] | None = None

    def holds(self, parts: Iterable[int]) -> bool:
        return self.parts is None or self.parts.issuperset(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What bytes travel over, bytes/s and seconds.

    site, slow: of one transfer inside a site; of all that goes from one site to another.  card: of a host, each way,
    for all of its transfers.  host: of the workers of a host that map the copy of one.
    cards, between, round_trips_s: what was measured: by host, by pair of sites, by pair of hosts or of sites.
    """

    site_bytes_per_s: float
    slow_bytes_per_s: float = math.inf
    card_bytes_per_s: float = math.inf
    host_bytes_per_s: float = math.inf
    site_round_trip_s: float = 0.0
    slow_round_trip_s: float = 0.0
    cards: Mapping[str, float] = field(default_factory=dict[str, float])
    between: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    round_trips_s: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def card(self, host: str) -> float:
        return self.cards.get(host, self.card_bytes_per_s)

    def bytes_per_s(self, one: str, other: str) -> float:
        """Between two sites, or inside of one."""
        if one == other:
            return self.site_bytes_per_s
        return self.between.get((one, other), self.between.get((other, one), self.slow_bytes_per_s))

    def round_trip_s(self, one: Peer, other: Peer) -> float:
        if one.host == other.host:
            return 0.0
        usual = self.site_round_trip_s if one.site == other.site else self.slow_round_trip_s
        pairs = ((one.host, other.host), (other.host, one.host), (one.site, other.site), (other.site, one.site))
        return next((self.round_trips_s[pair] for pair in pairs if pair in self.round_trips_s), usual)


class Stream(NamedTuple):
    """Pieces on their way. first_s: when the first is there.  bytes_per_s: of the slowest link so far."""

    first_s: float = 0.0
    bytes_per_s: float = math.inf

    def forwarded(self, bytes_per_s: float, round_trip_s: float, piece_bytes: float, hops: int = 1) -> Stream:
        """Behind ``hops`` links more, all alike."""
        late_s = hops * (round_trip_s + piece_bytes / bytes_per_s)
        return Stream(self.first_s + late_s, min(self.bytes_per_s, bytes_per_s))

    def end_s(self, nbytes: float, piece_bytes: float) -> float:
        """When all ``nbytes`` are there."""
        return self.first_s + max(0.0, nbytes - piece_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How the workers of ``site`` come to ``ranges``.

    root: a trainer rank, or the worker there that is the gateway.  feeds: from whom the gateway gets what it does not
    have.  parents: of every other worker, whom it pulls from.  fanout: hosts that a worker feeds, at most.
    """

    site: str
    root: str
    ranges: Ranges
    parents: Mapping[str, str]
    fanout: int
    feeds: tuple[tuple[str, Ranges], ...] = ()

    @property
    def nbytes(self) -> int:
        return num_bytes(self.ranges)


class Pull(NamedTuple):
    """What a worker gets from one process."""

    source: str
    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """parts: bytes of each.  sources, receivers: by name.  trees: none before one that its root has bytes from."""

    parts: tuple[int, ...]
    sources: Mapping[str, Source]
    receivers: Mapping[str, Peer]
    links: Links
    piece_bytes: int
    trees: tuple[Tree, ...]
    most_trees: int = 8

    @property
    def everything(self) -> Ranges:
        return tuple(Range(part, 0, nbytes) for part, nbytes in enumerate(self.parts))

    def peer(self, name: str) -> Peer:
        return self.receivers[name] if name in self.receivers else self.sources[name]

    def pulls(self, worker: str, held: Sequence[Range] = ()) -> tuple[Pull, ...]:
        """From whom ``worker`` gets what, but for what it has. () where it has everything."""
        found: list[Pull] = []
        for tree in self.trees:
            from_root = ((tree.parents[worker], tree.ranges),) if worker in tree.parents else ()
            for source, ranges in tree.feeds if worker == tree.root else from_root:
                if left := missing(ranges, held):
                    found.append(Pull(source, left))
        return tuple(found)


MOST_TURNED_TO = 6


def routes(plan: Plan, part: int) -> dict[str, tuple[str, ...]]:
    """Worker -> those it asks for a part, one after another; () where only a source of the plan is left to ask.

    The first is whom it pulls from. Should that one be dead, its first child takes its place as in ``reattach``: the
    others turn to that child, and it turns to whom the dead one pulled from. Nobody waits for itself: who is above
    turns only further up. For plans with one tree a site that has the part.
    """
    above: dict[str, str] = {}
    for tree in plan.trees:
        if any(one.part == part for one in tree.ranges):
            above.update(tree.parents)
            above.update((tree.root, name) for name, ranges in tree.feeds if any(one.part == part for one in ranges))
    heirs: dict[str, str] = {}
    for name, parent in above.items():
        heirs.setdefault(parent, name)
    found: dict[str, tuple[str, ...]] = {}
    for name in plan.receivers:
        turned_to: list[str] = []
        at = name
        while (parent := above.get(at, "")) in plan.receivers and len(turned_to) < MOST_TURNED_TO:
            turned_to += [parent] if heirs[parent] == at else [parent, heirs[parent]]
            at = parent
        found[name] = tuple(turned_to)
    return found


def plan_broadcast(
    parts: Sequence[int],
    sources: Sequence[Source],
    receivers: Sequence[Peer],
    links: Links,
    *,
    piece_bytes: int,
    most_trees: int | None = None,
) -> Plan:
    """The trees of a version.

    Args:    parts: bytes of each part, at least one.  sources: who has them, the one to send to other sites first.
             receivers: in an order that stays the same from version to version.  piece_bytes: what is verified at once.
             most_trees: of a site for one that roots them.
    Returns: the same plan for the same input.
    Raises:  ValueError: a part without bytes or without a source, or a name that is given twice.
    """
    names = [peer.name for peer in (*sources, *receivers)]
    if len(set(names)) != len(names):
        raise ValueError(f"two of these have one name: {', '.join(sorted(names))}")
    if piece_bytes < 1 or any(nbytes < 1 for nbytes in parts):
        raise ValueError(f"pieces of {piece_bytes} bytes, and parts of {list(parts)}: none can have less than 1")
    if orphans := [part for part in range(len(parts)) if not any(source.holds([part]) for source in sources)]:
        raise ValueError(f"no source has parts {orphans}")
    plan = Plan(
        parts=tuple(parts),
        sources={source.name: source for source in sources},
        receivers={peer.name: peer for peer in receivers},
        links=links,
        piece_bytes=piece_bytes,
        most_trees=MOST_TREES if most_trees is None else most_trees,
        trees=(),
    )
    sites = dict.fromkeys(peer.site for peer in receivers)
    plan = replace(plan, trees=tuple(tree for site in sites for tree in _local_trees(plan, site)))
    absent = {site: ranges for site in sites if (ranges := _absent(plan, site))}
    for site, upstream in _order_of_sites(plan, absent):
        plan = replace(plan, trees=(*plan.trees, _gateway_tree(plan, site, absent[site], upstream)))
    return plan


# --- inside a site ----------------------------------------------------------------------------------------------------


def _local_trees(plan: Plan, site: str) -> Iterator[Tree]:
    """Those rooted at trainer ranks of the site: each part is divided among the ranks there that have it."""
    shares: dict[str, Ranges] = {}
    for whole in plan.everything:
        holders = [source for source in plan.sources.values() if source.site == site and source.holds([whole.part])]
        for turn, share in enumerate(split((whole,), len(holders), plan.piece_bytes)):
            name = holders[(turn + whole.part) % len(holders)].name
            shares[name] = (*shares.get(name, ()), *share)
    shares = {name: share for name, share in shares.items() if share}
    if not shares:
        return
    hosts = _hosts(plan, site)
    roots = [plan.sources[name] for name in shares]
    shape = _best_shape(plan, hosts, roots, sum(map(num_bytes, shares.values())))
    trees = [(name, part) for name, share in shares.items() for part in split(share, shape.stripes, plan.piece_bytes)]
    for turn, (name, ranges) in enumerate((name, ranges) for name, ranges in trees if ranges):
        parents = _grow(plan, plan.sources[name], hosts, shape, turn / len(trees))
        yield Tree(site=site, root=name, ranges=ranges, parents=parents, fanout=shape.fanout)


def _absent(plan: Plan, site: str) -> Ranges:
    """What no source of the site has."""
    local = [source for source in plan.sources.values() if source.site == site]
    return tuple(whole for whole in plan.everything if not any(source.holds([whole.part]) for source in local))


def _hosts(plan: Plan, site: str) -> dict[str, list[Peer]]:
    """Host -> the workers there, of which the first pulls for all."""
    found: dict[str, list[Peer]] = {}
    for peer in plan.receivers.values():
        if peer.site == site:
            found.setdefault(peer.host, []).append(peer)
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a tree. top: hosts that its root feeds.  fanout: that any other does.  stripes: trees that a root has."""

    top: int
    fanout: int
    stripes: int = 1

    def inner(self, hosts: int) -> int:
        """How many hosts feed others."""
        return -(-max(0, hosts - self.top) // self.fanout)

    def depth(self, hosts: int) -> int:
        """Links from the root to the last of ``hosts``."""
        if self.fanout == 1:
            return -(-hosts // self.top)
        depth, row = 0, self.top
        while hosts > 0:
            depth, hosts, row = depth + 1, hosts - row, row * self.fanout
        return depth


WIDEST = 64  # of a tree that is no star; beyond it depth shrinks by little
MOST_TREES = 8  # of a site, unless there are more ranks to root them at
ABOUT = 1.02  # of the least time: within what links are known to


def _shapes(hosts: int, most_trees: int) -> Iterator[Shape]:
    fanouts = [*(1 << power for power in range(WIDEST.bit_length()) if 1 << power < hosts), hosts]
    for fanout in fanouts:
        for top in dict.fromkeys((1, fanout)):
            yield Shape(top, fanout)
            if 1 < fanout <= most_trees:
                yield Shape(top, fanout, fanout)


def _best_shape(
    plan: Plan, hosts: Mapping[str, Sequence[Peer]], roots: Sequence[Peer], nbytes: int, entry: Stream | None = None
) -> Shape:
    """The shape that is predicted to take the least time.

    entry: how bytes come to a root that is a gateway. Behind a slow link a wide tree seems to cost nothing, and would
    where the site's own links are slower than supposed: of shapes that take about as long, the one that asks least of a
    card.
    """
    rooted = {root.host for root in roots}
    others = [host for host in hosts if host not in rooted]
    shapes = _shapes(max(1, len(others)), plan.most_trees if entry is None else 1) if others else [Shape(1, 1)]
    cards = sorted((plan.links.card(host) for host in others), reverse=True)
    cards = [card for card in cards if card >= cards[0] / 2]
    root_card = min(plan.links.card(host) for host in rooted)
    trip_s = max(plan.links.round_trip_s(roots[0], hosts[host][0]) for host in others) if others else 0.0

    def cost(shape: Shape) -> tuple[float, float]:
        """Copies that the busiest card sends, and seconds until the last host has all."""
        trees = len(roots) * shape.stripes
        share = min(nbytes, math.ceil(nbytes / plan.piece_bytes / trees) * plan.piece_bytes)  # of the largest
        out = -(-trees * shape.inner(len(others)) // max(1, len(cards))) * shape.fanout * share
        from_root = shape.top * nbytes / len(rooted)
        rate = min(
            plan.links.site_bytes_per_s,
            min(cards, default=math.inf) * share / max(out, nbytes),
            root_card * share / from_root,
        )
        piece = min(plan.piece_bytes, share)
        stream = (entry or Stream()).forwarded(rate, trip_s, piece, shape.depth(len(others)))
        return max(out, from_root) / nbytes, stream.end_s(share, piece)

    costs = {shape: cost(shape) for shape in shapes}
    fastest = min(costs, key=lambda shape: costs[shape][1])
    if entry is None:
        return fastest
    enough_s = ABOUT * costs[fastest][1]
    return min((shape for shape in costs if costs[shape][1] <= enough_s), key=costs.__getitem__)


def _grow(plan: Plan, root: Peer, hosts: Mapping[str, Sequence[Peer]], shape: Shape, turn: float) -> dict[str, str]:
    """Worker -> whom it pulls from. turn: [0, 1), which hosts are to be the inner ones."""
    parents = {peer.name: root.name for peer in hosts.get(root.host, ()) if peer.name != root.name}
    others = [peers for peers in _in_order(plan, hosts, turn) if peers[0].host != root.host]
    for place, (leader, *mates) in enumerate(others):
        above = root if place < shape.top else others[(place - shape.top) // shape.fanout][0]
        parents[leader.name] = above.name
        parents.update((mate.name, leader.name) for mate in mates)
    return parents


def _in_order(plan: Plan, hosts: Mapping[str, Sequence[Peer]], turn: float) -> list[Sequence[Peer]]:
    """Those that forward well first, turned; those with slow cards and those of sources last."""
    enough = max(map(plan.links.card, hosts), default=0.0) / 2
    busy = {source.host for source in plan.sources.values()}
    good = [peers for host, peers in hosts.items() if host not in busy and plan.links.card(host) >= enough]
    rest = [peers for host, peers in hosts.items() if host in busy or plan.links.card(host) < enough]
    first = int(turn * len(good))
    return [*good[first:], *good[:first], *rest]


# --- between sites ----------------------------------------------------------------------------------------------------


def _order_of_sites(plan: Plan, absent: Mapping[str, Ranges]) -> Iterator[tuple[str, str | None]]:
    """(site, the site whose gateway feeds it, None: sources do), those that feed others first: the fastest links."""
    links = plan.links
    best: dict[str, tuple[float, str | None]] = {}
    for site, ranges in absent.items():
        senders = _senders(plan, site, ranges)
        best[site] = min(links.bytes_per_s(plan.sources[name].site, site) for name in senders), None
    while best:
        site = max(best, key=lambda one: best[one][0])
        yield site, best.pop(site)[1]
        for other, (known, _) in best.items():
            if links.bytes_per_s(site, other) > known:
                best[other] = links.bytes_per_s(site, other), site


def _senders(plan: Plan, site: str, ranges: Ranges, progress: Progress | None = None) -> dict[str, Ranges]:
    """Who sends what of ``ranges`` to ``site``: all of it one, where one has it; workers only what they have.

    Raises BytesLostError: nobody has some of it.
    """
    workers = [plan.receivers[name] for name in progress or () if name in plan.receivers]
    peers: list[Peer] = [*plan.sources.values(), *workers]
    nearest = sorted(peers, key=lambda peer: -plan.links.bytes_per_s(peer.site, site))

    def has(peer: Peer, wanted: Ranges) -> bool:
        if isinstance(peer, Source):
            return peer.holds(one.part for one in wanted)
        return not missing(wanted, (progress or {})[peer.name])

    whole = next((peer for peer in nearest if has(peer, ranges)), None)
    found: dict[str, Ranges] = {}
    for one in ranges:
        sender = whole or next((peer for peer in nearest if has(peer, (one,))), None)
        if sender is None:
            raise BytesLostError(f"nobody has bytes {one.start} to {one.end} of part {one.part} any more")
        found[sender.name] = (*found.get(sender.name, ()), one)
    return found


def _gateway_tree(plan: Plan, site: str, ranges: Ranges, upstream: str | None) -> Tree:
    """The one of a site that does not have ``ranges``. upstream: a site whose gateway is to send them."""
    links, hosts = plan.links, _hosts(plan, site)
    above = next((tree.root for tree in plan.trees if tree.feeds and tree.site == upstream), None)
    feeds = {above: ranges} if above is not None else _senders(plan, site, ranges)
    sender = plan.peer(next(iter(feeds)))
    leaders = [peers[0] for peers in hosts.values()]
    gateway = min(leaders, key=lambda peer: (links.round_trip_s(sender, peer), -links.card(peer.host)))
    rate = min(links.bytes_per_s(sender.site, site), links.card(sender.host), links.card(gateway.host))
    entry = Stream().forwarded(rate, links.round_trip_s(sender, gateway), plan.piece_bytes)
    shape = _best_shape(plan, hosts, [gateway], num_bytes(ranges), entry)
    parents = _grow(plan, gateway, hosts, shape, 0.0)
    return Tree(
        site=site, root=gateway.name, ranges=ranges, parents=parents, fanout=shape.fanout, feeds=tuple(feeds.items())
    )


# --- how long it takes ------------------------------------------------------------------------------------------------


def broadcast_time(plan: Plan) -> float:
    """Seconds until the last receiver has everything; 0 without any."""
    return max(arrivals_s(plan).values(), default=0.0)


def arrivals_s(plan: Plan) -> dict[str, float]:
    """Receiver -> seconds until it has everything, if nothing else goes over the links."""
    rates = _rates(plan)

    def forwarded(stream: Stream, above: str, name: str, ranges: Ranges) -> Stream:
        piece = min(plan.piece_bytes, num_bytes(ranges))
        trip_s = plan.links.round_trip_s(plan.peer(above), plan.peer(name))
        return stream.forwarded(rates[above, name, ranges], trip_s, piece)

    ends_s = dict.fromkeys(plan.receivers, 0.0)
    streams: dict[str, list[tuple[int, Stream]]] = {}  # of a worker: what comes in, tree by tree
    for tree in plan.trees:
        nbytes = tree.nbytes
        piece = min(plan.piece_bytes, nbytes)
        came = {tree.root: Stream()}
        if tree.feeds:
            fed = [
                (num_bytes(ranges), forwarded(_whole(streams.get(name, [])), name, tree.root, ranges))
                for name, ranges in tree.feeds
            ]
            came[tree.root] = _whole(fed)
            ends_s[tree.root] = max(ends_s[tree.root], *(stream.end_s(size, piece) for size, stream in fed))
            streams.setdefault(tree.root, []).append((nbytes, came[tree.root]))
        for name in _downwards(tree):
            came[name] = forwarded(came[tree.parents[name]], tree.parents[name], name, tree.ranges)
            ends_s[name] = max(ends_s[name], came[name].end_s(nbytes, piece))
            streams.setdefault(name, []).append((nbytes, came[name]))
    return ends_s


def _whole(streams: Sequence[tuple[int, Stream]]) -> Stream:
    """Several streams, each of some bytes, as one that ends with the last of them."""
    if not streams:
        return Stream()
    seconds = max(nbytes / stream.bytes_per_s for nbytes, stream in streams)
    total = sum(nbytes for nbytes, _ in streams)
    return Stream(max(stream.first_s for _, stream in streams), total / seconds if seconds else math.inf)


def _rates(plan: Plan) -> dict[Transfer, float]:
    """Bytes/s of each transfer.

    Those that share a card, or the link between two sites, share it by their bytes, so that they end together; what one
    cannot use goes to the others (weighted max-min fairness).
    """
    room: dict[tuple[str, ...], float] = {}
    users: dict[tuple[str, ...], list[Transfer]] = {}
    over: dict[Transfer, list[tuple[str, ...]]] = {}
    for transfer in _transfers(plan):
        over[transfer] = []
        for name, bytes_per_s in _ways(plan, transfer):
            if bytes_per_s < math.inf:
                room[name] = bytes_per_s
                users.setdefault(name, []).append(transfer)
                over[transfer].append(name)
    rates = {transfer: math.inf for transfer, ways in over.items() if not ways}
    waiting = {name: sum(num_bytes(ranges) for _, _, ranges in transfers) for name, transfers in users.items()}
    narrowest = [(room[name] / waiting[name], name) for name in users]
    heapq.heapify(narrowest)
    while narrowest:
        share, name = heapq.heappop(narrowest)
        if waiting[name] and room[name] / waiting[name] > share:  # some of its users are held up elsewhere
            heapq.heappush(narrowest, (room[name] / waiting[name], name))
            continue
        for transfer in users[name]:
            if transfer not in rates:
                nbytes = num_bytes(transfer[2])
                rates[transfer] = share * nbytes
                for way in over[transfer]:
                    room[way] -= share * nbytes
                    waiting[way] -= nbytes
    return rates


def _transfers(plan: Plan) -> Iterator[Transfer]:
    for tree in plan.trees:
        yield from ((name, tree.root, ranges) for name, ranges in tree.feeds)
        yield from ((above, name, tree.ranges) for name, above in tree.parents.items())


def _ways(plan: Plan, transfer: Transfer) -> Iterator[tuple[tuple[str, ...], float]]:
    """What it goes over, and the bytes/s of that, which other transfers may share."""
    above, name, ranges = transfer
    links, one, other = plan.links, plan.peer(above), plan.peer(name)
    if one.host == other.host:
        yield (above, name), links.host_bytes_per_s
        return
    yield (one.host, "out"), links.card(one.host)
    yield (other.host, "in"), links.card(other.host)
    if one.site != other.site:
        yield (one.site, other.site, "link"), links.bytes_per_s(one.site, other.site)
    else:
        yield (above, name, *map(str, ranges[0])), links.site_bytes_per_s


def _downwards(tree: Tree) -> Iterator[str]:
    """All below the root, each after the one that feeds it."""
    below = _children(tree.parents)
    names = list(below.get(tree.root, ()))
    for name in names:
        yield name
        names += below.get(name, ())


def _children(parents: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, above in parents.items():
        found.setdefault(above, []).append(name)
    return found


# --- changes in mid-broadcast -----------------------------------------------------------------------------------------


def attach(plan: Plan, receiver: Peer) -> Plan:
    """With one worker more: it maps the copy of its host, or hangs where its site's trees have room highest up.

    Raises ValueError: there is one of that name.
    """
    if receiver.name in plan.receivers or receiver.name in plan.sources:
        raise ValueError(f"{receiver.name} has its place already")
    neighbours = [tree for tree in plan.trees if tree.site == receiver.site]
    plan = replace(plan, receivers={**plan.receivers, receiver.name: receiver})
    if neighbours:
        trees = tuple(_with(plan, tree, receiver) if tree in neighbours else tree for tree in plan.trees)
        return replace(plan, trees=trees)
    plan = replace(plan, trees=(*plan.trees, *_local_trees(plan, receiver.site)))
    if absent := _absent(plan, receiver.site):
        plan = replace(plan, trees=(*plan.trees, _gateway_tree(plan, receiver.site, absent, None)))
    return plan


def _with(plan: Plan, tree: Tree, receiver: Peer) -> Tree:
    mates = [name for name in (tree.root, *tree.parents) if plan.peer(name).host == receiver.host]
    if mates:
        above = tree.parents.get(mates[0], "")
        leader = above if above in mates else mates[0]
        return replace(tree, parents={**tree.parents, receiver.name: leader})
    below = _children(tree.parents)
    for name in (tree.root, *_downwards(tree)):
        host = plan.peer(name).host
        elsewhere = [one for one in below.get(name, ()) if plan.peer(one).host != host]
        shares_a_copy = name != tree.root and plan.peer(tree.parents[name]).host == host
        if not shares_a_copy and len(elsewhere) < (1 if name == tree.root else tree.fanout):
            return replace(tree, parents={**tree.parents, receiver.name: name})
    raise AssertionError("a tree has leaves, and leaves have room")


def reattach(plan: Plan, dead: Collection[str], progress: Progress) -> Plan:
    """Without ``dead``: whoever pulled from one of them pulls from somebody else what it has not got yet.

    The place of a dead worker goes to one on its host, else to one of those that it fed, the one that has most; the
    others hang below that one, and so on down to a leaf. So shapes stay, and only siblings along one way down turn to
    another. A rank's trees go to another rank of the site that has their bytes, else to the worker there that has most
    of them, and gets the rest from elsewhere.

    Args:    dead: names of sources and receivers; others are ignored.  progress: what each worker has.
    Raises:  BytesLostError: with ``dead`` went bytes that no one else has.
    """
    left = replace(
        plan,
        sources={name: source for name, source in plan.sources.items() if name not in dead},
        receivers={name: peer for name, peer in plan.receivers.items() if name not in dead},
        trees=(),
    )
    rank = {name: (name in dead, -num_bytes(progress.get(name, ()))) for name in plan.receivers}
    heirs: dict[str, str] = {}
    for tree in plan.trees:
        parents = {**({} if tree.root in plan.sources else {tree.root: ""}), **tree.parents}
        for name in dead:
            if name in parents:
                _remove(plan, parents, name, rank.__getitem__)
        if not parents:
            continue
        root = next((name for name, above in parents.items() if not above), tree.root)
        parents.pop(root, None)
        if tree.root not in plan.sources:
            heirs[tree.root] = root
        kept = replace(tree, root=root, parents=parents)
        if root in dead:
            kept = _rooted_again(left, kept, rank.__getitem__)
        left = replace(left, trees=(*left.trees, _fed_again(left, kept, heirs, progress)))
    return left


Rank: TypeAlias = Callable[[str], tuple[bool, int]]


def _remove(plan: Plan, parents: dict[str, str], name: str, rank: Rank) -> None:
    """Fill the place of ``name``."""
    below = _children(parents)
    above, orphans = parents.pop(name), below.get(name, [])
    mates = [one for one in orphans if plan.peer(one).host == plan.peer(name).host]
    while orphans:
        heir = min(mates or orphans, key=rank)
        parents.update(dict.fromkeys(orphans, heir))
        parents[heir] = above
        host = plan.peer(heir).host
        above, orphans, mates = heir, [one for one in below.get(heir, ()) if plan.peer(one).host != host], []


def _rooted_again(plan: Plan, tree: Tree, rank: Rank) -> Tree:
    """``tree``, whose trainer rank died."""
    parts = {one.part for one in tree.ranges}
    loads = Counter({name: sum(one.nbytes for one in plan.trees if one.root == name) for name in plan.sources})
    able = [source for source in plan.sources.values() if source.site == tree.site and source.holds(parts)]
    hosts = _hosts(plan, tree.site)
    leaders = [peers[0] for peers in hosts.values()]
    root = min(able, key=lambda one: loads[one.name]) if able else min(leaders, key=lambda one: rank(one.name))
    shape = _best_shape(plan, hosts, [root], tree.nbytes)
    return replace(tree, root=root.name, parents=_grow(plan, root, hosts, shape, 0.0), fanout=shape.fanout)


def _fed_again(plan: Plan, tree: Tree, heirs: Mapping[str, str], progress: Progress) -> Tree:
    """``tree`` with feeds that live. plan: what lives, with the trees before this one.  heirs: of roots that died."""
    if tree.root in plan.sources:
        return tree
    feeds: dict[str, Ranges] = {}
    for name, ranges in tree.feeds:
        name = heirs.get(name, name)
        if name in plan.sources or name in plan.receivers:
            feeds[name] = ranges
    fed = [one for ranges in feeds.values() for one in ranges]
    rest = missing(missing(tree.ranges, fed), progress.get(tree.root, ()))
    for name, ranges in _senders(plan, tree.site, rest, progress).items():
        feeds[name] = (*feeds.get(name, ()), *ranges)
    return replace(tree, feeds=tuple(feeds.items()))


# --- ranges -----------------------------------------------------------------------------------------------------------


def num_bytes(ranges: Iterable[Range]) -> int:
    return sum(one.end - one.start for one in ranges)


def split(ranges: Ranges, shares: int, piece_bytes: int) -> list[Ranges]:
    """``ranges`` one after another in ``shares`` of nearly as many pieces, some perhaps empty."""
    pieces = sum(-(-(end - start) // piece_bytes) for _, start, end in ranges)
    cuts = [share * pieces // shares for share in range(shares + 1)] if shares else []
    return [tuple(_window(ranges, first, last, piece_bytes)) for first, last in pairwise(cuts)]


def _window(ranges: Ranges, first: int, last: int, piece_bytes: int) -> Iterator[Range]:
    """Pieces [first, last) of ``ranges``."""
    for part, start, end in ranges:
        pieces = -(-(end - start) // piece_bytes)
        if max(0, first) < min(last, pieces):
            yield Range(part, start + max(0, first) * piece_bytes, min(end, start + last * piece_bytes))
        first, last = first - pieces, last - pieces


def missing(ranges: Iterable[Range], held: Iterable[Range]) -> Ranges:
    """What of ``ranges`` is in none of ``held``."""
    left = list(ranges)
    for part, start, end in held:
        left = [
            rest
            for one in left
            for rest in (
                (Range(one.part, one.start, min(one.end, start)), Range(one.part, max(one.start, end), one.end))
                if one.part == part
                else (one,)
            )
            if rest.start < rest.end
        ]
    return tuple(left)
