"""Where in its data a trainer stands, and how a fresh process gets there again.

A DataLoader draws from the random states twice when an epoch begins: at `iter()` (the workers' base seed) and, at the
first `next()` or earlier with workers, in the sampler (the shuffle). Both instants are recorded, together with every
generator that the loader owns and the count of batches *handed out* (not prefetched). To get back, the recorded states
are put in place, `iter()` is called, as many batches as were handed out are passed over, and then all random states
become those of the snapshot:

    iter() ──record──▶ first next() ──record──▶ next() × k ──▶ snapshot(k)
    iter() under the recorded states ──▶ pass over k ──▶ states of the snapshot ──▶ batch k + 1, the same one

Passing over costs nothing for a map-style dataset without workers (only indexes are drawn; a dataset with state of its
own belongs into `extra`). With workers, and for iterable datasets, the batches are made and dropped, because only that
brings the workers' random states to the right place. What workers drew that lived on from an earlier epoch
(`persistent_workers`, second epoch on) cannot be repeated; the order of the samples is exact there, too.

Nothing is patched before `attach()`; then the loader's class becomes a subclass of itself with another `__iter__`.
Whatever goes wrong in our part of it is logged, and the position is unknown until the next epoch; the loop goes on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data.dataloader import (
    _DatasetKind,
    _SingleProcessDataLoaderIter,
)

from hotswarm.capture.rng import apply_rng, capture_rng
from hotswarm.errors import ConfigError, Incompatible

log = logging.getLogger(__name__)

Tree = dict[str, Any]
_ATTRIBUTE = "_hotswarm_position"


class Position:
    """Follows one loader. All methods on the thread that trains."""

    def __init__(self, loader: Any) -> None:
        if not hasattr(type(loader), "__iter__") or hasattr(type(loader), "__next__"):
            raise ConfigError(
                f"dataloader is a {type(loader).__qualname__}, which cannot be iterated twice: give the loader itself",
                "dataloader",
            )
        self._loader = loader
        self._plain_class: type | None = None
        self._current: Callable[[], _Followed | None] = lambda: None
        self._epoch = 0
        self._begin: Tree | None = None
        self._first: Tree | None = None
        self._kept_workers = False
        self._pending: Tree | None = None
        self._pending_rng: Tree | None = None
        self._lost = False  # the position in this epoch is not known
        self.on_next: Callable[[], None] | None = None
        """Called at the entry of each `__next__`, before the batch is fetched: a step boundary."""

    def attach(self) -> None:
        """Start to follow. An iterator that exists already is not known. ConfigError for a class that resists."""
        if self._plain_class is not None:
            return
        plain = type(self._loader)
        try:
            self._loader.__class__ = _following(plain)
        except TypeError as error:
            raise ConfigError(
                f"a {plain.__qualname__} cannot be followed as dataloader: {error}", "dataloader"
            ) from error
        # Weakly: a loader in a reference cycle dies in the garbage collector, where torch joins persistent workers for
        # five seconds each.
        self._loader.__dict__[_ATTRIBUTE] = weakref.ref(self)
        self._plain_class = plain

    def detach(self) -> None:
        """Leave the loader as it was. Iterators under way go on uncounted."""
        if self._plain_class is not None:
            self._loader.__dict__.pop(_ATTRIBUTE, None)
            self._loader.__class__ = self._plain_class
            self._plain_class = None
            self._current = lambda: None

    # ------------------------------------------------------------ capture

    def _generators(self) -> list[torch.Generator]:
        batches = getattr(self._loader, "batch_sampler", None)
        holders = (self._loader, getattr(self._loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found: dict[int, torch.Generator] = {}
        for holder in holders:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
        return list(found.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def _record(self) -> Tree:
        return {"rng": capture_rng(), "generators": self._generator_states()}

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None

    def _is_stateful(self) -> bool:
        return callable(getattr(self._loader, "state_dict", None)) and callable(
            getattr(self._loader, "load_state_dict", None)
        )

    def capture(self) -> Tree:
        """The position, as a tree of the closed set. Right after a restore: the one restored."""
        if self._is_stateful():
            return {"kind": "own", "state": self._loader.state_dict()}
        if self._pending is not None:
            return self._pending
        if self._lost:
            return {"kind": "unknown", "epoch": self._epoch}
        current = self._current()
        sampler_epoch = getattr(getattr(self._loader, "sampler", None), "epoch", None)
        return {
            "kind": "replay",
            "epoch": self._epoch,
            "active": current is not None,
            "consumed": current.consumed if current is not None else 0,
            "begin": self._begin if current is not None else None,
            "first": self._first if current is not None else None,
            "generators": self._generator_states(),
            "sampler_epoch": sampler_epoch if type(sampler_epoch) is int else None,
            "kept_workers": self._kept_workers if current is not None else self._has_workers(),
            "length": self._length(),
        }

    def _has_workers(self) -> bool:
        return bool(getattr(self._loader, "persistent_workers", False)) and (
            getattr(self._loader, "_iterator", None) is not None
        )

    # ------------------------------------------------------------ restore

    def check(self, tree: Tree) -> None:
        """Incompatible unless `restore` can take it."""
        if tree.get("kind") == "unknown":
            return
        if tree.get("kind") == "own":
            if not self._is_stateful():
                raise Incompatible(
                    "the snapshot's data position is that of a loader with state_dict(); this one has none"
                )
            return
        if self._is_stateful():
            raise Incompatible("the snapshot's data position is that of a plain DataLoader; this one keeps its own")
        if tree["length"] != self._length():
            raise Incompatible(
                f"the dataloader has {self._length()} batches here and {tree['length']} in the snapshot: its position "
                "means nothing here; use the same data and batch size, or leave the dataloader out"
            )
        if len(tree["generators"]) != len(self._generators()):
            raise Incompatible("the dataloader has another number of generators here than in the snapshot")

    def restore(self, tree: Tree, rng: Tree | None) -> None:
        """From the next `iter()` on, hand out what the snapshot's trainer would have got next.

        `rng` are the random states to leave behind when that is in the middle of an epoch; None: those found then.
        """
        if tree["kind"] == "own":
            self._loader.load_state_dict(tree["state"])
            return
        self._current = lambda: None
        self._epoch = tree["epoch"]
        if tree["kind"] == "unknown":
            log.warning("the data position was not known when the snapshot was taken: this epoch begins anew")
            return
        self._set_generators(tree["generators"])
        self._set_sampler_epoch(tree)
        self._pending, self._pending_rng = tree, rng

    def _set_sampler_epoch(self, tree: Tree) -> None:
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if callable(set_epoch) and tree["sampler_epoch"] is not None:
            set_epoch(tree["sampler_epoch"])

    # ------------------------------------------------------------ following

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """What the loader's `__iter__` returns; `make()` is its plain one."""
        if self._is_stateful():
            return self._follow(make(), 0)
        pending, self._pending = self._pending, None
        self._lost = False
        if pending is None:
            with self._noting():
                self._kept_workers = self._has_workers()
                self._epoch += 1
                self._begin, self._first = self._record(), None
            return self._follow(make(), 0)
        rng, self._pending_rng = self._pending_rng, None
        return self._resume(pending, capture_rng() if rng is None else rng, make)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Around what is only for us, in the middle of the user's loop."""
        try:
            yield
        except Exception:
            if not self._lost:
                log.exception("the data position is not known any more in this epoch; training goes on")
            self._lost = True

    def follows(self, loader: object) -> bool:
        """Whether this is the loader that is followed."""
        return loader is self._loader

    def _follow(self, inner: Iterator[Any], consumed: int) -> Iterator[Any]:
        followed = _Followed(self, inner, consumed)
        self._current = weakref.ref(followed)
        return followed

    def _resume(self, tree: Tree, rng: Tree, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if tree["active"]:
            self._begin, self._first, self._kept_workers = tree["begin"], tree["first"], tree["kept_workers"]
            self._set_sampler_epoch(tree)
            inner = self._replayed(tree, make)
        else:
            self._begin, self._first, self._kept_workers = self._record(), None, tree["kept_workers"]
            self._epoch += 1
            return self._follow(self._made(tree["kept_workers"], make), 0)
        with self._noting():
            self._set_generators(tree["generators"])
            apply_rng(rng)
        return self._follow(inner, tree["consumed"])

    def _replayed(self, tree: Tree, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._put(tree["begin"])
        inner = self._made(tree["kept_workers"], make)
        if tree["first"] is not None:
            if not getattr(self._loader, "num_workers", 0):
                self._put(tree["first"])
            try:
                _pass_over(inner, tree["consumed"])
            except StopIteration:
                log.error(  # noqa: TRY400  # the fault is in the data, a traceback says nothing
                    "the dataloader ended before batch %d, where the snapshot was taken: the data has changed since; "
                    "this epoch ends here",
                    tree["consumed"],
                )
        return inner

    def _put(self, record: Tree) -> None:
        with self._noting():
            self._set_generators(record["generators"])
            apply_rng(record["rng"])

    def _made(self, kept_workers: bool, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if not kept_workers:
            if self._has_workers():  # those of this process's past: start new ones
                self._loader._iterator._shutdown_workers()  # noqa: SLF001
                self._loader._iterator = None  # noqa: SLF001
            return make()
        # In the uninterrupted run the workers were there already and no base seed was drawn: draw it elsewhere.
        own = self._loader.generator
        self._loader.generator = torch.Generator()
        self._loader.generator.manual_seed(0)
        try:
            return make()
        finally:
            self._loader.generator = own

    def before(self, followed: _Followed) -> None:
        """At the entry of `__next__` of this iterator."""
        if self._current() is not followed:
            return
        if self.on_next is not None:
            self.on_next()  # which does not raise
        if followed.consumed == 0 and self._first is None and not self._is_stateful():
            with self._noting():
                self._first = self._record()

    def ended(self, followed: _Followed) -> None:
        """This iterator has no more batches."""
        if self._current() is followed:
            self._current = lambda: None


class _Followed:
    """An iterator of the loader, counting what it hands out."""

    def __init__(self, position: Position, inner: Iterator[Any], consumed: int) -> None:
        self._position = position
        self._inner = inner
        self.consumed = consumed

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._position.before(self)
        try:
            batch = next(self._inner)
        except StopIteration:
            self._position.ended(self)
            raise
        self.consumed += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _pass_over(inner: Iterator[Any], count: int) -> None:
    if type(inner) is _SingleProcessDataLoaderIter and inner._dataset_kind == _DatasetKind.Map:  # noqa: SLF001
        for _ in range(count):
            next(inner._sampler_iter)  # noqa: SLF001  # indexes only
        inner._num_yielded += count  # noqa: SLF001
        return
    for _ in range(count):
        next(inner)


_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def _following(plain: type) -> type:
    known = _classes.get(plain)
    if known is None:

        def begin_iteration(self: Any) -> Iterator[Any]:
            position = self.__dict__[_ATTRIBUTE]()
            if position is None or not position.follows(self):  # its owner is gone, or this is a copy of the loader
                return plain.__iter__(self)  # type: ignore[no-any-return, attr-defined]
            return position.begin(lambda: plain.__iter__(self))  # type: ignore[no-any-return, attr-defined]

        body = {"__iter__": begin_iteration, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
        known = type(plain.__name__, (plain,), body)
        _classes[plain] = known
    return known
