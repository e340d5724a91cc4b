"""When a trainer of the well-known shape is inside its outer step, although its `phase` may say that it is not.

Such a trainer calls its one callback *before* it refreshes `initial_weights`. Model, momentum and counters are those of
the new round then, the outer copy is still the old round's: a snapshot of that mixture would be vouched for like any
other, and the pseudo-gradient after its restore would be wrong. Its phase need not tell, and its lock does not keep the
callback out, because it is re-entrant. So:

    callback begins ──▶ open ──callback ends──▶ open ──the refresh is seen to be over──▶ closed

What shows that the refresh is over, each by itself: the lock that was held in the callback has been let go; every
tensor of `initial_weights` is another one, or was written to; a further inner step was counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor


class TrainerLock:
    """A trainer's own lock, taken by us. It knows whether this thread was inside the trainer's step already."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._depth = 0  # of our holds; only the thread that holds the lock changes it
        self._within = False  # our outermost hold lies within one that is not ours

    def owned(self) -> bool:
        """Whether this thread holds the lock, through us or not. False for locks that cannot tell."""
        is_owned = getattr(self.raw, "_is_owned", None)  # CPython's RLock has it for threading.Condition
        return is_owned is not None and is_owned() is True

    def inside_step(self) -> bool:
        """Whether this thread holds it other than through us: it was called from within the trainer's step."""
        return self.owned() and (self._depth == 0 or self._within)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.RLock.acquire`."""
        owned = self.owned()
        if not self.raw.acquire(blocking, timeout):
            return False
        if self._depth == 0:
            self._within = owned
        self._depth += 1
        return True

    def release(self) -> None:
        """As `threading.RLock.release`."""
        self._depth -= 1
        self.raw.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class _Mark:
    """What the trainer looked like when its callback began."""

    thread: int
    locked: bool
    total_steps: int
    weights: dict[str, tuple[weakref.ref[Tensor], int | None]]
    calls: int = 1  # callbacks under way


class OuterWindow:
    """Opens with the trainer's callback and closes once `initial_weights` is refreshed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._mark: _Mark | None = None

    @contextmanager
    def callback(self, lock: TrainerLock | None) -> Iterator[None]:
        """Around everything that the trainer's callback does."""
        mark = self._mark
        if mark is None or not mark.calls:
            weights = {name: (weakref.ref(tensor), _version(tensor)) for name, tensor in self._weights().items()}
            locked = lock is not None and lock.inside_step()
            mark = self._mark = _Mark(threading.get_ident(), locked, self._trainer.stats.total_inner_steps, weights)
        else:
            mark.calls += 1
        try:
            yield
        finally:
            mark.calls -= 1

    def is_open(self, lock: TrainerLock | None) -> bool:
        """Whether the refresh is still to come or under way. On any thread."""
        mark = self._mark
        if mark is None:
            return False
        if mark.calls or not (self._stepped(mark) or self._refreshed(mark) or _released(mark, lock)):
            return True
        self._mark = None
        return False

    def _weights(self) -> Mapping[str, Tensor]:
        weights: Mapping[str, Tensor] = self._trainer.initial_weights
        return weights

    def _stepped(self, mark: _Mark) -> bool:
        return bool(self._trainer.stats.total_inner_steps != mark.total_steps)

    def _refreshed(self, mark: _Mark) -> bool:
        weights = self._weights()
        if not set(mark.weights) <= set(weights):
            return False  # it is being filled anew
        return all(
            seen() is not weights[name] or (version is not None and _version(weights[name]) != version)
            for name, (seen, version) in mark.weights.items()
        )


def _released(mark: _Mark, lock: TrainerLock | None) -> bool:
    if not mark.locked or lock is None:
        return False
    if threading.get_ident() == mark.thread:
        return not lock.inside_step()
    return lock.owned()  # by this other thread: the trainer's has let go of it


def _version(tensor: Tensor) -> int | None:
    """torch's count of in-place writes; None for tensors that do not keep it."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - documented nowhere else
