"""The other nodes of the run: where they are, and what they say of themselves.

Four sources are asked at once, none is needed: the peers of the configuration (host:port, id unknown), the peer cache,
the DHT, and peer exchange with everyone who answers. Whoever is found is asked to describe itself; only that answer,
signed over a nonce, counts. A search ends when everyone known has answered or failed, after 3 s with at least one
answer, or with 5 answers; with none it goes on trying for a while, since the others may be starting too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import HotswarmError, NotAuthorised, PeerMisbehaved, PeerUnavailable
from hotswarm.ids import NodeId, is_node_id
from hotswarm.swarm.client import PeerClient, PeerLinks
from hotswarm.swarm.clocks import swarm_clock
from hotswarm.swarm.model import Description, LiveClock
from hotswarm.swarm.records import Relayed, SignedRecord

log = logging.getLogger(__name__)

SETTLE_S = 3.0  # with at least one answer, a search is over then
ENOUGH = 5  # answers that end a search
AT_LEAST_S = 0.25  # even then those that answer at once are all heard
ALONE_S = 5.0  # how long a search goes on when nobody answers at all
RETRY_S = 0.5
DESCRIBE_TIMEOUT_S = 2.0
CLOCK_TIMEOUT_S = 1.0
EXCHANGE_TIMEOUT_S = 2.0
SEARCH_S = 10.0  # the first search of a node, which nobody waits for
FIRST_REFRESH_S = 0.5  # doubled up to the next while nobody is known
REFRESH_S = 10.0
REFRESHED_AT_ONCE = 16
FORGET_FAILURES = 5  # in a row; then a peer is listed no more until somebody names it again
MAX_PEERS = 512
MAX_KNOWN = 64  # records that are relayed in one exchange


class Directory(Protocol):
    """What is used of `dht.RunDirectory`."""

    def lookup(self) -> AsyncGenerator[Relayed, None]:
        """Records of other members, as they arrive."""

    def known(self) -> list[Relayed]:
        """Records of others that are held here."""

    def known_with_own(self) -> list[Relayed]:
        """The same with this node's own."""

    def add_records(self, records: Iterable[Relayed]) -> int:
        """Take in relayed records."""

    def add_seeds(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Addresses to try."""


@dataclass(slots=True)
class Neighbour:
    """A node that was met or named."""

    node: NodeId
    addresses: list[str] = field(default_factory=list)  # the one that answered last first
    source: str = ""
    description: Description | None = None
    answered_at: float = float("-inf")  # monotonic
    failures: int = 0  # in a row
    problem: str = ""


class Neighbours:
    """See the module's head. One event loop."""

    def __init__(
        self,
        node_id: NodeId,
        links: PeerLinks,
        *,
        static: Sequence[str] = (),
        cached: Callable[[], Sequence[tuple[NodeId, str]]] = tuple,
        directory: Directory | None = None,
        note: Callable[[NodeId, str], None] = lambda _node, _address: None,
        own_addresses: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`note` is told of every node that answered, and where."""
        self.refused: dict[str, str] = {}  # who refused this node's key, by address or id, in the last search
        self._node_id = node_id
        self._links = links
        self._static = tuple(static)
        self._cached = cached
        self._directory = directory
        self._note = note
        self._own_addresses = own_addresses
        self._known: dict[NodeId, Neighbour] = {}
        self._at: dict[str, NodeId] = {}  # who answered at a configured address
        self._problems: dict[str, str] = {}  # configured addresses that do not answer

    # ------------------------------------------------------------ facts

    def all(self) -> list[Neighbour]:
        """Everyone that is known, those that answered last first."""
        return sorted(self._known.values(), key=lambda n: (-n.answered_at, n.node))

    def problems(self) -> dict[str, str]:
        """Configured addresses and known nodes that do not answer, and why."""
        silent: dict[str, str] = {n.node: n.problem for n in self._known.values() if n.problem}
        return {**self._problems, **silent}

    def client(self, node: str) -> PeerClient:
        """A connection to a node that answered. PeerUnavailable when its address is not known."""
        known = self._known.get(NodeId(node))
        if known is None or not known.addresses:
            raise PeerUnavailable(f"no address is known for node {node}", node)
        return self._links.link(known.addresses[0], known.node)

    # ------------------------------------------------------------ asking

    async def search(self, timeout_s: float) -> list[Description]:
        """Ask everyone who can be found. NotAuthorised when all who can be reached refuse this node's key."""
        search = _Search(self)
        self.refused = {}
        try:
            async with asyncio.timeout(timeout_s):
                await search.run()
        except TimeoutError:
            pass  # what has come by then is the answer
        finally:
            await search.end()
        if not search.answers and self.refused:
            raise NotAuthorised(
                f"every peer that can be reached refuses this node: {next(iter(self.refused.values()))}"
            )
        return list(search.answers.values())

    async def ask_again(self, nodes: Iterable[str], timeout_s: float = DESCRIBE_TIMEOUT_S) -> list[Description]:
        """Fresh descriptions of nodes that are known; without those that do not answer in time."""

        async def one(node: str) -> Description | None:
            known = self._known[NodeId(node)]
            for address in known.addresses[:1]:
                return await self.describe(address, known.node, timeout_s)
            return None

        answers = await asyncio.gather(*(one(node) for node in nodes if NodeId(node) in self._known))
        return [answer for answer in answers if answer is not None]

    async def ask_peer(self, peer: str, timeout_s: float) -> Description:
        """One peer, by node id or `host:port`. Raises what it failed with."""
        if not is_node_id(peer):
            client = self._links.link(peer, None)
            return self._heard(peer, await client.describe(timeout_s), "asked for")
        if NodeId(peer) not in self._known:
            await self.search(timeout_s)
        client = self.client(peer)
        return self._heard(client.address, await client.describe(timeout_s), "asked for")

    async def clock(self, own: Mapping[int, bytes], timeout_s: float = CLOCK_TIMEOUT_S) -> LiveClock | None:
        """Where the live trainers are in their round, see `clocks`. None: nobody is live. `own`: own outer digests."""
        nodes = [n.node for n in self._known.values() if n.failures == 0]
        return swarm_clock(await self.ask_again(nodes, timeout_s), own)

    async def describe(self, address: str, node: NodeId | None, timeout_s: float) -> Description | None:
        """Ask one address; None, with the reason kept, when that fails or it is this node itself."""
        client = self._links.link(address, node)
        try:
            description = await client.describe(timeout_s)
        except HotswarmError as error:
            self._failed(address, node, error)
            return None
        if description.node == self._node_id:
            self._problems.pop(address, None)
            self._at[address] = self._node_id
            return None
        return self._heard(address, description, "")

    def _heard(self, address: str, description: Description, source: str) -> Description:
        node = NodeId(description.node)
        known = self._known.setdefault(node, Neighbour(node, source=source or "configured"))
        known.addresses = [address, *(a for a in known.addresses if a != address)][:4]
        known.description = description
        known.answered_at = time.monotonic()
        known.failures, known.problem = 0, ""
        self._problems.pop(address, None)
        self.refused.pop(address, None)
        for other in [n.node for n in self._known.values() if n.node != node and n.problem and address in n.addresses]:
            self._forget(other)
        if address in self._static:
            self._at[address] = node
        self._note(node, address)
        if len(self._known) > MAX_PEERS:
            del self._known[min(self._known.values(), key=lambda n: n.answered_at).node]
        return description

    def _lives_there(self, address: str, other_than: NodeId) -> bool:
        """Whether this node itself, or another one that answers, is at that address."""
        others = (known for known in self._known.values() if known.node != other_than and not known.failures)
        return address in self._own_addresses() or any(known.addresses[:1] == [address] for known in others)

    def _forget(self, node: NodeId) -> None:
        self._known.pop(node, None)
        self.refused.pop(node, None)

    def _failed(self, address: str, node: NodeId | None, error: HotswarmError) -> None:
        reason = error.evidence if isinstance(error, PeerMisbehaved) else str(error)
        if isinstance(error, NotAuthorised):
            if node is not None and self._lives_there(address, node):
                self._forget(node)  # a machine that lost its key came back under another id
                return
            self.refused[node or address] = reason
        known = self._known.get(node) if node is not None else None
        if known is None:
            if address in self._static:
                self._problems[address] = reason
                self._at.pop(address, None)
            return
        known.problem = reason
        known.failures += 1
        known.addresses = [*(a for a in known.addresses if a != address), address]  # another one first next time
        if isinstance(error, NotAuthorised) and address in self._static:
            self._at.pop(address, None)  # another node may live there now
        if known.failures >= FORGET_FAILURES:
            del self._known[known.node]

    # ------------------------------------------------------------ sources

    @property
    def alone(self) -> bool:
        """Whether there are configured peers and nobody at all answers."""
        return bool(self._problems) and not any(known.failures == 0 for known in self._known.values())

    @property
    def all_refuse(self) -> bool:
        """Whether everyone who could be reached refuses this node's key."""
        return bool(self.refused) and not any(known.failures == 0 for known in self._known.values())

    def candidates(self) -> list[tuple[str, NodeId | None, str]]:
        """(address, id, source) of everyone who is known or named anywhere here, without asking."""
        found: list[tuple[str, NodeId | None, str]]
        found = [(address, self._at.get(address), "configured") for address in self._static]
        for known in self._known.values():
            found += [(address, known.node, known.source) for address in known.addresses[:1]]
        found += [(address, node, "peer cache") for node, address in self._cached()]
        if self._directory is not None:
            for relayed in self._directory.known():
                found += self.of_record(relayed, "dht")
        return [item for item in found if not self.is_me(item[0], item[1])]

    def of_record(self, relayed: Relayed, source: str) -> list[tuple[str, NodeId | None, str]]:
        """Where a record says that its signer is."""
        signer = relayed.signed.signer
        return [(join(host, port), signer, source) for host, port in relayed.signed.record.addresses]

    def is_configured(self, address: str) -> bool:
        """Whether the configuration names this address."""
        return address in self._static

    def is_me(self, address: str, node: NodeId | None) -> bool:
        """Whether that is this node itself."""
        return node == self._node_id or address in self._own_addresses()

    @property
    def directory(self) -> Directory | None:
        """The DHT, when there is one."""
        return self._directory

    async def exchange(self, node: str) -> list[tuple[str, NodeId | None, str]]:
        """Trade records with a peer; the addresses in those that it gave. Empty when that fails."""
        if self._directory is None:
            return []
        try:
            told = await self.client(node).exchange(
                [to_proto(r) for r in self._directory.known_with_own()[:MAX_KNOWN]], EXCHANGE_TIMEOUT_S
            )
        except HotswarmError as error:
            log.debug("no peer exchange with %s: %s", node, error)
            return []
        self._directory.add_records(from_proto(told))
        signers = {record.public_key for record in told}
        found = [r for r in self._directory.known() if r.signed.public_key in signers]
        return [item for r in found for item in self.of_record(r, "exchange") if not self.is_me(item[0], item[1])]

    async def keep_fresh(self) -> None:
        """For ever: search at once, then ask everyone again now and then, and trade records with one of them.

        While nobody answers the pauses are short: nodes of one job start at about the same time.
        """
        with contextlib.suppress(NotAuthorised):  # kept in `refused`
            await self.search(SEARCH_S)
        if self.alone:
            log.warning("no peer answers: %s", "; ".join(f"{who}: {why}" for who, why in self.problems().items()))
        pause_s = FIRST_REFRESH_S
        while True:
            alone = all(known.failures for known in self._known.values())
            pause_s = min(2 * pause_s, REFRESH_S) if alone else REFRESH_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            places = {(node or address): (address, node) for address, node, _ in reversed(self.candidates())}
            chosen = random.sample(sorted(places), min(REFRESHED_AT_ONCE, len(places)))
            await asyncio.gather(*(self.describe(*places[key], DESCRIBE_TIMEOUT_S) for key in chosen))
            alive = [n.node for n in self._known.values() if not n.failures]
            if alive:
                new = await self.exchange(random.choice(alive))
                unknown = [(a, n) for a, n, _ in new if n is not None and n not in self._known]
                await asyncio.gather(*(self.describe(a, n, DESCRIBE_TIMEOUT_S) for a, n in unknown[:REFRESHED_AT_ONCE]))

    def status(self) -> list[dict[str, Any]]:
        """For people and programs."""
        now = time.monotonic()
        rows: list[dict[str, Any]] = []
        for known in self.all():
            said = known.description
            rows.append(
                {
                    "node": known.node,
                    "name": said.name if said else "",
                    "addresses": list(known.addresses),
                    "reachable": known.failures == 0 and said is not None,
                    "live": bool(said and said.live),
                    "clock": said.clock.to_json() if said and said.clock else None,
                    "newest": said.offers[0].to_json() if said and said.offers else None,
                    "outer_step": said.offers[0].outer_step if said and said.offers else None,
                    "outer_digest": _hex(said.offers[0].outer_digest) if said and said.offers else None,
                    "snapshots": len(said.offers) if said else 0,
                    "streams_active": said.streams_active if said else 0,
                    "streams_max": said.streams_max if said else 0,
                    "seen_s_ago": now - known.answered_at if said else None,
                    "source": known.source,
                    "error": known.problem or None,
                }
            )
        for address, problem in self._problems.items():
            row = {"node": None, "name": "", "addresses": [address], "live": False, "clock": None, "error": problem}
            rows.append({**row, "reachable": False, "source": "configured"})
        return rows


class _Search:
    """One search: dials grow out of answers until nobody new is named."""

    def __init__(self, around: Neighbours) -> None:
        self.answers: dict[str, Description] = {}
        self._around = around
        self._dialled: set[tuple[str, NodeId | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._exchanged: set[str] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._dial(self._around.candidates())
        if self._around.directory is not None:
            self._spawn(self._look_up(self._around.directory))
        while True:
            now = loop.time() - started
            if self.answers and (now >= SETTLE_S or (len(self.answers) >= ENOUGH and now >= AT_LEAST_S)):
                return
            if not self._tasks:
                if self.answers or now >= ALONE_S or not self._dialled:
                    return
                await asyncio.sleep(RETRY_S)
                self._dialled.clear()
                self._dial(self._around.candidates())
                continue
            patience = AT_LEAST_S if len(self.answers) >= ENOUGH else SETTLE_S
            wait_s = max(0.01, patience - now) if self.answers else RETRY_S
            await asyncio.wait(self._tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _dial(self, places: Iterable[tuple[str, NodeId | None, str]]) -> None:
        for address, node, _ in places:
            if self._around.is_me(address, node):
                continue
            known_there = any(address == dialled for dialled, _ in self._dialled)
            if (address, node) not in self._dialled and (node is not None or not known_there):
                self._dialled.add((address, node))
                self._spawn(self._ask(address, node))

    async def _ask(self, address: str, node: NodeId | None) -> None:
        if node is not None and node in self.answers:
            return
        description = await self._around.describe(address, node, DESCRIBE_TIMEOUT_S)
        if description is None and node is not None and self._around.is_configured(address):
            description = await self._around.describe(address, None, DESCRIBE_TIMEOUT_S)  # another node lives there now
        if description is None:
            return
        self.answers[description.node] = description
        if description.node not in self._exchanged:
            self._exchanged.add(description.node)
            self._dial(place for place in await self._around.exchange(description.node) if place[1] not in self.answers)

    async def _look_up(self, directory: Directory) -> None:
        async with contextlib.aclosing(directory.lookup()) as records:
            async for relayed in records:
                if relayed.signed.signer not in self.answers:
                    self._dial(self._around.of_record(relayed, "dht"))


def join(host: str, port: int) -> str:
    """`host:port`, brackets around an IPv6 literal."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def to_proto(relayed: Relayed) -> pb.SignedRecord:
    """A record as `Peers` carries it."""
    signed = relayed.signed
    return pb.SignedRecord(
        body=signed.body,
        public_key=signed.public_key,
        signature=signed.signature,
        ttl_left_s=max(0, int(relayed.ttl_left_s)),
    )


def from_proto(records: Iterable[pb.SignedRecord]) -> list[Relayed]:
    """The records of a `Peers` message, unchecked: `add_records` checks."""
    return [
        Relayed(SignedRecord(record.body, record.public_key, record.signature), record.ttl_left_s) for record in records
    ]


def _hex(digest: bytes | None) -> str | None:
    return digest.hex() if digest else None
