"""What stands in the broker in place of a column whose bytes are in a storage unit: where they are.

Owns: its two forms. A locator is of one row's value, or of the values of all rows of a group, which lie one after
another; then the broker keeps it once for the group (``base.Block.shared``).
"""

from __future__ import annotations

from typing import TypeAlias

from transport.errors import ChecksumError
from transport.messages import MessageDecoder
from transport.types import Count, Struct
from transport.units import Part, Range, ValueBytes

ALIGNMENT = 8
"""Of every value in a segment, so that arrays are read in place."""


def aligned(nbytes: int) -> int:
    """What a value takes in a segment."""
    return nbytes + -nbytes % ALIGNMENT


class SentLocator(Struct, frozen=True, kw_only=True):
    """Of what was sent to a unit."""

    unit: str
    name: str
    sizes: tuple[ValueBytes, ...]
    checksums: tuple[str, ...]

    def of(self, sample: int) -> Part:
        """The value of one row. Raises ChecksumError: the locator is of fewer."""
        place = sample if len(self.sizes) > 1 else 0
        if place >= min(len(self.sizes), len(self.checksums)):
            raise ChecksumError(f"a locator of {len(self.sizes)} values has none of sample {sample}")
        return Part(key=f"{self.name}:{place}", nbytes=self.sizes[place], checksum=self.checksums[place])


class SegmentLocator(Struct, frozen=True, array_like=True, omit_defaults=False):
    """Of what is in a segment: an array in MessagePack, because 64 bytes, which it mostly has on a unit of this host,
    are the most that the broker keeps in the compact form of a hash.

    nbytes: of the value; of a group's values a tuple, of one number where all have that size.
    """

    unit: str
    segment: str
    offset: Count
    nbytes: ValueBytes | tuple[ValueBytes, ...]

    def of(self, sample: int) -> Range:
        """The value of one row. Raises ChecksumError: the locator is of fewer."""
        sizes = self.nbytes
        if isinstance(sizes, int):
            return Range(segment=self.segment, offset=self.offset, nbytes=sizes)
        if len(sizes) == 1:
            return Range(segment=self.segment, offset=self.offset + sample * aligned(sizes[0]), nbytes=sizes[0])
        if sample >= len(sizes):
            raise ChecksumError(f"a locator of {len(sizes)} values has none of sample {sample}")
        before = sum(map(aligned, sizes[:sample]))
        return Range(segment=self.segment, offset=self.offset + before, nbytes=sizes[sample])


Locator: TypeAlias = SentLocator | SegmentLocator

_sent_decoder = MessageDecoder(SentLocator)
_segment_decoder = MessageDecoder(SegmentLocator)


def decode_locator(raw: bytes) -> Locator:
    """Raises MessageError for what is neither."""
    is_array = raw[:1] and raw[0] & 0xF0 == 0x90  # MessagePack's first byte of a short array
    return _segment_decoder.decode(raw) if is_array else _sent_decoder.decode(raw)
