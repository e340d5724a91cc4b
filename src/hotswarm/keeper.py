"""The one background thread of a checkpointer: it looks after what must not cost the training thread anything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

ROUND_S = 0.5  # between two rounds when nobody wakes it


class Keeper:
    """Calls `work()` now and then, and at once after `wake()`. `work` must not raise; what it raises is logged."""

    def __init__(self, work: Callable[[], None], name: str = "hotswarm-keeper") -> None:
        self._work = work
        self._name = name
        self._wake = threading.Event()
        self._guard = threading.Lock()
        self._ended = True
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; one that has been told to end and has not yet is kept. Nothing happens when it runs."""
        with self._guard:
            self._ended = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Make the next round come now."""
        self._wake.set()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the round it is in; whether it is gone."""
        with self._guard:
            self._ended = True
            thread = self._thread
        self._wake.set()
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait(ROUND_S)
            self._wake.clear()
            with self._guard:
                if self._ended:
                    self._thread = None
                    return
            try:
                self._work()
            except Exception:
                log.exception("a background round of the checkpointer failed; the next one follows")
