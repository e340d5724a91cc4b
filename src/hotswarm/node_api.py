"""A node owned by a Python program: `swarm-node serve` as a child process, and its answers.

    with SwarmNode(NodeConfig(peers=("10.0.0.5:7411",), swarm_key="swarm.key")) as node:
        print(node.status()["listen"], node.peers())

The child is a process of its own: the caller's GIL, forks and event loop stay untouched. When the caller dies without
`stop()`, the child ends `linger_seconds` later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any, Self

from hotswarm.config import NodeConfig
from hotswarm.errors import ControlError, LocalFailure
from hotswarm.swarm.control import ControlClient
from hotswarm.swarm.spawn import Started, start_daemon

STOP_TIMEOUT_S = 30.0  # what is READY in the arena is still persisted


class SwarmNode:
    """Starts and stops one daemon. Thread-safe; usable again after `stop()`."""

    def __init__(self, config: NodeConfig | None = None) -> None:
        self.config = config if config is not None else NodeConfig()
        self._started: Started | None = None
        self._lock = threading.Lock()

    def start(self) -> Self:
        """Start the daemon and wait until it serves. Does nothing when it runs already.

        Raises LockedError (another daemon on this state directory or port), NotAuthorised, ConfigError, LocalFailure.
        """
        with self._lock:
            if self._started is None or not self._alive(self._started):
                self._started = start_daemon(self.config, owner_pid=os.getpid())
        return self

    def stop(self) -> None:
        """Stop the daemon as SIGTERM does, and wait for its end. Does nothing when none runs.

        Raises LocalFailure when it ended with an error; it has ended then as well.
        """
        with self._lock:
            started, self._started = self._started, None
        if started is None or started.process is None:
            return
        started.process.send_signal(signal.SIGTERM)
        try:
            code = started.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()
            raise LocalFailure(
                f"the daemon did not stop within {STOP_TIMEOUT_S:g} s and was killed; its complete snapshots are intact"
            ) from None
        if code:
            raise LocalFailure(f"the daemon ended with exit code {code}; see {self.config.state_dir}/daemon.log")

    @property
    def running(self) -> bool:
        """Whether the daemon lives."""
        started = self._started
        return started is not None and self._alive(started)

    @property
    def client(self) -> ControlClient:
        """The client of the running daemon. Raises ControlError when it was not started."""
        if self._started is None:
            raise ControlError("this SwarmNode is not started; call start() first")
        return self._started.client

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        if self._started is None:
            raise ControlError("this SwarmNode is not started; call start() first")
        return self._started.pid

    def peers(self) -> list[dict[str, Any]]:
        """The peers that the node knows."""
        return self.client.peers()

    def status(self) -> dict[str, Any]:
        """The node's state; `listen` is its address with the port that it got."""
        return self.client.status()

    @staticmethod
    def _alive(started: Started) -> bool:
        return started.process is not None and started.process.poll() is None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
