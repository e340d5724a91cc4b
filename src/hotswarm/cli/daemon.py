"""Finding the daemon that a verb speaks to, and running one for a verb that needs a node where none runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hotswarm.config import NodeConfig, Settings
from hotswarm.errors import ControlError

if TYPE_CHECKING:
    from hotswarm.swarm.control import ControlClient

STOP_TIMEOUT_S = 15.0


def find(settings: Settings) -> ControlClient | None:
    """The daemon of the state directory, when one runs."""
    from hotswarm.swarm.control import ControlClient

    return ControlClient.find(settings.config.state_dir)


def require(settings: Settings) -> ControlClient:
    """The daemon of the state directory, or ControlError."""
    client = find(settings)
    if client is None:
        raise ControlError(
            f"no daemon runs on the state directory {settings.config.state_dir.absolute()}; "
            "start one with `swarm-node serve`, or name another with --state-dir"
        )
    return client


@contextmanager
def running(settings: Settings) -> Iterator[ControlClient]:
    """The daemon that runs, or one that runs as long as this block does."""
    client = find(settings)
    if client is not None:
        yield client
        return
    from hotswarm.swarm.spawn import start_daemon

    started = start_daemon(_for_a_moment(settings), owner_pid=os.getpid())
    assert started.process is not None
    try:
        yield started.client
    finally:
        started.process.terminate()
        try:
            started.process.wait(STOP_TIMEOUT_S)
        except Exception:
            started.process.kill()
            started.process.wait()
            raise


def _for_a_moment(settings: Settings) -> NodeConfig:
    """The same node; on a free port, unless the port was chosen by somebody."""
    changes: dict[str, object] = {"linger_seconds": 0.0}
    if settings.origins["listen"] == "default":
        changes["listen"] = "127.0.0.1:0"
    return settings.config.replace(**changes)
