"""Keeps a DHT node connected, for ever: whom to call, when, and who they turned out to be.

- **bootstrap**: while fewer than three nodes are known, call everyone ever heard of (the addresses given, resolved anew
  each time; the peer cache; addresses from records and from gRPC), with a pause that grows to 10 s, or to 30 s once
  somebody is known. One answer is enough: a lookup of the own id then fills the table;
- **keep alive**: contacts not heard from for 30 s are pinged, so that lookups need not find out who is dead;
- **peer cache**: written every minute when it has changed, and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence

from hotswarm.config import Address as HostPort
from hotswarm.ids import NodeId
from hotswarm.swarm.crawl import crawl
from hotswarm.swarm.kad import SealedProtocol, SealedServer
from hotswarm.swarm.peercache import PeerCache
from hotswarm.swarm.resolve import Resolver
from hotswarm.swarm.sealed import Address, canonical

log = logging.getLogger(__name__)

MIN_CONTACTS = 3
FIRST_PAUSE_S = 0.25
MAX_PAUSE_ALONE_S = 10.0
MAX_PAUSE_S = 30.0
KEEPALIVE_S = 30.0
SAVE_EVERY_S = 60.0
MAX_LEARNED = 256
_CALLS_AT_ONCE = 64


class Bootstrap:
    """See the module's head. `mine` tells this node's own addresses; `on_growth` is called when the table has grown."""

    def __init__(
        self,
        server: SealedServer,
        seeds: Sequence[HostPort],
        cache: PeerCache,
        *,
        mine: Callable[[Address], bool],
        on_growth: Callable[[], None],
        wall_ms: Callable[[], int],
    ) -> None:
        self._server = server
        self._seeds = [(s.host, s.port) for s in seeds]
        self._cache = cache
        self._mine = mine
        self._on_growth = on_growth
        self._wall_ms = wall_ms
        self._resolver = Resolver()
        self._learned: dict[Address, None] = {}
        self._wake = asyncio.Event()

    @property
    def _protocol(self) -> SealedProtocol:
        protocol: SealedProtocol = self._server.protocol
        return protocol

    def learn(self, addresses: Iterable[Address]) -> None:
        """Addresses to call when few nodes are known; the oldest are forgotten first."""
        for ip, port in addresses:
            address = canonical(ip, port)
            if address is not None and address not in self._learned and not self._mine(address):
                self._learned[address] = None
                if len(self._learned) > MAX_LEARNED:
                    del self._learned[next(iter(self._learned))]
                self._wake.set()

    async def bootstrap(self) -> None:
        """Runs until cancelled."""
        pause = FIRST_PAUSE_S
        while True:
            if len(self._protocol.contacts()) < MIN_CONTACTS and await self._call_everyone():
                pause = FIRST_PAUSE_S
                await crawl(self._protocol, self._protocol.source_node.id)
                self._on_growth()
            try:
                async with asyncio.timeout(pause * random.uniform(0.8, 1.2)):
                    await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(FIRST_PAUSE_S)  # what woke us seldom comes alone
            except TimeoutError:
                pause = min(pause * 2, MAX_PAUSE_S if self._protocol.contacts() else MAX_PAUSE_ALONE_S)

    async def keep_alive(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(KEEPALIVE_S * random.uniform(0.8, 1.2))
            now = asyncio.get_running_loop().time()
            self._protocol.forget_strangers()
            heard = self._protocol.last_heard
            silent = [n for n in self._protocol.contacts() if now - heard.get(n.id, 0.0) > KEEPALIVE_S]
            await asyncio.gather(*(self._protocol.call_ping(n) for n in silent[:_CALLS_AT_ONCE]))
            if len(self._protocol.contacts()) < MIN_CONTACTS:
                self._wake.set()

    async def save_regularly(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write the peer cache, off the loop. A failure is logged: the cache is a convenience."""
        for n in self._protocol.contacts():
            self._cache.note(NodeId(n.id.hex()), (n.ip, n.port), self._wall_ms())
        data = self._cache.render()
        if data is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._cache.write, data)
            except OSError as e:
                log.warning("cannot write %s: %s; trying again in a minute", self._cache.path, e.strerror or e)

    async def _call_everyone(self) -> bool:
        """Call every address that is known and belongs to no contact; whether the table has grown."""
        before = {n.id for n in self._protocol.contacts()}
        there = {(n.ip, n.port) for n in self._protocol.contacts()}
        addresses = dict.fromkeys(await self._resolver.resolve(self._seeds))
        addresses.update(dict.fromkeys(p.address for p in self._cache.peers()))
        addresses.update(self._learned)
        slots = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def call(address: Address) -> None:
            async with slots:
                await self._protocol.meet(address)

        # The first answer is enough to go on: dead seeds must not hold up the join for their two timeouts.
        calls = {asyncio.ensure_future(call(a)) for a in addresses if a not in there and not self._mine(a)}
        try:
            while calls:
                _, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                if any(n.id not in before for n in self._protocol.contacts()):
                    return True
        finally:
            for task in calls:
                task.cancel()
        return False
