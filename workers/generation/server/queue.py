"""Samples on their way through a server: waiting here, sent, started, ended.

Only as many are sent as the server runs at once, so that the order of admission stays ours, and so that few wait there
when new weights come: a prompt that waits at the server would find the old weights' cache. Of a group one sample goes
first; once it has started, the group's prompt is in the server's cache, and the others take it from there.

Owns: that order, and which samples are where. Never: I/O. Invariant: a sample is in one place, and leaves it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from transport.contracts.types import GroupId
from workers.generation.engine import ABORTED_UNSTARTED, EngineFailure, GenerationRequest


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """prompt: its token ids as JSON.  waiting: samples not sent.  leader: the sample that computes the prompt now.
    cached: label of the weights under which the server has computed it.  losses: per sample, sendings that came to
    nothing.
    """

    request: GenerationRequest
    prompt: msgspec.Raw
    order: tuple[float, int]
    queued_at_s: float
    waiting: list[int]
    leader: int | None = None
    cached: str = ""
    losses: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True, kw_only=True, eq=False)
class SentSample:
    """A sample at the server. rid: of this sending.  label: weights at that time.  withdrawn: called back to be sent
    anew.  aborted: called off for good.
    """

    group: QueuedGroup
    sample: int
    rid: str
    label: str
    queued_at_s: float
    sent_at_s: float
    started_at_s: float | None = None
    withdrawn: bool = False
    aborted: bool = False

    def failure(self, reason: str, *, retryable: bool = True) -> EngineFailure:
        return self.group.request.failure((self.sample,), reason, retryable=retryable)


@dataclass(slots=True)
class SampleQueue:
    """What waits and what is sent. token: begins every rid, so that workers of one server cannot mean each other's."""

    token: str
    sent: dict[str, SentSample] = field(default_factory=dict[str, SentSample])
    _groups: list[QueuedGroup] = field(default_factory=list[QueuedGroup])
    _serial: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_waiting(self) -> int:
        return sum(len(group.waiting) for group in self._groups)

    @property
    def num_started(self) -> int:
        return sum(1 for sample in self.sent.values() if sample.started_at_s is not None)

    def push(self, request: GenerationRequest, now_s: float) -> None:
        """Queue a group: higher priorities first, then as they came."""
        group = QueuedGroup(
            request=request,
            prompt=msgspec.Raw(msgspec.json.encode(request.prompt_ids.tolist())),
            order=(-request.priority, next(self._serial)),
            queued_at_s=now_s,
            waiting=list(request.samples),
        )
        self._insert(group)

    def next(self, label: str, now_s: float) -> SentSample | None:
        """The sample to send next under weights ``label``; it counts as sent from now on. None: none may go now."""
        for group in self._groups:
            if group.waiting and (group.cached == label or group.leader is None):
                sample = group.waiting.pop(0)
                if group.cached != label:
                    group.leader = sample
                if not group.waiting:
                    self._groups.remove(group)
                return self._send(group, sample, label, now_s)
        return None

    def started(self, sent: SentSample, now_s: float) -> None:
        """Its first token came: its prompt is in the server's cache, under the label it was sent with."""
        sent.started_at_s = now_s
        if sent.group.leader == sent.sample:
            sent.group.leader = None
            sent.group.cached = sent.label

    def ended(self, sent: SentSample) -> None:
        """It is no longer at the server."""
        del self.sent[sent.rid]
        self._unlead(sent)

    def back(self, sent: SentSample, *, lost: bool) -> int:
        """It waits again, before what came after it. lost: its sending came to nothing. Returns how often that was."""
        del self.sent[sent.rid]
        self._unlead(sent)
        group = sent.group
        group.losses[sent.sample] = group.losses.get(sent.sample, 0) + (1 if lost else 0)
        if group not in self._groups:
            self._insert(group)
        group.waiting.insert(0, sent.sample)
        return group.losses[sent.sample]

    def give_up(self, sent: SentSample) -> None:
        """A sample that ``back`` put here is not sent again."""
        sent.group.waiting.remove(sent.sample)
        if not sent.group.waiting:
            self._groups.remove(sent.group)

    def forget_cached(self) -> None:
        """The server has started anew: it has no prompt of ours."""
        for group in {id(sent.group): sent.group for sent in self.sent.values()}.values():
            group.cached = ""
        for group in self._groups:
            group.cached = ""

    def take_out(self, keys: Collection[tuple[GroupId, int]]) -> list[EngineFailure]:
        """Waiting samples of these (group, attempt)s leave, as failures."""
        taken = [group for group in self._groups if group.request.key in keys]
        self._groups = [group for group in self._groups if group.request.key not in keys]
        return [group.request.failure(group.waiting, ABORTED_UNSTARTED) for group in taken]

    def _insert(self, group: QueuedGroup) -> None:
        place = next((i for i, other in enumerate(self._groups) if other.order > group.order), len(self._groups))
        self._groups.insert(place, group)

    def _send(self, group: QueuedGroup, sample: int, label: str, now_s: float) -> SentSample:
        group_id, attempt = group.request.key
        sent = SentSample(
            group=group,
            sample=sample,
            # The server aborts every rid that begins with the one it is given: the closing sign makes none a prefix.
            rid=f"{self.token}:{group_id}:{attempt}:{sample}:{next(self._serial)};",
            label=label,
            queued_at_s=group.queued_at_s,
            sent_at_s=now_s,
        )
        self.sent[sent.rid] = sent
        return sent

    def _unlead(self, sent: SentSample) -> None:
        if sent.group.leader == sent.sample:
            sent.group.leader = None
