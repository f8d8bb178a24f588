"""Requests of a service run on disk: what was accepted survives its process, and prompts that wait take no memory.

    <run-dir>/requests/<number>.request     written whole, then renamed; removed once everything is taken

Owns: those files, and the prompts in them. Never: when a request begins or ends (the core does). Invariant: a request
that was answered with 200 is on the disk, and its prompts can be read for as long as the core may name them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import numpy as np

from orchestrator.prompts.source import Prompt, PromptBatch
from transport.contracts.messages import PromptRef, PromptsSubmitted, SlotOutcome
from transport.contracts.types import PromptId, SamplingParams
from transport.process.files import replace

REQUESTS = "requests"
"""Their directory in the run's."""
SUFFIX = ".request"
MAX_OPEN = 4
"""Requests whose prompts are kept in memory: those whose groups start now."""


class StoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """text: as the model reads it, "" where only ids were given.  ids: int32, little endian."""

    text: str
    ids: bytes

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
        """The event that reports it to the core."""
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
        self._tickets: dict[str, Ticket] = {}
        for path in sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: int(path.stem)):
            self.remember(self._load(int(path.stem)))

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}{SUFFIX}"

    def ticket(self, name: str) -> Ticket | None:
        """The request of this name, if it is not all taken."""
        return self._tickets.get(name)

    @property
    def tickets(self) -> Collection[Ticket]:
        return self._tickets.values()

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
        self._tickets[request.name] = ticket
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
        """Remove all others."""
        kept = set(numbers)
        for name in [name for name, ticket in self._tickets.items() if ticket.number not in kept]:
            number = self._tickets.pop(name).number
            self._open.pop(number, None)
            self._path(number).unlink(missing_ok=True)

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
        return Prompt(prompt_id=prompt_id, text=prompt.text, prompt_ids=ids, entry_json="{}")

    def observe(self, outcome: SlotOutcome) -> None:
        """Every prompt comes once."""
