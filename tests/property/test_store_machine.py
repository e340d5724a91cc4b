"""A store against a dict: whatever is written, pinned, read, deleted, damaged or reopened, in any order."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotswarm.errors import StoreError
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from support.faults import CountedOps, failing_at
from support.snapshots import raw, read_back, state
from support.stores import leftovers, write

SIZE = 1500
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class StoreMachine(RuleBasedStateMachine):
    """`model` maps ids to (fill, outer) of the snapshots that must be there, in order of writing."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="hs-machine-", dir=FAST))
        self.policy = Retention(max_hot=3, max_cold=1)
        self.store = FileStore(self.root, retention=self.policy).open_for_writing()
        self.model, self.step, self.outer = {}, 0, 0
        self.pinned, self.reading = [], []

    def pick(self, number):
        return list(self.model)[number % len(self.model)]

    def settle(self):
        """Drop from the model what retention may have taken, and check that it was allowed to."""
        there = {info.snapshot_id for info in self.store.snapshots()}
        protected = set(self.pinned) | {source.snapshot_id for source in self.reading}
        assert there <= self.model.keys()
        assert protected <= there
        if self.model:
            assert list(self.model)[-1] in there
        self.model = {key: value for key, value in self.model.items() if key in there}
        hot = [key for key in there - protected if self.model[key][2] == "hot"]
        assert len(hot) <= self.policy.max_hot + 1

    @rule(new_round=st.booleans(), kind=st.sampled_from(["hot", "hot", "cold"]))
    def write(self, new_round, kind):
        self.step += 1
        self.outer += new_round
        info = write(self.store, self.step, outer=self.outer, size=SIZE, kind=kind)
        self.model[info.snapshot_id] = (self.step, self.outer, kind)
        self.settle()

    @rule(number=st.integers(0, 40))
    def fail(self, number):
        self.store._ops = failing_at(number)
        self.step += 1
        try:
            info = write(self.store, self.step, outer=self.outer, size=SIZE)
        except StoreError:
            assert self.store.health
        else:
            self.model[info.snapshot_id] = (self.step, self.outer, "hot")
        self.store._ops = CountedOps()
        self.write(new_round=False, kind="hot")  # the next one succeeds, and the report is clean again

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 100))
    def pin(self, number):
        self.store.pin(self.pick(number))
        if self.pick(number) not in self.pinned:
            self.pinned.append(self.pick(number))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        self.store.unpin(self.pinned.pop(0))

    @precondition(lambda self: self.model and len(self.reading) < 3)
    @rule(number=st.integers(0, 100))
    def open(self, number):
        self.reading.append(self.store.open(self.pick(number)))

    @precondition(lambda self: self.reading)
    @rule()
    def close(self):
        source = self.reading.pop(0)
        fill, outer, _ = self.model[source.snapshot_id]
        assert read_back(source) == raw(state(fill, SIZE, outer))
        source.close()

    @precondition(lambda self: len(self.model) > 1)
    @rule(number=st.integers(0, 100))
    def delete(self, number):
        key = self.pick(number)
        free = key not in self.pinned and key not in {source.snapshot_id for source in self.reading}
        try:
            self.store.delete(key)
            assert free
            del self.model[key]
        except StoreError:
            assert not free

    @rule()
    def reopen(self):
        while self.reading:
            self.close()
        self.store.close()
        self.store = FileStore(self.root, retention=self.policy).open_for_writing()
        assert {info.snapshot_id for info in self.store.snapshots()} == self.model.keys()

    @invariant()
    def all_is_there_and_nothing_else(self):
        for info in self.store.snapshots():
            fill, outer, kind = self.model[info.snapshot_id]
            assert (info.training_step, info.outer_step, info.kind) == (fill, outer, kind)
            assert info.pinned == (info.snapshot_id in self.pinned)
            with self.store.open(info.snapshot_id) as source:
                source.verify()
        assert leftovers(self.store) == set()
        assert self.store.health == []

    def teardown(self):
        for source in self.reading:
            source.close()
        self.store.close()
        shutil.rmtree(self.root)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
