"""The committed protobuf code is what proto/ generates."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[2]


def test_committed_messages_equal_what_the_proto_file_generates(tmp_path):
    proto = ROOT / "proto" / "hotswarm" / "v1"
    well_known = str(files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{proto}", f"-I{well_known}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main([*arguments, "recovery.proto"]) == 0
    committed = ROOT / "src" / "hotswarm" / "_proto"
    for name in ("recovery_pb2.py", "recovery_pb2.pyi"):
        assert _without_version((committed / name).read_text()) == _without_version((tmp_path / name).read_text())


def _without_version(text):
    """Less the generator's own version, which differs between installations and means nothing here."""
    text = re.sub(r"# Protobuf Python Version: .*", "", text)
    return re.sub(r"ValidateProtobufRuntimeVersion\([^)]*\)", "", text)
