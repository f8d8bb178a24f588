"""Figure ``growth``: does every parser of foreign text take time in proportion to it?

Each parser reads texts that are made of one fragment again and again, also between an opening and a closing one, at the
size n where that takes 50 ms of CPU and at 4n. What is still faster at its largest size is no danger, and is counted.

    worst_growth   CPU seconds at 2n over those at n: the square root of 4n over n, which evens out where a cache ends;
                   each the best of five; the worst of all; 2.3
    measured       pairs of a parser and a text that took 50 ms
    fast           pairs that never did, up to the largest text that reaches the parser

    python -m benchmarks.growth [--only PARSER]

Last line: JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.load import resolve
from orchestrator.errors import ConfigError
from workers.endpoint.messages import _canonical, find_tool_calls
from workers.environments.calculator import Calculator
from workers.scoring.answers import find_answer
from workers.scoring.code import extract_code

LEAST_S = 0.05
TRIES = 5
GROWTH = 2.3
ENOUGH_S = 20.0
"""CPU seconds at which a text is called worst without another look."""
FRAGMENTS = (
    *(" ", "\n", "a", "1", "(", ")", "{", "[", "=", "$", "**", "\\", "_", "^", ",", "-", ".", '"', "<", "`"),
    *("1+", "1+1=", "1 ", "(1)", "a b ", "\\frac{", "\\boxed{", "\\sqrt", "```\n", "x=1,", "{1,2}", "a^", "Answer:"),
    *("<tool_call>", "</tool_call>", '{"a":', '{"name":"a"}', "[],", '"a",', "\\u0000", "<b>", "</b>", "\\text{a}"),
    *("\u00a0", "\U0001f600", "e\u0301", "9e9", "0x", "%", "| "),
)
ALONE = ("", "")
LINES = (
    "[data.mix.p{}]\npath = 'a'\n",
    "[data.mix.p{}]\npath = 'a'\nkl_coef = 0.1\n",
    "[data.mix.p{0}]\nloss = 'm{0}:f'\n",
    "[eval.sets.s{}]\nsamples = 2\n",
    "[data.params]\nx{} = 1\n",
    "[x{}]\ny = 1\n",
    "# {}\n",
)
"""Of a configuration, each with the number of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """read: of foreign text.  largest: characters that can reach it.  around: what its fragments stand between."""

    read: Callable[[str], object]
    largest: int
    around: Sequence[tuple[str, str]] = (ALONE,)
    lines: Sequence[str] = ()

    def texts(self) -> Iterator[tuple[str, Callable[[int], str]]]:
        """Name of each text, and the text of about so many characters."""
        for line in self.lines:
            yield line, lambda length, line=line: "".join(map(line.format, range(length // len(line))))
        if not self.lines:
            for (before, behind), fragment in itertools.product(self.around, FRAGMENTS):
                yield (
                    f"{before}{fragment}...{behind}",
                    lambda length, a=before, f=fragment, b=behind: a + f * (length // len(f)) + b,
                )


def _override(text: str) -> None:
    with contextlib.suppress(ConfigError):
        resolve(None, [], [f"data.mix={text}"], {})


def _file(text: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file, contextlib.suppress(ConfigError):
        file.write(text)
        file.flush()
        resolve("tiny", [Path(file.name)], ["data.source=jsonl", "data.path=a"], {})


PARSERS: Mapping[str, Parser] = {
    "calls of tools, hermes": Parser(
        read=lambda text: find_tool_calls(text, "hermes"),
        largest=1 << 20,
        around=(ALONE, ("<tool_call>", ""), ("<tool_call>a", "b"), ('<tool_call>{"name": "a", "arguments": "', '"}')),
    ),
    "calls of tools, json": Parser(
        read=lambda text: find_tool_calls(text, "json"),
        largest=1 << 20,
        around=(ALONE, ('{"name": "a", "arguments": "', '"}')),
    ),
    "arguments of a call": Parser(read=_canonical, largest=1 << 22),
    "the calculator": Parser(
        read=lambda text: Calculator().step(text, ()), largest=1 << 20, around=(ALONE, ("1", "="), ("<calc>", ""))
    ),
    "code of an answer": Parser(
        read=lambda text: extract_code(text, ["f"]), largest=1 << 20, around=(ALONE, ("```python\n", "\n```"))
    ),
    "the answer in a response": Parser(
        read=lambda text: find_answer(text, "Answer:", marker_asked=False),
        largest=1 << 20,
        around=(ALONE, ("Answer: ", ""), ("\\boxed{", "}")),
    ),
    "the value of --set": Parser(read=_override, largest=1 << 17, around=(ALONE, ("{a = {path = '", "'}}"))),
    "a configuration": Parser(read=_file, largest=1 << 20, lines=LINES),
}


def cpu_s(read: Callable[[str], object], text: str) -> float:
    """The best of five; of one where it takes longer than all measures need."""
    best_s = float("inf")
    for _ in range(TRIES):
        began_s = time.process_time()
        read(text)
        best_s = min(best_s, time.process_time() - began_s)
        if best_s > ENOUGH_S:
            break
    return best_s


def growth(parser: Parser, make: Callable[[int], str]) -> tuple[float, int, float] | None:
    """(growth, n, seconds at n); None where the parser is fast up to its largest text."""
    length = 1 << 10
    while length <= parser.largest:
        began_s = time.process_time()
        parser.read(make(length))
        if time.process_time() - began_s >= LEAST_S and (first_s := cpu_s(parser.read, make(length))) >= LEAST_S:
            return (cpu_s(parser.read, make(4 * length)) / first_s) ** 0.5, length, first_s
        length *= 2
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARSERS)
    chosen = parser.parse_args().only
    found: dict[tuple[str, str], float] = {}
    num_fast = 0
    for name in [chosen] if chosen else PARSERS:
        for text, make in PARSERS[name].texts():
            if (measured := growth(PARSERS[name], make)) is None:
                num_fast += 1
                continue
            found[name, text] = measured[0]
            if measured[0] > GROWTH:
                print(
                    f"{name}: {text!r} grows by {measured[0]:.1f} from {measured[1]}, {measured[2]:.2f} s", flush=True
                )
    worst = max(found.values(), default=0.0)
    print(json.dumps({"figure": "growth", "worst_growth": round(worst, 2), "measured": len(found), "fast": num_fast}))


if __name__ == "__main__":
    main()
