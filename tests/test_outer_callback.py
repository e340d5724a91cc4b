"""Snapshots that are asked for in a DiLoCo trainer's outer-step callback, where the outer copy is still the old one.

What is stored is the state after the refresh: its digests are those of a run in which nobody asked.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from hotswarm import CheckpointConfig, SpeculativeCheckpointer
from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer
from support.foreign_trainers import ForeignTrainer

H = 3
TRAINERS = {
    "reference": lambda net: DiLoCoTrainer(net, DiLoCoConfig(inner_steps=H, inner_lr=0.01)),
    "foreign": lambda net: ForeignTrainer(net, refresh="unseen"),
    "foreign, position set back late": lambda net: ForeignTrainer(net, refresh="replaced", reset_late=True),
    "foreign without a lock": lambda net: ForeignTrainer(net, lock=False, refresh="copied"),
}


class Worker:
    def __init__(self, kind: str, folder: Path, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.trainer = TRAINERS[kind](self.net)
        config = CheckpointConfig(
            checkpoint_dir=folder,
            announce_to_dht=False,
            serve_to_peers=False,
            auto_fetch_on_start=False,
            snapshot_on_outer_step=False,
            snapshot_interval=3600.0,
        )
        self.checkpointer = SpeculativeCheckpointer(self.net, self.trainer.inner_optimizer, self.trainer, config)

    def train(self, steps: int, *, step: bool = True) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.trainer.stats.total_inner_steps)
            x = torch.randn(4, 6, generator=generator)
            self.trainer.inner_step(nn.functional.mse_loss(self.net(x), x[:, :2]))
            if step:
                self.checkpointer.step()

    def digests(self) -> dict[str, object]:
        """Of all that there is, by position, outer copy and momentum included."""
        outer = self.trainer.outer_optimizer.state_dict()["velocity"]
        tensors = {
            **{f"live.{name}": param.detach() for name, param in self.net.named_parameters()},
            **{f"outer.{name}": tensor for name, tensor in self.trainer.initial_weights.items()},
            **{f"momentum.{name}": tensor for name, tensor in outer.items()},
        }
        stats = self.trainer.stats
        counted = (stats.outer_step_count, stats.inner_step_count, stats.total_inner_steps)
        return {"counted": counted, **{name: tensor.numpy().tobytes() for name, tensor in tensors.items()}}


@pytest.fixture
def uninterrupted(short_dir: Path) -> Callable[[str], tuple[object, dict[str, object], dict[str, object]]]:
    """Outer digest and state after one round, and the state after two, of a run in which nobody asks."""

    def run(kind: str) -> tuple[object, dict[str, object], dict[str, object]]:
        twin = Worker(kind, short_dir / "twin")
        twin.train(H, step=False)
        metadata = twin.checkpointer.force_snapshot()
        assert metadata is not None, twin.checkpointer.last_error
        assert (metadata.outer_step, metadata.inner_step) == (1, 0)
        at_round_end = twin.digests()
        twin.train(H, step=False)
        return metadata.outer_digest, at_round_end, twin.digests()

    return run


@pytest.fixture
def kept_handler() -> Iterator[list[int]]:
    """The user's own SIGTERM handler, which only notes that it was called."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


WAYS: dict[str, Callable[[SpeculativeCheckpointer], object]] = {
    "force_snapshot": lambda checkpointer: checkpointer.force_snapshot(),
    "snapshot": lambda checkpointer: checkpointer.snapshot(),
    "SIGTERM": lambda checkpointer: signal.raise_signal(signal.SIGTERM),
}


@pytest.mark.parametrize("kind", list(TRAINERS))
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("set_when", ["before start", "after start"])
def test_what_is_asked_for_in_the_callback_is_taken_after_the_refresh(
    kind: str,
    way: str,
    set_when: str,
    short_dir: Path,
    uninterrupted: Callable[[str], tuple[object, dict[str, object], dict[str, object]]],
    kept_handler: list[int],
) -> None:
    digest, at_round_end, after_two = uninterrupted(kind)
    worker = Worker(kind, short_dir / "w")
    checkpointer, in_callback = worker.checkpointer, []

    def ask() -> None:
        got = WAYS[way](checkpointer)
        assert got is None or not got.is_copied
        in_callback.append(len(checkpointer.hot_snapshots))

    if set_when == "before start":
        worker.trainer.set_outer_step_callback(ask)
    checkpointer.start()
    if set_when == "after start":
        worker.trainer.set_outer_step_callback(ask)
    try:
        worker.train(H)
        assert in_callback == [0]
        assert worker.digests() == at_round_end
        if way == "force_snapshot":
            assert "step" in checkpointer.last_error
        checkpointer._taker.settle()
        (taken,) = checkpointer.hot_snapshots
    finally:
        checkpointer.stop(wait=True)
    assert (taken.outer_step, taken.inner_step, taken.outer_digest) == (1, 0, digest)
    assert kept_handler == ([signal.SIGTERM] if way == "SIGTERM" else [])
    again = Worker(kind, short_dir / "again", seed=9)
    assert again.checkpointer.restore_from_checkpoint(checkpointer.load_checkpoint(taken.file_path))
    assert again.digests() == at_round_end
    again.train(H)
    assert again.digests() == after_two


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_step_in_the_callback_is_no_boundary_and_what_is_due_is_taken_at_the_next(
    kind: str,
    short_dir: Path,
    uninterrupted: Callable[[str], tuple[object, dict[str, object], dict[str, object]]],
) -> None:
    digest, _, _ = uninterrupted(kind)
    worker = Worker(kind, short_dir / "w")
    checkpointer, listed = worker.checkpointer, []
    checkpointer.config.snapshot_on_outer_step = True
    handles = []

    def ask() -> None:
        handles.append(checkpointer.snapshot())
        checkpointer.step()
        listed.append((handles[-1].is_copied, len(checkpointer.hot_snapshots)))

    worker.trainer.set_outer_step_callback(ask)
    with checkpointer:
        worker.train(H, step=False)  # step() is called in the callback only
        assert listed == [(False, 0)]
        worker.net(torch.zeros(1, 6))  # the next step's forward is the boundary
        assert handles[0].result(20).outer_digest == digest
        assert {m.outer_digest for m in checkpointer.hot_snapshots} == {digest}


@pytest.mark.parametrize("kind", [kind for kind in TRAINERS if "without" not in kind])
def test_before_start_a_snapshot_in_the_callback_is_refused_and_one_after_it_is_right(
    kind: str,
    short_dir: Path,
    uninterrupted: Callable[[str], tuple[object, dict[str, object], dict[str, object]]],
) -> None:
    digest, _, _ = uninterrupted(kind)
    worker, got = Worker(kind, short_dir / "w"), []
    worker.trainer.set_outer_step_callback(lambda: got.append(worker.checkpointer.force_snapshot()))
    worker.train(H, step=False)
    assert got == [None]
    assert "step" in worker.checkpointer.last_error
    metadata = worker.checkpointer.force_snapshot()
    assert metadata is not None, worker.checkpointer.last_error
    assert metadata.outer_digest == digest
