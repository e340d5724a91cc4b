"""Retired packs that wait to be written over: that is faster than a new file, whose blocks must be found first.

A pack comes here only after its manifest is gone and the folder is synced. It is written over only under an exclusive
flock: every reader holds a shared one on its descriptor, in whatever process, so none is left.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hotswarm.store.directory import RunFolders
from hotswarm.store.fileops import FileOps, close_fd

MIN_SPARE_BYTES = 8 << 20  # below this a new file costs nothing worth a second thought


def _spare_path(folders: RunFolders, section: str) -> Path:
    return folders.spare / f"{section}.pack"


def retire_pack(folders: RunFolders, pack: str, ops: FileOps, *, keep: bool) -> None:
    """Put a pack that no manifest refers to into spare/, one per section, or delete it. OSError."""
    path = folders.packs / pack
    spare = _spare_path(folders, pack.partition("-")[0])
    try:
        size = path.lstat().st_size
    except FileNotFoundError:
        return
    if keep and size >= MIN_SPARE_BYTES and not spare.exists():
        ops.rename(path, spare)
    else:
        ops.unlink(path)


def take_spare(folders: RunFolders, section: str, stream_bytes: int, target: Path, ops: FileOps) -> int | None:
    """The descriptor of a spare pack of about the right size, renamed to `target` and locked; None when there is none.

    Closing the descriptor unlocks it. A spare that is still read, or of another size, is deleted. OSError.
    """
    path = _spare_path(folders, section)
    if stream_bytes < MIN_SPARE_BYTES or not path.exists():
        return None
    fd = ops.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not stream_bytes // 2 <= os.fstat(fd).st_size <= 2 * stream_bytes:
            raise BlockingIOError
        ops.rename(path, target)
    except BlockingIOError:
        close_fd(fd)
        ops.unlink(path)
        return None
    except BaseException:
        close_fd(fd)
        raise
    return fd


def drop_spares(folders: RunFolders, ops: FileOps) -> None:
    """Delete all spare packs: the disk is full, or the quota counts. OSError."""
    for path in folders.spare.iterdir():
        ops.unlink(path)
