"""Host names of peers, looked up off the event loop.

asyncio would resolve a name inside `sendto`, blocking everything; uvloop refuses names. A lookup can hang for as long
as the system's resolver likes, so it runs on a daemon thread of its own, at most one for each name: a dead name server
neither piles up threads nor holds up the end of the process.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence

from hotswarm.swarm.sealed import Address, canonical

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0

_Found = list[Address]


class Resolver:
    """Turns `(host, port)` pairs into addresses, each time anew."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], asyncio.Future[_Found]] = {}

    async def resolve(self, names: Sequence[tuple[str, int]], timeout_s: float = TIMEOUT_S) -> _Found:
        """All addresses found within the time; a name that fails is logged and left out."""
        out: _Found = []
        waiting = []
        for name in names:
            literal = canonical(*name)
            if literal is not None:
                out.append(literal)
            else:
                waiting.append(self._running.get(name) or self._begin(name))
        if waiting:
            done, late = await asyncio.wait(waiting, timeout=timeout_s)
            for future in done:
                out.extend(future.result())
            if late:
                log.info("%d host names of peers are still being looked up; trying again later", len(late))
        return list(dict.fromkeys(out))

    def _begin(self, name: tuple[str, int]) -> asyncio.Future[_Found]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Found] = loop.create_future()
        self._running[name] = future

        def finish(found: _Found) -> None:
            self._running.pop(name, None)
            if not future.done():
                future.set_result(found)

        def look_up() -> None:
            found = _look_up(*name)
            try:
                loop.call_soon_threadsafe(finish, found)
            except RuntimeError:
                pass  # the loop has ended in the meantime; nobody is waiting

        threading.Thread(target=look_up, name=f"resolve-{name[0]}", daemon=True).start()
        return future


def _look_up(host: str, port: int) -> _Found:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as e:
        log.info("cannot resolve the peer %s: %s; trying again later", host, e)
        return []
    found = (canonical(info[4][0], info[4][1]) for info in infos)
    return [a for a in found if a is not None]
