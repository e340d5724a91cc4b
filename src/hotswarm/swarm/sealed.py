"""Sealed datagrams: the DHT's traffic under the swarm's key, with no answer to anybody else. Pure: no socket, no clock.

Every datagram is `12 B random nonce | ChaCha20-Poly1305 of`

    u8 kind | 8 B sender's boot id | u64 counter | 8 B token for the receiver to check | 8 B token for the answer | body

The boot id is random at each start, the counter rises with each datagram, and a receiver keeps a window of counters per
boot id. That alone would not do: a datagram captured on its way to A is news to C, and to an A that has restarted. So a
datagram is also bound to its path. A *token* is a keyed hash, under a secret of the receiver's present run, of the
sender's address as the receiver sees it; who can show it has received a datagram at just that address, not long ago.

    KNOCK   first contact: no token to show. Body: sender's node id, and the address that it was sent to.
    HELLO   the answer to a KNOCK, of the same length; shows the token that came with it and hands over its own.
    DATA    a DHT message. Shows a token; without the right one it is dropped in silence.

What an outsider gets for each thing it can send:

    anything not sealed under a swarm key       nothing
    a captured DATA or HELLO, to anybody, from any address, or from a forged one     nothing: token or counter is wrong
    a captured KNOCK, to the node it was for    nothing: the counter was seen
    a captured KNOCK, to another node           nothing, where that node knows that the address in it is not its own
    otherwise a captured KNOCK (a node that was restarted since, or behind port mapping)     one HELLO, as long as the
                                                KNOCK, which it cannot read, at most 16 a second; it moves no route

So no address ever gets more bytes than it sent until it has shown that it receives there: stricter than the usual limit
of three times. The states of an address: unknown -> knocked (messages wait, 3 s) -> open (has a session) -> unknown
again after a call went unanswered, since the node there may have restarted and forgotten its secret.

While a key is being replaced, datagrams are opened with either; answers use the key that the other side used last.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

K = TypeVar("K")
V = TypeVar("V")

Address = tuple[str, int]
"""(canonical IP literal, port)."""

KNOCK, HELLO, DATA = 1, 2, 3
WINDOW = 1_024  # counters; parallel lookups put hundreds of datagrams in flight
MAX_PEERS = 4_096  # boot ids and addresses remembered
MAX_WAITING = 64  # messages for one knocked address: a lookup sends 16 at once, for two keys 32
WAIT_S = 3.0
KNOCK_EVERY_S = 0.4
MAX_HELLOS_PER_S = 16  # to one address
MAX_DATAGRAM = 2_048

_AAD = b"hotswarm-udp-v1"
_HEAD = struct.Struct(">B8sQ8s8s")
_NONCE = 12
_TAG = 16
_NO_TOKEN = bytes(8)
_FIRST_BODY = 20 + 1 + 16 + 2
OVERHEAD = _NONCE + _TAG + _HEAD.size


class ReplayWindow:
    """Which counters of one sender have been seen: all below `top - size`, and those marked in the window."""

    def __init__(self, size: int = WINDOW) -> None:
        self.size = size
        self._top = -1
        self._seen = 0  # bit i: counter top - i

    def accept(self, counter: int) -> bool:
        """True the first time for a counter, and only while it is within the window."""
        ahead = counter - self._top
        if ahead > 0:
            self._seen = ((self._seen << min(ahead, self.size)) | 1) & ((1 << self.size) - 1)
            self._top = counter
            return True
        if -ahead >= self.size:
            return False
        bit = 1 << -ahead
        if self._seen & bit:
            return False
        self._seen |= bit
        return True


@dataclass(frozen=True, slots=True)
class Received:
    """What came of a datagram: datagrams to send in return, and a message if it carried one."""

    replies: Sequence[tuple[bytes, Address]] = ()
    message: bytes | None = None
    sender_id: bytes = b""


_NOTHING = Received()


@dataclass(slots=True)
class _Peer:
    """One run of another node's process."""

    window: ReplayWindow
    node_id: bytes = b""


@dataclass(slots=True)
class _Session:
    """An address that we can send DATA to."""

    boot: bytes
    token: bytes
    key: int


@dataclass(slots=True)
class _Knocked:
    """An address that we wait for."""

    at: float
    messages: list[tuple[float, bytes]] = field(default_factory=list)


class SealedChannel:
    """The state of one socket. `mine` says whether an address can be this node's own (see KNOCK above)."""

    def __init__(self, keys: Sequence[bytes], node_id: bytes, mine: Callable[[Address], bool]) -> None:
        self._keys = [ChaCha20Poly1305(k) for k in keys]
        self._node_id = node_id
        self._mine = mine
        self.boot = os.urandom(8)
        self._secret = os.urandom(32)
        self._counter = 0
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._sessions: OrderedDict[Address, _Session] = OrderedDict()
        self._knocked: OrderedDict[Address, _Knocked] = OrderedDict()
        self._hellos: OrderedDict[Address, tuple[int, int]] = OrderedDict()
        self.dropped = 0

    def send(self, message: bytes, to: Address, now: float) -> list[tuple[bytes, Address]]:
        """The datagrams to send so that `message` arrives: itself, or a KNOCK while it waits for the HELLO."""
        session = self._sessions.get(to)
        if session is not None:
            return [(self._data(message, to, session), to)]
        knocked = self._knocked.get(to)
        first = knocked is None or now - knocked.at >= KNOCK_EVERY_S
        if knocked is None:
            knocked = _put(self._knocked, to, _Knocked(now))
        knocked.messages = [m for m in knocked.messages if now - m[0] < WAIT_S][-MAX_WAITING + 1 :]
        knocked.messages.append((now, message))
        if not first:
            return []
        knocked.at = now
        body = self._node_id + _pack_address(to)
        return [(self._seal(i, KNOCK, _NO_TOKEN, to, body), to) for i in range(len(self._keys))]

    def receive(self, datagram: bytes, sender: Address, now: float) -> Received:
        """Take in a datagram that came from `sender`. Never raises on what it holds."""
        opened = self._open(datagram)
        if opened is None:
            return self._drop()
        key, kind, boot, counter, shown, token, body = opened
        if kind in (HELLO, DATA):
            if shown != self._token(sender):
                return self._drop()
        elif kind != KNOCK or len(body) != _FIRST_BODY or not self._for_me(body):
            return self._drop()
        peer = self._peers.get(boot) or _put(self._peers, boot, _Peer(ReplayWindow()))
        self._peers.move_to_end(boot)
        if not peer.window.accept(counter):
            return self._drop()
        if kind in (KNOCK, HELLO):
            if len(body) != _FIRST_BODY:
                return self._drop()
            peer.node_id = peer.node_id or body[:20]
        if kind == KNOCK:
            if not self._may_answer(sender, now):
                return self._drop()
            answer = self._node_id + _pack_address(sender)
            return Received([(self._seal(key, HELLO, token, sender, answer), sender)])
        session = self._sessions.get(sender) or _put(self._sessions, sender, _Session(boot, token, key))
        session.boot, session.token, session.key = boot, token, key
        self._sessions.move_to_end(sender)
        waiting = self._knocked.pop(sender, None)
        replies = [
            (self._data(message, sender, session), sender)
            for at, message in (waiting.messages if waiting else ())
            if now - at < WAIT_S
        ]
        return Received(replies, body if kind == DATA else None, peer.node_id)

    def forget(self, address: Address) -> None:
        """The node there did not answer: knock again next time."""
        self._sessions.pop(address, None)
        self._knocked.pop(address, None)

    def node_at(self, address: Address) -> bytes | None:
        """The node id (20 bytes) that has said it is at this address, if it is open."""
        session = self._sessions.get(address)
        peer = self._peers.get(session.boot) if session else None
        return (peer.node_id or None) if peer else None

    def _for_me(self, body: bytes) -> bool:
        meant = _unpack_address(body[20:])
        return meant is not None and self._mine(meant) and meant not in self._sessions

    def _may_answer(self, sender: Address, now: float) -> bool:
        second, count = self._hellos.get(sender, (0, 0))
        count = count + 1 if second == int(now) else 1
        _put(self._hellos, sender, (int(now), count))
        return count <= MAX_HELLOS_PER_S

    def _data(self, message: bytes, to: Address, session: _Session) -> bytes:
        return self._seal(session.key, DATA, session.token, to, message)

    def _seal(self, key: int, kind: int, shown: bytes, to: Address, body: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        head = _HEAD.pack(kind, self.boot, self._counter, shown, self._token(to))
        self._counter += 1
        return nonce + self._keys[key].encrypt(nonce, head + body, _AAD)

    def _open(self, datagram: bytes) -> tuple[int, int, bytes, int, bytes, bytes, bytes] | None:
        if not OVERHEAD <= len(datagram) <= MAX_DATAGRAM:
            return None
        for i, key in enumerate(self._keys):
            try:
                plain = key.decrypt(datagram[:_NONCE], datagram[_NONCE:], _AAD)
            except InvalidTag:
                continue
            kind, boot, counter, shown, token = _HEAD.unpack_from(plain)
            if boot == self.boot:  # our own, reflected
                return None
            return i, kind, boot, counter, shown, token, plain[_HEAD.size :]
        return None

    def _token(self, address: Address) -> bytes:
        return hashlib.blake2b(f"{address[0]}|{address[1]}".encode(), digest_size=8, key=self._secret).digest()

    def _drop(self) -> Received:
        self.dropped += 1
        return _NOTHING


def canonical(ip: object, port: object) -> Address | None:
    """An address that can be sent to, with IPv4 in its own form, or None: outsiders and peers can claim anything."""
    if not isinstance(ip, str) or type(port) is not int or not 0 < port < 65536:
        return None
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.scope_id is not None:
            return None
        parsed = parsed.ipv4_mapped or parsed
    if parsed.is_multicast or parsed.is_unspecified or str(parsed) == "255.255.255.255":
        return None
    return str(parsed), port


def _pack_address(address: Address) -> bytes:
    ip = ipaddress.ip_address(address[0])
    return bytes([ip.version]) + ip.packed.ljust(16, b"\0") + address[1].to_bytes(2, "big")


def _unpack_address(data: bytes) -> Address | None:
    length = {4: 4, 6: 16}.get(data[0])
    if length is None:
        return None
    return canonical(str(ipaddress.ip_address(data[1 : 1 + length])), int.from_bytes(data[17:19], "big"))


def _put(table: OrderedDict[K, V], key: K, value: V) -> V:
    """Insert as the newest, and let the oldest go when there are too many."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_PEERS:
        table.popitem(last=False)
    return value
