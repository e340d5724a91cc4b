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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotswarm.capture.naming import clean, named_tensors
from hotswarm.errors import CaptureError, Incompatible

HYPER = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
"""The outer optimizer's settings that are part of the outer section; nothing else of it is."""

Tree = dict[str, Any]


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
        self._outer = _outer_state(trainer.outer_optimizer, self._name_of)

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
        return getattr(self._trainer, "_lock", None) or contextlib.nullcontext()

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
        """By the phase: anything but idle and the inner loop."""
        phase = str(self._trainer.phase.value)
        return phase != "idle" and not phase.startswith("inner")

    def on_outer_step(self, callback: Callable[[], None]) -> None:
        """Chained into the trainer's one callback slot; whoever had it before is called first."""
        trainer = self._trainer
        setter = getattr(trainer, "set_outer_step_callback", None)
        if setter is None:
            return
        before: Callable[..., object] | None = None

        def chained(*args: object, **kwargs: object) -> None:
            try:
                if before is not None:
                    before(*args, **kwargs)
            finally:
                callback()

        attributes = dict(vars(trainer)) if hasattr(trainer, "__dict__") else {}
        setter(chained)
        # Whatever the slot is called, it is the attribute that is the new callback now.
        slot = next((name for name in attributes if getattr(trainer, name, None) is chained), None)
        if slot is not None and callable(attributes[slot]):
            before = attributes[slot]

    # ------------------------------------------------------------ the outer copy

    def _raw_names(self) -> dict[str, str]:
        """Clean name → the name that the trainer itself uses."""
        raw = [*self._trainer.initial_weights]
        listing = getattr(self._model, "named_parameters", None)
        if listing is not None:
            raw += [name for name, _ in listing()]
        return {clean(name): name for name in reversed(raw)}

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


def _fields(stats: object) -> list[str]:
    if dataclasses.is_dataclass(stats):
        return [field.name for field in dataclasses.fields(stats)]
    return list(vars(stats))


def _is_number(value: object) -> bool:
    return type(value) in {bool, int, float}


# ---------------------------------------------------------------- outer optimizers


class _OuterState(Protocol):
    def momentum(self) -> dict[str, Tensor]: ...
    def hyper(self) -> Tree: ...
    def install(self, momentum: Mapping[str, Tensor], hyper: Tree | None) -> None: ...
    def commit(self) -> None: ...


def _outer_state(optimizer: Any, name_of: Callable[[], dict[int, str]]) -> _OuterState:
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOuterState(optimizer, name_of)
    return _DictOuterState(optimizer)


class TorchOuterState:
    """Momentum and settings of a torch.optim.Optimizer (SGD, ExactNesterov) as outer optimizer.

    `name_of()` gives the names of its parameters by id. Only `momentum_buffer` is state that an outer section takes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name_of: Callable[[], dict[int, str]]) -> None:
        self._optimizer = optimizer
        self._name_of = name_of

    def _named(self) -> dict[str, Tensor]:
        names = self._name_of()
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        return {names.get(id(param), f"~outer.{position}"): param for position, param in enumerate(params)}

    def momentum(self) -> dict[str, Tensor]:
        """name → the live momentum buffer, for parameters that have one."""
        buffers = {}
        for name, param in self._named().items():
            state = self._optimizer.state.get(param, {})
            others = sorted(str(key) for key, value in state.items() if key != "momentum_buffer" and value is not None)
            if others:
                raise CaptureError(
                    f"the outer optimizer {type(self._optimizer).__qualname__} keeps {others[0]!r} for {name!r}; only "
                    "momentum buffers can be part of the outer state (SGD, ExactNesterov)"
                )
            if state.get("momentum_buffer") is not None:
                buffers[name] = state["momentum_buffer"]
        return buffers

    def hyper(self) -> Tree:
        """The settings of HYPER; by group number when there are several groups."""
        groups = [{key: _number(group[key]) for key in HYPER if key in group} for group in self._optimizer.param_groups]
        return groups[0] if len(groups) == 1 else {str(index): group for index, group in enumerate(groups)}

    def install(self, momentum: Mapping[str, Tensor], hyper: Tree | None) -> None:
        """Momentum by reference, parameters without one lose theirs; settings into the groups."""
        named = self._named()
        unknown = sorted(set(momentum) - set(named))
        if unknown:
            raise Incompatible(f"the snapshot has outer momentum for {unknown[0]!r}, which the outer optimizer has not")
        groups = self._optimizer.param_groups
        if hyper is not None:
            settings = [hyper] if len(groups) == 1 else [hyper.get(str(index)) for index in range(len(groups))]
            if any(not isinstance(one, dict) or "0" in one for one in settings):
                raise Incompatible(f"the outer optimizer has {len(groups)} parameter groups here, another number there")
            for group, one in zip(groups, settings, strict=True):
                assert isinstance(one, dict)
                group.update({key: value for key, value in one.items() if key in HYPER})
        for name, param in named.items():
            if name in momentum:
                self._optimizer.state[param]["momentum_buffer"] = momentum[name]
            elif param in self._optimizer.state:
                self._optimizer.state[param].pop("momentum_buffer", None)

    def commit(self) -> None:
        """Nothing is left to do: the buffers were installed by reference."""


class _DictOuterState:
    """An outer optimizer that is no torch optimizer: settings as attributes, buffers in a dict by parameter name.

    The dict is the one entry of `state_dict()` that is a dict, and the attribute of the same name is the live one.
    Where there is no such attribute, `load_state_dict` gets the filled tensors at the end.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._late: dict[str, Any] | None = None

    def _key(self) -> str | None:
        keys = [key for key, value in self._optimizer.state_dict().items() if isinstance(value, dict)]
        if len(keys) > 1:
            raise CaptureError(
                f"the outer optimizer {type(self._optimizer).__qualname__} keeps several sets of buffers ({keys}); "
                "only one, the momentum, can be part of the outer state"
            )
        return keys[0] if keys else None

    def _live(self) -> dict[str, Tensor] | None:
        key = self._key()
        live = None if key is None else getattr(self._optimizer, key, None)
        return live if isinstance(live, dict) else None

    def momentum(self) -> dict[str, Tensor]:
        live = self._live()
        if live is not None:
            return live
        key = self._key()
        return {} if key is None else self._optimizer.state_dict()[key]

    def hyper(self) -> Tree:
        saved = self._optimizer.state_dict()
        settings = {}
        for name in HYPER:  # attributes first: some state_dict() leave weight_decay out
            value = _number(getattr(self._optimizer, name, saved.get(name)))
            if _is_number(value):
                settings[name] = value
        return settings

    def install(self, momentum: Mapping[str, Tensor], hyper: Tree | None) -> None:
        live, key = self._live(), self._key()
        if momentum and key is None:
            raise Incompatible("the snapshot has outer momentum and this outer optimizer has no place for any")
        if live is not None:
            new = dict(momentum)
            live.clear()
            live.update(new)
        elif key is not None:
            self._late = {**self._optimizer.state_dict(), **(hyper or {}), key: dict(momentum)}
        for name, value in (hyper or {}).items():
            if name in HYPER and getattr(self._optimizer, name, value) != value:
                setattr(self._optimizer, name, value)

    def commit(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            self._optimizer.load_state_dict(late)


def _number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
