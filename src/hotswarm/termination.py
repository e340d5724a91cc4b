"""SIGTERM: a last snapshot, then what would have happened without us.

A handler runs on the main thread between any two instructions, so most likely in the middle of a step, where the state
is not whole. What follows depends on who else is interested in the signal:

* The user has a handler: `urgent()` takes a snapshot if the state is whole (and makes one due at the next boundary if
  not), then the user's handler runs, and whatever it does is done.
* Nobody has: the process is to end. The next step boundary takes an exact snapshot and ends it; when no boundary comes
  within GRACE_S, `urgent()` does, from a timer thread, and the process ends without one.

The process then dies *of SIGTERM*, so that whoever waits for it sees what they sent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for the step under way; orchestrators send SIGKILL 10 to 30 s after SIGTERM


class Termination:
    """Chained into SIGTERM between `install` and `remove`. `urgent` must return quickly and never raise."""

    def __init__(self, urgent: Callable[[], None]) -> None:
        self._urgent = urgent
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
        return True

    def remove(self) -> None:
        """Chain out, unless somebody has put another handler on top since; that one stays, and still calls ours, which
        then only passes the signal on.
        """
        if not self._installed or self.ending:
            return
        self._installed = False
        ours = signal.getsignal(signal.SIGTERM) == self._handle
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def end(self) -> None:
        """Die of SIGTERM."""
        if self._timer is not None:
            self._timer.cancel()
        logging.shutdown()
        libc = ctypes.CDLL(None)  # Python's own signal.signal works on the main thread only
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGTERM, None)  # SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before
        if not self._installed:
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL:
                self.end()
            return
        if before == signal.SIG_DFL:
            if self.ending:
                self.end()  # asked twice
            self.ending = True
            self._timer = threading.Timer(GRACE_S, self._give_up)
            self._timer.daemon = True
            self._timer.start()
            return
        self._urgent()
        if callable(before):
            before(number, frame)

    def _give_up(self) -> None:
        log.warning("no step boundary within %g s of SIGTERM; ending with what is there", GRACE_S)
        self._urgent()
        self.end()
