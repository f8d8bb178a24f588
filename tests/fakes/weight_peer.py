"""One process of a broadcast: ``publish`` serves versions, ``receive`` pulls them along a route and passes them on.

Speaks lines of JSON on stdin and stdout.
    publish ADDRESS MEGABYTES DIRECTORY RANK RANKS
                            out: {"manifest"} for each line that comes in, whose number is the version
    receive BROKER WAIT_S   out: {"relay", "host_id"}, as of its lease
                            in: {"manifest"}  out: {"seconds", "digest", "way"} or {"error"}

Of several ranks each publishes all that they hold, at its own address: only its own part of that is asked for.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from tests.fakes.rank_threads import ThreadRank, on_ranks
from transport.contracts.messages import WeightManifest, encode, manifest_decoder
from transport.errors import StreamError
from transport.process.secret import SHARED_SECRET
from transport.tensors.base import Endpoint, TimeLimit, host_id
from transport.tensors.manifest import checksum
from transport.tensors.relay import Relay
from workers.weights.parts import Shard
from workers.weights.pull import WeightPuller

if TYPE_CHECKING:
    import torch

TENSORS, COLUMNS = 64, 64
LIMIT = TimeLimit(10.0, 0.5)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def publish(address: str, megabytes: float, directory: Path, rank: int, ranks: int, secret: bytes) -> None:
    import torch

    from workers.weights.publish import WeightPublisher

    endpoint = Endpoint(host=address, secret=secret, limit=LIMIT)
    publishers = [WeightPublisher("hosts", directory / str(one), endpoint=endpoint) for one in range(ranks)]
    rows, columns = int(megabytes * 1e6) // TENSORS // 4 // COLUMNS, COLUMNS
    for line in sys.stdin:
        generator = np.random.default_rng(int(line))
        tensors = [torch.from_numpy(generator.random((rows, columns), np.float32)) for _ in range(TENSORS)]

        def held(one: int, tensors: Sequence[torch.Tensor] = tensors) -> dict[str, torch.Tensor | Shard]:
            """Rows of every other tensor, and columns of the rest."""
            if ranks == 1:
                return {f"t{n}": tensor for n, tensor in enumerate(tensors)}
            across = slice(one * rows // ranks, (one + 1) * rows // ranks)
            down = slice(one * columns // ranks, (one + 1) * columns // ranks)
            return {
                f"t{n}": Shard(tensor[:, down].contiguous(), (0, down.start), (rows, columns))
                if n % 2
                else Shard(tensor[across], (across.start, 0), (rows, columns))
                for n, tensor in enumerate(tensors)
            }

        def work(
            one: ThreadRank, version: int = int(line), held: Callable[[int], dict[str, torch.Tensor | Shard]] = held
        ) -> WeightManifest:
            among = one if ranks > 1 else None
            return publishers[one.rank].publish(1, version, held(one.rank), torch.float32, among)

        manifest = on_ranks(ranks, work)[rank]
        if isinstance(manifest, Exception):
            raise manifest
        say(manifest=base64.b64encode(encode(manifest)).decode())
    for publisher in publishers:
        publisher.close()


def receive(broker: str, wait_s: float, secret: bytes) -> None:
    limit = TimeLimit(wait_s, LIMIT.min_mb_s)
    relay = Relay(secret=secret, limit=limit)
    relay.listen_facing(broker)
    say(relay=relay.address, host_id=host_id())
    puller = WeightPuller(secret=secret, limit=limit, relay=relay)
    for line in sys.stdin:
        manifest, started_s = manifest_decoder.decode(base64.b64decode(json.loads(line)["manifest"])), time.monotonic()
        try:
            with puller.opened(manifest) as opened:
                seconds = time.monotonic() - started_s
                found = checksum(opened.memory.buffer)
        except StreamError as error:
            say(error=f"{type(error).__name__}: {error}")
            continue
        say(seconds=seconds, digest=found, way=puller.way)
    relay.close()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    shared = os.environ[SHARED_SECRET].encode()
    if sys.argv[1] == "publish":
        publish(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]), shared)
    else:
        receive(sys.argv[2], float(sys.argv[3]), shared)
