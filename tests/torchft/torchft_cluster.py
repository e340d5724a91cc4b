"""Replicas as processes, their events as they come, and sidecar daemons when a test wants a swarm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchft_replica

from hotswarm.swarm.control import ControlClient
from support.forked import Forked

SWARM_NODE = [sys.executable, "-P", "-m", "hotswarm.cli.main"]
SCRIPT = Path(__file__).parent / "torchft_replica.py"
ALONE = {"announce_to_dht": False, "serve_to_peers": False}  # no daemon at all: the local store only


@dataclass
class Running:
    """One life of one replica."""

    child: Forked | subprocess.Popen[bytes]
    path: Path

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is unfinished
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in found if not kinds or event["ev"] in kinds]

    def wait_for(self, kind: str, timeout_s: float = 60.0, **wanted: object) -> dict[str, Any]:
        """The first event of that kind with these fields; fails when the process ends first."""
        deadline_at = time.monotonic() + timeout_s
        while True:
            ended = self.child.poll() is not None
            for event in self.events(kind):
                if all(event.get(name) == value for name, value in wanted.items()):
                    return event
            assert not ended, f"ended with {self.child.returncode} before {kind} {wanted}: {self.tail()}"
            assert time.monotonic() < deadline_at, f"no {kind} {wanted} within {timeout_s} s: {self.tail()}"
            time.sleep(0.02)

    def tail(self) -> str:
        log = self.path.with_suffix(".log")
        return f"\n{self.path.read_text(encoding='utf-8')[-1500:]}\n{log.read_text(errors='replace')[-3000:]}"

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def finish(self, timeout_s: float = 90.0) -> None:
        """Waits for its end; it must have been a good one."""
        try:
            code = self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        assert code == 0, f"ended with {code}: {self.tail()}"

    def losses(self) -> dict[tuple[int, int], str]:
        return {(event["outer"], event["inner"]): event["loss"] for event in self.events("step")}


class Cluster:
    """Starts replicas against one lighthouse; every folder lies under `root`."""

    def __init__(self, root: Path, lighthouse: str, start: Callable[..., subprocess.Popen[bytes]]) -> None:
        self.root = root
        self.lighthouse = lighthouse
        self._start = start
        self.lives: list[Running] = []

    def state_dir(self, index: int) -> Path:
        return self.root / f"s{index}"

    def replica(self, index: int, *, fresh: bool = False, **settings: Any) -> Running:
        """A process with these settings; with `fresh` it is a new interpreter, else a fork that has torch imported."""
        path = self.root / f"r{index}-{len(self.lives)}.jsonl"
        path.touch()
        given = {"index": index, "lighthouse": self.lighthouse, "state_dir": str(self.state_dir(index)), **settings}
        child: Forked | subprocess.Popen[bytes]
        if fresh:
            with path.open("wb") as out, path.with_suffix(".log").open("wb") as err:
                child = self._start([sys.executable, SCRIPT, json.dumps(given)], stdout=out, stderr=err)
        else:
            child = Forked(torchft_replica.run, json.dumps(given), path, path.with_suffix(".log"))
        self.lives.append(Running(child, path))
        return self.lives[-1]

    def end(self) -> None:
        """Ends what the test left running; fresh ones and daemons are ended by who started them."""
        for life in self.lives:
            if isinstance(life.child, Forked):
                life.child.end()

    def daemon(
        self, index: int, *, key: Path, peers: list[str] | None = None, flags: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        """Starts a sidecar for replica `index`; `address_of` waits until it answers."""
        command: list[str | Path] = [*SWARM_NODE, "serve", "--state-dir", self.state_dir(index)]
        command += [
            *flags,
            "--listen",
            "127.0.0.1:0",
            "--swarm-key",
            key,
            "--run",
            "torchft-test",
            "--name",
            f"r{index}",
        ]
        if peers:
            command += ["--peers", ",".join(peers)]
        return self._start(command)

    def address_of(self, index: int, child: subprocess.Popen[bytes]) -> str:
        """Where that sidecar listens, once it does."""
        deadline_at = time.monotonic() + 30
        while True:
            client = ControlClient.find(self.state_dir(index))
            if client is not None and (status := client.status())["pid"] == child.pid:
                return str(status["listen"])
            assert child.poll() is None, f"the daemon ended with {child.returncode}: {child.log.read_text()[-2000:]}"
            assert time.monotonic() < deadline_at, "the daemon does not answer"
            time.sleep(0.05)

    def key(self) -> Path:
        """A swarm key file, made by the command."""
        path = self.root / "swarm.key"
        command = [*SWARM_NODE, "keygen", "--swarm-key", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return path
