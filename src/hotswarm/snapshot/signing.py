"""Signatures over manifests and other statements: ECDSA P-256 with SHA-256.

The curve is grpcio's choice, not ours: it refuses Ed25519 certificates, and one key signs both.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from hotswarm.ids import NodeId

PUBLIC_KEY_BYTES = 33
SIGNATURE_BYTES = 64


class Signer(Protocol):
    """A node's identity, as far as signing goes."""

    @property
    def public_key(self) -> bytes:
        """The compressed P-256 point, 33 bytes."""
        ...

    @property
    def node_id(self) -> NodeId:
        """sha256(public key, SPKI DER)[:20] in hex."""
        ...

    def sign(self, message: bytes) -> bytes:
        """ECDSA-SHA256 as r || s, 64 bytes."""
        ...


def load_public_key(public_key: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a compressed point; ValueError for anything else."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), public_key)


def node_id_of(public_key: bytes) -> NodeId:
    """The node id of a compressed point. ValueError when it is not a point of the curve."""
    spki = load_public_key(public_key).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return NodeId(hashlib.sha256(spki).digest()[:20].hex())


def signature_is_good(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` (r || s) is the key's over `message`. False, too, for what is no key or no signature."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    half = SIGNATURE_BYTES // 2
    der = encode_dss_signature(int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big"))
    try:
        load_public_key(public_key).verify(der, message, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True
