"""Protocol buffers, as far as writing a trace needs them: four kinds of fields.

Written here, and not with the packages `perfetto` and `protobuf`: these are two more packages for
every login node, and the file of generated classes alone has 600 KB. Tests read what this writes
with them. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from typing import Self

VARINT, FIXED64, LENGTH_DELIMITED = 0, 1, 2
_FIXED64_FORMAT = struct.Struct("<Q")
_ONE_BYTE_VARINTS = [bytes((value,)) for value in range(0x80)]


def encode_varint(value: int) -> bytes:
    """`value` in groups of seven bits, the lowest first; negative ones as 64 bits."""
    if 0 <= value < 0x80:
        return _ONE_BYTE_VARINTS[value]
    value &= 0xFFFF_FFFF_FFFF_FFFF
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_key(field: int, wire_type: int) -> bytes:
    """The bytes that a field begins with."""
    return encode_varint(field << 3 | wire_type)


class ProtoMessage:
    """A message, field by field; each method returns the message itself."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add_int(self, field: int, value: int) -> Self:
        """A field of type int32, int64, uint32, uint64, bool or an enum."""
        self.data += encode_varint(field << 3 | VARINT)
        self.data += encode_varint(value)
        return self

    def add_fixed64(self, field: int, value: int) -> Self:
        self.data += encode_varint(field << 3 | FIXED64)
        self.data += _FIXED64_FORMAT.pack(value)
        return self

    def add_text(self, field: int, text: str) -> Self:
        return self.add_data(field, text.encode(errors="replace"))

    def add_message(self, field: int, message: ProtoMessage) -> Self:
        return self.add_data(field, message.data)

    def add_data(self, field: int, data: bytes | bytearray) -> Self:
        self.data += encode_varint(field << 3 | LENGTH_DELIMITED)
        self.data += encode_varint(len(data))
        self.data += data
        return self
