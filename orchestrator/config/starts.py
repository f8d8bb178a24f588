"""Each time that a run was started: when, from which preset, with which versions, on what machine and GPUs.

``starts.jsonl`` of a run's directory has a line for each. Only for people: nothing is decided by it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from orchestrator.config.load import Resolved, presets_of
from orchestrator.config.run_directory import RunDir
from transport.contracts.settings import SERVER_ENGINES
from transport.errors import DECODE_ERRORS
from transport.process.files import writing
from transport.process.programs import process_age_s, usable_cores, versions

PACKAGES = ("streamrl", "torch", "transformers")


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """Who of a run computes on one GPU.

    number: among those that the driver shows, from 0.  memory_mib: 0 where the driver does not say.  workers: their
    names.  share: of its memory, what each of them may use.  held: by another run, so that nobody of this one is there.
    """

    number: int
    name: str
    memory_mib: int = 0
    workers: list[str] = []
    share: float = 1.0
    held: bool = False

    def __str__(self) -> str:
        """What it is, for people."""
        return f"{self.name}, {self.memory_mib / 1024:.0f} GiB" if self.memory_mib else self.name

    @property
    def use(self) -> str:
        """For people: who computes there."""
        if not self.workers:
            return "held by another run" if self.held else "idle"
        return ", ".join(self.workers) + (f" ({self.share:.0%} of its memory each)" if self.share < 1 else "")


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """started: UTC, as ISO 8601.  preset: "" without one.
    versions: of what is installed here; a server that runs elsewhere may have another.  gpus: those of this machine,
    where the run's processes were dealt out to them."""

    started: str
    preset: str = ""
    versions: dict[str, str] = {}
    machine: str = ""
    gpus: list[GpuUse] = []


def note_start(rundir: RunDir, resolved: Resolved, gpus: Sequence[GpuUse] = ()) -> None:
    """Write down that the run is started here, by the command that this process runs. Raises: DirectoryError."""
    start = Start(
        started=(datetime.now(UTC) - timedelta(seconds=process_age_s())).isoformat(timespec="seconds"),
        preset="".join(presets_of(resolved)[:1]),
        versions=versions(*PACKAGES, *({resolved.settings.generation.engine} & {*SERVER_ENGINES})),
        machine=machine(),
        gpus=list(gpus),
    )
    with writing(rundir.path), rundir.starts.open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(start))  # a line that a kill tore ends here


def read_starts(rundir: RunDir) -> list[Start]:
    """All times that the run was started, in order; a damaged line is left out."""
    starts: list[Start] = []
    for line in rundir.starts.read_bytes().splitlines() if rundir.starts.exists() else ():
        with suppress(*DECODE_ERRORS):
            starts.append(msgspec.json.decode(line, type=Start))
    return starts


def machine() -> str:
    """Host, processor, cores that this process may use, memory and NVIDIA GPUs of this machine, as one line."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [
        platform.node(),
        f"{usable_cores()} cores {_named(Path('/proc/cpuinfo'), 'model name') or platform.machine()}",
    ]
    parts.append(f"{memory_bytes / 2**30:.0f} GiB memory")
    gpus = [_named(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return ", ".join(
        part for part in (*parts, *(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))) if part
    )


def _named(path: Path, key: str) -> str:
    """The value of the first line ``key: value``; "" without one."""
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return " ".join(value.split())
    return ""
