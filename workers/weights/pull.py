"""Weights in: pull the version that a manifest names, from the nearest source that answers, and check every byte.

Owns: choice of source, verification, the views. Never: the engine (the worker hands it the views) or the decision
which version to load. Invariant: what is yielded has the manifest's checksums; a worker never serves anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transport.contracts.messages import TensorSpec, WeightManifest
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError, StreamError
from transport.tensors.base import Deadline, Segment, SegmentReader, choose_sources
from transport.tensors.manifest import check_manifest, verify_tensors
from transport.tensors.tcp import reader_for
from workers.errors import WeightsMismatchError

if TYPE_CHECKING:
    import torch

ROUNDS = 2  # how often each source is asked before giving up: once more after all have failed
UNREACHABLE = "none can be reached from this host: let the trainer listen off loopback (tensors.host, or --listen)"
SHOWN_NAMES = 4


class PulledTensors(dict[str, "torch.Tensor"]):
    """A version's tensors as views of ``buffer``; ``manifest`` says where they lie, to hand the bytes on."""

    def __init__(self, manifest: WeightManifest, buffer: memoryview) -> None:
        super().__init__({spec.name: _view(buffer, spec) for spec in manifest.tensors})
        self.manifest = manifest
        self.buffer = buffer  # [total_bytes] uint8


class WeightPuller:
    """Pulls versions, one at a time, on the caller's thread (``asyncio.to_thread`` in a worker)."""

    def __init__(self, *, secret: bytes = b"", deadline_s: float = 120.0) -> None:
        self._secret = secret  # shared with the publisher
        self._deadline_s = deadline_s  # of one pull over all its sources and attempts
        self._readers: dict[str, SegmentReader] = {}

    @contextmanager
    def pull(self, manifest: WeightManifest, *, verify: bool = True) -> Iterator[PulledTensors]:
        """Give the tensors of ``manifest``, verified; they are valid inside the ``with`` and must be copied there.

        Shared memory is mapped, not copied: writing to a view changes no other process's bytes.  verify: False only for
        bytes that were verified on this host just now.

        Raises: MessageError: the manifest contradicts itself.  PeerUnavailableError: no source answers (superseded by
                a newer version, its trainer died): wait for the next manifest.  ChecksumError: bytes came and were
                wrong.  PeerRejectedError: the shared secret differs.
        """
        with self.opened(manifest, verify=verify) as segment:
            yield PulledTensors(manifest, segment.buffer)

    @contextmanager
    def opened(self, manifest: WeightManifest, *, verify: bool = True) -> Iterator[Segment]:
        """Give the bytes of ``manifest``, verified, as ``pull`` does; nothing here needs torch."""
        check_manifest(manifest)
        segment = self._open_any(manifest, verify)
        try:
            yield segment
        finally:
            segment.close()

    def _open_any(self, manifest: WeightManifest, verify: bool) -> Segment:
        deadline = Deadline(self._deadline_s)
        failures: list[StreamError] = []
        for address in choose_sources(manifest.sources, manifest.host) * ROUNDS:
            if address.scheme not in self._readers:
                self._readers[address.scheme] = reader_for(address, self._secret)
            reader = self._readers[address.scheme]
            try:
                segment = reader.open(address, manifest.total_bytes, deadline)
                try:
                    if verify:
                        verify_tensors(manifest, segment.buffer)
                except ChecksumError:
                    segment.close()
                    raise
                return segment
            except (PeerUnavailableError, ChecksumError, MessageError, PeerRejectedError) as error:
                failures.append(error)
        raise _summary(manifest, failures)


def _summary(manifest: WeightManifest, failures: list[StreamError]) -> StreamError:
    """The failure that says most: a refusal or wrong bytes before silence."""
    for kind in (PeerRejectedError, ChecksumError, MessageError):
        if said := next((failure for failure in failures if isinstance(failure, kind)), None):
            return said
    reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures)) or UNREACHABLE
    return PeerUnavailableError(", ".join(manifest.sources) or "(no source)", f"{manifest.weights}: {reasons}")


def _view(buffer: memoryview, spec: TensorSpec) -> torch.Tensor:
    """The tensor at ``spec``'s place in ``buffer``, without a copy. Shape and dtype as in the spec."""
    import torch  # here, because an engine without a model has none

    dtype: torch.dtype = getattr(torch, spec.dtype)  # one of manifest.ITEM_BYTES: the manifest was checked
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(buffer[spec.offset : spec.offset + spec.nbytes], dtype=dtype).reshape(spec.shape)


def check_tensors(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that ``tensors`` can replace all ``parameters``; a tied tensor may come under any or all of its names.

    Raises: WeightsMismatchError naming what is missing, unknown, or of another shape.
    """
    given = {id(parameters[name]) for name in tensors if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    unknown = [name for name in tensors if name not in parameters]
    misshaped = [
        f"{name} {tuple(tensor.shape)} instead of {tuple(parameters[name].shape)}"
        for name, tensor in tensors.items()
        if name in parameters and tensor.shape != parameters[name].shape
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    if any(problems.values()):
        found = "; ".join(f"{kind}: {shown_names(names)}" for kind, names in problems.items() if names)
        raise WeightsMismatchError(f"the new weights do not fit the model: {found}")


def shown_names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
