"""The run's length ranker beside the loops: it predicts when prompts come, learns from slots that end, is judged.

    PromptServer: predict (a thread) ◄── text model ◄── learn: refits in another process, when due
    PromptServer: observe (the loop) ──► history, quality ──► judge: RankerJudged ──► inbox, core; the run's file

Owns: the ranker's file in the run's directory. Never: whether predictions are used: the core decides that from
RankerJudged, so that a replay decides the same. Invariant: the loop never waits for it; a ranker that fails (a damaged
file, a refit that ends badly) costs what it would have gained, and never the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from orchestrator.loop.intake import Arrival, Inbox
from orchestrator.prompts.dataset import load_problems
from ranker.logs import read_log
from ranker.online import OnlineRanker
from ranker.protocol import LengthEstimate, LengthLogError, RankerFileError, RefitError
from transport.contracts.settings import Settings
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

JUDGED_EVERY = 16
"""Groups observed between two judgements; its figures are of thousands, so nothing is missed."""
SAVED_EVERY_S = 10.0
"""And whenever the verdict turns. A history of 200,000 prompts is 15 MB; what a crash may lose is not worth writing
that more often."""


class Ranking:
    """A LengthPredictor (ranker/protocol.py) with two loops: ``judge``, and for a text model ``learn``."""

    def __init__(self, ranker: OnlineRanker, path: Path, clock: Clock, *, refit_s: float) -> None:
        """path: where it is kept.  refit_s: limit of one refit."""
        self._ranker = ranker
        self._path = path
        self._clock = clock
        self._refit_s = refit_s
        self._observed = 0
        self._judged_trusted = ranker.trusted
        self._to_judge = asyncio.Event()
        self._to_learn = asyncio.Event()

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


def open_ranker(settings: Settings, path: Path) -> OnlineRanker:
    """The run's ranker, with what is known of the base policy's lengths. path: where the run keeps it.

    Blocks. Raises RankerFileError for ``ranker.model``, LengthLogError for ``ranker.base_lengths``; a damaged file of
    the run's own only costs what it had learnt.
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

    A line names its prompt by the run's own id for it or by its text, with or without ``data.suffix``; every prompt of
    that text gets its lengths. Of a line with ``base_tokens``, those count.
    Blocks. Raises: LengthLogError: unreadable, malformed, or not one line is of the run's prompts; DataError.
    """
    if not settings.ranker.base_lengths:
        return {}
    path = Path(settings.ranker.base_lengths)
    named: dict[str, tuple[int, ...]] = {}
    for sample in read_log(path):
        named[sample.text] = named[sample.prompt_id] = sample.base_tokens or sample.tokens
    problems = load_problems(settings).training
    found: dict[str, tuple[int, ...]] = {}
    for problem in problems:
        names = (problem.prompt_id, problem.question, problem.question.removesuffix(settings.data.suffix))
        tokens = next((named[name] for name in names if name in named), None)
        if tokens is not None:
            found[problem.prompt_id] = tokens
    if not found:
        raise LengthLogError(
            f"none of its prompts is among the run's {len(problems)}, of which one is {problems[0].prompt_id!r}: "
            f"{problems[0].question!r}",
            where=str(path),
        )
    log.info("lengths of the base policy are known", prompts=len(found), of=len(problems))
    return found
