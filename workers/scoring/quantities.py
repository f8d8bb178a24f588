"""A quantity as people write it: a number, its sign of percent, its unit; and whether two of them are the same.

    1,234 = 1 234 = 1234.0 = 1.234,0        12,34,567        -$3.50        14\\frac{6}{7}        1.39 \\times 10^{-10}
    forty-two = 42        1.45 million = 1,450,000        10:15 PM = 22:15        5 to 1 = 5:1
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
    r"(?P<over>[-+]?[\d.,]+)\s*/\s*(?P<under>[\d.,]+)|\\frac\{(?P<over2>[-+]?\s*[\d.,]+)\}\{(?P<under2>[-+]?[\d.,]+)\}"
)
_MIXED = re.compile(r"(?P<whole>\d+)(?:\s+(?:and\s+)?|(?=\\))(?P<rest>\d+\s*/\s*\d+|\\frac\{\d+\}\{\d+\})")
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
    if (ordinal := re.fullmatch(r"(\d+)(?:st|nd|rd|th)", text)) is not None:
        return Quantity(value=Fraction(ordinal[1]), unit="th")
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
    over, under = (found["over"] or found["over2"]).replace(" ", ""), found["under"] or found["under2"]
    one, other = _digits(over.lstrip("+-")), _digits(under.lstrip("+-"))
    if one is None or other is None or other.value == 0:
        return None
    return Quantity(value=(-1 if over.startswith("-") != under.startswith("-") else 1) * one.value / other.value)


def _mixed(text: str) -> Quantity | None:
    if (found := _MIXED.fullmatch(text)) is None or (rest := _ratio(found["rest"])) is None:
        return None
    return Quantity(value=int(found["whole"]) + rest.value)


def same_quantity(right: Quantity, said: Quantity) -> bool:
    if said.unit == "th" != right.unit:
        return False  # the 42nd is not 42
    if {right.unit, said.unit} == {"$", "¢"}:
        right, said = _in_dollars(right), _in_dollars(said)
    if right.unit and said.unit and not units_agree(right.unit, said.unit):
        return False
    if right.percent == said.percent:
        return _close(right, said, 1)
    if said.percent:  # "25%" is 0.25, and where the right answer is of 1 or more it may leave out its sign
        return _close(right, said, Fraction(1, 100)) or (abs(right.value) >= 1 and _close(right, said, 1))
    return _close(right, said, 1) or _close(right, said, 100)


def _in_dollars(amount: Quantity) -> Quantity:
    return replace(amount, value=amount.value / 100, decimals=2, unit="$") if amount.unit == "¢" else amount


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


# --- numbers in words -------------------------------------------------------------------------------------------------

_ONES = {
    **{"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9},
    **{"ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16},
    **{"seventeen": 17, "eighteen": 18, "nineteen": 19},
}
_TENS = {
    **{"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90},
}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    **{"half": 2, "third": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8},
    **{"ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000},
}
NUMBER_WORDS = frozenset((*_ONES, *_TENS, *_SCALES, *_PARTS, "hundred", "nought", "half", "halves"))
_SPOKEN = re.compile(
    r"(?P<sign>(?:minus|negative)\s+)?(?P<digits>\d[\d,]*(?:\.\d+)?)?(?P<words>[\s-]*[a-z]+(?:[\s-]+[a-z]+)*)?",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """``text`` with the number in words that begins it in digits, "" where none does.

    ``minus forty-two apples`` becomes ``-42 apples``; ``1.45 million``, ``1450000``; ``three quarters``, ``3/4``.
    """
    currency, text = (text[0], text[1:]) if text[:1] in ("$", "€", "£") else ("", text)
    if len(text) > 200 or (found := _SPOKEN.match(text)) is None:
        return ""
    words = re.findall(r"[a-z]+", (found["words"] or "").lower())
    spoken = 0
    while spoken < len(words) and (
        words[spoken].removesuffix("s") in NUMBER_WORDS or (0 < spoken < len(words) - 1 and words[spoken] == "and")
    ):
        spoken += 1
    counted, rest = words[:spoken], text[found.end("words") :] if found["words"] else text[found.end() :]
    if found["digits"]:
        if len(counted) > 1 or (counted and counted[0] not in _SCALES):
            return ""
        value = Fraction(found["digits"].replace(",", "")) * (_SCALES[counted[0]] if counted else 1)
    elif (value := _spoken(counted)) is None:
        return ""
    if not counted and not found["sign"]:
        return ""
    number = f"{'-' if found['sign'] else ''}{currency}{value}"
    return f"{number} {' '.join(words[spoken:])}{rest}".strip()


def _spoken(words: list[str]) -> Fraction | None:
    """The number that words of NUMBER_WORDS and ``and`` say; None for ``four two``."""
    if len(words) > 1 and (under := _PARTS.get({"halves": "half"}.get(words[-1], words[-1].removesuffix("s")))):
        over = _whole(words[:-1])
        return None if over is None else Fraction(over, under)
    whole = _whole(words)
    return None if whole is None else Fraction(whole)


def _whole(words: list[str]) -> int | None:
    total = group = 0
    room, scale = 1000, 10**15  # what the next word must be below
    for index, word in enumerate(words):
        if word == "and":
            if words[index - 1] not in ("hundred", *_SCALES):
                return None
        elif (value := {**_ONES, **_TENS}.get(word)) is not None and value < room:
            if value == 0 and len(words) > 1:
                return None
            group, room = group + value, 10 if value >= 20 else 0
        elif word == "hundred" and 0 < group < 100:
            group, room = group * 100, 100
        elif word in _SCALES and _SCALES[word] < scale and group:
            scale = _SCALES[word]
            total, group, room = total + group * scale, 0, 1000
        else:
            return None
    return total + group if words else None


# --- times, ratios, bases ---------------------------------------------------------------------------------------------

_CLOCK = re.compile(r"(?:at )?(?P<hour>\d{1,2}):(?P<minute>[0-5]\d)\s*(?P<half>[ap]\.? ?m\.?)?", re.IGNORECASE)
_PROPORTION = re.compile(r"(?:ratio )?(\d+(?:\.\d+)?(?:\s*(?::|\bto\b)\s*\d+(?:\.\d+)?)+)(?: ratio)?")


def same_colons(right: str, said: str) -> bool | None:
    """Equality of times of day and of ratios; None where neither is written as one with a colon."""
    if ":" not in right + said:
        return None
    times = _time(right), _time(said)
    if times[0] and times[1] and times[0] & times[1]:
        return True
    ratios = _proportion(right), _proportion(said)
    if not any((*times, *ratios)):
        return None
    if ratios[0] and len(ratios[0]) == 2 and re.search(r"[/.]|\\frac", said) and (number := read_quantity(said)):
        return ratios[0][1] != 0 and number.value == ratios[0][0] / ratios[0][1]
    return bool(ratios[0]) and len(ratios[0]) == len(ratios[1]) and _proportional(*ratios)


def _proportional(one: tuple[Fraction, ...], other: tuple[Fraction, ...]) -> bool:
    return any(one) and any(other) and all(a * sum(other) == b * sum(one) for a, b in zip(one, other, strict=True))


def _time(text: str) -> set[int]:
    """Minutes since midnight of a time of day; empty for other text."""
    if (found := _CLOCK.fullmatch(text)) is None or int(found["hour"]) > 24:
        return set()
    hour, minute = int(found["hour"]), int(found["minute"])
    if found["half"] is None:
        return {hour * 60 + minute}
    return {(hour % 12 + 12 * (found["half"][0] in "pP")) * 60 + minute} if 1 <= hour <= 12 else set()


def _proportion(text: str) -> tuple[Fraction, ...]:
    if (found := _PROPORTION.fullmatch(text)) is None:
        return ()
    parts = re.split(r"\s*(?::|to)\s*", found[1])
    if any(re.match(r"0\d", part) for part in parts):
        return ()  # 5:01 is a time
    return tuple(Fraction(part) for part in parts)


_BASED = re.compile(
    r"\(?(?P<digits>[0-9A-Fa-f]+)\)?\s*(?:_\s*\{?\s*\(?\s*|\(?base[\s-]+)(?P<base>\d+|[a-z]+)\s*\)?\s*\}?\)?",
    re.IGNORECASE,
)


def in_base(text: str) -> tuple[str, int] | None:
    """(digits, base) of ``204_5``, ``(204)_{5}``, ``204 base five``; None for anything else."""
    if (found := _BASED.fullmatch(text)) is None or not any(one.isdigit() for one in found["digits"]):
        return None
    base = int(found["base"][:4]) if found["base"].isdigit() else _whole([found["base"].lower()])
    return (found["digits"].lower(), base) if base else None


# --- units ------------------------------------------------------------------------------------------------------------

_SAME_UNITS = (
    *("mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre"),
    *("in inch inche", "ft foot feet", "yd yard", "mi mile", "s sec second", "min minute", "h hr hour", "d day"),
    *("wk week", "mo month", "yr year", "mg milligram", "g gram gramme", "kg kilogram kilo", "lb pound", "oz ounce"),
    *("t ton tonne", "l liter litre", "ml milliliter millilitre", "gal gallon", "° deg degree", "rad radian"),
    *("$ dollar usd buck", "€ euro eur", "£ gbp", "¥ yen", "₹ rs rupee", "¢ cent", "n newton", "j joule", "w watt"),
    *("v volt", "k kelvin", "pa pascal", "hz hertz", "mol mole", "ev electronvolt", "kw kilowatt", "kj kilojoule"),
    *("mph", "kph", "a ampere amp", "c celsius", "f fahrenheit", "acre", "people person", "unit", "ohm ω"),
    *("nm nanometer nanometre", "au", "μm micrometer micrometre micron", "μs microsecond", "å angstrom"),
)
"""Units that are written in several ways, the short way first."""
UNIT_OF = {name: row.split()[0] for row in _SAME_UNITS for name in row.split()}
_ATTACHED = frozenset(
    (*"$€£¥₹¢°ωåmsglh", "km", "cm", "mm", "kg", "mg", "ml", "ft", "in", "lb", "hz", "min", "\u03bcm", "\u03bcs")
)
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
        *("false", "maybe", "perhaps", "possibly", "never", "unless", "versus", "instead", "nope", "nah", "nay", "nil"),
        *("increased", "decreased", "multiplied", "raised", "doubled", "tripled", "halved", "negated", "reversed"),
        *("binary", "octal", "hexadecimal", "base", "upward", "downward", "backward", "onward", "flipped", "higher"),
        *("beyond", "lower", "larger", "smaller", "bigger", "grand", "gross", "shy"),
    )
)
"""Further words that make another number, or a doubt, of the one before them."""
_UNIT_TEXT = re.compile(
    r"[A-Za-z°ΩωμÅå€£¥₹¢$][A-Za-z°ΩωμÅå \-]*(?:\s*(?:/|\\cdot|\*)\s*[A-Za-z][A-Za-z ]*|\s*\^\s*\{?-?[1-4]\}?)*"
)


def split_unit(text: str) -> tuple[str, str]:
    """(what stands before the unit, the unit in one spelling), the unit "" where there is none."""
    text = text.strip()
    if (currency := _CURRENCY.match(text)) is not None and currency.end() < len(text):
        sign = (currency[1] or currency[2]).lower().rstrip(".")
        amount, per, time = text[currency.end() :].strip().partition("/")
        if per and re.fullmatch(r"\s*[a-z]+", time):
            return (
                amount,
                f"{UNIT_OF.get(sign, sign)}/{UNIT_OF.get(_singular(time.strip()), _singular(time.strip()))}",
            )
        return text[currency.end() :].strip(), UNIT_OF.get(sign, sign)
    if text.startswith("-") and (currency := _CURRENCY.match(text[1:].lstrip())) is not None:
        sign = (currency[1] or currency[2]).lower().rstrip(".")
        return "-" + text[1:].lstrip()[currency.end() :].strip(), UNIT_OF.get(sign, sign)
    for found in re.finditer(r"(?<=[\d}).!°\s])(?<![\\A-Za-z])(?=[A-Za-z°ΩωμÅå€£¥₹¢$])", text):
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
    words = re.findall(r"[a-zωμå]+|[°€£¥₹¢$]", lowered)
    refused = any({word, _singular(word)} & (NO_UNIT | MULTIPLES | NUMBER_WORDS) for word in words)
    if refused or re.fullmatch(r"\w{4,}(?<!e)ed", lowered):  # 7 tripled
        return ""
    if words[:1] == ["per"] or words[-1:] == ["per"]:
        return ""
    known = all(_singular(word) in UNIT_OF for word in words)
    if any(len(word) < 3 and _singular(word) not in UNIT_OF for word in words):
        return ""  # a product of variables
    if attached and words[0] not in _ATTACHED and not (known and len(words[0]) > 1) and words[0] != "°":
        return ""
    if not known and len(words[0]) == 1 and len(words) == 1:
        return ""  # a letter is a variable
    spelled = re.sub(r"\s+per\s+", "/", lowered)
    spelled = re.sub(r"[a-zωμå]+", lambda found: UNIT_OF.get(_singular(found[0]), _singular(found[0])), spelled)
    return re.sub(r"[\s{}]+", "", spelled)


def _singular(word: str) -> str:
    return word if word in UNIT_OF or len(word) < 3 else word.removesuffix("s")


def units_agree(right: str, said: str) -> bool:
    """Whether a unit that is said is the right one. A unit that one of the two leaves out is no error."""
    if not right or not said or right == said:
        return True
    known = set(UNIT_OF.values())
    if re.split(r"[/^]", right)[0] in known or re.split(r"[/^]", said)[0] in known:
        return False
    return right in said or said in right  # "right triangles", "triangles"
