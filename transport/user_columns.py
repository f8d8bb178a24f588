"""What a user's column holds: one array of any shape, or one text, which says itself what it is.

    bytes = kind (1) | dimensions (1) | padding to 4 | each dimension (4, little-endian) | padding to 8 | the elements

The run's own columns need no such header, because their type follows from their name; a user's name says nothing. NaN
and infinity are the user's business.

Owns: the codec. Invariant: what ``decode_value`` returns has exactly the shape, type and elements that were encoded.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transport.errors import MessageError
from transport.types import Column

Value: TypeAlias = "NDArray[Any] | str"

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""As for a run's column: more is a mistake, not a row."""
MAX_DIMENSIONS = 8

_TEXT = 0
_KINDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("?"),
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    4: np.dtype("<i2"),
    5: np.dtype("<i4"),
    6: np.dtype("<i8"),
    7: np.dtype("<f2"),
    8: np.dtype("<f4"),
    9: np.dtype("<f8"),
}
_KIND_OF = {dtype: kind for kind, dtype in _KINDS.items()}


def encode_value(value: object) -> bytes:
    """The bytes of one value.

    Args:   value: a text, or anything that numpy makes an array of bool, integers or floats of.
    Raises: ValueError: another type (bfloat16: view it as int16), or more than MAX_VALUE_BYTES.
    """
    if isinstance(value, str):
        return _joined(_TEXT, (), value.encode())
    array = np.asarray(value)
    kind = _KIND_OF.get(array.dtype.newbyteorder("<"))
    if kind is None or array.ndim > MAX_DIMENSIONS:
        known = ", ".join(str(dtype) for dtype in _KIND_OF)
        raise ValueError(f"no column holds {array.dtype} of {array.ndim} dimensions; text and {known} can be stored")
    return _joined(kind, array.shape, array.astype(_KINDS[kind], copy=False).tobytes())


def _joined(kind: int, shape: tuple[int, ...], elements: bytes) -> bytes:
    raw = _header(kind, shape) + elements
    if len(raw) > MAX_VALUE_BYTES:
        raise ValueError(f"a value of {len(raw)} bytes is over the limit of {MAX_VALUE_BYTES}")
    return raw


def _header(kind: int, shape: tuple[int, ...]) -> bytes:
    head = struct.pack(f"<BBxx{len(shape)}I", kind, len(shape), *shape)
    return head + bytes(-len(head) % 8)


def decode_value(column: Column, raw: bytes) -> Value:
    """The value: an array (read-only, a view of ``raw``) or a text. Raises MessageError for any other bytes."""
    kind, shape, start = _read_header(column, raw)
    if kind == _TEXT:
        return _text(column, raw[start:])
    return np.frombuffer(raw, _KINDS[kind], offset=start).reshape(shape)


def check_value(column: Column, raw: bytes) -> None:
    """Raises MessageError unless ``raw`` is what ``encode_value`` gives."""
    kind, _, start = _read_header(column, raw)
    if kind == _TEXT:
        _text(column, raw[start:])


def _read_header(column: Column, raw: bytes) -> tuple[int, tuple[int, ...], int]:
    """Kind, shape, and where the elements begin; their number is checked."""
    if not 8 <= len(raw) <= MAX_VALUE_BYTES or raw[1] > MAX_DIMENSIONS:
        raise MessageError(f"column {column} has {len(raw)} bytes, which are no value")
    kind, start = raw[0], 4 + 4 * raw[1]
    start += -start % 8
    if len(raw) < start or (kind != _TEXT and kind not in _KINDS):
        raise MessageError(f"column {column} has {len(raw)} bytes of an unknown kind")
    shape: tuple[int, ...] = struct.unpack_from(f"<{raw[1]}I", raw, 4)
    if kind != _TEXT and len(raw) - start != math.prod(shape) * _KINDS[kind].itemsize:
        raise MessageError(f"column {column} has {len(raw) - start} bytes, which are no array of shape {shape}")
    return kind, shape, start


def _text(column: Column, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise MessageError(f"column {column} is not text: {error}") from error
