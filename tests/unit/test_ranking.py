"""The ranker of a live run: judged as it learns, saved, found again, and never a reason for the run to end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from orchestrator.config.load import resolve
from orchestrator.errors import ConfigError
from orchestrator.loop.intake import Inbox, new_inbox
from orchestrator.loop.prompt_server import HELD_OUT
from orchestrator.loop.ranking import (
    JUDGED_EVERY,
    SAVED_EVERY_S,
    Ranking,
    in_daemon_thread,
    open_oracle,
    open_ranker,
)
from orchestrator.observability.metrics import ranker_numbers
from ranker.online import FIRST_REFIT_GROUPS, OnlineRanker
from ranker.protocol import RankerFileError, RefitError
from transport.contracts.messages import RankerJudged
from transport.contracts.settings import (
    GenerationSettings,
    PipelineSettings,
    RankerSettings,
    SamplingSettings,
    Settings,
)
from transport.contracts.types import group_id
from transport.contracts.user_files import ForcedLengths

PROMPTS = [f"p{number}" for number in range(64)]


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def opened(path: Path, **settings: Any) -> OnlineRanker:
    ranker, sampling = RankerSettings(**settings), SamplingSettings(max_new_tokens=100)
    return open_ranker(Settings(ranker=ranker, sampling=sampling), path)


def ranking_at(path: Path, clock: HandClock | None = None) -> Ranking:
    return Ranking(opened(path), path, clock or HandClock(), refit_s=60.0)


def visit_all(ranking: Ranking, times: int) -> None:
    """Each prompt has its own length, so that a history knows the order after one visit."""
    for _ in range(times):
        ranking.predict(PROMPTS, PROMPTS)
        for number, prompt_id in enumerate(PROMPTS):
            ranking.observe(prompt_id, [10 + 10 * number, 11 + 10 * number])


@asynccontextmanager
async def judging(ranking: Ranking) -> AsyncIterator[Inbox]:
    inbox = new_inbox()
    ranking.introduce(inbox)
    task = asyncio.create_task(ranking.judge(inbox))
    yield inbox
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def next_judgement(inbox: Inbox) -> RankerJudged:
    async with asyncio.timeout(30):
        event = (await inbox.get()).event
    assert isinstance(event, RankerJudged)
    return event


async def test_the_core_hears_at_once_that_nothing_is_known_and_later_that_it_is(tmp_path: Path):
    ranking = ranking_at(tmp_path / "ranker.bin")
    async with judging(ranking) as inbox:
        first = await next_judgement(inbox)
        assert (first.trusted, first.num_groups) == (False, 0)
        assert ranker_numbers(first) == {}
        visit_all(ranking, 6)
        later = await next_judgement(inbox)
    assert later.trusted
    assert later.recall_20 > 0.75
    assert ranker_numbers(later)["ranker_trusted"] == 1.0


async def test_it_is_judged_again_after_so_many_groups_and_not_before(tmp_path: Path):
    ranking = ranking_at(tmp_path / "ranker.bin")
    async with judging(ranking) as inbox:
        await next_judgement(inbox)
        for number in range(JUDGED_EVERY - 1):
            ranking.observe(PROMPTS[number], [5])
        await asyncio.sleep(0)
        assert inbox.empty()
        ranking.observe(PROMPTS[-1], [5, 0])
        assert (await next_judgement(inbox)).known_prompts == JUDGED_EVERY


async def test_what_was_learnt_survives_a_restart(tmp_path: Path):
    path, clock = tmp_path / "ranker.bin", HandClock()
    ranking = ranking_at(path, clock)
    async with judging(ranking) as inbox:
        await next_judgement(inbox)
        assert not path.exists(), "nothing was learnt yet"
        clock.at_s = SAVED_EVERY_S
        visit_all(ranking, 6)
        await next_judgement(inbox)
        await asyncio.to_thread(ranking.save)
    before = ranking.predict(PROMPTS, PROMPTS)
    again = opened(path)
    assert again.trusted
    assert [round(one.mean_tokens) for one in again.predict(PROMPTS, PROMPTS)] == [
        round(one.mean_tokens) for one in before
    ]


def test_a_damaged_file_of_the_run_costs_what_it_held_and_one_that_the_user_named_is_refused(tmp_path: Path):
    path = tmp_path / "ranker.bin"
    path.write_bytes(b"torn")
    assert not opened(path).trusted
    with pytest.raises(RankerFileError, match=r"torn\.ranker"):
        opened(tmp_path / "none", kind="text", model=str(tmp_path / "torn.ranker"))


def test_a_place_that_cannot_be_written_is_no_reason_to_end(tmp_path: Path):
    ranking = ranking_at(tmp_path / "gone" / "ranker.bin")
    visit_all(ranking, 1)
    ranking.save()
    assert not (tmp_path / "gone").exists()


async def test_a_refit_that_fails_leaves_the_loop_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail(self: OnlineRanker, deadline_s: float) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise RefitError("too few prompts")

    monkeypatch.setattr(OnlineRanker, "refit", fail)
    ranking = ranking_at(tmp_path / "ranker.bin")
    task = asyncio.create_task(ranking.learn())
    visit_all(ranking, -(-FIRST_REFIT_GROUPS // len(PROMPTS)))
    async with asyncio.timeout(30):
        await tried.wait()
        tried.clear()
        ranking.observe(PROMPTS[0], [5])
        await tried.wait()
    assert not task.done()
    task.cancel()


async def test_work_that_hangs_is_left_behind():
    hanging = asyncio.Event()
    loop = asyncio.get_running_loop()
    released = threading.Event()

    def hang() -> None:
        loop.call_soon_threadsafe(hanging.set)
        released.wait(4.0)

    with pytest.raises(TimeoutError):
        await in_daemon_thread(hang, limit_s=0.05)
    assert hanging.is_set()
    released.set()


def test_an_oracle_says_what_each_slot_is_forced_to(tmp_path: Path):
    """Prompts by their order, whatever they are called, in a circle; evaluations from the first length on."""
    path = tmp_path / "lengths.txt"
    path.write_text("10 \n20\n30\n40\n500\n60\n70\n80\n90\n100\n")
    settings = Settings(
        pipeline=PipelineSettings(groups_per_batch=2, group_size=2, oversampled_groups=1),
        sampling=SamplingSettings(max_new_tokens=200),
        generation=GenerationSettings(lengths=str(path)),
        ranker=RankerSettings(kind="oracle"),
    )
    forced, oracle = ForcedLengths.of(settings), open_oracle(settings)
    ranking = Ranking(oracle, tmp_path / "ranker.bin", HandClock(), refit_s=60.0)
    slots = [group_id(batch, slot) for batch in range(3) for slot in range(3)]
    truth = [fmean(forced.limits(slot, range(2))) for slot in slots]
    assert truth[:4] == [15, 35, 130, 130], "cut at the limit; the slot beyond a batch takes the next one's lengths"
    said = [one.mean_tokens for one in ranking.predict(["a", "b", "a", "c"], [""] * 4)]
    held_out = ranking.predict([HELD_OUT + "a", HELD_OUT + "b"], ["", ""])
    assert [one.mean_tokens for one in held_out] == [10, 30]
    ranking.begin_at(4)  # as after a restart
    said += [one.mean_tokens for one in ranking.predict(["d"] * 5, [""] * 5)]
    assert said == truth
    for name, slot in zip("abac", slots, strict=False):
        ranking.observe(name, forced.limits(slot, range(2)))
    assert (oracle.quality().num_groups, oracle.quality().kendall_tau, oracle.trusted) == (4, pytest.approx(1.0), True)


def test_an_oracle_that_is_wrong_is_found_out(tmp_path: Path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(random.Random(n).randrange(1, 1000)) for n in range(997)))
    oracle = open_oracle(
        Settings(generation=GenerationSettings(lengths=str(path)), ranker=RankerSettings(kind="oracle"))
    )
    names = [f"p{n}" for n in range(512)]
    said = oracle.predict(names, names)
    for name, another in zip(names, [*said[1:], said[0]], strict=True):
        oracle.observe(name, [round(another.mean_tokens)])
    assert not oracle.trusted


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["ranker.kind=oracle"], "without forced lengths"),
        (["ranker.kind=oracle", "generation.lengths=l", "pipeline.drop_no_signal=true"], "by the order of prompts"),
        (["ranker.kind=oracle", "generation.lengths=l", "ranker.scores=s"], "needs ranker.kind"),
        (["ranker.kind=none", "ranker.scores=s"], "needs ranker.kind"),
        (["ranker.base_lengths=b", "ranker.scores=s"], "one of the two"),
    ],
)
def test_settings_of_a_ranker_that_cannot_be_meant_are_refused(overrides: list[str], problem: str):
    with pytest.raises(ConfigError, match=problem):
        resolve("tiny", [], overrides, {})
