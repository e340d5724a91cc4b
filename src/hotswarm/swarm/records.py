r"""Signed, expiring announcements: "I am a member of this run, dial me there". Pure: no sockets, `now` is an argument.

A record says *who*; what a node can serve it says itself, in a signed answer to `Describe`. So a stale record costs one
failed dial and never a wrong restore.

Body, big-endian, 50 bytes + 7 or 19 per address, signed with the node's key:

    u8 version = 1 | u64 seq | u32 ttl_s | u32 outer_step | u64 inner_step | 16 B outer digest (first half, or zeros)
    | u64 snapshot bytes | u8 count <= 3 | per address: u8 4 or 6, 4 or 16 B ip, u16 port

The signature covers "hotswarm-record-v1\0" + the DHT key (20 bytes) + body, so a record of one run or shard cannot be
shown under another. In a DHT value records stand one after the other, each as

    u16 length of body | u32 ttl left, s | 33 B public key | 64 B signature | body

which is at most 210 bytes; five fit into a value. `ttl left` is not signed: whoever relays a record writes the time
that remains, counted from its own receipt on a monotonic clock. A holder never changes an expiry that it has given: it
remembers (signer, seq) with it for 24 hours, so that a dead node's record dies everywhere after one time to live, no
matter who relays it and how often. A record signed with a time to live of 0 withdraws the earlier ones.
"""

from __future__ import annotations

import hashlib
import ipaddress
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hotswarm.ids import NodeId
from hotswarm.snapshot.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, node_id_of, signature_is_good
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.swarmkey import run_tag

VERSION = 1
SHARDS = 16
MAX_ADDRESSES = 3
MAX_TTL_S = 86_400
DIGEST_BYTES = 16
DHT_KEY_BYTES = 20
MAX_VALUE_BYTES = 1_060  # a sealed `store` or its answer then stays under 1,200 bytes: no IP fragments anywhere
MAX_BODY_BYTES = 50 + MAX_ADDRESSES * 19

_DOMAIN = b"hotswarm-record-v1\0"
_FIXED = struct.Struct(">BQIIQ16sQB")
_ENTRY = struct.Struct(f">HI{PUBLIC_KEY_BYTES}s{SIGNATURE_BYTES}s")

Address = tuple[str, int]
"""(IP literal, port); never a host name."""


class RecordError(ValueError):
    """Bytes that are no record, or a record that nobody honest made."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a node announces. Steps and digest are hints; 0 and b"" when it has no snapshot."""

    seq: int
    ttl_s: int
    addresses: tuple[Address, ...] = ()
    outer_step: int = 0
    inner_step: int = 0
    outer_digest: bytes = b""
    snapshot_bytes: int = 0

    def encode(self) -> bytes:
        """The body. RecordError when a field is out of range."""
        if len(self.addresses) > MAX_ADDRESSES:
            raise RecordError(f"{len(self.addresses)} addresses; a record holds {MAX_ADDRESSES}")
        if not 0 <= self.ttl_s <= MAX_TTL_S:
            raise RecordError(f"a time to live of {self.ttl_s} s is not within 0 to {MAX_TTL_S}")
        digest = self.outer_digest[:DIGEST_BYTES].ljust(DIGEST_BYTES, b"\0")
        try:
            head = _FIXED.pack(
                VERSION,
                self.seq,
                self.ttl_s,
                self.outer_step,
                self.inner_step,
                digest,
                self.snapshot_bytes,
                len(self.addresses),
            )
        except struct.error as e:
            raise RecordError(f"a field of the record is out of range: {e}") from e
        return head + b"".join(_encode_address(a) for a in self.addresses)

    @classmethod
    def decode(cls, body: bytes) -> Record:
        """The record in a body. RecordError on anything that `encode` does not write."""
        if not _FIXED.size <= len(body) <= MAX_BODY_BYTES:
            raise RecordError(f"a body of {len(body)} bytes")
        version, seq, ttl_s, outer, inner, digest, size, count = _FIXED.unpack_from(body)
        if version != VERSION:
            raise RecordError(f"version {version}; this node reads {VERSION}")
        if ttl_s > MAX_TTL_S or count > MAX_ADDRESSES:
            raise RecordError("time to live or number of addresses over the limit")
        addresses, at = [], _FIXED.size
        for _ in range(count):
            address, at = _decode_address(body, at)
            addresses.append(address)
        if at != len(body):
            raise RecordError("bytes after the last address")
        return cls(seq, ttl_s, tuple(addresses), outer, inner, digest if any(digest) else b"", size)


@dataclass(frozen=True)
class SignedRecord:
    """A record as it travels. Constructing one checks nothing; `check` does."""

    body: bytes
    public_key: bytes
    signature: bytes

    @classmethod
    def sign(cls, record: Record, dht_key: bytes, identity: NodeIdentity) -> SignedRecord:
        """This node's record, for one DHT key."""
        body = record.encode()
        return cls(body, identity.public_key, identity.sign(_DOMAIN + dht_key + body))

    def check(self, dht_key: bytes) -> None:
        """RecordError unless it parses and its key signed it for this DHT key."""
        _ = self.record
        if not _signed_by(self.public_key, self.signature, dht_key, self.body):
            raise RecordError("the signature does not match")

    @cached_property
    def record(self) -> Record:
        """The parsed body."""
        return Record.decode(self.body)

    @cached_property
    def signer(self) -> NodeId:
        """The id of the node that signed it (once checked)."""
        try:
            return _node_id_of(self.public_key)
        except ValueError as e:
            raise RecordError(f"the public key is none: {e}") from e

    @property
    def entry_bytes(self) -> int:
        """Its length in a DHT value."""
        return _ENTRY.size + len(self.body)


_node_id_of = lru_cache(maxsize=4096)(node_id_of)  # decompressing a point takes a square root


@lru_cache(maxsize=4096)  # a lookup meets each record once per holder
def _signed_by(public_key: bytes, signature: bytes, dht_key: bytes, body: bytes) -> bool:
    return signature_is_good(public_key, _DOMAIN + dht_key + body, signature)


@dataclass(frozen=True, slots=True)
class Relayed:
    """A record and the whole seconds it has left, as sent and received."""

    signed: SignedRecord
    ttl_left_s: int


def encode_value(records: Iterable[Relayed]) -> bytes:
    """A DHT value."""
    return b"".join(
        _ENTRY.pack(len(r.signed.body), r.ttl_left_s, r.signed.public_key, r.signed.signature) + r.signed.body
        for r in records
    )


def decode_value(value: object) -> list[Relayed]:
    """The records in a DHT value, unchecked. RecordError on anything else, whatever its type."""
    if not isinstance(value, bytes) or len(value) > MAX_VALUE_BYTES:
        raise RecordError("not bytes, or too many")
    out, at = [], 0
    while at < len(value):
        if at + _ENTRY.size > len(value):
            raise RecordError("cut within a record")
        length, ttl_left, public_key, signature = _ENTRY.unpack_from(value, at)
        at += _ENTRY.size
        if length > MAX_BODY_BYTES or at + length > len(value):
            raise RecordError("cut within a record")
        out.append(Relayed(SignedRecord(value[at : at + length], public_key, signature), ttl_left))
        at += length
    return out


def shard_of(node_id: NodeId) -> int:
    """The shard that a node's record belongs to: the first hex digit of its id."""
    return int(node_id[0], 16)


def dht_keys(run_secret: bytes, run: str) -> tuple[bytes, ...]:
    """The DHT keys of a run, one for each shard. They say nothing about the run's name to those without the secret."""
    tag = run_tag(run_secret, run)
    return tuple(hashlib.sha1(b"rv1" + tag + bytes([shard]), usedforsecurity=False).digest() for shard in range(SHARDS))


# ------------------------------------------------------------------ addresses


def _encode_address(address: Address) -> bytes:
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError as e:
        raise RecordError(f"{address[0]!r} is not an IP address") from e
    if not 0 < address[1] < 65536:
        raise RecordError(f"port {address[1]} is not within 1 to 65535")
    return bytes([ip.version]) + ip.packed + address[1].to_bytes(2, "big")


def _decode_address(body: bytes, at: int) -> tuple[Address, int]:
    length = {4: 4, 6: 16}.get(body[at]) if at < len(body) else None
    if length is None or at + 3 + length > len(body):
        raise RecordError("an address that is cut or of an unknown family")
    ip = ipaddress.ip_address(body[at + 1 : at + 1 + length])
    port = int.from_bytes(body[at + 1 + length : at + 3 + length], "big")
    if port == 0:
        raise RecordError("port 0")
    return (str(ip), port), at + 3 + length


def newest(records: Sequence[Relayed]) -> Iterator[Relayed]:
    """One record for each signer: the one with the highest seq, and of equal ones the one with more time left."""
    best: dict[NodeId, Relayed] = {}
    for r in records:
        have = best.get(r.signed.signer)
        if have is None or (r.signed.record.seq, r.ttl_left_s) > (have.signed.record.seq, have.ttl_left_s):
            best[r.signed.signer] = r
    return iter(best.values())
