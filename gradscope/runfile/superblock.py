"""The first bytes of an HDF5 file: where it should end, and whether its writer closed it.

Layouts from the HDF5 File Format Specification, version 3.0, section II.A.
"""

from __future__ import annotations

import struct

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CONSISTENCY = 11
_FLAGS = 0b101
"""Bits of that byte: open for writing, and for writing beside readers (SWMR)."""
_MASK = 0xFFFFFFFF


def opened_up(data: bytes) -> tuple[bytes, list[str]]:
    """Returns the bytes of a file that was not closed or cut short as HDF5 opens them, and what was wrong.

    What is missing at the end comes out as zeros.
    """
    found: list[str] = []
    if not data.startswith(SIGNATURE) or len(data) < 48:
        return data, found
    changed = bytearray(data)
    version = data[8]
    if version in (2, 3) and changed[_CONSISTENCY] & _FLAGS:
        changed[_CONSISTENCY] &= ~_FLAGS
        changed[44:48] = struct.pack("<I", lookup3(bytes(changed[:44])))
        found.append("its writer did not close it (consistency flag)")
    (end,) = struct.unpack_from("<Q", data, 40 if version < 2 else 28)
    if len(data) < end < 2**40:
        missing = end - len(data)
        found.append(f"{missing} of {end} bytes are missing at the end")
        changed.extend(bytes(missing))
    return bytes(changed), found


def lookup3(data: bytes) -> int:
    """Returns Bob Jenkins's lookup3 checksum, with which HDF5 protects its metadata."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    while len(data) > 12:
        x, y, z = struct.unpack_from("<III", data)
        a, b, c = _mixed((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
        data = data[12:]
    if not data:
        return c
    x, y, z = struct.unpack("<III", data.ljust(12, b"\0"))
    return _finished((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & _MASK) ^ _rotated(c, bits)
        c = (c + b) & _MASK
        a, b, c = b, c, a
    return a, b, c


def _finished(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, bits)) & _MASK
        a, b, c = b, c, a
    # Seven turns leave the word that was worked on last in b.
    return b
