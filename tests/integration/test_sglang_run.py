"""A whole run on the real SGLang server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.agents import leased
from tests.fakes.live_run import LiveRun
from tests.fakes.sglang_servers import command, needs_sglang

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(400)]

EXACT = 1e-3


def settings_of(engine: str) -> list[str]:
    if engine == "embedded":
        return []
    return [
        'generation.engine="sglang"',
        f"generation.server_command={json.dumps(list(command('--random-seed', '1')))}",
    ]


def converse(calls: httpx.Client, work: dict[str, Any]) -> int:
    """Two turns, each as ids. Returns the policy's tokens."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count"}]
    known: list[int] = []
    total = 0
    for _ in range(2):
        asked = {"messages": messages, "max_tokens": 12, "logprobs": True, "return_token_ids": True}
        answer = calls.post(f"{work['session_url']}/chat/completions", json={"model": work["model"], **asked})
        said = answer.raise_for_status().json()
        (choice,) = said["choices"]
        assert said["prompt_token_ids"][: len(known)] == known, "what was sampled stays as it was sampled"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
        assert all(one["logprob"] <= 0 for one in choice["logprobs"]["content"])
        known = said["prompt_token_ids"] + choice["token_ids"]
        total += len(choice["token_ids"])
        messages += [choice["message"], {"role": "user", "content": "On"}]
    calls.post(f"/sessions/{work['id']}/end", json={"reward": float(work["sample"])}).raise_for_status()
    return total


def test_a_conversation_over_the_real_server_is_trained_as_it_was_sampled(tmp_path: Path) -> None:
    """That the trainer computes the logprobs that were recorded says that ids, mask and places are the engine's."""
    endpoint = ("endpoint.enabled=true", "endpoint.max_session_s=300.0", "pipeline.rollout_timeout_s=400.0")
    sampling = ("sampling.max_new_tokens=400",)
    small = ("pipeline.groups_per_batch=1", "pipeline.group_size=2", "eval.problems=0", "run.batches=1")
    with LiveRun(tmp_path, *endpoint, *sampling, *small, *settings_of("sglang")) as run:
        address = run.run_dir / "endpoint" / "0.address"
        run.wait_until(address.exists, "an address")
        headers = {"authorization": f"Bearer {(run.run_dir / 'endpoint.key').read_text()}"}
        with httpx.Client(base_url=f"http://{address.read_text().strip()}/v1", headers=headers, timeout=120) as calls:
            works = [leased(calls) for _ in range(2)]
            tokens = sum(converse(calls, work) for work in works)
        assert run.wait_for_end(timeout_s=200) == 0, run.describe()
        (line,) = run.metrics()
        assert line["tokens_trained"] == tokens
        assert line["logprob_mismatch_max"] < EXACT
        assert run.audit().returncode == 0


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_run_learns_with_either_engine(tmp_path: Path, engine: str) -> None:
    """With weights never apart, what is left of the mismatch is the two implementations."""
    with LiveRun(tmp_path, "pipeline.max_staleness=0", "run.batches=16", *settings_of(engine)) as run:
        assert run.wait_for_end(timeout_s=360) == 0, run.describe()
        lines = run.metrics()
        rewards = [line["reward"] for line in lines]
        assert len(lines) == 16
        assert sum(rewards[-4:]) > 1.25 * sum(rewards[:4]), f"it learns: {rewards}"
        compared = [line for line in lines if line["computed_tokens"]]  # where all groups agree nothing is computed
        assert len(compared) >= 8
        assert max(line["logprob_mismatch_max"] for line in compared) < EXACT
        assert {line["staleness"] for line in lines} == {0.0}
        assert run.audit().returncode == 0
        print("curve", engine, [round(reward, 3) for reward in rewards])
        if engine == "sglang":
            log = run.run_dir / "logs" / "sglang-generate-0.log"
            assert "fired up" in log.read_text(errors="replace")
        run.wait_until_gone()  # no server outlives the run; the kernel takes a moment to end one
