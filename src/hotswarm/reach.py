"""Which backend serves a checkpointer right now, and answers about snapshots wherever they are.

Before `start`, and after `stop`: a daemon that runs on the state directory is used, because it owns the files; else
the local store, whose lock is taken with the first write only. `start` brings a daemon up where one is wanted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hotswarm.backend import Backend, LocalBackend
from hotswarm.backend_daemon import DaemonBackend
from hotswarm.capturing import Capturer
from hotswarm.checkpoint_types import CheckpointConfig
from hotswarm.errors import ConfigError, ControlError, HotswarmError, LockedError, StoreError
from hotswarm.ids import is_snapshot_id
from hotswarm.link import Link
from hotswarm.snapshot.manifest import Manifest
from hotswarm.store.base import SnapshotInfo, SnapshotSource
from hotswarm.store.files import FileStore
from hotswarm.store.placement import id_of_file
from hotswarm.store.retention import Retention
from hotswarm.store.source import open_manifest_file
from hotswarm.swarm.control import ControlClient

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTACH_AGAIN_S = 2.0
OTHER_TRAINER_S = 2.0  # for the daemon to notice that a trainer was killed; milliseconds, on a quiet machine


class Reach:
    """The way to the snapshots of one checkpointer."""

    def __init__(self, link: Link, config: CheckpointConfig, label: str) -> None:
        self._link = link
        self._config = config
        self._label = label
        self._backend: Backend | None = None
        self._guard = threading.RLock()
        self._attach_at = 0.0
        self._wake: Callable[[], None] | None = None
        self.complaint = ""
        """Why no daemon serves although one is wanted; empty when all is well."""

    # ------------------------------------------------------------ backends

    def start(self, *, daemon: bool, more_peers: Sequence[str] = ()) -> Backend:
        """The backend to train with. A daemon that cannot be had is a `complaint`, and the local store serves."""
        with self._guard:
            self.complaint = ""
            self._attach_at = 0.0
            if isinstance(self._backend, LocalBackend):
                self._close()  # the daemon needs the lock
            if isinstance(self._backend, DaemonBackend):
                return self._backend
            try:
                client = self._link.find_or_spawn(more_peers=more_peers) if daemon else self._link.find()
                if client is not None:
                    self._backend = self._daemon(client)
                    return self._backend
            except ConfigError:
                raise
            except (HotswarmError, OSError) as error:
                self.complaint = f"no daemon serves this trainer: {error}; its snapshots stay on this machine"
            self._backend = self._local()
            return self._backend

    def for_writing(self) -> Backend:
        """The backend that takes a snapshot now."""
        with self._guard:
            backend = self.for_reading()
            if isinstance(backend, LocalBackend) and not backend.writing:
                try:
                    backend.open_for_writing()
                except LockedError:
                    client = self._link.find()
                    if client is None:
                        raise
                    self._close()
                    self._backend = backend = self._daemon(client)
            return backend

    def for_reading(self) -> Backend:
        """The backend that knows the snapshots now."""
        with self._guard:
            backend = self._backend
            if backend is None:
                self._backend = self._running_daemon() or self._local()
            elif isinstance(backend, DaemonBackend):
                started = self._wake is not None
                if not started and not backend.attached and self._link.find() is None:
                    self._close()  # it was there before start(), and is gone
                    self._backend = self._local()
            elif isinstance(backend, LocalBackend) and not backend.writing:
                self._backend = self._running_daemon() or backend
            assert self._backend is not None
            return self._backend

    def _running_daemon(self) -> DaemonBackend | None:
        client = self._link.find()
        try:
            return None if client is None else self._daemon(client)
        except ControlError as error:  # it ended in between
            log.debug("the daemon that was found is gone: %s", error)
            return None

    def fall_back(self) -> bool:
        """No daemon answers any more: the local store takes over. False when there is one, or the store is not free."""
        with self._guard:
            backend = self._backend
            if not isinstance(backend, DaemonBackend) or backend.attached or self._link.find() is not None:
                return False
            self._close()
            self._backend = local = self._local()
            try:
                local.open_for_writing()
            except HotswarmError as error:
                log.warning("the local store cannot take over: %s", error)
                return False
            return True

    def _daemon(self, client: ControlClient) -> DaemonBackend:
        config = self._config
        backend = DaemonBackend(
            client,
            self._link.again,
            label=self._label,
            retention={
                "max_hot": config.max_hot_snapshots,
                "max_cold": config.max_cold_checkpoints,
                "max_bytes": config.max_bytes,
            },
            linger_seconds=float(config.linger_seconds),
        )
        backend.background = self._wake
        return backend

    def _local(self) -> LocalBackend:
        config, link = self._config, self._link
        retention = Retention(
            max_hot=config.max_hot_snapshots, max_cold=config.max_cold_checkpoints, max_bytes=config.max_bytes
        )
        store = FileStore(link.state_dir, link.config.run, retention=retention)
        return LocalBackend(store, link.config.run, link.signer)

    def _close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def stop(self) -> None:
        """Let go of the backend; the next question finds one again."""
        with self._guard:
            self._close()

    def idle(self) -> None:
        """After a call outside of start and stop: nobody else is to be kept from the state directory."""
        backend = self._backend
        if isinstance(backend, LocalBackend):
            backend.unlock()

    def tend(self) -> None:
        """See Backend."""
        backend = self._backend
        if backend is not None:
            backend.tend()

    def first_boundary(self, capturer: Capturer) -> None:
        """Have the daemon attached to at the first step boundary, when the optimizer has its state, so that the swarm
        can ask where this trainer stands. While that fails it is tried again every ATTACH_AGAIN_S.
        """
        backend, now = self._backend, time.monotonic()
        if isinstance(backend, DaemonBackend) and not backend.has_session and now >= self._attach_at:
            self._attach_at = now + ATTACH_AGAIN_S
            capturer.want_arena(backend)

    def background(self, wake: Callable[[], None] | None) -> None:
        """There is a thread that calls `tend()` from now on, and this wakes it; None: there is none any more."""
        self._wake = wake
        backend = self._backend
        if isinstance(backend, DaemonBackend):
            backend.background = wake

    def write_live(self, capturer: Capturer) -> None:
        """Tell the daemon, where there is one, where training stands."""
        backend = self._backend
        if backend is not None:
            capturer.write_live(backend)

    # ------------------------------------------------------------ facts

    @property
    def is_local(self) -> bool:
        """Whether snapshots are written by this process."""
        return isinstance(self._backend, LocalBackend)

    @property
    def node_id(self) -> str:
        """The swarm's id of the daemon that serves; empty without one."""
        backend = self._backend
        return backend.node_id if isinstance(backend, DaemonBackend) else ""

    def other_trainer(self) -> str:
        """Why the state at the daemon is not this trainer's to take: it serves another one that lives. Empty else.

        One that was killed a moment ago may still be listed, so its going is waited for.
        """
        backend = self._backend
        if not isinstance(backend, DaemonBackend) or backend.has_session:
            return ""
        deadline = time.monotonic() + OTHER_TRAINER_S
        while True:
            try:
                other = backend.status().get("trainer")
            except HotswarmError:
                return ""
            if not other:
                return ""
            if time.monotonic() > deadline:
                return (
                    f"busy: the daemon serves the trainer with process id {other.get('pid')}; nothing is recovered, "
                    "and this one trains unprotected. Give each trainer a state directory of its own"
                )
            time.sleep(0.05)

    def addresses(self) -> list[str]:
        """Where others reach the daemon."""
        backend = self._backend
        if not isinstance(backend, DaemonBackend):
            return []
        try:
            status = backend.status()
        except HotswarmError:
            return []
        return [str(status[key]) for key in ("advertise", "listen") if status.get(key)][:1]

    def served(self) -> int:
        """Streams that the daemon has served since it started."""
        backend = self._backend
        if not isinstance(backend, DaemonBackend):
            return 0
        try:
            counters = backend.status().get("swarm", {}).get("counters", {})
        except HotswarmError:
            return 0
        return int(counters.get("streams_served", 0))

    # ------------------------------------------------------------ snapshots

    def _ask(self, question: Callable[[Backend], T]) -> T:
        """An answer from the backend; once more from the next one when a daemon went away in between."""
        backend = self.for_reading()
        try:
            return question(backend)
        except ControlError:
            with self._guard:
                if self._backend is not backend or self._link.find() is not None:
                    raise
                if backend is self._backend and getattr(backend, "attached", False):
                    raise
                local = self._local()
            return question(local)

    def snapshots(self) -> list[SnapshotInfo]:
        """What is there, oldest first."""
        return self._ask(lambda backend: backend.snapshots())

    def open(self, snapshot_id: str) -> SnapshotSource:
        """A snapshot by its id."""
        return self._ask(lambda backend: backend.open(snapshot_id))

    def manifest(self, snapshot_id: str) -> Manifest:
        """What a snapshot holds."""
        with contextlib.closing(self.open(snapshot_id)) as source:
            return source.manifest

    def open_path(self, path: Path) -> SnapshotSource:
        """A snapshot by its manifest's path, or by what a path ends in: an id, or a file that a daemon owns."""
        if path.is_file():
            return open_manifest_file(path)
        name = path.name
        found = name.rpartition("_")[2] if is_snapshot_id(name.rpartition("_")[2]) else id_of_file(name)
        if found is None and not path.exists():
            raise StoreError(f"{path} is missing: there is no such file; check the path")
        if found is None:
            raise StoreError(f"{path} is no snapshot: neither a manifest, nor a .pt file, nor a snapshot id")
        return self.open(found)

    def kind_of(self, snapshot_id: str) -> str | None:
        """The local kind ("recovery" for what was fetched); None when this store does not list it."""
        try:
            infos = self.snapshots()
        except HotswarmError:
            return None
        return next((info.kind for info in infos if info.snapshot_id == snapshot_id), None)
