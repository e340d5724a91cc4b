"""From live objects to leaves: the closed set, and nothing else.

A leaf that equals the one of the last walk *is* that object: whoever encodes leaves can tell by identity what is new.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotswarm.capture.naming import NamedTensors, optimizer_params
from hotswarm.capture.tensors import NAME_OF_DTYPE, spec_of
from hotswarm.errors import CaptureError
from hotswarm.snapshot.limits import MAX_DEPTH, MAX_ROLE_BYTES
from hotswarm.snapshot.tree import Alias, Container, DTypeValue, Key, Leaf, Path, SizeValue, TensorSpec, show_path

Tree = dict[str, Any]

_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_VALUES = frozenset({type(None), bool, int, float, str, bytes})
DICT, LIST, TUPLE = Container("dict"), Container("list"), Container("tuple")


def is_stateful(thing: object) -> bool:
    """Whether an object saves and loads itself."""
    kind = type(thing)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


class Walk:
    """Collects the leaves of one section; a leaf equal to the one of last time is that very object."""

    def __init__(self, before: dict[Path, Leaf]) -> None:
        self._before = before
        self.seen: dict[Path, Leaf] = {}
        self.leaves: list[Leaf] = []
        self.tensors: list[Tensor] = []
        self._places: dict[int, tuple[Path, TensorSpec, Tensor]] = {}
        self._roles: dict[Key, str] = {}
        self._variants: dict[tuple[int, TensorSpec, tuple[int, ...]], Path] = {}

    def add(self, path: Path, what: Any, role: str = "") -> None:
        """A leaf that is no tensor."""
        leaf = self._before.get(path)
        if leaf is None or leaf.role != role or not _same(leaf.what, what):
            leaf = Leaf(path, what, role)
        self.seen[path] = leaf
        self.leaves.append(leaf)

    def tensor(self, path: Path, tensor: Tensor, role: str) -> None:
        """A tensor leaf, or an alias when the very same elements were seen before."""
        leaf = self._before.get(path)
        known = leaf.what if leaf is not None else None
        if (
            type(known) is TensorSpec
            and (type(tensor) is Tensor or type(tensor) is nn.Parameter)
            and tensor.shape == known.shape
            and NAME_OF_DTYPE.get(tensor.dtype) == known.dtype
            and tensor.layout is torch.strided
        ):
            spec = known
        else:
            spec = spec_of(tensor, path)
        address = tensor.data_ptr()
        there = self._places.setdefault(address, (path, spec, tensor))
        if there[0] is not path and address:
            first = self._first_of(address, there, path, spec, tensor)
            if first is not path and 0 not in spec.shape:
                self.add(path, Alias(first), role)
                return
        if leaf is None or spec is not known or leaf.role != role:
            leaf = Leaf(path, spec, role)
        self.seen[path] = leaf
        self.leaves.append(leaf)
        self.tensors.append(tensor)

    def _first_of(
        self, address: int, there: tuple[Path, TensorSpec, Tensor], path: Path, spec: TensorSpec, tensor: Tensor
    ) -> Path:
        """The path of the first tensor with exactly these elements; several views may begin at one address."""
        self._variants.setdefault((address, there[1], there[2].stride()), there[0])
        return self._variants.setdefault((address, spec, tensor.stride()), path)

    # ------------------------------------------------------------ parts

    def outer(self, tree: Tree) -> None:
        """The outer section: the whitelist and nothing else."""
        for key, role in (("params", "param"), ("momentum", "momentum")):
            self.add((key,), DICT)
            for name, tensor in tree[key].items():
                self.tensor((key, name), tensor, role)
        rest = {key: value for key, value in tree.items() if key not in {"params", "momentum"}}
        for key, value in rest.items():
            self.tree((key,), value)

    def model(self, names: NamedTensors) -> None:
        """Parameters and buffers; a tied name is an alias of the first."""
        self.add(("model",), DICT)
        for name, tensor in names.params.items():
            self.tensor(("model", name), tensor, "param")
        for name, tensor in names.buffers.items():
            self.tensor(("model", name), tensor, "buffer")
        for name, first in names.ties.items():
            target = self.seen["model", first].what
            role = "param" if first in names.params else "buffer"
            self.add(("model", name), target if type(target) is Alias else Alias(("model", first)), role)

    def optimizer(self, path: Path, optimizer: Any, name_of: Mapping[int, str]) -> None:
        """State and groups by parameter name; `class` says what it is."""
        self.add(path, DICT)
        self.add((*path, "class"), type(optimizer).__name__)
        self.add((*path, "state"), DICT)
        state = optimizer.state
        for param in optimizer_params(optimizer):
            if param in state:  # a defaultdict: looking up would create
                at = (*path, "state", name_of[id(param)])
                self.add(at, DICT)
                for key, value in state[param].items():
                    role = self._roles.get(key)
                    if role is None:
                        role = self._roles[key] = _role(key)
                    self.tree(_longer(at, key), value, role)
        loose = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        self.tree((*path, "global"), loose)
        self.add((*path, "param_groups"), LIST)
        for index, group in enumerate(optimizer.param_groups):
            at = (*path, "param_groups", index)
            self.add(at, DICT)
            for key, value in group.items():
                named = [name_of[id(param)] for param in value] if key == "params" else value
                self.tree(_longer(at, key), named)

    def attached(self, path: Path, node: Any) -> None:
        """A tree whose ends may also be objects that save themselves."""
        kind = type(node)
        if isinstance(node, torch.Generator):
            self.tensor(path, node.get_state(), "rng")
        elif kind in _DICTS:
            self.add(path, DICT)
            for key, child in node.items():
                self.attached(_longer(path, key), child)
        elif kind is list or kind is tuple:
            self.add(path, LIST if kind is list else TUPLE)
            for index, child in enumerate(node):
                self.attached(_longer(path, index), child)
        elif is_stateful(node):
            self.tree(path, node.state_dict())
        else:
            self.tree(path, node)

    def tree(self, path: Path, node: Any, role: str = "other") -> None:
        """A tree of the closed set."""
        kind = type(node)
        if kind is Tensor:
            self.tensor(path, node, role)
        elif kind in _VALUES:
            if kind is str:
                _check_text(path, node)
            self.add(path, node)
        elif kind in _DICTS:
            self.add(path, DICT)
            for key, child in node.items():
                self.tree(_longer(path, key), child, role)
        elif kind is torch.Size:
            self.add(path, SizeValue(tuple(node)))
        elif kind is list or kind is tuple:
            self.add(path, LIST if kind is list else TUPLE)
            for index, child in enumerate(node):
                self.tree(_longer(path, index), child, role)
        elif isinstance(node, Tensor):
            self.tensor(path, node, role)
        elif kind is torch.dtype:
            if node not in NAME_OF_DTYPE:
                raise CaptureError(f"{show_path(path)} is {node}, a dtype whose tensors cannot be captured")
            self.add(path, DTypeValue(NAME_OF_DTYPE[node]))
        elif (plain := _plain_number(node)) is not None:
            self.add(path, plain)
        else:
            raise CaptureError(
                f"{show_path(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be captured: "
                "keep tensors, None, bool, int, float, str, bytes, torch.dtype, torch.Size, dicts, lists and tuples"
            )


def _same(old: object, new: object) -> bool:
    if type(old) is not type(new):
        return False
    # 0.0 == -0.0, and NaN is not itself: a float counts as the same only when it is the same object, or written alike.
    return old is new or (old == new and (type(old) is not float or repr(old) == repr(new)))


def _role(key: Key) -> str:
    usable = type(key) is str and key.isascii() and 0 < len(key) <= MAX_ROLE_BYTES
    return key if usable and key not in {"param", "buffer"} else "other"  # type: ignore[return-value]


def _longer(path: Path, key: object) -> Path:
    if type(key) is str and key.isascii() and len(path) < MAX_DEPTH:
        return (*path, key)
    if type(key) is not str and type(key) is not int:
        raise CaptureError(f"{show_path(path)} has a key of type {type(key).__name__}; only str and int will do")
    if len(path) >= MAX_DEPTH:
        raise CaptureError(f"{show_path(path[:4])}/… is nested deeper than {MAX_DEPTH}: is there a cycle in the state?")
    if type(key) is str:
        _check_text(path, key)
    return (*path, key)


def _check_text(path: Path, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CaptureError(f"{show_path(path)} has a str with a lone surrogate, which has no UTF-8 form") from None


def _plain_number(node: object) -> bool | int | float | None:
    """A numpy scalar as Python's number: schedules computed with numpy leave them in `lr`."""
    if type(node).__module__ != "numpy" or not callable(item := getattr(node, "item", None)):
        return None
    if getattr(node, "shape", None) != ():
        return None
    value = item()
    return value if type(value) in {bool, int, float} else None
