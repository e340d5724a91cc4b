from __future__ import annotations

import base64
import hashlib
import hmac
import stat
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hotswarm.errors import ConfigError, LocalFailure, NotAuthorised
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.swarmkey import (
    Membership,
    SwarmKey,
    is_loopback,
    issue_leaf,
    keys_or_loopback,
    leaf_id,
    parse_key_text,
    read_key_file,
    write_join_file,
    write_key_file,
)

KEY = SwarmKey(bytes(range(32)))


def hkdf(secret: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with SHA-256 and no salt, written out."""
    prk = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    out, block, i = b"", b"", 1
    while len(out) < length:
        block = hmac.new(prk, block + info + bytes([i]), hashlib.sha256).digest()
        out, i = out + block, i + 1
    return out[:length]


def test_derived_keys_are_those_of_rfc_5869():
    assert KEY.udp_key == hkdf(KEY.secret, b"udp-v1", 32)
    assert KEY.run_secret == hkdf(KEY.secret, b"run-id", 32)
    n = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    scalar = int.from_bytes(hkdf(KEY.secret, b"swarm-ca-v1", 48), "big") % (n - 1) + 1
    assert KEY.ca_key.private_numbers().private_value == scalar


def test_every_process_arrives_at_the_same_ca_certificate():
    code = (
        "from hotswarm.swarm.swarmkey import *; from hotswarm.swarm.swarmkey import _pem;"
        "print(_pem(SwarmKey(bytes(range(32))).ca_cert).decode())"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert elsewhere.stdout.strip() == KEY.ca_cert.public_bytes(serialization.Encoding.PEM).decode().strip()
    assert SwarmKey.generate().ca_cert != KEY.ca_cert


def test_a_leaf_is_issued_by_the_swarm_for_the_nodes_own_name():
    identity = NodeIdentity.generate()
    leaf = x509.load_pem_x509_certificate(Membership.from_keys([KEY], identity).leaf_pem)
    leaf.verify_directly_issued_by(KEY.ca_cert)
    assert leaf_id(leaf) == identity.node_id
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [identity.node_id, "hotswarm"]
    assert len(leaf.public_bytes(serialization.Encoding.DER)) < 600


def test_a_name_that_is_not_the_keys_hash_is_no_id():
    a, b = NodeIdentity.generate(), NodeIdentity.generate()
    assert leaf_id(issue_leaf(KEY.ca_key, KEY.ca_cert, b.public, claim=a.node_id)) is None
    other_curve = ec.generate_private_key(ec.SECP384R1()).public_key()
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(KEY.ca_cert.subject)
        .public_key(other_curve)
        .serial_number(7)
        .not_valid_before(KEY.ca_cert.not_valid_before_utc)
        .not_valid_after(KEY.ca_cert.not_valid_after_utc)
        .sign(KEY.ca_key, hashes.SHA256())
    )
    assert leaf_id(cert) is None


def test_keygen_writes_a_text_file_that_only_its_owner_reads_and_never_replaces_one(tmp_path):
    path = tmp_path / "swarm.key"
    write_key_file(path, KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines == [base64.b64encode(KEY.secret).decode()]
    assert read_key_file(path).keys == (KEY,)
    with pytest.raises(LocalFailure, match="exists"):
        write_key_file(path, SwarmKey.generate())
    assert read_key_file(path).keys == (KEY,)


def test_a_join_file_brings_addresses_and_key(tmp_path):
    path = tmp_path / "join"
    write_join_file(path, KEY, ["10.0.0.7:7411", "[2001:db8::1]:7411", "seed.example:7411"])
    got = read_key_file(path)
    assert got.keys == (KEY,)
    assert got.peers == ("10.0.0.7:7411", "[2001:db8::1]:7411", "seed.example:7411")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_keys_are_accepted_and_three_are_not():
    two = parse_key_text(f"{KEY.text}\n# the next one\nkey {SwarmKey.generate().text}\n", "f")
    assert two.keys[0] == KEY
    assert len(two.keys) == 2
    with pytest.raises(NotAuthorised, match="3 swarm keys"):
        parse_key_text("\n".join([KEY.text] * 3), "f")


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "not base64!", base64.b64encode(bytes(31)).decode(), "key c2hvcnQ="]
)
def test_what_is_no_key_is_refused_without_being_shown(text):
    with pytest.raises(NotAuthorised) as refused:
        parse_key_text(text, "the file")
    assert refused.value.exit_code == 12
    assert "the file" in str(refused.value)
    if text and not text.startswith("#"):
        assert text.split()[-1] not in str(refused.value)


def test_a_missing_or_binary_key_file_is_not_authorised(tmp_path):
    with pytest.raises(NotAuthorised, match="keygen"):
        read_key_file(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(NotAuthorised, match="not text"):
        read_key_file(tmp_path / "binary")


def test_the_key_does_not_show_in_its_repr():
    assert KEY.text not in repr(KEY)
    assert repr(KEY.secret) not in repr(KEY)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7411", "127.8.9.10", "localhost:1", "[::1]:7411", "::1", "[::ffff:127.0.0.1]:5"]
)
def test_without_a_key_loopback_swarms_run_under_the_public_one_with_a_warning(address, caplog):
    (key,) = keys_or_loopback((), [address])
    assert key == SwarmKey.public_loopback()
    assert "no swarm key" in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:7411",
        "10.0.0.7:7411",
        "localhost.evil.example:1",
        "[::]:7411",
        "128.0.0.1:1",
        "127.0.0.1.nip.example:5",
    ],
)
def test_without_a_key_any_other_address_exits_12(address):
    assert not is_loopback(address)
    with pytest.raises(NotAuthorised, match="keygen") as refused:
        keys_or_loopback((), ["127.0.0.1:7411", address])
    assert refused.value.exit_code == 12
    assert keys_or_loopback((KEY,), [address]) == (KEY,)


def test_an_operators_leaf_is_accepted_only_on_its_node():
    a, b = NodeIdentity.generate(), NodeIdentity.generate()
    leaf = issue_leaf(KEY.ca_key, KEY.ca_cert, a.public).public_bytes(serialization.Encoding.PEM)
    roots = KEY.ca_cert.public_bytes(serialization.Encoding.PEM)
    assert Membership.issued(roots, leaf, KEY.udp_key, KEY.run_secret, a).leaf_pem == leaf
    with pytest.raises(ConfigError, match="another key"):
        Membership.issued(roots, leaf, KEY.udp_key, KEY.run_secret, b)
    with pytest.raises(ConfigError, match="cannot be read"):
        Membership.issued(b"nothing", leaf, KEY.udp_key, KEY.run_secret, a)
