"""Who is in the swarm: the key file, what is derived from it, and the join file.

`swarm.key` is a text file, mode 0600, that members copy to each other as they would a WireGuard key:

    # hotswarm swarm key: whoever holds it is a member
    <base64 of 32 random bytes>

While a key is being replaced the file holds two: the first is used, both are accepted. A join file is the same with
addresses, so that one file is all that a new machine needs:

    peer 10.0.0.7:7411
    key <base64 of 32 random bytes>

Everything is derived with HKDF-SHA256, so every member arrives at the same values with no server: the certificate
authority ("swarm-ca-v1"), the key that seals DHT datagrams ("udp-v1"), and the secret that blinds run names in DHT
keys ("run-id").

The runtime never asks for the swarm key itself, only for a `Membership`. In operator mode a node gets that from files
that an operator issued (a CA certificate, its own leaf, the datagram key), and the CA key stays elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hotswarm.errors import ConfigError, LocalFailure, NotAuthorised
from hotswarm.ids import NodeId
from hotswarm.swarm.identity import NodeIdentity, node_id_of

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_KEYS = 2
COMMON_NAME = "hotswarm"
"""A name that every leaf carries beside its id, for dialling an address whose id is not known yet."""

_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_UTC = dt.UTC
# Fixed and far apart, so that a machine whose clock is wrong can still recover from its neighbours.
_NOT_BEFORE = dt.datetime(2020, 1, 1, tzinfo=_UTC)
_NOT_AFTER = dt.datetime(2120, 1, 1, tzinfo=_UTC)
_MAX_FILE_BYTES = 65536


@dataclass(frozen=True)
class SwarmKey:
    """One 32-byte secret and what it stands for."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ConfigError(f"a swarm key has {KEY_BYTES} bytes, not {len(self.secret)}", "swarm_key")

    @classmethod
    def generate(cls) -> SwarmKey:
        """A new key from the system's random source."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def public_loopback(cls) -> SwarmKey:
        """The constant that everyone knows. It protects nothing, so it is for one machine's loopback only."""
        return cls(hashlib.sha256(b"hotswarm: the public key of swarms that never leave the loopback").digest())

    @property
    def text(self) -> str:
        """The key as base64, one line without its end."""
        return base64.b64encode(self.secret).decode("ascii")

    @cached_property
    def ca_key(self) -> ec.EllipticCurvePrivateKey:
        """The key of the swarm's certificate authority; the same on every member."""
        number = int.from_bytes(self._derive(b"swarm-ca-v1", 48), "big") % (_P256_ORDER - 1) + 1
        return ec.derive_private_key(number, ec.SECP256R1())

    @cached_property
    def ca_cert(self) -> x509.Certificate:
        """The authority's certificate, byte for byte the same on every member (RFC 6979 signature)."""
        # The subject differs from key to key: with two roots of one name, chain building may try the wrong one.
        subject = _name(f"hotswarm-ca-{node_id_of(self.ca_key.public_key())[:16]}")
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(self.ca_key.public_key())
            .serial_number(1)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.ca_key.public_key()), critical=False)
            .sign(self.ca_key, hashes.SHA256(), ecdsa_deterministic=True)
        )

    @property
    def udp_key(self) -> bytes:
        """ChaCha20-Poly1305 key of the DHT's datagrams, 32 bytes."""
        return self._derive(b"udp-v1", 32)

    @property
    def run_secret(self) -> bytes:
        """What blinds run names in the DHT's keys, 32 bytes."""
        return self._derive(b"run-id", 32)

    def _derive(self, purpose: bytes, length: int) -> bytes:
        return HKDF(hashes.SHA256(), length, salt=None, info=purpose).derive(self.secret)

    def __repr__(self) -> str:
        return "SwarmKey(…)"  # never in a log


@dataclass(frozen=True)
class Membership:
    """All that a node needs to take part: trust roots, its own certificate, and the datagram secrets.

    `udp_keys` and `run_secrets` have the one in use first; the others are accepted.
    """

    roots_pem: bytes
    leaf_pem: bytes
    udp_keys: tuple[bytes, ...]
    run_secrets: tuple[bytes, ...]

    @classmethod
    def from_keys(cls, keys: Sequence[SwarmKey], identity: NodeIdentity) -> Membership:
        """The usual way: this node issues its own leaf with the CA key that the first swarm key gives it."""
        if not 1 <= len(keys) <= MAX_KEYS:
            raise ConfigError(f"one swarm key, or two while it is being replaced; not {len(keys)}", "swarm_key")
        return cls(
            roots_pem=b"".join(_pem(k.ca_cert) for k in keys),
            leaf_pem=_pem(issue_leaf(keys[0].ca_key, keys[0].ca_cert, identity.public)),
            udp_keys=tuple(k.udp_key for k in keys),
            run_secrets=tuple(k.run_secret for k in keys),
        )

    @classmethod
    def issued(
        cls, roots_pem: bytes, leaf_pem: bytes, udp_key: bytes, run_secret: bytes, identity: NodeIdentity
    ) -> Membership:
        """Operator mode: the leaf was issued elsewhere. ConfigError when it is not this node's."""
        try:
            leaf = x509.load_pem_x509_certificate(leaf_pem)
            x509.load_pem_x509_certificates(roots_pem)
        except ValueError as e:
            raise ConfigError(f"the certificate from the operator cannot be read: {e}", "swarm_key") from e
        if leaf_id(leaf) != identity.node_id:
            raise ConfigError(
                f"the certificate from the operator belongs to another key than this node's ({identity.node_id}); "
                "ask for one issued for this node id",
                "swarm_key",
            )
        return cls(roots_pem, leaf_pem, (udp_key,), (run_secret,))


def issue_leaf(
    ca_key: ec.EllipticCurvePrivateKey,
    ca_cert: x509.Certificate,
    public_key: ec.EllipticCurvePublicKey,
    claim: NodeId | None = None,
) -> x509.Certificate:
    """A node's certificate. `claim` names it other than by its key, which only an attacker wants: tests do."""
    node_id = claim or node_id_of(public_key)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(node_id))
        .issuer_name(ca_cert.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(node_id), x509.DNSName(COMMON_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def leaf_id(leaf: x509.Certificate) -> NodeId | None:
    """The node id of a certificate, or None when the name it bears is not its key's hash."""
    key = leaf.public_key()
    names = leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    if not isinstance(key, ec.EllipticCurvePublicKey) or len(names) != 1:
        return None
    node_id = node_id_of(key)
    return node_id if names[0].value == node_id else None


def run_tag(run_secret: bytes, run: str) -> bytes:
    """What stands for a run's name in the DHT, 32 bytes; says nothing to those without the key."""
    return hmac.new(run_secret, run.encode("ascii"), hashlib.sha256).digest()


# ------------------------------------------------------------------ files


@dataclass(frozen=True)
class KeyFile:
    """What a key file or a join file says."""

    keys: tuple[SwarmKey, ...]
    peers: tuple[str, ...] = ()


def parse_key_text(text: str, where: str) -> KeyFile:
    """Read the text of a key file or join file; NotAuthorised names `where` and the line, never the line's content."""
    keys: list[SwarmKey] = []
    peers: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "peer" and rest.strip():
            peers.append(rest.strip())
            continue
        encoded = rest.strip() if word == "key" else line
        try:
            secret = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            secret = b""
        if len(secret) != KEY_BYTES:
            raise NotAuthorised(
                f"{where}, line {number}: not a swarm key ({KEY_BYTES} bytes as base64); copy the file that "
                "`swarm-node keygen` wrote"
            )
        keys.append(SwarmKey(secret))
    if not 1 <= len(keys) <= MAX_KEYS:
        raise NotAuthorised(f"{where} holds {len(keys)} swarm keys; it needs one, or two while a key is replaced")
    return KeyFile(tuple(keys), tuple(peers))


def read_key_file(path: Path) -> KeyFile:
    """Read a key file or join file. NotAuthorised when it is missing or is none."""
    try:
        with open(path, "rb") as f:
            if stat.S_IMODE(os.fstat(f.fileno()).st_mode) & 0o077:
                log.warning("the swarm key %s can be read by other users; chmod 600 it", path)
            data = f.read(_MAX_FILE_BYTES)
        text = data.decode("ascii")
    except OSError as e:
        raise NotAuthorised(
            f"cannot read the swarm key {path}: {e.strerror or e}; make one with `swarm-node keygen`"
        ) from e
    except UnicodeDecodeError as e:
        raise NotAuthorised(f"{path} is not a swarm key file: it is not text") from e
    return parse_key_text(text, str(path))


def write_key_file(path: Path, key: SwarmKey) -> None:
    """Write a new key file, 0600. Never replaces one: LocalFailure when `path` exists."""
    _write_secret(path, f"# hotswarm swarm key: whoever holds it is a member\n{key.text}\n")


def write_join_file(path: Path, key: SwarmKey, peers: Iterable[str]) -> None:
    """Write a new join file (addresses and key), 0600. Never replaces one."""
    lines = "".join(f"peer {p}\n" for p in peers)
    _write_secret(path, f"# hotswarm join file: it holds the swarm key, keep it secret\n{lines}key {key.text}\n")


def _write_secret(path: Path, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as e:
        raise LocalFailure(f"{path} exists and is left alone; name another file, or remove it first") from e
    except OSError as e:
        raise LocalFailure(f"cannot write {path}: {e.strerror or e}") from e
    with os.fdopen(fd, "w", encoding="ascii") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def keys_or_loopback(keys: Sequence[SwarmKey], addresses: Iterable[str]) -> tuple[SwarmKey, ...]:
    """The keys given, or without any the public one, if every address (`host:port` or host) is loopback.

    NotAuthorised (exit 12) names the first address that is not.
    """
    if keys:
        return tuple(keys)
    for address in addresses:
        if not is_loopback(address):
            raise NotAuthorised(
                f"{address} is not a loopback address, and there is no swarm key; make one with `swarm-node keygen` "
                "and give it to every member (--swarm-key or --join-file)"
            )
    log.warning("no swarm key: using the public one, which any user of this machine can use; loopback only")
    return (SwarmKey.public_loopback(),)


def is_loopback(address: str) -> bool:
    """Whether `host:port`, `[v6]:port` or a bare host is on the loopback. Names other than localhost are not."""
    host = address.strip()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if host.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)
