"""Real servers for tests: started bare, on a free port, without persistence, killed at the end."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from transport.broker.embedded import free_port, packaged_binary

READY_S = 60.0


class ServerProcess:
    """A Redis or Valkey server of its own."""

    def __init__(self, binary: Path, directory: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen(
            [str(binary), *arguments, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def find_binary(kind: str) -> Path | None:
    """The server to test against: "valkey" from the package, "redis" from the system; None when it is not there."""
    if kind == "valkey":
        return packaged_binary()
    found = shutil.which("redis-server")
    return Path(found) if found else None
