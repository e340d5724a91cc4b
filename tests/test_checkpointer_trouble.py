"""What goes wrong beside training must not go wrong in it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from hotswarm import CheckpointConfig, SpeculativeCheckpointer
from hotswarm.errors import ControlError
from hotswarm.store.lock import read_lock
from hotswarm.swarm.control import ControlClient
from rejoining import Worker


@pytest.fixture(autouse=True)
def no_daemon_is_left(short_dir: Path) -> Iterator[None]:
    yield
    for lock in short_dir.rglob("daemon.lock"):
        pid = json.loads(lock.read_text()).get("pid", 0)
        if read_lock(lock.parent)[1] and pid != os.getpid() and psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def plain(folder: Path, **settings: Any) -> tuple[SpeculativeCheckpointer, Callable[[], None]]:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = CheckpointConfig(
        **{
            "checkpoint_dir": folder,
            "announce_to_dht": False,
            "serve_to_peers": False,
            "linger_seconds": 0,
            "snapshot_interval": 3600.0,
            **settings,
        }
    )
    checkpointer = SpeculativeCheckpointer(net, optimizer, config=config)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step()

    return checkpointer, step


def test_a_daemon_that_dies_before_the_first_step_is_replaced(short_dir: Path, wait_until: Callable[..., None]) -> None:
    checkpointer, step = plain(short_dir, serve_to_peers=True, snapshot_interval=0.3)
    checkpointer.start()
    first = read_lock(short_dir)[0]["pid"]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while checkpointer.snapshots_saved < 2:
        step()
        time.sleep(0.02)
        assert time.monotonic() < deadline, checkpointer.last_error
    assert read_lock(short_dir)[0]["pid"] != first
    wait_until(lambda: ControlClient.find(short_dir).status()["clock"] is not None, 10, "the live clock")
    checkpointer.stop()


def test_the_last_state_is_not_lost_with_a_daemon_that_is_gone_at_stop(short_dir: Path) -> None:
    checkpointer, step = plain(short_dir, serve_to_peers=True)
    checkpointer.start()
    step()
    checkpointer._keeper.stop(5)  # nobody has noticed yet
    os.kill(read_lock(short_dir)[0]["pid"], signal.SIGKILL)
    time.sleep(0.3)
    for _ in range(4):
        step()
    checkpointer.stop()
    assert checkpointer.load_latest_checkpoint()["training_step"] == 5
    reader, _ = plain(short_dir)
    assert reader.hot_snapshots[-1].training_step == 5


class SlowTable:
    """A p2p manager whose network is slow."""

    def __init__(self) -> None:
        self.dht = self
        self.stored = 0

    def store(self, key: str, value: str) -> None:
        self.stored += 1
        time.sleep(0.8)

    def get_peers(self) -> list[str]:
        return []


def test_a_snapshot_that_retention_took_before_anyone_looked_counts_once(short_dir: Path) -> None:
    checkpointer, step = plain(short_dir, max_hot_snapshots=2)
    checkpointer.p2p = manager = SlowTable()
    checkpointer._p2p._manager = manager
    checkpointer.start()
    checkpointer.config.announce_to_dht = True
    handles = []
    for _ in range(12):
        step()
        handles.append(checkpointer.snapshot())
        time.sleep(0.05)
    deadline = time.monotonic() + 20
    while not all(handle.done for handle in handles) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    results = [handle.result(1) for handle in handles]
    assert checkpointer.snapshots_saved == 12
    assert [metadata.training_step for metadata in results] == list(range(1, 13))
    assert len({metadata.snapshot_id for metadata in results}) == 12
    assert manager.stored >= 1
    checkpointer.stop()
    assert checkpointer.snapshots_saved == 13


def test_a_forked_child_is_ended_by_terminate_and_takes_no_snapshot(short_dir: Path) -> None:
    checkpointer, step = plain(short_dir)
    checkpointer.start()
    step()
    saved = checkpointer.snapshots_saved
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.3)
    began = time.monotonic()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    assert time.monotonic() - began < 2.0
    assert checkpointer.snapshots_saved == saved
    assert signal.getsignal(signal.SIGTERM) == checkpointer._termination._handle
    checkpointer.stop()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_snapshot_asked_for_in_a_signal_handler_waits_for_the_boundary(short_dir: Path) -> None:
    checkpointer, step = plain(short_dir, max_hot_snapshots=20)
    checkpointer.start()
    step()
    answers: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: answers.append(checkpointer.snapshot()))
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert not answers[0].is_copied
        step()
        assert answers[0].result(10).training_step == 2
        signal.signal(signal.SIGUSR1, lambda *_: answers.append(checkpointer.force_snapshot()))
        signal.raise_signal(signal.SIGUSR1)
        assert answers[1] is None
        assert "signal handler" in checkpointer.last_error
    finally:
        signal.signal(signal.SIGUSR1, before)
    checkpointer._capturer.in_optimizer_step = True
    assert checkpointer.force_snapshot() is None
    checkpointer._capturer.in_optimizer_step = False
    assert checkpointer.force_snapshot() is not None
    checkpointer.stop()


def test_a_daemon_that_was_there_before_start_and_is_gone_leaves_the_local_store(short_dir: Path) -> None:
    first, step = plain(short_dir, serve_to_peers=True, linger_seconds=30)
    first.start()
    step()
    idle, _ = plain(short_dir)
    assert len(idle.hot_snapshots) == 0
    assert idle._reach.node_id
    os.kill(read_lock(short_dir)[0]["pid"], signal.SIGKILL)
    first._keeper.stop(5)
    time.sleep(0.3)
    assert idle.force_snapshot() is not None, idle.last_error
    assert idle.load_latest_checkpoint() is not None
    first.stop()


def test_a_slow_network_of_the_p2p_manager_holds_neither_start_nor_stop(short_dir: Path) -> None:
    checkpointer, step = plain(short_dir, serve_to_peers=True)

    class Slow(SlowTable):
        def get_peers(self) -> list[str]:
            return [f"peer{n}" for n in range(60)]

        def lookup_value(self, key: str) -> None:
            time.sleep(1.0)

        def store(self, key: str, value: str) -> None:
            time.sleep(4.0)

    checkpointer._p2p._manager = checkpointer.p2p = Slow()
    checkpointer.config.announce_to_dht = True
    began = time.monotonic()
    checkpointer.start()
    assert time.monotonic() - began < 10.0
    for _ in range(2):
        step()
        assert checkpointer.force_snapshot() is not None, checkpointer.last_error
        time.sleep(0.6)
        began = time.monotonic()
        checkpointer.stop()
        assert time.monotonic() - began < 1.5
        assert [t.name for t in threading.enumerate()].count("hotswarm-keeper") == 0
        checkpointer.start()
        assert [t.name for t in threading.enumerate()].count("hotswarm-keeper") == 1
    checkpointer.stop()


def test_a_damaged_own_snapshot_does_not_take_the_fetched_one_with_it(short_dir: Path) -> None:
    donor = Worker(0, short_dir / "donor", settings={"announce_to_dht": False, "serve_to_peers": False})
    donor.steps(23)
    donor.checkpointer.force_snapshot()
    home = short_dir / "joiner"
    alone = {"announce_to_dht": False, "serve_to_peers": False}
    own = Worker(1, home, seed=3, settings=alone)
    own.steps(4)
    own.checkpointer.force_snapshot()
    fetched(donor, home, ("buffer", "exp_avg", "exp_avg_sq", "step"))
    pack = min(home.glob("runs/*/packs/inner-*"), key=lambda p: p.stat().st_mtime_ns)
    with pack.open("r+b") as file:
        file.write(b"\xff\xff")
    joiner = Worker(1, home, seed=8, settings=alone)
    report = joiner.checkpointer.recover()
    assert (report.action, report.outer_step, report.restored) == ("outer", 2, True), report.summary()
    assert [m.outer_step for m in joiner.checkpointer.hot_snapshots] == []


class Gone:
    """A backend's clock that cannot be asked: its daemon died after the fetch."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def clock(self) -> None:
        raise ControlError("no answer from the daemon")


@pytest.mark.parametrize("trouble", ["clock", "plateau", "one cycle"])
def test_nothing_is_raised_once_the_state_is_in(trouble: str, short_dir: Path) -> None:
    donor = Worker(0, short_dir / "donor", settings={"announce_to_dht": False, "serve_to_peers": False})
    donor.steps(13)
    donor.checkpointer.force_snapshot()
    fetched(donor, short_dir / "joiner", ("buffer", "exp_avg", "exp_avg_sq", "step"))
    joiner = Worker(1, short_dir / "joiner", seed=8, settings={"announce_to_dht": False, "serve_to_peers": False})
    if trouble != "clock":
        scheduler: Any
        if trouble == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(joiner.inner)
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(joiner.inner, 0.1, total_steps=14)
        joiner.trainer.scheduler = None
        donor_like = SpeculativeCheckpointer(
            joiner.net, joiner.inner, joiner.trainer, joiner.checkpointer.config, scheduler=scheduler
        )
        scheduler.last_epoch = 13
        before = scheduler.last_epoch
        donor_like._recoverer.move_scheduler(13, 40)  # neither can be moved there
        assert scheduler.last_epoch >= before
        return
    backend = Gone(joiner.checkpointer._reach.for_reading())
    prepared = joiner.checkpointer._recoverer.prepare(backend)
    report = joiner.checkpointer._finish(prepared)
    assert (report.action, report.restored) == ("outer", True), report.summary()
    assert joiner.checkpointer.recoveries_performed == 1
    assert joiner.trainer.stats.outer_step_count == 1
    assert joiner.trainer.stats.inner_step_count == 0
    assert joiner.trainer.stats.total_inner_steps == 10


def fetched(donor: Worker, home: Path, roles: tuple[str, ...] = ()) -> None:
    """Put the donor's newest snapshot into another store as one that came from a peer: all of outer, and of inner the
    chunks of these roles.
    """
    from hotswarm.store.files import FileStore

    source = FileStore(donor.folder).open(donor.checkpointer.hot_snapshots[-1].snapshot_id)
    with FileStore(home) as store:
        parts = {}
        for name in ("outer", "inner"):
            entry = source.manifest.sections[name]
            parts[name] = part = store.partial(entry)
            wanted = range(len(entry.chunk_digests)) if name == "outer" else entry.layout.chunks_of_roles(roles)
            for index in wanted:
                part.put(index, bytes(source.chunk(name, index)))
        store.add_fetched(source.stored.signed, parts)
    source.close()


@pytest.mark.parametrize("moments", [True, False])
def test_what_was_fetched_before_is_found_without_a_daemon(moments: bool, short_dir: Path) -> None:
    donor = Worker(0, short_dir / "donor", settings={"announce_to_dht": False, "serve_to_peers": False})
    donor.steps(23)
    donor.checkpointer.force_snapshot()
    fetched(donor, short_dir / "joiner", ("buffer", *(("exp_avg", "exp_avg_sq", "step") if moments else ())))
    joiner = Worker(1, short_dir / "joiner", seed=8, settings={"announce_to_dht": False, "serve_to_peers": False})
    checkpoint = joiner.checkpointer.load_latest_checkpoint()
    assert checkpoint["checkpoint_type"] == "recovery"
    joiner.checkpointer.start()
    report = joiner.checkpointer.last_report
    assert (report.action, report.outer_step, report.restored) == ("outer", 2, True), report.summary()
    assert (len(joiner.inner.state) > 0) is moments
    assert report.inner_source == ("adopt" if moments else "fresh")
    assert torch.equal(joiner.net.a.weight, donor.trainer.initial_weights["a.weight"])
    joiner.checkpointer.stop()


def test_a_run_directory_that_cannot_be_written_does_not_end_training(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/proc/nowhere")
    checkpointer, step = plain(short_dir, serve_to_peers=True)
    checkpointer.start()
    assert checkpointer.running
    assert checkpointer.last_error
    step()
    assert checkpointer.force_snapshot() is not None, checkpointer.last_error
    checkpointer.stop()


def test_an_idle_checkpointer_keeps_nobody_out(short_dir: Path) -> None:
    idle, _ = plain(short_dir)
    assert idle.force_snapshot() is not None
    assert read_lock(short_dir)[1] is False
    busy, step = plain(short_dir, serve_to_peers=True)
    busy.start()
    assert busy.swarm_node_id, busy.last_error
    step()
    assert busy.force_snapshot() is not None
    assert idle.force_snapshot() is None
    assert "busy" in idle.last_error
    busy.stop()


def test_a_frozen_daemon_does_not_stop_training(short_dir: Path, wait_until: Callable[..., None]) -> None:
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    extra: dict[str, Any] = {"more": torch.zeros(1)}
    config = CheckpointConfig(checkpoint_dir=short_dir, snapshot_interval=0.05, linger_seconds=0)
    checkpointer = SpeculativeCheckpointer(net, optimizer, config=config, extra=extra)
    checkpointer.start()

    def longest_step(seconds: float) -> float:
        longest, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            optimizer.step()
            checkpointer.step()
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.01)
        return longest

    longest_step(1.0)
    wait_until(lambda: checkpointer.snapshots_saved >= 1, 10, "a snapshot")
    daemon = read_lock(short_dir)[0]["pid"]
    os.kill(daemon, signal.SIGSTOP)
    try:
        extra["more"] = torch.zeros(1 << 20)  # the state outgrows its arena, and nobody answers
        assert longest_step(4.0) < 1.0
        began = time.monotonic()
        checkpointer.stop()
        assert time.monotonic() - began < 3.0
    finally:
        os.kill(daemon, signal.SIGCONT)


def test_a_state_that_grows_gets_a_larger_arena_and_goes_on(short_dir: Path) -> None:
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    extra: dict[str, Any] = {"more": torch.zeros(1)}
    config = CheckpointConfig(checkpoint_dir=short_dir, snapshot_interval=3600.0, linger_seconds=0)
    checkpointer = SpeculativeCheckpointer(net, optimizer, config=config, extra=extra)
    checkpointer.start()
    sizes = []
    for power in (10, 16, 20):
        extra["more"] = torch.full((1 << power,), float(power))
        checkpointer.step()
        metadata = checkpointer.force_snapshot()
        assert metadata is not None, checkpointer.last_error
        sizes.append(metadata.original_size)
        assert checkpointer.load_checkpoint(metadata.file_path)["extra"]["more"][-1] == power
    assert sizes[0] + (1 << 21) < sizes[1] + (1 << 22) <= sizes[2] + (1 << 18)
    checkpointer.stop()
    assert len(checkpointer.hot_snapshots) == 4
