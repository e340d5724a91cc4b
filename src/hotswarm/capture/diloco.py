"""What hotswarm needs to know of an engine that trains in rounds, and how it gets it from a DiLoCo trainer.

An engine keeps a second copy of the parameters (the *outer* copy, as of the last outer step), an outer optimizer with
momentum, and counters. `EngineAdapter` is all that the rest of hotswarm sees of it; `SeedAdapter` fits trainers that
have the well-known shape (`initial_weights`, `outer_optimizer`, `stats`, `phase`), `hotswarm.torchft` has its own.

Restoring is in two halves, so that nothing is half done when something fails. `load_outer(tree)` installs tensors by
reference: those of `tree` are the engine's own live ones where name, dtype and shape agree, else new ones *whose bytes
are not there yet*. Then the bytes are read straight into them, and `commit_outer()` ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotswarm.capture.naming import clean, named_tensors
from hotswarm.capture.outer import Tree, outer_state_of
from hotswarm.capture.window import OuterWindow, TrainerLock
from hotswarm.errors import CaptureError, Incompatible


@dataclass(frozen=True, slots=True)
class Counters:
    """Finished rounds, position in this round, and inner steps over all rounds."""

    outer_step: int
    inner_step: int
    training_step: int


class EngineAdapter(Protocol):
    """An engine, seen from outside. All methods run on the training thread, or under `lock()`."""

    engine: str
    """Its name in manifests: "diloco", "torchft"."""

    @property
    def round_length(self) -> int:
        """Inner steps per round; 0 when unknown."""
        ...

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that really trains, which need not be the one that the user handed over."""
        ...

    def lock(self) -> AbstractContextManager[object]:
        """Held by the engine through a step; whoever holds it stands at a step boundary."""
        ...

    def counters(self) -> Counters:
        """Read in the same instant as the tensors."""
        ...

    def set_counters(self, counters: Counters) -> None:
        """Cannot fail. Also leaves the engine in the middle of a round, when it has an outer copy."""
        ...

    def in_outer_step(self) -> bool:
        """Whether an outer step is under way, so that live and outer copy do not fit together now."""
        ...

    def on_outer_step(self, callback: Callable[[], None]) -> None:
        """`callback` is called in every outer step from now on; the state may be captured at the boundary after it."""
        ...

    def outer_tree(self) -> Tree | None:
        """`{"params": {name: tensor}, "momentum": {name: tensor}, "hyper": {…}, "outer_step": int}`, live tensors and
        clean names; None while there is no outer copy yet.
        """
        ...

    def load_outer(self, tree: Tree | None) -> None:
        """Install what `outer_tree` described. May raise, and then nothing is changed; see the module's head."""
        ...

    def commit_outer(self) -> None:
        """The bytes are in the tensors now. Does not fail where `load_outer` did not."""
        ...

    def inner_tree(self) -> Tree:
        """What else of the engine an exact continuation needs: small values and tensors of the closed set."""
        ...

    def load_inner(self, tree: Tree) -> None:
        """Take over what `inner_tree` gave. May raise Incompatible, and then nothing is changed."""
        ...


def is_diloco_shaped(trainer: object) -> bool:
    """Whether `SeedAdapter` fits."""
    parts = ("initial_weights", "outer_optimizer", "stats", "phase")
    return all(hasattr(trainer, part) for part in parts)


class SeedAdapter:
    """For DiLoCo trainers recognised by shape: `initial_weights`, `outer_optimizer`, `stats.*`, `phase.value`, and
    optionally `inner_optimizer`, `_lock`, `set_outer_step_callback`, `config.inner_steps`.
    """

    engine = "diloco"

    def __init__(self, trainer: Any, model: object | None = None) -> None:
        if not is_diloco_shaped(trainer):
            raise CaptureError(
                f"{type(trainer).__qualname__} is no DiLoCo trainer: it lacks one of initial_weights, outer_optimizer, "
                "stats, phase"
            )
        self._trainer = trainer
        self._model = getattr(trainer, "model", None) if model is None else model
        self._outer = outer_state_of(trainer.outer_optimizer, self._name_of)
        self._window = OuterWindow(trainer)
        self._known_lock: TrainerLock | None = None
        self._listeners: list[Callable[[], None]] = []
        self._chained: Callable[..., None] | None = None
        self._slot: tuple[str, object] | None = (
            None  # the trainer's attribute that holds the callback, and what is there
        )
        self._chaining = threading.Lock()

    # ------------------------------------------------------------ the engine

    @property
    def round_length(self) -> int:
        """`config.inner_steps`, or 0."""
        steps = getattr(getattr(self._trainer, "config", None), "inner_steps", 0)
        return steps if isinstance(steps, int) else 0

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer | None:
        """The trainer's own."""
        return getattr(self._trainer, "inner_optimizer", None)

    def lock(self) -> AbstractContextManager[object]:
        """The trainer's RLock, where it has one."""
        return self._trainer_lock() or getattr(self._trainer, "_lock", None) or contextlib.nullcontext()

    def _trainer_lock(self) -> TrainerLock | None:
        raw = getattr(self._trainer, "_lock", None)
        if not hasattr(raw, "acquire"):
            return None
        if self._known_lock is None or self._known_lock.raw is not raw:
            self._known_lock = TrainerLock(raw)
        return self._known_lock

    def counters(self) -> Counters:
        """From `stats`."""
        stats = self._trainer.stats
        return Counters(stats.outer_step_count, stats.inner_step_count, stats.total_inner_steps)

    def set_counters(self, counters: Counters) -> None:
        """Into `stats`; `phase` becomes the inner loop when there is an outer copy."""
        stats = self._trainer.stats
        stats.outer_step_count = counters.outer_step
        stats.inner_step_count = counters.inner_step
        stats.total_inner_steps = counters.training_step
        if self._trainer.initial_weights:
            kind = type(self._trainer.phase)
            inner = next((phase for phase in kind if str(phase.value).startswith("inner")), self._trainer.phase)
            self._trainer.phase = inner

    def in_outer_step(self) -> bool:
        """By the phase: anything but idle and the inner loop. And from the trainer's callback until `initial_weights`
        is refreshed, whatever the phase says then.
        """
        self._stay_chained()
        phase = str(self._trainer.phase.value)
        if phase != "idle" and not phase.startswith("inner"):
            return True
        lock = self._trainer_lock()
        return self._window.is_open(lock) or (self._chained is None and self._looks_torn(lock))

    def _looks_torn(self, lock: TrainerLock | None) -> bool:
        """Whether this may be a callback that we are not chained into: inside the trainer's lock, at the end of a
        round, with an outer copy that is not the model's.
        """
        if lock is None or not lock.inside_step() or not hasattr(self._trainer, "set_outer_step_callback"):
            return False
        here, length = self.counters(), self.round_length
        if not here.outer_step or (here.inner_step and not 0 < length <= here.inner_step):
            return False
        live = {clean(name): param for name, param in self._named_parameters()}
        pairs = ((live.get(clean(name)), outer) for name, outer in self._trainer.initial_weights.items())
        return any(param is not None and not torch.equal(param.to(outer.device), outer) for param, outer in pairs)

    def on_outer_step(self, callback: Callable[[], None]) -> None:
        """Chained into the trainer's one callback slot; whoever had it before is called first. Whoever takes the slot
        later is chained in again.
        """
        self._listeners.append(callback)
        if self._chained is None:
            self._chain()

    def _stay_chained(self) -> None:
        if self._slot is None or getattr(self._trainer, self._slot[0], None) is self._slot[1]:
            return
        if self._chaining.acquire(blocking=False):  # else another thread is at it
            try:
                self._chain()
            finally:
                self._chaining.release()

    def _chain(self) -> None:
        trainer = self._trainer
        setter = getattr(trainer, "set_outer_step_callback", None)
        if setter is None:
            return
        before: Callable[..., object] | None = None

        def chained(*args: object, **kwargs: object) -> None:
            with self._window.callback(self._trainer_lock()):
                try:
                    if before is not None:
                        before(*args, **kwargs)
                finally:
                    for listener in self._listeners:
                        listener()

        attributes = _attributes(trainer)
        setter(chained)
        self._chained = chained
        # Whatever the slot is called, and whether or not the setter wraps what it is given: it is what has changed.
        changed = [(name, new) for name, new in _attributes(trainer).items() if new is not attributes.get(name)]
        self._slot = next((one for one in changed if callable(one[1])), None)
        if self._slot is not None and callable(attributes.get(self._slot[0])):
            before = attributes[self._slot[0]]

    # ------------------------------------------------------------ the outer copy

    def _raw_names(self) -> dict[str, str]:
        """Clean name → the name that the trainer itself uses."""
        raw = [*self._trainer.initial_weights, *(name for name, _ in self._named_parameters())]
        return {clean(name): name for name in reversed(raw)}

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        listing = getattr(self._model, "named_parameters", None)
        return () if listing is None else listing()

    def _name_of(self) -> dict[int, str]:
        """id(tensor) → clean name, for outer optimizers that know their tensors by identity."""
        names = {id(tensor): clean(name) for name, tensor in self._trainer.initial_weights.items()}
        if self._model is not None:
            names.update(named_tensors(self._model).name_of)
        return names

    def outer_tree(self) -> Tree | None:
        """See EngineAdapter."""
        weights = self._trainer.initial_weights
        if not weights:
            return None
        return {
            "params": {clean(name): tensor for name, tensor in weights.items()},
            "momentum": {clean(name): tensor for name, tensor in self._outer.momentum().items()},
            "hyper": self._outer.hyper(),
            "outer_step": self._trainer.stats.outer_step_count,
        }

    def load_outer(self, tree: Tree | None) -> None:
        """See EngineAdapter. The numbers of the round are `set_counters`' business."""
        weights = self._trainer.initial_weights
        if tree is None:
            self._outer.install({}, None)
            weights.clear()
            return
        raw = self._raw_names()
        unknown = sorted(name for name in tree["params"] if name not in raw)
        if unknown:
            raise Incompatible(f"the outer copy in the snapshot has {unknown[0]!r}, which this trainer's model has not")
        momentum = {raw.get(name, name): tensor for name, tensor in tree["momentum"].items()}
        self._outer.install(momentum, tree["hyper"])
        new = {raw[name]: tensor for name, tensor in tree["params"].items()}
        weights.clear()
        weights.update(new)

    def commit_outer(self) -> None:
        """See EngineAdapter."""
        self._outer.commit()

    # ------------------------------------------------------------ the rest

    def inner_tree(self) -> Tree:
        """All numbers of `stats`, and the phase."""
        stats = self._trainer.stats
        return {
            "stats": {name: getattr(stats, name) for name in _fields(stats) if _is_number(getattr(stats, name))},
            "phase": str(self._trainer.phase.value),
        }

    def load_inner(self, tree: Tree) -> None:
        """See EngineAdapter. Numbers that this trainer's `stats` does not have are left out."""
        kind, value = type(self._trainer.phase), tree["phase"]
        phase = next((phase for phase in kind if str(phase.value) == value), None)
        if phase is None:
            raise Incompatible(f"the snapshot's trainer is in phase {value!r}, which {kind.__qualname__} does not know")
        stats = self._trainer.stats
        known = set(_fields(stats))
        for name, number in tree["stats"].items():
            if name in known:
                setattr(stats, name, number)
        self._trainer.phase = phase


def _attributes(thing: object) -> dict[str, Any]:
    """Those of the object itself, `__slots__` included."""
    slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(thing, name)}
    return {**{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}


def _fields(stats: object) -> list[str]:
    if dataclasses.is_dataclass(stats):
        return [field.name for field in dataclasses.fields(stats)]
    return list(vars(stats))


def _is_number(value: object) -> bool:
    return type(value) in {bool, int, float}
