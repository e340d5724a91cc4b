r"""One trainer of the demo: a byte-level transformer under torchft's DiLoCo, protected by a sidecar daemon.

    python -m hotswarm.demo.trainer --label a --shard 0/3 --state-dir DIR --lighthouse URL --round-length 60 \
        --snapshot-every 10 --start-file GO --stop-file STOP --log LOG

It is what a user would write, with a journal added: build everything, attach, `start()` (which recovers), train, call
`step()` at the end of each step. The daemon of DIR may die and come back meanwhile.

With `--calibrate N` there is no Manager and no other trainer: the same work under the reference trainer, a durable
snapshot ten steps before the N-th step, then on until it is killed; started again it resumes and replays. That is how
the orchestrator measures the step time and the restart time on this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it by another module's name
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from hotswarm.capture.diloco import EngineAdapter, SeedAdapter
from hotswarm.checkpoint_types import CheckpointConfig
from hotswarm.checkpointer import SpeculativeCheckpointer
from hotswarm.demo.data import Batches, library_text
from hotswarm.demo.journal import Journal, digests, process_age_s
from hotswarm.demo.model import ByteTransformer
from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer, ExactNesterov
from hotswarm.errors import HotswarmError
from hotswarm.torchft import SwarmCheckpointTransport, attach

BATCH = 8
INNER_LR = 1e-3
WARMUP_STEPS = 20
HOST = "localhost"
POLL_S = 0.05
REPLAY_STEPS = 10  # how many steps the orchestrator wants to see replayed


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; the orchestrator is its only caller."""
    parser = argparse.ArgumentParser(prog="hotswarm.demo.trainer")
    parser.add_argument("--label", required=True)
    parser.add_argument("--shard", required=True, help="I/N: this node's shard")
    parser.add_argument("--state-dir", required=True, type=Path)
    parser.add_argument("--log", required=True, type=Path)
    parser.add_argument("--run", default="demo")
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--round-length", type=int, default=60, help="inner steps per round")
    parser.add_argument("--snapshot-every", type=int, default=10, help="inner steps between two snapshots")
    parser.add_argument("--start-file", type=Path, help="wait for it before the first step")
    parser.add_argument("--stop-file", type=Path, help="holds the outer step after which to stop")
    parser.add_argument("--rejoin", default="auto", choices=("auto", "resume", "outer"))
    parser.add_argument("--inner", default="auto", choices=("auto", "adopt", "own", "fresh"))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--calibrate", type=int, default=0, help="measure alone; a snapshot ten steps before this one")
    return parser.parse_args(argv)


def learning_rate(step: int) -> float:
    """Linear warm-up, then down with the square root: never constant, so that a wrong position shows."""
    warm = (step + 1) / WARMUP_STEPS
    return warm if warm < 1.0 else float(((step + 1) / WARMUP_STEPS) ** -0.5)


class Trainer:
    """Everything that trains, and the journal. `engine` is the adapter of either engine."""

    def __init__(self, args: argparse.Namespace, journal: Journal) -> None:
        self.imported_s = process_age_s()
        self.args = args
        self.journal = journal
        shard, shards = (int(part) for part in args.shard.split("/"))
        torch.manual_seed(args.seed)  # the same initial weights everywhere …
        self.model = ByteTransformer()
        torch.manual_seed(args.seed * 1000 + shard + 1)  # … and dropout of one's own
        self.inner = AdamW(self.model.parameters(), lr=INNER_LR, foreach=False)
        self.scheduler = LambdaLR(self.inner, learning_rate)
        context = self.model.config.context
        self.batches = Batches(library_text(shard, shards), batch=BATCH, context=context, seed=args.seed)
        self.checkpointer = SpeculativeCheckpointer(
            self.model,
            self.inner,
            config=CheckpointConfig(
                checkpoint_dir=args.state_dir,
                snapshot_interval=3600.0,  # outer steps and --snapshot-every decide
                rejoin=args.rejoin,
                inner=args.inner,
                recovery_timeout=30.0,
            ),
            node_id=args.label,
            scheduler=self.scheduler,
            dataloader=self.batches,
        )
        self.checkpointer.on_progress = lambda progress: journal.write("progress", progress=progress)
        self.engine: EngineAdapter
        self._stream: Iterator[Tensor] = iter(())

    def recover(self) -> None:
        """Starts the checkpointer, which recovers, and writes down what it restored."""
        self.checkpointer.start()
        report = self.checkpointer.last_report
        if report is not None and report.restored:
            self.journal.write(
                "recovered",
                **self.position(),
                report=asdict(report),
                snapshot_id=report.snapshot_id,
                digests=self.digests(),
            )

    def position(self) -> dict[str, int]:
        """Where training stands, in the journal's words."""
        counters = self.engine.counters()
        return {"outer": counters.outer_step, "inner": counters.inner_step, "training": counters.training_step}

    def digests(self) -> dict[str, str]:
        """The journal's digests of the live state."""
        return digests(self.model, self.inner, self.engine.outer_tree())

    def forward(self) -> Tensor:
        """The loss of the next batch."""
        return self.model.loss(next(self._stream))

    def log_step(self, before: dict[str, int], loss: Tensor) -> None:
        """The step that began at `before`."""
        self.journal.write(
            "step",
            outer=before["outer"],
            inner=before["inner"] + 1,
            training=before["training"] + 1,
            loss=float(loss.item()).hex(),
        )

    def boundary(self, *, synced: bool) -> None:
        """After the scheduler: everything of this step has happened. Takes and notes the snapshots that are due."""
        self.checkpointer.step()
        here = self.position()
        due = here["inner"] > 0 and here["inner"] % self.args.snapshot_every == 0
        if due:
            self.checkpointer.snapshot()
        if due or synced:
            self.journal.write("snapshot", **here, snapshot_id=None, digests=self.digests())

    def ready(self, built_s: float) -> None:
        """Says how long the start took, then waits for the others. `built_s`: age of the process before recovery."""
        recover_s = process_age_s() - built_s
        seconds = {"import": self.imported_s, "build": built_s - self.imported_s, "recover": recover_s}
        self._stream = iter(self.batches)  # after the start of the checkpointer, which follows it
        self.journal.write("ready", **self.position(), seconds=seconds)
        while self.args.start_file is not None and not self.args.start_file.exists():
            time.sleep(POLL_S)

    def should_stop(self) -> bool:
        """Whether the stop file names this outer step or an earlier one."""
        try:
            text = self.args.stop_file.read_text(encoding="ascii").strip() if self.args.stop_file else ""
        except FileNotFoundError:
            return False
        return text.isdigit() and self.position()["outer"] >= int(text)


def loopback_store() -> TCPStore:
    """The Manager's store, on loopback; by itself it listens on every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def train(trainer: Trainer) -> None:
    """torchft: quorum, averaging and commit are its; DiLoCo's hooks run inside `inner.step()`."""
    args, model, inner, journal = trainer.args, trainer.model, trainer.inner, trainer.journal
    store = loopback_store()
    transport = SwarmCheckpointTransport()  # else the Manager starts torchft's own, on every interface
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        checkpoint_transport=transport,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # all are seeded alike
        replica_id=f"{args.label}_{args.shard.split('/')[0]}",
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        hostname=HOST,
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(seconds=600),
    )
    outer = ExactNesterov(model.parameters(), lr=0.7, momentum=0.9)
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=args.round_length)
    adapter = attach(manager, diloco, trainer.checkpointer)
    trainer.engine = adapter
    built_s = process_age_s()
    trainer.recover()
    trainer.ready(built_s)
    with diloco:
        while True:
            before, heals = trainer.position(), (transport.sent, transport.received)
            loss = trainer.forward()
            inner.zero_grad()
            loss.backward()
            began_at = time.monotonic()
            inner.step()
            trainer.scheduler.step()
            trainer.log_step(before, loss)
            synced = before["inner"] + 1 >= args.round_length
            if synced:
                after = trainer.position()
                journal.write(
                    "sync",
                    outer=after["outer"],
                    committed=after["outer"] > before["outer"],
                    participants=manager.num_participants(),
                    seconds=time.monotonic() - began_at,
                    digests=trainer.digests(),
                )
                for direction, count, was in zip(
                    ("send", "receive"), (transport.sent, transport.received), heals, strict=True
                ):
                    if count != was:
                        journal.write("heal", direction=direction)
            trainer.boundary(synced=synced)
            if synced and trainer.should_stop():
                break
    trainer.checkpointer.stop(wait=True)
    manager.shutdown(wait=False)


def calibrate(trainer: Trainer) -> None:
    """The same work without torchft: one endless round of the reference trainer. Ends when it is killed."""
    args = trainer.args
    diloco = DiLoCoTrainer(trainer.model, DiLoCoConfig(inner_steps=10**9), trainer.inner, scheduler=trainer.scheduler)
    trainer.engine = SeedAdapter(diloco, trainer.model)
    trainer.checkpointer.set_engine(trainer.engine)
    built_s = process_age_s()
    trainer.recover()
    trainer.ready(built_s)
    while True:
        before = trainer.position()
        loss = trainer.forward()
        diloco.inner_step(loss)
        trainer.log_step(before, loss)
        trainer.checkpointer.step()
        if trainer.position()["training"] == args.calibrate - REPLAY_STEPS:
            taken = trainer.checkpointer.force_snapshot()
            if taken is None:
                raise HotswarmError(f"calibration could not snapshot: {trainer.checkpointer.last_error}")
            trainer.journal.write(
                "snapshot", **trainer.position(), snapshot_id=taken.snapshot_id, digests=trainer.digests()
            )
            trainer.journal.write("calibrated", **trainer.position())


def main(argv: list[str] | None = None) -> int:
    """Runs one trainer; 0 when it was told to stop, 1 when it failed, which the journal then says too."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    args = arguments(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    journal = Journal(args.log)
    journal.write("start", pid=os.getpid())
    try:
        trainer = Trainer(args, journal)
        (calibrate if args.calibrate else train)(trainer)
    except Exception as error:
        journal.write("end", reason=f"{type(error).__name__}: {error}")
        raise
    journal.write("end", reason="told to stop")
    journal.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # torchft's threads do not end by themselves
