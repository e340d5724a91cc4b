"""The copy into the arena: one instant, no leak of the next step into it, no memory of its own, kills at any point."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from capture_kit import Camera, everything, raw, restore, sealed, snap, spread_ram
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotswarm.capture.boundary import Boundary
from hotswarm.capture.diloco import Counters
from hotswarm.capture.staging import ArenaTooSmallError, Label, Stager
from hotswarm.capture.state import TrainingState
from hotswarm.errors import StoreError
from hotswarm.snapshot.draft import parse_draft
from hotswarm.snapshot.tree import TensorSpec
from hotswarm.store.arena import Arena, SlotState

SRC = str(Path(__file__).parents[2] / "src")


class Filled:
    """A training whose every number is k at step k: parameters, moments, `step`, counters, an extra value."""

    def __init__(self, width=64):
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.model(torch.randn(4, width)).sum().backward()
        self.optimizer.step()
        self.extra = {"k": 0, "strided": torch.zeros(40, 30).t()}
        self.state = TrainingState(self.model, [self.optimizer], extra=self.extra, rng=False)
        self.to(0)

    def to(self, k):
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers(), self.extra["strided"]]:
                tensor.fill_(k)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.fill_(k)
        self.extra["k"] = k
        self.optimizer.param_groups[0]["weight_decay"] = k
        self.state.counters = Counters(k, k, k)


def one_number(draft, streams):
    """The k that everything in a snapshot holds; fails when there are two."""
    seen = {draft.training_step, draft.inner_step, draft.outer_step}
    from hotswarm.snapshot.chunks import layout

    for name, section in draft.sections.items():
        for placed in layout(section.leaves).tensors:
            data = bytearray(streams[name][placed.offset : placed.offset + placed.nbytes])
            tensor = torch.frombuffer(data, dtype=getattr(torch, placed.spec.dtype))
            assert len(set(tensor.tolist())) == 1, placed.path
            seen.add(int(tensor[0]))
        values = {leaf.path: leaf.what for leaf in section.leaves}
        seen |= {values["extra", "k"], values["optimizer", "param_groups", 0, "weight_decay"], values["training_step",]}
    assert len(seen) == 1, seen
    return seen.pop()


def test_fifty_snapshots_of_a_hot_loop_each_hold_one_step_while_a_reader_pulls_them():
    training = Filled()
    stager = Stager()
    need = stager.need(training.state.collect())
    arena = Arena.create(need.slot_bytes, need.table_bytes, 2)
    reader = Arena.from_fd(os.dup(arena.fd))
    found, stop, failures = [], threading.Event(), []

    def pull():
        try:
            while not stop.is_set():
                for slot in reader.ready():
                    if slot.take():
                        found.append((slot.seq, one_number(parse_draft(slot.table()), slot.streams())))
                        slot.hold()
        except BaseException as error:  # noqa: BLE001  # shown by the test itself
            failures.append(error)

    step = 0

    def due(exact):
        stager.stage(training.state.collect(), arena, Label("run", "x", exact=exact), seq=step)

    boundary = Boundary(training.model, [training.optimizer], None, due)
    thread = threading.Thread(target=pull)
    thread.start()
    deadline = time.monotonic() + 60
    try:
        while len(found) < 50 and not failures and time.monotonic() < deadline:
            step += 1
            training.to(step)
            boundary.explicit()
    finally:
        stop.set()
        thread.join(20)
    assert failures == []
    assert len(found) >= 50
    assert all(seq == k for seq, k in found)


def test_steps_after_the_copy_do_not_reach_the_snapshot():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    step()
    state = TrainingState(model, [optimizer])
    stager = Stager()
    tree = state.collect()
    need = stager.need(tree)
    arena = Arena.create(need.slot_bytes, need.table_bytes, 1)
    at_one = everything(model, [optimizer])
    staged = stager.stage(tree, arena, Label("run", ""), 1)  # the writer is blocked: nobody has read the slot yet
    for _ in range(3):
        step()
    assert everything(model, [optimizer]) != at_one
    other = nn.Linear(4, 4)
    joiner = torch.optim.AdamW(other.parameters())
    restore(TrainingState(other, [joiner]), sealed(arena, staged.slot))
    assert everything(other, [joiner]) == at_one
    assert all(float(s["step"]) == 1 for s in joiner.state.values())


def test_snapshots_of_large_tensors_are_split_among_threads_and_whole():
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3_000_001), "b": torch.randn(1000, 1001).t(), "c": torch.randn(5)}
    source = snap(TrainingState(nn.Linear(1, 1), extra=tensors, rng=False))
    source.verify()
    back = {key: torch.zeros(value.shape) for key, value in tensors.items()}
    restore(TrainingState(nn.Linear(1, 1), extra=back, rng=False), source)
    for key, value in tensors.items():
        assert raw(back[key]) == raw(value)


def test_nothing_is_written_while_no_slot_is_free_and_an_outgrown_arena_says_what_it_takes():
    model = nn.Linear(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, [optimizer])
    stager = Stager()
    need = stager.need(state.collect())
    arena = Arena.create(need.slot_bytes, need.table_bytes, 1)
    assert stager.stage(state.collect(), arena, Label("run", ""), 1) is not None
    assert stager.stage(state.collect(), arena, Label("run", ""), 2) is None
    arena.slots[0].take()
    arena.slots[0].hold()
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    with pytest.raises(ArenaTooSmallError) as small:
        stager.stage(state.collect(), arena, Label("run", ""), 3)
    assert arena.slots[0].state is SlotState.HELD  # untouched
    assert small.value.need.slot_bytes >= 3 * 512 * 64 * 4
    larger = Arena.create(small.value.need.slot_bytes, small.value.need.table_bytes, 1)
    staged = stager.stage(state.collect(), larger, Label("run", ""), 3)
    sealed(larger, staged.slot).verify()


def test_a_slot_that_the_trainer_takes_again_is_no_source_any_more():
    training = Filled(width=8)
    camera = Camera(training.state)
    tree = training.state.collect()
    need = camera.stager.need(tree)
    arena = Arena.create(need.slot_bytes, need.table_bytes, 1)
    source = camera.snap(arena)
    source.verify()
    camera.snap(arena)
    for read in (
        lambda: source.chunk("inner", 0),
        lambda: source.read_into("inner", 0, memoryview(bytearray(8))),
        source.verify,
    ):
        with pytest.raises(StoreError, match="no longer in the arena"):
            read()


def test_a_slot_source_reads_what_a_slice_of_the_stream_holds_gaps_as_zero():
    training = Filled(width=24)
    training.to(7)
    source = snap(training.state)
    layout = source.manifest.sections["inner"].layout
    stream = bytearray(layout.stream_bytes)
    for index, span in enumerate(layout.chunks):
        stream[span.offset : span.end] = source.chunk("inner", index)
    for offset, length in [(0, layout.stream_bytes), (5, 100), (4000, 5000), (layout.stream_bytes - 3, 3), (9, 0)]:
        out = bytearray(b"\xff" * length)
        source.read_into("inner", offset, memoryview(out))
        assert out == stream[offset : offset + length]
    with pytest.raises(ValueError, match="outside"):
        source.read_into("inner", layout.stream_bytes - 3, memoryview(bytearray(4)))


def test_no_memory_is_taken_after_the_first_snapshot():
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(40)])  # 40 MiB
    state = TrainingState(model, [torch.optim.SGD(model.parameters(), 0.1)])
    camera = Camera(state)
    need = camera.stager.need(state.collect())
    arena = Arena.create(need.slot_bytes, need.table_bytes, 1)

    def snapshot():
        camera.seq += 1
        staged = camera.stager.stage(state.collect(), arena, Label("run", ""), camera.seq)
        staged.slot.take()
        staged.slot.hold()

    for _ in range(3):
        snapshot()
    before = spread_ram()
    for _ in range(30):
        snapshot()
    assert spread_ram() - before < 2 << 20


# ---------------------------------------------------------------- processes

VICTIM = """
import os, signal, socket, sys, threading, time
import torch
from torch import nn
from hotswarm.capture.diloco import Counters
from hotswarm.capture.staging import Label, Stager
from hotswarm.capture.state import TrainingState
from hotswarm.store import arena as arena_module
from hotswarm.store.arena import Arena
_, fds, _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)
arena = Arena.from_fd(fds[0])
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
state = TrainingState(model, [torch.optim.SGD(model.parameters(), 0.1)], rng=False)
stager = Stager()
where, seq = sys.argv[2], 0
if where == "ready":
    plain = arena_module.Slot.commit
    def commit(self, table, sections):
        plain(self, table, sections)
        os.kill(os.getpid(), signal.SIGKILL)
    arena_module.Slot.commit = commit
elif where == "random":
    threading.Thread(target=lambda: (time.sleep(float(sys.argv[3])), os.kill(os.getpid(), signal.SIGKILL))).start()
while True:
    seq += 1
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(seq)
    state.counters = Counters(0, 0, seq)
    staged = stager.stage(state.collect(), arena, Label("run", ""), seq)
    if staged is None:
        time.sleep(0.001)
        continue
    if where == "writing" and seq == 3:
        staged.slot._move((2,), 0)  # give it back and stop inside the next write
        staged.slot.begin(4)
        os.kill(os.getpid(), signal.SIGKILL)
    if seq < 5:
        staged.slot.take(); staged.slot.hold()
"""


def killed(where: str, *arguments: str) -> Arena:
    arena = Arena.create(4 << 20, 64 << 10, 2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(theirs.fileno()), where, *arguments],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": SRC},
        )
        socket.send_fds(ours, [b"!"], [arena.fd])
        assert child.wait(60) == -signal.SIGKILL
    return arena


def whole_snapshots(arena: Arena) -> list[int]:
    """Training steps of the READY and HELD slots, each checked to hold one number everywhere."""
    steps = []
    for slot in arena.slots:
        if slot.state in {SlotState.READY, SlotState.HELD}:
            draft = parse_draft(slot.table())
            floats = torch.frombuffer(bytearray(slot.streams()["inner"]), dtype=torch.float32)
            leaves = draft.sections["inner"].leaves
            count = sum(leaf.what.nbytes for leaf in leaves if type(leaf.what) is TensorSpec) // 4
            assert set(floats[:count].tolist()) == {float(draft.training_step)}
            assert slot.seq == draft.seq
            steps.append(draft.training_step)
    return steps


def test_a_trainer_killed_right_after_ready_has_lost_nothing():
    arena = killed("ready")
    assert arena.drop_unfinished() == 0
    assert whole_snapshots(arena) == [1]


def test_a_trainer_killed_while_writing_leaves_the_older_snapshots_and_no_other():
    arena = killed("writing")
    assert arena.drop_unfinished() == 1
    assert whole_snapshots(arena) == [2] or whole_snapshots(arena) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", range(0, 100, 5))
def test_a_trainer_killed_at_any_moment_leaves_only_whole_snapshots(delay_ms):
    arena = killed("random", str(delay_ms / 1000))
    arena.drop_unfinished()
    whole_snapshots(arena)
    assert all(slot.state is not SlotState.WRITING for slot in arena.slots)


def _sees(arena_ino, queue):
    held = []
    for name in os.listdir("/proc/self/fd"):
        try:
            held.append(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        queue.put((arena_ino in held, "hotswarm-arena" in maps.read()))


def test_data_loader_workers_forked_between_snapshots_neither_hang_nor_hold_the_arena():
    training = Filled(width=256)
    big = {"x": torch.zeros(3_000_000)}  # large enough that the helper thread runs
    training.state.extra = big
    camera = Camera(training.state)
    need = camera.stager.need(training.state.collect())
    arena = Arena.create(need.slot_bytes, need.table_bytes, 1)
    loader = DataLoader(
        TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=30
    )
    for _ in range(3):
        camera.snap(arena)
        assert sum(batch[0].sum().item() for batch in loader) == 780.0
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_sees, args=(os.fstat(arena.fd).st_ino, queue))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert queue.get() == (False, False)
