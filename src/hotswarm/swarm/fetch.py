"""The shell around the planner: streams, verification and disk. What to ask of whom is decided in plan.py.

    Ask → a task that reads one stream; each chunk is verified, scanned and written in place on a thread while the next
    one is on its way; what became of it goes back to the planner as an event, through one queue.

Nothing here is lost when the process dies: chunks lie in a PartialSection as soon as they are verified, and the next
fetch of the same section asks only for what it lacks.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter

from hotswarm.errors import (
    HotswarmError,
    IntegrityError,
    LocalFailure,
    NotAuthorised,
    PeerMisbehaved,
    PeerUnavailable,
    RecoveryError,
    StoreError,
)
from hotswarm.snapshot.chunks import Placed
from hotswarm.snapshot.manifest import SectionEntry
from hotswarm.snapshot.tree import show_path
from hotswarm.store.partial import PartialSection
from hotswarm.swarm.client import PeerClient, PeerLacks
from hotswarm.swarm.nanscan import find_nan
from hotswarm.swarm.plan import FAILURES_MAX, Planner
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
    SectionDropped,
    SectionKey,
    Stuck,
    Tick,
)
from hotswarm.swarm.wire import ChunkFrame

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.25
RATE_OVER_S = 2.0  # of the rate that is shown
REPORT_TIMEOUT_S = 2.0
KEEPERS = 4  # threads that verify and write

Json = dict[str, object]


class Poisoned(RecoveryError):
    """The state is what its donors say it is, and it holds a NaN: nobody can train from it."""


class DonorsLost(PeerUnavailable):
    """Every donor of a section failed. `reasons` by node."""

    def __init__(self, section: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        words = "; ".join(f"{node[:12]}: {reason}" for node, reason in reasons.items()) or "there was none"
        super().__init__(f"no donor is left for section {section!r} ({words})")


@dataclass(slots=True)
class Part:
    """Chunks of one section that are wanted, and who has them. `scan`: refuse NaN in them."""

    key: SectionKey
    entry: SectionEntry
    partial: PartialSection
    indexes: Sequence[int]
    donors: Sequence[str]
    replaceable: bool = False
    scan: bool = False
    scanned: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The section's name."""
        return self.entry.name

    def missing(self) -> tuple[tuple[int, int], ...]:
        """(index, bytes) of the wanted chunks that are not here yet."""
        spans = self.entry.layout.chunks
        return tuple((index, spans[index].length) for index in self.indexes if not self.partial.has(index))

    def keep(self, index: int, data: memoryview) -> None:
        """Verify, write, scan. IntegrityError: not the chunk. StoreError: the disk. Poisoned: a NaN."""
        self.partial.put(index, data)
        self.scan_chunk(index, data)

    def scan_chunk(self, index: int, data: bytes | memoryview) -> None:
        """Poisoned when a wanted scan finds a NaN in this chunk; names the tensor."""
        if not self.scan or index in self.scanned:
            return
        start = self.entry.layout.chunks[index].offset
        at = find_nan(self._tensor_at(start).spec.dtype, data)  # a chunk's tensors are all of one dtype
        if at is not None:
            path = show_path(self._tensor_at(start + at).path)
            raise Poisoned(f"{path} of the {self.name} section holds a NaN")
        self.scanned.add(index)

    def _tensor_at(self, offset: int) -> Placed:
        tensors = self.entry.layout.tensors
        return tensors[bisect.bisect_right(tensors, offset, key=attrgetter("offset")) - 1]

    def scan_rest(self) -> None:
        """Scan what was here already. Poisoned."""
        if self.scan:
            for index in self.indexes:
                if index not in self.scanned:
                    self.scan_chunk(index, self.partial.chunk(index))


@dataclass(slots=True)
class Tally:
    """What one section cost. `fetched_chunks` counts verified arrivals, duplicates too."""

    fetched: int = 0
    fetched_chunks: int = 0


class Fetch:
    """One fetch. `add` parts, `run`, add more, run again; `close` at the end."""

    def __init__(
        self,
        client: Callable[[str], PeerClient],
        *,
        timeout_s: float,
        progress: Callable[[Json], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` gives a connection to a node. `timeout_s` bounds the time without progress."""
        self.tallies: dict[str, Tally] = {}
        self.inner_donor = ""
        self._client = client
        self._progress = progress
        self._clock = clock
        self._planner = Planner(timeout_s=timeout_s, now=clock())
        self._parts: dict[SectionKey, Part] = {}
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._keepers = ThreadPoolExecutor(KEEPERS, thread_name_prefix="keep")
        self._finished = False
        self._shown: list[tuple[float, int]] = []

    # ------------------------------------------------------------ facts

    @property
    def bytes_fetched(self) -> int:
        """Verified bytes of the parts that are still wanted."""
        return self._planner.fetched_bytes()

    @property
    def bytes_wasted(self) -> int:
        """Bytes that came and are of no use."""
        return self._planner.wasted_bytes

    @property
    def by_donor(self) -> dict[str, int]:
        """Verified bytes by node."""
        return self._planner.bytes_by_donor()

    @property
    def problems(self) -> dict[str, str]:
        """Donors that failed, and why."""
        return self._planner.problems()

    @property
    def misbehaved(self) -> frozenset[str]:
        """Donors that sent what no honest donor sends."""
        return self._planner.barred

    def rate_of(self, node: str) -> float | None:
        """Measured bytes per second of a donor."""
        return self._planner.rate_of(node)

    # ------------------------------------------------------------ parts

    def add(self, *parts: Part) -> None:
        """These chunks are wanted too. Takes effect with the next event."""
        self._queue.put_nowait(self._added(parts))

    def replace(self, old: Sequence[SectionKey], new: Sequence[Part]) -> None:
        """Give up some parts, and want others."""
        dropped = [SectionDropped(key) for key in old]
        self._queue.put_nowait(Batch((*dropped, *self._added(new).events)))

    def _added(self, parts: Sequence[Part]) -> Batch:
        events: list[Event] = []
        for part in parts:
            self._parts[part.key] = part
            patience = 1 if part.replaceable else FAILURES_MAX
            events.append(SectionAdded(part.key, part.name, part.missing(), patience))
            events += [DonorAdded(node, frozenset({part.key})) for node in part.donors]
        self._finished = False
        return Batch(tuple(events))

    # ------------------------------------------------------------ running

    async def run(self, on_lost: Callable[[SectionKey, Mapping[str, str]], Awaitable[None]]) -> None:
        """Fetch until all parts are here.

        `on_lost` is called when a part has no donor left: it calls `replace`, or raises. Raises what it raises,
        PeerUnavailable without progress for too long, LocalFailure when the disk refuses or when three different donors
        fail verification, Poisoned.
        """
        while not self._finished:
            now = self._clock()
            self._show(now)
            event: Event | BaseException = Tick()
            delay = min(self._planner.next_deadline(now) - now, PROGRESS_EVERY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    event = await self._queue.get()
            if isinstance(event, BaseException):
                raise event
            for effect in self._planner.handle(event, self._clock()):
                self._execute(effect, on_lost)
        self._show(self._clock(), last=True)
        loop = asyncio.get_running_loop()
        for part in self._parts.values():
            await loop.run_in_executor(self._keepers, part.scan_rest)

    def _execute(self, effect: Effect, on_lost: Callable[[SectionKey, Mapping[str, str]], Awaitable[None]]) -> None:
        match effect:
            case Ask():
                task = asyncio.get_running_loop().create_task(self._stream(effect))
                self._tasks[effect.request] = task
                task.add_done_callback(lambda _: self._tasks.pop(effect.request, None))
            case Cancel():
                task_or_none = self._tasks.get(effect.request)
                if task_or_none is not None:
                    task_or_none.cancel()
            case Report():
                self._beside(self._report(effect))
            case Lost():
                self._beside(self._replace_lost(effect, on_lost))
            case Blame():
                raise LocalFailure(f"{effect.text}: the fault is on this machine; check its memory and disk")
            case Stuck():
                raise PeerUnavailable(f"{effect.text} from any donor; try again later")
            case Finished():
                self._finished = True

    async def _replace_lost(
        self, lost: Lost, on_lost: Callable[[SectionKey, Mapping[str, str]], Awaitable[None]]
    ) -> None:
        try:
            await on_lost(lost.key, lost.reasons)
        except HotswarmError as error:
            self._queue.put_nowait(error)

    def _beside(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._others.add(task)
        task.add_done_callback(self._beside_done)
        return task

    def _beside_done(self, task: asyncio.Task[None]) -> None:
        self._others.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever awaited it has it, and who was cancelled meanwhile does not need it

    async def close(self) -> None:
        """Cancel every stream, and wait until no thread touches a partial section any more."""
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._keepers.shutdown)

    # ------------------------------------------------------------ one stream

    async def _stream(self, ask: Ask) -> None:
        part = self._parts[ask.key]
        keeping: asyncio.Task[None] | None = None
        try:
            async with contextlib.aclosing(self._client(ask.node).chunks(part.entry, ask.indexes)) as chunks:
                async for chunk in chunks:
                    if keeping is not None:
                        await asyncio.shield(keeping)
                    keeping = self._beside(self._keep(ask, part, chunk))
            if keeping is not None:
                await asyncio.shield(keeping)
            ended = Ended(ask.request, "complete")
        except IntegrityError:
            return  # _keep has told the planner
        except PeerLacks as error:
            ended = Ended(ask.request, "gone", str(error))
        except PeerUnavailable as error:
            kind = "full" if error.retry_after_s is not None else "unavailable"
            ended = Ended(ask.request, kind, str(error), error.retry_after_s)  # type: ignore[arg-type]
        except PeerMisbehaved as error:
            ended = Ended(ask.request, "misbehaved", error.evidence)
        except NotAuthorised as error:
            ended = Ended(ask.request, "gone", str(error))
        except (StoreError, Poisoned) as error:
            self._queue.put_nowait(error)
            return
        self._queue.put_nowait(ended)

    async def _keep(self, ask: Ask, part: Part, chunk: ChunkFrame) -> None:
        """Verify and write on a thread, and tell the planner. A chunk that is here already is not even hashed.

        Runs to its end when the stream is cancelled: what was verified is not fetched again.
        """
        nbytes = chunk.raw_bytes
        if self._planner.needs(part.key, chunk.index):
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._keepers, part.keep, chunk.index, chunk.data)
            except IntegrityError:
                self._queue.put_nowait(Corrupt(ask.request, ask.node, part.key, chunk.index, nbytes))
                raise
        tally = self.tallies.setdefault(part.name, Tally())
        tally.fetched += nbytes
        tally.fetched_chunks += 1
        self._queue.put_nowait(Arrived(ask.request, ask.node, part.key, chunk.index, nbytes))

    async def _report(self, report: Report) -> None:
        part = self._parts[report.key]
        try:
            await self._client(report.node).report_bad_chunk("", part.entry.digest, report.index, REPORT_TIMEOUT_S)
        except HotswarmError as error:
            log.info("could not tell %s of its corrupt chunk: %s", report.node, error)

    # ------------------------------------------------------------ progress

    def _show(self, now: float, *, last: bool = False) -> None:
        if self._shown and not last and now - self._shown[-1][0] < PROGRESS_EVERY_S:
            return
        done, total = self._planner.fetched_bytes(), self._planner.wanted_bytes()
        self._shown.append((now, done))
        self._shown = [shown for shown in self._shown if now - shown[0] <= RATE_OVER_S] or self._shown[-1:]
        since, before = self._shown[0]
        rate = max(0, done - before) / (now - since) if now > since else 0.0
        self._progress(
            {
                "phase": "fetch",
                "bytes": done,
                "total": total,
                "rate": rate,
                "eta_s": (total - done) / rate if rate else None,
                "wasted": self._planner.wasted_bytes,
                "donors": self._planner.bytes_by_donor(),
                "inner_donor": self.inner_donor,
            }
        )
