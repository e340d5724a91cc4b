"""What is done with damaged snapshots and with what a crash left behind. The caller holds the lock of the directory.

A damaged snapshot goes to quarantine/ with its packs, for people to look at: the newest few files are kept, for a week.
Which packs a damaged manifest means is read from it as far as it can be read; where it cannot, packs that nobody refers
to are put beside it and not deleted. A manifest of a newer format is left where it is, packs and all: whoever went back
to an older version may go forward again.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from hotswarm.errors import ManifestError, StoreError
from hotswarm.ids import SnapshotId
from hotswarm.store.directory import PIN_SUFFIX, TMP_SUFFIX, RunFolders, log
from hotswarm.store.fileops import FileOps
from hotswarm.store.placement import MANIFEST_NAME, PACK_NAME, id_of_file, named_packs
from hotswarm.store.source import read_stored_bytes

PARTIAL_KEEP_S = 24 * 3600
QUARANTINE_KEEP_S = 7 * 24 * 3600
QUARANTINED_FILES = 12


def packs_named_in(path: Path) -> frozenset[str]:
    """The packs that a manifest file names, however damaged it is; none when it cannot be read at all."""
    try:
        return named_packs(read_stored_bytes(path))
    except (FileNotFoundError, ManifestError, StoreError):
        return frozenset()


def to_quarantine(folders: RunFolders, name: str, packs: Iterable[str], ops: FileOps) -> None:
    """Move a manifest, and packs that only it needs. OSError."""
    ops.replace(folders.snapshots / name, folders.quarantine / name)
    ops.sync_dir(folders.snapshots)
    for pack in packs:
        _pack_to_quarantine(folders, pack, ops)
    files = sorted(folders.quarantine.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
    for path in files[: max(len(files) - QUARANTINED_FILES, 0)]:
        _discard(path, ops)


def _pack_to_quarantine(folders: RunFolders, pack: str, ops: FileOps) -> None:
    if (folders.packs / pack).exists():
        ops.replace(folders.packs / pack, folders.quarantine / pack)


def sweep(
    folders: RunFolders, ops: FileOps, *, packs: Collection[str], ids: Collection[SnapshotId], wall_s: float
) -> None:
    """Remove temporaries, packs that are not among `packs`, pins of snapshots that are not among `ids`, old fetches and
    old quarantine. OSError.
    """
    for path in folders.snapshots.iterdir():
        orphan = path.name.endswith(PIN_SUFFIX) and path.name.removesuffix(PIN_SUFFIX) not in ids
        if orphan or path.name.endswith(TMP_SUFFIX):
            _remove_leftover(path, ops)
        elif not path.name.endswith(PIN_SUFFIX) and id_of_file(path.name) is None:
            log.warning("%s is no file of ours; it is left alone", path)
    for path in folders.quarantine.iterdir():
        if wall_s - path.lstat().st_mtime > QUARANTINE_KEEP_S:
            _discard(path, ops)
    riddles = [path for path in folders.quarantine.iterdir() if MANIFEST_NAME.fullmatch(path.name)]
    doubtful = any(not packs_named_in(path) for path in riddles)
    for path in folders.packs.iterdir():
        if PACK_NAME.fullmatch(path.name) and path.name not in packs:
            if doubtful and path.is_file():
                log.warning("%s may belong to a damaged manifest: it is put beside it in quarantine", path)
                _pack_to_quarantine(folders, path.name, ops)
            else:
                _remove_leftover(path, ops)
    for path in folders.partial.iterdir():
        newest = max((item.lstat().st_mtime for item in path.iterdir()), default=0.0) if path.is_dir() else 0.0
        if wall_s - newest > PARTIAL_KEEP_S:
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftover(path: Path, ops: FileOps) -> None:
    if path.is_dir() and not path.is_symlink():
        log.warning("%s is a folder and none of ours; it is left alone", path)
        return
    log.info("%s was left by a crash or failure; it is removed", path)
    ops.unlink(path)


def _discard(path: Path, ops: FileOps) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        ops.unlink(path)
