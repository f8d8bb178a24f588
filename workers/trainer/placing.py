"""How a checkpoint comes to be in place, and goes: by one rename on a file system, by its last file in an object store.

    begin(name)      an empty place, ``draft(name)``, where all ranks write its files
    take(...)        files of the last checkpoint, again, without sending them
    place(name)      it counts from now on; its META_FILE was written last
    remove(place)

Two ways, because one loses something: fsspec neither syncs nor renames in one step nor links, and no object store has
a rename. What is the same, reading and writing a file, is in transport/process/storage.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast

from transport.contracts.ledger import META_FILE, parse_checkpoint_name
from transport.process.files import sync_directory
from transport.process.storage import ObjectPath, Place


class Placing(Protocol):
    """Of the checkpoints in one directory. Everything raises OSError."""

    def taken(self) -> Iterable[str]:
        """Names that no new checkpoint may have."""
        ...

    def draft(self, name: str) -> Place: ...

    def begin(self, name: str) -> None:
        """Removes what killed trainers left."""
        ...

    def take(self, last: Place, draft: Place, files: Iterable[str]) -> None: ...

    def place(self, name: str) -> None: ...

    def remove(self, place: Place) -> None:
        """What cannot be removed stays, and nobody is told: the next one is tried again with the one after it."""
        ...

    def free_bytes(self) -> int | None:
        """None: nobody knows."""
        ...


def placing_in(directory: Place) -> Placing:
    return ObjectPlacing(directory) if isinstance(directory, ObjectPath) else FilePlacing(directory)


class FilePlacing:
    """Files are written in ``writing-*``, synced, and get their name together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def taken(self) -> Iterable[str]:
        return [path.name for path in self._directory.glob("step-*")]

    def draft(self, name: str) -> Path:
        return self._directory / f"writing-{name.removeprefix('step-')}"

    def begin(self, name: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob("writing-*"):
            shutil.rmtree(left)
        self.draft(name).mkdir()

    def take(self, last: Place, draft: Place, files: Iterable[str]) -> None:
        for file in files:
            os.link(cast(Path, last) / file, cast(Path, draft) / file)

    def place(self, name: str) -> None:
        sync_directory(self.draft(name))
        self.draft(name).rename(self._directory / name)
        sync_directory(self._directory)

    def remove(self, place: Place) -> None:
        shutil.rmtree(cast(Path, place), ignore_errors=True)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._directory).free


class ObjectPlacing:
    """Files have their final names at once; nobody looks at them before META_FILE is beside them."""

    def __init__(self, directory: ObjectPath) -> None:
        self._directory = directory

    def taken(self) -> Iterable[str]:
        """Also those of drafts: a trainer that another has replaced may still write one."""
        return {file.parent.name for file in self._directory.files()}

    def draft(self, name: str) -> ObjectPath:
        return self._directory / name

    def begin(self, name: str) -> None:
        found = self._directory.files()
        placed = {file.parent for file in found if file.name == META_FILE}
        for left in {file.parent for file in found} - placed:
            if parse_checkpoint_name(left.name) is not None:
                left.remove()

    def take(self, last: Place, draft: Place, files: Iterable[str]) -> None:
        for file in files:
            cast(ObjectPath, last / file).copy_to(cast(ObjectPath, draft / file))

    def place(self, name: str) -> None:
        """Its META_FILE is there."""

    def remove(self, place: Place) -> None:
        """First what makes it one: a trainer that is killed in between leaves no half of a checkpoint."""
        try:
            (cast(ObjectPath, place) / META_FILE).remove()
            cast(ObjectPath, place).remove()
        except OSError:
            return

    def free_bytes(self) -> int | None:
        return None
