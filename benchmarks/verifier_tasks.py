"""Answers without content, over all reasoning_gym tasks that have a verifier here: none may be paid.

    empty    says nothing of the problem: nan, 0, an empty list, the prompt, another row's answer, an endless repetition
    near     (--near) the right answer with one fault, or several guesses at once
    right    (--right) the right answer as the task gives it, in which case rows that do not earn 1 are listed

Every answer goes the whole way of a response: extraction, then the task's grader. An answer that is the right one by
chance is not counted. A process of its own grades them, so that a grader that hangs is a finding and ends nothing.

    python -m benchmarks.verifier_tasks [--rows 5] [--seed 0] [--near] [--right] [--tasks coin_flip,gcd]

Last line: JSON. ``empty_paid`` answers without content that earn 1; ``slow`` answers that take over a second of CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from transport.contracts.gym_tasks import OURS, READ, refusal

CPU_LIMIT_S = 1.0
"""CPU seconds that an answer may take."""
STOP_S = 5.0
"""CPU seconds after which the grading of an answer is interrupted: far enough beyond the limit to report a figure."""
HANG_S = 30.0
"""Seconds without a sign of life after which the grading process is killed."""
CONSTANT_ROWS = 3
"""Rows from which on a constant that is right on each of them is reported as a degenerate task."""

PLAYED_OUT = frozenset(
    {
        *("boxnet", "countdown", "cryptarithm", "graph_color", "jugs", "kakurasu", "knight_swap", "puzzle24"),
        *("quantum_lock", "rubiks_cube", "rush_hour", "shortest_path", "sokoban", "tower_of_hanoi", "word_ladder"),
    }
)
"""Tasks with several right answers, each tried on the problem itself. There the right answer of another row may solve
this one as well; it counts as paid where it solves more than half of the rows."""

Entry: TypeAlias = Mapping[str, Any]
Answers: TypeAlias = Callable[[Sequence[Entry], int, random.Random], Iterator[str]]
"""(entries of a task, index of the row, randomness) -> answers to try on this row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """An answer that earned 1, or took more than CPU_LIMIT_S. row: index.  cpu_s: CPU seconds; inf: it was killed."""

    task: str
    row: int
    answer: str
    right: str
    cpu_s: float
    paid: bool


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was tried. constants: (task, answer) that is right on every row.  slowest: the answer with the most CPU."""

    tasks: int = 0
    tried: int = 0
    paid: list[Paid] = field(default_factory=list[Paid])
    slow: list[Paid] = field(default_factory=list[Paid])
    constants: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    slowest: Paid | None = None


def scan(seed: int, rows: int) -> list[Paid]:
    """Answers without content that earn 1, over all allowed tasks."""
    return survey(seed, rows, empty).paid


def allowed() -> list[str]:
    """Tasks that have a verifier here."""
    return sorted(task for task in (*READ, *OURS) if not refusal(task))


# --- what is tried ----------------------------------------------------------------------------------------------------

CONSTANTS = (
    *("nan", "NaN", "-nan", "inf", "-inf", "infinity", "nan+nani", "nani", "inf+infi", "nan, nan", "nan/nan", "1e400"),
    *("", " ", ".", "-", "?", "*", "()", "[]", "{}", "[[]]", "[nan]", "[[nan]]", "[0]", "[[0]]", "{}{}", '""', "''"),
    *("None", "null", "true", "True", "false", "False", "yes", "Yes", "no", "No", "unknown", "impossible", "N/A"),
    *("0", "-0", "0.0", "1", "-1", "2", "0x0", "1j", "0/1", "0/0", "1/0", "0, 0", "1 2 3 4 5 6 7 8 9", "x", "C", "a"),
    *(
        "answer",
        "Answer:",
        "<result>",
        "<answer>",
        "<answer></answer>",
        "...",
        "\\boxed{}",
        "\\text{}",
        "$$",
        "\\infty",
    ),
    *(
        "x = x",
        "P → P",
        "P \u2228 ¬P",
        "P \u2228 Q",
        "P ∧ ¬P",
        "¬(P ∧ ¬P)",
        "p \u2228 ¬p",
        "R R'",
        "A → B → C",
        "ABC",
        "LRUD",
        "#",
    ),
    *(
        '["fill A"]',
        '{"0": 1}',
        '{"a": 1}',
        "[true]",
        "[[true]]",
        "1 \u00d7",
        "\u00d7 \u00d7",
        "()()",
        "²",
        "\u0661",
        "abcdefghijklmnopqrstuvwxyz",
    ),
)
"""Answers that are the same whatever is asked."""
_MUCH = 39_000
"""Characters of most answers of LONG: just below what is read at all (workers/scoring/graders.py, MAX_ANSWER)."""


def _filled(unit: str, first: str = "", last: str = "") -> str:
    return first + unit * ((_MUCH - len(first) - len(last)) // len(unit)) + last


LONG = (
    *("9" * 4000, "9" * 1_000_000, "1e999999999", "-1e-999999999", "1/" + "9" * 4000, "9**9**9**9", "x" + "**x" * 150),
    *(
        _filled("9"),
        _filled("9 "),
        _filled("9, "),
        _filled("9,"),
        _filled("a "),
        _filled("a"),
        _filled("0.1"),
        _filled("-"),
    ),
    *(
        _filled("["),
        _filled("[", last="]"),
        _filled("1, ", "[", "1]"),
        _filled("[1, 2], ", "[", "[1, 2]]"),
        _filled("{"),
    ),
    *(_filled('"a", ', '["', '"]'), _filled('["a"], ', "[", '["a"]]'), _filled('"a": [1, 2], ', "{", '"b": 1}')),
    *(_filled("(", last=")"), "(" * 300 + "1" + ")" * 300, _filled("1 + ", last="1"), _filled("1:"), _filled("A=1,")),
    *(_filled(", a", '[{"Agent[0.5, 0.5]":"move('), _filled(', "B,A1,B2"', '["w,A1,B2"', "]")),
    *(
        _filled(', "fill A"', '["fill B"', "]"),
        _filled(', "pour A->B"', '["fill A"', "]"),
        "A+999999999",
        _filled("A+9 "),
    ),
    *(
        "R999999999",
        _filled("R "),
        _filled("R9 "),
        "R9 " * 399,
        _filled("LRUD"),
        "LRUD" * 499,
        _filled("A \u2192 ", last="A"),
    ),
    *(
        _filled("9 \u00d7 ", last="9"),
        "97 \u00d7 " * 5000 + "97",
        _filled("7 days, "),
        _filled("1e"),
        _filled("\\frac{"),
    ),
    *(_filled("AB,"), _filled("right "), _filled("Q _ "), _filled("\u00ac", last="P"), _filled("(\u00ac", last="P")),
    *(" \u2228 ".join("abcdefghijklmnopqrstuvwxyz"), "(x+1)**4000*(x+2)**4000", "(x+1)**100*(x+2)**100*(x+3)**100"),
    *("sin(" * 90 + "x" + ")" * 90, "(x+1)/(x-1)*" * 40 + "x", "((x+1)**(1/3)+" * 20 + "x" + ")" * 20),
    *("(x+1/3)**99*" * 40 + "x", "((((x+1)**9+1)**9+1)**9+1)**9", "9**99*" * 80 + "x", "(1/7)**99*" * 49 + "x"),
)
"""Answers made to be slow."""


def empty(entries: Sequence[Entry], row: int, rng: random.Random) -> Iterator[str]:
    """Answers without content."""
    entry = entries[row]
    question = str(entry["question"])
    yield from CONSTANTS
    yield from LONG
    yield question
    yield question.replace("\n", " ")
    lines = [line.strip() for line in question.splitlines() if line.strip()]
    yield from lines[:3]
    yield from lines[-4:]
    for example in re.findall(r"(?i)(?:example|e\.g\.|ex|format|like)[^\n:]{0,40}:?\s*([^\n]+)", question):
        yield from (example, example.strip("\"'`. "))
    yield from re.findall(r"[\"'`]([^\"'`\n]{1,200})[\"'`]", question)[:8]
    numbers = re.findall(r"-?\d+\.?\d*", json.dumps(entry["metadata"]))
    yield from (" ".join(numbers)[:2000], ", ".join(numbers)[:2000], json.dumps(entry["metadata"])[:5000])
    yield from dict.fromkeys(numbers[:12])
    others = [right_answer(one) for at, one in enumerate(entries) if at != row]
    yield from others[:5]
    yield from (" ".join(others[:4]), ", ".join(others[:4]))
    for value in entry["metadata"].values():
        if isinstance(value, str | int | float):
            yield str(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            yield from value[:4]


def near(entries: Sequence[Entry], row: int, rng: random.Random) -> Iterator[str]:
    """The right answer with one fault, and several answers at once."""
    right = right_answer(entries[row])
    others = [one for one in map(right_answer, entries) if one != right][:3] or ["0"]
    yield from (right[:-1], right[1:], right + "x", right + " x", right + " 1", right + ", 1", right + "0", "-" + right)
    yield from (right[::-1], "not " + right, right + right, f"{right} {right}", f"{right}, {right}", f"1{right}")
    yield from (f"{right} or {others[0]}", f"{others[0]} or {right}", f"{right}, {others[0]}", f"{others[0]}, {right}")
    yield from (f"{right} {others[0]}", f"{others[0]} {right}", f"it is {others[0]}, not {right}", f"{right}/{right}")
    yield from (f"{right};{others[0]}", f"[{right}, {others[0]}]", f"{right} # {others[0]}", f"{others[0]} = {right}")
    for separator in (", ", " ", ","):
        items = right.split(separator)
        if len(items) > 1:
            yield from (separator.join(items[:-1]), separator.join(items[1:]), separator.join([*items, items[0]]))
            yield from (separator.join([items[1], items[0], *items[2:]]), separator.join(items[::-1]))
    for at in rng.sample(range(len(right)), min(6, len(right))):
        if right[at].isdigit():
            yield right[:at] + str((int(right[at]) + 1) % 10) + right[at + 1 :]
        elif right[at].isalpha():
            yield right[:at] + ("a" if right[at] != "a" else "b") + right[at + 1 :]
    if re.fullmatch(r"-?\d+(\.\d+)?", right):
        digits = len(right.partition(".")[2])
        for step in (1, -1, 0.5, 0.1, 0.01):
            yield f"{float(right) + step:.{max(digits, 2)}f}"
        yield from (f"{-float(right)}", f"{float(right) * 1.01}", f"{right},000", f"{right}e1")


def right_only(entries: Sequence[Entry], row: int, rng: random.Random) -> Iterator[str]:
    yield right_answer(entries[row])


def right_answer(entry: Entry) -> str:
    """The entry's answer; where it has none, as many answers are right, the example in its metadata. "": neither."""
    metadata = entry["metadata"]
    examples = (metadata.get(name) for name in ("example_answer", "example_correct_answer", "possible_answer"))
    found = entry["answer"] if entry["answer"] is not None else next((one for one in examples if one), "")
    return found if isinstance(found, str) else json.dumps(found)


def is_same(answer: str, right: str) -> bool:
    """Whether ``answer`` is the right one by chance, whatever way it is written."""
    plain = [re.sub(r"[\s\"'`*$<>\[\]°]+", "", text).strip(".()").casefold() for text in (answer, right)]
    if plain[0] == plain[1]:
        return True
    if " and " in right:  # a sentence whose parts may come in any order
        parts = [sorted(re.split(r",? and |, ", text.strip(" .'\"").casefold())) for text in (answer, right)]
        return parts[0] == parts[1]
    try:
        numbers = [float(re.sub(r"[,%]", "", text)) for text in plain]
    except ValueError:
        return False
    decimals = len(right.strip("°% ").partition(".")[2])
    rounded = decimals > 1 and math.isclose(round(numbers[0], decimals), numbers[1], rel_tol=1e-9)
    return rounded or math.isclose(*numbers, rel_tol=1e-6)


def is_any(answer: str, rights: Iterable[str]) -> bool:
    return any(is_same(answer, right) for right in rights)


RESPONSES = ("Answer: {}", "Answer: \\boxed{{{}}}", "It is easy.\n\nAnswer: ${}$")


# --- the grading process ----------------------------------------------------------------------------------------------


class _LateError(BaseException):
    """The answer took STOP_S of CPU."""


def _late(*_: object) -> None:
    raise _LateError


def entries_of(task: str, seed: int, rows: int) -> list[Entry]:
    """Rows as a reward gets them, after a way through JSON."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(task, size=rows, seed=seed)
    return [json.loads(json.dumps(made[at], default=str)) for at in range(rows)]


def _grade(connection: Connection, answers: Answers, seed: int, rows: int, forms: Sequence[str]) -> None:
    """Serve (task, first answer) until stdin ends: says ``("try", number, row, answer)`` before each that may hang."""
    warnings.filterwarnings("ignore")
    from workers.errors import RewardError
    from workers.scoring.rewards import RewardSpec, build_reward

    signal.signal(signal.SIGPROF, _late)
    while True:
        task, first = connection.recv()
        entries = entries_of(task, seed, rows)
        score = build_reward(
            RewardSpec(source="reasoning_gym", task=task, params={}, answer_marker="Answer:", well_formed_reward=0.0)
        )
        number = 0
        for row, entry in enumerate(entries):
            right = right_answer(entry)
            for answer in dict.fromkeys(answers(entries, row, random.Random(f"{seed} {task} {row}"))):
                number += 1
                if number <= first:
                    continue
                connection.send(("try", number, row, answer))
                began_s = time.process_time()
                value = 0.0
                try:
                    signal.setitimer(signal.ITIMER_PROF, STOP_S)
                    for form in forms:
                        value = max(value, score(str(entry["question"]), form.format(answer), entry).value)
                except (_LateError, RewardError):  # a row whose right answer is empty has no reward
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0.0)
                cpu_s = (time.process_time() - began_s) / len(forms)
                paid = value >= 1.0
                rights = (right, *entry["metadata"].get("valid_answers", ()))  # of n_queens: all solutions
                connection.send(("done", row, answer, right, cpu_s, paid, paid and is_any(answer, rights)))
        connection.send(("end",))


class _Grader:
    """A process that grades; started again where it hangs."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_grade, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()

    def grade(self, task: str) -> Iterator[tuple[Paid, bool]]:
        """(what came of an answer, whether it is the right one), each answer of the task."""
        done, row, answer = 0, 0, ""
        while True:
            self._connection.send((task, done))
            try:
                while self._connection.poll(HANG_S):
                    match self._connection.recv():
                        case ("end",):
                            return
                        case ("try", done, row, answer):
                            pass
                        case (_, row, answer, right, cpu_s, paid, same):
                            yield Paid(task=task, row=row, answer=answer, right=right, cpu_s=cpu_s, paid=paid), same
            except EOFError:
                pass  # the process died: out of memory, for one
            if not done:
                raise SystemExit(f"{task}: the grading process ended, or hangs, before the first answer")
            yield Paid(task=task, row=row, answer=answer, right="", cpu_s=math.inf, paid=False), False
            self.close()
            self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def survey(
    seed: int, rows: int, answers: Answers = empty, tasks: Sequence[str] = (), forms: Sequence[str] = RESPONSES
) -> Survey:
    """Grade ``answers`` to ``rows`` rows of every task. Prints each task with what it pays."""
    found = Survey()
    grader = _Grader(answers, seed, rows, forms)
    try:
        for task in tasks or allowed():
            found.tasks += 1
            began_s, right_on, paid, rights = time.monotonic(), Counter[str](), list[Paid](), set[str]()
            for one, same in grader.grade(task):
                found.tried += 1
                right_on[one.answer] += same
                rights.add(one.right)
                if one.paid and not same:
                    paid.append(one)
                if one.cpu_s > CPU_LIMIT_S:
                    found.slow.append(one)
                    print(f"  SLOW {one.task} row {one.row}: {one.cpu_s:.1f} s CPU {one.answer!r:.60}", flush=True)
                if found.slowest is None or one.cpu_s > found.slowest.cpu_s:
                    found.slowest = one
            if task in PLAYED_OUT:
                times = Counter(one.answer for one in paid)
                paid = [one for one in paid if one.answer not in rights or times[one.answer] > rows / 2]
            found.paid += paid
            if rows >= CONSTANT_ROWS:
                found.constants += [(task, answer) for answer, often in right_on.items() if often == rows]
            print(f"{task}: {time.monotonic() - began_s:.1f} s, {len(paid)} paid", flush=True)
            for answer, often in Counter(one.answer for one in paid).most_common(12):
                right = sorted({one.right for one in paid if one.answer == answer})
                print(f"  PAID on {often} of {rows}: {answer!r:.100}   right: {right!s:.120}", flush=True)
    finally:
        grader.close()
    return found


def _unpaid(seed: int, rows: int, tasks: Sequence[str]) -> list[str]:
    """Tasks whose own right answer does not earn 1 on every row that has one."""
    grader = _Grader(right_only, seed, rows, RESPONSES[:1])
    lacking: list[str] = []
    try:
        for task in tasks or allowed():
            graded = [one for one, _ in grader.grade(task) if one.right]
            missed = [one for one in graded if not one.paid]
            if missed or not graded:
                lacking.append(task)
                print(f"  UNPAID {task}: {len(missed)} of {len(graded)}, {[one.right for one in missed[:2]]!s:.200}")
    finally:
        grader.close()
    return lacking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--near", action="store_true")
    parser.add_argument("--right", action="store_true")
    parser.add_argument("--tasks", default="")
    given = parser.parse_args()
    tasks = [task for task in given.tasks.split(",") if task]
    if given.right:
        print(json.dumps({"right_unpaid": _unpaid(given.seed, given.rows, tasks)}))
        return
    found = survey(given.seed, given.rows, near if given.near else empty, tasks)
    slowest = found.slowest and (found.slowest.task, found.slowest.answer[:40], round(found.slowest.cpu_s, 3))
    figures = {
        "tasks_allowed": len(allowed()),
        "tasks": found.tasks,
        "answers": found.tried,
        "near_paid" if given.near else "empty_paid": len(found.paid),
        "paid_tasks": sorted({one.task for one in found.paid}),
        "slow": len(found.slow),
        "slow_tasks": sorted({one.task for one in found.slow}),
        "slowest": slowest,
        "constants": found.constants,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
