"""The folders of one run, and the index of its snapshots. The index is the directory: there is nothing else to lose.

Everything here is shared by all stores of this process on the same folder, found through `shared_state`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hotswarm.errors import IntegrityError, ManifestError, NewerFormat, StoreError
from hotswarm.ids import SnapshotId
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.fileops import make_private_dir
from hotswarm.store.placement import MANIFEST_NAME, OWN, SectionPlacement, StoredManifest
from hotswarm.store.source import read_stored

log = logging.getLogger("hotswarm.store")

KEEP_PARSED = 4  # manifests kept in memory: one that is written, one that is served, and their predecessors
PIN_SUFFIX = ".pin"
TMP_SUFFIX = ".tmp"


@dataclass(frozen=True)
class RunFolders:
    """Where the files of one run lie."""

    base: Path

    @property
    def snapshots(self) -> Path:
        """Stored manifests and pins."""
        return self.base / "snapshots"

    @property
    def packs(self) -> Path:
        """Chunk bytes."""
        return self.base / "packs"

    @property
    def partial(self) -> Path:
        """Unfinished fetches."""
        return self.base / "partial"

    @property
    def spare(self) -> Path:
        """Retired packs, to be written over."""
        return self.base / "spare"

    @property
    def quarantine(self) -> Path:
        """Damaged snapshots, for people to look at."""
        return self.base / "quarantine"

    def make(self) -> None:
        """Create them all, for this user only."""
        for folder in (self.snapshots, self.packs, self.partial, self.spare, self.quarantine):
            make_private_dir(folder)


Stamp = tuple[int, int, int]
"""Inode, modification time and size of a manifest file: another stamp is another file."""


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_ino, status.st_mtime_ns, status.st_size)


@dataclass(frozen=True)
class Entry:
    """One snapshot of the index."""

    name: str
    stamp: Stamp
    info: SnapshotInfo
    placements: Mapping[str, SectionPlacement]
    packs: Mapping[str, int]
    """Sizes by name."""


@dataclass(frozen=True)
class Problem:
    """A manifest file that is no usable snapshot, and why."""

    name: str
    stamp: Stamp
    reason: str
    newer: bool
    """Not damaged: a later version wrote it. It stays where it is."""


@dataclass
class Lease:
    """A joiner's claim on a snapshot. Monotonic seconds."""

    granted_at: float
    until: float


@dataclass
class Shared:
    """What all stores of one folder in this process have in common.

    Locks: `writing` is held through everything that changes the folder, `guard` for moments; `writing` comes first.
    """

    folders: RunFolders
    writing: threading.RLock = field(default_factory=threading.RLock)
    guard: threading.RLock = field(default_factory=threading.RLock)
    swept: bool = False
    littered: bool = False
    """A change failed halfway since the last sweep: there may be packs that nobody refers to."""
    readers: Counter[SnapshotId] = field(default_factory=Counter)
    leases: dict[SnapshotId, Lease] = field(default_factory=dict)
    held_until: dict[SnapshotId, float] = field(default_factory=dict)
    """What was just fetched, and until when retention leaves it alone. Monotonic seconds."""
    trusted_packs: set[str] = field(default_factory=set)
    """Packs that this process wrote or has verified: what new snapshots may share."""
    health: dict[str, str] = field(default_factory=dict)
    last_seq: int = 0
    _known: dict[str, Entry | Problem] = field(default_factory=dict)
    _parsed: OrderedDict[SnapshotId, StoredManifest] = field(default_factory=OrderedDict)

    def entries(self, run: str) -> tuple[list[Entry], list[Problem]]:
        """All snapshots, oldest first, and the files that are none. Reads only what is new since the last call.

        StoreError when this process cannot read the folder now, which must not pass for an empty one.
        """
        with self.guard:
            found: dict[str, Stamp] = {}
            pins: set[str] = set()
            try:
                with os.scandir(self.folders.snapshots) as listing:
                    for item in listing:
                        if MANIFEST_NAME.fullmatch(item.name):
                            try:
                                found[item.name] = _stamp(item.stat(follow_symlinks=False))
                            except FileNotFoundError:
                                continue  # deleted by the lock's holder since it was listed
                        elif item.name.endswith(PIN_SUFFIX):
                            pins.add(item.name.removesuffix(PIN_SUFFIX))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StoreError(f"{self.folders.snapshots} cannot be listed: {error.strerror}") from error
            for name, known in list(self._known.items()):
                if found.get(name) != known.stamp:
                    del self._known[name]
            for name, stamp in found.items():
                if name not in self._known:
                    loaded = self._load(name, stamp, run)
                    if loaded is not None:
                        self._known[name] = loaded
            good = [_pinned(known, pins) for known in self._known.values() if isinstance(known, Entry)]
            good.sort(key=lambda entry: (*entry.info.order_key, entry.info.snapshot_id))
            return good, [known for known in self._known.values() if isinstance(known, Problem)]

    def _load(self, name: str, stamp: Stamp, run: str) -> Entry | Problem | None:
        try:
            stored = read_stored(self.folders.snapshots / name)
            if stored.file_name != name:
                raise ManifestError(f"its contents belong to {stored.file_name}")
            if stored.signed.manifest.run != run:
                raise ManifestError(f"it belongs to run {stored.signed.manifest.run!r}")
            entry = self._entry(stored, stamp)
        except FileNotFoundError:
            return None  # deleted by the lock's holder since it was listed
        except (ManifestError, IntegrityError) as error:
            return Problem(name, stamp, str(error), isinstance(error, NewerFormat))
        except OSError as error:
            raise StoreError(f"{self.folders.packs} cannot be read: {error.strerror}") from error
        self.remember(stored)
        return entry

    def _entry(self, stored: StoredManifest, stamp: Stamp) -> Entry:
        sizes: dict[str, int] = {}
        for pack in stored.packs():
            try:
                sizes[pack] = os.stat(self.folders.packs / pack, follow_symlinks=False).st_size
            except FileNotFoundError:
                if not (self.folders.snapshots / stored.file_name).exists():
                    raise
                raise IntegrityError(f"pack {pack} is missing") from None
        own_bytes = 0
        for section, placement in stored.placements.items():
            lengths: dict[int, int] = {}
            for index, span in enumerate(stored.signed.manifest.sections[section].layout.chunks):
                at = placement.locate(index)
                if at is not None and at[1] + span.length > sizes[at[0]]:
                    raise IntegrityError(f"pack {at[0]} ends before chunk {index} of section {section!r}")
                if placement.offsets[index] & 3 == OWN:
                    lengths[placement.offsets[index]] = span.length
            own_bytes += sum(lengths.values())
        path = self.folders.snapshots / stored.file_name
        return Entry(
            stored.file_name, stamp, _info(stored, path, own_bytes + path.stat().st_size), stored.placements, sizes
        )

    def forget(self) -> None:
        """Another process may have written here: look at everything again."""
        with self.guard:
            self.swept = False
            self.trusted_packs.clear()
            self._known.clear()
            self._parsed.clear()

    def adopt(self, stored: StoredManifest) -> None:
        """Take a manifest into the index that this process has just committed, without reading it back. OSError."""
        with self.guard:
            stamp = _stamp((self.folders.snapshots / stored.file_name).lstat())
            self._known[stored.file_name] = self._entry(stored, stamp)
            self.remember(stored)

    def remember(self, stored: StoredManifest) -> None:
        """Keep a parsed manifest for a while."""
        with self.guard:
            self._parsed[stored.signed.snapshot_id] = stored
            self._parsed.move_to_end(stored.signed.snapshot_id)
            while len(self._parsed) > KEEP_PARSED:
                self._parsed.popitem(last=False)

    def stored(self, entry: Entry) -> StoredManifest:
        """The parsed manifest of an entry. StoreError when it went away, ManifestError when it was damaged since."""
        with self.guard:
            known = self._parsed.get(entry.info.snapshot_id)
            if known is not None and known.placements == entry.placements:
                self._parsed.move_to_end(entry.info.snapshot_id)
                return known
        try:
            stored = read_stored(entry.info.path)
        except FileNotFoundError:
            raise StoreError(f"snapshot {entry.info.snapshot_id} is no longer here") from None
        self.remember(stored)
        return stored

    def signed(self, entry: Entry) -> SignedManifest:
        """The signed manifest of an entry."""
        return self.stored(entry).signed


def _info(stored: StoredManifest, path: Path, stored_bytes: int) -> SnapshotInfo:
    manifest = stored.signed.manifest
    return SnapshotInfo(
        snapshot_id=stored.signed.snapshot_id,
        kind=stored.kind,
        run=manifest.run,
        node=manifest.node,
        label=manifest.label,
        seq=manifest.seq,
        time_ms=manifest.time_ms,
        outer_step=manifest.outer_step,
        inner_step=manifest.inner_step,
        training_step=manifest.training_step,
        outer_digest=manifest.outer_digest,
        arch=manifest.arch,
        bytes=manifest.raw_bytes,
        stored_bytes=stored_bytes,
        path=path,
        complete_sections=frozenset(name for name, placed in stored.placements.items() if placed.complete),
        all_sections=frozenset(manifest.sections),
        pinned=False,
        own=stored.kind != "recovery",
    )


def _pinned(entry: Entry, pins: set[str]) -> Entry:
    if entry.info.snapshot_id not in pins:
        return entry
    return replace(entry, info=replace(entry.info, pinned=True))


_all: dict[Path, Shared] = {}
_all_guard = threading.Lock()


def shared_state(base: Path) -> Shared:
    """The one Shared of this process for the folder of a run."""
    key = base.resolve()
    with _all_guard:
        return _all.setdefault(key, Shared(RunFolders(key)))


def forget_sweeps(root: Path) -> None:
    """Another process may have written under `root`: whoever opens a run there for writing sweeps it again."""
    key = root.resolve()
    with _all_guard:
        for base, shared in _all.items():
            if key in base.parents:
                shared.forget()
