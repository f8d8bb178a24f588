"""GPUs of this machine, each held by the processes that compute on it, found without a scheduler.

Several workers start from the same command line (replicas of a container, a shell loop), and each shall have GPUs of
its own. A worker locks some of the GPUs that it may take, and torch and inference servers see no others; workers that
share one hold its lock together. The kernel lets go of a lock when its process dies. Invariant: of workers with the
same lock directory, nobody else holds a GPU that one took for itself.

Numbers are positions, from 0, among the GPUs that CUDA_VISIBLE_DEVICES shows; where it is not set, as in nvidia-smi.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transport.errors import ForeignError, GpuError
from transport.process.files import private_directory

LOCKS_VARIABLE = "STREAMRL_GPU_LOCKS"
"""Directory of the locks; containers that share GPUs share it as a volume.

Without it, each user has a directory of their own: in one for all users, the first user kept all others from every GPU.
The driver's compute mode, or a scheduler, keeps users apart.
"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARE_VARIABLE = "STREAMRL_GPU_SHARE"
"""Of the memory of its GPUs, what this process may use; not set: all."""
LIST_S = 30.0
"""nvidia-smi without its persistence daemon takes seconds a GPU."""

LOOK_S = 0.05
"""Before a lock is tried again: ``free_gpus`` of another process may just have looked at it."""

_held: list[int] = []
"""Lock files of this process: open until it ends."""
_taken: list[Gpu] = []
"""What they lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """uuid: the driver's unique id.  memory_mib: 0 where the driver does not say."""

    uuid: str
    name: str = "GPU"
    memory_mib: int = 0


def take_gpus(wanted: str, *, each: int = 1, share: float = 1.0) -> None:
    """Lock ``each`` GPUs of ``wanted`` and make them the only ones that this process and its children see.

    Args:    wanted: "0,2-3", "all", or "": change nothing.
             share: of their memory, that this process may use; below 1 others may take the same GPUs with such a share.
    Raises:  GpuError: one is not there, or too few are free; the message names them.
    """
    if not wanted:
        return
    if each < 1 or not 0 < share <= 1:
        raise GpuError(
            f"--gpus-each {each} --gpu-share {share:g}: needs 1 or more GPUs, and a share above 0, at most 1"
        )
    present = list_gpus()
    indexes = parse_gpus("--gpus", wanted, len(present))
    if len(indexes) < each:
        raise GpuError(f"--gpus {wanted}: names {len(indexes)}, and --gpus-each asks for {each}")
    directory = lock_directory()
    taken: list[Gpu] = []
    locks: list[int] = []
    for index in indexes:
        lock = _lock(directory, present[index].uuid, shared=share < 1)
        if lock is not None:
            locks.append(lock)
            taken.append(present[index])
        if len(taken) == each:
            _held.extend(locks)
            _taken.extend(taken)
            os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in taken)
            os.environ[SHARE_VARIABLE] = f"{share:g}"
            return
    for lock in locks:
        os.close(lock)
    others = "another worker holds " + ("it" if len(indexes) == 1 else "each of them" if not taken else "some of them")
    raise GpuError(f"--gpus {wanted}: {others} (locks in {directory}); start fewer workers, or allow more GPUs")


def taken_gpus() -> tuple[Gpu, ...]:
    """Those that this process computes on; () where nobody told it to take any."""
    return tuple(_taken)


def one_each(wanted: str, ranks: int, *, share: float = 1.0) -> list[str]:
    """The number of a free GPU for each of ``ranks`` processes that train together, as ``--gpus`` takes it.

    Args:    wanted: "0,2-3", "all", or "": all, and none where the machine has none.
             share: of its memory; below 1 one that others share is free, too.
    Returns: [ranks] numbers, or [].
    Raises:  GpuError: one is not there, or there are fewer than ranks: NCCL takes one rank a GPU.
    """
    present = list_gpus()
    if not wanted and not present:
        return []
    named = parse_gpus("--gpus", wanted or "all", len(present))
    open_to_us = free_gpus(present, shared=share < 1)
    free = [str(number) for number in named if number in open_to_us]
    if len(free) < ranks:
        raise GpuError(
            f"--ranks {ranks}: each rank needs a GPU of its own, and --gpus {wanted or 'all'} names {len(named)}, of "
            f"which {len(free)} are free"
        )
    return free[:ranks]


def gpu_share(environ: Mapping[str, str]) -> float:
    """Of the memory of this process's GPUs, what it may use."""
    return float(environ.get(SHARE_VARIABLE, "1"))


def free_gpus(present: Sequence[Gpu], *, shared: bool = False) -> list[int]:
    """Numbers of those that no worker holds. shared: or holds with others. Raises GpuError: no place for locks."""
    directory = lock_directory()
    free: list[int] = []
    for index, gpu in enumerate(present):
        lock = _lock(directory, gpu.uuid, shared=shared)
        if lock is not None:
            os.close(lock)
            free.append(index)
    return free


def lock_directory() -> Path:
    """Where GPUs are locked. Raises GpuError: what is in the place of this user's own is somebody else's."""
    if named := os.environ.get(LOCKS_VARIABLE):
        return Path(named)
    directory = Path(tempfile.gettempdir()) / f"streamrl-gpus-{os.geteuid()}"
    try:
        private_directory(directory)
    except (ForeignError, OSError) as error:
        raise GpuError(f"no place for locks of GPUs: {error}; set {LOCKS_VARIABLE} to a directory of yours") from error
    return directory


def parse_gpus(option: str, wanted: str, num_present: int) -> list[int]:
    """``"0,2-3"`` -> ``[0, 2, 3]``; ``"all"`` -> all that are present.

    option: what ``wanted`` was given as, for the message.  Raises: GpuError: it is nothing of the kind, or one is not
    there.
    """
    if wanted == "all":
        if not num_present:
            raise GpuError(f"{option} all: {_seen(0)}")
        return list(range(num_present))
    indexes: list[int] = []
    for part in wanted.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise GpuError(f'{option} {wanted}: write numbers of GPUs like 0,2-3, or "all"')
        indexes += range(int(match[1]), int(match[2] or match[1]) + 1)
    if absent := [str(index) for index in indexes if index >= num_present]:
        raise GpuError(f"{option} {wanted}: there is no GPU {', '.join(absent)} here; {_seen(num_present)}")
    return list(dict.fromkeys(indexes))


def list_gpus() -> list[Gpu]:
    """The GPUs that the driver, and CUDA_VISIBLE_DEVICES, show here, by number; [] without a driver."""
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=LIST_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    present: list[Gpu] = []
    for line in done.stdout.splitlines():
        uuid, name, memory = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
        if uuid.startswith("GPU-"):
            present.append(Gpu(uuid=uuid, name=name or "GPU", memory_mib=int(memory) if memory.isdigit() else 0))
    return _visible(present, os.environ.get(VISIBLE))


def _visible(present: Sequence[Gpu], shown: str | None) -> list[Gpu]:
    """As CUDA reads it: in the order of ``shown``, which ends at the first that is not there."""
    if shown is None:
        return list(present)
    found: list[Gpu] = []
    for part in map(str.strip, shown.split(",")):
        named = [gpu for number, gpu in enumerate(present) if part == str(number) or gpu.uuid.startswith(part or "-")]
        if len(named) != 1:
            break
        found += named
    return found


def _seen(num_present: int) -> str:
    if num_present:
        return f"nvidia-smi shows {num_present}, numbered from 0"
    return (
        "nvidia-smi shows none. Is the NVIDIA driver installed and, in a container, the NVIDIA Container Toolkit with "
        "GPUs reserved for this service?"
    )


def _lock(directory: Path, gpu: str, *, shared: bool) -> int | None:
    """The open lock of a GPU; None where others hold it. shared: beside others who share it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / f"{gpu}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise GpuError(f"cannot lock a GPU in {directory}: {error.strerror}; set {LOCKS_VARIABLE}") from error
    for pause_s in (LOOK_S, 0.0):
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        else:
            return descriptor
    os.close(descriptor)
    return None
