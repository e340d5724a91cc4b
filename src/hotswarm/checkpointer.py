"""`SpeculativeCheckpointer`: hot snapshots of a trainer, and the way back.

    checkpointer = SpeculativeCheckpointer(model, optimizer, diloco_trainer, scheduler=scheduler, dataloader=loader)
    checkpointer.start()                  # recovers first
    for batch in loader:
        ...
        checkpointer.step()               # everything of this step has happened

What happens where. The training thread only copies, and only at step boundaries: when a snapshot is due, it costs one
memory copy into the arena; otherwise a look at the clock. One background thread, the keeper, follows each snapshot to
the disk, counts, announces, and reconnects to a daemon that came back. Before `start()` there is no thread, no process
and no hook; `force_snapshot` and loading then work on the local store, on the caller's thread.

Errors. The methods that existing code calls return None or False and leave the reason in `last_error`; `recover`,
`recover_from` and handles raise. Nothing that fails here ends training.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from hotswarm.backend import Backend
from hotswarm.cadence import Cadence
from hotswarm.capture.diloco import Counters, EngineAdapter, SeedAdapter
from hotswarm.capturing import Capturer
from hotswarm.checkpoint_types import CheckpointConfig, CheckpointMetadata, CheckpointType
from hotswarm.errors import (
    ConfigError,
    ControlError,
    HalfRestored,
    HotswarmError,
    Incompatible,
    LocalFailure,
    NoSnapshot,
)
from hotswarm.handle import SnapshotHandle
from hotswarm.keeper import Keeper
from hotswarm.label import kept_label
from hotswarm.link import for_checkpointer
from hotswarm.loading import Loader, VerifyReport
from hotswarm.metadata import MetadataMaker
from hotswarm.p2p import P2PManager
from hotswarm.reach import Reach
from hotswarm.recovery import Prepared, Recoverer, RecoveryReport
from hotswarm.taking import FORCE_WAIT_S, Taker, as_hotswarm
from hotswarm.termination import Termination

log = logging.getLogger(__name__)

DURABLE_ON_STOP_BYTES = 64 << 20  # up to this, stop() waits for the disk: it takes well under a second
STOP_BUDGET_S = 0.9
WAIT_AT_STOP_S = 60.0  # for a free slot, with wait=True

Progress = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class SpeculativeCheckpointer:
    """Takes hot snapshots of a trainer, has them served, and brings the trainer back. See the module's docstring.

    `diloco_trainer` is recognised by shape (contract: `initial_weights`, `outer_optimizer`, `stats`, `phase`); its own
    inner optimizer and counters are what is captured then. `scheduler`, `scaler`, `dataloader` and `extra` are more
    state. `node` says which daemon; see `hotswarm.link`.

    Raises ConfigError for arguments that cannot work.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        diloco_trainer: Any = None,
        config: CheckpointConfig | None = None,
        node_id: str = "",
        p2p_manager: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
        node: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        config = config if config is not None else CheckpointConfig()
        if checkpoint_dir is not None:
            config = dataclasses.replace(config, checkpoint_dir=checkpoint_dir)
        self.model = model
        self.optimizer = optimizer
        self.diloco = diloco_trainer
        self.config = config
        self.p2p = p2p_manager
        self.checkpoint_dir = Path(config.checkpoint_dir)
        try:
            self.checkpoint_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_dir {self.checkpoint_dir} cannot be made: {error.strerror}; choose another",
                "checkpoint_dir",
            ) from error
        self.node_id = node_id or kept_label(self.checkpoint_dir)

        self.running = False
        self.recoveries_performed = 0
        self.last_report: RecoveryReport | None = None
        self.on_progress: Progress | None = None
        """Called with every progress dict of a recovery; may raise RecoveryError to give it up."""
        self._served_here = 0
        self._served_by_daemon = 0
        self._reach = Reach(for_checkpointer(node, config, self.node_id), config, self.node_id)
        self._p2p = P2PManager(p2p_manager, self.node_id)
        self._capturer = Capturer(
            model,
            list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer],
            engine=SeedAdapter(diloco_trainer, model) if diloco_trainer is not None else None,
            scheduler=scheduler if scheduler is not None else getattr(diloco_trainer, "scheduler", None),
            scaler=scaler,
            dataloader=dataloader,
            extra=extra,
            label=self.node_id,
        )
        self._recoverer = Recoverer(self._capturer, config, lambda: self.on_progress)
        self._loader = Loader(self._recoverer)
        self._cadence = Cadence(config.snapshot_interval, config.cold_checkpoint_interval, config.max_overhead)
        metadata = MetadataMaker(model, self.node_id, self._reach.manifest)
        self._taker = Taker(self._capturer, self._reach, self._cadence, metadata)
        self._keeper = Keeper(self._background)
        self._termination = Termination(self._taker.soon, self._taker.hand_over)
        self._taker.wake = self._keeper.wake
        self._taker.on_durable = self._durable
        self._taker.ending = lambda: self._termination.ending
        self._taker.last_words = self._last_words
        self._to_announce: deque[CheckpointMetadata] = deque()
        self._followed: list[EngineAdapter] = []

    def set_engine(self, engine: EngineAdapter) -> None:
        """Capture and restore through `engine` (what `hotswarm.torchft.attach` calls). Before `start()`."""
        if self.running:
            raise ConfigError("set_engine must come before start()", "engine")
        self._capturer.set_engine(engine)

    # ------------------------------------------------------------ counters

    @property
    def training_step(self) -> int:
        """Inner steps over all rounds."""
        return self._capturer.counters().training_step

    @property
    def outer_step(self) -> int:
        """Finished rounds."""
        return self._capturer.counters().outer_step

    @property
    def inner_step(self) -> int:
        """Position in this round."""
        return self._capturer.counters().inner_step

    def update_training_state(self, training_step: int, outer_step: int = 0, inner_step: int = 0) -> None:
        """Say where training stands. Not needed with a DiLoCo trainer, whose own numbers count. Returns at once."""
        self._capturer.caller_counters(Counters(int(outer_step), int(inner_step), int(training_step)))

    # ------------------------------------------------------------ lifecycle

    def start(self) -> None:
        """Recover (with `auto_fetch_on_start`), then begin to take snapshots. Does nothing when it runs already.

        Where no daemon can be had the local store serves alone, and `last_error` says so. What fails here ends no
        training, but for HalfRestored: then the model is not fit to be trained on.
        """
        if self.running:
            return
        wanted = self.config.announce_to_dht or self.config.serve_to_peers
        backend = self._reach.start(daemon=wanted, more_peers=self._p2p.addresses() if wanted else ())
        self._taker.outcome("daemon", LocalFailure(self._reach.complaint) if self._reach.complaint else None)
        if self.config.auto_fetch_on_start:
            self._recover_quietly(backend)
        engine = self._capturer.engine
        if engine is not None and all(engine is not followed for followed in self._followed):
            engine.on_outer_step(self._outer_step_ended)
            self._followed.append(engine)
        self._taker.protected_since = time.monotonic()
        self._capturer.attach()
        self._cadence.start(time.monotonic())
        if self.config.handle_sigterm:
            self._termination.install()
        self.running = self._taker.active = True
        atexit.register(self._at_exit)
        self._reach.background(self._keeper.wake)
        self._keeper.start()
        log.info("snapshots every %g s through %s", self._cadence.interval_s, type(backend).__name__)

    def stop(self, wait: bool = False) -> None:
        """Take a last snapshot, hand it over and let go; within a second.

        Durable on return for states up to 64 MiB, and always without a daemon; `wait` waits for larger ones as well.
        """
        if not self.running:
            return
        self.running = self._taker.active = False
        deadline = time.monotonic() + STOP_BUDGET_S
        self._cadence.stop()
        handle = self._last_snapshot(WAIT_AT_STOP_S if wait else STOP_BUDGET_S / 2)
        self._capturer.detach()
        self._capturer.cancel_posted()
        self._termination.remove()
        atexit.unregister(self._at_exit)
        forever = wait or self._reach.is_local
        if forever or self._capturer.state_bytes <= DURABLE_ON_STOP_BYTES:
            with contextlib.suppress(HotswarmError):  # noted by then, or still under way at the daemon
                handle.result(FORCE_WAIT_S if forever else max(0.1, deadline - time.monotonic()))
        self._reach.background(None)
        self._keeper.stop(max(0.1, deadline - time.monotonic()))
        self._let_go()
        log.info("snapshots stopped")

    def _last_snapshot(self, wait_s: float) -> SnapshotHandle:
        handle = self._taker.handle(CheckpointType.HOT)
        try:
            self._reach.fall_back()  # where the daemon is gone, the local store takes it
            self._capturer.at_boundary(lambda: self._taker.copy_into(handle, wait_s=wait_s), timeout_s=wait_s)
        except HotswarmError as error:
            handle.failed(error)
            self._taker.failed(error)
        return handle

    def _at_exit(self) -> None:
        """The program ends without stop(): what was copied is handed over, nothing more is copied."""
        self.running = self._taker.active = False
        self._cadence.stop()
        self._keeper.stop(STOP_BUDGET_S)
        self._let_go()

    def _let_go(self) -> None:
        self._taker.forget()
        self._capturer.release()
        self._reach.stop()

    def _last_words(self) -> None:
        """At a boundary after SIGTERM: a last exact snapshot, then the end."""
        self._termination.take_over()
        self.stop()  # durable without a daemon; a daemon has it, and outlives this process
        self._termination.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ------------------------------------------------------------ taking snapshots

    def step(self) -> None:
        """Everything of this step has happened: scheduler, scaler, EMA. Takes the snapshot if one is due."""
        self._capturer.explicit_step()

    def snapshot(self, kind: CheckpointType = CheckpointType.HOT, wait: bool = False) -> SnapshotHandle:
        """Copy now and return; the handle's `result()` waits for the disk. `wait`: return when it is durable.

        On the trainer's thread inside an outer step the copy is made at the next boundary. What fails is in the handle.
        """
        return self._taker.snapshot(CheckpointType(kind), wait=wait)

    def force_snapshot(self) -> CheckpointMetadata | None:
        """A snapshot, durable when this returns; None with the reason in `last_error`."""
        return self._taker.force()

    def _outer_step_ended(self) -> None:
        if self.config.snapshot_on_outer_step:
            self._taker.outer_step_ended()

    def _durable(self, metadata: CheckpointMetadata) -> None:
        if self.running and self.p2p is not None and self.config.announce_to_dht:
            self._to_announce.append(metadata)
            self._keeper.wake()

    def _background(self) -> None:
        """A round of the keeper."""
        try:
            self._reach.tend()
        except HotswarmError as error:
            self._taker.failed(error)
        self._taker.settle()
        newest = None
        while self._to_announce:
            newest = self._to_announce.popleft()
        if newest is not None:
            self._p2p.announce_soon(newest, self._reach.node_id, self._reach.addresses())

    # ------------------------------------------------------------ what is there

    @property
    def hot_snapshots(self) -> list[CheckpointMetadata]:
        """The rolling window, oldest first, those of earlier processes included. What the store keeps besides, for
        neighbours that are one round behind, is not part of it.
        """
        return self._listed(CheckpointType.HOT)[-self.config.max_hot_snapshots :]

    @property
    def cold_checkpoints(self) -> list[CheckpointMetadata]:
        """The cold ones, oldest first."""
        return self._listed(CheckpointType.COLD)

    def _listed(self, kind: CheckpointType) -> list[CheckpointMetadata]:
        make = self._taker.metadata.make
        return [make(info) for info in self._reach.snapshots() if info.kind == kind.value]

    @property
    def snapshots_saved(self) -> int:
        """Snapshots that became durable since this object was made."""
        return self._taker.saved

    @property
    def last_error(self) -> str | None:
        """Why the last thing that failed did. None when nothing has, or the same thing has succeeded since."""
        return self._taker.last_error

    @property
    def snapshots_served(self) -> int:
        """Times that a snapshot left this node: through its daemon, or through `get_latest_snapshot_for_serving`."""
        served = self._reach.served()
        self._served_by_daemon = max(self._served_by_daemon, served)
        return self._served_here + self._served_by_daemon

    @property
    def swarm_node_id(self) -> str:
        """This node's id in the swarm, 40 hex digits; empty while it is in none."""
        return self._reach.node_id

    def get_stats(self) -> dict[str, Any]:
        """Counters and times, plain JSON values; seconds and counts."""
        try:
            infos = self._reach.snapshots()
        except HotswarmError as error:
            infos = []
            self._taker.outcome("loading", error)
        hot = [info for info in infos if info.kind == CheckpointType.HOT.value]
        return {
            "running": self.running,
            "snapshots_saved": self.snapshots_saved,
            "snapshots_served": self.snapshots_served,
            "recoveries_performed": self.recoveries_performed,
            "hot_snapshot_count": len(hot),
            "cold_checkpoint_count": sum(info.kind == CheckpointType.COLD.value for info in infos),
            "latest_snapshot_age": time.time() - hot[-1].time_ms / 1000.0 if hot else None,
            "training_step": self.training_step,
            "failures": self._taker.failures,
            "last_error": self.last_error,
            "stall_seconds_last": self._taker.stall_s_last,
            "stall_seconds_total": self._taker.stall_s_total,
            "skipped": self._taker.skipped,
            "work_at_risk_seconds": time.monotonic() - self._taker.protected_since,
            "interval_seconds": self._cadence.interval_s,
        }

    # ------------------------------------------------------------ loading

    def load_latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest snapshot that verifies, as a dict; older ones are tried. None when there is none."""
        return self._loaded(lambda: self._loader.newest(self._reach.for_reading()))

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """A snapshot by its manifest's path or its id, or an old `.pt` / `.pt.gz`; None with `last_error` set."""
        return self._loaded(lambda: self._loader.at(Path(path), self._reach))

    def _loaded(self, load: Callable[[], T]) -> T | None:
        try:
            found = load()
        except HotswarmError as error:
            self._taker.outcome("loading", error)
            return None
        self._taker.outcome("loading")
        return found

    def restore_from_checkpoint(self, checkpoint: dict[str, Any]) -> bool:
        """Restore from a dict, all or nothing; False with the reason in `last_error`."""
        try:
            backend = self._reach.for_reading() if self.running else None
            self._capturer.at_boundary(lambda: self._loader.apply(checkpoint, backend))
        except HalfRestored:
            raise
        except Exception as error:  # noqa: BLE001 - a dict can hold anything
            self._taker.outcome("loading", as_hotswarm(error))
            return False
        self._taker.outcome("loading")
        self.recoveries_performed += 1
        return True

    def get_latest_snapshot_for_serving(self) -> bytes | None:
        """The newest hot snapshot as a file of the older class (gzipped torch.save), for callers that serve it."""
        if not self.config.serve_to_peers:
            return None
        data = self._loaded(lambda: self._loader.packed(self._reach.for_reading(), self.config.compression_level))
        self._served_here += data is not None
        return data

    # ------------------------------------------------------------ recovery

    async def fetch_neighbor_snapshot(self, peer_id: str) -> dict[str, Any] | None:
        """The newest state of one peer (node id, `host:port`, or the label that it announced through the p2p manager),
        verified and kept as RECOVERY; None with the reason in `last_error`.
        """
        try:
            fetch = self._loader.fetch
            found = await asyncio.to_thread(lambda: fetch(self._reach.for_reading(), self._p2p, peer_id))
        except HotswarmError as error:
            self._taker.outcome("recovery", error)
            return None
        self._taker.outcome("recovery")
        return found

    async def try_auto_recovery(self) -> bool:
        """Recover in mode `config.rejoin`; whether a state was restored. The reason of a False is in `last_error`."""
        try:
            prepared = await asyncio.to_thread(self._recoverer.prepare, self._reach.for_reading(), None)
            report = self._finish(prepared)  # on this thread: restoring must not race with training
        except HotswarmError as error:
            self._taker.outcome("recovery", error)
            return False
        if not report.restored:
            self._taker.outcome("recovery", NoSnapshot(f"nothing was restored: {report.reason}"))
        return report.restored

    def recover(self, mode: str | None = None, *, dry_run: bool = False) -> RecoveryReport:
        """Find the freshest state, fetch, verify and restore it; blocks. `mode`: auto, resume, outer, clone; None is
        `config.rejoin`. With `dry_run` the report only says what would be done.

        Raises RecoveryError subclasses, and nothing is changed then.
        """
        return self._recover(mode=mode, dry_run=dry_run)

    def recover_from(
        self, peer: str | None = None, *, mode: str | None = None, timeout_s: float | None = None
    ) -> RecoveryReport:
        """`recover` from one peer only (node id or `host:port`; None: from the swarm), with another timeout."""
        return self._recover(mode=mode, peer=peer, timeout_s=timeout_s)

    def _recover(self, **wishes: Any) -> RecoveryReport:
        return self._finish(self._recoverer.prepare(self._reach.for_reading(), **wishes))

    def _finish(self, prepared: Prepared) -> RecoveryReport:
        report = self._capturer.at_boundary(prepared.finish)
        self.last_report = report
        self._taker.outcome("recovery", Incompatible(report.warning) if report.warning else None)
        if report.restored:
            self.recoveries_performed += 1
            self._taker.protected_since = time.monotonic()
        return report

    def _recover_quietly(self, backend: Backend) -> None:
        """What start() does: a fresh start is no failure, and a live state that is newer stays."""
        try:
            if other := self._reach.other_trainer():
                raise ControlError(other)
            report = self._finish(self._recoverer.prepare(backend, None, keep_newer=True))
            log.info("recovery: %s", report.summary())
        except HalfRestored:
            raise  # the one failure that must not be trained on
        except HotswarmError as error:
            self._taker.outcome("recovery", error)
            log.error("nothing was recovered: %s", error)  # noqa: TRY400 - the message says it all
        except Exception as error:  # noqa: BLE001 - training goes on
            self._taker.outcome("recovery", as_hotswarm(error))

    def verify(self) -> VerifyReport:
        """Compare the live state with the newest snapshot, digest by digest. NoSnapshot when there is none."""
        return self._capturer.at_boundary(lambda: self._loader.verify(self._reach.for_reading()))


def create_checkpointer(
    model: Any,
    optimizer: Any,
    checkpoint_dir: str | os.PathLike[str] = "./checkpoints",
    snapshot_interval: float | Literal["auto"] = 120.0,
    node_id: str = "",
    *,
    diloco_trainer: Any = None,
    p2p_manager: Any = None,
    node: Any = None,
    **config_kwargs: Any,
) -> SpeculativeCheckpointer:
    """A SpeculativeCheckpointer; `config_kwargs` are further fields of CheckpointConfig. ConfigError."""
    known = {field.name for field in dataclasses.fields(CheckpointConfig)}
    unknown = sorted(set(config_kwargs) - known)
    if unknown:
        from hotswarm.config import nearest

        raise ConfigError(f"unknown setting {unknown[0]!r}{nearest(unknown[0], known)}", unknown[0])
    config = CheckpointConfig(checkpoint_dir=checkpoint_dir, snapshot_interval=snapshot_interval, **config_kwargs)
    return SpeculativeCheckpointer(model, optimizer, diloco_trainer, config, node_id, p2p_manager, node=node)
