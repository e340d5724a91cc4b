"""When a daemon ends by itself.

started by a trainer (`spawned`)   `linger_seconds` after the last trainer left; a first one is waited for longer
with an owner process              the same, from the owner's death on
any other                          never; after that time it only gives the arena's memory back
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)


class Lifetime:
    """Winds and stops the clock. `on_end` is called once when the daemon is to end, `on_idle` when it merely idles."""

    def __init__(
        self, *, spawned: bool, linger_seconds: float, on_end: Callable[[], None], on_idle: Callable[[], None]
    ) -> None:
        self._ends = spawned
        self._awaits_first = spawned
        self._linger_seconds = linger_seconds
        self._on_end = on_end
        self._on_idle = on_idle
        self._timer: asyncio.TimerHandle | None = None
        self._owner_fd: int | None = None

    def trainer_came(self) -> None:
        """Somebody needs this daemon."""
        self._awaits_first = False
        self._stop_timer()

    def nobody_there(self, linger_seconds: float | None = None) -> None:
        """No trainer is attached: from here on time runs. `linger_seconds` is what the last one asked for."""
        self._stop_timer()
        if linger_seconds is not None:
            self._linger_seconds = linger_seconds
        if self._awaits_first and self._owner_fd is not None:
            return
        self._timer = asyncio.get_running_loop().call_later(self._linger_seconds, self._expired)

    def watch_owner(self, pid: int, *, idle: Callable[[], bool]) -> None:
        """Begin to end when this process dies; at once when it is dead. `idle` says whether no trainer is attached."""

        def gone() -> None:
            self._unwatch()
            log.info("the process %d that started this node is gone", pid)
            self._ends, self._awaits_first = True, False
            if idle():
                self.nobody_there()

        try:
            self._owner_fd = os.pidfd_open(pid)
        except OSError:
            gone()
            return
        asyncio.get_running_loop().add_reader(self._owner_fd, gone)

    def stop(self) -> None:
        """Nothing is called any more."""
        self._stop_timer()
        self._unwatch()

    def _expired(self) -> None:
        self._timer = None
        if self._ends:
            log.info("no trainer needs this daemon, so it ends")
            self._on_end()
        else:
            self._on_idle()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unwatch(self) -> None:
        if self._owner_fd is not None:
            asyncio.get_running_loop().remove_reader(self._owner_fd)
            os.close(self._owner_fd)
            self._owner_fd = None
