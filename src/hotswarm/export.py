"""Taking a snapshot out of the store, for programs that know nothing of hotswarm.

    FILE.safetensors   the model: parameters and buffers under their own names, so that any reader of that format loads
                       it into the model. Parameters are the live ones, or, where a fetched snapshot lacks those, the
                       outer copy; `__metadata__` says which, and which snapshot, run and steps these are.
    FILE.pt            everything, as the dict that `load_checkpoint` returns; torch.load(weights_only=True) reads it
    FOLDER             everything, without torch: model.safetensors as above, state.safetensors with all other tensors
                       under "<section>/<path>", and snapshot.json, which lists every leaf of the tree in order

A target that exists is left alone. What is written appears under its name in one step, complete. The safetensors
format is eight bytes of header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}} padded with
spaces, and the tensors' bytes without gaps; it is written here directly, a piece at a time, so that a snapshot larger
than memory goes through. Wide elements come first: then each tensor lies at a multiple of its element's size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotswarm.errors import ConfigError, LocalFailure, StoreError
from hotswarm.snapshot.dtypes import ITEMSIZE
from hotswarm.snapshot.tree import Alias, Container, DTypeValue, Leaf, SizeValue, TensorSpec, Value
from hotswarm.snapshot.tree import Path as TreePath
from hotswarm.store.base import SnapshotSource

PIECE_BYTES = 16 << 20
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Element types that the safetensors format has, by torch's name."""

FormName = Literal["safetensors", "pt", "folder"]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: tensors and their bytes, and which copy of the parameters the model's are."""

    path: Path
    tensors: int
    nbytes: int
    parameters: Literal["live", "outer"]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    section: str
    path: TreePath
    spec: TensorSpec


def form_of(target: str) -> FormName:
    """What a target's name asks for. ConfigError for a name that says nothing."""
    if target.endswith(".safetensors"):
        return "safetensors"
    if target.endswith((".pt", ".pth")):
        return "pt"
    if target.endswith(os.sep) or not Path(target).suffix or Path(target).is_dir():
        return "folder"
    raise ConfigError(
        f"--to {target}: a file ends in .safetensors or .pt, a folder's name in {os.sep}; choose one of them", "to"
    )


def export(source: SnapshotSource, target: str) -> Exported:
    """Write an open, verified snapshot to `target`. ConfigError: a name without a form, or one that exists already;
    StoreError: parts of the snapshot are not here; LocalFailure: the disk refuses.
    """
    form, path = form_of(target), Path(target)
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already and is left as it is; remove it or name another target", "to")
    which: Literal["live", "outer"] = "live" if _model_is_here(source) else "outer"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if form == "pt":
            count, nbytes = _write_pt(source, temporary, which)
        elif form == "safetensors":
            count, nbytes = _write_model(source, temporary, which)
        else:
            count, nbytes = _write_folder(source, temporary, which)
        if os.path.lexists(path):
            raise ConfigError(f"{path} has come into being meanwhile and is left as it is; name another target", "to")
        temporary.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise LocalFailure(f"cannot write {path}: {error.strerror or error}; check the folder and the disk") from error
    finally:
        if form == "folder":
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
    return Exported(path, count, nbytes, which)


# ---------------------------------------------------------------- the three forms


def _write_model(source: SnapshotSource, path: Path, which: str) -> tuple[int, int]:
    tensors = _model(source, which)
    return len(tensors), write_safetensors(source, path, tensors, {**_facts(source), "parameters": which})


def _write_pt(source: SnapshotSource, path: Path, which: Literal["live", "outer"]) -> tuple[int, int]:
    import torch

    from hotswarm.capture.exchange import to_dict

    state = to_dict(source, model="inner" if which == "live" else "outer")
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    found: dict[int, int] = {}  # a tied tensor is one

    def count(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            found[id(node)] = node.nbytes
        elif isinstance(node, dict):
            for item in node.values():
                count(item)
        elif isinstance(node, list | tuple):
            for item in node:
                count(item)

    count(state)
    return len(found), sum(found.values())


def _write_folder(source: SnapshotSource, path: Path, which: str) -> tuple[int, int]:
    path.mkdir()
    facts = _facts(source)
    model = _model(source, which)
    taken = {(tensor.section, tensor.path): ("model.safetensors", tensor.name) for tensor in model}
    state: list[_Tensor] = []
    names: set[str] = set()
    for section, leaf in _leaves(source):
        if type(leaf.what) is TensorSpec and (section, leaf.path) not in taken and _is_here(source, section, leaf.path):
            name = f"{section}/" + "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in leaf.path)
            while name in names:  # a dict with both 1 and "1"
                name += "~"
            names.add(name)
            state.append(_Tensor(name, section, leaf.path, leaf.what))
            taken[section, leaf.path] = ("state.safetensors", name)
    nbytes = write_safetensors(source, path / "model.safetensors", model, {**facts, "parameters": which})
    nbytes += write_safetensors(source, path / "state.safetensors", state, facts)
    trees: dict[str, list[dict[str, Any]]] = {section: [] for section in source.manifest.sections}
    for section, leaf in _leaves(source):
        trees[section].append(_leaf_to_json(leaf, taken.get((section, leaf.path))))
    with (path / "snapshot.json").open("x", encoding="utf-8") as file:
        json.dump({**facts, "parameters": which, "sections": trees}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(path)
    return len(model) + len(state), nbytes


def _leaf_to_json(leaf: Leaf, place: tuple[str, str] | None) -> dict[str, Any]:
    what, path = leaf.what, list(leaf.path)
    if type(what) is TensorSpec:
        where = None if place is None else {"file": place[0], "name": place[1]}  # None: it was not fetched
        return {"path": path, "tensor": where, "dtype": what.dtype, "shape": list(what.shape), "role": leaf.role}
    if type(what) is Container:
        return {"path": path, "container": what.kind}
    if type(what) is Alias:
        return {"path": path, "alias": list(what.target)}
    return {"path": path, "value": _value_to_json(what)}  # type: ignore[arg-type]


def _value_to_json(value: Value) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, DTypeValue):
        return {"dtype": value.name}
    if isinstance(value, SizeValue):
        return {"size": list(value.dims)}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):  # noqa: PLR0124  NaN
        return {"float": str(value)}  # JSON has no such numbers
    return value


# ---------------------------------------------------------------- safetensors


def write_safetensors(source: SnapshotSource, path: Path, tensors: Sequence[_Tensor], metadata: dict[str, str]) -> int:
    """Write a new file, durable when this returns; the bytes of its tensors. LocalFailure for a dtype without name."""
    ordered = sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.spec.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor in ordered:
        dtype = DTYPES.get(tensor.spec.dtype)
        if dtype is None:
            raise LocalFailure(
                f"{tensor.name} is {tensor.spec.dtype}, which the safetensors format lacks; export to a .pt file"
            )
        begin, end = end, end + tensor.spec.nbytes
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.spec.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("xb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in ordered:
            for piece in _pieces(source, tensor):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return end


def _pieces(source: SnapshotSource, tensor: _Tensor) -> Iterator[memoryview]:
    placed = source.manifest.sections[tensor.section].layout.by_path[tensor.path]
    buffer = memoryview(bytearray(min(PIECE_BYTES, placed.nbytes)))
    for at in range(0, placed.nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, placed.nbytes - at)]
        source.read_into(tensor.section, placed.offset + at, piece)
        yield piece


# ---------------------------------------------------------------- what is in the snapshot


def _leaves(source: SnapshotSource) -> Iterator[tuple[str, Leaf]]:
    for name, entry in source.manifest.sections.items():
        for leaf in entry.leaves:
            yield name, leaf


def _is_here(source: SnapshotSource, section: str, path: TreePath) -> bool:
    layout = source.manifest.sections[section].layout
    return all(source.has_chunk(section, index) for index in layout.chunks_of_paths([path]))


def _named(source: SnapshotSource, section: str, key: str) -> dict[str, tuple[TreePath, TensorSpec]]:
    """The tensors of the dict at `key`, tied ones under each of their names."""
    entry = source.manifest.sections.get(section)
    specs = {leaf.path: leaf.what for leaf in entry.leaves if type(leaf.what) is TensorSpec} if entry else {}
    found: dict[str, tuple[TreePath, TensorSpec]] = {}
    for leaf in entry.leaves if entry else ():
        target = leaf.what.target if type(leaf.what) is Alias else leaf.path
        if len(leaf.path) == 2 and leaf.path[0] == key and target in specs:
            found[str(leaf.path[1])] = (target, specs[target])
    return found


def _model_is_here(source: SnapshotSource) -> bool:
    return all(_is_here(source, "inner", path) for path, _ in _named(source, "inner", "model").values())


def _model(source: SnapshotSource, which: str) -> list[_Tensor]:
    live = {name: ("inner", *item) for name, item in _named(source, "inner", "model").items()}
    chosen = live
    if which == "outer":
        copy = {name: ("outer", *item) for name, item in _named(source, "outer", "params").items()}
        of_target = {live[name][1]: copy[name] for name in copy if name in live}
        chosen = {name: of_target.get(item[1], item) for name, item in live.items()} if live else copy
    tensors = [_Tensor(name, *item) for name, item in chosen.items()]
    for tensor in tensors:
        if not _is_here(source, tensor.section, tensor.path):
            raise StoreError(
                f"snapshot {source.snapshot_id} was fetched in part: {tensor.name} is not here; export another one"
            )
    if not tensors:
        raise StoreError(f"snapshot {source.snapshot_id} holds no model; export another one")
    return tensors


def _facts(source: SnapshotSource) -> dict[str, str]:
    """Text only, as the format's metadata is."""
    manifest = source.manifest
    facts = {name: str(getattr(manifest, name)) for name in ("run", "node", "label", "kind", "time_ms", "engine")}
    steps = {name: str(getattr(manifest, name)) for name in ("outer_step", "inner_step", "training_step")}
    return {"format": "pt", "snapshot_id": source.snapshot_id, **facts, **steps}


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
