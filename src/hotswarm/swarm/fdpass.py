"""The server of `<socket>.fd`: accepts, checks who it is, hands over messages with their descriptors.

What the messages mean is decided elsewhere (`berth.py`, `node.py`); their format is `channel`'s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from hotswarm.errors import ControlError, NotAuthorised
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.arena import Arena, Slot
from hotswarm.store.source import FileSource
from hotswarm.swarm import channel
from hotswarm.swarm.access import listen_unix, may_use
from hotswarm.swarm.channel import Json

log = logging.getLogger(__name__)

Handler = Callable[["Connection", Json, list[int]], Awaitable[None]]


class Connection:
    """One client. `pid` is the kernel's word, 0 when the client lives in a PID namespace that is not visible here."""

    def __init__(self, server: FdServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self.pid, self.uid, _ = channel.peer_credentials(sock)
        self.on_close: list[Callable[[], None]] = []  # called once, when the client is gone or closed here
        self.closed = False
        self.refused = False

    def hung_up(self) -> bool:
        """Whether the client has closed its end, noticed by the event loop yet or not."""
        if self.closed:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, message: Json, fds: Sequence[int] = ()) -> None:
        """Answer; the descriptors are duplicated by the kernel and stay the caller's."""
        try:
            channel.send(self._sock, message, fds)
        except OSError as error:  # the client is gone, or reads nothing: it loses its connection, nobody waits for it
            log.debug("client %d took no answer: %s", self.pid, error)
            self.close()

    def fail(self, error: BaseException) -> None:
        """Answer with an error and hang up."""
        self.send({"error": channel.error_to_json(error)})
        self.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._server.forget(self, self._sock)
        self._sock.close()
        for callback in self.on_close:
            callback()


class FdServer:
    """Accepts connections on one loop and calls `handler` for each message, one at a time per server."""

    def __init__(self, path: Path, gid: int | None, handler: Handler) -> None:
        self.path = path
        self._gid = gid
        self._handler = handler
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises LocalFailure."""
        self._listener = listen_unix(self.path, socket.SOCK_SEQPACKET, self._gid)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def stop(self) -> None:
        """Stop listening, hang up on everybody."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()

    def forget(self, connection: Connection, sock: socket.socket) -> None:
        """Called by a connection that closes."""
        asyncio.get_running_loop().remove_reader(sock.fileno())
        self._connections.discard(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # nothing there after all, or out of descriptors: the next event tries again
            log.warning("cannot accept a connection on %s: %s", self.path, error)
            return
        sock.setblocking(False)
        connection = Connection(self, sock)
        connection.refused = not may_use(sock, self._gid)
        if connection.refused:
            log.warning("refused user id %d (process %d) on %s", connection.uid, connection.pid, self.path)
        self._connections.add(connection)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read, connection, sock)

    def _read(self, connection: Connection, sock: socket.socket) -> None:
        try:
            got = channel.receive(sock)
        except BlockingIOError:
            return
        except OSError:
            got = None
        except ControlError as error:
            connection.fail(error)
            return
        if got is None:
            connection.close()
            return
        if connection.refused:  # only now: closing with a message unread would lose the answer
            channel.close_all(got[1])
            connection.fail(_refusal(connection.uid))
            return
        task = asyncio.get_running_loop().create_task(self._handle(connection, *got))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, connection: Connection, message: Json, fds: list[int]) -> None:
        try:
            await self._handler(connection, message, fds)
        except Exception as error:  # noqa: BLE001  the one place where a request's failure becomes its answer
            log.info("request %r of process %d failed: %s", message.get("op"), connection.pid, error)
            connection.fail(error)
        finally:
            channel.close_all(fds)  # a handler that keeps one duplicates it


def _refusal(uid: int) -> NotAuthorised:
    return NotAuthorised(
        f"user id {uid} may not use this daemon; run as its user, or start it with --socket-group and be a member"
    )


# ---------------------------------------------------------------- opened snapshots (see `opened`)


def send_files(connection: Connection, source: FileSource) -> None:
    """Answer an `open` message with the packs of `source`, which is closed afterwards."""
    with source:
        stored, names, packs = source.export()
        manifest = _memory(stored)
        try:
            connection.send({"ok": True, "packs": list(names)}, [manifest, *packs])
        finally:
            os.close(manifest)


def send_slot(connection: Connection, arena: Arena, slot: Slot, signed: SignedManifest) -> None:
    """Answer an `open` message with a slot of the arena."""
    manifest = _memory(signed.to_bytes())
    try:
        connection.send({"ok": True, "slot": slot.index}, [manifest, arena.fd])
    finally:
        os.close(manifest)


def _memory(data: bytes) -> int:
    fd = os.memfd_create("hotswarm-manifest", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return fd
