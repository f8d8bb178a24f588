"""Whether what a response answers is the right answer: one comparison for text, numbers, lists and mathematics.

    right, said ─► plain ─► equal as text
                      └───► numbers   exactly, with units and percent (quantities.py)
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
    Quantity,
    read_quantity,
    rounds_to,
    same_quantity,
    split_unit,
    units_agree,
)

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
    wanted = _APPROXIMATELY.sub("", plain(right))
    if not _UNIT_COMMANDS.search(right):
        wanted = _VARIABLE.sub(r"\1*\2", wanted)
    return any(_equal(wanted, candidate) for candidate in _candidates(plain(said)))


_UNIT_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|textrm|rm)(?![A-Za-z])")
_VARIABLE = re.compile(r"^(-?(?:[\d.,]+|\\frac\{\d+\}\{\d+\})) ?([A-Za-z](?:\^\d)?)$")
"""One letter behind a right answer's number: a variable, since units of right answers are set as text."""


def _is_choice(right: str, said: str) -> bool:
    """Whether ``said`` chooses the letter ``right`` among answers: ``(B) 42``, ``option B``."""
    if re.fullmatch(r"[A-J]", right) is None or len(said) > MAX_CHARACTERS:
        return False
    text = plain(said)
    found = re.match(r"(?:(?:option|choice|answer)\s+)?\(?([A-Ja-j])(?:[).:]+(?P<rest>\s.*|$)|$)", text, re.IGNORECASE)
    others = re.search(r"\b[A-J]\b", found["rest"] or "") if found else None
    return found is not None and found[1].upper() == right and not others and not _HEDGES.search(found["rest"] or "")


def reads_as_number(text: str) -> bool:
    """Whether an unwrapped answer is one number, with or without a unit, a name or a sentence around it."""
    if len(text) > MAX_CHARACTERS:
        return False
    for candidate in _candidates(plain(text)):
        sides = _sides(candidate)
        bare = sides[1] if sides is not None and _names(sides[0]) else candidate
        within = _brackets(bare)[1]
        if read_quantity(bare) is not None or (within != bare and read_quantity(within) is not None):
            return True
    return False


def _equal(right: str, said: str) -> bool:
    """Both in the spelling of ``plain``."""
    if _letters(right) == _letters(said):
        return not _is_not_finite(said)
    one, other = read_quantity(right), read_quantity(said)
    if one is not None and other is not None:
        return same_quantity(one, other)
    if _plus_minus(right) or _plus_minus(said):
        right, said = _plus_minus(right) or right, _plus_minus(said) or said
    if (equal := _same_sides(right, said)) is not None:
        return equal
    wanted, given = _items(right), _items(said)
    if wanted is not None and given is not None:
        return _same_items(wanted, given)
    for many, single in ((wanted, said), (given, right)):
        if many is not None and len(many.items) == 1:
            return _equal(many.items[0], single) if many is wanted else _equal(single, many.items[0])
    if wanted is not None or given is not None:
        return _compares_relations(right, said) and _same_mathematics(right, said)
    body, unit = split_unit(right)
    said_body, said_unit = split_unit(said)
    if (unit or said_unit) and (body, said_body) != (right, said):
        return units_agree(unit, said_unit) and _equal(body, said_body)
    return "\\infty" not in right + said and _same_mathematics(right, said)


_CAPITALS = re.compile(r"\\(Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z])")


def _letters(text: str) -> str:
    """``text`` without spaces, in lower case but for Greek capitals: what is equal as text.

    It stays as it is where it has a letter in both cases (``R-r``).
    """
    text = _CAPITALS.sub(r"\\capital-\1", re.sub(r"\s+", "", text))
    letters = set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", text))
    return text if any(one.swapcase() in letters for one in letters) else text.casefold()


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
    r"\b(?:or|either|neither|nor|not|no|never|cannot|between|maybe|perhaps|possibly|if|unless|except|versus|vs|incorrect"
    r"|wrong|false|instead|rather|minus|negative|plus|times|more|less|fewer|greater|least|most|above|below|under|over)\b"
    r"|n't\b|n\u2019t\b",
    re.IGNORECASE,
)
"""Words that make one number of a sentence something else than its answer."""
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


def _candidates(said: str) -> Iterator[str]:
    """What an answer may be of a text: all of it, what its sentence says, its only number. Each of them is one answer:
    a list of guesses stays a list of guesses.
    """
    text = _APPROXIMATELY.sub("", said)
    yield text
    if text != said:
        yield said
    exact, about, rounded = text.partition("\\approx")
    if about and read_quantity(rounded) is not None:
        yield exact.strip()
    for pattern in (_BEFORE, _LEADING):
        stripped = text
        while (found := pattern.match(stripped)) is not None and not _HEDGES.search(found.groupdict().get("lead", "")):
            stripped = _APPROXIMATELY.sub("", unwrap(found["rest"]))
        if stripped != text:
            yield stripped
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
    if not _changes(before) and not _changes(after, allowed=_BEHIND):
        yield number


def _changes(words: str, allowed: frozenset[str] = frozenset()) -> bool:
    """Whether the words beside a number make another answer of it."""
    found = set(re.findall(r"[a-z]+", words.lower())) - allowed
    found |= {word.removesuffix("s") for word in found}
    counted = any(word.endswith(("ths", "teen", "ty")) or "-" in word for word in words.split())
    hedged = any(one[0].lower() not in allowed for one in _HEDGES.finditer(words))
    return counted or hedged or bool(found & (NO_UNIT - _IN_SENTENCES | _CHANGES | MULTIPLES))


_SPELLED = re.compile(r"\s*\([a-z -]+\)$")
"""Words in brackets behind an answer: its unit, or itself in words."""
_BEHIND = frozenset(("to", "than", "from", "by", "over", "under", "least", "most"))
"""Words that change the number behind them, and not the one before."""
_IN_SENTENCES = frozenset(
    ("and", "about", "is", "are", "was", "equals", "equal", "where", "when", "for", "because", "since")
)
"""Words of NO_UNIT that change no number of a sentence."""
_CHANGES = frozenset(
    (
        *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "first"),
        *(
            "second",
            "point",
            "triple",
            "thrice",
            "cube",
            "inverse",
            "opposite",
            "reciprocal",
            "successor",
            "log",
            "logs",
        ),
        *("predecessor", "multiple", "divisible", "congruent", "reverse", "beyond", "within", "exceeds", "exceeding"),
        *("unlike", "excluding", "hardly", "nearly", "almost", "anything", "different", "differs", "far", "close"),
        *("other", "isnt", "arent", "dont", "cant", "wont", "add", "added", "subtract", "multiplied", "raised", "up"),
        *("increased", "decreased", "before", "after", "binary", "base", "doubled", "halved", "negated", "reversed"),
        *("doubt", "untrue", "mistake", "lie", "unequal", "halves", "thirds", "quarters", "fifths", "tenths"),
    )
)
"""Further words that make another number of the one in their sentence, or deny it."""


# --- equations, plus and minus ----------------------------------------------------------------------------------------

_EQUATION = re.compile(r"^(?P<left>[^=<>]*[^=<>\s!:])\s*=\s*(?P<right>[^=<>]+)$")
_MEMBER = re.compile(r"^(?P<left>[A-Za-z](?:_\w)?)\s*\\in\s*(?P<right>.+)$")


def _same_sides(right: str, said: str) -> bool | None:
    """Equality where one of the two, or both, are of the form ``name = value``; None where neither is."""
    wanted, given = _sides(right), _sides(said)
    if wanted is None and given is None:
        return None
    if wanted is not None and given is not None:
        if _letters(wanted[0]) == _letters(given[0]):
            return _equal(wanted[1], given[1])
        return _same_mathematics(right, said)
    if given is not None:
        return _names(given[0]) and _equal(right, given[1])
    assert wanted is not None
    return _is_name(wanted[0]) and _equal(wanted[1], said)


def _sides(text: str) -> tuple[str, str] | None:
    """(left, right) of an equation or a membership that is no list of several; of a chain, its first and last."""
    if _top_level(text, ",;") or len(_split(text, _AND)) > 1:
        return None
    parts = text.split("=")
    if len(parts) > 2 and not any(one in text for one in "<>"):
        text = f"{parts[0]}={parts[-1]}"
    found = _EQUATION.match(text) or _MEMBER.match(text)
    return (found["left"].strip(), found["right"].strip()) if found else None


_NAME = re.compile(r"(?:\\(?!sqrt|frac)[A-Za-z]+\s*)?(?:[A-Za-z][A-Za-z' ]*)?(?:_\{?\w+\}?)?(?:\([\w, \\]+\))?")


def _is_name(text: str) -> bool:
    """Whether the left side of an equation only names its right side: ``x``, ``f(2)``, ``\\angle ABC``, words."""
    return bool(text) and _NAME.fullmatch(text) is not None and not _HEDGES.search(text)


def _names(text: str) -> bool:
    """Likewise for sums and products of names (``m + n``), and for a computation with numbers alone (``6 * 7``)."""
    terms = [term.strip() for term in re.split(r"[+*/-]|\\cdot|\\times", text)]
    if all(_is_name(term) for term in terms):
        return True
    return len(terms) > 1 and not re.search(r"[A-Za-z\\^]", re.sub(r"\\(?:cdot|times|frac)", "", text))


def _plus_minus(text: str) -> str:
    """``a \\pm b`` as the list of both, "" for text without a single one."""
    if text.count("\\pm") != 1 or _top_level(text, ",;"):
        return ""
    return f"{text.replace(chr(92) + 'pm', '+')}, {text.replace(chr(92) + 'pm', '-')}"


# --- lists ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    """opening, closing: brackets around all of it, "" without.  union: its items are parts of one set."""

    items: tuple[str, ...]
    opening: str = ""
    closing: str = ""
    union: bool = False

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", "\\{", "{") and not self.union

    @property
    def is_interval(self) -> bool:
        """Whether it can only be an interval: half open, or without an end."""
        mixed = {self.opening, self.closing} in ({"(", "]"}, {"[", ")"})
        endless = self.opening in ("(", "[") and any("\\infty" in item for item in self.items)
        return len(self.items) == 2 and (mixed or endless)


_OPENINGS = {"\\{": "\\}", "\\langle": "\\rangle", "(": ")", "[": "]", "{": "}"}
_PIECES = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_AND = re.compile(r",?\s+(?:and|or|\\text\{\s*(?:and|or)\s*\}|\\quad|\\wedge|\\vee)\s+")


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
    return _Items(items=tuple(items), opening=opening, closing=closing)


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
            return pieces[0], "".join(pieces[1:-1]).strip(), pieces[-1]
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
    if right.is_interval or said.is_interval:
        if (right.opening, right.closing) != (said.opening, said.closing):
            return False
    elif right.opening and said.opening and right.opening != said.opening and len(right.items) == 2:
        return False  # (0, 1), [0, 1] and {0, 1} are a point or two intervals and a set
    if right.ordered:
        return all(_equal(one, other) for one, other in zip(right.items, said.items, strict=True))
    left = list(said.items)
    for item in right.items:
        match = next((one for one in left if _equal(item, one)), None)
        if match is None:
            return False
        left.remove(match)
    return True


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
    if set(_CAPITALS.findall(right)) != set(_CAPITALS.findall(said)):
        return False  # math-verify reads long names in lower case
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
    return tuple(_parser()(text))


def load_mathematics() -> None:
    """Import math-verify, which takes a second: longer than a comparison may."""
    _parser()


@lru_cache(maxsize=1)
def _parser() -> Callable[[str], Sequence[Any]]:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that we keep time ourselves
    latex = [LatexExtractionConfig()]  # its other reader hands text to sympy's parser, which evaluates it
    return lambda text: parse(f"${text.replace('$', '')}$", latex, fallback_mode="no_fallback", parsing_timeout=0)
