"""Where is the swarm in its round? Pure: descriptions in, a clock out.

Each live trainer says where it is. In a swarm that works in rounds they are at most one outer step apart, so a clock
that nobody else is near is left out as soon as there is a choice; so are those of nodes whose outer history is another
than this node's, and those that cannot be (past the end of their own round). Of the rest the furthest outer step
counts, because arriving late at a sync is the expensive mistake. Within that round the middle one is taken: survivors
wait for their slowest, so the middle is early enough, and no single node can move it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hotswarm.swarm.agreement import continues
from hotswarm.swarm.model import Description, LiveClock


def swarm_clock(answers: Iterable[Description], own: Mapping[int, bytes] | None = None) -> LiveClock | None:
    """The clock to go by; None when no live trainer says where it is. `own`: this node's outer digests by step."""
    live = [answer for answer in answers if answer.live and answer.clock is not None and _possible(answer.clock)]
    related = [answer for answer in live if continues(own or {}, answer)] or live
    clocks = [answer.clock for answer in related if answer.clock is not None]
    if not clocks:
        return None
    near = [clock for clock in clocks if _has_company(clock, clocks)] or _nearest_first(clocks)[:1]
    furthest = max(clock.outer_step for clock in near)
    there = sorted(
        (clock for clock in near if clock.outer_step == furthest), key=lambda c: (c.inner_step, c.training_step)
    )
    return there[len(there) // 2]


def _possible(clock: LiveClock) -> bool:
    return not 0 < clock.round_length < clock.inner_step


def _has_company(clock: LiveClock, clocks: Sequence[LiveClock]) -> bool:
    others = [other for other in clocks if other is not clock]
    return not others or any(abs(other.outer_step - clock.outer_step) <= 1 for other in others)


def _nearest_first(clocks: Sequence[LiveClock]) -> list[LiveClock]:
    """When nobody is near anybody: a clock ahead costs rounds, one that is behind is corrected at the next sync."""
    return sorted(clocks, key=lambda clock: (clock.outer_step, clock.inner_step))
