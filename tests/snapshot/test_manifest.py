from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from blake3 import blake3

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import ManifestError
from hotswarm.ids import NodeId
from hotswarm.snapshot import limits
from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.manifest import Manifest, SectionEntry, SignedManifest, encode_body, parse_body
from hotswarm.snapshot.sections import SectionDraft, arch_fingerprint, chunk_digest
from hotswarm.snapshot.tree import Container, Leaf, TensorSpec
from support.snapshots import KeySigner, draft, state

SIGNER = KeySigner()


def manifest(**changes):
    made, streams = draft(**state(3, outer=2), outer_step=4, training_step=7)
    entries = {}
    for name, section in made.sections.items():
        spans = layout(section.leaves).chunks
        entries[name] = SectionEntry.of(section, [chunk_digest(streams[name][s.offset : s.end]) for s in spans])
    return replace(made.with_sections(entries, SIGNER.node_id), **changes)


def with_leaves(leaves):
    return manifest(sections={"inner": SectionEntry.of(SectionDraft("inner", tuple(leaves)), [])})


def check(made, good, said="limit"):
    """Signing refuses what parsing refuses."""
    if good:
        assert SignedManifest.parse(SignedManifest.sign(made, SIGNER).to_bytes()).manifest == made
        return
    with pytest.raises(ManifestError, match=said):
        SignedManifest.sign(made, SIGNER)
    with pytest.raises(ManifestError, match=said):
        parse_body(encode_body(made))


def test_a_manifest_comes_back_and_its_id_names_its_body():
    signed = SignedManifest.sign(manifest(), SIGNER)
    again = SignedManifest.parse(signed.to_bytes())
    assert again == signed
    assert again.manifest == manifest()
    assert again.snapshot_id == blake3(signed.body).digest()[:16].hex()
    assert again.manifest.order_key == (4, 7, 0)
    assert again.manifest.outer_digest == manifest().sections["outer"].digest


def test_the_node_id_is_the_hash_of_the_key_in_its_standard_form():
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), SIGNER.public_key)
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert hashlib.sha256(der).hexdigest()[:40] == SIGNER.node_id


def test_a_flipped_bit_anywhere_in_a_signed_manifest_is_noticed():
    data = bytearray(SignedManifest.sign(manifest(), SIGNER).to_bytes())
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        with pytest.raises(ManifestError):
            SignedManifest.parse(bytes(data))
        data[at] ^= 1 << at % 8


def test_a_manifest_cut_anywhere_is_refused():
    data = SignedManifest.sign(manifest(), SIGNER).to_bytes()
    for size in range(len(data)):
        with pytest.raises(ManifestError):
            SignedManifest.parse(data[:size])


def test_another_members_signature_under_this_nodes_name_is_refused():
    other = KeySigner()
    body = encode_body(manifest())
    forged = pb.SignedManifest(
        body=body, public_key=other.public_key, signature=other.sign(b"hotswarm-manifest-v1\0" + body)
    )
    with pytest.raises(ManifestError, match="signed by another"):
        SignedManifest.parse(forged.SerializeToString())


@pytest.mark.parametrize("key", [b"", b"\0" * 33, b"\x02" + b"\xff" * 32, b"\x04" + b"\1" * 64])
def test_a_key_that_is_no_point_is_a_wrong_signature_not_a_crash(key):
    forged = pb.SignedManifest(body=encode_body(manifest()), public_key=key, signature=b"\1" * 64)
    with pytest.raises(ManifestError, match="signature"):
        SignedManifest.parse(forged.SerializeToString())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "../x"}, "run name"),
        ({"run": ".."}, "run name"),
        ({"run": ""}, "run name"),
        ({"run": "r" * 65}, "run name"),
        ({"kind": "warm"}, "kind"),
        ({"kind": ""}, "kind"),
        ({"outer_step": -1}, "outer_step"),
        ({"inner_step": -1}, "inner_step"),
        ({"training_step": -1}, "training_step"),
        ({"arch": b"\0" * 31}, "arch"),
        ({"arch": b"\0" * 33}, "arch"),
        ({"sections": {}}, "sections"),
    ],
)
def test_fields_that_cannot_be_are_refused(changes, said):
    check(manifest(**changes), good=False, said=said)


@pytest.mark.parametrize("node", ["", "A" * 40, "0" * 39, "../" + "0" * 37])
def test_a_node_that_is_no_id_is_refused(node):
    with pytest.raises(ManifestError, match="hex digits"):
        parse_body(encode_body(manifest(node=NodeId(node))))


def test_steps_and_sequence_go_to_their_limit():
    check(manifest(seq=limits.MAX_STEP, outer_step=limits.MAX_STEP, training_step=limits.MAX_STEP), good=True)
    message = pb.Manifest.FromString(encode_body(manifest()))
    message.seq = limits.MAX_STEP + 1
    with pytest.raises(ManifestError, match="seq"):
        parse_body(message.SerializeToString())


def test_text_limits():
    for extra in (-1, 0, 1):
        check(manifest(label="é" + "x" * (limits.MAX_LABEL_BYTES - 2 + extra)), good=extra <= 0)
        check(manifest(engine="x" * (limits.MAX_ENGINE_BYTES + extra)), good=extra <= 0)


def test_the_number_of_tensors(monkeypatch):
    monkeypatch.setattr("hotswarm.snapshot.manifest.MAX_TENSORS", 50)
    for extra in (-1, 0, 1):
        leaves = [Leaf((), Container("dict"))]
        leaves += [Leaf((f"t{i}",), TensorSpec("float32", (0,))) for i in range(50 + extra)]
        check(with_leaves(leaves), good=extra <= 0, said="tensors, the limit is 50")


def test_the_number_of_tensors_counts_all_sections(monkeypatch):
    tensors = sum(isinstance(leaf.what, TensorSpec) for e in manifest().sections.values() for leaf in e.leaves)
    for limit, good in ((tensors - 1, False), (tensors, True)):
        monkeypatch.setattr("hotswarm.snapshot.manifest.MAX_TENSORS", limit)
        check(manifest(), good=good)


def test_the_number_of_leaves(monkeypatch):
    leaves = [Leaf((), Container("list"))] + [Leaf((i,), None) for i in range(20)]
    body = encode_body(with_leaves(leaves))
    for limit, good in ((20, False), (21, True), (22, True)):
        monkeypatch.setattr("hotswarm.snapshot.prescan.MAX_LEAVES", limit)
        if good:
            parse_body(body)
        else:
            with pytest.raises(ManifestError, match="leaves"):
                parse_body(body)


def test_the_number_of_sections():
    message = pb.Manifest.FromString(encode_body(manifest()))
    assert len(message.sections) == limits.MAX_SECTIONS
    parse_body(message.SerializeToString())
    message.sections.add(name="inner")
    with pytest.raises(ManifestError, match="more than 3 sections"):
        parse_body(message.SerializeToString())


def test_an_arch_fingerprint_that_is_not_that_of_the_parameters_is_a_lie():
    honest = arch_fingerprint(manifest().sections["inner"].leaves)
    check(manifest(arch=honest), good=True)
    check(manifest(arch=honest[::-1]), good=False, said="arch fingerprint is not that of")
    outer_only = {"outer": manifest().sections["outer"]}
    check(manifest(arch=honest[::-1], sections=outer_only), good=True)  # nothing here to hold it against


def test_the_size_of_a_manifest_to_the_byte():
    def of_size(extra):
        filler = b"x" * (limits.MAX_MANIFEST_BYTES - base + extra)
        return with_leaves([Leaf((), Container("dict")), Leaf(("v",), filler)])

    base = 0
    base = len(SignedManifest.sign(of_size(-(1 << 20)), SIGNER).to_bytes()) - (15 << 20)
    for extra in (-1, 0, 1):
        made = of_size(extra)
        body = encode_body(made)
        message = pb.SignedManifest(
            body=body, public_key=SIGNER.public_key, signature=SIGNER.sign(b"hotswarm-manifest-v1\0" + body)
        ).SerializeToString()
        assert len(message) == limits.MAX_MANIFEST_BYTES + extra
        if extra <= 0:
            assert SignedManifest.parse(message).manifest == made
            SignedManifest.sign(made, SIGNER)
        else:
            with pytest.raises(ManifestError, match=f"{len(message)} bytes, the limit is"):
                SignedManifest.parse(message)
            with pytest.raises(ManifestError, match="limit"):
                SignedManifest.sign(made, SIGNER)


def test_what_the_limits_are():
    """The numbers that the design fixes."""
    assert limits.MAX_MANIFEST_BYTES == 16 * 1024 * 1024
    assert limits.MAX_TENSORS == 200_000
    assert limits.MAX_NDIM == 32
    assert Manifest.__dataclass_params__.frozen
