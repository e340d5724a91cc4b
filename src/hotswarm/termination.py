"""SIGTERM: a last snapshot, then what would have happened without us.

A handler runs on the main thread between any two instructions, so most likely in the middle of a step, where the state
is no state: nothing is copied there. A snapshot is made due at the next step boundary, and then:

* The user has a handler: it runs, and whatever it does is done.
* Nobody has: the process is to end. The next boundary takes the snapshot and ends it; when none comes within GRACE_S,
  the process ends with what was copied before (`hand_over`).

The process then dies *of SIGTERM*, so that whoever waits for it sees what they sent. A forked child gets the former
handler back at once: it has no snapshots to take, and `terminate()` must end it.
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


class Termination:
    """Chained into SIGTERM between `install` and `remove`. `later` makes a snapshot due at the next boundary,
    `hand_over` sees to what was copied; neither raises.
    """

    def __init__(self, later: Callable[[], None], hand_over: Callable[[], None]) -> None:
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

    def take_over(self) -> None:
        """The boundary came: the timer that would end the process without one is not needed."""
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """Die of SIGTERM. From any thread: Python's own signal.signal works on the main one only."""
        self.take_over()
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
        self._later()
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


_installed: weakref.WeakSet[Termination] = weakref.WeakSet()


def _restore_in_child() -> None:
    for termination in list(_installed):
        termination.restore_in_child()
    _installed.clear()


os.register_at_fork(after_in_child=_restore_in_child)
