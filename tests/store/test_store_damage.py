"""Damage on disk is named, put aside, and an older snapshot is used."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import IntegrityError, ManifestError, StoreError
from hotswarm.store.damage import QUARANTINE_KEEP_S
from hotswarm.store.files import FileStore
from hotswarm.store.lock import read_lock
from hotswarm.store.placement import StoredManifest
from support.snapshots import draft, raw, read_back, state
from support.stores import SIGNER, as_a_new_process, check_holds, leftovers, place_of, small_store, write


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def packs_of(store, info):
    with store.open(info.snapshot_id) as source:
        return sorted(store.folders.packs / name for name in source.stored.packs())


def test_a_flipped_byte_anywhere_in_the_newest_is_named_and_the_older_one_is_used(tmp_path, caplog):
    rng = random.Random(8)
    for number in range(12):
        root = tmp_path / f"{number}"
        with small_store(root) as store:
            write(store, 1)
            newest = write(store, 2)
            files = [newest.path, *packs_of(store, newest)]
        path = files[number % len(files)]
        flip(path, rng.randrange(rng.choice([16, path.stat().st_size]) if path == newest.path else 16))
        caplog.clear()
        as_a_new_process()
        with small_store(root) as store:
            used = store.newest()
            check_holds(store, used, 1)
            assert newest.snapshot_id in caplog.text
            assert newest.snapshot_id in store.health[0]
            assert [info.training_step for info in store.snapshots()] == [1]
            assert {p.name for p in store.folders.quarantine.iterdir()} >= {newest.path.name}
            assert leftovers(store) == set()
        with small_store(root) as store:
            check_holds(store, store.newest(), 1)


def test_a_reader_without_the_lock_falls_back_too_and_moves_nothing(tmp_path):
    with small_store(tmp_path) as store:
        write(store, 1)
        newest = write(store, 2)
        flip(packs_of(store, newest)[0], 5)
    reader = FileStore(tmp_path)
    assert reader.newest().training_step == 1
    assert "chunk 0 of section 'inner'" in reader.health[0]
    assert newest.path.exists()


@pytest.mark.parametrize("where", ["manifest", "pack"])
def test_a_file_cut_at_any_length_is_noticed(tmp_path, where):
    for number, share in enumerate((0, 0.01, 0.5, 0.99, 1)):
        root = tmp_path / f"{number}"
        with small_store(root) as store:
            write(store, 1)
            newest = write(store, 2)
            path = newest.path if where == "manifest" else packs_of(store, newest)[0]
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(min(int(size * share), size - 1))
        with small_store(root) as store:
            assert store.newest().training_step == 1
            assert len(store.health) == 1
            assert len(store.snapshots()) == 1


def test_a_missing_pack_is_noticed(tmp_path):
    with small_store(tmp_path) as store:
        write(store, 1)
        newest = write(store, 2)
        packs_of(store, newest)[0].unlink()
    as_a_new_process()
    with small_store(tmp_path) as store:
        assert store.newest().training_step == 1
        assert "missing" in store.health[0]


def test_damage_in_a_shared_outer_pack_takes_all_its_snapshots_and_new_ones_do_not_share_it(tmp_path):
    with small_store(tmp_path) as store:
        write(store, 1, outer=1)
        newest = [write(store, step, outer=2) for step in (2, 3)][-1]
        outer = next(path for path in packs_of(store, newest) if path.name.startswith("outer"))
        flip(outer, 4097)
    as_a_new_process()
    with small_store(tmp_path) as store:
        added = write(store, 4, outer=2)
        check_holds(store, added, 4, outer=2)
        assert outer not in packs_of(store, added)
        assert store.newest() == added
        store.delete(added.snapshot_id)
        assert store.newest().training_step == 1
        assert [info.training_step for info in store.snapshots()] == [1]
        assert leftovers(store) == set()


def test_when_all_are_damaged_there_is_none(tmp_path):
    with small_store(tmp_path) as store:
        for step in range(3):
            flip(packs_of(store, write(store, step))[0], 9)
        assert store.newest() is None
        assert len(store.health) == 3
        assert store.newest(verify=False) is None
        check_holds(store, write(store, 5), 5)
        assert store.newest().training_step == 5


def test_reading_a_damaged_chunk_by_hand_names_section_and_chunk(tmp_path):
    with small_store(tmp_path) as store:
        info = write(store, 1, size=700_000)
        inner, offset = place_of(store, info, "inner", 1)
        flip(inner, offset + 3)
        with pytest.raises(IntegrityError, match="chunk 1 of section 'inner' does not match"):
            store.verify(info.snapshot_id)
        with store.open(info.snapshot_id) as source:
            source.verify(["private"])
            with inner.open("r+b") as file:
                file.truncate(offset + 1)
            with pytest.raises(IntegrityError, match="is cut short"):
                source.chunk("inner", 1)
            with pytest.raises(IntegrityError, match="is cut short"):
                source.read_into("inner", 0, memoryview(bytearray(2 << 20)))


def test_quarantine_is_bounded(tmp_path):
    with small_store(tmp_path) as store:
        for step in range(20):
            store.quarantine(write(store, step).snapshot_id, "by hand")
        assert len(list(store.folders.quarantine.iterdir())) <= 12
        assert store.snapshots() == []


def test_strange_files_are_left_alone(tmp_path):
    with small_store(tmp_path) as store:
        write(store, 1)
        strange = [store.folders.snapshots / "notes.txt", store.folders.packs / "notes.pack"]
        for path in strange:
            path.write_text("mine")
        store.scan()
        assert [path.read_text() for path in strange] == ["mine", "mine"]
        assert len(store.snapshots()) == 1


def test_links_are_not_followed(tmp_path):
    with small_store(tmp_path) as store:
        first, info = write(store, 1), write(store, 2)
        pack = packs_of(store, info)[0]
        elsewhere = tmp_path / "elsewhere"
        pack.rename(elsewhere)
        pack.symlink_to(elsewhere)
        assert store.newest() == first
        manifest = first.path.rename(tmp_path / "manifest")
        first.path.symlink_to(manifest)
    with small_store(tmp_path) as store:
        assert store.newest() is None


def test_a_pack_damaged_while_it_is_open_is_still_found(tmp_path):
    with small_store(tmp_path) as store:
        info = write(store, 1)
        source = store.open(info.snapshot_id)
        flip_in_place(packs_of(store, info)[0], 3)
        with pytest.raises(IntegrityError):
            source.verify()
        source.close()


def flip_in_place(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_manifest_under_another_name_is_refused(tmp_path):
    with small_store(tmp_path) as store:
        info = write(store, 1)
        other = info.path.with_name(info.path.name.replace("-hot-", "-cold-"))
        other.write_bytes(info.path.read_bytes())
        assert [i.snapshot_id for i in store.snapshots()] == [info.snapshot_id]
        assert "belong to" in store.health[0]
        assert not other.exists()


def test_nan_payloads_and_odd_bytes_survive(tmp_path):
    bits = np.random.default_rng(2).integers(0, 1 << 32, 9000, dtype=np.uint32)
    trees = {"inner": {"model": {"w": bits.view(np.float32)}}}
    made, streams = draft(**trees)
    with small_store(tmp_path) as store, store.open(store.write(made, streams, SIGNER).snapshot_id) as source:
        assert read_back(source) == raw(trees)
        with pytest.raises(StoreError):
            store.delete(source.snapshot_id)
    assert raw(state(1)) == raw(state(1))


def test_a_flipped_bit_anywhere_in_a_stored_manifest_is_noticed(tmp_path):
    with small_store(tmp_path) as store:
        data = bytearray(write(store, 1).path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        with pytest.raises(ManifestError, match="its own digest"):
            StoredManifest.parse(bytes(data))
        data[at] ^= 1 << at % 8
    StoredManifest.parse(bytes(data))


def test_the_packs_of_a_damaged_manifest_go_along_to_quarantine(tmp_path):
    for number, damage in enumerate(("flip", "cut", "empty")):
        root = tmp_path / f"{number}"
        with small_store(root) as store:
            write(store, 1)
            newest = write(store, 2)
            names = {path.name for path in packs_of(store, newest)}
        data = newest.path.read_bytes()
        if damage == "flip":
            flip(newest.path, len(data) - 40)
        else:
            newest.path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
        for _ in range(2):
            as_a_new_process()
            with small_store(root) as store:
                assert [one.training_step for one in store.snapshots()] == [1]
                assert leftovers(store) == set()
                assert {path.name for path in store.folders.quarantine.iterdir()} == {*names, newest.path.name}


def test_old_quarantine_is_cleared_away(tmp_path):
    with small_store(tmp_path) as store:
        store.quarantine(write(store, 1).snapshot_id, "by hand")
        for path in store.folders.quarantine.iterdir():
            stamp = path.stat().st_mtime - QUARANTINE_KEEP_S - 60
            os.utime(path, (stamp, stamp))
        store.scan()
        assert list(store.folders.quarantine.iterdir()) == []


def test_a_snapshot_of_a_newer_version_is_left_as_it_is(tmp_path):
    with small_store(tmp_path) as store:
        write(store, 1)
        newer = write(store, 2)
        store.pin(newer.snapshot_id)
        names = {path.name for path in packs_of(store, newer)}
        message = pb.StoredManifest.FromString(newer.path.read_bytes()[:-32])
        signed = pb.SignedManifest.FromString(message.signed)
        body = pb.Manifest.FromString(signed.body)
        body.format = 2
        signed.body = body.SerializeToString()
        signed.signature = SIGNER.sign(b"hotswarm-manifest-v1\0" + signed.body)
        message.signed = signed.SerializeToString()
        data = message.SerializeToString()
        newer.path.write_bytes(data + blake3(data).digest())
        before = newer.path.read_bytes()
    as_a_new_process()
    with small_store(tmp_path) as store:
        assert store.newest().training_step == 1
        assert "newer version" in store.health[0]
        for step in range(3, 9):
            write(store, step)
        store.scan()
        assert newer.path.read_bytes() == before
        assert names <= {path.name for path in store.folders.packs.iterdir()}
        assert (newer.path.parent / f"{newer.snapshot_id}.pin").exists()
        assert list(store.folders.quarantine.iterdir()) == []


def make_odd(kind, path):
    """Put something that is no file where a file of ours belongs."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(path))
        made.close()


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_neither_hangs_nor_stops_the_store(short_dir, monkeypatch, kind):
    with small_store(short_dir) as store:
        write(store, 1)
        manifest, pack = write(store, 2), write(store, 3)
        packs = packs_of(store, pack)
    monkeypatch.chdir(store.folders.snapshots)  # socket paths end at 108 bytes
    make_odd(kind, manifest.path.relative_to(store.folders.snapshots))
    monkeypatch.chdir(store.folders.packs)
    make_odd(kind, packs[0].relative_to(store.folders.packs))
    make_odd(kind, Path("inner-0123456789abcdef.pack"))
    assert FileStore(short_dir).newest().training_step == 1
    with small_store(short_dir) as store:
        assert store.newest().training_step == 1
        store.scan()
        check_holds(store, write(store, 4), 4)
    lock = Path(short_dir / "daemon.lock")
    monkeypatch.chdir(short_dir)
    make_odd(kind, Path(lock.name))
    assert read_lock(short_dir) == ({}, False)
    with pytest.raises(StoreError, match=r"daemon\.lock"):
        small_store(short_dir).open_for_writing()
