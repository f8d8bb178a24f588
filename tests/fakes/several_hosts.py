"""Several hosts on one network: each a network, a host name and a clock of its own, on a bridge, with links as slow as
wanted.

Needs root, iproute2 and unshare; a test that asks for them is skipped, and says so, elsewhere.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.fakes.second_host import UP_S, begin_there, ip


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """address: of its one network card.  run: the beginning of a command line that runs there."""

    name: str
    address: str
    run: tuple[str, ...]

    def shape(self, mbit_s: float) -> None:
        """All that it sends."""
        rate = ("rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "50ms")
        subprocess.run(
            ["tc", "-n", self.name, "qdisc", "replace", "dev", "card", "root", "tbf", *rate],
            check=True,
            capture_output=True,
            timeout=10,
        )

    @property
    def sent_bytes(self) -> int:
        read = ["ip", "netns", "exec", self.name, "cat", "/sys/class/net/card/statistics/tx_bytes"]
        return int(subprocess.run(read, check=True, capture_output=True, timeout=10).stdout)

    def set_link(self, state: str) -> None:
        """state: "up" or "down"."""
        ip("-n", self.name, "link", "set", "card", state)


@contextmanager
def several_hosts(number: int) -> Iterator[list[Host]]:
    """Names and addresses are drawn: other tests of this machine may have hosts too."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("making hosts needs root, iproute2 and unshare")
    mark, network = secrets.token_hex(3), f"10.214.{secrets.randbelow(256)}"
    bridge, hosts = f"sb{mark}", list[Host]()
    with ExitStack() as stack:
        try:
            ip("netns", "add", bridge)  # the switch has a network of its own: nothing of this machine filters it
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        stack.callback(ip, "netns", "del", bridge)
        try:
            ip("-n", bridge, "link", "add", "switch", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridges here: {error.stderr.decode().strip()}")
        ip("-n", bridge, "link", "set", "switch", "up")
        for index in range(number):
            name, address = f"sh{mark}-{index}", f"{network}.{index + 1}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", bridge, "link", "add", f"p{index}", "type", "veth", "peer", "name", "card", "netns", name)
            ip("-n", bridge, "link", "set", f"p{index}", "master", "switch")
            ip("-n", bridge, "link", "set", f"p{index}", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "card")
            ip("-n", name, "link", "set", "card", "up")
            ip("-n", name, "link", "set", "lo", "up")
            begin = begin_there(name, f"host-{index}", up_s=index * UP_S)
            hosts.append(Host(name=name, address=address, run=begin))
        yield hosts
