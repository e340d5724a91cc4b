"""Hand-written frames against the generated protobuf classes, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.swarm import wire
from hotswarm.swarm.wire import ChunkFrame, EndFrame, HeaderFrame, WireError, parse_frame

uint32 = st.integers(0, 2**32 - 1)
EDGES = [0, 1, 127, 128, 16383, 16384, 2**21, 2**31, 2**32 - 1]


@given(st.text(max_size=40), st.text(max_size=10), st.binary(max_size=40), uint32)
def test_a_header_is_what_protobuf_reads_and_writes(snapshot: str, section: str, digest: bytes, count: int) -> None:
    header = HeaderFrame(snapshot, section, digest, count)
    theirs = pb.SnapshotFrame.FromString(wire.encode_header(header))
    assert theirs.WhichOneof("frame") == "header"
    assert (theirs.header.snapshot_id, theirs.header.section) == (snapshot, section)
    assert (theirs.header.section_digest, theirs.header.chunk_count) == (digest, count)
    assert parse_frame(theirs.SerializeToString()) == header
    assert parse_frame(wire.encode_header(header)) == header


@given(uint32, st.sampled_from([0, 1, 300]), st.binary(max_size=300))
def test_a_chunk_is_what_protobuf_reads_and_writes(index: int, codec: int, data: bytes) -> None:
    message = wire.encode_chunk(index, memoryview(data), codec=codec)
    theirs = pb.SnapshotFrame.FromString(message)
    assert theirs.WhichOneof("frame") == "chunk"
    assert (theirs.chunk.index, theirs.chunk.codec) == (index, codec)
    assert (theirs.chunk.raw_bytes, theirs.chunk.data) == (len(data), data)
    assert message == theirs.SerializeToString(deterministic=True)
    back = parse_frame(theirs.SerializeToString())
    assert isinstance(back, ChunkFrame)
    assert (back.index, back.codec, back.raw_bytes, bytes(back.data)) == (index, codec, len(data), data)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2**14, 2**20 - 1, 2**20])
def test_chunks_of_every_length_of_length(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    message = wire.encode_chunk(7, data)
    assert pb.SnapshotFrame.FromString(message).chunk.data == data
    assert len(message) <= size + 32
    assert len(message) < wire.MAX_FRAME_BYTES


@pytest.mark.parametrize("sent", EDGES)
def test_an_end_is_what_protobuf_reads_and_writes(sent: int) -> None:
    theirs = pb.SnapshotFrame.FromString(wire.encode_end(sent))
    assert theirs.WhichOneof("frame") == "end"
    assert theirs.end.chunks_sent == sent
    assert parse_frame(theirs.SerializeToString()) == EndFrame(sent)


def test_a_chunks_data_is_a_view_not_a_copy() -> None:
    message = wire.encode_chunk(1, b"x" * 100)
    frame = parse_frame(message)
    assert isinstance(frame, ChunkFrame)
    assert frame.data.obj is message


def test_fields_of_later_versions_are_skipped() -> None:
    known = wire.encode_end(5)
    unknown = wire.varint(9 << 3) + wire.varint(77) + wire.varint(10 << 3 | 2) + b"\x03abc"
    unknown += wire.varint(11 << 3 | 1) + bytes(8) + wire.varint(12 << 3 | 5) + bytes(4)
    assert parse_frame(unknown + known + unknown) == EndFrame(5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x12",  # a chunk without a length
        b"\x12\x05abc",  # shorter than it says
        b"\x12\xff\xff\xff\xff\x0f" + b"x",  # 4 GiB that are not there
        b"\x08\x01",  # a header that is a number
        b"\x1a\x00\x1a\x00",  # two ends
        b"\x1a\x02\x08\x80",  # a number that is cut
        b"\x1a\x0b\x08" + b"\xff" * 10,  # a number without an end
        b"\x1a\x06\x08\xff\xff\xff\xff\x7f",  # more than 32 bits
        b"\x0a\x03\x0a\x01\xff",  # text that is not UTF-8
        b"\x03",  # a group
        b"\x00\x00",  # field number 0
    ],
)
def test_what_no_frame_serialises_to_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        parse_frame(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    try:
        parse_frame(data)
    except WireError:
        pass
