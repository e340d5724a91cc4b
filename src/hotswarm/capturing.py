"""The trainer's half of a snapshot: standing at a step boundary, reading the counters, copying into the arena.

The state is whole only between two steps. Who may touch it, and when:

    the trainer's thread             at once, unless it is inside an outer step
    another thread, engine with lock   when it holds `engine.lock()`
    another thread, no lock            never; it posts a request, which the trainer's thread runs at its next boundary

The trainer's thread is the one that made the checkpointer, until a boundary is seen on another one.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hotswarm.backend import Backend, NotReadyError, Ticket
from hotswarm.capture.boundary import Boundary
from hotswarm.capture.diloco import Counters, EngineAdapter
from hotswarm.capture.position import Position
from hotswarm.capture.staging import ArenaTooSmallError, Label, Need, Stager
from hotswarm.capture.state import SectionState, StateTree, TrainingState
from hotswarm.errors import CaptureError, HotswarmError, StoreError
from hotswarm.snapshot.chunks import GROUP_ALIGN
from hotswarm.snapshot.tree import TensorSpec
from hotswarm.store.arena import Arena

log = logging.getLogger(__name__)
T = TypeVar("T")

BOUNDARY_TIMEOUT_S = 10.0  # how long a call from another thread waits for a step boundary: the contract says so
SLOT_POLL_S = 0.002


class NotNowError(CaptureError):
    """The state is not whole at this moment and will not be in time."""


class InsideStepError(NotNowError):
    """This is the trainer's own thread in the middle of a step: waiting would be for ever."""


class NoSlotError(CaptureError):
    """Earlier snapshots are still being written, so that no arena slot is free."""


class Capturer:
    """Copies one trainer's state, and says when it may be touched."""

    def __init__(
        self,
        model: object,
        optimizers: list[Any],
        *,
        engine: EngineAdapter | None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
        label: str = "",
    ) -> None:
        self._parts: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler, "extra": extra}
        self._model = model
        self._given = optimizers
        self.position = Position(dataloader) if dataloader is not None else None
        self.label = label
        self.trainer_thread = threading.current_thread()
        self.on_boundary: Callable[[bool], None] = _ignore
        self.on_live: Callable[[], None] = lambda: None
        self._posted: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._copying = threading.RLock()
        self._stager = Stager()
        self._need: Need | None = None
        self._need_of: Backend | None = None
        self._caller_counts = False
        self._engine: EngineAdapter | None = None
        self._step_hooks: list[Any] = []
        self.in_optimizer_step = False
        """Whether parameters are being changed right now; a step that raised leaves it set until the next one."""
        self._counted = False
        self.state_bytes = 0
        """Tensor bytes of the newest copy."""
        self.set_engine(engine)

    # ------------------------------------------------------------ the engine and its counters

    @property
    def engine(self) -> EngineAdapter | None:
        """What trains in rounds, if anything does."""
        return self._engine

    def set_engine(self, engine: EngineAdapter | None) -> None:
        """Capture and restore through this engine from now on. Not while hooks are attached."""
        self._engine = engine
        inner = engine.inner_optimizer if engine is not None else None
        optimizers = list(self._given)
        if inner is not None and all(optimizer is not inner for optimizer in optimizers):
            if optimizers:
                log.info("the trainer uses an optimizer of its own, not the one given; that one is captured")
            optimizers = [inner]
        old = getattr(self, "state", None)
        self.state = TrainingState(self._model, optimizers, position=self.position, adapter=engine, **self._parts)
        if old is not None:
            self.state.counters = old.counters
        self.boundary = Boundary(
            self._model,
            optimizers,
            self.position,
            self._at_boundary,
            in_outer_step=self.in_outer_step,
            on_step=self._count,
        )

    def attach(self) -> None:
        """Install the hooks that find step boundaries, and those that tell when an optimizer is at work."""
        self.boundary.attach()
        if not self._step_hooks:
            for optimizer in self.state.optimizers:
                for name, inside in (("register_step_pre_hook", True), ("register_step_post_hook", False)):
                    register = getattr(optimizer, name, None)
                    if register is not None:
                        self._step_hooks.append(register(partial(self._enters_step, inside)))

    def detach(self) -> None:
        """Remove the hooks."""
        self.boundary.detach()
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks.clear()
        self.in_optimizer_step = False

    def _enters_step(self, inside: bool, *_: object) -> None:
        self.in_optimizer_step = inside

    def in_outer_step(self) -> bool:
        """Whether live and outer copy do not fit together now."""
        return self._engine is not None and self._engine.in_outer_step()

    def counters(self) -> Counters:
        """Where training stands. The engine's numbers, until it has any the caller's, else steps counted here."""
        if self._engine is not None:
            counted = self._engine.counters()
            if counted != Counters(0, 0, 0):
                return counted
        return self.state.counters

    def caller_counters(self, counters: Counters) -> None:
        """The caller says where training stands; takes no lock."""
        self._caller_counts = True
        self.state.counters = counters

    def restored_counters(self, counters: Counters) -> None:
        """Go on counting from here."""
        self.state.counters = counters

    def _count(self) -> None:
        self._counted = True
        if self._engine is None and not self._caller_counts:
            old = self.state.counters
            self.state.counters = replace(old, training_step=old.training_step + 1)

    # ------------------------------------------------------------ boundaries

    def explicit_step(self) -> None:
        """`checkpointer.step()`. Counts a step where no optimizer did since the last boundary."""
        if not self._counted:
            self._count()
        self._counted = False
        if self.in_outer_step():
            self.on_live()  # no boundary, but others want to know where training stands
        self.boundary.explicit()

    def _at_boundary(self, exact: bool) -> None:
        self.trainer_thread = threading.current_thread()
        while self._posted:
            function, future = self._posted.popleft()
            if future.set_running_or_notify_cancel():
                _run(function, future)
        self.on_boundary(exact)

    def at_boundary(self, function: Callable[[], T], timeout_s: float = BOUNDARY_TIMEOUT_S) -> T:
        """`function()`'s result, run where the state is whole. NotNowError when that is not possible in time,
        InsideStepError when this is the trainer's own thread in the middle of a step.
        """
        if threading.current_thread() is self.trainer_thread:
            self._refuse_inside_step()
        lock = self._real_lock()
        if lock is not None:
            inside = getattr(lock, "inside_step", None)
            if inside is not None and inside():
                raise InsideStepError("the trainer's lock is held by this very thread: its step is still going on")
            with self._entered(lock, timeout_s):
                if not self.in_outer_step():
                    return function()
        elif self._is_trainer() and not self.in_outer_step():
            return function()
        if self._is_trainer():
            raise InsideStepError(
                "the trainer is inside an outer step (in its callback?): live and outer parameters do not fit together "
                "before the next step boundary"
            )
        return self._post_and_wait(function, timeout_s)

    def _refuse_inside_step(self) -> None:
        if self.in_optimizer_step:
            raise InsideStepError("an optimizer is at work: parameters are being changed right now")
        if in_signal_handler():
            raise InsideStepError("a signal handler runs in the middle of a step; the next step boundary takes it")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The engine's lock, for the trainer's thread at a boundary. NotNowError inside an outer step."""
        with self._engine.lock() if self._engine is not None else contextlib.nullcontext():
            if self.in_outer_step():
                raise NotNowError("the trainer is inside an outer step")
            yield

    def _is_trainer(self) -> bool:
        return threading.current_thread() is self.trainer_thread or not self.trainer_thread.is_alive()

    def _real_lock(self) -> Any:
        lock = self._engine.lock() if self._engine is not None else None
        return None if isinstance(lock, contextlib.nullcontext) else lock

    @staticmethod
    @contextlib.contextmanager
    def _entered(lock: Any, timeout_s: float) -> Iterator[None]:
        acquire = getattr(lock, "acquire", None)
        if acquire is None:
            with lock:
                yield
            return
        if not acquire(timeout=timeout_s):
            raise NotNowError(f"the trainer has held its lock for {timeout_s:g} s; is it waiting for its peers?")
        try:
            yield
        finally:
            lock.release()

    def _post_and_wait(self, function: Callable[[], T], timeout_s: float) -> T:
        future: Future[T] = Future()
        self._posted.append((function, future))
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.cancel():
                raise NotNowError(
                    f"the training thread came to no step boundary within {timeout_s:g} s; call checkpointer.step() in "
                    "the loop, or force the snapshot on that thread"
                ) from None
            return future.result()  # it is just being run

    def post(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` at the next boundary."""
        future: Future[Any] = Future()
        self._posted.append((function, future))
        return future

    def cancel_posted(self) -> None:
        """Nobody comes to a boundary any more."""
        while self._posted:
            self._posted.popleft()[1].cancel()

    # ------------------------------------------------------------ the copy

    def copy(self, backend: Backend, kind: str, *, exact: bool, wait_s: float = 0.0) -> tuple[Ticket, float]:
        """Copy the state, which is whole, and submit it. Returns the ticket and the seconds that took.

        NoSlotError when after `wait_s` seconds no slot may be written; CaptureError, StoreError, ControlError.
        """
        began = time.perf_counter()
        with self._copying:
            tree = self.state.collect()
            counters = self.counters()
            if tree.counters != counters:
                tree = replace(tree, counters=counters)
            label = Label(run=backend.run, label=self.label, kind=kind, exact=exact)
            deadline = time.monotonic() + wait_s
            while True:
                arena = self._arena_for(backend, tree, max(0.0, deadline - time.monotonic()))
                seq = backend.next_seq()
                try:
                    staged = self._stager.stage(tree, arena, label, seq)
                except ArenaTooSmallError as error:
                    self._need = error.need
                    continue
                if staged is not None:
                    self.state_bytes = staged.nbytes
                    return backend.submit(staged.slot, seq), time.perf_counter() - began
                if time.monotonic() >= deadline:
                    raise NoSlotError("earlier snapshots are still being written; this one is left out")
                backend.make_room()
                time.sleep(SLOT_POLL_S)

    def _arena_for(self, backend: Backend, tree: StateTree, wait_s: float) -> Arena:
        if self._need is None or self._need_of is not backend:
            need = self._stager.need(tree)
            self._need, self._need_of = replace(need, slot_bytes=need.slot_bytes + self._yet_to_come(tree)), backend
        return backend.arena(self._need.slot_bytes, self._need.table_bytes, wait_s)

    def _yet_to_come(self, tree: StateTree) -> int:
        """Bytes that an engine's first round will add: the outer copy, and the momentum of the first outer step. An
        arena made without them would have to be made again in the middle of training.
        """
        if self._engine is None:
            return 0
        outer = tree.sections.get("outer")
        parameters = _bytes_of_role(tree.sections["inner"], "param")
        if outer is None:
            return 2 * parameters + 2 * GROUP_ALIGN
        return 0 if _bytes_of_role(outer, "momentum") else parameters + GROUP_ALIGN

    def want_arena(self, backend: Backend) -> None:
        """Have the arena made now rather than at the first snapshot. Waits for nobody."""
        with self._copying, contextlib.suppress(NotReadyError):
            self._arena_for(backend, self.state.collect(), 0.0)

    def write_live(self, backend: Backend) -> None:
        """Tell the daemon where training stands; a few microseconds."""
        arena = backend.mapped()
        if arena is None:
            return
        counters = self.counters()
        length = self._engine.round_length if self._engine is not None else 0
        with contextlib.suppress(StoreError):  # exchanged for a larger one at this very moment
            arena.write_live(
                counters.outer_step, counters.inner_step, counters.training_step, self.boundary.steps_per_s, length
            )

    def release(self) -> None:
        """Let go of the arena; the next copy asks for one again."""
        with self._copying:
            self._stager.close()
            self._need = self._need_of = None


def _bytes_of_role(section: SectionState, role: str) -> int:
    return sum(leaf.what.nbytes for leaf in section.leaves if type(leaf.what) is TensorSpec and leaf.role == role)


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
        if not isinstance(error, HotswarmError):
            log.exception("a request at the step boundary failed")


def _ignore(exact: bool) -> None:
    """Nobody listens at boundaries yet."""


def in_signal_handler() -> bool:
    """Whether a Python signal handler is on this thread's stack: a frame that was given its caller as an argument."""
    frame = sys._getframe(1)  # noqa: SLF001 - the way to one's own stack
    while frame is not None and frame.f_back is not None:
        caller = frame.f_back
        for value in frame.f_locals.values():
            if value is caller or (type(value) is tuple and any(item is caller for item in value)):
                return True
        frame = caller
    return False
