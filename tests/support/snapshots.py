"""Small snapshots without torch: trees of numpy arrays and raw tensors, a signer, and reading back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.draft import DraftManifest
from hotswarm.snapshot.sections import SectionDraft
from hotswarm.snapshot.signing import node_id_of
from hotswarm.snapshot.tree import Alias, TensorSpec, flatten, unflatten

ROLES = {"params": "param", "model": "param", "momentum": "momentum", "exp_avg": "exp_avg", "buffers": "buffer"}


class KeySigner:
    """A node key for tests."""

    def __init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        form = serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
        self.public_key = self._key.public_key().public_bytes(*form)
        self.node_id = node_id_of(self.public_key)

    def sign(self, message):
        r, s = decode_dss_signature(self._key.sign(message, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")


@dataclass(frozen=True)
class Raw:
    """A tensor as it travels, of dtypes that numpy does not know, too."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def raw(value):
    """An array as a Raw; anything else as it is."""
    if isinstance(value, np.ndarray):
        return Raw(str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, dict):
        return {key: raw(item) for key, item in value.items()}
    return type(value)(map(raw, value)) if type(value) in (list, tuple) else value


def role_of(path):
    """Well-known ones by the first key; otherwise the last key makes a group of its own."""
    last = str(path[-1])[:20]
    return ROLES.get(path[0], last if last.isascii() else "other")


def section(name, tree, role=role_of):
    """(draft, packed stream) of a tree. An object that occurs twice becomes an alias."""
    tensors, seen = {}, {}

    def classify(path, value):
        if not isinstance(value, (np.ndarray, Raw)):
            return None
        if id(value) in seen:
            return Alias(seen[id(value)])
        seen[id(value)], tensors[path] = path, raw(value)
        return TensorSpec(tensors[path].dtype, tensors[path].shape)

    leaves = flatten(tree, classify, role)
    placed = layout(leaves)
    stream = bytearray(placed.stream_bytes)
    for tensor in placed.tensors:
        stream[tensor.offset : tensor.offset + tensor.nbytes] = tensors[tensor.path].data
    return SectionDraft(name, leaves), memoryview(stream)


def draft(outer_step=0, training_step=0, *, run="default", kind="hot", seq=0, **trees):
    """(DraftManifest, streams) of the given section trees."""
    made = {name: section(name, tree) for name, tree in trees.items()}
    manifest = DraftManifest(
        run=run,
        label="test/label",
        kind=kind,
        seq=seq,
        time_ms=1_700_000_000_000 + training_step,
        outer_step=outer_step,
        inner_step=training_step,
        training_step=training_step,
        exact=True,
        arch=b"",
        sections={name: item[0] for name, item in made.items()},
    )
    return manifest, {name: item[1] for name, item in made.items()}


def ramp(fill, size):
    """Values between `fill` and `fill` + 1, all different."""
    return np.float32(fill) + np.arange(size, dtype=np.float32) / np.float32(size + 1)


def state(fill, size=3000, outer=None):
    """Section trees whose every tensor follows from `fill`, the outer ones from `outer`; parameters equal by value."""
    trees = {
        "inner": {
            "model": {"w": ramp(fill, size), "b": ramp(fill, 7)},
            "exp_avg": {"w": -ramp(fill, size)},
            "step": fill,
        },
        "private": {"rng": np.full(16, fill % 256, dtype=np.uint8)},
    }
    if outer is not None:
        trees["outer"] = {
            "params": {"w": ramp(outer, size), "b": ramp(outer, 7)},
            "momentum": {"w": ramp(outer, size) * 2},
            "outer_step": outer,
        }
    return trees


def read_back(source):
    """{section: tree with Raw tensors} of a SnapshotSource."""

    def tensor_of(name):
        placed = source.manifest.sections[name].layout.by_path

        def tensor(leaf):
            out = bytearray(placed[leaf.path].nbytes)
            source.read_into(name, placed[leaf.path].offset, memoryview(out))
            return Raw(leaf.what.dtype, leaf.what.shape, bytes(out))

        return tensor

    return {name: unflatten(entry.leaves, tensor_of(name)) for name, entry in source.manifest.sections.items()}


class FakeClock:
    """Time that moves when told."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def wall_ms(self):
        return 1_700_000_000_000 + int(self.now * 1000)
