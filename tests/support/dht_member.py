"""A process that takes part in a swarm until it is killed: `python -m support.dht_member KEY_FILE STATE_DIR [SEED …]`.

Prints one line of JSON, `{"address", "node"}`, once it is announced.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from hotswarm.swarm.dht import Announcement
from hotswarm.swarm.swarmkey import read_key_file
from support.dhtkit import address_of, swarm, until


async def main(key_file: str, state: str, *seeds: str) -> None:
    async with swarm() as s:
        node = await s.add(*seeds, keys=read_key_file(Path(key_file)).keys, state=state)
        if seeds:
            await until(node.contacts, 30, "a contact")
        await node.publish(Announcement((node.address,)))
        print(json.dumps({"address": address_of(node), "node": node.identity.node_id}), flush=True)
        await asyncio.sleep(120)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
