"""A network of make-believe donors under a virtual clock, for driving the planner without sockets."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from hotswarm.swarm.plan import Planner
from hotswarm.swarm.plan_types import (
    Arrived,
    Ask,
    Batch,
    Blame,
    Cancel,
    Corrupt,
    DonorAdded,
    Effect,
    Ended,
    Event,
    Finished,
    Lost,
    Report,
    SectionAdded,
    SectionKey,
    Stuck,
    Tick,
)

OUTER = SectionKey(b"outer".ljust(32))
INNER = SectionKey(b"inner".ljust(32))
MIB = 1 << 20


@dataclass
class SimDonor:
    """`rate` in bytes/s. From `dies_at` on every stream breaks; from `freezes_at` on nothing comes any more."""

    node: str
    rate: float
    holds: frozenset[SectionKey] = frozenset({OUTER})
    dies_at: float = math.inf
    back_at: float = math.inf
    freezes_at: float = math.inf
    corrupt: frozenset[int] = frozenset()
    full_until: float = -math.inf


@dataclass
class Result:
    finished_at: float | None = None
    stuck: bool = False
    blamed: bool = False
    lost: list[Lost] = field(default_factory=list)
    asked: Counter[tuple[SectionKey, int]] = field(default_factory=Counter)
    asked_after_verified: int = 0
    verified: Counter[tuple[SectionKey, int]] = field(default_factory=Counter)
    reports: list[Report] = field(default_factory=list)
    first_ask_after: dict[str, float] = field(default_factory=dict)


class Simulation:
    def __init__(
        self, donors: list[SimDonor], sizes: dict[SectionKey, list[int]], timeout_s: float = 60.0, patience: int = 5
    ) -> None:
        self.planner = Planner(timeout_s=timeout_s, now=0.0)
        self.donors = {donor.node: donor for donor in donors}
        self.sizes = sizes
        self.result = Result()
        self.now = 0.0
        self._queue: list[tuple[float, int, int, Event | None]] = []
        self._order = itertools.count()
        self._open: set[int] = set()
        self._start: list[Event] = [DonorAdded(donor.node, donor.holds) for donor in donors]
        self._start += [SectionAdded(key, "s", tuple(enumerate(lengths)), patience) for key, lengths in sizes.items()]

    def run(self, until: float = 10_000.0) -> Result:
        self._execute(self.planner.handle(Batch(tuple(self._start)), self.now))
        result = self.result
        while result.finished_at is None and not result.stuck and not result.blamed and self.now < until:
            deadline = self.planner.next_deadline(self.now)
            if self._queue and self._queue[0][0] <= deadline:
                at, _, request, event = heapq.heappop(self._queue)
                self.now = max(self.now, at)
                if request in self._open and event is not None:
                    self._deliver(request, event)
            else:
                assert deadline > self.now or not self._queue, "the planner asks for a tick in the past"
                self.now = max(self.now, deadline)
                self._execute(self.planner.handle(Tick(), self.now))
        return result

    def _deliver(self, request: int, event: Event) -> None:
        if isinstance(event, Ended):
            self._open.discard(request)
        if isinstance(event, Arrived):
            self.result.verified[event.key, event.index] += 1
        self._execute(self.planner.handle(event, self.now))

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask():
                    self._ask(effect)
                case Cancel():
                    self._open.discard(effect.request)
                case Report():
                    self.result.reports.append(effect)
                case Lost():
                    self.result.lost.append(effect)
                case Stuck():
                    self.result.stuck = True
                case Blame():
                    self.result.blamed = True
                case Finished():
                    self.result.finished_at = self.now

    def _ask(self, ask: Ask) -> None:
        donor = self.donors[ask.node]
        assert ask.indexes
        assert len(set(ask.indexes)) == len(ask.indexes)
        self._open.add(ask.request)
        self.result.first_ask_after.setdefault(ask.node, self.now)
        for index in ask.indexes:
            self.result.asked[ask.key, index] += 1
            if self.result.verified[ask.key, index]:
                self.result.asked_after_verified += 1
        at = self.now + 0.001
        if donor.dies_at <= at < donor.back_at:
            return self._later(at, ask.request, Ended(ask.request, "unavailable", "connection refused"))
        if at < donor.full_until:
            return self._later(at, ask.request, Ended(ask.request, "full", "no slot", retry_after_s=0.5))
        alive_until = donor.dies_at if at < donor.dies_at else math.inf
        for index in ask.indexes:
            nbytes = self.sizes[ask.key][index]
            at += nbytes / donor.rate
            if at >= donor.freezes_at:
                return None
            if at >= alive_until:
                return self._later(alive_until, ask.request, Ended(ask.request, "unavailable", "stream cut"))
            kind = Corrupt if index in donor.corrupt else Arrived
            self._later(at, ask.request, kind(ask.request, ask.node, ask.key, index, nbytes))
        return self._later(at, ask.request, Ended(ask.request, "complete"))

    def _later(self, at: float, request: int, event: Event) -> None:
        heapq.heappush(self._queue, (at, next(self._order), request, event))
