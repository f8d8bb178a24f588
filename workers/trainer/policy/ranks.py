"""The ranks of one trainer: how they meet, what they tell one another, how one learns that another is gone.

Each rank reads the rounds log itself and takes its part of each round. A forward pass is a collective, so before each
round the ranks agree on its shape (``RankGroup.agree_round``), which each enters only with its rows at hand. What a
slower rank still computes, or waits for, the others wait for under ``timeout_s``.

Rank 0 of a local trainer opens a meeting: a file of its own in a private directory of this machine, locked for as long
as it lives, whose id it reports over the broker. The other ranks join by that id; nothing listens on a port for ranks
that are to come. A rank that was replaced takes its seat again, which rank 0 sees, or opens another meeting, which the
others see: then all start over together. Under torchrun, which several hosts need, its agents see to all that.

Publishing runs beside training, over a process group of its own (``RankGroup.beside``): each of the two keeps the order
of its own collectives, and there is none between them.

Owns: the process groups; the meeting's files and what stands about it on the broker. Invariants: no rank joins a
meeting whose rank 0 is gone; a rank starts over as soon as another one was replaced. Collectives of one machine use its
loopback interface only, those of several the one towards rank 0; gloo and NCCL know no proof of who connects, so ranks
of several machines belong on a network of their own (docs/security.md).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from transport.broker.base import Broker
from transport.contracts.training_memory import Layout
from transport.process.files import is_locked
from transport.tensors.base import is_loopback
from workers.algorithms.loss import LossMetrics
from workers.errors import RanksError
from workers.trainer.learner import InThread
from workers.trainer.policy.parallel import AXES, RoundShape, place_of

STARTED_TOGETHER = "STREAMRL_RANKS"
"""Variable in which an engine's launcher names one start of all ranks."""
STORE_AT = "ranks-{}"
"""Meta key: address and port of rank 0's store, of one start."""
MEETING = "trainer-ranks"
"""Meta key: id of the meeting that was opened last."""
SEAT = "trainer-rank-{}"
"""Meta key of a rank but 0: ``<meeting id> <token of its process>``."""
GPU = "gpu of rank {}"
"""Key of the ranks' store."""
POLL_S = 0.2
ASKS, ANSWER, CAME = "rank {} asks", "answer to {}", "rank {} came"
"""Keys of torchrun's store, see ``store_of_this_start``."""


class Talk:
    """What ranks tell one another over one process group, None for the first (workers.weights.parts.TalkingRanks)."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self._num_ranks = num_ranks
        self._device = device
        self._group = group

    def gather(self, data: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self._device)
        lengths = [length for (length,) in self.numbers([len(data)])]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = own[: len(data)]
        found = self._each(padded)
        return [bytes(one[:length].cpu().numpy()) for one, length in zip(found, lengths, strict=True)]

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Every rank's, in their order; all give equally many."""
        return torch.stack(self._each(torch.tensor(own, dtype=torch.int64, device=self._device))).tolist()

    def _each(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self._num_ranks)]
        with lost_ranks(self.rank):
            dist.all_gather(found, own, group=self._group)
        return found


class RankGroup:
    """Ranks of one torch.distributed process group (gloo on CPU, nccl on GPUs), met over ``store``: see ``Ranks``."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        store: Store,
        *,
        device: torch.device,
        timeout_s: float,
        alike: str = "",
        gpu: str = "",
    ) -> None:
        """alike: what must be the same for all besides torch and the layout, for people.  gpu: see ``gpu_of``.

        Raises: RanksError: a rank never came, has something else, or the same GPU; no collective was entered.
        """
        self.rank = rank
        self.layout = layout
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        store.set(GPU.format(rank), gpu)
        self._check_alike(store, f"torch {torch.__version__}, {layout}, {device.type}{alike and ', '}{alike}")
        self._check_own_gpu(store, gpu)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=layout.num_ranks,
            timeout=self._timeout,
        )
        self._talk = Talk(rank, layout.num_ranks, device)
        self.beside = self._join_beside()
        places = torch.arange(layout.num_ranks).view(layout.pipeline, layout.data, layout.tensor)
        self._sizes: dict[str, int] = dict(zip(AXES, places.shape, strict=True))
        self._mesh = self._mesh_of(places)
        self.ends = self._join_lines(places[[0, -1]], 0) if layout.pipeline > 1 else None
        """The first and the last stage of this rank's pipeline; no group for a stage between them."""

    def _check_alike(self, store: Store, own: str) -> None:
        """Before the backend connects them, which for CPUs and GPUs is not the same.

        Settings come from the broker; ranks can still differ where "auto" finds another device, precision or memory, or
        where the settings were replaced between the starts of two ranks.
        """
        keys = [f"rank {rank}" for rank in range(self.layout.num_ranks)]
        store.set(keys[self.rank], own)
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [key for key in keys if not store.check([key])]
            raise RanksError(
                f"rank {self.rank} waited {self._timeout.total_seconds():.0f} s for the others, of which "
                f"{', '.join(missing)} never joined: start {len(keys)}, or set trainer.ranks to those there are"
            ) from error
        for key in keys:
            if (other := store.get(key).decode("utf-8", "replace")) != own:
                raise RanksError(
                    f"rank {self.rank} has {own}; {key} has {other}: install the same versions on all hosts, set "
                    "trainer.parallel, trainer.device and trainer.dtype where their devices differ, and start all anew"
                )

    def _check_own_gpu(self, store: Store, own: str) -> None:
        """NCCL takes one rank a GPU, and its own words for two are an invalid usage."""
        others = [rank for rank in range(self.layout.num_ranks) if rank != self.rank]
        for other in others if own else ():
            if store.get(GPU.format(other)).decode("utf-8", "replace") == own:
                raise RanksError(
                    f"rank {self.rank} and rank {other} both compute on {own}: give each a GPU of its own, with "
                    '--gpus all for each of them and trainer.device = "cuda"'
                )

    def _join_beside(self) -> Talk:
        group = dist.new_group(backend="gloo", timeout=self._timeout)
        return Talk(self.rank, self.layout.num_ranks, torch.device("cpu"), cast(dist.ProcessGroup, group))

    def _mesh_of(self, places: Tensor) -> DeviceMesh:
        """Ranks along pipeline, data, tensor. Not by init_device_mesh, whose groups wait for half an hour."""
        groups = [cast(dist.ProcessGroup, self._join_lines(places, axis)) for axis in range(places.ndim)]
        return DeviceMesh.from_group(groups, self._device.type, places, mesh_dim_names=AXES)

    def _join_lines(self, places: Tensor, axis: int) -> dist.ProcessGroup | None:
        """A group of each line of ranks along ``axis``. Every rank makes all of them; that with it in is returned."""
        own: dist.ProcessGroup | None = None
        for members in places.movedim(axis, -1).flatten(0, -2).tolist():
            group = dist.new_group(members, timeout=self._timeout)
            if self.rank in members:
                own = cast(dist.ProcessGroup, group)
        return own

    def axis(self, name: str) -> DeviceMesh | None:
        return self._mesh[name] if self._sizes[name] > 1 else None

    def total(self, value: float) -> float:
        return self._sum([value])[0]

    def reduce(self, metrics: LossMetrics) -> LossMetrics:
        sums, largest = metrics.to_vectors()
        return LossMetrics.from_vectors(self._sum(sums), self._sum(largest, dist.ReduceOp.MAX))

    def agree(self, value: int) -> int:
        chosen = torch.tensor(value, dtype=torch.int64, device=self._device)
        with lost_ranks(self.rank):
            dist.broadcast(chosen, src=0)
        return int(chosen.item())

    def agree_round(self, shape: RoundShape) -> RoundShape:
        found = self._talk.numbers([shape.mark, shape.micro_batches, shape.tokens])
        of_ranks = [RoundShape(mark=mark, micro_batches=count, tokens=tokens) for mark, count, tokens in found]
        data = place_of(self.layout, self.rank).data
        peers = {rank: one for rank, one in enumerate(of_ranks) if place_of(self.layout, rank).data == data}
        if other := [rank for rank, peer in peers.items() if peer.mark != shape.mark]:
            raise RanksError(f"rank {self.rank} has other rows of a round than its peers {other}")
        return RoundShape(
            mark=shape.mark,
            micro_batches=max(one.micro_batches for one in of_ranks),
            tokens=max(peer.tokens for peer in peers.values()),
        )

    def gather(self, data: bytes) -> list[bytes]:
        return self._talk.gather(data)

    def close(self) -> None:
        dist.destroy_process_group()

    def _sum(self, values: Sequence[float], how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        with lost_ranks(self.rank):
            dist.all_reduce(numbers, how)
        return numbers.tolist()


def gpu_of(device: torch.device) -> str:
    """The same for two devices that are one GPU, of whatever container or process; "" for a CPU."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_properties(device)
    return f"GPU-{found.uuid} ({found.name})"  # the driver's id, no two in the world the same


@contextmanager
def lost_ranks(rank: int) -> Iterator[None]:
    """Raise RanksError for a collective that failed, ours or one of FSDP's: another rank died, hung, or left."""
    try:
        yield
    except dist.DistError as error:
        raise RanksError(f"rank {rank} lost the others: {error}") from error
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in ("gloo", "connection closed", "timed out", "peer")):
            raise
        raise RanksError(f"rank {rank} lost the others: {error}") from error


async def meet_ranks(
    broker: Broker,
    rank: int,
    layout: Layout,
    in_torch: InThread,
    *,
    directory: Path,
    device: torch.device,
    join_timeout_s: float,
    collective_timeout_s: float,
    alike: str,
) -> tuple[RankGroup, Meeting | None]:
    """Become one of the ranks of ``layout``, two or more. No meeting under torchrun, whose agent sees to the others.

    directory: where ranks of one machine meet.  join_timeout_s: for rank 0.  collective_timeout_s: for all to connect,
    and later for a slower one.  alike: what must be the same for all.
    Raises: RanksError: they did not come in time, are not alike, or one was replaced meanwhile.
    """

    world_size = layout.num_ranks

    def group(find: Callable[[], Store]) -> RankGroup:
        try:
            return RankGroup(
                rank, layout, find(), device=device, timeout_s=collective_timeout_s, alike=alike, gpu=gpu_of(device)
            )
        except (dist.DistError, RuntimeError) as error:
            raise RanksError(f"rank {rank} of {world_size} could not join the others: {error}") from error

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return await in_torch(lambda: group(partial(_torchrun_store, rank, world_size, collective_timeout_s))), None
    if start := os.environ.get(STARTED_TOGETHER):
        store = await _store_at_broker(broker, start, rank, world_size, limit_s=join_timeout_s)
        return await in_torch(lambda: group(lambda: store)), None
    meeting = Meeting(broker, rank, world_size, directory)
    await (meeting.open() if rank == 0 else meeting.join(limit_s=join_timeout_s))
    _stay_on_loopback()
    joining = asyncio.ensure_future(in_torch(lambda: group(partial(FileStore, str(meeting.store), world_size))))
    following = asyncio.create_task(meeting.follow(), name="follow ranks")
    try:
        await asyncio.wait({joining, following}, return_when=asyncio.FIRST_COMPLETED)
        return (joining.result() if joining.done() else following.result()), meeting
    finally:
        for task in (joining, following):
            task.cancel()
        await asyncio.gather(joining, following, return_exceptions=True)


async def _store_at_broker(broker: Broker, start: str, rank: int, world_size: int, *, limit_s: float) -> Store:
    """Of ranks that an engine of many nodes started together: rank 0 opens a store and says at the broker where.

    start: names this start of all of them, so that none meets a rank of an earlier one.
    Raises: RanksError: rank 0 said nothing within ``limit_s``, or is not reached from here.
    """
    own = _own_address_towards((await broker.info()).address)
    _use_interface(lambda each: each == own)
    key, timeout = STORE_AT.format(start), timedelta(seconds=limit_s)
    if rank == 0:
        store = TCPStore(own, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        await broker.put_meta(key, f"{own} {store.port}".encode(), ttl_s=limit_s)
        return store
    try:
        async with asyncio.timeout(limit_s):
            while (said := await broker.get_meta(key)) is None:  # noqa: ASYNC110 the broker wakes nobody for it
                await asyncio.sleep(POLL_S)
        host, port = said.decode().split()
        connect = partial(TCPStore, host, int(port), world_size, is_master=False, timeout=timeout)
        return await asyncio.to_thread(connect, wait_for_workers=False)
    except TimeoutError:
        raise RanksError(f"rank {rank} found no rank 0 of its start within {limit_s:.0f} s") from None
    except (dist.DistError, RuntimeError) as error:
        raise RanksError(f"rank {rank} does not reach rank 0: {error}") from error


def _own_address_towards(broker: str) -> str:
    """This host's address on the way to the broker's ``host:port``; loopback where the broker is a socket of it."""
    host = broker.rpartition(":")[0].strip("[]")
    return "127.0.0.1" if not host or "/" in host else _own_address(host)


def _torchrun_store(rank: int, world_size: int, timeout_s: float) -> Store:
    """That of its agents, which its environment names."""
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # host
        _stay_on_loopback()
    else:
        _use_interface_towards(os.environ["MASTER_ADDR"])
    store, *_ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
    return store_of_this_start(store, rank, world_size, timeout_s)


def store_of_this_start(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of ``store`` that only ranks that were started together use: torchrun's agents keep one over restarts.

    Each other rank asks under a name that it draws, and rank 0 answers all who ask, those before them included, with
    the name of its part, until each rank has come there or ``timeout_s`` is over.
    Raises: RuntimeError: rank 0 did not answer.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(ASKS.format(rank), own)
        store.wait([ANSWER.format(own)], timedelta(seconds=timeout_s))
        part = PrefixStore(store.get(ANSWER.format(own)).decode(), store)
        part.set(CAME.format(rank), own)
        return part
    part, answered = PrefixStore(own, store), set[str]()
    others, deadline_s = range(1, world_size), time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and not all(part.check([CAME.format(other)]) for other in others):
        asking = {store.get(key).decode() for other in others if store.check([key := ASKS.format(other)])}
        for name in asking - answered:
            store.set(ANSWER.format(name), own)
        answered |= asking
        time.sleep(POLL_S)
    return part


def _stay_on_loopback() -> None:
    """By themselves gloo and NCCL listen on the address of the host's name, which is often one of the network's."""
    _use_interface(is_loopback)


def _use_interface_towards(host: str) -> None:
    """The one on whose network rank 0's ``host`` is: the host's own name is often that of another, or of loopback.

    Raises: RanksError: there is no such host, or no way to it.
    """
    own = _own_address(host)
    _use_interface(lambda address: address == own)


def _own_address(host: str) -> str:
    """Of this host, on the way to ``host``. Raises RanksError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # which sends nothing, and chooses the way
            return probe.getsockname()[0]
    except OSError as error:
        raise RanksError(
            f"rank 0's host {host} cannot be reached from here ({error}): give torchrun of each host --local-addr with "
            "an address of it that the others reach"
        ) from error


def _use_interface(is_its: Callable[[str], bool]) -> None:
    """Have gloo and NCCL of this process use the interface with such an address, unless its owner chose one."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(is_its(address.address) for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


class Meeting:
    """The ranks that train together, as one of them sees it. rank, world_size: of this process."""

    def __init__(self, broker: Broker, rank: int, world_size: int, directory: Path) -> None:
        """directory: of this machine, the same for all ranks, of this user alone."""
        self._broker = broker
        self._rank = rank
        self._world_size = world_size
        self._directory = directory
        self._lock: int | None = None
        self._seats: dict[int, bytes] = {}
        self._id = ""

    @property
    def store(self) -> Path:
        """The file over which the ranks exchange their addresses."""
        return self._directory / f"{self._id}.store"

    async def open(self) -> None:
        """As rank 0: open a meeting that no other rank has joined yet."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._directory.iterdir():  # of rank 0s that are gone; the others of theirs start over
            left.unlink(missing_ok=True)
        self._id = secrets.token_hex(8)
        self._lock = os.open(self._lock_file(self._id), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        await self._broker.put_meta(MEETING, self._id.encode())

    async def join(self, *, limit_s: float) -> None:
        """As another rank: join the meeting of the present rank 0.

        One that an earlier process of this rank had joined is not joined again: rank 0 starts over when it sees us.
        Raises: RanksError: no rank 0 within ``limit_s``.
        """
        own, over = secrets.token_hex(8).encode(), b""
        seat = SEAT.format(self._rank)
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    meeting = await self._broker.get_meta(MEETING) or b""
                    if meeting != over and self._is_open(meeting):
                        before = await self._broker.get_meta(seat) or b""
                        await self._broker.put_meta(seat, meeting + b" " + own)
                        if not before.startswith(meeting):
                            self._id = meeting.decode()
                            return
                        over = meeting
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RanksError(
                f"rank {self._rank} found no rank 0 within {limit_s:.0f} s; the ranks of one machine need the same "
                f"--run-dir (this one's is {self._directory.parent}), ranks of several machines torchrun"
            ) from None

    async def follow(self) -> NoReturn:
        """Raise RanksError once another rank was replaced by a new process.

        Until the next reduction nothing else shows it: the round that a rank was training when it died never ends.
        """
        while True:
            own = self._id.encode()
            if self._rank != 0 and (await self._broker.get_meta(MEETING) or own) != own:  # or: the broker lost the key
                raise RanksError("rank 0 died, and was started again")
            for rank in range(1, self._world_size) if self._rank == 0 else ():
                taken = await self._broker.get_meta(SEAT.format(rank)) or b""
                if taken.startswith(own) and self._seats.setdefault(rank, taken) != taken:
                    raise RanksError(f"rank {rank} died, and was started again")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Let no rank join any more."""
        if self._lock is not None:
            self._lock_file(self._id).unlink(missing_ok=True)
            self.store.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _is_open(self, meeting: bytes) -> bool:
        """Whether its rank 0 lives. What the broker says becomes part of a path only in the form of an id."""
        name = meeting.decode("ascii", "replace")
        return re.fullmatch(r"[0-9a-f]{16}", name) is not None and is_locked(self._lock_file(name))

    def _lock_file(self, meeting: str) -> Path:
        return self._directory / f"{meeting}.open"
