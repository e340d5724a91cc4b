"""SIGTERM: a last snapshot, then what would have happened without us.

A handler runs on the main thread between any two instructions, so most likely in the middle of a step. `urgent()` then
takes a snapshot if the state stands still (the main thread is the trainer's, and no optimizer is at work), marked as
not exact. What follows depends on who else is interested in the signal:

* The user has a handler: it runs, and whatever it does is done.
* Nobody has: the process is to end. The next step boundary takes an exact snapshot and ends it; when no boundary comes
  within GRACE_S, the process ends with what it has (`hand_over`). Nothing is copied then: the step is still going on.

The process then dies *of SIGTERM*, so that whoever waits for it sees what they sent.

The interrupted instruction may hold a lock that is not re-entrant. So when hotswarm's own code is on the stack, or one
of the modules in LOCKING near its top, nothing is taken in the handler, and a snapshot is due at the next boundary.

A forked child gets the former handler back at once: it has no snapshots to take, and `terminate()` must end it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for the step under way; orchestrators send SIGKILL 10 to 30 s after SIGTERM
LOCKING = ("threading", "concurrent", "queue", "logging", "multiprocessing")
NEAR = 4  # frames: who called into one of those from further up is waiting in it, not changing it


class Termination:
    """Chained into SIGTERM between `install` and `remove`. `urgent`, `later` and `hand_over` never raise.

    `later` makes a snapshot due at the next boundary.
    """

    def __init__(self, urgent: Callable[[], None], later: Callable[[], None], hand_over: Callable[[], None]) -> None:
        self._urgent = urgent
        self._later = later
        self._hand_over = hand_over
        self._before: Any = None
        self._installed = False
        self._timer: threading.Timer | None = None
        self.ending = False
        """Whether the process is to end at the next step boundary; `end()` does it."""

    def install(self) -> bool:
        """Chain in. False where that is impossible: off the main thread, or a handler that is not Python's."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return self._installed
        before = signal.getsignal(signal.SIGTERM)
        if before is None:
            return False
        self._before = before
        signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        _installed.add(self)
        return True

    def remove(self) -> None:
        """Chain out, unless somebody has put another handler on top since; that one stays, and still calls ours, which
        then only passes the signal on.
        """
        if not self._installed or self.ending:
            return
        self._installed = False
        _installed.discard(self)
        ours = signal.getsignal(signal.SIGTERM) == self._handle
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def end(self) -> None:
        """Die of SIGTERM. From any thread: Python's own signal.signal works on the main one only."""
        if self._timer is not None:
            self._timer.cancel()
        logging.shutdown()
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGTERM, None)  # SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before
        if not self._installed:
            self._pass_on(number, frame)
            return
        if before == signal.SIG_DFL and self.ending:
            self.end()  # asked twice
        if _may_hold_a_lock(frame):
            self._later()
        else:
            self._urgent()
        if before == signal.SIG_DFL:
            self.ending = True
            self._timer = threading.Timer(GRACE_S, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            self.end()

    def _give_up(self) -> None:
        log.warning("no step boundary within %g s of SIGTERM; ending with what there is", GRACE_S)
        self._hand_over()
        self.end()

    def restore_in_child(self) -> None:
        """After a fork, in the child: as if `install` had never been called."""
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)


def _may_hold_a_lock(frame: FrameType | None) -> bool:
    depth = 0
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module == "hotswarm" or (depth < NEAR and module in LOCKING):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


_installed: weakref.WeakSet[Termination] = weakref.WeakSet()


def _restore_in_child() -> None:
    for termination in list(_installed):
        termination.restore_in_child()
    _installed.clear()


os.register_at_fork(after_in_child=_restore_in_child)
