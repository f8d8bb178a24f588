"""Agents of four threads that add with a tool:  endpoint_agent.py RUN_DIRECTORY [SAMPLES]"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai

AWAY_S = 60
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def endpoint_of(run: Path) -> tuple[str, str]:
    """base_url and key; the first worker writes its address when it listens."""
    address = run / "endpoint" / "0.address"
    deadline_s = time.monotonic() + 300
    while not address.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{address} is not there: has the run started?")
        time.sleep(0.5)
    return f"http://{address.read_text().strip()}/v1", (run / "endpoint.key").read_text()


def calculate(arguments: str) -> str:
    """A sum, and nothing that is executed."""
    try:
        terms = json.loads(arguments)["expression"].replace("-", "+-").split("+")
        return str(sum(int(term.replace(" ", "")) for term in terms if term.strip()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


def solve(work: dict) -> float:
    """Your agent: it knows nothing of the run but ``base_url``, key and model."""
    agent = openai.OpenAI(base_url=work["base_url"], api_key=work["key"])
    messages = [{"role": "user", "content": work["question"]}]
    text = ""
    for _ in range(3):
        answer = agent.chat.completions.create(model=work["model"], messages=messages, tools=TOOLS, max_tokens=64)
        message = answer.choices[0].message
        text = message.content or ""
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            told = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return float(text.rstrip(" .").endswith(str(work["answer"])))


def work_on(run: Path, left: threading.Semaphore) -> None:
    base_url, key = endpoint_of(run)
    heard_s = time.monotonic()
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {key}"}, timeout=60) as calls:
        while left.acquire(blocking=False):
            try:
                lease = calls.post("/sessions", json={"wait_s": 20})
                away = lease.status_code >= 500
            except httpx.TransportError:
                away = True
            if away:  # its worker starts again, or the run has ended
                if time.monotonic() - heard_s > AWAY_S:
                    return
                left.release()
                time.sleep(1)
                continue
            heard_s = time.monotonic()
            if lease.status_code == 429:  # no sample is wanted now
                left.release()
                continue
            work = lease.raise_for_status().json()
            url = f"/sessions/{work['id']}"
            try:
                reward = solve(work)
                calls.post(f"{url}/end", json={"reward": reward}).raise_for_status()
            except openai.BadRequestError as error:
                print(error)
                calls.post(f"{url}/fail", json={"reason": str(error)[:500]})  # another agent gets it
            except (openai.APIError, httpx.HTTPError) as error:
                print(error)  # its worker died, or the run does not want this sample any more
            else:
                print(f"{work['group']}/{work['sample']} {reward:.0f}", flush=True)


if __name__ == "__main__":
    samples = threading.Semaphore(int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work_on, Path(sys.argv[1]), samples) for _ in range(4)]:
            done.result()
