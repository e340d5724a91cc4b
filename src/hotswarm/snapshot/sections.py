r"""Sections of a snapshot, their digests, and the fingerprint of an architecture.

The digest of a section is BLAKE3 over these bytes. `lp(x)` is the length of x as u32 and then x; all numbers are
little-endian; leaves are in the order of their encoded paths (ASCII bytes), whatever their order in the tree.

    "hotswarm-section-v1\0"  lp(section name)
    u32 count of leaves, then for each:  lp(encoded path)  lp(role)  and one of
        "T"  lp(dtype)  u32 count of dimensions  u64 each         a tensor
        "A"  lp(encoded path of the target)                       an alias
        "C"  lp("dict" | "list" | "tuple")                        a container
        "V"  one letter for the type  lp(canonical bytes)         a value:
             n none, empty; b bool, one byte 0 or 1; i int, two's complement, big-endian, shortest, at least one byte;
             f float, IEEE-754 double; s str, UTF-8; r bytes; d dtype, its name; z size, i64 each
    u32 count of chunks, then the 32 bytes of each chunk's digest
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from hotswarm.ids import Digest
from hotswarm.snapshot.tree import Alias, Container, Leaf, TensorSpec, encode_path, show_path
from hotswarm.snapshot.values import canonical

SECTIONS = ("outer", "inner", "private")
ARCH_ROLES = frozenset({"param", "buffer"})
_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SectionDraft:
    """A section before its tensor bytes are hashed."""

    name: str
    leaves: tuple[Leaf, ...]


def chunk_digest(data: bytes | bytearray | memoryview) -> Digest:
    """The name of a chunk: BLAKE3 of its raw bytes. Releases the GIL for anything but tiny data."""
    return Digest(blake3(data).digest())


def _lp(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _leaf_bytes(leaf: Leaf, encoded_path: str) -> bytes:
    head = _lp(encoded_path.encode()) + _lp(leaf.role.encode())
    what = leaf.what
    if type(what) is TensorSpec:
        ndim = len(what.shape)
        return head + b"T" + _lp(what.dtype.encode()) + struct.pack(f"<I{ndim}Q", ndim, *what.shape)
    if type(what) is Alias:
        return head + b"A" + _lp(encode_path(what.target).encode())
    if type(what) is Container:
        return head + b"C" + _lp(what.kind.encode())
    letter, data = canonical(what)  # type: ignore[arg-type]
    return head + b"V" + letter + _lp(data)


def section_digest(draft: SectionDraft, chunk_digests: Sequence[bytes]) -> Digest:
    """The digest that the module's head describes."""
    keyed = sorted([(encode_path(leaf.path), index) for index, leaf in enumerate(draft.leaves)])
    parts = [b"hotswarm-section-v1\0", _lp(draft.name.encode()), _U32.pack(len(keyed))]
    parts += [_leaf_bytes(draft.leaves[index], encoded) for encoded, index in keyed]
    parts.append(_U32.pack(len(chunk_digests)))
    parts += chunk_digests
    return Digest(blake3(b"".join(parts)).digest())


def _arch_lines(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Per parameter or buffer: "model/fc.weight" without the first key, and its role, dtype and shape in words."""
    lines: dict[str, str] = {}
    for leaf in leaves:
        if leaf.role in ARCH_ROLES:
            what = leaf.what
            said = f"tied to {show_path(what.target[1:])}" if type(what) is Alias else str(what)
            lines[show_path(leaf.path[1:])] = f"{said} {leaf.role}"
    return lines


def arch_fingerprint(leaves: Iterable[Leaf]) -> bytes:
    """32 bytes that are equal for models with equal parameters and buffers by name, role, dtype, shape and tying.

    The first key of the path does not count, so the `inner` model gives one fingerprint wherever it hangs.
    """
    lines = _arch_lines(leaves)
    text = "".join(f"{name}\0{lines[name]}\n" for name in sorted(lines))
    return blake3(b"hotswarm-arch-v1\0" + text.encode("utf-8", "surrogatepass")).digest()


def first_difference(mine: Iterable[Leaf], theirs: Iterable[Leaf]) -> str | None:
    """One sentence about the first name at which two architectures differ, or None: the fingerprints are equal then."""
    here, there = _arch_lines(mine), _arch_lines(theirs)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            return f"{name}: {here.get(name, 'nothing')} here, {there.get(name, 'nothing')} there"
    return None
