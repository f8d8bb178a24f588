"""Figure ``scoring``: CPU milliseconds of a scored sample, with and without a jail around the reward.

One child and the same answers each time: the own verifier of a task, of mathematics, and a user's function. Counted are
this process, which stands for the worker, and all below it; starting them is not.

    python -m benchmarks.scoring [--samples 2000]

Last line: JSON. ``<reward>_<where>_cpu_ms`` a sample; where: ``limits`` or ``jail``.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import psutil

from transport.contracts.settings import DataSettings, ScoringSettings, Settings
from workers.scoring.reward_pool import RewardPool
from workers.scoring.rewards import RewardSpec, reward_spec

DIGITS = "workers.scoring.rewards:digit_share"
REWARDS: dict[str, tuple[RewardSpec, str, bytes]] = {
    "task": (
        reward_spec(Settings(data=DataSettings(task="chain_sum")), ""),
        "It is easy. Answer: 12",
        b'{"answer": "12", "metadata": {}}',
    ),
    "mathematics": (
        reward_spec(Settings(data=DataSettings(source="jsonl")), ""),
        "Answer: \\frac{2}{4}",
        b'{"answer": "\\\\frac{1}{2}"}',
    ),
    "function": (
        reward_spec(Settings(scoring=ScoringSettings(reward=DIGITS)), DIGITS),
        "Answer: 12",
        b'{"answer": "12"}',
    ),
}


def cpu_s() -> float:
    """Of this process and of those below it, a jail's too."""
    return sum(sum(one.cpu_times()[:2]) for one in (psutil.Process(), *psutil.Process().children(recursive=True)))


async def sample_cpu_s(spec: RewardSpec, response: str, entry: bytes, samples: int, *, jailed: bool) -> float:
    """CPU seconds of one of so many samples, once the child is warm."""
    pool = RewardPool(spec, timeout_s=20.0, processes=1, jailed=jailed)
    await pool.start()
    if pool.jailed != jailed:
        raise SystemExit("there is no jail here: install bubblewrap")
    try:
        await pool.score("12 + 0 =", response, entry)
        began_s = cpu_s()
        for _ in range(samples):
            await pool.score("12 + 0 =", response, entry)
        return (cpu_s() - began_s) / samples
    finally:
        await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    samples = parser.parse_args().samples
    figures: dict[str, float] = {}
    for where, jailed in (("limits", False), ("jail", True)):
        for name, (spec, response, entry) in REWARDS.items():
            used_s = asyncio.run(sample_cpu_s(spec, response, entry, samples, jailed=jailed))
            figures[f"{name}_{where}_cpu_ms"] = round(1000 * used_s, 3)
            print(name, where, figures[f"{name}_{where}_cpu_ms"], "ms a sample", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
