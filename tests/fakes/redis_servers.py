"""Real servers for tests: started bare, on a free port, without persistence, killed at the end."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from transport.broker.embedded import packaged_binary
from transport.process.programs import ending_with_this_process

READY_S = 60.0
SLOTS = 16_384
"""Of every cluster."""
SLOTS_EACH = SLOTS // 3
PORTS = range(20_000, 32_000)
"""Below the kernel's ephemeral ports (32768 up): a client that keeps connecting to a closed ephemeral port of its own
host can connect to itself, and then the restarted server cannot have its port back."""


class ServerProcess:
    """A Redis or Valkey server of its own."""

    def __init__(
        self, binary: Path, directory: Path, *options: str, port: int | None = None, first: tuple[str, ...] = ()
    ) -> None:
        """first: options that have to be the first."""
        self.port = port or free_port()
        self.bus_port = 0
        """Of a node of a cluster."""
        self.url = f"redis://127.0.0.1:{self.port}"
        directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen(
            [str(binary), *first, *arguments, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=ending_with_this_process(),  # a session that is killed leaves none
        )

    def wait_listening(self, port: int | None = None) -> None:
        """Return once it accepts connections. Raises RuntimeError when it ends or takes too long."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port or self.port)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"no server on port {port or self.port}: exit status {self.process.poll()}")

    def limit_memory(self, nbytes: int) -> None:
        """Take writes up to so many bytes; 0: without a limit; 1: none at all."""
        with redis.Redis(port=self.port) as client:
            client.config_set("maxmemory", nbytes)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Servers:
    """Any number of them, each with a directory of its own; the test kills them at its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._binary = find_binary("valkey") or pytest.skip("no valkey-server on this machine")
        self.started: list[ServerProcess] = []

    def start(self, *options: str, sentinel: str = "") -> ServerProcess:
        """sentinel: lines of its configuration file, into which it writes, too; "": it is none."""
        directory, first = self._directory / str(len(self.started)), tuple[str, ...]()
        if sentinel:
            directory.mkdir(parents=True)
            (directory / "sentinel.conf").write_text(sentinel)
            first = (str(directory / "sentinel.conf"), "--sentinel")
        self.started.append(ServerProcess(self._binary, directory, *options, first=first))
        self.started[-1].wait_listening()
        return self.started[-1]

    def start_node(self) -> ServerProcess:
        """Of a cluster. Its bus is at a port of PORTS, too: by default it is 10,000 above, where a client may sit."""
        bus_port = free_port()
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", str(bus_port))
        node = self.start(*options)
        node.bus_port = bus_port
        return node

    def kill(self) -> None:
        for server in self.started:
            server.kill()


class Watched:
    """A primary, its replica, and three sentinels of which two agree after a second of silence."""

    def __init__(self, servers: Servers) -> None:
        self.primary = servers.start()
        self.replica = servers.start("--replicaof", f"127.0.0.1 {self.primary.port}")
        lines = (
            f"monitor runs 127.0.0.1 {self.primary.port} 2",
            "down-after-milliseconds runs 1000",
            "failover-timeout runs 10000",
        )
        configuration = "".join(f"sentinel {line}\n" for line in lines)
        self.sentinels = [servers.start(sentinel=configuration) for _ in range(3)]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/runs"
        with redis.Redis(port=self.replica.port) as client:
            until(lambda: client.info("replication")["master_link_status"] == "up", "the replica")
        for one in self.sentinels:
            with redis.Redis(port=one.port) as client:
                until(
                    lambda c=client: len(c.execute_command("SENTINEL", "REPLICAS", "runs")) == 1, "the replica's name"
                )
                until(
                    lambda c=client: len(c.execute_command("SENTINEL", "SENTINELS", "runs")) == 2, "the other sentinels"
                )


class Clustered:
    """A cluster of three primaries; that which has the keys of run ``name`` has a replica, which takes its place."""

    def __init__(self, servers: Servers, name: str) -> None:
        nodes = [servers.start_node() for _ in range(4)]
        self.primary, self.replica = nodes[0], nodes[3]
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"
        clients = [redis.Redis(port=node.port) for node in nodes]
        own = clients[0].execute_command("CLUSTER", "KEYSLOT", f"{{{name}}}") // SLOTS_EACH
        thirds = [range(third * SLOTS_EACH, (third + 1) * SLOTS_EACH) for third in range(3)]
        thirds[2] = range(2 * SLOTS_EACH, SLOTS)
        thirds = [thirds[min(own, 2)], *(slots for third, slots in enumerate(thirds) if third != min(own, 2))]
        for client, slots in zip(clients, thirds, strict=False):
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        for client in clients[1:]:
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
        for client in clients:
            until(lambda c=client: b"cluster_known_nodes:4" in c.execute_command("CLUSTER", "INFO"), "its other nodes")
        clients[3].execute_command("CLUSTER", "REPLICATE", clients[0].execute_command("CLUSTER", "MYID"))
        until(lambda: clients[3].info("replication").get("master_link_status") == "up", "the replica")
        for client in clients:
            until(lambda c=client: b"cluster_state:ok" in c.execute_command("CLUSTER", "INFO"), "the cluster")
            client.close()


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + READY_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited {READY_S:.0f} s for {what}"
        time.sleep(0.1)


def self_signed(directory: Path) -> tuple[str, str]:
    """Files of a certificate of 127.0.0.1 that signs itself, and of its key. Skips the test without openssl."""
    openssl = shutil.which("openssl") or pytest.skip("no openssl binary to make a certificate with")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    certificate, key = str(directory / "ca.pem"), str(directory / "key.pem")
    subprocess.run([openssl, *words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def find_binary(kind: str) -> Path | None:
    """The server to test against: "valkey" from the package, "redis" from the system; None when it is not there."""
    if kind == "valkey":
        return packaged_binary()
    found = shutil.which("redis-server")
    return Path(found) if found else None


def free_port() -> int:
    """A port of PORTS that nobody listens on now."""
    return next(port for port in random.SystemRandom().sample(PORTS, 200) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
