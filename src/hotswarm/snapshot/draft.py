"""A manifest as the trainer writes it: leaves and counters, no digests, no node, no signature.

The trainer encodes one at every capture, between two steps, so it must be cheap. Most leaves are the same objects each
time (tensors, containers, names); only learning rates, counters and the like are new. `DraftEncoder` keeps the encoded
bytes of blocks of leaves and encodes again only the blocks in which some leaf is another object than last time.
Identity, not equality: 1, 1.0 and True are equal and encode differently.

The bytes are a `Manifest` message whose sections have no chunks and no digest.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import EncodeError

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import CaptureError, ManifestError
from hotswarm.ids import NodeId
from hotswarm.snapshot.manifest import (
    Manifest,
    SectionEntry,
    check_header,
    check_sections,
    header_to_proto,
    leaf_to_proto,
    parse_leaves,
    parse_message,
)
from hotswarm.snapshot.sections import SectionDraft
from hotswarm.snapshot.tree import Leaf

BLOCK_LEAVES = 128  # small enough that one changed learning rate costs little, large enough that blocks are few


@dataclass(frozen=True)
class DraftManifest:
    """What the trainer knows of a snapshot. Fields as in Manifest."""

    run: str
    label: str
    kind: str
    seq: int
    time_ms: int
    outer_step: int
    inner_step: int
    training_step: int
    exact: bool
    arch: bytes
    sections: Mapping[str, SectionDraft]
    engine: str = ""

    def with_sections(self, sections: Mapping[str, SectionEntry], node: NodeId) -> Manifest:
        """The manifest, once the chunks are hashed."""
        return Manifest(
            run=self.run,
            node=node,
            label=self.label,
            kind=self.kind,
            seq=self.seq,
            time_ms=self.time_ms,
            outer_step=self.outer_step,
            inner_step=self.inner_step,
            training_step=self.training_step,
            exact=self.exact,
            arch=self.arch,
            sections=sections,
            engine=self.engine,
        )


@dataclass
class DraftEncoder:
    """Encodes drafts of one trainer, remembering blocks. Not thread-safe: one per capturing thread."""

    _blocks: dict[tuple[str, int], tuple[tuple[Leaf, ...], bytes]] = field(default_factory=dict)

    def encode(self, draft: DraftManifest) -> bytes:
        """The draft's bytes. CaptureError when something in it has no encoding."""
        try:
            parts = [header_to_proto(draft.with_sections({}, NodeId(""))).SerializeToString()]
            for section in draft.sections.values():
                body = self._section(section)
                parts += [b"\x6a", _varint(sum(map(len, body))), *body]  # field 13 of Manifest, length-delimited
        except (ValueError, EncodeError, ManifestError) as error:
            raise CaptureError(f"the state cannot be encoded: {error}") from error
        return b"".join(parts)

    def _section(self, section: SectionDraft) -> list[bytes]:
        parts = [pb.Section(name=section.name).SerializeToString()]
        for start in range(0, len(section.leaves), BLOCK_LEAVES):
            leaves = section.leaves[start : start + BLOCK_LEAVES]
            known = self._blocks.get((section.name, start))
            if known is None or len(known[0]) != len(leaves) or not all(map(operator.is_, known[0], leaves)):
                # A Section with nothing but leaves is exactly the bytes that those leaves add to a larger one.
                known = (leaves, pb.Section(leaves=map(leaf_to_proto, leaves)).SerializeToString())
                self._blocks[section.name, start] = known
            parts.append(known[1])
        return parts


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def draft_to_bytes(draft: DraftManifest) -> bytes:
    """The draft's bytes, once. For repeated use keep a DraftEncoder."""
    return DraftEncoder().encode(draft)


def parse_draft(data: bytes | memoryview) -> DraftManifest:
    """The draft of these bytes, its trees checked. ManifestError."""
    message = parse_message(bytes(data))
    check_header(message.label, message.kind, message.engine)
    sections = [SectionDraft(section.name, parse_leaves(section)) for section in message.sections]
    check_sections(sections)
    return DraftManifest(
        run=message.run,
        label=message.label,
        kind=message.kind,
        seq=message.seq,
        time_ms=message.time_ms,
        outer_step=message.outer_step,
        inner_step=message.inner_step,
        training_step=message.training_step,
        exact=message.exact,
        arch=message.arch,
        sections={section.name: section for section in sections},
        engine=message.engine,
    )
