"""Samples of a run, played with tasks of verifiers:  endpoint_verifiers.py RUN_DIRECTORY single_turn|tool [SAMPLES]

It runs in an environment of its own, with verifiers and uv in it.
"""

import asyncio
import os
import sys
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.null.harness import NullHarnessConfig


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    """Of a single turn: the policy answers, and is judged."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rstrip(" .").endswith(self.data.answer))


class Calculator(vf.Toolset):
    @vf.tool
    def add(self, a: float, b: float) -> float:
        """The sum of two numbers."""
        return a + b


class ToolTask(SumTask):
    """The same with a tool, which verifiers serves."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]


TASKS = {"single_turn": SumTask, "tool": ToolTask}


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


async def main(run: Path, kind: str, samples: int) -> None:
    address, key = (run / "endpoint" / "0.address").read_text().strip(), (run / "endpoint.key").read_text()
    os.environ["STREAMRL_ENDPOINT_KEY"] = key
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"http://{address}/v1", headers=headers, timeout=60) as calls:
        while samples:
            lease = await calls.post("/sessions")
            if lease.status_code == 429:  # no sample is wanted now
                continue
            work = lease.raise_for_status().json()
            url = f"/sessions/{work['id']}"
            trace = await play(kind, work)
            if trace.has_error:
                await calls.post(f"{url}/fail", json={"reason": str(trace.last_error)[:500]})
                print(f"{work['group']}/{work['sample']} failed: {trace.last_error}")
            else:
                ended = await calls.post(f"{url}/end", json={"reward": trace.reward})
                print(f"{work['group']}/{work['sample']} {trace.reward:.0f}", ended.json(), flush=True)
            samples -= 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 8))
