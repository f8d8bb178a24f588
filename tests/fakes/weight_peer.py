"""One process of a broadcast: ``publish`` serves versions, ``receive`` pulls them along a route and passes them on.

Speaks lines of JSON on stdin and stdout.
    publish ADDRESS MEGABYTES DIRECTORY   out: {"manifest"} for each line that comes in, whose number is the version
    receive BROKER WAIT_S                 out: {"relay", "host_id"}, as of its lease
                                          in: {"manifest"}  out: {"seconds", "digest", "way"} or {"error"}
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import structlog

from transport.contracts.messages import encode, manifest_decoder
from transport.errors import StreamError
from transport.process.secret import SHARED_SECRET
from transport.tensors.base import Endpoint, TimeLimit, host_id
from transport.tensors.manifest import checksum
from transport.tensors.relay import Relay
from workers.weights.pull import WeightPuller

TENSORS = 64
LIMIT = TimeLimit(10.0, 0.5)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def publish(address: str, megabytes: float, directory: Path, secret: bytes) -> None:
    import torch

    from workers.weights.publish import WeightPublisher

    publisher = WeightPublisher("hosts", directory, endpoint=Endpoint(host=address, secret=secret, limit=LIMIT))
    items = int(megabytes * 1e6) // TENSORS // 4
    for line in sys.stdin:
        generator = np.random.default_rng(int(line))
        tensors = {f"t{n}": torch.from_numpy(generator.random(items, np.float32)) for n in range(TENSORS)}
        manifest = publisher.publish(1, int(line), tensors, torch.float32)
        say(manifest=base64.b64encode(encode(manifest)).decode())
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
        publish(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), shared)
    else:
        receive(sys.argv[2], float(sys.argv[3]), shared)
