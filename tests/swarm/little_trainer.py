"""A trainer without torch: its whole state at step k is bytes of value k mod 251. As a program:

    little_trainer.py STATE_DIR LOG MODE [COUNT]

    MODE loop       capture as fast as slots allow, re-attaching to whatever daemon runs on STATE_DIR, until SIGTERM
    MODE die        COUNT captures, each made durable except the last: SIGKILL right after READY
    MODE torn       one capture made durable, then SIGKILL while WRITING the next
    MODE hold       attach, capture once, wait until killed
    MODE unstored   attach, wait for LOG.go, capture once, see the disk refuse it, wait until killed
    MODE fork       attach, fork a child that sleeps, wait until killed
    MODE leave      attach, capture once, detach, exit

LOG gets a line per event: `attached`, `committed K`, `durable K`, `refused K`, `child PID`, `busy MESSAGE`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hotswarm.errors import HotswarmError, StoreError
from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.draft import DraftManifest, draft_to_bytes
from hotswarm.snapshot.sections import SectionDraft
from hotswarm.snapshot.tree import Container, Leaf, TensorSpec
from hotswarm.store.arena import Arena, Slot
from hotswarm.store.base import SnapshotSource
from hotswarm.swarm.control import ControlClient, Session

TABLE_BYTES = 1 << 16
INNER_STEPS = 4  # a round


def leaves(section: str, numbers: int) -> tuple[Leaf, ...]:
    """One float32 parameter and one moment of `numbers` elements each."""
    role = "momentum" if section == "outer" else "exp_avg"
    return (
        Leaf((), Container("dict")),
        Leaf(("w",), TensorSpec("float32", (numbers,)), "param"),
        Leaf(("m",), TensorSpec("float32", (numbers,)), role),
    )


class LittleState:
    """The sections of a state of about `4 * section_bytes` and how they lie in a slot."""

    def __init__(self, section_bytes: int = 1 << 20) -> None:
        numbers = section_bytes // 8
        self.sections = {name: SectionDraft(name, leaves(name, numbers)) for name in ("outer", "inner")}
        self.places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, section in self.sections.items():
            length = layout(section.leaves).stream_bytes
            self.places[name] = (at, length)
            at += -(-length // 4096) * 4096
        self.slot_bytes = at

    def capture(self, slot: Slot, seq: int, step: int, run: str = "default") -> None:
        """Everything up to READY."""
        self.begin(slot, seq, step)
        self.commit(slot, seq, step, run)

    def begin(self, slot: Slot, seq: int, step: int) -> None:
        slot.begin(seq)
        for name, (offset, length) in self.places.items():
            value = step // INNER_STEPS if name == "outer" else step
            slot.data[offset : offset + length] = bytes([value % 251]) * length

    def commit(self, slot: Slot, seq: int, step: int, run: str = "default") -> None:
        slot.commit(draft_to_bytes(self.draft(seq, step, run)), self.places)

    def draft(self, seq: int, step: int, run: str) -> DraftManifest:
        return DraftManifest(
            run=run,
            label="little",
            kind="hot",
            seq=seq,
            time_ms=time.time_ns() // 1_000_000,
            outer_step=step // INNER_STEPS,
            inner_step=step % INNER_STEPS,
            training_step=step,
            exact=True,
            arch=b"",
            sections=self.sections,
        )


def check_one_step(source: SnapshotSource) -> int:
    """The step that every byte of a snapshot says; AssertionError when they do not agree, or with the manifest."""
    step = source.manifest.training_step
    for name, entry in source.manifest.sections.items():
        value = step // INNER_STEPS if name == "outer" else step
        for index in range(len(entry.chunk_digests)):
            chunk = bytes(source.chunk(name, index))
            assert chunk.count(value % 251) == len(chunk), f"section {name} chunk {index} is not of step {step}"
    return step


class LittleTrainer:
    """Attached to a daemon, and again after that daemon was replaced."""

    def __init__(self, state_dir: Path, state: LittleState, *, slots: int = 2, linger: float | None = None) -> None:
        self.state_dir = state_dir
        self.state = state
        self.slots = slots
        self.linger = linger
        self.session: Session | None = None
        self.arena: Arena | None = None
        self.seq = 0

    def attach(self) -> None:
        client = ControlClient.find(self.state_dir)
        if client is None:
            raise HotswarmError("no daemon")
        given = self.session.arena_fd if self.session is not None else None
        session = client.attach(
            self.state.slot_bytes, TABLE_BYTES, self.slots, label="little", arena_fd=given, linger_seconds=self.linger
        )
        old, self.session = self.session, session
        if self.arena is None:
            self.arena = Arena.from_fd(os.dup(session.arena_fd))
        if old is not None:
            old.close()
        self.seq = max(self.seq, session.next_seq)

    def attach_until_it_works(self, deadline_s: float = 30.0) -> None:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                self.attach()
                return
            except HotswarmError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def capture(self, step: int) -> int | None:
        """The capture's sequence number, or None when no slot is writable."""
        assert self.arena is not None
        assert self.session is not None
        slot = self.arena.writable()
        if slot is None:
            return None
        seq, self.seq = self.seq, self.seq + 1
        self.state.capture(slot, seq, step)
        self.session.ready(slot.index, seq)
        return seq


def main(state_dir: Path, log_path: Path, mode: str, count: int) -> None:
    with log_path.open("a", buffering=1) as log:
        trainer = LittleTrainer(state_dir, LittleState())
        try:
            trainer.attach()
        except HotswarmError as error:
            log.write(f"busy {error}\n")
            return
        log.write("attached\n")
        assert trainer.session is not None
        assert trainer.arena is not None
        if mode == "loop":
            loop(trainer, log)
            return
        while mode == "unstored" and not log_path.with_suffix(".go").exists():
            time.sleep(0.01)
        for step in range(1, count + 1):
            seq = trainer.capture(step)
            assert seq is not None
            log.write(f"committed {step}\n")
            if mode == "die" and step == count:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                trainer.session.flush(seq, 20.0)
                log.write(f"durable {step}\n")
            except StoreError:
                assert mode == "unstored"
                log.write(f"refused {step}\n")
        if mode == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            log.write(f"child {child}\n")
        if mode == "torn":
            slot = trainer.arena.writable()
            assert slot is not None
            trainer.state.begin(slot, trainer.seq, count + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "leave":
            trainer.session.close()
            return
        time.sleep(600)


def loop(trainer: LittleTrainer, log: object) -> None:
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    step = trainer.seq - 1  # goes on where the trainer before it was killed
    while not stopping:
        assert trainer.session is not None
        if not trainer.session.alive:
            trainer.attach_until_it_works()
            log.write("attached\n")
        if trainer.capture(step + 1) is not None:
            step += 1
            log.write(f"committed {step}\n")
        time.sleep(0.005)
    log.write(f"fds {len(os.listdir('/proc/self/fd'))}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 1)
