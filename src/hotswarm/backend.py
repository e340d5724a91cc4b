"""Where a checkpointer's snapshots go and come from: a store in this process, or the daemon beside it.

Both take the same slots of the same arena and give the same answers, so nothing above cares which one it is.

`LocalBackend` writes on the thread that asks: the checkpointer's keeper thread, or the caller of `Ticket.result` before
there is one. `DaemonBackend` (backend_daemon.py) hands the slot over by its state word and waits only when asked to.

A capture is known by its sequence number from `submit` on; the store may renumber it, so what a snapshot is called is
in the SnapshotInfo that the ticket gives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hotswarm.errors import ControlError, HotswarmError, LockedError, NoSnapshot, StoreError
from hotswarm.snapshot.draft import parse_draft
from hotswarm.snapshot.signing import Signer
from hotswarm.store.arena import Arena, Slot, SlotState, slots_that_fit
from hotswarm.store.base import SnapshotInfo, SnapshotSource
from hotswarm.store.files import FileStore
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest, ReportData

log = logging.getLogger(__name__)


class NotReadyError(ControlError):
    """The arena for this snapshot is still being made."""


Progress = Callable[[dict[str, Any]], None]


class Ticket(Protocol):
    """A capture on its way to the disk."""

    @property
    def seq(self) -> int:
        """Its capture sequence number."""
        ...

    def result(self, timeout_s: float) -> SnapshotInfo:
        """Wait until it is durable. StoreError when it could not be written, ControlError when not in time."""
        ...


class Backend(Protocol):
    """What a checkpointer asks of its store. All methods may be called from any thread."""

    @property
    def node_id(self) -> str:
        """The swarm's node id: 40 hex digits."""
        ...

    @property
    def run(self) -> str:
        """The run's name."""
        ...

    def arena(self, slot_bytes: int, table_bytes: int, wait_s: float) -> Arena:
        """An arena with slots of at least these sizes; the same one as long as it is large enough.

        Where making one takes somebody else's time it is made in the background, and NotReadyError is raised when it is
        not there after `wait_s` seconds. StoreError, ControlError.
        """
        ...

    def mapped(self) -> Arena | None:
        """The arena that is there, if one is. Costs nothing."""
        ...

    def next_seq(self) -> int:
        """A capture sequence number above all before."""
        ...

    def submit(self, slot: Slot, seq: int) -> Ticket:
        """Hand over a READY slot."""
        ...

    def make_room(self) -> None:
        """Hurry: somebody waits for a slot. May return before there is one."""
        ...

    def snapshots(self) -> list[SnapshotInfo]:
        """What is there, oldest first."""
        ...

    def open(self, snapshot_id: str) -> SnapshotSource:
        """Its bytes. NoSnapshot."""
        ...

    def quarantine(self, snapshot_id: str, reason: str) -> None:
        """Take a damaged snapshot out of the listing."""
        ...

    def recover(self, request: RecoverRequest, progress: Progress | None = None) -> RecoverOutcome:
        """Locate, choose and fetch. RecoveryError."""
        ...

    def clock(self) -> LiveClock | None:
        """Where the swarm is now; None when nobody else trains."""
        ...

    def fetch(self, peer: str, request: RecoverRequest) -> SnapshotInfo:
        """Fetch one peer's newest snapshot. PeerUnavailable, PeerMisbehaved, RecoveryError."""
        ...

    def status(self) -> dict[str, Any]:
        """As `/api/v1/status`; a local backend has few of its fields."""
        ...

    def tend(self) -> None:
        """What has to be done now and then: reconnect to a daemon that came back. Never raises."""
        ...

    def close(self) -> None:
        """Let go; what was submitted is persisted first. Idempotent."""
        ...


class _LocalTicket:
    def __init__(self, backend: LocalBackend, seq: int) -> None:
        self._backend = backend
        self.seq = seq
        self.outcome: SnapshotInfo | HotswarmError | None = None

    def result(self, timeout_s: float) -> SnapshotInfo:
        if self.outcome is None:
            self._backend.persist_ready(timeout_s)
        if self.outcome is None:
            raise ControlError(f"capture {self.seq} is not durable after {timeout_s:g} s; the disk is slow or busy")
        if isinstance(self.outcome, HotswarmError):
            raise self.outcome
        return self.outcome


class LocalBackend:
    """A store in this process. Takes the state directory's lock at the first write and keeps it until `close`."""

    def __init__(self, store: FileStore, run: str, signer: Callable[[], Signer]) -> None:
        self._store = store
        self._signer_of = signer
        self._signer: Signer | None = None
        self._arena: Arena | None = None
        self._writable = False
        self._last_seq = 0
        self._tickets: dict[int, _LocalTicket] = {}
        self._persisting = threading.Lock()
        self._guard = threading.Lock()
        self.run = run

    @property
    def root(self) -> Path:
        """The state directory."""
        return self._store.root

    @property
    def node_id(self) -> str:
        """The id that this state directory's key gives; the key is made when there is none."""
        return self._identity().node_id

    def _identity(self) -> Signer:
        if self._signer is None:
            self._signer = self._signer_of()
        return self._signer

    @property
    def writing(self) -> bool:
        """Whether this process holds the state directory's lock through this backend."""
        return self._writable

    def open_for_writing(self) -> None:
        """Take the lock, now rather than at the first write. LockedError, StoreError."""
        with self._guard:
            if not self._writable:
                self._store.open_for_writing()
                self._writable = True
                newest = max((info.seq for info in self._store.snapshots()), default=0)
                self._last_seq = max(self._last_seq, newest)

    def unlock(self) -> None:
        """Give the state directory back; the next write takes it again. The arena stays."""
        self.persist_ready()
        with self._guard:
            if self._writable:
                self._writable = False
                self._store.close()

    def mapped(self) -> Arena | None:
        """See Backend. Nobody reads the live counters of an arena of this process's own."""
        return None

    def arena(self, slot_bytes: int, table_bytes: int, wait_s: float) -> Arena:
        """See Backend. A state that grew gets a new arena, once the old one's slots are on disk."""
        self.open_for_writing()
        arena = self._arena
        if arena is not None and arena.slot_bytes >= slot_bytes and arena.table_bytes >= table_bytes:
            return arena
        if arena is not None:
            self.persist_ready()
            arena.close()
        self._arena = Arena.create(slot_bytes, table_bytes, slots_that_fit(slot_bytes))
        return self._arena

    def next_seq(self) -> int:
        """See Backend."""
        self.open_for_writing()
        with self._guard:
            self._last_seq += 1
            return self._last_seq

    def submit(self, slot: Slot, seq: int) -> Ticket:
        """See Backend. Writes nothing yet."""
        ticket = _LocalTicket(self, seq)
        with self._guard:
            self._tickets[seq] = ticket
        return ticket

    def make_room(self) -> None:
        """See Backend."""
        self.persist_ready()

    def persist_ready(self, timeout_s: float = -1) -> None:
        """Write what is READY, oldest first, on this thread. Gives up after `timeout_s` when another one is at it."""
        if not self._persisting.acquire(timeout=timeout_s):
            return
        try:
            while self._arena is not None and (slot := next(self._arena.ready(), None)) is not None:
                self._persist(slot)
        finally:
            self._persisting.release()

    def _persist(self, slot: Slot) -> None:
        seq = slot.seq
        outcome: SnapshotInfo | HotswarmError
        try:
            slot.take()
            draft = parse_draft(slot.table())
            outcome = self._store.write(draft, slot.streams(), self._identity(), kind=draft.kind)
        except HotswarmError as error:
            outcome = error
        except BaseException as error:
            outcome = StoreError(f"capture {seq} could not be written: {type(error).__name__}: {error}")
            raise
        finally:
            if slot.state is SlotState.READING:
                slot.hold()  # written, or given up: either way the trainer may use the slot again
            with self._guard:
                ticket = self._tickets.pop(seq, None)
            if ticket is not None:
                ticket.outcome = outcome

    def snapshots(self) -> list[SnapshotInfo]:
        """See Backend."""
        return self._store.snapshots()

    def open(self, snapshot_id: str) -> SnapshotSource:
        """See Backend."""
        return self._store.open(snapshot_id)

    def quarantine(self, snapshot_id: str, reason: str) -> None:
        """See Backend. Where another process writes, it is that one's to do."""
        try:
            self.open_for_writing()
        except LockedError as error:
            log.warning("the damaged snapshot %s stays where it is: %s", snapshot_id, error)
            return
        self._store.quarantine(snapshot_id, reason)

    def recover(self, request: RecoverRequest, progress: Progress | None = None) -> RecoverOutcome:
        """The newest own snapshot; there are no neighbours without a daemon."""
        report = ReportData(mode=request.mode)
        if request.mode in {"outer", "clone"} or request.peer is not None:
            raise NoSnapshot(
                f"mode {request.mode} takes a neighbour's state, and this checkpointer has no daemon to reach one; "
                "call start() with serve_to_peers or announce_to_dht, or give node="
            )
        usable = [info for info in self.snapshots() if info.restorable and request.arch in (None, b"", info.arch)]
        if not usable:
            if request.mode == "resume":
                raise NoSnapshot(f"no snapshot of this model lies in {self._store.root}")
            return RecoverOutcome("fresh", report=_reason(report, "no snapshot of this model lies here"))
        newest = max(usable, key=lambda info: info.order_key)
        if newest.own:
            return RecoverOutcome(
                "own",
                newest.snapshot_id,
                private_from=newest.snapshot_id,
                report=_reason(report, "the own snapshot is the newest", newest),
            )
        action = "outer" if "outer" in newest.complete_sections else "clone"
        source = "fresh" if request.inner == "fresh" else "adopt"
        own = max((info for info in usable if info.own), key=lambda info: info.order_key, default=None)
        return RecoverOutcome(
            action,  # type: ignore[arg-type]
            newest.snapshot_id,
            inner_source=source,  # type: ignore[arg-type]
            private_from=own.snapshot_id if own else None,
            report=_reason(report, "a state fetched before is the newest", newest),
        )

    def clock(self) -> LiveClock | None:
        """See Backend."""
        return None

    def fetch(self, peer: str, request: RecoverRequest) -> SnapshotInfo:
        """There is nobody to fetch from without a daemon. NoSnapshot."""
        raise NoSnapshot(
            f"nothing can be fetched from {peer} without a daemon; "
            "call start() with serve_to_peers or announce_to_dht, or give node="
        )

    def status(self) -> dict[str, Any]:
        """See Backend."""
        return {"node_id": self.node_id, "run": self.run, "health": list(self._store.health)}

    def tend(self) -> None:
        """See Backend."""

    def close(self) -> None:
        """See Backend."""
        self.unlock()
        with self._guard:
            arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


def _reason(report: ReportData, reason: str, info: SnapshotInfo | None = None) -> ReportData:
    return ReportData(
        mode=report.mode,
        reason=reason,
        snapshot_id=info.snapshot_id if info else None,
        outer_step=info.outer_step if info else 0,
        inner_step=info.inner_step if info else 0,
        training_step=info.training_step if info else 0,
    )
