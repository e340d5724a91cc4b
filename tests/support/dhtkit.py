"""Swarms for tests: directories on loopback sockets, and a member that speaks the sealed protocol by hand."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import umsgpack
import uvloop

from hotswarm.swarm.dht import Announcement, RunDirectory
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.kad import SealedProtocol
from hotswarm.swarm.peercache import PeerCache
from hotswarm.swarm.sealed import SealedChannel
from hotswarm.swarm.swarmkey import Membership, SwarmKey

LOOPS = ("asyncio", "uvloop")
KEY = SwarmKey(bytes(range(32)))


def run(kind: str, main: Coroutine[None, None, None]) -> None:
    """Run a coroutine on the loop of that kind; an exception that nobody handled in a callback or task is a failure."""
    unhandled: list[dict] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if kind == "uvloop" else None) as runner:
        runner.run(watched())
    assert not unhandled, unhandled


async def until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait for a condition; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what} did not come within {timeout_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


class Swarm:
    """Directories that are closed at the end of the test."""

    def __init__(self) -> None:
        self.nodes: list[RunDirectory] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hs-")

    async def add(
        self, *seeds: str | RunDirectory, identity=None, keys=(KEY,), state=None, host="127.0.0.1", port=0, **options
    ):
        identity = identity or NodeIdentity.generate()
        state = Path(state or tempfile.mkdtemp(dir=self._folder.name))
        state.mkdir(exist_ok=True)
        options.setdefault("run", "r")
        node = RunDirectory(
            identity,
            Membership.from_keys(keys, identity),
            cache=PeerCache.load(state),
            seeds=[s if isinstance(s, str) else address_of(s) for s in seeds],
            **options,
        )
        await node.start(host, port)
        self.nodes.append(node)
        return node

    async def mesh(self, count: int, **options) -> list[RunDirectory]:
        """`count` nodes that all know each other and are all announced."""
        first = await self.add(**options)
        nodes = [first] + [await self.add(first, **options) for _ in range(count - 1)]
        await until(lambda: all(len(n.contacts()) >= count - 1 for n in nodes), 10, "a full mesh")
        await asyncio.gather(*(n.publish(Announcement((n.address,))) for n in nodes))
        return nodes

    async def close(self) -> None:
        await asyncio.gather(*(n.stop(withdraw=False) for n in self.nodes))
        self._folder.cleanup()


@asynccontextmanager
async def swarm():
    made = Swarm()
    try:
        yield made
    finally:
        await made.close()


def address_of(node: RunDirectory) -> str:
    return f"{node.address[0]}:{node.address[1]}"


def signers(records) -> set[str]:
    return {r.signed.signer for r in records}


def routes(node: RunDirectory) -> dict[str, tuple[str, int]]:
    return dict(node.contacts())


class RawMember:
    """A member (it has the key) that does with its socket only what a test tells it."""

    def __init__(self, node_id: bytes | None = None, key: SwarmKey = KEY) -> None:
        self.node_id = node_id or os.urandom(20)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address = self.socket.getsockname()
        self.channel = SealedChannel([key.udp_key], self.node_id, lambda _: True)
        self.bytes_sent = self.bytes_received = 0

    def send(self, message: bytes, to) -> None:
        for datagram, address in self.channel.send(message, to, time.monotonic()):
            self.bytes_sent += len(datagram)
            self.socket.sendto(datagram, address)

    def call(self, name: str, *args: object, to) -> bytes:
        """Send a request and return its message id."""
        msg_id = os.urandom(20)
        self.send(b"\0" + msg_id + umsgpack.packb([name, list(args)]), to)
        return msg_id

    async def messages(self, seconds: float) -> list[bytes]:
        """Pump the socket for a while; the messages that arrived."""
        out = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                datagram, sender = self.socket.recvfrom(65536)
            except BlockingIOError:
                await asyncio.sleep(0.01)
                continue
            self.bytes_received += len(datagram)
            got = self.channel.receive(datagram, sender, time.monotonic())
            for reply, to in got.replies:
                self.bytes_sent += len(reply)
                self.socket.sendto(reply, to)
            if got.message is not None:
                out.append(got.message)
        return out

    def close(self) -> None:
        self.socket.close()


class Wire:
    """Every datagram that the directories of this process send, as an eavesdropper sees them: (bytes, from, to)."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[tuple[bytes, tuple[str, int], tuple[str, int]]] = []
        original = SealedProtocol._raw

        def tapped(protocol: SealedProtocol, datagram: bytes, to: tuple[str, int]) -> None:
            self.seen.append((datagram, protocol._socket.get_extra_info("sockname")[:2], to))
            original(protocol, datagram, to)

        monkeypatch.setattr(SealedProtocol, "_raw", tapped)
