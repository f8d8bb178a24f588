"""Users' columns: names that are allowed, values that come back exactly, bytes that are refused."""

import contextlib
import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from transport.contracts.types import Column, is_user_name
from transport.errors import MessageError
from transport.rows.columns import decode_table, decode_value, encode_value

NAME = Column("x_notes")
DTYPES = ["?", "u1", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", ">i4"]


def test_a_users_column_is_a_column() -> None:
    assert Column("x_notes") == NAME == "x_notes"
    assert {NAME: 1}[Column("x_notes")] == 1
    assert f"{NAME}" == NAME.value == NAME.name == "x_notes"
    assert NAME not in list(Column)
    assert Column("reward") is Column.REWARD


@pytest.mark.parametrize("name", ["notes", "x_", "x_A", "x_a b", "x_" + "a" * 61, "x_a:b", "", 7])
def test_other_names_are_none(name: object) -> None:
    with pytest.raises(ValueError, match="is not a valid Column"):
        Column(name)
    assert not is_user_name(str(name))


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=3, min_side=0))))
def test_arrays_come_back_exactly(array: np.ndarray) -> None:
    raw = encode_value(array)
    back = decode_value(NAME, raw)
    assert isinstance(back, np.ndarray)
    assert (back.shape, back.dtype) == (array.shape, array.dtype.newbyteorder("<"))
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")


@given(st.text())
def test_texts_come_back_exactly(text: str) -> None:
    raw = encode_value(text)
    assert decode_value(NAME, raw) == text


@pytest.mark.parametrize("value", [b"bytes", None, {}, [1j], np.zeros([1] * 9), np.array(["a"])])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="no column holds"):
        encode_value(value)


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda raw: np.lib.format.magic(1, 0) + raw))
def test_any_bytes_are_a_value_or_a_named_error(raw: bytes) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(decode_value(NAME, raw), np.ndarray | str)


def saved(array: np.ndarray) -> bytes:
    """As numpy.save writes it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@given(st.sampled_from(DTYPES[:-1]).flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0))))
def test_an_array_is_a_file_that_numpy_saves_and_loads(array: np.ndarray) -> None:
    assert encode_value(array) == saved(array)
    assert np.array_equal(np.load(io.BytesIO(encode_value(array))), array, equal_nan=array.dtype.kind == "f")


def header(described: str) -> bytes:
    text = f"{{'descr': {described}, }}\n".encode()
    return np.lib.format.magic(1, 0) + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize("shape", [(0, *3 * [2**32 - 1]), (*6 * [2**32 - 1], 0), (2**31, 0, 2**31)])
def test_an_empty_array_of_a_shape_that_numpy_does_not_make_is_refused(shape: tuple[int, ...]) -> None:
    raw = header(f"'<f4', 'fortran_order': False, 'shape': {shape}")
    for read in (decode_value, lambda name, one: decode_table(name, [one, one])):
        with pytest.raises(MessageError, match="no column holds float32 of shape"):
            read(NAME, raw)


@pytest.mark.parametrize(
    "raw",
    [
        saved(np.asfortranarray(np.ones((2, 3)))),
        saved(np.ones(2, ">f4")),
        saved(np.ones(2, "c8")),
        saved(np.ones(2, [("a", "<f4")])),
        saved(np.array(["a"])),
        saved(np.ones(2)) + b"\0",
        header("'|O', 'fortran_order': False, 'shape': (1,)"),
        header("'<f4', 'fortran_order': False, 'shape': (1 1)"),
        header("'<f4', 'fortran_order': False, 'shape': (-1,)"),
        header("'<f4', 'fortran_order': False, 'shape': (01,)"),
        header("'<f4', 'fortran_order': False, 'shape': (1)"),
        header("'<f4', 'fortran_order': False, 'shape': " + "(" * 9999),
        np.lib.format.magic(3, 0) + bytes(8),
    ],
)
def test_other_files_of_numpy_are_refused(raw: bytes) -> None:
    with pytest.raises(MessageError):
        decode_value(NAME, raw)


@given(st.lists(st.binary(max_size=16) | st.just(encode_value([1.0, 2.0])), max_size=3))
def test_any_table_of_bytes_is_values_or_a_named_error(raws: list[bytes]) -> None:
    with contextlib.suppress(MessageError):
        assert len(decode_table(NAME, raws)) == len(raws)


def test_an_array_cut_short_is_refused() -> None:
    raw = encode_value(np.arange(5, dtype=np.int32))
    for end in range(1, len(raw)):
        with pytest.raises(MessageError):
            decode_value(NAME, raw[:end])
