"""The daemon: what it is made of, in which order it starts and stops, and when it ends by itself.

    start   lock the state directory → identity → store → persister, berth → swarm (its port) → sockets → daemon.lock
    stop    refuse trainers → persist what is READY → withdraw from the swarm → close sockets → unlock

It ends on SIGTERM (exit 0), on SIGINT (exit 130), or by itself (`lifetime`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hotswarm.config import NodeConfig
from hotswarm.errors import ControlError, HotswarmError, IntegrityError, ManifestError, NoSnapshot
from hotswarm.ids import SnapshotId, is_snapshot_id
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from hotswarm.swarm.access import group_id
from hotswarm.swarm.berth import Berth
from hotswarm.swarm.channel import Json
from hotswarm.swarm.control import snapshot_to_json
from hotswarm.swarm.fdpass import Connection, FdServer, send_files, send_slot
from hotswarm.swarm.http_api import Progress
from hotswarm.swarm.http_server import HttpServers
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.lifetime import Lifetime
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest
from hotswarm.swarm.paths import fd_socket_path, socket_path
from hotswarm.swarm.persist import Persister

log = logging.getLogger(__name__)

KEPT_RECOVERIES = 20
WITHDRAW_TIMEOUT_S = 5.0


class SwarmSide(Protocol):
    """The part of a node that speaks to other nodes."""

    async def start(self) -> None:
        """Bind the port and begin to look for peers. Raises LockedError when the port is taken."""

    async def stop(self) -> None:
        """Withdraw the announcement and close everything."""

    async def announce(self) -> None:
        """Tell the swarm about the newest snapshot."""

    async def recover(self, req: RecoverRequest, progress: Callable[[Json], None]) -> RecoverOutcome:
        """Locate, choose, fetch."""

    async def fetch(self, peer: str, req: RecoverRequest, progress: Callable[[Json], None]) -> SnapshotInfo:
        """Fetch the newest snapshot of one peer."""

    async def clock(self) -> LiveClock | None:
        """Where the swarm is in its round now."""

    def peers(self) -> list[Json]:
        """The peers that are known."""

    def status(self) -> Json:
        """`listen` as bound, `health` (reasons, empty when well), `counters`, and whatever helps."""


async def serve(
    config: NodeConfig, *, ready_fd: int | None = None, spawned: bool = False, owner_pid: int | None = None
) -> int:
    """Run a node until it is told to stop or nobody needs it. Returns the exit code; raises HotswarmError."""
    async with contextlib.AsyncExitStack() as stack:
        store = FileStore(config.state_dir, config.run, retention=_retention(config))
        await asyncio.to_thread(store.open_for_writing)
        stack.callback(store.close)
        node = Node(config, store, NodeIdentity.load_or_create(config.state_dir), spawned=spawned)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, node.request_stop)
        loop.add_signal_handler(signal.SIGINT, node.request_stop, 130)
        await node.start(stack)
        node.watch(owner_pid)
        node.announce_ready(ready_fd)
        return await node.wait_until_stopped()


@functools.cache
def _version() -> str:
    return importlib.metadata.version("hotswarm")  # slow enough to be asked for once, and not while starting


def _retention(config: NodeConfig) -> Retention:
    return Retention(max_hot=config.max_hot_snapshots, max_cold=config.max_cold_checkpoints, max_bytes=config.max_bytes)


class Node:
    """One daemon. Implements `http_api.Api`."""

    def __init__(self, config: NodeConfig, store: FileStore, identity: NodeIdentity, *, spawned: bool) -> None:
        from hotswarm.swarm.side import build_swarm

        self.config = config
        self.node_id = identity.node_id
        self._started_at = time.monotonic()
        self._ready = False
        self._stop_asked = asyncio.Event()
        self._exit_code = 0
        self._announcing: asyncio.Task[None] | None = None
        self._to_announce: SnapshotId | None = None
        self._recoveries: deque[Json] = deque(maxlen=KEPT_RECOVERIES)
        self._store = store
        self._persister = Persister(store, identity, self._stored)
        facts = {"run": config.run, "node_id": self.node_id}
        self._berth = Berth(store, self._persister, _retention(config), facts, self._trainer_changed)
        self._lifetime = Lifetime(
            spawned=spawned,
            linger_seconds=config.linger_seconds,
            on_end=self.request_stop,
            on_idle=self._berth.release,  # the state is on disk; a sidecar need not hold it in memory for ever
        )
        self._side: SwarmSide = build_swarm(config, identity, store, self._berth.live)
        self._socket, gid = socket_path(config.state_dir), group_id(config.socket_group)
        self._fds = FdServer(fd_socket_path(self._socket), gid, self._on_message)
        self._http = HttpServers(self, config, self._socket, gid)

    # ---------------------------------------------------------------- life

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start everything; `stack` stops it, in reverse, also when a later part fails to start."""
        stack.push_async_callback(self._leave_swarm)
        await self._side.start()
        self._persister.start()
        stack.push_async_callback(self._persister.stop)
        stack.push_async_callback(self._fds.stop)
        await self._fds.start()
        stack.push_async_callback(self._berth.close)
        stack.push_async_callback(self._http.stop)
        await self._http.start()
        stack.callback(self._lifetime.stop)
        self._store.lock.update(socket=str(self._socket), listen=self.listen, http=self._http.address)
        self._ready = not self._stop_asked.is_set()
        state_dir = self.config.state_dir
        log.info("node %s of run %r listens on %s, state in %s", self.node_id, self.config.run, self.listen, state_dir)

    @property
    def listen(self) -> str:
        """The address as bound."""
        return str(self._side.status().get("listen", self.config.listen))

    def announce_ready(self, ready_fd: int | None) -> None:
        """Tell whoever started this process: a line on a pipe, a datagram to a service manager."""
        if ready_fd is not None:
            line = {"pid": os.getpid(), "socket": str(self._socket), "listen": self.listen, "http": self._http.address}
            with contextlib.suppress(BrokenPipeError):  # whoever waited is gone; a trainer may still come
                os.write(ready_fd, json.dumps(line).encode() + b"\n")
            os.close(ready_fd)
        manager = os.environ.get("NOTIFY_SOCKET")
        if manager:  # sd_notify(3); "@" marks an abstract name
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                    sock.sendto(b"READY=1", "\0" + manager[1:] if manager.startswith("@") else manager)
            except OSError as error:  # the name of a manager that is gone, or lies in another container
                log.warning("could not tell the service manager at %s that this node is ready: %s", manager, error)

    def request_stop(self, exit_code: int = 0) -> None:
        """Begin to stop."""
        self._exit_code = exit_code
        self._ready = False
        self._stop_asked.set()

    async def wait_until_stopped(self) -> int:
        """Returns the exit code once somebody or something asked for the end."""
        await self._stop_asked.wait()
        log.info("stopping")
        return self._exit_code

    async def _leave_swarm(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._side.stop()
        except (HotswarmError, OSError, TimeoutError) as error:
            log.warning("did not leave the swarm cleanly: %s; the announcement expires by itself", error)

    def watch(self, owner_pid: int | None) -> None:
        """Begin to consider when to end."""
        if owner_pid is not None:
            self._lifetime.watch_owner(owner_pid, idle=lambda: self._berth.trainer is None)
        self._trainer_changed()

    def _trainer_changed(self) -> None:
        if self._stop_asked.is_set():
            return
        if self._berth.trainer is not None:
            self._lifetime.trainer_came()
        else:
            self._lifetime.nobody_there(self._berth.last_linger_seconds)

    # ---------------------------------------------------------------- events

    def _stored(self, info: SnapshotInfo) -> None:
        """A snapshot became durable: tell the swarm, one announcement at a time, and the newest in the end."""
        self._to_announce = info.snapshot_id
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        while self._to_announce is not None:
            self._to_announce = None
            try:
                await self._side.announce()
            except (HotswarmError, OSError, TimeoutError) as error:
                log.warning("could not announce the newest snapshot: %s; the next one tries again", error)

    async def _on_message(self, connection: Connection, message: Json, fds: list[int]) -> None:
        operation = message.get("op")
        if operation == "ready":
            self._persister.wake()
        elif operation == "attach":
            if self._stop_asked.is_set():
                raise ControlError("the daemon is stopping; attach to the next one")
            await self._berth.attach(connection, message, fds)
        elif operation == "open":
            from_arena = message.get("from_arena") is True
            await self._open(connection, str(message.get("snapshot_id", "")), from_arena=from_arena)
        else:
            raise ControlError(f"unknown operation {operation!r}; is the client of another version?")

    async def _open(self, connection: Connection, snapshot_id: str, *, from_arena: bool) -> None:
        known = self._known(snapshot_id)
        slot, arena = self._persister.held(known), self._berth.arena
        # A reader beside a living trainer could be overtaken by its writes.
        if from_arena and slot is not None and arena is not None and self._berth.only_writer(connection.pid):
            send_slot(connection, arena, slot, self._store.signed(known))
        else:
            send_files(connection, await asyncio.to_thread(self._store.open, known))

    def _known(self, snapshot_id: str) -> SnapshotId:
        if not is_snapshot_id(snapshot_id):
            raise NoSnapshot(f"{snapshot_id!r} is no snapshot id (32 hex digits); `swarm-node snapshots` lists them")
        if all(info.snapshot_id != snapshot_id for info in self._store.snapshots()):
            raise NoSnapshot(f"this node holds no snapshot {snapshot_id}; `swarm-node snapshots` lists what it has")
        return SnapshotId(snapshot_id)

    # ---------------------------------------------------------------- Api

    def ready(self) -> bool:
        """Whether the node serves."""
        return self._ready

    def status(self) -> Json:
        """The node's state, for people and programs. Seconds end in _s, Unix milliseconds in _ms."""
        swarm, clock = self._side.status(), self._berth.live()
        snapshots = self._store.snapshots()
        reasons = [*self._store.health, *swarm.get("health", [])]
        if self._persister.last_error is not None:
            reasons.insert(0, self._persister.last_error)
        return {
            "version": _version(),
            "pid": os.getpid(),
            "node": self.node_id,
            "name": self.config.name,
            "run": self.config.run,
            "state_dir": str(self.config.state_dir.absolute()),
            "socket": str(self._socket),
            "listen": self.listen,
            "advertise": self.config.advertise,
            "http": self._http.address,
            "uptime_s": time.monotonic() - self._started_at,
            "ready": self._ready,
            "trainer": self._berth.status(),
            "clock": None if clock is None else clock.to_json(),
            "snapshots": len(snapshots),
            "newest": snapshot_to_json(snapshots[-1]) if snapshots else None,
            "work_at_risk_s": self._work_at_risk(),
            "persist": self._persister.status(),
            "health": {"state": "yellow" if reasons else "green", "reasons": reasons},
            "swarm": swarm,
        }

    def _work_at_risk(self) -> float | None:
        trainer = self._berth.trainer
        if trainer is None:
            return None
        stored = self._persister.last_stored_at
        return time.time() - trainer.attached_at if stored is None else time.monotonic() - stored

    def peers(self) -> list[Json]:
        """The peers that this node knows."""
        return self._side.peers()

    def snapshots(self) -> list[Json]:
        """All snapshots, oldest first."""
        return [snapshot_to_json(info) for info in self._store.snapshots()]

    def recoveries(self) -> list[Json]:
        """The last recoveries, oldest first."""
        return list(self._recoveries)

    async def clock(self) -> Json | None:
        """Where the swarm is in its round."""
        clock = await self._side.clock()
        return None if clock is None else clock.to_json()

    async def flush(self, seq: int, timeout_s: float) -> Json:
        """Wait until a capture is durable."""
        return snapshot_to_json(await self._persister.durable(seq, timeout_s))

    async def recover(self, request: RecoverRequest, progress: Progress) -> Json:
        """Locate, choose and fetch."""
        outcome = (await self._side.recover(request, progress)).to_json()
        if not request.dry_run:
            self._recoveries.append({**outcome, "finished_ms": int(time.time() * 1000)})
        return outcome

    async def fetch(self, peer: str, request: RecoverRequest, progress: Progress) -> Json:
        """Fetch from one peer."""
        return snapshot_to_json(await self._side.fetch(peer, request, progress))

    async def verify(self, snapshot_id: str) -> Json:
        """Check every digest of a snapshot; a damaged one goes into quarantine."""
        known = self._known(snapshot_id)

        def check() -> Json:
            try:
                with self._store.open(known) as source:
                    source.verify()
                    manifest = source.manifest
            except (IntegrityError, ManifestError) as error:
                self._store.quarantine(known, str(error))
                raise
            return {"snapshot_id": known, "bytes": manifest.raw_bytes, "sections": list(manifest.sections)}

        return await asyncio.to_thread(check)

    async def pin(self, snapshot_id: str, *, pinned: bool) -> None:
        """Keep a snapshot from retention, or no longer."""
        known = self._known(snapshot_id)
        await asyncio.to_thread(self._store.pin if pinned else self._store.unpin, known)
