"""A snapshot that still lies in the arena: the fastest way back for a trainer that lost only its process.

The slot belongs to the trainer, who may overwrite it for its next snapshot. So every read is bracketed: the slot must
be HELD and carry the same sequence number before and after, else the bytes do not count and StoreError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

from hotswarm.errors import IntegrityError, StoreError
from hotswarm.ids import SnapshotId
from hotswarm.snapshot.manifest import Manifest, SectionEntry, SignedManifest
from hotswarm.snapshot.sections import chunk_digest
from hotswarm.store.arena import Arena, Slot, SlotState
from hotswarm.store.mapping import address_of, memmove
from hotswarm.store.packing import HASH_THREADS, batches, run_all


class SlotSource:
    """SnapshotSource over a HELD slot. Safe to use from several threads."""

    def __init__(self, arena: Arena, slot: Slot, signed: SignedManifest, *, owns_arena: bool = False) -> None:
        """`owns_arena`: close() closes it too. StoreError when the slot does not hold this snapshot."""
        self._arena = arena
        self._slot = slot
        self._signed = signed
        self._owns_arena = owns_arena
        self._check()
        self._streams = slot.streams()
        for name, entry in self.manifest.sections.items():
            stream = self._streams.get(name)
            if stream is None or len(stream) != entry.layout.stream_bytes:
                raise StoreError(f"arena slot {slot.index} does not hold section {name!r} of {self.snapshot_id}")

    @property
    def signed(self) -> SignedManifest:
        """The manifest with its signature."""
        return self._signed

    @property
    def manifest(self) -> Manifest:
        """What the snapshot holds."""
        return self._signed.manifest

    @property
    def snapshot_id(self) -> SnapshotId:
        """Its id."""
        return self._signed.snapshot_id

    def _check(self) -> None:
        if self._slot.state is not SlotState.HELD or self._slot.seq != self.manifest.seq:
            raise StoreError(f"snapshot {self.snapshot_id} is no longer in the arena: the trainer took its slot")

    def has_chunk(self, section: str, index: int) -> bool:
        """Whether the section has such a chunk: a slot holds all of them."""
        return 0 <= index < len(self.manifest.sections[section].chunk_digests)

    def chunk(self, section: str, index: int) -> bytes:
        """The raw bytes of one chunk, unverified."""
        span = self.manifest.sections[section].layout.chunks[index]
        data = bytes(self._stream(section)[span.offset : span.end])
        self._check()
        return data

    def read_into(self, section: str, offset: int, out: memoryview) -> None:
        """Fill `out` from the packed stream, unverified, without the GIL. Gap bytes read as zero."""
        stream, view = self._stream(section), out.cast("B")
        end = offset + len(view)
        if offset < 0 or end > len(stream):
            raise ValueError(f"bytes {offset} to {end} are outside the stream of {section!r}")
        if not view:
            return
        memmove(address_of(view), address_of(stream[offset:end]), len(view))
        layout = self.manifest.sections[section].layout
        at = offset
        for index in layout.chunks_in(offset, len(view)):
            span = layout.chunks[index]
            if span.offset > at:
                view[at - offset : span.offset - offset] = bytes(span.offset - at)
            at = min(end, span.end)
        if at < end:
            view[at - offset :] = bytes(end - at)
        self._check()

    def verify(self, sections: Iterable[str] | None = None) -> None:
        """Hash every chunk. IntegrityError names section and chunk; StoreError when the slot was taken meanwhile."""
        jobs: list[Callable[[], None]] = []
        for name in self.manifest.sections if sections is None else sections:
            entry = self.manifest.sections[name]
            for batch in batches(range(len(entry.chunk_digests))):
                jobs.append(lambda entry=entry, batch=batch: self._verify(entry, batch))  # type: ignore[misc]  # noqa: PERF401
        run_all(jobs, HASH_THREADS)
        self._check()

    def _verify(self, entry: SectionEntry, batch: Sequence[int]) -> None:
        stream = self._stream(entry.name)
        for index in batch:
            span = entry.layout.chunks[index]
            if chunk_digest(stream[span.offset : span.end]) != entry.chunk_digests[index]:
                self._check()  # overwritten is another message than damaged
                raise IntegrityError(
                    f"snapshot {self.snapshot_id}: chunk {index} of section {entry.name!r} in the arena does not match "
                    "its digest"
                )

    def _stream(self, section: str) -> memoryview:
        try:
            return self._streams[section]
        except KeyError:
            raise StoreError(f"snapshot {self.snapshot_id} is closed, or has no section {section!r}") from None

    def close(self) -> None:
        """Let go of the arena. Harmless when done twice."""
        self._streams = {}
        if self._owns_arena:
            self._owns_arena = False
            self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
