r"""The manifest: the signed table of contents of a snapshot. This page is the format.

Bytes. A manifest travels and is stored as a protobuf `SignedManifest` (proto/hotswarm/v1/recovery.proto): `body` is a
serialised `Manifest`, `public_key` a compressed P-256 point (33 bytes), `signature` the ECDSA-SHA256 signature r || s
(64 bytes) over the ASCII text "hotswarm-manifest-v1", one zero byte, and `body`. Protobuf bytes are not canonical:
`body` is never encoded again, and the snapshot's id is BLAKE3(body)[:16] in hex.

Fields of `Manifest`. `format` is 1. `run` is a run name; `node` is sha256(SPKI DER of the key)[:20] in hex, and a
reader checks that it is the key's. `label` is any text. `kind` is "hot", "cold" or "recovery". `seq` counts the
captures of this node; `time_ms` is Unix time. `outer_step`, `inner_step`, `training_step` are not negative. `arch` is
empty or the 32 bytes of sections.arch_fingerprint over the leaves of "inner". Snapshots are ordered by (outer_step,
training_step, seq).

Sections. One to three, each name once: "outer" (what all nodes share after an outer step), "inner" (the node's model
and optimizer), "private" (never applied from another node). A section is a tree, listed as leaves. A leaf's `path` is
a JSON array of strings and integers without spaces, in ASCII (other characters as \uXXXX), as Python's
json.dumps(path, separators=(",", ":")) writes it. The first leaf is the root, a container with the path `[]`; a parent
comes before its children; the items of a list or tuple are numbered from 0 in order; no path occurs twice. A leaf is
one of

    container   "dict", "list" or "tuple"
    tensor      dtype (a torch name without "torch.") and shape; `role` says what it is for
    alias       the path of an earlier tensor leaf of this section: the two are one tensor
    value       none (true), boolean, integer (two's complement, big-endian, shortest, at least one byte),
                real (the 64 bits of a double), text, raw, dtype (a name), size (a list of numbers)

Only tensors and aliases have a role.

Tensor bytes are contiguous, row-major, little-endian. They are packed into one stream per section as chunks.py
describes: grouped by role (param, momentum, exp_avg, exp_avg_sq, buffer, then others by name) and within it by dtype
name; inside a group ordered by the encoded path without its first key, then by the whole encoded path; back to back. A
group with bytes begins at the next multiple of 4096 and is cut into chunks of 1 MiB, the last one being what is left.
The bytes between groups belong to no chunk. `stream_bytes` is the end of the last group.

`chunks` holds the BLAKE3 digest (32 bytes) of each chunk's raw bytes, in stream order. `digest` is the section's
digest as sections.py describes it. A reader computes layout and digest itself and refuses a section where they differ.

Limits. limits.py; a manifest past one is refused with a ManifestError that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from blake3 import blake3
from google.protobuf.message import DecodeError

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import ConfigError, ManifestError, NewerFormat
from hotswarm.ids import Digest, NodeId, SnapshotId, check_run, is_node_id
from hotswarm.snapshot import values
from hotswarm.snapshot.chunks import SectionLayout, layout
from hotswarm.snapshot.limits import (
    MAX_ENGINE_BYTES,
    MAX_LABEL_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_STEP,
    MAX_TENSORS,
)
from hotswarm.snapshot.prescan import check_counts
from hotswarm.snapshot.sections import SECTIONS, SectionDraft, arch_fingerprint, section_digest
from hotswarm.snapshot.signing import Signer, node_id_of, signature_is_good
from hotswarm.snapshot.tree import (
    Alias,
    Container,
    Leaf,
    TensorSpec,
    Value,
    check_leaves,
    decode_path,
    encode_path,
)

FORMAT: Final = 1
KINDS: Final = ("hot", "cold", "recovery")
SIGNED_PREFIX: Final = b"hotswarm-manifest-v1\0"
DIGEST_BYTES: Final = 32


@dataclass(frozen=True)
class SectionEntry:
    """A section of a manifest: its tree, and the names of its chunks."""

    name: str
    leaves: tuple[Leaf, ...]
    chunk_digests: tuple[Digest, ...]
    digest: Digest

    @cached_property
    def layout(self) -> SectionLayout:
        """Where the tensors and chunks lie in the packed stream."""
        return layout(self.leaves, max_chunks=len(self.chunk_digests))

    @property
    def raw_bytes(self) -> int:
        """Sum of the chunk lengths."""
        return self.layout.raw_bytes

    @staticmethod
    def of(draft: SectionDraft, chunk_digests: Sequence[Digest]) -> SectionEntry:
        """The entry of a section whose chunks have been hashed."""
        return SectionEntry(draft.name, draft.leaves, tuple(chunk_digests), section_digest(draft, chunk_digests))


@dataclass(frozen=True)
class Manifest:
    """What a snapshot is. Times are Unix milliseconds; steps count from 0."""

    run: str
    node: NodeId
    label: str
    kind: str
    seq: int
    time_ms: int
    outer_step: int
    inner_step: int
    training_step: int
    exact: bool
    arch: bytes
    sections: Mapping[str, SectionEntry]
    engine: str = ""

    @property
    def outer_digest(self) -> Digest | None:
        """Digest of the outer section, where there is one."""
        outer = self.sections.get("outer")
        return outer.digest if outer else None

    @property
    def order_key(self) -> tuple[int, int, int]:
        """Later snapshots have larger keys. A failed commit repeats a round, so (outer, inner) is no order."""
        return (self.outer_step, self.training_step, self.seq)

    def numbered(self, kind: str, seq: int) -> Manifest:
        """The same with another kind and sequence number."""
        return replace(self, kind=kind, seq=seq)

    @property
    def raw_bytes(self) -> int:
        """Tensor bytes of all sections."""
        return sum(section.raw_bytes for section in self.sections.values())


@dataclass(frozen=True)
class SignedManifest:
    """A manifest with its verbatim signed bytes. Make one with `sign` or `parse`: both check it."""

    body: bytes
    public_key: bytes
    signature: bytes
    manifest: Manifest

    @cached_property
    def snapshot_id(self) -> SnapshotId:
        """BLAKE3(body)[:16] in hex."""
        return SnapshotId(blake3(self.body).digest(16).hex())

    def to_bytes(self) -> bytes:
        """A serialised SignedManifest message."""
        return pb.SignedManifest(
            body=self.body, public_key=self.public_key, signature=self.signature
        ).SerializeToString()

    @staticmethod
    def sign(manifest: Manifest, signer: Signer) -> SignedManifest:
        """Sign as this node: `node` becomes the signer's id. ManifestError when it is past a limit."""
        manifest = replace(manifest, node=signer.node_id)
        body = encode_body(manifest)
        signed = SignedManifest(body, signer.public_key, signer.sign(SIGNED_PREFIX + body), manifest)
        size = len(signed.to_bytes())
        if size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"the manifest has {size} bytes, the limit is {MAX_MANIFEST_BYTES}")
        _check_fields(manifest)
        return signed

    @staticmethod
    def parse(data: bytes) -> SignedManifest:
        """Read and check everything: signature, node id, limits, tree, layout and section digests. ManifestError."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"the manifest has {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
        message = pb.SignedManifest()
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise ManifestError(f"these bytes are no signed manifest: {error}") from error
        if not signature_is_good(message.public_key, SIGNED_PREFIX + message.body, message.signature):
            raise ManifestError("the manifest's signature is wrong")
        manifest = parse_body(message.body)
        if manifest.node != node_id_of(message.public_key):
            raise ManifestError(f"the manifest says node {manifest.node} and is signed by another")
        return SignedManifest(message.body, message.public_key, message.signature, manifest)


def leaf_to_proto(leaf: Leaf) -> pb.Leaf:
    """One leaf as a protobuf message."""
    path, what = encode_path(leaf.path), leaf.what
    if type(what) is TensorSpec:
        return pb.Leaf(path=path, role=leaf.role, tensor=pb.Tensor(dtype=what.dtype, shape=what.shape))
    if type(what) is Container:
        return pb.Leaf(path=path, container=what.kind)
    if type(what) is Alias:
        return pb.Leaf(path=path, role=leaf.role, alias=encode_path(what.target))
    return pb.Leaf(path=path, value=values.to_proto(what))  # type: ignore[arg-type]


def leaf_from_proto(leaf: pb.Leaf) -> Leaf:
    """One leaf. ManifestError for what is not of the format; the tree as a whole is `check_leaves`' job."""
    path = decode_path(leaf.path)
    what: TensorSpec | Container | Alias | Value
    match leaf.WhichOneof("what"):
        case "tensor":
            what = TensorSpec(leaf.tensor.dtype, tuple(leaf.tensor.shape))
        case "container":
            if leaf.container not in ("dict", "list", "tuple"):
                raise ManifestError(f"unknown container {leaf.container[:40]!r}")
            what = Container(leaf.container)  # type: ignore[arg-type]
        case "alias":
            what = Alias(decode_path(leaf.alias))
        case "value":
            what = values.from_proto(leaf.value)
        case _:
            raise ManifestError("a leaf is of no known type")
    return Leaf(path, what, leaf.role)


def header_to_proto(manifest: Manifest) -> pb.Manifest:
    """Everything but the sections."""
    return pb.Manifest(
        format=FORMAT,
        run=manifest.run,
        node=manifest.node,
        label=manifest.label,
        kind=manifest.kind,
        seq=manifest.seq,
        time_ms=manifest.time_ms,
        outer_step=manifest.outer_step,
        inner_step=manifest.inner_step,
        training_step=manifest.training_step,
        exact=manifest.exact,
        arch=manifest.arch,
        engine=manifest.engine,
    )


def encode_body(manifest: Manifest) -> bytes:
    """A serialised Manifest message. What it means is fixed, its bytes are not: keep them once signed."""
    try:
        message = header_to_proto(manifest)
        for entry in manifest.sections.values():
            message.sections.append(
                pb.Section(
                    name=entry.name,
                    leaves=map(leaf_to_proto, entry.leaves),
                    chunks=b"".join(entry.chunk_digests),
                    digest=entry.digest,
                    stream_bytes=entry.layout.stream_bytes,
                )
            )
        return message.SerializeToString()
    except ValueError as error:  # protobuf: a number out of range, a text without UTF-8 form
        raise ManifestError(f"the manifest cannot be encoded: {error}") from error


def parse_message(body: bytes) -> pb.Manifest:
    """The protobuf message of a body or draft, with its format, size and counts checked. ManifestError."""
    if len(body) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"the manifest has {len(body)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    check_counts(body)
    message = pb.Manifest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ManifestError(f"these bytes are no manifest: {error}") from error
    if message.format != FORMAT:
        kind = NewerFormat if message.format > FORMAT else ManifestError
        raise kind(f"the manifest has format {message.format}; this version reads format {FORMAT}")
    return message


def parse_leaves(section: pb.Section) -> tuple[Leaf, ...]:
    """The checked tree of a section."""
    leaves = tuple(map(leaf_from_proto, section.leaves))
    check_leaves(leaves)
    return leaves


def check_sections(sections: Iterable[SectionDraft | SectionEntry]) -> None:
    """ManifestError unless the names are known and single and the tensors within their limit."""
    names = [section.name for section in sections]
    if not names or len(set(names)) != len(names) or not set(names) <= set(SECTIONS):
        raise ManifestError(f"the sections are {names!r:.200}; each of {SECTIONS} may occur once, and one must")
    tensors = sum(type(leaf.what) is TensorSpec for section in sections for leaf in section.leaves)
    if tensors > MAX_TENSORS:
        raise ManifestError(f"the manifest has {tensors} tensors, the limit is {MAX_TENSORS}")


def parse_body(body: bytes) -> Manifest:
    """The manifest of a body, checked in everything but its signature. ManifestError names what is wrong."""
    message = parse_message(body)
    sections = [_parse_section(section) for section in message.sections]
    manifest = Manifest(
        run=message.run,
        node=NodeId(message.node),
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
    check_sections(sections)
    _check_fields(manifest)
    return manifest


def _parse_section(section: pb.Section) -> SectionEntry:
    where = f"section {section.name[:40]!r}"
    if len(section.chunks) % DIGEST_BYTES:
        raise ManifestError(f"{where}: its chunk digests are not a multiple of {DIGEST_BYTES} bytes")
    digests = tuple(
        Digest(section.chunks[at : at + DIGEST_BYTES]) for at in range(0, len(section.chunks), DIGEST_BYTES)
    )
    entry = SectionEntry(section.name, parse_leaves(section), digests, Digest(section.digest))
    if len(entry.layout.chunks) != len(digests):
        raise ManifestError(f"{where}: {len(digests)} chunk digests for {len(entry.layout.chunks)} chunks")
    if entry.layout.stream_bytes != section.stream_bytes:
        raise ManifestError(f"{where}: {section.stream_bytes} stream bytes said, {entry.layout.stream_bytes} counted")
    if section_digest(SectionDraft(entry.name, entry.leaves), digests) != entry.digest:
        raise ManifestError(f"{where}: its digest does not match its contents")
    return entry


def _check_fields(manifest: Manifest) -> None:
    try:
        check_run(manifest.run)
    except ConfigError as error:
        raise ManifestError(str(error)) from error
    if not is_node_id(manifest.node):
        raise ManifestError(f"node {manifest.node[:80]!r} is not 40 hex digits")
    check_sections(list(manifest.sections.values()))
    if len(manifest.arch) not in (0, DIGEST_BYTES):
        raise ManifestError(f"the arch fingerprint has {len(manifest.arch)} bytes, not {DIGEST_BYTES}")
    inner = manifest.sections.get("inner")
    if manifest.arch and inner is not None and arch_fingerprint(inner.leaves) != manifest.arch:
        raise ManifestError("the arch fingerprint is not that of the parameters and buffers that are listed")
    check_header(manifest.label, manifest.kind, manifest.engine)
    for name in ("seq", "outer_step", "inner_step", "training_step"):
        if not 0 <= getattr(manifest, name) <= MAX_STEP:
            raise ManifestError(f"{name} is {getattr(manifest, name)}: 0 to {MAX_STEP} are allowed")


def check_header(label: str, kind: str, engine: str) -> None:
    """ManifestError for texts that are too long or a kind that is unknown."""
    if kind not in KINDS:
        raise ManifestError(f"kind {kind[:40]!r} is none of {KINDS}")
    if len(label.encode()) > MAX_LABEL_BYTES:
        raise ManifestError(f"the label has {len(label.encode())} bytes, the limit is {MAX_LABEL_BYTES}")
    if len(engine.encode()) > MAX_ENGINE_BYTES:
        raise ManifestError(f"the engine's name has {len(engine.encode())} bytes, the limit is {MAX_ENGINE_BYTES}")
