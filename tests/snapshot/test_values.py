from __future__ import annotations

import math
import struct

import pytest

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import ManifestError
from hotswarm.snapshot.limits import MAX_INTEGER_BYTES
from hotswarm.snapshot.tree import DTypeValue, SizeValue
from hotswarm.snapshot.values import canonical, from_proto, integer_from_bytes, integer_to_bytes, to_proto


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (0, "00"),
        (1, "01"),
        (-1, "ff"),
        (127, "7f"),
        (128, "0080"),
        (-128, "80"),
        (-129, "ff7f"),
        (255, "00ff"),
        (1 << 64, "010000000000000000"),
        (-(1 << 63), "8000000000000000"),
    ],
)
def test_integers_are_shortest_twos_complement(value, data):
    assert integer_to_bytes(value).hex() == data
    assert integer_from_bytes(bytes.fromhex(data)) == value


@pytest.mark.parametrize("data", ["", "0001", "ffff", "007f", "ff80"])
def test_longer_forms_of_an_integer_are_refused(data):
    with pytest.raises(ManifestError):
        integer_from_bytes(bytes.fromhex(data))


def test_the_length_limit_of_integers():
    for extra in (-1, 0):
        value = 1 << (8 * (MAX_INTEGER_BYTES + extra) - 2)
        assert len(integer_to_bytes(value)) == MAX_INTEGER_BYTES + extra
        assert from_proto(to_proto(value)) == value
    value = 1 << (8 * (MAX_INTEGER_BYTES + 1) - 2)
    with pytest.raises(ManifestError):
        to_proto(value)
    with pytest.raises(ManifestError):
        from_proto(pb.Value(integer=integer_to_bytes(value)))


VALUES = [None, True, False, 0, -1, 1 << 200, 0.5, -0.0, math.inf, "", "é\0", b"", b"\xff", DTypeValue("bool")]


@pytest.mark.parametrize("value", [*VALUES, SizeValue(()), SizeValue((2**63 - 1, -1))], ids=repr)
def test_values_come_back_through_the_wire(value):
    back = from_proto(pb.Value.FromString(to_proto(value).SerializeToString()))
    assert type(back) is type(value)
    assert canonical(back) == canonical(value)


def test_the_payload_of_a_nan_survives():
    for bits in (0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x7FF0000000000001):
        (value,) = struct.unpack("<d", struct.pack("<Q", bits))
        assert struct.unpack("<Q", struct.pack("<d", from_proto(to_proto(value))))[0] == bits


@pytest.mark.parametrize("message", [pb.Value(), pb.Value(none=False), pb.Value(dtype="object"), pb.Value(integer=b"")])
def test_anything_outside_the_closed_set_is_refused(message):
    with pytest.raises(ManifestError):
        from_proto(message)
