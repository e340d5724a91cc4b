"""The checkpointer and its daemon: who starts whom, who outlives whom, and what training notices of it (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hotswarm import CheckpointConfig, NodeConfig, SpeculativeCheckpointer, SwarmNode
from hotswarm.store.lock import read_lock
from hotswarm.swarm.control import ControlClient
from rejoining import Worker, start_node

TRAINER = Path(__file__).parent / "sigterm_trainer.py"


def lock_pid(folder: Path) -> int:
    return int(json.loads((folder / "daemon.lock").read_text())["pid"])


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def no_daemon_is_left(short_dir: Path) -> Iterator[None]:
    yield
    for lock in short_dir.rglob("daemon.lock"):
        pid = json.loads(lock.read_text()).get("pid", 0)
        if read_lock(lock.parent)[1] and pid != os.getpid() and alive(pid):
            os.kill(pid, signal.SIGKILL)


def small(folder: Path, **settings: Any) -> Worker:
    return Worker(0, folder, settings=settings)


def test_nothing_is_spawned_before_start_and_the_daemon_goes_with_the_trainer(
    short_dir: Path, wait_until: Callable[..., None]
) -> None:
    home = short_dir / "d"
    worker = small(home)
    worker.steps(3)
    assert worker.checkpointer.force_snapshot() is not None
    assert lock_pid(home) == os.getpid()
    assert worker.checkpointer.swarm_node_id == ""

    worker.checkpointer.start()
    daemon = lock_pid(home)
    assert daemon != os.getpid()
    assert re.fullmatch("[0-9a-f]{40}", worker.checkpointer.swarm_node_id)
    worker.steps(2)
    metadata = worker.checkpointer.force_snapshot()
    assert metadata is not None, worker.checkpointer.last_error
    assert metadata.training_step == 5
    assert Path(metadata.file_path).is_file()
    assert worker.checkpointer.load_checkpoint(metadata.file_path)["training_step"] == 5
    assert [m.training_step for m in worker.checkpointer.hot_snapshots] == [3, 5]
    worker.steps(1)
    began = time.monotonic()
    worker.checkpointer.stop()
    assert time.monotonic() - began < 1.0
    wait_until(lambda: not alive(daemon), 20, "the daemon to end, linger_seconds being 0")
    assert worker.checkpointer.load_latest_checkpoint()["training_step"] == 6  # the last one, by the local store


def test_a_sidecar_is_attached_to_and_stays(short_dir: Path, processes: Any) -> None:
    home = short_dir / "d"
    sidecar = start_node(processes, home)
    worker = small(home)
    worker.checkpointer.start()
    worker.steps(12)
    assert worker.checkpointer.force_snapshot().outer_step == 1
    status = ControlClient.find(home).status()
    assert status["trainer"]["pid"] == os.getpid()
    assert status["trainer"]["label"] == "worker-0"
    clock = status["clock"]
    assert (clock["outer_step"], clock["inner_step"], clock["training_step"]) == (1, 2, 12)
    assert clock["round_length"] == worker.round_length
    assert clock["steps_per_s"] > 0
    worker.checkpointer.stop()
    time.sleep(0.5)
    assert sidecar.poll() is None
    assert worker.checkpointer.hot_snapshots[-1].training_step == 12


@pytest.mark.parametrize("how", ["socket", "NodeConfig", "SwarmNode"])
def test_the_ways_to_name_a_node(how: str, short_dir: Path) -> None:
    config = NodeConfig(state_dir=short_dir / "node", listen="127.0.0.1:0", linger_seconds=0, run="named")
    with SwarmNode(config) as node:
        named: Any = {"socket": node.status()["socket"], "NodeConfig": config, "SwarmNode": node}[how]
        worker = Worker(0, short_dir / "mine", node=named)
        worker.checkpointer.start()
        worker.steps(2)
        metadata = worker.checkpointer.force_snapshot()
        assert metadata is not None, worker.checkpointer.last_error
        assert str(short_dir / "node" / "runs" / "named") in metadata.file_path
        assert worker.checkpointer.load_checkpoint(metadata.file_path)["training_step"] == 2
        assert worker.checkpointer.load_checkpoint(metadata.snapshot_id)["training_step"] == 2
        worker.checkpointer.stop()
        assert not (short_dir / "mine" / "runs").exists()


def test_a_second_trainer_on_one_daemon_trains_on_unprotected_and_is_told(
    short_dir: Path, processes: Any, wait_until: Callable[..., None]
) -> None:
    home = short_dir / "d"
    start_node(processes, home)
    first, second = small(home), Worker(1, home)
    first.checkpointer.start()
    first.steps(1)
    assert first.checkpointer.force_snapshot() is not None
    second.checkpointer.start()
    second.steps(3)
    assert second.trainer.stats.total_inner_steps >= 3
    wait_until(lambda: "busy" in str(second.checkpointer.last_error), 10, "the warning")
    assert "unprotected" in second.checkpointer.last_error
    assert second.checkpointer.force_snapshot() is None
    second.checkpointer.stop()
    first.steps(1)
    assert first.checkpointer.force_snapshot() is not None, first.checkpointer.last_error
    first.checkpointer.stop()


def test_training_goes_on_without_the_daemon_and_the_next_one_takes_over(
    short_dir: Path, processes: Any, wait_until: Callable[..., None]
) -> None:
    home = short_dir / "d"
    sidecar = start_node(processes, home)
    worker = small(home, snapshot_interval=0.2, max_hot_snapshots=30)
    worker.checkpointer.start()
    worker.steps(2)
    assert worker.checkpointer.force_snapshot() is not None
    sidecar.kill()
    sidecar.wait()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        worker.steps(1)
        time.sleep(0.01)
    without = worker.trainer.stats.total_inner_steps
    assert worker.checkpointer.get_stats()["skipped"] > 0
    start_node(processes, home)
    client = ControlClient.find(home)
    wait_until(lambda: client.status()["trainer"] is not None, 20, "the trainer to give its arena back")
    wait_until(
        lambda: any(2 < info.training_step <= without for info in client.snapshots()),
        20,
        "what was taken without a daemon to reach the disk",
    )
    worker.steps(1)
    assert worker.checkpointer.force_snapshot() is not None, worker.checkpointer.last_error
    worker.checkpointer.stop()


def test_a_daemon_that_this_trainer_started_is_started_again(short_dir: Path, wait_until: Callable[..., None]) -> None:
    home = short_dir / "d"
    worker = small(home)
    worker.checkpointer.start()
    worker.steps(2)
    assert worker.checkpointer.force_snapshot() is not None
    first = lock_pid(home)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: lock_pid(home) != first and ControlClient.find(home) is not None, 30, "another daemon")
    wait_until(lambda: worker.checkpointer._reach._backend.attached, 20, "the trainer to attach")
    worker.steps(1)
    assert worker.checkpointer.force_snapshot().training_step == 3
    worker.checkpointer.stop()


def test_where_no_daemon_can_run_the_local_store_serves_and_says_why(short_dir: Path) -> None:
    home = short_dir / "d"
    home.mkdir()
    config = NodeConfig(state_dir=home, listen="127.0.0.1:0", swarm_key=short_dir / "no-such-key")
    worker = Worker(0, home, node=config)
    worker.checkpointer.start()
    assert worker.checkpointer.running
    assert "no-such-key" in worker.checkpointer.last_error
    worker.steps(3)
    assert worker.checkpointer.force_snapshot() is not None, worker.checkpointer.last_error
    worker.checkpointer.stop()


# ---------------------------------------------------------------- SIGTERM


class Run:
    """sigterm_trainer.py, followed through its log."""

    def __init__(self, processes: Any, folder: Path, *options: object) -> None:
        self.home, self.log = folder / "d", folder / "log"
        self.log.touch()
        words = [sys.executable, TRAINER, "--dir", self.home, "--log", self.log, *options]
        self.processes = processes
        self.child = processes.start([str(word) for word in words])

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while sum(line.startswith("step") for line in self.lines()) < count:
            assert self.child.poll() is None, self.processes.log_of(self.child)
            assert time.monotonic() < deadline, self.processes.log_of(self.child)
            time.sleep(0.02)

    @property
    def last_step(self) -> int:
        return max(int(line.split()[1]) for line in self.lines() if line.startswith("step"))

    def saved_steps(self) -> list[int]:
        net = torch.nn.Linear(8, 8)
        config = CheckpointConfig(checkpoint_dir=self.home)
        reader = SpeculativeCheckpointer(net, torch.optim.AdamW(net.parameters()), config=config)
        return [metadata.training_step for metadata in reader.hot_snapshots]


@pytest.mark.parametrize("place", ["daemon", "local"])
def test_sigterm_takes_a_last_exact_snapshot_and_ends_the_process_by_the_signal(
    place: str, short_dir: Path, processes: Any, wait_until: Callable[..., None]
) -> None:
    run = Run(processes, short_dir, *(["--daemon"] if place == "daemon" else []))
    run.wait_for_steps(5)
    run.child.send_signal(signal.SIGTERM)
    assert run.child.wait(30) == -signal.SIGTERM, processes.log_of(run.child)
    wait_until(lambda: run.last_step <= max(run.saved_steps()) <= run.last_step + 1, 20, "the last step's snapshot")
    assert "end" not in run.lines()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["daemon", "local"])
def test_sigterm_in_a_step_that_does_not_end_takes_nothing_and_ends_after_the_grace(
    place: str, short_dir: Path, processes: Any
) -> None:
    run = Run(processes, short_dir, "--pause", 60, *(["--daemon"] if place == "daemon" else []))
    run.wait_for_steps(1)
    run.child.send_signal(signal.SIGTERM)
    assert run.child.wait(30) == -signal.SIGTERM, processes.log_of(run.child)
    assert run.saved_steps() == [0]  # a step that is going on is no state


@pytest.mark.parametrize("handler", ["flag", "exit"])
def test_the_users_own_handler_still_runs(handler: str, short_dir: Path, processes: Any) -> None:
    run = Run(processes, short_dir, "--handler", handler)
    run.wait_for_steps(5)
    run.child.send_signal(signal.SIGTERM)
    code = run.child.wait(30)
    assert code == (7 if handler == "exit" else 0), processes.log_of(run.child)
    assert run.lines().count("handler") == 1
    assert ("end" in run.lines()) == (handler == "flag")
    if handler == "flag":  # the loop went on to its end, and to stop()
        assert run.last_step <= max(run.saved_steps()) + 1


def test_a_program_that_just_ends_has_handed_its_snapshots_over(short_dir: Path) -> None:
    import subprocess

    code = """
import sys, torch
from hotswarm import SpeculativeCheckpointer, CheckpointConfig
net = torch.nn.Linear(4, 4)
opt = torch.optim.AdamW(net.parameters())
c = SpeculativeCheckpointer(net, opt, config=CheckpointConfig(
    checkpoint_dir=sys.argv[1], announce_to_dht=False, serve_to_peers=False))
c.start()
for _ in range(3):
    net(torch.ones(1, 4)).sum().backward(); opt.step(); c.step()
c.snapshot()
"""
    subprocess.run([sys.executable, "-c", code, str(short_dir / "d")], check=True, timeout=60)
    net = torch.nn.Linear(4, 4)
    reader = SpeculativeCheckpointer(net, torch.optim.AdamW(net.parameters()), checkpoint_dir=short_dir / "d")
    assert [metadata.training_step for metadata in reader.hot_snapshots] == [3]


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("place", ["daemon", "local"])
def test_dataloader_workers_forked_meanwhile_neither_hang_nor_hold_our_descriptors(
    place: str, short_dir: Path, processes: Any, wait_until: Callable[..., None]
) -> None:
    run = Run(processes, short_dir, "--workers", 2, "--linger", 30, *(["--daemon"] if place == "daemon" else []))
    run.wait_for_steps(5)
    parent = psutil.Process(run.child.pid)
    workers = [child for child in parent.children() if "sigterm_trainer" in " ".join(child.cmdline())]
    assert len(workers) == 2
    ours = held(parent.pid)
    assert any("hotswarm-arena" in target for target in ours)
    for worker in workers:
        targets = held(worker.pid)
        assert [t for t in targets if "hotswarm-arena" in t or "daemon.lock" in t or t.endswith(".pack")] == []
        assert sockets(worker.pid) & own_unix_sockets(parent.pid, place) == set()
    if place == "daemon":
        # The trainer dies; its workers are orphans for a moment. The daemon notices the death all the same.
        for worker in workers:
            worker.suspend()
        run.child.kill()
        run.child.wait()
        client = ControlClient.find(run.home)
        wait_until(lambda: client.status()["trainer"] is None, 10, "the daemon to see that the trainer is gone")
        for worker in workers:
            worker.kill()
        client.stop()
    else:
        run.child.send_signal(signal.SIGTERM)
        assert run.child.wait(30) == -signal.SIGTERM
        assert read_lock(run.home)[1] is False  # nobody's child keeps the directory locked


def held(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = []
    for link in folder.iterdir():
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return found


def sockets(pid: int) -> set[str]:
    return {target for target in held(pid) if target.startswith("socket:")}


def own_unix_sockets(pid: int, place: str) -> set[str]:
    """Sockets of the trainer that are connected to the daemon's descriptor socket (workers' own ones are not)."""
    if place == "local":
        return set()
    inodes = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[4] == "0005":  # SOCK_SEQPACKET: only hotswarm's descriptor socket is one
            inodes.add(f"socket:[{fields[6]}]")
    return sockets(pid) & inodes
