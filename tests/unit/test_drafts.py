"""Drafts of what was said before: the automaton against a plain search, memory, acceptance."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.generation.embedded.drafts import (
    NO_DRAFT,
    PRIOR,
    ROOT,
    Acceptance,
    Continuation,
    SaidBefore,
    SuffixAutomaton,
)

# -- the automaton


def plain_search(texts, of):
    """(length of the longest suffix of ``of`` that was ever continued, how often by which token); None where none."""
    for start in range(len(of) + 1):
        suffix = of[start:]
        went_on = Counter(
            text[at + len(suffix)]
            for text in texts
            for at in range(len(text) - len(suffix))
            if text[at : at + len(suffix)] == suffix
        )
        if went_on:
            return len(suffix), went_on
    return None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_it_finds_what_a_plain_search_finds_however_texts_grow(drawn):
    """(text, token) in any order: each text ends with at most 30 tokens, all of whose suffixes are counted."""
    automaton, states, texts = SuffixAutomaton(), [ROOT] * 4, [[] for _ in range(4)]
    for which, token in drawn:
        if len(texts[which]) < 30:
            states[which] = automaton.extend(states[which], token)
            texts[which].append(token)
    assert automaton.num_tokens == sum(map(len, texts))
    assert len(automaton._length) <= 2 * automaton.num_tokens + 1
    for state, text in zip(states, texts, strict=True):
        found, expected = automaton.continued(state), plain_search(texts, text)
        if expected is None:
            assert found is None
            continue
        matched, went_on = expected
        assert found is not None
        assert (found.matched, found.of) == (matched, went_on.total())
        assert found.times == went_on[found.token] == max(went_on.values())


@given(st.lists(st.integers(0, 2), max_size=25), st.lists(st.integers(0, 3), max_size=25))
def test_a_text_that_is_not_kept_is_followed_by_its_longest_known_suffix(kept, followed):
    automaton = SuffixAutomaton()
    state = ROOT
    for token in kept:
        state = automaton.extend(state, token)
    states, state = len(automaton._length), ROOT
    for token in followed:
        state = automaton.move(state, token)
    assert len(automaton._length) == states, "nothing was added"
    found, expected = automaton.continued(state), plain_search([kept], followed)
    assert (found is None) == (expected is None)
    if found is not None:
        # the state may be that of a longer suffix, which goes on alike
        assert found.times == expected[1][found.token]


def test_a_token_said_a_thousand_times_takes_no_thousand_steps_a_token():
    automaton, state = SuffixAutomaton(), ROOT
    for _ in range(5_000):
        state = automaton.extend(state, 7)
    found = automaton.continued(state)
    assert (found.token, found.matched) == (7, 4_999)


# -- the texts of all prompts


def say(said, prompt, response, key=None):
    key = bytes(prompt) if key is None else key
    text = said.begin(key, prompt)
    for token in response:
        said.add(text, token)
    return text


def test_a_sibling_is_drafted_from_the_first_token_on():
    said = SaidBefore(1000)
    say(said, [1, 2, 3], [10, 11, 12, 13])
    sibling = said.begin(bytes([1, 2, 3]), [1, 2, 3])
    assert said.draft(sibling, 3).token_ids == [10, 11, 12]
    said.add(sibling, 10)
    assert said.draft(sibling, 9).token_ids[:3] == [11, 12, 13]
    said.add(sibling, 77)
    said.add(sibling, 12)
    assert said.draft(sibling, 1).token_ids == [13], "found again after a token of its own"


def test_chances_never_rise_and_a_draft_is_as_long_as_asked():
    said = SaidBefore(1000)
    for _ in range(3):
        say(said, [1, 2, 3], [10, 11, 12, 13])
    text = said.begin(bytes([1, 2, 3]), [1, 2, 3])
    for most in range(5):
        draft = said.draft(text, most)
        assert len(draft.token_ids) == len(draft.chances) == most
        assert draft.chances == sorted(draft.chances, reverse=True)
        assert all(0 <= chance <= 1 for chance in draft.chances)


def test_another_prompt_gives_nothing_and_a_later_visit_does():
    said = SaidBefore(1000)
    said.end(say(said, [1, 2, 3], [10, 11, 12]))
    other = said.begin(bytes([4, 5]), [4, 5])
    assert set(said.draft(other, 4).token_ids) <= {4, 5}, "of its own prompt at most"
    assert said.draft(said.begin(bytes([1, 2, 3]), [1, 2, 3]), 3).token_ids == [10, 11, 12]


def test_a_sample_goes_on_from_what_it_had():
    said = SaidBefore(1000)
    say(said, [1, 2], [10, 11, 12])
    resumed = said.begin(bytes([1, 2]), [1, 2], [10, 11])
    assert said.draft(resumed, 1).token_ids == [12]


def test_the_prompt_that_was_unused_for_longest_is_forgotten():
    said = SaidBefore(30)
    for first in (10, 20, 30, 40):
        said.end(say(said, [first, 1], range(first + 2, first + 9)))
        assert said.num_tokens <= 30
    assert said.draft(said.begin(bytes([40, 1]), [40, 1]), 1).token_ids == [42]
    assert set(said.draft(said.begin(bytes([10, 1]), [10, 1]), 1).token_ids) <= {10, 1}


def test_memory_stays_bounded_while_all_samples_run_and_those_beyond_it_still_draft():
    said = SaidBefore(20)
    say(said, [1, 2], range(10, 30))
    assert said.num_tokens == 20
    late = say(said, [1, 2], [10, 11])
    assert said.num_tokens == 20
    assert said.draft(late, 2).token_ids == [12, 13]
    none = SaidBefore(0)
    assert none.draft(say(none, [1], [2, 2, 2]), 4) == NO_DRAFT


# -- acceptance


def found(*, matched=8, times=1, of=1):
    return Continuation(token=5, state=1, matched=matched, times=times, of=of)


@pytest.mark.parametrize("true", [True, False])
def test_what_always_or_never_comes_true_is_learnt(true):
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.saw(found(), true)
    chance = acceptance.chance(found())
    assert 0 < chance < 1
    assert abs(chance - true) < PRIOR / 100


def test_kinds_of_drafts_are_told_apart_and_the_past_is_forgotten():
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.saw(found(matched=16, times=3, of=3), True)
        acceptance.saw(found(matched=1, times=1, of=3), False)
    assert acceptance.chance(found(matched=20, times=5, of=5)) > 0.9
    assert acceptance.chance(found(matched=1, times=1, of=4)) < 0.1
    for _ in range(600):
        acceptance.saw(found(matched=16, times=3, of=3), False)
    assert acceptance.chance(found(matched=16, times=3, of=3)) < 0.1


def test_a_sample_that_says_what_no_other_did_is_drafted_with_less_hope_and_one_that_does_as_they_with_more():
    """In the end a batch waits for odd ones, and what the many had guessed right says little of them."""
    said = SaidBefore(1000)
    for _ in range(6):
        say(said, [1, 2], list(range(10, 40)))
    odd, usual = (said.begin(bytes([1, 2]), [1, 2]) for _ in range(2))
    for token in range(10, 20):
        said.add(usual, token)
        said.add(odd, 90 + token)
        said.add(odd, token)  # from here on every suffix of length one is known
    first, second = said.draft(odd, 1).chances[0], said.draft(usual, 1).chances[0]
    assert odd.likelier < usual.likelier
    assert first < second <= 1
