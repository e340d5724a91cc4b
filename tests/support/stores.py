"""What tests ask of a store's folder."""

from __future__ import annotations

import os
import signal
import traceback

from hotswarm.store import directory
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from support.snapshots import KeySigner, draft, raw, read_back, state

SIGNER = KeySigner()


def write(store, fill, *, outer=None, size=3000, outer_step=None, kind=None):
    """Write the state that is filled with `fill`, at training step `fill`."""
    made, streams = draft(outer_step if outer_step is not None else (outer or 0), fill, **state(fill, size, outer))
    return store.write(made, streams, SIGNER, kind=kind)


def check_holds(store, info, fill, *, outer=None, size=3000):
    """The snapshot verifies and holds exactly that state."""
    with store.open(info.snapshot_id) as source:
        source.verify()
        assert read_back(source) == raw(state(fill, size, outer))


def leftovers(store):
    """Files of the run that no snapshot accounts for; spare packs and quarantine are accounted for."""
    folders = store.folders
    needed = set()
    for info in store.snapshots():
        needed.add(info.path.name)
        with store.open(info.snapshot_id) as source:
            needed |= source.stored.packs()
    found = {path.name for folder in (folders.snapshots, folders.packs) for path in folder.iterdir()}
    return {name for name in found - needed if not name.endswith(".pin")}


def as_a_new_process():
    """Forget all that this process knows of any state directory, as a new one would begin."""
    directory._all.clear()


def place_of(store, info, section, index):
    """(pack path, byte offset) of a chunk."""
    with store.open(info.snapshot_id) as source:
        name, offset = source.stored.placements[section].locate(index)
    return store.folders.packs / name, offset


def small_store(root, **settings):
    """A store that keeps three."""
    return FileStore(root, retention=Retention(max_hot=3), **settings)


def in_child(job):
    """Run `job()` in a forked child; returns its wait status (a signal number when it was killed)."""
    pid = os.fork()
    if pid == 0:
        try:
            job()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on with the test
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
