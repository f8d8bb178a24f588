"""Weights of a model that gloo ranks share, as torch's own engine splits it, into an engine that serves the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, Module

from tests.fakes.parallel_ranks import run_layout, shard
from tests.fakes.tiny_models import VOCAB, tiny_model
from transport.contracts.messages import WeightManifest, WeightPart
from transport.contracts.settings import GenerationSettings
from transport.contracts.training_memory import Layout
from transport.contracts.types import GroupId, SamplingParams, WeightIdentity
from transport.errors import MessageError
from transport.process.clock import MonotonicClock
from transport.tensors.base import Address, Segment, TimeLimit
from transport.tensors.tcp import TcpReader
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.engine import Completion, GenerationRequest, serving
from workers.models import random_model
from workers.trainer.policy.parallel import Ranks
from workers.weights.parts import shard_of
from workers.weights.publish import DELTA, WeightPublisher
from workers.weights.pull import WeightPuller


def publish_and_check(
    ranks: Ranks, directory: Path, tensors: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]
) -> WeightManifest:
    """Publish together; every rank then has the whole from all others, with the digest of one rank alone."""
    publisher = WeightPublisher("sharded-test", directory / str(ranks.rank))
    manifest = publisher.publish(2, 1, tensors, torch.bfloat16, ranks)
    alone = WeightPublisher("alone-test", directory / f"alone-{ranks.rank}")
    assert manifest.weights.digest == alone.publish(2, 1, order_of(manifest, dense), torch.bfloat16).weights.digest
    with WeightPuller(limit=TimeLimit(60)).pull(manifest) as pulled:
        assert pulled.keys() == dense.keys()
        for name, tensor in dense.items():
            assert torch.equal(pulled[name], tensor.detach().bfloat16()), name
    dist.barrier()
    alone.close()
    publisher.close()
    return manifest


def order_of(manifest: WeightManifest, dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {spec.name: dense[spec.name] for spec in manifest.tensors}


def split_model(ranks: Ranks, directory: Path, data: int, tensor: int) -> None:
    dense = dict(tiny_model(seed=1).named_parameters())
    model = tiny_model(seed=1)
    shard(model, data=data, tensor=tensor)
    manifest = publish_and_check(ranks, directory, dict(model.named_parameters()), dense)
    assert len(manifest.parts) == data * tensor
    nbytes = [sum(np.prod(piece.shape, dtype=int) for piece in part.pieces) for part in manifest.parts]
    assert sum(nbytes) == sum(parameter.numel() for parameter in dense.values())
    assert max(nbytes) < 2 * min(nbytes)


def split_unevenly(ranks: Ranks, directory: Path) -> None:
    """Sizes that come out even on no axis, rows of rows, columns, and placements that a trainer has on few tensors."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    class Layer(Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Linear(6, 10), Linear(10, 6, bias=False)

    layer = Layer()
    dense = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(layer, mesh=mesh["data"])
    tensors: dict[str, torch.Tensor] = dict(layer.named_parameters())
    placements = {"rows": [Split(0), Replicate()], "grid": [Split(0), Split(1)], "few": [Split(0), Split(0)]}
    for name, placed in placements.items():
        dense[name] = torch.randn(3 if name == "few" else 7, 5)
        tensors[name] = distribute_tensor(dense[name], mesh, placed)
    dense["alike"] = tensors["alike"] = torch.randn(5)
    publish_and_check(ranks, directory, tensors, dense)
    unsummed = DTensor.from_local(torch.ones(2), mesh["data"], [Partial()])
    with pytest.raises(ValueError, match="not the same as any part"):
        shard_of(unsummed)


def tell_changes(ranks: Ranks, directory: Path) -> None:
    """Rows and columns of a matrix on four ranks, of which a few elements change: a receiver of another host hears just
    those from each rank.
    """
    model = tiny_model(seed=1)
    shard(model, data=2, tensor=2)
    held = dict(model.named_parameters())
    publisher = WeightPublisher("changes-test", directory / str(ranks.rank), delta_share=0.5)
    puller = WeightPuller(limit=TimeLimit(60))
    for version in range(3):
        manifest = publisher.publish(1, version, held, torch.bfloat16, ranks)
        expected = {name: parameter.full_tensor().bfloat16() for name, parameter in held.items()}
        if ranks.rank == 0:
            parts = [part.delta for part in manifest.parts]
            assert [part is not None for part in parts] == [version > 0] * 4
            with spied(puller) as opened, puller.pull(elsewhere(manifest)) as pulled:
                assert all(torch.equal(pulled[name], tensor) for name, tensor in expected.items())
                assert len(opened) == 4
                assert all(address.endswith(DELTA) for address in opened) == (version > 0)
        for parameter in held.values():
            parameter.to_local().detach().reshape(-1)[::97] += 1.0
        dist.barrier()
    publisher.close()


def elsewhere(manifest: WeightManifest) -> WeightManifest:
    """As a worker of another host reads it."""

    def over_tcp(part: WeightPart) -> WeightPart:
        changed = part.delta and replace(part.delta, sources=part.delta.sources[1:2])
        return replace(part, sources=part.sources[1:2], delta=changed)

    return replace(manifest, parts=tuple(map(over_tcp, manifest.parts)))


@contextmanager
def spied(puller: WeightPuller) -> Iterator[list[str]]:
    """The addresses that it opens."""
    opened: list[str] = []
    reader = puller._readers.setdefault("tcp", TcpReader())

    def watched(address: Address, *more: Any) -> Segment:
        opened.append(str(address))
        return type(reader).open(reader, address, *more)  # pyright: ignore

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(reader, "open", watched)
        yield opened


def four_ranks(ranks: Ranks, directory: Path) -> None:
    tell_changes(ranks, directory / "changes")
    split_model(ranks, directory / "model", 2, 2)
    split_unevenly(ranks, directory / "uneven")


def test_what_four_ranks_hold_arrives_whole_whatever_the_placements(tmp_path: Path) -> None:
    run_layout(Layout(data=4), four_ranks, tmp_path)


def split_over_stages(ranks: Ranks, directory: Path) -> None:
    """Each stage holds its own layers, whole, and both the matrix of tied embeddings."""
    dense = {name: parameter.detach() for name, parameter in tiny_model(seed=1).named_parameters()}
    other = f"model.layers.{1 - ranks.rank}."
    held = {name: tensor for name, tensor in dense.items() if not name.startswith(other)}
    if ranks.rank == 0:
        del held["model.norm.weight"]
    publish_and_check(ranks, directory, held, dense)


def serve_published(ranks: Ranks, directory: Path) -> None:
    model = tiny_model(seed=1)
    dense = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard(model, data=2, tensor=1)
    publisher = WeightPublisher("served-test", directory / str(ranks.rank))
    manifest = publisher.publish(1, 1, dict(model.named_parameters()), torch.float32, ranks)
    if ranks.rank == 0:
        with WeightPuller(limit=TimeLimit(60)).pull(manifest) as tensors:
            of_parts = asyncio.run(generated(directory / "model", manifest.weights, tensors))
        of_dense = asyncio.run(generated(directory / "model", manifest.weights, dense))
        assert of_parts == of_dense
        assert {span.weights for one in of_parts for span in one[2]} == {manifest.weights}
        torn = replace(manifest, parts=manifest.parts[:1])
        with pytest.raises(MessageError, match="'model"), WeightPuller().pull(torn):
            pass
    dist.barrier()
    publisher.close()


async def generated(directory: Path, weights: WeightIdentity, tensors) -> list[tuple]:
    """(tokens, logprobs, spans) of two samples of an engine that was given ``tensors``."""
    engine = EmbeddedEngine(GenerationSettings(slots=2, dtype="float32", max_context=64), directory, MonotonicClock())
    async with serving(engine), asyncio.timeout(120):
        await engine.load_weights(weights, tensors)
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=3)
        prompt = np.arange(2, 9, dtype=np.int32) % VOCAB
        engine.submit(GenerationRequest(group_id=GroupId("0/0"), prompt_ids=prompt, samples=(0, 1), sampling=sampling))
        found: list[Completion] = []
        while len(found) < 2:
            found += [one for one in await engine.results() if isinstance(one, Completion)]
    found.sort(key=lambda one: one.sample)
    return [(one.response_ids.tolist(), one.logprobs.tolist(), tuple(one.spans)) for one in found]


def two_ranks(ranks: Ranks, directory: Path) -> None:
    split_over_stages(ranks, directory / "stages")
    serve_published(ranks, directory)


def test_an_engine_serves_what_two_ranks_published_and_so_do_stages(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    random_model("qwen3-tiny")(tmp_path / "model")
    tiny_model(seed=0).save_pretrained(tmp_path / "model")
    run_layout(Layout(data=2), two_ranks, tmp_path)
