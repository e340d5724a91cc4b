from __future__ import annotations

import struct

from blake3 import blake3

from hotswarm.snapshot.sections import SectionDraft, arch_fingerprint, first_difference, section_digest
from hotswarm.snapshot.tree import Alias, Container, DTypeValue, Leaf, SizeValue, TensorSpec

ROOT = Leaf((), Container("dict"))
W = Leaf(("model", "w"), TensorSpec("float32", (2, 3)), "param")
MODEL = Leaf(("model",), Container("dict"))
CHUNK = b"\x01" * 32


def test_the_digest_of_a_section_written_out_by_hand():
    def lp(data):
        return struct.pack("<I", len(data)) + data

    leaves = (
        ROOT,
        MODEL,
        W,
        Leaf(("model", "tied"), Alias(("model", "w")), "param"),
        Leaf(("a",), -129),
        Leaf(("b",), True),
        Leaf(("c",), -0.0),
        Leaf(("d",), DTypeValue("int8")),
        Leaf(("e",), SizeValue((4, 0))),
        Leaf(("f",), None),
        Leaf(("g",), "é"),
        Leaf(("h",), b"\xff"),
    )
    expected = b"hotswarm-section-v1\0" + lp(b"inner") + struct.pack("<I", 12)
    expected += lp(b'["a"]') + lp(b"") + b"Vi" + lp(b"\xff\x7f")
    expected += lp(b'["b"]') + lp(b"") + b"Vb" + lp(b"\x01")
    expected += lp(b'["c"]') + lp(b"") + b"Vf" + lp(b"\0\0\0\0\0\0\0\x80")
    expected += lp(b'["d"]') + lp(b"") + b"Vd" + lp(b"int8")
    expected += lp(b'["e"]') + lp(b"") + b"Vz" + lp(struct.pack("<qq", 4, 0))
    expected += lp(b'["f"]') + lp(b"") + b"Vn" + lp(b"")
    expected += lp(b'["g"]') + lp(b"") + b"Vs" + lp("é".encode())
    expected += lp(b'["h"]') + lp(b"") + b"Vr" + lp(b"\xff")
    expected += lp(b'["model","tied"]') + lp(b"param") + b"A" + lp(b'["model","w"]')
    expected += lp(b'["model","w"]') + lp(b"param") + b"T" + lp(b"float32") + struct.pack("<IQQ", 2, 2, 3)
    expected += lp(b'["model"]') + lp(b"") + b"C" + lp(b"dict")
    expected += lp(b"[]") + lp(b"") + b"C" + lp(b"dict")
    expected += struct.pack("<I", 1) + CHUNK
    assert section_digest(SectionDraft("inner", leaves), [CHUNK]) == blake3(expected).digest()


def test_the_order_of_a_dict_does_not_change_the_digest_and_everything_else_does():
    base = (ROOT, MODEL, W, Leaf(("n",), 1))
    digest = section_digest(SectionDraft("outer", base), [CHUNK])
    assert section_digest(SectionDraft("outer", (ROOT, base[3], MODEL, W)), [CHUNK]) == digest
    others = [
        SectionDraft("inner", base),
        SectionDraft("outer", base[:3]),
        SectionDraft("outer", (*base[:3], Leaf(("n",), True))),
        SectionDraft("outer", (*base[:3], Leaf(("n",), 1.0))),
        SectionDraft("outer", (*base[:3], Leaf(("n",), "1"))),
        SectionDraft("outer", (*base[:3], Leaf(("m",), 1))),
        SectionDraft("outer", (ROOT, MODEL, Leaf(W.path, TensorSpec("float32", (3, 2)), "param"), base[3])),
        SectionDraft("outer", (ROOT, MODEL, Leaf(W.path, TensorSpec("int32", (2, 3)), "param"), base[3])),
        SectionDraft("outer", (ROOT, MODEL, Leaf(W.path, W.what, "buffer"), base[3])),
    ]
    digests = {section_digest(other, [CHUNK]) for other in others} | {section_digest(SectionDraft("outer", base), [])}
    assert digest not in digests
    assert len(digests) == len(others) + 1


def test_architectures_differ_by_name_shape_dtype_role_and_tying_and_the_first_difference_is_named():
    mine = (ROOT, MODEL, W)
    assert arch_fingerprint(mine) == arch_fingerprint((ROOT, Leaf(("params", "w"), W.what, "param")))
    assert first_difference(mine, mine) is None
    changes = {
        Leaf(W.path, TensorSpec("float32", (2, 5)), "param"): "w: 2x3 float32 param here, 2x5 float32 param there",
        Leaf(W.path, TensorSpec("bfloat16", (2, 3)), "param"): "w: 2x3 float32 param here, 2x3 bfloat16 param there",
        Leaf(W.path, W.what, "buffer"): "w: 2x3 float32 param here, 2x3 float32 buffer there",
        Leaf(("model", "a"), W.what, "param"): "a: nothing here, 2x3 float32 param there",
    }
    for leaf, said in changes.items():
        theirs = (ROOT, MODEL, leaf)
        assert arch_fingerprint(theirs) != arch_fingerprint(mine)
        assert first_difference(mine, theirs) == said
    tied = (*mine, Leaf(("model", "x"), Alias(W.path), "param"))
    assert first_difference(mine, tied) == "x: nothing here, tied to w param there"


def test_optimizer_state_and_values_are_no_part_of_the_architecture():
    more = (ROOT, MODEL, W, Leaf(("opt", "w"), W.what, "exp_avg"), Leaf(("lr",), 0.1))
    assert arch_fingerprint(more) == arch_fingerprint((ROOT, MODEL, W))
