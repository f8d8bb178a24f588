"""What one session has said, as a tree of exchanges: a request continues the longest exchange that it begins with.

    system, user ─► turn 1 ─► tool ─► turn 2      each exchange: what was added, as ids that were encoded once,
                       └────► user ─► turn 3      and the turn, as ids that were sampled: never encoded at all

Never: encodes; talks to an engine. Invariant: the ids of a branch are what the policy read and wrote, in order, so a
row that is made of one is token-exact. Edited history begins with no exchange, or an earlier one: a new branch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from transport.contracts.types import SegmentKind
from workers.environments.transcript import Transcript
from workers.generation.engine import Completion


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """added: ids between the parent's end and the turn, chosen by ``kind``.  text: of a prompt of text, all of it and
    the turn; None in a chat.  policy_tokens: of the branch up to here.
    """

    parent: Exchange | None
    added: Sequence[int]
    kind: SegmentKind
    turn: Completion
    text: str | None = None
    policy_tokens: int = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.policy_tokens = len(self.turn.response_ids) + (self.parent.policy_tokens if self.parent else 0)
        self.depth = 1 + (self.parent.depth if self.parent else 0)

    @property
    def branch(self) -> list[Exchange]:
        """From the first one to this."""
        found: list[Exchange] = []
        one: Exchange | None = self
        while one is not None:
            found.append(one)
            one = one.parent
        return found[::-1]

    @property
    def last_token(self) -> int:
        return int(self.turn.response_ids[-1]) if len(self.turn.response_ids) else -1


class Conversation:
    """opening: ids that every branch begins with, those of the group's prompt."""

    def __init__(self, opening: Sequence[int]) -> None:
        self.opening = tuple(opening)
        self.exchanges: list[Exchange] = []
        self._of_digest: dict[bytes, Exchange] = {}

    def find(self, digests: Sequence[bytes]) -> tuple[Exchange | None, int]:
        """(the longest exchange that a chat begins with, how many of its messages that is). digests: see messages."""
        for known in range(len(digests), 0, -1):
            if (found := self._of_digest.get(digests[known - 1])) is not None:
                return found, known
        return None, 0

    @property
    def answered(self) -> Container[bytes]:
        """The digests of chats that end with an answer of the policy."""
        return self._of_digest

    def find_text(self, prompt: str) -> Exchange | None:
        """Likewise for a prompt of text."""
        fitting = [one for one in self.exchanges if one.text is not None and prompt.startswith(one.text)]
        return max(fitting, key=lambda one: len(one.text or ""), default=None)

    def find_ids(self, prompt: Sequence[int]) -> Exchange | None:
        """Likewise for a prompt of ids."""
        best: Exchange | None = None
        for one in self.exchanges:
            ids = self.ids(one)
            beginnings = (ids, ids[len(self.opening) :])
            if any(list(prompt[: len(begin)]) == begin for begin in beginnings) and (
                best is None or one.depth > best.depth
            ):
                best = one
        return best

    def ids(self, upto: Exchange | None) -> list[int]:
        """What the policy has read and written at the end of an exchange."""
        ids = list(self.opening)
        for one in upto.branch if upto else ():
            ids += one.added
            ids += one.turn.response_ids.tolist()
        return ids

    def add(self, exchange: Exchange, digest: bytes | None = None) -> None:
        """It was answered. digest: of the messages and the answer; the last of two that mean the same is continued."""
        self.exchanges.append(exchange)
        if digest is not None:
            self._of_digest[digest] = exchange

    @property
    def longest(self) -> Exchange | None:
        """The end of the branch that is trained: the one with most tokens of the policy, of several the last."""
        best: Exchange | None = None
        for one in self.exchanges:
            if best is None or one.policy_tokens >= best.policy_tokens:
                best = one
        return best

    @property
    def num_branches(self) -> int:
        parents = {id(one.parent) for one in self.exchanges}
        return sum(id(one) not in parents for one in self.exchanges)

    @property
    def policy_tokens(self) -> int:
        """Of all branches."""
        return sum(len(one.turn.response_ids) for one in self.exchanges)

    def branches(self, room: int) -> list[Exchange]:
        """The ends of the branches that fit into ``room`` tokens together, those with most tokens of the policy first
        to be taken; in the order in which they were answered. The longest is always there.
        """
        continued = {id(one.parent) for one in self.exchanges}
        taken: list[Exchange] = []
        for one in sorted(self.exchanges[::-1], key=lambda one: -one.policy_tokens):
            tokens = len(self.ids(one)) - len(self.opening)
            if id(one) not in continued and (not taken or tokens <= room):
                taken.append(one)
                room -= tokens
        return [one for one in self.exchanges if one in taken]

    def transcript(self, ends: Sequence[Exchange]) -> Transcript:
        """The branches with these ends, one behind another; what two of them have is trained in the first."""
        made = Transcript()
        told: set[int] = set()
        for end in ends:
            if told:
                made.end_branch()
            for one in end.branch:
                if id(one) in told:
                    made.add_observation([*one.added, *one.turn.response_ids.tolist()], SegmentKind.REPEATED)
                else:
                    made.add_observation(one.added, one.kind)
                    made.add_turn(one.turn)
                    told.add(id(one))
        return made
