"""Made snapshots, and nodes around them, for the tests of the swarm.

A made state is a function of its numbers: `outer` content depends on (seed, outer step) alone, so that nodes agree;
`inner` content depends on the node's name too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from pathlib import Path

from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.draft import DraftManifest
from hotswarm.snapshot.sections import SectionDraft, arch_fingerprint
from hotswarm.snapshot.tree import Container, Leaf, TensorSpec
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.fileops import FileOps
from hotswarm.store.files import FileStore
from hotswarm.store.retention import Retention
from hotswarm.swarm.identity import NodeIdentity

RUN = "kit"
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Made:
    """What to make. `params` in float32 elements per tensor."""

    node: str = "a"
    outer_step: int = 9
    inner_step: int = 3
    seed: str = "S"
    params: tuple[int, ...] = (600_000, 700_000, 5)
    buffer: int = 64
    outer: bool = True
    nan_at: int | None = None  # element of the outer momentum
    width: int = 0  # makes another architecture
    frozen: int = 0  # elements of a parameter that the outer optimizer does not have


def pattern(words: str, nbytes: int) -> bytes:
    """Bytes that look like float32 around 1, different in each block of 4 KiB: never NaN, no two chunks alike."""
    block = hashlib.shake_256(words.encode()).digest(1024)
    page = struct.pack("<1024f", *(1.0 + byte / 256 for byte in block))
    salt = int.from_bytes(block[:4], "big") >> 9
    out = bytearray(page * (nbytes // len(page) + 1))
    for number in range(len(out) // len(page)):
        struct.pack_into("<II", out, number * len(page), 0x3F800000 | salt, 0x3F800000 | number)
    return bytes(out[:nbytes])


def _section(name: str, tree: dict[str, object], words: str) -> tuple[SectionDraft, bytearray]:
    leaves: list[Leaf] = [Leaf((), Container("dict"))]

    def walk(path: tuple[str | int, ...], node: object) -> None:
        if isinstance(node, dict):
            if path:
                leaves.append(Leaf(path, Container("dict")))
            for key, child in node.items():
                walk((*path, key), child)
        elif isinstance(node, tuple):
            role, dtype, shape = node
            leaves.append(Leaf(path, TensorSpec(dtype, shape), role))
        else:
            leaves.append(Leaf(path, node))

    walk((), tree)
    draft = SectionDraft(name, tuple(leaves))
    placed = layout(draft.leaves)
    stream = bytearray(placed.stream_bytes)
    for tensor in placed.tensors:
        # the live parameters of a made node differ from the outer ones, moments differ from everything
        data = pattern(f"{words}/{tensor.role}/{tensor.path[-2:]}", tensor.nbytes)
        stream[tensor.offset : tensor.offset + tensor.nbytes] = data
    return draft, stream


def make_draft(made: Made, label: str = "") -> tuple[DraftManifest, dict[str, memoryview]]:
    names = {f"layer{number}.weight": (size + made.width,) for number, size in enumerate(made.params)}
    outer_tree: dict[str, object] = {
        "params": {name: ("param", "float32", shape) for name, shape in names.items()},
        "momentum": {name: ("momentum", "float32", shape) for name, shape in names.items()},
        "hyper": {"lr": 0.7, "momentum": 0.9},
        "outer_step": made.outer_step,
    }
    model: dict[str, object] = {name: ("param", "float32", shape) for name, shape in names.items()}
    if made.frozen:
        model["frozen.weight"] = ("param", "float32", (made.frozen,))
    if made.buffer:
        model["running_mean"] = ("buffer", "float32", (made.buffer,))
    inner_tree: dict[str, object] = {
        "model": model,
        "optimizer": {
            "state": {
                name: {
                    "exp_avg": ("exp_avg", "float32", shape),
                    "exp_avg_sq": ("exp_avg_sq", "float32", shape),
                    "step": ("step", "float32", ()),
                }
                for name, shape in names.items()
            }
        },
        "inner_step": made.inner_step,
        "training_step": made.outer_step * 100 + made.inner_step,
    }
    private_tree: dict[str, object] = {"rng": {"torch": made.node.encode() * 10}}
    wanted = {"inner": inner_tree, "private": private_tree}
    if made.outer:
        wanted = {"outer": outer_tree, **wanted}
    drafts, streams = {}, {}
    for name, tree in wanted.items():
        words = (
            f"{made.seed}{made.outer_step}" if name == "outer" else f"{made.node}{made.outer_step}.{made.inner_step}"
        )
        drafts[name], stream = _section(name, tree, words)
        if name == "outer" and made.nan_at is not None:
            momentum = next(t for t in layout(drafts[name].leaves).tensors if t.role == "momentum")
            struct.pack_into("<f", stream, momentum.offset + 4 * made.nan_at, float("nan"))
        streams[name] = memoryview(stream)
    arch = arch_fingerprint(leaf for leaf in drafts["inner"].leaves if leaf.role in ("param", "buffer"))
    draft = DraftManifest(
        run=RUN,
        label=label or made.node,
        kind="hot",
        seq=0,
        time_ms=1_700_000_000_000,
        outer_step=made.outer_step,
        inner_step=made.inner_step,
        training_step=made.outer_step * 100 + made.inner_step,
        exact=True,
        arch=arch,
        sections=drafts,
        engine="diloco",
    )
    return draft, streams


def arch_of(made: Made) -> bytes:
    return make_draft(made)[0].arch


def open_store(root: Path, *, run: str = RUN, ops: FileOps | None = None, **retention: int) -> FileStore:
    return FileStore(root, run, retention=Retention(**retention), ops=ops).open_for_writing()


def fill(store: FileStore, identity: NodeIdentity, made: Made) -> SnapshotInfo:
    draft, streams = make_draft(made)
    return store.write(draft, streams, identity)
