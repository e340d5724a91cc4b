"""SwarmNode: a daemon owned by a Python program."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import textwrap

import psutil
import pytest

from hotswarm import NodeConfig, SwarmNode
from hotswarm.errors import ControlError, LocalFailure, LockedError
from hotswarm.swarm.spawn import spawn


def config(folder, **changes) -> NodeConfig:
    return NodeConfig(state_dir=folder / "state", listen="127.0.0.1:0", **changes)


def test_a_node_starts_answers_and_stops(short_dir):
    node = SwarmNode(config(short_dir, name="n"))
    with pytest.raises(ControlError, match="not started"):
        node.status()
    with node:
        assert node.running
        status = node.status()
        assert (status["name"], status["pid"]) == ("n", node.pid)
        assert status["listen"].startswith("127.0.0.1:")
        assert node.peers() == []
        assert node.start() is node
        assert node.status()["pid"] == status["pid"]
    assert not node.running
    assert not psutil.pid_exists(status["pid"])
    node.stop()
    with node:
        assert node.status()["pid"] != status["pid"]


def test_starting_on_a_taken_state_directory_says_who_has_it(short_dir):
    with SwarmNode(config(short_dir)) as first, pytest.raises(LockedError, match=str(first.pid)):
        SwarmNode(config(short_dir)).start()


def test_a_killed_daemon_is_reported_and_replaced(short_dir):
    node = SwarmNode(config(short_dir)).start()
    os.kill(node.pid, signal.SIGKILL)
    with pytest.raises(LocalFailure, match=r"daemon\.log"):
        node.stop()
    with node:
        assert node.running


def test_the_service_manager_of_the_owner_hears_nothing_of_the_node(short_dir, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_dir / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_dir / "notify"))
        with SwarmNode(config(short_dir)) as node:
            assert node.running
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_what_the_machine_refuses_is_a_local_failure(short_dir, monkeypatch):
    folder = short_dir / "state"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, hard))
        for start in (lambda: SwarmNode(config(short_dir)).start(), lambda: spawn(config(short_dir))):
            with pytest.raises(LocalFailure, match="Too many open files"):
                start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(short_dir / "gone"))
    with pytest.raises(LocalFailure, match="No such file or directory"):
        spawn(config(short_dir))
    assert not (folder / "daemon.lock").exists()


def test_a_daemon_that_is_not_ready_in_time_is_not_left_behind(short_dir, monkeypatch):
    monkeypatch.setattr("hotswarm.swarm.spawn.READY_TIMEOUT_S", 0.2)
    with pytest.raises(ControlError, match="not ready after"):
        spawn(config(short_dir))
    mine = str(short_dir / "state")
    left = [p.pid for p in psutil.process_iter(["cmdline", "status"]) if mine in (p.info["cmdline"] or ())]
    assert left == []


def test_a_node_outlives_its_owner_by_linger_seconds_only(processes, short_dir, wait_until):
    code = textwrap.dedent(
        f"""
        from hotswarm import NodeConfig, SwarmNode
        import time
        node = SwarmNode(NodeConfig(state_dir={str(short_dir / "state")!r}, listen="127.0.0.1:0", linger_seconds=0))
        print(node.start().pid, flush=True)
        time.sleep(600)
        """
    )
    owner = processes.start([sys.executable, "-c", code])
    wait_until(lambda: processes.log_of(owner).strip(), 30, "the start")
    pid = int(processes.log_of(owner))
    owner.kill()
    owner.wait()
    try:
        wait_until(lambda: not psutil.pid_exists(pid), 45, "the end of the node")
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
