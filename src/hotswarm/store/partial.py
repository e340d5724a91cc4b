"""A section that is being fetched: chunks only ever go from absent to present, so fetches may overlap and repeat.

    partial/<section digest>/data      the packed stream, chunks at their stream offsets, holes where they are absent
    partial/<section digest>/bitmap    one byte per chunk: 1 once it was verified and written

A crash at any point leaves chunks that were written and not marked (fetched again) or, when the machine lost power,
marked and not written. So the bitmap is a hint: at the start every marked chunk is hashed, and counts only if it is
right.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from hotswarm.errors import IntegrityError, StoreError
from hotswarm.ids import Digest
from hotswarm.snapshot.manifest import SectionEntry
from hotswarm.snapshot.sections import chunk_digest
from hotswarm.store.base import SnapshotSource
from hotswarm.store.fileops import FileOps, close_fd, make_private_dir
from hotswarm.store.packing import batches, run_all

DATA_NAME, BITMAP_NAME = "data", "bitmap"


class PartialSection:
    """Verified chunks of one section on their way in. Safe to use from several threads."""

    def __init__(self, folder: Path, entry: SectionEntry, ops: FileOps | None = None) -> None:
        """Begin, or go on where an earlier process was. StoreError when the disk refuses."""
        self._data_fd = self._bitmap_fd = -1
        self.folder = folder
        self.entry = entry
        self._ops = ops or FileOps()
        self._spans = entry.layout.chunks
        self._lock = threading.Lock()
        self._have = bytearray(len(self._spans))
        try:
            make_private_dir(folder)
            self._data_fd = self._ops.open(folder / DATA_NAME, os.O_RDWR | os.O_CREAT)
            self._bitmap_fd = self._ops.open(folder / BITMAP_NAME, os.O_RDWR | os.O_CREAT)
            if os.fstat(self._data_fd).st_size != entry.layout.stream_bytes:
                self._ops.truncate(self._data_fd, entry.layout.stream_bytes)
            self._rehash(os.pread(self._bitmap_fd, len(self._spans), 0))
            self._ops.truncate(self._bitmap_fd, len(self._spans))
            self._ops.write(self._bitmap_fd, bytes(self._have), 0)
        except OSError as error:
            self.close()
            raise self._failed(error) from error

    def _rehash(self, marks: bytes) -> None:
        def job(batch: Sequence[int]) -> None:
            for index in batch:
                if self._digest_on_disk(index) == self.entry.chunk_digests[index]:
                    self._have[index] = 1

        marked = [index for index, mark in enumerate(marks) if mark]
        run_all([lambda batch=batch: job(batch) for batch in batches(marked)])  # type: ignore[misc]

    def _digest_on_disk(self, index: int) -> Digest:
        span = self._spans[index]
        return chunk_digest(os.pread(self._data_fd, span.length, span.offset))

    @property
    def data_path(self) -> Path:
        """The file with the stream."""
        return self.folder / DATA_NAME

    def has(self, index: int) -> bool:
        """Whether that chunk is here, verified."""
        return bool(self._have[index])

    def missing(self) -> list[int]:
        """Indexes of the chunks that are not here."""
        return [index for index, have in enumerate(self._have) if not have]

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return all(self._have)

    @property
    def bytes_here(self) -> int:
        """Sum of the lengths of the chunks that are here."""
        return sum(span.length for span, have in zip(self._spans, self._have, strict=True) if have)

    def put(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify a chunk and write it in place. True when it was new.

        IntegrityError when it is not the chunk: whoever sent it is to blame. StoreError when the disk refuses.
        """
        span = self._spans[index]
        if len(data) != span.length or chunk_digest(data) != self.entry.chunk_digests[index]:
            raise IntegrityError(f"chunk {index} of section {self.entry.name!r} does not match its digest")
        if self._have[index]:
            return False
        try:
            self._ops.write(self._data_fd, memoryview(data), span.offset)
            self._ops.write(self._bitmap_fd, b"\1", index)
        except OSError as error:
            raise self._failed(error) from error
        with self._lock:
            new = not self._have[index]
            self._have[index] = 1
        return new

    def chunk(self, index: int) -> bytes:
        """The bytes of a chunk that is here."""
        if not self._have[index]:
            raise StoreError(f"chunk {index} of section {self.entry.name!r} is not here yet")
        span = self._spans[index]
        return os.pread(self._data_fd, span.length, span.offset)

    def prefill(self, source: SnapshotSource) -> int:
        """Take over the chunks that another snapshot of this machine holds, by digest. Returns how many bytes."""
        wanted: dict[Digest, list[int]] = {}
        for index in self.missing():
            wanted.setdefault(self.entry.chunk_digests[index], []).append(index)
        taken = 0
        for name, section in source.manifest.sections.items():
            for other, digest in enumerate(section.chunk_digests):
                if digest in wanted and source.has_chunk(name, other):
                    data = source.chunk(name, other)
                    try:
                        taken += sum(len(data) for index in wanted[digest] if self.put(index, data))
                    except IntegrityError:
                        continue  # damaged there: it is fetched instead, and the store finds out when it verifies
                    del wanted[digest]
        return taken

    def sync(self) -> None:
        """Make the data durable. StoreError."""
        try:
            self._ops.sync(self._data_fd)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the files; what is there stays for the next attempt. Harmless when done twice."""
        for fd in (self._data_fd, self._bitmap_fd):
            close_fd(fd)
        self._data_fd = self._bitmap_fd = -1

    def __del__(self) -> None:
        self.close()

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(
            f"the fetched section {self.entry.name!r} cannot be kept in {self.folder}: {error.strerror or error}; "
            "what was fetched before is kept"
        )
