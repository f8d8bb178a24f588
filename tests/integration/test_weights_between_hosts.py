"""A trainer behind a slow link, and workers of another site: real processes in networks of their own.

The slow link is one token bucket; what it carried is what the trainer's card says it sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.several_hosts import several_hosts
from tests.fakes.weight_site import Site
from transport.contracts.settings import TensorSettings

SLOW_MBIT_S, MEGABYTES, NUM_WORKERS = 40.0, 8.0, 3
ONCE_S = MEGABYTES * 8 / SLOW_MBIT_S


@contextmanager
def site_of(directory: Path, wait_s: float = 10.0) -> Iterator[Site]:
    with several_hosts(1 + NUM_WORKERS) as hosts:
        hosts[0].shape(SLOW_MBIT_S)
        site = Site(hosts, directory, MEGABYTES, wait_s=wait_s)
        try:
            yield site
        finally:
            site.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_of(tmp_path) as site:
        yield site


def copies_since(site: Site, before: int) -> float:
    """Versions that the slow link carried."""
    copies = (site.trainer.host.sent_bytes - before) / (MEGABYTES * 1e6)
    print(f"{copies:.3f} copies over the slow link")
    return copies


def until_sent(site: Site, before: int, share: float) -> None:
    while site.trainer.host.sent_bytes - before < MEGABYTES * 1e6 * share:
        time.sleep(0.05)


def assert_alike(answers: Sequence[Mapping[str, Any]]) -> None:
    assert all("digest" in answer for answer in answers), answers
    assert len({answer["digest"] for answer in answers}) == 1


def test_the_slow_link_carries_each_version_once_the_first_too(site: Site) -> None:
    for version in (0, 1):
        before = site.trainer.host.sent_bytes
        site.begin(version)
        answers = [worker.answer() for worker in site.workers]
        seconds = max(answer["seconds"] for answer in answers)
        print(f"version {version}: {seconds:.2f} s where one copy takes {ONCE_S:.2f} s")
        assert_alike(answers)
        assert 1 <= copies_since(site, before) < 1.3  # headers of packets, and what was sent again


def test_a_worker_that_joins_in_mid_broadcast_is_given_the_version_at_its_site(site: Site) -> None:
    before = site.trainer.host.sent_bytes
    site.begin(0, NUM_WORKERS - 1)
    until_sent(site, before, 1 / 2)
    site.join(NUM_WORKERS)
    assert site.routes[-1], "it does not ask the trainer first"
    assert_alike([worker.answer() for worker in site.workers])
    assert 1 <= copies_since(site, before) < 1.3


def test_a_link_that_is_cut_in_mid_transfer_costs_no_byte_that_came(site: Site) -> None:
    before = site.trainer.host.sent_bytes
    site.begin(1)
    until_sent(site, before, 1 / 4)
    site.trainer.host.set_link("down")
    time.sleep(3)
    site.trainer.host.set_link("up")
    assert_alike([worker.answer() for worker in site.workers])
    assert copies_since(site, before) < 1.6


@pytest.mark.long  # the silence that a worker bears in a run, tensors.wait_s, and the cut: each half a minute
def test_a_site_that_is_cut_off_for_30_s_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with site_of(tmp_path, TensorSettings().wait_s) as site:
        before = site.trainer.host.sent_bytes
        site.begin(0)
        until_sent(site, before, 1 / 2)
        site.trainer.host.set_link("down")
        time.sleep(30)
        site.trainer.host.set_link("up")
        answers = [worker.answer() for worker in site.workers]
        print([answer.get("seconds", answer) for answer in answers])
        assert_alike(answers)
        # A relay says that it waits itself, so nobody but the gateway asks the trainer for the other half.
        assert copies_since(site, before) < 1.3


def test_the_gateway_of_a_site_dies_and_the_rest_comes_once_more(site: Site) -> None:
    before = site.trainer.host.sent_bytes
    site.begin(1)
    until_sent(site, before, 1 / 2)
    gateway = site.routes.index(())
    site.workers[gateway].process.kill()
    assert_alike([worker.answer() for n, worker in enumerate(site.workers) if n != gateway])
    assert copies_since(site, before) < 1.8  # the half that had come stayed


def test_two_ranks_of_a_trainer_each_send_what_they_hold_once_or_twice_and_workers_the_rest(tmp_path: Path) -> None:
    """Rows and columns, at once: a worker passes on pieces of a tensor before the others of it came."""
    ranks, workers = 2, 4
    with several_hosts(ranks + workers) as hosts:
        for host in hosts:
            host.shape(SLOW_MBIT_S)
        site = Site(hosts, tmp_path, MEGABYTES, site="", ranks=ranks)
        try:
            for version in (0, 1):
                before = [rank.host.sent_bytes for rank in site.ranks]
                site.begin(version)
                answers = [worker.answer() for worker in site.workers]
                sent = [rank.host.sent_bytes - was for rank, was in zip(site.ranks, before, strict=True)]
                copies = [nbytes / (MEGABYTES * 1e6) for nbytes in sent]
                seconds = max(answer["seconds"] for answer in answers)
                print(f"version {version}: {seconds:.2f} s where one copy takes {ONCE_S:.2f} s; sent {copies}")
                assert_alike(answers)
                assert site.routed_by_part == workers
                assert all(0.5 <= share < 1.3 for share in copies), "each sends its half to one worker, or two"
        finally:
            site.close()
