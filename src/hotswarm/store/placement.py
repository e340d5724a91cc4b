"""Stored manifests: the signed manifest, and where its chunks lie in the packs of this disk.

A stored manifest is a serialised `StoredManifest` message followed by the 32-byte BLAKE3 digest of it, so that damage
to the local part shows as surely as damage to the signed one. File names:

    snapshots/<outer>-<training>-<seq>-<kind>-<snapshot id>.manifest      numbers with at least 12 digits
    packs/<section>-<16 hex digits>.pack

Per section a placement names the section's own pack and perhaps the outer section's pack of the same snapshot, whose
chunks it shares, and gives one number per chunk: the byte offset times 4, plus 0 for the own pack, 1 for the shared
one, 2 for a chunk that is not here (its offset is 0).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3
from google.protobuf.message import DecodeError

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import ManifestError
from hotswarm.ids import SnapshotId
from hotswarm.snapshot.limits import MAX_MANIFEST_BYTES
from hotswarm.snapshot.manifest import KINDS, SectionEntry, SignedManifest

OWN, SHARED, ABSENT = 0, 1, 2
PACK_NAME = re.compile(r"(outer|inner|private)-[0-9a-f]{16}\.pack")
MANIFEST_NAME = re.compile(r"\d{12,19}-\d{12,19}-\d{12,19}-(hot|cold|recovery)-([0-9a-f]{32})\.manifest")
MAX_STORED_BYTES = 2 * MAX_MANIFEST_BYTES  # a placement takes at most ten bytes where the manifest has a 32-byte digest
MAX_PACK_OFFSET = 1 << 61


@dataclass(frozen=True, slots=True)
class SectionPlacement:
    """Where the chunks of one section lie. `offsets` as in the module's head."""

    pack: str
    shared_pack: str
    offsets: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return all(offset & 3 != ABSENT for offset in self.offsets)

    @property
    def present(self) -> int:
        """How many chunks are here."""
        return sum(offset & 3 != ABSENT for offset in self.offsets)

    def locate(self, index: int) -> tuple[str, int] | None:
        """(pack name, byte offset) of a chunk, or None when it is not here."""
        offset = self.offsets[index]
        where = offset & 3
        return None if where == ABSENT else (self.pack if where == OWN else self.shared_pack, offset >> 2)

    def packs(self) -> frozenset[str]:
        """The packs that it needs."""
        return frozenset(name for name in (self.pack, self.shared_pack) if name)


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A snapshot as it lies on this disk."""

    signed: SignedManifest
    placements: Mapping[str, SectionPlacement]
    kind: str
    local_seq: int
    stored_ms: int

    @property
    def file_name(self) -> str:
        """The name of its file."""
        manifest = self.signed.manifest
        numbers = f"{manifest.outer_step:012d}-{manifest.training_step:012d}-{manifest.seq:012d}"
        return f"{numbers}-{self.kind}-{self.signed.snapshot_id}.manifest"

    def packs(self) -> frozenset[str]:
        """All packs that it needs."""
        return frozenset[str]().union(*(placement.packs() for placement in self.placements.values()))

    def to_bytes(self) -> bytes:
        """The contents of its file."""
        data = pb.StoredManifest(
            signed=self.signed.to_bytes(),
            placements=[
                pb.Placement(section=name, pack=p.pack, shared_pack=p.shared_pack, offsets=p.offsets)
                for name, p in self.placements.items()
            ],
            kind=self.kind,
            local_seq=self.local_seq,
            stored_ms=self.stored_ms,
        ).SerializeToString()
        return data + blake3(data).digest()

    @staticmethod
    def parse(data: bytes) -> StoredManifest:
        """Read and check everything that can be checked without the packs. ManifestError names what is wrong."""
        if len(data) > MAX_STORED_BYTES:
            raise ManifestError(f"the stored manifest has {len(data)} bytes, the limit is {MAX_STORED_BYTES}")
        if blake3(data[:-32]).digest() != data[-32:]:
            raise ManifestError("the stored manifest does not match its own digest: it was cut or changed")
        message = pb.StoredManifest()
        try:
            message.ParseFromString(data[:-32])
        except DecodeError as error:
            raise ManifestError(f"these bytes are no stored manifest: {error}") from error
        if message.kind not in KINDS:
            raise ManifestError(f"kind {message.kind[:40]!r} is none of {KINDS}")
        signed = SignedManifest.parse(message.signed)
        placements = _placements(message.placements, signed.manifest.sections)
        return StoredManifest(signed, placements, message.kind, message.local_seq, message.stored_ms)


def _placements(messages: Iterable[pb.Placement], sections: Mapping[str, SectionEntry]) -> dict[str, SectionPlacement]:
    placements: dict[str, SectionPlacement] = {}
    for message in messages:
        name = message.section
        if name not in sections or name in placements:
            raise ManifestError(f"a placement is for section {name[:40]!r}, which is unknown or placed twice")
        placement = SectionPlacement(message.pack, message.shared_pack, tuple(message.offsets))
        if len(placement.offsets) != len(sections[name].chunk_digests):
            raise ManifestError(f"section {name!r} has a placement for {len(placement.offsets)} chunks only")
        for pack in placement.packs():
            if not PACK_NAME.fullmatch(pack):
                raise ManifestError(f"{pack[:80]!r} is no name of a pack")
        kinds = {offset & 3 for offset in placement.offsets}
        if kinds - {OWN, SHARED, ABSENT}:
            raise ManifestError(f"section {name!r} places a chunk nowhere")
        if (OWN in kinds and not placement.pack) or (SHARED in kinds and not placement.shared_pack):
            raise ManifestError(f"section {name!r} places a chunk in a pack without a name")
        if any(offset >> 2 > MAX_PACK_OFFSET for offset in placement.offsets):
            raise ManifestError(f"section {name!r} places a chunk past {MAX_PACK_OFFSET} bytes")
        placements[name] = placement
    for name, entry in sections.items():
        placements.setdefault(name, nowhere(entry))
    return placements


def nowhere(entry: SectionEntry) -> SectionPlacement:
    """The placement of a section of which nothing is here."""
    return SectionPlacement("", "", (ABSENT,) * len(entry.chunk_digests))


def named_packs(data: bytes) -> frozenset[str]:
    """The packs that the bytes of a stored manifest name, though they may be damaged; what else they say is not
    believed.
    """
    message = pb.StoredManifest()
    try:
        message.ParseFromString(data[:-32])
    except DecodeError:
        return frozenset()
    names = {name for placement in message.placements for name in (placement.pack, placement.shared_pack)}
    return frozenset(name for name in names if PACK_NAME.fullmatch(name))


def id_of_file(name: str) -> SnapshotId | None:
    """The snapshot id in the name of a stored manifest, or None for another name."""
    match = MANIFEST_NAME.fullmatch(name)
    return SnapshotId(match[2]) if match else None
