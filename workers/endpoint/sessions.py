"""Who works on which sample: seats are samples that wait for an agent, a session is one agent's lease of a seat.

    offer ─► seat ─► lease ─► session ─► seal: the sample
               ▲                 │ silent, too long, failed
               └─────────────────┘ a new session with a new key; after max_leases the sample has failed

Owns: seats, sessions, keys. Never: tokens, HTTP, clocks (time is given). Invariant: every seat that was offered leaves
exactly once: sealed, failed or aborted; a session's key opens nothing after its end.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from transport.contracts.messages import OwnPrompt
from transport.contracts.settings import EndpointSettings
from transport.contracts.types import GroupId, is_evaluation
from workers.endpoint.conversation import Conversation
from workers.errors import EndpointRefusedError
from workers.generation.engine import GenerationRequest

REMEMBERED_ENDS = 4096
"""Sessions whose end a late agent is told; an older one's key is unknown."""
SESSION_ENDED = "session_ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Seat:
    """One sample of a group. leases: so far."""

    request: GenerationRequest
    sample: int
    leases: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """An agent at work on a sample. heard_s: when it last sent something.  turns: that are generated now.  outgrown: it
    asked for more than the sample's tokens.  asked: turns so far.  reward: as it was last reported.
    """

    seat: Seat
    name: str
    key: str
    began_s: float
    heard_s: float
    conversation: Conversation
    reward: float | None = None
    turns: set[GroupId] = field(default_factory=set[GroupId])
    outgrown: bool = False
    asked: int = 0

    @property
    def request(self) -> GenerationRequest:
        return self.seat.request

    @property
    def room(self) -> int:
        """Tokens of the whole sample."""
        return self.request.limit(self.seat.sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a session ended. sealed: as a sample, with so many tokens and the reward that was reported, if one was."""

    reason: str
    sealed: bool
    tokens: int = 0
    reward: float | None = None


class Sessions:
    """group_size: of the run; only a group of which no sample was begun takes an agent's own prompt, and all of its
    samples have it then.
    """

    def __init__(self, settings: EndpointSettings, *, group_size: int = 1) -> None:
        self._settings = settings
        self.group_size = group_size
        self.own_prompts: dict[GroupId, OwnPrompt] = {}
        self.seats: list[Seat] = []
        self.open: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._ends: dict[str, End] = {}  # by name, the oldest first
        self._ends_by_key: dict[str, End] = {}  # names stand in URLs and logs, and open nothing

    def offer(self, request: GenerationRequest, own: OwnPrompt | None = None) -> None:
        """own: the prompt that an agent brought for its group."""
        held = {seat.request.group_id for seat in (*self.seats, *(one.seat for one in self.open.values()))}
        self.own_prompts = {name: prompt for name, prompt in self.own_prompts.items() if name in held}
        if own is not None:
            self.own_prompts[request.group_id] = own
        self.seats += [Seat(request=request, sample=sample) for sample in request.samples]

    def lease(self, now_s: float, group: str = "") -> Session | None:
        """The next seat, None where there is none; those with an agent's own prompt after all others.

        group: only one of its seats will do.
        """
        fitting = [one for one in self.seats if group in ("", one.request.group_id)]
        seat = min(fitting, key=lambda one: one.request.group_id in self.own_prompts, default=None)
        return None if seat is None else self._begin(seat, now_s)

    def lease_own(self, now_s: float, prompt: OwnPrompt) -> Session | None:
        """A seat of the group that this prompt has, else None."""
        has_it = (one for one in self.seats if self.own_prompts.get(one.request.group_id) == prompt)
        seat = next(has_it, None)
        return None if seat is None else self._begin(seat, now_s)

    def untouched_group(self) -> GroupId | None:
        """One that may take an agent's own prompt: all of its samples are here, and none was ever leased."""
        fresh: dict[GroupId, int] = {}
        for seat in self.seats:
            name = seat.request.group_id
            if not seat.leases and name not in self.own_prompts and not is_evaluation(name):
                fresh[name] = fresh.get(name, 0) + 1
        return next((name for name, count in fresh.items() if count == self.group_size), None)

    def why_none(self, group: str = "", *, own: bool = False) -> str:
        """Why no seat can be leased, where none can. own: for a prompt of the agent's own."""
        count = len(self.seats)
        waiting = f"{count} {'sample waits' if count == 1 else 'samples wait'} for an agent"
        if not self.seats:
            return "no sample waits for an agent: the run has given out all that it wants now"
        if own and self.untouched_group() is not None:
            return f"{waiting}, but there was no time to keep the prompt (wait_s)"
        if own:
            return (
                f"{waiting}, but of groups that were begun, or evaluate, or have a prompt: your own takes a group "
                f"of which none of the {self.group_size} samples (group_size) was leased"
            )
        return f"{waiting}, but none of group {group}"

    def _begin(self, seat: Seat, now_s: float) -> Session:
        self.seats.remove(seat)
        seat.leases += 1
        session = Session(
            seat=seat,
            name=f"s-{secrets.token_hex(8)}",
            key=f"sk-{secrets.token_urlsafe(24)}",
            began_s=now_s,
            heard_s=now_s,
            conversation=Conversation(seat.request.prompt_ids.tolist()),
        )
        self.open[session.name] = self._by_key[session.key] = session
        return session

    def of_key(self, key: str) -> Session | None:
        """The open session of a key; None for one that is none's. Raises EndpointRefusedError: it has ended."""
        return self._by_key.get(key) or self._ended(self._ends_by_key.get(key))

    def knows(self, key: str) -> bool:
        """Whether it is or was a session's. Keys are random and long, and are looked up by their hash."""
        return key in self._by_key or key in self._ends_by_key

    def of_name(self, name: str) -> Session:
        """Raises EndpointRefusedError: there is no such session, or it has ended."""
        found = self.open.get(name) or self._ended(self._ends.get(name))
        if found is None:
            raise EndpointRefusedError(404, "no_such_session", f"there is no session {name!r}: lease one")
        return found

    def _ended(self, end: End | None) -> None:
        if end is not None:
            raise EndpointRefusedError(410, SESSION_ENDED, f"the session has ended: {end.reason}; lease another one")

    def end_of(self, name: str) -> End | None:
        return self._ends.get(name)

    def end_by_key(self, key: str) -> End | None:
        return self._ends_by_key.get(key)

    def close(self, session: Session, end: End) -> None:
        """Its seat is not offered again, unless ``give_back`` did."""
        del self.open[session.name], self._by_key[session.key]
        for ends, word in ((self._ends, session.name), (self._ends_by_key, session.key)):
            ends[word] = end
            if len(ends) > REMEMBERED_ENDS:
                del ends[next(iter(ends))]

    def give_back(self, session: Session, reason: str) -> str:
        """End it, and offer its seat to others, before any that waits. Returns "", or why the sample has failed."""
        seat, most = session.seat, self._settings.max_leases
        self.close(session, End(reason=reason, sealed=False))
        if seat.leases < most:
            self.seats.insert(0, seat)
            return ""
        return f"{reason} (the last of {most} leases)"

    def lapsed(self, now_s: float) -> list[tuple[Session, str]]:
        """Those to give back, each with the reason. One that waits for a turn is not silent."""
        found: list[tuple[Session, str]] = []
        for session in self.open.values():
            if now_s - session.began_s > self._settings.max_session_s:
                limit = f"{self._settings.max_session_s:g} s (endpoint.max_session_s)"
                found.append((session, f"its agent did not end it within {limit}"))
            elif not session.turns and now_s - session.heard_s > self._settings.silence_s:
                limit = f"{self._settings.silence_s:g} s (endpoint.silence_s)"
                found.append((session, f"its agent sent nothing for {limit}"))
        return found

    def withdraw(self, groups: Collection[tuple[GroupId, int]]) -> tuple[list[Seat], list[Session]]:
        """Seats and sessions of these (group, attempt)s; the seats are gone, the sessions are still to be closed."""
        seats = [seat for seat in self.seats if seat.request.key in groups]
        self.seats = [seat for seat in self.seats if seat.request.key not in groups]
        return seats, [session for session in self.open.values() if session.request.key in groups]
