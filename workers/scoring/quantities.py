"""A quantity as people write it: a number, its sign of percent, its unit; and whether two of them are the same.

    1,234 = 1 234 = 1234.0 = 1.234,0        12,34,567        -$3.50        14\\frac{6}{7}        1.39 \\times 10^{-10}
    25% = 0.25        9 min = 9 minutes != 9 hours        0.\\overline{3} = 1/3 = 0.3333

A number is read where it can mean one thing only: ``1,5`` is a list, and ``1.234`` a decimal fraction. Texts are in the
spelling of answers.plain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from workers.scoring.answers import STOPS

MAX_EXPONENT = 5000
"""Largest power of ten of a number in scientific notation."""
ROUNDED_DIGITS = 4
"""Significant digits from which a decimal fraction may stand for a fraction or a root that it is rounded from."""
NOISE = Fraction(1, 10**13)
"""Relative error of a decimal fraction that was computed with floating point."""
COMPUTED_DIGITS = 9
"""Significant digits from which a right answer is a rounded one: what rounds to it is equal to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number as it is written. decimals: digits behind the point, None for a whole number or a fraction; digits: its
    significant ones.  cut: it ends with an ellipsis.  percent, unit: what stands beside it.
    """

    value: Fraction
    decimals: int | None = None
    digits: int = 0
    cut: bool = False
    percent: bool = False
    unit: str = ""


_SEPARATED = re.compile(
    r"(?P<whole>[1-9]\d{0,2}(?:(?P<mark>[, '])\d{3})(?:(?P=mark)\d{3})*)(?P<part>\.\d*)?"  # 1,234,567.8
    r"|(?P<dotted>[1-9]\d{0,2}(?:\.\d{3})+),(?P<comma>\d+)"  # 1.234,5
    r"|(?P<spaced>[1-9]\d{0,2}(?:[ ']\d{3})+),(?P<comma2>\d+)"  # 1 234,5
    r"|(?P<dots>[1-9]\d{0,2}(?:\.\d{3}){2,})"  # 1.234.567
    r"|(?P<lakh>[1-9]\d?(?:,\d{2})+,\d{3})"  # 12,34,567
)
_DECIMAL = re.compile(r"(?P<whole>\d*)(?:\.(?P<part>\d*))?")
_REPEATING = re.compile(r"(?P<whole>\d*)\.(?P<part>\d*)\\overline\{(?P<again>\d+)\}")
_SCIENTIFIC = re.compile(
    r"(?:(?P<mantissa>[-+]?[\d.,]+)\s*(?:[eE]|(?:\\times|\\cdot|\*|x)\s*10\s*\^)|(?P<power>10\s*\^))"
    r"\s*[{(]?\s*(?P<exponent>[-+]?\d+)\s*[})]?"
)
_RATIO = re.compile(
    r"(?P<over>[-+]?[\d.,]+)\s*/\s*(?P<under>[\d.,]+)|\\frac\{(?P<over2>[-+]?\s*[\d.,]+)\}\{(?P<under2>[\d.,]+)\}"
)
_MIXED = re.compile(r"(?P<whole>\d+)(?:\s+|(?=\\))(?P<rest>\d+\s*/\s*\d+|\\frac\{\d+\}\{\d+\})")
_ELLIPSIS = re.compile(r"\s*(?:\.{3}|\u2026)$")
_CURRENCY = re.compile(r"(?:US|USD|EUR|GBP|A|C)?\s*([$€£¥₹])\s*|(USD|EUR|GBP|Rs\.?)\s+", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(?:%|percent|per cent|pct)\.?$", re.IGNORECASE)
MAX_DIGITS = 1000
"""Digits of a number that is read as one."""


def read_quantity(text: str) -> Quantity | None:
    """The number that ``text`` is, with its unit; None for anything else."""
    text = text.strip()
    if not text or len(text) > MAX_DIGITS or not any(one.isdigit() for one in text):
        return None
    if (found := _PERCENT.search(text)) is not None and (bare := _bare_number(text[: found.start()])) is not None:
        return replace(bare, percent=True)
    if (bare := _bare_number(text)) is not None:
        return bare
    body, unit = split_unit(text)
    if not unit or (bare := _bare_number(body)) is None:
        return None
    return replace(bare, unit=unit)


def _bare_number(text: str) -> Quantity | None:
    """A number without a unit: signs before it, in any of the ways that people write it."""
    text = text.strip()
    sign = 1
    if text[:1] in ("+", "-"):
        sign, text = (-1 if text[0] == "-" else 1), text[1:].strip()
    found = _scientific(text) or _mixed(text) or _ratio(text) or _digits(text)
    if found is None:
        return None
    return replace(found, value=sign * found.value)


def _digits(text: str) -> Quantity | None:
    cut = _ELLIPSIS.search(text)
    text = text[: cut.start()] if cut else text
    if (found := _SEPARATED.fullmatch(text)) is not None:
        whole = found["whole"] or found["dotted"] or found["spaced"] or found["dots"] or found["lakh"]
        part = (found["part"] or "").removeprefix(".") or found["comma"] or found["comma2"] or ""
        whole = re.sub(r"\D", "", whole)
    elif (found := _REPEATING.fullmatch(text)) is not None:
        whole, part, again = found["whole"] or "0", found["part"], found["again"]
        shift = 10 ** len(part)
        repeated = Fraction(int(again), (10 ** len(again) - 1) * shift)
        return Quantity(value=Fraction(int((whole + part) or "0"), shift) + repeated)
    elif (found := _DECIMAL.fullmatch(text)) is not None and (found["whole"] or found["part"]):
        whole, part = found["whole"] or "0", found["part"] or ""
    else:
        return None
    digits = len((whole + part).lstrip("0"))
    value = Fraction(int(whole + part), 10 ** len(part))
    return Quantity(value=value, decimals=len(part) or None, digits=digits, cut=bool(cut))


def _scientific(text: str) -> Quantity | None:
    if (found := _SCIENTIFIC.fullmatch(text)) is None or abs(int(found["exponent"][:6])) > MAX_EXPONENT:
        return None
    mantissa = _digits(found["mantissa"].lstrip("+")) if found["mantissa"] else Quantity(value=Fraction(1))
    if mantissa is None:
        return None
    exponent = int(found["exponent"])
    return Quantity(value=mantissa.value * Fraction(10) ** exponent)


def _ratio(text: str) -> Quantity | None:
    if (found := _RATIO.fullmatch(text)) is None:
        return None
    over = (found["over"] or found["over2"]).replace(" ", "")
    one, other = _digits(over.lstrip("+-")), _digits(found["under"] or found["under2"])
    if one is None or other is None or other.value == 0:
        return None
    return Quantity(value=(-1 if over.startswith("-") else 1) * one.value / other.value)


def _mixed(text: str) -> Quantity | None:
    if (found := _MIXED.fullmatch(text)) is None or (rest := _ratio(found["rest"])) is None:
        return None
    return Quantity(value=int(found["whole"]) + rest.value)


def same_quantity(right: Quantity, said: Quantity) -> bool:
    if right.unit and said.unit and not units_agree(right.unit, said.unit):
        return False
    if right.percent == said.percent:
        return _close(right, said, 1)
    if said.percent:  # "25%" is 0.25, and where the right answer is of 1 or more it may leave out its sign
        return _close(right, said, Fraction(1, 100)) or (abs(right.value) >= 1 and _close(right, said, 1))
    return _close(right, said, 1) or _close(right, said, 100)


def _close(right: Quantity, said: Quantity, factor: Fraction | int) -> bool:
    """Whether ``factor`` times ``said`` is the number: exactly, but for the last digits of decimal fractions."""
    value, wanted = said.value * factor, right.value
    if value == wanted:
        return True
    if wanted.denominator == 1 or said.decimals is None:
        return False
    if right.decimals is not None:
        rounding = Fraction(1, 2 * 10**right.decimals) if right.digits >= COMPUTED_DIGITS else 0
        return abs(value - wanted) <= max(NOISE * abs(wanted), rounding)
    return rounds_to(wanted / factor, said)


def rounds_to(exact: Fraction, said: Quantity) -> bool:
    """Whether ``said`` is ``exact`` rounded to enough digits; or cut off, where an ellipsis says so."""
    if said.decimals is None or said.digits < ROUNDED_DIGITS - said.cut:
        return False
    unit = Fraction(1, 10**said.decimals)
    difference = abs(said.value - exact)
    return difference <= unit / 2 or (said.cut and difference < unit)


# --- units ------------------------------------------------------------------------------------------------------------

_SAME_UNITS = (
    *("mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre"),
    *("in inch inche", "ft foot feet", "yd yard", "mi mile", "s sec second", "min minute", "h hr hour", "d day"),
    *("wk week", "mo month", "yr year", "mg milligram", "g gram gramme", "kg kilogram kilo", "lb pound", "oz ounce"),
    *("t ton tonne", "l liter litre", "ml milliliter millilitre", "gal gallon", "° deg degree", "rad radian"),
    *("$ dollar usd buck", "€ euro eur", "£ gbp", "¥ yen", "₹ rs rupee", "¢ cent", "n newton", "j joule", "w watt"),
    *("v volt", "k kelvin", "pa pascal", "hz hertz", "mol mole", "ev electronvolt", "kw kilowatt", "kj kilojoule"),
    *("mph", "kph", "a ampere amp", "c celsius", "f fahrenheit", "acre", "people person", "unit", "ohm ω"),
)
"""Units that are written in several ways, the short way first."""
_UNIT_OF = {name: row.split()[0] for row in _SAME_UNITS for name in row.split()}
_ATTACHED = frozenset(("m", "s", "g", "l", "h", "km", "cm", "mm", "kg", "mg", "ml", "ft", "in", "lb", "hz", "°", "min"))
"""Units that stand behind a number without a space."""
NO_UNIT = frozenset(
    (
        *("and", "or", "either", "neither", "nor", "not", "no", "but", "than", "more", "less", "fewer", "greater"),
        *("least", "most", "above", "below", "under", "over", "between", "to", "from", "about", "minus", "plus"),
        *("times", "divided", "by", "negative", "hundred", "thousand", "million", "billion", "trillion", "dozen"),
        *("half", "third", "quarter", "twice", "double", "square", "root", "squared", "cubed", "factorial", "mod"),
        *("pi", "is", "are", "was", "equals", "equal", "where", "when", "if", "for", "because", "since", "except"),
        *("without",),
    )
)
"""Words behind a number that say another number, or another answer."""
MULTIPLES = frozenset(
    (
        *("lakh", "crore", "bn", "mil", "halves", "fifths", "tenths", "hundredths", "millionths", "wrong", "incorrect"),
        *("false", "maybe", "perhaps", "possibly", "never", "unless", "versus", "instead", "one", "two", "three"),
        *("four", "five", "six", "seven", "eight", "nine", "ten", "point", "increased", "decreased", "multiplied"),
        *("raised", "doubled", "halved", "negated", "reversed", "binary", "base", "forty", "fifty", "thirty", "twenty"),
    )
)
"""Further words that make another number, or a doubt, of the one before them."""
_UNIT_TEXT = re.compile(
    r"[A-Za-z°Ωω€£¥₹¢$][A-Za-z°Ωω \-]*(?:\s*(?:/|\\cdot|\*)\s*[A-Za-z][A-Za-z ]*|\s*\^\s*\{?-?[1-4]\}?)*"
)


def split_unit(text: str) -> tuple[str, str]:
    """(what stands before the unit, the unit in one spelling), the unit "" where there is none."""
    text = text.strip()
    if (currency := _CURRENCY.match(text)) is not None and currency.end() < len(text):
        sign = (currency[1] or currency[2]).lower().rstrip(".")
        return text[currency.end() :].strip(), _UNIT_OF.get(sign, sign)
    if text.startswith("-") and (currency := _CURRENCY.match(text[1:].lstrip())) is not None:
        sign = (currency[1] or currency[2]).lower().rstrip(".")
        return "-" + text[1:].lstrip()[currency.end() :].strip(), _UNIT_OF.get(sign, sign)
    for found in re.finditer(r"(?<=[\d}).!°\s])(?<![\\A-Za-z])(?=[A-Za-z°Ωω€£¥₹¢])", text):
        body, rest = text[: found.start()], text[found.start() :]
        if not any(one.isdigit() for one in body) or text.count("{", 0, len(body)) != text.count("}", 0, len(body)):
            continue
        if body.rstrip().endswith(("\\cdot", "\\times", "+", "-", "/", "*", "^", "=", ",", "<", ">")):
            continue
        unit = _unit(rest.rstrip(STOPS), attached=not body[-1:].isspace())
        if unit:
            return body.strip(), unit
    return text, ""


def _unit(text: str, *, attached: bool) -> str:
    """A unit in one spelling, "" for text that is none. attached: no space is before it, as in ``5cm``."""
    if _UNIT_TEXT.fullmatch(text) is None:
        return ""
    lowered = text.lower()
    for long, short in (("square", 2), ("sq", 2), ("cubic", 3), ("cu", 3)):
        if (found := re.match(rf"{long}\.?\s+(.+)", lowered)) is not None:
            lowered = f"{found[1]}^{short}"
    words = re.findall(r"[a-zω]+|[°€£¥₹¢$]", lowered)
    refused = any(word in NO_UNIT or _singular(word) in NO_UNIT or word in MULTIPLES for word in words)
    if refused or words[:1] == ["per"] or words[-1:] == ["per"]:
        return ""
    known = all(_singular(word) in _UNIT_OF for word in words)
    if any(len(word) < 3 and _singular(word) not in _UNIT_OF for word in words):
        return ""  # a product of variables
    if attached and words[0] not in _ATTACHED and not (known and len(words[0]) > 1) and words[0] != "°":
        return ""
    if not known and len(words[0]) == 1 and len(words) == 1:
        return ""  # a letter is a variable
    spelled = re.sub(r"\s+per\s+", "/", lowered)
    spelled = re.sub(r"[a-zω]+", lambda found: _UNIT_OF.get(_singular(found[0]), _singular(found[0])), spelled)
    return re.sub(r"[\s{}]+", "", spelled)


def _singular(word: str) -> str:
    return word if word in _UNIT_OF or len(word) < 3 else word.removesuffix("s")


def units_agree(right: str, said: str) -> bool:
    """Whether a unit that is said is the right one. A unit that one of the two leaves out is no error."""
    if not right or not said or right == said:
        return True
    known = set(_UNIT_OF.values())
    if re.split(r"[/^]", right)[0] in known or re.split(r"[/^]", said)[0] in known:
        return False
    return right in said or said in right  # "right triangles", "triangles"
