"""Whether what a response answers is the right answer: one comparison for text, numbers, lists and mathematics.

    right, said ─► plain ─► equal as text
                      └───► numbers   exactly, with units and percent; times, ratios, bases (quantities.py)
                      └───► regions   intervals, relations and set builders in one form (regions.py)
                      └───► lists     item by item, in order where order matters      (0,1) != [0,1], {1,2} = 2, 1
                      └───► mathematics   by math-verify, within bounds of size

Owns: equality of answers. Never: finds the answer in a response (answers.py). Invariants: text of words is compared as
text (math-verify takes ``on`` for ``no``: products of letters); what is not finite equals nothing; no number of more
than MAX_BITS is computed. The caller bounds the CPU time of a comparison.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from workers.scoring.answers import plain, unwrap
from workers.scoring.quantities import (
    MULTIPLES,
    NO_UNIT,
    NUMBER_WORDS,
    UNIT_OF,
    Quantity,
    in_base,
    in_digits,
    read_quantity,
    rounds_to,
    same_colons,
    same_quantity,
    split_unit,
    units_agree,
)
from workers.scoring.regions import same_region

MAX_CHARACTERS = 2000
"""Length of an answer that is compared as more than text; the longest right answer of MATH has 230."""
MAX_ITEMS = 64
"""Items of a list that is compared item by item."""
MAX_BITS = 20_000
"""Size of a number that mathematics may compute: 2^4950 is an answer of MATH, 9^9^9 fills the memory."""


def same_answer(right: str, said: str) -> bool:
    """Whether ``said``, an unwrapped answer, is the answer ``right``."""
    right = unwrap(right)
    if not right or _is_not_finite(said):
        return False
    if _letters(right) == _letters(said) or _is_choice(right, said):
        return True
    if len(right) > MAX_CHARACTERS or len(said) > MAX_CHARACTERS:
        return False
    wanted = _APPROXIMATELY.sub("", _unmarked(plain(right)))
    if not _UNIT_COMMANDS.search(right):
        wanted = _VARIABLE.sub(r"\1*\2", wanted)
    return any(_equal(*_in_one_case(wanted, candidate)) for candidate in _candidates(plain(said)))


_UNIT_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|textrm|rm)(?![A-Za-z])")
_VARIABLE = re.compile(r"^(-?(?:[\d.,]+|\\frac\{\d+\}\{\d+\})) ?([A-Za-z](?:\^\d)?)$")
"""One letter behind a right answer's number: a variable, since units of right answers are set as text."""


def _is_choice(right: str, said: str) -> bool:
    """Whether ``said`` chooses what ``right`` is: a letter among answers (``(B) 42``, ``option B``), or yes or no."""
    if len(said) > MAX_CHARACTERS:
        return False
    text = _INTRODUCED.sub("", plain(said))
    if (verdict := re.fullmatch(r"(yes|no|true|false)", plain(right), re.IGNORECASE)) is not None:
        found = re.match(rf"{verdict[1]}\b(?:[,.!;:]|\s+(?:because|since|as)\b)(?P<rest>.*)", text, re.IGNORECASE)
        return found is not None and not _TURNS[verdict[1].lower()].search(found["rest"])
    letter = re.fullmatch(r"([A-J])|\(([A-J])\)", plain(right))
    if letter is None:
        return False
    wanted = letter[1] or letter[2]
    if (found := _CALLED_RIGHT.fullmatch(text)) is not None:
        return found[1] == wanted
    if (found := _CHOSEN.fullmatch(text)) is None:
        return False
    rest = found["rest"] or ""
    chosen = next(filter(None, found.groups()[:3]))
    return chosen.upper() == wanted and not re.search(r"\b[A-J]\b", rest) and not _HEDGES.search(rest)


_CALLED_RIGHT = re.compile(r"\(?([A-J])\)? is (?:the )?(?:correct|right)(?: (?:answer|option|choice))?")
_CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:([A-J])\)?|(?:\(([A-J])\)[.:]?|([A-J])[).:]+(?=\s))(?P<rest>\s.*)?)",
    re.IGNORECASE,
)
_INTRODUCED = re.compile(
    r"^(?:(?:therefore|thus|so|hence|finally|=>|(?:the )?(?:final )?answer:|both"
    r"|(?:the )?(?:point|pair|interval|set|vector)(?= [(\[\\{])"
    r"|(?:(?:it's|it is) )?(?:on|at|a|an|the|it's)"
    r"(?= (?!(?:and|or|is|are|not|but|least|most)\b)(?:[A-Za-z]{3}|\d+(?:st|nd|rd|th)))"
    r"),?:?\s+)+",
    re.IGNORECASE,
)
"""What may stand before an answer without a verb."""
_TURNS = {
    **dict.fromkeys(("yes", "true"), re.compile(r"\b(?:no|not|never|but|maybe|false)\b|n't\b", re.IGNORECASE)),
    **dict.fromkeys(("no", "false"), re.compile(r"\b(?:yes|but|maybe|true)\b", re.IGNORECASE)),
}
"""Words that take a yes or a no back."""


def reads_as_number(text: str) -> bool:
    """Whether an unwrapped answer is one number: alone, or with a unit, a name, a computation or a sentence."""
    return len(text) <= MAX_CHARACTERS and any(
        _is_number(part) for candidate in _candidates(plain(text)) for part in _values(candidate)
    )


def asks_for_number(right: str) -> bool:
    """Likewise for a right answer, which is no equation (``x^2 + y^2 = 25``) and no number of a variable (``3 n``)."""
    if not reads_as_number(right) or (_VARIABLE.match(plain(right)) and not _UNIT_COMMANDS.search(right)):
        return False
    return all(_is_number(part) or _names(part) for part in _values(plain(right))) or "=" not in right


def _values(text: str) -> list[str]:
    """The parts of a chain of equations; of alternatives that are all equal, the first."""
    found = _items(text)
    if (
        found is not None
        and found.alternatives
        and _one_value(found.items)
        and all(_equal(found.items[0], item) for item in found.items)
    ):
        return [found.items[0]]
    return (_parts_of_chain(text) if _sides(text) is not None else []) or [_without_member(text)]


def _is_number(text: str) -> bool:
    return read_quantity(text) is not None or read_quantity(_brackets(text)[1]) is not None


def _equal(right: str, said: str) -> bool:
    """Both in the spelling of ``plain``."""
    if _letters(right) == _letters(said):
        return not _is_not_finite(said)
    one, other = read_quantity(right), read_quantity(said)
    if one is not None and other is not None:
        return same_quantity(one, other)
    if (same := same_region(right, said, _equal)) is not None:
        return same
    if _plus_minus(right) or _plus_minus(said):
        right, said = _plus_minus(right) or right, _plus_minus(said) or said
    if (same := _same_sides(right, said)) is not None:
        return same
    for special in (same_colons(right, said), _same_bases(right, said), _same_emptiness(right, said)):
        if special is not None:
            return special
    wanted, given = _items(right), _items(said)
    if wanted is None and other is not None:
        given = None  # 1,024 is a number beside 2^10
    if wanted is not None and given is not None:
        if one is not None and len(given.items) > 1:
            return False  # 1,600 is no point
        return _same_items(wanted, given)
    for many, single in ((wanted, said), (given, right)):
        if many is not None and len(many.items) == 1:
            return _equal(many.items[0], single) if many is wanted else _equal(single, many.items[0])
    if given is not None and given.alternatives and not given.opening:
        return _one_value(given.items) and all(_equal(right, item) for item in given.items)
    if wanted is not None or given is not None:
        return _compares_relations(right, said) and _same_mathematics(right, said)
    body, unit = split_unit(right)
    said_body, said_unit = split_unit(said)
    if (unit or said_unit) and (body, said_body) != (right, said) and units_agree(unit, said_unit):
        return _equal(body, said_body) or _same_mathematics(right, said)
    return "\\infty" not in right + said and _same_mathematics(right, said)


def _one_value(items: Sequence[str]) -> bool:
    """Whether alternatives may be one value in several forms (``1/2 or 0.5``). Two decimal fractions that differ are
    guesses, however near they are.
    """
    numbers = [read_quantity(item) for item in items]
    decimals = {number.value for number in numbers if number is not None and number.decimals is not None}
    return len(decimals) <= 1 and not any(re.search(r"\}\s*\d", item) for item in items)


def _same_bases(right: str, said: str) -> bool | None:
    """Equality where the right number has a base; None elsewhere. The base may be left out."""
    if (wanted := in_base(right)) is None:
        return None
    given = in_base(said)
    return given == wanted if given is not None else said.strip().lower() == wanted[0]


_EMPTY = re.compile(
    r"\\emptyset|\\?\{ *\\?\}|(?:the )?empty set|(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?",
    re.IGNORECASE,
)


def _same_emptiness(right: str, said: str) -> bool | None:
    empty = [_EMPTY.fullmatch(text) is not None for text in (right, said)]
    return all(empty) if any(empty) else None


_CAPITALS = re.compile(r"\\(Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z])")


def _letters(text: str) -> str:
    """``text`` without spaces, in lower case but for Greek capitals: what is equal as text.

    It stays as it is where it has a letter in both cases (``R-r``).
    """
    text = _CAPITALS.sub(r"\\capital-\1", re.sub(r"\s+", "", text))
    return text if _in_both_cases(text) else text.casefold()


def _in_both_cases(text: str) -> list[str]:
    """Capitals among the letters of mathematics that stand beside their small letters: ``R`` of ``R-r``."""
    runs = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{1,3}(?![A-Za-z])", text)
    letters = {one for run in runs for one in run if len(run) == 1 or re.search(r"[\d\\^+*/=-]", text)}
    return sorted(one for one in letters if one.isupper() and one.lower() in letters)


def _in_one_case(right: str, said: str) -> tuple[str, str]:
    """Both texts with another small letter for each capital that stands beside its own one: math-verify reads ``R`` as
    ``r``.
    """
    both = right + said
    free = [one for one in "qzwjhgkvuypfbcalmnorstx" if one not in both.lower()]
    for capital in sorted({*_in_both_cases(right), *_in_both_cases(said)}):
        if not free:
            break
        other = free.pop(0)
        pattern = re.compile(rf"(?<!\\)(?<!\\[A-Za-z]){capital}(?![a-z]{{3}})")
        right, said = pattern.sub(other, right), pattern.sub(other, said)
    return right, said


def _is_not_finite(text: str) -> bool:
    return re.fullmatch(r"[-+]?(nan|inf|infinity)i?", _letters(text)) is not None


# --- bounds -----------------------------------------------------------------------------------------------------------


_TOKEN = re.compile(r"\d+|\\[A-Za-z]+|[A-Za-z{}()!^\[\]]")
_HEAVY = re.compile(r"\\(?:sum|prod|int|iint|iiint|oint|lim|binom|tbinom|dbinom)(?![A-Za-z])")


def _bits(text: str) -> float:
    """Upper bound of the bits of any number that evaluating ``text`` makes; infinite where it has none.

    Each sum and product counts as if all its numbers were multiplied.
    """
    bits, position = _bits_of_group(_TOKEN.findall(text), 0, 0)
    return bits if position >= 0 else math.inf


def _bits_of_group(tokens: Sequence[str], position: int, depth: int) -> tuple[float, int]:
    """(bits, position behind the group that begins at ``position``)."""
    total = last = 0.0
    while position < len(tokens):
        token = tokens[position]
        if token in ("}", ")", "]"):
            return total, position + 1
        if token == "^":
            exponent, position = _bits_of_atom(tokens, position + 1, depth)
            power = last * 2.0 ** min(exponent, 60.0)
            total, last = total - last + power, power
        elif token == "!":
            factorial = (last + 1) * 2.0 ** min(last, 60.0)
            total, last, position = total - last + factorial, factorial, position + 1
        else:
            last, position = _bits_of_atom(tokens, position, depth)
            total += last
    return total, position


def _bits_of_atom(tokens: Sequence[str], position: int, depth: int) -> tuple[float, int]:
    if position >= len(tokens):
        return 0.0, position
    token = tokens[position]
    if token in ("{", "(", "["):
        return (math.inf, len(tokens)) if depth > 50 else _bits_of_group(tokens, position + 1, depth + 1)
    return (max(1.0, len(token) * 3.33) if token.isdigit() else 1.0), position + 1


# --- sentences --------------------------------------------------------------------------------------------------------

_HEDGES = re.compile(
    r"\b(?:or|either|neither|nor|not|no|never|cannot|maybe|perhaps|possibly|if|unless|except|versus|vs"
    r"|between(?! (?:them|the|both|these|those)\b)"
    r"|instead|rather|minus|negative|plus|times|more|less|fewer|greater|(?<!the )least|(?<!the )most|above|below|under"
    r"|over|opposite|lie|lies|trap|myth|nobody|no one|none|something|as many as|fails? to"
    r"|suppose|assum(?:e|ing)|whether|imagine|used to)\b"
    r"|\b(?:common|typical|usual|frequent|easy|careless) (?:\w+ )?errors?\b"
    r"|\b(?:wrong|incorrect|false|untru|mistak|doubt|den(?:y|ied)|refus|distract|mislead|reject|impossib|invalid"
    r"|guess|tempt|ignor|unlikely|exclu)\w*"
    r"|\b(?:some|many|most|others|people|someone|students?)\b.*\b(?:say|said|claim|think|thought|believ|answer|write|wrote)\w*"
    r"|n't\b|n\u2019t\b",
    re.IGNORECASE,
)
"""Words that make one number of a sentence something else than its answer, and phrases that deny it."""
_LEADING = re.compile(
    r"^(?P<lead>[^\d\\$]{1,160}?(?:\b(?:is|are|was|were|be|equals?|equal to|gives?|get|obtain|:)))\s+(?P<rest>\S.*)$"
)
_BEFORE = re.compile(
    r"^(?P<rest>.{1,200}?)\s+(?:is|are) (?:the|our|my|your) (?:(?:final|correct|right|only|required) ){0,2}"
    r"(?:answers?|solutions?|results?)$",
    re.IGNORECASE,
)
_MARKED = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\*\*([^*]+)\*\*")
_APPROXIMATELY = re.compile(
    r"^(?:\\approx|\\sim|~|=|\\to|\\Rightarrow|\\implies|→|⇒|approximately|about|exactly|only|roughly)\s*"
)
_ALONE = re.compile(r"(?<![\w.\\^])(?<![A-Za-z]-)[-+]?[$€£]?\d+(?:[.,]\d+)*(?:/\d+)?(?![\w/^])%?")


_AMOUNT_OF = re.compile(
    r"\b(?:total|sum|amount|answer|value|result|average|profit|loss|cost|price|area|perimeter|length|volume|distance|speed"
    r"|rate|age|score|balance|income|difference|product|maximum|minimum|solution)\s+of\s*$",
    re.IGNORECASE,
)
"""What a number is the amount of; the factor of a number is another one."""
_CHANGED_BEHIND = re.compile(
    r"^\s*(?:and\b|(?:is|was)\b(?! (?:the|what|how|our|my)\b)|(?:does|seems|looks)\b|[A-Za-z]+(?:wards?|fold)\b"
    r"|[A-Za-z]{2,}ed(?=\W*$|\s+(?:by|to|from|with|in)\b))",
    re.IGNORECASE,
)
"""Words directly behind a number that make another one of it: ``and``, ``tripled``, ``upwards``."""
_SHORT_WORDS = frozenset(
    (
        *(
            "a",
            "i",
            "am",
            "an",
            "as",
            "at",
            "be",
            "by",
            "do",
            "go",
            "he",
            "if",
            "in",
            "is",
            "it",
            "me",
            "my",
            "no",
            "of",
        ),
        *("oh", "on", "or", "so", "to", "up", "us", "we", "mr", "ms", "dr", "sq", "cu", "s", "t", "re", "ll"),
    )
)
"""English words of one and two letters; any other is a product of variables."""


def _candidates(said: str) -> Iterator[str]:
    """What an answer may be of a text: all of it, what its sentence says, its only number. Each of them is one answer:
    a list of guesses stays a list of guesses.
    """
    yield from _readings(said)
    if (unmarked := _unmarked(said)) != said:
        yield from _readings(unmarked)


def _unmarked(text: str) -> str:
    """``text`` without the marks of mathematics and emphasis around its parts."""
    return _MARKED.sub(lambda found: next(filter(None, found.groups())).strip(), text)


def _readings(said: str) -> Iterator[str]:
    text = _APPROXIMATELY.sub("", _INTRODUCED.sub("", said))
    yield text
    if text != said:
        yield said
    yield from _rewritten(text)
    for pattern in (_BEFORE, _LEADING):
        stripped = text
        while (found := pattern.match(stripped)) is not None and not _HEDGES.search(found.groupdict().get("lead", "")):
            stripped = _APPROXIMATELY.sub("", unwrap(found["rest"]))
        if stripped != text:
            yield stripped
            yield from _rewritten(stripped)
            text = stripped
    marked = {next(filter(None, found.groups())) for found in _MARKED.finditer(text)}
    outside = _MARKED.sub(" ", text)
    if len(marked) == 1 and not _HEDGES.search(outside) and not any(one.isdigit() for one in outside):
        yield plain(unwrap(marked.pop()))
    if read_quantity(text) is not None:
        return  # with its unit, which counts
    if (shorter := _SPELLED.sub("", text)) != text:
        yield shorter
    text = shorter.replace("equal to", "equal")
    numbers = {found[0].lstrip("+") for found in _ALONE.finditer(text)}
    words = _ALONE.sub(" ", text)
    in_a_sentence = re.fullmatch(r"[A-Za-z\s,.;:'\"!?()-]*", words) and re.search(r"[A-Za-z]{2}", words)
    if len(numbers) != 1 or not in_a_sentence:
        return
    number = numbers.pop()
    before, _, after = text.partition(number)
    if not _changes(before) and not _changes(after, allowed=_BEHIND) and not _CHANGED_BEHIND.match(after):
        yield number


def _rewritten(text: str) -> Iterator[str]:
    """``text`` in digits, and one of two equal values that it gives: ``\\sqrt{2} \\approx 1.414``, ``five (5)``."""
    if (digits := in_digits(text)) and read_quantity(digits) is not None:
        yield digits
    exact, about, rounded = (part.strip() for part in text.partition("\\approx"))
    if about and (number := read_quantity(rounded)) is not None and _is_about(exact, number):
        yield exact
    if (twice := _TWICE.fullmatch(text)) is not None:
        one, other = (in_digits(part) or part for part in twice.groups())
        if _equal(one, other):
            yield one
    if (point := _POINT.fullmatch(text)) is not None:
        yield point[1]


_TWICE = re.compile(r"(.{1,200}?)\s+\((?:or |approximately |about |= ?|\\approx ?)?([^()]{1,200})\)")
_POINT = re.compile(r"[A-Z] ?(\([^()]+,[^()]+\))")
"""A point with its name: ``A(1, 2)``."""


def _is_about(exact: str, rounded: Quantity) -> bool:
    """Whether a number may be what ``exact`` is rounded to: it differs by less than one in its last digit."""
    exact = exact.rpartition("=")[2].strip()
    if (number := read_quantity(exact)) is not None:
        value = number.value
    else:
        parsed = _parsed(exact) if _is_mathematics(exact) and _bounded(exact) else ()
        found = _value(parsed[0]) if parsed else None
        if found is None or not (found.is_Float or found.is_Rational):
            return False
        value = Fraction(str(found))
    return abs(value - rounded.value) < Fraction(1, 10 ** (rounded.decimals or 0))


def _changes(words: str, allowed: frozenset[str] = frozenset()) -> bool:
    """Whether the words beside a number make another answer of it."""
    found = set(re.findall(r"[a-z]+", words.lower())) - allowed
    found |= {word.removesuffix("s") for word in found}
    counted = any(word.endswith(("ths", "teen", "ty")) or "-" in word for word in words.split())
    hedged = any(one[0].lower() not in allowed for one in _HEDGES.finditer(words))
    of_it = re.search(r"\b(?:of|point)\s*$", words) and not _AMOUNT_OF.search(words)
    short = {word for word in re.findall(r"(?<![a-z'])[a-z]{1,2}(?![a-z])", words.lower())}
    if counted or hedged or of_it or "?" in words or short - _SHORT_WORDS - UNIT_OF.keys():
        return True
    return bool(found & (NO_UNIT - _IN_SENTENCES | _CHANGES | MULTIPLES | NUMBER_WORDS))


_SPELLED = re.compile(r"\s*\([a-z]{3}[a-z -]*\)$")
"""Words in brackets behind an answer: its unit, or itself in words."""
_BEHIND = frozenset(("to", "than", "from", "by", "over", "under", "least", "most"))
"""Words that change the number behind them, and not the one before."""
_IN_SENTENCES = frozenset(
    ("and", "about", "is", "are", "was", "equals", "equal", "where", "when", "for", "because", "since")
)
"""Words of NO_UNIT that change no number of a sentence."""
_CHANGES = frozenset(
    (
        *("first", "second", "triple", "thrice", "cube", "inverse", "reciprocal", "successor", "log", "logs"),
        *("predecessor", "multiple", "divisible", "congruent", "reverse", "within", "exceeds", "exceeding"),
        *("unlike", "hardly", "nearly", "almost", "anything", "different", "differs", "far", "close", "past"),
        *("other", "isnt", "arent", "dont", "cant", "wont", "add", "added", "subtract", "up", "toward", "towards"),
        *("before", "after", "unequal", "until", "negation", "against", "near", "beneath"),
    )
)
"""Further words that make another number of the one in their sentence, or deny it."""


# --- equations, plus and minus ----------------------------------------------------------------------------------------

_EQUATION = re.compile(r"^(?P<left>[^=<>]*[^=<>\s!:])\s*=\s*(?P<right>[^=<>]+)$")
_MEMBER = re.compile(r"^(?P<left>[A-Za-z](?:_\w)?|\([A-Za-z](?:, ?[A-Za-z])+\))\s*\\in\s*(?P<right>.+)$")


def _same_sides(right: str, said: str) -> bool | None:
    """Equality where one of the two, or both, are of the form ``name = value``; None where neither is."""
    wanted, given = _sides(right), _sides(said)
    if wanted is None and given is None:
        return None
    if wanted is not None and given is not None:
        for name, value in (given, given[::-1]):
            if _letters(wanted[0]) == _letters(name):
                return _equal(wanted[1], value)
        return _same_mathematics(right, said)
    if given is not None:
        parts = _parts_of_chain(said) or list(given)
        values = [part for part in parts if not _names(part)] or parts[-1:]
        return all(_equal(right, value) for value in values)
    assert wanted is not None
    return _is_name(wanted[0]) and _equal(wanted[1], said)


def _parts_of_chain(text: str) -> list[str]:
    """What stands between the signs of equality of ``text``; empty without one."""
    cuts = _top_level(text, "=")
    pieces = [text[a + 1 : b].strip() for a, b in pairwise([-1, *cuts, len(text)])]
    return pieces if cuts and all(pieces) else []


def _sides(text: str) -> tuple[str, str] | None:
    """(left, right) of an equation or a membership that is no list of several; of a chain, its first and last."""
    if _top_level(text, ",;") or len(_split(text, _AND)) > 1:
        return None
    if not re.search(r"[<>!:]", text) and (parts := _parts_of_chain(text)):
        return parts[0], parts[-1]
    found = (_EQUATION.match(text) if _top_level(text, "=") else None) or _MEMBER.match(text)
    return (found["left"].strip(), found["right"].strip()) if found else None


_ARGUMENTS = re.compile(r"(?<=[A-Za-z}'])\s?(?:\([^()]*\)|\[[^\[\]]*\])")
_INDEX = re.compile(r"_(?:\{[^{}]*\}|\\[A-Za-z]+|\w)|\^(?:\{(?:-1|\\?\*|\\prime)\}|-1|\*|T(?![A-Za-z]))|'+(?![A-Za-z])")
_NO_NAME = re.compile(
    r"^-|[\d^!<>%$,;:?&]|\\(?:sqrt|log|ln|exp|pi|infty|sum|prod|i*int|lim|pm|begin|in|to|approx)(?![A-Za-z])"
)
_POINT_NAME = re.compile(r"\([A-Za-z](?:_\w)?(?:, ?[A-Za-z](?:_\w)?)+\)")


def _names(text: str) -> bool:
    """Whether the side of an equation names what the other side is: ``x``, ``f(2)``, ``|AB|``, ``m + n``, words.

    ``x^2``, ``2x`` and ``x + 1`` do not: the other side is no value of what was asked for.
    """
    if _POINT_NAME.fullmatch(text):
        return True
    text = _INDEX.sub("", text)
    for _ in range(3):
        text = _INDEX.sub("", _ARGUMENTS.sub("", text))
    return re.search(r"[A-Za-z]", text) is not None and not _NO_NAME.search(text) and not _HEDGES.search(text)


def _is_name(text: str) -> bool:
    """Likewise for the left side of a right answer, where a sum or a product is more than a name."""
    return _names(text) and not re.search(r"[+*/-]|\\(?:cdot|times|frac)", text)


def _plus_minus(text: str) -> str:
    """``a \\pm b`` as the two alternatives, "" for text without a single one."""
    if text.count("\\pm") != 1 or _top_level(text, ",;"):
        return ""
    plus = re.sub(r"(^|=)\s*\\pm", r"\1", text).replace("\\pm", "+")
    return f"{plus} or {text.replace(chr(92) + 'pm', '-')}"


# --- lists ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    """opening, closing: brackets around all of it, "" without.  union: its items are parts of one set.
    alternatives: ``or`` joins them, or they all are values of one variable.  names: the left sides of the items, "" for
    an item without one.
    """

    items: tuple[str, ...]
    opening: str = ""
    closing: str = ""
    union: bool = False
    alternatives: bool = False
    names: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", "\\{", "{") and not self.union

    @property
    def named(self) -> bool:
        """Whether its items are values of several variables."""
        return all(self.names) and len(set(self.names)) > 1

    @property
    def values(self) -> tuple[str, ...]:
        """The values of several variables in the order of their names; of words, in theirs."""
        sides = [(name, item.partition("=")[2].strip()) for name, item in zip(self.names, self.items, strict=True)]
        short = all(len(re.sub(r"_\{?\w+\}?|\\", "", name)) == 1 for name in self.names)
        return tuple(value for _, value in (sorted(sides, key=lambda side: side[0]) if short else sides))

    @property
    def is_interval(self) -> bool:
        """Whether it can only be an interval: half open, or without an end."""
        mixed = {self.opening, self.closing} in ({"(", "]"}, {"[", ")"})
        endless = self.opening in ("(", "[") and any("\\infty" in item for item in self.items)
        return len(self.items) == 2 and (mixed or endless)


_OPENINGS = {"\\{": "\\}", "\\langle": "\\rangle", "(": ")", "[": "]", "{": "}"}
_PIECES = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_AND = re.compile(r",?\s+(?:and|or|&|\\quad|\\wedge|\\vee)\s+|\\vee(?![A-Za-z])\s*")
_OR = re.compile(r"(?:^|\s)or\s|\\vee(?![A-Za-z])")


def _top_level(text: str, marks: str) -> list[int]:
    """Positions of ``marks`` outside of all brackets."""
    found: list[int] = []
    depth = position = 0
    for piece in _PIECES.findall(text):
        if piece in ("(", "[", "{", "\\{", "\\langle"):
            depth += 1
        elif piece in (")", "]", "}", "\\}", "\\rangle"):
            depth -= 1
        elif depth == 0 and piece in marks:
            found.append(position)
        position += len(piece)
    return found


def _items(text: str) -> _Items | None:
    """The list, tuple, set, interval or union that ``text`` is; None for a single value."""
    if "\\begin" in text:
        return None
    text = _without_member(text)
    if "\\cup" in text and (parts := _split(text, re.compile(r"\\cup(?![A-Za-z])"))) and len(parts) > 1:
        return _Items(items=tuple(parts), union=True)
    opening, inner, closing = _brackets(text)
    marks = ";" if _top_level(inner, ";") else ","
    cuts = _top_level(inner, marks)
    pieces = [inner[a + 1 : b] for a, b in zip([-1, *cuts], [*cuts, len(inner)], strict=True)]
    items = [item.strip() for piece in pieces for item in _split(piece, _AND)]
    items = [_stripped_and(item) for item in items if item]
    if not items or len(items) > MAX_ITEMS or (len(items) == 1 and not opening):
        return None
    sides = [_sides(item) if "=" in item else None for item in items]
    names = tuple(side[0] if side is not None and _names(side[0]) else "" for side in sides)
    of_one = (
        len(items) > 1 and bool(names[0]) and not _POINT_NAME.fullmatch(names[0]) and set(names[1:]) <= {names[0], ""}
    )
    either = any(_OR.search(piece) and len(_split(piece, _AND)) > 1 for piece in pieces)
    return _Items(items=tuple(items), opening=opening, closing=closing, alternatives=either or of_one, names=names)


def _without_member(text: str) -> str:
    found = _MEMBER.match(text)
    return found["right"] if found else text


def _stripped_and(item: str) -> str:
    return re.sub(r"^(?:and|or)\s+", "", item)


def _brackets(text: str) -> tuple[str, str, str]:
    """(opening, inside, closing); both "" where no pair of brackets is around all of ``text``."""
    text = text.strip()
    pieces = _PIECES.findall(text)
    if len(pieces) < 2 or pieces[0] not in _OPENINGS:
        return "", text, ""
    depth = 0
    for index, piece in enumerate(pieces):
        depth += (piece in _OPENINGS) - (piece in _OPENINGS.values())
        if depth == 0:
            if index != len(pieces) - 1:
                return "", text, ""
            opening, closing = ("(", ")") if pieces[0] == "\\langle" else (pieces[0], pieces[-1])
            return opening, "".join(pieces[1:-1]).strip(), closing
    return "", text, ""


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """``text`` cut at what ``separator`` finds outside of brackets."""
    cuts = [found for found in separator.finditer(text) if not _depth(text[: found.start()])]
    edges = [(0, 0), *((found.start(), found.end()) for found in cuts), (len(text), len(text))]
    return [text[a[1] : b[0]].strip() for a, b in pairwise(edges)]


def _depth(text: str) -> int:
    pieces = _PIECES.findall(text)
    return sum((piece in _OPENINGS) - (piece in _OPENINGS.values()) for piece in pieces)


def _same_items(right: _Items, said: _Items) -> bool:
    if right.union != said.union or len(right.items) != len(said.items):
        return False
    if any(one.alternatives and other.ordered for one, other in ((right, said), (said, right))):
        return False  # (1, 2) is a point or an interval, "1 or 2" are two values
    if (right.named or said.named) and right.alternatives != said.alternatives:
        return False
    for named, other in ((right, said), (said, right)):
        if named.named and not any(other.names):
            pairs = zip(named.values, other.items, strict=True)
            return all(_equal(*(pair if named is right else pair[::-1])) for pair in pairs)
    if right.is_interval or said.is_interval:
        if (right.opening, right.closing) != (said.opening, said.closing):
            return False
    elif right.opening and said.opening and right.opening != said.opening and len(right.items) == 2:
        return False  # (0, 1), [0, 1] and {0, 1} are a point or two intervals and a set
    if right.ordered:
        return all(_same_item(one, other) for one, other in zip(right.items, said.items, strict=True))
    left = list(said.items)
    for item in right.items:
        match = next((one for one in left if _same_item(item, one)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_item(right: str, said: str) -> bool:
    """Equality of two items of a list, where a set of one element is not that element."""
    return right.startswith("\\{") == said.startswith("\\{") and _equal(right, said)


# --- mathematics ------------------------------------------------------------------------------------------------------

VALUE_DIGITS, SPARE_DIGITS = 50, 10
"""Digits to which expressions of numbers are evaluated, and how many of them rounding may take."""
_RELATIONS = ("<", ">", "\\leq", "\\geq", "\\neq")
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "sec", "csc", "cot", "log", "exp", "lim", "max", "min", "gcd", "lcm", "mod", "det"),
        *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
    )
)
"""Words of three letters and more that are mathematics."""


def _compares_relations(right: str, said: str) -> bool:
    """Whether one of the two is a relation, which an interval may stand for."""
    return any(sign in right for sign in _RELATIONS) != any(sign in said for sign in _RELATIONS)


def _is_mathematics(text: str) -> bool:
    """Whether ``text`` may be handed to math-verify: it has signs of mathematics, no words, and no huge numbers."""
    if not re.search(r"[\d\\^+\-*/=<>]", text) or re.search(r"\d_|\\(?:approx|cong|mod|pmod)(?![A-Za-z])", text):
        return False  # math-verify leaves out the base of a number, and what follows some signs
    words = re.findall(r"(?<![\\A-Za-z{])[A-Za-z]{3,}", re.sub(r"\\(?:begin|end)\{\w+\}", "", text))
    return all(word in _FUNCTIONS for word in words)


def _bounded(text: str) -> bool:
    bits = _bits(text)
    return bits <= (64 if _HEAVY.search(text) else MAX_BITS)


def _same_mathematics(right: str, said: str) -> bool:
    if not (_is_mathematics(right) and _is_mathematics(said) and _bounded(right) and _bounded(said)):
        return False
    if set(_CAPITALS.findall(right)) != set(_CAPITALS.findall(said)) or _ignored(right) != _ignored(said):
        return False
    wanted, given = _parsed(right), _parsed(said)
    if not wanted or not given:
        return False
    if (number := read_quantity(said)) is not None and not number.unit:
        return _same_value(wanted[0], number)
    if (same := _same_exactly(wanted[0], given[0])) is not None:
        return same
    one, other = _value(wanted[0]), _value(given[0])
    if one is not None and other is not None:  # math-verify takes 1/2^98 for 3/2^98
        return bool(abs(one - other) <= abs(one) * 10.0 ** (SPARE_DIGITS - VALUE_DIGITS))
    endless = given[0] if one is not None else wanted[0]
    if (one is None) != (other is None) and not (_symbols(endless) or hasattr(endless, "rhs")):
        return False  # a number and what has no finite value
    return _verified(wanted, given)


def _ignored(text: str) -> list[str]:
    """Signs that math-verify leaves out: primes, and all that are not of ASCII."""
    return sorted(one for one in text if one == "'" or not (one.isascii() or one == "\u00b0"))


def _symbols(expression: Any) -> bool:
    return bool(getattr(expression, "free_symbols", True))


def _same_exactly(one: Any, other: Any) -> bool | None:
    """Equality of two rational numbers; None for any other expressions."""
    exact = [_rational(expression) for expression in (one, other)]
    return None if None in exact else exact[0] == exact[1]


def _rational(expression: Any) -> Fraction | None:
    try:
        value = expression.doit()
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # sympy's, of any answer
        return None
    return Fraction(int(value.p), int(value.q)) if getattr(value, "is_Rational", False) else None


def _value(expression: Any) -> Any:
    """The finite value of an expression of numbers alone; None for any other expression."""
    if getattr(expression, "free_symbols", None) != set() or not hasattr(expression, "evalf"):
        return None
    value = expression.evalf(VALUE_DIGITS)
    return value if getattr(value, "is_number", False) and getattr(value, "is_finite", False) else None


def _same_value(exact: Any, said: Quantity) -> bool:
    """A number against an expression: its value, exactly or rounded."""
    said_value = said.value / 100 if said.percent else said.value
    if (rational := _rational(exact)) is not None and said_value == rational:
        return True
    value = _value(exact)
    if value is None or not (value.is_Float or value.is_Rational):
        return False
    wanted = rational if rational is not None else Fraction(str(value))
    return not said.percent and wanted.denominator != 1 and rounds_to(wanted, said)


def _verified(wanted: Sequence[Any], given: Sequence[Any]) -> bool:
    from math_verify import verify

    return bool(verify(list(wanted), list(given), float_rounding=12, timeout_seconds=0, allow_set_relation_comp=True))


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Any, ...]:
    text = re.sub(r"\\log_\{?e\}?(?![A-Za-z])", r"\\ln", text)
    if _ANGLE_FUNCTION.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return tuple(_parser()(text))


_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")
_DEGREES = re.compile(r"(?<![\d.])\(?(\d+(?:\.\d+)?)\s*\u00b0\)?")


def load_mathematics() -> None:
    """Import math-verify, which takes a second: longer than a comparison may."""
    _parser()


@lru_cache(maxsize=1)
def _parser() -> Callable[[str], Sequence[Any]]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that we keep time ourselves
    spelled = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    latex = [
        LatexExtractionConfig(normalization_config=spelled)
    ]  # its other reader hands text to sympy's parser, which evaluates it
    return lambda text: parse(f"${text.replace('$', '')}$", latex, fallback_mode="no_fallback", parsing_timeout=0)
