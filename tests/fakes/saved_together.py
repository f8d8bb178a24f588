"""A checkpoint that several ranks save together, as the trainer does; what they report is gathered here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from transport.contracts.ledger import CheckpointMeta, Ledger
from transport.process.storage import Place
from workers.trainer.checkpoint import CheckpointStore, Gather, TensorFile, Written

META = CheckpointMeta(version=3, epoch=1, digest="d", cursor="7-1", source_position="", fingerprint={}, files={})


def save_together(
    directory: Place,
    files: Callable[[], Mapping[str, TensorFile]],
    *,
    rank: int,
    gather: Gather,
    version: int = META.version,
    problem: str = "",
) -> Place | None:
    """Every rank calls it. problem: what this rank says of its part; "": it is there.

    Returns: the checkpoint, on rank 0, once it is in place.
    """
    store = CheckpointStore(directory, keep=2, rank=rank)
    meta = msgspec.structs.replace(META, version=version)
    saving = store.begin(files, Ledger(version=version, cursor=META.cursor), meta, gather=gather)
    written = store.write(saving)
    said = gather(msgspec.msgpack.encode(Written(problem=problem) if problem else written))
    parts = {number: msgspec.msgpack.decode(raw, type=Written) for number, raw in enumerate(said)}
    try:
        return store.commit(saving, parts) if rank == 0 else None
    finally:
        gather(b"")  # nobody goes on before it is there
