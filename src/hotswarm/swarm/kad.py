"""Kademlia (the package, unmodified) over sealed datagrams, made to survive what peers can send and how peers die.

Kept from the package: the routing table, the node and its distances, the five remote procedures and their names.
Replaced, with the reason:

- datagrams go through `SealedChannel`, and only to addresses that a socket can take: under plain asyncio a bad one in
  a peer's reply would close the socket for good;
- a call waits 1 s and is tried twice (the package: 5 s, once, and one lost packet evicts the peer); an address that
  failed is left alone for a while, so that 16 parallel lookups do not each wait for the same dead node;
- arguments and replies are checked for type and size before they are used; anything else counts as no answer;
- a known node that turns up at another address is believed once it has answered a ping there;
- the lookup is `crawl.crawl`;
- storage merges (`MergeStorage`), is never pushed to new nodes and never republished by holders.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import umsgpack
from kademlia.network import Server
from kademlia.node import Node
from kademlia.protocol import KademliaProtocol
from kademlia.storage import IStorage

from hotswarm.swarm.recordbook import Outcome, RecordBook
from hotswarm.swarm.records import MAX_VALUE_BYTES, RecordError, decode_value
from hotswarm.swarm.sealed import OVERHEAD, Address, SealedChannel, canonical

log = logging.getLogger(__name__)

K = 16  # nodes per answer and holders per key; 20 addresses of IPv6 would not fit into one datagram
RPC_TIMEOUT_S = 1.0
RPC_TRIES = 2
RECEIVE_BUFFER_BYTES = 1 << 20  # the kernel may grant less; a lookup's answers come all at once
SHUN_S = 5.0  # an address that failed twice is not asked again for this long, unless it is heard from
MAX_SHUNNED = 1_024
MAX_PACKET = 1_200  # with IP and UDP headers still under the 1,280 that every IPv6 link carries
MAX_MESSAGE = MAX_PACKET - OVERHEAD

ID_BYTES = 20
_REQUEST, _RESPONSE = b"\0", b"\1"
_BAD_MSGPACK = (umsgpack.UnpackException, RecursionError, ValueError, TypeError, OverflowError, MemoryError)
_ARGUMENTS: dict[str, int] = {"ping": 1, "stun": 0, "find_node": 2, "find_value": 2}
"""How many ids each remote procedure takes; `store` takes two and a value."""

Reply = tuple[bool, Any]
"""(whether it answered, what); the package's convention."""


class MergeStorage(IStorage):  # type: ignore[misc]  # the package is untyped
    """A `RecordBook` as the package's storage, on a monotonic clock."""

    def __init__(self, book: RecordBook, clock: Callable[[], float] = time.monotonic) -> None:
        self.book = book
        self._clock = clock

    def offer(self, key: bytes, value: object) -> bool:
        """Merge each valid record of a value; whether all of them are held now, or were already."""
        try:
            outcomes = [self.book.merge(key, r, self._clock()) for r in decode_value(value)]
        except RecordError as e:
            log.debug("refused a value: %s", e)
            return False
        return all(o in (Outcome.STORED, Outcome.KNOWN) for o in outcomes)

    def __setitem__(self, key: bytes, value: object) -> None:
        self.offer(key, value)

    def __getitem__(self, key: bytes) -> bytes:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """The value under a key, with the time that each record has left."""
        return self.book.value(key, self._clock()) or default

    def iter_older_than(self, seconds_old: float) -> list[tuple[bytes, bytes]]:
        """Nothing: only the signer refreshes a record, or it would outlive its signer."""
        return []

    def __iter__(self) -> Any:
        return iter(())  # nothing is pushed to newcomers: a forged newcomer would be an amplifier


class SealedProtocol(KademliaProtocol):  # type: ignore[misc]  # the package is untyped
    """One node's end of the DHT. All in one event loop."""

    def __init__(self, node: Node, storage: MergeStorage, channel: SealedChannel) -> None:
        super().__init__(node, storage, K)
        self._channel = channel
        self._socket: asyncio.DatagramTransport | None = None
        self._family = 4
        self._calls: dict[bytes, tuple[asyncio.Future[Reply], Address]] = {}
        self._shunned: dict[Address, float] = {}
        self._moves: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.hostile = 0
        self.last_heard: dict[bytes, float] = {}

    # ------------------------------------------------------------ socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._socket = cast("asyncio.DatagramTransport", transport)  # asyncio's own class does not derive from it
        self.transport = transport
        self._family = 6 if ":" in transport.get_extra_info("sockname")[0] else 4

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.close()

    def error_received(self, exc: Exception) -> None:
        """An ICMP error; the call that caused it times out by itself."""
        log.debug("datagram socket: %s", exc)

    def close(self) -> None:
        """End everything that is under way; calls come back as unanswered."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()
        for task in self._tasks:
            task.cancel()
        for future, _ in self._calls.values():
            if not future.done():
                future.set_result((False, None))
        self._calls.clear()

    def usable(self, ip: object, port: object) -> Address | None:
        """An address of this socket's family that can be sent to, or None."""
        address = canonical(ip, port)
        return address if address is not None and (6 if ":" in address[0] else 4) == self._family else None

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """Called by the loop."""
        sender = self.usable(addr[0], addr[1])
        if sender is None or self._closed:
            return
        got = self._channel.receive(data, sender, asyncio.get_running_loop().time())
        for datagram, to in got.replies:
            self._raw(datagram, to)
        if got.message is not None:
            self._shunned.pop(sender, None)
            self._message(got.message, sender, got.sender_id)

    def _send(self, message: bytes, to: Address) -> None:
        for datagram, address in self._channel.send(message, to, asyncio.get_running_loop().time()):
            self._raw(datagram, address)

    def _raw(self, datagram: bytes, to: Address) -> None:
        if self._socket is not None and not self._closed:
            try:
                self._socket.sendto(datagram, to)
            except (OSError, ValueError) as e:  # no route, or a link that went down; like a lost packet
                log.debug("cannot send to %s:%s: %s", *to, e)

    # ------------------------------------------------------------ answering

    def _message(self, message: bytes, sender: Address, sender_id: bytes) -> None:
        msg_id, body = message[1 : 1 + ID_BYTES], message[1 + ID_BYTES :]
        try:
            data = umsgpack.unpackb(body)
        except _BAD_MSGPACK:
            self.hostile += 1
            return
        if message[:1] == _RESPONSE:
            call = self._calls.get(msg_id)
            if call is not None and call[1] == sender and not call[0].done():
                call[0].set_result((True, data))
        elif message[:1] == _REQUEST and not self._request(msg_id, data, sender, sender_id):
            self.hostile += 1

    def _request(self, msg_id: bytes, data: object, sender: Address, sender_id: bytes) -> bool:
        """Answer a call. False when no honest node makes it; then there is no answer."""
        if (
            not isinstance(data, list)
            or len(data) != 2
            or not isinstance(data[0], str)
            or not isinstance(data[1], list)
        ):
            return False
        name, args = data
        if name == "store":
            if len(args) != 3 or not isinstance(args[2], bytes) or len(args[2]) > MAX_VALUE_BYTES:
                return False
            ids = args[:2]
        elif name in _ARGUMENTS and len(args) == _ARGUMENTS[name]:
            ids = args
        else:
            return False
        if not all(isinstance(i, bytes) and len(i) == ID_BYTES for i in ids):
            return False
        if ids and ids[0] != sender_id:  # one run of a process is one node
            return False
        self.last_heard[sender_id] = asyncio.get_running_loop().time()
        answer = getattr(self, f"rpc_{name}")(sender, *args)
        self._send(_RESPONSE + msg_id + umsgpack.packb(answer), sender)
        return True

    def rpc_store(self, sender: Address, nodeid: bytes, key: bytes, value: bytes) -> bool:
        """Merge what is valid. Answers whether it is held now."""
        self.welcome_if_new(Node(nodeid, *sender))
        return bool(self.storage.offer(key, value))

    def rpc_find_value(self, sender: Address, nodeid: bytes, key: bytes) -> Any:
        """The value, and as many near nodes as still fit into the datagram; or near nodes alone."""
        nodes = self.rpc_find_node(sender, nodeid, key)
        value = self.storage.get(key)
        if value is None:
            return nodes
        room = MAX_MESSAGE - len(value) - 40
        sizes = [len(umsgpack.packb(n)) for n in nodes]
        return {"value": value, "nodes": [n for i, n in enumerate(nodes) if sum(sizes[: i + 1]) <= room]}

    def welcome_if_new(self, node: Node) -> None:
        """Add a node to the table; move a known one only after it has answered at the new address."""
        if len(node.id) != ID_BYTES or node.id == self.source_node.id:
            return
        known = self.contact(node.id)
        if known is None:
            super().welcome_if_new(node)
        elif not known.same_home_as(node) and node.id not in self._moves:
            self._moves.add(node.id)
            self._spawn(self._confirm_move(node))

    async def _confirm_move(self, node: Node) -> None:
        try:
            answered, node_id = await self.request((node.ip, node.port), "ping", self.source_node.id, force=True)
            bucket = self.router.buckets[self.router.get_bucket_for(node)]
            if answered and node_id == node.id and node.id in bucket.nodes:
                log.info("node %s has moved to %s", node.id.hex(), node)
                bucket.nodes[node.id] = node
        finally:
            self._moves.discard(node.id)

    # ------------------------------------------------------------ asking

    async def request(self, to: Address, name: str, *args: object, force: bool = False) -> Reply:
        """Call a remote procedure: (True, answer), or (False, None) after two tries. Never raises."""
        address = self.usable(*to)
        now = asyncio.get_running_loop().time()
        if address is None or (not force and self._shunned.get(address, 0.0) > now):
            return False, None
        for _ in range(RPC_TRIES):
            reply = await self._call(address, name, args)
            if reply[0] or self._closed:
                return reply
            self._channel.forget(address)  # it may have restarted, and then it dropped what we sent
        while len(self._shunned) >= MAX_SHUNNED:
            del self._shunned[next(iter(self._shunned))]
        self._shunned[address] = asyncio.get_running_loop().time() + SHUN_S
        return False, None

    async def _call(self, address: Address, name: str, args: Sequence[object]) -> Reply:
        msg_id = os.urandom(ID_BYTES)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[msg_id] = (future, address)
        try:
            self._send(_REQUEST + msg_id + umsgpack.packb([name, list(args)]), address)
            async with asyncio.timeout(RPC_TIMEOUT_S):
                return await future
        except TimeoutError:
            return False, None
        finally:
            self._calls.pop(msg_id, None)

    async def meet(self, address: Address) -> None:
        """Call an address that may hold a node, whose id is not known yet, and keep it if one answers."""
        answered, node_id = await self.request(address, "ping", self.source_node.id, force=True)
        if answered and isinstance(node_id, bytes) and node_id == self._channel.node_at(address):
            self.handle_call_response((True, node_id), Node(node_id, *address))

    async def call_ping(self, node_to_ask: Node) -> Reply:
        """Used by the routing table too, to see whether the oldest of a full bucket is alive."""
        return await self._ask(node_to_ask, "ping")

    async def call_find_node(self, node_to_ask: Node, node_to_find: Node) -> Reply:
        """Ask a node for the nodes near an id."""
        return await self._ask(node_to_ask, "find_node", node_to_find.id)

    async def call_find_value(self, node_to_ask: Node, node_to_find: Node) -> Reply:
        """Ask a node for a value, or for the nodes near its key."""
        return await self._ask(node_to_ask, "find_value", node_to_find.id)

    async def call_store(self, node_to_ask: Node, key: bytes, value: bytes) -> Reply:
        """Give a node a value to merge."""
        return await self._ask(node_to_ask, "store", key, value)

    async def _ask(self, node: Node, name: str, *args: object) -> Reply:
        address = (node.ip, node.port)
        result = await self.request(address, name, self.source_node.id, *args)
        found = self._channel.node_at(address)
        if result[0] and found is not None and found != node.id:
            self.router.remove_contact(node)  # another node lives there now
            self.welcome_if_new(Node(found, *address))
            return False, None
        return self.handle_call_response(result, node)

    def handle_call_response(self, result: Reply, node: Node) -> Reply:
        """Keep who answers, drop who does not."""
        if not result[0]:
            known = self.contact(node.id)
            if known is not None and known.same_home_as(node):  # it may have moved in the meantime
                self.router.remove_contact(node)
            self.last_heard.pop(node.id, None)
        else:
            self.last_heard[node.id] = asyncio.get_running_loop().time()
            self.welcome_if_new(node)
        return result

    # ------------------------------------------------------------ table

    def contact(self, node_id: bytes) -> Node | None:
        """The table's entry for an id."""
        return self.router.buckets[self.router.get_bucket_for(Node(node_id))].nodes.get(node_id)

    def contacts(self) -> list[Node]:
        """All nodes in the table."""
        return [n for bucket in self.router.buckets for n in bucket.get_nodes()]

    def forget_strangers(self) -> None:
        """Drop what is remembered of nodes that are no contacts any more."""
        there = {n.id for n in self.contacts()}
        self.last_heard = {i: t for i, t in self.last_heard.items() if i in there}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SealedServer(Server):  # type: ignore[misc]  # the package is untyped
    """The package's server with our protocol; keeping the table filled is the task of `Bootstrap`."""

    def __init__(self, node_id: bytes, storage: MergeStorage, channel: SealedChannel) -> None:
        super().__init__(ksize=K, node_id=node_id, storage=storage)
        self._channel = channel

    def _create_protocol(self) -> SealedProtocol:
        return SealedProtocol(self.node, self.storage, self._channel)

    async def listen(self, port: int, interface: str = "127.0.0.1") -> None:
        """Open the socket. OSError when the address is taken or not here."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(interface, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 nodes could not call back
            sock.bind(address)
            self.transport, self.protocol = await loop.create_datagram_endpoint(self._create_protocol, sock=sock)
        except BaseException:
            sock.close()
            raise

    def refresh_table(self, interval: float = 0) -> None:
        """Nothing: the package's own refresh dies of a hostile reply, and republishes what others stored."""

    def stop(self) -> None:
        """Close the socket and end what is under way."""
        super().stop()
        if self.protocol is not None:
            self.protocol.close()
