"""A trainer is killed in the middle of a round and comes back from its own snapshot, bit for bit."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAINER = Path(__file__).parent / "resume_trainer.py"
STEPS = 60


def command(folder: Path, log: Path, *more: object) -> list[str]:
    words = [sys.executable, TRAINER, "--dir", folder, "--log", log, "--steps", STEPS, *more]
    return [str(word) for word in words]


def steps_in(log: Path) -> list[tuple[int, str]]:
    """(step, the rest of the line: loss and learning rate in hex), in the order written."""
    lines = [line.split(" ", 1) for line in log.read_text().splitlines() if not line.startswith("#")]
    return [(int(step), rest) for step, rest in lines]


def starts_in(log: Path) -> list[int]:
    return [int(line.split()[3]) for line in log.read_text().splitlines() if line.startswith("# start")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, str]]:
    """workers → step → loss and learning rate of a run that nobody disturbs."""
    runs: dict[int, dict[int, str]] = {}
    for workers in (0, 2):
        folder = tmp_path_factory.mktemp("reference")
        subprocess.run(command(folder / "d", folder / "log", "--workers", workers), check=True, timeout=100)
        runs[workers] = dict(steps_in(folder / "log"))
        assert len(runs[workers]) == STEPS
    return runs


@pytest.mark.parametrize(
    ("workers", "explicit"),
    [
        pytest.param(0, 1, id="step()"),
        pytest.param(2, 0, id="hooks-workers"),
        pytest.param(0, 0, id="hooks", marks=pytest.mark.slow),
        pytest.param(2, 1, id="step()-workers", marks=pytest.mark.slow),
    ],
)
def test_killed_mid_round_and_resumed_from_the_local_store(
    workers: int, explicit: int, uninterrupted: dict[int, dict[int, str]], short_dir: Path
) -> None:
    folder, log = short_dir / "d", short_dir / "log"
    options = ["--workers", workers, "--explicit", explicit, "--interval", 0.02, "--pause", 0.03]
    killed_at = random.Random(workers * 2 + explicit).randrange(20, 50)
    dead = subprocess.run(command(folder, log, *options, "--die-at", killed_at), check=False, timeout=100)
    assert dead.returncode == -signal.SIGKILL
    subprocess.run(command(folder, log, *options), check=True, timeout=100)
    _, resumed_at = starts_in(log)
    print(f"killed at {killed_at}, resumed at {resumed_at}")
    assert 0 < resumed_at <= killed_at
    assert_same(log, uninterrupted[workers])


def assert_same(log: Path, expected: dict[int, str]) -> None:
    steps = steps_in(log)
    assert {step for step, _ in steps} == set(range(1, STEPS + 1))
    for step, line in steps:
        assert line == expected[step], f"step {step}"


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_killed_mid_round_and_resumed_from_the_daemon_that_lives_on(
    workers: int, uninterrupted: dict[int, dict[int, str]], short_dir: Path
) -> None:
    folder, log = short_dir / "d", short_dir / "log"
    options = ["--workers", workers, "--daemon", "--pause", 0.03]
    dead = subprocess.run(command(folder, log, *options, "--die-at", 31), check=False, timeout=100)
    assert dead.returncode == -signal.SIGKILL
    daemon = daemon_pid(folder)
    assert alive(daemon)
    subprocess.run(command(folder, log, *options), check=True, timeout=100)
    first, resumed_at = starts_in(log)
    assert first == 0
    assert 12 <= resumed_at <= 31
    assert_same(log, uninterrupted[workers])
    wait_until_gone(daemon)  # linger_seconds is 0 for the second one


def daemon_pid(folder: Path) -> int:
    import json

    return int(json.loads((folder / "daemon.lock").read_text())["pid"])


def alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_instant(seed: int, uninterrupted: dict[int, dict[int, str]], short_dir: Path) -> None:
    """SIGKILL from outside, whatever the trainer is doing: importing, copying, writing."""
    folder, log = short_dir / "d", short_dir / "log"
    log.touch()
    wait_s = random.Random(seed).uniform(0.5, 6.0)
    child = subprocess.Popen(command(folder, log, "--interval", 0.005, "--pause", 0.02))
    time.sleep(wait_s)
    child.send_signal(signal.SIGKILL)
    child.wait()
    print(f"seed {seed}: killed after {wait_s:.2f} s")
    subprocess.run(command(folder, log), check=True, timeout=100)
    assert_same(log, uninterrupted[0])
    assert not list(folder.glob("runs/*/snapshots/*.tmp"))
