"""Writing, reading back, sharing, and what another process finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from hotswarm.errors import ConfigError, ManifestError, StoreError
from hotswarm.snapshot.chunks import CHUNK_BYTES
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from hotswarm.store.source import FileSource, open_manifest_file
from support.snapshots import KeySigner, draft, raw, read_back, state
from support.stores import SIGNER, check_holds, leftovers, small_store, write

MIB_OF_FLOATS = CHUNK_BYTES // 4


@pytest.mark.parametrize("size", [0, 1, 1000, MIB_OF_FLOATS, 3 * MIB_OF_FLOATS + 5])
def test_what_is_written_is_read_back(tmp_path, size):
    with FileStore(tmp_path) as store:
        info = write(store, 7, outer=2, size=size)
        check_holds(store, info, 7, outer=2, size=size)
        assert info.complete
        assert (info.outer_step, info.training_step, info.kind, info.own, info.pinned) == (2, 7, "hot", True, False)
        assert info.label == "test/label"
        assert info.node == SIGNER.node_id
        assert info.outer_digest == store.signed(info.snapshot_id).manifest.outer_digest
        assert info.path.is_file()
        assert store.health == []


def test_every_range_of_a_stream_reads_as_the_stream_has_it(tmp_path):
    rng = np.random.default_rng(4)
    trees = {"inner": {"model": {"w": rng.random(700_001, dtype=np.float32)}, "buffers": {"n": np.arange(999)}}}
    trees["inner"]["exp_avg"] = {"w": rng.random(300_000, dtype=np.float32)}
    made, streams = draft(**trees)
    whole = bytes(streams["inner"])
    with FileStore(tmp_path) as store, store.open(store.write(made, streams, SIGNER).snapshot_id) as source:
        edges = sorted({0, len(whole)} | {b + d for s in source.manifest.sections["inner"].layout.chunks
                                          for b in (s.offset, s.end) for d in (-1, 0, 1)})  # fmt: skip
        edges = [edge for edge in edges if 0 <= edge <= len(whole)]
        for start in edges:
            for end in edges[edges.index(start) :]:
                out = bytearray(b"\xee" * (end - start))
                source.read_into("inner", start, memoryview(out))
                assert out == whole[start:end]
        for bad in ((-1, 1), (len(whole), 1)):
            with pytest.raises(ValueError, match="outside"):
                source.read_into("inner", bad[0], memoryview(bytearray(bad[1])))


def test_ten_writes_in_one_second_are_ten_snapshots_and_retention_leaves_exactly_n(tmp_path):
    clock_before = time.monotonic()
    with small_store(tmp_path) as store:
        infos = [write(store, 5) for _ in range(10)]
        assert time.monotonic() - clock_before < 5
        assert len({info.snapshot_id for info in infos}) == 10
        assert len({info.path for info in infos}) == 10
        assert [info.seq for info in infos] == list(range(1, 11))
        left = store.snapshots()
        assert [info.snapshot_id for info in left] == [info.snapshot_id for info in infos[-3:]]
        for info in left:
            check_holds(store, info, 5)
        assert leftovers(store) == set()


def test_sequence_numbers_go_on_after_a_restart_and_after_deletion(tmp_path):
    with small_store(tmp_path) as store:
        for step in range(5):
            write(store, step)
        store.delete(store.snapshots()[-1].snapshot_id)
        assert write(store, 1).seq == 6
    with small_store(tmp_path) as store:
        assert write(store, 0).seq == 7


def test_a_larger_sequence_number_of_the_trainer_is_kept(tmp_path):
    with FileStore(tmp_path) as store:
        made, streams = draft(**state(1), seq=40)
        assert store.write(made, streams, SIGNER).seq == 40
        assert store.write(made, streams, SIGNER).seq == 41


def test_order_is_by_outer_step_then_training_step_then_sequence(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=9)) as store:
        for outer, step in ((2, 9), (1, 50), (2, 9), (2, 3), (10, 0)):
            write(store, step, outer_step=outer)
        order = [(info.outer_step, info.training_step, info.seq) for info in store.snapshots()]
        assert order == [(1, 50, 2), (2, 3, 4), (2, 9, 1), (2, 9, 3), (10, 0, 5)]


def test_within_a_round_the_outer_section_is_stored_once(tmp_path):
    size = 2 * MIB_OF_FLOATS
    with FileStore(tmp_path) as store:
        first = write(store, 1, outer=4, size=size, outer_step=4)
        second = write(store, 2, outer=4, size=size, outer_step=4)
        assert first.bytes == second.bytes
        assert first.stored_bytes - second.stored_bytes > 1.9 * CHUNK_BYTES
        third = write(store, 3, outer=5, size=size, outer_step=5)
        assert third.stored_bytes > 0.99 * first.stored_bytes
        for info, fill, outer in ((first, 1, 4), (second, 2, 4), (third, 3, 5)):
            check_holds(store, info, fill, outer=outer, size=size)


def test_at_a_round_boundary_live_parameters_are_stored_once_with_the_outer_ones(tmp_path):
    size = 3 * MIB_OF_FLOATS + 11
    with FileStore(tmp_path) as store:
        info = write(store, 4, outer=4, size=size)
        params = momentum = exp_avg = size * 4
        assert info.bytes == pytest.approx(2 * params + momentum + exp_avg, rel=1e-3)
        assert info.stored_bytes == pytest.approx(params + momentum + exp_avg, rel=1e-3)
        check_holds(store, info, 4, outer=4, size=size)


def test_a_shared_outer_pack_outlives_the_snapshot_that_wrote_it(tmp_path):
    with FileStore(tmp_path, retention=Retention(max_hot=1)) as store:
        for fill in range(4):
            info = write(store, fill, outer=9, outer_step=9)
        assert len(store.snapshots()) == 1
        check_holds(store, info, 3, outer=9)
        assert leftovers(store) == set()
        info = write(store, 4, outer=10, outer_step=10)
        check_holds(store, info, 4, outer=10)
        assert [one.training_step for one in store.snapshots()] == [3, 4]  # the round before stays servable
        write(store, 5, outer=11, outer_step=11)
        assert [one.training_step for one in store.snapshots()] == [4, 5]
        kinds = [path.name.split("-")[0] for path in store.folders.packs.iterdir()]
        assert sorted(kinds) == ["inner", "inner", "outer", "outer", "private", "private"]


def test_an_outer_section_of_another_round_is_never_shared(tmp_path):
    with FileStore(tmp_path) as store:
        write(store, 1, outer=4, outer_step=4)
        write(store, 2, outer=4, outer_step=5)
        assert sum(path.name.startswith("outer") for path in store.folders.packs.iterdir()) == 2


def test_a_new_process_finds_serves_and_retires_what_lies_there(tmp_path):
    with small_store(tmp_path) as store:
        written = [write(store, step).snapshot_id for step in range(3)]
    script = (
        "import json, sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from support.stores import *\n"
        "store = small_store(Path(sys.argv[1]))\n"
        "found = [i.snapshot_id for i in store.snapshots()]\n"
        "check_holds(store, store.newest(), 2)\n"
        "with store: write(store, 3)\n"
        "print(json.dumps([found, [i.snapshot_id for i in store.snapshots()], sorted(leftovers(store))]))\n"
    )
    tests = os.path.dirname(os.path.dirname(__file__))
    out = subprocess.run([sys.executable, "-c", script, tmp_path, tests], capture_output=True, text=True, check=True)
    found, after, left = json.loads(out.stdout)
    assert found == written
    assert after[:2] == written[1:]
    assert len(after) == 3
    assert left == []
    store = small_store(tmp_path)
    assert [info.snapshot_id for info in store.snapshots()] == after
    check_holds(store, store.newest(), 3)


def test_two_stores_of_one_process_see_each_other(tmp_path):
    with small_store(tmp_path) as one, small_store(tmp_path) as two:
        info = write(one, 1)
        assert two.newest() == info
        with two.open(info.snapshot_id) as source:
            for step in range(2, 8):
                write(one, step)
            assert info.snapshot_id in {i.snapshot_id for i in two.snapshots()}
            assert read_back(source) == raw(state(1))
        write(two, 9)
        assert info.snapshot_id not in {i.snapshot_id for i in one.snapshots()}


def test_runs_lie_apart(tmp_path):
    with FileStore(tmp_path, "a") as a, FileStore(tmp_path, "b") as b:
        made, streams = draft(run="a", **state(1))
        info = a.write(made, streams, SIGNER)
        assert b.snapshots() == []
        (b.folders.snapshots / info.path.name).write_bytes(info.path.read_bytes())
        assert b.snapshots() == []
        assert "run 'a'" in b.health[0]


@pytest.mark.parametrize("run", ["", "..", "a/b", "x" * 65, "a\0"])
def test_run_names_that_would_leave_the_folder_are_refused(tmp_path, run):
    with pytest.raises(ConfigError):
        FileStore(tmp_path, run)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_created_before_it_is_opened_for_writing(tmp_path):
    store = FileStore(tmp_path / "state")
    assert store.snapshots() == []
    assert store.newest() is None
    with pytest.raises(StoreError, match="reading only"):
        write(store, 1)
    assert not (tmp_path / "state").exists()


def test_files_and_folders_are_for_this_user_only(tmp_path):
    with FileStore(tmp_path / "state") as store:
        write(store, 1, outer=1)
        store.pin(store.snapshots()[0].snapshot_id)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "state").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_draft_that_cannot_be_written_changes_nothing(tmp_path):
    with FileStore(tmp_path) as store:
        made, streams = draft(**state(1))
        with pytest.raises(StoreError, match="stream of"):
            store.write(made, {"inner": streams["inner"][:-1], "private": streams["private"]}, SIGNER)
        with pytest.raises(ManifestError):
            store.write(made, streams, SIGNER, kind="warm")
        assert leftovers(store) == set()
        assert store.snapshots() == []


def test_the_kind_can_be_set_at_writing(tmp_path):
    with FileStore(tmp_path) as store:
        info = write(store, 1, kind="cold")
        assert info.kind == "cold"
        assert store.signed(info.snapshot_id).manifest.kind == "cold"


def test_a_source_goes_to_another_owner_by_its_descriptors(tmp_path):
    with FileStore(tmp_path) as store:
        info = write(store, 3, outer=2)
        with store.open(info.snapshot_id) as source:
            stored, names, fds = source.export()
            other = FileSource.of_export(stored, names, [os.dup(fd) for fd in fds])
        with other:
            other.verify()
            assert read_back(other) == raw(state(3, outer=2))
        with pytest.raises(ManifestError, match="did not come along"):
            FileSource.of_export(stored, names[1:], [os.open(os.devnull, os.O_RDONLY) for _ in names[1:]])


def test_a_closed_source_says_so(tmp_path):
    with FileStore(tmp_path) as store:
        source = store.open(write(store, 3).snapshot_id)
        source.close()
        source.close()
        with pytest.raises(StoreError, match="closed"):
            source.chunk("inner", 0)


def test_a_manifest_file_opens_by_its_path(tmp_path):
    with FileStore(tmp_path) as store:
        info = write(store, 3, outer=2)
    with open_manifest_file(info.path) as source:
        assert read_back(source) == raw(state(3, outer=2))
    with pytest.raises(StoreError, match="no snapshot at"):
        open_manifest_file(info.path.with_name("x.manifest"))


def test_an_unknown_snapshot_is_named(tmp_path):
    with FileStore(tmp_path) as store:
        for call in (store.open, store.info, store.verify, store.pin, store.delete):
            with pytest.raises(StoreError, match="no snapshot 00ff"):
                call("00ff")


def test_another_signer_does_not_disturb_what_is_there(tmp_path):
    with FileStore(tmp_path) as store:
        first = write(store, 1)
        made, streams = draft(**state(2))
        second = store.write(made, streams, KeySigner())
        assert first.node != second.node
        assert len(store.snapshots()) == 2
