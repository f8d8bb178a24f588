"""What other libraries take for the same bytes, each as its manual shows it (``transport_ways.py``)."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.transport_ways import ENDING_S, REQUEST, STEP_S, Side, Transfer, Way, mapped, memory
from transport.broker.embedded import packaged_binary
from transport.process.programs import ending_with_this_process


def torch_alone() -> Any:
    """Torch with one thread, on loopback."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    import torch

    torch.set_num_threads(1)
    return torch


def meeting_point(side: Side, rank: int) -> str:
    """A file by which two ranks find each other."""
    if rank:
        return side.link.recv()
    point = f"file://{side.inputs.directory}/meeting-{os.getpid()}"
    side.link.send(point)
    return point


@contextmanager
def gloo(side: Side, *, rank: int) -> Iterator[Transfer]:
    torch = torch_alone()
    point = meeting_point(side, rank)
    torch.distributed.init_process_group("gloo", init_method=point, rank=rank, world_size=2)
    asked = torch.zeros(1, dtype=torch.int64)

    def send(nbytes: int) -> None:
        torch.distributed.recv(asked, 1)
        torch.distributed.send(torch.frombuffer(side.content[:nbytes], dtype=torch.uint8), 1)

    def receive(nbytes: int) -> None:
        torch.distributed.send(asked, 0)
        into = memory(nbytes)
        torch.distributed.recv(torch.frombuffer(into, dtype=torch.uint8), 0)
        side.check(into, nbytes)

    yield send if rank == 0 else receive
    torch.distributed.destroy_process_group()


def rpc_give(content: Path, nbytes: int) -> Any:
    """Called by the other process."""
    import torch

    return torch.frombuffer(mapped(content)[:nbytes], dtype=torch.uint8)


@contextmanager
def torch_rpc(side: Side, *, rank: int) -> Iterator[Transfer]:
    torch_alone()
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1, init_method=meeting_point(side, rank))
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    def receive(nbytes: int) -> None:
        side.check(rpc.rpc_sync("rank0", rpc_give, (side.inputs.content, nbytes)).numpy().data, nbytes)

    yield receive if rank else lambda nbytes: None
    rpc.shutdown()


@contextmanager
def pickle_sender(side: Side) -> Iterator[Transfer]:
    def transfer(nbytes: int) -> None:
        side.link.recv()
        side.link.send(np.frombuffer(side.content[:nbytes], np.uint8))

    yield transfer


@contextmanager
def pickle_receiver(side: Side) -> Iterator[Transfer]:
    def transfer(nbytes: int) -> None:
        side.link.send(nbytes)
        side.check(side.link.recv().data, nbytes)

    yield transfer


@contextmanager
def streams_sender(side: Side) -> Iterator[Transfer]:
    with asyncio.Runner() as runner:

        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            came: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
            came = asyncio.get_running_loop().create_future()
            server = await asyncio.start_server(lambda *ends: came.set_result(ends), "127.0.0.1", 0)
            side.link.send(server.sockets[0].getsockname()[1])
            ends = await came
            server.close()
            return ends

        reader, writer = runner.run(connected())
        writer.transport.set_write_buffer_limits(0)  # drained is sent: nothing is while no coroutine runs

        async def send(nbytes: int) -> None:
            await reader.readexactly(REQUEST.size)
            writer.write(side.content[:nbytes])
            await writer.drain()

        yield lambda nbytes: runner.run(send(nbytes))
        writer.close()


@contextmanager
def streams_receiver(side: Side) -> Iterator[Transfer]:
    with asyncio.Runner() as runner:
        reader, writer = runner.run(asyncio.open_connection("127.0.0.1", side.link.recv()))

        async def receive(nbytes: int) -> None:
            writer.write(REQUEST.pack(nbytes))
            side.check(memoryview(await reader.readexactly(nbytes)), nbytes)

        yield lambda nbytes: runner.run(receive(nbytes))
        writer.close()


@contextmanager
def redis_sender(side: Side) -> Iterator[Transfer]:
    import redis

    path = side.inputs.directory / f"redis-{os.getpid()}.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(
        [str(packaged_binary()), *options], stdout=subprocess.DEVNULL, preexec_fn=ending_with_this_process()
    )
    side.others.append(server.pid)
    try:
        client = redis.Redis(unix_socket_path=str(path))
        until_s = time.monotonic() + STEP_S
        while not path.exists() and server.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        client.ping()
        side.link.send(str(path))

        def transfer(nbytes: int) -> None:
            side.link.recv()
            client.set("tensor", side.content[:nbytes])
            side.link.send("set")

        yield transfer
        client.close()
    finally:
        server.terminate()
        server.wait(ENDING_S)


@contextmanager
def redis_receiver(side: Side) -> Iterator[Transfer]:
    import redis

    client = redis.Redis(unix_socket_path=side.link.recv())

    def transfer(nbytes: int) -> None:
        side.link.send(nbytes)
        side.link.recv()
        side.check(memoryview(client.get("tensor")), nbytes)

    yield transfer
    client.close()


@contextmanager
def ray_sender(side: Side) -> Iterator[Transfer]:
    yield lambda nbytes: None  # an actor sends


@contextmanager
def ray_receiver(side: Side) -> Iterator[Transfer]:
    import ray

    class Owner:
        def put(self, content: str, nbytes: int) -> list[Any]:
            import numpy
            import ray

            if not hasattr(self, "content"):
                self.content = numpy.memmap(content, numpy.uint8, "r")
            return [ray.put(numpy.asarray(self.content[:nbytes]))]

    most = 4 * max(side.inputs.pieces) + (256 << 20)
    ray.init(num_cpus=2, object_store_memory=most, include_dashboard=False, log_to_driver=False, logging_level="error")
    owner: Any = ray.remote(Owner).remote()
    ray.get(owner.put.remote(str(side.inputs.content), min(side.inputs.pieces)))
    side.others += [process.pid for process in psutil.Process().children(recursive=True)]

    def transfer(nbytes: int) -> None:
        [put] = ray.get(owner.put.remote(str(side.inputs.content), nbytes))
        side.check(memoryview(ray.get(put)), nbytes)

    try:
        yield transfer
    finally:
        ray.shutdown()


NIXL = ("nixl", "nixl_cu12", "nixl_cu13")


def nixl_agent(name: str) -> Any:
    [found, *_] = [module for module in NIXL if importlib.util.find_spec(module)]
    api = importlib.import_module(f"{found}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def region(view: memoryview) -> tuple[int, int, int, str]:
    return (np.frombuffer(view, np.uint8).ctypes.data, view.nbytes, 0, "")


@contextmanager
def nixl_sender(side: Side) -> Iterator[Transfer]:
    """Its memory is read by the other side; its library's thread sees to that."""
    agent = nixl_agent("sender")
    registered = agent.register_memory([region(side.content)], "DRAM")
    side.link.send((agent.get_agent_metadata(), region(side.content)[0]))
    yield lambda nbytes: None
    side.link.recv()
    agent.deregister_memory(registered)


@contextmanager
def nixl_receiver(side: Side) -> Iterator[Transfer]:
    agent = nixl_agent("receiver")
    into = memory(max(side.inputs.pieces))
    registered = agent.register_memory([region(into)], "DRAM")
    metadata, there = side.link.recv()
    name = agent.add_remote_agent(metadata)

    @functools.cache
    def handle(nbytes: int) -> Any:
        here = agent.get_xfer_descs([region(into[:nbytes])[:3]], "DRAM")
        return agent.initialize_xfer("READ", here, agent.get_xfer_descs([(there, nbytes, 0)], "DRAM"), name, b"")

    def transfer(nbytes: int) -> None:
        state = agent.transfer(handle(nbytes))
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl: the transfer failed")
            state = agent.check_xfer_state(handle(nbytes))
        side.check(into, nbytes)

    yield transfer
    for nbytes in side.inputs.pieces:
        agent.release_xfer_handle(handle(nbytes))
    agent.deregister_memory(registered)
    side.link.send("end")


OTHERS = {
    "gloo send/recv": Way(functools.partial(gloo, rank=0), functools.partial(gloo, rank=1)),
    "torch RPC": Way(functools.partial(torch_rpc, rank=0), functools.partial(torch_rpc, rank=1)),
    "nixl, READ": Way(nixl_sender, nixl_receiver, NIXL),
    "Ray put/get": Way(ray_sender, ray_receiver, ("ray",)),
    "Redis SET/GET (Valkey)": Way(redis_sender, redis_receiver),
    "pickle, multiprocessing": Way(pickle_sender, pickle_receiver),
    "asyncio streams": Way(streams_sender, streams_receiver),
}
