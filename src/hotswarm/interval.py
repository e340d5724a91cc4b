"""How often to take a snapshot: the classical answer, pure, no clock.

A snapshot costs the trainer `cost_s` seconds. Failures arrive on average every `mtbf_s` seconds. Too many snapshots
waste their cost, too few waste the work since the last one. Two published optima:

* Young (1974), "A first order approximation to the optimum checkpoint interval": T = sqrt(2 C M).
* Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), eq. 37:
  T = sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)) - C   for C < 2M,   else T = M.

hotswarm uses Daly's, because with slow disks or fragile machines C is no longer small against M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_MTBF_S = 4 * 3600.0  # a guess for spot instances until failures have been seen; only "auto" uses it
MIN_INTERVAL_S = 1.0  # below this the bookkeeping, not the copy, is what costs
MAX_INTERVAL_S = 1800.0  # a machine that has never failed still loses at most half an hour


def young(cost_s: float, mtbf_s: float) -> float:
    """Young's first-order optimum in seconds, for `cost_s` >= 0 and `mtbf_s` > 0."""
    _check(cost_s, mtbf_s)
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum in seconds: the time of useful work between the end of one dump and the next."""
    _check(cost_s, mtbf_s)
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run has shown so far.

    `stall_s`: seconds the training thread was blocked by one snapshot. `durable_s`: seconds from the copy until the
    snapshot would survive this node; the next one cannot be of use before that. `mtbf_s`: mean time between failures.
    """

    stall_s: float
    durable_s: float = 0.0
    mtbf_s: float = DEFAULT_MTBF_S


def automatic(seen: Observed, max_overhead: float) -> float:
    """The interval in seconds for `snapshot_interval="auto"`.

    Daly's optimum, but never so short that the stall takes more than `max_overhead` of the training time, nor shorter
    than the time that a snapshot needs to become durable, nor outside [MIN_INTERVAL_S, MAX_INTERVAL_S].
    """
    if not 0.0 < max_overhead <= 1.0:
        raise ValueError(f"max_overhead must be in (0, 1], not {max_overhead}")
    affordable = seen.stall_s / max_overhead
    best = max(daly(seen.stall_s, seen.mtbf_s), affordable, seen.durable_s, MIN_INTERVAL_S)
    return min(best, max(MAX_INTERVAL_S, affordable))


def _check(cost_s: float, mtbf_s: float) -> None:
    if not cost_s >= 0.0 or not mtbf_s > 0.0:
        raise ValueError(f"need cost_s >= 0 and mtbf_s > 0, not {cost_s} and {mtbf_s}")
