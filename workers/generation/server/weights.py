"""The version that a server has to hold, kept by the engine so that a server that starts again gets it again.

A version in shared memory is kept by its open file, without a copy: its name may go, its bytes stay. Anything else is
copied into anonymous memory once. The server's loader maps either; a server on another host pulls from the manifest's
own sources.

Owns: that file, and the calls that make a server load it. Invariant: what is held was verified, and never changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from transport.contracts.messages import TensorSpec, WeightManifest
from transport.contracts.types import WeightIdentity
from transport.errors import PeerUnavailableError
from transport.tensors.address import choose_sources, host_id
from transport.tensors.manifest import checksum, digest_tensors, layout_bytes, plan_layout, with_checksums
from transport.tensors.shm import held_address
from workers.errors import ServerAnswerError, WeightsMismatchError
from workers.generation.server.client import ServerClient
from workers.generation.server.order import LoadOrder
from workers.weights.pull import PulledTensors

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class HeldWeights:
    """weights: what tokens are labelled with.  manifest: of the bytes behind ``fd``."""

    weights: WeightIdentity
    manifest: WeightManifest
    fd: int
    _is_open: bool = field(default=True, init=False)

    def sources(self, *, same_host: bool) -> tuple[str, ...]:
        """For a server here, which maps what is held, or for one elsewhere, which pulls, and may be here after all."""
        held = held_address(self.fd)
        return (held,) if same_host else (held, *self.manifest.sources)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.fd)


def hold(weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> HeldWeights:
    """Keep ``tensors``, which may go when this returns. Blocks for a copy where they do not lie in shared memory."""
    if not isinstance(tensors, PulledTensors):
        return _copied(weights, tensors)
    fd = _shared_file(tensors.manifest)
    if fd is None:
        fd = os.memfd_create(str(weights), os.MFD_CLOEXEC)
        _write(fd, 0, tensors.buffer[: tensors.manifest.total_bytes])
    return HeldWeights(weights=weights, manifest=tensors.manifest, fd=fd)


def _shared_file(manifest: WeightManifest) -> int | None:
    """The manifest's segment on this host, opened."""
    for address in choose_sources(manifest.sources, manifest.host):
        if address.scheme == "shm":
            try:
                return os.open(Path("/") / address.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # superseded since it was mapped: the copy of the mapping has to do
                return None
    return None


def _copied(weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> HeldWeights:
    layout = plan_layout((name, t.shape, str(t.dtype).removeprefix("torch.")) for name, t in tensors.items())
    fd = os.memfd_create(str(weights), os.MFD_CLOEXEC)
    os.ftruncate(fd, layout_bytes(layout))
    specs = with_checksums(layout, [_write_tensor(fd, spec, tensors[spec.name]) for spec in layout])
    manifest = WeightManifest(
        weights=replace(weights, digest=digest_tensors(specs)),
        tensors=specs,
        total_bytes=layout_bytes(specs),
        sources=(),
        host=host_id(),
    )
    return HeldWeights(weights=weights, manifest=manifest, fd=fd)


def _write_tensor(fd: int, spec: TensorSpec, tensor: torch.Tensor) -> str:
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    _write(fd, spec.offset, data)
    return checksum(data)


def _write(fd: int, offset: int, data: memoryview) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        offset, data = offset + written, data[written:]


class WeightOrders:
    """Gives orders to the loader of one server. same_host: its server is on this host, as this user.

    vocab_size: of the run's model.  processes: that hold the server's model.  label: of the weights it serves.
    """

    def __init__(self, client: ServerClient, *, same_host: bool) -> None:
        self._client = client
        self._same_host = same_host
        self._number = 0
        self.vocab_size = 0
        self.processes = 1
        self.label = ""

    async def look(self) -> None:
        """Have the loader look whether the server's model is of this vocabulary. Raises as ``pass_on``."""
        await self._give(self._order(None), "")

    async def pass_on(self, held: HeldWeights) -> None:
        """Have the server load ``held``: running samples wait between two steps meanwhile, and go on from their KV.

        Raises: WeightsMismatchError: they do not fit its model.  PeerUnavailableError: it cannot get them. In both
                cases it serves what it served.  ServerUnavailableError, ServerAnswerError: what it serves is unknown.
        """
        manifest = replace(held.manifest, sources=held.sources(same_host=self._same_host))
        await self._give(self._order(manifest), str(held.weights))

    def _order(self, manifest: WeightManifest | None) -> LoadOrder:
        self._number += 1
        return LoadOrder(number=self._number, vocab_size=self.vocab_size, manifest=manifest, verified=self._same_host)

    async def _give(self, order: LoadOrder, label: str) -> None:
        """label: what tokens are of, once the order was carried out."""
        client = self._client
        await client.pause()
        spoiled = False
        try:
            outcome = await client.load(order, label or None, self.processes)
            if outcome.number != order.number:
                raise ServerAnswerError(client.url, 0, f"its loader reports order {outcome.number}, not {order.number}")
            spoiled = outcome.spoiled
            if outcome.error and label and not spoiled:
                await client.set_label(self.label)
        finally:
            if not spoiled:  # or its samples would go on under weights that nothing names
                await client.resume()
        if spoiled:
            raise ServerAnswerError(client.url, 0, f"{label} was loaded half-way: {outcome.error}")
        if outcome.mismatch:
            raise WeightsMismatchError(outcome.error)
        if outcome.error:
            raise PeerUnavailableError(client.url, f"it cannot load {label}: {outcome.error}")
        self.label = label or self.label
