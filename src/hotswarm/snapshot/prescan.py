"""Counting before building: protobuf makes an object of 80 bytes of two bytes on the wire, so the limits on what is
repeated must hold before a hostile manifest is parsed, or 16 MiB become 640.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotswarm.errors import ManifestError
from hotswarm.snapshot.limits import MAX_LEAVES, MAX_SECTIONS

_SECTIONS_FIELD = 13  # of Manifest
_LEAVES_FIELD = 2  # of Section
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_counts(body: bytes) -> None:
    """ManifestError when the bytes of a Manifest hold too many sections or leaves, or are no fields at all."""
    sections = leaves = 0
    for number, start, end in _fields(body, 0, len(body)):
        if number != _SECTIONS_FIELD:
            continue
        sections += 1
        if sections > MAX_SECTIONS:
            raise ManifestError(f"the manifest has more than {MAX_SECTIONS} sections")
        for inner, _, _ in _fields(body, start, end):
            if inner == _LEAVES_FIELD:
                leaves += 1
                if leaves > MAX_LEAVES:
                    raise ManifestError(f"the manifest has more than {MAX_LEAVES} leaves")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, first byte, byte behind the last one) of each field between two offsets."""
    while at < end:
        key, at = _varint(data, at, end)
        wire = key & 7
        if wire == _BYTES:
            length, at = _varint(data, at, end)
        elif wire == _VARINT:
            _, behind = _varint(data, at, end)
            length = behind - at
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ManifestError(f"these bytes are no manifest: wire type {wire}")
        if at + length > end:
            raise ManifestError("these bytes are no manifest: a field is cut short")
        yield key >> 3, at, at + length
        at += length


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ManifestError("these bytes are no manifest: a number without end")
