"""Where in the round a joiner starts: the swarm's live clock turned into counters. Pure.

A joiner that restores the outer state of a round trains only what is left of it, because the others will not wait for
more: arriving late at the sync means that they go on without it. So it starts at the position where the others are
*now*, and a little ahead, for what it still has to do before its first step; arriving early costs it only waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotswarm.swarm.model import LiveClock

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
    if clock.outer_step > snapshot.outer_step:
        live = clock.round_length or round_length  # they are past it: nothing of this round is left but the sync
    else:
        ahead = math.ceil(max(clock.steps_per_s, 0.0) * (max(elapsed_s, 0.0) + margin_s))
        live = clock.inner_step + max(ahead, 1)
        if clock.training_step >= clock.inner_step:
            began = clock.training_step - clock.inner_step
    length = round_length or clock.round_length
    inner = max(0, min(live, length - 1)) if length else max(0, live)
    return Position(snapshot.outer_step, inner, began + inner)
