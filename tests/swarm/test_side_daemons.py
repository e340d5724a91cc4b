"""The swarm side inside real daemons: `swarm-node serve`, `recover`, `peers`, with a key, found by one address."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from daemons import client_of, last_json, run_cli, start_daemon
from swarm_kit import RUN, Made, fill, open_store

from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.swarmkey import SwarmKey, write_key_file


def prepared(root: Path, made: Made) -> Path:
    state_dir = root / made.node
    with open_store(state_dir) as store:
        fill(store, NodeIdentity.load_or_create(state_dir), made)
    return state_dir


def test_a_lost_machine_is_rebuilt_by_daemons_that_it_finds_through_one_of_them(
    processes: Any, short_dir: Path, wait_until: Any
) -> None:
    key = short_dir / "swarm.key"
    write_key_file(key, SwarmKey.generate())
    common = ("--run", RUN, "--swarm-key", str(key))
    dirs = [prepared(short_dir, Made(name)) for name in "ab"]
    start_daemon(processes, dirs[0], *common)
    first = client_of(dirs[0]).status()["listen"]
    start_daemon(processes, dirs[1], *common, "--peers", first)
    second = client_of(dirs[1]).status()["listen"]
    start_daemon(processes, short_dir / "j", *common, "--peers", second)

    planned = run_cli("recover", "--dry-run", "--json", "--state-dir", short_dir / "j")
    assert planned.returncode == 0, planned.stderr
    done = run_cli("recover", "--json", "--state-dir", short_dir / "j")
    assert done.returncode == 0, done.stderr
    report = last_json(done.stdout)
    text = done.stdout
    assert "agreed" in text
    assert all(client_of(d).status()["node"] in text for d in dirs), "both gave something, one was found by the other"
    assert report
    snapshots = client_of(short_dir / "j").snapshots()
    assert [info.kind if hasattr(info, "kind") else info["kind"] for info in snapshots] == ["recovery"]

    peers = last_json(run_cli("peers", "--json", "--state-dir", short_dir / "j").stdout)
    assert first in str(peers)
    assert second in str(peers)
    recoveries = client_of(short_dir / "j").get("/api/v1/recoveries")
    assert "fetched_chunks" in str(recoveries)


def test_a_daemon_looks_for_its_peers_at_once_and_unasked(processes: Any, short_dir: Path, wait_until: Any) -> None:
    state_dir = prepared(short_dir, Made("a"))
    start_daemon(processes, state_dir, "--run", RUN)
    a = client_of(state_dir).status()
    start_daemon(processes, short_dir / "j", "--run", RUN, "--peers", a["listen"])
    wait_until(lambda: [peer["node"] for peer in client_of(short_dir / "j").peers()] == [a["node"]], 4, "the peer")


def test_a_daemon_with_another_key_is_told_so_by_everyone(processes: Any, short_dir: Path) -> None:
    for name in ("mine", "theirs"):
        write_key_file(short_dir / name, SwarmKey.generate())
    state_dir = prepared(short_dir, Made("a"))
    start_daemon(processes, state_dir, "--run", RUN, "--swarm-key", str(short_dir / "theirs"))
    listen = client_of(state_dir).status()["listen"]
    start_daemon(processes, short_dir / "j", "--run", RUN, "--swarm-key", str(short_dir / "mine"), "--peers", listen)
    refused = run_cli("recover", "--state-dir", short_dir / "j")
    assert refused.returncode == 12, refused.stderr
    assert "swarm key" in refused.stderr
    deadline = time.monotonic() + 5
    while run_cli("peers", "--state-dir", short_dir / "j").returncode != 12:
        assert time.monotonic() < deadline
