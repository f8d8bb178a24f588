"""Figure ``verifier``: right answers in ordinary forms are paid, wrong ones near them and empty ones are not.

Right answers are those of recorded data sets (``prompts_gsm8k``, ``prompts_math``, ``prompts_matheval`` in ``--data``),
each different one once. Each is written in every form of RIGHT that suits it, and turned into every wrong answer of
WRONG that suits it; the own verifier of files scores them all. The plain rules below, and not the verifier, decide
which forms suit an answer.

    forms_paid      share of the right forms that earn 1; what does not is listed
    wrong_paid      wrong answers that earn 1, each listed
    slowest_s       CPU seconds of the slowest answer
    empty_paid      answers without content that earn 1, over all tasks of reasoning_gym (verifier_tasks.py)
    tasks_allowed   tasks of reasoning_gym that have a verifier

    python -m benchmarks.verifier [--data DIRECTORY] [--share 1.0] [--seed 0] [--list]
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from benchmarks.verifier_tasks import allowed, empty, survey
from workers.scoring.rewards import RewardSpec, Scorer, build_reward

DATA = "STREAMRL_DATA"
"""Directory with the three files of ``FILES``."""
FILES = ("prompts_gsm8k", "prompts_math", "prompts_matheval")
MARKER = "Answer:"
SHOWN = 40
"""Exceptions that are printed of each kind, without ``--list``."""

Form = Callable[[str], "str | None"]
"""A right answer as the data has it -> a response; None where the form does not suit it."""


# --- what an answer is ------------------------------------------------------------------------------------------------


def whole(answer: str) -> int | None:
    return int(answer) if re.fullmatch(r"-?(0|[1-9]\d*)", answer) else None


def decimal(answer: str) -> str | None:
    return answer if re.fullmatch(r"-?\d+\.\d+", answer) else None


def fraction(answer: str) -> Fraction | None:
    found = re.fullmatch(r"(-?)\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", answer)
    return Fraction(int(found[1] + "1") * int(found[2]), int(found[3])) if found and int(found[3]) else None


def is_words(answer: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z' ]*", answer) is not None


def is_formula(answer: str) -> bool:
    """Mathematics of one value: no words, no list, no relation."""
    text = re.sub(r"\\[A-Za-z]+", "", answer)
    return not re.search(r"[A-Za-z]{3,}|[,;=<>%$]|\\\\", text) and not re.search(
        r"\\(text|mbox|le|ge|ne|lt|gt|in|cup|cap|pm|to|begin|equiv|approx|circ|mathrm|textbf|infty)", answer
    )


def items(answer: str) -> list[str] | None:
    """Whole numbers with commas between them, in brackets or not, that can be no grouped number."""
    found = re.fullmatch(r"\(?\s*(-?\d+(?:\s*,\s*-?\d+)+)\s*\)?", answer)
    if not found or (re.fullmatch(r"\d{1,3}(,\d{3})+", answer)) or answer.count("(") != answer.count(")"):
        return None
    return [item.strip() for item in found[1].split(",")]


def value_of(answer: str) -> Fraction | None:
    if (number := whole(answer)) is not None:
        return Fraction(number)
    return Fraction(answer) if decimal(answer) else fraction(answer)


# --- right forms ------------------------------------------------------------------------------------------------------


def _said(text: str | None) -> str | None:
    return f"{MARKER} {text}" if text is not None else None


def _if(suits: bool, text: str) -> str | None:
    return _said(text) if suits else None


def _free(answer: str) -> bool:
    """Without dollars of its own."""
    return "$" not in answer


def _with_unit(answer: str) -> bool:
    return is_formula(answer) and answer[-1:].isdigit() and "_" not in answer and ":" not in answer


def _listed(answer: str) -> str | None:
    found = items(answer)
    if found is None:
        return None
    return _said(", ".join(found) if answer.startswith("(") else f"({', '.join(found)})")


def _as_decimal(answer: str) -> str | None:
    found = fraction(answer)
    return _said(f"{float(found):.8f}") if found is not None and abs(found) > Fraction(1, 1000) else None


def _thousands(answer: str) -> str | None:
    number = whole(answer)
    return _said(f"{number:,}") if number is not None and abs(number) >= 1000 else None


def _zeros(answer: str) -> str | None:
    if whole(answer) is not None:
        return _said(f"{answer}.00")
    return _said(f"{answer}00") if decimal(answer) else None


RIGHT: Mapping[str, Form] = {
    "bare": lambda a: a,
    "answer": _said,
    "full stop": lambda a: _said(f"{a}."),
    "bold": lambda a: _said(f"**{a}**"),
    "$": lambda a: _if(_free(a), f"${a}$"),
    "$$": lambda a: _if(_free(a), f"$${a}$$"),
    "\\(": lambda a: _if(_free(a), f"\\({a}\\)"),
    "\\[": lambda a: _if(_free(a), f"\n\\[\n{a}\n\\]"),
    "box": lambda a: f"So it is \\boxed{{{a}}}.",
    "box in dollars": lambda a: _said(f"$\\boxed{{{a}}}$"),
    "text": lambda a: _if(is_words(a) or value_of(a) is not None, f"\\text{{{a}}}"),
    "x =": lambda a: _if(is_formula(a), f"x = {a}"),
    "unit": lambda a: _if(_with_unit(a), f"{a} cm"),
    "percent": lambda a: _if(whole(a) not in (None, 0), f"{a}%"),
    "thousands": _thousands,
    "decimal": _as_decimal,
    "dfrac": lambda a: _if("\\frac" in a, a.replace("\\frac", "\\dfrac")),
    "zeros": _zeros,
    "sentence": lambda a: _said(f"The answer is {a}."),
    "list": _listed,
    "upper case": lambda a: _if("\\" not in a, a.upper()),
}
"""Ordinary forms of a right answer."""


# --- wrong answers near a right one -----------------------------------------------------------------------------------


def _other(answer: str, make: Callable[[Fraction], object]) -> str | None:
    """A number made of the answer's, where it is another one."""
    if (number := value_of(answer)) is None:
        return None
    made = make(number)
    if isinstance(made, Fraction):
        if made == number:
            return None
        made = str(made) if fraction(answer) is not None or whole(answer) is not None else f"{float(made):.10g}"
    return _said(str(made)) if made is not None else None


def _digit(answer: str) -> str | None:
    """One digit changed: the first of a number or formula."""
    found = re.search(r"\d", answer)
    if found is None or (found[0] == "0" and whole(answer) is None):
        return None
    changed = str((int(found[0]) + 1) % 9 + 1)
    return _if(changed != found[0], answer[: found.start()] + changed + answer[found.end() :])


def _swapped(answer: str) -> str | None:
    number = whole(answer)
    if number is None or abs(number) < 10 or answer[-1] == answer[-2]:
        return None
    return _said(answer[:-2] + answer[-1] + answer[-2])


def _more_digits(answer: str) -> str | None:
    if whole(answer) is not None:
        return _said(f"{answer}1")
    return _if(
        decimal(answer) is not None and len(answer) < 15, f"{answer}7"
    )  # a longer one is rounded by its computer


def _fused(answer: str) -> str | None:
    found = items(answer)
    return _said("".join(found)) if found else None


def _list(answer: str, change: Callable[[list[str]], list[str] | None]) -> str | None:
    found = items(answer)
    made = change(list(found)) if found else None
    if not found or not made or sorted(made) == sorted(found):
        return None
    return _said(f"({', '.join(made)})" if answer.startswith("(") else ", ".join(made))


def _turned(answer: str) -> str | None:
    """A pair in brackets, the other way around."""
    found = items(answer)
    if not found or not answer.startswith("(") or found == found[::-1]:
        return None
    return _said(f"({', '.join(found[::-1])})")


def _closed(answer: str) -> str | None:
    found = re.fullmatch(r"\(([^,]+,[^,]+)\)", answer)
    return (
        _if(found is not None and answer.count("(") == 1, f"[{found[1]}]" if found else "") if "," in answer else None
    )


def _anagram(answer: str) -> str | None:
    if not is_words(answer) or len(answer) < 2:
        return None
    turned = answer[::-1]
    return _if(turned.casefold() != answer.casefold(), turned)


def _is_value(answer: str) -> bool:
    return value_of(answer) is not None


WRONG: Mapping[str, Form] = {
    "one more": lambda a: _other(a, lambda n: n + 1),
    "one less": lambda a: _other(a, lambda n: n - 1),
    "negative": lambda a: _other(a, lambda n: -n),
    "ten times": lambda a: _other(a, lambda n: n * 10),
    "a tenth": lambda a: _other(a, lambda n: n / 10),
    "upside down": lambda a: _other(a, lambda n: 1 / n if n and abs(n) != 1 else None),
    "digit": _digit,
    "swapped digits": _swapped,
    "more digits": _more_digits,
    "two guesses": lambda a: _if(_is_value(a), f"{a} or {a}1"),
    "a list of guesses": lambda a: _if(_is_value(a), ", ".join((a, f"{a}1", f"{a}2"))),
    "not": lambda a: _said(f"not {a}"),
    "more than": lambda a: _if(_is_value(a), f"> {a}"),
    "bound": lambda a: _if(is_formula(a), f"x < {a}"),
    "times x": lambda a: _if(_is_value(a), f"{a}x"),
    "square of x": lambda a: _if(_is_value(a), f"x^2 = {a}"),
    "million": lambda a: _if(whole(a) not in (None, 0), f"{a} million"),
    "plus one": lambda a: _if(is_formula(a), f"{a} + 1"),
    "twice": lambda a: _if(is_formula(a) and not re.fullmatch(r"[-+]?0+(\.0*)?", a), f"2({a})"),
    "fused": _fused,
    "item missing": lambda a: _list(a, lambda found: found[:-1]),
    "item too many": lambda a: _list(a, lambda found: [*found, "77"]),
    "item changed": lambda a: _list(a, lambda found: [*found[:-1], found[-1] + "7"]),
    "other order": _turned,
    "other brackets": _closed,
    "anagram": _anagram,
    "letter missing": lambda a: _if(is_words(a) and len(a) > 1, a[:-1]),
    "two words": lambda a: _if(is_words(a), f"{a} or Zebra"),
    "nan": lambda a: _said("nan"),
    "inf": lambda a: _said("inf"),
    "placeholder": lambda a: _said("<result>"),
    "nothing": lambda a: f"{MARKER} ",
}
"""Answers that look like the right one, and answers of no content."""


# --- the trial --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Tried:
    """Counts by form, and what went wrong: (form, right answer, response)."""

    right: Counter[str] = field(default_factory=Counter[str])
    wrong: Counter[str] = field(default_factory=Counter[str])
    unpaid: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    paid: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    slowest: tuple[float, str, str] = (0.0, "", "")

    def add(self, other: Tried) -> None:
        self.right += other.right
        self.wrong += other.wrong
        self.unpaid += other.unpaid
        self.paid += other.paid
        self.slowest = max(self.slowest, other.slowest)


def own_verifier() -> Scorer:
    return build_reward(RewardSpec(source="jsonl", task="", params={}, answer_marker=MARKER, well_formed_reward=0.1))


def tried(answers: Iterable[str]) -> Tried:
    """Score all forms of some right answers, in this process."""
    score, found = own_verifier(), Tried()
    for answer in answers:
        for forms, counts, missed, wanted in (
            (RIGHT, found.right, found.unpaid, True),
            (WRONG, found.wrong, found.paid, False),
        ):
            for name, form in forms.items():
                if (response := form(answer)) is None:
                    continue
                started_s = time.process_time()
                right = score("q", response, {"answer": answer}).components["right"] == 1.0
                found.slowest = max(found.slowest, (time.process_time() - started_s, answer, response))
                counts[name] += 1
                if right != wanted:
                    missed.append((name, answer, response))
    return found


def right_answers(directory: Path) -> list[str]:
    """Each different right answer of the data once; of a list of spellings the first."""
    found: dict[str, None] = {}
    for name in FILES:
        with gzip.open(directory / f"{name}.jsonl.gz", "rt") as lines:
            for line in lines:
                answer = json.loads(line)["answer"]
                first = answer[0] if isinstance(answer, list) else answer
                text = str(first).strip() if first is not None else ""
                if len(text) > 2 and text.startswith("$") and text.endswith("$") and text.count("$") == 2:
                    text = text[1:-1].strip()
                if text:
                    found.setdefault(text)
    return list(found)


def shares(answers: list[str], number: int) -> Iterator[list[str]]:
    """``number`` lists of about equal work."""
    for index in range(number):
        yield answers[index::number]


def show(kind: str, missed: list[tuple[str, str, str]], *, whole_list: bool) -> None:
    by_form = Counter(name for name, _, _ in missed)
    print(f"{kind}: {len(missed)}", dict(by_form.most_common()))
    for name, answer, response in missed if whole_list else missed[:SHOWN]:
        print(f"  {name:18} {answer!r:50.80} {response!r:.100}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=os.environ.get(DATA, ""), help=f"directory of the data sets; default: ${DATA}"
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the right answers that are tried")
    parser.add_argument("--seed", type=int, default=0, help="draws that share")
    parser.add_argument("--rows", type=int, default=3, help="rows of each task of reasoning_gym")
    parser.add_argument("--list", action="store_true", help="print every exception")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    if options.data:
        answers = right_answers(Path(options.data))
        random.Random(options.seed).shuffle(answers)
        answers = answers[: round(len(answers) * options.share)]
        found = Tried()
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            for one in pool.imap_unordered(tried, shares(answers, 16 * options.processes)):
                found.add(one)
        forms, wrongs = sum(found.right.values()), sum(found.wrong.values())
        print(f"{len(answers)} right answers, seed {options.seed}; {forms} right forms, {wrongs} wrong answers")
        show("right and not paid", found.unpaid, whole_list=options.list)
        show("wrong and paid", found.paid, whole_list=options.list)
        print(f"slowest: {found.slowest[0]:.2f} s of CPU, {found.slowest[1]!r} {found.slowest[2]!r}")
        figures = {
            "answers": len(answers),
            "forms_paid": round(1 - len(found.unpaid) / forms, 5),
            "wrong_paid": len(found.paid),
            "slowest_s": round(found.slowest[0], 3),
        }
    else:
        print(f"no right answers: name the directory of the data sets with --data or {DATA}")
    tasks = survey(options.seed, options.rows, empty, ())
    for one in (*tasks.paid, *tasks.slow):
        print(f"  {one.task}, row {one.row}: {one.answer!r:.80} (right: {one.right!r:.60}), {one.cpu_s:.2f} s of CPU")
    figures |= {
        "empty_paid": len(tasks.paid),
        "tasks_allowed": len(allowed()),
        "empty_answers": tasks.tried,
        "slow_tasks": sorted({one.task for one in tasks.slow}),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
