"""A node's lasting identity: one P-256 key in `<state_dir>/node.key`.

The node id is the first 20 bytes of sha256 over the public key's SPKI DER encoding, as 40 hex digits. The same 160
bits are the Kademlia id and the certificate's common name, so a name can always be checked against the key that claims
it. ECDSA P-256 and not Ed25519, because the TLS stack inside grpcio refuses Ed25519 certificates.

Public keys travel as compressed points (33 bytes), signatures as r || s (64 bytes, big-endian); `snapshot.signing`
checks them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from hotswarm.errors import LocalFailure
from hotswarm.ids import NodeId
from hotswarm.snapshot.signing import SIGNATURE_BYTES

log = logging.getLogger(__name__)

KEY_FILE = "node.key"
_HALF = SIGNATURE_BYTES // 2
_ECDSA = ec.ECDSA(hashes.SHA256())


def node_id_of(public_key: ec.EllipticCurvePublicKey) -> NodeId:
    """The node id that belongs to a key."""
    der = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return NodeId(hashlib.sha256(der).hexdigest()[:40])


class NodeIdentity:
    """The private key of this node and what follows from it. Implements `snapshot.signing.Signer`."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        if not isinstance(key.curve, ec.SECP256R1):
            raise LocalFailure(f"a node key must be on the curve P-256, not {key.curve.name}")
        self._key = key
        self.public = key.public_key()
        self.public_key = self.public.public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
        )
        self.node_id = node_id_of(self.public)

    @classmethod
    def generate(cls) -> NodeIdentity:
        """A new identity that lives in memory only."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def load_or_create(cls, state_dir: Path) -> NodeIdentity:
        """The identity of this state directory; made at the first start.

        Two processes that start at once end up with the same key. LocalFailure when the file cannot be read, is not a
        P-256 key, or cannot be written.
        """
        path = Path(state_dir) / KEY_FILE
        try:
            return cls._load(path)
        except FileNotFoundError:
            pass
        identity = cls.generate()
        try:
            Path(state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(path, identity.private_pem)
        except FileExistsError:
            return cls._load(path)
        except OSError as e:
            raise LocalFailure(f"cannot write the node key {path}: {e.strerror or e}; check the directory") from e
        return identity

    @classmethod
    def _load(cls, path: Path) -> NodeIdentity:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise LocalFailure(f"cannot read the node key {path}: {e.strerror or e}; check its owner and mode") from e
        with os.fdopen(fd, "rb") as f:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                log.warning("the node key %s can be read by other users; chmod 600 it", path)
            data = f.read(16384)
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError) as e:
            raise LocalFailure(
                f"the node key {path} is damaged; move it away and this node starts again under a new id"
            ) from e
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise LocalFailure(f"the node key {path} is not a P-256 key; move it away and a new one is made")
        return cls(key)

    @property
    def kademlia_id(self) -> bytes:
        """The node id as 20 bytes."""
        return bytes.fromhex(self.node_id)

    @property
    def private_pem(self) -> bytes:
        """PKCS8, unencrypted: what is on disk, and what the TLS library wants."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def sign(self, message: bytes) -> bytes:
        """ECDSA-SHA256 over `message`: 64 bytes, r || s."""
        r, s = decode_dss_signature(self._key.sign(message, _ECDSA))
        return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")

    def __repr__(self) -> str:
        return f"NodeIdentity({self.node_id})"


def _write_new(path: Path, data: bytes) -> None:
    """Whole or not at all; FileExistsError when another process was first."""
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.link(tmp, path)  # unlike a rename, this never replaces a key that is already there
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        os.unlink(tmp)
