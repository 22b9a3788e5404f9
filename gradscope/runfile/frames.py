"""Frames of a journal: a checksum around each record, and a scan that finds every whole one.

A frame is `magic, kind, sequence, run, length, payload, crc32`; the checksum covers everything before it. A
scan that meets damage looks for the next whole frame, so one bad record costs one record. `run` tells a
record of another run, as a file system that mixed up blocks leaves it, from one of this run.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

MAGIC = b"\x9eGSJ\r\n\x1a\x01"
HEADER_KIND = 0
"""Payload: JSON with the layout and the root attributes."""
ROWS_KIND = 1
"""Payload: rows of tables, in the layout that it names."""

_HEAD = struct.Struct("<8sBQII")
_TAIL = struct.Struct("<I")


@dataclass(frozen=True)
class Frame:
    """One whole record.

    Attributes:
        kind: `HEADER_KIND` or `ROWS_KIND`.
        sequence: Number of the record in the run, rising by one each record; headers repeat the last one.
        run: Which run it is of, see `run_tag`.
        payload: The bytes inside.
    """

    kind: int
    sequence: int
    run: int
    payload: bytes


@dataclass(frozen=True)
class Damage:
    """Bytes of a journal that are no whole frame.

    Attributes:
        offset: First such byte.
        num_bytes: How many.
        at_end: Whether they reach the end of the file.
        unfinished: Whether they are the beginning of a record, as after a crash in the middle of a write.
    """

    offset: int
    num_bytes: int
    at_end: bool
    unfinished: bool = False


def run_tag(run_id: str) -> int:
    """Returns the number by which frames name their run."""
    return zlib.crc32(run_id.encode())


def encode(frame: Frame) -> bytes:
    """Returns the frame as it stands in the file."""
    head = _HEAD.pack(MAGIC, frame.kind, frame.sequence, frame.run, len(frame.payload))
    body = head + frame.payload
    return body + _TAIL.pack(zlib.crc32(body))


def scan(data: bytes) -> tuple[list[Frame], list[Damage]]:
    """Returns the whole frames of a journal in order, and the stretches between that are damaged."""
    frames: list[Frame] = []
    damages: list[Damage] = []
    position = good_end = 0
    while position < len(data):
        found = _frame_at(data, position)
        if found is None:
            following = data.find(MAGIC, position + 1)
            position = len(data) if following < 0 else following
            continue
        if position > good_end:
            damages.append(Damage(good_end, position - good_end, at_end=False))
        frame, position = found
        frames.append(frame)
        good_end = position
    if good_end < len(data):
        rest = data[good_end:]
        damages.append(Damage(good_end, len(rest), at_end=True, unfinished=_is_beginning(rest)))
    return frames, damages


def _is_beginning(data: bytes) -> bool:
    """Returns whether bytes are what a record begins with, and less than the whole of it."""
    if len(data) < _HEAD.size:
        return data[: len(MAGIC)] == MAGIC[: len(data)]
    magic, _, _, _, length = _HEAD.unpack_from(data)
    return magic == MAGIC and len(data) < _HEAD.size + length + _TAIL.size


def _frame_at(data: bytes, position: int) -> tuple[Frame, int] | None:
    payload_start = position + _HEAD.size
    if payload_start + _TAIL.size > len(data) or not data.startswith(MAGIC, position):
        return None
    _, kind, sequence, run, length = _HEAD.unpack_from(data, position)
    payload_end = payload_start + length
    end = payload_end + _TAIL.size
    if end > len(data):
        return None
    (checksum,) = _TAIL.unpack_from(data, payload_end)
    if zlib.crc32(data[position:payload_end]) != checksum:
        return None
    return Frame(kind, sequence, run, data[payload_start:payload_end]), end
