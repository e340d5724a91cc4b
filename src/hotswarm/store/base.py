"""What every store of snapshots offers, whatever it keeps them in."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hotswarm.ids import Digest, NodeId, SnapshotId
from hotswarm.snapshot.manifest import Manifest


class Clock(Protocol):
    """Time as the store needs it; tests bring their own."""

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        ...

    def wall_ms(self) -> int:
        """Unix milliseconds."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        return time.monotonic()

    def wall_ms(self) -> int:
        """Unix milliseconds."""
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One line of a store's listing."""

    snapshot_id: SnapshotId
    kind: str
    """"hot", "cold" or "recovery"; the local kind: a peer's hot snapshot is "recovery" here."""
    run: str
    node: NodeId
    label: str
    seq: int
    time_ms: int
    outer_step: int
    inner_step: int
    training_step: int
    outer_digest: Digest | None
    arch: bytes
    bytes: int
    """Tensor bytes of all its sections."""
    stored_bytes: int
    """What it takes on disk beyond what it shares with earlier snapshots."""
    path: Path
    """The manifest file."""
    complete_sections: frozenset[str]
    all_sections: frozenset[str]
    pinned: bool
    own: bool
    """Captured on this node, not fetched from a peer."""

    @property
    def complete(self) -> bool:
        """Whether every chunk of every section is here."""
        return self.complete_sections == self.all_sections

    @property
    def restorable(self) -> bool:
        """Whether a trainer can go on from it. Of a fetched snapshot the shared part must be here (without an outer
        section the inner one); its donor's private section never is.
        """
        needed = "outer" if "outer" in self.all_sections else "inner"
        return self.complete or (not self.own and needed in self.complete_sections)

    @property
    def order_key(self) -> tuple[int, int, int]:
        """Later snapshots have larger keys."""
        return (self.outer_step, self.training_step, self.seq)


@runtime_checkable
class SnapshotSource(Protocol):
    """The bytes of one snapshot. Offsets are those of a section's packed stream (snapshot/chunks.py)."""

    @property
    def manifest(self) -> Manifest:
        """What it holds."""
        ...

    @property
    def snapshot_id(self) -> SnapshotId:
        """Its id."""
        ...

    def read_into(self, section: str, offset: int, out: memoryview) -> None:
        """Fill `out` from the stream, unverified. May span chunks; gap bytes read as zero.

        StoreError when a chunk of that range is not here, IntegrityError when it cannot be read.
        """
        ...

    def chunk(self, section: str, index: int) -> memoryview | bytes:
        """The raw bytes of one chunk, unverified. Errors as in `read_into`."""
        ...

    def has_chunk(self, section: str, index: int) -> bool:
        """Whether that chunk is here. A snapshot fetched from a peer may lack some."""
        ...

    def verify(self, sections: Iterable[str] | None = None) -> None:
        """Hash every chunk that is here. IntegrityError names section and chunk of the first that differs."""
        ...

    def close(self) -> None:
        """Let go of it. Harmless when done twice."""
        ...
