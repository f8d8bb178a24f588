"""A harness as anybody writes one, for figure ``endpoint_over_direct``: OpenAI's client in a process of its own.

    python -m benchmarks.agents_harness BASE_URL MODEL SESSIONS TURNS < KEY

It leases all its sessions, holds their conversations at once, and ends them with a reward. Last line: the seconds from
the first request of a conversation to the last answer, as JSON. It imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai

TIMEOUT_S = 600.0


async def play(base_url: str, key: str, model: str, sessions: int, turns: int) -> float:
    async with AsyncExitStack() as stack:
        headers = {"authorization": f"Bearer {key}"}
        run = await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S))
        leases = [(await run.post("/sessions")).raise_for_status().json() for _ in range(sessions)]
        agents = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=lease["base_url"], api_key=lease["key"], timeout=TIMEOUT_S)
            )
            for lease in leases
        ]
        began_s = time.perf_counter()
        await asyncio.gather(*(_converse(agent, model, turns) for agent in agents))
        took_s = time.perf_counter() - began_s
        for lease in leases:
            (await run.post(f"/sessions/{lease['id']}/end", json={"reward": 1.0})).raise_for_status()
    return took_s


async def _converse(agent: openai.AsyncOpenAI, model: str, turns: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "what is 17 + 25? say it step by step."}]
    for _ in range(turns):
        answer = await agent.chat.completions.create(model=model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]


if __name__ == "__main__":
    url, name, number, length = sys.argv[1:]
    print(json.dumps(asyncio.run(play(url, sys.stdin.read().strip(), name, int(number), int(length)))))
