"""A snapshot that lies in files, open for reading.

All its packs are open from the start, each under a shared flock: whatever is renamed or deleted meanwhile, the bytes
stay, and no pack is written over while a reader is left, in whatever process (the lock lives in the open file, so it
goes along with a descriptor that is passed to another process).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from hotswarm.errors import IntegrityError, ManifestError, StoreError
from hotswarm.ids import SnapshotId
from hotswarm.snapshot.chunks import Span
from hotswarm.snapshot.manifest import Manifest, SectionEntry, SignedManifest
from hotswarm.snapshot.sections import chunk_digest
from hotswarm.store.fileops import OPEN_FLAGS, close_fd, track_fd
from hotswarm.store.packing import batches, run_all
from hotswarm.store.placement import MAX_STORED_BYTES, StoredManifest

READ_THREADS = 4  # from a cold disk 1.2 s per 1,000 MiB, with two threads 1.5, with single chunks 2.3 (2 cores)
READ_BATCH_CHUNKS = 8
THREADS_FROM_BYTES = 4 << 20  # below it threads cost more than they gain

DAMAGE = (errno.EIO, errno.ELOOP, errno.EISDIR, errno.ESPIPE, errno.ENXIO)
"""What says that a file is bad (or a link, folder, pipe, socket). Anything else, like too many open files, is not."""


def read_stored(path: Path) -> StoredManifest:
    """The stored manifest in a file. FileNotFoundError; ManifestError when it is damaged; StoreError when this process
    cannot read it now, which says nothing about the file.
    """
    return StoredManifest.parse(read_stored_bytes(path))


def read_stored_bytes(path: Path) -> bytes:
    """What such a file holds. Errors as in `read_stored`."""
    try:
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            data = os.pread(fd, MAX_STORED_BYTES + 1, 0)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in DAMAGE:
            raise ManifestError(f"{path} cannot be read: {error.strerror}") from error
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    return data


def open_pack(path: Path) -> int:
    """A tracked descriptor of a pack under a shared lock. FileNotFoundError when it is gone or being written over."""
    fd = track_fd(os.open(path, os.O_RDONLY | OPEN_FLAGS))
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        here, there = os.fstat(fd), os.stat(path, follow_symlinks=False)
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            raise FileNotFoundError(f"{path} was retired")
    except BlockingIOError:
        close_fd(fd)
        raise FileNotFoundError(f"{path} is being written over") from None
    except BaseException:
        close_fd(fd)
        raise
    return fd


class FileSource:
    """SnapshotSource over pack files. Safe to use from several threads. Close it, or use it as a context manager."""

    def __init__(
        self, stored: StoredManifest, packs: Mapping[str, int], on_close: Callable[[], None] | None = None
    ) -> None:
        """`packs`: a tracked descriptor per pack name; they are this object's from now on.

        IntegrityError when a pack is shorter than the manifest says.
        """
        self.stored = stored
        self._packs = dict(packs)
        self._on_close = on_close
        sizes = {name: os.fstat(fd).st_size for name, fd in self._packs.items()}
        try:
            for section, placement in stored.placements.items():
                spans = self.manifest.sections[section].layout.chunks
                for index, span in enumerate(spans):
                    at = placement.locate(index)
                    if at is not None and at[1] + span.length > sizes[at[0]]:
                        raise IntegrityError(
                            f"snapshot {self.snapshot_id}: pack {at[0]} ends before chunk {index} of {section!r}"
                        )
        except BaseException:
            self.close()
            raise

    @staticmethod
    def open(stored: StoredManifest, packs_dir: Path, on_close: Callable[[], None] | None = None) -> FileSource:
        """Open all packs of a stored manifest. IntegrityError when one is missing or too short, StoreError when this
        process cannot open it now.
        """
        fds: dict[str, int] = {}
        try:
            for name in sorted(stored.packs()):
                fds[name] = open_pack(packs_dir / name)
        except OSError as error:
            for fd in fds.values():
                close_fd(fd)
            bad = isinstance(error, FileNotFoundError) or error.errno in DAMAGE
            raise (IntegrityError if bad else StoreError)(
                f"snapshot {stored.signed.snapshot_id}: pack {name} cannot be opened: {error.strerror or error}"
            ) from error
        return FileSource(stored, fds, on_close)

    @property
    def signed(self) -> SignedManifest:
        """The manifest with its signature."""
        return self.stored.signed

    @property
    def manifest(self) -> Manifest:
        """What the snapshot holds."""
        return self.stored.signed.manifest

    @property
    def snapshot_id(self) -> SnapshotId:
        """Its id."""
        return self.stored.signed.snapshot_id

    def export(self) -> tuple[bytes, tuple[str, ...], tuple[int, ...]]:
        """(bytes of the stored manifest, pack names, their descriptors): all that `of_export` needs elsewhere.

        The descriptors stay this object's; pass them with SCM_RIGHTS before it is closed.
        """
        names = tuple(sorted(self._packs))
        return self.stored.to_bytes(), names, tuple(self._packs[name] for name in names)

    @staticmethod
    def of_export(stored: bytes, names: Sequence[str], fds: Sequence[int]) -> FileSource:
        """The source on the other side; it owns the descriptors from now on. ManifestError, IntegrityError."""
        packs = {name: track_fd(fd) for name, fd in zip(names, fds, strict=True)}
        try:
            parsed = StoredManifest.parse(stored)
            if not parsed.packs() <= packs.keys():
                raise ManifestError(f"packs {sorted(parsed.packs() - packs.keys())} did not come along")
        except BaseException:
            for fd in packs.values():
                close_fd(fd)
            raise
        return FileSource(parsed, packs)

    def has_chunk(self, section: str, index: int) -> bool:
        """Whether that chunk is here."""
        return self.stored.placements[section].locate(index) is not None

    def chunk(self, section: str, index: int) -> bytes:
        """The raw bytes of one chunk, unverified."""
        entry = self.manifest.sections[section]
        fd, offset = self._locate(entry, index)
        span = entry.layout.chunks[index]
        data = os.pread(fd, span.length, offset)
        if len(data) != span.length:
            raise self._damaged(section, index, "is cut short")
        return data

    def read_into(self, section: str, offset: int, out: memoryview) -> None:
        """Fill `out` from the packed stream, unverified; neighbouring chunks that lie together are one read."""
        entry = self.manifest.sections[section]
        if not out.nbytes:
            return  # a tensor without bytes lies nowhere
        view = out.cast("B")
        end = offset + view.nbytes
        if offset < 0 or end > entry.layout.stream_bytes:
            raise ValueError(f"bytes {offset} to {end} are outside the stream of {section!r}")
        at = offset
        for first, last in self._joined(entry, entry.layout.chunks_in(offset, view.nbytes)):
            spans = entry.layout.chunks
            start, stop = max(offset, spans[first].offset), min(end, spans[last].end)
            view[at - offset : start - offset] = bytes(start - at)  # a gap between groups
            fd, place = self._locate(entry, first)
            self._fill(fd, view[start - offset : stop - offset], place + start - spans[first].offset, section, first)
            at = stop
        view[at - offset :] = bytes(end - at)

    def verify(self, sections: Iterable[str] | None = None) -> None:
        """Hash every chunk that is here. IntegrityError names section and chunk."""
        jobs: list[Callable[[], None]] = []
        total_bytes = 0
        for name in sections if sections is not None else self.manifest.sections:
            entry = self.manifest.sections[name]
            here = [index for index in range(len(entry.chunk_digests)) if self.has_chunk(name, index)]
            total_bytes += sum(entry.layout.chunks[index].length for index in here)
            jobs += [partial(self._verify, entry, batch) for batch in batches(here, READ_BATCH_CHUNKS)]
        run_all(jobs, READ_THREADS if total_bytes >= THREADS_FROM_BYTES else 1)

    def close(self) -> None:
        """Close the packs. Harmless when done twice."""
        packs, self._packs = self._packs, {}
        for fd in packs.values():
            close_fd(fd)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_packs", None):
            self.close()

    def _verify(self, entry: SectionEntry, batch: Sequence[int]) -> None:
        spans: Sequence[Span] = entry.layout.chunks
        buffer = memoryview(bytearray(max(spans[index].length for index in batch)))
        for index in batch:
            fd, offset = self._locate(entry, index)
            view = buffer[: spans[index].length]
            self._fill(fd, view, offset, entry.name, index)
            if chunk_digest(view) != entry.chunk_digests[index]:
                raise self._damaged(entry.name, index, "does not match its digest")

    def _fill(self, fd: int, view: memoryview, offset: int, section: str, index: int) -> None:
        while view:
            try:
                done = os.preadv(fd, [view], offset)
            except OSError as error:
                raise self._damaged(section, index, f"cannot be read: {error.strerror}") from error
            if not done:
                raise self._damaged(section, index, "is cut short")
            view, offset = view[done:], offset + done

    def _joined(self, entry: SectionEntry, indexes: range) -> list[tuple[int, int]]:
        """Runs of chunks (first, last) that lie in one pack at the distances that they have in the stream."""
        spans, found = entry.layout.chunks, list[tuple[int, int]]()
        previous: tuple[int, int] | None = None
        for index in indexes:
            fd, place = self._locate(entry, index)
            here = (fd, place - spans[index].offset)
            adjacent = index > indexes.start and spans[index - 1].end == spans[index].offset
            if adjacent and here == previous:
                found[-1] = (found[-1][0], index)
            else:
                found.append((index, index))
            previous = here
        return found

    def _locate(self, entry: SectionEntry, index: int) -> tuple[int, int]:
        at = self.stored.placements[entry.name].locate(index)
        if at is None:
            raise StoreError(f"snapshot {self.snapshot_id}: chunk {index} of section {entry.name!r} is not here")
        try:
            return self._packs[at[0]], at[1]
        except KeyError:
            raise StoreError(f"snapshot {self.snapshot_id} is closed") from None

    def _damaged(self, section: str, index: int, what: str) -> IntegrityError:
        return IntegrityError(f"snapshot {self.snapshot_id}: chunk {index} of section {section!r} {what}")


def open_manifest_file(path: Path) -> FileSource:
    """Open the snapshot of a manifest file, in whatever state directory it lies. ManifestError, StoreError."""
    try:
        stored = read_stored(path)
    except FileNotFoundError:
        raise StoreError(f"there is no snapshot at {path}") from None
    return FileSource.open(stored, path.resolve().parent.parent / "packs")
