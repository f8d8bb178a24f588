"""What changed between two versions of a tensor: exactly that, and nothing that garbage could make of it."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import MessageError
from transport.tensors import delta
from transport.tensors.delta import apply, encode

ITEMS = st.sampled_from([1, 2, 4, 8])
GUARD = 64


def patched(base: bytes, patch: bytes, item: int) -> bytes:
    """``base`` with the patch applied, in the middle of memory that must stay as it is."""
    memory = bytearray(b"\xa5" * GUARD + base + b"\x5a" * GUARD)
    try:
        apply(patch, memoryview(memory)[GUARD : GUARD + len(base)], item)
    finally:
        assert memory[:GUARD] == b"\xa5" * GUARD
        assert memory[GUARD + len(base) :] == b"\x5a" * GUARD
    return bytes(memory[GUARD : GUARD + len(base)])


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Two versions of a tensor, from none to all of whose elements differ, by any bits; and its item size."""
    item, size = draw(ITEMS), draw(st.integers(0, 3000))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = random.integers(0, 256, (size, item), np.uint8)
    new = base.copy()
    changed = random.random(size) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
    new[changed] = random.integers(0, 256, (int(changed.sum()), item), np.uint8)
    return base.tobytes(), new.tobytes(), item


@given(versions(), st.sampled_from([1, 256, 1000, 1 << 20]))
def test_the_patch_makes_the_new_version_of_the_base(given: tuple[bytes, bytes, int], block: int) -> None:
    base, new, item = given
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(delta, "BLOCK_ELEMENTS", block)
        patch = encode(memoryview(base), memoryview(new), item)
        assert patched(base, patch, item) == new
    assert (patch == b"") == (base == new)


@given(versions(), st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 10_000))
def test_garbage_is_refused_or_stays_inside(
    given: tuple[bytes, bytes, int], garbage: bytes, start: int, end: int
) -> None:
    base, new, item = given
    patch = encode(memoryview(base), memoryview(new), item)
    start, end = sorted((start % (len(patch) + 1), end % (len(patch) + 1)))
    torn = patch[:start] + garbage + patch[end:]
    with contextlib.suppress(MessageError):
        patched(base, torn, item)  # which looks at the memory around it


@given(st.integers(1, 5000), st.integers(0, 255), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_well_packed_nonsense_is_refused_or_stays_inside(size: int, gap: int, count: int, claimed: int) -> None:
    """Every layer but the last is right: gaps that lead out of the tensor, more of them than it has elements."""
    base = bytes(2 * size)
    gaps, changes = delta._deflated(bytes([gap]) * count), delta._deflated(b"\x02" * 2 * count)
    for number in (count, claimed):
        patch = delta._HEADER.pack(number, len(gaps), len(changes)) + gaps + changes
        inside = gap != delta.SKIP and number == count and count * (gap + 1) <= size
        if inside:
            assert np.count_nonzero(np.frombuffer(patched(base, patch, 2), np.uint16)) == count
        else:
            with pytest.raises(MessageError):
                patched(base, patch, 2)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = delta._deflated(bytes(50_000_000))
    patch = delta._HEADER.pack(1, len(bomb), len(bomb)) + 2 * bomb
    with pytest.raises(MessageError, match="unpack"):
        patched(bytes(200), patch, 2)


def test_every_cut_of_a_patch_is_refused() -> None:
    base, new = np.zeros(5000, np.uint16), np.zeros(5000, np.uint16)
    new[::300] = 1
    patch = encode(memoryview(base).cast("B"), memoryview(new).cast("B"), 2)
    for end in range(1, len(patch)):
        with pytest.raises(MessageError):
            patched(base.tobytes(), patch[:end], 2)
    with pytest.raises(MessageError, match="behind its tensor"):
        patched(base.tobytes(), patch + b"\0", 2)


def test_tensors_of_different_sizes_have_no_patch() -> None:
    with pytest.raises(ValueError, match="2 elements has 1"):
        encode(memoryview(b"abcd"), memoryview(b"ab"), 2)


def test_one_change_in_a_hundred_by_one_unit_costs_less_than_the_changed_elements() -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 16, 1 << 20, np.uint16)
    new = base + (random.random(base.size) < 0.01) * random.choice([1, 65535], base.size).astype(np.uint16)
    patch = encode(memoryview(base).cast("B"), memoryview(new).cast("B"), 2)
    assert len(patch) < 0.01 * base.nbytes * 0.65
