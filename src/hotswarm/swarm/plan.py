"""Who is asked for which chunk next. A machine without I/O: (event, now) in, effects out.

A chunk goes only forward: *todo* → *asked* (of one donor, rarely two) → *verified*. Whatever ends a request (a cut
stream, a deadline, a corrupt chunk, another donor that overtook it) puts its unverified chunks back to *todo*; nothing
verified is ever asked for again. Events may arrive in any order and late: an event of a request that has ended is
counted, not obeyed.

    donor:  ready → busy → ready …       one request at a time; several streams to one donor gain nothing
                      ├→ resting until t   it failed, or is full and said when to come back
                      └→ out               it misbehaved, or failed too often in a row

Requests are sized by guided self-scheduling (Polychronopoulos and Kuck, 1987): half of a donor's share of what is left,
by measured rates, at most some seconds' worth; so donors finish together without knowing rates beforehand. A donor with
nothing left to ask takes over the tail of the request that would end last. Only the chunk in flight of a stalled
request is ever asked for twice, and the number of those is bounded.

The shell (`fetch.py`) executes effects and feeds events; `next_deadline` says when to send a Tick.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    SectionDone,
    SectionDropped,
    SectionKey,
    Stuck,
    Tick,
)

READ_TIMEOUT_S = 10.0  # no chunk for this long, and another donor has it: ask there (network.md)
STALL_S = 1.0  # after this long without a chunk an idle donor may be asked for the one in flight
MIN_RATE = 32 * 1024  # bytes/s; a donor slower than this over RATE_WINDOW_S is left, if another one has the chunks
RATE_WINDOW_S = 15.0
TICK_S = 0.25  # how often deadlines are looked at while something is under way
RATE_DECAY_S = 3.0  # measured rates forget with this time constant
REQUEST_S = 2.0  # a request asks for at most this many seconds' worth of chunks
REQUEST_CHUNKS = 128  # and never for more than this
PROBE_CHUNKS = 4  # first request to a donor of unknown rate, when others share the work
FAILURES_MAX = 5  # in a row; then the donor is out: 0.25 + 0.5 + 1 + 2 s of rests
REST_S = 0.25  # after the first failure; doubles
CORRUPT_DONORS_MAX = 3  # so many different donors cannot all be wrong: the fault is here


@dataclass(slots=True)
class _Section:
    key: SectionKey
    name: str
    sizes: dict[int, int]
    todo: deque[int]
    patience: int
    verified: set[int] = field(default_factory=set)
    lost: bool = False
    done: bool = False


@dataclass(slots=True)
class _Donor:
    node: str
    holds: set[SectionKey]
    request: int | None = None
    rest_until: float = -math.inf
    failures: int = 0  # in a row
    out: str = ""  # reason
    last_problem: str = ""
    slow: str = ""  # that another donor had to take over from it, and when
    seen_bytes: float = 0.0  # both decay with RATE_DECAY_S
    seen_s: float = 0.0
    busy_s: float = 0.0  # in all
    verified_bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Measured bytes per second while busy."""
        return self.seen_bytes / self.seen_s if self.seen_s > 0 and self.seen_bytes > 0 else None


@dataclass(slots=True)
class _Request:
    number: int
    node: str
    key: SectionKey
    pending: deque[int]  # in the order in which the donor sends
    asked_at: float
    last_at: float  # of the last chunk, or asked_at
    cut: bool = False  # it owes less than it was asked for, so it is cancelled when it has sent the rest


class Planner:
    """The plan of one fetch."""

    def __init__(self, *, timeout_s: float, now: float, duplicates_max: int = 16) -> None:
        """`timeout_s` bounds the time without progress. `duplicates_max`: chunks that may be asked for twice."""
        self.wasted_bytes = 0
        self.duplicates = 0
        self._timeout_s = timeout_s
        self._duplicates_left = duplicates_max
        self._progress_at = now
        self._sections: dict[SectionKey, _Section] = {}
        self._donors: dict[str, _Donor] = {}
        self._requests: dict[int, _Request] = {}
        self._numbers = 0
        self._corrupt: set[str] = set()  # nodes that sent a chunk with a wrong digest
        self._barred: set[str] = set()  # nodes that get no second chance in this fetch
        self._finished = False
        self._stuck = False

    # ------------------------------------------------------------ what can be asked of it

    def needs(self, key: SectionKey, index: int) -> bool:
        """Whether that chunk is wanted and not verified yet."""
        section = self._sections.get(key)
        return section is not None and index in section.sizes and index not in section.verified

    def bytes_by_donor(self) -> dict[str, int]:
        """Verified bytes of each donor that gave some."""
        return {node: donor.verified_bytes for node, donor in self._donors.items() if donor.verified_bytes}

    @property
    def barred(self) -> frozenset[str]:
        """Nodes that misbehaved."""
        return frozenset(self._barred)

    def rate_of(self, node: str) -> float | None:
        """Measured bytes per second of that donor, None when unknown."""
        donor = self._donors.get(node)
        return donor.rate if donor else None

    def problems(self) -> dict[str, str]:
        """Why donors are out, or what they failed with when they gave nothing."""
        found = {}
        for node, donor in self._donors.items():
            if donor.out:
                found[node] = donor.out
            elif donor.slow:
                found[node] = donor.slow
            elif not donor.verified_bytes and (donor.last_problem or donor.request is not None or donor.busy_s):
                found[node] = donor.last_problem or "slow: it had sent nothing when the others were done"
        return found

    def fetched_bytes(self) -> int:
        """Verified bytes of the sections that are wanted."""
        return sum(section.sizes[index] for section in self._sections.values() for index in section.verified)

    def wanted_bytes(self) -> int:
        """Bytes that were missing when their sections were added."""
        return sum(sum(section.sizes.values()) for section in self._sections.values())

    def next_deadline(self, now: float) -> float:
        """When to send a Tick at the latest, on the clock of `now`."""
        rests = [donor.rest_until for donor in self._donors.values() if donor.rest_until > now]
        ticks = [now + TICK_S] if self._requests else []
        return min([self._progress_at + self._timeout_s, *rests, *ticks])

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event, return what is to be done, in order."""
        effects: list[Effect] = []
        self._take(event, now, effects)
        self._expire(now, effects)
        self._assign(now, effects)
        self._conclude(now, effects)
        return effects

    def _take(self, event: Event, now: float, effects: list[Effect]) -> None:
        match event:
            case Batch():
                for one in event.events:
                    self._take(one, now, effects)
            case SectionAdded():
                sizes = dict(event.missing)
                self._sections[event.key] = _Section(event.key, event.name, sizes, deque(sizes), event.patience)
                self._progress_at = now
                self._finished = False
            case SectionDropped():
                self._drop_section(event.key, effects)
            case DonorAdded():
                self._add_donor(event)
            case Arrived():
                self._arrived(event, now, effects)
            case Corrupt():
                self._corrupted(event, effects)
            case Ended():
                self._ended(event, now, effects)
            case Tick():
                pass

    def _add_donor(self, event: DonorAdded) -> None:
        donor = self._donors.setdefault(event.node, _Donor(event.node, set()))
        donor.holds |= event.sections
        if donor.node not in self._barred:
            donor.out, donor.failures, donor.rest_until = "", 0, -math.inf
        for key in event.sections & self._sections.keys():
            self._sections[key].lost = False

    def _drop_section(self, key: SectionKey, effects: list[Effect]) -> None:
        section = self._sections.pop(key, None)
        if section is None:
            return
        self.wasted_bytes += sum(section.sizes[index] for index in section.verified)
        for request in [request for request in self._requests.values() if request.key == key]:
            self._close(request, effects, "the section is not needed any more")

    def _arrived(self, event: Arrived, now: float, effects: list[Effect]) -> None:
        request = self._requests.get(event.request)
        donor = self._donors[event.node]
        if request is not None:
            self._measure(donor, request, event.nbytes, now)
            if event.index in request.pending:
                request.pending.remove(event.index)
        section = self._sections.get(event.key)
        if section is None or not self.needs(event.key, event.index):
            self.wasted_bytes += event.nbytes
            self.duplicates += 1
        else:
            section.verified.add(event.index)
            donor.verified_bytes += event.nbytes
            self._progress_at = now
            if event.index in section.todo:
                section.todo.remove(event.index)
            self._retire_elsewhere(event, effects)
        donor.failures = 0
        donor.last_problem = ""
        if request is not None and request.cut and not request.pending and request.number in self._requests:
            self._close(request, effects, "others took over the rest of it")

    def _retire_elsewhere(self, event: Arrived, effects: list[Effect]) -> None:
        """Take a verified chunk out of other requests; a request with nothing left to send is cancelled."""
        for other in list(self._requests.values()):
            if other.number != event.request and other.key == event.key and event.index in other.pending:
                other.pending.remove(event.index)
                other.cut = True
                if not other.pending:
                    self._close(other, effects, "another donor was faster")

    def _measure(self, donor: _Donor, request: _Request, nbytes: int, now: float) -> None:
        elapsed = max(0.0, now - request.last_at)
        fade = math.exp(-elapsed / RATE_DECAY_S)
        donor.seen_bytes = donor.seen_bytes * fade + nbytes
        donor.seen_s = donor.seen_s * fade + max(elapsed, 1e-6)
        donor.busy_s += elapsed
        request.last_at = now

    def _corrupted(self, event: Corrupt, effects: list[Effect]) -> None:
        self.wasted_bytes += event.nbytes
        donor = self._donors[event.node]
        self._corrupt.add(event.node)
        self._barred.add(event.node)
        section = self._sections.get(event.key)
        name = section.name if section else "a"
        self._put_out(donor, f"chunk {event.index} of its {name} section does not match its digest", effects)
        effects.append(Report(event.node, event.key, event.index))
        if len(self._corrupt) >= CORRUPT_DONORS_MAX:
            effects.append(Blame(f"chunks from {len(self._corrupt)} different donors do not match their digests"))

    def _ended(self, event: Ended, now: float, effects: list[Effect]) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        donor = self._donors[request.node]
        unsent = bool(request.pending)
        self._close(request, None, "")
        if event.kind == "complete" and not unsent:
            return
        if event.kind == "complete":
            self._barred.add(donor.node)
            self._put_out(donor, "it ended a stream without sending all that was asked for", effects)
        elif event.kind == "misbehaved":
            self._barred.add(donor.node)
            self._put_out(donor, event.text, effects)
        elif event.kind == "gone":
            donor.holds.discard(request.key)
            donor.last_problem = event.text
            if not donor.holds & self._sections.keys():
                self._put_out(donor, event.text, effects)
        elif event.kind == "full":
            donor.rest_until = now + (event.retry_after_s or 1.0)
            donor.last_problem = event.text
        else:
            self._failed(donor, event.text, now, effects)

    def _failed(self, donor: _Donor, text: str, now: float, effects: list[Effect]) -> None:
        donor.failures += 1
        donor.last_problem = text
        if donor.failures >= FAILURES_MAX:
            self._put_out(donor, text, effects)
        else:
            donor.rest_until = now + REST_S * 2 ** (donor.failures - 1)

    def _put_out(self, donor: _Donor, reason: str, effects: list[Effect]) -> None:
        donor.out = reason
        if donor.request is not None:
            self._close(self._requests[donor.request], effects, reason)

    def _close(self, request: _Request, effects: list[Effect] | None, why: str) -> None:
        """End a request: what it still owed is todo again, unless another request is asked for it. None: no Cancel."""
        del self._requests[request.number]
        self._donors[request.node].request = None
        section = self._sections.get(request.key)
        if section is not None:
            asked = {index for other in self._requests.values() if other.key == request.key for index in other.pending}
            back = [index for index in request.pending if index not in section.verified and index not in asked]
            section.todo.extendleft(reversed(back))
        if effects is not None:
            effects.append(Cancel(request.number, why))

    # ------------------------------------------------------------ deadlines

    def _read_timeout(self, request: _Request) -> float:
        """A donor that nobody can replace is given until the time without progress is up."""
        section = self._sections[request.key]
        replaceable = section.patience < FAILURES_MAX or self._others(request.key, request.node)
        return min(READ_TIMEOUT_S, self._timeout_s) if replaceable else self._timeout_s

    def _others(self, key: SectionKey, node: str) -> bool:
        return any(d.node != node and not d.out and d.failures == 0 and key in d.holds for d in self._donors.values())

    def _expire(self, now: float, effects: list[Effect]) -> None:
        for donor in self._donors.values():
            if donor.rest_until <= now:
                donor.rest_until = -math.inf
        for request in list(self._requests.values()):
            donor = self._donors[request.node]
            silent = now - request.last_at
            limit = self._read_timeout(request)
            if silent >= limit:
                self._close(request, effects, f"no data for {limit:.0f} s")
                self._failed(donor, f"stalled: no data for {limit:.0f} s", now, effects)
                donor.rest_until = max(donor.rest_until, now + READ_TIMEOUT_S)
            elif self._too_slow(donor, silent) and self._others(request.key, donor.node):
                self._put_out(donor, f"too slow: {donor.rate or 0:.0f} bytes/s, below {MIN_RATE}", effects)

    def _too_slow(self, donor: _Donor, silent: float) -> bool:
        return donor.busy_s + silent >= RATE_WINDOW_S and donor.seen_bytes < MIN_RATE * (donor.seen_s + silent)

    # ------------------------------------------------------------ who is asked for what

    def _assign(self, now: float, effects: list[Effect]) -> None:
        idle = [d for d in self._donors.values() if d.request is None and not d.out and d.rest_until <= now]
        for donor in sorted(idle, key=lambda d: (-(d.rate or math.inf), d.node)):
            mine = [s for s in self._sections.values() if s.key in donor.holds and s.todo]
            if mine:
                # the rarest section first: nobody else can do this donor's inner section
                section = min(mine, key=lambda s: (len(self._holders(s.key)), s.name))
                count = self._share(donor, section)
                self._ask(donor, section, [section.todo.popleft() for _ in range(count)], now, effects)
            else:
                self._take_over(donor, now, effects)

    def _holders(self, key: SectionKey) -> list[_Donor]:
        return [donor for donor in self._donors.values() if not donor.out and key in donor.holds]

    def _share(self, donor: _Donor, section: _Section) -> int:
        """How many chunks to ask of this donor now."""
        holders = [holder for holder in self._holders(section.key) if holder.failures == 0] or [donor]
        left = len(section.todo)
        if donor.failures:
            return 1
        if len(holders) == 1:
            return min(left, REQUEST_CHUNKS)
        if donor.rate is None:
            return max(1, min(left // (2 * len(holders)), PROBE_CHUNKS))
        known = [holder.rate for holder in holders if holder.rate is not None]
        total = sum(known) + (len(holders) - len(known)) * (sum(known) / len(known))
        size = sum(section.sizes.values()) / len(section.sizes)
        guided = math.ceil(left * donor.rate / total / 2)
        return max(1, min(left, guided, REQUEST_CHUNKS, int(donor.rate * REQUEST_S / size)))

    def _ask(self, donor: _Donor, section: _Section, indexes: Iterable[int], now: float, effects: list[Effect]) -> None:
        self._numbers += 1
        request = _Request(self._numbers, donor.node, section.key, deque(sorted(indexes)), now, now)
        self._requests[request.number] = request
        donor.request = request.number
        effects.append(Ask(request.number, donor.node, section.key, tuple(request.pending)))

    def _take_over(self, donor: _Donor, now: float, effects: list[Effect]) -> None:
        """Nothing is todo: help the request that would end last."""
        candidates = [r for r in self._requests.values() if r.pending and r.key in donor.holds]
        if not candidates:
            return
        slowest = max(candidates, key=lambda request: (self._ends_in(request, now), request.number))
        section = self._sections[slowest.key]
        theirs = self._rate_now(slowest, now)
        mine = donor.rate or theirs or 1.0  # an unknown donor is taken for an equal one
        asked = Counter(i for r in self._requests.values() if r.key == slowest.key for i in r.pending)
        tail = [index for index in list(slowest.pending)[1:] if asked[index] == 1]
        count = int(len(slowest.pending) * mine / (mine + (theirs or mine)))
        if donor.rate is None or donor.failures:
            count = min(count, PROBE_CHUNKS)
        taken = tail[max(0, len(tail) - count) :] if count else []
        head = slowest.pending[0]
        my_s = section.sizes[head] / mine
        if taken:
            for index in taken:
                slowest.pending.remove(index)
            slowest.cut = True
            self._ask(donor, section, taken, now, effects)
        elif (
            now - slowest.last_at >= max(STALL_S, 2 * my_s)
            and asked[head] == 1
            and self._duplicates_left > 0
            and len(slowest.pending) == 1
        ):
            self._duplicates_left -= 1
            silent_s = now - slowest.last_at
            self._donors[slowest.node].slow = f"slow: silent for {silent_s:.1f} s when another donor took over"
            self._ask(donor, section, [head], now, effects)

    def _rate_now(self, request: _Request, now: float) -> float | None:
        """Bytes per second of a busy donor, its present silence included."""
        donor = self._donors[request.node]
        return donor.seen_bytes / (donor.seen_s + now - request.last_at) if donor.rate else None

    def _ends_in(self, request: _Request, now: float) -> float:
        """Seconds until that request would be done."""
        rate = self._rate_now(request, now)
        sizes = self._sections[request.key].sizes
        owed = sum(sizes[index] for index in request.pending)
        return owed / rate if rate else math.inf

    # ------------------------------------------------------------ the end

    def _conclude(self, now: float, effects: list[Effect]) -> None:
        for section in self._sections.values():
            if not section.done and len(section.verified) == len(section.sizes):
                section.done = True
                effects.append(SectionDone(section.key))
            holders = [d for d in self._holders(section.key) if d.failures < section.patience]
            if not section.done and not section.lost and not holders:
                section.lost = True
                reasons = {d.node: d.out or d.last_problem for d in self._donors.values() if section.key in d.holds}
                effects.append(Lost(section.key, reasons))
        if self._sections and not self._finished and all(section.done for section in self._sections.values()):
            self._finished = True
            effects.append(Finished())
        if not self._finished and not self._stuck and now >= self._progress_at + self._timeout_s:
            self._stuck = True
            effects.append(Stuck(f"no progress for {self._timeout_s:.0f} s"))
