"""A user's own loss and advantage: what is good passes, what is bad is named, with what to do, before a run begins."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes import algorithms
from transport.contracts.messages import TrialRows
from transport.contracts.settings import AlgorithmSettings, DataPart, DataSettings, Settings, TrainerSettings
from workers.__main__ import exit_code
from workers.algorithms.advantage import estimator
from workers.algorithms.loss import Objective, OwnLoss, TokenBatch, loss_sum, loss_terms
from workers.commands.check import check_workers
from workers.errors import AlgorithmError, RewardError
from workers.user_functions.advantage import OwnAdvantage, Response, own_advantages
from workers.user_functions.loss import own_losses, try_loss, try_losses

HERE = "tests.fakes.algorithms"


def loaded(function: str) -> OwnLoss:
    name = f"{HERE}:{function}"
    return own_losses([name, "gspo"], name)[name]


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
        ("breaks_down_in_a_run", r"the loss is -?(inf|nan) for \d+ of 498 tokens where nothing changed"),
        ("louder_in_a_run", r"says additive = 'responses', but .* beside other responses and .* without them"),
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
            own_losses([wanted], allowed)
    with pytest.raises(AlgorithmError, match="start it with --advantage mine:best"):
        own_advantages(["mine:best"], "")
    with pytest.raises(AlgorithmError, match="start it with --loss mine:loss,other:loss, and --functions-path"):
        own_losses(["mine:loss", "other:loss", "gspo"], "mine:loss")
    assert own_losses(["gspo"], "") == {}
    assert own_advantages(["rloo"], "") == {}


def test_a_missing_module_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(AlgorithmError, match=r"No module named 'mine_of_nobody'.*algorithm\.functions_path"):
        own_losses(["mine_of_nobody:loss"], "mine_of_nobody:loss", str(tmp_path))


def test_an_objective_has_one_loss() -> None:
    with pytest.raises(ValueError, match="mine:loss"):
        Objective(loss="mine:loss")
    with pytest.raises(ValueError, match="both"):
        Objective(own_loss=loaded("reinforce"))


# -- advantages


def estimator_named(function: str) -> OwnAdvantage:
    name = f"{HERE}:{function}"
    return own_advantages([name], name)[name]


def test_a_good_advantage_passes() -> None:
    found = estimator_named("best_only").of_samples(np.array([0.0, 2.0, 2.0], np.float32))
    assert found.tolist() == [0.0, 1.0, 1.0]


def test_a_good_advantage_of_tokens_passes_and_is_nothing_where_the_policy_chose_nothing() -> None:
    responses = [
        Response(
            token_ids=np.arange(len(mask), dtype=np.int32),
            chosen=np.array(mask, bool),
            logprobs=np.zeros(len(mask), np.float32),
            branch_ends=np.array([len(mask)], np.int32),
        )
        for mask in ([1, 1, 1], [1, 0, 1])
    ]
    estimate = estimator_named("later_less")
    assert estimate.per_token
    found = estimate.of_tokens(np.array([0.0, 2.0], np.float32), responses)
    assert [one.tolist() for one in found] == [[-1.0, -0.5, -0.25], [1.0, 0.0, 0.25]]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("of_groups", r"additive = 'batch': write of_groups.additive = 'responses' below it"),
        ("running_mean", r"must look at its group alone, and remember nothing"),
        ("one_number", r"returned shape \[\] for 2 rewards: return one number for each"),
        ("no_deviation", r"returned \[nan, nan, nan\] for rewards \[1.0, 1.0, 1.0\]"),
        ("reinforce", r"cannot be called with \(rewards\)"),
        ("takes_responses", r"cannot be called with \(rewards\).*says takes_responses.per_token = True"),
        ("forgets_one", r"returned 1 arrays for 2 responses: return a list with an array for each"),
        ("chosen_alone", r"returned shape \[3\] for response 1, which has 4 tokens: .* also for those that the policy"),
        ("last_is_nan", r"returned nan for token 0 of response 0, the first of 1"),
        ("words", r"returned no numbers of response 0: could not convert string"),
        ("counts_calls", r"must look at its group alone, and remember nothing"),
    ],
)
def test_bad_advantages_are_named_with_what_to_do(function: str, says: str) -> None:
    algorithms.seen.clear()
    with pytest.raises(AlgorithmError, match=says):
        estimator_named(function)


def test_an_advantage_that_fails_in_the_run_is_no_number() -> None:
    with pytest.raises(RewardError, match=r"best_only.*raised ValueError"):
        estimator_named("best_only").of_samples(np.zeros(0, np.float32))


def test_ours_are_found_by_name() -> None:
    assert estimator("mean_only")([0.0, 1.0]).tolist() == [-0.5, 0.5]
    with pytest.raises(ValueError, match="mine"):
        estimator("mine")


# -- before the run


@pytest.mark.parametrize("of_a_part", [False, True])
@pytest.mark.parametrize("which", ["loss", "advantage"])
def test_the_check_of_a_run_tries_them(which: str, of_a_part: bool) -> None:
    def settings_with(function: str) -> Settings:
        own, trainer = {which: f"{HERE}:{function}"}, TrainerSettings(device="cpu")
        if of_a_part:
            return Settings(data=DataSettings(mix={"a": DataPart(**own), "b": DataPart()}), trainer=trainer)
        return Settings(algorithm=AlgorithmSettings(**own), trainer=trainer)

    bad, good = {"loss": ("whitens", "clipped"), "advantage": ("no_deviation", "best_only")}[which]
    with pytest.raises(AlgorithmError, match=bad) as failure:
        check_workers(settings_with(bad), TrialRows(rows=[]))
    assert exit_code(failure.value) == 2
    check_workers(settings_with(good), TrialRows(rows=[]))


def test_a_loss_is_tried_as_each_part_has_it() -> None:
    loss = loaded("clipped")
    good = Objective(loss=loss.name, own_loss=loss)
    try_losses(Objective(of_parts={"a": good}))
    bad = loaded("whitens")
    with pytest.raises(AlgorithmError, match="whitens"):
        try_losses(Objective(of_parts={"a": good, "b": Objective(loss=bad.name, own_loss=bad)}))


def test_what_is_of_the_whole_batch_is_the_same_in_all_parts() -> None:
    with pytest.raises(ValueError, match="aggregation is of the whole mini-batch: part 'a' cannot have its own"):
        Objective(of_parts={"a": Objective(aggregation="sequence_mean")})


def test_a_directory_of_functions_is_looked_in_where_a_function_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = "def loss(logprobs, tokens, objective):\n    return -logprobs\n\n\nloss.additive = 'tokens'\n"
    (tmp_path / "loss_of_a_test.py").write_text(text)
    monkeypatch.setattr(sys, "path", before := [*sys.path])
    name = "loss_of_a_test:loss"
    assert own_losses(["gspo"], "", str(tmp_path)) == {}
    assert sys.path == before
    assert [*own_losses([name], name, str(tmp_path))] == [name]
    sys.modules.pop("loss_of_a_test")
