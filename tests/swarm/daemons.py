"""Starting real daemons in tests: each on a free port, ended by the `processes` fixture."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hotswarm.swarm.control import ControlClient

SWARM_NODE = [sys.executable, "-P", "-m", "hotswarm.cli.main"]
LITTLE_TRAINER = [sys.executable, str(Path(__file__).with_name("little_trainer.py"))]


def start_daemon(processes: Any, state_dir: Path, *flags: str, **popen: object) -> subprocess.Popen[bytes]:
    """`swarm-node serve` on a free port; returns once it answers."""
    child = processes.start(
        [*SWARM_NODE, "serve", "--state-dir", state_dir, "--listen", "127.0.0.1:0", *flags], **popen
    )
    deadline = time.monotonic() + 30
    while True:
        client = ControlClient.find(state_dir)
        if client is not None and client.status()["pid"] == child.pid:
            return child
        assert child.poll() is None, f"the daemon ended with {child.returncode}:\n{processes.log_of(child)}"
        assert time.monotonic() < deadline, f"the daemon did not answer:\n{processes.log_of(child)}"
        time.sleep(0.02)


def client_of(state_dir: Path) -> ControlClient:
    """A client of the daemon that runs there."""
    client = ControlClient.find(state_dir)
    assert client is not None
    return client


def run_cli(*words: str | Path, timeout_s: float = 30.0, **popen: Any) -> subprocess.CompletedProcess[str]:
    """Run `swarm-node` to its end."""
    argv = [*SWARM_NODE, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, **popen)


def last_json(text: str) -> Any:
    """The JSON in a line of output."""
    return json.loads(text.strip().splitlines()[-1])
