from __future__ import annotations

import random

import numpy as np
import pytest

from hotswarm.errors import ManifestError
from hotswarm.snapshot.chunks import CHUNK_BYTES, GROUP_ALIGN, Span, layout
from hotswarm.snapshot.tree import Container, Leaf, TensorSpec
from support.snapshots import section

ROOT = Leaf((), Container("dict"))


def leaf(path, role, count, dtype="float32"):
    return Leaf(path, TensorSpec(dtype, (count,)), role)


def test_a_worked_example():
    """Two parameters, one buffer of another dtype, one moment: offsets as one would write them down by hand."""
    leaves = [
        ROOT,
        leaf(("buffers", "n"), "buffer", 3, "int64"),
        leaf(("exp_avg", "w"), "exp_avg", 10),
        leaf(("model", "w"), "param", 300_000),
        leaf(("model", "b"), "param", 5),
    ]
    placed = layout(leaves)
    assert [(p.path, p.offset, p.nbytes) for p in placed.tensors] == [
        (("model", "b"), 0, 20),
        (("model", "w"), 20, 1_200_000),
        (("exp_avg", "w"), 1_200_128, 40),  # 293 pages of 4096
        (("buffers", "n"), 1_204_224, 24),
    ]
    assert placed.chunks == (
        Span(0, 1 << 20),
        Span(1 << 20, 1_200_020 - (1 << 20)),
        Span(1_200_128, 40),
        Span(1_204_224, 24),
    )
    assert placed.stream_bytes == 1_204_248
    assert placed.raw_bytes == 1_200_020 + 40 + 24


def test_roles_come_in_their_order_then_by_name_then_dtypes_by_name():
    roles = ["zeta", "buffer", "exp_avg_sq", "alpha", "exp_avg", "momentum", "param", ""]
    leaves = [ROOT] + [leaf((role, dtype), role, 1, dtype) for role in roles for dtype in ("int8", "float16")]
    order = [(p.role, p.spec.dtype) for p in layout(leaves).tensors]
    wanted = ["param", "momentum", "exp_avg", "exp_avg_sq", "buffer", "", "alpha", "zeta"]
    assert order == [(role, dtype) for role in wanted for dtype in ("float16", "int8")]


def test_live_and_outer_parameters_cut_into_the_same_chunks():
    rng = np.random.default_rng(5)
    params = {f"layer.{i}.w": rng.random(rng.integers(1, 200_000), dtype=np.float32) for i in range(20)}
    shuffled = dict(sorted(params.items(), key=lambda item: item[1].size))
    outer, outer_stream = section("outer", {"params": params, "momentum": params})
    inner, inner_stream = section(
        "inner", {"exp_avg": params, "model": shuffled, "buffers": {"n": params["layer.3.w"]}}
    )
    cut = lambda made, stream: [bytes(stream[s.offset : s.end]) for s in layout(made.leaves).chunks]  # noqa: E731
    chunks = cut(outer, outer_stream)
    assert len(chunks) > 6
    assert set(chunks) <= set(cut(inner, inner_stream))


def test_the_cut_does_not_depend_on_the_order_of_the_tree():
    leaves = [leaf(("model", f"n{i}"), "param", i * 7919 % 100_000) for i in range(1, 60)]
    shuffled = leaves.copy()
    random.Random(3).shuffle(shuffled)
    assert layout([ROOT, *leaves]) == layout([ROOT, *shuffled])


def test_fifty_thousand_small_tensors_do_not_make_fifty_thousand_chunks():
    placed = layout([ROOT] + [leaf(("model", f"t{i}"), "param", 16) for i in range(50_000)])
    assert len(placed.chunks) == -(-50_000 * 64 // CHUNK_BYTES)


def test_tensors_without_bytes_take_no_room_and_no_chunk():
    placed = layout([ROOT, leaf(("model", "e"), "param", 0), leaf(("model", "f"), "buffer", 4)])
    assert placed.chunks == (Span(0, 16),)
    assert [p.nbytes for p in placed.tensors] == [0, 16]
    assert layout([ROOT]).stream_bytes == 0


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunk_counts_at_the_edges(size):
    placed = layout([ROOT, leaf(("model", "w"), "param", size, "uint8"), leaf(("model", "n"), "buffer", 1, "uint8")])
    assert sum(span.length for span in placed.chunks[:-1]) == size
    assert len(placed.chunks) - 1 == -(-size // CHUNK_BYTES)
    assert placed.chunks[-1].offset % GROUP_ALIGN == 0


def test_ranges_and_roles_name_the_chunks_that_a_slow_search_finds():
    rng = random.Random(11)
    leaves = [ROOT] + [
        leaf(("x", f"n{i}"), rng.choice(["param", "buffer", "step"]), rng.choice([0, 1, 5000, 400_000]))
        for i in range(40)
    ]
    placed = layout(leaves)

    def slow(offset, length):
        return [i for i, s in enumerate(placed.chunks) if s.offset < offset + length and offset < s.end and length > 0]

    for _ in range(300):
        offset, length = rng.randrange(placed.stream_bytes), rng.choice([0, 1, 4096, 2_000_000])
        assert list(placed.chunks_in(offset, length)) == slow(offset, length)
    for role in ("param", "buffer", "step", "none"):
        wanted = {i for p in placed.tensors if p.role == role for i in slow(p.offset, p.nbytes)}
        assert placed.chunks_of_roles([role]) == sorted(wanted)
    some = [p.path for p in placed.tensors[::3]]
    wanted = {i for p in placed.tensors[::3] for i in slow(p.offset, p.nbytes)}
    assert placed.chunks_of_paths(some) == sorted(wanted)


def test_a_shape_of_an_exabyte_is_refused_without_listing_its_chunks():
    with pytest.raises(ManifestError, match="chunks"):
        layout([ROOT, leaf(("model", "w"), "param", 1 << 60, "uint8")])
    with pytest.raises(ManifestError, match="more than 1 chunks"):
        layout([ROOT, leaf(("model", "w"), "param", CHUNK_BYTES + 1, "uint8")], max_chunks=1)
    assert len(layout([ROOT, leaf(("model", "w"), "param", CHUNK_BYTES, "uint8")], max_chunks=1).chunks) == 1


def test_a_sum_that_overflows_is_refused():
    with pytest.raises(ManifestError, match="overflow"):
        layout([ROOT] + [leaf(("model", f"w{i}"), "param", 1 << 62, "uint8") for i in range(2)])
