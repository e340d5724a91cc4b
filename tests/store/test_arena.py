"""The arena between real processes: hand-over by SCM_RIGHTS, kills in every state, forked children."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hotswarm.errors import StoreError
from hotswarm.store import mapping
from hotswarm.store.arena import MAX_SLOTS, Arena, SlotState, available_bytes, slots_that_fit

SRC = str(Path(__file__).parents[2] / "src")


def small(slots: int = 2) -> Arena:
    return Arena.create(slot_bytes=64 << 10, table_bytes=1 << 10, slots=slots)


def write(arena: Arena, seq: int, fill: int, length: int = 10_000) -> None:
    slot = arena.writable()
    assert slot is not None
    slot.begin(seq)
    slot.data[:length] = bytes([fill]) * length
    slot.commit(b"table %d" % seq, {"inner": (0, length), "outer": (8192, 100)})


def test_what_is_committed_is_what_the_other_side_of_the_descriptor_reads():
    trainer = small()
    daemon = Arena.from_fd(os.dup(trainer.fd))
    write(trainer, seq=7, fill=3)
    (slot,) = daemon.ready()
    assert slot.take()
    assert slot.seq == 7
    assert slot.table() == b"table 7"
    streams = slot.streams()
    assert bytes(streams["inner"]) == b"\3" * 10_000
    assert len(streams["outer"]) == 100
    slot.hold()
    assert trainer.slots[slot.index].state is SlotState.HELD
    assert daemon.held(7) is slot
    assert daemon.held(8) is None


def test_a_trainer_gets_a_free_slot_then_the_oldest_held_one_and_never_an_unread_one():
    arena = small(slots=2)
    write(arena, 1, 1)
    write(arena, 2, 2)
    assert arena.writable() is None  # both READY
    for slot in list(arena.ready()):
        assert slot.take()
        assert arena.writable() is None or slot.seq == 2  # READING is not writable either
        slot.hold()
    oldest = arena.writable()
    assert oldest is not None
    assert oldest.seq == 1


def test_every_wrong_turn_is_refused_and_changes_nothing():
    moves = ["begin", "commit", "abandon", "take", "hold", "put_back", "release"]
    allowed = {
        SlotState.FREE: {"begin": SlotState.WRITING},
        SlotState.WRITING: {"commit": SlotState.READY, "abandon": SlotState.FREE},
        SlotState.READY: {"take": SlotState.READING, "release": SlotState.FREE},
        SlotState.READING: {"hold": SlotState.HELD, "put_back": SlotState.READY, "release": SlotState.FREE},
        SlotState.HELD: {"begin": SlotState.WRITING, "release": SlotState.FREE},
    }
    arguments = {"begin": (1,), "commit": (b"", {})}
    arena = small(slots=1)
    (slot,) = arena.slots
    for state in SlotState:
        for move in moves:
            arena.words[slot._meta_at // 4] = state
            if move in allowed[state]:
                getattr(slot, move)(*arguments.get(move, ()))
                assert slot.state is allowed[state][move]
            elif move == "take":
                assert slot.take() is False
                assert slot.state is state
            else:
                with pytest.raises(StoreError, match=state.name):
                    getattr(slot, move)(*arguments.get(move, ()))
                assert slot.state is state


def test_a_table_or_section_that_does_not_fit_is_refused_before_ready():
    arena = small(slots=1)
    (slot,) = arena.slots
    slot.begin(1)
    room = arena.table_bytes
    with pytest.raises(StoreError, match="leaf table"):
        slot.commit(b"x" * (room + 1), {})
    with pytest.raises(StoreError, match="ends outside"):
        slot.commit(b"", {"inner": (arena.slot_bytes - 1, 2)})
    with pytest.raises(StoreError, match="sections"):
        slot.commit(b"", dict.fromkeys("abcde", (0, 1)))
    assert slot.state is SlotState.WRITING
    slot.commit(b"x" * room, {"inner": (arena.slot_bytes - 1, 1)})
    assert slot.state is SlotState.READY


def test_a_header_that_lies_is_refused_by_the_reader():
    arena = small(slots=1)
    write(arena, 1, 1)
    (slot,) = arena.slots
    struct.pack_into("<Q", arena.view, slot._meta_at + 16, arena.table_bytes + 1)
    with pytest.raises(StoreError, match="leaf table"):
        slot.table()
    struct.pack_into("<I", arena.view, slot._meta_at + 24, 5)
    with pytest.raises(StoreError, match="5 sections"):
        slot.streams()
    struct.pack_into("<I", arena.view, slot._meta_at + 24, 1)
    struct.pack_into("<QQ", arena.view, slot._meta_at + 28 + 16, 2**63, 2**63)
    with pytest.raises(StoreError, match="outside"):
        slot.streams()


def test_descriptors_that_are_no_arena_are_refused_and_stay_open():
    with open(os.devnull, "rb") as null, pytest.raises(StoreError):
        Arena.from_fd(null.fileno())
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    with pytest.raises(StoreError, match="sealed"):
        Arena.from_fd(unsealed)
    os.close(unsealed)
    blank = mapping.make_memory("x", 1 << 20)
    with pytest.raises(StoreError, match="begin like one"):
        Arena.from_fd(blank)
    assert os.fstat(blank).st_size == 1 << 20
    os.close(blank)


def test_nobody_can_shrink_an_arena_under_its_reader():
    arena = small()
    with pytest.raises(OSError):
        os.ftruncate(arena.fd, 0)


@pytest.mark.parametrize("slots", [0, MAX_SLOTS + 1])
def test_the_number_of_slots_has_limits(slots):
    with pytest.raises(StoreError, match="slots"):
        Arena.create(1, 1, slots)
    assert len(Arena.create(1, 1, MAX_SLOTS).slots) == MAX_SLOTS


def test_an_arena_larger_than_memory_is_refused_with_both_figures():
    room = available_bytes()
    assert room is not None
    with pytest.raises(StoreError, match=r"needs \d+ MiB of memory and \d+ MiB are available"):
        Arena.create(room + (1 << 30), 1, 1)
    assert slots_that_fit(1 << 20) == 2
    assert slots_that_fit(room) == 1


def test_views_stay_readable_after_close():
    arena = small()
    view = arena.slots[0].data[:4]
    view[:] = b"abcd"
    arena.close()
    arena.close()
    assert bytes(view) == b"abcd"
    with pytest.raises(StoreError, match="closed"):
        _ = arena.slots[0].state


def test_prefault_leaves_the_contents_alone():
    arena = small()
    write(arena, 1, 9)
    thread = arena.prefault()
    thread.join(10)
    assert not thread.is_alive()
    assert bytes(arena.slots[0].streams()["inner"]) == b"\x09" * 10_000


# ---------------------------------------------------------------- live counters


def test_live_counters_are_never_a_mixture_of_two_steps():
    writer = small()
    reader = Arena.from_fd(os.dup(writer.fd))
    assert reader.read_live() is None
    stop = threading.Event()

    def train() -> None:
        k = 0
        while not stop.is_set():
            k += 1
            writer.write_live(k, k, k, float(k), k % 1000)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        seen = set()
        for _ in range(3000):
            live = reader.read_live()
            if live is None:
                continue
            assert live.outer_step == live.inner_step == live.training_step == live.steps_per_s
            assert live.round_length == live.outer_step % 1000
            assert 0 <= live.age_s < 60
            seen.add(live.outer_step)
        assert len(seen) > 1
    finally:
        stop.set()
        thread.join()


def test_a_trainer_killed_inside_a_counter_write_blocks_neither_reader_nor_successor():
    arena = small()
    arena.write_live(3, 4, 5)
    arena.words[64 // 4] |= 1  # what a kill in the middle leaves
    assert arena.read_live() is None
    arena.write_live(6, 7, 8, 1.5, 9)
    live = arena.read_live()
    assert live is not None
    assert (live.outer_step, live.inner_step, live.training_step, live.steps_per_s, live.round_length) == (
        6,
        7,
        8,
        1.5,
        9,
    )


# ---------------------------------------------------------------- kills

TRAINER = """
import os, signal, socket, sys
from hotswarm.store.arena import Arena
_, fds, _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)
arena = Arena.from_fd(fds[0])
where = sys.argv[2]
slot = arena.writable()
slot.begin(41)
slot.data[:1000] = b"a" * 1000
if where == "writing":
    os.kill(os.getpid(), signal.SIGKILL)
slot.commit(b"the table", {"inner": (0, 1000)})
if where == "ready":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_trainer(arena: Arena, where: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(theirs.fileno()), where],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": SRC},
        )
        socket.send_fds(ours, [b"!"], [arena.fd])
        assert child.wait(30) == -signal.SIGKILL


def test_sigkill_right_after_ready_loses_nothing():
    for _ in range(3):
        arena = small(slots=1)
        killed_trainer(arena, "ready")
        assert arena.drop_unfinished() == 0
        (slot,) = arena.ready()
        assert slot.take()
        assert slot.seq == 41
        assert slot.table() == b"the table"
        assert bytes(slot.streams()["inner"]) == b"a" * 1000


def test_sigkill_while_writing_leaves_nothing_that_looks_like_a_snapshot():
    arena = small(slots=1)
    killed_trainer(arena, "writing")
    assert list(arena.ready()) == []
    assert arena.writable() is None
    assert arena.drop_unfinished() == 1
    assert arena.writable() is arena.slots[0]


def test_a_daemon_that_died_reading_leaves_the_slot_to_the_next_one():
    trainer = small(slots=1)
    write(trainer, 5, 5)
    first = Arena.from_fd(os.dup(trainer.fd))
    assert next(first.ready()).take()
    first.close()
    second = Arena.from_fd(os.dup(trainer.fd))
    assert list(second.ready()) == []
    assert second.requeue_unread() == 1
    (slot,) = second.ready()
    assert slot.seq == 5


# ---------------------------------------------------------------- forks


def test_a_forked_child_neither_maps_the_arena_nor_holds_its_descriptor():
    arena = small()
    arena.write_live(1, 2, 3)
    ino = os.fstat(arena.fd).st_ino
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            held = []
            for name in os.listdir("/proc/self/fd"):
                try:
                    held.append(os.stat(f"/proc/self/fd/{name}").st_ino)
                except OSError:
                    continue
            with open("/proc/self/maps", encoding="utf-8") as maps:
                mapped = "hotswarm-arena" in maps.read()
            try:
                arena.write_live(9, 9, 9)
                raised = False
            except StoreError:
                raised = True
            del arena  # collecting it must unmap nothing in here
            os.write(writes, f"{ino in held} {mapped} {raised}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    _, status = os.waitpid(child, 0)
    answer = os.read(reads, 100).decode()
    os.close(reads)
    assert status == 0
    assert answer == "False False True"
    live = arena.read_live()
    assert live is not None
    assert live.outer_step == 1


def test_writing_live_counters_costs_microseconds():
    arena = small()
    rounds = 2000
    start = time.perf_counter()
    for k in range(rounds):
        arena.write_live(k, k, k, 1.0, 10)
    assert (time.perf_counter() - start) / rounds < 100e-6  # measured: about 2; the margin is for a busy machine
