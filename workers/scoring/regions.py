"""A set of real numbers as people write it: intervals, unions of them, relations, set builders.

    (3, \\infty) = ]3, \\infty[ = x > 3 = 3 < x = \\{x | x > 3\\}        (-\\infty, 2)\\cup(2, \\infty) = x \\neq 2
    -1 < x < 3 = (-1, 3) = x > -1 and x < 3        all real numbers = \\mathbb{R} = (-\\infty, \\infty)

``(0, 1)`` is read as an interval only beside text that can be nothing else, since it may be a point. Texts are in the
spelling of answers.plain; ends of intervals stay text, which the caller compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class Interval:
    """low, high: the ends, "" where it has none. low_closed, high_closed: the end belongs to it."""

    low: str
    low_closed: bool
    high: str
    high_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """sure: the text can be nothing else. name: the variable of a relation, "" for a set."""

    parts: tuple[Interval, ...]
    name: str = ""
    sure: bool = True


WHOLE = Interval("", False, "", False)
_NAME = r"(?:[A-Za-z](?:_\w)?|\\(?:theta|alpha|beta|lambda|mu))"
_REALS = r"(?:\\mathbb ?\{?R\}?|\\R(?![a-z])|\\reals|(?:all |the )?real numbers|all reals)"
_ALL_REALS = re.compile(_REALS)
_WITHOUT = re.compile(_REALS + r"\s*(?:\\setminus|\\backslash|-|except(?: for)?)\s*(?P<points>.+)")
_BUILDER = re.compile(rf"(?:\\?\{{)?\s*(?P<name>{_NAME})\s*(?:\\in\s*{_REALS})?\s*[|:]\s*(?P<body>.+?)\s*(?:\\?\}})?")
_MEMBER = re.compile(rf"(?P<name>{_NAME})\s*\\in\s*(?P<set>.+)")
_UNION = re.compile(r"\s*\\cup(?![A-Za-z])\s*|(?<=[)\]\[])\s*U\s*(?=[(\[\]])")
_OR = re.compile(r",?\s*(?:\bor\b|\\vee(?![A-Za-z]))\s*")
_BOTH = re.compile(r",?\s*(?:\band\b|\\wedge(?![A-Za-z]))\s*")
_INTERVAL = re.compile(r"(?P<opening>[(\[\]])(?P<low>[^,;]+)[,;](?P<high>[^,;]+)(?P<closing>[)\]\[])")
_SIGN = re.compile(r"\s*(<|>|\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|\\neq(?![A-Za-z]))\s*")
_ENDLESS = re.compile(r"([-+]?)\s*(?:\\infty|inf|infinity|oo)", re.IGNORECASE)


def same_region(right: str, said: str, same_end: Callable[[str, str], bool]) -> bool | None:
    """Equality of two sets of real numbers; None where neither of the texts must be one."""
    wanted, given = read_region(right), read_region(said)
    if not (wanted is not None and wanted.sure) and not (given is not None and given.sure):
        return None
    if wanted is None or given is None or len(wanted.parts) != len(given.parts):
        return False
    if wanted.name and given.name and wanted.name != given.name:
        return False
    left = list(given.parts)
    for part in wanted.parts:
        match = next((one for one in left if _same(part, one, same_end)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same(one: Interval, other: Interval, same_end: Callable[[str, str], bool]) -> bool:
    if (one.low_closed, one.high_closed) != (other.low_closed, other.high_closed):
        return False
    return all(a == b or (bool(a and b) and same_end(a, b)) for a, b in ((one.low, other.low), (one.high, other.high)))


def read_region(text: str) -> Region | None:
    """The set that ``text`` is; None for anything else."""
    text = re.sub(r"^(?:for )?all (?=\w\s*(?:[<>]|\\[lgn]eq))", "", text.strip())
    if (built := _BUILDER.fullmatch(text)) is not None:
        inner = _relations(built["body"])
        return Region(parts=inner.parts) if inner is not None and inner.name == built["name"] else None
    if (member := _MEMBER.fullmatch(text)) is not None:
        inner = _set(member["set"])
        return Region(parts=inner.parts, name=member["name"], sure=inner.sure) if inner is not None else None
    return _set(text) or _relations(text)


def _set(text: str) -> Region | None:
    if _ALL_REALS.fullmatch(text) is not None:
        return Region(parts=(WHOLE,))
    if (without := _WITHOUT.fullmatch(text)) is not None:
        points = re.sub(r"^\\?\{\s*|\s*\\?\}$", "", without["points"])
        return Region(parts=_around(points)) if "," not in points and len(points.split()) == 1 else None
    pieces = _UNION.split(text)
    if len(pieces) > MAX_PARTS:
        return None
    parts = [_interval(piece.strip()) for piece in pieces]
    if any(part is None for part in parts):
        return None
    mixed = any(re.match(r"\(.*\]$|\[.*[)\[]$|\]", piece.strip()) for piece in pieces)
    found = tuple(part for part in parts if part is not None)
    endless = any(not (part.low and part.high) for part in found)
    return Region(parts=found, sure=mixed or endless or len(found) > 1)


def _interval(text: str) -> Interval | None:
    if (found := _INTERVAL.fullmatch(text)) is None:
        return None
    low, high = found["low"].strip(), found["high"].strip()
    if _depth(low) or _depth(high):
        return None
    low_end, high_end = _ENDLESS.fullmatch(low), _ENDLESS.fullmatch(high)
    if (low_end and low_end[1] != "-") or (high_end and high_end[1] == "-"):
        return None
    return Interval("" if low_end else low, found["opening"] == "[", "" if high_end else high, found["closing"] == "]")


def _depth(text: str) -> int:
    return sum(text.count(one) for one in "([{") - sum(text.count(one) for one in ")]}")


def _around(point: str) -> tuple[Interval, ...]:
    return (Interval("", False, point, False), Interval(point, False, "", False))


def _relations(text: str) -> Region | None:
    """``x < 1 or x > 3``, ``x > 1 and x < 3``, ``1 < x < 3``, ``x \\neq 2``."""
    if _SIGN.search(text) is None or len(text) > 500:
        return None
    choices = _OR.split(text)
    bounds = [_relation(one) for one in (choices if len(choices) > 1 else _BOTH.split(text))]
    if len(bounds) > MAX_PARTS or any(one is None for one in bounds):
        return None
    found = [one for one in bounds if one is not None]
    if len({one.name for one in found}) != 1:
        return None
    if len(found) == 1 or len(choices) > 1:
        return Region(parts=tuple(part for one in found for part in one.parts), name=found[0].name)
    ends = sorted((one.parts[0] for one in found), key=lambda part: bool(part.high))
    if len(found) != 2 or any(len(one.parts) > 1 for one in found) or ends[0].high or ends[1].low:
        return None
    both = Interval(ends[0].low, ends[0].low_closed, ends[1].high, ends[1].high_closed)
    return Region(parts=(both,), name=found[0].name)


def _relation(text: str) -> Region | None:
    """One relation of a variable with one or two bounds that do not contain it."""
    pieces = _SIGN.split(text.strip())
    operands, signs = pieces[::2], pieces[1::2]
    names = [index for index, one in enumerate(operands) if re.fullmatch(_NAME, one)]
    if not signs or len(operands) > 3 or not all(operands) or "=" in text:
        return None
    place = 1 if len(operands) == 3 else names[0] if len(names) == 1 else -1
    if place not in names or any(operands[place] in one for index, one in enumerate(operands) if index != place):
        return None
    name = operands[place]
    if signs == ["\\neq"]:
        return Region(parts=_around(operands[1 - place]), name=name)
    low = high = ""
    low_closed = high_closed = False
    for index, sign in enumerate(signs):
        before = index < place  # the bound stands before the variable
        bound, closed = operands[index if before else index + 1], "eq" in sign
        endless = _ENDLESS.fullmatch(bound)
        bound, closed = ("", False) if endless else (bound, closed)
        if sign == "\\neq":
            return None
        if before == (sign in ("<", "\\leq")):
            if low:
                return None
            low, low_closed = bound, closed
        else:
            if high:
                return None
            high, high_closed = bound, closed
    return Region(parts=(Interval(low, low_closed, high, high_closed),), name=name)
