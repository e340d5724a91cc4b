"""A trainer's place at its daemon: the arena's descriptor and the connection that holds it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

from hotswarm.errors import ControlError
from hotswarm.store.base import SnapshotInfo
from hotswarm.swarm import channel

if TYPE_CHECKING:
    from hotswarm.swarm.control import ControlClient

GROW_TIMEOUT_S = 120.0  # as for attaching: the daemon touches every page of a new arena


class Session:
    """This trainer's place at the daemon: the arena's descriptor and the connection that holds it.

    Attributes: `arena_fd` (owned by the session; map it, do not close it), `slots`, `next_seq` (one above every capture
    that the store knows), `reused` (the arena was there before and its pages are warm), `run`, `node_id`.
    In a forked child both descriptors are closed: a DataLoader worker must not keep a dead trainer's session open.
    """

    def __init__(self, client: ControlClient, sock: socket.socket, arena_fd: int, answer: dict[str, Any]) -> None:
        self.client = client
        self.arena_fd = arena_fd
        self.slots = int(answer["slots"])
        self.next_seq = int(answer["next_seq"])
        self.reused = bool(answer["reused"])
        self.run = str(answer["run"])
        self.node_id = str(answer["node_id"])
        self._sock: socket.socket | None = sock
        self._lock = threading.Lock()
        sock.setblocking(False)
        _sessions.add(self)

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds this session. False after it ended or was killed: attach again with
        `arena_fd`, which stays valid until `close`.
        """
        sock = self._sock
        if sock is None:
            return False
        try:
            poll = select.poll()
            poll.register(sock, select.POLLIN | select.POLLRDHUP)
            return not poll.poll(0)  # the daemon never writes after the answer: anything to read is the end
        except (OSError, ValueError):
            return False

    def ready(self, slot: int, seq: int) -> None:
        """Hint that a slot is READY. Never blocks, never raises: the slot's word is what counts."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                channel.send(sock, {"op": "ready", "slot": slot, "seq": seq})

    def grow(self, slot_bytes: int, table_bytes: int) -> None:
        """Change to an arena with slots of at least these sizes; `arena_fd` is the new one's then. What was READY in
        the old one is durable. Raises what the daemon raises (memory), ControlError when it does not answer; the
        session is over then.
        """
        sock = self._sock
        if sock is None:
            raise ControlError("this session is closed")
        sock.settimeout(GROW_TIMEOUT_S)
        try:
            channel.send(sock, {"op": "attach", "slot_bytes": slot_bytes, "table_bytes": table_bytes, "slots": 0})
            got = channel.receive(sock)
        except OSError as error:
            raise ControlError(f"the daemon gave no larger arena: {error or type(error).__name__}") from None
        finally:
            sock.setblocking(False)
        if got is None or "error" in got[0]:
            raise channel.error_from_json(got[0]["error"]) if got else ControlError("the daemon hung up")
        os.close(self.arena_fd)
        (self.arena_fd,) = got[1]
        self.slots, self.next_seq = int(got[0]["slots"]), int(got[0]["next_seq"])

    def flush(self, seq: int, timeout_s: float) -> SnapshotInfo:
        """Wait until the capture `seq` is durable, see `ControlClient.flush`."""
        return self.client.flush(seq, timeout_s)

    def close(self) -> None:
        """Leave. What is READY in the arena is still persisted. Idempotent; unmap the arena first."""
        with self._lock:
            _sessions.discard(self)
            self._drop()

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
            os.close(self.arena_fd)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_in_child() -> None:
    for session in list(_sessions):
        session._drop()  # noqa: SLF001  no lock: its holder may be a thread that the child does not have
    _sessions.clear()


os.register_at_fork(after_in_child=_close_in_child)
