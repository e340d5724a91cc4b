"""One snapshot holds one instant, whatever the trainer does meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hotswarm import CheckpointConfig, CheckpointMetadata, SpeculativeCheckpointer

SNAPSHOTS = 50


class Constant:
    """A model and an AdamW state in which, at step k, every number is k."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 300), nn.BatchNorm1d(300))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.net(torch.ones(4, 64)).sum().backward()
        self.optimizer.step()
        self.k = 0

    @torch.no_grad()
    def fill(self) -> None:
        self.k += 1
        tensors = [*self.net.parameters(), *self.net.buffers()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        for tensor in tensors:
            tensor.fill_(self.k)


def values_in(checkpoint: dict[str, object]) -> set[float]:
    tensors = list(checkpoint["model_state_dict"].values())
    for state in checkpoint["optimizer_state_dict"]["state"].values():
        tensors += list(state.values())
    return {value for tensor in tensors for value in (tensor.min().item(), tensor.max().item())}


class Watcher(threading.Thread):
    """Looks at snapshots as they come, until it has seen SNAPSHOTS of them; forces each one when told to."""

    def __init__(self, checkpointer: SpeculativeCheckpointer, *, force: bool) -> None:
        super().__init__()
        self.checkpointer = checkpointer
        self.force = force
        self.seen: dict[str, tuple[int, int, set[float]]] = {}
        self.errors: list[str | None] = []
        self.done = threading.Event()

    def run(self) -> None:
        deadline = time.monotonic() + 100
        while len(self.seen) < SNAPSHOTS and not self.errors and time.monotonic() < deadline:
            if self.force:
                metadata = self.checkpointer.force_snapshot()
                if metadata is None:
                    self.errors.append(self.checkpointer.last_error)
                else:
                    self.look(metadata)
            else:
                for metadata in self.checkpointer.hot_snapshots:
                    if metadata.snapshot_id not in self.seen:
                        self.look(metadata)
        self.done.set()

    def look(self, metadata: CheckpointMetadata) -> None:
        checkpoint = self.checkpointer.load_checkpoint(metadata.file_path)
        if checkpoint is not None:  # else it was retired meanwhile
            self.seen[metadata.snapshot_id] = (
                metadata.training_step,
                checkpoint["training_step"],
                values_in(checkpoint),
            )


@pytest.mark.parametrize("how", ["forced from another thread", "due"])
@pytest.mark.parametrize("counted", ["by step()", "by the caller"])
def test_every_snapshot_of_a_hot_loop_holds_one_step(how: str, counted: str, short_dir: Path) -> None:
    state = Constant()
    forced = how.startswith("forced")
    config = CheckpointConfig(
        checkpoint_dir=short_dir,
        announce_to_dht=False,
        serve_to_peers=False,
        snapshot_interval=3600.0 if forced else 0.01,
        max_hot_snapshots=4,
    )
    checkpointer = SpeculativeCheckpointer(state.net, state.optimizer, config=config)
    checkpointer.start()
    watcher = Watcher(checkpointer, force=forced)
    watcher.start()
    while not watcher.done.is_set():
        state.fill()
        if counted == "by the caller":
            checkpointer.update_training_state(state.k)
        checkpointer.step()
    watcher.join()
    checkpointer.stop()
    assert watcher.errors == []
    assert len(watcher.seen) >= SNAPSHOTS
    assert len({step for step, _, _ in watcher.seen.values()}) > SNAPSHOTS // 2  # the loop did move on
    for listed, loaded, values in watcher.seen.values():
        assert listed == loaded
        assert values == {float(listed)}


def test_a_restore_waits_for_the_training_threads_boundary(short_dir: Path) -> None:
    state = Constant()
    config = CheckpointConfig(checkpoint_dir=short_dir, announce_to_dht=False, serve_to_peers=False)
    checkpointer = SpeculativeCheckpointer(state.net, state.optimizer, config=config)
    state.fill()
    checkpointer.update_training_state(1)
    checkpoint = checkpointer.load_checkpoint(checkpointer.force_snapshot().file_path)
    checkpointer.start()
    for _ in range(3):
        state.fill()
        checkpointer.step()
    answers: list[bool] = []
    seen: list[set[float]] = []
    other = threading.Thread(target=lambda: answers.append(checkpointer.restore_from_checkpoint(checkpoint)))
    other.start()
    time.sleep(0.3)
    assert answers == []  # this thread trains, and has come to no boundary
    while not answers:
        state.fill()
        checkpointer.step()
        seen.append({parameter.max().item() for parameter in state.net.parameters()})
        time.sleep(0.01)
    other.join()
    checkpointer.stop()
    assert answers == [True], checkpointer.last_error
    assert all(len(values) == 1 for values in seen)
    assert {1.0} in seen


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_peak_memory_of_a_snapshot_is_one_copy_of_the_state(short_dir: Path) -> None:
    """The older class held the state three times; here it is the arena's slots and nothing else."""
    import subprocess
    import sys

    code = """
import sys, torch, os
from hotswarm import SpeculativeCheckpointer, CheckpointConfig
def rss(kind):
    with open("/proc/self/status") as f:
        return next(int(l.split()[1]) for l in f if l.startswith(kind + ":")) // 1024
net = torch.nn.Linear(4096, 4096, bias=False)   # 64 MiB
opt = torch.optim.SGD(net.parameters(), lr=0.1)
c = SpeculativeCheckpointer(net, opt, config=CheckpointConfig(
    checkpoint_dir=sys.argv[1], announce_to_dht=False, serve_to_peers=False))
before = rss("RssAnon")
for _ in range(4):
    assert c.force_snapshot(), c.last_error
print(rss("RssAnon") - before)
"""
    out = subprocess.run([sys.executable, "-c", code, str(short_dir)], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 0.2 * 64 + 8, out.stdout  # the arena itself is shared memory, counted apart
