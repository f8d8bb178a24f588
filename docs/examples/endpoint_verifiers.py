"""Samples of a run, played with tasks of verifiers:  endpoint_verifiers.py RUN_DIRECTORY single_turn|tool [SAMPLES]

It runs in an environment of its own, with verifiers and uv in it. verifiers starts its harness as a process, for which
uv installs some packages the first time.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import verifiers.v1 as vf
from endpoint_tasks import TASKS, SumData
from verifiers.v1.harnesses.null.harness import NullHarnessConfig

PLAY_S = 600
"""For one sample."""
AWAY_S = 300
"""Without a sample to play, it ends."""
MAX_FAILURES = 3
"""In a row: then something is wrong here, and more samples would fail, too."""
BEAT_S = 4
"""Between two signs of life; a session that gives none for endpoint.silence_s is leased to another agent."""


async def play(kind: str, work: dict) -> vf.Trace:
    client = vf.EvalClientConfig(base_url=work["session_url"], api_key_var="STREAMRL_ENDPOINT_KEY")
    agent = vf.Agent(
        vf.AgentConfig(
            harness=NullHarnessConfig(id="null"),
            runtime=vf.SubprocessConfig(),
            model=work["model"],
            client=client,
            max_turns=4,
        )
    )
    task = TASKS[kind](SumData(idx=0, prompt=work["question"], answer=str(work["answer"])))
    return await agent.run(task)


@contextlib.asynccontextmanager
async def heartbeat(calls: httpx.AsyncClient, url: str) -> AsyncIterator[None]:
    """It works, although it asks nothing: while uv installs, or a process starts."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(httpx.HTTPError):
                await calls.post(f"{url}/heartbeat")

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def work_on(calls: httpx.AsyncClient, kind: str, work: dict) -> bool:
    """Play one sample. Returns whether it was sealed; if not, it is leased again, to this agent or another."""
    url, name = f"/sessions/{work['id']}", f"{work['group']}/{work['sample']}"
    try:
        async with heartbeat(calls, url), asyncio.timeout(PLAY_S):
            trace = await play(kind, work)
        reason = str(trace.last_error) if trace.has_error else ""
    except TimeoutError:
        reason = f"not played within {PLAY_S} s"
    if reason:
        await calls.post(f"{url}/fail", json={"reason": reason[:500]})
        print(f"{name} failed: {reason}", flush=True)
        return False
    ended = await calls.post(f"{url}/end", json={"reward": trace.reward})
    print(f"{name} {trace.reward:.0f}", ended.json(), flush=True)
    return ended.status_code == 200


def put_first(variable: str, directory: Path) -> None:
    os.environ[variable] = os.pathsep.join(filter(None, (str(directory), os.environ.get(variable))))


async def main(run: Path, kind: str, samples: int) -> None:
    address, key = (run / "endpoint" / "0.address").read_text().strip(), (run / "endpoint.key").read_text()
    os.environ["STREAMRL_ENDPOINT_KEY"] = key
    put_first("PATH", Path(sys.executable).parent)  # verifiers looks for uv there
    put_first("PYTHONPATH", Path(__file__).parent)  # and starts the tool of endpoint_tasks by its name
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"http://{address}/v1", headers=headers, timeout=60) as calls:
        try:
            async with asyncio.timeout(AWAY_S) as away:
                failures = 0
                while samples and failures < MAX_FAILURES:
                    lease = await calls.post("/sessions")
                    if lease.status_code == 429:  # no sample is wanted now
                        continue
                    work = lease.raise_for_status().json()
                    away.reschedule(None)
                    sealed = await work_on(calls, kind, work)
                    samples, failures = samples - sealed, 0 if sealed else failures + 1
                    away.reschedule(asyncio.get_running_loop().time() + AWAY_S)
            if failures:
                raise SystemExit(f"{failures} samples in a row were not sealed")
        except TimeoutError:
            raise SystemExit(f"no sample was wanted for {AWAY_S} s") from None
        except httpx.TransportError as error:
            raise SystemExit(f"the run has ended, or its worker starts again: {error!r}") from None


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 8))
