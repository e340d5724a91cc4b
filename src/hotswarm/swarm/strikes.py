"""Nodes that sent what no honest node sends are left out for a while: a minute, doubling to an hour. Pure, in memory.

Nobody else is told: one node's disk fault must not become a campaign. Lasting bans are the operator's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 60.0
MOST_S = 3600.0


@dataclass(slots=True)
class _Strike:
    until: float
    length_s: float
    reason: str


class Strikes:
    """Who is left out, until when, and why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._strikes: dict[str, _Strike] = {}

    def add(self, node: str, reason: str) -> None:
        """It happened (again)."""
        now = self._clock()
        old = self._strikes.get(node)
        if old is not None and now < old.until:
            return  # the same incident, noticed twice
        length_s = min(MOST_S, old.length_s * 2) if old is not None and now < old.until + MOST_S else FIRST_S
        self._strikes[node] = _Strike(now + length_s, length_s, reason)

    def reason(self, node: str) -> str | None:
        """Why that node is left out now; None when it is not."""
        strike = self._strikes.get(node)
        left_s = strike.until - self._clock() if strike is not None else 0.0
        return f"{strike.reason} (left out for {left_s:.0f} s more)" if strike is not None and left_s > 0 else None
