"""A worker with other weights joins a swarm of real daemons: the outer state comes over and the round goes on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hotswarm
from hotswarm import NodeConfig, SwarmNode, errors
from hotswarm.swarm.control import ControlClient
from rejoining import ROUND, Ring, Worker, same, start_node, together
from support.children import Processes


def listen_of(folder: Path) -> str:
    client = ControlClient.find(folder)
    assert client is not None
    return str(client.status()["listen"])


class Swarm:
    """Two donors that have trained two rounds and four steps, each with a daemon."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder = folder
        self.processes = processes
        self.donors: list[Worker] = []
        self.joiners = 0
        for rank in (0, 1):
            home = folder / f"n{rank}"
            peers = ("--peers", listen_of(self.donors[0].folder)) if self.donors else ()
            start_node(processes, home, *peers)
            worker = Worker(rank, home)
            worker.checkpointer.start()
            self.donors.append(worker)
        ring = Ring(2)
        for donor in self.donors:
            donor.join(ring)
        together(*self.donors, count=2 * ROUND + 4)
        for donor in self.donors:
            assert donor.checkpointer.force_snapshot() is not None, donor.checkpointer.last_error
        assert same(*[{k: v for k, v in d.outer.items() if not k.startswith("live")} for d in self.donors]) == []

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(listen_of(donor.folder) for donor in self.donors)

    def joiner(self, *, start: bool = True, **settings: Any) -> Worker:
        self.joiners += 1
        home = self.folder / f"joiner{self.joiners}"
        start_node(self.processes, home, "--peers", ",".join(self.peers))
        worker = Worker(7, home, seed=99, settings=settings)
        if start:
            worker.checkpointer.start()
        return worker

    def close(self) -> None:
        for donor in self.donors:
            donor.checkpointer.stop()


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """Donors that stand still; their daemons go with the module's last test."""
    folder = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
    processes = Processes(folder)
    made = Swarm(folder, processes)
    yield made
    made.close()
    processes.end_all()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def moving_swarm(short_dir: Path, processes: Any) -> Iterator[Swarm]:
    """Donors of one test's own, which may train on."""
    made = Swarm(short_dir, processes)
    yield made
    made.close()


def test_a_joiner_takes_the_agreed_outer_state_and_the_next_sync_is_equal_everywhere(moving_swarm: Swarm) -> None:
    swarm = moving_swarm
    donors = swarm.donors
    joiner = swarm.joiner(inner="adopt")
    report = joiner.checkpointer.last_report
    assert (report.action, report.agreement, report.restored) == ("outer", "agreed", True), report.summary()
    assert report.outer_step == 2
    assert set(report.donors) <= {donor.checkpointer.swarm_node_id for donor in donors}
    assert report.bytes > 0
    # both copies of the parameters are the donors' outer copy, and the momentum is theirs
    mine, theirs = joiner.outer, donors[0].outer
    assert (
        same(
            {name: value for name, value in mine.items() if not name.startswith("live")},
            {name: value for name, value in theirs.items() if not name.startswith("live")},
        )
        == []
    )
    assert all(torch.equal(mine[f"live.{name}"], mine[f"outer.{name}"]) for name, _ in joiner.net.named_parameters())
    # moments and their step counts came along, for every parameter
    steps = {float(state["step"]) for state in joiner.inner.state.values()}
    assert len(joiner.inner.state) == len(list(joiner.net.parameters()))
    assert steps == {2.0 * ROUND + 4}
    # the clock is the swarm's live one: ahead of the snapshot, before the sync
    started = report.started_at
    assert started["outer_step"] == 2
    assert 5 <= started["inner_step"] < ROUND
    assert started["training_step"] == 2 * ROUND + started["inner_step"]
    assert joiner.scheduler.last_epoch == started["training_step"]
    assert joiner.inner.param_groups[0]["lr"] == 1e-2 / (1 + 0.01 * started["training_step"])
    assert joiner.checkpointer.verify().ok

    for group in joiner.inner.param_groups:
        group["lr"] = 0.0
    joiner.scheduler.base_lrs = [0.0]
    ring = Ring(3)
    for worker in (*donors, joiner):
        worker.join(ring)
    left = {worker: ROUND - worker.trainer.stats.inner_step_count for worker in (*donors, joiner)}
    threads = [threading.Thread(target=worker.steps, args=(count,)) for worker, count in left.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert joiner.trainer.stats.outer_step_count == 3
    assert same(joiner.outer, donors[0].outer) == []
    assert same(joiner.outer, donors[1].outer) == []
    joiner.checkpointer.stop()


@pytest.mark.parametrize(("inner", "states"), [("fresh", 0), ("own", 0)])
def test_moments_are_the_joiners_choice(inner: str, states: int, swarm: Swarm) -> None:
    joiner = swarm.joiner(inner=inner)
    report = joiner.checkpointer.last_report
    assert report.action == "outer"
    assert report.inner_source in {inner, "fresh"}
    assert len(joiner.inner.state) == states
    assert joiner.scheduler.last_epoch == report.started_at["training_step"]
    joiner.checkpointer.stop()


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(swarm: Swarm) -> None:
    joiner = swarm.joiner(start=False)
    before = joiner.outer
    report = joiner.checkpointer.recover("outer", dry_run=True)
    assert (report.action, report.restored, report.bytes) == ("outer", False, 0)
    assert report.plan
    assert same(before, joiner.outer) == []
    assert joiner.checkpointer.recoveries_performed == 0


def test_another_architecture_is_refused_before_any_tensor_moves(swarm: Swarm) -> None:
    joiner = swarm.joiner(start=False)
    joiner.net.b = torch.nn.Linear(32, 5)
    joiner.inner = torch.optim.AdamW(joiner.net.parameters())
    other = hotswarm.SpeculativeCheckpointer(joiner.net, joiner.inner, config=joiner.checkpointer.config)
    before = {name: tensor.clone() for name, tensor in joiner.net.state_dict().items()}
    with pytest.raises(errors.RecoveryError, match=r"b\.bias: 5 float32 param here, 4 float32 param there") as caught:
        other.recover("outer")
    print(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in joiner.net.state_dict().items())
    assert not list(joiner.folder.glob("runs/*/packs/*"))


def test_the_coroutines_fetch_and_restore(swarm: Swarm) -> None:
    joiner = swarm.joiner(start=False)
    checkpoint = asyncio.run(joiner.checkpointer.fetch_neighbor_snapshot(swarm.peers[0]))
    assert checkpoint is not None, joiner.checkpointer.last_error
    assert checkpoint["checkpoint_type"] == "recovery"
    outer = swarm.donors[0].outer
    for name in dict(joiner.net.named_parameters()):
        assert torch.equal(checkpoint["model_state_dict"][name], outer[f"outer.{name}"])
    by_id = asyncio.run(joiner.checkpointer.fetch_neighbor_snapshot(swarm.donors[1].checkpointer.swarm_node_id))
    assert by_id is not None, joiner.checkpointer.last_error
    rng = torch.get_rng_state()
    assert joiner.checkpointer.restore_from_checkpoint(checkpoint), joiner.checkpointer.last_error
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(joiner.outer["live.a.weight"], outer["outer.a.weight"])
    assert joiner.trainer.stats.outer_step_count == 2
    kinds = {info.kind for info in ControlClient.find(joiner.folder).snapshots()}
    assert kinds == {"recovery"}

    assert asyncio.run(joiner.checkpointer.fetch_neighbor_snapshot("127.0.0.1:9")) is None
    assert "127.0.0.1:9" in joiner.checkpointer.last_error
    assert asyncio.run(joiner.checkpointer.fetch_neighbor_snapshot("nobody")) is None
    assert "nobody" in joiner.checkpointer.last_error


def test_auto_recovery_as_a_coroutine(swarm: Swarm) -> None:
    joiner = swarm.joiner(start=False)
    assert asyncio.run(joiner.checkpointer.try_auto_recovery()) is True, joiner.checkpointer.last_error
    assert joiner.checkpointer.recoveries_performed == 1
    assert (
        same(
            {k: v for k, v in joiner.outer.items() if not k.startswith("live")},
            {k: v for k, v in swarm.donors[0].outer.items() if not k.startswith("live")},
        )
        == []
    )


def test_the_function_fetches_with_a_daemon_of_its_own_and_the_snapshot_outlives_it(
    swarm: Swarm, tmp_path: Path
) -> None:
    config = NodeConfig(state_dir=tmp_path / "visitor", listen="127.0.0.1:0", peers=swarm.peers)
    with hotswarm.fetch_neighbor_snapshot(node=config, timeout=20.0) as snapshot:
        assert ControlClient.find(config.state_dir) is None  # it lived for the call
        assert snapshot.manifest.outer_step == 2
        assert snapshot.metadata.checkpoint_type is hotswarm.CheckpointType.RECOVERY
        assert set(snapshot.sections) == {"outer", "inner"}
        assert snapshot.path.is_file()
        outer = swarm.donors[0].outer
        assert torch.equal(snapshot.state_dict()["model_state_dict"]["a.weight"], outer["outer.a.weight"])
        other = Worker(3, tmp_path / "other", seed=5)
        snapshot.restore_into(other.net, other.inner, other.trainer)
        assert other.trainer.stats.outer_step_count == 2
        assert (
            same(
                {k: v for k, v in other.outer.items() if not k.startswith("live")},
                {k: v for k, v in outer.items() if not k.startswith("live")},
            )
            == []
        )
        wrong = torch.nn.Linear(3, 3)
        with pytest.raises(errors.Incompatible):
            snapshot.restore_into(wrong, torch.optim.AdamW(wrong.parameters()))


def test_the_awaitable_function_uses_a_running_node(swarm: Swarm, tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "visitor", listen="127.0.0.1:0", peers=swarm.peers)
    with SwarmNode(config) as node:
        snapshot = asyncio.run(hotswarm.afetch_neighbor_snapshot(swarm.peers[1], node=node, timeout=20.0))
        assert snapshot.manifest.node == swarm.donors[1].checkpointer.swarm_node_id
        snapshot.close()
        with pytest.raises(errors.ConfigError, match="serves run"):
            hotswarm.fetch_neighbor_snapshot(run="elsewhere", node=node)
    with pytest.raises(errors.ConfigError, match="mode"):
        hotswarm.fetch_neighbor_snapshot(node=config, mode="steal")


def test_a_node_that_is_back_within_its_round_resumes_its_own_snapshot(moving_swarm: Swarm) -> None:
    swarm = moving_swarm
    donor = swarm.donors[1]
    outer, moments = donor.outer, {p: dict(s) for p, s in donor.inner.state.items()}
    donor.checkpointer.stop()
    again = Worker(1, donor.folder, seed=31)
    again.checkpointer.start()
    report = again.checkpointer.last_report
    assert (report.action, report.inner_step) == ("resume", 4), report.summary()
    assert same(again.outer, outer) == []
    assert len(again.inner.state) == len(moments)
    assert again.trainer.stats.inner_step_count == 4
    swarm.donors[1] = again


def test_a_swarm_that_finishes_its_round_meanwhile_is_chased(moving_swarm: Swarm) -> None:
    swarm = moving_swarm
    joiner = swarm.joiner(start=False, inner="adopt")
    moved: list[int] = []

    def progress(event: dict[str, Any]) -> None:
        if event.get("phase") == "fetch" and not moved:  # what to fetch is chosen: the donors end their round now
            moved.append(1)
            together(*swarm.donors, count=ROUND)
            for donor in swarm.donors:
                assert donor.checkpointer.force_snapshot() is not None

    joiner.checkpointer.on_progress = progress
    joiner.checkpointer.start()
    report = joiner.checkpointer.last_report
    assert moved
    assert (report.action, report.outer_step) == ("outer", 3), report.summary()
    assert report.started_at["outer_step"] == joiner.trainer.stats.outer_step_count == 3
    assert joiner.scheduler.last_epoch == joiner.trainer.stats.total_inner_steps == report.started_at["training_step"]
    assert same(not_live(joiner), not_live(swarm.donors[0])) == []
    joiner.checkpointer.stop()


def not_live(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: value for name, value in worker.outer.items() if not name.startswith("live")}


def test_without_an_outer_optimizer_the_one_who_trained_longest_is_cloned(
    short_dir: Path, processes: Any, wait_until: Any
) -> None:
    made = []
    for rank, steps in ((0, 5), (1, 9), (2, 0)):
        home = short_dir / f"n{rank}"
        peers = ("--peers", ",".join(listen_of(worker.checkpoint_dir) for worker, _ in made)) if made else ()
        start_node(processes, home, *peers)
        torch.manual_seed(rank)
        net = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(net.parameters())
        config = hotswarm.CheckpointConfig(checkpoint_dir=home, linger_seconds=0, handle_sigterm=False)
        checkpointer = hotswarm.SpeculativeCheckpointer(net, optimizer, config=config, node_id=f"w{rank}")
        made.append((checkpointer, net))
        if not steps:  # a snapshot is described a moment after it is durable
            found = partial(checkpointer.recover, dry_run=True)
            wait_until(lambda found=found: "9 steps" in found().reason, 20, "both donors' answers")
        checkpointer.start()
        if steps:
            optimizer.zero_grad()
            for _ in range(steps - checkpointer.training_step):
                net(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
                checkpointer.step()
            assert checkpointer.force_snapshot().training_step == steps
    last, net = made[-1]
    report = last.last_report
    assert (report.action, report.agreement, report.training_step) == ("clone", "unconfirmed", 9), report.summary()
    assert torch.equal(net.weight, made[1][1].weight)
    assert last.training_step == 9
    for checkpointer, _ in made:
        checkpointer.stop()
