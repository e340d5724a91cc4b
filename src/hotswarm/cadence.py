"""When a snapshot is due: a machine without clock or thread. `now` is monotonic seconds, an argument everywhere.

    started ──interval──▶ due ──taken──▶ (interval runs again)
                           └──failed──▶ due again after RETRY_S, 2·RETRY_S, … at most one interval

A cold checkpoint is a snapshot that is kept longer, so when both kinds are due one cold one serves for both. The end of
an outer step makes a hot one due at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hotswarm.checkpoint_types import CheckpointType
from hotswarm.interval import DEFAULT_MTBF_S, Observed, automatic

RETRY_S = 1.0  # after a failure; the disk may be full for a moment only
SMOOTHING = 0.3  # weight of the newest stall in their running mean


@dataclass(slots=True)
class Cadence:
    """Due times of hot and cold snapshots."""

    interval: float | Literal["auto"]
    cold_interval: float
    max_overhead: float = 0.01
    stall_s: float = 0.0
    durable_s: float = 0.0
    mtbf_s: float = DEFAULT_MTBF_S
    _hot_at: float = field(default=float("inf"), init=False)
    _cold_at: float = field(default=float("inf"), init=False)
    _failures: int = field(default=0, init=False)
    _measured: bool = field(default=False, init=False)

    @property
    def interval_s(self) -> float:
        """Seconds between two hot snapshots, as things stand."""
        if self.interval == "auto":
            return automatic(Observed(self.stall_s, self.durable_s, self.mtbf_s), self.max_overhead)
        return self.interval

    def start(self, now: float) -> None:
        """Begin counting. An automatic interval needs a first stall to go by, so its first snapshot is due at once."""
        self._hot_at = now if self.interval == "auto" else now + self.interval
        self._cold_at = now + self.cold_interval
        self._failures = 0

    def stop(self) -> None:
        """Nothing is due any more."""
        self._hot_at = self._cold_at = float("inf")

    @property
    def next_at(self) -> float:
        """When the next snapshot is due; infinite when stopped."""
        return min(self._hot_at, self._cold_at)

    def due(self, now: float) -> CheckpointType | None:
        """The kind that is due, if one is."""
        if now >= self._cold_at:
            return CheckpointType.COLD
        return CheckpointType.HOT if now >= self._hot_at else None

    def outer_step(self, now: float) -> None:
        """A round ended: a hot snapshot is due now, unless stopped."""
        if self._hot_at != float("inf"):
            self._hot_at = min(self._hot_at, now)

    def taken(self, kind: CheckpointType, now: float, stall_s: float) -> None:
        """A snapshot was copied at `now`, blocking training for `stall_s`."""
        self.stall_s = self.stall_s * (1 - SMOOTHING) + stall_s * SMOOTHING if self._measured else stall_s
        self._measured = True
        self._failures = 0
        if self._hot_at == float("inf"):
            return  # stopped: an explicit snapshot starts nothing
        self._hot_at = now + self.interval_s
        if kind is CheckpointType.COLD:
            self._cold_at = now + self.cold_interval

    def durable(self, seconds: float) -> None:
        """A snapshot became durable `seconds` after its copy."""
        self.durable_s = seconds

    def failed(self, now: float) -> None:
        """A snapshot that was due could not be taken or written."""
        retry_s = min(RETRY_S * 2.0**self._failures, self.interval_s)
        self._failures = min(self._failures + 1, 16)
        for name in ("_hot_at", "_cold_at"):
            if getattr(self, name) <= now:
                setattr(self, name, now + retry_s)
        if self._hot_at != float("inf"):
            self._hot_at = min(self._hot_at, now + retry_s)
