"""The policy alone, on made-up listings, and then with a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.errors import StoreError
from hotswarm.ids import NodeId, SnapshotId
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from support.snapshots import FakeClock
from support.stores import check_holds, leftovers, small_store, write


def info(number, kind="hot", outer=0, complete=True, own=True, outer_digest=b"d"):
    return SnapshotInfo(
        snapshot_id=SnapshotId(f"{number:032x}"), kind=kind, run="r", node=NodeId("0" * 40), label="", seq=number,
        time_ms=0, outer_step=outer, inner_step=0, training_step=0, outer_digest=outer_digest, arch=b"", bytes=10,
        stored_bytes=10, path=Path("x"), complete_sections=frozenset({"inner"} if complete else ()),
        all_sections=frozenset({"inner"}), pinned=False, own=own,
    )  # fmt: skip


def doomed(policy, infos, protected=(), packs=None):
    packs = packs or {one.snapshot_id: {one.snapshot_id: 10} for one in infos}
    return [int(name, 16) for name in policy.doomed(infos, {f"{n:032x}" for n in protected}, packs)]


def test_the_newest_of_each_kind_stay():
    infos = [
        info(n, kind) for n, kind in enumerate(["hot", "cold", "hot", "recovery", "cold", "hot", "recovery", "hot"])
    ]
    assert doomed(Retention(max_hot=2, max_cold=1, max_recovery=1), infos) == [0, 1, 2, 3]


def test_protected_ones_stay():
    assert doomed(Retention(max_hot=1), [info(n) for n in range(5)], protected=[0, 2]) == [1, 3]


def test_each_model_is_counted_by_itself_and_keeps_its_newest():
    def of(number, arch, **more):
        return replace(info(number, **more), arch=arch)

    infos = [of(n, b"old") for n in range(6)] + [of(n, b"new") for n in range(6, 10)]
    assert doomed(Retention(max_hot=3), infos) == [0, 1, 2, 6]
    further_on = [of(n, b"new") for n in range(3)] + [of(n, b"old") for n in range(3, 9)]  # by counters, not by time
    assert doomed(Retention(max_hot=2), further_on) == [0, 3, 4, 5, 6]
    packs = {one.snapshot_id: {one.snapshot_id: 10} for one in infos}
    assert doomed(Retention(max_hot=3, max_bytes=10), infos, packs=packs) == [0, 1, 2, 6, 3, 4, 7, 8]  # 5 and 9 stay
    mixed = [of(0, b"old"), of(1, b"old", complete=False), of(2, b"new")]
    assert doomed(Retention(max_hot=0), mixed) == [1]


def test_a_fetched_one_counts_as_restorable_when_its_shared_part_is_here():
    def fetched(number, *here):
        both = frozenset({"outer", "inner", "private"})
        return replace(info(number, "recovery", own=False), all_sections=both, complete_sections=frozenset(here))

    assert [fetched(1, *here).restorable for here in (("outer",), ("inner",), ())] == [True, False, False]
    infos = [info(0), info(1), fetched(2, "outer"), fetched(3, "inner"), fetched(4)]
    assert doomed(Retention(max_hot=0, max_recovery=0), infos) == [0, 3, 4]


def test_the_newest_complete_one_stays_even_when_newer_ones_are_not_complete():
    infos = [info(0), info(1), info(2, complete=False), info(3, complete=False)]
    assert doomed(Retention(max_hot=1), infos) == [0, 2]
    assert doomed(Retention(max_hot=0), infos) == [0, 2, 3]


def test_the_newest_own_one_stays_beside_fetched_ones():
    infos = [info(0), info(1), info(2, "recovery", own=False), info(3, "recovery", own=False)]
    assert doomed(Retention(max_hot=0, max_recovery=0), infos) == [0, 2]


def test_the_round_before_is_kept_besides():
    def held(number, outer, kind="hot", here=("inner", "outer")):
        both = frozenset({"inner", "outer"})
        return replace(info(number, kind, outer=outer), all_sections=both, complete_sections=frozenset(here))

    infos = [held(n, 2) for n in range(2)] + [held(n, 3) for n in range(2, 4)] + [held(n, 4) for n in range(4, 8)]
    assert doomed(Retention(max_hot=1), infos) == [0, 1, 2, 4, 5, 6]
    assert doomed(Retention(max_hot=3), infos) == [0, 1, 2, 4]
    assert doomed(Retention(max_hot=5), infos) == [0, 1, 2], "the fifth has it already"
    assert doomed(Retention(max_hot=1), infos, protected=[2]) == [0, 1, 3, 4, 5, 6], "the protected one has it already"
    assert sorted(doomed(Retention(max_hot=2, max_bytes=20), infos)) == [0, 1, 2, 3, 4, 5], "not against the quota"
    lacking = [*infos[:3], held(3, 3, here=("inner",)), *infos[4:]]
    assert doomed(Retention(max_hot=1), lacking) == [0, 1, 3, 4, 5, 6]
    fetched = [held(0, 3, "recovery"), held(1, 3), held(2, 4), held(3, 4)]
    assert doomed(Retention(max_hot=1), fetched) == [1, 2], "a fetched one serves as well"
    plain = [info(n, outer=n, outer_digest=None) for n in range(4)]
    assert doomed(Retention(max_hot=1), plain) == [0, 1, 2]


def test_the_last_state_of_another_model_is_not_pushed_out():
    infos = [replace(info(n), arch=bytes([n // 3]), time_ms=n) for n in range(15)]
    assert doomed(Retention(max_hot=2), infos) == [0, 3, 6, 9, 12]
    quota = doomed(Retention(max_hot=2, max_bytes=20), infos)
    assert sorted(quota) == [0, 1, 3, 4, 6, 7, 9, 10, 12, 13], "the newest of each stays, whatever the quota says"


def test_a_training_that_begins_again_in_an_old_folder_keeps_its_new_snapshots(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=2)) as store:
        for step in (1000, 1001, 1002):
            write(store, step, outer=100, outer_step=100)
        for step in (1, 2, 3):
            info = write(store, step, outer=step, outer_step=0)
            assert info.snapshot_id in {one.snapshot_id for one in store.snapshots()}
        assert [one.training_step for one in store.snapshots()] == [2, 3, 1002]  # and the newest by steps stays
        assert leftovers(store) == set()
        store.retention = Retention(max_hot=2, max_bytes=1)
        store.retain()
        assert [one.training_step for one in store.snapshots()] == [3, 1002]


def test_bytes_count_each_pack_once_and_the_oldest_go_first():
    infos = [info(n) for n in range(4)]
    packs = {one.snapshot_id: {"shared": 100, one.snapshot_id: 10} for one in infos}
    for limit, gone in ((140, []), (139, [0]), (129, [0, 1]), (119, [0, 1, 2]), (1, [0, 1, 2])):
        assert doomed(Retention(max_bytes=limit), infos, packs=packs) == gone
    assert doomed(Retention(max_bytes=1), infos, protected=[1], packs=packs) == [0, 2]


LISTINGS = st.lists(
    st.tuples(st.sampled_from(["hot", "cold", "recovery"]), st.integers(0, 3), st.booleans(), st.booleans()),
    max_size=12,
)


@given(LISTINGS, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.none() | st.integers(0, 100), st.data())
def test_whatever_there_is(listing, hot, cold, recovery, max_bytes, data):
    infos = [info(n, kind, outer, complete, kind != "recovery") for n, (kind, outer, complete, _) in enumerate(listing)]
    infos.sort(key=lambda one: one.order_key)
    protected = {one.snapshot_id for one, (*_, keep) in zip(infos, listing, strict=True) if keep}
    policy = Retention(hot, cold, recovery, max_bytes)
    packs = {one.snapshot_id: {one.snapshot_id: 10} for one in infos}
    gone = policy.doomed(infos, protected, packs)
    assert not protected & set(gone)
    kept = [one for one in infos if one.snapshot_id not in gone]
    complete = [one for one in infos if one.complete]
    if complete:
        assert complete[-1] in kept
        limits = {"hot": hot, "cold": cold, "recovery": recovery}
        extra = len(protected) + 3
        for kind, limit in limits.items():
            assert sum(one.kind == kind for one in kept) <= limit + extra
    if max_bytes is not None:
        assert 10 * len(kept) <= max(max_bytes, 10 * (len(protected) + 3))
    again = policy.doomed(kept, protected, packs)
    assert again == []


def test_with_a_store_exactly_n_are_left_and_load(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=2, max_cold=1)) as store:
        for step in range(6):
            write(store, step)
            write(store, step, kind="cold")
        left = store.snapshots()
        assert [(one.kind, one.training_step) for one in left] == [("hot", 4), ("hot", 5), ("cold", 5)]
        for one in left:
            check_holds(store, one, one.training_step)
        assert leftovers(store) == set()


def test_pins_hold_across_restarts(tmp_path):
    with small_store(tmp_path) as store:
        pinned = write(store, 0)
        store.pin(pinned.snapshot_id)
        assert store.info(pinned.snapshot_id).pinned
    with small_store(tmp_path) as store:
        for step in range(1, 8):
            write(store, step)
        check_holds(store, pinned, 0)
        with pytest.raises(StoreError, match="pinned"):
            store.delete(pinned.snapshot_id)
        store.unpin(pinned.snapshot_id)
        store.retain()
        assert [one.training_step for one in store.snapshots()] == [5, 6, 7]
        assert [path for path in store.folders.snapshots.iterdir() if path.suffix == ".pin"] == []


def test_a_pin_goes_with_its_snapshot(tmp_path):
    with small_store(tmp_path) as store:
        first = write(store, 0)
        store.pin(first.snapshot_id)
        first.path.unlink()
        store.scan()
        assert [path for path in store.folders.snapshots.iterdir() if path.suffix == ".pin"] == []


def test_what_is_read_stays_until_it_is_closed(tmp_path):
    with small_store(tmp_path) as store:
        first = write(store, 0)
        source, second = store.open(first.snapshot_id), store.open(first.snapshot_id)
        for step in range(1, 8):
            write(store, step)
        source.verify()
        source.close()
        store.retain()
        assert first.snapshot_id in {one.snapshot_id for one in store.snapshots()}
        with pytest.raises(StoreError, match="being read"):
            store.delete(first.snapshot_id)
        second.close()
        assert store.retain() == [first.snapshot_id]


def test_leases_hold_for_their_time_and_are_renewed_up_to_ten_minutes(tmp_path):
    clock = FakeClock()
    with small_store(tmp_path, clock=clock) as store:
        first = write(store, 0)
        assert store.lease(first.snapshot_id, 60) == 60
        for step in range(1, 5):
            write(store, step)
        clock.now += 59
        assert store.retain() == []
        assert store.lease(first.snapshot_id, 60) == 60
        clock.now += 59
        assert store.retain() == []
        clock.now += 2
        assert store.retain() == [first.snapshot_id]


def test_a_lease_ends_ten_minutes_after_it_began_however_often_it_is_renewed(tmp_path):
    clock = FakeClock()
    with small_store(tmp_path, clock=clock) as store:
        first = write(store, 0)
        granted = []
        for _ in range(12):
            granted.append(store.lease(first.snapshot_id, 60))
            clock.now += 59
        assert granted[:10] == [60] * 10
        assert granted[10:] == [10, 0]
        clock.now += 700
        assert store.lease(first.snapshot_id, 60) == 60


def test_two_snapshots_are_leased_at_most(tmp_path):
    clock = FakeClock()
    with small_store(tmp_path, clock=clock) as store:
        one, two, three = (write(store, step).snapshot_id for step in range(3))
        assert store.lease(one, 60) == 60
        assert store.lease(two, 60) == 60
        assert store.lease(three, 60) == 0
        assert store.lease(two, 60) == 60
        clock.now += 61
        assert store.lease(three, 60) == 60


def test_a_byte_quota_holds_and_never_takes_the_last(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=50, max_bytes=150_000)) as store:
        for step in range(9):
            write(store, step, outer=step // 3)
            used = sum(path.stat().st_size for path in store.folders.packs.iterdir())
            assert used <= 150_000
        assert 1 < len(store.snapshots()) < 9
        store.retention = Retention(max_hot=50, max_bytes=1)
        store.retain()
        (last,) = store.snapshots()
        check_holds(store, last, 8, outer=2)
