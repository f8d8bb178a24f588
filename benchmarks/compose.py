"""docker compose on a machine without a GPU: from built images to the first trained batch, and what the images weigh.

The images are built first, which is not counted. ``image_gb`` is what our own images without SGLang take on the disk,
their base included; layers that they share count once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.fakes.compose_stack import Stack, inspected, layer_bytes, provide_torch_wheel, why_not

IMAGES = ("streamrl-broker:0.2.0", "streamrl:0.2.0")
CONFIG = '[api]\nhost = "0.0.0.0"\nport = 8000\n'


def main() -> None:
    if reason := why_not():
        sys.exit(f"no container engine: {reason}; set DOCKER_HOST, or install docker with compose")
    provide_torch_wheel()
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory), CONFIG)
        stack.build()
        begun_s = time.monotonic()
        try:
            stack.up()
            up_s = time.monotonic() - begun_s
            stack.wait_until(lambda: stack.trained() >= 1, "first batch", timeout_s=600)
            first_batch_s = time.monotonic() - begun_s
        finally:
            stack.down()
    for image in IMAGES:
        print(f"{image}: {int(inspected(image, '{{.Size}}')) / 1e9:.2f} GB")
    print(f"every container was started after {up_s:.1f} s")
    figures = {"up_to_first_batch_s": round(first_batch_s, 1), "image_gb": round(layer_bytes(IMAGES) / 1e9, 3)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
