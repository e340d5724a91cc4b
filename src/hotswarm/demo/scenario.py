"""The play: calibrate, train, lose a process, lose a machine, lose a donor, finish, judge.

    calibrate   three trainers step at full load without an outer loop; one is killed and comes back. That gives the
                step time and the restart-and-restore time of this machine now, and from them the round length, the
                lighthouse's join timeout and the donors' upload cap.
    round 0     lighthouse, three daemons, three trainers, a barrier, the first outer step
    act 1       lost process: kill -9 a trainer mid-round, start it again
    act 2       lost machine: kill -9 a trainer and its daemon, delete its state, start a fresh node
    act 3       lost donor: the same again, and while the fetch runs the daemon of one donor is killed (with `fast`,
                acts 2 and 3 are one)
    the end     one more outer step by all; then the record is taken and judged

Who acts next is decided by what the trainers' logs say, never by sleeping.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from hotswarm.demo import claims, plot, timeline
from hotswarm.demo.cluster import Cluster, DemoError, Node, Tail, interrupt_on_sigterm
from hotswarm.demo.record import Event, Record

RUN = "demo"
LABELS = ("a", "b", "c")
CALIBRATION_STEPS = 30  # the snapshot comes ten steps before
REPLAY_STEPS = 12  # a kill comes that many steps after a snapshot; ten must be seen to replay
FETCH_S = 4.0  # how long the capped donors need together for what a joiner fetches
SLOWEST_FETCH_S = 2 * FETCH_S  # all of it from one donor
RESTARTS_PER_ROUND = 3.1  # the round is at least three restarts long; a little more against noise
JOIN_SLACK_S = 2.0
STUCK_S = 240.0  # many times what any act takes; past it the demo is stuck

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    fast: bool = False
    report_dir: Path = Path("demo-report")
    lenient_clock: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What calibration found, and what follows from it."""

    step_s: float
    restart_s: float  # kill -> first new step, restore and imports included
    snapshot_bytes: int

    @property
    def round_length(self) -> int:
        """Inner steps per round: enough for a restart, or for a fresh node to start and fetch, with room to spare."""
        shortest_s = max(RESTARTS_PER_ROUND * self.restart_s, self.restart_s + SLOWEST_FETCH_S + JOIN_SLACK_S)
        return max(4 * REPLAY_STEPS, math.ceil(shortest_s / self.step_s))

    @property
    def join_timeout_ms(self) -> int:
        """How long the lighthouse waits for a member that is alive and late: restart, replay and two seconds."""
        return round(1000 * (self.restart_s + REPLAY_STEPS * self.step_s + JOIN_SLACK_S))

    @property
    def snapshot_every(self) -> int:
        """Inner steps between two snapshots within a round."""
        return max(REPLAY_STEPS + 3, self.round_length // 4)

    @property
    def upload_bytes_per_s(self) -> int:
        """Each donor's upload cap. A joiner fetches outer parameters, momentum and both moments, which is as much as a
        snapshot of the calibration holds: live and outer parameters and both moments.
        """
        return max(64 * 1024, round(self.snapshot_bytes / FETCH_S / (len(LABELS) - 1)))

    def to_json(self) -> dict[str, float]:
        """All numbers by name, for the report."""
        return {
            "step_s": self.step_s,
            "restart_s": self.restart_s,
            "snapshot_bytes": self.snapshot_bytes,
            "round_length": self.round_length,
            "join_timeout_ms": self.join_timeout_ms,
            "snapshot_every": self.snapshot_every,
            "upload_bytes_per_s": self.upload_bytes_per_s,
        }


def run(options: Options, console: Console) -> int:
    """Plays, judges, writes report.json, record.json and losses.png; 0 when every claim held, else 1."""
    report_dir = options.report_dir.resolve()
    logs = report_dir / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    began_at = time.time()

    def say(mark: Event) -> None:
        row = timeline.mark_row(mark, began_at)
        console.print(Text(f"{row.at_s:6.1f} s  {row.label:<5} {row.what}", style=row.style))

    work = Path(tempfile.mkdtemp(prefix="hs-demo-"))
    try:
        with interrupt_on_sigterm(), Cluster(work, logs, say) as cluster:
            settings = calibrate(cluster)
            record = Stage(cluster, settings, began_at).play(fast=options.fast)
    except DemoError as error:
        if error.shown:
            console.print(Text(error.shown, style="dim"))
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

    verdict = claims.check(record)
    (report_dir / "record.json").write_text(json.dumps(record.to_json()))
    (report_dir / "report.json").write_text(json.dumps(timeline.report(record, verdict), indent=2) + "\n")
    plot.draw(record, report_dir / "losses.png")
    console.print()
    timeline.show(record, verdict, console, options.lenient_clock)
    good = claims.passed(verdict, options.lenient_clock)
    shown = os.path.relpath(report_dir)
    console.print()
    console.print(f"{'Every claim held' if good else 'NOT every claim held'}, {time.time() - began_at:.0f} s in all.")
    console.print(f"Written: {shown}/report.json, {shown}/record.json, {shown}/losses.png, {shown}/logs/")
    return 0 if good else 1


def calibrate(cluster: Cluster) -> Settings:
    """Measures step time and restart time at full load, on throwaway nodes."""
    cluster.mark("note", what="calibrating: three trainers at once, one killed and restarted")
    nodes = [Node(f"calibrate-{label}", cluster.work / f"calibrate-{label}") for label in LABELS]
    start = cluster.work / "calibrate"
    start.touch()
    cluster.start_daemons(nodes, {"run": "calibrate"})
    for index, node in enumerate(nodes):
        cluster.start_trainer(node, _calibration_options(index, start))
    watched: Sequence[Node] = nodes
    cluster.until(
        lambda: all(len(_steps(node.tail)) >= CALIBRATION_STEPS for node in nodes) and nodes[0].tail.last("calibrated"),
        STUCK_S,
        "the calibration's steps",
        watched,
    )
    loaded_from = max(_steps(node.tail)[0].at for node in nodes)  # from here on all three were stepping
    step_s = statistics.median(
        late.at - early.at
        for node in nodes
        for early, late in itertools.pairwise(_steps(node.tail))
        if early.at > loaded_from
    )
    snapshot_bytes = max(snapshot.bytes for snapshot in nodes[0].control().snapshots())
    killed_at = time.time()
    cluster.kill(nodes[0], "trainer")
    tail = cluster.start_trainer(nodes[0], _calibration_options(0, start))
    first = cluster.until(lambda: tail.first("step"), STUCK_S, "the restarted trainer's first step", watched)
    if first.integer("training") == 1:
        raise DemoError(f"the restarted trainer did not resume; see {cluster.logs}")
    for node in nodes:
        cluster.kill(node, "trainer")
        cluster.kill(node, "daemon")
    settings = Settings(step_s, first.at - killed_at, snapshot_bytes)
    cluster.marks.clear()
    cluster.node_labels.clear()
    cluster.mark(
        "note",
        what=f"calibrated: {1000 * step_s:.0f} ms per step, {settings.restart_s:.1f} s from kill to first step, "
        f"so {settings.round_length} steps per round and {settings.join_timeout_ms / 1000:.1f} s join timeout",
    )
    return settings


class Stage:
    """The nodes, and the acts played on them."""

    def __init__(self, cluster: Cluster, settings: Settings, began_at: float) -> None:
        self.cluster = cluster
        self.settings = settings
        self.began_at = began_at
        self.nodes = [Node(label, cluster.work / label) for label in LABELS]
        self.start_file = cluster.work / "start"
        self.stop_file = cluster.work / "stop"
        self.key = cluster.work / "swarm.key"
        self.lighthouse = ""

    def play(self, *, fast: bool) -> Record:
        """All acts in order; what happened."""
        a, b, c = self.nodes
        self._open()
        self._wait_for_round(1)
        self.lost_process(b)
        if fast:
            self.lost_machine(c, lose_a_donor=True)
        else:
            self.lost_machine(c, lose_a_donor=False)
            self.lost_machine(a, lose_a_donor=True)
        return self._close()

    def lost_process(self, node: Node) -> None:
        """kill -9 a trainer mid-round, at least REPLAY_STEPS after its last snapshot, and start it again."""
        tail = node.tail
        self._wait_for_quiet_round()
        kill_from = self.settings.snapshot_every + REPLAY_STEPS + 1
        self._until(
            lambda: (step := tail.last("step")) is not None and step.integer("inner") >= kill_from and step,
            f"{node.label}'s step {kill_from} of the round",
        )
        self.cluster.mark("act", name="lost process", label=node.label, life=len(node.lives))
        self.cluster.kill(node, "trainer")
        self._start_trainer(node, "auto", "auto")
        self._until(lambda: node.tail.first("sync"), f"{node.label}'s next outer step")

    def lost_machine(self, node: Node, *, lose_a_donor: bool) -> None:
        """kill -9 a trainer and its daemon, delete the state, start a fresh node; with `lose_a_donor` kill the daemon
        of the donor that is not the inner donor while the fetch runs, and start it again afterwards.
        """
        self._wait_for_quiet_round()
        donors = [other for other in self.nodes if other is not node]
        name = "lost machine and donor" if lose_a_donor else "lost machine"
        act: dict[str, object] = {"name": name, "label": node.label, "life": len(node.lives)}
        mark = self.cluster.mark("act", **act)
        self.cluster.kill(node, "trainer")
        self.cluster.kill(node, "daemon")
        self.cluster.delete_state(node)
        node.state_dir = self.cluster.work / f"{node.label}{len(node.lives) + 1}"
        node.address = ""
        self._start_daemons([node], donors)
        self._start_trainer(node, "auto", "adopt")
        if lose_a_donor:
            lost = self._lose_a_donor(node, donors)
            # the judges read from the act which donor was lost
            self.cluster.marks[self.cluster.marks.index(mark)] = Event("act", mark.at, {**act, "lost_donor": lost})
        self._until(lambda: node.tail.first("sync"), f"{node.label}'s first outer step")

    def _lose_a_donor(self, joiner: Node, donors: Sequence[Node]) -> str:
        progress = self._until(lambda: _under_way(joiner.tail), f"{joiner.label}'s fetch to be under way")
        inner_donor = self.cluster.node_labels.get(str(progress.mapping("progress").get("inner_donor")))
        lost = next(donor for donor in donors if donor.label != inner_donor)
        self.cluster.kill(lost, "daemon")
        self._until(lambda: joiner.tail.last("recovered"), f"{joiner.label}'s restore")
        self._start_daemons([lost], [joiner, *donors])
        return lost.label

    # ---- the frame around the acts

    def _open(self) -> None:
        self.lighthouse = self.cluster.start_lighthouse(self.settings.join_timeout_ms)
        self.cluster.swarm_node("keygen", "--swarm-key", str(self.key))
        self._start_daemons(self.nodes[:1], [])
        self._start_daemons(self.nodes[1:], self.nodes[:1])
        for node in self.nodes:
            self._start_trainer(node, "auto", "auto")
        self._until(lambda: all(node.tail.last("ready") for node in self.nodes), "three trainers ready at the barrier")
        self.start_file.touch()
        self.cluster.mark("note", what="barrier open, training begins")

    def _close(self) -> Record:
        """One more outer step by all; then the trainers end by themselves, and the daemons are asked."""
        for node in self.nodes:
            self.cluster.may_end(node)
        last = self._newest_sync() + 1
        staged = self.stop_file.with_suffix(".new")
        staged.write_text(str(last))
        staged.rename(self.stop_file)
        self.cluster.mark("note", what=f"everybody is back; the run ends with outer step {last}")
        self._until(
            lambda: all(node.trainer and node.trainer.process.poll() is not None for node in self.nodes),
            "the trainers to end",
        )
        for child in (node.trainer for node in self.nodes):
            if child is not None and (status := child.process.returncode):
                raise DemoError(f"{child.name} ended with status {status}; see {child.output}", child.end_of_log())
        return self.cluster.record(self.nodes, self.began_at, self.settings.to_json())

    def _wait_for_round(self, outer: int) -> None:
        self._until(
            lambda: all((sync := node.tail.last("sync")) and sync.integer("outer") >= outer for node in self.nodes),
            f"outer step {outer} on all nodes",
        )

    def _wait_for_quiet_round(self) -> None:
        """Until all nodes are in the first steps of one round, so that an act has the whole round before it."""

        def quiet() -> bool:
            steps = [node.tail.last("step") for node in self.nodes]
            positions = [step.position() for step in steps if step is not None]
            if len(positions) < len(self.nodes) or len({outer for outer, _, _ in positions}) > 1:
                return False
            return all(3 <= inner <= self.settings.snapshot_every for _, inner, _ in positions)

        self._until(quiet, "a round that all nodes have just begun")

    def _newest_sync(self) -> int:
        return max(sync.integer("outer") for node in self.nodes if (sync := node.tail.last("sync")) is not None)

    def _start_daemons(self, nodes: Sequence[Node], known: Sequence[Node]) -> None:
        peers = [other.address for other in known if other not in nodes]
        options = {
            "run": RUN,
            "swarm-key": str(self.key),
            "max-upload-bytes-per-s": str(self.settings.upload_bytes_per_s),
        }
        self.cluster.start_daemons(nodes, options, peers)

    def _start_trainer(self, node: Node, rejoin: str, inner: str) -> Tail:
        return self.cluster.start_trainer(
            node,
            {
                "run": RUN,
                "shard": f"{self.nodes.index(node)}/{len(self.nodes)}",
                "lighthouse": self.lighthouse,
                "round-length": str(self.settings.round_length),
                "snapshot-every": str(self.settings.snapshot_every),
                "start-file": str(self.start_file),
                "stop-file": str(self.stop_file),
                "rejoin": rejoin,
                "inner": inner,
            },
        )

    def _until(self, condition: Callable[[], T | None], what: str) -> T:
        return self.cluster.until(condition, STUCK_S, what, self.nodes)


def _under_way(tail: Tail) -> Event | None:
    """The newest progress line of a fetch that is between 30 % and 70 % done, and knows its inner donor."""
    event = tail.last("progress")
    if event is None:
        return None
    progress = event.mapping("progress")
    total = progress.get("total") or 0
    under_way = progress.get("phase") == "fetch" and total and 0.3 <= progress.get("bytes", 0) / total <= 0.7
    return event if under_way and progress.get("inner_donor") else None


def _steps(tail: Tail) -> list[Event]:
    return [event for event in tail.events if event.kind == "step"]


def _calibration_options(index: int, start: Path) -> dict[str, str]:
    return {
        "run": "calibrate",
        "shard": f"{index}/{len(LABELS)}",
        "calibrate": str(CALIBRATION_STEPS),
        "start-file": str(start),
    }
