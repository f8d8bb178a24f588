"""Values made to be misread: of the right structure with wrong content, of the wrong structure, and damaged bytes."""

from __future__ import annotations

import enum
import functools
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

MOST_ITEMS = 4

STRINGS = (
    "",
    "0/0",
    "0/0/0",
    "1/2/3",
    "1/2",
    "/",
    "//",
    "1//2",
    "-1/0/0",
    "1/2/3/4",
    "x/y/z",
    "²/0/0",
    "0/0/²",
    "0/٣/1",
    "eval1/0",
    "eval/0/0",
    "evalx/0/0",
    "0/0/" + "9" * 40,
    "9" * 5000,
    "generate-0.1",
    "train-0.1",
    "0-0",
    "1-1",
    "18446744073709551616-0",
    "a-b",
    "-",
    "nan",
    "\x00",
    "a\x00b",
    "\n",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "../../../etc/passwd",
    "/etc/passwd",
    "a/" * 2000,
    "%00",
    "%s%n{0}{x!r}",
    "{{7*7}}",
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "' onmouseover='alert(1)",
    "<!--",
    "]]>",
    "\u202e\u2066",
    "\ufeff",
    "\U0010ffff",
    "é" * 300,
    "tcp://[",
    "tcp://:::",
    "shm://../x",
    "http://[::1",
    "file:///etc/passwd",
)
NUMBERS = (0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))


def text(random: Random) -> str:
    """Mostly a string that somebody's reader stumbled over, else any characters but lone surrogates."""
    if random.random() < 0.8:
        return random.choice(STRINGS)
    return "".join(
        chr(random.choice((random.randrange(0xD800), random.randrange(128)))) for _ in range(random.choice((1, 5, 60)))
    )


def whole(random: Random) -> int:
    return random.choice((random.choice(NUMBERS), random.randrange(8), random.randrange(8)))


def number(random: Random) -> float:
    return random.choice(FLOATS) if random.random() < 0.5 else random.uniform(-2, 50)


def anything(random: Random, depth: int = 0) -> Any:
    """A value of no structure in particular."""
    makers: list[Callable[[Random], Any]] = [
        text,
        whole,
        number,
        lambda r: r.randbytes(3),
        lambda r: None,
        lambda r: True,
    ]
    if depth < 3:
        makers += [
            lambda r: [anything(r, depth + 1) for _ in range(r.randrange(MOST_ITEMS))],
            lambda r: {text(r): anything(r, depth + 1) for _ in range(r.randrange(MOST_ITEMS))},
        ]
    return random.choice(makers)(random)


@functools.cache
def _type_info(kind: object) -> inspect.Type:
    return inspect.type_info(kind)


class Maker:
    """Makes values of msgspec types as plain values. wild: share of values that are anything instead.

    strings: what else a string may be, such as ids that somebody knows.
    """

    def __init__(self, random: Random, *, wild: float, strings: tuple[str, ...] = ()) -> None:
        self._random, self._wild, self._strings = random, wild, strings

    def value(self, kind: object) -> Any:
        """Of a type, as msgspec would encode it."""
        return self._of(_type_info(kind))

    def _of(self, kind: inspect.Type) -> Any:
        random = self._random
        if random.random() < self._wild:
            return anything(random)
        match kind:
            case inspect.StructType():
                return self._struct(kind)
            case inspect.UnionType():
                return self._of(random.choice(kind.types))
            case inspect.VarTupleType() | inspect.ListType() | inspect.FrozenSetType():
                return [self._of(kind.item_type) for _ in range(random.randrange(MOST_ITEMS))]
            case inspect.TupleType():
                return [self._of(each) for each in kind.item_types]
            case inspect.DictType():
                return {
                    self._key(kind.key_type): self._of(kind.value_type) for _ in range(random.randrange(MOST_ITEMS))
                }
            case inspect.EnumType():
                return _plain(random.choice(list(kind.cls)))
            case inspect.LiteralType():
                return random.choice(kind.values)
            case inspect.StrType():
                return self._text(kind)
            case inspect.IntType():
                return _inside(kind, whole(random), random)
            case inspect.FloatType():
                return _inside(kind, number(random), random)
            case inspect.BoolType():
                return random.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.BytesType():
                return random.randbytes(random.choice((0, 1, 4, 64)))
            case _:
                return anything(random)

    def _text(self, kind: inspect.StrType) -> str:
        """One that fits the type's pattern, where there is any."""
        found = [text(self._random), *self._random.choices(self._strings or STRINGS, k=9)]
        fitting = [each for each in found if kind.pattern is None or re.search(kind.pattern, each)]
        return self._random.choice(fitting or found)

    def _key(self, kind: inspect.Type) -> Any:
        key = self._of(kind)
        if isinstance(key, list):
            key = tuple(key)
        try:
            hash(key)
        except TypeError:
            return text(self._random)
        return key

    def _struct(self, kind: inspect.StructType) -> Any:
        random = self._random
        fields = {
            each.encode_name: self._of(each.type) for each in kind.fields if each.required or random.random() < 0.7
        }
        if kind.array_like:
            return list(fields.values())
        tag = {kind.tag_field: kind.tag} if kind.tag_field is not None else {}
        return tag | fields


def _inside(kind: inspect.IntType | inspect.FloatType, value: float, random: Random) -> float:
    """``value``, or one of the bounds that it is outside of."""
    low, high = kind.ge, kind.le
    if (low is None or value >= low) and (high is None or value <= high):
        return value
    return random.choice([bound for bound in (low, high) if bound is not None])


def _plain(member: enum.Enum) -> Any:
    return member.value


def damaged(random: Random, raw: bytes) -> bytes:
    """The same bytes cut, flipped, repeated, spliced, or with a length of theirs replaced."""
    content = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 6))):
        at = random.randrange(len(content) + 1)
        match random.randrange(7):
            case 0:
                del content[at:]
            case 1 if at < len(content):
                content[at] ^= 1 << random.randrange(8)
            case 2:
                content[at:at] = random.randbytes(random.choice((1, 2, 8, 40)))
            case 3:
                content[at:at] = content[random.randrange(at + 1) : at]
            case 4:
                content[at : at + 4] = random.choice(
                    (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0")
                )
            case 5:
                content[at : at + 1] = random.choice(
                    (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xcb")
                )
            case _:
                content[at : at + 8] = struct.pack("<d", random.choice(FLOATS))
    return bytes(content)


def packed(value: object) -> bytes:
    """As MessagePack; what it cannot hold (a key that is a list) is left out."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError):
        return b"\xc0"


def nested(random: Random) -> bytes:
    """Lists in lists, far beyond what a recursive reader takes: MessagePack or JSON."""
    depth = random.choice((50, 900, 100_000))
    return random.choice(
        (b"\x91" * depth + b"\xc0", b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth, b"\x81\xa1a" * depth)
    )


def raw_message(random: Random, kind: object) -> bytes:
    """Bytes for a MessagePack decoder of ``kind``."""
    match random.randrange(10):
        case 0:
            return random.randbytes(random.choice((0, 1, 2, 9, 200)))
        case 1:
            return packed(anything(random))
        case 2 if random.random() < 0.2:
            return nested(random)
        case 3 | 4 | 5:
            return damaged(random, packed(Maker(random, wild=0.0).value(kind)))
        case _:
            return packed(Maker(random, wild=random.choice((0.0, 0.02, 0.1))).value(kind))
