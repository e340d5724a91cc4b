from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from hotswarm.errors import LocalFailure
from hotswarm.snapshot.signing import node_id_of, signature_is_good
from hotswarm.swarm.identity import NodeIdentity

SPKI_P256 = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")  # RFC 5480, up to the point


def test_the_node_id_is_the_hash_of_the_spki_put_together_by_hand():
    identity = NodeIdentity.generate()
    numbers = identity.public.public_numbers()
    point = b"\x04" + numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
    expected = hashlib.sha256(SPKI_P256 + point).digest()[:20]
    assert identity.node_id == expected.hex()
    assert identity.kademlia_id == expected
    assert node_id_of(identity.public_key) == identity.node_id
    assert identity.public_key == bytes([2 + numbers.y % 2]) + numbers.x.to_bytes(32, "big")


def test_a_signature_verifies_for_its_message_and_key_only():
    a, b = NodeIdentity.generate(), NodeIdentity.generate()
    signature = a.sign(b"message")
    assert len(signature) == 64
    assert signature_is_good(a.public_key, b"message", signature)
    assert not signature_is_good(a.public_key, b"Message", signature)
    assert not signature_is_good(b.public_key, b"message", signature)


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    state = tmp_path / "state"
    first = NodeIdentity.load_or_create(state)
    assert NodeIdentity.load_or_create(state).node_id == first.node_id
    assert stat.S_IMODE((state / "node.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert os.listdir(state) == ["node.key"]
    assert first.private_pem.decode() not in repr(first)


def test_processes_that_start_at_once_on_one_directory_end_up_with_one_key(tmp_path):
    code = (
        "import sys; from hotswarm.swarm.identity import NodeIdentity;"
        "print(NodeIdentity.load_or_create(sys.argv[1]).node_id)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "s"], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ids = {child.communicate(timeout=60)[0] for child in children}
    assert len(ids) == 1
    assert os.listdir(tmp_path / "s") == ["node.key"]


def ed25519_key() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def p384_key() -> bytes:
    return ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize("content", [lambda: b"", lambda: b"garbage", ed25519_key, p384_key])
def test_a_key_file_that_is_none_is_refused_and_left_alone(tmp_path, content):
    data = content()
    (tmp_path / "node.key").write_bytes(data)
    with pytest.raises(LocalFailure, match=r"node.key|P-256"):
        NodeIdentity.load_or_create(tmp_path)
    assert (tmp_path / "node.key").read_bytes() == data


def test_a_link_in_place_of_the_key_is_not_followed(tmp_path):
    elsewhere = NodeIdentity.load_or_create(tmp_path / "other")
    state = tmp_path / "state"
    state.mkdir()
    (state / "node.key").symlink_to(tmp_path / "other" / "node.key")
    with pytest.raises(LocalFailure, match=r"node\.key"):
        NodeIdentity.load_or_create(state)
    assert NodeIdentity.load_or_create(tmp_path / "other").node_id == elsewhere.node_id


def test_a_readable_key_is_used_with_a_warning(tmp_path, caplog):
    NodeIdentity.load_or_create(tmp_path)
    (tmp_path / "node.key").chmod(0o644)
    NodeIdentity.load_or_create(tmp_path)
    assert "can be read by other users" in caplog.text
