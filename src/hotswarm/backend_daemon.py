"""Snapshots through the daemon: the slot's state word hands them over, everything else goes over the control socket.

The daemon may die and come back; training must not notice. The arena's memory belongs to this process as well, so
captures go on into free slots meanwhile (and are skipped when there are none left), and `tend()`, called every second
or so by the keeper thread, gives the arena back to the next daemon, which persists what it finds READY in it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hotswarm.backend import Progress, Ticket
from hotswarm.errors import ControlError, HotswarmError, StoreError
from hotswarm.store.arena import Arena, Slot
from hotswarm.store.base import SnapshotInfo, SnapshotSource
from hotswarm.swarm.control import ControlClient, Session
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest

log = logging.getLogger(__name__)

RECONNECT_S = 1.0  # between two looks for a daemon
LOOK_LIMIT_S = 30.0  # and at most this after many fruitless ones

Connect = Callable[[], ControlClient | None]


class _DaemonTicket:
    def __init__(self, backend: DaemonBackend, seq: int) -> None:
        self._backend = backend
        self.seq = seq

    def result(self, timeout_s: float) -> SnapshotInfo:
        return self._backend.client.flush(self.seq, timeout_s)


class DaemonBackend:
    """A trainer's side of one daemon. `connect` finds (or starts) the daemon when the one that was there is gone.

    Attaching happens with the first arena, not before: until then this only asks. Raises ControlError where the
    daemon does not answer, and "busy" from `arena` where it serves another trainer.
    """

    def __init__(
        self,
        client: ControlClient,
        connect: Connect,
        *,
        label: str,
        retention: Mapping[str, int | None] | None = None,
        linger_seconds: float | None = None,
    ) -> None:
        self.client = client
        self._connect = connect
        self._label = label
        self._retention = retention
        self._linger_seconds = linger_seconds
        status = client.status()
        self.node_id = str(status.get("node", ""))
        self.run = str(status.get("run", ""))
        self._session: Session | None = None
        self._arena: Arena | None = None
        self._last_seq = 0
        self._guard = threading.Lock()
        self._look_at = 0.0
        self._looks = 0
        self._closed = False
        self._lost = False

    @property
    def has_session(self) -> bool:
        """Whether this trainer has attached; its daemon may be gone since."""
        return self._session is not None

    @property
    def attached(self) -> bool:
        """Whether a daemon holds this trainer's session right now."""
        return self._session is not None and self._session.alive

    def arena(self, slot_bytes: int, table_bytes: int) -> Arena:
        """See Backend. A state that grew gets a larger arena on the session that it has."""
        with self._guard:
            if self._closed:
                raise ControlError("this checkpointer has let go of its daemon")
            arena, session = self._arena, self._session
            if arena is not None and arena.slot_bytes >= slot_bytes and arena.table_bytes >= table_bytes:
                return arena
            if session is None:
                try:
                    session = self._session = self._attach(slot_bytes, table_bytes, None)
                except ControlError:
                    self._lost = True  # it may be busy, or gone: tend() looks which
                    raise
            elif not session.alive:
                raise ControlError(
                    "the state has outgrown the arena while no daemon is there to make a larger one; its snapshots wait"
                )
            else:
                session.grow(slot_bytes, table_bytes)
                self._last_seq = max(self._last_seq, session.next_seq - 1)
            self._arena = _mapped(session)
            self._arena.prefault()
            if arena is not None:
                arena.close()
            return self._arena

    def _attach(self, slot_bytes: int, table_bytes: int, arena_fd: int | None) -> Session:
        session = self.client.attach(
            slot_bytes,
            table_bytes,
            label=self._label,
            rank=int(os.environ.get("LOCAL_RANK", "0") or 0),
            retention=self._retention,
            arena_fd=arena_fd,
            linger_seconds=self._linger_seconds,
        )
        self._last_seq = max(self._last_seq, session.next_seq - 1)
        return session

    def next_seq(self) -> int:
        """See Backend."""
        with self._guard:
            self._last_seq += 1
            return self._last_seq

    def submit(self, slot: Slot, seq: int) -> Ticket:
        """See Backend. Microseconds."""
        session = self._session
        if session is not None:
            session.ready(slot.index, seq)
        return _DaemonTicket(self, seq)

    def make_room(self) -> None:
        """See Backend. The daemon is at it already."""

    def snapshots(self) -> list[SnapshotInfo]:
        """See Backend."""
        return self.client.snapshots()

    def open(self, snapshot_id: str) -> SnapshotSource:
        """See Backend."""
        return self.client.open_snapshot(snapshot_id)

    def quarantine(self, snapshot_id: str, reason: str) -> None:
        """The daemon looks for itself: it quarantines what its own verification finds damaged."""
        try:
            self.client.verify(snapshot_id)
        except HotswarmError as error:
            log.warning("snapshot %s: %s (%s)", snapshot_id, error, reason)

    def recover(self, request: RecoverRequest, progress: Progress | None = None) -> RecoverOutcome:
        """See Backend."""
        return self.client.recover(request, progress)

    def clock(self) -> LiveClock | None:
        """See Backend."""
        return self.client.clock()

    def fetch(self, peer: str, request: RecoverRequest) -> SnapshotInfo:
        """See Backend."""
        return self.client.fetch(peer, request)

    def status(self) -> dict[str, Any]:
        """See Backend."""
        return self.client.status()

    def tend(self) -> None:
        """See Backend: give the arena back to a daemon that came after the one it was made with."""
        session, now = self._session, time.monotonic()
        if now < self._look_at or self._closed or self._guard.locked():
            return
        if session.alive if session is not None else not self._lost:
            return
        self._looks += 1
        self._look_at = now + min(RECONNECT_S * 2 ** min(self._looks - 1, 5), LOOK_LIMIT_S)
        try:
            found = self._connect()
            if found is None:
                return
            with self._guard:
                arena = self._arena
                if self._closed or self._session is not session:
                    return
                self.client, self._lost = found, False
                if session is not None and arena is not None:
                    self._session = self._attach(arena.slot_bytes, arena.table_bytes, session.arena_fd)
                    session.close()
        except HotswarmError as error:
            log.warning("no daemon to protect this trainer: %s; trying again", error)
            return
        self._looks = 0
        log.info("found the daemon at %s", found.socket)

    def _release(self) -> None:
        session, self._session = self._session, None
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()
        if session is not None:
            session.close()

    def close(self) -> None:
        """See Backend. The daemon persists what is READY, and lingers."""
        with self._guard:
            self._closed = True
            self._release()


def _mapped(session: Session) -> Arena:
    fd = os.dup(session.arena_fd)  # the session keeps its own, to give it to the next daemon
    try:
        return Arena.from_fd(fd)
    except StoreError:
        os.close(fd)
        raise
