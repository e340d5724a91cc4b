"""Names of tensors: the same for a model plain, compiled or wrapped, and for parameters that no module knows.

Wrappers put `module.` (DistributedDataParallel) or `_orig_mod.` (torch.compile) in front of a part of a name; those
parts are taken out, so that a snapshot of one restores into the other.

A parameter that the optimizer owns but `named_parameters()` does not list (layers kept in a plain dict or list of the
model, a loose tensor) is looked for along the model's attributes, and named by the way there: `layers.3.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor, nn

from hotswarm.errors import CaptureError

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DEEPEST = 8  # attribute levels that are searched for loose parameters


@lru_cache(maxsize=100_000)
def clean(name: str) -> str:
    """`module._orig_mod.fc.weight` → `fc.weight`."""
    parts = name.split(".")
    kept = [part for part in parts if part not in _WRAPPERS]
    return ".".join(kept or parts)


@dataclass
class NamedTensors:
    """Parameters and buffers by clean name. The second name of a tied parameter is in `ties`, not in `params`."""

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Second name → the name in `params` or `buffers` that it shares one tensor object with."""
    name_of: dict[int, str] = field(default_factory=dict)
    """id(tensor) → name, for parameters."""


def _unwrapped(model: object) -> object:
    seen = set()
    while id(model) not in seen:
        seen.add(id(model))
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if isinstance(inner, nn.Module):
            model = inner
    return model


def _own_tensors(model: object) -> Iterator[tuple[str, Tensor, bool]]:
    """(clean name, tensor, is a buffer) as the model itself lists them, second names of tied ones included."""
    if isinstance(model, nn.Module):
        for name, param in model.named_parameters(remove_duplicate=False):
            yield clean(name), param, False
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():  # noqa: SLF001  # the only list of what is persistent
                if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
                    yield clean(f"{prefix}.{name}" if prefix else name), buffer, True
    elif callable(listing := getattr(model, "named_parameters", None)):
        for name, param in listing():
            yield clean(name), param, False


def named_tensors(model: object, owned: Iterable[Tensor] = ()) -> NamedTensors:
    """Every tensor of the model, and those of `owned` (what the optimizers own) that the model does not list.

    CaptureError when two different tensors come out under one name.
    """
    found = NamedTensors()
    first: dict[int, str] = {}
    for name, tensor, is_buffer in _own_tensors(model):
        if id(tensor) in first:
            if first[id(tensor)] != name:
                found.ties[name] = first[id(tensor)]
            continue
        if name in found.params or name in found.buffers:
            raise CaptureError(f"two different tensors of the model have the name {name!r} without wrappers' prefixes")
        first[id(tensor)] = name
        (found.buffers if is_buffer else found.params)[name] = tensor
    missing = [tensor for tensor in owned if id(tensor) not in first]
    if missing:
        _name_loose(found, model, missing)
    found.name_of = {id(tensor): name for name, tensor in found.params.items()}
    return found


def _name_loose(found: NamedTensors, model: object, missing: list[Tensor]) -> None:
    wanted = {id(tensor) for tensor in missing}
    ways: dict[int, str] = {}
    _search(_unwrapped(model), "", wanted, ways.setdefault, set(), 0)
    for position, tensor in enumerate(missing):
        name = clean(ways.get(id(tensor), f"~loose.{position}"))
        if name in found.params or name in found.buffers:
            name = f"~{name}"
        found.params[name] = tensor


def _search(
    node: object, way: str, wanted: set[int], note: Callable[[int, str], object], seen: set[int], depth: int
) -> None:
    if isinstance(node, Tensor):
        if id(node) in wanted:
            note(id(node), way)
        return
    if depth > _DEEPEST or id(node) in seen or isinstance(node, str | bytes | int | float | type):
        return
    seen.add(id(node))
    children: Iterable[tuple[object, object]]
    if isinstance(node, nn.Module):
        registered = {**node._parameters, **node._modules}  # noqa: SLF001
        children = [*registered.items(), *_attributes(node)]
    elif isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list | tuple):
        children = enumerate(node)
    elif type(node).__module__.split(".")[0] in {"builtins", "torch", "threading"}:
        return
    else:
        children = _attributes(node)
    for key, child in children:
        if child is not None:
            _search(child, f"{way}.{key}" if way else str(key), wanted, note, seen, depth + 1)


def _attributes(node: object) -> list[tuple[object, object]]:
    own = getattr(node, "__dict__", {})
    return [(key, child) for key, child in own.items() if key not in {"_parameters", "_buffers", "_modules"}]


def optimizer_params(optimizer: object) -> list[Tensor]:
    """Every parameter of a torch-shaped optimizer, group by group."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        raise CaptureError(f"{type(optimizer).__qualname__} has no param_groups: it is not a torch optimizer")
    return [param for group in groups for param in group["params"]]
