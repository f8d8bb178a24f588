"""Weights out: each version becomes a segment that generation workers map or pull, and a manifest that names it.

Owns: the last few published versions of this trainer. Never: the ``weights`` log (the trainer appends the manifest).
Invariant: a version is written once, cast to the generation dtype on the way, and its digest depends on nothing but
names, shapes, dtypes and bytes. 270 MB of bf16 from fp32 take .14 s on one core, checksums included.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transport.contracts.messages import TensorSpec, WeightManifest
from transport.contracts.types import WeightIdentity
from transport.tensors.address import Endpoint, host_id
from transport.tensors.base import SegmentWriter
from transport.tensors.manifest import Crc, digest_tensors, layout_bytes, plan_layout, with_checksums
from transport.tensors.shm import ShmStore, segment_directories
from transport.tensors.tcp import ServedStore

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1024 * 1024
"""Elements cast at once: 2 MB of bf16 stay in the cache until they are checksummed and written."""


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in a TensorSpec: ``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


class WeightPublisher:
    """Publishes versions of one trainer; keeps the newest ``keep`` readable.

    run: name of the run.  run_dir: where segments go when /dev/shm is too small.  keep: versions, >= 1; readers of an
    older one keep what they have mapped.  endpoint: where other hosts pull from.  Starts nothing until the first
    ``publish``, which raises ListenError where nothing can be listened on. Any thread may close it, at any moment.
    """

    def __init__(self, run: str, run_dir: Path, *, keep: int = 3, endpoint: Endpoint | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest version has to be readable")
        self._keep = keep
        self._published: deque[str] = deque()
        self._store = ServedStore(ShmStore(run, segment_directories(run_dir)), endpoint or Endpoint())
        self._starting = threading.Lock()
        self._started = self._closed = False

    def publish(
        self, epoch: int, version: int, tensors: Mapping[str, torch.Tensor], cast: torch.dtype
    ) -> WeightManifest:
        """Write a version and make it readable.

        Args:    tensors: by name, on any device; floating-point ones are cast to ``cast``, others keep their dtype.
        Returns: the manifest, with the digest in ``weights`` and the sources shm:// and tcp://.
        Raises:  SegmentSpaceError: neither shared memory nor the run's directory has room.
                 ValueError: this epoch and version is published already, or it was closed.
        """
        layout = plan_layout((name, t.shape, dtype_name(_target(t, cast))) for name, t in tensors.items())
        return self.publish_layout(
            epoch, version, layout, lambda writer, spec: _write(writer, spec, tensors[spec.name], cast)
        )

    def publish_layout(
        self, epoch: int, version: int, layout: Sequence[TensorSpec], write: Callable[[SegmentWriter, TensorSpec], str]
    ) -> WeightManifest:
        """``publish`` for a caller that has bytes: ``write`` puts one tensor in its place and returns its checksum."""
        self._start()
        name = f"e{epoch}v{version}"
        self._make_room()
        writer = self._store.create(name, layout_bytes(layout))
        try:
            specs = with_checksums(layout, [write(writer, spec) for spec in layout])
            sources = writer.seal()
        except BaseException:
            writer.abort()
            raise
        self._published.append(name)
        return WeightManifest(
            weights=WeightIdentity(epoch=epoch, version=version, digest=digest_tensors(specs)),
            tensors=specs,
            total_bytes=layout_bytes(specs),
            sources=sources,
            host=host_id(),
        )

    def _start(self) -> None:
        with self._starting:
            if not (self._started or self._closed):
                self._store.start()
                self._started = True

    def _make_room(self) -> None:
        """Drop the oldest versions, so that the next one makes ``keep``."""
        while len(self._published) >= self._keep:
            self._store.drop(self._published.popleft())

    def close(self) -> None:
        """Unlink every segment and stop serving, for good; what another thread publishes now fails."""
        with self._starting:
            self._closed = True
        self._store.close()


def _target(tensor: torch.Tensor, cast: torch.dtype) -> torch.dtype:
    return cast if tensor.is_floating_point() else tensor.dtype


def _chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, cast, a chunk at a time; each is valid until the next is asked for."""
    import torch  # here, because an emulated trainer has none

    flat = tensor.detach().reshape(-1)
    scratch = torch.empty(min(CHUNK_ELEMENTS, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        piece = flat[start : start + CHUNK_ELEMENTS]
        part = scratch[: piece.numel()]
        part.copy_(piece)
        yield part.view(torch.uint8).numpy().data


def _write(writer: SegmentWriter, spec: TensorSpec, tensor: torch.Tensor, cast: torch.dtype) -> str:
    """Write one tensor at its offset. Returns its checksum."""
    crc = Crc()
    offset = spec.offset
    for chunk in _chunks(tensor, _target(tensor, cast)):
        crc.update(chunk)
        writer.write(offset, chunk)
        offset += chunk.nbytes
    return crc.text()
