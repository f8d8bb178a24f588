"""An optimizer whose moments pass through small buffers steps as torch's own does, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the backend

from workers.trainer.policy.offload import OffloadedAdamW

SHAPES = ((300, 7), (64,), (1,), (33, 64))
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=chance, dtype=dtype)) for shape in SHAPES]


def groups(some: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": some[::3], "weight_decay": 0.1}, {"params": some[1:3], "weight_decay": 0.0}]


def give_gradients(some: list[nn.Parameter], seed: int, *, none: int | None = None) -> None:
    chance = torch.Generator().manual_seed(seed)
    for index, one in enumerate(some):
        one.grad = torch.randn(one.shape, generator=chance, dtype=one.dtype) if index != none else None


def tensors(optimizer: torch.optim.Optimizer, some: list[nn.Parameter]) -> list[Tensor]:
    states = [optimizer.state[one] for one in some]
    assert {frozenset(state) for state in states} == {frozenset({"step", "exp_avg", "exp_avg_sq"})}
    return [*some, *(torch.as_tensor(value) for state in states for _, value in sorted(state.items()))]


@pytest.mark.parametrize("piece", [64, 128, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_fused_adamw(piece: int, dtype: torch.dtype) -> None:
    theirs, ours = parameters(dtype), parameters(dtype)
    expected = torch.optim.AdamW(groups(theirs), fused=True, **ADAM)
    offloaded = OffloadedAdamW(groups(ours), piece=piece, **ADAM)
    for number in range(4):
        for some, optimizer in ((theirs, expected), (ours, offloaded)):
            give_gradients(some, number, none=1 if number == 2 else None)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + number)
            optimizer.step()
    for one, other in zip(tensors(offloaded, ours), tensors(expected, theirs), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_either_goes_on_from_the_state_of_the_other() -> None:
    theirs, ours = parameters(torch.float32), parameters(torch.float32)
    expected = torch.optim.AdamW(groups(theirs), fused=True, **ADAM)
    offloaded = OffloadedAdamW(groups(ours), piece=64, **ADAM)
    for number in range(2):
        give_gradients(theirs, number)
        expected.step()
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            one.copy_(other)
    offloaded.load_state_dict(copy.deepcopy(expected.state_dict()))
    for some, optimizer in ((theirs, expected), (ours, offloaded)):
        give_gradients(some, 7)
        optimizer.step()
    for one, other in zip(tensors(offloaded, ours), tensors(expected, theirs), strict=True):
        assert torch.equal(one, other)


def test_a_step_without_gradients_changes_nothing() -> None:
    some = parameters(torch.float32)
    optimizer = OffloadedAdamW(some, **ADAM)
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(one, other) for one, other in zip(some, parameters(torch.float32), strict=True))


def test_a_sharded_parameter_is_stepped_by_its_own_part() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        (part,), (plain,) = parameters(torch.float32)[:1], parameters(torch.float32)[:1]
        give_gradients([plain], 0)
        assert plain.grad is not None
        sharded = nn.Parameter(DTensor.from_local(part.detach(), mesh, [Shard(0)]))
        sharded.grad = DTensor.from_local(plain.grad, mesh, [Shard(0)])
        assert sharded.shape == (600, 7)
        optimizers = [OffloadedAdamW([one], piece=64, **ADAM) for one in (plain, sharded)]
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(sharded.to_local(), plain)
        assert torch.equal(optimizers[1].state[sharded]["exp_avg"], optimizers[0].state[plain]["exp_avg"])
    finally:
        dist.destroy_process_group()
