"""Outer optimizers: where they keep their momentum and settings, and how both are put back by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hotswarm.errors import CaptureError, Incompatible

HYPER = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
"""The outer optimizer's settings that are part of the outer section; nothing else of it is."""

Tree = dict[str, Any]


class OuterState(Protocol):
    """What an adapter needs of an outer optimizer. `install` and `commit` are the two halves of a restore."""

    def momentum(self) -> dict[str, Tensor]:
        """name → momentum buffer, live where the optimizer lets it be reached."""
        ...

    def hyper(self) -> Tree:
        """The settings of HYPER."""
        ...

    def install(self, momentum: Mapping[str, Tensor], hyper: Tree | None) -> None:
        """Take these buffers by reference, and these settings. Incompatible: nothing is changed."""
        ...

    def commit(self) -> None:
        """The buffers' bytes are there now."""
        ...


def outer_state_of(optimizer: Any, name_of: Callable[[], dict[int, str]]) -> OuterState:
    """The one that fits: torch's own kind by `state`, any other by its `state_dict()`."""
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
            if type(value) in {bool, int, float}:
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
