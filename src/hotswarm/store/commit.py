"""The two ways into a store: sections from memory, and sections fetched from peers. Packs are written and synced here;
the manifest that makes them a snapshot is committed by the caller, and undone with them when anything fails.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from hotswarm.errors import StoreError
from hotswarm.ids import Digest
from hotswarm.snapshot.chunks import SectionLayout, layout
from hotswarm.snapshot.manifest import Manifest, SectionEntry
from hotswarm.snapshot.sections import SECTIONS, SectionDraft
from hotswarm.store.directory import RunFolders, log
from hotswarm.store.fileops import FileOps, close_fd
from hotswarm.store.packing import DIRECT_FROM_BYTES, PackWriter, hash_stream
from hotswarm.store.partial import PartialSection
from hotswarm.store.placement import ABSENT, OWN, SHARED, SectionPlacement, nowhere
from hotswarm.store.source import FileSource
from hotswarm.store.spare import drop_spares, take_spare


class Undo:
    """Removes the files of an attempt that failed, the last one first. `keep` ends its duty."""

    def __init__(self, ops: FileOps) -> None:
        self._ops = ops
        self._paths: list[Path] = []
        self._kept = False

    def created(self, path: Path) -> None:
        """This file is about to be made."""
        self._paths.append(path)

    def keep(self) -> None:
        """The attempt succeeded."""
        self._kept = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kept:
            return
        for path in reversed(self._paths):
            try:
                self._ops.unlink(path)
            except OSError as failure:
                # A manifest that cannot be removed still needs its packs, so nothing before it is touched.
                log.warning("%s cannot be removed (%s): the next start sweeps it", path, failure.strerror)
                return


def _new_pack_path(folders: RunFolders, section: str) -> Path:
    return folders.packs / f"{section}-{secrets.token_hex(8)}.pack"


def write_sections(
    drafts: Mapping[str, SectionDraft],
    streams: Mapping[str, memoryview],
    *,
    ops: FileOps,
    folders: RunFolders,
    undo: Undo,
    share: FileSource | None,
) -> tuple[dict[str, SectionEntry], dict[str, SectionPlacement]]:
    """Hash and write all sections, outer first, whose chunks the others need not write again.

    `share` is a snapshot of the same round; it is closed here. When the outer section's chunks are the same as its,
    they stay where they are. OSError, StoreError.
    """
    try:
        layouts = {name: layout(drafts[name].leaves) for name in SECTIONS if name in drafts}
        views = {name: _view(name, streams, placed) for name, placed in layouts.items()}
        entries: dict[str, SectionEntry] = {}
        placements: dict[str, SectionPlacement] = {}
        outer_pack, outer_chunks = "", dict[Digest, int]()
        for name, placed in layouts.items():
            digests, placement = None, None
            if name == "outer" and share is not None:
                digests = hash_stream(views[name], placed.chunks)
                if tuple(digests) == share.manifest.sections["outer"].chunk_digests:
                    placement = _all_shared(share.stored.placements["outer"])
            if placement is None:
                digests, placement = _write_pack(
                    name, views[name], placed, digests, outer_pack, outer_chunks, ops=ops, folders=folders, undo=undo
                )
            assert digests is not None
            entries[name] = SectionEntry.of(drafts[name], digests)
            placements[name] = placement
            if name == "outer":
                outer_pack = placement.shared_pack or placement.pack
                outer_chunks = {
                    digest: offset & ~3 | SHARED for digest, offset in zip(digests, placement.offsets, strict=True)
                }
        ops.sync_dir(folders.packs)
        return entries, placements
    except OSError:
        if any(folders.spare.iterdir()):
            drop_spares(folders, ops)  # most likely the disk is full, and this room is ours to give
        raise
    finally:
        if share is not None:
            share.close()


def _view(name: str, streams: Mapping[str, memoryview], placed: SectionLayout) -> memoryview:
    view = memoryview(streams.get(name, b"")).cast("B")
    if len(view) < placed.stream_bytes:
        raise StoreError(f"section {name!r} needs a stream of {placed.stream_bytes} bytes and got {len(view)}")
    return view


def _all_shared(placement: SectionPlacement) -> SectionPlacement:
    pack = placement.shared_pack or placement.pack
    return SectionPlacement("", pack, tuple(offset & ~3 | SHARED for offset in placement.offsets))


def _write_pack(
    name: str,
    view: memoryview,
    placed: SectionLayout,
    digests: list[Digest] | None,
    outer_pack: str,
    outer_chunks: Mapping[Digest, int],
    *,
    ops: FileOps,
    folders: RunFolders,
    undo: Undo,
) -> tuple[list[Digest], SectionPlacement]:
    path = _new_pack_path(folders, name)
    undo.created(path)
    fd = take_spare(folders, name, placed.stream_bytes, path, ops)
    roomy = fd is not None
    if fd is None:
        fd = ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    direct_fd = None
    try:
        if placed.stream_bytes >= DIRECT_FROM_BYTES:
            roomy = roomy or ops.preallocate(fd, placed.stream_bytes)
            direct_fd = _open_direct(path, ops)
        writer = PackWriter(ops, fd, direct_fd)
        digests, offsets = writer.write_section(view, placed.chunks, known=outer_chunks, digests=digests)
        if roomy:
            ops.truncate(fd, writer.size)
        if writer.size:
            ops.sync(fd)
    finally:
        close_fd(fd)
        if direct_fd is not None:
            close_fd(direct_fd)
    if not writer.size:
        ops.unlink(path)
    kinds = {offset & 3 for offset in offsets}
    placement = SectionPlacement(
        path.name if OWN in kinds else "", outer_pack if SHARED in kinds else "", tuple(offsets)
    )
    return digests, placement


def _open_direct(path: Path, ops: FileOps) -> int | None:
    try:
        return ops.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None  # this file system has no O_DIRECT


def fetch_placements(
    manifest: Manifest,
    partials: Mapping[str, PartialSection],
    before: Mapping[str, SectionPlacement],
    *,
    ops: FileOps,
    folders: RunFolders,
    undo: Undo,
) -> dict[str, SectionPlacement]:
    """Turn fetched sections into packs. A section that lay here with more chunks before keeps its place. OSError."""
    placements: dict[str, SectionPlacement] = {}
    for name, entry in manifest.sections.items():
        partial, old = partials.get(name), before.get(name, nowhere(entry))
        if partial is not None and partial.entry.digest != entry.digest:
            raise StoreError(f"what was fetched for section {name!r} belongs to another snapshot")
        here = len(entry.chunk_digests) - len(partial.missing()) if partial is not None else 0
        if partial is None or here <= old.present:
            placements[name] = old
            continue
        partial.sync()
        path = _new_pack_path(folders, name)
        undo.created(path)
        ops.link(partial.data_path, path)
        offsets = (
            span.offset << 2 | OWN if partial.has(index) else ABSENT for index, span in enumerate(entry.layout.chunks)
        )
        placements[name] = SectionPlacement(path.name, "", tuple(offsets))
    ops.sync_dir(folders.packs)
    return placements
