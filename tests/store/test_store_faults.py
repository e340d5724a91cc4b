"""Each call by which the store changes the disk fails once, in turn: earlier snapshots stay, nothing leaks."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from hotswarm.errors import StoreError
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.files import FileStore
from support.faults import CountedOps, HalfWrites, failing_at
from support.snapshots import draft, state
from support.stores import SIGNER, check_holds, leftovers, small_store, write


def calls_of(job, root, prepare):
    """The calls that `job` makes when all goes well."""
    with small_store(root) as store:
        prepare(store)
    with small_store(root) as store:
        store._ops = ops = CountedOps()
        job(store)
    return ops.calls


def fetch(store, donor_root):
    """Fetch everything of the donor's newest snapshot, through partial sections."""
    donor = FileStore(donor_root)
    info = donor.newest()
    signed = SignedManifest.parse(donor.signed(info.snapshot_id).to_bytes())
    with donor.open(info.snapshot_id) as source:
        partials = {}
        for name, entry in signed.manifest.sections.items():
            partials[name] = store.partial(entry)
            for index in partials[name].missing():
                partials[name].put(index, source.chunk(name, index))
    return store.add_fetched(signed, partials)


JOBS = {
    "write": (
        lambda store, donor: write(store, 9, outer=3),
        lambda store: [write(store, n, outer=3) for n in range(2)],
    ),
    "write and retire": (
        lambda store, donor: write(store, 9, outer=4),
        lambda store: [write(store, n, outer=n) for n in range(3)],
    ),
    "fetch": (fetch, lambda store: [write(store, n) for n in range(2)]),
}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", JOBS)
def test_any_one_call_may_fail(fast_dir, name, code):
    job, prepare = JOBS[name]
    with small_store(fast_dir / "donor") as donor:
        write(donor, 50, outer=7)
    calls = calls_of(lambda store: job(store, fast_dir / "donor"), fast_dir / "dry", prepare)
    assert {"open", "write", "sync", "rename", "sync_dir"} <= set(calls)
    for number, call in enumerate(calls):
        root = fast_dir / f"{number}"
        with small_store(root) as store:
            prepare(store)
            before = store.snapshots()
            store._ops = failing_at(number, code)
            try:
                done = job(store, fast_dir / "donor")
            except StoreError as error:
                done, said = None, str(error)
            assert done or store.health or name == "fetch"  # opening a partial is not the store's own write
            store._ops = CountedOps()
            ids = {info.snapshot_id for info in store.snapshots()}
            if done is None:
                assert os.strerror(code) in said
                assert ids == {info.snapshot_id for info in before}, f"call {number}: {call}"
            else:
                assert done.snapshot_id in ids
            for info in store.snapshots():
                store.verify(info.snapshot_id)
            if done is None:
                assert leftovers(store) == set(), f"call {number}: {call}"
            again = job(store, fast_dir / "donor")
            store.verify(again.snapshot_id)
            assert store.health == []
            assert leftovers(store) == set(), f"call {number}: {call}"


def test_when_undoing_fails_too_the_next_start_sweeps(fast_dir):
    prepare = lambda store: [write(store, n, outer=3) for n in range(2)]  # noqa: E731
    calls = calls_of(lambda store: write(store, 9, outer=4), fast_dir / "dry", prepare)
    for number in range(len(calls)):
        root = fast_dir / f"{number}"
        with small_store(root) as store:
            prepare(store)
            store._ops = failing_at(number, until=1 << 30)
            try:
                write(store, 9, outer=4)
            except StoreError:
                pass
            for info in store.snapshots():
                store.verify(info.snapshot_id)
        with small_store(root) as store:
            assert leftovers(store) == set()
            assert len(store.snapshots()) in (2, 3)
            for info in store.snapshots():
                store.verify(info.snapshot_id)


def test_the_disk_fills_up_in_the_middle_of_a_write(fast_dir):
    for room in (0, 1, 4096, 13_000, 24_000, 36_500):
        with small_store(fast_dir / f"{room}") as store:
            kept = write(store, 1)
            store._ops = HalfWrites(room)
            with pytest.raises(StoreError, match="No space left"):
                write(store, 2, outer=2)
            assert "No space left" in store.health[0]
            assert store.snapshots() == [kept]
            assert leftovers(store) == set()
            check_holds(store, kept, 1)
            store._ops = CountedOps()
            check_holds(store, write(store, 2, outer=2), 2, outer=2)
            assert store.health == []


def test_a_failing_retention_does_not_unmake_the_snapshot(fast_dir):
    with small_store(fast_dir) as store:
        for step in range(3):
            write(store, step)

        def before(number, name, target):
            if name == "unlink" and str(target).endswith(".manifest"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        store._ops = CountedOps(before)
        info = write(store, 3)
        check_holds(store, info, 3)
        assert len(store.snapshots()) == 4
        assert "retention" in store.health[0]
        store._ops = CountedOps()
        write(store, 4)
        assert len(store.snapshots()) == 3
        assert store.health == []


def test_a_real_file_system_that_is_full(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with small_store(tmp_path / "state") as store:
            kept = write(store, 1, size=100_000)
            made, streams = draft(**state(2, size=900_000))
            with pytest.raises(StoreError, match="No space left"):
                store.write(made, streams, SIGNER)
            assert store.snapshots() == [kept]
            assert leftovers(store) == set()
            check_holds(store, kept, 1, size=100_000)
            check_holds(store, write(store, 2, size=100_000), 2, size=100_000)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
