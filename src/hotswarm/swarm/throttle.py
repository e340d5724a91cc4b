"""What keeps serving from hurting: upload slots, and one bucket for the bytes of all uploads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

PER_PEER_SLOTS = 2  # one stream, and its predecessor that is still being cancelled
BURST_S = 0.05  # a bucket that was idle lets this much pass at once, so that small sleeps need not be exact


class TokenBucket:
    """Bytes per second for everything that passes through it, first come, first served. None: no limit."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._free_at = clock()
        self._turn = asyncio.Lock()

    async def take(self, nbytes: int) -> None:
        """Wait until `nbytes` may pass. Cancelled while waiting, it has taken nothing."""
        if self._rate is None:
            return
        async with self._turn:
            wait_s = self._free_at - self._clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._free_at = max(self._free_at, self._clock() - BURST_S) + nbytes / self._rate


class Slots:
    """Upload slots, in all and per peer. One of several is kept for nodes that wait to train (`recovering`)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: Counter[str] = Counter()

    @property
    def active(self) -> int:
        """Slots in use."""
        return self._held.total()

    def take(self, peer: str, *, recovering: bool) -> Callable[[], None] | None:
        """A slot, as the function that gives it back (harmless when called again); None when there is none free."""
        limit = self.total if recovering or self.total == 1 else self.total - 1
        if self.active >= limit or self._held[peer] >= PER_PEER_SLOTS:
            return None
        self._held[peer] += 1
        given_back = False

        def give_back() -> None:
            nonlocal given_back
            if not given_back:
                given_back = True
                self._held[peer] -= 1
                if not self._held[peer]:
                    del self._held[peer]

        return give_back
