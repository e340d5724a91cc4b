"""A daemon and its one trainer, as real processes: kills on either side, linger, a second trainer, a second daemon."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from daemons import LITTLE_TRAINER, client_of, run_cli, start_daemon
from little_trainer import INNER_STEPS, LittleState, LittleTrainer, check_one_step

from hotswarm.backend_daemon import DaemonBackend
from hotswarm.config import NodeConfig
from hotswarm.errors import ControlError, LockedError, NoSnapshot, StoreError
from hotswarm.store.arena import SlotState
from hotswarm.store.files import FileStore
from hotswarm.store.slotsource import SlotSource
from hotswarm.swarm.control import ControlClient
from hotswarm.swarm.spawn import spawn

# (seed, kills): ten of the daemon and ten of the trainer each time, many more in the slow suite
KILLS = [(1, 10), pytest.param(2, 40, marks=pytest.mark.slow)]


def steps(state_dir: Path) -> list[int]:
    return [info.training_step for info in FileStore(state_dir).snapshots()]


def logged(log: Path, word: str) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.partition(" ")[2] or "-" for line in lines if line.split(" ")[0] == word]


def check_store(state_dir: Path) -> None:
    """Everything visible is complete and of one step; the newest loads."""
    store = FileStore(state_dir)
    for info in store.snapshots():
        with store.open(info.snapshot_id) as source:
            source.verify()
            check_one_step(source)
        assert info.complete


def settled(state_dir: Path) -> bool:
    """Whether the daemon has no trainer and nothing left to persist."""
    status = client_of(state_dir).status()
    return status["trainer"] is None and set(status["persist"]["slots"]) <= {"FREE", "HELD"}


def test_a_capture_becomes_durable_and_can_be_read_through_descriptors(processes, short_dir):
    start_daemon(processes, short_dir / "state")
    trainer = LittleTrainer(short_dir / "state", LittleState())
    trainer.attach()
    seq = trainer.capture(7)
    info = trainer.session.flush(seq, 20.0)
    assert (info.training_step, info.outer_step, info.inner_step, info.seq) == (7, 1, 3, seq)
    source = client_of(short_dir / "state").open_snapshot(info.snapshot_id)
    assert source.manifest.label == "little"
    source.verify()
    assert check_one_step(source) == 7
    source.close()
    held = client_of(short_dir / "state").open_snapshot(info.snapshot_id, from_arena=True)
    assert isinstance(held, SlotSource)
    held.verify()
    assert check_one_step(held) == 7
    trainer.session.flush(trainer.capture(8), 20.0)
    trainer.session.flush(trainer.capture(9), 20.0)
    with pytest.raises(StoreError, match="no longer in the arena"):
        held.verify()
    held.close()
    with pytest.raises(NoSnapshot, match="holds no snapshot"):
        client_of(short_dir / "state").open_snapshot("0" * 32)
    trainer.session.close()


def test_a_restarted_trainer_reads_what_the_daemon_still_has_in_memory(processes, short_dir, wait_until):
    state_dir, log = short_dir / "state", short_dir / "log"
    start_daemon(processes, state_dir)
    child = processes.start([*LITTLE_TRAINER, state_dir, log, "hold", "1"])
    wait_until(lambda: logged(log, "durable"), 20, "the snapshot")
    (info,) = client_of(state_dir).snapshots()
    with client_of(state_dir).open_snapshot(info.snapshot_id, from_arena=True) as beside:
        assert not isinstance(beside, SlotSource), "that trainer may capture again"
    child.kill()
    child.wait()
    wait_until(lambda: settled(state_dir), 10, "the end of the trainer")
    backend = DaemonBackend(client_of(state_dir), lambda: None, label="again")
    with backend.open(info.snapshot_id) as source:
        assert isinstance(source, SlotSource)
        source.verify()
        assert check_one_step(source) == 1
    backend.close()


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_a_trainer_killed_right_after_ready_loses_nothing(processes, short_dir, wait_until, kills):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir, "--max-hot-snapshots", "100")
    for number in range(1, kills + 1):
        child = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "die", str(1)])
        assert child.wait(30) == -signal.SIGKILL, processes.log_of(child)
        wait_until(lambda number=number: len(steps(state_dir)) == number, 10, f"snapshot {number} of a killed trainer")
    check_store(state_dir)


def test_a_trainer_killed_while_writing_leaves_nothing_torn(processes, short_dir, wait_until):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir)
    child = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "torn", "1"])
    assert child.wait(30) == -signal.SIGKILL, processes.log_of(child)
    wait_until(lambda: client_of(state_dir).status()["trainer"] is None, 5, "the death of the trainer")
    assert "WRITING" not in client_of(state_dir).status()["persist"]["slots"]
    assert steps(state_dir) == [1]
    check_store(state_dir)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "kills"), KILLS)
def test_a_trainer_killed_at_random_points_loses_nothing_that_was_ready(processes, short_dir, wait_until, seed, kills):
    print(f"seed {seed}")
    chance = random.Random(seed)
    state_dir, log = short_dir / "state", short_dir / "log"
    start_daemon(processes, state_dir, "--max-hot-snapshots", "3")
    for _ in range(kills):
        seen = len(logged(log, "committed"))
        trainer = processes.start([*LITTLE_TRAINER, state_dir, log, "loop"])
        wait_until(lambda seen=seen: len(logged(log, "committed")) > seen, 20, "a capture")
        time.sleep(chance.uniform(0.0, 0.05))
        trainer.kill()
        trainer.wait()
        last = int(logged(log, "committed")[-1])
        wait_until(lambda last=last: steps(state_dir)[-1:] >= [last], 10, f"capture {last} of a killed trainer")
        wait_until(lambda: settled(state_dir), 10, "the daemon to come to rest")
        check_store(state_dir)
    assert len(steps(state_dir)) == 3


def test_a_restarted_trainer_attaches_at_once_and_gets_warm_memory(processes, short_dir):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir)
    first = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "hold", "1"])
    while not logged(short_dir / "log", "durable"):
        time.sleep(0.01)
    first.kill()
    first.wait()
    second = LittleTrainer(state_dir, LittleState())
    second.attach()  # without waiting for the daemon to notice the death
    assert second.session.reused
    assert second.session.next_seq == 2
    second.session.close()


def test_a_second_trainer_is_told_busy_and_by_whom(processes, short_dir):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir)
    first = LittleTrainer(state_dir, LittleState())
    first.attach()
    with pytest.raises(ControlError, match=rf"busy: .*process id {os.getpid()} \(little\).*unprotected"):
        LittleTrainer(state_dir, LittleState()).attach()
    child = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "hold"])
    assert child.wait(30) == 0
    assert "unprotected" in logged(short_dir / "log", "busy")[0]
    assert first.session.alive
    first.session.flush(first.capture(3), 20.0)
    first.session.close()


def test_captures_of_a_disconnected_trainer_are_persisted(processes, short_dir, wait_until):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir)
    child = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "leave", "2"])
    assert child.wait(30) == 0
    wait_until(lambda: steps(state_dir) == [1, 2], 10, "both snapshots")
    wait_until(lambda: client_of(state_dir).status()["trainer"] is None, 5, "the trainer to be forgotten")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "kills"), KILLS)
def test_a_daemon_killed_at_random_points_leaves_only_complete_snapshots(processes, short_dir, wait_until, seed, kills):
    print(f"seed {seed}")
    chance = random.Random(seed)
    state_dir, log = short_dir / "state", short_dir / "log"
    flags = ("--max-hot-snapshots", "3")
    daemon = start_daemon(processes, state_dir, *flags)
    trainer = processes.start([*LITTLE_TRAINER, state_dir, log, "loop"])
    for round_number in range(kills):
        seen = len(logged(log, "committed"))
        wait_until(lambda seen=seen: len(logged(log, "committed")) > seen, 20, "a capture")
        time.sleep(chance.uniform(0.0, 0.08))
        daemon.kill()
        daemon.wait()
        check_store(state_dir)
        assert trainer.poll() is None, processes.log_of(trainer)
        daemon = start_daemon(processes, state_dir, *flags)
        attached = round_number + 2
        wait_until(lambda attached=attached: len(logged(log, "attached")) >= attached, 20, "attaching again")
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(20) == 0
    last = int(logged(log, "committed")[-1])
    wait_until(lambda: steps(state_dir)[-1] == last, 10, f"the last capture, {last}")
    check_store(state_dir)
    assert int(logged(log, "fds")[0]) < 15, "descriptors leak with each attachment"
    run = state_dir / "runs" / "default"
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(20) == 0
    kept = steps(state_dir)
    assert 3 <= len(kept) <= 4, kept  # the fourth, where there is one, holds the outer section of the round before
    if len(kept) == 4:
        assert kept[0] // INNER_STEPS == kept[1] // INNER_STEPS - 1, kept
    packs = sum(path.stat().st_size for path in (run / "packs").iterdir())
    assert packs <= len(kept) * 2 * (1 << 20) + (1 << 16), "packs that no manifest refers to are left"
    assert not [path for path in (run / "snapshots").iterdir() if path.suffix != ".manifest"]


def test_sigterm_persists_what_is_ready_and_exits_0(processes, short_dir):
    state_dir = short_dir / "state"
    daemon = start_daemon(processes, state_dir)
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    trainer.capture(5)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(20) == 0, processes.log_of(daemon)
    assert steps(state_dir) == [5]
    assert not trainer.session.alive
    assert ControlClient.find(state_dir) is None
    assert trainer.arena.slots[0].state is SlotState.HELD
    trainer.session.close()


def test_a_capture_that_is_half_written_when_the_daemon_stops_can_be_finished(processes, short_dir):
    state_dir = short_dir / "state"
    daemon = start_daemon(processes, state_dir)
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    slot = trainer.arena.writable()
    trainer.state.begin(slot, trainer.seq, 9)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(20) == 0
    trainer.state.commit(slot, trainer.seq, 9)
    start_daemon(processes, state_dir)
    trainer.attach()
    assert trainer.session.flush(1, 20.0).training_step == 9
    trainer.session.close()


def test_ctrl_c_stops_cleanly_and_exits_130(processes, short_dir):
    daemon = start_daemon(processes, short_dir / "state")
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait(20) == 130


def test_the_live_counters_reach_the_status(processes, short_dir):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir)
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    assert client_of(state_dir).status()["clock"] is None
    trainer.arena.write_live(3, 17, 77, 2.5, 20)
    clock = client_of(state_dir).status()["clock"]
    assert (clock["outer_step"], clock["inner_step"], clock["training_step"]) == (3, 17, 77)
    assert (clock["steps_per_s"], clock["round_length"]) == (2.5, 20)
    trainer.session.close()


def test_a_disk_that_refuses_costs_a_capture_and_nothing_else(processes, short_dir, wait_until):
    state_dir = short_dir / "state"
    daemon = start_daemon(processes, state_dir)
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    trainer.session.flush(trainer.capture(1), 20.0)
    no_limit = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (100_000, no_limit[1]))  # writes fail with EFBIG from here on
    with pytest.raises(StoreError, match="File too large"):
        trainer.session.flush(trainer.capture(2), 20.0)
    status = client_of(state_dir).status()
    assert status["health"]["state"] == "yellow"
    assert "File too large" in status["health"]["reasons"][0]
    assert steps(state_dir) == [1]
    check_store(state_dir)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, no_limit)
    trainer.session.flush(trainer.capture(3), 20.0)
    assert client_of(state_dir).status()["health"] == {"state": "green", "reasons": []}
    assert steps(state_dir) == [1, 3]
    trainer.session.close()


def test_what_the_disk_refused_is_tried_again_when_the_trainer_is_dead(processes, short_dir, wait_until):
    state_dir, log = short_dir / "state", short_dir / "log"
    daemon = start_daemon(processes, state_dir)
    child = processes.start([*LITTLE_TRAINER, state_dir, log, "unstored", "1"])
    wait_until(lambda: logged(log, "attached"), 20, "the attachment")
    no_limit = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (100_000, no_limit[1]))
    log.with_suffix(".go").touch()
    wait_until(lambda: logged(log, "refused"), 20, "the refusal")
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, no_limit)
    assert steps(state_dir) == []
    child.kill()
    child.wait()
    wait_until(lambda: steps(state_dir) == [1], 10, "the snapshot of the dead trainer")
    check_store(state_dir)


def test_forked_children_hold_none_of_our_descriptors(processes, short_dir, wait_until):
    state_dir, log = short_dir / "state", short_dir / "log"
    start_daemon(processes, state_dir)
    parent = processes.start([*LITTLE_TRAINER, state_dir, log, "fork"])
    wait_until(lambda: logged(log, "child"), 20, "the forked child")
    child = psutil.Process(int(logged(log, "child")[0]))

    def ours() -> list[str]:
        folder = f"/proc/{child.pid}/fd"
        targets = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
        return [target for target in targets if "hotswarm" in target or target.startswith("socket:")]

    wait_until(lambda: not ours(), 10, "the child, which may not have run yet, to close them")
    assert "hotswarm-arena" not in Path(f"/proc/{child.pid}/maps").read_text()
    parent.kill()
    parent.wait()
    wait_until(lambda: client_of(state_dir).status()["trainer"] is None, 5, "the death of the trainer")
    assert child.is_running()
    child.kill()


# ---------------------------------------------------------------- two daemons


def test_a_second_daemon_on_the_same_state_directory_exits_11_and_names_it(processes, short_dir):
    first = start_daemon(processes, short_dir / "state")
    began = time.monotonic()
    second = run_cli("serve", "--state-dir", short_dir / "state", "--listen", "127.0.0.1:0")
    assert second.returncode == 11
    assert time.monotonic() - began < 5
    assert str(short_dir / "state") in second.stderr
    assert str(first.pid) in second.stderr


def test_a_second_daemon_on_the_same_port_exits_11_and_names_it(processes, short_dir):
    start_daemon(processes, short_dir / "one")
    listen = client_of(short_dir / "one").status()["listen"]
    began = time.monotonic()
    second = run_cli("serve", "--state-dir", short_dir / "two", "--listen", listen)
    assert second.returncode == 11, second.stderr
    assert time.monotonic() - began < 5
    assert listen.rpartition(":")[2] in second.stderr
    assert len(second.stderr.strip().splitlines()[-1]) < 300


def test_a_taken_http_port_exits_11_and_names_it(short_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        second = run_cli("serve", "--state-dir", short_dir / "s", "--listen", "127.0.0.1:0", "--http", address)
    assert second.returncode == 11
    assert address in second.stderr


# ---------------------------------------------------------------- spawned daemons


def config(state_dir: Path, linger_s: float = 0.0) -> NodeConfig:
    return NodeConfig(state_dir=state_dir, listen="127.0.0.1:0", linger_seconds=linger_s)


def end(pid: int) -> None:
    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        return


def test_a_spawned_daemon_ends_after_its_trainer_with_everything_stored(processes, short_dir, wait_until):
    state_dir = short_dir / "state"
    client = spawn(config(state_dir))
    pid = client.status()["pid"]
    try:
        assert os.getsid(pid) != os.getsid(0)
        assert psutil.Process(pid).ppid() != os.getpid(), "a trainer that never waits would keep a zombie"
        child = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "die", "2"])
        assert child.wait(30) == -signal.SIGKILL, processes.log_of(child)
        wait_until(lambda: not psutil.pid_exists(pid), 10, "the end of the daemon")
        assert steps(state_dir) == [1, 2]
    finally:
        end(pid)


def test_a_spawned_daemon_lingers_for_the_next_trainer(processes, short_dir, wait_until):
    state_dir = short_dir / "state"
    pid = spawn(config(state_dir, linger_s=1.0)).status()["pid"]
    try:
        for number in (1, 2):
            child = processes.start([*LITTLE_TRAINER, state_dir, short_dir / "log", "die", "1"])
            assert child.wait(30) == -signal.SIGKILL, processes.log_of(child)
            wait_until(lambda number=number: len(steps(state_dir)) == number, 10, "the snapshot")
        assert psutil.pid_exists(pid)
        wait_until(lambda: not psutil.pid_exists(pid), 10, "the end of the daemon")
    finally:
        end(pid)


def test_a_spawned_daemon_waits_for_the_first_attachment_of_its_owner_and_not_after_its_death(
    processes, short_dir, wait_until
):
    state_dir = short_dir / "state"
    code = (
        "from hotswarm.config import NodeConfig\nfrom hotswarm.swarm.spawn import spawn\nimport time\n"
        f"client = spawn(NodeConfig(state_dir={str(state_dir)!r}, listen='127.0.0.1:0', linger_seconds=0))\n"
        "print(client.status()['pid'], flush=True)\ntime.sleep(600)\n"
    )
    owner = processes.start([sys.executable, "-c", code])
    wait_until(lambda: processes.log_of(owner).strip(), 30, "the start")
    pid = int(processes.log_of(owner))
    try:
        time.sleep(1.0)
        assert psutil.pid_exists(pid)
        owner.kill()
        owner.wait()
        wait_until(lambda: not psutil.pid_exists(pid), 10, "the end of the daemon")
    finally:
        end(pid)


def test_spawning_twice_gives_one_daemon(short_dir):
    state_dir = short_dir / "state"
    pid = spawn(config(state_dir)).status()["pid"]
    try:
        assert spawn(config(state_dir)).status()["pid"] == pid
    finally:
        end(pid)


def test_spawning_waits_for_a_daemon_that_is_just_ending(short_dir):
    state_dir = short_dir / "state"
    first = spawn(config(state_dir))
    pids = [first.status()["pid"]]
    try:
        first.stop()
        second = spawn(config(state_dir))
        pids.append(second.status()["pid"])
        assert pids[0] != pids[1]
        assert second.status()["ready"]
    finally:
        for pid in pids:
            end(pid)


def test_spawning_where_it_cannot_work_says_why(short_dir):
    taken = FileStore(short_dir / "state").open_for_writing()
    try:
        with pytest.raises(LockedError, match=str(os.getpid())):
            spawn(config(short_dir / "state"))
    finally:
        taken.close()


# ---------------------------------------------------------------- what an idle daemon is


def test_the_daemon_is_small_and_never_imports_torch(processes, short_dir):
    state_dir = short_dir / "state"
    daemon = start_daemon(processes, state_dir)
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    trainer.session.flush(trainer.capture(1), 20.0)
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "/torch/" not in maps
    trainer.session.close()
    resident = psutil.Process(daemon.pid).memory_full_info()
    mib = (resident.rss - resident.shared) / 2**20
    print(f"resident without shared {mib:.0f} MiB, with {resident.rss / 2**20:.0f} MiB")
    assert resident.rss / 2**20 < 100


def test_importing_the_daemon_imports_no_torch():
    code = "import hotswarm.swarm.node, hotswarm.swarm.side, hotswarm.cli.main, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_client_that_trainers_use_needs_no_server_and_no_event_loop():
    code = (
        "import hotswarm.swarm.control, hotswarm.swarm.opened, hotswarm.swarm.spawn, sys\n"
        "print([name for name in ('torch', 'grpc', 'aiohttp', 'uvloop', 'asyncio', 'kademlia') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
