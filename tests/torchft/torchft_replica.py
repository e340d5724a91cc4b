"""One replica of the torchft tests: `python torchft_replica.py '{json settings}'`, or `run` in a forked process.

A small MLP with dropout, LambdaLR and a shuffled data order; JSON lines on standard output, as it goes:
ready, recovered, step (loss as float.hex), sync (sha256 digests of what a swarm shares), left.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from hotswarm import CheckpointConfig, SpeculativeCheckpointer
from hotswarm.demo.data import Batches
from hotswarm.demo.journal import digests
from hotswarm.diloco import ExactNesterov
from hotswarm.errors import RecoveryError
from hotswarm.torchft import SwarmCheckpointTransport, TorchftAdapter, attach

HOST = "localhost"


@dataclass
class Settings:
    """What a test decides."""

    index: int
    lighthouse: str
    state_dir: str
    sync_every: int = 6
    rounds: int = 4  # stop once the outer step is this far
    seed: int = 0  # of the initial weights
    hidden: int = 32  # width: about 50 bytes of outer parameters a unit
    inner_lr: float = 1e-2
    step_s: float = 0.03
    snapshot_every: int = 0  # inner steps; 0: at outer steps only
    rejoin: str = "auto"
    inner: str = "auto"
    start_file: str = ""
    hold_file: str = ""  # while it exists, no further step
    init_sync: bool = False
    recover: bool = True
    freeze: bool = False  # inner lr 0 up to the first sync: what is synced is what was restored
    timeout_s: float = 20.0
    plain: bool = False  # torchft alone: its own transport, nothing of hotswarm attached
    bomb: str = ""  # the user state holds an object whose unpickling makes this folder
    config: dict[str, Any] = field(default_factory=dict)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"ev": kind, "t": time.time(), **fields}, default=str), flush=True)


def loopback_store() -> TCPStore:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def main(settings: Settings) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    model = nn.Sequential(nn.Linear(8, settings.hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(settings.hidden, 4))
    torch.manual_seed(1000 + settings.index)
    inner = AdamW(model.parameters(), lr=settings.inner_lr)
    scheduler = LambdaLR(inner, lambda step: 1 / (1 + 0.1 * step))
    batches = Batches(bytes(range(256)) * 8, batch=16, context=7, seed=settings.index)
    store = loopback_store()
    transport = SwarmCheckpointTransport()  # else the Manager starts torchft's own, on every interface
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=lambda state: say("user_load"),
        state_dict=lambda: {"bomb": Bomb(settings.bomb)} if settings.bomb else {},
        checkpoint_transport=None if settings.plain else transport,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=settings.init_sync,
        replica_id=f"r_{settings.index}",
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=settings.lighthouse,
        hostname=HOST,
        timeout=timedelta(seconds=settings.timeout_s),
        quorum_timeout=timedelta(seconds=60),
    )
    diloco = DiLoCo(manager, [model], inner, ExactNesterov(model.parameters()), sync_every=settings.sync_every)
    checkpointer = SpeculativeCheckpointer(
        model,
        inner,
        config=CheckpointConfig(
            checkpoint_dir=settings.state_dir,
            snapshot_interval=3600.0,
            rejoin=settings.rejoin,
            inner=settings.inner,
            auto_fetch_on_start=settings.recover,
            linger_seconds=0,
            **settings.config,
        ),
        node_id=f"r{settings.index}",
        scheduler=scheduler,
        dataloader=batches,
    )
    if settings.plain:
        adapter = TorchftAdapter(manager, diloco, model)
    else:
        adapter = attach(manager, diloco, checkpointer)
        checkpointer.start()

    def state() -> dict[str, str]:
        return digests(model, inner, adapter.outer_tree())

    report = checkpointer.last_report
    if report is not None and report.restored:
        say(
            "recovered",
            action=report.action,
            started_at=report.started_at,
            outer=report.outer_step,
            inner=report.inner_step,
            digests=state(),
        )
    frozen = settings.freeze
    if frozen:
        inner.param_groups[0]["lr"] = 0.0
    say("ready", outer=manager.current_step(), inner=diloco._local_step, lr=inner.param_groups[0]["lr"])
    while settings.start_file and not Path(settings.start_file).exists():
        time.sleep(0.01)
    stream = iter(batches)
    with diloco:
        while manager.current_step() < settings.rounds:
            while settings.hold_file and Path(settings.hold_file).exists():
                time.sleep(0.01)
            outer, position = manager.current_step(), diloco._local_step
            x = next(stream)[:, :8] / 255
            loss = nn.functional.mse_loss(model(x), x[:, :4])
            inner.zero_grad()
            loss.backward()
            lr = inner.param_groups[0]["lr"]
            outer_before = state()["outer"]
            try:
                inner.step()
            except RecoveryError as error:
                say("left", reason=str(error), changed=state()["outer"] != outer_before)
                raise
            if not frozen:
                scheduler.step()
            say("step", outer=outer, inner=position + 1, loss=loss.item().hex(), lr=lr)
            if position + 1 == settings.sync_every:
                frozen = False
                say(
                    "sync",
                    outer=manager.current_step(),
                    committed=manager.current_step() > outer,
                    participants=manager.num_participants(),
                    heals=[transport.sent, transport.received],
                    digests=state(),
                )
            checkpointer.step()
            if settings.snapshot_every and diloco._local_step and diloco._local_step % settings.snapshot_every == 0:
                checkpointer.snapshot().result(20)
                say("snapshot", outer=manager.current_step(), inner=diloco._local_step, digests=state())
            time.sleep(settings.step_s)
    checkpointer.stop(wait=True)
    manager.shutdown(wait=False)


def run(argument: str) -> None:
    """Ends the process: 0 at the end of the last round, 3 when the replica left its swarm."""
    code = 1
    try:
        main(Settings(**json.loads(argument)))
        say("end")
        code = 0
    except RecoveryError:
        code = 3
    except Exception:
        logging.getLogger(__name__).exception("the replica failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torchft's threads do not end by themselves


if __name__ == "__main__":
    run(sys.argv[1])
