"""What `serve` tells people to type."""

from __future__ import annotations

import msgspec

from orchestrator.launch.app import join_commands
from transport.contracts.settings import (
    AlgorithmSettings,
    BrokerSettings,
    DataPart,
    DataSettings,
    RunSettings,
    ScoringPool,
    ScoringSettings,
    Settings,
    TrainerSettings,
)
from transport.process.programs import command

SETTINGS = Settings(run=RunSettings(name="mine"), broker=BrokerSettings(url="redis://user:secret@host:6379"))
WORKER = command("streamrl-worker")
WHERE = "--broker redis://user@host:6379 --run mine"


def test_each_kind_of_worker_has_a_line_without_the_password():
    assert join_commands(SETTINGS) == [f"{WORKER} {kind} {WHERE}" for kind in ("generate", "score", "train")]


def test_a_reward_of_the_users_is_named_to_the_worker_that_runs_it():
    settings = msgspec.structs.replace(SETTINGS, scoring=ScoringSettings(reward="mine.rewards:exact"))
    assert join_commands(settings)[1] == f"{WORKER} score --reward mine.rewards:exact {WHERE}"

    settings = msgspec.structs.replace(SETTINGS, scoring=ScoringSettings(reward="mine:exact", reward_path="my rewards"))
    assert join_commands(settings)[1] == f"{WORKER} score --reward mine:exact --reward-path 'my rewards' {WHERE}"


def test_functions_of_an_algorithm_are_named_to_the_workers_that_run_them():
    own = AlgorithmSettings(advantage="mine:best", loss="mine:clip", functions_path="mine")
    settings = msgspec.structs.replace(SETTINGS, algorithm=own)
    assert join_commands(settings)[1:] == [
        f"{WORKER} score --advantage mine:best --functions-path mine {WHERE}",
        f"{WORKER} train --loss mine:clip --functions-path mine {WHERE}",
    ]


def test_functions_of_parts_are_named_beside_those_of_the_run():
    mix = {"one": DataPart(advantage="mine:tokens", loss="gspo"), "two": DataPart(loss="mine:clip"), "all": DataPart()}
    settings = msgspec.structs.replace(
        SETTINGS,
        data=DataSettings(mix=mix),
        algorithm=AlgorithmSettings(advantage="mine:best", functions_path="mine"),
    )
    assert join_commands(settings)[1:] == [
        f"{WORKER} score --advantage mine:best,mine:tokens --functions-path mine {WHERE}",
        f"{WORKER} train --loss mine:clip --functions-path mine {WHERE}",
    ]


def test_environments_of_the_users_are_named_to_the_workers_that_ask_them():
    settings = msgspec.convert(
        {
            "environment": {"name": "calculator", "path": "mine"},
            "data": {"mix": {"one": {"environment": "mine:One"}, "two": {"environment": "mine:Two"}, "sums": {}}},
        },
        Settings,
    )
    settings = msgspec.structs.replace(settings, run=SETTINGS.run, broker=SETTINGS.broker)
    line = f"{WORKER} generate --environment mine:One,mine:Two --environment-path mine {WHERE}"
    assert join_commands(settings)[0] == line


def test_a_pool_of_scoring_workers_has_a_line_of_its_own():
    scoring = ScoringSettings(reward_model="judge", pools={"reward": ScoringPool(), "reference": ScoringPool()})
    settings = msgspec.structs.replace(SETTINGS, scoring=scoring, algorithm=AlgorithmSettings(kl_coef=0.1))
    assert join_commands(settings)[1:4] == [
        f"{WORKER} score --tasks advantages {WHERE}",
        f"{WORKER} score --tasks reward {WHERE}",
        f"{WORKER} score --tasks reference {WHERE}",
    ]


def test_a_critic_is_one_more():
    settings = msgspec.structs.replace(SETTINGS, algorithm=AlgorithmSettings(advantage="gae"))
    kinds = ("generate", "score", "train", "critic")
    assert join_commands(settings) == [f"{WORKER} {kind} {WHERE}" for kind in kinds]


def test_a_service_has_a_publisher_and_neither_scoring_nor_training():
    settings = msgspec.structs.replace(SETTINGS, trainer=TrainerSettings(engine="none"))
    assert join_commands(settings) == [f"{WORKER} publish {WHERE}", f"{WORKER} generate {WHERE}"]
