"""Names and identifiers, and the rules that keep them harmless in paths and on the wire."""

from __future__ import annotations

import re
from typing import NewType

from hotswarm.errors import ConfigError

NodeId = NewType("NodeId", str)
"""40 hex digits: sha256(public key, SPKI DER)[:20]; also the Kademlia id and the certificate's common name."""

SnapshotId = NewType("SnapshotId", str)
"""32 hex digits: BLAKE3(manifest body)[:16]."""

Digest = NewType("Digest", bytes)
"""32 bytes, BLAKE3."""

RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NODE_ID = re.compile(r"[0-9a-f]{40}")
SNAPSHOT_ID = re.compile(r"[0-9a-f]{32}")


def check_run(name: str) -> str:
    """The run name itself, or ConfigError: it becomes a folder name and a part of DHT keys."""
    if not RUN_NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(f"run name {name!r} is not usable: 1 to 64 of A-Z a-z 0-9 . _ - (not '.' or '..')", "run")
    return name


def is_node_id(text: str) -> bool:
    """Whether `text` is a swarm node id."""
    return NODE_ID.fullmatch(text) is not None


def is_snapshot_id(text: str) -> bool:
    """Whether `text` is a snapshot id."""
    return SNAPSHOT_ID.fullmatch(text) is not None
