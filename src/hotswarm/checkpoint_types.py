"""What a checkpointer is told and what it tells: kinds, metadata, settings. Plain values, no torch, no I/O."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from hotswarm.errors import ConfigError

REJOIN = ("auto", "resume", "outer", "clone")
INNER = ("auto", "adopt", "own", "fresh")


class CheckpointType(Enum):
    """Why a snapshot exists, which decides how long it is kept."""

    HOT = "hot"  # one of the rolling window
    COLD = "cold"  # kept longer
    RECOVERY = "recovery"  # fetched from a peer


@dataclass(slots=True)
class CheckpointMetadata:
    """One snapshot as the caller sees it. Sizes in bytes, `timestamp` in Unix seconds.

    `file_path` is the manifest's path; `load_checkpoint` takes it, and also the bare snapshot id. `compressed_size` is
    what the snapshot takes on disk (chunks that it shares with an older one of its round count once, there),
    `original_size` what it stands for. `model_hash` is a digest of every parameter byte.
    """

    checkpoint_id: str
    timestamp: float
    checkpoint_type: CheckpointType
    training_step: int
    outer_step: int
    inner_step: int
    model_hash: str
    num_params: int
    layer_ids: list[int]
    file_path: str
    compressed_size: int
    original_size: int
    node_id: str
    outer_digest: str = ""  # hex; empty without an outer optimizer
    snapshot_id: str = field(default="")  # 32 hex digits

    @property
    def age_seconds(self) -> float:
        """Seconds since the copy was taken, by the wall clock."""
        return time.time() - self.timestamp

    @property
    def compression_ratio(self) -> float:
        """Bytes on disk by bytes of state; 1.0 for an empty state."""
        return self.compressed_size / self.original_size if self.original_size else 1.0


@dataclass
class CheckpointConfig:
    """Settings of a checkpointer. A value that cannot work is a ConfigError that names the field.

    Times are seconds. Raises ConfigError.
    """

    snapshot_interval: float | Literal["auto"] = 120.0
    cold_checkpoint_interval: float = 3600.0
    max_hot_snapshots: int = 5
    max_cold_checkpoints: int = 3
    checkpoint_dir: str | os.PathLike[str] = "./checkpoints"
    compression_level: int = 6  # kept for old callers; the local disk is always raw: coding it never pays
    announce_to_dht: bool = True
    serve_to_peers: bool = True
    auto_fetch_on_start: bool = True
    recovery_timeout: float = 60.0  # bounds locating and choosing, and the time without progress; not a long download
    snapshot_on_outer_step: bool = True
    max_overhead: float = 0.01  # of training time that stalls may take when snapshot_interval is "auto"
    max_bytes: int | None = None  # quota of the local store
    replicas: int = 0
    rejoin: str = "auto"
    inner: str = "auto"
    min_agree: int | None = None
    linger_seconds: float = 600
    handle_sigterm: bool = True

    def __post_init__(self) -> None:
        if self.snapshot_interval != "auto":
            _seconds(self, "snapshot_interval", least=0.0, exclusive=True, also=' or "auto"')
        _seconds(self, "cold_checkpoint_interval", least=0.0, exclusive=True)
        _seconds(self, "recovery_timeout", least=0.0, exclusive=True)
        _seconds(self, "linger_seconds", least=0.0)
        _whole(self, "max_hot_snapshots", least=1)
        _whole(self, "max_cold_checkpoints", least=0)
        _whole(self, "compression_level", least=0, most=9)
        _whole(self, "replicas", least=0)
        if self.replicas:
            _refuse(self, "replicas", "0: replicas on other nodes are not available in this version")
        _whole(self, "max_bytes", least=1, optional=True)
        _whole(self, "min_agree", least=1, optional=True)
        if not _is_number(self.max_overhead) or not 0.0 < self.max_overhead <= 1.0:
            _refuse(self, "max_overhead", "a number in (0, 1]")
        if not isinstance(self.checkpoint_dir, (str, os.PathLike)) or not os.fspath(self.checkpoint_dir):
            _refuse(self, "checkpoint_dir", "a path")
        for name in ("announce_to_dht", "serve_to_peers", "auto_fetch_on_start", "snapshot_on_outer_step"):
            _flag(self, name)
        _flag(self, "handle_sigterm")
        _choice(self, "rejoin", REJOIN)
        _choice(self, "inner", INNER)


def _refuse(config: CheckpointConfig, name: str, wanted: str) -> None:
    raise ConfigError(f"CheckpointConfig.{name} must be {wanted}, not {getattr(config, name)!r}", name)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _seconds(config: CheckpointConfig, name: str, *, least: float, exclusive: bool = False, also: str = "") -> None:
    value = getattr(config, name)
    if not _is_number(value) or value < least or (exclusive and value == least):
        _refuse(config, name, f"a number of seconds {'above' if exclusive else 'of at least'} {least:g}{also}")


def _whole(config: CheckpointConfig, name: str, *, least: int, most: int | None = None, optional: bool = False) -> None:
    value = getattr(config, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = f" and at most {most}" if most is not None else ""
        _refuse(config, name, f"a whole number of at least {least}{upper}{' or None' if optional else ''}")


def _flag(config: CheckpointConfig, name: str) -> None:
    if not isinstance(getattr(config, name), bool):
        _refuse(config, name, "True or False")


def _choice(config: CheckpointConfig, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if not isinstance(value, str) or value not in allowed:
        _refuse(config, name, f"one of {', '.join(allowed)}")
    setattr(config, name, str(value))
