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

`RecordBook` is what a holder keeps: per DHT key the newest record of each signer. What moves in it:

    (nothing) -> held        a valid record arrives with time left
    held -> held             the same signer with a higher seq replaces it; an equal or lower seq changes nothing
    held -> remembered       it expires, is withdrawn, or is evicted at random from a full value
    remembered -> held       only a higher seq, or the evicted record itself within its first expiry
"""

from __future__ import annotations

import hashlib
import ipaddress
import random
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache

from hotswarm.ids import NodeId
from hotswarm.snapshot.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, node_id_of, signature_is_good
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.swarmkey import run_tag

VERSION = 1
SHARDS = 16
MAX_ADDRESSES = 3
MAX_TTL_S = 86_400
MEMORY_S = 86_400.0  # as long as the longest time to live, so that nothing outlives being remembered
DIGEST_BYTES = 16
DHT_KEY_BYTES = 20
MAX_VALUE_BYTES = 1_060  # a sealed `store` or its answer then stays under 1,200 bytes: no IP fragments anywhere
MAX_BODY_BYTES = 50 + MAX_ADDRESSES * 19
MAX_KEYS = 1_024  # 32 runs, two swarm keys each
MAX_REMEMBERED = 16_384

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


# ------------------------------------------------------------------ the holder's book


class Outcome(Enum):
    """What became of a record that was offered to a book."""

    STORED = "stored"
    KNOWN = "known"
    OLDER = "older"
    EXPIRED = "expired"
    EVICTED = "evicted"


@dataclass(slots=True)
class _Held:
    signed: SignedRecord
    expires_at: float


@dataclass(slots=True)
class _Memory:
    seq: int
    expires_at: float
    forget_at: float


@dataclass
class RecordBook:
    """The newest record of each signer under each DHT key, bounded in every direction. See the module's head."""

    max_keys: int = MAX_KEYS
    max_remembered: int = MAX_REMEMBERED
    max_value_bytes: int = MAX_VALUE_BYTES
    keep: NodeId | None = None  # this node's own record is never the one that is evicted
    rng: random.Random = field(default_factory=random.Random)
    _held: OrderedDict[bytes, dict[NodeId, _Held]] = field(default_factory=OrderedDict)
    _memory: OrderedDict[tuple[bytes, NodeId], _Memory] = field(default_factory=OrderedDict)

    def merge(self, dht_key: bytes, offered: Relayed, now: float) -> Outcome:
        """Take one record in. RecordError when it is not valid under this key; then nothing has changed."""
        if len(dht_key) != DHT_KEY_BYTES:
            raise RecordError(f"a DHT key of {len(dht_key)} bytes")
        signed = offered.signed
        shelf = self._held.get(dht_key, {})
        held = shelf.get(signed.signer)
        if held is None or held.signed != signed:
            signed.check(dht_key)
        record, signer = signed.record, signed.signer
        memory = self._memory.get((dht_key, signer))
        if memory is None or memory.forget_at <= now or record.seq > memory.seq:
            ttl = min(record.ttl_s, offered.ttl_left_s)
            if ttl == 0 < record.ttl_s:
                return Outcome.EXPIRED  # not remembered: a relay's word must not bar the signer's own, still on its way
            memory = _Memory(record.seq, now + ttl, now + MEMORY_S)
            self._remember(dht_key, signer, memory)
        elif record.seq < memory.seq:
            return Outcome.OLDER
        if memory.expires_at <= now:
            self._drop(dht_key, signer)
            return Outcome.EXPIRED
        if held is not None and held.signed.record.seq == record.seq:
            return Outcome.KNOWN
        return self._shelve(dht_key, signer, _Held(signed, memory.expires_at), now)

    def records(self, dht_key: bytes, now: float) -> list[Relayed]:
        """What is held under a key, with the whole seconds left; those with less than one are left out."""
        shelf = self._held.get(dht_key, {})
        alive = (Relayed(h.signed, int(h.expires_at - now)) for h in shelf.values())
        return [r for r in alive if r.ttl_left_s > 0]

    def value(self, dht_key: bytes, now: float) -> bytes | None:
        """The same as a DHT value, sorted by signer; None when nothing is left."""
        records = sorted(self.records(dht_key, now), key=lambda r: r.signed.signer)
        return encode_value(records) if records else None

    def sweep(self, now: float) -> None:
        """Drop what has expired and forget what is old enough."""
        for key in list(self._held):
            for signer in [s for s, h in self._held[key].items() if h.expires_at <= now]:
                self._drop(key, signer)
        for name in [n for n, m in self._memory.items() if m.forget_at <= now]:
            del self._memory[name]

    def __len__(self) -> int:
        return sum(len(shelf) for shelf in self._held.values())

    def _remember(self, dht_key: bytes, signer: NodeId, memory: _Memory) -> None:
        self._memory[dht_key, signer] = memory
        self._memory.move_to_end((dht_key, signer))
        while len(self._memory) > self.max_remembered:
            self._memory.popitem(last=False)

    def _shelve(self, dht_key: bytes, signer: NodeId, new: _Held, now: float) -> Outcome:
        if dht_key not in self._held and len(self._held) >= self.max_keys:
            self.sweep(now)
            self._evict_a_key()
        shelf = self._held.setdefault(dht_key, {})
        for gone in [s for s, h in shelf.items() if h.expires_at <= now]:
            del shelf[gone]
        shelf[signer] = new
        while sum(h.signed.entry_bytes for h in shelf.values()) > self.max_value_bytes:
            del shelf[self.rng.choice([s for s in sorted(shelf) if s != self.keep])]
        return Outcome.STORED if signer in shelf else Outcome.EVICTED

    def _evict_a_key(self) -> None:
        if len(self._held) >= self.max_keys:
            evictable = [k for k, shelf in self._held.items() if self.keep not in shelf]
            if evictable:
                del self._held[self.rng.choice(evictable)]

    def _drop(self, dht_key: bytes, signer: NodeId) -> None:
        shelf = self._held.get(dht_key)
        if shelf is not None and shelf.pop(signer, None) is not None and not shelf:
            del self._held[dht_key]


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
