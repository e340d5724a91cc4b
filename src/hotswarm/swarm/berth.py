"""The place for the one trainer that a daemon serves: attaching, watching over it, and what its end leaves to do.

    empty ──attach──▶ taken ──the connection closes, or the process ends──▶ empty

The kernel says when a trainer is gone: its pidfd becomes readable, whatever its children still hold open. Where the
trainer's pid is not visible (another PID namespace) the end of the connection must do. Either way what is READY is
persisted; a torn slot is freed only when the process is dead, because one that merely hung up may still be writing. The
arena stays mapped for the next trainer, its pages warm, until `release()`.

An attachment is refused as busy only while the other trainer is really there: both its pidfd and its connection are
asked on the spot, because a trainer that is killed and restarted at once may be faster than the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from hotswarm.errors import ControlError
from hotswarm.store.arena import Arena, slots_that_fit
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from hotswarm.swarm.channel import Json
from hotswarm.swarm.fdpass import Connection
from hotswarm.swarm.model import LiveClock
from hotswarm.swarm.persist import Persister

log = logging.getLogger(__name__)

MAX_SLOT_BYTES = 1 << 46  # an offset must stay an offset
MAX_TABLE_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class Trainer:
    """An attached trainer. `pidfd` is None where its process is not visible."""

    connection: Connection
    pid: int
    pidfd: int | None
    label: str
    rank: int
    attached_at: float  # time.time()
    linger_seconds: float | None

    def gone(self) -> bool:
        """Whether it has left, noticed by the event loop yet or not."""
        return self.connection.hung_up() or self.dead()

    def dead(self) -> bool:
        """Whether its process has ended. A trainer that only hung up may still be writing into the arena."""
        if self.pidfd is None:
            return self.connection.hung_up()
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


class Berth:
    """At most one trainer. All methods belong to the event loop's thread."""

    def __init__(
        self,
        store: FileStore,
        persister: Persister,
        retention: Retention,
        facts: Json,
        on_change: Callable[[], None],
    ) -> None:
        """`facts` ({"run", "node_id"}) are told to each trainer. `on_change` is called when a trainer has come, and
        when one has left and what it left is on disk.
        """
        self._store = store
        self._persister = persister
        self._retention = retention
        self._facts = facts
        self._on_change = on_change
        self._attaching = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._watched: set[Trainer] = set()  # processes not dead yet: the trainer, or one that has hung up
        self.trainer: Trainer | None = None
        self.arena: Arena | None = None
        self.last_linger_seconds: float | None = None  # what the last trainer asked for

    async def attach(self, connection: Connection, request: Json, fds: list[int]) -> None:
        """Answer an `attach` message. Raises ControlError ("busy"), StoreError (memory).

        From the trainer that is attached, on its connection, it asks for a larger arena.
        """
        slot_bytes = _number(request, "slot_bytes", MAX_SLOT_BYTES)
        table_bytes = _number(request, "table_bytes", MAX_TABLE_BYTES)
        slots = _number(request, "slots", 8)
        async with self._attaching:
            growing = self.trainer is not None and self.trainer.connection is connection
            if growing:
                await self._persister.settle(retry=False)  # what lies READY in the arena that is given up
            elif self.trainer is not None and not self.trainer.gone():
                other = self.trainer
                raise ControlError(
                    f"busy: this daemon serves the trainer with process id {other.pid}"
                    f"{f' ({other.label})' if other.label else ''}; this one trains unprotected. "
                    "Give each trainer a state directory of its own"
                )
            if not growing:
                await self._make_free()
            if not fds:
                self._persister.forget_failures()
            arena, reused = await self._arena_for(slot_bytes, table_bytes, slots, fds)
            if connection.hung_up():
                return
            if not growing:
                self._take(connection, request)
            newest = [info.seq for info in self._store.snapshots()] + [slot.seq for slot in arena.slots]
            answer = {
                "ok": True,
                "slots": len(arena.slots),
                "next_seq": max(newest, default=0) + 1,
                "reused": reused,
                **self._facts,
            }
            connection.send(answer, [arena.fd])
        self._on_change()

    async def _make_free(self) -> None:
        if self.trainer is not None:
            self._vacate(self.trainer, dead=self.trainer.dead())
        for former in list(self._watched):
            self._unwatch(former)
        await self._finish_leaving()

    def _take(self, connection: Connection, request: Json) -> None:
        pid = connection.pid or 0
        linger = request.get("linger_seconds")
        trainer = Trainer(
            connection=connection,
            pid=pid,
            pidfd=_open_pidfd(pid),
            label=str(request.get("label", "")),
            rank=_number(request, "rank", 1 << 31),
            attached_at=time.time(),
            linger_seconds=float(linger) if isinstance(linger, int | float) else None,
        )
        self.trainer = trainer
        wanted = request.get("retention")
        self._store.retention = _retention(wanted, self._retention) if isinstance(wanted, dict) else self._retention
        connection.on_close.append(lambda: self._hung_up(trainer))
        if trainer.pidfd is not None:
            self._watched.add(trainer)
            asyncio.get_running_loop().add_reader(trainer.pidfd, self._died, trainer)
        log.info("trainer attached: process %d, label %r", pid, trainer.label)

    async def _arena_for(self, slot_bytes: int, table_bytes: int, slots: int, fds: list[int]) -> tuple[Arena, bool]:
        """The trainer's own arena given back, or the one that is here, or a new one; and whether it is warm."""
        if fds:
            given = await asyncio.to_thread(_map_given, fds[0])
            self._use(given)
            log.info("took an arena back from a trainer that outlived the daemon before this one")
            return given, True
        here = self.arena
        if here is not None and _fits(here, slot_bytes, table_bytes, slots):
            here.drop_unfinished()  # the session before this one is over, whether its process lives or not
            return here, True
        self._use(None)
        count = slots or slots_that_fit(slot_bytes)
        made = await asyncio.to_thread(Arena.create, slot_bytes, table_bytes, count)
        self._use(made)
        return made, False

    def _use(self, arena: Arena | None) -> None:
        old, self.arena = self.arena, arena
        self._persister.set_arena(arena)
        if old is not None and old is not arena:
            old.close()

    def _hung_up(self, trainer: Trainer) -> None:
        """Its connection ended. A killed process closes its files before its pidfd tells, so that watch goes on."""
        if self.trainer is trainer:
            log.info("trainer left: process %d", trainer.pid)
            self._vacate(trainer, dead=trainer.pidfd is None)

    def _died(self, trainer: Trainer) -> None:
        """Its process ended: nothing of it writes any more."""
        self._unwatch(trainer)
        if self.trainer in {trainer, None}:
            log.info("the trainer's process %d ended", trainer.pid)
            self._vacate(trainer, dead=True)

    def _vacate(self, trainer: Trainer, *, dead: bool) -> None:
        self.trainer = None
        trainer.connection.close()
        if dead and self.arena is not None and self.arena.drop_unfinished():
            log.info("it was in the middle of a capture, which is dropped")
        task = asyncio.get_running_loop().create_task(self._after(trainer, dead=dead))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _unwatch(self, trainer: Trainer) -> None:
        self._watched.discard(trainer)
        if trainer.pidfd is not None:
            asyncio.get_running_loop().remove_reader(trainer.pidfd)
            os.close(trainer.pidfd)
            trainer.pidfd = None

    async def _after(self, trainer: Trainer, *, dead: bool) -> None:
        await self._persister.settle(retry=dead and self.trainer is None)
        if self.trainer is None:
            self.last_linger_seconds = trainer.linger_seconds
            self._on_change()

    async def _finish_leaving(self) -> None:
        # A slot that is tried again lies HELD while it is read: no new trainer may get it before that is over.
        await asyncio.gather(*self._leaving)

    def release(self) -> None:
        """Give the arena's memory back. Only while no trainer is attached and nothing in it waits for the disk."""
        if self.trainer is None and self.arena is not None and not self._leaving:
            self._use(None)

    def only_writer(self, pid: int) -> bool:
        """Whether no process but this one may be writing into the arena: nobody is attached, or that process is."""
        writers = {trainer.pid for trainer in self._watched if not trainer.dead()}
        if self.trainer is not None:
            writers.add(self.trainer.pid)
        return writers <= {pid}

    def live(self) -> LiveClock | None:
        """Where the attached trainer is in its round, from the arena's header; None without a trainer."""
        if self.trainer is None or self.arena is None or self.trainer.gone():
            return None
        counters = self.arena.read_live()
        if counters is None:
            return None
        return LiveClock(
            outer_step=counters.outer_step,
            inner_step=counters.inner_step,
            training_step=counters.training_step,
            steps_per_s=counters.steps_per_s,
            round_length=counters.round_length,
        )

    def status(self) -> Json | None:
        """The trainer for `/api/v1/status`."""
        trainer = self.trainer
        if trainer is None:
            return None
        return {
            "pid": trainer.pid,
            "label": trainer.label,
            "rank": trainer.rank,
            "attached_ms": int(trainer.attached_at * 1000),
        }

    async def close(self) -> None:
        """Persist what is there, hang up on the trainer (it trains on and may give the arena back later)."""
        if self.trainer is not None:
            self._vacate(self.trainer, dead=False)
        for former in list(self._watched):
            self._unwatch(former)
        await self._finish_leaving()


def _number(request: Json, name: str, highest: int) -> int:
    value = request.get(name, 0)
    if type(value) is not int or not 0 <= value <= highest:
        raise ControlError(f"attach: {name} is {value!r}; it must be a whole number from 0 to {highest}")
    return value


def _fits(arena: Arena, slot_bytes: int, table_bytes: int, slots: int) -> bool:
    """Whether an arena serves a trainer of these sizes without wasting more than a tenth of its memory."""
    enough = arena.slot_bytes >= slot_bytes and arena.table_bytes >= table_bytes
    wasteful = arena.slot_bytes > slot_bytes + slot_bytes // 10 + (1 << 20)
    return enough and not wasteful and slots in {0, len(arena.slots)}


def _map_given(fd: int) -> Arena:
    own = os.dup(fd)
    try:
        return Arena.from_fd(own)
    except BaseException:
        os.close(own)
        raise


def _open_pidfd(pid: int) -> int | None:
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:  # gone already (the connection's end tells), or a kernel without pidfds
        log.debug("no pidfd for process %d: %s", pid, error)
        return None


def _retention(wanted: Json, default: Retention) -> Retention:
    def pick(name: str, fallback: int | None) -> int | None:
        value = wanted.get(name, fallback)
        return value if value is None or type(value) is int else fallback

    hot, cold = pick("max_hot", default.max_hot), pick("max_cold", default.max_cold)
    return Retention(
        max_hot=default.max_hot if hot is None else hot,
        max_cold=default.max_cold if cold is None else cold,
        max_bytes=pick("max_bytes", default.max_bytes),
    )
