"""A client's consumer in a process of its own, which a test may kill or stop. Says each batch on a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from workers.client import Client
from workers.errors import LeaseLostError

ROOT = Path(__file__).parents[2]
WAIT_S = 100.0
BATCH = 3


class ConsumerProcess:
    """Consumes "x_train" in batches of three rows. options: see ``main``."""

    def __init__(self, url: str, run: str, name: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.consumer_process", url, run, name, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a line that readline had taken along would be invisible to select
        )

    def read_line(self) -> dict[str, Any]:
        """The next thing it says. Raises TimeoutError when it is silent."""
        assert self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(WAIT_S):
                raise TimeoutError("the consumer says nothing")
        return json.loads(self.process.stdout.readline())

    def read_batch(self) -> list[str]:
        return self.read_line()["rows"]

    def read_to_end(self) -> list[str]:
        """All rows up to the end of its stream."""
        rows: list[str] = []
        while "ended" not in (line := self.read_line()):
            rows += line["rows"]
        return rows

    def go_on(self) -> None:
        """Let it go on with the batch that it holds."""
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("url", "run", "name"):
        parser.add_argument(name)
    parser.add_argument("--hold-after", type=int, default=-1, help="batches after which it waits, holding the next one")
    options = parser.parse_args()
    with Client.connect(options.url, options.run, name=options.name) as client:
        taken = 0
        while True:
            batch = client.get_experience_data("x_train", ["x_ids"], BATCH, timeout_s=WAIT_S)
            if batch.ended:
                say({"ended": True})
                return
            say({"rows": batch.index})
            if taken == options.hold_after:
                sys.stdin.readline()
            try:
                client.done(batch)
            except LeaseLostError as error:
                say({"lost": list(error.rows)})
            taken += 1


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
