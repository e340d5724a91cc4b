"""Where in the round a joiner starts: the swarm's live clock turned into counters. Pure.

A joiner that restores the outer state of a round trains only what is left of it, because the others will not wait for
more: arriving late at the sync means that they go on without it. So it starts at the position where the others are
*now*, and a little ahead, for what it still has to do before its first step; arriving early costs it only waiting.

A clock is one member's word. It decides the position *within* the round and nothing else: where the round began is what
the restored snapshot says, and the position never leaves the round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotswarm.swarm.model import LiveClock

LONGEST_ROUND = 100_000  # steps; the bound where the engine does not know its own round's length
MARGIN_S = 0.5  # from the last look at the clock to the first step: setting counters, first-step warm-up of the kernels


@dataclass(frozen=True, slots=True)
class Position:
    """Finished rounds, position in this round, inner steps over all rounds."""

    outer_step: int
    inner_step: int
    training_step: int


def join_position(
    snapshot: Position, clock: LiveClock | None, round_length: int, elapsed_s: float, margin_s: float = MARGIN_S
) -> Position:
    """The counters to start with, for the outer state of `snapshot`, `elapsed_s` after `clock` was read.

    Without a clock, or with one that is still in the round before, nobody is ahead in this round and it starts from its
    beginning. `round_length` 0 is unknown. Never beyond the round's last step.
    """
    began = snapshot.training_step - snapshot.inner_step  # where training stood when this round began
    if clock is None or clock.outer_step < snapshot.outer_step:
        return Position(snapshot.outer_step, 0, began)
    length = round_length or min(clock.round_length, LONGEST_ROUND)
    last = (length or LONGEST_ROUND) - 1
    if clock.outer_step > snapshot.outer_step:
        live = last if length else 0  # they are past it: nothing of this round is left but the sync
    else:
        ahead = clock.steps_per_s * (max(elapsed_s, 0.0) + margin_s)
        live = clock.inner_step + (max(math.ceil(min(ahead, last)), 1) if math.isfinite(ahead) else 1)
    inner = max(0, min(live, last))
    return Position(snapshot.outer_step, inner, began + inner)
