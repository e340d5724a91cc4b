"""A snapshot that has been copied and is on its way to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hotswarm.backend import Ticket
from hotswarm.checkpoint_types import CheckpointMetadata, CheckpointType
from hotswarm.errors import ControlError, HotswarmError
from hotswarm.store.base import SnapshotInfo

DEFAULT_TIMEOUT_S = 600.0  # the slowest disk that still makes sense for the largest state that fits into memory

Settled = Callable[["SnapshotHandle", SnapshotInfo | HotswarmError], CheckpointMetadata | None]


class SnapshotHandle:
    """What `SpeculativeCheckpointer.snapshot` returns. Thread-safe.

    `stall_s`: seconds that the training thread was blocked for the copy; 0 until the copy is made.
    """

    def __init__(self, kind: CheckpointType, settled: Settled) -> None:
        self.kind = kind
        self.stall_s = 0.0
        self.copied_at = 0.0  # time.monotonic()
        self._settled = settled
        self._ticket: Ticket | None = None
        self._copied = threading.Event()
        self._lock = threading.Lock()
        self._metadata: CheckpointMetadata | None = None
        self._error: HotswarmError | None = None
        self.settled = False
        """Whether the disk has answered, good or bad; then its owner has been told."""

    def copied(self, ticket: Ticket, stall_s: float) -> None:
        """The state is in the arena; called by whoever made the copy."""
        self._ticket, self.stall_s, self.copied_at = ticket, stall_s, time.monotonic()
        self._copied.set()

    def failed(self, error: HotswarmError) -> None:
        """There will be no snapshot."""
        with self._lock:
            if self._metadata is None and self._error is None:
                self._error = error
        self._copied.set()

    @property
    def done(self) -> bool:
        """Whether it is durable, or has failed for good."""
        return self._metadata is not None or self._error is not None

    @property
    def is_copied(self) -> bool:
        """Whether the copy is made (or will never be)."""
        return self._copied.is_set()

    def result(self, timeout: float | None = None) -> CheckpointMetadata:
        """Wait until the snapshot is durable.

        Raises what kept it from there: CaptureError, StoreError; ControlError when it is not durable after `timeout`
        seconds (600 when None), and then waiting again makes sense.
        """
        deadline = time.monotonic() + (DEFAULT_TIMEOUT_S if timeout is None else timeout)
        if not self._copied.wait(max(0.0, deadline - time.monotonic())):
            raise ControlError("the training thread did not come to a step boundary in time; nothing was copied yet")
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):  # another thread is waiting for it
            raise ControlError("the snapshot is not durable yet")
        try:
            if self._error is not None:
                raise self._error
            if self._metadata is None:
                assert self._ticket is not None
                try:
                    info = self._ticket.result(max(0.0, deadline - time.monotonic()))
                except ControlError:
                    raise
                except HotswarmError as error:
                    self._error, self.settled = error, True
                    self._settled(self, error)
                    raise
                self.settled = True
                self._metadata = self._settled(self, info)
            assert self._metadata is not None
            return self._metadata
        finally:
            self._lock.release()
