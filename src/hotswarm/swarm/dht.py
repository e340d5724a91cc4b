"""`RunDirectory`: who takes part in a run, kept in a sealed DHT.

One per daemon, in its event loop. It holds the socket, announces this node and finds the others; `Bootstrap` keeps it
connected. A third of the time to live after an announcement the record is signed and stored again, with a new seq;
sooner, when the table has grown and hardly anybody holds the last one.

The directory may be wrong or slow without harm: it need return only one live member, and nothing is restored because
of what a record says. `lookup` therefore yields records as they arrive and never waits for the slowest node.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kademlia.node import Node

from hotswarm.config import parse_address
from hotswarm.errors import ConfigError, LocalFailure, LockedError
from hotswarm.ids import NodeId, check_run
from hotswarm.swarm.bootstrap import MIN_CONTACTS, Bootstrap
from hotswarm.swarm.crawl import crawl
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.kad import K, MergeStorage, SealedProtocol, SealedServer
from hotswarm.swarm.peercache import PeerCache
from hotswarm.swarm.recordbook import RecordBook
from hotswarm.swarm.records import (
    MAX_TTL_S,
    Record,
    RecordError,
    Relayed,
    SignedRecord,
    decode_value,
    dht_keys,
    encode_value,
    newest,
    shard_of,
)
from hotswarm.swarm.sealed import Address, SealedChannel, canonical
from hotswarm.swarm.swarmkey import Membership, is_loopback

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 8.0  # a crawl through dead nodes and one round of stores
WITHDRAW_TIMEOUT_S = 0.5
RESTART_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a node says of itself; `RunDirectory` adds sequence number, time to live and signature."""

    addresses: tuple[Address, ...]
    outer_step: int = 0
    inner_step: int = 0
    outer_digest: bytes = b""
    snapshot_bytes: int = 0


class RunDirectory:
    """See the module's head. `seeds` are `host:port`, names allowed; `ttl_s` is that of this node's record."""

    def __init__(
        self,
        identity: NodeIdentity,
        membership: Membership,
        run: str,
        cache: PeerCache,
        *,
        seeds: Sequence[str] = (),
        advertise: Address | None = None,
        ttl_s: int = 600,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise ConfigError(
                f"a record's time to live of {ttl_s} s is not within 1 to {MAX_TTL_S}", "record_ttl_seconds"
            )
        self.identity = identity
        self.run = check_run(run)
        self.ttl_s = ttl_s
        self.address: Address = ("", 0)
        self._advertise = advertise
        self._cache = cache
        self._wall_ms = wall_ms
        self._keys = [dht_keys(secret, run) for secret in membership.run_secrets]
        self._storage = MergeStorage(RecordBook(keep=identity.node_id))
        self._channel = SealedChannel(membership.udp_keys, identity.kademlia_id, self._may_be_mine)
        self._server = SealedServer(identity.kademlia_id, self._storage, self._channel)
        self._bootstrap = Bootstrap(
            self._server,
            [parse_address(s, "peers") for s in seeds],
            cache,
            mine=self._is_mine,
            on_growth=self._on_growth,
            wall_ms=wall_ms,
        )
        self._announcement: Announcement | None = None
        self._seq = cache.seq
        self._met = -1  # the highest seq met in a record of this node that it does not remember making
        self._stored_on = 0
        self._published_at = 0.0
        self._publishing = asyncio.Lock()
        self._refresh_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    async def start(self, host: str, port: int) -> int:
        """Open the socket and begin to look for others. Returns the port, for `port` 0 a free one.

        LockedError when the port is taken, LocalFailure when it cannot be opened otherwise.
        """
        for name in ("kademlia", "rpcudp"):  # they log keys and values at INFO, and every dead node as a warning
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            await self._server.listen(port, host)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise LockedError(
                    f"UDP port {port} on {host} belongs to another process; end it, or choose another --listen"
                ) from e
            raise LocalFailure(f"cannot listen on UDP {host}:{port}: {e.strerror or e}; check --listen") from e
        name = self._server.transport.get_extra_info("sockname")
        self.address = (str(name[0]), int(name[1]))
        near = self._bootstrap
        for work in (near.bootstrap, near.keep_alive, near.save_regularly, self._refresh):
            self._tasks.append(asyncio.get_running_loop().create_task(_for_ever(work)))
        return self.address[1]

    async def stop(self, *, withdraw: bool = True) -> None:
        """Take the record back (at most a second), save the cache, close. Safe to call twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if withdraw and tasks:
            await self.withdraw()
        self._server.stop()
        if tasks:
            await self._bootstrap.save()
            await asyncio.sleep(0)  # lets the transport's close come through before the loop ends

    @property
    def protocol(self) -> SealedProtocol:
        """The DHT's lower half, once started."""
        protocol: SealedProtocol = self._server.protocol
        return protocol

    # ------------------------------------------------------------ announcing

    async def publish(self, announcement: Announcement) -> int:
        """Announce this node from now on. Returns how many others hold the record; 0 when alone, which is no error."""
        self._announcement = announcement
        try:
            return await self._put()
        finally:
            self._refresh_now.set()  # the refresh counts from here

    async def withdraw(self) -> None:
        """Take the announcement back everywhere, at best effort and within half a second."""
        said, self._announcement = self._announcement, None
        if said is None:
            return
        # Not behind the lock: a publish under way may be waiting for dead nodes. Its record has the lower seq.
        try:
            await asyncio.wait_for(self._put_once(said, 0), WITHDRAW_TIMEOUT_S)
        except TimeoutError:
            log.info("not every node took the withdrawal in time; there the record expires within %d s", self.ttl_s)

    async def _put(self) -> int:
        async with self._publishing:
            for _ in range(2):
                said = self._announcement
                if said is None:
                    return 0
                self._published_at = asyncio.get_running_loop().time()
                self._stored_on = await self._put_once(said, self.ttl_s)
                if self._met < self._seq:
                    break  # otherwise a record of this node with a higher seq was met: once more, above it
            return self._stored_on

    async def _put_once(self, said: Announcement, ttl_s: int) -> int:
        self._seq = self._cache.seq = max(self._seq + 1, self._met + 1, self._wall_ms())
        record = Record(
            self._seq, ttl_s, said.addresses, said.outer_step, said.inner_step, said.outer_digest, said.snapshot_bytes
        )
        shard = shard_of(self.identity.node_id)
        return max(await asyncio.gather(*(self._put_under(keys[shard], record) for keys in self._keys)))

    async def _put_under(self, key: bytes, record: Record) -> int:
        """Store here first, so that this node alone is a directory of one; then at the nearest nodes known, at once,
        for the living must not wait until the dead are found out; then at those that the lookup adds.
        """
        signed = SignedRecord.sign(record, key, self.identity)
        self._storage.book.merge(key, Relayed(signed, record.ttl_s), time.monotonic())
        value = encode_value([Relayed(signed, record.ttl_s)])
        holders: set[bytes] = set()

        async def store(nodes: list[Node]) -> None:
            replies = await asyncio.gather(*(self.protocol.call_store(n, key, value) for n in nodes))
            holders.update(n.id for n, (ok, held) in zip(nodes, replies, strict=True) if ok and held is True)

        known = self.protocol.router.find_neighbors(Node(key), k=K)
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                if record.ttl_s == 0:
                    await store(known)
                else:
                    near, _ = await asyncio.gather(
                        crawl(self.protocol, key, lambda v: self._take(key, v)), store(known)
                    )
                    await store([n for n in near if n.id not in {k.id for k in known}])
        except TimeoutError:
            log.info("storing the record took over %.0f s; %d nodes hold it", PUBLISH_TIMEOUT_S, len(holders))
        return len(holders)

    # ------------------------------------------------------------ finding

    async def lookup(self) -> AsyncGenerator[Relayed, None]:
        """Records of other members of the run: those known here at once, then the others as answers arrive.

        A signer may come twice, the second time with a higher seq. Ends when all nodes have answered or timed out;
        close it sooner (`aclosing`) when it has served its purpose.
        """
        seen: dict[NodeId, int] = {}
        arrived: asyncio.Queue[Relayed | None] = asyncio.Queue()

        async def one(key: bytes) -> None:
            await crawl(self.protocol, key, lambda value: self._take(key, value, arrived.put_nowait))

        async def every() -> None:
            await asyncio.gather(*(one(key) for keys in self._keys for key in keys))

        for relayed in self.known():
            arrived.put_nowait(relayed)
        crawling = asyncio.get_running_loop().create_task(every())
        crawling.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (relayed_or_end := await arrived.get()) is not None:
                signed = relayed_or_end.signed
                if seen.get(signed.signer, -1) < signed.record.seq:
                    seen[signed.signer] = signed.record.seq
                    yield relayed_or_end
            await crawling
        finally:
            crawling.cancel()

    async def find(self, *, timeout_s: float = 3.0, enough: int | None = None) -> list[Relayed]:
        """What `lookup` yields within `timeout_s`, or until `enough` members were found; one record for each."""
        found: list[Relayed] = []
        records = self.lookup()
        try:
            async with asyncio.timeout(timeout_s):
                async for relayed in records:
                    found.append(relayed)
                    if enough is not None and len({r.signed.signer for r in found}) >= enough:
                        break
        except TimeoutError:
            pass  # what has arrived by then is the answer
        finally:
            await records.aclose()
        return list(newest(found))

    def known(self) -> list[Relayed]:
        """The other members that this node holds records of, without asking anyone: the answer to `Peers`."""
        return [r for r in self._held() if r.signed.signer != self.identity.node_id]

    def known_with_own(self) -> list[Relayed]:
        """The same with this node's own record, when it is announced."""
        return self._held()

    def add_records(self, records: Iterable[Relayed]) -> int:
        """Take in records that a peer relayed over gRPC. Returns how many were new; invalid ones are left out."""
        added = 0
        for relayed in records:
            for keys in self._keys:
                try:
                    key = keys[shard_of(relayed.signed.signer)]
                    relayed.signed.check(key)
                except RecordError:
                    continue  # perhaps under the other swarm key
                added += self._take_one(key, relayed)
                break
        return added

    def add_seeds(self, addresses: Iterable[Address]) -> None:
        """Addresses to try when few nodes are known, as learned over gRPC (one port number serves both)."""
        self._bootstrap.learn(addresses)

    async def observed_ip(self) -> str | None:
        """The IP address that at least two other nodes see this one at, or None."""
        contacts = self.protocol.contacts()[:8]
        replies = await asyncio.gather(*(self.protocol.request((n.ip, n.port), "stun") for n in contacts))
        votes: Counter[str] = Counter()
        for ok, seen in replies:
            address = canonical(*seen) if ok and isinstance(seen, list) and len(seen) == 2 else None
            if address is not None:
                votes[address[0]] += 1
        best = votes.most_common(1)
        return best[0][0] if best and best[0][1] >= 2 else None

    def contacts(self) -> list[tuple[NodeId, Address]]:
        """The routing table."""
        return [(NodeId(n.id.hex()), (n.ip, n.port)) for n in self.protocol.contacts()]

    def status(self) -> dict[str, Any]:
        """For people and programs: what the directory knows."""
        return {
            "address": f"{self.address[0]}:{self.address[1]}",
            "contacts": len(self.protocol.contacts()),
            "records": len(self._held()),
            "seq": self._seq,
            "stored_on": self._stored_on,
            "datagrams_dropped": self._channel.dropped,
            "hostile_messages": self.protocol.hostile,
        }

    def _held(self) -> list[Relayed]:
        now = time.monotonic()
        return list(newest([r for keys in self._keys for key in keys for r in self._storage.book.records(key, now)]))

    def _take(self, key: bytes, value: bytes, then: Callable[[Relayed], None] | None = None) -> None:
        """Merge a value from a peer; `then` gets the records of others that are alive."""
        try:
            records = decode_value(value)
        except RecordError as e:
            self.protocol.hostile += 1
            log.debug("refused a value: %s", e)
            return
        for relayed in records:
            self._take_one(key, relayed)
        if then is not None:
            for relayed in self._storage.book.records(key, time.monotonic()):
                if relayed.signed.signer != self.identity.node_id:
                    then(relayed)

    def _take_one(self, key: bytes, relayed: Relayed) -> bool:
        signed = relayed.signed
        try:
            if signed.signer == self.identity.node_id:
                signed.check(key)
                if signed.record.seq > max(self._seq, self._met):
                    log.warning(
                        "this node's record was met with a higher seq (a lost state directory?); going on from it"
                    )
                    self._met = signed.record.seq
                return False
            before = len(self._storage.book)
            self._storage.book.merge(key, relayed, time.monotonic())
        except RecordError as e:
            self.protocol.hostile += 1
            log.debug("refused a record: %s", e)
            return False
        self.add_seeds(signed.record.addresses)
        return len(self._storage.book) > before

    # ------------------------------------------------------------ tasks

    async def _refresh(self) -> None:
        third = self.ttl_s / 3
        while True:
            self._refresh_now.clear()
            due = self._published_at + third - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(due, 0.0) if self._announcement else None):
                    await self._refresh_now.wait()
                if self._stored_on >= min(MIN_CONTACTS, len(self.protocol.contacts())):
                    continue
            except TimeoutError:
                pass  # a third of the time to live has passed
            self._storage.book.sweep(time.monotonic())
            await self._put()

    # ------------------------------------------------------------ own address

    def _on_growth(self) -> None:
        self._refresh_now.set()

    def _is_mine(self, address: Address) -> bool:
        return address in (self.address, self._advertise)

    def _may_be_mine(self, address: Address) -> bool:
        """Whether a first contact addressed to `address` can have been meant for this node (see sealed.py)."""
        if self._is_mine(address):
            return True
        if canonical(*self.address) is None:
            return True  # bound to every address of the machine, and perhaps behind a port mapping
        # Bound to one: on the loopback nobody translates addresses; elsewhere it may be a mapping not known here.
        return not is_loopback(self.address[0]) and not is_loopback(address[0])


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    """A fault of ours in one of the tasks must not cut this node off for the rest of its life, nor go unseen."""
    while True:
        try:
            await work()
        except Exception:  # whatever it is, it is logged with its traceback, and the task starts again
            log.exception("a task of the directory failed; starting it again in %.0f s", RESTART_PAUSE_S)
            await asyncio.sleep(RESTART_PAUSE_S)
