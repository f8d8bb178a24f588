"""One GPU of this machine for one worker, found without a scheduler.

Several workers start from the same command line (replicas of a container, a shell loop), and each shall have a GPU of
its own. A worker locks one of the GPUs that it may take, and torch and engine servers see no other.

The kernel lets go of the lock when this process dies. Invariant: no two workers with the same lock directory hold the
same GPU, and torch is not imported here (CUDA_VISIBLE_DEVICES is read at import).
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transport.errors import ForeignError
from transport.process.files import private_directory
from workers.errors import GpuError

LOCKS_VARIABLE = "STREAMRL_GPU_LOCKS"
"""Directory of the locks; containers that share GPUs share it as a volume.

Without it, each user has a directory of their own: in one for all users, the first user kept all others from every GPU.
The driver's compute mode, or a scheduler, keeps users apart.
"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST_S = 30.0
"""nvidia-smi without its persistence daemon takes seconds a GPU."""

_held: list[int] = []
"""Lock files of this process: open until it ends."""


def take_gpu(wanted: str) -> None:
    """Lock one GPU of ``wanted`` and make it the only one that this process and its children see. "": change nothing.

    Raises GpuError: one is not there, or none is free; the message names them.
    """
    if not wanted:
        return
    present = list_gpus()
    indexes = parse_gpus(wanted, len(present))
    if absent := [index for index in indexes if index >= len(present)]:
        raise GpuError(f"--gpus {wanted}: there is no GPU {_listed(absent)} here; {_seen(present)}")
    directory = _lock_directory()
    for index in indexes:
        if _lock(directory, present[index]):
            os.environ[VISIBLE] = present[index]
            return
    raise GpuError(
        f"--gpus {wanted}: another worker holds {'it' if len(indexes) == 1 else 'each of them'} "
        f"(locks in {directory}); start fewer workers, or allow more GPUs"
    )


def _lock_directory() -> Path:
    """Raises GpuError: what is in the place of this user's own is somebody else's."""
    if named := os.environ.get(LOCKS_VARIABLE):
        return Path(named)
    directory = Path(tempfile.gettempdir()) / f"streamrl-gpus-{os.geteuid()}"
    try:
        private_directory(directory)
    except (ForeignError, OSError) as error:
        raise GpuError(f"no place for locks of GPUs: {error}; set {LOCKS_VARIABLE} to a directory of yours") from error
    return directory


def parse_gpus(wanted: str, num_present: int) -> list[int]:
    """``"0,2-3"`` -> ``[0, 2, 3]``; ``"all"`` -> all that are present. Raises GpuError for anything else."""
    if wanted == "all":
        if not num_present:
            raise GpuError(f"--gpus all: {_seen([])}")
        return list(range(num_present))
    indexes: list[int] = []
    for part in wanted.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise GpuError(f'--gpus {wanted}: write numbers of GPUs like 0,2-3, or "all"')
        indexes += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(indexes))


def list_gpus() -> list[str]:
    """Unique ids of the GPUs that the driver shows here, by number; [] without a driver."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=LIST_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU-\S+$", done.stdout, re.MULTILINE) if done.returncode == 0 else []


def _seen(present: Sequence[str]) -> str:
    if present:
        return f"nvidia-smi shows {len(present)}, numbered from 0"
    return (
        "nvidia-smi shows none. Is the NVIDIA driver installed and, in a container, the NVIDIA Container Toolkit with "
        "GPUs reserved for this service?"
    )


def _listed(indexes: Sequence[int]) -> str:
    return ", ".join(map(str, indexes))


def _lock(directory: Path, gpu: str) -> bool:
    """Whether the GPU is ours now."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / f"{gpu}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise GpuError(f"cannot lock a GPU in {directory}: {error.strerror}; set {LOCKS_VARIABLE}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held.append(descriptor)
    return True
