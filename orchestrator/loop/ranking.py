"""The run's length ranker beside the loops: it predicts when prompts come, learns from slots that end, is judged.

    PromptServer: predict (a thread) ◄── text model ◄── learn: refits in another process, when due
    PromptServer: observe (the loop) ──► history, quality ──► judge: RankerJudged ──► inbox, core; the run's file

Owns: the ranker's file in the run's directory. Never: whether predictions are used: the core decides that from
RankerJudged, so that a replay decides the same. Invariant: the loop never waits for it; a ranker that fails (a damaged
file, a refit that ends badly) costs what it would have gained, and never the run.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import TypeVar

import structlog

from orchestrator.loop.intake import Arrival, Inbox
from orchestrator.loop.prompt_server import HELD_OUT
from orchestrator.prompts.dataset import load_problems
from ranker.logs import read_log, read_scores
from ranker.online import OnlineRanker
from ranker.protocol import LengthEstimate, LengthLogError, RankerFileError, RefitError
from ranker.quality import RunningQuality
from transport.contracts.messages import RankerJudged
from transport.contracts.settings import Settings
from transport.contracts.types import evaluation_id, group_id
from transport.contracts.user_files import ForcedLengths
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

JUDGED_EVERY = 16
"""Groups observed between two judgements; its figures are of thousands, so nothing is missed."""
SAVED_EVERY_S = 10.0
"""And whenever the verdict turns. A history of 200,000 prompts is 15 MB; what a crash may lose is not worth writing
that more often."""


class Oracle:
    """Knows what every response will be: the lengths that engines are forced to. What dispatch gains at most.

    Prompts are told apart by their order: the n-th is the n-th slot of the run. A slot that was replaced (its group
    failed for good) moves those after it by one; its quality is measured as any ranker's, so that this is seen.
    """

    refit_due = False

    def __init__(self, forced: ForcedLengths, *, slots_per_batch: int, group_size: int) -> None:
        self._forced = forced
        self._slots_per_batch = slots_per_batch
        self._samples = range(group_size)
        self._quality = RunningQuality(trusted=True)
        self._said: dict[str, deque[float]] = {}
        self.next_place = 0

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        """Of the prompts that come next; held-out ones are the first of an evaluation, one sample each."""
        if prompt_ids and prompt_ids[0].startswith(HELD_OUT):
            return [_known(self._forced.limits(evaluation_id(0, n), (0,))) for n in range(len(prompt_ids))]
        estimates: list[LengthEstimate] = []
        for prompt_id in prompt_ids:
            batch, slot = divmod(self.next_place, self._slots_per_batch)
            estimates.append(_known(self._forced.limits(group_id(batch, slot), self._samples)))
            self._said.setdefault(prompt_id, deque()).append(estimates[-1].mean_tokens)
            self.next_place += 1
        return estimates

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        said = self._said.get(prompt_id)
        if said and response_tokens:
            self._quality.record(said.popleft(), fmean(response_tokens))
            if not said:
                del self._said[prompt_id]

    @property
    def trusted(self) -> bool:
        return self._quality.trusted

    def quality(self) -> RankerJudged:
        return self._quality.judged()

    def refit(self, deadline_s: float) -> None:
        """Nothing to learn."""

    def save(self, path: Path) -> None:
        """Nothing to keep."""


def _known(tokens: Sequence[int]) -> LengthEstimate:
    return LengthEstimate(
        mean_tokens=fmean(tokens), level_sigma=0.0, sample_sigma=pstdev(math.log(length) for length in tokens)
    )


class Ranking:
    """A LengthPredictor (ranker/protocol.py) with two loops: ``judge``, and for a text model ``learn``."""

    def __init__(self, ranker: OnlineRanker | Oracle, path: Path, clock: Clock, *, refit_s: float) -> None:
        """path: where it is kept.  refit_s: limit of one refit."""
        self._ranker = ranker
        self._path = path
        self._clock = clock
        self._refit_s = refit_s
        self._observed = 0
        self._judged_trusted = ranker.trusted
        self._to_judge = asyncio.Event()
        self._to_learn = asyncio.Event()

    def begin_at(self, num_prompts: int) -> None:
        """So many were given before the first that will be asked for."""
        if isinstance(self._ranker, Oracle):
            self._ranker.next_place = num_prompts

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        """Blocks: for a thread."""
        return self._ranker.predict(prompt_ids, texts)

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Lengths that a group turned out to have. Cheap; empty responses say nothing of a length."""
        self._ranker.observe(prompt_id, [tokens for tokens in response_tokens if tokens > 0])
        self._observed += 1
        if self._observed % JUDGED_EVERY == 0 or self._ranker.trusted != self._judged_trusted:
            self._to_judge.set()
        if self._ranker.refit_due:
            self._to_learn.set()

    def introduce(self, inbox: Inbox) -> None:
        """Report what is known before the first group to the core: the first batch is planned by it, too."""
        inbox.put_nowait(Arrival(self._ranker.quality()))

    async def judge(self, inbox: Inbox) -> None:
        """Report to the core how right predictions were, and keep what was learnt, forever."""
        saved_s = self._clock.now_s()
        while True:
            await self._to_judge.wait()
            self._to_judge.clear()
            quality = await asyncio.to_thread(self._ranker.quality)
            turned = quality.trusted != self._judged_trusted
            self._judged_trusted = quality.trusted
            if turned or self._clock.now_s() - saved_s >= SAVED_EVERY_S:
                saved_s = self._clock.now_s()
                await asyncio.to_thread(self.save)  # first: a new verdict must survive a crash right after its report
            await inbox.put(Arrival(quality))

    async def learn(self) -> None:
        """Train on what was observed whenever enough of it came, forever."""
        while True:
            await self._to_learn.wait()
            self._to_learn.clear()
            try:
                await in_daemon_thread(partial(self._ranker.refit, self._refit_s), limit_s=2 * self._refit_s)
            except (RefitError, TimeoutError) as error:
                log.warning("the ranker learnt nothing new", error=str(error) or "its thread hangs")
            else:
                log.info("the ranker has a new model", refits=self._ranker.quality().refits)
                self._to_judge.set()

    def save(self) -> None:
        """Keep model, history and verdict for a restart. Never raises: the next time may find room."""
        try:
            self._ranker.save(self._path)
        except RankerFileError as error:
            log.warning("the ranker was not saved", error=str(error))


def open_oracle(settings: Settings) -> Oracle:
    """Blocks. Raises LengthFileError."""
    pipeline = settings.pipeline
    return Oracle(
        ForcedLengths.of(settings),
        slots_per_batch=pipeline.groups_per_batch + pipeline.oversampled_groups,
        group_size=pipeline.group_size,
    )


def open_ranker(settings: Settings, path: Path) -> OnlineRanker:
    """The run's ranker, with what is known of the base policy's lengths. path: where the run keeps it.

    Blocks. Raises RankerFileError for ``ranker.model``, LengthLogError for ``ranker.base_lengths`` and
    ``ranker.scores``; a damaged file of the run's own only costs what it had learnt.
    """
    first_guess_tokens = float(settings.sampling.max_new_tokens)
    ranker = None
    if path.exists():
        try:
            ranker = OnlineRanker.load(path, first_guess_tokens=first_guess_tokens)
        except RankerFileError as error:
            log.warning("the ranker begins anew", error=str(error))
    if ranker is None and settings.ranker.model:
        ranker = OnlineRanker.load(Path(settings.ranker.model), first_guess_tokens=first_guess_tokens)
    if ranker is None:
        ranker = OnlineRanker(first_guess_tokens=first_guess_tokens)
    ranker.cold_start(base_lengths(settings))
    ranker.expect(scores(settings))
    return ranker


async def in_daemon_thread(work: Callable[[], None], *, limit_s: float) -> None:
    """``work`` in a thread that does not hold up the end of the process, as one of the loop's executor would.

    Raises what it raises, or TimeoutError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: RefitError | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(None)

    def run() -> None:
        error: RefitError | None = None
        try:
            work()
        except RefitError as raised:
            error = raised
        finally:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="ranker", daemon=True).start()
    async with asyncio.timeout(limit_s):
        await done


def base_lengths(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Lengths by prompt id, of the prompts that ``ranker.base_lengths`` names; {} where it is not set.

    Of a line with ``base_tokens``, those count. Blocks. Raises: LengthLogError: unreadable, malformed, or not one line
    is of the run's prompts; DataError.
    """
    if not settings.ranker.base_lengths:
        return {}
    path = Path(settings.ranker.base_lengths)
    named: dict[str, tuple[int, ...]] = {}
    for sample in read_log(path):
        named[sample.text] = named[sample.prompt_id] = sample.base_tokens or sample.tokens
    return _of_prompts(named, settings, path)


def scores(settings: Settings) -> dict[str, LengthEstimate]:
    """What ``ranker.scores`` expects, by prompt id; {} where it is not set. Blocks. Raises as ``base_lengths``."""
    if not settings.ranker.scores:
        return {}
    path = Path(settings.ranker.scores)
    return _of_prompts(read_scores(path), settings, path)


T = TypeVar("T")


def _of_prompts(named: Mapping[str, T], settings: Settings, path: Path) -> dict[str, T]:
    """What a file says, by the ids of the run's prompts.

    A line names its prompt by the run's own id for it or by its text, with or without ``data.suffix``; every prompt of
    that text gets what it says. Raises LengthLogError: there is not one.
    """
    problems = load_problems(settings).training
    found: dict[str, T] = {}
    for problem in problems:
        names = (problem.prompt_id, problem.question, problem.question.removesuffix(settings.data.suffix))
        name = next((name for name in names if name in named), None)
        if name is not None:
            found[problem.prompt_id] = named[name]
    if not found:
        raise LengthLogError(
            f"none of its prompts is among the run's {len(problems)}, of which one is {problems[0].prompt_id!r}: "
            f"{problems[0].question!r}",
            where=str(path),
        )
    log.info("lengths of prompts are known or expected", file=str(path), prompts=len(found), of=len(problems))
    return found
