"""What a holder of records keeps, per DHT key: the newest of each signer, bounded in every direction. Pure.

What moves in a `RecordBook`:

    (nothing) -> held        a valid record arrives with time left
    held -> held             the same signer with a higher seq replaces it; an equal or lower seq changes nothing
    held -> remembered       it expires, is withdrawn, or is evicted at random from a full value
    remembered -> held       only a higher seq, or the evicted record itself within its first expiry
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from hotswarm.ids import NodeId
from hotswarm.swarm.records import DHT_KEY_BYTES, MAX_VALUE_BYTES, RecordError, Relayed, SignedRecord, encode_value

MEMORY_S = 86_400.0  # as long as the longest time to live, so that nothing outlives being remembered
MAX_KEYS = 1_024  # 32 runs, two swarm keys each
MAX_REMEMBERED = 16_384


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
