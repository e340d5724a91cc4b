"""`swarm-node recover` and `peers` against real neighbours."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))
from daemons import SWARM_NODE, client_of, run_cli, start_daemon
from little_trainer import INNER_STEPS, LittleState, LittleTrainer, check_one_step

from hotswarm.store.files import FileStore


def key_file(folder: Path, name: str) -> Path:
    assert run_cli("keygen", "--swarm-key", folder / name).returncode == 0
    return folder / name


@pytest.fixture
def swarm(processes, short_dir):
    """Two nodes at outer step 3 under one key, each with its trainer attached; (key, address, address)."""
    key = key_file(short_dir, "swarm.key")
    trainers, addresses = [], []
    for name in ("a", "b"):
        peers = ["--peers", ",".join(addresses)] if addresses else []
        start_daemon(processes, short_dir / name, "--swarm-key", str(key), "--name", name, *peers)
        addresses.append(client_of(short_dir / name).status()["listen"])
        trainer = LittleTrainer(short_dir / name, LittleState())
        trainer.attach()
        trainer.session.flush(trainer.capture(3 * INNER_STEPS), 30.0)
        trainer.arena.write_live(3, 0, 3 * INNER_STEPS, 1.0, INNER_STEPS)
        trainers.append(trainer)
    yield key, *addresses
    for trainer in trainers:
        trainer.session.close()


def test_a_node_without_anything_recovers_from_its_neighbours(swarm, short_dir):
    key, first, second = swarm
    at = ("--state-dir", short_dir / "c", "--swarm-key", key, "--peers", f"{first},{second}")
    peers = json.loads(run_cli("peers", "--json", *at).stdout)["peers"]
    assert {peer["name"] for peer in peers} <= {"a", "b"}
    assert peers
    dry = run_cli("recover", "--dry-run", *at)
    assert dry.returncode == 0, dry.stderr
    assert "would" in dry.stdout
    assert FileStore(short_dir / "c").snapshots() == []
    done = run_cli("recover", "--json", *at)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["action"] in {"outer", "clone"}
    assert outcome["report"]["outer_step"] == 3
    assert outcome["report"]["agreement"] == "agreed"
    (kept,) = FileStore(short_dir / "c").snapshots()
    assert (kept.snapshot_id, kept.kind, kept.own) == (outcome["snapshot_id"], "recovery", False)
    with FileStore(short_dir / "c").open(kept.snapshot_id) as source:
        source.verify()
        if kept.complete:
            assert check_one_step(source) == 3 * INNER_STEPS
    text = run_cli("snapshots", "--state-dir", short_dir / "c").stdout
    assert "from " in text


def test_recovering_from_one_named_neighbour(swarm, short_dir):
    key, first, second = swarm
    done = run_cli("recover", "--from", second, "--state-dir", short_dir / "c", "--swarm-key", key, "--peers", first)
    assert done.returncode == 0, done.stderr
    donor = client_of(short_dir / "b").status()["node"][:12]
    assert donor in done.stdout
    assert client_of(short_dir / "a").status()["node"][:12] not in done.stdout


def test_with_nobody_there_is_nothing_to_recover(short_dir):
    done = run_cli("recover", "--state-dir", short_dir / "c", "--timeout", "2")
    assert done.returncode == 10, done.stderr
    assert done.stderr.splitlines()[-1].startswith("swarm-node: ")
    unasked = run_cli("peers", "--wait", "0.2", "--state-dir", short_dir / "c")
    assert (unasked.returncode, "no daemon runs" in unasked.stderr) == (1, True), unasked.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        asked = run_cli("peers", "--wait", "0.2", "--state-dir", short_dir / "c", "--peers", nobody)
    assert nobody in asked.stdout


def test_a_named_peer_that_refuses_is_no_success_because_of_an_own_snapshot(swarm, processes, short_dir):
    _, first, _ = swarm
    mine = short_dir / "mine"
    start_daemon(processes, mine)
    trainer = LittleTrainer(mine, LittleState())
    trainer.attach()
    trainer.session.flush(trainer.capture(1), 30.0)
    trainer.session.close()
    assert run_cli("recover", "--state-dir", mine).returncode == 0
    done = run_cli("recover", "--from", first, "--state-dir", mine)  # the key was forgotten
    assert done.returncode == 12, done.stdout + done.stderr


def test_the_wrong_key_exits_12(swarm, short_dir):
    _, first, second = swarm
    other = key_file(short_dir, "other.key")
    at = ("--state-dir", short_dir / "c", "--swarm-key", other, "--peers", f"{first},{second}")
    done = run_cli("recover", "--timeout", "10", *at)
    assert done.returncode == 12, done.stderr
    assert "key" in done.stderr.splitlines()[-1]
    done = run_cli("peers", *at)
    assert done.returncode == 12, done.stdout


def test_a_fetch_shows_how_far_how_fast_and_how_long(processes, short_dir):
    state = LittleState(1 << 21)
    start_daemon(processes, short_dir / "a", "--max-upload-bytes-per-s", "1000000")
    trainer = LittleTrainer(short_dir / "a", state)
    trainer.attach()
    trainer.session.flush(trainer.capture(3 * INNER_STEPS), 30.0)
    address = client_of(short_dir / "a").status()["listen"]
    terminal, other_end = pty.openpty()
    try:
        child = processes.start(
            [*SWARM_NODE, "recover", "--mode", "clone", "--state-dir", short_dir / "c", "--peers", address],
            stdout=subprocess.DEVNULL,
            stderr=other_end,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(other_end)
        seen = bytearray()
        while child.poll() is None:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    seen += os.read(terminal, 65536)
                except OSError:  # the other end is closed
                    break
        assert child.wait(30) == 0, seen.decode(errors="replace")
    finally:
        os.close(terminal)
    text = seen.decode(errors="replace")
    assert "fetch" in text
    assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? [KM]iB", text), text
    assert re.search(r"\d+(\.\d+)? [kM]B/s", text), text
    assert re.search(r"0:00:0\d", text), text
    trainer.session.close()
