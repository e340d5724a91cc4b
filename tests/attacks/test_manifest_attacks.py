"""Manifests as an attacker or a broken disk would make them: correctly signed, and wrong inside."""

from __future__ import annotations

import pickle
import resource
import time

import pytest

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import ManifestError
from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.manifest import SectionEntry, SignedManifest, encode_body
from hotswarm.snapshot.sections import chunk_digest
from hotswarm.store.placement import StoredManifest
from support.snapshots import draft, state
from support.stores import SIGNER, in_child, small_store, write


class Bomb:
    """Leaves a file behind when it is unpickled."""

    path = None

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def honest():
    made, streams = draft(**state(1, outer=1))
    entries = {}
    for name, section in made.sections.items():
        spans = layout(section.leaves).chunks
        entries[name] = SectionEntry.of(section, [chunk_digest(streams[name][s.offset : s.end]) for s in spans])
    return pb.Manifest.FromString(encode_body(made.with_sections(entries, SIGNER.node_id)))


def sign(message):
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return pb.SignedManifest(
        body=body, public_key=SIGNER.public_key, signature=SIGNER.sign(b"hotswarm-manifest-v1\0" + body)
    ).SerializeToString()


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def tensor(message):
    return next(leaf for leaf in message.sections[0].leaves if leaf.WhichOneof("what") == "tensor").tensor


def value(message, **changes):
    leaf = next(leaf for leaf in message.sections[0].leaves if leaf.WhichOneof("what") == "value")
    leaf.value.CopyFrom(pb.Value(**changes))


def set_path(path):
    def attack(message):
        message.sections[0].leaves[-1].path = path

    return attack


def set_shape(*shape, dtype="float32"):
    def attack(message):
        tensor(message).CopyFrom(pb.Tensor(dtype=dtype, shape=shape))

    return attack


def set_field(name, new):
    return lambda message: setattr(message, name, new)


def pickled_dtype(message):
    tensor(message).dtype = pickle.dumps(Bomb(), protocol=0).decode("latin-1")


def cyclic_alias(message):
    message.sections[0].leaves[-1].alias = message.sections[0].leaves[-1].path


def deep_path(message):
    message.sections[0].leaves[-1].path = "[" * 3000 + "]" * 3000


def twice_a_section(message):
    message.sections.add().CopyFrom(message.sections[0])


def swapped_chunks(message):
    section = next(one for one in message.sections if len(one.chunks) >= 64)
    section.chunks = section.chunks[32:64] + section.chunks[:32] + section.chunks[64:]


ATTACKS = {
    "a path that is no path": set_path("../../x"),
    "a path with a step upwards and no container": set_path('["../x","y"]'),
    "a path of an absolute file under nothing": set_path('["/etc/passwd",0]'),
    "a path of 3000 brackets": deep_path,
    "a product that overflows to nothing": set_shape(1 << 32, 1 << 32),
    "a product that overflows to a little": set_shape((1 << 62) + 1, 4),
    "a size of 2^63": set_shape(1 << 63, dtype="uint8"),
    "a size of 2^64 - 1": set_shape((1 << 64) - 1, dtype="uint8"),
    "an exabyte within the limits": set_shape(1 << 60, dtype="uint8"),
    "thirty-three dimensions": set_shape(*[1] * 33),
    "an unknown dtype": set_shape(1, dtype="object"),
    "a quantized dtype": set_shape(1, dtype="quint8"),
    "a pickle for a dtype": pickled_dtype,
    "a run that leaves the folder": set_field("run", "../x"),
    "a run that is the folder above": set_field("run", ".."),
    "a node that is a path": set_field("node", "/" * 40),
    "a kind that is a path": set_field("kind", "../hot"),
    "a step below zero": set_field("outer_step", -1),
    "a format of the future": set_field("format", 2),
    "no section": lambda message: message.ClearField("sections"),
    "an unknown section": lambda message: setattr(message.sections[0], "name", "../outer"),
    "a section twice": twice_a_section,
    "chunks in another order": swapped_chunks,
    "a chunk too many": lambda message: setattr(message.sections[0], "chunks", message.sections[0].chunks + b"\0" * 32),
    "a chunk too few": lambda message: setattr(message.sections[0], "chunks", message.sections[0].chunks[32:]),
    "half a digest": lambda message: setattr(message.sections[0], "chunks", message.sections[0].chunks[:-1]),
    "a stream of 2^63 bytes": lambda message: setattr(message.sections[0], "stream_bytes", 1 << 63),
    "another section digest": lambda message: setattr(message.sections[0], "digest", b"\0" * 32),
    "no section digest": lambda message: setattr(message.sections[0], "digest", b""),
    "a leaf of no kind": lambda message: message.sections[0].leaves.add(path='["zz"]'),
    "a value of no kind": value,
    "an integer without end": lambda message: value(message, integer=b"\x01" * 70_000),
    "an alias of itself": cyclic_alias,
    "a container of an unknown kind": lambda message: setattr(message.sections[0].leaves[0], "container", "set"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_refused_in_one_line_quickly_and_with_nothing_done(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Bomb.path = tmp_path / "bomb"
    message = honest()
    ATTACKS[name](message)
    started = time.perf_counter()
    with pytest.raises(ManifestError) as error:
        SignedManifest.parse(sign(message))
    assert time.perf_counter() - started < 1
    assert 10 < len(str(error.value)) < 1000
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_honest_one_is_accepted():
    assert SignedManifest.parse(sign(honest())).manifest.run == "default"


def test_bytes_that_are_no_protobuf_are_refused():
    for junk in (b"", b"\0", b"\xff" * 100, pickle.dumps(Bomb()), b"\x0a\xff\xff\xff\xff\x0f", b"PK\3\4" * 50):
        for data in (junk, sign(junk)):
            with pytest.raises(ManifestError):
                SignedManifest.parse(data)


def test_sixteen_megabytes_of_leaves_do_not_take_the_machine_down():
    """The costliest manifest that fits, as many tiny leaves as there is room for, is refused in bounded memory."""

    def job():
        leaves = pb.Manifest(format=1).SerializeToString() + b"\x6a" + varint(15 << 20) + b"\x12\0" * (15 << 19)
        sections = pb.Manifest(format=1).SerializeToString() + b"\x6a\0" * (15 << 19)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for body, said in ((leaves, "more than 500000 leaves"), (sections, "more than 3 sections")):
            with pytest.raises(ManifestError, match=said):
                SignedManifest.parse(sign(body))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB

    assert in_child(job) == 0


PLACEMENTS = {
    "a pack above the folder": {"pack": "../../../etc/passwd"},
    "an absolute pack": {"pack": "/etc/passwd"},
    "a pack of another kind": {"pack": "outer-0123456789abcdef.pack.tmp"},
    "a shared pack above the folder": {"shared_pack": "../inner-0123456789abcdef.pack"},
    "an unknown section": {"section": "../inner"},
    "too few chunks": {"offsets": []},
    "a fourth place": {"offsets": [3]},
    "an offset past every file": {"offsets": [((1 << 62) - 1) << 2]},
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_stored_manifests_with_bad_places_are_refused(tmp_path, name):
    from blake3 import blake3

    with small_store(tmp_path) as store:
        kept = write(store, 1)
        victim = write(store, 2)
        message = pb.StoredManifest.FromString(victim.path.read_bytes()[:-32])
        placement = next(one for one in message.placements if one.section == "private")
        for field, new in PLACEMENTS[name].items():
            if field == "offsets":
                del placement.offsets[:]
                placement.offsets.extend(new)
            else:
                setattr(placement, field, new)
        data = message.SerializeToString()
        with pytest.raises(ManifestError):
            StoredManifest.parse(data + blake3(data).digest())
        victim.path.write_bytes(data + blake3(data).digest())
        assert store.snapshots() == [kept]
        assert victim.snapshot_id in store.health[0]


def test_an_offset_behind_the_end_of_a_pack_is_no_snapshot(tmp_path):
    from blake3 import blake3

    with small_store(tmp_path) as store:
        kept = write(store, 1)
        victim = write(store, 2)
        message = pb.StoredManifest.FromString(victim.path.read_bytes()[:-32])
        message.placements[0].offsets[0] = 1 << 40
        data = message.SerializeToString()
        victim.path.write_bytes(data + blake3(data).digest())
        assert store.snapshots() == [kept]
        assert "ends before chunk 0" in store.health[0]
