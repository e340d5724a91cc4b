"""From the arena to the disk: the daemon's half of the slot protocol.

The slot word is the truth. `wake()` is only a hint that makes the next look come sooner; without any hint each slot is
looked at every `POLL_S`. One thread of low priority hashes and writes, one snapshot at a time, oldest first:

    READY ──take──▶ READING ──store.write──▶ HELD

- The store cannot write (disk full): HELD all the same, so that the trainer can overwrite it with something newer, and
  the failure is kept for whoever waits for that capture. Nothing is retried while the trainer lives, because the next
  snapshot is the retry. Once the trainer is dead there is no next one: `settle(retry=True)` tries what failed again.
- The slot's table is not a manifest: FREE, and the failure is kept. Only a fault in the trainer's process does that.
- A daemon before this one died in READING: the bytes are whole and the slot is offered again. When that daemon had
  committed the snapshot and died before HELD, the store knows the capture already and nothing is written twice. Only
  such a slot is looked up, by its capture number: two captures may well agree in time and steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hotswarm.errors import ControlError, HotswarmError, LocalFailure, ManifestError
from hotswarm.snapshot.draft import DraftManifest, parse_draft
from hotswarm.snapshot.signing import Signer
from hotswarm.store.arena import Arena, Slot, SlotState
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.swarm.channel import Json

log = logging.getLogger(__name__)

POLL_S = 0.2  # what a lost hint costs; five looks at a few words of memory a second are not measurable
NICE = 10  # training goes first
KEPT_RESULTS = 64


class Persister:
    """Watches the slots of one arena. All methods belong to the event loop's thread."""

    def __init__(self, store: FileStore, signer: Signer, on_stored: Callable[[SnapshotInfo], None]) -> None:
        self._store = store
        self._signer = signer
        self._on_stored = on_stored
        self._arena: Arena | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._results: OrderedDict[int, SnapshotInfo | HotswarmError] = OrderedDict()
        self._unsaved: dict[int, int] = {}  # slot index → seq that could not be written
        self._held: dict[int, tuple[int, SnapshotInfo]] = {}  # slot index → (seq, what lies there)
        self._interrupted: dict[int, int] = {}  # slot index → seq that a daemon before this one was reading
        self._executor = ThreadPoolExecutor(1, "hotswarm-persist", _lower_priority)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.stored = 0
        self.failures = 0
        self.last_error: str | None = None
        self.last_seconds: float | None = None
        self.last_stored_at: float | None = None  # time.monotonic()

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Persist what is READY, then end."""
        self._stopping = True
        self.wake()
        if self._task is not None:
            await self._task  # never cancelled: the thread inside store.write cannot be
        await self.settle()
        self._executor.shutdown(wait=True)

    def set_arena(self, arena: Arena | None) -> None:
        """Watch this arena from now on. What an earlier daemon was reading is offered again."""
        if arena is self._arena:
            return
        self._arena = arena
        self._unsaved.clear()
        self._held.clear()
        self._interrupted.clear()
        if arena is not None:
            self._interrupted = {slot.index: slot.seq for slot in arena.slots if slot.state is SlotState.READING}
            arena.requeue_unread()
            self.wake()

    def forget_failures(self) -> None:
        """A new trainer numbers its captures anew: what failed under the same numbers is no answer to it."""
        for seq in [seq for seq, result in self._results.items() if isinstance(result, HotswarmError)]:
            del self._results[seq]

    def wake(self) -> None:
        """A hint that some slot may be READY."""
        self._wake.set()

    # ---------------------------------------------------------------- answers

    def held(self, snapshot_id: str) -> Slot | None:
        """The slot that still holds this snapshot."""
        if self._arena is None:
            return None
        for index, (seq, info) in self._held.items():
            slot = self._arena.slots[index]
            same = info.snapshot_id == snapshot_id and info.seq == seq == slot.seq
            if same and slot.state is SlotState.HELD:
                return slot
        return None

    async def durable(self, seq: int, timeout_s: float) -> SnapshotInfo:
        """Wait until the capture `seq` is on disk.

        Raises the StoreError that kept it from there, or ControlError after `timeout_s` seconds.
        """
        self.wake()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (result := self._result(seq)) is None:
            try:
                async with asyncio.timeout_at(deadline), self._progress:
                    await self._progress.wait()
            except TimeoutError:
                why = "the disk is slow or busy" if self._arena is not None else "no trainer has given it here yet"
                raise ControlError(
                    f"capture {seq} is not durable after {timeout_s:g} s: {why}; the daemon goes on trying"
                ) from None
        if isinstance(result, HotswarmError):
            raise result
        return result

    def _result(self, seq: int) -> SnapshotInfo | HotswarmError | None:
        if seq in self._results:
            return self._results[seq]
        for info in reversed(self._store.snapshots()):  # a capture that an earlier daemon wrote
            if info.own and info.seq == seq:
                return info
        return None

    def status(self) -> Json:
        """Counters for `/api/v1/status`; seconds and counts."""
        arena = self._arena
        return {
            "stored": self.stored,
            "failures": self.failures,
            "last_error": self.last_error,
            "last_seconds": self.last_seconds,
            "slots": [] if arena is None else [slot.state.name for slot in arena.slots],
        }

    # ---------------------------------------------------------------- work

    async def settle(self, *, retry: bool = False) -> None:
        """Persist everything that is READY. `retry`: also what failed before; only when no process can be writing."""
        await self._persist_ready()
        arena = self._arena
        if arena is None or not retry:
            return
        for index, seq in list(self._unsaved.items()):
            slot = arena.slots[index]
            if slot.state is SlotState.HELD and slot.seq == seq:
                async with self._writing:
                    await self._write(slot)

    async def _watch(self) -> None:
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._arena is not None else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._persist_ready()
            except Exception as error:  # a watch that ended would leave every later capture unprotected
                self.last_error = f"watching the arena failed: {type(error).__name__}: {error}"
                log.exception("watching the arena failed; going on")
                await asyncio.sleep(POLL_S)

    async def _persist_ready(self) -> None:
        arena = self._arena
        while arena is not None:
            async with self._writing:
                slot = next(arena.ready(), None)
                if slot is None or not slot.take():
                    return
                await self._write(slot)
            arena = self._arena

    async def _write(self, slot: Slot) -> None:
        seq = slot.seq
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        result: SnapshotInfo | HotswarmError
        try:
            interrupted = self._interrupted.pop(slot.index, None) == seq
            result = await loop.run_in_executor(self._executor, self._write_in_thread, slot, interrupted)
        except ManifestError as error:
            slot.release()
            result = error
        except HotswarmError as error:
            result = error
        except Exception as error:  # recorded, shown in health, and the daemon lives on to serve what it has
            log.exception("persisting capture %d failed unexpectedly", seq)
            result = LocalFailure(f"persisting capture {seq} failed: {type(error).__name__}: {error}; see the log")
        if slot.state is SlotState.READING:
            slot.hold()
        self.last_seconds = time.monotonic() - began
        self._record(slot.index, seq, result)
        async with self._progress:
            self._progress.notify_all()
        if isinstance(result, SnapshotInfo):
            self._on_stored(result)

    def _record(self, index: int, seq: int, result: SnapshotInfo | HotswarmError) -> None:
        self._results[seq] = result
        self._results.move_to_end(seq)
        while len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        if isinstance(result, HotswarmError):
            self.failures += 1
            self.last_error = str(result)
            self._held.pop(index, None)
            if not isinstance(result, ManifestError):
                self._unsaved[index] = seq
            log.error("capture %d is not on disk: %s", seq, result)
            return
        self.stored += 1
        self.last_error = None
        self.last_stored_at = time.monotonic()
        self._held[index] = (seq, result)
        self._unsaved.pop(index, None)
        log.info(
            "stored %s: outer %d, inner %d, %.1f MiB in %.2f s",
            result.snapshot_id, result.outer_step, result.inner_step, result.bytes / 2**20, self.last_seconds,
        )  # fmt: skip

    def _write_in_thread(self, slot: Slot, interrupted: bool) -> SnapshotInfo:
        draft = parse_draft(slot.table())
        known = self._stored_before(draft) if interrupted else None
        return known or self._store.write(draft, slot.streams(), self._signer, kind=draft.kind)

    def _stored_before(self, draft: DraftManifest) -> SnapshotInfo | None:
        """What a daemon made of this very capture before it died, if it came that far."""
        capture = _capture(draft)
        return next((info for info in self._store.snapshots() if info.own and _capture(info) == capture), None)


def _capture(of: DraftManifest | SnapshotInfo) -> tuple[object, ...]:
    return (of.seq, of.kind, of.label, of.time_ms, of.training_step, of.outer_step, of.inner_step)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
