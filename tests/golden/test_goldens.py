"""Recorded runs and simulated ones decide what they decided when they were recorded, command by command.

Each of five real runs is replayed through the state of today; its commands must be the recorded ones, byte for byte
after the renaming of ``renames.py``. Of simulated runs there are digests. ``README.md`` says what each run covers.
"""

from __future__ import annotations

import json

import pytest

from orchestrator.sim.simulate import simulate
from tests.golden.goldens import DIGESTS, JOURNALS, UnknownNameError, canonical, digest, replayed, today
from tests.golden.renames import Added, Renaming
from tests.golden.scenarios import SCENARIOS

NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in JOURNALS.glob("*.jsonl.gz"))
WHAT_TO_DO = """
What to do:
- You only renamed a message, field, value or setting: add one line to RENAMES in tests/golden/renames.py (its head says
  how), in the same commit.
- You changed no decision on purpose: this is a bug. `git stash` tells whether it is yours.
- You changed a decision on purpose: record anew with `python -m tests.golden.record {name}`, and say in the commit
  message which decision changed and why.
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_decides_the_same_again(name: str):
    try:
        for number, (moment, commands) in enumerate(replayed(today(name)), 1):
            if commands != moment.commands or canonical(commands) != canonical(moment.commands):
                pytest.fail(_difference(name, number, moment.event, moment.commands, commands), pytrace=False)
    except UnknownNameError as error:
        pytest.fail(f"golden {name}: {error}\n{WHAT_TO_DO.format(name=name)}", pytrace=False)


def _difference(name: str, number: int, event: dict, recorded: list[dict], now: list[dict]) -> str:
    lines = [
        f"golden {name}: event {number} gives other commands than when it was recorded",
        f"  event {canonical(event)}",
    ]
    lines += [f"  - {canonical(command)}" for command in recorded if command not in now]
    lines += [f"  + {canonical(command)}" for command in now if command not in recorded]
    if len(lines) == 2:
        lines.append(f"  in another order: {[one['type'] for one in recorded]} -> {[one['type'] for one in now]}")
    return "\n".join(lines) + "\n" + WHAT_TO_DO.format(name=name)


def test_there_is_a_golden_of_every_run_that_is_to_be_held():
    assert NAMES == ["elastic", "evaluation", "service", "staleness_2", "synchronous"]


@pytest.fixture(scope="module")
def digests() -> dict[str, dict]:
    return json.loads(DIGESTS.read_text())


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_simulated_run_decides_the_same_again(name: str, digests: dict[str, dict]):
    was, now = digests[name], digest(simulate(SCENARIOS[name]).history)
    if was == now:
        return
    differing = [mark for mark, other in zip(was["marks"].split(), now["marks"].split(), strict=False) if mark != other]
    kinds = {kind: (was["kinds"].get(kind, 0), now["kinds"].get(kind, 0)) for kind in {*was["kinds"], *now["kinds"]}}
    pytest.fail(
        f"simulated run '{name}' decides something else, first in the events up to {differing[:1]}; "
        f"counts that changed (recorded, now): { {kind: pair for kind, pair in kinds.items() if pair[0] != pair[1]} }\n"
        + WHAT_TO_DO.format(name="digests"),
        pytrace=False,
    )


def test_the_digests_are_of_the_scenarios(digests: dict[str, dict]):
    assert list(digests) == list(SCENARIOS)


TABLE = {
    "ComputePlan": "Plan",
    "ComputePlan.workers": "instances",
    "ComputePlan.workers.pace": "slowdown",
    "ComputePlan.policy=even": "equal",
    "ComputePlan.reason~gone (.*)": r"lost \1",
    "ComputePlan.groups.lane": Added("train"),
    "*.group_id": "group",
}
RECORDED = {
    "type": "ComputePlan",
    "policy": "even",
    "groups": [{"group_id": "0/1"}],
    "workers": [{"pace": 2.0}],
    "reason": "a worker is gone early",
}


def test_a_table_of_renames_leads_to_the_names_of_today():
    assert Renaming(TABLE).message(RECORDED) == {
        "type": "Plan",
        "policy": "equal",
        "groups": [{"group": "0/1", "lane": "train"}],
        "instances": [{"slowdown": 2.0}],
        "reason": "a worker is lost early",
    }
    assert Renaming({"settings.scaling.min_gain": None}).settings({"scaling": {"min_gain": 1}}) == {"scaling": {}}


def test_and_back_but_for_texts():
    without_text = {key: value for key, value in RECORDED.items() if key != "reason"}
    renaming = Renaming(TABLE)
    assert renaming.as_recorded(renaming.message(without_text)) == without_text
