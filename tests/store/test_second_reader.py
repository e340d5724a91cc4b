"""The format is what its description says: a reader that shares no code with the writer reads the same."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path

import numpy as np
from grpc_tools import protoc

from hotswarm.snapshot.tree import DTypeValue, SizeValue
from hotswarm.store.files import FileStore
from support import second_reader
from support.snapshots import KeySigner, Raw, draft


def test_the_second_reader_is_short_and_shares_no_code():
    source = Path(second_reader.__file__).read_text()
    assert len(source.splitlines()) <= 80
    imported = [
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not [line for line in imported if "hotswarm" in line]


def _classes_of_the_proto_file(folder):
    proto = Path(__file__).parents[2] / "proto" / "hotswarm" / "v1"
    assert protoc.main(["protoc", f"-I{proto}", f"--python_out={folder}", "recovery.proto"]) == 0
    spec = importlib.util.spec_from_file_location("second_recovery_pb2", folder / "recovery_pb2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_second_reader_reads_what_the_store_wrote(tmp_path):
    rng = np.random.default_rng(1)
    big = rng.integers(-100, 100, 2_500_000, dtype=np.int8)
    weights = {f"w{i}": rng.random((i, 7)).astype(np.float32) for i in range(12)}
    values = {"lr": 1e-3, "n": -(1 << 70), "none": None, "yes": True, "text": "é", "raw": b"\0\xff", "inf": -math.inf}
    trees = {
        "outer": {"params": weights, "momentum": {"w3": weights["w4"].copy()}, "outer_step": 5},
        "inner": {
            "model": weights,
            "tied": weights["w5"],
            "big": big,
            "bf16": Raw("bfloat16", (3,), b"\x01\x02\x03\x04\x05\x06"),
            "empty": np.zeros((0, 4), dtype=np.float64),
            "scalar": np.array(7, dtype=np.int64),
            "groups": [{"betas": (0.9, 0.99), "params": ["w1", "w2"], "none": []}],
            "size": SizeValue((2, -3)),
            "dtype": DTypeValue("float8_e5m2"),
        },
        "private": values,
    }
    made, streams = draft(5, 40, **trees)
    with FileStore(tmp_path) as store:
        path = store.write(made, streams, KeySigner()).path
    found = second_reader.read(path, _classes_of_the_proto_file(tmp_path))
    assert found["private"] == {(): "dict", **{(key,): value for key, value in values.items()}}
    assert found["outer"]["momentum", "w3"] == ("float32", (4, 7), weights["w4"].tobytes())
    inner = found["inner"]
    for name, array in weights.items():
        assert inner["model", name] == ("float32", array.shape, array.tobytes())
    assert inner["tied",] == ("alias", "model", "w5")
    assert inner["big",] == ("int8", (2_500_000,), big.tobytes())
    assert inner["bf16",] == ("bfloat16", (3,), b"\x01\x02\x03\x04\x05\x06")
    assert inner["empty",] == ("float64", (0, 4), b"")
    assert inner["scalar",] == ("int64", (), (7).to_bytes(8, "little"))
    assert inner["groups", 0, "betas"] == "tuple"
    assert [inner["groups", 0, "betas", i] for i in (0, 1)] == [0.9, 0.99]
    assert [inner["groups", 0, "params", i] for i in (0, 1)] == ["w1", "w2"]
    assert inner["groups", 0, "none"] == "list"
    assert inner["size",] == ("size", 2, -3)
    assert inner["dtype",] == "dtype float8_e5m2"
