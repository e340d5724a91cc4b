"""From slots to the store, without processes: which capture becomes which snapshot."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from little_trainer import TABLE_BYTES, LittleState, check_one_step

from hotswarm.snapshot.draft import draft_to_bytes
from hotswarm.store.arena import Arena, Slot, SlotState
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from hotswarm.swarm.persist import Persister
from support.snapshots import KeySigner

STATE = LittleState(1 << 16)


@pytest.fixture
def arena():
    made = Arena.create(STATE.slot_bytes, TABLE_BYTES, 2)
    yield made
    made.close()


def capture(slot: Slot, seq: int, *, value: int, kind: str = "hot", time_ms: int = 5_000) -> None:
    """A capture whose bytes say `value`, and which differs in nothing else but what is given."""
    STATE.begin(slot, seq, value)
    made = STATE.draft(seq, value, "default")
    slot.commit(draft_to_bytes(dataclasses.replace(made, kind=kind, time_ms=time_ms)), STATE.places)


def written(store: FileStore, persister: Persister, arena: Arena, *seqs: int):
    async def work():
        persister.set_arena(arena)
        await persister.settle()
        return [await persister.durable(seq, 10) for seq in seqs]

    return asyncio.run(work())


def open_store(folder: Path) -> FileStore:
    return FileStore(folder, retention=Retention(max_hot=50, max_cold=50)).open_for_writing()


def test_captures_that_agree_in_time_and_steps_are_two_snapshots(tmp_path, arena):
    with open_store(tmp_path) as store:

        async def work():
            persister = Persister(store, KeySigner(), lambda _: None)
            persister.set_arena(arena)
            infos = []
            for seq, kind in ((1, "hot"), (2, "hot"), (3, "cold")):
                slot = arena.writable()
                capture(slot, seq, value=7, kind=kind)
                await persister.settle()
                infos.append(await persister.durable(seq, 10))
            return infos

        infos = asyncio.run(work())
        assert [(info.seq, info.kind) for info in infos] == [(1, "hot"), (2, "hot"), (3, "cold")]
        assert len({info.snapshot_id for info in infos}) == len(store.snapshots()) == 3


def test_what_a_daemon_committed_before_it_died_is_not_written_twice(tmp_path, arena):
    signer = KeySigner()
    with open_store(tmp_path) as store:
        capture(arena.slots[0], 1, value=3)
        (first,) = written(store, Persister(store, signer, lambda _: None), arena, 1)
        capture(arena.slots[0], 1, value=3)  # as a daemon leaves it that dies between the commit and HELD
        assert arena.slots[0].take()
        (again,) = written(store, Persister(store, signer, lambda _: None), arena, 1)
        assert again.snapshot_id == first.snapshot_id
        assert len(store.snapshots()) == 1
        assert arena.slots[0].state is SlotState.HELD


def test_what_a_daemon_was_reading_and_had_not_committed_is_written(tmp_path, arena):
    signer = KeySigner()
    with open_store(tmp_path) as store:
        capture(arena.slots[0], 1, value=3)
        written(store, Persister(store, signer, lambda _: None), arena, 1)
        capture(arena.slots[1], 2, value=3)  # the same time and steps
        assert arena.slots[1].take()
        (second,) = written(store, Persister(store, signer, lambda _: None), arena, 2)
        assert second.seq == 2
        assert len(store.snapshots()) == 2
        with store.open(second.snapshot_id) as source:
            source.verify()
            assert check_one_step(source) == 3
