"""A trainer that trains until a signal ends it.

    python sigterm_trainer.py --dir STATE --log FILE [--daemon] [--handler none|flag|exit] [--workers K]

The log says `ready`, `step N` after each step, and `handler` from the user's own handler.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotswarm import CheckpointConfig, SpeculativeCheckpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--daemon", action="store_true")
    parser.add_argument("--handler", default="none")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--linger", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.01)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    log = options.log.open("a", buffering=1)
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        log.write("handler\n")
        asked.append(number)
        if options.handler == "exit":
            sys.exit(7)

    if options.handler != "none":
        signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(1)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    loader = DataLoader(TensorDataset(torch.rand(4096, 8)), batch_size=2, num_workers=options.workers)
    checkpointer = SpeculativeCheckpointer(
        net,
        optimizer,
        config=CheckpointConfig(
            checkpoint_dir=options.dir,
            snapshot_interval=3600.0,
            announce_to_dht=options.daemon,
            serve_to_peers=options.daemon,
            linger_seconds=options.linger,
        ),
        dataloader=loader,
    )
    checkpointer.start()
    checkpointer.force_snapshot()
    log.write(f"ready {checkpointer.last_error}\n")
    while not asked:
        for (x,) in loader:
            net(x).sum().backward()
            optimizer.step()
            checkpointer.step()
            log.write(f"step {checkpointer.training_step}\n")
            time.sleep(options.pause)
            if asked:
                break
    checkpointer.stop()
    log.write("end\n")


if __name__ == "__main__":
    main()
