"""A snapshot opened by the daemon and read by this process: the receiving end of an `open` message.

What travels is the stored manifest (in a memfd: it may be larger than a message) and a descriptor per pack. The packs'
shared locks live in the open files and travel along, so nothing is written over while the receiver reads, whatever the
daemon deletes or whether it still lives. A snapshot that is still in the arena is read from there by its own trainer.
"""

from __future__ import annotations

import os

from hotswarm.errors import ControlError
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.arena import Arena
from hotswarm.store.base import SnapshotSource
from hotswarm.store.placement import MAX_STORED_BYTES
from hotswarm.store.slotsource import SlotSource
from hotswarm.store.source import FileSource
from hotswarm.swarm import channel
from hotswarm.swarm.channel import Json


def open_received(answer: Json, fds: list[int]) -> SnapshotSource:
    """The snapshot that came with an answer; it owns the descriptors.

    Raises ControlError, ManifestError, StoreError.
    """
    try:
        if not fds:
            raise ControlError("the daemon opened a snapshot without its descriptors; is it of another version?")
        manifest = os.pread(fds[0], MAX_STORED_BYTES + 1, 0)
        os.close(fds.pop(0))
        if "slot" in answer and len(fds) == 1:
            signed = SignedManifest.parse(manifest)
            arena = Arena.from_fd(fds[0])
            fds.clear()
            try:
                return SlotSource(arena, arena.slots[int(answer["slot"])], signed, owns_arena=True)
            except BaseException:
                arena.close()
                raise
        names = answer.get("packs")
        if not isinstance(names, list) or len(names) != len(fds):
            raise ControlError("the daemon opened a snapshot in a way that this version does not know")
        given = fds[:]
        fds.clear()  # of_export closes them itself when it fails
        return FileSource.of_export(manifest, names, given)
    finally:
        channel.close_all(fds)
