"""Drafts from what was already said to a prompt: by the group's other samples, by earlier visits, by the sample itself.

Owns: the texts, found again by their suffixes, up to a number of tokens; how often what is found there comes true.
Never: the model, the draw, whether a draft pays (``continuous_batching.num_drafted``).
Invariant: a draft is a guess. It changes which tokens a step computes, and never which token a sample gets.

    prompt ─► SuffixAutomaton of its samples' texts ◄─ every token, as it is drawn
                 │ the longest suffix of a sample's text that was once continued, and how it went on
                 ▼
              Draft: token ids, and the chance that each of them is reached: from what such drafts came to before

Source: ours. Drafts of siblings from one suffix tree: Seer; of a tree with counts: SuffixDecoding (Oliaro et al. 2024).
The automaton: Blumer et al. 1985. Its states are at most twice the tokens, so a long text costs no more a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT, NONE = 0, -1
MAX_SUFFIXES = 32
"""Suffixes of a text, longest first, whose continuations are counted when it grows. Natural texts have about ten; one
that repeats a single token has as many as tokens, and the short ones tell nothing there that the long ones do not."""


class SuffixAutomaton:
    """All substrings of several texts that grow token by token, each known by a state: its longest suffix's.

    A text is the state of all that it has so far; ``ROOT`` is the empty one. Texts may begin where another ends.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._length, self._link = [0], [NONE]
        self._next: list[dict[int, int]] = [{}]
        self._count, self._continued, self._best = [0], [0], [NONE]

    def extend(self, text: int, token: int) -> int:
        """The text goes on with ``token``. Returns its new state."""
        grown = self._grown(text, token)
        self._tally(text, token)
        self.num_tokens += 1
        return grown

    def move(self, text: int, token: int) -> int:
        """The same for a text that is not to be kept: the state of its longest suffix that is known."""
        while text != NONE and token not in self._next[text]:
            text = self._link[text]
        return self._next[text][token] if text != NONE else ROOT

    def _grown(self, text: int, token: int) -> int:
        length, link, following = self._length, self._link, self._next
        if (known := following[text].get(token)) is not None:  # another text was here before
            return known if length[known] == length[text] + 1 else self._split(text, token, known)
        grown = self._state(length[text] + 1, {})
        while text != NONE and token not in following[text]:
            following[text][token] = grown
            text = link[text]
        if text == NONE:
            link[grown] = ROOT
        else:
            known = following[text][token]
            link[grown] = known if length[known] == length[text] + 1 else self._split(text, token, known)
        return grown

    def _state(self, length: int, following: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._next.append(following)
        self._count.append(0)
        self._continued.append(0)
        self._best.append(NONE)
        return len(self._length) - 1

    def _split(self, text: int, token: int, known: int) -> int:
        """Suffixes up to that of ``text`` and ``token`` occur where those of ``known`` do not: a state of their own."""
        following, link = self._next, self._link
        own = self._state(self._length[text] + 1, dict(following[known]))
        self._count[own], self._continued[own] = self._count[known], self._continued[known]
        self._best[own], link[own] = self._best[known], link[known]
        link[known] = own
        state = text
        while state != NONE and following[state].get(token) == known:
            following[state][token] = own
            state = link[state]
        return own

    def _tally(self, text: int, token: int) -> None:
        """Its longest suffixes were continued once more, by ``token``."""
        counted, following, count, best = NONE, self._next, self._count, self._best
        for _ in range(MAX_SUFFIXES):
            reached = following[text][token]
            if reached != counted:
                count[reached] += 1
                counted = reached
            self._continued[text] += 1
            if best[text] == NONE or count[reached] >= count[following[text][best[text]]]:
                best[text] = token  # of equal ones the later
            text = self._link[text]
            if text == NONE:
                return

    def continued(self, text: int) -> Continuation | None:
        """How the longest suffix of a text that was ever continued went on; None when nothing is known."""
        while self._best[text] == NONE:
            if text == ROOT:
                return None
            text = self._link[text]
        token = self._best[text]
        after = self._next[text][token]
        return Continuation(token, after, self._length[text], self._count[after], self._continued[text])


class Continuation(NamedTuple):
    """token: the most frequent one.  state: of the text with it.  matched: tokens of the suffix.  times, of: how often
    the suffix went on with it, and at all.
    """

    token: int
    state: int
    matched: int
    times: int
    of: int


# --- how often it comes true ------------------------------------------------------------------------------------------

FORGET = 1 / 256
"""Weight of one observation: with the weights that are trained, and the samples that end, the past says ever less."""
PRIOR = 4.0
"""Observations that what a kind of draft begins with counts for; and that a sample is like the others."""
OWN_FORGET = 1 / 16
"""The same of a sample's own record: it may come to say what was never said, or what it says again and again."""


class Acceptance:
    """Measured chance that the policy draws what a continuation says, by how long its suffix is and how often it went
    on so. It is measured at every token, also while nothing is drafted: whether a guess comes true is seen for free.
    """

    def __init__(self) -> None:
        self._kinds = dict[tuple[int, int], tuple[float, float]]()

    @staticmethod
    def _kind(found: Continuation) -> tuple[int, int]:
        """Lengths by powers of two up to 16; never contradicted, most often, or one of several."""
        share = 2 if found.times == found.of else int(2 * found.times > found.of)
        return min(found.matched.bit_length(), 5), share + 3 * (found.of > 2)

    def chance(self, found: Continuation) -> float:
        """In [0, 1]."""
        prior = 0.5 * found.times / (found.of + 1)
        hits, tries = self._kinds.get(self._kind(found), (0.0, 0.0))
        return (hits + PRIOR * prior) / (tries + PRIOR)

    def saw(self, found: Continuation, came_true: bool) -> None:
        kind = self._kind(found)
        hits, tries = self._kinds.get(kind, (0.0, 0.0))
        self._kinds[kind] = hits * (1 - FORGET) + came_true, tries * (1 - FORGET) + 1


# --- the texts of all prompts -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Text:
    """Prompt and response of one sample, as far as they are known. state: in the automaton of its prompt.  kept: it can
    be found again; once it is not, it stays so, as what followed would stand behind a gap.  came_true, expected: of its
    guesses of late; the samples that a batch waits for at its end are the odd ones.
    """

    of: _Said
    state: int = ROOT
    kept: bool = True
    came_true: float = 0.0
    expected: float = 0.0

    @property
    def likelier(self) -> float:
        """Factor by which guesses come true more often in it than in others."""
        return (self.came_true + PRIOR) / (self.expected + PRIOR)

    def saw(self, chance: float, came_true: bool) -> None:
        self.came_true = self.came_true * (1 - OWN_FORGET) + came_true
        self.expected = self.expected * (1 - OWN_FORGET) + chance


@dataclass(slots=True)
class _Said:
    """What was said to one prompt. open: texts that grow.  after_prompt: where they begin."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    open: int = 0
    after_prompt: tuple[int, bool] = (ROOT, True)


class Draft(NamedTuple):
    """token_ids: what comes next, by one's guess.  chances: that each of them is reached and right; they never rise."""

    token_ids: list[int]
    chances: list[float]


NO_DRAFT = Draft([], [])


class SaidBefore:
    """Texts of ``max_tokens`` tokens together, of samples that run and of earlier ones.

    The prompts unused for longest are forgotten first. While those of running samples are more than that, nothing is
    added. A token takes about 0.6 kB.
    """

    def __init__(self, max_tokens: int) -> None:
        self.acceptance = Acceptance()
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._prompts = OrderedDict[bytes, _Said]()

    def begin(self, key: bytes, prompt_ids: Sequence[int], response_ids: Iterable[int] = ()) -> Text:
        """A sample of the prompt ``key`` begins, or goes on from ``response_ids``."""
        said = self._prompts.setdefault(key, _Said())
        self._prompts.move_to_end(key)
        said.open += 1
        if said.open == 1 and not said.automaton.num_tokens:
            prompt = Text(said)
            for token in prompt_ids:
                self._add(prompt, token)
            said.after_prompt = prompt.state, prompt.kept
        text = Text(said, *said.after_prompt)
        for token in response_ids:
            self._add(text, token)
        return text

    def add(self, text: Text, token: int) -> None:
        """The sample drew ``token``."""
        if (found := text.of.automaton.continued(text.state)) is not None:
            text.saw(self.acceptance.chance(found), found.token == token)
            self.acceptance.saw(found, found.token == token)
        self._add(text, token)

    def _add(self, text: Text, token: int) -> None:
        text.kept = text.kept and self._has_room(text.of)
        if text.kept:
            text.state = text.of.automaton.extend(text.state, token)
            self.num_tokens += 1
        else:
            text.state = text.of.automaton.move(text.state, token)

    def _has_room(self, growing: _Said) -> bool:
        """Perhaps because the oldest prompt is forgotten that no sample runs of."""
        if self.num_tokens >= self._max_tokens:
            unused = (key for key, said in self._prompts.items() if not said.open and said is not growing)
            if (oldest := next(unused, None)) is not None:
                self.num_tokens -= self._prompts.pop(oldest).automaton.num_tokens
        return self.num_tokens < self._max_tokens

    def end(self, text: Text) -> None:
        """The sample has ended; what it said stays."""
        text.of.open -= 1

    def draft(self, text: Text, max_tokens: int, stop_token_ids: Container[int] = ()) -> Draft:
        """At most ``max_tokens`` tokens, up to one that would end the sample: behind it there is nothing to compute."""
        automaton, state, chance = text.of.automaton, text.state, 1.0
        token_ids, chances = list[int](), list[float]()
        while len(token_ids) < max_tokens and (found := automaton.continued(state)) is not None:
            if found.token in stop_token_ids:
                break
            chance *= min(1.0, text.likelier * self.acceptance.chance(found))
            token_ids.append(found.token)
            chances.append(chance)
            state = found.state
        return Draft(token_ids, chances)
