"""A second host: a network, a host name and a clock of its own, joined to ours by a virtual cable.

Needs root, iproute2 and unshare; a test that asks for one is skipped, and says so, elsewhere.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

UP_S = 1_000_000
"""Far more than any deadline: time that is compared between hosts shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondHost:
    """here, there: addresses of the two ends of the cable.  run: the beginning of a command line that runs there."""

    here: str
    there: str
    run: tuple[str, ...]


@contextmanager
def second_host() -> Iterator[SecondHost]:
    """Names and addresses are drawn: other tests of this machine may have a second host too."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("making a second host needs root, iproute2 and unshare")
    mark = secrets.token_hex(4)
    name, cable = f"streamrl-{mark}", (f"sr{mark}a", f"sr{mark}b")
    network = f"10.213.{secrets.randbelow(256)}"
    first = 4 * secrets.randbelow(64)
    here, there = f"{network}.{first + 1}", f"{network}.{first + 2}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1], "netns", name)
        ip("addr", "add", f"{here}/30", "dev", cable[0])
        ip("link", "set", cable[0], "up")
        ip("-n", name, "addr", "add", f"{there}/30", "dev", cable[1])
        ip("-n", name, "link", "set", cable[1], "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield SecondHost(here=here, there=there, run=begin_there(name, "other", up_s=UP_S))
    finally:
        # The namespace takes its end of the cable along, but later: the next test's would find it in the way.
        subprocess.run(["ip", "link", "del", cable[0]], check=False, capture_output=True, timeout=10)
        ip("netns", "del", name)


def begin_there(namespace: str, hostname: str, *, up_s: int) -> tuple[str, ...]:
    """Beginning of a command line that runs on a host whose network ``namespace`` is.

    up_s: how long it has been up already when this machine was switched on: its monotonic clock is so far ahead.
    """
    clock = ("--time", "--monotonic", str(up_s), "--boottime", str(up_s))
    call = f'hostname {hostname} && exec "$@"'
    return ("ip", "netns", "exec", namespace, "unshare", "--uts", *clock, "sh", "-c", call, "sh")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)
