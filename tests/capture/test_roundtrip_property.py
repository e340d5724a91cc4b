"""Any tree of the closed set comes back as it was, types and bits included."""

from __future__ import annotations

import torch
from capture_kit import fingerprint, restore, snap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hotswarm.capture.exchange import from_dict, to_dict
from hotswarm.capture.restore import Restorer
from hotswarm.capture.state import TrainingState
from hotswarm.capture.verify import differences

# The others have no printed form, which a failing example needs; they are tested one by one elsewhere.
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int64", "int16", "uint8", "complex64"]


@st.composite
def tensors(draw):
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = torch.empty(0, dtype=torch.uint8).view(dtype).element_size()
    count = size
    for dim in shape:
        count *= dim
    data = draw(st.binary(min_size=count, max_size=count))
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = flat.clone().view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


def values():
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**80), 2**80),
        st.floats(),
        texts,
        st.binary(max_size=8),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.lists(st.integers(0, 5), max_size=3).map(torch.Size),
        tensors(),
    )


KEYS = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.integers(-9, 10**12))


def trees():
    return st.recursive(
        values(),
        lambda child: st.one_of(
            st.lists(child, max_size=3),
            st.lists(child, max_size=3).map(tuple),
            st.dictionaries(KEYS, child, max_size=3),
        ),
        max_leaves=8,
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(tree=st.dictionaries(KEYS, trees(), max_size=4))
def test_any_tree_of_the_closed_set_comes_back_bit_for_bit(tree):
    model = nn.Linear(1, 1)
    source = snap(TrainingState(model, extra=tree, rng=False))
    back = {}
    state = TrainingState(model, extra=back, rng=False)
    restore(state, source)
    assert fingerprint(back) == fingerprint(tree)
    assert list(back) == list(tree)
    assert differences(state.collect(), source.manifest) == []
    again = {}
    state = TrainingState(model, extra=again, rng=False)
    Restorer(state).apply(from_dict(to_dict(source), state))
    assert fingerprint(again) == fingerprint(tree)
