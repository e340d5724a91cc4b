"""hotswarm: hot snapshots for DiLoCo training, served to neighbours, so that a crashed node is back in seconds.

Importing this package imports neither torch nor grpc nor an event loop; each name below loads what it needs on first
use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hotswarm import errors
from hotswarm.errors import HotswarmError

if TYPE_CHECKING:
    from hotswarm.checkpoint_types import CheckpointConfig, CheckpointMetadata, CheckpointType
    from hotswarm.checkpointer import SpeculativeCheckpointer, create_checkpointer
    from hotswarm.config import NodeConfig
    from hotswarm.diloco import DiLoCoConfig, DiLoCoPhase, DiLoCoTrainer, ExactNesterov, OuterOptimizer
    from hotswarm.node_api import SwarmNode
    from hotswarm.recovery import RecoveryReport
    from hotswarm.snapshot_api import Snapshot, afetch_neighbor_snapshot, fetch_neighbor_snapshot

_HOME = {
    "CheckpointConfig": "checkpoint_types",
    "CheckpointMetadata": "checkpoint_types",
    "CheckpointType": "checkpoint_types",
    "DiLoCoConfig": "diloco",
    "DiLoCoPhase": "diloco",
    "DiLoCoTrainer": "diloco",
    "ExactNesterov": "diloco",
    "NodeConfig": "config",
    "OuterOptimizer": "diloco",
    "RecoveryReport": "recovery",
    "Snapshot": "snapshot_api",
    "SpeculativeCheckpointer": "checkpointer",
    "SwarmNode": "node_api",
    "afetch_neighbor_snapshot": "snapshot_api",
    "create_checkpointer": "checkpointer",
    "fetch_neighbor_snapshot": "snapshot_api",
}

__all__ = [
    "CheckpointConfig",
    "CheckpointMetadata",
    "CheckpointType",
    "DiLoCoConfig",
    "DiLoCoPhase",
    "DiLoCoTrainer",
    "ExactNesterov",
    "HotswarmError",
    "NodeConfig",
    "OuterOptimizer",
    "RecoveryReport",
    "Snapshot",
    "SpeculativeCheckpointer",
    "SwarmNode",
    "afetch_neighbor_snapshot",
    "create_checkpointer",
    "errors",
    "fetch_neighbor_snapshot",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("hotswarm")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hotswarm' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"hotswarm.{home}"), name)
    globals()[name] = value  # the next use does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
