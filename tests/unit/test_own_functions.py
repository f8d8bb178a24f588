"""A user's own loss and advantage: what is good passes, what is bad is named, with what to do, before a run begins."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes import algorithms
from transport.contracts.messages import TrialRows
from transport.contracts.settings import AlgorithmSettings, Settings, TrainerSettings
from workers.__main__ import exit_code
from workers.algorithms.advantage import estimator
from workers.algorithms.loss import Objective, OwnLoss, TokenBatch, loss_sum, loss_terms
from workers.commands.check import check_workers
from workers.errors import AlgorithmError, RewardError
from workers.user_functions.advantage import own_advantage
from workers.user_functions.loss import own_loss, try_loss

HERE = "tests.fakes.algorithms"


def loaded(function: str) -> OwnLoss:
    loss = own_loss(f"{HERE}:{function}", f"{HERE}:{function}")
    assert loss is not None
    return loss


@pytest.mark.parametrize("function", ["reinforce", "clipped", "row_mean"])
@pytest.mark.parametrize("objective", [{}, {"old_logprobs": "recomputed", "kl_coef": 0.1}])
def test_good_losses_pass(function: str, objective: dict[str, object]) -> None:
    loss = loaded(function)
    try_loss(loss, Objective(**objective, loss=loss.name, own_loss=loss))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("says_nothing", r'additive = None: write says_nothing.additive = "tokens" below it'),
        ("two_parameters", r"cannot be called with \(logprobs, tokens, objective\)"),
        ("mean_of_all", r"returned shape \[\] for 11 tokens: return a tensor with the loss of each"),
        ("numbers", r"returned list for 11 tokens"),
        ("divides_by_nothing", r"the loss is \[nan.* where nothing changed since the rollout; it must be finite"),
        ("no_finite_gradient", r"the gradient of its loss is \[.*it must be finite"),
        ("detached", r"has no gradient: compute it from logprobs"),
        ("raises", r"raised KeyError: 'no such column', .*algorithms.py:\d+"),
        ("says_tokens_and_looks_at_rows", r'says additive = \'tokens\', but .*say "responses" if it looks'),
        ("whitens", r"says additive = 'responses', but .* beside other responses and .* must leave that out"),
        ("nowhere", r"cannot be imported: AttributeError.*mend its module"),
        ("seen", r"is not a function"),
    ],
)
def test_bad_losses_are_named_with_what_to_do(function: str, says: str) -> None:
    with pytest.raises(AlgorithmError, match=rf"loss 'tests.fakes.algorithms:{function}'.*{says}"):
        try_loss(loaded(function), Objective())


def test_a_loss_that_goes_bad_in_the_run_is_named_and_does_not_broadcast() -> None:
    """A number for all tokens would be added to each of them."""
    loss = loaded("mean_of_all")
    objective = Objective(loss=loss.name, own_loss=loss)
    tokens = TokenBatch(rollout_logprobs_N=torch.zeros(3), advantages_N=torch.ones(3), weights_N=torch.ones(3))
    with pytest.raises(AlgorithmError, match="mean_of_all"):
        loss_sum(torch.zeros(3).requires_grad_(), tokens, objective, loss_terms(objective))


def test_what_the_run_names_is_imported_only_where_this_process_names_it_too() -> None:
    for wanted, allowed in ((f"{HERE}:reinforce", ""), (f"{HERE}:reinforce", f"{HERE}:clipped"), ("gspo", "mine:loss")):
        sys.modules.pop("mine", None)
        with pytest.raises(AlgorithmError, match=r"this worker allows|drop --loss mine:loss"):
            own_loss(wanted, allowed)
    with pytest.raises(AlgorithmError, match="start it with --advantage mine:best"):
        own_advantage("mine:best", "")
    assert own_loss("gspo", "") is None
    assert own_advantage("rloo", "") is None


def test_a_missing_module_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(AlgorithmError, match=r"No module named 'mine_of_nobody'.*algorithm\.functions_path"):
        own_loss("mine_of_nobody:loss", "mine_of_nobody:loss", str(tmp_path))


def test_an_objective_has_one_loss() -> None:
    with pytest.raises(ValueError, match="mine:loss"):
        Objective(loss="mine:loss")
    with pytest.raises(ValueError, match="both"):
        Objective(own_loss=loaded("reinforce"))


# -- advantages


def test_a_good_advantage_passes() -> None:
    estimate = own_advantage(f"{HERE}:best_only", f"{HERE}:best_only")
    assert estimate is not None
    assert estimate(np.array([0.0, 2.0, 2.0], np.float32)).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("of_groups", r"additive = 'batch': write of_groups.additive = 'responses' below it"),
        ("running_mean", r"must look at its group alone, and remember nothing"),
        ("one_number", r"returned shape \[\] for 2 rewards: return one number for each"),
        ("no_deviation", r"returned \[nan, nan, nan\] for rewards \[1.0, 1.0, 1.0\]"),
        ("reinforce", r"cannot be called with \(rewards\)"),
    ],
)
def test_bad_advantages_are_named_with_what_to_do(function: str, says: str) -> None:
    algorithms.seen.clear()
    with pytest.raises(AlgorithmError, match=says):
        own_advantage(f"{HERE}:{function}", f"{HERE}:{function}")


def test_an_advantage_that_fails_in_the_run_is_no_number() -> None:
    estimate = own_advantage(f"{HERE}:best_only", f"{HERE}:best_only")
    assert estimate is not None
    with pytest.raises(RewardError, match=r"best_only.*raised ValueError"):
        estimate(np.zeros(0, np.float32))


def test_ours_are_found_by_name() -> None:
    assert estimator("mean_only")([0.0, 1.0]).tolist() == [-0.5, 0.5]
    with pytest.raises(ValueError, match="mine"):
        estimator("mine")


# -- before the run


@pytest.mark.parametrize("which", ["loss", "advantage"])
def test_the_check_of_a_run_tries_them(which: str) -> None:
    bad = {"loss": "whitens", "advantage": "no_deviation"}[which]
    settings = Settings(algorithm=AlgorithmSettings(**{which: f"{HERE}:{bad}"}), trainer=TrainerSettings(device="cpu"))
    with pytest.raises(AlgorithmError, match=bad) as failure:
        check_workers(settings, TrialRows(rows=[]))
    assert exit_code(failure.value) == 2
    good = {"loss": "clipped", "advantage": "best_only"}[which]
    settings = Settings(algorithm=AlgorithmSettings(**{which: f"{HERE}:{good}"}), trainer=TrainerSettings(device="cpu"))
    check_workers(settings, TrialRows(rows=[]))
