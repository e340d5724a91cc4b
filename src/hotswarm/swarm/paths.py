"""Where a daemon's sockets lie, and how others find them from its state directory.

The control socket cannot lie in the state directory (AF_UNIX paths end at 108 bytes, and the folder may be on a network
disk). It lies in a runtime directory under a short hash of the state directory's real path; `daemon.lock` in the state
directory says where.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hotswarm.errors import LocalFailure
from hotswarm.store.lock import LOCK_NAME, MAX_LOCK_BYTES

SOCKET_PATH_MAX = 107 - len(".fd")  # sockaddr_un.sun_path is 108 bytes with its zero


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """What `daemon.lock` says. It outlives a daemon that was killed: only the lock on it, or an answer, proves life."""

    pid: int
    socket: Path
    listen: str
    http: str | None


def runtime_dir() -> Path:
    """The folder for sockets: `$RUNTIME_DIRECTORY`, else `$XDG_RUNTIME_DIR/hotswarm`, else `hotswarm-<uid>` in the
    temporary folder. Made with mode 0700 (not the first, which the service manager made).

    Raises LocalFailure when somebody else owns the folder: sockets in it could be theirs.
    """
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]  # systemd may list several
    if given:
        return Path(given)
    session = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(session, "hotswarm") if session else Path(tempfile.gettempdir(), f"hotswarm-{os.getuid()}")
    if len(os.fsencode(folder)) + 1 + len(_socket_name("")) > SOCKET_PATH_MAX:
        folder = Path("/tmp", f"hotswarm-{os.getuid()}")  # noqa: S108  owner and mode are checked below
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise LocalFailure(f"cannot make the folder for sockets {folder}: {error}; set XDG_RUNTIME_DIR") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise LocalFailure(
            f"{folder} is not a folder that only this user can write, so sockets in it cannot be trusted; "
            "remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def _socket_name(real_path: str) -> str:
    return hashlib.blake2b(real_path.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest() + ".sock"


def socket_path(state_dir: Path) -> Path:
    """Where the daemon of `state_dir` listens; the descriptor socket is this with `.fd` at the end."""
    return runtime_dir() / _socket_name(os.path.realpath(state_dir))


def fd_socket_path(control_socket: Path) -> Path:
    """The socket beside the control socket over which descriptors pass."""
    return control_socket.with_name(control_socket.name + ".fd")


def read_daemon_info(state_dir: Path) -> DaemonInfo | None:
    """What the last daemon on this state directory wrote into its lock file; None when there is nothing readable."""
    try:
        with open(state_dir / LOCK_NAME, "rb") as file:
            data = json.loads(file.read(MAX_LOCK_BYTES))
        return DaemonInfo(int(data["pid"]), Path(data["socket"]), str(data["listen"]), data.get("http"))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no daemon has run here, or one is just starting


def answers(path: Path) -> bool:
    """Whether some process listens on this Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def find_socket(state_dir: Path) -> Path | None:
    """The control socket of the daemon that runs on this state directory, or None when none answers."""
    info = read_daemon_info(state_dir)
    return info.socket if info is not None and answers(info.socket) else None
