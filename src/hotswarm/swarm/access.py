"""Who may use the daemon's Unix sockets: its own user, root, and the members of one group when one is configured.

The sockets' mode (0660) already says so to the kernel; the check of the peer's credentials holds even where the mode
of a socket file is not enforced, and where somebody has widened it.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
import struct
from pathlib import Path

from hotswarm.errors import ConfigError, LocalFailure
from hotswarm.swarm.channel import peer_credentials

SO_PEERGROUPS = 59  # linux/asm-generic/socket.h; Python's socket module does not name it
MAX_GROUPS = 256  # getsockopt of Python takes 1,024 bytes at most; a user with more groups counts by the primary one


def group_id(name: str | None) -> int | None:
    """The numeric id of a group by name or number. Raises ConfigError."""
    if name is None:
        return None
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: this machine has no group {name!r}", "socket_group") from None


def listen_unix(path: Path, kind: socket.SocketKind, gid: int | None) -> socket.socket:
    """A listening, non-blocking Unix socket of mode 0660. A leftover file is replaced: the caller holds the state
    directory's lock, and the path belongs to that directory alone.

    Raises LocalFailure.
    """
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        path.unlink(missing_ok=True)
        old = os.umask(0o177)  # no moment with a wider mode
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(old)
        if gid is not None:
            os.chown(path, -1, gid)
            _let_through(path.parent, gid)
        path.chmod(0o660)
        sock.listen(64)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise LocalFailure(f"cannot listen on {path}: {error}; is its folder writable for this user?") from None
    return sock


def _let_through(folder: Path, gid: int) -> None:
    """The group may pass our own private folder to reach the socket in it, and see nothing else there."""
    found = folder.stat()
    if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
        os.chown(folder, -1, gid)
        folder.chmod(0o710)


def may_use(sock: socket.socket, gid: int | None) -> bool:
    """Whether the process at the other end of a Unix socket may speak to this daemon."""
    _, uid, primary = peer_credentials(sock)
    if uid in {os.getuid(), 0}:
        return True
    return gid is not None and (gid == primary or gid in _peer_groups(sock))


def _peer_groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * 4)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)
