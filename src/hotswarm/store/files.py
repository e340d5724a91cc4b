"""Snapshots in files: data first, then commit by one rename.

Writing: chunks go into new packs, the packs are synced, their folder is synced; the manifest goes into a temporary
file, is synced, and is renamed to its name; that rename is the commit. A crash at any byte before it leaves packs that
nobody refers to and perhaps a temporary file, and the next process that opens the directory for writing sweeps them
away. A failing call does the same by itself: what was written is removed, the health report says why, and earlier
snapshots are as they were.

Deleting goes backwards: the manifest first, its folder is synced, then the packs that no other manifest refers to. A
retired pack may wait in spare/ and be written over, which is faster than a new file; that happens only when its
manifest is gone and no descriptor with a reader's lock is left, in any process.

One process at a time may write (lock.py); reading needs no lock. Stores of one process on one directory share all
of their state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from hotswarm.errors import IntegrityError, ManifestError, StoreError
from hotswarm.ids import SnapshotId, check_run
from hotswarm.snapshot.draft import DraftManifest
from hotswarm.snapshot.manifest import SectionEntry, SignedManifest
from hotswarm.snapshot.signing import Signer
from hotswarm.store.base import Clock, SnapshotInfo, SystemClock
from hotswarm.store.commit import Undo, fetch_placements, write_sections
from hotswarm.store.damage import packs_named_in, sweep, to_quarantine
from hotswarm.store.directory import (
    PIN_SUFFIX,
    TMP_SUFFIX,
    Entry,
    Lease,
    Problem,
    forget_sweeps,
    log,
    shared_state,
)
from hotswarm.store.fileops import FileOps, close_fd
from hotswarm.store.lock import StateDirLock
from hotswarm.store.partial import PartialSection
from hotswarm.store.placement import StoredManifest, id_of_file
from hotswarm.store.retention import Retention
from hotswarm.store.source import FileSource
from hotswarm.store.spare import retire_pack

LEASE_TOTAL_S = 600
FETCHED_HOLD_S = 600  # what was fetched is there to be restored: no quota takes it before that
LEASED_SNAPSHOTS = 2


class FileStore:
    """The snapshots of one run in one state directory. Thread-safe."""

    def __init__(
        self,
        root: Path,
        run: str = "default",
        *,
        retention: Retention | None = None,
        clock: Clock | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Nothing is created or changed before `open_for_writing`. ConfigError for an unusable run name."""
        self.root = Path(root)
        self.run = check_run(run)
        self.retention = retention or Retention()
        self.lock = StateDirLock(self.root)
        self._clock = clock or SystemClock()
        self._ops = ops or FileOps()
        self._shared = shared_state(self.root / "runs" / run)
        self.folders = self._shared.folders

    # ------------------------------------------------------------ opening

    def open_for_writing(self) -> Self:
        """Take the lock of the state directory, make the folders, sweep leftovers. LockedError, StoreError."""
        if self.lock.held:
            return self
        if self.lock.acquire():
            forget_sweeps(self.root)
        try:
            with self._shared.writing:
                self.folders.make()
                if not self._shared.swept or self._shared.littered:
                    self._sweep()
                    self._shared.swept = True
        except OSError as error:
            self.lock.release()
            raise StoreError(f"{self.folders.base} cannot be used: {error.strerror or error}") from error
        except BaseException:
            self.lock.release()
            raise
        return self

    def close(self) -> None:
        """Give the lock back. Sources that are open stay usable."""
        self.lock.release()

    def __enter__(self) -> Self:
        return self.open_for_writing()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def scan(self) -> list[SnapshotInfo]:
        """Sweep leftovers when this store may write, and list what is there, oldest first."""
        if self.lock.held:
            with self._shared.writing, self._reporting("sweep"):
                self._sweep()
        return self.snapshots()

    # ------------------------------------------------------------ reading

    def snapshots(self) -> list[SnapshotInfo]:
        """All snapshots, oldest first by (outer step, training step, sequence). Damaged ones are not among them."""
        return [entry.info for entry in self._entries()]

    def info(self, snapshot_id: str) -> SnapshotInfo:
        """One snapshot; StoreError when it is not here."""
        return self._entry(snapshot_id).info

    def signed(self, snapshot_id: str) -> SignedManifest:
        """Its signed manifest."""
        return self._shared.signed(self._entry(snapshot_id))

    def open(self, snapshot_id: str) -> FileSource:
        """Open for reading; it is not deleted until the source is closed. StoreError, IntegrityError."""
        with self._shared.guard:
            entry = self._entry(snapshot_id)
            key = entry.info.snapshot_id
            self._shared.readers[key] += 1
        try:
            stored = self._shared.stored(entry)
            return FileSource.open(stored, self.folders.packs, on_close=lambda: self._release(key))
        except BaseException:
            self._release(key)
            raise

    def _release(self, snapshot_id: SnapshotId) -> None:
        with self._shared.guard:
            self._shared.readers[snapshot_id] -= 1
            if self._shared.readers[snapshot_id] <= 0:
                del self._shared.readers[snapshot_id]

    def newest(self, verify: bool = True, *, own: bool = False) -> SnapshotInfo | None:
        """The newest snapshot that can be restored, or None. With `verify` every byte that is here is hashed first: a
        damaged one is put into quarantine, named in log and health, and the next older one is tried. `own`: not those
        fetched from peers, so every section of it is here.
        """
        for entry in reversed(self._entries()):
            if not entry.info.restorable or (own and not entry.info.own):
                continue
            if not verify:
                return entry.info
            try:
                self.verify(entry.info.snapshot_id)
            except (IntegrityError, ManifestError) as error:
                self._damaged(entry, str(error))
            except StoreError as error:
                log.warning("snapshot %s is skipped: %s", entry.info.snapshot_id, error)
            else:
                return entry.info
        return None

    def verify(self, snapshot_id: str) -> None:
        """Hash every chunk. IntegrityError names section and chunk; nothing is moved."""
        with self.open(snapshot_id) as source:
            source.verify()
        self._shared.trusted_packs.update(source.stored.packs())

    def _entries(self) -> list[Entry]:
        entries, problems = self._shared.entries(self.run)
        for problem in problems:
            self._damaged(problem, problem.reason)
        return entries

    def _entry(self, snapshot_id: str) -> Entry:
        for entry in self._entries():
            if entry.info.snapshot_id == snapshot_id:
                return entry
        raise StoreError(f"there is no snapshot {snapshot_id[:80]} of run {self.run!r} in {self.root}")

    # ------------------------------------------------------------ health

    @property
    def health(self) -> list[str]:
        """What is wrong now, one sentence each; empty when all is well."""
        return list(self._shared.health.values())

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Turn an OSError into a StoreError, and keep it in the health report until the next success."""
        try:
            yield
        except OSError as error:
            reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            message = (
                f"{what} failed in {self.folders.base}: {reason}; earlier snapshots are intact, the next try follows"
            )
            self._shared.health[what] = message
            self._shared.littered = True
            log.warning("%s", message)
            raise StoreError(message) from error
        self._shared.health.pop(what, None)

    def _damaged(self, what: Entry | Problem, reason: str) -> None:
        key = f"damaged {what.name}"
        if key not in self._shared.health:
            newer = isinstance(what, Problem) and what.newer
            state = "is of a newer version" if newer else "is damaged"
            self._shared.health[key] = f"snapshot {what.name} {state}: {reason}"
            log.warning("snapshot %s %s, an older one is used: %s", what.name, state, reason)
        if self.lock.held and not (isinstance(what, Problem) and what.newer):
            # Where even that fails, the snapshot stays where it is, unused; the health report has both.
            with contextlib.suppress(StoreError), self._shared.writing, self._reporting("quarantine"):
                self._to_quarantine(what)

    # ------------------------------------------------------------ writing

    def write(
        self, draft: DraftManifest, streams: Mapping[str, memoryview], signer: Signer, *, kind: str | None = None
    ) -> SnapshotInfo:
        """Hash, write, sign and commit a snapshot; durable when this returns. Then retention is applied.

        `streams` are the packed streams by section. `kind` overrides the draft's. The manifest's `seq` is the draft's,
        or one more than the largest here when that is not larger. StoreError when the disk refuses (all is as before
        then), ManifestError when the draft is past a limit.
        """
        self._must_write()
        with self._shared.writing:
            with self._reporting("writing a snapshot"), Undo(self._ops) as undo:
                seq = self._shared.last_seq = max(draft.seq, self._last_seq() + 1)
                sections, placements = write_sections(
                    draft.sections, streams, ops=self._ops, folders=self.folders, undo=undo, share=self._sharable(draft)
                )
                manifest = draft.with_sections(sections, signer.node_id)
                signed = SignedManifest.sign(manifest.numbered(kind or draft.kind, seq), signer)
                stored = StoredManifest(signed, placements, kind or draft.kind, seq, self._clock.wall_ms())
                self._commit(stored, undo)
            self._shared.trusted_packs.update(stored.packs())
            info = self.info(signed.snapshot_id)
            self._retain_quietly()
            return info

    def add_fetched(
        self, signed: SignedManifest, partials: Mapping[str, PartialSection], *, kind: str = "recovery"
    ) -> SnapshotInfo:
        """Commit what was fetched from peers. Sections without a partial, and chunks that a partial lacks, are recorded
        as absent. Fetched again with more chunks, a snapshot is completed. The partials are closed and used up.

        StoreError when the disk refuses: the partials stay for the next try then.
        """
        self._must_write()
        if signed.manifest.run != self.run:
            raise StoreError(f"the fetched snapshot is of run {signed.manifest.run!r}, this store keeps {self.run!r}")
        with self._shared.writing:
            before = [entry for entry in self._entries() if entry.info.snapshot_id == signed.snapshot_id]
            old = before[0] if before else None
            if old is not None and (old.info.complete or old.info.own):
                return self._discard(partials, old.info)
            with self._reporting("keeping a fetched snapshot"), Undo(self._ops) as undo:
                placements = fetch_placements(
                    signed.manifest,
                    partials,
                    old.placements if old else {},
                    ops=self._ops,
                    folders=self.folders,
                    undo=undo,
                )
                seq = self._last_seq() + 1
                stored = StoredManifest(signed, placements, kind, seq, self._clock.wall_ms())
                self._commit(stored, undo, over=old is not None)
            self._shared.trusted_packs.update(stored.packs())
            if old is not None:
                self._retire(old.packs)
            info = self._discard(partials, self.info(signed.snapshot_id))
            self._shared.held_until[signed.snapshot_id] = self._clock.monotonic() + FETCHED_HOLD_S
            self._retain_quietly()
            return info

    def partial(self, entry: SectionEntry) -> PartialSection:
        """The unfinished fetch of a section, begun or gone on with. StoreError."""
        self._must_write()
        return PartialSection(self.folders.partial / entry.digest.hex(), entry, self._ops)

    def _discard(self, partials: Mapping[str, PartialSection], info: SnapshotInfo) -> SnapshotInfo:
        for partial in partials.values():
            partial.close()
            shutil.rmtree(partial.folder, ignore_errors=True)
        return info

    def _commit(self, stored: StoredManifest, undo: Undo, *, over: bool = False) -> None:
        final = self.folders.snapshots / stored.file_name
        temporary = final.with_name(final.name + TMP_SUFFIX)
        undo.created(temporary)
        fd = self._ops.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._ops.write(fd, stored.to_bytes(), 0)
            self._ops.sync(fd)
        finally:
            close_fd(fd)
        if over:
            self._ops.replace(temporary, final)
            undo.keep()  # the old manifest is gone: from here on the new packs are needed, synced or not
        else:
            if final.exists():
                raise StoreError(f"{final} exists already; it is left as it is")
            undo.created(final)
            self._ops.rename(temporary, final)
        self._ops.sync_dir(self.folders.snapshots)
        undo.keep()
        self._shared.adopt(stored)

    def _sharable(self, draft: DraftManifest) -> FileSource | None:
        """An open snapshot of the same round whose outer pack a new one may share, verified once by this process."""
        if "outer" not in draft.sections:
            return None
        for entry in reversed(self._entries()):
            placement = entry.placements.get("outer")
            if entry.info.outer_step != draft.outer_step or placement is None or not placement.complete:
                continue
            try:
                source = self.open(entry.info.snapshot_id)
                if not placement.packs() <= self._shared.trusted_packs:
                    source.verify(["outer"])
                    self._shared.trusted_packs.update(placement.packs())
            except (IntegrityError, ManifestError) as error:
                self._damaged(entry, str(error))
                continue
            return source
        return None

    def _last_seq(self) -> int:
        """The largest sequence number known; that of a deleted snapshot counts while this process lives."""
        shared = self._shared
        largest = max((entry.info.seq for entry in self._entries() if entry.info.own), default=0)
        shared.last_seq = max(shared.last_seq, largest)
        return shared.last_seq

    def _must_write(self) -> None:
        if not self.lock.held:
            raise StoreError(f"the store in {self.root} is open for reading only: call open_for_writing first")

    # ------------------------------------------------------------ keeping and deleting

    def pin(self, snapshot_id: str) -> None:
        """Keep a snapshot until it is unpinned, across restarts."""
        self._must_write()
        with self._shared.writing, self._reporting("pinning a snapshot"):
            path = self.folders.snapshots / (self._entry(snapshot_id).info.snapshot_id + PIN_SUFFIX)
            close_fd(self._ops.open(path, os.O_WRONLY | os.O_CREAT))
            self._ops.sync_dir(self.folders.snapshots)

    def unpin(self, snapshot_id: str) -> None:
        """Let retention have it again. Harmless when it was not pinned."""
        self._must_write()
        with self._shared.writing, self._reporting("unpinning a snapshot"):
            self._ops.unlink(self.folders.snapshots / (self._entry(snapshot_id).info.snapshot_id + PIN_SUFFIX))
            self._ops.sync_dir(self.folders.snapshots)

    def lease(self, snapshot_id: str, seconds: float) -> float:
        """Keep a snapshot for a joiner. Returns for how many seconds from now; 0 when it is refused.

        At most two snapshots are leased at a time, each for ten minutes in all.
        """
        now = self._clock.monotonic()
        with self._shared.guard:
            key = self._entry(snapshot_id).info.snapshot_id
            leases = self._shared.leases
            for other in [other for other, lease in leases.items() if lease.until + LEASE_TOTAL_S <= now]:
                del leases[other]  # kept for a while after it ends, so that asking again does not start a new total
            active = sum(lease.until > now for other, lease in leases.items() if other != key)
            if active >= LEASED_SNAPSHOTS:
                return 0.0
            lease = leases.setdefault(key, Lease(now, now))
            lease.until = max(lease.until, min(now + seconds, lease.granted_at + LEASE_TOTAL_S))
            return max(0.0, lease.until - now)

    def _protected(self, entries: list[Entry]) -> set[SnapshotId]:
        now = self._clock.monotonic()
        leased = {key for key, lease in self._shared.leases.items() if lease.until > now}
        return {entry.info.snapshot_id for entry in entries if entry.info.pinned} | leased | set(self._shared.readers)

    def _just_fetched(self) -> set[SnapshotId]:
        now = self._clock.monotonic()
        return {key for key, until in self._shared.held_until.items() if until > now}

    def retain(self) -> list[SnapshotId]:
        """Delete what retention no longer keeps. Returns what was deleted. StoreError."""
        self._must_write()
        with self._shared.writing, self._reporting("retention"):
            entries = self._entries()
            with self._shared.guard:
                doomed = self.retention.doomed(
                    [entry.info for entry in entries],
                    self._protected(entries) | self._just_fetched(),
                    {entry.info.snapshot_id: entry.packs for entry in entries},
                )
                gone = [entry for entry in entries if entry.info.snapshot_id in doomed]
                for entry in gone:
                    self._ops.unlink(entry.info.path)
            if gone:
                self._ops.sync_dir(self.folders.snapshots)
                self._retire({pack: size for entry in gone for pack, size in entry.packs.items()})
            if self._shared.littered:
                self._sweep()
            return [entry.info.snapshot_id for entry in gone]

    def _retain_quietly(self) -> None:
        """After a commit: the snapshot stands, whatever retention meets; the health report has it."""
        with contextlib.suppress(StoreError):
            self.retain()

    def delete(self, snapshot_id: str) -> None:
        """Delete one snapshot. StoreError while it is pinned, leased or read."""
        self._must_write()
        with self._shared.writing, self._reporting("deleting a snapshot"):
            with self._shared.guard:
                entry = self._entry(snapshot_id)
                if entry.info.snapshot_id in self._protected([entry]):
                    raise StoreError(f"snapshot {snapshot_id} is pinned, leased or being read: it is not deleted")
                self._ops.unlink(entry.info.path)
            self._ops.sync_dir(self.folders.snapshots)
            self._retire(entry.packs)

    def _retire(self, packs: Mapping[str, int]) -> None:
        """Packs that no manifest refers to any more become spare or go."""
        needed, _ = self._needed()
        for pack in packs:
            if pack not in needed:
                self._shared.trusted_packs.discard(pack)
                retire_pack(self.folders, pack, self._ops, keep=self.retention.max_bytes is None)

    # ------------------------------------------------------------ damage and leftovers

    def quarantine(self, snapshot_id: str, reason: str) -> None:
        """Take a damaged snapshot out of use; it stays in quarantine/ for people to look at."""
        self._must_write()
        self._damaged(self._entry(snapshot_id), reason)

    def _to_quarantine(self, what: Entry | Problem) -> None:
        path = self.folders.snapshots / what.name
        if not path.exists():
            return
        named = frozenset(what.packs) if isinstance(what, Entry) else packs_named_in(path)
        packs, _ = self._needed(but=what.name)
        to_quarantine(self.folders, what.name, named - packs, self._ops)
        self._shared.trusted_packs -= named
        self._shared.littered = self._shared.littered or not named

    def _needed(self, but: str = "") -> tuple[set[str], set[SnapshotId]]:
        """(packs, ids) of all snapshots, those of a newer format included; `but` is the name of one to leave out."""
        entries, problems = self._shared.entries(self.run)
        packs = {pack for entry in entries if entry.name != but for pack in entry.packs}
        ids = {entry.info.snapshot_id for entry in entries}
        for problem in problems:
            if problem.newer and problem.name != but:
                packs |= packs_named_in(self.folders.snapshots / problem.name)
                ids |= {snapshot_id for snapshot_id in [id_of_file(problem.name)] if snapshot_id}
        return packs, ids

    def _sweep(self) -> None:
        self._entries()  # damaged ones go to quarantine first
        packs, ids = self._needed()
        sweep(self.folders, self._ops, packs=packs, ids=ids, wall_s=self._clock.wall_ms() / 1000)
        self._shared.littered = False
