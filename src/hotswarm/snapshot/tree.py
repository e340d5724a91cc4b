"""The state tree: what a snapshot holds, as a flat list of leaves.

A tree is made of dicts (keys `str` or `int`), lists and tuples; its ends are tensors or values of a closed set. Flat,
it is a sequence of leaves, each with a path. Every container has a leaf too, so that an empty list survives. A parent
comes before its children, the children of a list or tuple come in order, and the first leaf is the root's container.

A tensor that occurs twice is carried once; the second place holds an alias to the first.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Literal

from hotswarm.errors import CaptureError, ManifestError
from hotswarm.snapshot.dtypes import ITEMSIZE
from hotswarm.snapshot.limits import MAX_DEPTH, MAX_NBYTES, MAX_NDIM, MAX_PATH_BYTES, MAX_ROLE_BYTES

Key = str | int
Path = tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes: contiguous, row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Product of the shape times the size of an element; a scalar has one element."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True, slots=True)
class DTypeValue:
    """A torch.dtype as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class SizeValue:
    """A torch.Size as a value."""

    dims: tuple[int, ...]


Value = None | bool | int | float | str | bytes | DTypeValue | SizeValue

ContainerKind = Literal["dict", "list", "tuple"]


@dataclass(frozen=True, slots=True)
class Container:
    """A dict, list or tuple; its children are leaves of their own."""

    kind: ContainerKind


@dataclass(frozen=True, slots=True)
class Alias:
    """The same tensor as the leaf at `target`, an earlier tensor leaf of this section."""

    target: Path


@dataclass(frozen=True, slots=True)
class Leaf:
    """One place of the tree. `role` says what a tensor is for: "param", "exp_avg", …; it is empty for values."""

    path: Path
    what: TensorSpec | Value | Container | Alias
    role: str = ""


_VALUE_TYPES = frozenset({type(None), bool, int, float, str, bytes, DTypeValue, SizeValue})
_DICT_TYPES = frozenset({dict, OrderedDict, defaultdict})


def encode_path(path: Path) -> str:
    """The path as a compact ASCII JSON array: `["model","fc.weight"]`."""
    return "[" + ",".join([encode_basestring_ascii(k) if type(k) is str else str(k) for k in path]) + "]"


def decode_path(text: str) -> Path:
    """The path that `encode_path` would write as exactly `text`; ManifestError otherwise."""
    if len(text) > MAX_PATH_BYTES:
        raise ManifestError(f"a path has {len(text)} bytes, the limit is {MAX_PATH_BYTES}")
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError):
        keys = None
    if type(keys) is not list or not all(type(k) is str or type(k) is int for k in keys):
        raise ManifestError(f"path {text[:200]!r} is not a JSON array of strings and integers")
    if len(keys) > MAX_DEPTH:
        raise ManifestError(f"a path has {len(keys)} keys, the limit is {MAX_DEPTH}")
    path: Path = tuple(keys)
    if encode_path(path) != text:
        raise ManifestError(f"path {text[:200]!r} is not in its compact ASCII form")
    return path


def show_path(path: Path) -> str:
    """The path for people: `model/fc.weight`."""
    return "/".join(map(str, path)) or "(root)"


def check_spec(spec: TensorSpec, where: str) -> None:
    """ManifestError unless dtype, number of dimensions and size are within the limits."""
    if spec.dtype not in ITEMSIZE:
        raise ManifestError(f"{where}: unknown dtype {spec.dtype[:40]!r}")
    if len(spec.shape) > MAX_NDIM:
        raise ManifestError(f"{where}: {len(spec.shape)} dimensions, the limit is {MAX_NDIM}")
    nbytes = ITEMSIZE[spec.dtype]
    for dim in spec.shape:
        # Empty dimensions are left out of the product: (2^62, 2^62, 0) has no bytes, and is a lie all the same.
        nbytes *= max(dim, 1)
        if dim < 0 or nbytes > MAX_NBYTES:
            raise ManifestError(f"{where}: shape {spec.shape} of {spec.dtype} overflows {MAX_NBYTES} bytes")


def check_leaves(leaves: Sequence[Leaf]) -> None:
    """ManifestError unless the leaves form one tree in the order that the module's head describes."""
    if not leaves or leaves[0].path != () or type(leaves[0].what) is not Container:
        raise ManifestError("a section does not begin with the container at its root")
    seen: dict[Path, Leaf] = {(): leaves[0]}
    children: dict[Path, int] = {}
    for leaf in leaves[1:]:
        path = leaf.path
        parent = seen.get(path[:-1]) if path else None
        if parent is None or type(parent.what) is not Container:
            raise ManifestError(f"leaf {show_path(path)} has no container before it")
        if path in seen:
            raise ManifestError(f"leaf {show_path(path)} occurs twice")
        if parent.what.kind != "dict":
            index = children.get(parent.path, 0)
            if type(path[-1]) is not int or path[-1] != index:
                raise ManifestError(f"leaf {show_path(path)} is not item {index} of its {parent.what.kind}")
            children[parent.path] = index + 1
        what = leaf.what
        if type(what) is TensorSpec:
            check_spec(what, show_path(path))
        elif type(what) is Alias:
            target = seen.get(what.target)
            if target is None or type(target.what) is not TensorSpec:
                raise ManifestError(f"leaf {show_path(path)} shares {show_path(what.target)}, no tensor before it")
        elif leaf.role:
            raise ManifestError(f"leaf {show_path(path)} is no tensor and has the role {leaf.role[:40]!r}")
        if len(leaf.role) > MAX_ROLE_BYTES or not leaf.role.isascii():
            raise ManifestError(f"leaf {show_path(path)}: a role is ASCII and has at most {MAX_ROLE_BYTES} bytes")
        seen[path] = leaf


Classified = TensorSpec | DTypeValue | SizeValue | Alias | None


def _no_role(path: Path) -> str:
    del path
    return ""


def flatten(
    tree: object,
    classify: Callable[[Path, object], Classified],
    role: Callable[[Path], str] = _no_role,
) -> tuple[Leaf, ...]:
    """The leaves of a tree, parents before children, dicts in their own order.

    `classify` is asked about every object that is neither a container nor a plain value (torch.Size and torch.dtype
    included): it returns a spec for a tensor, an alias for one seen before, a value, or None for what it does not know.
    `role` is asked for tensors and aliases. CaptureError names the path and the type of what cannot be captured.
    """
    leaves: list[Leaf] = []

    def visit(path: Path, node: object) -> None:
        kind = type(node)
        if kind in _DICT_TYPES:
            leaves.append(Leaf(path, Container("dict")))
            for key, child in node.items():  # type: ignore[attr-defined]
                if type(key) is not str and type(key) is not int:
                    raise CaptureError(
                        f"{show_path(path)} has a key of type {type(key).__name__}: only str and int can be captured"
                    )
                visit(_longer(path, key), child)
        elif kind is list or kind is tuple:
            leaves.append(Leaf(path, Container("list" if kind is list else "tuple")))
            for index, child in enumerate(node):  # type: ignore[arg-type]
                visit(_longer(path, index), child)
        elif kind in _VALUE_TYPES:
            if kind is str:
                _check_text(path, node)  # type: ignore[arg-type]
            leaves.append(Leaf(path, node))  # type: ignore[arg-type]
        else:
            what = classify(path, node)
            if what is None:
                raise CaptureError(
                    f"{show_path(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be captured: "
                    "keep tensors, None, bool, int, float, str, bytes, torch.dtype, torch.Size, dicts, lists and tuples"
                )
            said = role(path) if type(what) is TensorSpec or type(what) is Alias else ""
            if len(said) > MAX_ROLE_BYTES or not said.isascii():
                raise CaptureError(f"{show_path(path)}: its role {said[:80]!r} is not ASCII of {MAX_ROLE_BYTES} bytes")
            leaves.append(Leaf(path, what, said))

    if type(tree) not in _DICT_TYPES and type(tree) is not list and type(tree) is not tuple:
        raise CaptureError(f"a section is a dict, list or tuple, not a {type(tree).__name__}")
    visit((), tree)
    return tuple(leaves)


def _longer(path: Path, key: Key) -> Path:
    longer = (*path, key)
    if len(longer) > MAX_DEPTH:
        raise CaptureError(f"{show_path(path[:4])}/… is nested deeper than {MAX_DEPTH}: is there a cycle in the state?")
    if len(encode_path(longer)) > MAX_PATH_BYTES:
        raise CaptureError(f"{show_path(longer)[:200]}… is a path of more than {MAX_PATH_BYTES} bytes")
    return longer


def _check_text(path: Path, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CaptureError(f"{show_path(path)} is a str with a lone surrogate, which has no UTF-8 form") from None


def unflatten(leaves: Iterable[Leaf], tensor: Callable[[Leaf], object]) -> object:
    """The tree of leaves that `check_leaves` accepts.

    `tensor` is called once for each tensor leaf; an alias becomes the very object that its target became. Values of
    type DTypeValue and SizeValue stay what they are.
    """
    made: dict[Path, object] = {}
    order: list[tuple[Path, Container]] = []
    children: dict[Path, list[tuple[Key, Path]]] = {}
    for leaf in leaves:
        path, what = leaf.path, leaf.what
        if type(what) is Container:
            order.append((path, what))
            children[path] = []
        elif type(what) is TensorSpec:
            made[path] = tensor(leaf)
        elif type(what) is Alias:
            made[path] = made[what.target]
        else:
            made[path] = what
        if path:
            children[path[:-1]].append((path[-1], path))
    for path, container in reversed(order):  # children come after their parent, so backwards they are ready
        if container.kind == "dict":
            made[path] = {key: made[child] for key, child in children[path]}
        else:
            items = [made[child] for _, child in children[path]]
            made[path] = items if container.kind == "list" else tuple(items)
    return made[()]
