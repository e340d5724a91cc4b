"""Shared memory without a name: a sealed memfd, mapped so that no forked child inherits it.

CPython's `mmap` duplicates the descriptor and unmaps in every process that holds the object, a forked child included,
where the address may belong to something else by then. This mapping therefore owns neither habit: it is made with
the C library's `mmap`, marked MADV_DONTFORK, and unmapped only by the process that made it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import weakref

from hotswarm.errors import StoreError

_MADV_DONTFORK = getattr(mmap, "MADV_DONTFORK", None)
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; absent from Python's mmap module
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_PREFAULT_STEP = 64 << 20  # bytes touched per call, so that a prefault can be given up half way

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_libc.memmove.restype = None
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_MAP_FAILED = ctypes.c_void_p(-1).value


def memmove(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, without the GIL (a slice assignment between memoryviews keeps it)."""
    _libc.memmove(target, source, nbytes)


def address_of(view: memoryview) -> int:
    """Where a writable, contiguous, not empty view begins."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def available_bytes() -> int | None:
    """Bytes of memory that can still be had here: the least of what the machine and its control groups leave."""
    limits = [_meminfo_available(), *_cgroup_rooms()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _cgroup_rooms() -> list[int | None]:
    """Limit minus use (page cache that can be dropped does not count) of our control group and each above it."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            lines = file.read().split()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return [_room("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")]
    rooms, parts = [], [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
        rooms.append(_room(folder, "memory.max", "memory.current", ""))
    return rooms


def _room(folder: str, limit_name: str, used_name: str, prefix: str) -> int | None:
    try:
        with open(f"{folder}/{limit_name}", encoding="ascii") as file:
            limit = file.read().strip()
        with open(f"{folder}/{used_name}", encoding="ascii") as file:
            used = int(file.read())
        if limit == "max":
            return None
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            stat = dict(line.split() for line in file)
    except (OSError, ValueError):
        return None
    cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
    return max(0, int(limit) - used + cache)


def make_memory(name: str, size: int) -> int:
    """A descriptor of `size` bytes of memory that is all there: a later touch can neither fail nor raise SIGBUS.

    Raises StoreError when the machine or its control group has not that much left.
    """
    room = available_bytes()
    if room is not None and size > room:
        raise StoreError(
            f"the snapshot arena needs {size >> 20} MiB of memory and {room >> 20} MiB are available on this machine; "
            "use one slot, a smaller model per node, or raise the memory limit"
        )
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:  # a file that nobody can open by name any more
        fd, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        if sys.platform == "linux":
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise StoreError(
            f"no memory for a snapshot arena of {size >> 20} MiB on this machine: {error.strerror}"
        ) from error
    return fd


def check_memory(fd: int) -> int:
    """Size in bytes of a received descriptor; StoreError when its owner could shrink it under our feet."""
    size = os.fstat(fd).st_size
    if sys.platform == "linux":
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise StoreError("the descriptor given as an arena is not a memfd") from error
            raise
        if seals & _SEALS != _SEALS:
            raise StoreError("the descriptor given as an arena is not sealed against changes of its size")
    return size


class Mapping:
    """`size` bytes of `fd`, shared, read and write. `view` is None in a forked child and after close().

    The memory stays mapped as long as anything holds a slice of `view`; the descriptor is ours.
    """

    def __init__(self, fd: int, size: int) -> None:
        os.set_inheritable(fd, False)
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise StoreError(f"cannot map {size >> 20} MiB of shared memory on this machine: {os.strerror(code)}")
        self.fd = fd
        self.size = size
        self._address = int(address)
        buffer = (ctypes.c_ubyte * size).from_address(self._address)
        weakref.finalize(buffer, _unmap, self._address, size, os.getpid()).atexit = False
        self.view: memoryview | None = memoryview(buffer).cast("B")
        if _MADV_HUGEPAGE is not None:  # refused where the kernel has no huge pages for shared memory: no loss
            _libc.madvise(self._address, size, _MADV_HUGEPAGE)
        if _MADV_DONTFORK is not None:
            _libc.madvise(self._address, size, _MADV_DONTFORK)
            _open.add(self)

    def prefault(self, offset: int, length: int) -> None:
        """Enter pages into this process's page table: the first copy then pays no page faults. Slow: use a thread."""
        end = min(self.size, offset + length)
        for start in range(offset - offset % mmap.PAGESIZE, end, _PREFAULT_STEP):
            view = self.view
            if view is None:
                return
            size = min(_PREFAULT_STEP, end - start)
            if _libc.madvise(self._address + start, size, _MADV_POPULATE_WRITE) != 0:
                for page in range(start, start + size, mmap.PAGESIZE):  # older kernels: a read maps the page as well
                    view[page]

    def close(self) -> None:
        """Give up the descriptor and our view. Slices that others hold stay valid."""
        _open.discard(self)
        self.view = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _unmap(address: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # in a forked child this address was never ours
        _libc.munmap(address, size)


_open: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _forget_in_child() -> None:
    for mapping in list(_open):
        mapping.close()


os.register_at_fork(after_in_child=_forget_in_child)
