"""Fetched sections: chunks go from absent to present, and survive whatever happens to the process."""

from __future__ import annotations

import os
import random
import signal

import pytest

from hotswarm.errors import IntegrityError, StoreError
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.damage import PARTIAL_KEEP_S
from hotswarm.store.files import FileStore
from hotswarm.store.partial import PartialSection
from hotswarm.store.retention import Retention
from support.faults import CountedOps, HalfWrites
from support.snapshots import FakeClock, draft, raw, read_back, state
from support.stores import SIGNER, check_holds, in_child, leftovers, place_of, small_store, write

SIZE = 700_000  # three chunks of parameters, three of moments


@pytest.fixture
def donor(tmp_path):
    """(signed manifest as it would arrive, source) of a snapshot in another state directory."""
    with small_store(tmp_path / "donor") as store:
        info = write(store, 5, outer=2, size=SIZE)
        with store.open(info.snapshot_id) as source:
            yield SignedManifest.parse(store.signed(info.snapshot_id).to_bytes()), source


def fill(partial, source, indexes=None):
    for index in partial.missing() if indexes is None else indexes:
        assert partial.put(index, source.chunk(partial.entry.name, index))


def all_partials(store, signed, source):
    partials = {name: store.partial(entry) for name, entry in signed.manifest.sections.items()}
    for partial in partials.values():
        fill(partial, source)
    return partials


def test_chunks_in_any_order_make_the_section(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        partial = store.partial(signed.manifest.sections["inner"])
        order = partial.missing()
        random.Random(3).shuffle(order)
        for count, index in enumerate(order):
            assert not partial.complete
            assert not partial.has(index)
            assert partial.put(index, source.chunk("inner", index)) is True
            assert partial.has(index)
            assert partial.put(index, source.chunk("inner", index)) is False
            assert len(partial.missing()) == len(order) - count - 1
            assert partial.chunk(index) == source.chunk("inner", index)
        assert partial.complete
        assert partial.bytes_here == signed.manifest.sections["inner"].raw_bytes
        partial.close()
        partial.close()


def test_a_wrong_chunk_is_refused_and_nothing_is_written(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        partial = store.partial(signed.manifest.sections["inner"])
        good = source.chunk("inner", 0)
        for bad in (b"", good[:-1], good + b"\0", bytes([good[0] ^ 1]) + good[1:], source.chunk("inner", 1)):
            with pytest.raises(IntegrityError, match="chunk 0 of section 'inner'"):
                partial.put(0, bad)
        assert not partial.has(0)
        with pytest.raises(StoreError, match="not here yet"):
            partial.chunk(0)
        partial.put(0, good)
        with pytest.raises(IntegrityError):
            partial.put(0, b"")
        assert partial.chunk(0) == good
        partial.close()


def test_a_fetch_goes_on_where_a_killed_process_was(tmp_path, donor):
    signed, source = donor
    root = tmp_path / "joiner"

    def job():
        with small_store(root) as store:
            partial = store.partial(signed.manifest.sections["inner"])
            fill(partial, source, [0, 3, 4])
            os.kill(os.getpid(), signal.SIGKILL)

    # The child closes the donor's files at fork: give it bytes, not a source.
    chunks = {index: source.chunk("inner", index) for index in (0, 3, 4)}
    source_chunk, source.chunk = source.chunk, lambda name, index: chunks[index]
    assert in_child(job) == -signal.SIGKILL
    source.chunk = source_chunk
    with small_store(root) as store:
        partial = store.partial(signed.manifest.sections["inner"])
        assert [index for index in range(6) if partial.has(index)] == [0, 3, 4]
        fill(partial, source)
        partial.close()


def test_what_was_marked_and_is_not_there_is_fetched_again(tmp_path, donor):
    """A machine that lost power may have the mark on disk and not the bytes."""
    signed, source = donor
    entry = signed.manifest.sections["inner"]
    folder = tmp_path / "partial"
    partial = PartialSection(folder, entry)
    fill(partial, source)
    partial.close()
    with (folder / "data").open("r+b") as data:
        data.seek(entry.layout.chunks[2].offset + 77)
        data.write(b"\xff\xff")
    again = PartialSection(folder, entry)
    assert again.missing() == [2]
    again.close()
    for damage in (b"", b"\1" * 3, b"\xff" * 1000):
        (folder / "bitmap").write_bytes(damage)
        with (folder / "data").open("r+b") as data:
            data.truncate(10)
        again = PartialSection(folder, entry)
        assert again.missing() == list(range(len(entry.chunk_digests)))
        again.close()


def test_local_chunks_are_taken_over_by_their_names(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        own = write(store, 9, outer=2, size=SIZE)  # another inner state, the same outer one
        path, offset = place_of(store, own, "outer", 0)
        with path.open("r+b") as pack:
            pack.seek(offset)
            pack.write(b"\xff\xff\xff")
        partial = store.partial(signed.manifest.sections["outer"])
        with store.open(own.snapshot_id) as local:
            taken = partial.prefill(local)
        assert partial.missing() == [0]  # the damaged one
        assert taken == partial.bytes_here
        fill(partial, source)
        inner = store.partial(signed.manifest.sections["inner"])
        with store.open(own.snapshot_id) as local:
            assert inner.prefill(local) == 0
        partial.close()
        inner.close()


def test_equal_chunks_of_a_section_are_all_prefilled(tmp_path):
    import numpy as np

    trees = {"inner": {"model": {"w": np.zeros(3 << 18, dtype=np.float32)}}}
    made, streams = draft(**trees)
    with small_store(tmp_path / "a") as a, small_store(tmp_path / "b") as b:
        info = a.write(made, streams, SIGNER)
        partial = b.partial(a.signed(info.snapshot_id).manifest.sections["inner"])
        with a.open(info.snapshot_id) as source:
            assert partial.prefill(source) == 3 << 20
        assert partial.complete
        partial.close()


def test_a_whole_fetched_snapshot_is_like_one_written_here(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        info = store.add_fetched(signed, all_partials(store, signed, source))
        assert (info.kind, info.own, info.complete) == ("recovery", False, True)
        assert info.snapshot_id == source.snapshot_id
        assert info.node == SIGNER.node_id
        check_holds(store, info, 5, outer=2, size=SIZE)
        assert store.signed(info.snapshot_id).to_bytes() == signed.to_bytes()
        assert list(store.folders.partial.iterdir()) == []
        assert leftovers(store) == set()
        assert store.newest() == info
        assert store.newest(own=True) is None
    with small_store(tmp_path / "joiner") as store:
        check_holds(store, store.newest(), 5, outer=2, size=SIZE)
        assert leftovers(store) == set()


def test_a_snapshot_fetched_in_part_says_what_it_lacks_and_can_be_completed(tmp_path, donor):
    signed, source = donor
    entries = signed.manifest.sections
    with small_store(tmp_path / "joiner") as store:
        partials = {name: store.partial(entries[name]) for name in ("outer", "inner")}
        fill(partials["outer"], source)
        moments = entries["inner"].layout.chunks_of_roles(["exp_avg"])
        fill(partials["inner"], source, moments)
        info = store.add_fetched(signed, partials)
        assert info.complete_sections == {"outer"}
        assert not info.complete
        assert store.newest() == info  # the outer section is all that a joiner needs
        assert store.newest(own=True) is None
        with store.open(info.snapshot_id) as part:
            part.verify()
            assert [part.has_chunk("inner", index) for index in range(6)] == [i in moments for i in range(6)]
            assert not part.has_chunk("private", 0)
            whole = read_back(source)
            placed = entries["inner"].layout.by_path["exp_avg", "w"]
            out = bytearray(placed.nbytes)
            part.read_into("inner", placed.offset, memoryview(out))
            assert bytes(out) == whole["inner"]["exp_avg"]["w"].data
            with pytest.raises(StoreError, match="chunk 0 of section 'inner' is not here"):
                part.read_into("inner", 0, memoryview(bytearray(10)))
            with pytest.raises(StoreError, match="not here"):
                part.chunk("inner", 0)
        packs_before = {path.name for path in store.folders.packs.iterdir()}
        # The same again brings nothing new and keeps what is there; the rest completes it.
        again = {"inner": store.partial(entries["inner"])}
        fill(again["inner"], source, moments[:1])
        assert store.add_fetched(signed, again).complete_sections == {"outer"}
        assert {path.name for path in store.folders.packs.iterdir()} == packs_before
        rest = {name: store.partial(entries[name]) for name in ("inner", "private")}
        with store.open(info.snapshot_id) as part:
            assert rest["inner"].prefill(part) == sum(entries["inner"].layout.chunks[i].length for i in moments)
        for partial in rest.values():
            fill(partial, source)
        complete = store.add_fetched(signed, rest)
        assert complete.complete
        assert [one.snapshot_id for one in store.snapshots()] == [info.snapshot_id]
        check_holds(store, complete, 5, outer=2, size=SIZE)
        assert leftovers(store) == set()


def test_new_snapshots_share_a_fetched_outer_pack(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        fetched = store.add_fetched(signed, all_partials(store, signed, source))
        own = write(store, 6, outer=2, size=SIZE)
        assert own.stored_bytes < own.bytes - SIZE * 7
        store.delete(fetched.snapshot_id)
        check_holds(store, own, 6, outer=2, size=SIZE)
        assert leftovers(store) == set()


def test_fetching_ones_own_snapshot_changes_nothing(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "donor") as store:
        before = store.snapshots()
        assert store.add_fetched(signed, all_partials(store, signed, source)) == before[0]
        assert store.snapshots() == before
        assert leftovers(store) == set()


def test_a_snapshot_of_another_run_or_another_section_is_refused(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        other = store.partial(signed.manifest.sections["outer"])
        with pytest.raises(StoreError, match="another snapshot"):
            store.add_fetched(signed, {"inner": other})
        store.run = "other"
        with pytest.raises(StoreError, match="run 'default'"):
            store.add_fetched(signed, {"outer": other})
        store.run = "default"
        assert store.snapshots() == []
        fill(other, source)
        other.close()


def test_no_quota_takes_what_was_just_fetched(tmp_path, donor):
    signed, source = donor
    clock = FakeClock()
    with FileStore(tmp_path / "joiner", retention=Retention(max_bytes=1), clock=clock) as store:
        own = write(store, 900, outer=9, size=SIZE)
        info = store.add_fetched(signed, {"outer": all_partials(store, signed, source)["outer"]})
        assert {one.snapshot_id for one in store.snapshots()} == {own.snapshot_id, info.snapshot_id}
        clock.now += 599
        assert store.retain() == []
        clock.now += 2
        assert store.retain() == [info.snapshot_id]


def test_a_full_disk_keeps_what_was_fetched(tmp_path, donor):
    signed, source = donor
    entry = signed.manifest.sections["inner"]
    with small_store(tmp_path / "joiner") as store:
        store._ops = HalfWrites(2_500_000)
        partial = store.partial(entry)
        got, said = [], []
        for index in partial.missing():
            try:
                partial.put(index, source.chunk("inner", index))
                got.append(index)
            except StoreError as error:
                said.append(str(error))
        assert got == [0, 1]
        assert all("No space left" in text for text in said)
        partial.close()
        store._ops = CountedOps()
        partial = store.partial(entry)
        assert [index for index in range(6) if partial.has(index)] == [0, 1]
        fill(partial, source)
        partial.close()


def test_unfinished_fetches_are_kept_for_a_day(tmp_path, donor):
    signed, source = donor
    with small_store(tmp_path / "joiner") as store:
        partial = store.partial(signed.manifest.sections["inner"])
        fill(partial, source, [1])
        partial.close()
        store.scan()
        assert partial.folder.is_dir()
        for path in partial.folder.iterdir():
            stamp = path.stat().st_mtime - PARTIAL_KEEP_S - 60
            os.utime(path, (stamp, stamp))
        store.scan()
        assert not partial.folder.exists()


def test_a_section_without_tensors_needs_no_fetch(tmp_path):
    trees = {"inner": state(1)["inner"], "private": {"epoch": 3}}
    made, streams = draft(**trees)
    with small_store(tmp_path / "a") as a, small_store(tmp_path / "b") as b:
        info = a.write(made, streams, SIGNER)
        signed = a.signed(info.snapshot_id)
        with a.open(info.snapshot_id) as source:
            partial = b.partial(signed.manifest.sections["inner"])
            fill(partial, source)
            fetched = b.add_fetched(signed, {"inner": partial})
        assert fetched.complete
        with b.open(fetched.snapshot_id) as source:
            assert read_back(source) == raw(trees)
