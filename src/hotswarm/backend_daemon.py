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

from hotswarm.backend import NotReadyError, Progress, Ticket
from hotswarm.errors import ControlError, HotswarmError, StoreError
from hotswarm.store.arena import Arena, Slot
from hotswarm.store.base import SnapshotInfo, SnapshotSource
from hotswarm.swarm.control import ControlClient, Session
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest

log = logging.getLogger(__name__)

RECONNECT_S = 1.0  # between two looks for a daemon
GRACE_S = 0.5  # for an answer of the daemon's own, beyond the time that it was given
LOOK_LIMIT_S = 30.0  # and at most this after many fruitless ones

Connect = Callable[[], ControlClient | None]


class _DaemonTicket:
    def __init__(self, backend: DaemonBackend, seq: int) -> None:
        self._backend = backend
        self.seq = seq

    def result(self, timeout_s: float) -> SnapshotInfo:
        return self._backend.client.flush(self.seq, timeout_s, grace_s=GRACE_S)


class DaemonBackend:
    """A trainer's side of one daemon. `connect` finds (or starts) the daemon when the one that was there is gone.

    Attaching happens with the first arena, not before: until then this only asks. Raises ControlError where the
    daemon does not answer, and "busy" where it serves another trainer.
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
        self.background: Callable[[], None] | None = None
        """Wakes the thread that calls `tend()`; None while there is none, and then the caller does its work itself."""
        self._session: Session | None = None
        self._arena: Arena | None = None
        self._wanted: tuple[int, int] | None = None
        self._trouble: HotswarmError | None = None
        self._made = threading.Condition()  # guards the four above; held for moments
        self._slow = threading.Lock()  # held by whoever talks to the daemon about the session; comes before `_made`
        self._last_seq = 0
        self._look_at = 0.0
        self._looks = 0
        self._closed = False
        self._lost = False

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    @property
    def has_session(self) -> bool:
        """Whether this trainer has attached; its daemon may be gone since."""
        return self._session is not None

    @property
    def attached(self) -> bool:
        """Whether a daemon holds this trainer's session right now."""
        return self._session is not None and self._session.alive

    # ------------------------------------------------------------ the arena

    def mapped(self) -> Arena | None:
        """See Backend."""
        return self._arena

    def arena(self, slot_bytes: int, table_bytes: int, wait_s: float) -> Arena:
        """See Backend. The daemon makes it; that can take seconds, or for ever where the daemon is frozen, so the
        background thread waits for it and training does not.
        """
        with self._made:
            if self._closed:
                raise ControlError("this checkpointer has let go of its daemon")
            if self._fits(slot_bytes, table_bytes):
                assert self._arena is not None
                return self._arena
            self._wanted = (slot_bytes, table_bytes)
            self._trouble = None
        if self.background is None:
            self._provide()
        else:
            self.background()
        with self._made:
            self._made.wait_for(lambda: self._wanted is None or self._trouble is not None or self._closed, wait_s)
            self._raise_trouble()
            if self._arena is None or not self._fits(slot_bytes, table_bytes):
                raise NotReadyError("the daemon is still making room for this snapshot; it is left out")
            return self._arena

    def _raise_trouble(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            self._wanted = None
            raise trouble

    def _fits(self, slot_bytes: int, table_bytes: int) -> bool:
        arena = self._arena
        return arena is not None and arena.slot_bytes >= slot_bytes and arena.table_bytes >= table_bytes

    def _provide(self) -> None:
        """Attach, or grow, as `_wanted` says. What goes wrong is `_trouble`."""
        with self._slow:
            wanted = self._wanted
            if wanted is None or self._closed:
                return
            try:
                session = self._session
                if session is None:
                    session = self._attach(*wanted, None)
                elif session.alive:
                    session.grow(*wanted)
                else:
                    return  # tend() finds a daemon first
                arena = _mapped(session)
            except HotswarmError as error:
                self._lost = self._session is None
                with self._made:
                    self._trouble = error
                    self._made.notify_all()
                return
            arena.prefault()
            with self._made:
                if self.closed:  # meanwhile, by somebody who did not wait
                    arena.close()
                    session.close()
                    return
                old, self._arena = self._arena, arena
                self._session, self._wanted = session, None
                self._last_seq = max(self._last_seq, session.next_seq - 1)
                self._made.notify_all()
            if old is not None:
                old.close()

    def _attach(self, slot_bytes: int, table_bytes: int, arena_fd: int | None) -> Session:
        return self.client.attach(
            slot_bytes,
            table_bytes,
            label=self._label,
            rank=int(os.environ.get("LOCAL_RANK", "0") or 0),
            retention=self._retention,
            arena_fd=arena_fd,
            linger_seconds=self._linger_seconds,
        )

    def next_seq(self) -> int:
        """See Backend."""
        with self._made:
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
        """See Backend. Before the first capture the daemon's memory serves too: nothing here writes into it yet."""
        return self.client.open_snapshot(snapshot_id, from_arena=self._arena is None)

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
        """See Backend: make the arena that is wanted, and find the daemon that came after the one that is gone. Raises
        what the daemon refuses.
        """
        if self._closed:
            return
        session, now = self._session, time.monotonic()
        lost = not session.alive if session is not None else self._lost
        if lost and now >= self._look_at:
            self._looks += 1
            self._look_at = now + min(RECONNECT_S * 2 ** min(self._looks - 1, 5), LOOK_LIMIT_S)
            self._reconnect(session)
        if self._wanted is not None and self._trouble is None:
            self._provide()
            self._tell_trouble()

    def _tell_trouble(self) -> None:
        trouble = self._trouble
        if trouble is not None:
            raise trouble

    def _reconnect(self, session: Session | None) -> None:
        found = self._connect()
        if found is None:
            return
        with self._slow:
            if self._closed or self._session is not session:
                return
            self.client, self._lost = found, False
            arena = self._arena
            if session is not None and arena is not None:
                again = self._attach(arena.slot_bytes, arena.table_bytes, session.arena_fd)
                with self._made:
                    self._session = again
                    self._last_seq = max(self._last_seq, again.next_seq - 1)
                session.close()
        self._looks = 0
        log.info("found the daemon at %s", found.socket)

    def close(self) -> None:
        """See Backend. The daemon persists what is READY, and lingers. Does not wait for a daemon that hangs."""
        with self._made:
            self._closed = True
            session, self._session = self._session, None
            arena, self._arena = self._arena, None
            self._made.notify_all()
        if arena is not None:
            arena.close()
        if session is not None:
            session.close()


def _mapped(session: Session) -> Arena:
    fd = os.dup(session.arena_fd)  # the session keeps its own, to give it to the next daemon
    try:
        return Arena.from_fd(fd)
    except StoreError:
        os.close(fd)
        raise
