"""The part of a node that speaks to other nodes: it owns the gRPC server, the DHT directory and the connections.

    start   keys → TCP port → UDP port of the same number → first announcement → keeping neighbours fresh
    stop    withdraw the record → stop serving (streams get half a second) → close connections

Nothing here is needed for training to go on: a DHT that finds nobody, a peer that refuses, a full disk are health
reasons and log lines. Only a port that is taken, or a missing key where one is needed, stops a node from starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.config import Address, NodeConfig, parse_address
from hotswarm.errors import HotswarmError, LocalFailure, LockedError
from hotswarm.ids import NodeId
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.swarm.catalog import FRESH_S, Catalog
from hotswarm.swarm.client import PeerLinks
from hotswarm.swarm.dht import Announcement, RunDirectory
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest
from hotswarm.swarm.neighbours import MAX_KNOWN, Neighbours, from_proto, join, to_proto
from hotswarm.swarm.peercache import PeerCache
from hotswarm.swarm.rejoin import Rejoin
from hotswarm.swarm.sealed import canonical
from hotswarm.swarm.serve import Servicer, SwarmServer
from hotswarm.swarm.strikes import Strikes
from hotswarm.swarm.swarmkey import KeyFile, Membership, keys_or_loopback, read_key_file
from hotswarm.swarm.throttle import Slots
from hotswarm.swarm.tls import SwarmTls
from hotswarm.swarm.transfer import Ledger

log = logging.getLogger(__name__)

PORT_TRIES = 20  # for one number that is free in TCP and UDP
ANNOUNCE_TIMEOUT_S = 10.0

Progress = Callable[[dict[str, object]], None]


def build_swarm(
    config: NodeConfig, identity: NodeIdentity, store: FileStore, live: Callable[[], LiveClock | None]
) -> Swarm:
    """The swarm side of a node; nothing is opened before `start`. NotAuthorised when a key is missing or unreadable."""
    return Swarm(config, identity, store, live)


class Swarm:
    """Implements `node.SwarmSide`."""

    def __init__(
        self, config: NodeConfig, identity: NodeIdentity, store: FileStore, live: Callable[[], LiveClock | None]
    ) -> None:
        file = _key_file(config)
        peers = tuple(dict.fromkeys([*config.peers, *file.peers]))
        addresses = [config.listen, *([config.advertise] if config.advertise else []), *peers]
        keys = keys_or_loopback(file.keys, addresses)
        self._config = config
        self._identity = identity
        self._store = store
        self._live = live
        self._membership = Membership.from_keys(keys, identity)
        self._tls = SwarmTls(identity, self._membership)
        self._catalog = Catalog(store)
        self._cache = PeerCache.load(config.state_dir)
        self._links = PeerLinks(config.run, self._tls)
        self._strikes = Strikes()
        self._host, self._port = "", 0
        self._advertised: tuple[Address, ...] = ()
        advertise = _literal(config.advertise)
        self._directory = RunDirectory(
            identity,
            self._membership,
            config.run,
            self._cache,
            seeds=peers,
            advertise=(advertise.host, advertise.port) if advertise else None,
            ttl_s=config.record_ttl_seconds,
        )
        self._neighbours = Neighbours(
            identity.node_id,
            self._links,
            static=peers,
            cached=lambda: [(peer.node_id, join(*peer.address)) for peer in self._cache.peers()],
            directory=self._directory,
            note=self._note,
            own_addresses=lambda: [str(address) for address in self._addresses()],
        )
        self._servicer: Servicer | None = None
        self._server: SwarmServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._health: dict[str, str] = {}
        self._recoveries = 0
        self._one_at_a_time = asyncio.Lock()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind TCP and UDP, announce, look for others. LockedError names a port that is taken."""
        wanted = parse_address(self._config.listen, "listen", port_zero=True)
        self._host = await _resolve(wanted.host)
        for attempt in range(PORT_TRIES):
            servicer = self._new_servicer()
            server = SwarmServer(servicer, self._tls.server_credentials())
            port = await server.start(self._host, wanted.port)
            try:
                await self._directory.start(self._host, port)
            except LockedError:
                await server.stop(0)
                if wanted.port or attempt == PORT_TRIES - 1:
                    raise
            except BaseException:
                await server.stop(0)
                raise
            else:
                self._servicer, self._server, self._port = servicer, server, port
                break
        await self._find_addresses()
        await self._catalog.refresh()
        self._tasks = [
            asyncio.get_running_loop().create_task(self._neighbours.keep_fresh()),
            asyncio.get_running_loop().create_task(self._announce_first()),
        ]

    def _new_servicer(self) -> Servicer:
        return Servicer(
            self._store,
            self._identity,
            self._catalog,
            _Exchange(self._directory),
            authenticate=self._tls.peer_id,
            live=self._live,
            addresses=lambda: [str(address) for address in self._addresses()],
            name=self._config.name,
            slots=self._config.upload_slots,
            bytes_per_s=self._config.max_upload_bytes_per_s,
        )

    async def stop(self) -> None:
        """Withdraw the announcement and close everything. Safe to call twice, and before `start`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._directory.stop(withdraw=True)
            await self._server.stop()
            self._server = None
        await self._links.close()

    # ------------------------------------------------------------ announcing

    async def announce(self) -> None:
        """Tell the swarm about the newest snapshot, or that this node is here."""
        await self._catalog.refresh()
        held = self._catalog.held
        newest = held[-1].info if held else None
        clock = self._live()
        announcement = Announcement(
            addresses=tuple((a.host, a.port) for a in self._addresses() if canonical(a.host, a.port))[:3],
            outer_step=newest.outer_step if newest else 0,
            inner_step=newest.inner_step if newest else (clock.inner_step if clock else 0),
            outer_digest=(newest.outer_digest or b"") if newest else b"",
            snapshot_bytes=newest.bytes if newest else 0,
        )
        async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
            await self._directory.publish(announcement)

    async def _announce_first(self) -> None:
        try:
            await self.announce()
        except (HotswarmError, TimeoutError, OSError) as error:
            log.warning("could not announce this node: %s; the directory tries again by itself", error)

    def _addresses(self) -> Sequence[Address]:
        """Where others reach this node."""
        return self._advertised

    async def _find_addresses(self) -> None:
        if self._config.advertise:
            address = parse_address(self._config.advertise, "advertise")
            self._advertised = (Address(await _resolve(address.host), address.port),)
            return
        if not ipaddress.ip_address(self._host).is_unspecified:
            self._advertised = (Address(self._host, self._port),)
            return
        host = _outbound_ip(self._host)
        self._advertised = (Address(host, self._port),) if host else ()
        if not host:
            self._health["address"] = "no address of this machine is known that others could reach; set --advertise"

    def _note(self, node: NodeId, address: str) -> None:
        """A node answered there: remember it, and let the DHT use it as a seed."""
        place = parse_address(address, "peers")
        literal = canonical(place.host, place.port)
        if literal is not None:
            self._cache.note(node, literal, time.time_ns() // 1_000_000)
            self._directory.add_seeds([literal])

    # ------------------------------------------------------------ recovering

    async def recover(self, req: RecoverRequest, progress: Progress) -> RecoverOutcome:
        """Locate, choose, fetch. See rejoin.py for what it raises."""
        request = dataclasses.replace(req, allow_rollback=req.allow_rollback or self._config.allow_rollback)
        outcome = await self._rejoin(request, progress)
        if outcome.action in ("outer", "clone") and request.allow_rollback and not request.dry_run:
            await asyncio.to_thread(self._catalog.go_back, outcome.report.outer_step)
        return outcome

    async def _rejoin(self, request: RecoverRequest, progress: Progress) -> RecoverOutcome:
        self._recoveries += 1
        rejoin = Rejoin(
            node_id=self._identity.node_id,
            store=self._store,
            catalog=self._catalog,
            neighbours=self._neighbours,
            request=request,
            ledger=Ledger(self._strikes),
            progress=progress,
        )
        async with self._one_at_a_time:  # two at once would write the same unfinished sections
            outcome = await rejoin.run()
        log.info("recovery: %s (%s)", outcome.action, outcome.report.reason)
        return outcome

    async def fetch(self, peer: str, req: RecoverRequest, progress: Progress) -> SnapshotInfo:
        """Fetch the newest state of one peer (or of the swarm, for "") into the store, whatever this node has itself.

        Moments are adopted unless the request says otherwise: the snapshot is to be of use by itself.
        """
        request = dataclasses.replace(
            req,
            peer=peer or None,
            mode="clone" if req.mode == "clone" else "outer",
            inner="adopt" if req.inner == "auto" else req.inner,
            allow_rollback=True,
            dry_run=False,
        )
        outcome = await self._rejoin(request, progress)
        assert outcome.snapshot_id is not None
        return self._store.info(outcome.snapshot_id)

    async def clock(self) -> LiveClock | None:
        """Where the swarm is in its round now, by those who train. None when nobody does, or nobody is known."""
        if not self._neighbours.all():
            await self._neighbours.search(FRESH_S)
        return await self._neighbours.clock(self._catalog.voucher_digests)

    # ------------------------------------------------------------ facts

    def peers(self) -> list[dict[str, object]]:
        """The peers that are known, and configured addresses that do not answer."""
        return self._neighbours.status()

    def status(self) -> dict[str, object]:
        """For people and programs."""
        slots = self._servicer.slots if self._servicer is not None else Slots(self._config.upload_slots)
        refused = self._neighbours.refused
        reasons = list(self._health.values())
        if self._neighbours.alone and not refused:
            silent = "; ".join(f"{who}: {why}" for who, why in self._neighbours.problems().items())
            reasons.append(f"no peer answers, so nobody could help this node after a loss: {silent}")
        reasons += [f"{who} refuses this node: {why}" for who, why in refused.items()]
        served = self._servicer
        return {
            "listen": join(self._host, self._port) if self._port else self._config.listen,
            "addresses": [str(address) for address in self._addresses()],
            "health": reasons,
            "peers": sum(1 for neighbour in self._neighbours.all() if not neighbour.failures),
            "refused": self._neighbours.all_refuse,
            "streams_active": slots.active,
            "streams_max": slots.total,
            "vouchers": {str(step): digest.hex() for step, digest in self._catalog.voucher_digests.items()},
            "directory": self._directory.status() if self._port else {},
            "counters": {
                "bytes_sent": served.bytes_sent if served else 0,
                "chunks_sent": served.chunks_sent if served else 0,
                "streams_served": served.streams_served if served else 0,
                "refused_full": served.refused_full if served else 0,
                "recoveries": self._recoveries,
            },
        }


class _Exchange:
    """Implements `serve.Exchange` over the directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def take(self, records: Iterable[pb.SignedRecord]) -> None:
        self._directory.add_records(from_proto(records))

    def give(self) -> list[pb.SignedRecord]:
        return [to_proto(record) for record in self._directory.known_with_own()[:MAX_KNOWN]]


def _key_file(config: NodeConfig) -> KeyFile:
    path = config.swarm_key or config.join_file
    return read_key_file(path) if path is not None else KeyFile(())


def _literal(text: str | None) -> Address | None:
    """An address whose host is an IP literal; None for names, which are resolved later."""
    if text is None:
        return None
    address = parse_address(text, "advertise")
    return address if canonical(address.host, address.port) else None


async def _resolve(host: str) -> str:
    """The IP address of a host name, IPv4 before IPv6. LocalFailure when there is none."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LocalFailure(
            f"the host name {host!r} cannot be resolved: {error.strerror}; give an IP address"
        ) from error
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(found[0][4][0])


def _outbound_ip(listening: str) -> str | None:
    """The address that this machine would use to reach others. Nothing is sent."""
    family, probe = (socket.AF_INET6, "2001:db8::1") if ":" in listening else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((probe, 9))
        except OSError:
            return None
        return str(sock.getsockname()[0])
