"""One writer per state directory: `daemon.lock`, held with flock for as long as the process lives.

The file's contents are JSON, `{"pid": …, "socket": …, "listen": …, "http": …}`: that is how trainers and the command
line find the daemon. The kernel drops the lock when the process dies, however it dies, so a stale file locks nobody
out; it is not removed, because removing a locked file invites two holders.

Within a process the lock is counted: several stores on one directory share it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotswarm.errors import LockedError, StoreError
from hotswarm.store.fileops import OPEN_FLAGS, close_fd, make_private_dir, track_fd

LOCK_NAME = "daemon.lock"
MAX_LOCK_BYTES = 65536
_HOLDER = secrets.token_hex(8)  # this process among all that have had its pid, in whatever container


@dataclass
class _Held:
    fd: int
    pid: int
    count: int = 1
    info: dict[str, Any] = field(default_factory=dict)


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


def read_lock(root: Path) -> tuple[dict[str, Any], bool]:
    """(what daemon.lock says, whether some process holds it). Empty and False when there is none."""
    path = root / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError:
        return {}, False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return {}, False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False  # nobody holds it exclusively; ours goes with the descriptor
        except BlockingIOError:
            held = True
        return _parse(os.pread(fd, MAX_LOCK_BYTES, 0)), held
    finally:
        os.close(fd)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        info = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


class StateDirLock:
    """The lock of one state directory. `acquire` and `release` are counted across all objects of this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mine = 0

    @property
    def held(self) -> bool:
        """Whether this object has acquired the lock."""
        return self._mine > 0

    def acquire(self) -> bool:
        """Take the lock; True when another process may have held it since this one did last. LockedError names the
        holder.
        """
        make_private_dir(self.root)
        key = self.root.resolve()
        with _guard:
            held = _held.get(key)
            if held is not None and held.pid == os.getpid():
                held.count += 1
                self._mine += 1
                return False
            fd = self._open(key / LOCK_NAME)
            last = _parse(os.pread(fd, MAX_LOCK_BYTES, 0))
            _held[key] = _Held(fd, os.getpid())
            mine = {"pid": os.getpid(), "holder": _HOLDER}
            try:
                self._write(key, mine)
            except StoreError:
                del _held[key]
                close_fd(fd)
                raise
            self._mine += 1
            return {name: last.get(name) for name in mine} != mine

    def _open(self, path: Path) -> int:
        try:
            fd = track_fd(os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600))
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror}; check owner and permissions") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            close_fd(fd)
            raise StoreError(f"{path} is no regular file: remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = _parse(os.pread(fd, MAX_LOCK_BYTES, 0)).get("pid", "unknown")
            close_fd(fd)
            raise LockedError(
                f"state directory {self.root} is in use by process {pid}; stop it, or use another directory"
            ) from error
        return fd

    def update(self, **info: object) -> None:
        """Add to what the file says, for those who look for the daemon. The lock must be held."""
        key = self.root.resolve()
        with _guard:
            self._write(key, {**_held[key].info, **info})

    def _write(self, key: Path, info: dict[str, Any]) -> None:
        held = _held[key]
        held.info = info
        data = json.dumps(info).encode() + b"\n"
        try:
            os.pwrite(held.fd, data, 0)  # one write: a reader never sees it empty; the old tail goes afterwards
            os.ftruncate(held.fd, len(data))
        except OSError as error:
            raise StoreError(f"{key / LOCK_NAME} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Give up what this object acquired; the last one in the process unlocks. Harmless when nothing is held."""
        key = self.root.resolve()
        with _guard:
            held = _held.get(key)
            if held is None or not self._mine:
                return
            held.count -= 1
            self._mine -= 1
            if held.count == 0:
                del _held[key]
                close_fd(held.fd)
