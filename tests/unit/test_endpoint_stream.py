"""What may be told of a turn before it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from tests.property.exploring import SEED
from workers.endpoint.stream import TurnStream, TurnText


def characters(ids: Sequence[int]) -> str:
    """A token a byte of UTF-8, so that a character may be half there."""
    return bytes(ids).decode(errors="replace")


def told(text: str, **how: Any) -> list[str]:
    turn = TurnText(characters, **how)
    return [turn.take([byte]) for byte in text.encode()]


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("ab", {}, ["a", "b"]),
        ("a\u00e9\U0001f600", {}, ["a", "", "\u00e9", "", "", "", "\U0001f600"]),
        ("a END b", {"ends": ("END",)}, ["a", " ", "", "", "", "", ""]),
        ("a EN b", {"ends": ("END",)}, ["a", " ", "", "", "EN ", "b"]),
        ("aab", {"ends": ("aac",)}, ["", "", "aab"]),
        ("x<tool_call>{", {"held_from": "<tool_call>"}, ["x", *[""] * 12]),
        ('{"name"', {"silent": True}, [""] * 7),
    ],
)
def test_only_what_nothing_later_changes_is_told(text: str, how: dict[str, Any], expected: list[str]) -> None:
    assert told(text, **how) == expected


@pytest.mark.parametrize("number", range(100))
def test_the_pieces_are_a_beginning_of_the_text_however_it_comes(number: int) -> None:
    random = Random(f"{SEED}/{number}")
    text = "".join(random.choice("aE ND\u00e9\u4e2d\U0001f600<") for _ in range(random.randint(1, 40)))
    ends = random.choice([(), ("END",), ("END", "aE"), ("<",)])
    turn, raw, pieces = TurnText(characters, ends=ends), text.encode(), ""
    while raw:
        some = random.randint(1, 5)
        pieces, raw = pieces + turn.take(raw[:some]), raw[some:]
    stops = [at for one in ends if (at := text.find(one)) >= 0]
    whole = text[: min(stops)] if stops else text
    assert whole.startswith(pieces)
    held = max((len(one) - 1 for one in ends), default=0)
    assert stops or len(whole) - len(pieces) <= held


def test_tokens_that_are_told_again_are_taken_once_and_others_tear_the_stream() -> None:
    stream = TurnStream()
    stream.text = TurnText(characters)
    stream.put(0, [97, 98], [-1.0, -2.0])
    piece = stream.take()
    assert piece is not None
    assert (piece.text, piece.ids, piece.logprobs) == ("ab", [97, 98], [-1.0, -2.0])
    assert stream.take() is None
    stream.put(0, [97, 98, 99], [-1.0, -2.0, -3.0])
    piece = stream.take()
    assert piece is not None
    assert (piece.text, piece.ids, piece.logprobs) == ("c", [99], [-3.0])
    assert stream.agrees([97, 98, 99, 100])
    assert not stream.agrees([97, 98])
    for start, ids in ((1, [97]), (5, [1]), (0, [98])):
        torn = TurnStream()
        torn.put(0, [97, 98, 99], [0.0] * 3)
        torn.put(start, ids, [0.0] * len(ids))
        assert not torn.agrees([97, 98, 99]), (start, ids)
