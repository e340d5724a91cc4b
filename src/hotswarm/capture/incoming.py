"""A snapshot on its way back in: its trees, with a promise of bytes where a tensor will be.

Nothing is read before somebody asks a promise to fill a tensor, and then the bytes go straight there: a restore never
holds a second copy of the state. Promises come from a SnapshotSource, or from tensors that the caller has (restoring
from a dict).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotswarm.capture.diloco import Counters
from hotswarm.capture.tensors import bytes_of, copy_elements, dtype_of, is_flat, new_tensor, spec_of
from hotswarm.errors import Incompatible
from hotswarm.snapshot.manifest import Manifest
from hotswarm.snapshot.tree import DTypeValue, Leaf, SizeValue, TensorSpec, unflatten
from hotswarm.store.base import SnapshotSource

Tree = dict[str, Any]

_SCAN_BYTES = 4 << 20  # read at a time when looking for NaN
_THREADS = 2  # copies run at 13 GB/s with one thread and 23 with two
_THREADED_BYTES = 8 << 20


class Incoming(Protocol):
    """The bytes of one tensor, still elsewhere. One object per tensor: a tied one is met twice, and is one promise."""

    spec: TensorSpec
    role: str

    def fill(self, tensor: Tensor) -> None:
        """Put the bytes into a tensor of this spec. Raises StoreError when they cannot be read."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FromSource:
    """A tensor in the packed stream of a snapshot."""

    source: SnapshotSource
    section: str
    offset: int
    spec: TensorSpec
    role: str

    def fill(self, tensor: Tensor) -> None:
        """See Incoming."""
        flat = tensor if is_flat(tensor) else new_tensor(self.spec)
        if self.spec.nbytes:
            self.source.read_into(self.section, self.offset, bytes_of(flat))
        if flat is not tensor:
            put(tensor, flat)


@dataclass(frozen=True, slots=True, eq=False)
class FromTensor:
    """A tensor that is here already."""

    tensor: Tensor
    spec: TensorSpec
    role: str

    def fill(self, tensor: Tensor) -> None:
        """See Incoming."""
        put(tensor, self.tensor)


def put(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, exact in every bit, across devices too."""
    if target.device == source.device:
        copy_elements(target, source)
    else:
        with torch.no_grad():
            target.detach().copy_(source.detach())


@dataclass(frozen=True, slots=True)
class IncomingState:
    """All of a snapshot. `sections`: name → tree, whose tensors are promises, dtypes and sizes torch's own."""

    sections: Mapping[str, Tree]
    counters: Counters
    engine: str
    source: SnapshotSource | None = None

    def section(self, name: str) -> Tree:
        """The tree of a section; Incompatible when the snapshot has none of that name."""
        try:
            return self.sections[name]
        except KeyError:
            raise Incompatible(f"the snapshot has no {name!r} section") from None

    def check_present(self, promises: Iterable[Incoming]) -> None:
        """Incompatible unless every chunk that these need is here."""
        wanted: dict[str, set[int]] = {}
        for promise in promises:
            if isinstance(promise, FromSource):
                layout = promise.source.manifest.sections[promise.section].layout
                wanted.setdefault(promise.section, set()).update(layout.chunks_in(promise.offset, promise.spec.nbytes))
        if self.source is None:
            return
        for section, indexes in wanted.items():
            absent = sum(not self.source.has_chunk(section, index) for index in indexes)
            if absent:
                raise Incompatible(
                    f"{absent} of {len(indexes)} chunks that this restore needs of section {section!r} were not fetched"
                )


def incoming_from_source(source: SnapshotSource) -> IncomingState:
    """The promises of a snapshot that lies somewhere."""
    manifest = source.manifest
    sections = {name: _tree(source, manifest, name) for name in manifest.sections}
    counters = Counters(manifest.outer_step, manifest.inner_step, manifest.training_step)
    return IncomingState(sections, counters, manifest.engine, source)


def _tree(source: SnapshotSource, manifest: Manifest, section: str) -> Tree:
    entry = manifest.sections[section]
    places = entry.layout.by_path

    def promise(leaf: Leaf) -> FromSource:
        placed = places[leaf.path]
        return FromSource(source, section, placed.offset, placed.spec, placed.role)

    tree = torch_values(unflatten(entry.leaves, promise))
    if not isinstance(tree, dict):
        raise Incompatible(f"section {section!r} of the snapshot is not a dict: another program wrote it")
    return tree


def torch_values(node: Any) -> Any:
    """DTypeValue and SizeValue become torch.dtype and torch.Size; containers are new ones."""
    kind = type(node)
    if kind is dict:
        return {key: torch_values(child) for key, child in node.items()}
    if kind is list:
        return [torch_values(child) for child in node]
    if kind is tuple:
        return tuple(torch_values(child) for child in node)
    if kind is DTypeValue:
        return dtype_of(node.name)
    if kind is SizeValue:
        return torch.Size(node.dims)
    return node


def is_promise(node: object) -> bool:
    """Whether a node of an incoming tree stands for a tensor."""
    return isinstance(node, FromSource | FromTensor)


def promises_in(node: Any) -> list[Incoming]:
    """All promises of a tree, each once."""
    found: dict[int, Incoming] = {}

    def visit(node: Any) -> None:
        if is_promise(node):
            found[id(node)] = node
        elif type(node) is dict:
            for child in node.values():
                visit(child)
        elif type(node) is list or type(node) is tuple:
            for child in node:
                visit(child)

    visit(node)
    return list(found.values())


def replace_promises(node: Any, tensor: Callable[[Incoming], Tensor]) -> Any:
    """The tree with a tensor for each promise; `tensor` is asked once per place."""
    if is_promise(node):
        return tensor(node)
    if type(node) is dict:
        return {key: replace_promises(child, tensor) for key, child in node.items()}
    if type(node) is list:
        return [replace_promises(child, tensor) for child in node]
    if type(node) is tuple:
        return tuple(replace_promises(child, tensor) for child in node)
    return node


def materialise(node: Any) -> Any:
    """The tree with new, filled CPU tensors; a promise met twice is one tensor."""
    made: dict[int, Tensor] = {}

    def tensor(promise: Incoming) -> Tensor:
        if id(promise) not in made:
            made[id(promise)] = new_tensor(promise.spec)
            promise.fill(made[id(promise)])
        return made[id(promise)]

    return replace_promises(node, tensor)


def promise_tensors(node: Any, role: str = "") -> Any:
    """A tree of the caller's with a promise for each tensor; the same tensor twice is one promise."""
    made: dict[int, FromTensor] = {}

    def visit(node: Any, where: tuple[str | int, ...]) -> Any:
        if isinstance(node, Tensor):
            if id(node) not in made:
                made[id(node)] = FromTensor(node, spec_of(node, where), role)
            return made[id(node)]
        if isinstance(node, dict):
            return {key: visit(child, (*where, key)) for key, child in node.items()}
        if type(node) is list:
            return [visit(child, (*where, index)) for index, child in enumerate(node)]
        if type(node) is tuple:
            return tuple(visit(child, (*where, index)) for index, child in enumerate(node))
        return node

    return visit(node, ())


def fill_all(reads: list[tuple[Tensor, Incoming]]) -> None:
    """Fill every tensor from its promise, on two threads when that is worth it."""
    nbytes = sum(promise.spec.nbytes for _, promise in reads)
    if nbytes < _THREADED_BYTES:
        for tensor, promise in reads:
            promise.fill(tensor)
        return
    reads = sorted(reads, key=lambda read: -read[1].spec.nbytes)
    queue = iter(reads)  # next() on a list iterator is atomic under the GIL: both threads draw from it

    def work() -> None:
        for tensor, promise in queue:
            promise.fill(tensor)

    with ThreadPoolExecutor(_THREADS - 1, thread_name_prefix="hotswarm-fill") as pool:
        other = pool.submit(work)
        work()
        other.result()


def find_nan(state: IncomingState, section: str = "outer") -> str | None:
    """The name of a tensor of a section that holds a NaN, or None. Reads a little at a time."""
    scratch = torch.empty(_SCAN_BYTES, dtype=torch.uint8)
    for kind, tensors in state.section(section).items():
        if type(tensors) is not dict:
            continue
        for name, promise in tensors.items():
            if is_promise(promise) and _has_nan(promise, scratch):
                return f"{kind}/{name}"
    return None


def _has_nan(promise: Incoming, scratch: Tensor) -> bool:
    dtype = dtype_of(promise.spec.dtype)
    if not (dtype.is_floating_point or dtype.is_complex) or not promise.spec.nbytes:
        return False
    if not isinstance(promise, FromSource):
        tensor = new_tensor(promise.spec)
        promise.fill(tensor)
        return bool(torch.isnan(_wide(tensor)).any())
    for start in range(0, promise.spec.nbytes, _SCAN_BYTES):
        part = scratch[: min(_SCAN_BYTES, promise.spec.nbytes - start)]
        promise.source.read_into(promise.section, promise.offset + start, bytes_of(part))
        if torch.isnan(_wide(part.view(dtype))).any():
            return True
    return False


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor
