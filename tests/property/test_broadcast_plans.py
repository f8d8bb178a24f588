"""Broadcast plans for any cluster, before and after deaths: every byte comes to everyone once, by short ways."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.core.broadcast import (
    BytesLostError,
    Links,
    Peer,
    Plan,
    Progress,
    Range,
    Source,
    Tree,
    arrivals_s,
    attach,
    broadcast_time,
    missing,
    num_bytes,
    plan_broadcast,
    reattach,
    split,
)

RATES = st.sampled_from([1e6, 2e6, 5e7, math.inf])


@st.composite
def links_of(draw: st.DrawFn) -> Links:
    return Links(
        site_bytes_per_s=draw(RATES),
        slow_bytes_per_s=draw(RATES),
        card_bytes_per_s=draw(RATES),
        site_round_trip_s=draw(st.sampled_from([0.0, 0.001, 0.5])),
        slow_round_trip_s=draw(st.sampled_from([0.0, 0.1])),
        cards={f"h{number}.a": draw(RATES) for number in range(3)},
        between={("a", "b"): draw(RATES), ("c", "b"): draw(RATES)},
    )


@st.composite
def peers(draw: st.DrawFn, prefix: str, sites: str, most: int) -> list[Peer]:
    places = st.lists(st.tuples(st.sampled_from(sites), st.integers(0, 8)), min_size=1, max_size=most)
    return [
        Peer(name=f"{prefix}{number}", host=f"h{host}.{site}", site=site)
        for number, (site, host) in enumerate(draw(places))
    ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Ranks that hold all or some, in one site or two, and workers in up to three."""
    parts = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    holds = st.none() | st.frozensets(st.integers(0, len(parts) - 1))
    ranks = draw(peers("rank", draw(st.sampled_from(["a", "ab"])), 4))
    sources = [Source(name=one.name, host=one.host, site=one.site, parts=draw(holds)) for one in ranks]
    assume(all(any(source.holds([part]) for source in sources) for part in range(len(parts))))
    receivers = draw(peers("worker", "abc", 24))
    return plan_broadcast(parts, sources, receivers, draw(links_of()), piece_bytes=draw(st.sampled_from([7, 64, 1000])))


@st.composite
def progress_of(draw: st.DrawFn, plan: Plan, before: Progress) -> Progress:
    """What workers may have by now, no less than ``before``: everything, the first bytes of each part, or nothing."""
    found: dict[str, Sequence[Range]] = {}
    for name in plan.receivers:
        share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
        held = [Range(part, 0, int(share * end)) for part, _, end in plan.everything if int(share * end)]
        found[name] = max(held, before.get(name, ()), key=num_bytes)
    return found


def pulls(plan: Plan, progress: Progress) -> Iterator[tuple[str, str, Range]]:
    """(worker, from whom, what)"""
    for worker in plan.receivers:
        for source, ranges in plan.pulls(worker, progress.get(worker, ())):
            yield from ((worker, source, one) for one in ranges)


def bytes_of(ranges: Sequence[Range]) -> set[tuple[int, int]]:
    return {(part, at) for part, start, end in ranges for at in range(start, end)}


def check(plan: Plan, progress: Progress) -> None:
    """Everyone gets what it lacks, once; so does each host and each site; it all comes from who has it."""
    got: dict[str, list[Range]] = {name: [] for name in plan.receivers}
    into_host, into_site = Counter[tuple[str, int, int]](), Counter[tuple[str, int, int]]()
    above: dict[tuple[str, int, int], str] = {}
    for worker, source, one in pulls(plan, progress):
        got[worker].append(one)
        ours, theirs = plan.receivers[worker], plan.peer(source)
        for place in bytes_of([one]):
            assert (worker, *place) not in above
            above[worker, *place] = source
            into_host[ours.host, *place] += ours.host != theirs.host
            into_site[ours.site, *place] += ours.site != theirs.site
    for worker, ranges in got.items():
        assert bytes_of(ranges) == bytes_of(missing(plan.everything, progress.get(worker, ())))
    assert max(into_host.values(), default=0) <= 1
    assert max(into_site.values(), default=0) <= 1
    for (worker, *place), source in above.items():
        seen = {worker}
        while (source, *place) in above:
            assert source not in seen, f"{source} waits for itself"
            seen.add(source)
            source = above[source, *place]
        if source in plan.sources:
            assert plan.sources[source].holds(place[:1])
        else:
            assert tuple(place) in bytes_of(progress[source])


def hops(plan: Plan, tree: Tree, name: str) -> int:
    """Links between hosts from the tree's root."""
    count = 0
    while name != tree.root:
        above = tree.parents[name]
        count += plan.peer(name).host != plan.peer(above).host
        name = above
    return count


def feeding(plan: Plan, tree: Tree) -> Mapping[str, int]:
    """Worker -> the hosts that it feeds."""
    edges = [(above, name) for name, above in tree.parents.items()]
    return Counter(above for above, name in edges if plan.peer(above).host != plan.peer(name).host)


def least_depth(hosts: int, fanout: int) -> int:
    """Of a root that feeds one host, behind which each feeds ``fanout``."""
    depth, room = 0, 0
    while room < hosts:
        depth, room = depth + 1, room + fanout**depth
    return depth


def check_shape(plan: Plan, tree: Tree) -> None:
    hosts = {plan.peer(name).host for name in tree.parents} - {plan.peer(tree.root).host}
    depth = max((hops(plan, tree, name) for name in tree.parents), default=0)
    assert depth <= least_depth(len(hosts), tree.fanout)
    assert all(count <= tree.fanout for name, count in feeding(plan, tree).items() if name != tree.root)


@given(plan=plans())
def test_every_byte_comes_once_to_everyone_and_into_every_host_and_site(plan: Plan):
    check(plan, {})
    for tree in plan.trees:
        check_shape(plan, tree)
    for site in {peer.site for peer in plan.receivers.values()}:
        entered = {
            worker
            for worker, source, _ in pulls(plan, {})
            if plan.receivers[worker].site == site and plan.peer(source).site != site
        }
        assert len(entered) <= 1, "a site has one gateway"


@given(plan=plans())
def test_a_plan_is_the_same_for_the_same_input(plan: Plan):
    again = plan_broadcast(
        plan.parts,
        list(plan.sources.values()),
        list(plan.receivers.values()),
        plan.links,
        piece_bytes=plan.piece_bytes,
    )
    assert again == plan


@given(plan=plans(), data=st.data())
def test_after_deaths_everyone_gets_what_it_lacks_and_no_way_is_longer(plan: Plan, data: st.DataObject):
    progress: Progress = {}
    for _ in range(data.draw(st.integers(1, 3))):
        names = [*plan.receivers, *plan.sources]
        progress = data.draw(progress_of(plan, progress))
        dead = data.draw(st.sets(st.sampled_from(names), max_size=3)) if names else set[str]()
        before = plan
        try:
            plan = reattach(plan, sorted(dead), progress)
        except BytesLostError:
            alive = [source for name, source in plan.sources.items() if name not in dead]
            assert any(not any(one.holds([part]) for one in alive) for part in range(len(plan.parts)))
            return
        assert not dead & {*plan.receivers, *plan.sources}
        check(plan, progress)
        kept = {(tree.site, tree.ranges): tree for tree in before.trees if tree.root in before.sources}
        for tree in plan.trees:
            former = kept.get((tree.site, tree.ranges))
            if former is not None and former.root == tree.root:
                assert all(hops(plan, tree, name) <= hops(before, former, name) for name in tree.parents)
                fed, was = feeding(plan, tree), feeding(before, former)
                assert all(count <= max(tree.fanout, was.get(name, 0)) for name, count in fed.items())
        if not dead:
            assert plan == before


@given(plan=plans(), newcomers=peers("new", "abcd", 6))
def test_newcomers_find_their_places(plan: Plan, newcomers: list[Peer]):
    for newcomer in newcomers:
        plan = attach(plan, newcomer)
    check(plan, {})
    for tree in plan.trees:
        assert all(count <= tree.fanout for name, count in feeding(plan, tree).items() if name != tree.root)


@given(data=st.data(), plan=plans(), newcomers=peers("new", "abc", 4))
def test_one_dies_and_others_come(data: st.DataObject, plan: Plan, newcomers: list[Peer]):
    dead = data.draw(st.sampled_from(sorted(plan.receivers)))
    plan = reattach(plan, [dead], {})
    for newcomer in newcomers:
        plan = attach(plan, newcomer)
    check(plan, {})


@given(
    hosts=st.integers(1, 40),
    pieces=st.integers(1, 30),
    card=st.sampled_from([1e3, 1e4]),
    site=st.sampled_from([1e3, math.inf]),
    trip_s=st.sampled_from([0.0, 0.05, 3.0]),
)
def test_the_predicted_time_is_that_of_pieces_moved_one_by_one(hosts, pieces, card, site, trip_s):
    links = Links(site_bytes_per_s=site, card_bytes_per_s=card, site_round_trip_s=trip_s)
    receivers = [Peer(name=f"w{number}", host=f"h{number}") for number in range(hosts)]
    plan = plan_broadcast([100 * pieces], [Source(name="t", host="t")], receivers, links, piece_bytes=100)
    assume(len(plan.trees) == 1)
    (tree,) = plan.trees
    fed = feeding(plan, tree)

    def arrivals(name: str) -> list[float]:
        """When each piece is there."""
        if name == "t":
            return [0.0] * pieces
        above = tree.parents[name]
        piece_s = 100 / min(site, card / fed[above], card)
        found: list[float] = []
        for sent in arrivals(above):
            found.append(max([sent + trip_s, *found[-1:]]) + piece_s)
        return found

    predicted = arrivals_s(plan)
    for name in plan.receivers:
        assert math.isclose(predicted[name], arrivals(name)[-1])


@given(
    receivers=st.integers(2, 200),
    pieces=st.integers(16, 500),
    ranks=st.integers(1, 8),
    trip_s=st.sampled_from([0.0, 1e-3]),
)
def test_equal_links_carry_a_version_to_many_in_little_more_than_to_one(receivers, pieces, ranks, trip_s):
    """No worse than a chain, the widest tree or a star; 16 in 2.5 times what one takes."""
    links = Links(site_bytes_per_s=25e6, card_bytes_per_s=25e6, site_round_trip_s=trip_s)
    sources = [Source(name=f"t{number}", host=f"t{number}") for number in range(ranks)]

    def seconds(count: int) -> float:
        workers = [Peer(name=f"w{number}", host=f"w{number}") for number in range(count)]
        return broadcast_time(plan_broadcast([pieces << 20], sources, workers, links, piece_bytes=1 << 20))

    piece_s = (1 << 20) / 25e6
    if receivers <= 16:
        assert seconds(receivers) <= 2.5 * seconds(1)
    chain_s = pieces * piece_s + receivers * (ranks * piece_s + trip_s)
    star_s = trip_s + receivers * pieces * piece_s
    assert seconds(receivers) <= 1.001 * min(chain_s, star_s)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 50)), max_size=4),
    shares=st.integers(1, 5),
    piece_bytes=st.integers(1, 20),
)
def test_shares_are_the_ranges_again_in_nearly_equal_pieces(ranges, shares, piece_bytes):
    whole = tuple(Range(part, start, start + size) for part, start, size in ranges)
    found = split(whole, shares, piece_bytes)
    assert len(found) == shares
    assert [place for share in found for one in share for place in sorted(bytes_of([one]))] == [
        place for one in whole for place in sorted(bytes_of([one]))
    ]
    most = num_bytes(whole) // shares + (len(whole) + 1) * piece_bytes
    assert max(map(num_bytes, found)) <= most


@given(
    ranges=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(1, 9)), max_size=3),
    held=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 9)), max_size=4),
)
def test_what_is_missing_is_what_was_not_held(ranges, held):
    wanted = [Range(part, start, start + size) for part, start, size in ranges]
    have = [Range(part, start, start + size) for part, start, size in held]
    assert bytes_of(missing(wanted, have)) == bytes_of(wanted) - bytes_of(have)
