"""DiLoCo workers of one process on real daemons of their own, for tests of leaving and joining."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotswarm import CheckpointConfig, DiLoCoConfig, DiLoCoTrainer, SpeculativeCheckpointer
from hotswarm.swarm.control import ControlClient

ROUND = 10


class Ring:
    """An all-reduce among the threads of this process: a barrier on both sides of a mean in a fixed order."""

    def __init__(self, members: int) -> None:
        self.barrier = threading.Barrier(members)
        self.given: dict[int, Mapping[str, Tensor]] = {}

    def average(self, rank: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.given[rank] = own
        self.barrier.wait(60)
        ranks = sorted(self.given)
        mean = {name: torch.stack([self.given[r][name] for r in ranks]).mean(0) for name in own}
        self.barrier.wait(60)
        return mean


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.b = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.norm(torch.relu(self.a(x))))
        return out


@dataclass(eq=False)
class Worker:
    """One worker: model, trainer, checkpointer. `rank` gives it data of its own."""

    rank: int
    folder: Path
    seed: int = 0
    round_length: int = ROUND
    settings: dict[str, Any] = field(default_factory=dict)
    node: Any = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.net = Net()
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner, lambda step: 1.0 / (1.0 + 0.01 * step))
        self.trainer = DiLoCoTrainer(
            self.net, DiLoCoConfig(inner_steps=self.round_length), self.inner, scheduler=self.scheduler
        )
        config = CheckpointConfig(
            **{
                "checkpoint_dir": self.folder,
                "snapshot_interval": 3600.0,
                "linger_seconds": 0,
                "recovery_timeout": 20.0,
                "handle_sigterm": False,
                **self.settings,
            }
        )
        self.checkpointer = SpeculativeCheckpointer(
            self.net, self.inner, self.trainer, config, f"worker-{self.rank}", node=self.node
        )

    def join(self, ring: Ring | None) -> None:
        self.trainer.set_average(None if ring is None else lambda own: ring.average(self.rank, own))

    def steps(self, count: int) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.rank * 7919 + self.trainer.stats.total_inner_steps)
            x = torch.rand(8, 16, generator=generator)
            self.trainer.inner_step(self.net(x).square().mean())
            self.checkpointer.step()

    @property
    def outer(self) -> dict[str, Tensor]:
        """Copies of live parameters, outer copy and momentum, by name."""
        found = {f"live.{name}": param.detach().clone() for name, param in self.net.named_parameters()}
        found |= {f"outer.{name}": value.clone() for name, value in self.trainer.initial_weights.items()}
        velocity = self.trainer.outer_optimizer.velocity
        return found | {f"momentum.{name}": value.clone() for name, value in velocity.items()}


def together(*workers: Worker, count: int) -> None:
    """`count` steps of each, in parallel: they meet at their outer steps."""
    threads = [threading.Thread(target=worker.steps, args=(count,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a worker hangs"


def start_node(processes: Any, state_dir: Path, *flags: str) -> Any:
    """`swarm-node serve` on a free port, ended by the `processes` fixture; returns once it answers."""
    words = [sys.executable, "-P", "-m", "hotswarm.cli.main", "serve", "--state-dir", state_dir]
    child = processes.start([*words, "--listen", "127.0.0.1:0", *flags])
    deadline = time.monotonic() + 40
    while (client := ControlClient.find(state_dir)) is None or client.status()["pid"] != child.pid:
        assert child.poll() is None, processes.log_of(child)
        assert time.monotonic() < deadline, processes.log_of(child)
        time.sleep(0.02)
    return child


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names that differ."""
    return [
        name for name in sorted(a.keys() | b.keys()) if name not in a or name not in b or not a[name].equal(b[name])
    ]
