"""A second reader of the format, written from its description alone: it uses nothing of src/.

`pb` is what protoc makes of proto/hotswarm/v1/recovery.proto.
"""

import hashlib
import json
import math
import struct
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ROLES = ["param", "momentum", "exp_avg", "exp_avg_sq", "buffer"]
SIZES = {"int8": 1, "bool": 1, "bfloat16": 2, "uint16": 2, "float32": 4, "int64": 8, "float64": 8, "complex128": 16}


def check_signature(signed, manifest):
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), signed.public_key)
    r, s = (int.from_bytes(half, "big") for half in (signed.signature[:32], signed.signature[32:]))
    message = b"hotswarm-manifest-v1\0" + signed.body
    key.verify(utils.encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA256()))
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert manifest.node == hashlib.sha256(spki).hexdigest()[:40]


def value(message):
    kind = message.WhichOneof("v")
    plain = getattr(message, kind)
    return {
        "none": lambda: None,
        "integer": lambda: int.from_bytes(plain, "big", signed=True),
        "real": lambda: struct.unpack("<d", struct.pack("<Q", plain))[0],
        "dtype": lambda: "dtype " + plain,
        "size": lambda: ("size", *plain.dims),
    }.get(kind, lambda: plain)()


def read(path, pb):
    """{section: {path: value, container kind, ("alias", …) or (dtype, shape, bytes)}} of a manifest file."""
    data = Path(path).read_bytes()
    assert blake3(data[:-32]).digest() == data[-32:]
    stored = pb.StoredManifest.FromString(data[:-32])
    signed = pb.SignedManifest.FromString(stored.signed)
    manifest = pb.Manifest.FromString(signed.body)
    check_signature(signed, manifest)
    places = {place.section: place for place in stored.placements}
    packs = Path(path).parent.parent / "packs"
    return {section.name: read_section(section, places[section.name], packs) for section in manifest.sections}


def read_section(section, place, packs):
    out, groups, index, size = {}, {}, 0, lambda dtype, shape: SIZES[dtype] * math.prod(shape)
    for leaf in section.leaves:
        path, kind = tuple(json.loads(leaf.path)), leaf.WhichOneof("what")
        if kind == "tensor":
            group = (ROLES.index(leaf.role) if leaf.role in ROLES else len(ROLES), leaf.role, leaf.tensor.dtype)
            order = (json.dumps(path[1:], separators=(",", ":")), leaf.path)
            groups.setdefault(group, []).append((order, path, tuple(leaf.tensor.shape)))
        else:
            plain = {"container": lambda m: m.container, "alias": lambda m: ("alias", *json.loads(m.alias))}
            out[path] = plain.get(kind, lambda m: value(m.value))(leaf)
    for (_, _, dtype), tensors in sorted(groups.items()):
        left, stream = sum(size(dtype, shape) for _, _, shape in tensors), b""
        while left:
            with (packs / (place.shared_pack if place.offsets[index] & 3 else place.pack)).open("rb") as pack:
                pack.seek(place.offsets[index] >> 2)
                chunk = pack.read(min(left, 1 << 20))
            assert blake3(chunk).digest() == section.chunks[32 * index : 32 * index + 32]
            index, left, stream = index + 1, left - len(chunk), stream + chunk
        for _, path, shape in sorted(tensors):
            out[path], stream = (dtype, shape, stream[: size(dtype, shape)]), stream[size(dtype, shape) :]
    assert len(section.chunks) == 32 * index
    return out
