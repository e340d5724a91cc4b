"""The demo's processes: a lighthouse, and for each node a daemon and a trainer. Starts, watches and kills them.

Everything that is started here is ended here: `close()` ends what still runs, and should this process itself be killed,
the kernel kills its children (PR_SET_PDEATHSIG). Nothing outside is touched: every child is known by its pid, every
port is a free one, and all state lies in one temporary folder with a short name (Unix socket paths end at 108 bytes).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from hotswarm.demo.record import DaemonView, Event, Life, Record
from hotswarm.errors import ControlError, HotswarmError
from hotswarm.swarm.control import ControlClient

POLL_S = 0.02
LIGHTHOUSE_URL = re.compile(r"listening on: http://.*:(\d+)")
HEAL_LINE = b"healing required"  # what torchft's manager logs when it is about to heal
PR_SET_PDEATHSIG = 1

T = TypeVar("T")


class DemoError(HotswarmError):
    """The demo could not be played to its end. `shown` is the end of the log of the process that is to blame."""

    def __init__(self, message: str, shown: str = "") -> None:
        super().__init__(message)
        self.shown = shown


class Tail:
    """Reads the events of a growing JSON-lines file; a line without its end is not read yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []

    def poll(self) -> None:
        """Reads what was appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = (Event.parse(line) for line in whole.decode(errors="replace").splitlines())
        self.events += [event for event in found if event is not None]

    def last(self, *kinds: str) -> Event | None:
        """The newest event of one of these kinds."""
        return next((event for event in reversed(self.events) if event.kind in kinds), None)

    def first(self, kind: str) -> Event | None:
        """The oldest event of that kind."""
        return next((event for event in self.events if event.kind == kind), None)


@dataclass
class Child:
    """A process that this cluster started. `wanted` is False once it was killed or may end by itself."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    wanted: bool = True

    def end_of_log(self, lines: int = 12) -> str:
        """The last lines that it printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Node:
    """One member: its state directory, its address, its daemon and its trainer's lives."""

    label: str
    state_dir: Path
    address: str = ""
    daemon: Child | None = None
    trainer: Child | None = None
    lives: list[tuple[Tail, Path]] = field(default_factory=list)  # the log and the output of each trainer process

    @property
    def tail(self) -> Tail:
        """The log of the trainer that runs now, or ran last."""
        return self.lives[-1][0]

    def control(self) -> ControlClient:
        """A client of the running daemon. Raises ControlError."""
        client = ControlClient.find(self.state_dir)
        if client is None:
            raise ControlError(f"no daemon runs on {self.state_dir}")
        return client


class Cluster:
    """All processes of one demo run. A context manager: leaving it ends them."""

    def __init__(self, work: Path, logs: Path, say: Callable[[Event], None]) -> None:
        self.work = work
        self.logs = logs
        self.marks: list[Event] = []
        self.node_labels: dict[str, str] = {}
        self._say = say
        self._children: list[Child] = []
        (work / "run").mkdir(mode=0o700)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("HOTSWARM_")}
        self._environment |= {
            "XDG_RUNTIME_DIR": str(work / "run"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self._environment.pop("RUNTIME_DIRECTORY", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def mark(self, kind: str, **data: object) -> Event:
        """Notes what the orchestrator does, and when, and tells it to whoever watches."""
        event = Event(kind, time.time(), data)
        self.marks.append(event)
        self._say(event)
        return event

    # ---- processes

    def start_lighthouse(self, join_timeout_ms: int) -> str:
        """torchft's lighthouse on a free loopback port; its URL."""
        program = Path(sys.executable).with_name("torchft_lighthouse")
        argv = [str(program), "--bind", "127.0.0.1:0", "--min_replicas", "2", "--join_timeout_ms", str(join_timeout_ms)]
        child = self.start("lighthouse", argv)
        match = self.until(lambda: LIGHTHOUSE_URL.search(child.output.read_text(errors="replace")), 20, "a lighthouse")
        return f"http://127.0.0.1:{match.group(1)}"

    def swarm_node(self, *words: str) -> str:
        """Runs one `swarm-node` command to its end; its output. Raises DemoError when it fails."""
        done = subprocess.run(
            [*_swarm_node_program(), *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise DemoError(f"`swarm-node {' '.join(words)}` exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start_daemons(self, nodes: Sequence[Node], options: Mapping[str, str], peers: Sequence[str] = ()) -> None:
        """A `swarm-node` for each of these nodes, on its old address or else a free port; returns when all answer."""
        for node in nodes:
            argv = [*_swarm_node_program(), "serve", "--state-dir", str(node.state_dir), "--name", node.label]
            argv += ["--listen", node.address or "127.0.0.1:0"]
            argv += ["--peers", ",".join(peers)] if peers else []
            for name, value in options.items():
                argv += [f"--{name}", value]
            node.daemon = self.start(f"{node.label}-daemon", argv)
        for node in nodes:
            status = self.until(functools.partial(_status, node), 30, f"the daemon of {node.label}")
            node.address = str(status["listen"])
            self.node_labels[str(status["node"])] = node.label
            self.mark("start", what="daemon", label=node.label)

    def start_trainer(self, node: Node, options: Mapping[str, str]) -> Tail:
        """That node's trainer, as a new life with a log of its own."""
        number = len(node.lives) + 1
        log = self.logs / f"{node.label}-{number}.jsonl"
        argv = [sys.executable, "-m", "hotswarm.demo.trainer", "--label", node.label]
        argv += ["--state-dir", str(node.state_dir), "--log", str(log)]
        for name, value in options.items():
            argv += [f"--{name}", value]
        node.trainer = self.start(f"{node.label}-trainer-{number}", argv)
        node.lives.append((Tail(log), node.trainer.output))
        self.mark("start", what="trainer", label=node.label, life=number)
        return node.tail

    def kill(self, node: Node, what: str) -> None:
        """SIGKILL to that node's "trainer" or "daemon"."""
        child = node.trainer if what == "trainer" else node.daemon
        if child is None:
            raise DemoError(f"{node.label} has no {what} to kill")
        child.wanted = False
        self.mark("kill", what=what, label=node.label)
        child.process.kill()
        child.process.wait()

    def delete_state(self, node: Node) -> None:
        """The machine is lost: nothing of the node's state stays."""
        shutil.rmtree(node.state_dir)
        self.mark("delete", what="state", label=node.label)

    def close(self) -> None:
        """Ends what still runs: SIGTERM to all, SIGKILL to those that stay longer than 5 s."""
        living = [child for child in self._children if child.process.poll() is None]
        for child in living:
            child.wanted = False
            child.process.send_signal(signal.SIGTERM)
        deadline_at = time.monotonic() + 5
        for child in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_at - time.monotonic()))
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()

    # ---- watching

    def until(self, condition: Callable[[], T | None], timeout_s: float, what: str, nodes: Sequence[Node] = ()) -> T:
        """Polls the logs of `nodes` and the condition until it is true, and returns its value.

        Raises DemoError after `timeout_s`, or as soon as a process ends that should live.
        """
        deadline_at = time.monotonic() + timeout_s
        while True:
            for node in nodes:
                if node.lives:
                    node.tail.poll()
            value = condition()
            if value:
                return value
            for child in self._children:
                if child.wanted and child.process.poll() is not None:
                    raise DemoError(
                        f"{child.name} ended with status {child.process.returncode} while the demo waited for {what}; "
                        f"see {child.output}",
                        child.end_of_log(),
                    )
            if time.monotonic() > deadline_at:
                raise DemoError(f"{what} did not come within {timeout_s:.0f} s; see the logs in {self.logs}")
            time.sleep(POLL_S)

    def may_end(self, node: Node) -> None:
        """From now on that node's trainer may end by itself."""
        if node.trainer is not None:
            node.trainer.wanted = False

    def record(self, nodes: Sequence[Node], began_at: float, settings: Mapping[str, float]) -> Record:
        """What happened, with what the daemons that still run say about it."""
        lives = []
        for node in nodes:
            for number, (tail, output) in enumerate(node.lives, start=1):
                tail.poll()
                heals = output.read_bytes().count(HEAL_LINE)
                lives.append(Life(node.label, number, tuple(tail.events), heals))
        views = {node.label: _view(node) for node in nodes}
        return Record(began_at, tuple(lives), tuple(self.marks), dict(self.node_labels), views, dict(settings))

    def start(self, name: str, argv: Sequence[str | Path]) -> Child:
        """A child process whose output goes to `<name>.log`."""
        output = self.logs / f"{name}.log"
        with output.open("ab") as out:
            process = subprocess.Popen(
                [os.fspath(word) for word in argv],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal reaches this process alone, which then ends the rest
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        child = Child(name, process, output)
        self._children.append(child)
        return child


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that the processes are ended on the way out."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _swarm_node_program() -> list[str]:
    script = Path(sys.executable).with_name("swarm-node")
    return [str(script)] if script.exists() else [sys.executable, "-m", "hotswarm.cli.main"]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _status(node: Node) -> dict[str, object] | None:
    try:
        status = node.control().status()
    except (ControlError, json.JSONDecodeError):
        return None
    return status if status.get("listen") else None


def _view(node: Node) -> DaemonView:
    try:
        client = node.control()
        return DaemonView(
            client.status(),
            client.get("/api/v1/snapshots")["snapshots"],
            client.get("/api/v1/recoveries")["recoveries"],
        )
    except ControlError:
        return DaemonView()
