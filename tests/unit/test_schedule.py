"""The learning rate of every batch: equal to transformers' schedules, and to itself after a change of length."""

from __future__ import annotations

import pytest
import torch
from transformers.optimization import get_scheduler

from orchestrator.config.rules import violations
from transport.contracts.settings import LrSchedule, RunSettings, Settings, TrainerSettings
from workers.trainer.policy.policy_learner import learning_rate


def theirs(name: str, *, lr: float, warmup: int, total: int, **more: float) -> list[float]:
    """[total + 1] the rate at each step, as transformers sets it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(name, optimizer, warmup, total, more or None)
    rates: list[float] = []
    for _ in range(total + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize(
    ("kind", "min_share", "name", "more"),
    [
        ("constant", 0.0, "constant_with_warmup", {}),
        ("linear", 0.0, "linear", {}),
        ("cosine", 0.0, "cosine", {}),
        ("cosine", 0.1, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
def test_rates_are_those_of_transformers(
    kind: LrSchedule, min_share: float, name: str, more: dict[str, float], warmup: int
) -> None:
    expected = theirs(name, lr=3e-4, warmup=warmup, total=20, **more)
    for batch in range(20):
        step = batch + 1 if batch < warmup else batch
        assert learning_rate(batch, 20, lr=3e-4, schedule=kind, min_share=min_share, warmup=warmup) == pytest.approx(
            expected[step], rel=1e-12
        )


def test_linear_falls_to_its_least_share_and_no_further() -> None:
    rates = [learning_rate(batch, 4, lr=1.0, schedule="linear", min_share=0.5) for batch in range(6)]
    assert rates == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


def test_a_run_made_longer_goes_on_as_if_it_had_been_so_long_and_an_unknown_length_never_falls() -> None:
    assert learning_rate(8, 10, lr=1.0, schedule="linear") == pytest.approx(0.2)
    assert learning_rate(9, 20, lr=1.0, schedule="linear") == pytest.approx(0.55)
    assert learning_rate(9, 0, lr=1.0, schedule="linear") == 1.0


def test_settings_that_contradict_each_other_are_refused() -> None:
    def broken(**trainer: object) -> list[str]:
        settings = Settings(run=RunSettings(batches=10), trainer=TrainerSettings(**trainer))  # type: ignore[arg-type]
        return [keys[0] for keys, _ in violations(settings)]

    assert broken(lr_schedule="cosine", warmup_batches=10) == ["trainer.warmup_batches"]
    assert broken(lr_min_share=0.1) == ["trainer.lr_min_share"]
    assert broken(warmup_batches=10) == broken(lr_schedule="linear", lr_min_share=0.1, warmup_batches=9) == []
