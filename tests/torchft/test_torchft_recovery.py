"""Replicas of torchft's DiLoCo, really killed: exact replay, the same sync, and healing that unpickles nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torchft_cluster import ALONE, Cluster

H = 6


@pytest.fixture
def cluster(short_dir: Path, processes: Any, lighthouse: Callable[..., str]) -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as ending:

        def make(**options: Any) -> Cluster:
            made = Cluster(short_dir, lighthouse(**options), processes.start)
            ending.callback(made.end)
            return made

        yield make


def agree(*events: dict[str, Any]) -> None:
    """All of these syncs left the same live weights, outer copy and momentum behind."""
    for name in ("params", "outer", "momentum"):
        assert len({event["digests"][name] for event in events}) == 1, name


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_replica_replays_its_losses_bit_for_bit_and_joins_the_same_sync(
    cluster: Callable[..., Cluster], fresh: bool
) -> None:
    swarm = cluster(min_replicas=2, join_timeout_ms=40_000)
    go, hold = swarm.root / "go", swarm.root / "hold"
    common = {
        "sync_every": 12,
        "rounds": 3,
        "start_file": str(go),
        "config": ALONE,
        "snapshot_every": 3,
        "fresh": fresh,
    }
    survivor = swarm.replica(0, **common)
    victim = swarm.replica(1, hold_file=str(hold), **common)
    for each in (survivor, victim):
        each.wait_for("ready")
    go.touch()
    victim.wait_for("step", outer=1, inner=8)
    victim.kill()
    before = victim.losses()
    again = swarm.replica(1, **common)
    recovered = again.wait_for("recovered")
    assert recovered["action"] in ("own", "resume")
    assert (recovered["outer"], recovered["inner"]) == (1, 6)
    taken = next(event for event in victim.events("snapshot") if (event["outer"], event["inner"]) == (1, 6))
    assert recovered["digests"] == taken["digests"]
    again.wait_for("step", outer=1, inner=7, timeout_s=20)
    survivor.finish(90)
    again.finish(30)
    after = again.losses()
    replayed = sorted(set(before) & set(after))
    assert replayed[0] == (1, 7)
    assert len(replayed) >= 2
    assert {step: before[step] for step in replayed} == {step: after[step] for step in replayed}
    rates = [{(e["outer"], e["inner"]): e["lr"] for e in life.events("step")} for life in (victim, again)]
    assert all(rates[0][step] == rates[1][step] for step in replayed)
    syncs = survivor.events("sync")
    assert [(sync["outer"], sync["committed"], sync["participants"]) for sync in syncs] == [
        (1, True, 2),
        (2, True, 2),
        (3, True, 2),
    ]
    for sync, own in zip(syncs[1:], again.events("sync"), strict=True):
        agree(sync, own)
        assert own["heals"] == [0, 0]
        assert sync["heals"] == [0, 0]


def test_a_replica_that_is_behind_and_finds_no_swarm_leaves_and_unpickles_nothing(
    cluster: Callable[..., Cluster],
) -> None:
    swarm = cluster(min_replicas=1, join_timeout_ms=500)
    exploded = swarm.root / "exploded"
    settings = {"sync_every": H, "config": ALONE, "rounds": 10_000}
    healthy = swarm.replica(0, plain=True, bomb=str(exploded), step_s=0.1, **settings)
    healthy.wait_for("sync", outer=1)
    late = swarm.replica(1, recover=False, timeout_s=5, step_s=0.0, **settings)
    assert late.child.wait(80) == 3, late.tail()
    (left,) = late.events("left")
    assert "behind its swarm" in left["reason"]
    assert late.events("user_load", "sync") == []  # nothing of a peer was loaded, and it asked for one quorum only
    assert not exploded.exists()
    reached = healthy.events("sync")[-1]["outer"]
    healthy.wait_for("sync", outer=reached + 3)
    discarded = [sync for sync in healthy.events("sync") if not sync["committed"]]
    assert len(discarded) <= 1


@pytest.mark.slow
def test_the_bomb_of_the_test_above_is_live_under_torchfts_own_transport(cluster: Callable[..., Cluster]) -> None:
    swarm = cluster(min_replicas=1, join_timeout_ms=500)
    exploded = swarm.root / "exploded"
    settings = {"sync_every": H, "config": ALONE, "rounds": 10_000, "plain": True, "fresh": True}
    healthy = swarm.replica(0, bomb=str(exploded), step_s=0.1, **settings)
    healthy.wait_for("sync", outer=1)
    late = swarm.replica(1, step_s=0.0, **settings)
    late.wait_for("sync")
    assert exploded.is_dir()
