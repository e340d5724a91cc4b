"""Taking snapshots: from "one is due" to "it is durable", with the books kept."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from hotswarm.backend import NotReadyError
from hotswarm.cadence import Cadence
from hotswarm.capturing import Capturer, InsideStepError, NoSlotError, NotNowError
from hotswarm.checkpoint_types import CheckpointMetadata, CheckpointType
from hotswarm.errors import ControlError, HotswarmError, LocalFailure
from hotswarm.handle import SnapshotHandle
from hotswarm.metadata import MetadataMaker
from hotswarm.reach import Reach
from hotswarm.store.base import SnapshotInfo
from hotswarm.troubles import Troubles

log = logging.getLogger(__name__)

FORCE_WAIT_S = 600.0  # for the disk
SLOT_WAIT_S = 10.0  # an explicit snapshot waits for a free arena slot; one that is merely due does not
LOST_AFTER_S = 60.0  # a snapshot that nobody knows any more, when newer ones are durable
SETTLE_S = 0.25  # that the keeper waits for one snapshot before it looks at other things


class Taker:
    """Takes snapshots of one trainer. Public counters are those of `get_stats`; seconds and counts."""

    def __init__(self, capturer: Capturer, reach: Reach, cadence: Cadence, metadata: MetadataMaker) -> None:
        self.capturer = capturer
        self.reach = reach
        self.cadence = cadence
        self.metadata = metadata
        self.active = False
        """Between start and stop: only then does anything happen by itself."""
        self.saved = 0
        self.failures = 0
        self.skipped = 0
        self.troubles = Troubles()
        self.stall_s_last = 0.0
        self.stall_s_total = 0.0
        self.protected_since = time.monotonic()
        self.wake: Callable[[], None] = lambda: None
        self.on_durable: Callable[[CheckpointMetadata], None] = lambda _: None
        self.ending: Callable[[], bool] = lambda: False
        self.last_words: Callable[[], None] = lambda: None
        self._unsettled: deque[SnapshotHandle] = deque()
        capturer.on_boundary = self.boundary
        capturer.on_live = lambda: reach.write_live(capturer)

    # ------------------------------------------------------------ asked for

    def handle(self, kind: CheckpointType) -> SnapshotHandle:
        """For a snapshot that is about to be taken."""
        return SnapshotHandle(kind, self._settled)

    def snapshot(self, kind: CheckpointType, *, wait: bool) -> SnapshotHandle:
        """Copy now, or, inside an outer step of this thread, at the next boundary. What fails is in the handle."""
        handle = self.handle(kind)
        try:
            self.capturer.at_boundary(lambda: self.copy_into(handle, wait_s=SLOT_WAIT_S))
        except InsideStepError as error:
            if self.active:
                self._at_next_boundary(handle)
            else:
                self._give_up(handle, error)
        except HotswarmError as error:
            self._give_up(handle, error)
        if handle.is_copied and not handle.done and (wait or not self.active):
            with contextlib.suppress(HotswarmError):  # it is in the handle
                handle.result(FORCE_WAIT_S)
        if not self.active:
            self.reach.idle()
        return handle

    def _at_next_boundary(self, handle: SnapshotHandle) -> None:
        posted = self.capturer.post(lambda: self.copy_into(handle))
        posted.add_done_callback(
            lambda future: (
                handle.failed(NotNowError("stopped before the next step boundary")) if future.cancelled() else None
            )
        )

    def force(self) -> CheckpointMetadata | None:
        """A durable hot snapshot, or None with `last_error`."""
        handle = self.handle(CheckpointType.HOT)
        try:
            self.capturer.at_boundary(lambda: self.copy_into(handle, wait_s=SLOT_WAIT_S))
            return handle.result(FORCE_WAIT_S)
        except HotswarmError as error:
            if self.active and self.capturer.in_outer_step():
                self.soon()  # a callback of the engine asked: it is taken at the next boundary
            self._give_up(handle, error)
            return None
        finally:
            if not self.active:
                self.reach.idle()

    def hand_over(self) -> None:
        """The process ends now: what was copied reaches the disk, or the daemon has it. Never raises."""
        try:
            if self.reach.is_local:
                self.settle()
        except Exception:
            log.exception("what was copied last is not on disk")

    def copy_into(self, handle: SnapshotHandle, *, exact: bool = True, wait_s: float = 0.0) -> None:
        """Copy the state, which is whole, and hand it over."""
        kind = handle.kind if handle.kind is CheckpointType.COLD else CheckpointType.HOT
        try:
            ticket, stall_s = self.capturer.copy(self.reach.for_writing(), kind.value, exact=exact, wait_s=wait_s)
        except HotswarmError as error:
            handle.failed(error)
            raise
        self.stall_s_last = stall_s
        self.stall_s_total += stall_s
        self.cadence.taken(kind, time.monotonic(), stall_s)
        handle.copied(ticket, stall_s)
        self._unsettled.append(handle)
        self.wake()

    def _give_up(self, handle: SnapshotHandle, error: HotswarmError) -> None:
        if not handle.settled:
            handle.failed(error)
            self.failed(error)

    # ------------------------------------------------------------ due

    def boundary(self, exact: bool) -> None:
        """On the training thread, between two steps. Whatever goes wrong here, training goes on."""
        if not self.active:
            return
        try:
            self.reach.first_boundary(self.capturer)
            self.reach.write_live(self.capturer)
            if self.ending():
                self.last_words()
                return
            kind = self.cadence.due(time.monotonic())
            if kind is not None:
                self._take_due(kind, exact)
        except HotswarmError as error:
            self.cadence.failed(time.monotonic())
            self.failed(error)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.cadence.failed(time.monotonic())
            self.failed(as_hotswarm(error))

    def _take_due(self, kind: CheckpointType, exact: bool) -> None:
        try:
            with self.capturer.held():
                self.copy_into(self.handle(kind), exact=exact)
        except (NoSlotError, NotNowError, NotReadyError) as error:
            self.skipped += 1
            self.cadence.failed(time.monotonic())
            log.debug("a snapshot was left out: %s", error)

    def soon(self) -> None:
        """Make a snapshot due at the next boundary."""
        self.cadence.outer_step(time.monotonic())

    def outer_step_ended(self) -> None:
        """A round is over; the next boundary takes a snapshot."""
        if self.active:
            self.cadence.outer_step(time.monotonic())

    # ------------------------------------------------------------ afterwards

    def settle(self) -> None:
        """Follow what was handed over to the disk, as far as that goes now. For the keeper's thread."""
        newest_done = 0.0
        for handle in reversed(list(self._unsettled)):
            with contextlib.suppress(HotswarmError):  # noted by _settled; or not durable yet: the next round
                handle.result(SETTLE_S)
            lost = handle.copied_at < newest_done and time.monotonic() - handle.copied_at > LOST_AFTER_S
            if not handle.done and lost:
                handle.failed(ControlError("a daemon that is gone took this snapshot along; newer ones are durable"))
                self.skipped += 1
            if handle.done:
                newest_done = max(newest_done, handle.copied_at)
                with contextlib.suppress(ValueError):  # forgotten meanwhile
                    self._unsettled.remove(handle)

    def forget(self) -> None:
        """Follow nothing any more: the daemon has it, or it is on disk."""
        self._unsettled.clear()

    def _settled(self, handle: SnapshotHandle, result: SnapshotInfo | HotswarmError) -> CheckpointMetadata | None:
        """A snapshot is durable, or failed for good. Once per handle, on whichever thread learned it."""
        if isinstance(result, HotswarmError):
            self.cadence.failed(time.monotonic())
            self.failed(result)
            return None
        self.saved += 1
        self.protected_since = max(self.protected_since, handle.copied_at)
        self.cadence.durable(time.monotonic() - handle.copied_at)
        self.troubles.over("snapshot")
        metadata = self.metadata.make(result)
        self.on_durable(metadata)
        return metadata

    @property
    def last_error(self) -> str | None:
        """The newest trouble that is not over."""
        return self.troubles.newest

    def failed(self, error: HotswarmError, *, counted: bool = True, about: str = "snapshot") -> None:
        """Keep the books of a failure, and tell once."""
        self.failures += counted
        if self.troubles.note(about, str(error)):
            log.warning("%s", error)

    def outcome(self, about: str, error: HotswarmError | None = None) -> None:
        """How something other than a snapshot went; None: well."""
        if error is None:
            self.troubles.over(about)
        else:
            self.failed(error, counted=False, about=about)


def as_hotswarm(error: Exception) -> HotswarmError:
    """The error itself, or, of one that nobody expected, its name and text; its traceback goes into the log."""
    if isinstance(error, HotswarmError):
        return error
    log.error("unexpected, and kept away from training", exc_info=error)
    return LocalFailure(f"{type(error).__name__}: {error}; this is a fault of hotswarm, the log has more")
