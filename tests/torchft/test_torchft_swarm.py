"""Replicas of torchft's DiLoCo that are restored by their neighbours' daemons, and torchft heals served by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torchft_cluster import Cluster

H = 10


@pytest.fixture
def cluster(short_dir: Path, processes: Any, lighthouse: Callable[..., str]) -> Iterator[Callable[..., Cluster]]:
    """A lighthouse, and for each replica a sidecar daemon that knows the first one."""

    with ExitStack() as ending:

        def make(replicas: int, flags: tuple[str, ...] = (), **options: Any) -> Cluster:
            made = Cluster(short_dir, lighthouse(**options), processes.start)
            ending.callback(made.end)
            key = made.key()
            first = made.address_of(0, made.daemon(0, key=key, flags=flags))
            others = {index: made.daemon(index, key=key, peers=[first], flags=flags) for index in range(1, replicas)}
            for index, child in others.items():
                made.address_of(index, child)
            return made

        yield make


def agree(*events: dict[str, Any]) -> None:
    for name in ("params", "outer", "momentum"):
        assert len({event["digests"][name] for event in events}) == 1, name


def test_a_joiner_with_other_weights_holds_the_donors_state_bit_for_bit_after_the_next_sync(
    cluster: Callable[..., Cluster],
) -> None:
    swarm = cluster(3, min_replicas=2, join_timeout_ms=20_000)
    go, hold = swarm.root / "go", swarm.root / "hold"
    common = {"sync_every": H, "rounds": 5, "start_file": str(go), "step_s": 0.1}
    donors = [swarm.replica(index, hold_file=str(hold), **common) for index in (0, 1)]
    for donor in donors:
        donor.wait_for("ready")
    go.touch()
    for donor in donors:
        donor.wait_for("sync", outer=2)
    hold.touch()
    joiner = swarm.replica(2, seed=99, freeze=True, rejoin="outer", inner="adopt", **{**common, "step_s": 0.0})
    recovered = joiner.wait_for("recovered")
    assert recovered["action"] == "outer"
    assert recovered["outer"] == 2
    known = donors[0].wait_for("sync", outer=2)["digests"]
    for name in ("outer", "momentum"):
        assert recovered["digests"][name] == known[name]
    assert recovered["digests"]["params"] == known["outer"]
    moments = {(d["digests"]["exp_avg"], d["digests"]["exp_avg_sq"]) for donor in donors for d in donor.events("sync")}
    assert (recovered["digests"]["exp_avg"], recovered["digests"]["exp_avg_sq"]) in moments
    hold.unlink()
    joined = joiner.wait_for("sync", outer=3)
    agree(joined, *(donor.wait_for("sync", outer=3) for donor in donors))
    assert joined["participants"] == 3
    for each in (*donors, joiner):
        each.finish(60)
        assert all(sync["committed"] and sync["heals"] == [0, 0] for sync in each.events("sync"))
    agree(*(each.events("sync")[-1] for each in (*donors, joiner)))


def test_a_replica_that_did_not_recover_is_healed_by_the_swarm_and_nothing_of_its_peer_is_loaded(
    cluster: Callable[..., Cluster],
) -> None:
    swarm = cluster(3, min_replicas=2, join_timeout_ms=20_000)
    go = swarm.root / "go"
    common = {"sync_every": H, "rounds": 10_000, "start_file": str(go)}
    donors = [swarm.replica(index, step_s=0.1, **common) for index in (0, 1)]
    for donor in donors:
        donor.wait_for("ready")
    go.touch()
    for donor in donors:
        donor.wait_for("sync", outer=1)
    late = swarm.replica(2, seed=99, recover=False, step_s=0.0, **common)
    healed = late.wait_for("sync")
    assert healed["committed"]
    assert healed["heals"] == [0, 1]
    for outer in (healed["outer"], healed["outer"] + 2):
        agree(*(each.wait_for("sync", outer=outer) for each in (*donors, late)))
    for each in (*donors, late):
        assert each.events("user_load") == []
        assert all(sync["committed"] for sync in each.events("sync"))


@pytest.mark.slow
def test_replicas_that_were_initialised_differently_start_from_the_one_that_torchft_chose(
    cluster: Callable[..., Cluster],
) -> None:
    swarm = cluster(2, min_replicas=2, join_timeout_ms=20_000)
    go = swarm.root / "go"
    both = [
        swarm.replica(index, seed=index, init_sync=True, sync_every=4, rounds=2, start_file=str(go)) for index in (0, 1)
    ]
    for each in both:
        each.wait_for("ready")
    go.touch()
    for each in both:
        each.finish(90)
    syncs = [each.events("sync") for each in both]
    for one, other in zip(*syncs, strict=True):
        agree(one, other)
    assert sorted(sync[0]["heals"] for sync in syncs) == [[0, 1], [1, 0]]


@pytest.mark.slow
def test_a_heal_that_would_take_longer_than_the_managers_timeout_is_given_up_with_nothing_changed(
    cluster: Callable[..., Cluster],
) -> None:
    swarm = cluster(2, flags=("--max-upload-bytes-per-s", "1000"), min_replicas=1, join_timeout_ms=500)
    common = {"sync_every": H, "rounds": 10_000}
    healthy = swarm.replica(0, step_s=0.1, hidden=4096, **common)
    healthy.wait_for("sync", outer=1)
    late = swarm.replica(1, seed=99, recover=False, step_s=0.0, timeout_s=8, hidden=4096, **common)
    assert late.child.wait(90) == 3, late.tail()
    (left,) = late.events("left")
    assert "in time" in left["reason"], left
    assert left["changed"] is False
    reached = healthy.events("sync")[-1]["outer"]
    healthy.wait_for("sync", outer=reached + 2)
    assert sum(not sync["committed"] for sync in healthy.events("sync")) <= 1
