"""From the `node=` that a caller gives to the store or the daemon that it means.

`None`: the daemon that runs on the state directory, else one started there. A `NodeConfig` or `SwarmNode`: the same
with those settings. The path of a directory: the same with that state directory. Any other path: the control socket of
a daemon that somebody else runs; nothing is ever started then. The state directory is the one that is named so, else
`$HOTSWARM_STATE_DIR` or a settings file, else the checkpointer's own directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswarm.checkpoint_types import CheckpointConfig
from hotswarm.config import NodeConfig, load_settings
from hotswarm.errors import ConfigError, ControlError
from hotswarm.snapshot.signing import Signer
from hotswarm.swarm.control import ControlClient, find_socket

ANSWER_S = 1.0  # for a daemon to say that it is there; it takes milliseconds
CALL_S = 10.0  # for any other short question
DEAF_S = 15.0
ANY_LOOPBACK_PORT = "127.0.0.1:0"  # a daemon nobody configured must not collide with another one on this machine


@dataclass(slots=True)
class Link:
    """A node that may or may not be running. `socket` is set when the caller named a control socket."""

    config: NodeConfig
    socket: Path | None = None
    spawned: bool = False
    deaf_until: float = 0.0
    """time.monotonic() until which a daemon that did not answer is not asked again"""
    is_default: bool = False
    """Whether nobody named the state directory."""

    @property
    def state_dir(self) -> Path:
        """The node's state directory (of a daemon known by its socket alone: the directory for local use)."""
        return self.config.state_dir

    def find(self) -> ControlClient | None:
        """A client of the daemon that runs and answers, or None. One that hangs counts as none, and is left alone for
        DEAF_S: whoever asks here may be training.
        """
        if time.monotonic() < self.deaf_until:
            return None
        found = self.socket if self.socket is not None else find_socket(self.state_dir)
        if found is None:
            return None
        try:
            ControlClient(found, timeout_s=ANSWER_S).status()
        except ControlError:
            if find_socket(self.state_dir) is not None or self.socket is not None:
                self.deaf_until = time.monotonic() + DEAF_S
            return None
        return ControlClient(found, timeout_s=CALL_S)

    def find_or_spawn(self, *, more_peers: Sequence[str] = ()) -> ControlClient:
        """A client of the daemon that runs, or of a new one. Raises what kept it from starting."""
        client = self.find()
        if client is not None:
            return client
        if self.socket is not None:
            raise ControlError(
                f"no daemon answers at the control socket {self.socket}; start it, or give node=None (or the state "
                "directory) to have one started"
            )
        from hotswarm.swarm.spawn import spawn

        peers = tuple(dict.fromkeys((*self.config.peers, *more_peers)))
        client = spawn(self.config.replace(peers=peers))
        self.spawned = True
        return client

    def again(self) -> ControlClient | None:
        """After the daemon was lost: the one that runs now, or, where this process had started it, a new one."""
        client = self.find()
        return self.find_or_spawn() if client is None and self.spawned else client

    def signer(self) -> Signer:
        """The identity that the state directory holds, made when there is none."""
        from hotswarm.swarm.identity import NodeIdentity

        return NodeIdentity.load_or_create(self.state_dir)


def resolve(node: object, directory: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Link:
    """The link that `node` means. `directory` is the state directory of last resort; `overrides` are settings that
    apply where this process starts the daemon itself, unless `node` says otherwise. ConfigError.
    """
    if isinstance(node, NodeConfig):
        return Link(_absolute(node))
    if isinstance(node, (str, os.PathLike)):
        path = Path(node)
        settings = load_settings()
        if path.is_dir():
            changes = {k: v for k, v in (overrides or {}).items() if settings.origins.get(k) == "default"}
            if settings.origins["listen"] == "default":
                changes["listen"] = ANY_LOOPBACK_PORT
            return Link(_absolute(settings.config.replace(**{**changes, "state_dir": path})))
        fallback = directory if directory is not None else settings.config.state_dir
        return Link(_absolute(settings.config.replace(state_dir=fallback)), socket=path)
    if node is None:
        settings = load_settings()
        changes = dict(overrides or {})
        if settings.origins["state_dir"] == "default" and directory is not None:
            changes["state_dir"] = directory
        if settings.origins["listen"] == "default":
            changes["listen"] = ANY_LOOPBACK_PORT
        changes = {k: v for k, v in changes.items() if settings.origins.get(k) == "default"}
        unnamed = settings.origins["state_dir"] == "default" and directory is None
        return Link(_absolute(settings.config.replace(**changes)), is_default=unnamed)
    config = getattr(node, "config", None)  # a SwarmNode; its module is loaded only by those who use it
    if isinstance(config, NodeConfig):
        return Link(_absolute(config))
    raise ConfigError(
        f"node must be a NodeConfig, a SwarmNode, the path of a state directory or control socket, or None, "
        f"not {type(node).__name__}",
        "node",
    )


def for_checkpointer(node: object, config: CheckpointConfig, label: str) -> Link:
    """The link of a checkpointer: where it starts a daemon itself, that one keeps and lingers as `config` says."""
    overrides = {
        "max_hot_snapshots": config.max_hot_snapshots,
        "max_cold_checkpoints": config.max_cold_checkpoints,
        "max_bytes": config.max_bytes,
        "linger_seconds": float(config.linger_seconds),
        "name": label,
    }
    return resolve(node, Path(config.checkpoint_dir).absolute(), overrides)


def _absolute(config: NodeConfig) -> NodeConfig:
    return config.replace(state_dir=config.state_dir.absolute())  # the working directory may change later
