"""Answers that are hard to read as mathematics, against the CPU time of a grade.

An input is ``(answer, right answer)``. The reward's process gives a reward, whatever the answer is, the next answer is
scored, and nothing of an answer is executed: there is no jail around it here, which would hide that.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec

from tests.fuzz.harness import Check, CheckFailedError, Target
from tests.fuzz.hostile import packed, text
from workers.scoring.reward_pool import RewardPool
from workers.scoring.rewards import Reward, RewardSpec

LIMIT_S = 60.0
"""Wall time of one reward, which its CPU time ends long before, also on a machine at load 10."""
HANG_S = 2 * LIMIT_S
MARK = "@MARK@"
"""Stands for a file that an answer tries to make."""

HARD = (
    "9^{9^{9^{9}}}", "10^{10^{10}}", "2^{2^{2^{2^{2^{2}}}}}", "100000000!", r"\binom{10^9}{5 \cdot 10^8}",
    r"\sum_{n=1}^{10^9} n^n", r"\int_0^{\infty} e^{x^{x^x}} dx", r"\frac{1}{0}",
    r"\sqrt[10^9]{2}", r"\log_{1}(0)", "(x+1)^{99999}", "1" * 5000,
    "9" * 200_000,
    r"\lim_{x \to 0} \frac{\sin x}{x}", "x" * 5000, "-" * 3000 + "1", r"\infty - \infty", "0.1e999999999",
    r"\{1, 2, \{3\}\}", r"\text{" + "a" * 5000 + "}",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}^{99999}",
    r"\prod_{k=1}^{10^8} k", "[1, 2) \\cup (3, 4]",
)  # fmt: skip
CODE = (
    f"__import__('os').system('touch {MARK}')", f"exec(\"open('{MARK}','w')\")", f"open('{MARK}','w').write('x')",
    f"\\text{{__import__('pathlib').Path('{MARK}').touch()}}", f"Lambda(x, __import__('os').system('touch {MARK}'))(1)",
    f"().__class__.__base__.__subclasses__() and open('{MARK}','w')", f"`touch {MARK}`",
    f"$(touch {MARK})", f"; touch {MARK} ;",
)  # fmt: skip


def _rewards() -> RewardPool:
    spec = RewardSpec(source="jsonl", task="", params={}, answer_marker="Answer:", well_formed_reward=0.1)
    return RewardPool(spec, timeout_s=LIMIT_S, processes=1, jailed=False)


@contextmanager
def _opened() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="streamrl-fuzz-") as name, asyncio.Runner() as runner:
        mark = Path(name) / "made"
        rewards = _rewards()
        runner.run(rewards.start())

        def check(content: bytes) -> None:
            answer, gold = msgspec.msgpack.decode(content, type=tuple[str, str])
            runner.run(_scored(rewards, answer.replace(MARK, str(mark)), gold))
            if mark.exists():
                mark.unlink()
                raise CheckFailedError("an answer was executed")

        try:
            yield check
        finally:
            runner.run(rewards.close())


async def _scored(rewards: RewardPool, answer: str, gold: str) -> None:
    async with asyncio.timeout(HANG_S):
        reward = await _score(rewards, answer, gold)
        if reward.value not in (0.0, 0.1, 1.0):
            raise CheckFailedError(f"a reward of {reward.value}")
        if (await _score(rewards, "42", "42")).value != 1.0:
            raise CheckFailedError("the answer after it is scored otherwise")


async def _score(rewards: RewardPool, answer: str, gold: str) -> Reward:
    return await rewards.score("", f"Answer: {answer}", json.dumps({"answer": gold}).encode())


def make(random: Random) -> bytes:
    return packed((_expression(random), random.choice(("42", r"\frac{1}{2}", "x^2+1", "(1, 2)", _expression(random)))))


def _expression(random: Random) -> str:
    match random.randrange(6):
        case 0:
            return random.choice(CODE)
        case 1:
            opening, closing = random.choice(
                ((r"\frac{1}{", "}"), ("(", ")"), (r"\sqrt{", "}"), ("2^{", "}"), (r"\left[", r"\right]"))
            )
            depth = random.choice((5, 60, 2000))
            return opening * depth + "1" + closing * depth
        case 2:
            return random.choice(("+", r"\cdot ", "^", ",", r"\cup ", "=")).join(random.choice(HARD) for _ in range(3))
        case 3:
            return text(random)
        case _:
            return random.choice((r"\boxed{%s}", "$%s$", "%s", r"\(%s\)", "<%s>")) % random.choice(HARD)


TARGET = Target(name="mathematics", make=make, opened=_opened, num_inputs=6)
