"""The closed set of values: their canonical bytes (for digests) and their protobuf form."""

from __future__ import annotations

import struct

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import ManifestError
from hotswarm.snapshot.dtypes import ITEMSIZE
from hotswarm.snapshot.limits import MAX_INTEGER_BYTES
from hotswarm.snapshot.tree import DTypeValue, SizeValue, Value

_REAL = struct.Struct("<d")
_BITS = struct.Struct("<Q")


def integer_to_bytes(value: int) -> bytes:
    """Two's complement, big-endian, as few bytes as hold the sign: 0 is one zero byte."""
    return value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "big", signed=True)


def integer_from_bytes(data: bytes) -> int:
    """The inverse; ManifestError for anything but the shortest form."""
    if not data or len(data) > MAX_INTEGER_BYTES:
        raise ManifestError(f"an integer has {len(data)} bytes: 1 to {MAX_INTEGER_BYTES} are allowed")
    value = int.from_bytes(data, "big", signed=True)
    if integer_to_bytes(value) != data:
        raise ManifestError("an integer is not in its shortest form")
    return value


def canonical(value: Value) -> tuple[bytes, bytes]:
    """(one letter for the type, bytes): what a section digest takes of a value."""
    match value:
        case None:
            return b"n", b""
        case bool():
            return b"b", b"\x01" if value else b"\x00"
        case int():
            return b"i", integer_to_bytes(value)
        case float():
            return b"f", _REAL.pack(value)
        case str():
            return b"s", value.encode()
        case bytes():
            return b"r", value
        case DTypeValue(name):
            return b"d", name.encode()
        case SizeValue(dims):
            return b"z", struct.pack(f"<{len(dims)}q", *dims)


def to_proto(value: Value) -> pb.Value:
    """The protobuf form. ManifestError for an integer that is too long."""
    match value:
        case None:
            return pb.Value(none=True)
        case bool():
            return pb.Value(boolean=value)
        case int():
            data = integer_to_bytes(value)
            if len(data) > MAX_INTEGER_BYTES:
                raise ManifestError(f"an integer has {len(data)} bytes: at most {MAX_INTEGER_BYTES} are allowed")
            return pb.Value(integer=data)
        case float():
            return pb.Value(real=_BITS.unpack(_REAL.pack(value))[0])
        case str():
            return pb.Value(text=value)
        case bytes():
            return pb.Value(raw=value)
        case DTypeValue(name):
            return pb.Value(dtype=name)
        case SizeValue(dims):
            return pb.Value(size=pb.Size(dims=dims))


def from_proto(value: pb.Value) -> Value:
    """The value; ManifestError when none is set or it is not of the closed set."""
    match value.WhichOneof("v"):
        case "none":
            if not value.none:
                raise ManifestError("a value says that it is not None and nothing else")
            return None
        case "boolean":
            return value.boolean
        case "integer":
            return integer_from_bytes(value.integer)
        case "real":
            return float(_REAL.unpack(_BITS.pack(value.real))[0])
        case "text":
            return value.text
        case "raw":
            return value.raw
        case "dtype":
            if value.dtype not in ITEMSIZE:
                raise ManifestError(f"unknown dtype {value.dtype[:40]!r}")
            return DTypeValue(value.dtype)
        case "size":
            return SizeValue(tuple(value.size.dims))
        case _:
            raise ManifestError("a value is of no known type")
