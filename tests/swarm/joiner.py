"""A joiner as a process: recovers once and prints what happens, one JSON object a line.

python joiner.py '{"state_dir": …, "peers": […], "request": {…}}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import uvloop
from swarm_nodes import joiner

from hotswarm.swarm.model import RecoverRequest


async def main(options: dict) -> None:
    async with joiner(Path(options["state_dir"]), *options["peers"]) as joined:
        request = RecoverRequest.from_json(options["request"])
        outcome = await joined.swarm.recover(request, lambda seen: print(json.dumps(seen), flush=True))
        print(json.dumps({"outcome": outcome.to_json()}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
