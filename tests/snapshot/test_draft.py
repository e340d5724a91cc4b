from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import CaptureError, ManifestError
from hotswarm.snapshot.draft import BLOCK_LEAVES, DraftEncoder, draft_to_bytes, parse_draft
from hotswarm.snapshot.sections import SectionDraft
from hotswarm.snapshot.tree import Container, Leaf, TensorSpec
from support.snapshots import draft, state


def with_leaves(leaves):
    made, _ = draft(**state(1))
    return replace(made, sections={"inner": SectionDraft("inner", tuple(leaves))})


def same(one, two):
    """Equal in types, too: 1, True and 1.0 are told apart."""
    return repr(one) == repr(two)


def test_a_draft_comes_back():
    made, _ = draft(**state(3, outer=2), outer_step=4, training_step=7)
    assert parse_draft(draft_to_bytes(made)) == made
    assert parse_draft(memoryview(draft_to_bytes(made))) == made


def test_an_encoder_with_a_memory_writes_what_a_fresh_one_writes():
    root, fixed = Leaf((), Container("dict")), [Leaf((f"t{i}",), TensorSpec("float32", (i,)), "p") for i in range(500)]
    encoder = DraftEncoder()
    for value in (1, True, 1.0, 0.0, -0.0, float("nan"), "x", None, 1):
        made = with_leaves([root, *fixed[:300], Leaf(("v",), value), *fixed[300:]])
        data = encoder.encode(made)
        assert data == draft_to_bytes(made)
        assert same(parse_draft(data), made)


def test_an_encoder_follows_leaves_that_come_and_go():
    root, fixed = Leaf((), Container("dict")), [Leaf((f"t{i}",), i) for i in range(3 * BLOCK_LEAVES)]
    encoder = DraftEncoder()
    for count in (3 * BLOCK_LEAVES, 2, BLOCK_LEAVES, BLOCK_LEAVES - 1, 3 * BLOCK_LEAVES, 1):
        made = with_leaves([root, *fixed[:count]])
        assert parse_draft(encoder.encode(made)) == made


def test_unchanged_leaves_cost_next_to_nothing():
    leaves = [Leaf((), Container("dict"))] + [Leaf((f"t{i}",), TensorSpec("float32", (8,)), "p") for i in range(50_000)]
    encoder = DraftEncoder()
    made = with_leaves(leaves)
    started = time.perf_counter()
    encoder.encode(made)
    first_s = time.perf_counter() - started
    again_s = []
    for _ in range(3):
        started = time.perf_counter()
        encoder.encode(with_leaves(leaves))
        again_s.append(time.perf_counter() - started)
    assert min(again_s) < first_s / 5


def test_what_cannot_be_encoded_is_the_captures_fault():
    with pytest.raises(CaptureError):
        draft_to_bytes(with_leaves([Leaf((), Container("dict")), Leaf(("v",), "\ud800")]))
    with pytest.raises(CaptureError):
        draft_to_bytes(replace(with_leaves([Leaf((), Container("dict"))]), seq=-1))


def test_a_damaged_draft_is_refused():
    made, _ = draft(**state(3))
    message = pb.Manifest.FromString(draft_to_bytes(made))
    message.sections[0].leaves[1].path = '["../x",1]'
    with pytest.raises(ManifestError):
        parse_draft(message.SerializeToString())
    with pytest.raises(ManifestError, match="format"):
        parse_draft(b"")
