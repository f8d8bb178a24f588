"""The answer in a response: where it stands, and the text that is left when its wrappers are gone.

    response ─► find_answer: what follows the marker; else the last box, or a response of one line
                   └─► unwrap: boxes, dollars, emphasis, tags, quotes, a full stop, until none is left
                          └─► plain: one spelling for signs, spaces, fractions and styles

Owns: extraction and spelling. Never: compares two answers (equality.py). Invariant: the time of an extraction is linear
in the length of the response.
"""

from __future__ import annotations

import html
import re
import unicodedata

MAX_ROUNDS = 32
"""Wrappers within wrappers that are taken off an answer; real answers have at most five."""

DECORATION = "*` \u2713\u2714\u2705\u25a0\u25a1\u220e"
"""Emphasis, check marks and marks of the end of a proof, at either end of an answer."""
QUOTES = "'\"\u2018\u2019\u201c\u201d\u00ab\u00bb"
STOPS = ".;,\u3002\uff0e"
"""Punctuation that ends a sentence or a clause."""

PAIRS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("```", "```"), ("**", "**"), ("__", "__")),
    *(("`", "`"), ("<", ">"), ("'", "'"), ('"', '"'), ("\u2018", "\u2019"), ("\u201c", "\u201d"), ("\u00ab", "\u00bb")),
)
"""Wrappers with an opening and a closing mark, longer marks first."""
STYLES = (
    *("boxed", "fbox", "text", "textbf", "textit", "textrm", "textsf", "texttt", "emph", "mathrm", "mathbf", "mathit"),
    *("mathsf", "mathtt", "boldsymbol", "bm", "underline", "mbox", "hbox", "operatorname"),
)
"""LaTeX commands whose argument is shown as it is, in another font or frame."""
_STYLED = re.compile(r"\\(?:" + "|".join(STYLES) + r")\*?\s*\{")
_COLOURED = re.compile(r"\\(?:text)?color\s*\{\s*\w+\s*\}\s*")
_SIZES = re.compile(
    r"\\(?:displaystyle|textstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm|quad|qquad)(?![A-Za-z])"
)
_TAGGED = re.compile(
    r"<(answer|ans|final|final[_-]?answer|result|solution|output|response|value|number|math|b|i|u|em|strong|span|p|code"
    r"|div|mark|pre)>(.*)</\1>",
    re.DOTALL | re.IGNORECASE,
)
"""Tags that change nothing of what they enclose; ``<not>`` and ``<wrong>`` do."""
_EMPHASIS = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*]+)(?<=\S)\*\*(?![\w*])")
_PROOF_END = re.compile(r"\s*\$?\\(?:(?:black)?square|qed)\$?$")
_BLANKS_BEFORE = re.compile(r"^(?:\s|~|\\[,;:!]|\\ )+")
_BLANKS_BEHIND = re.compile(r"(?:\s|~|\\[,;:!]|\\(?= |$))+$")
"""Spaces of text and of LaTeX at either end."""
_LANGUAGE = re.compile(r"```[a-z]*\n")


def find_answer(response: str, marker: str, *, marker_asked: bool, lines: int = 1) -> str | None:
    """The answer that ``response`` gives, unwrapped; None where it gives none.

    Args:   marker: text before an answer, in any case; the last one counts.
            lines: lines of the right answer, as many of which the answer may have.
            marker_asked: the prompt asks for the marker, so that an answer without it is none. Elsewhere the last
            ``\\boxed{}`` counts, then a response of a single line.
    """
    found = extract_answer(response, marker, lines=lines)
    if found is not None or marker_asked:
        return found
    if (boxed := last_box(response)) is not None:
        return unwrap(boxed) or None
    text = response.strip()
    return (unwrap(text) or None) if text and len(text.splitlines()) <= lines else None


def extract_answer(response: str, marker: str, *, lines: int = 1) -> str | None:
    """The text behind the last ``marker``, unwrapped; None where there is no marker or nothing behind it.

    The text ends with its line, or with the wrapper that it opens. The next line counts where the marker's is empty.
    """
    places = [found.span() for found in re.finditer(_marker_pattern(marker), response, re.IGNORECASE)]
    if not places:
        return None
    begin, end = places[-1]
    rest = _BEHIND_MARKER.sub("", response[end:], count=1)
    if rest.startswith("}") and "{" in response[:begin][-20:]:  # the marker has a style of its own
        rest = rest[1:].lstrip("\\ ")
    line = "\n".join(rest.split("\n", lines)[:lines])
    if response[:begin][-1:] in tuple(QUOTES):  # the asked form is quoted as a whole
        line = line.rstrip().rstrip(STOPS).rstrip(QUOTES)
    for opening, closing in (*PAIRS[:5], ("\\boxed{", "}"), ("\\begin{", "\\end{")):
        if line.startswith(opening) and closing not in line[len(opening) :]:
            inside, closed, behind = rest[len(opening) :].partition(closing)
            if closed:
                line = opening + inside + closed + behind.partition("\n")[0]
            break
    surplus = line.count("}") - line.count("{")
    if surplus > 0 and line.rstrip().endswith("}" * surplus):  # of a wrapper that the marker is within
        line = line.rstrip()[:-surplus]
    answer = unwrap(line)
    if (boxed := last_box(answer)) is not None:
        answer = unwrap(boxed)
    return (answer if lines > 1 else " ".join(answer.split())) or None


_BEHIND_MARKER = re.compile(r"^[*_]*(?:[ \t:=\r\n](?<!=(?=>))|\*+(?=\s)|[=-]+>)*")
"""Emphasis of the marker, spaces and arrows between it and the answer."""


def _marker_pattern(marker: str) -> str:
    """``marker``, whose colon may be a wide one and may stand behind emphasis: ``**Answer**:``."""
    denied = r"(?<!\bwrong )(?<!\bincorrect )(?<!\bfalse )(?<!\bnot the )(?<!\bnot an )"
    if not marker.endswith(":"):
        return denied + re.escape(marker)
    return denied + re.escape(marker[:-1]) + r"[*_]{0,3} ?[:\uff1a]"


_BOX = re.compile(r"\\f?boxed\s*\{")
_TOUCHES_BEFORE = re.compile(r"(?:(?<![\w)}])-|[\d.,]*\d)\Z")
_TOUCHES_BEHIND = re.compile(r"[.,]?\d[\d.,]*|\^\S+|/\d+")


def last_box(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` that is in no other one; None without one whose braces are balanced.

    Digits, a minus and a power that touch the box belong to the answer: ``\\boxed{42}43`` is ``42 43``.
    """
    content, start, position = None, 0, 0
    while (found := _BOX.search(text, position)) is not None:
        end = closing_brace(text, found.end() - 1)
        if end is None:
            break
        content, start, position = text[found.end() : end], found.start(), end + 1
    if content is None:
        return None
    before = _TOUCHES_BEFORE.search(text[max(0, start - 40) : start])
    behind = _TOUCHES_BEHIND.match(text, position)
    if before is None and behind is None:
        return content
    left, right = before[0] if before else "", behind[0].rstrip(".,") if behind else ""
    return f"{left}{' ' if left[-1:].isdigit() else ''}{content}{' ' if right[:1].isdigit() else ''}{right}"


def closing_brace(text: str, opened: int) -> int | None:
    """The index of the brace that closes the one at ``opened``; None where it is never closed."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", text[opened:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return opened + found.start()
    return None


def unwrap(text: str) -> str:
    """``text`` without the wrappers around all of it, and without a full stop behind it."""
    for _ in range(MAX_ROUNDS):
        before = text
        text = _unwrap_once(text)
        if text == before:
            break
    return text


def _unwrap_once(text: str) -> str:
    text = _BLANKS_BEFORE.sub("", text.strip())
    text = text[:-200] + _BLANKS_BEHIND.sub("", text[-200:])  # of all of a long text, it takes the square of its length
    text = _EMPHASIS.sub(r"\1", text) if "**" in text else text
    text = text[:-20] + _PROOF_END.sub("", text[-20:])
    if fenced := _LANGUAGE.match(text):
        text = "```" + text[fenced.end() :]
    for opening, closing in PAIRS:
        inner = text[len(opening) : len(text) - len(closing)]
        if len(text) >= len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            if opening not in inner and closing not in inner:
                return inner
            if opening != "<":
                break  # several wrapped pieces: none of them wraps all
    if tagged := _TAGGED.fullmatch(text):
        return tagged[2]
    text = _COLOURED.sub("", text)
    if (styled := _STYLED.match(text)) and closing_brace(text, styled.end() - 1) == len(text) - 1:
        return text[styled.end() : -1]
    if text.startswith("{") and not any(one in text for one in ",:\"'") and closing_brace(text, 0) == len(text) - 1:
        return text[1:-1]
    stripped = text.strip(DECORATION)
    stripped = stripped if stripped.endswith("...") else stripped.rstrip(STOPS).removesuffix("\\\\")
    stripped = stripped.strip(DECORATION)
    return stripped if stripped.count("$") % 2 == text.count("$") % 2 else text


# --- one spelling -----------------------------------------------------------------------------------------------------

_SIGNS = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u2002\u2003\u2005\u2006\u2008", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", ""),
    **{"\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u00f7": "/", "\u2044": "/", "\u2215": "/"},
    **{"\u2264": "\\leq ", "\u2265": "\\geq ", "\u2260": "\\neq ", "\u221e": "\\infty ", "\u222a": "\\cup "},
    **{"\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u00b1": "\\pm ", "\u03c0": "\\pi "},
    **{"\u2245": "\\cong ", "\u2236": ":", "\u211d": "\\mathbb{R}", "\u27e8": "\\langle ", "\u27e9": "\\rangle "},
    **{"\u2248": "\\approx ", "\u221a": "\\sqrt ", "\u2220": "\\angle ", "\u2211": "\\sum ", "\u03b8": "\\theta "},
    **{"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2032": "'", "\u00ba": "\u00b0"},
}
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_RADICAL = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+(?:\\.\\d+)?|[A-Za-z]))")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SYNONYMS = {
    **{"le": "leq", "ge": "geq", "ne": "neq", "leqslant": "leq", "geqslant": "geq", "lt": "<", "gt": ">"},
    **{
        **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "xfrac"), "frac"),
        **dict.fromkeys(("dbinom", "tbinom"), "binom"),
        "bigcup": "cup",
        "div": "/",
        "lor": "vee",
        "rightarrow": "to",
        "varnothing": "emptyset",
        "land": "wedge",
    },
    **{"lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|"},
    **{"bmatrix": "pmatrix", "degree": "\u00b0", "degrees": "\u00b0", "mid": "|", "ldots": "...", "dots": "..."},
    **{"lparen": "(", "rparen": ")", "colon": ":", "infin": "infty", "approxeq": "approx", "cdots": "..."},
}
"""LaTeX command -> the one that it is read as; a sign stands for itself."""
_SILENT = re.compile(
    r"\\(?:left|right)\.|\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|bigg|Bigg|displaystyle|limits|nolimits|middle)(?![A-Za-z])"
    r"|\\[!]|\\phantom\s*\{?-?\}?"
)
_SPACES = re.compile(r"\\(?:[,;:> ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|hspace\{[^{}]*\})|~")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_CIRCLE = re.compile(r"(?<=\d)\^\{?o\}?(?![A-Za-z])|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_FRACTION = re.compile(r"\\frac\s*(\{|\d|[A-Za-z]|\\[A-Za-z]+)")
_ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z](?![A-Za-z]))")
_WORDS = re.compile(
    r"(?<![\\A-Za-z])(sqrt|pi|infinity|infty|theta|alpha|beta|sin|cos|tan|sec|csc|cot|ln|log|exp|arcsin|arccos|arctan)"
    r"(?![A-Za-z])"
)
_OHM = re.compile(r"(?<=\d)\s*\\Omega(?![A-Za-z])")
_REPEATED = re.compile(r"(?<=\.)\\dot\s*\{?(\d)\}?")
_OVER = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}|^([^{}=]*)\\(over|choose)(?![A-Za-z])([^{}=]*)$")
_CASES = re.compile(r"\\begin\{cases\}(.*?)\\end\{cases\}", re.DOTALL)
_ROW_SPACE = re.compile(r"\\\\\s*\[\d*\.?\d+\s*[a-z]{2}\]|\\cr(?![A-Za-z])")
_BRACED_INDEX = re.compile(r"([\^_])\s*\{\s*(\w)\s*\}")
_MATRIX = re.compile(r"\{(?:bmatrix|Bmatrix|array|smallmatrix|matrix)\}(?:\{[lcr|]+\})?")
_NEW_ROW = "\x00"
"""Stands for the two backslashes that end a row of a matrix."""
_MARKUP = re.compile(r"</?(?:b|i|em|strong|span|p|br|u|code|sup|sub)\s*/?>", re.IGNORECASE)


def plain(text: str) -> str:
    """``text`` in one spelling: ASCII signs, LaTeX for mathematics, one space between words, styles taken off.

    ``\\dfrac12 \\text{ cm}²`` becomes ``\\frac{1}{2} cm ^2``; a comma that LaTeX hides (``{,}``) becomes a comma.
    """
    text = _ROW_SPACE.sub(lambda found: "\\\\", _signs(text)).replace("{:}", ":").replace("\\\\", _NEW_ROW)
    text = _CASES.sub(lambda found: found[1].strip(f" {_NEW_ROW}").replace(_NEW_ROW, ", "), text)
    text = _OVER.sub(_braced_over, text)
    for _ in range(MAX_ROUNDS):
        found = _STYLED.search(text)
        end = closing_brace(text, found.end() - 1) if found else None
        if found is None or end is None:
            break
        text = f"{text[: found.start()]} {text[found.end() : end]} {text[end + 1 :]}"
    text = _SIZES.sub(" ", _COLOURED.sub("", text))
    text = text.replace("{,}", ",").replace(",\\!", ",")
    text = _SPACES.sub(" ", _SILENT.sub("", text)).replace("\\$", "$").replace("\\%", "%").replace("\\ ", " ")
    text = _OHM.sub(" ohm", _REPEATED.sub(r"\\overline{\1}", text.replace("!=", "\\neq ").replace("+/-", "\\pm ")))
    text = _CIRCLE.sub("\u00b0", text)
    text = _COMMAND.sub(_synonym, text)
    text = _WORDS.sub(lambda found: "\\" + {"infinity": "infty"}.get(found[1], found[1]), text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = text.replace("+\\infty", "\\infty")
    text = _ROOT.sub(r"\\sqrt{\1}", text.replace("**", "^").replace("<=", "\\leq ").replace(">=", "\\geq "))
    text = _BRACED_INDEX.sub(r"\1\2", _braced_fractions(_MATRIX.sub("{pmatrix}", text)))
    return " ".join(text.split()).replace(_NEW_ROW, "\\\\")


def _signs(text: str) -> str:
    text = html.unescape(_MARKUP.sub("", text)) if "&" in text or "<" in text else text
    text = _RADICAL.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = _RAISED.sub(lambda found: _raised("".join(map(_SUPERSCRIPTS.__getitem__, found[0]))), text)
    text = _LOWERED.sub(lambda found: "_" + "".join(map(_SUBSCRIPTS.__getitem__, found[0])), text)
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = text.translate({ord(sign): ascii_sign for sign, ascii_sign in _SIGNS.items()})
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate({ord(sign): one for sign, one in _SIGNS.items()})
    digits = (str(unicodedata.digit(one)) if one.isdigit() and not one.isascii() else one for one in text)
    return text if text.isascii() else "".join(digits).replace("\u2044", "/").replace("\u2212", "-")


def _raised(exponent: str) -> str:
    return f"^{{{exponent}}}" if len(exponent) > 1 else f"^{exponent}"


def _synonym(found: re.Match[str]) -> str:
    name = _SYNONYMS.get(found[1])
    if name is None:
        return found[0]
    return f"\\{name}" if name.isalpha() else name


def _braced_over(found: re.Match[str]) -> str:
    over, command, under = found.groups()[:3] if found[2] else found.groups()[3:]
    return f"\\{'frac' if command == 'over' else 'binom'}{{{over.strip()}}}{{{under.strip()}}}"


def _braced_fractions(text: str) -> str:
    """``\\frac12`` and ``\\frac1{2}`` with braces around both parts."""
    position = 0
    while (found := _FRACTION.search(text, position)) is not None:
        head, tail = text[: found.start()], text[found.end() - len(found[1]) :]
        parts: list[str] = []
        for _ in range(2):
            tail = tail.lstrip()
            if tail.startswith("{"):
                end = closing_brace(tail, 0)
                if end is None:
                    return text
                part, tail = tail[1:end], tail[end + 1 :]
            else:
                one = re.match(r"\\[A-Za-z]+|.", tail)
                if one is None:
                    return text
                part, tail = one[0], tail[one.end() :]
            parts.append(part.strip())
        text = f"{head}\\frac{{{parts[0]}}}{{{parts[1]}}}{tail}"
        position = found.start() + len("\\frac")
    return text
