"""A trainer behind a slow link, and workers of another site: real processes in networks of their own.

The slow link is one token bucket; what it carried is what the trainer's card says it sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.several_hosts import several_hosts
from tests.fakes.weight_site import Site

SLOW_MBIT_S, MEGABYTES, NUM_WORKERS = 40.0, 8.0, 3
ONCE_S = MEGABYTES * 8 / SLOW_MBIT_S


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with several_hosts(1 + NUM_WORKERS) as hosts:
        site = Site(hosts, tmp_path, MEGABYTES)
        try:
            site.begin_to_pass_on()
            hosts[0].shape(SLOW_MBIT_S)
            yield site
        finally:
            site.close()


def test_the_slow_link_carries_a_version_once(site: Site) -> None:
    before = site.trainer.host.sent_bytes
    site.begin(1)
    answers = [worker.answer() for worker in site.workers]
    copies = (site.trainer.host.sent_bytes - before) / (MEGABYTES * 1e6)
    seconds = max(answer["seconds"] for answer in answers)
    print(f"{copies:.3f} copies over the slow link, {seconds:.2f} s where one copy takes {ONCE_S:.2f} s")
    assert len({answer["digest"] for answer in answers}) == 1
    assert 1 <= copies < 1.3  # headers of packets, and what was sent again


def test_a_link_that_is_cut_in_mid_transfer_costs_no_byte_that_came(site: Site) -> None:
    before = site.trainer.host.sent_bytes
    site.begin(1)
    while site.trainer.host.sent_bytes - before < MEGABYTES * 1e6 / 4:
        time.sleep(0.05)
    site.trainer.host.set_link("down")
    time.sleep(3)
    site.trainer.host.set_link("up")
    answers = [worker.answer() for worker in site.workers]
    copies = (site.trainer.host.sent_bytes - before) / (MEGABYTES * 1e6)
    print(f"{copies:.3f} copies over the slow link")
    assert all("digest" in answer for answer in answers), answers
    assert len({answer["digest"] for answer in answers}) == 1
    assert copies < 1.6


def test_the_gateway_of_a_site_dies_and_the_rest_comes_once_more(site: Site) -> None:
    before = site.trainer.host.sent_bytes
    site.begin(1)
    while site.trainer.host.sent_bytes - before < MEGABYTES * 1e6 / 2:
        time.sleep(0.05)
    gateway = site.routes.index(())
    site.workers[gateway].process.kill()
    answers = [worker.answer() for n, worker in enumerate(site.workers) if n != gateway]
    copies = (site.trainer.host.sent_bytes - before) / (MEGABYTES * 1e6)
    print(f"{copies:.3f} copies over the slow link")
    assert all("digest" in answer for answer in answers), answers
    assert len({answer["digest"] for answer in answers}) == 1
    assert copies < 1.8  # the half that had come stayed
