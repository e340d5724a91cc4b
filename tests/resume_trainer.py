"""A real training run for tests that kill it: dropout, shuffled data from worker processes, LambdaLR, DiLoCo rounds.

    python resume_trainer.py --dir STATE --log FILE --steps N [--daemon] [--workers K] [--interval S] [--die-at STEP]

Each finished step is one line in the log, written before the next one begins: `step loss-in-hex lr-in-hex`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hotswarm import CheckpointConfig, DiLoCoConfig, DiLoCoTrainer, SpeculativeCheckpointer

ROUND = 12


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """96 fixed points; each read adds noise from the worker's own generator."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        base = torch.linspace(-1, 1, 16) * (1 + index % 7)
        return base + 0.1 * torch.randn(16), torch.tensor([float(index % 3)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--daemon", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--interval", type=float, default=0.05)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps; real ones are not this short")
    parser.add_argument("--explicit", type=int, default=1, help="call checkpointer.step()")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0 / (1.0 + step))
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=ROUND), inner)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=options.workers)
    checkpointer = SpeculativeCheckpointer(
        model,
        inner,
        trainer,
        CheckpointConfig(
            checkpoint_dir=options.dir,
            snapshot_interval=options.interval,
            announce_to_dht=options.daemon,
            serve_to_peers=options.daemon,
            linger_seconds=0 if options.die_at < 0 else 30,
        ),
        scheduler=scheduler,
        dataloader=loader,
    )
    checkpointer.start()
    log = options.log.open("a", buffering=1)
    log.write(f"# start at {trainer.stats.total_inner_steps} outer {trainer.stats.outer_step_count}\n")
    while trainer.stats.total_inner_steps < options.steps:
        for x, y in loader:
            if trainer.stats.total_inner_steps >= options.steps:
                break
            lr = inner.param_groups[0]["lr"]
            loss = (model(x) - y).square().mean()
            trainer.inner_step(loss)
            scheduler.step()
            step = trainer.stats.total_inner_steps
            log.write(f"{step} {loss.item().hex()} {lr.hex()}\n")
            if options.explicit:
                checkpointer.step()
            time.sleep(options.pause)
            if step == options.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.stop()
    log.write("# end\n")


if __name__ == "__main__":
    main()
