from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest

from hotswarm.errors import CaptureError, ManifestError
from hotswarm.snapshot.limits import MAX_DEPTH, MAX_NBYTES, MAX_NDIM, MAX_PATH_BYTES, MAX_ROLE_BYTES
from hotswarm.snapshot.tree import (
    Alias,
    Container,
    DTypeValue,
    Leaf,
    SizeValue,
    TensorSpec,
    check_leaves,
    check_spec,
    decode_path,
    encode_path,
    flatten,
    unflatten,
)
from support.snapshots import Raw, raw, section


def nothing(path, value):
    return None


@pytest.mark.parametrize(
    "path", [(), ("a",), ("model", "fc.weight"), (0, "0", -1, 10**30), ('"', "\\", "\x00", "é", "\U0001f600", "\ud800")]
)
def test_paths_are_what_json_dumps_writes_and_come_back(path):
    assert encode_path(path) == json.dumps(list(path), separators=(",", ":"))
    assert decode_path(encode_path(path)) == path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        '"a"',
        "[null]",
        "[true]",
        "[1.0]",
        "[[]]",
        '["a", "b"]',
        '["é"]',
        '["\\u0061"]',
        "[01]",
        "[-0]",
        "[1]x",
    ],
)
def test_any_other_spelling_of_a_path_is_refused(text):
    with pytest.raises(ManifestError):
        decode_path(text)


def test_path_limits_hold_to_the_byte_and_to_the_key():
    for extra, good in ((-1, True), (0, True), (1, False)):
        text = encode_path(("x" * (MAX_PATH_BYTES - 4 + extra),))
        assert len(text) == MAX_PATH_BYTES + extra
        deep = encode_path((1,) * (MAX_DEPTH + extra))
        for candidate in (text, deep):
            if good:
                decode_path(candidate)
            else:
                with pytest.raises(ManifestError, match="limit"):
                    decode_path(candidate)


def test_a_tree_comes_back_with_its_types_and_order():
    tree = {
        "z": [],
        "a": (1, True, 1.0, "1", b"1", None),
        0: {"0": {}, 0: ()},
        "d": DTypeValue("bfloat16"),
        "s": SizeValue((2, 0)),
        "nan": math.nan,
        "minus": -0.0,
    }
    back = unflatten(flatten(tree, nothing), lambda leaf: leaf)
    assert list(back) == list(tree)
    assert repr(back) == repr(tree)
    assert [type(item) for item in back["a"]] == [int, bool, float, str, bytes, type(None)]


def test_ordered_and_default_dicts_become_dicts():
    tree = OrderedDict(a=defaultdict(list, b=[1]))
    back = unflatten(flatten(tree, nothing), lambda leaf: leaf)
    assert type(back) is dict
    assert type(back["a"]) is dict
    assert back == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "builtins.object"),
        ({1}, "builtins.set"),
        (np.float64(1.0), "numpy.float64"),
        (namedtuple("Point", "x")(1), "Point"),  # noqa: PYI024
        (print, "builtin_function_or_method"),
        ({(1, 2): 3}, "key of type tuple"),
        ({True: 3}, "key of type bool"),
        ("\ud800", "surrogate"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_path_and_type(value, said):
    with pytest.raises(CaptureError, match="extra/deep") as error:
        flatten({"extra": {"deep": value}}, nothing)
    assert said in str(error.value)


def test_a_cycle_is_refused_not_followed_for_ever():
    cycle = {}
    cycle["self"] = cycle
    with pytest.raises(CaptureError, match="cycle"):
        flatten(cycle, nothing)


def test_a_path_that_a_reader_would_refuse_is_refused_at_capture():
    for extra in (-1, 0):
        flatten({"x" * (MAX_PATH_BYTES - 4 + extra): 1}, nothing)
    with pytest.raises(CaptureError, match="more than"):
        flatten({"x" * (MAX_PATH_BYTES - 3): 1}, nothing)


def test_a_tied_tensor_is_carried_once_and_is_one_object_again():
    tied = np.ones(3, dtype=np.float32)
    made, stream = section("inner", {"model": {"emb": tied, "head": tied}})
    assert made.leaves[3] == Leaf(("model", "head"), Alias(("model", "emb")), "param")
    assert len(stream) == tied.nbytes
    back = unflatten(made.leaves, lambda leaf: [leaf.path])
    assert back["model"]["emb"] is back["model"]["head"]


def test_scalars_and_empty_tensors_keep_their_shapes():
    tree = {"params": {"s": np.ones((), dtype=np.float32), "e": np.zeros((0, 4), dtype=np.int64)}}
    made, stream = section("inner", tree)
    specs = [leaf.what for leaf in made.leaves if isinstance(leaf.what, TensorSpec)]
    assert specs == [TensorSpec("float32", ()), TensorSpec("int64", (0, 4))]
    assert len(stream) == 4
    assert raw(tree)["params"]["e"] == Raw("int64", (0, 4), b"")


ROOT = Leaf((), Container("dict"))
LIST = Leaf(("l",), Container("list"))
TENSOR = Leaf(("t",), TensorSpec("float32", (2,)), "param")


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ([], "root"),
        ([Leaf((), 1)], "root"),
        ([TENSOR], "root"),
        ([ROOT, ROOT], "no container"),
        ([ROOT, Leaf(("a", "b"), 1)], "no container"),
        ([ROOT, TENSOR, Leaf(("t", "b"), 1)], "no container"),
        ([ROOT, TENSOR, TENSOR], "twice"),
        ([ROOT, LIST, Leaf(("l", 1), 1)], "item 0"),
        ([ROOT, LIST, Leaf(("l", "0"), 1)], "item 0"),
        ([ROOT, LIST, Leaf(("l", 0), 1), Leaf(("l", 0), 1)], "twice"),
        ([ROOT, LIST, Leaf(("l", 0), 1), Leaf(("l", 2), 1)], "item 1"),
        ([ROOT, Leaf(("a",), Alias(("t",))), TENSOR], "no tensor before"),
        ([ROOT, LIST, Leaf(("a",), Alias(("l",)))], "no tensor before"),
        ([ROOT, TENSOR, Leaf(("a",), Alias(("t",))), Leaf(("b",), Alias(("a",)))], "no tensor before"),
        ([ROOT, Leaf(("v",), 1, "param")], "role"),
        ([ROOT, Leaf(("t",), TensorSpec("float32", ()), "é")], "ASCII"),
        ([ROOT, Leaf(("t",), TensorSpec("object", ()))], "unknown dtype"),
        ([ROOT, Leaf(("t",), TensorSpec("qint8", (1,)))], "unknown dtype"),
    ],
)
def test_leaves_that_are_no_tree_are_refused(leaves, said):
    with pytest.raises(ManifestError, match=said):
        check_leaves(leaves)


def test_role_and_dimension_limits():
    for extra in (-1, 0, 1):
        role = Leaf(("t",), TensorSpec("float32", ()), "r" * (MAX_ROLE_BYTES + extra))
        ndim = Leaf(("t",), TensorSpec("float32", (1,) * (MAX_NDIM + extra)))
        for leaf in (role, ndim):
            if extra <= 0:
                check_leaves([ROOT, leaf])
            else:
                with pytest.raises(ManifestError):
                    check_leaves([ROOT, leaf])


@pytest.mark.parametrize(
    ("dtype", "shape", "good"),
    [
        ("uint8", (MAX_NBYTES - 1,), True),
        ("uint8", (MAX_NBYTES,), True),
        ("uint8", (MAX_NBYTES + 1,), False),
        ("float64", (MAX_NBYTES // 8,), True),
        ("float64", (MAX_NBYTES // 8 + 1,), False),
        ("float32", (1 << 32, 1 << 32), False),  # 2^64 elements: 0 in 64-bit arithmetic
        ("uint8", (1 << 62, 1 << 62, 0), False),
        ("uint8", (-1,), False),
        ("uint8", (-1, -1), False),
        ("uint8", (0,), True),
    ],
)
def test_sizes_are_counted_without_wrapping_around(dtype, shape, good):
    if good:
        check_spec(TensorSpec(dtype, shape), "t")
    else:
        with pytest.raises(ManifestError, match="overflows"):
            check_spec(TensorSpec(dtype, shape), "t")
