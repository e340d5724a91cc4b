"""Any tree of the closed set goes through capture, disk and back without a bit changed."""

from __future__ import annotations

import math
import os
import random
import struct
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswarm.snapshot.draft import draft_to_bytes, parse_draft
from hotswarm.snapshot.dtypes import ITEMSIZE
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.snapshot.tree import DTypeValue, SizeValue
from hotswarm.store.files import FileStore
from support.snapshots import Raw, draft, raw, read_back
from support.stores import SIGNER

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of stores, each with its fsyncs
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEYS = st.text(max_size=8) | st.integers(-(2**70), 2**70)
VALUES = (
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 3000), 1 << 3000) | st.floats() | TEXT
    | st.binary(max_size=40) | st.sampled_from(sorted(ITEMSIZE)).map(DTypeValue)
    | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda dims: SizeValue(tuple(dims)))
)  # fmt: skip


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    return Raw(dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes)))


LEAVES = VALUES | tensors()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)  # fmt: skip
SEEDS = st.integers(0, 1 << 30)
SECTIONS = st.dictionaries(
    st.sampled_from(["outer", "inner", "private"]), st.dictionaries(KEYS, TREES, max_size=5), min_size=1, max_size=3
)


def bits(tree):
    """The tree with floats as their bits, so that NaN equals NaN and -0.0 does not equal 0.0, and types spelled out."""
    if isinstance(tree, dict):
        return [(type(key), key, bits(item)) for key, item in tree.items()]
    if type(tree) in (list, tuple):
        return (type(tree), [bits(item) for item in tree])
    return (type(tree), struct.pack("<d", tree) if type(tree) is float else tree)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SECTIONS)
def test_write_then_open_is_the_identity(trees):
    made, streams = draft(**trees)
    parsed = parse_draft(draft_to_bytes(made))
    with tempfile.TemporaryDirectory(dir=FAST) as folder, FileStore(Path(folder)) as store:
        info = store.write(parsed, streams, SIGNER)
        signed = SignedManifest.parse(store.signed(info.snapshot_id).to_bytes())
        assert signed.snapshot_id == info.snapshot_id
        with store.open(info.snapshot_id) as source:
            source.verify()
            back = read_back(source)
    assert {name: bits(tree) for name, tree in back.items()} == {name: bits(raw(tree)) for name, tree in trees.items()}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700_000), st.sampled_from(["params", "momentum", "n"])), max_size=8), SEEDS)
def test_large_sections_read_back_whole_and_in_pieces(sizes, seed):
    rng = random.Random(seed)
    noise = np.random.default_rng(rng.randrange(1 << 30))
    trees = {"outer": {"params": {}, "momentum": {}, "n": {}}}
    for number, (size, role) in enumerate(sizes):
        trees["outer"][role][f"t{number}"] = noise.integers(0, 256, size, dtype=np.uint8)
    made, streams = draft(**trees)
    with tempfile.TemporaryDirectory(dir=FAST) as folder, FileStore(Path(folder)) as store:
        info = store.write(made, streams, SIGNER)
        with store.open(info.snapshot_id) as source:
            assert read_back(source) == raw(trees)
            whole = bytes(streams["outer"])
            for _ in range(20):
                start = rng.randrange(len(whole) + 1)
                end = rng.randrange(start, len(whole) + 1)
                out = bytearray(b"\xaa" * (end - start))
                source.read_into("outer", start, memoryview(out))
                assert out == whole[start:end]
