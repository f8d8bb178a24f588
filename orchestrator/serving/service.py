"""The generation service of a run that trains nothing: requests in, samples out, weights in.

    submit ──► store (disk) ──► inbox: PromptsSubmitted ──► core ──► plans ──► generation workers
    stream ◄── rows (broker) ◄── the core's numbered results         taken ──► inbox: SamplesTaken ──► rows freed
    update ──► queue ``updates`` ──► publisher ──► WeightsPublished ──► core ──► workers load

Owns: limits, the one reader of each request, the form of a sample. Never: what is generated where (the core), HTTP
(``serving/http.py``). Invariant: every wait of a caller has a deadline; a reader that stands still holds one chunk of
samples and nothing of another reader; a request that was answered with 200 is on the disk, in a file of its own
(``<run-dir>/requests/<number>.request``) that goes once everything is taken.
Source: StreamRL sec. 3, ``generate`` and ``update``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from orchestrator.core.state import PipelineState
from orchestrator.errors import RefusedError
from orchestrator.prompts.source import Prompt, PromptBatch
from transport.broker import keys
from transport.broker.base import Broker, Entry
from transport.contracts.messages import (
    Event,
    PromptRef,
    PromptsSubmitted,
    RequestCancelled,
    SamplesTaken,
    SlotOutcome,
    UpdateFailed,
    UpdateRequest,
    WeightsPublished,
    encode,
    rollout_info_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import Column, PromptId, RowId, SamplingParams, WeightIdentity, parse_row_id
from transport.process.files import replace
from transport.rows.columns import RowStore, decode_array

log = structlog.get_logger(__name__)

CHUNK_ROWS = 16
"""Samples that a reader is handed at once: what a stream holds in memory, also while its reader stands still."""
ROW_WAIT_S = 60.0
"""How long a sample that was reported and is not there (the broker lost its tail) is waited for."""
LOOK_S = 1.0
"""A stream with nothing to say looks again; whatever happens wakes it sooner."""
COLUMNS = (Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.ROLLOUT_INFO)

REQUESTS = "requests"
"""Their directory in the run's."""
SUFFIX = ".request"
MAX_OPEN = 4
"""Requests whose prompts are kept in memory: those whose groups start now."""

Detokenize = Callable[[Sequence[int]], str]
Report = Callable[[Event], Awaitable[None]]
"""Sends an event to the core."""


# -- requests on disk: what was accepted survives its process, and prompts that wait take no memory


class StoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """text: as the model reads it, "" where only ids were given.  ids: int32, little endian.  entry: JSON, what an
    environment is told of it.
    """

    text: str
    ids: bytes
    entry: str = "{}"

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was accepted. acknowledged: its reader says what it has, else what was sent counts as taken."""

    number: int
    name: str
    prompts: list[StoredPrompt]
    group_size: int
    sampling: SamplingParams | None = None
    acknowledged: bool = False

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.group_size

    def event(self, predicted_tokens: float) -> PromptsSubmitted:
        prompts = tuple(
            PromptRef(
                prompt_id=PromptId(f"{self.number}/{index}"),
                prompt_tokens=prompt.num_tokens,
                predicted_tokens=predicted_tokens,
            )
            for index, prompt in enumerate(self.prompts)
        )
        return PromptsSubmitted(
            request=self.number, prompts=prompts, group_size=self.group_size, sampling=self.sampling
        )


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept in memory of every request that is on the disk."""

    number: int
    name: str
    num_prompts: int
    num_samples: int
    acknowledged: bool


class RequestStore:
    """The requests of one run, and the source of their prompts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._open: OrderedDict[int, StoredRequest] = OrderedDict()
        self.tickets: dict[str, Ticket] = {}
        """By name, the requests that are not all taken."""
        for path in sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: int(path.stem)):
            self.remember(self._load(int(path.stem)))

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}{SUFFIX}"

    def write(self, request: StoredRequest) -> None:
        """Write a request down, for ``remember`` to follow. Blocks for as long as the disk takes; on any thread."""
        replace(self._path(request.number), msgspec.msgpack.encode(request))

    def remember(self, request: StoredRequest) -> Ticket:
        """It is on the disk: it can be found from now on."""
        ticket = Ticket(
            number=request.number,
            name=request.name,
            num_prompts=len(request.prompts),
            num_samples=request.num_samples,
            acknowledged=request.acknowledged,
        )
        self.tickets[request.name] = ticket
        self._keep_open(request)
        return ticket

    def get(self, number: int) -> StoredRequest:
        """Raises KeyError for one that is not there."""
        if number not in self._open:
            self._keep_open(self._load(number))
        self._open.move_to_end(number)
        return self._open[number]

    def _load(self, number: int) -> StoredRequest:
        try:
            return msgspec.msgpack.decode(self._path(number).read_bytes(), type=StoredRequest)
        except FileNotFoundError:
            raise KeyError(f"there is no request {number}") from None

    def _keep_open(self, request: StoredRequest) -> None:
        self._open[request.number] = request
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def keep_only(self, numbers: Iterable[int]) -> None:
        kept = set(numbers)
        for ticket in [ticket for ticket in self.tickets.values() if ticket.number not in kept]:
            del self.tickets[ticket.name]
            self._open.pop(ticket.number, None)
            self._path(ticket.number).unlink(missing_ok=True)

    # -- a PromptSource: prompts come with requests, by ``<request>/<index>``

    @property
    def position(self) -> str:
        return ""

    def next(self, count: int) -> PromptBatch:
        return PromptBatch(prompts=[], positions=[], exhausted=True)

    def seek(self, position: str) -> None:
        """There is one place only."""

    def lookup(self, prompt_id: PromptId) -> Prompt:
        number, _, index = prompt_id.partition("/")
        prompt = self.get(int(number)).prompts[int(index)]
        ids = np.frombuffer(prompt.ids, dtype="<i4").astype(np.int32)
        return Prompt(prompt_id=prompt_id, text=prompt.text, prompt_ids=ids, entry_json=prompt.entry)

    def observe(self, outcome: SlotOutcome) -> None:
        """Every prompt comes once."""


# -- the service


class Service:
    """What the routes call. The decider calls ``on_events`` after the state has applied them."""

    def __init__(
        self,
        settings: Settings,
        state: PipelineState,
        broker: Broker,
        rows: RowStore,
        report: Report,
        store: RequestStore,
        detokenize: Detokenize,
    ) -> None:
        self._settings = settings
        self._pipeline = state.pipeline
        self._broker = broker
        self._rows = rows
        self._report = report
        self._store = store
        self._detokenize = detokenize
        self._last_number = max([state.pipeline.last_request, *(ticket.number for ticket in store.tickets.values())])
        self._changed = asyncio.Event()
        self._readers: dict[int, int] = {}
        self._reader_numbers = count()
        self._updates: dict[str, asyncio.Future[WeightsPublished | UpdateFailed]] = {}
        self._submitting = asyncio.Lock()

    async def recover(self) -> None:
        """Submit again what is on the disk and not known to the core; forget what the core has done with."""
        numbers = (ticket.number for ticket in self._store.tickets.values())
        later = sorted(number for number in numbers if number > self._pipeline.last_request)
        self._store.keep_only([*self._pipeline.requests, *later])
        for number in later:
            await self._report(self._store.get(number).event(self._predicted(None)))

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, WeightsPublished | UpdateFailed):
                waiting = self._updates.get(event.update)
                if waiting and not waiting.done():
                    waiting.set_result(event)
        self._store.keep_only(
            [*self._pipeline.requests, *range(self._pipeline.last_request + 1, self._last_number + 1)]
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- requests

    def find(self, name: str) -> Ticket:
        """Raises RefusedError: there is none of that name (any more)."""
        ticket = self._store.tickets.get(name)
        if ticket is None:
            raise RefusedError(404, f"there is no request {name!r}: it is unknown, or all of it was taken")
        return ticket

    async def submit(
        self, name: str, prompts: list[StoredPrompt], group_size: int, sampling: SamplingParams, *, acknowledged: bool
    ) -> Ticket:
        """Accept a request, on the disk. One of a name that is there already is that one. Raises RefusedError."""
        async with self._submitting:
            if known := self._store.tickets.get(name):
                return known
            self.check_room(name, len(prompts))
            request = StoredRequest(
                number=self._last_number + 1,
                name=name,
                prompts=prompts,
                group_size=group_size,
                sampling=sampling,
                acknowledged=acknowledged,
            )
            self._last_number += 1
            await asyncio.to_thread(self._store.write, request)
            ticket = self._store.remember(request)
            await self._report(request.event(self._predicted(sampling)))
            log.info("request", name=name, number=request.number, prompts=len(prompts), group_size=group_size)
            return ticket

    def check_room(self, name: str, num_prompts: int) -> None:
        """Raises RefusedError where ``submit`` would: before anything is done with the prompts."""
        if name in self._store.tickets:
            return
        limits = self._settings.service
        open_prompts = sum(ticket.num_prompts for ticket in self._store.tickets.values())
        if len(self._store.tickets) >= limits.max_requests:
            reason = f"{limits.max_requests} requests are open (service.max_requests): read or cancel one"
            raise RefusedError(429, reason)
        if open_prompts + num_prompts > limits.max_prompts:
            raise RefusedError(
                429,
                f"{num_prompts} prompts more than the {open_prompts} of open requests are over service.max_prompts "
                f"({limits.max_prompts}): send fewer, or read what is there",
            )

    def _predicted(self, sampling: SamplingParams | None) -> float:
        return float((sampling or self._settings.sampling).max_new_tokens)

    async def cancel(self, ticket: Ticket) -> None:
        await self._report(RequestCancelled(request=ticket.number, reason="cancelled by request"))

    async def take(self, ticket: Ticket, upto: int) -> None:
        """The reader has the first ``upto`` samples. Raises RefusedError: there are not so many."""
        request = self._pipeline.requests.get(ticket.number)
        if request is not None and upto > len(request.results):
            raise RefusedError(400, f"only {len(request.results)} samples of {ticket.name!r} have ended")
        await self._report(SamplesTaken(request=ticket.number, upto=upto))

    # -- samples

    async def stream(self, ticket: Ticket, start: int) -> AsyncIterator[bytes]:
        """NDJSON: one line a sample from number ``start`` on, as each ends, and a last line ``{"done": ...}``.

        A second reader of a request takes over; the first is sent an error. Raises RefusedError: ``start`` was taken
        already.
        """
        reader = self._readers[ticket.number] = next(self._reader_numbers)
        position = start
        try:
            while True:
                if self._readers.get(ticket.number) != reader:
                    yield _line({"error": "another reader of this request took over"})
                    return
                changed = self._changed
                request = self._pipeline.requests.get(ticket.number)
                if request is None and ticket.number <= self._pipeline.last_request:
                    done = position == ticket.num_samples
                    yield _line({"done": position} if done else {"error": "the request was cancelled, or expired"})
                    return
                rows = request.results[position : position + CHUNK_ROWS] if request else []
                if rows:
                    yield b"".join([line async for line in self._samples(ticket, position, rows)])
                    position += len(rows)
                    if not ticket.acknowledged:
                        await self._report(SamplesTaken(request=ticket.number, upto=position))
                elif position == ticket.num_samples:
                    yield _line({"done": position})
                    return
                else:
                    await _either(changed, LOOK_S)
        finally:
            if self._readers.get(ticket.number) == reader:
                del self._readers[ticket.number]

    def first_untaken(self, ticket: Ticket) -> int:
        """The number of the first sample that its reader has not taken."""
        request = self._pipeline.requests.get(ticket.number)
        return request.taken if request else 0

    async def _samples(self, ticket: Ticket, first: int, rows: Sequence[RowId]) -> AsyncIterator[bytes]:
        columns = await self._rows.read_rows(rows, COLUMNS)
        for number, (row, found) in enumerate(zip(rows, columns, strict=True), start=first):
            group_id, sample = parse_row_id(row)
            prompt = int(group_id.rpartition("/")[2])
            place = {"n": number, "request": ticket.name, "prompt": prompt, "sample": sample, "id": row}
            request = self._pipeline.requests.get(ticket.number)
            reason = request.failed.get(row, "") if request is not None else ""
            if not reason and len(found) < len(COLUMNS):
                found = await self._when_made_again(row)
                reason = "" if found else "the broker lost it, and it was not made again in time"
            yield _line(place | ({"failed": reason} if reason else self._content(found)))

    async def _when_made_again(self, row: RowId) -> dict[Column, bytes]:
        """{} when it is not there after ROW_WAIT_S."""
        deadline_s = asyncio.get_running_loop().time() + ROW_WAIT_S
        while asyncio.get_running_loop().time() < deadline_s:
            await _either(self._changed, LOOK_S)
            (found,) = await self._rows.read_rows([row], COLUMNS)
            if len(found) == len(COLUMNS):
                return found
        return {}

    def _content(self, columns: dict[Column, bytes]) -> dict[str, Any]:
        info = rollout_info_decoder.decode(columns[Column.ROLLOUT_INFO])
        token_ids = decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]).tolist()
        episode: dict[str, Any] = {}
        if info.segments:
            episode["segments"] = [{"kind": one.kind.value, "end": one.end} for one in info.segments]
        if info.reward is not None:
            episode["reward"] = info.reward
        return {
            "text": self._detokenize(token_ids),
            "token_ids": token_ids,
            "logprobs": decode_array(Column.ROLLOUT_LOGPROBS, columns[Column.ROLLOUT_LOGPROBS]).tolist(),
            "finish_reason": info.finish_reason.value,
            "versions": [{"start": span.start, "end": span.end, **_identity(span.weights)} for span in info.spans],
            "worker": info.worker_id,
            **episode,
        }

    # -- weights

    async def update(self, update: UpdateRequest, wait_s: float) -> dict[str, Any]:
        """Have weights published and loaded.

        Returns: ``{"version", "epoch", "digest", "loaded": [worker], "pending": [worker]}``: whatever is submitted from
        now on starts with this version; ``pending`` had not loaded it within ``wait_s``, and get nothing new before.
        Raises:  RefusedError: the publisher refused it, or did not answer in time.
        """
        deadline_s = asyncio.get_running_loop().time() + wait_s
        entry = Entry(fields={"path": update.path or "(a manifest)"}, payload=encode(update))
        waiting = self._updates[update.update] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._broker.enqueue(keys.UPDATES, entry)
                answer = await waiting
        except TimeoutError:
            raise RefusedError(
                504,
                f"no publisher answered within {wait_s:.0f} s; it may yet. Is a worker of kind publish running? "
                'A large checkpoint takes longer: "wait_s"',
            ) from None
        finally:
            del self._updates[update.update]
        if isinstance(answer, UpdateFailed):
            raise RefusedError(400, answer.reason)
        loop = asyncio.get_running_loop()
        while self._loaded(answer.weights)["pending"] and (left_s := deadline_s - loop.time()) > 0:
            await _either(self._changed, min(left_s, LOOK_S))
        return self._loaded(answer.weights)

    def _loaded(self, weights: WeightIdentity) -> dict[str, Any]:
        serving = {worker.worker_id: worker.loaded for worker in self._pipeline.fleet.workers.values()}
        return {
            **_identity(weights),
            "loaded": sorted(worker for worker, loaded in serving.items() if loaded == weights),
            "pending": sorted(worker for worker, loaded in serving.items() if loaded != weights),
        }


def _identity(weights: WeightIdentity) -> dict[str, Any]:
    return {"version": weights.version, "epoch": weights.epoch, "digest": weights.digest}


def _line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


async def _either(changed: asyncio.Event, seconds: float) -> None:
    """Until something was applied, or for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()
