"""Another model's snapshot is refused by its manifest alone: no tensor byte is asked for."""

from __future__ import annotations

import dataclasses

import pytest
from swarm_kit import Made, make_draft

from hotswarm.errors import Incompatible
from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.manifest import Manifest, SectionEntry
from hotswarm.snapshot.sections import SectionDraft
from hotswarm.snapshot.tree import Leaf, TensorSpec
from hotswarm.store.packing import hash_stream
from hotswarm.swarm.model import RecoverRequest, TensorName
from hotswarm.swarm.transfer import OUTER_SLACK_BYTES, refuse_other_model
from support.snapshots import KeySigner

MINE = Made("j", params=(300, 20))


def manifest(outer_of: Made = MINE, inner_of: Made = MINE, *more: Leaf) -> Manifest:
    """What a member can sign: the inner section of one model, the outer one of another."""
    inner, outer = make_draft(inner_of), make_draft(outer_of)
    entries = {}
    for name, (draft, streams) in {"outer": outer, "inner": inner}.items():
        section, stream = draft.sections[name], streams[name]
        if more and name == "outer":
            section = SectionDraft(name, (*section.leaves, *more))
            stream = memoryview(bytes(layout(section.leaves).stream_bytes))
        entries[name] = SectionEntry.of(section, hash_stream(stream, layout(section.leaves).chunks))
    return inner[0].with_sections(entries, KeySigner().node_id)


def request(made: Made = MINE) -> RecoverRequest:
    names = [TensorName(f"layer{i}.weight", "param", "float32", (size,)) for i, size in enumerate(made.params)]
    names.append(TensorName("running_mean", "buffer", "float32", (made.buffer,)))
    return RecoverRequest(arch=make_draft(made)[0].arch, names=tuple(names))


def test_the_same_model_passes():
    refuse_other_model(request(), manifest(), "n")


def test_an_outer_section_of_another_shape_is_refused():
    other = dataclasses.replace(MINE, params=(300, 21))
    with pytest.raises(Incompatible, match=r"layer1.weight: 20 float32 here, 21 float32 in params of the outer"):
        refuse_other_model(request(), manifest(other), "n")


def test_an_outer_copy_of_another_dtype_passes():
    wider = manifest()
    outer = wider.sections["outer"]
    leaves = tuple(
        Leaf(leaf.path, TensorSpec("float64", leaf.what.shape), leaf.role) if type(leaf.what) is TensorSpec else leaf
        for leaf in outer.leaves
    )
    section = SectionDraft("outer", leaves)
    stream = memoryview(bytes(layout(leaves).stream_bytes))
    entry = SectionEntry.of(section, hash_stream(stream, layout(leaves).chunks))
    refuse_other_model(request(), dataclasses.replace(wider, sections={**wider.sections, "outer": entry}), "n")


@pytest.mark.parametrize(("over", "refused"), [(0, False), (1, True)])
def test_an_outer_section_has_a_share_of_the_model_at_most(over, refused):
    model_bytes = 4 * (300 + 20 + MINE.buffer)
    room = 16 * model_bytes + OUTER_SLACK_BYTES - 2 * 4 * (300 + 20)  # less its parameters and their momentum
    big = manifest(MINE, MINE, Leaf(("params", "mine alone"), TensorSpec("uint8", (room + over,)), "param"))
    if refused:
        with pytest.raises(Incompatible, match="its outer section has"):
            refuse_other_model(request(), big, "n")
    else:
        refuse_other_model(request(), big, "n")
