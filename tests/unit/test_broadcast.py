"""Broadcast trees on clusters that one can draw; any cluster is tests/property/test_broadcast_plans.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.core.broadcast import (
    BytesLostError,
    Links,
    Peer,
    Plan,
    Pull,
    Range,
    Source,
    arrivals_s,
    attach,
    broadcast_time,
    plan_broadcast,
    reattach,
)

MIB = 1 << 20
LAN = Links(site_bytes_per_s=100 * MIB, slow_bytes_per_s=MIB, card_bytes_per_s=100 * MIB, slow_round_trip_s=0.05)
WHOLE = Range(0, 0, 64 * MIB)


def ranks(number: int, site: str = "home") -> list[Source]:
    return [Source(name=f"rank{index}", host=f"trainer{index}", site=site) for index in range(number)]


def workers(number: int, *, site: str = "home", a_host: int = 1, first: int = 0) -> list[Peer]:
    return [
        Peer(name=f"{site}-{index}", host=f"{site}{index // a_host}", site=site)
        for index in range(first, first + number)
    ]


def plan_of(sources: list[Source], receivers: list[Peer], links: Links = LAN, *, pieces: int = 64) -> Plan:
    return plan_broadcast([WHOLE.end], sources, receivers, links, piece_bytes=WHOLE.end // pieces)


def test_every_rank_of_a_site_roots_a_tree_with_an_equal_share():
    """StreamRL sec. 6: trees rooted at different data-parallel ranks, all of them busy."""
    plan = plan_of(ranks(4), workers(8))
    assert {tree.root for tree in plan.trees} == {"rank0", "rank1", "rank2", "rank3"}
    sent = {name: sum(tree.nbytes for tree in plan.trees if tree.root == name) for name in plan.sources}
    assert set(sent.values()) == {16 * MIB}


def test_trees_have_their_inner_nodes_in_turn():
    """What a worker's uplink carries is no more than the version, though it feeds several in a tree."""
    plan = plan_of(ranks(8), workers(32))
    fed = {name: 0 for name in plan.receivers}
    for tree in plan.trees:
        for above in tree.parents.values():
            if above in fed:
                fed[above] += tree.nbytes
    assert plan.trees[0].fanout > 1
    assert max(fed.values()) <= WHOLE.end


def test_sixteen_take_little_longer_than_one():
    one, sixteen = (broadcast_time(plan_of(ranks(1), workers(number))) for number in (1, 16))
    assert sixteen < 1.25 * one


def test_a_few_bytes_over_slow_round_trips_go_to_all_at_once():
    links = Links(site_bytes_per_s=1e9, card_bytes_per_s=1e9, site_round_trip_s=1.0)
    plan = plan_broadcast([1000], ranks(1), workers(16), links, piece_bytes=1000)
    assert broadcast_time(plan) == pytest.approx(1.0, abs=0.01)
    assert set(plan.trees[0].parents.values()) == {"rank0"}


def test_a_tree_behind_a_slow_link_asks_little_of_cards_that_may_be_slower_than_supposed():
    links = Links(site_bytes_per_s=1e9, card_bytes_per_s=1e9, slow_bytes_per_s=1e8)
    plan = plan_broadcast([64 * MIB], ranks(1), workers(16, site="away"), links, piece_bytes=MIB)
    feeding = Counter(plan.trees[0].parents.values())
    assert max(feeding.values()) <= 2
    at_supposed, at_slow = (
        broadcast_time(replace(plan, links=replace(links, site_bytes_per_s=rate, card_bytes_per_s=rate)))
        for rate in (1e9, 1e8)
    )
    assert at_slow < 2.5 * at_supposed


def test_rank_0_sends_once_into_a_site_whose_gateway_broadcasts():
    plan = plan_of(ranks(4), [*workers(4), *workers(4, site="away")])
    (away,) = [tree for tree in plan.trees if tree.site == "away"]
    assert away.feeds == (("rank0", (WHOLE,)),)
    assert plan.pulls("away-0") == (Pull("rank0", (WHOLE,)),)
    assert away.root == "away-0"
    assert {*away.parents.values()} <= {"away-0", "away-1", "away-2", "away-3"}
    assert broadcast_time(plan) == pytest.approx(64, rel=0.1), "what the slow link takes"


def test_the_gateway_is_the_nearest():
    links = Links(
        site_bytes_per_s=1e9, slow_bytes_per_s=1e6, slow_round_trip_s=0.2, round_trips_s={("away2", "trainer0"): 0.1}
    )
    plan = plan_of(ranks(1), workers(4, site="away"), links)
    assert plan.trees[0].root == "away-2"


def test_a_site_gets_it_from_where_the_link_is_widest():
    links = Links(site_bytes_per_s=1e9, slow_bytes_per_s=1e6, between={("near", "far"): 1e8})
    plan = plan_of(ranks(1), [*workers(2, site="far"), *workers(2, site="near")], links)
    feeds = {tree.site: tree.feeds[0][0] for tree in plan.trees}
    assert feeds == {"far": "rank0", "near": "far-0"}
    near, far = (arrivals_s(plan)[name] for name in ("near-0", "far-0"))
    assert far < near < 1.1 * far


def test_ranks_with_a_part_each_send_their_own_and_one_gateway_gets_all():
    sources = [
        Source(name=f"rank{part}", host=f"trainer{part}", site="home", parts=frozenset([part])) for part in range(3)
    ]
    plan = plan_broadcast([30, 40, 50], sources, [*workers(2), *workers(2, site="away")], LAN, piece_bytes=10)
    assert {pull.source for pull in plan.pulls("away-0")} == {"rank0", "rank1", "rank2"}
    assert {pull.source for pull in plan.pulls("away-1")} == {"away-0"}
    assert {tree.root for tree in plan.trees if tree.site == "home"} == {"rank0", "rank1", "rank2"}


def test_workers_of_a_host_share_one_copy_and_those_of_a_rank_its_own():
    beside = Peer(name="beside", host="trainer0", site="home")
    plan = plan_of(ranks(1), [*workers(4, a_host=4), beside])
    assert [{pull.source for pull in plan.pulls(f"home-{index}")} for index in range(4)] == [
        {"rank0"},
        *[{"home-0"}] * 3,
    ]
    assert {pull.source for pull in plan.pulls("beside")} == {"rank0"}


def test_a_slow_card_feeds_nobody():
    links = Links(site_bytes_per_s=100 * MIB, card_bytes_per_s=100 * MIB, cards={"home0": MIB})
    plan = plan_of(ranks(1), workers(6), links)
    assert all("home-0" not in tree.parents.values() for tree in plan.trees)
    assert arrivals_s(plan)["home-5"] < 2


def chain() -> Plan:
    """Rank 0 feeds home-0, that home-1, and so on: no trip takes time, and pieces are small."""
    plan = plan_of(ranks(1), workers(4), Links(site_bytes_per_s=1e9, card_bytes_per_s=1e9), pieces=4096)
    parents = {f"home-{index}": f"home-{index - 1}" if index else "rank0" for index in range(4)}
    assert [tree.parents for tree in plan.trees] == [parents]
    return plan


def test_behind_a_dead_worker_one_turns_to_another_and_goes_on_where_it_was():
    had = [Range(0, 0, 1000)]
    plan = reattach(chain(), ["home-1"], {"home-2": had, "home-3": had[:0]})
    assert plan.trees[0].parents == {"home-0": "rank0", "home-2": "home-0", "home-3": "home-2"}
    assert plan.pulls("home-2", had) == (Pull("home-0", (Range(0, 1000, WHOLE.end),)),)


def test_a_neighbour_on_its_host_takes_the_place_of_a_dead_worker():
    plan = plan_of(ranks(1), workers(8, a_host=2), Links(site_bytes_per_s=1e9, card_bytes_per_s=1e9), pieces=4096)
    plan = reattach(plan, ["home-2"], {})
    assert plan.trees[0].parents == {
        "home-0": "rank0",
        "home-1": "home-0",
        "home-3": "home-0",
        "home-4": "home-3",
        "home-5": "home-4",
        "home-6": "home-4",
        "home-7": "home-6",
    }


def test_the_worker_that_has_most_follows_a_dead_gateway():
    plan = plan_of(ranks(1), workers(5, site="away"), Links(site_bytes_per_s=1e9, slow_bytes_per_s=1e6))
    second = next(name for name, above in plan.trees[0].parents.items() if above == "away-0")
    plan = reattach(plan, ["away-0"], {second: [Range(0, 0, 500)]})
    assert plan.trees[0].root == second
    assert plan.pulls(second, [Range(0, 0, 500)]) == (Pull("rank0", (Range(0, 500, WHOLE.end),)),)


def test_the_trees_of_a_dead_rank_go_to_another_that_has_its_bytes():
    plan = reattach(plan_of(ranks(2), [*workers(4), *workers(2, site="away")]), ["rank0"], {})
    assert {tree.root for tree in plan.trees if tree.site == "home"} == {"rank1"}
    assert plan.pulls("away-0") == (Pull("rank1", (WHOLE,)),)


def test_a_worker_that_has_everything_goes_on_for_the_last_rank():
    plan = reattach(chain(), ["rank0"], {"home-2": [WHOLE]})
    assert plan.pulls("home-2", [WHOLE]) == ()
    assert {plan.pulls(f"home-{index}")[0].source for index in (0, 1, 3)} == {"home-2", "home-0", "home-1"}


def test_bytes_that_nobody_has_any_more_are_said_to_be_lost():
    with pytest.raises(BytesLostError, match="bytes 500 to 67108864 of part 0"):
        reattach(chain(), ["rank0"], {"home-0": [Range(0, 0, 500)]})


def test_who_joins_maps_the_copy_of_its_host_or_hangs_highest_up():
    plan = attach(chain(), Peer(name="mate", host="home1", site="home"))
    plan = attach(plan, Peer(name="new", host="new", site="home"))
    plan = attach(plan, Peer(name="remote", host="remote", site="away"))
    assert plan.trees[0].parents["mate"] == "home-1"
    assert plan.trees[0].parents["new"] == "home-3"
    assert plan.pulls("remote") == (Pull("rank0", (WHOLE,)),)


@pytest.mark.parametrize(
    ("parts", "names", "problem"),
    [
        ([0], ["a"], "can have less than 1"),
        ([5], ["a", "a"], "one name: a, a, rank0"),
        ([5, 5], ["a"], r"no source has parts \[1\]"),
    ],
)
def test_what_cannot_be_planned_is_refused(parts: list[int], names: list[str], problem: str):
    sources = [Source(name="rank0", host="h", parts=frozenset([0]))]
    with pytest.raises(ValueError, match=problem):
        plan_broadcast(parts, sources, [Peer(name=name, host=name) for name in names], LAN, piece_bytes=8)


def test_a_name_has_one_place():
    with pytest.raises(ValueError, match="home-1 has its place already"):
        attach(chain(), Peer(name="home-1", host="elsewhere"))
