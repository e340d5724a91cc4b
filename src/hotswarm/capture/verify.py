"""Whether the live state is what a manifest says, bit for bit, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3
from torch import Tensor

from hotswarm.capture.incoming import put
from hotswarm.capture.state import SectionState, StateTree
from hotswarm.capture.tensors import bytes_of, is_flat, new_tensor
from hotswarm.ids import Digest
from hotswarm.snapshot.chunks import SectionLayout, layout
from hotswarm.snapshot.manifest import Manifest
from hotswarm.snapshot.sections import SectionDraft, section_digest
from hotswarm.snapshot.tree import Path, TensorSpec, show_path


def live_digests(state: StateTree, sections: Iterable[str] | None = None) -> dict[str, Digest]:
    """The digest that each section would have if it were captured now."""
    digests = {}
    for name in state.sections if sections is None else sections:
        section = state.sections[name]
        digests[name] = section_digest(
            SectionDraft(name, section.leaves), _chunk_digests(section, layout(section.leaves))
        )
    return digests


def differences(state: StateTree, manifest: Manifest, sections: Iterable[str] = ("outer", "inner")) -> list[str]:
    """What the live state has that the manifest has not, in words; empty when the digests of the sections agree."""
    found: list[str] = []
    for name in sections:
        entry = manifest.sections.get(name)
        section = state.sections.get(name)
        if entry is None or section is None:
            if (entry is None) != (section is None):
                found.append(f"{name}: only {'live' if entry is None else 'in the snapshot'}")
            continue
        here, there = {leaf.path: leaf for leaf in section.leaves}, {leaf.path: leaf for leaf in entry.leaves}
        for path in [*here, *(path for path in there if path not in here)]:
            if here.get(path) != there.get(path):
                mine, theirs = here.get(path), there.get(path)
                live = "nothing" if mine is None else repr(mine.what)
                saved = "nothing" if theirs is None else repr(theirs.what)
                found.append(f"{name}/{show_path(path)}: {live} live, {saved} in the snapshot")
        where = layout(section.leaves)
        if where != entry.layout:
            continue
        for index, digest in enumerate(_chunk_digests(section, where)):
            if digest != entry.chunk_digests[index]:
                span = where.chunks[index]
                names = [
                    show_path(placed.path)
                    for placed in where.tensors
                    if placed.offset < span.end and placed.offset + placed.nbytes > span.offset
                ]
                found.append(f"{name}: bytes differ in chunk {index} ({', '.join(names[:3])})")
    return found


def _chunk_digests(section: SectionState, where: SectionLayout) -> list[Digest]:
    live: dict[Path, Tensor] = {}
    tensors = iter(section.tensors)
    for leaf in section.leaves:
        if type(leaf.what) is TensorSpec:
            live[leaf.path] = next(tensors)
    digests: list[Digest] = []
    placed = iter(where.tensors)
    current = next(placed, None)
    view = memoryview(b"")
    if current is not None:
        view = _bytes(live[current.path], current.spec)
    for span in where.chunks:
        hasher = blake3()
        at = span.offset
        while at < span.end:
            assert current is not None
            end = current.offset + current.nbytes
            if end <= at:
                current = next(placed)
                view = _bytes(live[current.path], current.spec)
                continue
            stop = min(end, span.end)
            hasher.update(view[at - current.offset : stop - current.offset])
            at = stop
        digests.append(Digest(hasher.digest()))
    return digests


def _bytes(tensor: Tensor, spec: TensorSpec) -> memoryview:
    if is_flat(tensor):
        return bytes_of(tensor)
    flat = new_tensor(spec)
    put(flat, tensor)
    return memoryview(bytes(bytes_of(flat)))  # its own bytes: `flat` does not outlive this call
