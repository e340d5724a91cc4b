"""Every call by which the store changes the disk, in one place, so that tests can make each of them fail.

Also the descriptors that are open: a forked child (a DataLoader worker) closes them at once, so that it holds neither
locks nor deleted packs of ours.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""For every file of a state directory: links are not followed, and a pipe that somebody put there does not hang us."""

_libc = ctypes.CDLL(None)
_open_fds: set[int] = set()


def _close_in_child() -> None:
    for fd in _open_fds:
        try:
            os.close(fd)
        except OSError:
            pass  # a child that has closed it already is where we want it
    _open_fds.clear()


os.register_at_fork(after_in_child=_close_in_child)


def track_fd(fd: int) -> int:
    """Have forked children close this descriptor. Returns it."""
    _open_fds.add(fd)
    return fd


def close_fd(fd: int) -> None:
    """Close a tracked descriptor, once: in a forked child, where it is closed already, nothing happens."""
    if fd in _open_fds:
        _open_fds.discard(fd)
        os.close(fd)


class FileOps:
    """The real thing. A subclass that raises OSError is what the tests inject."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A tracked descriptor; close it with `close_fd`. Links are not followed."""
        return track_fd(os.open(path, flags | OPEN_FLAGS, mode))

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, without copying it."""
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            if not done:
                raise OSError(errno.EIO, "nothing was written")
            view, offset = view[done:], offset + done

    def preallocate(self, fd: int, size: int) -> bool:
        """Have the file system find room for `size` bytes at once; False where it cannot, which does no harm."""
        try:
            return bool(_libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0)
        except AttributeError:  # not Linux; os.posix_fallocate would write zeros where there is no support
            return False

    def truncate(self, fd: int, size: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable."""
        os.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename without replacing. Only the holder of the state directory's lock renames, so a check is enough."""
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over the target."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file; where the file system has no links, a rename."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is removed already."""
        path.unlink(missing_ok=True)

    def sync_dir(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_private_dir(path: Path) -> None:
    """A folder that only this user can enter, and its parents likewise."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
