"""Disk calls that fail, or kill the process, where a test says."""

from __future__ import annotations

import errno
import os
import signal

from hotswarm.store.fileops import FileOps

CHANGING = ("open", "write", "truncate", "sync", "rename", "replace", "link", "unlink", "sync_dir")


class CountedOps(FileOps):
    """The real calls, each counted and passed to `before(number, name, path or descriptor)`, which may raise."""

    def __init__(self, before=lambda number, name, target: None):
        self.calls = []
        self.before = before

    def _called(self, name, target):
        self.calls.append(name)
        self.before(len(self.calls) - 1, name, target)


def _wrap(name):
    real = getattr(FileOps, name)

    def call(self, target, *rest):
        self._called(name, target)
        return real(self, target, *rest)

    return call


for _name in CHANGING:
    setattr(CountedOps, _name, _wrap(_name))


def failing_at(number, code=errno.ENOSPC, *, until=None):
    """Fails call `number` (and, with `until`, all before that one) with an OSError."""

    def before(at, name, target):
        if number <= at < (number + 1 if until is None else until):
            raise OSError(code, os.strerror(code))

    return CountedOps(before)


def killed_at(number):
    """SIGKILLs this very process at call `number`."""

    def before(at, name, target):
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountedOps(before)


class HalfWrites(FileOps):
    """The first `room` bytes can be written, then the disk is full, in the middle of a write."""

    def __init__(self, room):
        self.room = room

    def write(self, fd, data, offset):
        view = memoryview(data).cast("B")
        FileOps.write(self, fd, view[: self.room], offset)
        if len(view) > self.room:
            self.room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(view)
