"""How the tensors of a section are packed into one stream and cut into chunks.

The cut depends on names, dtypes and shapes alone, never on values or on the node, so equal tensors on two nodes make
equal chunks; and the live parameters of `inner` cut as the outer parameters of `outer` do, because a tensor's place
follows from its path without the first key.

    stream:  | group param/float32             |gap| group momentum/float32 |gap| group buffer/int64 |
    chunks:  [ 1 MiB ][ 1 MiB ][ the rest ]        [ 1 MiB ][ the rest ]        [ the rest ]

A group is all tensors of one role and dtype. Groups come in the order of `ROLE_ORDER`, then other roles by name;
within a role by dtype name. Tensors within a group come in the order of the encoded path without its first key, then
of the whole encoded path (ASCII bytes), back to back. Each group begins at the next multiple of 4096 and starts a new
chunk. Gap bytes belong to no chunk and have no meaning. A group without bytes takes no room.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import cast

from hotswarm.errors import ManifestError
from hotswarm.snapshot.limits import MAX_MANIFEST_BYTES, MAX_NBYTES
from hotswarm.snapshot.tree import Leaf, Path, TensorSpec, encode_path

CHUNK_BYTES = 1 << 20  # gRPC streams run fastest with messages of 512 KiB to 1 MiB (2.0-2.3 GB/s, 64 KiB: 0.5)
GROUP_ALIGN = 4096  # a page: what O_DIRECT and mmap want
ROLE_ORDER = ("param", "momentum", "exp_avg", "exp_avg_sq", "buffer")
MAX_CHUNKS = MAX_MANIFEST_BYTES // 32  # more digests than that no manifest can carry


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and where its bytes lie in the packed stream."""

    path: Path
    role: str
    offset: int
    nbytes: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes of the packed stream."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first offset behind it."""
        return self.offset + self.length


@dataclass(frozen=True)
class SectionLayout:
    """Where everything of one section lies. `tensors` in stream order, `chunks` likewise."""

    tensors: tuple[Placed, ...]
    chunks: tuple[Span, ...]
    stream_bytes: int

    @cached_property
    def raw_bytes(self) -> int:
        """Sum of the chunk lengths: the tensor bytes without gaps."""
        return sum(span.length for span in self.chunks)

    @cached_property
    def by_path(self) -> dict[Path, Placed]:
        """The tensors by path."""
        return {placed.path: placed for placed in self.tensors}

    @cached_property
    def _starts(self) -> list[int]:
        return [span.offset for span in self.chunks]

    def chunk_at(self, offset: int) -> int:
        """Index of the last chunk that begins at or before this stream offset; -1 when there is none."""
        return bisect_right(self._starts, offset) - 1

    def chunks_in(self, offset: int, length: int) -> range:
        """Indexes of the chunks that hold bytes of this range of the stream."""
        if length <= 0 or not self.chunks:
            return range(0)
        first = max(self.chunk_at(offset), 0)
        if self.chunks[first].end <= offset:
            first += 1
        return range(first, self.chunk_at(offset + length - 1) + 1)

    def chunks_of(self, wanted: Callable[[Placed], bool]) -> list[int]:
        """Indexes of the chunks that hold any byte of a wanted tensor, ascending."""
        found: set[int] = set()
        for placed in self.tensors:
            if placed.nbytes and wanted(placed):
                found.update(self.chunks_in(placed.offset, placed.nbytes))
        return sorted(found)

    def chunks_of_roles(self, roles: Iterable[str]) -> list[int]:
        """Indexes of the chunks that hold tensors of these roles."""
        chosen = frozenset(roles)
        return self.chunks_of(lambda placed: placed.role in chosen)

    def chunks_of_paths(self, paths: Iterable[Path]) -> list[int]:
        """Indexes of the chunks that hold these tensors."""
        chosen = frozenset(paths)
        return self.chunks_of(lambda placed: placed.path in chosen)


def role_rank(role: str) -> tuple[int, str]:
    """Sort key of a role within a stream."""
    return (ROLE_ORDER.index(role), "") if role in ROLE_ORDER else (len(ROLE_ORDER), role)


def layout(leaves: Sequence[Leaf], *, max_chunks: int = MAX_CHUNKS) -> SectionLayout:
    """Place the tensors of a section. ManifestError when the stream overflows or needs more than `max_chunks`."""
    groups: dict[tuple[str, str], list[tuple[str, str, Leaf]]] = {}
    for leaf in leaves:
        if type(leaf.what) is TensorSpec:
            key = (leaf.role, leaf.what.dtype)
            groups.setdefault(key, []).append((encode_path(leaf.path[1:]), encode_path(leaf.path), leaf))
    placed: list[Placed] = []
    chunks: list[Span] = []
    end = 0
    for role, dtype in sorted(groups, key=lambda key: (role_rank(key[0]), key[1])):
        start = offset = -(-end // GROUP_ALIGN) * GROUP_ALIGN
        for _, _, leaf in sorted(groups[role, dtype]):
            spec = cast("TensorSpec", leaf.what)
            nbytes = spec.nbytes
            placed.append(Placed(leaf.path, role, offset, nbytes, spec))
            offset += nbytes
        if offset > MAX_NBYTES:
            raise ManifestError(f"a section's tensors overflow: the limit is {MAX_NBYTES} bytes")
        if offset == start:
            continue
        if len(chunks) + -(-(offset - start) // CHUNK_BYTES) > max_chunks:
            raise ManifestError(f"a section's tensors need more than {max_chunks} chunks of {CHUNK_BYTES} bytes")
        chunks += [Span(at, min(CHUNK_BYTES, offset - at)) for at in range(start, offset, CHUNK_BYTES)]
        end = offset
    placed.sort(key=attrgetter("offset"))
    return SectionLayout(tuple(placed), tuple(chunks), end)
