"""Retired packs are written over, and never while anybody may still read them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from hotswarm.store.source import FileSource
from hotswarm.store.spare import MIN_SPARE_BYTES
from support.snapshots import raw, read_back, state
from support.stores import check_holds, leftovers, write

SIZE = MIN_SPARE_BYTES // 4 // 2 + 100  # two tensors of it pass the limit


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=1)) as made:
        yield made


def spares(store):
    return {path.name: path.stat().st_ino for path in store.folders.spare.iterdir()}


def packs(store):
    return {path.stat().st_ino for path in store.folders.packs.iterdir()}


def test_a_retired_pack_is_written_over_and_holds_the_new_bytes(store):
    write(store, 1, size=SIZE)
    write(store, 2, size=SIZE)
    inode = spares(store)["inner.pack"]
    info = write(store, 3, size=SIZE)
    assert inode in packs(store)
    check_holds(store, info, 3, size=SIZE)
    smaller = write(store, 4, size=SIZE * 2 // 3)
    check_holds(store, smaller, 4, size=SIZE * 2 // 3)
    assert leftovers(store) == set()


def test_a_pack_takes_no_more_room_than_its_chunks(store):
    """Room is found for the whole section in advance, and a spare may be larger: both are given back."""
    sizes = []
    for size, outer in ((SIZE * 2, None), (SIZE, None), (SIZE * 2, 3), (SIZE, None)):
        info = write(store, 3, size=size, outer=outer, outer_step=3)
        with store.open(info.snapshot_id) as source:
            (inner,) = (store.folders.packs / name for name in source.stored.packs() if name.startswith("inner"))
        shared = size * 4 if outer else 0  # parameters that are the outer ones
        used = size * 8 - shared
        assert used <= inner.stat().st_size <= used + 2 * 4096
        assert inner.stat().st_blocks * 512 <= used + (64 << 10)
        sizes.append(inner.stat().st_ino)
        check_holds(store, info, 3, size=size, outer=outer)
    assert len(set(sizes)) < len(sizes)  # one was written over


def test_a_pack_that_this_process_reads_is_never_written_over(store):
    info = write(store, 1, size=SIZE)
    source = store.open(info.snapshot_id)
    for step in range(2, 6):
        write(store, step, size=SIZE)
    source.verify()
    assert read_back(source) == raw(state(1, SIZE))
    source.close()


def test_a_pack_whose_descriptor_went_elsewhere_is_never_written_over(store):
    info = write(store, 1, size=SIZE)
    with store.open(info.snapshot_id) as source:
        stored, names, fds = source.export()
        elsewhere = FileSource.of_export(stored, names, [os.dup(fd) for fd in fds])
    for step in range(2, 6):
        write(store, step, size=SIZE)
    assert info.snapshot_id not in {one.snapshot_id for one in store.snapshots()}
    elsewhere.verify()
    assert read_back(elsewhere) == raw(state(1, SIZE))
    elsewhere.close()


def test_a_pack_that_another_process_reads_is_never_written_over(store, tmp_path):
    write(store, 1, size=SIZE)
    script = (
        "import sys; from pathlib import Path; from hotswarm.store.files import FileStore\n"
        "store = FileStore(Path(sys.argv[1])); source = store.open(store.newest(False).snapshot_id)\n"
        "print('open', flush=True); sys.stdin.readline(); source.verify(); print('good', flush=True)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout.readline() == "open\n"
        for step in range(2, 6):
            write(store, step, size=SIZE)
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "good\n"
    finally:
        reader.kill()
        reader.communicate()


def test_spare_packs_do_not_count_against_a_quota_because_there_are_none(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=1, max_bytes=10 * SIZE * 4)) as store:
        for step in range(4):
            write(store, step, size=SIZE)
        assert spares(store) == {}


def test_there_is_at_most_one_spare_per_section(store):
    for step in range(6):
        write(store, step, outer=100 + step, size=SIZE)
    assert set(spares(store)) == {"inner.pack", "outer.pack"}
