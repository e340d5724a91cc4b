"""The arena: memory that a trainer copies its state into and the daemon reads, without a message in between.

One memfd holds a header page and a few slots. Each slot has a state word that says whose turn it is:

    FREE ──begin──▶ WRITING ──commit──▶ READY      moved by the trainer
                                        READY ──take──▶ READING ──hold──▶ HELD      moved by the daemon
    FREE, HELD ──begin──▶ WRITING                  a HELD slot is persisted, so the trainer may overwrite it

Everything that a snapshot needs (packed tensor bytes, the leaf table with small values and counters, the place of each
section) is in the slot *before* READY is stored, so what a crash leaves behind is this:

- trainer dies in WRITING: a torn slot. The daemon, who sees the death, calls `drop_unfinished()`: FREE again.
- trainer dies one instruction after READY: nothing is lost; the daemon reads the slot as if nothing had happened.
- daemon dies in READING: the bytes are whole. The next daemon calls `requeue_unread()`: READY again.
- HELD survives both; a reader of a HELD slot checks afterwards that it was not overwritten meanwhile (`SlotSource`).

A state word is one aligned 32-bit store. x86 keeps the order of stores; elsewhere `_fence()` makes it so.

The header also carries the live counters, which the trainer writes at each step under a sequence lock (odd while a
write is under way): a joiner elsewhere asks for them through the daemon without disturbing training.
"""

from __future__ import annotations

import enum
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hotswarm.errors import StoreError
from hotswarm.store import mapping
from hotswarm.store.mapping import available_bytes

__all__ = ["MAX_SLOTS", "Arena", "LiveCounters", "Slot", "SlotState", "available_bytes", "slots_that_fit"]

PAGE = 4096
HEADER_BYTES = PAGE
MAX_SLOTS = 8
MAX_SECTIONS = 4
_MAGIC = b"HSARENA1"
_HEAD = struct.Struct("<8sIIQQ")  # magic, slots, 0, slot_bytes, table_bytes
_LIVE_AT = 64
_LIVE = struct.Struct("<qqqdqI")  # outer, inner, training, steps/s, monotonic ns, round length
_SLOT_AT = 256
_SLOT_STRIDE = 256
_SLOT_META = struct.Struct("<QQI")  # seq, table length, sections; behind the state word and 4 bytes of padding
_SECTION = struct.Struct("<16sQQ")  # name, offset, length
_SPINS = 1000  # a writer is inside for under a microsecond; a thousand tries outlast any preemption that matters


class SlotState(enum.IntEnum):
    """Whose turn it is with a slot."""

    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3
    HELD = 4


@dataclass(frozen=True, slots=True)
class LiveCounters:
    """Where the trainer is right now. `age_s` is the time since it said so."""

    outer_step: int
    inner_step: int
    training_step: int
    steps_per_s: float
    round_length: int
    age_s: float


_fences = (threading.Lock(), threading.Lock())


def _fence() -> None:
    # Releasing one lock and acquiring another orders the stores before against the stores after, on any processor.
    with _fences[0]:
        pass
    with _fences[1]:
        pass


def slots_that_fit(state_bytes: int) -> int:
    """2 when the state is under a quarter of the memory that is left, else 1."""
    room = available_bytes()
    return 2 if room is None or state_bytes * 4 < room else 1


class Slot:
    """One snapshot's place. Methods say which process calls them; a wrong turn is a StoreError."""

    def __init__(self, arena: Arena, index: int) -> None:
        self._arena = arena
        self.index = index
        self._meta_at = _SLOT_AT + index * _SLOT_STRIDE
        self._table_at = HEADER_BYTES + index * (arena.table_bytes + arena.slot_bytes)
        self._data_at = self._table_at + arena.table_bytes

    @property
    def state(self) -> SlotState:
        """The state word as it is now."""
        return SlotState(self._arena.words[self._meta_at // 4])

    def _move(self, allowed: tuple[SlotState, ...], to: SlotState) -> None:
        state = self.state
        if state not in allowed:
            raise StoreError(f"arena slot {self.index} is {state.name}, so it cannot become {to.name}")
        _fence()
        self._arena.words[self._meta_at // 4] = to
        _fence()

    def _meta(self) -> tuple[int, int, int]:
        seq, table_length, sections = _SLOT_META.unpack_from(self._arena.view, self._meta_at + 8)
        return seq, table_length, sections

    @property
    def seq(self) -> int:
        """Capture sequence of what lies here, or is being written."""
        return self._meta()[0]

    @property
    def data(self) -> memoryview:
        """The whole data part, `slot_bytes` long."""
        return self._arena.view[self._data_at : self._data_at + self._arena.slot_bytes]

    # ------------------------------------------------------------ trainer

    def begin(self, seq: int) -> None:
        """FREE or HELD → WRITING."""
        self._move((SlotState.FREE, SlotState.HELD), SlotState.WRITING)
        _SLOT_META.pack_into(self._arena.view, self._meta_at + 8, seq, 0, 0)

    def commit(self, table: bytes, sections: Mapping[str, tuple[int, int]]) -> None:
        """WRITING → READY. `sections`: name → (offset in `data`, length), in bytes."""
        arena = self._arena
        if len(table) > arena.table_bytes:
            raise StoreError(f"the leaf table takes {len(table)} bytes, the arena has room for {arena.table_bytes}")
        if len(sections) > MAX_SECTIONS:
            raise StoreError(f"a slot takes {MAX_SECTIONS} sections, not {len(sections)}")
        view = arena.view
        view[self._table_at : self._table_at + len(table)] = table
        at = self._meta_at + 8 + _SLOT_META.size
        for name, (offset, length) in sections.items():
            if offset < 0 or length < 0 or offset + length > arena.slot_bytes:
                raise StoreError(
                    f"section {name} at {offset}+{length} ends outside of the slot ({arena.slot_bytes} bytes)"
                )
            _SECTION.pack_into(view, at, name.encode("ascii"), offset, length)
            at += _SECTION.size
        _SLOT_META.pack_into(view, self._meta_at + 8, self.seq, len(table), len(sections))
        self._move((SlotState.WRITING,), SlotState.READY)

    def abandon(self) -> None:
        """WRITING → FREE: what was being written is given up."""
        self._move((SlotState.WRITING,), SlotState.FREE)

    # ------------------------------------------------------------ daemon

    def take(self) -> bool:
        """READY → READING; False when there is nothing to read."""
        if self.state is not SlotState.READY:
            return False
        self._move((SlotState.READY,), SlotState.READING)
        return True

    def hold(self) -> None:
        """READING → HELD: it is on disk; it stays readable here until the trainer needs the slot."""
        self._move((SlotState.READING,), SlotState.HELD)

    def put_back(self) -> None:
        """READING → READY: persisting failed, and is to be tried again."""
        self._move((SlotState.READING,), SlotState.READY)

    def release(self) -> None:
        """READY, READING or HELD → FREE: nobody wants it any more."""
        self._move((SlotState.READY, SlotState.READING, SlotState.HELD), SlotState.FREE)

    # ------------------------------------------------------------ either

    def table(self) -> bytes:
        """The leaf table given to commit(). StoreError when its length is a lie."""
        length = self._meta()[1]
        if length > self._arena.table_bytes:
            raise StoreError(f"arena slot {self.index} claims a leaf table of {length} bytes")
        return bytes(self._arena.view[self._table_at : self._table_at + length])

    def streams(self) -> dict[str, memoryview]:
        """Packed bytes by section, without a copy. StoreError when a place lies outside of the slot."""
        count = self._meta()[2]
        if count > MAX_SECTIONS:
            raise StoreError(f"arena slot {self.index} claims {count} sections")
        data, streams = self.data, {}
        for number in range(count):
            at = self._meta_at + 8 + _SLOT_META.size + number * _SECTION.size
            name, offset, length = _SECTION.unpack_from(self._arena.view, at)
            if offset + length > len(data):
                raise StoreError(f"arena slot {self.index} claims a section outside of itself")
            streams[name.rstrip(b"\0").decode("ascii", "replace")] = data[offset : offset + length]
        return streams


class Arena:
    """Header, live counters and slots in one mapped memfd. Not thread-safe beyond what the state words promise."""

    def __init__(self, memory: mapping.Mapping, slots: int, slot_bytes: int, table_bytes: int) -> None:
        self._memory = memory
        self.slot_bytes = slot_bytes
        self.table_bytes = table_bytes
        self._words: memoryview | None = None
        self.slots = tuple(Slot(self, index) for index in range(slots))

    @classmethod
    def create(cls, slot_bytes: int, table_bytes: int, slots: int) -> Arena:
        """A new arena, its memory allocated and all slots FREE. Raises StoreError when memory is short."""
        if not 1 <= slots <= MAX_SLOTS or slot_bytes < 0 or table_bytes < 0:
            raise StoreError(f"an arena takes 1 to {MAX_SLOTS} slots of no negative size")
        slot_bytes, table_bytes = max(PAGE, _pages(slot_bytes)), max(PAGE, _pages(table_bytes))
        size = HEADER_BYTES + slots * (slot_bytes + table_bytes)
        fd = mapping.make_memory("hotswarm-arena", size)
        try:
            memory = mapping.Mapping(fd, size)
        except BaseException:
            os.close(fd)
            raise
        arena = cls(memory, slots, slot_bytes, table_bytes)
        _HEAD.pack_into(arena.view, 0, _MAGIC, slots, 0, slot_bytes, table_bytes)
        return arena

    @classmethod
    def from_fd(cls, fd: int) -> Arena:
        """The arena behind a received descriptor, which becomes ours. Raises StoreError (and leaves `fd` open) else."""
        size = mapping.check_memory(fd)
        if size < HEADER_BYTES:
            raise StoreError(f"the descriptor given as an arena has only {size} bytes")
        memory = mapping.Mapping(fd, size)
        assert memory.view is not None
        magic, slots, _, slot_bytes, table_bytes = _HEAD.unpack_from(memory.view, 0)
        fits = 1 <= slots <= MAX_SLOTS and HEADER_BYTES + slots * (slot_bytes + table_bytes) == size
        if magic != _MAGIC or not fits or slot_bytes % PAGE or table_bytes % PAGE:
            memory.view = None
            raise StoreError("the descriptor given as an arena does not begin like one")
        return cls(memory, slots, slot_bytes, table_bytes)

    @property
    def fd(self) -> int:
        """The descriptor to hand over with SCM_RIGHTS."""
        return self._memory.fd

    @property
    def view(self) -> memoryview:
        """All of it, as bytes. StoreError in a forked child, where there is no such memory, and after close()."""
        view = self._memory.view
        if view is None:
            raise StoreError("this arena is closed, or belongs to the process that this one was forked from")
        return view

    @property
    def words(self) -> memoryview:
        """The header as aligned unsigned 32-bit words."""
        if self._memory.view is None or self._words is None:
            self._words = self.view[:HEADER_BYTES].cast("I")
        return self._words

    def writable(self) -> Slot | None:
        """A slot that the trainer may begin: a FREE one, else the HELD one with the oldest content, else None."""
        free = next((slot for slot in self.slots if slot.state is SlotState.FREE), None)
        if free is not None:
            return free
        held = [slot for slot in self.slots if slot.state is SlotState.HELD]
        return min(held, key=lambda slot: slot.seq, default=None)

    def ready(self) -> Iterator[Slot]:
        """READY slots, oldest first."""
        waiting = [slot for slot in self.slots if slot.state is SlotState.READY]
        yield from sorted(waiting, key=lambda slot: slot.seq)

    def held(self, seq: int) -> Slot | None:
        """The slot that still holds snapshot number `seq`."""
        return next((slot for slot in self.slots if slot.state is SlotState.HELD and slot.seq == seq), None)

    def drop_unfinished(self) -> int:
        """Free the slots that a dead trainer was writing; how many. The daemon calls this, and only after the death."""
        torn = [slot for slot in self.slots if slot.state is SlotState.WRITING]
        for slot in torn:
            slot.abandon()
        return len(torn)

    def requeue_unread(self) -> int:
        """Offer again the slots that a dead daemon was reading; how many."""
        interrupted = [slot for slot in self.slots if slot.state is SlotState.READING]
        for slot in interrupted:
            slot.put_back()
        return len(interrupted)

    # ------------------------------------------------------------ live counters

    def write_live(
        self, outer_step: int, inner_step: int, training_step: int, steps_per_s: float = 0.0, round_length: int = 0
    ) -> None:
        """Say where training is; a microsecond. One writer only: the thread that trains."""
        words, at = self.words, _LIVE_AT // 4
        odd = words[at] | 1  # also closes a write that a killed predecessor left open
        words[at] = odd
        _fence()
        now = time.monotonic_ns()
        _LIVE.pack_into(self.view, _LIVE_AT + 8, outer_step, inner_step, training_step, steps_per_s, now, round_length)
        _fence()
        words[at] = (odd + 1) & 0xFFFFFFFF

    def read_live(self) -> LiveCounters | None:
        """The trainer's last word on where it is; None before the first, or when it died while saying it."""
        words, at = self.words, _LIVE_AT // 4
        for _ in range(_SPINS):
            before = words[at]
            if before == 0:
                return None
            if before % 2 == 0:
                _fence()
                outer, inner, training, rate, stamp, length = _LIVE.unpack_from(self.view, _LIVE_AT + 8)
                _fence()
                if words[at] == before:
                    age_s = max(0.0, (time.monotonic_ns() - stamp) / 1e9)
                    return LiveCounters(outer, inner, training, rate, length, age_s)
        return None

    # ------------------------------------------------------------ memory

    def prefault(self) -> threading.Thread:
        """Enter all pages into this process's page table on a thread of its own, which is returned, running."""
        thread = threading.Thread(
            target=self._memory.prefault, args=(0, self._memory.size), name="hotswarm-prefault", daemon=True
        )
        thread.start()
        return thread

    def close(self) -> None:
        """Give up the descriptor and the mapping; slices that others hold stay valid."""
        self._words = None
        self._memory.close()


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
