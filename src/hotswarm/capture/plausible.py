"""Whether training can go on with values from outside: what `Restorer.check` asks beyond names and shapes of a model.

A dict of the caller's or a neighbour's snapshot may hold anything that the format can say, and a wrong value is taken
without a murmur and ends training a step later. So moments must fit their parameters, settings must be of the kind
that they are here, and torch's own optimizers make one step on a stand-in: a parameter of one element with the
snapshot's settings and keys. Messages name the first value that cannot be.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotswarm.capture.incoming import Tree, is_promise, materialise
from hotswarm.capture.outer import HYPER
from hotswarm.capture.tensors import dtype_of
from hotswarm.errors import Incompatible

LIKE_THE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
)
"""State that is as large as its parameter in every optimizer that has it."""

_SWITCHES = frozenset({"foreach", "fused"})  # None, or a bool: which of them, differs between two machines
_UNTRIED = ("LBFGS", "SparseAdam", "Adafactor", "Muon")  # cannot be tried on one element
_HARDWARE = ("capturable", "differentiable", "fused", "foreach")  # settings that say how a step is computed, not what


def check_optimizer_values(tree: Tree, ordered: Sequence[Tree], optimizer: Any, name_of: Mapping[int, str]) -> None:
    """Incompatible unless `optimizer` can step with this state and these groups (in the order of the groups here)."""
    check_group_values(ordered, optimizer)
    if not isinstance(tree["state"], dict):
        raise Incompatible("the optimizer's state in the snapshot is no dict")
    tried: set[object] = set()
    for group, saved in zip(optimizer.param_groups, ordered, strict=True):
        for param in group["params"]:
            state = tree["state"].get(name_of[id(param)])
            if state is None:
                continue
            _check_state(state, optimizer.state.get(param, {}), param, name_of[id(param)])
            signature = (id(saved), param.dtype, *((key, _kind(value, param)) for key, value in state.items()))
            if signature not in tried:
                tried.add(signature)
                _try_step(optimizer, param, group, saved, state, name_of[id(param)])


def check_group_values(ordered: Sequence[Tree], optimizer: Any) -> None:
    """Incompatible unless every setting of the groups is of the kind that it is here."""
    for group, saved in zip(optimizer.param_groups, ordered, strict=True):
        for key, value in saved.items():
            if key == "params" or key not in group:
                continue
            if key in _SWITCHES:
                if value is not None and type(value) is not bool:
                    raise Incompatible(f"the setting {key!r} of a parameter group is {_shown(value)} in the snapshot")
                continue
            check_alike(value, group[key], f"the setting {key!r} of a parameter group", finite=True)
        _try_settings(optimizer, group, saved)


def check_steps(tree: Tree) -> None:
    """Incompatible for a step count below 0, or none at all. Reads these tensors, so their bytes must be here."""
    for name, state in tree["state"].items():
        step = state.get("step", 0) if isinstance(state, dict) else 0
        if is_promise(step):
            step = materialise(step).item()
        if not isinstance(step, int | float) or not math.isfinite(step) or step < 0:
            raise Incompatible(f"the optimizer's step count of {name} is {step!r} in the snapshot")


def check_alike(value: Any, live: Any, what: str, *, finite: bool = False) -> None:
    """Incompatible unless `value` is of the kind of `live`: int and float are one kind, and a tensor of one element is
    a number. Where there is None here anything may come.
    """
    if live is None:
        return
    if isinstance(live, bool | str):
        good = type(value) is type(live)
    elif isinstance(live, int | float) or (isinstance(live, Tensor) and live.numel() == 1):
        good = _is_number(value)
        if good and finite and not is_promise(value):
            good = math.isfinite(value) or value == live
    elif isinstance(live, Tensor):
        good = is_promise(value) and tuple(value.spec.shape) == tuple(live.shape)
    elif isinstance(live, list | tuple):
        good = isinstance(value, list | tuple) and len(value) == len(live)
        for index, child in enumerate(live if good else ()):
            check_alike(value[index], child, f"{what}[{index}]", finite=finite)
    elif isinstance(live, Mapping):
        good = isinstance(value, Mapping)
        for key in live.keys() & value.keys() if good else ():
            check_alike(value[key], live[key], f"{what}[{key!r}]", finite=finite)
    else:
        return
    if not good:
        raise Incompatible(f"{what} is {_shown(live)} here and {_shown(value)} in the snapshot")


def check_own_kind(tree: Any, thing: Any, what: str) -> None:
    """Incompatible unless a scheduler or scaler of torch's own finds its values of the kinds that they are here. What
    is of anybody else knows best itself.
    """
    if type(thing).__module__.startswith(("torch.optim.", "torch.amp.", "torch.cuda.amp.")):
        check_alike(tree, thing.state_dict(), f"the {what}'s state")


def check_outer_values(outer: Tree, live: Tree | None, trained: Sequence[str]) -> None:
    """Incompatible unless the outer copy has every parameter that is trained, in floating point, and its settings are
    numbers. `live`: the outer tree as it is here, when there is one.
    """
    have = (live or {}).get("params", {})
    for name in have or trained:
        if name not in outer["params"]:
            raise Incompatible(f"the outer copy in the snapshot lacks {name!r}, which is trained here")
    for key in ("params", "momentum"):
        for name, promise in outer[key].items():
            dtype = dtype_of(promise.spec.dtype)
            if not (dtype.is_floating_point or dtype.is_complex):
                raise Incompatible(f"outer {key}: {name} is {promise.spec} in the snapshot")
            here = (live or {}).get(key, {}).get(name)
            if here is not None and here.dtype != dtype:
                raise Incompatible(f"outer {key}: {name} is {here.dtype} here and {promise.spec} in the snapshot")
    _check_hyper(outer["hyper"])


def _check_hyper(node: Any) -> None:
    if not isinstance(node, dict):
        raise Incompatible(f"the outer optimizer's settings are {_shown(node)} in the snapshot")
    for key, value in node.items():
        if key not in HYPER:
            if isinstance(value, dict):  # by group, or by fragment
                _check_hyper(value)
            continue
        good = type(value) is bool if key == "nesterov" else type(value) in {int, float} and math.isfinite(value)
        if not good:
            raise Incompatible(f"the outer optimizer's {key} is {_shown(value)} in the snapshot")


# ---------------------------------------------------------------- an optimizer's state


def _check_state(state: Any, live: Mapping[str, Any], param: Tensor, name: str) -> None:
    if not isinstance(state, dict):
        raise Incompatible(f"the optimizer's state of {name} is {_shown(state)} in the snapshot")
    for key, value in state.items():
        what = f"the optimizer's {key} of {name}"
        if key == "step":
            if not _is_number(value):
                raise Incompatible(f"{what} is {_shown(value)} in the snapshot, not a number")
        elif key in LIKE_THE_PARAMETER and value is not None:
            if not is_promise(value) or tuple(value.spec.shape) != tuple(param.shape):
                raise Incompatible(f"{what} is {_shown(value)} in the snapshot, and its parameter {_shown(param)} here")
        elif isinstance(live.get(key), Tensor):
            check_alike(value, live[key], what)


def _is_number(value: Any) -> bool:
    if is_promise(value):
        dtype = dtype_of(value.spec.dtype)
        return math.prod(value.spec.shape) == 1 and dtype != torch.bool and not dtype.is_complex
    return type(value) in {int, float}


def _kind(value: Any, param: Tensor) -> object:
    if is_promise(value):
        return value.spec.dtype, tuple(value.spec.shape) == tuple(param.shape), math.prod(value.spec.shape) == 1
    return type(value)


def _shown(value: Any) -> str:
    if is_promise(value):
        return f"a tensor of {value.spec}"
    if isinstance(value, Tensor):
        return f"a tensor of {'x'.join(map(str, value.shape)) or 'one element'}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


# ---------------------------------------------------------------- a step on a stand-in


def _is_tried(optimizer: Any) -> bool:
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "hotswarm" or (
        kind.__module__.startswith("torch.optim.") and kind.__name__ not in _UNTRIED
    )


def _twin(optimizer: Any, settings: Mapping[str, Any], param: Tensor) -> Any:
    known = inspect.signature(type(optimizer)).parameters
    return type(optimizer)([param], **{key: value for key, value in settings.items() if key in known})


def _settings(group: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
    mixed = {**group, **saved}
    return {key: _number(value) for key, value in mixed.items() if key != "params" and key not in _HARDWARE}


def _number(value: Any) -> Any:
    """A setting without its tensors: any rate or beta may be a half."""
    if isinstance(value, list | tuple):
        return type(value)(map(_number, value))
    return 0.5 if is_promise(value) or isinstance(value, Tensor) else value


def _try_settings(optimizer: Any, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """What the constructor refuses (betas above 1, say), unless it refuses what is here as well."""
    if not _is_tried(optimizer):
        return
    try:
        _twin(optimizer, _settings(group, saved), torch.zeros(1))
    except Exception as error:
        if not _fails(lambda: _twin(optimizer, _settings(group, {}), torch.zeros(1))):
            raise Incompatible(f"{type(optimizer).__name__} refuses the snapshot's settings: {error}") from error


def _try_step(
    optimizer: Any, param: Tensor, group: Mapping[str, Any], saved: Mapping[str, Any], state: Tree, name: str
) -> None:
    if not _is_tried(optimizer) or not (param.dtype.is_floating_point or param.dtype.is_complex):
        return

    def step(settings: Tree, values: Mapping[str, Any]) -> None:
        small = torch.ones([1] * param.ndim, dtype=param.dtype, requires_grad=True)
        twin = _twin(optimizer, settings, small)
        twin.state[small] = {key: _small(value, small.shape) for key, value in values.items()}
        small.grad = torch.ones_like(small)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            inspect.unwrap(type(twin).step)(twin)  # past the hooks that anybody set on all optimizers

    try:
        step(_settings(group, saved), state)
    except Exception as error:
        live = optimizer.state.get(param)
        if live and _fails(lambda: step(_settings(group, {}), live)):
            return  # neither does it with what is here, so this says nothing
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise Incompatible(
            f"{type(optimizer).__name__} could not go on from the snapshot's state of {name}: {lacking}"
        ) from error


def _small(value: Any, shape: Sequence[int]) -> Any:
    """A stand-in of one element for a tensor; anything else as it is."""
    if is_promise(value):
        one = math.prod(value.spec.shape) == 1 and not value.spec.shape
        return torch.ones(() if one else tuple(shape), dtype=dtype_of(value.spec.dtype))
    if isinstance(value, Tensor):
        return torch.ones(() if value.ndim == 0 else tuple(shape), dtype=value.dtype)
    return value


def _fails(action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception:  # noqa: BLE001 - whatever it is, that is the answer
        return True
    return False
