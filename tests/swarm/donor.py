"""A donor as a process: a made snapshot in a state directory, served until it is killed.

    python donor.py '{"state_dir": …, "made": {…} or [{…}, …], "peers": […], "live": true, "corrupt": ["outer", 3, …]}'

Prints one JSON line {"node": …, "listen": …} when it serves. With `live` it says that a trainer is at the newest made
state. `corrupt` flips a byte of those chunks on disk after they were written.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import uvloop
from swarm_kit import RUN, Made, fill, open_store

from hotswarm.config import NodeConfig
from hotswarm.store.files import FileStore
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.model import LiveClock
from hotswarm.swarm.side import build_swarm


def corrupt(store: FileStore, snapshot_id: str, section: str, index: int) -> None:
    with store.open(snapshot_id) as source:
        at = source.stored.placements[section].locate(index)
        assert at is not None
        path = store.folders.packs / at[0]
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, at[1] + 100)
    os.pwrite(fd, bytes([byte[0] ^ 0x01]), at[1] + 100)
    os.close(fd)


async def main(options: dict) -> None:
    state_dir = Path(options["state_dir"])
    config = NodeConfig(
        peers=tuple(options.get("peers", ())),
        run=options.get("run", RUN),
        listen=options.get("listen", "127.0.0.1:0"),
        state_dir=state_dir,
        swarm_key=options.get("swarm_key"),
        name=options.get("name", ""),
        upload_slots=options.get("slots", 4),
        max_upload_bytes_per_s=options.get("bytes_per_s"),
    )
    identity = NodeIdentity.load_or_create(state_dir)
    store = open_store(state_dir)
    mades = options.get("made", [])
    clock = None
    for raw in mades if isinstance(mades, list) else [mades]:
        made = Made(**{**raw, "params": tuple(raw["params"])} if "params" in raw else raw)
        known = [info for info in store.snapshots() if info.training_step == made.outer_step * 100 + made.inner_step]
        info = known[0] if known else fill(store, identity, made)
        clock = LiveClock(made.outer_step, made.inner_step, info.training_step, options.get("speed", 5.0), 100)
        if "corrupt" in options:
            section, *indexes = options["corrupt"]
            for index in indexes:
                corrupt(store, info.snapshot_id, section, index)
    live = clock if options.get("live", True) else None
    swarm = build_swarm(config, identity, store, lambda: live)
    await swarm.start()
    print(json.dumps({"node": identity.node_id, "listen": swarm.status()["listen"]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
